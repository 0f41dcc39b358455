//! A scenario as flat keys, and how two differ.

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
    /// What it shows.
    pub about: String,
    /// What the command line called it, a path or a name; empty where that is not known.
    #[serde(default)]
    pub source: String,
    /// The file's text as it was read; empty where only the resolved scenario is known.
    #[serde(default)]
    pub text: String,
    /// `section.key=VALUE` from the command line, in order.
    #[serde(default)]
    pub overrides: Vec<String>,
    /// Every option of the resolved scenario: `section.key` to its value. Options without a value
    /// are left out. The options of a what-if follow, see [`what_if`].
    pub settings: BTreeMap<String, String>,
    /// Digest of the scenario's options: 16 hexadecimal digits, equal exactly for equal options.
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
                // How a run is judged is not part of it.
                if !matches!(name.as_str(), "name" | "about" | "gate") {
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
            source: String::new(),
            text: String::new(),
            overrides: Vec::new(),
            settings,
            digest: hash.finalize().to_hex()[..16].to_owned(),
        }
    }

    /// What batches of its model are counted in; none where the options are not known.
    #[must_use]
    pub fn counted_in(&self) -> Option<BatchUnit> {
        let family = self.settings.get("model.family")?;
        Family::named(family).map(Family::counted_in)
    }

    /// Counts the options of training, sharding, precision and compilation that differ from their
    /// defaults, as its policy has them. It orders scenarios of one model by closeness to the
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

/// The options of a what-if prediction (`sim --scale`, `--straggler`, `--jitter`, `--seed`), each
/// with its value, as the environment of its run tells them.
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

/// Options that are words or numbers or lists, as a scenario file writes them.
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

/// Globs joined by `+`, with `=keep` where the unit is not resharded.
fn pattern(value: &Value) -> Option<String> {
    let modules = value.get("modules")?.as_array()?;
    let globs: Vec<&str> = modules.iter().filter_map(Value::as_str).collect();
    let keep = value.get("keep")?.as_bool()?;
    Some(globs.join("+") + if keep { "=keep" } else { "" })
}

/// An option that is not the same in all of several scenarios.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Path in JSON: `section.key`, by the first name that the key had.
    pub key: String,
    /// Its value in each, where it has one.
    pub values: Vec<Option<String>>,
}

impl Difference {
    /// Returns the path of the option as scenario files write it.
    #[must_use]
    pub fn name(&self) -> Cow<'_, str> {
        key_of(&self.key)
    }
}

/// Options that are not the same in all of these scenarios, by key. One without any option is not
/// known in full (that of a gate's baseline): it differs from none.
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
            // Every scenario names its hardware; a gate's baseline leaves it out, as it may be a
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
    fn what_ifs_are_told_as_the_command_line_has_them() {
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
        let told: Vec<String> = what_if(&environment)
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        assert_eq!(
            told,
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
