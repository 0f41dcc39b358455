//! Parallel sizes from the environment, for launchers that set variables rather than arguments.
//!
//! A variable counts as the first `--set`: it wins over the file and loses to what the command line
//! says. Runs record it among their overrides.

use std::num::NonZeroU32;

/// Variables with the keys that they override.
const SIZES: [(&str, &str); 4] = [
    ("SHARDLAB_DP_SHARD", "mesh.dp_shard"),
    ("SHARDLAB_DP_REPLICATE", "mesh.dp_outer"),
    ("SHARDLAB_TP", "mesh.tp"),
    ("SHARDLAB_EP", "mesh.ep"),
];

/// Variables of axes that do not exist: they may say 1.
const ABSENT: [(&str, &str); 2] = [
    ("SHARDLAB_CP", "context parallelism"),
    ("SHARDLAB_PP", "pipeline parallelism"),
];

/// Returns the overrides that variables ask for. An empty variable counts as unset.
///
/// # Errors
/// What is wrong with a variable: no positive integer, or more than one rank on an axis that does
/// not exist.
pub(super) fn overrides(read: impl Fn(&str) -> Option<String>) -> Result<Vec<String>, String> {
    let size = |name: &str| -> Result<Option<NonZeroU32>, String> {
        let Some(text) = read(name).filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
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

#[cfg(test)]
mod tests {
    use super::overrides;

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
            ("SHARDLAB_DP_REPLICATE", ""),
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
                "SHARDLAB_TP",
                "-1",
                "SHARDLAB_TP must be a positive integer, not \"-1\"",
            ),
        ] {
            assert_eq!(of(&[(name, value)]).unwrap_err(), expected);
        }
    }
}
