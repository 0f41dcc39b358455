//! Parallel sizes from the environment, for launchers that set variables rather than arguments.
//!
//! A variable has the same effect as a `--set` before all others: it overrides the file, and the
//! command line overrides it. Runs record it among their overrides and in their environment.

use shardlab_plan::scenario::ScenarioError;
use std::num::NonZeroU32;

/// Variables, and the keys that they override.
const SIZES: [(&str, &str); 4] = [
    ("SHARDLAB_DP_SHARD", "mesh.dp_shard"),
    ("SHARDLAB_DP_REPLICATE", "mesh.dp_outer"),
    ("SHARDLAB_TP", "mesh.tp"),
    ("SHARDLAB_EP", "mesh.ep"),
];

/// Variables for axes that do not exist. Their value may be 1.
const ABSENT: [(&str, &str); 2] = [
    ("SHARDLAB_CP", "context parallelism"),
    ("SHARDLAB_PP", "pipeline parallelism"),
];

/// Returns the overrides that the variables set.
///
/// # Errors
/// Returns the error in a variable: a value that is not a positive integer, or more than one rank
/// on an axis that does not exist.
pub(super) fn overrides(read: impl Fn(&str) -> Option<String>) -> Result<Vec<String>, String> {
    let size = |name: &str| -> Result<Option<NonZeroU32>, String> {
        let Some(text) = read(name) else {
            return Ok(None);
        };
        if text.trim().is_empty() {
            return Err(format!(
                "{name} is empty: unset it, or give a positive integer"
            ));
        }
        let wrong = |_| format!("{name} must be a positive integer, not {text:?}");
        text.trim().parse().map(Some).map_err(wrong)
    };
    for (name, axis) in ABSENT {
        if let Some(ranks) = size(name)?
            && ranks.get() > 1
        {
            return Err(format!("{name} must be 1, not {ranks}: there is no {axis}"));
        }
    }
    let mut all = Vec::new();
    for (name, key) in SIZES {
        all.extend(size(name)?.map(|ranks| format!("{key}={ranks}")));
    }
    Ok(all)
}

/// Returns the variables that are set, with their values, for the record of a run.
pub(super) fn given() -> impl Iterator<Item = (String, String)> {
    let names = SIZES.iter().map(|(name, _)| *name);
    let all = names.chain(ABSENT.map(|(name, _)| name));
    all.filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?)))
}

/// Adds the name of the variable to an error about a value that it set.
pub(super) fn blame(e: ScenarioError, read: impl Fn(&str) -> Option<String>) -> ScenarioError {
    let found = SIZES.iter().find_map(|(name, key)| {
        let value = read(name)?;
        let value = value.trim();
        (e.file() == format!("--set {key}={value}")).then(|| format!("{name}={value}"))
    });
    match found {
        Some(variable) => e.set_by(variable),
        None => e,
    }
}

#[cfg(test)]
mod tests {
    use super::{blame, overrides};
    use shardlab_plan::scenario;
    use std::path::Path;

    #[test]
    fn errors_name_the_variable() {
        let set = ["mesh.ep=3".to_owned()];
        let e = scenario::load(Path::new("small-moe"), &set).unwrap_err();
        let read = |name: &str| (name == "SHARDLAB_EP").then(|| " 3".to_owned());
        let text = format!("{:#}", blame(e.clone(), read));
        let expected = "SHARDLAB_EP=3: `ep` = 3 does not divide `dp_shard` = 4";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(blame(e.clone(), |_| None), e);
    }

    fn of(variables: &[(&str, &str)]) -> Result<Vec<String>, String> {
        overrides(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn variables_become_overrides() {
        assert_eq!(of(&[]).unwrap(), [""; 0]);
        let found = of(&[
            ("SHARDLAB_TP", "2"),
            ("SHARDLAB_DP_SHARD", " 8 "),
            ("SHARDLAB_PP", "1"),
            ("SHARDLAB_EP", "4"),
        ]);
        assert_eq!(
            found.unwrap(),
            ["mesh.dp_shard=8", "mesh.tp=2", "mesh.ep=4"]
        );
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (name, value, expected) in [
            (
                "SHARDLAB_CP",
                "2",
                "SHARDLAB_CP must be 1, not 2: there is no context parallelism",
            ),
            (
                "SHARDLAB_EP",
                "x",
                "SHARDLAB_EP must be a positive integer, not \"x\"",
            ),
            (
                "SHARDLAB_DP_SHARD",
                "0",
                "SHARDLAB_DP_SHARD must be a positive integer, not \"0\"",
            ),
            (
                "SHARDLAB_DP_REPLICATE",
                "",
                "SHARDLAB_DP_REPLICATE is empty: unset it, or give a positive integer",
            ),
            (
                "SHARDLAB_TP",
                "-1",
                "SHARDLAB_TP must be a positive integer, not \"-1\"",
            ),
        ] {
            assert_eq!(of(&[(name, value)]).unwrap_err(), expected);
        }
    }
}
