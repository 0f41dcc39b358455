//! Summary files: the part of a run that is used for lists, filters and queries.

use super::error::StoreError;
use super::files::{GAPS, MEMORY, RUN, SPANS, SUMMARY};
use super::id::Id;
use crate::environment::MACHINE;
use crate::view::{RunView, what_if};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use shardlab_plan::record::RunKind;
use shardlab_plan::scenario::json_path_of;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A run without its tables.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Id.
    #[serde(serialize_with = "as_text")]
    pub id: Id,
    /// Time of saving: `YYYY-MM-DDTHH:MM:SSZ`.
    pub created: String,
    /// `sim` or `exec`.
    pub kind: String,
    /// Scenario.
    pub scenario: String,
    /// Policy.
    pub policy: String,
    /// Hardware profile or device.
    pub hardware: String,
    /// Ranks.
    pub world_size: u64,
    /// Digest of the program.
    pub program_digest: String,
    /// Digest of the options.
    pub scenario_digest: String,
    /// Overrides `section.key=VALUE` from the command line.
    pub overrides: Vec<String>,
    /// Options by `section.key`, including those of a what-if.
    pub settings: BTreeMap<String, String>,
    /// Environment.
    pub environment: BTreeMap<String, String>,
    /// Every number of the summary, keyed by its path in the JSON, for example `step_ms.median` or
    /// `memory.peak_allocated_bytes`. Also contains `loss.first`, `loss.last` and `spans`.
    pub metrics: BTreeMap<String, f64>,
}

fn as_text<S: serde::Serializer>(id: &Id, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(id.as_str())
}

/// Fields that the summary file adds to the JSON contract.
#[derive(Serialize)]
struct Added<'a> {
    id: &'a str,
    created: String,
    scenario_digest: &'a str,
    overrides: &'a [String],
    settings: &'a BTreeMap<String, String>,
    spans: usize,
    interrupted: bool,
}

/// Returns the content of the summary file: the JSON contract of a run, and additional fields for
/// lists.
pub(super) fn summary(id: &Id, view: &RunView) -> impl Serialize {
    let added = Added {
        id: id.as_str(),
        created: id.created(),
        scenario_digest: &view.scenario.digest,
        overrides: &view.scenario.overrides,
        settings: &view.scenario.settings,
        spans: view.run.spans.len(),
        interrupted: view.interrupted,
    };
    let mut all = Map::new();
    let contract = serde_json::to_value(view.run.summary());
    for part in [serde_json::to_value(added), contract] {
        // Both are structs of plain values, so they always become objects.
        if let Ok(Value::Object(fields)) = part {
            all.extend(fields);
        }
    }
    all
}

/// The fields of the summary file that are read.
#[derive(Deserialize)]
struct File {
    kind: String,
    scenario: String,
    policy: String,
    hardware: String,
    world_size: u64,
    program_digest: String,
    scenario_digest: String,
    overrides: Vec<String>,
    settings: BTreeMap<String, String>,
    environment: BTreeMap<String, String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Entry {
    pub(super) fn read(dir: &Path) -> Result<Self, StoreError> {
        for name in [RUN, SPANS, MEMORY, GAPS] {
            let path = dir.join(name);
            fs::metadata(&path).map_err(|e| StoreError::io(&path, e))?;
        }
        let path = dir.join(SUMMARY);
        let text = fs::read(&path).map_err(|e| StoreError::io(&path, e))?;
        let id = dir
            .file_name()
            .and_then(|n| Id::parse(n.to_str()?))
            .ok_or_else(|| StoreError::invalid(dir, "the folder's name is not a run id"))?;
        Self::parse(id, &text).map_err(|e| StoreError::invalid(&path, e))
    }

    /// Parses the text of a summary file.
    pub(super) fn parse(id: Id, text: &[u8]) -> serde_json::Result<Self> {
        let file: File = serde_json::from_slice(text)?;
        let mut metrics = BTreeMap::new();
        let losses = file.rest.get("losses").and_then(Value::as_array);
        for (name, loss) in losses
            .into_iter()
            .flat_map(|l| [("loss.first", l.first()), ("loss.last", l.last())])
        {
            if let Some(x) = loss.and_then(Value::as_f64) {
                metrics.insert(name.to_owned(), x);
            }
        }
        for (key, value) in &file.rest {
            numbers(key, value, &mut metrics);
        }
        metrics.remove("format");
        let mut settings = file.settings;
        settings.extend(what_if(&file.environment));
        Ok(Self {
            created: id.created(),
            id,
            kind: file.kind,
            scenario: file.scenario,
            policy: file.policy,
            hardware: file.hardware,
            world_size: file.world_size,
            program_digest: file.program_digest,
            scenario_digest: file.scenario_digest,
            overrides: file.overrides,
            settings,
            environment: file.environment,
            metrics,
        })
    }

    /// Returns the changes: `section.key=VALUE` from the command line, and the options of a what-if
    /// (`--scale host=2`).
    #[must_use]
    pub fn changes(&self) -> Vec<String> {
        let what_if = what_if(&self.environment);
        let what_if = what_if
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"));
        self.overrides.iter().cloned().chain(what_if).collect()
    }

    /// Returns a key that is equal for equal predictions. It covers everything except when and
    /// where they were made. Measurements have no key, because no two are the same.
    pub(super) fn identity(&self) -> Option<String> {
        if self.kind != RunKind::Sim.name() {
            return None;
        }
        let mut environment = self.environment.clone();
        environment.retain(|key, _| !MACHINE.contains(&key.as_str()));
        let same = (
            (
                &self.scenario,
                &self.policy,
                &self.hardware,
                self.world_size,
            ),
            (&self.program_digest, &self.overrides, &self.settings),
            (&environment, &self.metrics),
        );
        serde_json::to_string(&same).ok()
    }

    /// Returns a metric; NaN if the run does not have it.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics.get(name).copied().unwrap_or(f64::NAN)
    }

    /// Returns the value of a filter key or grouping key: a field, an option (by any name of its
    /// key) or a fact of the environment.
    #[must_use]
    pub fn field(&self, key: &str) -> Option<String> {
        Some(match key {
            "id" => self.id.to_string(),
            "created" => self.created.clone(),
            "kind" => self.kind.clone(),
            "scenario" => self.scenario.clone(),
            "policy" => self.policy.clone(),
            "hardware" => self.hardware.clone(),
            "world_size" => self.world_size.to_string(),
            "digest" | "program_digest" => self.program_digest.clone(),
            "scenario_digest" => self.scenario_digest.clone(),
            _ => {
                let option = || self.settings.get(&json_path_of(key)?);
                let own = self.settings.get(key).or_else(option);
                return own.or_else(|| self.environment.get(key)).cloned();
            }
        })
    }

    /// Returns all values that [`Self::field`] can return, by key.
    #[must_use]
    pub fn fields(&self) -> BTreeMap<String, String> {
        let own = Self::FIELDS.iter().map(|k| (*k).to_owned());
        let keys = own.chain(self.environment.keys().chain(self.settings.keys()).cloned());
        keys.filter_map(|k| Some((k.clone(), self.field(&k)?)))
            .collect()
    }

    /// Fields that every run has.
    pub const FIELDS: [&'static str; 9] = [
        "id",
        "created",
        "kind",
        "scenario",
        "policy",
        "hardware",
        "world_size",
        "program_digest",
        "scenario_digest",
    ];
}

/// Collects the numbers in a value by their paths. Lists are series, not metrics.
fn numbers(path: &str, value: &Value, into: &mut BTreeMap<String, f64>) {
    match value {
        Value::Number(n) => {
            if let Some(x) = n.as_f64() {
                into.insert(path.to_owned(), x);
            }
        }
        Value::Object(fields) => {
            for (key, value) in fields {
                numbers(&format!("{path}.{key}"), value, into);
            }
        }
        _ => {}
    }
}

/// A filter term: `KEY=VALUE` or `KEY!=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// A field, an option or a fact of the environment.
    pub key: String,
    /// Expected value. For digests, a prefix is enough.
    pub value: String,
    /// Whether the values must be equal (`true`) or different.
    pub equal: bool,
}

impl Term {
    /// Parses a term.
    ///
    /// # Errors
    /// Fails if the text has no `=`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (key, value, equal) = match (text.split_once("!="), text.split_once('=')) {
            (Some((k, v)), _) => (k, v, false),
            (None, Some((k, v))) => (k, v, true),
            (None, None) => {
                return Err("KEY=VALUE or KEY!=VALUE is expected, for example kind=sim".into());
            }
        };
        Ok(Self {
            key: key.trim().to_owned(),
            value: value.trim().to_owned(),
            equal,
        })
    }

    /// Returns whether a run satisfies the term. A key that the run lacks does not have any value.
    #[must_use]
    pub fn matches(&self, entry: &Entry) -> bool {
        let digest = self.key.ends_with("digest") && !self.value.is_empty();
        let same = entry
            .field(&self.key)
            .is_some_and(|found| found == self.value || digest && found.starts_with(&self.value));
        same == self.equal
    }
}
