//! Options in a baseline: `section = ["key = value", …]`, or `"section.key" = "value"` in files of
//! format 1.

use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;

/// Separates an option's name from its value.
pub(super) const IS: &str = " = ";

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Value(String),
    Section(Vec<String>),
}

/// Reads options of either form as `section.key` and value.
pub(crate) fn read<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    let mut all = BTreeMap::new();
    for (name, entry) in BTreeMap::<String, Entry>::deserialize(from)? {
        match entry {
            Entry::Value(value) => {
                all.insert(name, value);
            }
            Entry::Section(entries) => {
                for entry in entries {
                    let (key, value) = entry.split_once(IS).ok_or_else(|| {
                        de::Error::custom(format_args!(
                            "options.{name}: `{entry}` is not `key = value`"
                        ))
                    })?;
                    all.insert(format!("{name}.{key}"), value.to_owned());
                }
            }
        }
    }
    Ok(all)
}
