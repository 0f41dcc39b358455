//! A scenario as flat keys, and the differences between scenarios.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardlab_plan::Scenario;
use shardlab_plan::config::Family;
use shardlab_plan::scenario::{BatchUnit, key_of, parse};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The option that names the hardware profile, which may be a path.
pub(crate) const HARDWARE: &str = "mesh.hardware";

/// The scenario of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScenarioView {
    /// Name.
    pub name: String,
    /// Description.
    pub about: String,
    /// Path or name on the command line; empty if unknown.
    #[serde(default)]
    pub source: String,
    /// Text of the file as it was read; empty if only the resolved scenario is known.
    #[serde(default)]
    pub text: String,
    /// `section.key=VALUE` from the command line, in order.
    #[serde(default)]
    pub overrides: Vec<String>,
    /// Every option of the resolved scenario as `section.key` and value. Options without a value
    /// are left out. Options of a what-if follow, see [`what_if`].
    pub settings: BTreeMap<String, String>,
    /// Digest of the scenario's options: 16 hexadecimal digits, equal exactly for equal options.
    pub digest: String,
}

impl ScenarioView {
    /// Returns the view of a resolved scenario. The caller adds its text and overrides.
    #[must_use]
    pub fn new(scenario: &Scenario) -> Self {
        let mut settings = BTreeMap::new();
        // A scenario is plain data, so it always becomes an object.
        if let Ok(Value::Object(sections)) = serde_json::to_value(scenario) {
            for (name, section) in sections {
                // The rules for judging a run are not part of its scenario.
                if !matches!(name.as_str(), "name" | "about" | "gate") {
                    flatten(&name, section, &mut settings);
                }
            }
        }
        let mut hash = blake3::Hasher::new();
        for (key, value) in &settings {
            // Keys and values contain no zero bytes, so the hashed text is unambiguous.
            hash.update(key.as_bytes()).update(&[0]);
            hash.update(value.as_bytes()).update(&[0]);
        }
        Self {
            name: scenario.name.clone(),
            about: scenario.about.clone(),
            source: String::new(),
            text: String::new(),
            overrides: Vec::new(),
            settings,
            digest: hash.finalize().to_hex()[..16].to_owned(),
        }
    }

    /// Returns the batch unit of its model; `None` if the options are not known.
    #[must_use]
    pub fn counted_in(&self) -> Option<BatchUnit> {
        let family = self.settings.get("model.family")?;
        Family::named(family).map(Family::counted_in)
    }

    /// Counts the options for training, sharding, precision and compilation that differ from the
    /// defaults of the policy. The count orders scenarios of one model by how close they are to the
    /// defaults.
    #[must_use]
    pub fn changes(&self) -> usize {
        let policy = self.settings.get("fsdp.policy").map_or("", |p| p);
        let text = |fsdp: &str| {
            format!(
                "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n[fsdp]\n{fsdp}"
            )
        };
        let own = format!("policy = {policy:?}");
        let defaults = parse("defaults", &text(&own), &[])
            .or_else(|_| parse("defaults", &text(""), &[]))
            .map(|s| Self::new(&s).settings)
            .unwrap_or_default();
        let keys: BTreeSet<&String> = self.settings.keys().chain(defaults.keys()).collect();
        keys.into_iter()
            .filter(|key| SCHEDULE.iter().any(|section| key.starts_with(section)))
            .filter(|key| self.settings.get(*key) != defaults.get(*key))
            .count()
    }
}

/// Returns the options of a what-if prediction (`sim --scale`, `--straggler`, `--jitter`,
/// `--seed`) with their values, from the environment of its run.
#[must_use]
pub fn what_if(environment: &BTreeMap<String, String>) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (fact, option) in [("slower", "--scale"), ("stragglers", "--straggler")] {
        let pairs = environment.get(fact).into_iter();
        let pairs =
            pairs.flat_map(|text| text.split_whitespace().filter_map(|p| p.split_once('=')));
        all.extend(pairs.map(|(of, factor)| (format!("{option} {of}"), factor.to_owned())));
    }
    for (fact, option, default) in [("jitter", "--jitter", "0"), ("seed", "--seed", "0")] {
        let value = environment.get(fact).filter(|v| *v != default);
        all.extend(value.map(|v| (option.to_owned(), v.clone())));
    }
    all
}
/// Sections with the options that are tuned for a model on a machine.
const SCHEDULE: [&str; 4] = ["train.", "fsdp.", "precision.", "compile."];

fn flatten(path: &str, value: Value, into: &mut BTreeMap<String, String>) {
    if let Some(text) = choice(path, &value) {
        into.insert(path.to_owned(), text);
        return;
    }
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

/// Formats options that are words, numbers or lists as in a scenario file.
fn choice(path: &str, value: &Value) -> Option<String> {
    let text = match path {
        "fsdp.prefetch_forward" | "fsdp.prefetch_backward" => match value.get("depth") {
            Some(depth) => depth.to_string(),
            None => format!("{{ elements = {} }}", value.get("elements")?),
        },
        "fsdp.reshard_after_forward" => match value.as_str() {
            Some("always") => "true".into(),
            Some("never") => "false".into(),
            Some(_) => return None,
            None => value.get("group")?.to_string(),
        },
        "fsdp.units" => {
            let patterns = value.get("patterns")?.as_array()?.iter().map(pattern);
            Value::from(patterns.collect::<Option<Vec<_>>>()?).to_string()
        }
        "compile.cuda_graph" => value.get("scopes")?.to_string(),
        _ => return None,
    };
    Some(text)
}

/// Formats glob patterns joined by `+`, with `=keep` for units that are not resharded.
fn pattern(value: &Value) -> Option<String> {
    let modules = value.get("modules")?.as_array()?;
    let globs: Vec<&str> = modules.iter().filter_map(Value::as_str).collect();
    let keep = value.get("keep")?.as_bool()?;
    Some(globs.join("+") + if keep { "=keep" } else { "" })
}

/// An option that differs between scenarios.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Path in the JSON: `section.key`, with the first name that the key had.
    pub key: String,
    /// Value in each scenario, if it has one.
    pub values: Vec<Option<String>>,
}

impl Difference {
    /// Returns the path of the option as scenario files write it.
    #[must_use]
    pub fn name(&self) -> Cow<'_, str> {
        key_of(&self.key)
    }
}

/// Returns the options that differ between scenarios, by key. A scenario without options, such as
/// that of a gate's baseline, is not fully known and does not differ from any other.
#[must_use]
pub fn differences(all: &[&ScenarioView]) -> Vec<Difference> {
    let keys: BTreeSet<&String> = all.iter().flat_map(|s| s.settings.keys()).collect();
    keys.into_iter()
        .map(|key| Difference {
            key: key.clone(),
            values: all.iter().map(|s| s.settings.get(key).cloned()).collect(),
        })
        .filter(|d| {
            let known = all.iter().zip(&d.values);
            // Every scenario names its hardware. A gate's baseline omits it, because it may be a
            // path.
            let mut known = known
                .filter(|(s, v)| !s.settings.is_empty() && (v.is_some() || d.key != HARDWARE))
                .map(|(_, v)| v);
            let first = known.next();
            known.any(|v| Some(v) != first)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(options: &str) -> ScenarioView {
        let text = format!(
            "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n{options}"
        );
        ScenarioView::new(&parse("made", &text, &[]).unwrap())
    }

    #[test]
    fn options_are_written_as_a_file_writes_them() {
        let v = view(
            "[fsdp]\nprefetch_forward = 0\nprefetch_backward = { elements = 5000 }\nreshard_after_forward = 2\n\
             units = [\"layers.*\", \"norm+output=keep\"]\n",
        );
        for (key, value) in [
            ("fsdp.prefetch_forward", "0"),
            ("fsdp.prefetch_backward", "{ elements = 5000 }"),
            ("fsdp.reshard_after_forward", "2"),
            ("fsdp.units", r#"["layers.*","norm+output=keep"]"#),
            ("mesh.dp_shard", "4"),
        ] {
            assert_eq!(
                v.settings.get(key).map(String::as_str),
                Some(value),
                "{key}"
            );
        }
    }

    #[test]
    fn what_ifs_are_shown_as_on_the_command_line() {
        let environment = BTreeMap::from(
            [
                ("slower", "arithmetic=3 host=2"),
                ("stragglers", "1=4"),
                ("jitter", "0.02"),
                ("seed", "0"),
                ("host", "here"),
            ]
            .map(|(k, v)| (k.to_owned(), v.to_owned())),
        );
        let formatted: Vec<String> = what_if(&environment)
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        assert_eq!(
            formatted,
            [
                "--scale arithmetic=3",
                "--scale host=2",
                "--straggler 1=4",
                "--jitter=0.02"
            ]
        );
    }

    #[test]
    fn changes_are_counted_from_the_defaults_of_the_policy() {
        assert_eq!(view("").changes(), 0);
        assert_eq!(view("[fsdp]\npolicy = \"fsdp2\"\n").changes(), 0);
        assert_eq!(view("[fsdp]\nprefetch_forward = 1\n").changes(), 0);
        let two = "[fsdp]\nprefetch_forward = 0\n[train]\nrecompute = \"full\"\n";
        assert_eq!(view(two).changes(), 2);
    }

    #[test]
    fn differences_and_digests_agree() {
        let (a, b) = (view(""), view("[fsdp]\nprefetch_forward = 0\n"));
        assert_eq!(differences(&[&a, &a]), []);
        let found = differences(&[&a, &b]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].key, "fsdp.prefetch_forward");
        assert_eq!(
            found[0].values,
            [Some("1".to_owned()), Some("0".to_owned())]
        );
        let unknown = ScenarioView::default();
        assert_eq!(differences(&[&a, &unknown]), []);
        let found = differences(&[&a, &unknown, &b]);
        assert_eq!(found[0].values[1], None);
        assert_eq!(found.len(), 1);
        assert_eq!(a.digest, view("").digest);
        assert_ne!(a.digest, b.digest);
    }
}
