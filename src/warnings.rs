//! Warnings: what a scenario says and may say, but probably does not mean.
//!
//! A rule looks at a scenario and its hardware profile and names the option that it is about; where that option was written
//! is found afterwards, from the scenario's texts.

use serde::{Serialize, Serializer};
use shardlab_plan::Scenario;
use shardlab_plan::scenario::{self, Position};
use shardlab_sim::Profile;
use std::fmt;
use std::path::Path;

/// A warning about one option of a scenario.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// The option: `section.key`.
    pub key: &'static str,
    /// What is odd about it, in one sentence.
    pub message: String,
    /// Where it is written: `file:line:column`. `None` for a default.
    #[serde(serialize_with = "as_text")]
    pub place: Option<(String, Position)>,
}

fn as_text<S: Serializer>(place: &Option<(String, Position)>, to: S) -> Result<S::Ok, S::Error> {
    match place {
        Some((file, at)) => to.serialize_str(&format!("{file}:{}:{}", at.line, at.column)),
        None => to.serialize_none(),
    }
}

/// `file:line:column: message`, as errors about a scenario are.
impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((file, at)) = &self.place {
            write!(f, "{file}:{}:{}: ", at.line, at.column)?;
        }
        f.write_str(&self.message)
    }
}

impl Warning {
    fn new(key: &'static str, message: String) -> Self {
        Self {
            key,
            message,
            place: None,
        }
    }
}

/// A rule: what it has to say about a scenario on a machine.
type Rule = fn(&Scenario, &Profile, &mut Vec<Warning>);

/// All rules, in the order in which their warnings are listed.
const RULES: [Rule; 1] = [nvlink_domain];

/// The warnings about a scenario on this machine, without their places.
#[must_use]
pub fn warnings(scenario: &Scenario, profile: &Profile) -> Vec<Warning> {
    let mut all = Vec::new();
    for rule in RULES {
        rule(scenario, profile, &mut all);
    }
    all
}

/// As [`warnings`], with the places where the options are written in the scenario of this path with these overrides.
#[must_use]
pub fn located(
    scenario: &Scenario,
    profile: &Profile,
    path: &Path,
    overrides: &[String],
) -> Vec<Warning> {
    let mut all = warnings(scenario, profile);
    if !all.is_empty() {
        // The scenario was loaded from the same texts: only a file that has changed since can fail.
        let places = scenario::places(path, overrides).unwrap_or_default();
        for warning in &mut all {
            warning.place = places.get(warning.key).cloned();
        }
    }
    all
}

/// Nodes with more GPUs than NVLink connects: their traffic is priced as if it did.
fn nvlink_domain(scenario: &Scenario, profile: &Profile, all: &mut Vec<Warning>) {
    let mesh = &scenario.mesh;
    let together = mesh.gpus_per_node.min(mesh.world());
    if let Some(domain) = profile.network.nvlink_domain.filter(|d| together > *d) {
        all.push(Warning::new(
            "mesh.gpus_per_node",
            format!(
                "NVLink connects {domain} GPUs of {}, but `gpus_per_node` is {}: collectives of more than {domain} \
                 ranks are priced as if NVLink connected them",
                profile.name, mesh.gpus_per_node
            ),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_sim::hardware;

    fn of(overrides: &[&str]) -> Vec<Warning> {
        let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
        let path = Path::new("llama3-8b-8xh100");
        let scenario = scenario::load(path, &overrides).unwrap();
        let profile = hardware::load(&scenario.mesh.hardware).unwrap();
        located(&scenario, &profile, path, &overrides)
    }

    #[test]
    fn nodes_larger_than_nvlink_are_named_where_they_are_written() {
        let sixteen = of(&["mesh.dp_shard=16", "mesh.gpus_per_node=16"]);
        let [warning] = &sixteen[..] else {
            panic!("{sixteen:?}")
        };
        assert_eq!(warning.key, "mesh.gpus_per_node");
        let text = warning.to_string();
        let place = "--set mesh.gpus_per_node=16:1:20: ";
        assert!(text.starts_with(place), "{text}");
        assert!(text.contains("connects 8 GPUs of h100-80"), "{text}");
        for fine in [
            &["mesh.dp_shard=16"][..],
            // All ranks are within one domain.
            &["mesh.gpus_per_node=16"],
            // No NVLink, no domain.
            &[
                "mesh.hardware=cpu",
                "mesh.dp_shard=16",
                "mesh.gpus_per_node=16",
            ],
        ] {
            assert_eq!(of(fine), [], "{fine:?}");
        }
    }
}
