//! A scenario as flat keys, and how two differ.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardlab_plan::Scenario;
use std::collections::{BTreeMap, BTreeSet};

/// The scenario of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScenarioView {
    /// Name.
    pub name: String,
    /// What it shows.
    pub about: String,
    /// The file's text as it was read; empty where only the resolved scenario is known.
    #[serde(default)]
    pub text: String,
    /// `section.key=VALUE` from the command line, in order.
    #[serde(default)]
    pub overrides: Vec<String>,
    /// Every option of the resolved scenario: `section.key` to its value. Options without a value are left out.
    pub settings: BTreeMap<String, String>,
    /// Digest of the settings: 16 hexadecimal digits, equal exactly for equal settings.
    pub digest: String,
}

impl ScenarioView {
    /// The view of a resolved scenario; its text and overrides are the caller's to add.
    #[must_use]
    pub fn new(scenario: &Scenario) -> Self {
        let mut settings = BTreeMap::new();
        // A scenario is plain data: it always becomes an object.
        if let Ok(Value::Object(sections)) = serde_json::to_value(scenario) {
            for (name, section) in sections {
                if !matches!(name.as_str(), "name" | "about") {
                    flatten(&name, section, &mut settings);
                }
            }
        }
        let mut hash = blake3::Hasher::new();
        for (key, value) in &settings {
            // Keys and values hold no zero bytes: lines cannot run into one another.
            hash.update(key.as_bytes()).update(&[0]);
            hash.update(value.as_bytes()).update(&[0]);
        }
        Self {
            name: scenario.name.clone(),
            about: scenario.about.clone(),
            text: String::new(),
            overrides: Vec::new(),
            settings,
            digest: hash.finalize().to_hex()[..16].to_owned(),
        }
    }
}

fn flatten(path: &str, value: Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (key, value) in fields {
                flatten(&format!("{path}.{key}"), value, into);
            }
        }
        Value::String(text) => {
            into.insert(path.to_owned(), text);
        }
        other => {
            into.insert(path.to_owned(), other.to_string());
        }
    }
}

/// An option that is not the same in all of several scenarios.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `section.key`.
    pub key: String,
    /// Its value in each, where it has one.
    pub values: Vec<Option<String>>,
}

/// Options that are not the same in all of these scenarios, by key.
#[must_use]
pub fn differences(all: &[&ScenarioView]) -> Vec<Difference> {
    let keys: BTreeSet<&String> = all.iter().flat_map(|s| s.settings.keys()).collect();
    keys.into_iter()
        .map(|key| Difference {
            key: key.clone(),
            values: all.iter().map(|s| s.settings.get(key).cloned()).collect(),
        })
        .filter(|d| d.values.windows(2).any(|w| w[0] != w[1]))
        .collect()
}
