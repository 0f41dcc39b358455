//! The keys that the user fixes or frees: `--keep` and `--free`.

use shardlab_plan::Scenario;
use shardlab_plan::scenario::{json_path_of, keys, nearest};

/// Keys that do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Keys, with their primary names.
    pub keys: Vec<String>,
    /// Overrides of the job: the given values, and those that follow from them.
    pub overrides: Vec<String>,
}

/// Keys whose values have a constant product, so that each determines the other.
const PRODUCTS: [[&str; 2]; 2] = [
    ["train.micro_batch", "train.grad_accum"],
    ["mesh.dp_shard", "mesh.dp_replicate"],
];

/// Reads `--keep` options: `KEY` keeps the job's value, `KEY=VALUE` sets another one.
///
/// # Errors
/// Fails if a key is unknown, or if values contradict each other or the job's batch and ranks.
pub fn kept(texts: &[String], base: &Scenario) -> Result<Kept, String> {
    let mut found = Kept::default();
    let mut given: Vec<(String, &str)> = Vec::new();
    for text in texts {
        let (key, value) = parts(text);
        let key = named(key).map_err(|e| format!("--keep {text}: {e}"))?;
        if let Some(value) = value {
            let before = given.iter().find(|(k, v)| *k == key && *v != value);
            if let Some((_, before)) = before {
                return Err(format!("--keep {text} contradicts --keep {key}={before}"));
            }
            given.push((key.clone(), value));
            found.overrides.push(format!("{key}={value}"));
        }
        if !found.keys.contains(&key) {
            found.keys.push(key);
        }
    }
    let today = |key: &str| match key {
        "train.micro_batch" => base.train.micro_batch,
        "train.grad_accum" => u64::from(base.train.grad_accum),
        "mesh.dp_shard" => u64::from(base.mesh.dp_shard),
        _ => u64::from(base.mesh.dp_outer),
    };
    for [a, b] in PRODUCTS {
        let all = today(a) * today(b);
        let value = |key: &str| {
            let given = given.iter().find(|(k, _)| k == key);
            given.and_then(|(_, v)| v.trim().parse::<u64>().ok())
        };
        let (known, other) = match (value(a), value(b)) {
            (None, None) => continue,
            (Some(x), Some(y)) if x.checked_mul(y) == Some(all) => continue,
            (Some(x), Some(y)) => {
                return Err(format!(
                    "--keep {a}={x} contradicts --keep {b}={y}: their product is {all} and does not change"
                ));
            }
            (Some(x), None) => ((a, x), b),
            (None, Some(y)) => ((b, y), a),
        };
        let (key, number) = known;
        if number == 0 || !all.is_multiple_of(number) {
            return Err(format!(
                "--keep {key}={number}: {key} times {other} is {all} and does not change, which is not a multiple of {number}"
            ));
        }
        found.overrides.push(format!("{other}={}", all / number));
    }
    Ok(found)
}

/// Reads `--free` options: `KEY` for every value of the key, `KEY=VALUE` for one more value.
/// Returns keys with their values.
///
/// # Errors
/// Fails if a key is unknown, has no list of values, or is also kept.
pub fn freed(texts: &[String], kept: &Kept) -> Result<Vec<(String, Vec<String>)>, String> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for text in texts {
        let (key, value) = parts(text);
        let key = named(key).map_err(|e| format!("--free {text}: {e}"))?;
        if kept.keys.contains(&key) {
            return Err(format!("--free {text} contradicts --keep {key}"));
        }
        let info = keys().iter().find(|k| k.path() == key);
        let mut values: Vec<String> = match value {
            Some(value) => vec![value.to_owned()],
            None => info
                .into_iter()
                .flat_map(|k| k.values())
                .map(str::to_owned)
                .collect(),
        };
        if values.is_empty() {
            let expected = info.map_or_else(String::new, |k| format!(" ({})", k.expected()));
            return Err(format!(
                "--free {text}: the key has no list of values{expected}; name those to try: --free {key}=VALUE, once per value"
            ));
        }
        match found.iter_mut().find(|(k, _)| *k == key) {
            Some((_, all)) => all.append(&mut values),
            None => found.push((key, values)),
        }
    }
    Ok(found)
}

/// Reads `--only` options. Returns the keys that do not change if only these do. Micro-batch and
/// accumulation change together, and so do the sizes of the mesh.
///
/// # Errors
/// Fails if a key is unknown.
pub(crate) fn all_but(texts: &[String]) -> Result<Vec<String>, String> {
    let mut only = Vec::new();
    for text in texts {
        let key = named(text).map_err(|e| format!("--only {text}: {e}"))?;
        let pair = PRODUCTS.iter().find(|p| p.contains(&key.as_str()));
        only.extend(pair.into_iter().flatten().map(|k| (*k).to_owned()));
        only.push(key);
    }
    let paths = keys().iter().map(|k| k.path());
    Ok(paths.filter(|path| !only.contains(path)).collect())
}

/// Splits `KEY` or `KEY=VALUE`.
fn parts(text: &str) -> (&str, Option<&str>) {
    match text.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (text, None),
    }
}

/// Returns the primary name of the key with this name or alias.
fn named(name: &str) -> Result<String, String> {
    let name = name.trim();
    let found = json_path_of(name).and_then(|field| {
        let key = keys().iter().find(|k| k.json_path() == field)?;
        Some(key.path())
    });
    found.ok_or_else(|| {
        let paths: Vec<String> = keys().iter().map(|k| k.path()).collect();
        match nearest(name, paths.iter().map(String::as_str)) {
            Some(near) => format!("`{name}` is not a key; did you mean `{near}`?"),
            None => format!("`{name}` is not a key; `shardlab schema --markdown` lists all"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario;

    fn base() -> Scenario {
        let set = [
            "train.micro_batch=2".to_owned(),
            "train.grad_accum=3".to_owned(),
        ];
        scenario::load("small-fsdp2".as_ref(), &set).unwrap()
    }

    fn keep(texts: &[&str]) -> Result<Kept, String> {
        let texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
        kept(&texts, &base())
    }

    fn free(texts: &[&str], kept: &Kept) -> Result<Vec<(String, Vec<String>)>, String> {
        let texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
        freed(&texts, kept)
    }

    #[test]
    fn what_is_kept_decides_its_partner() {
        let found = keep(&["train.micro_batch=3", "fsdp.units"]).unwrap();
        assert_eq!(found.keys, ["train.micro_batch", "fsdp.units"]);
        assert_eq!(
            found.overrides,
            ["train.micro_batch=3", "train.grad_accum=2"]
        );
        // Aliases are names of the same key.
        let found = keep(&["train.micro_batch_size"]).unwrap();
        assert_eq!(found.keys, ["train.micro_batch"]);
    }

    #[test]
    fn contradictions_and_unknown_keys_are_refused() {
        for (texts, message) in [
            (
                &["fsdp.prefetch_foward=1"][..],
                "did you mean `fsdp.prefetch_forward`?",
            ),
            (
                &["train.micro_batch=1", "train.micro_batch=2"][..],
                "contradicts --keep train.micro_batch=1",
            ),
            (
                &["train.micro_batch=2", "train.grad_accum=4"][..],
                "their product is 6 and does not change",
            ),
            (&["train.micro_batch=4"][..], "not a multiple of 4"),
        ] {
            let error = keep(texts).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn partners_change_together() {
        let kept = all_but(&["train.grad_accum".to_owned()]).unwrap();
        let has = |key: &str| kept.iter().any(|k| k == key);
        assert!(!has("train.micro_batch") && !has("train.grad_accum") && has("fsdp.units"));
        let error = all_but(&["train.recomputed".to_owned()]).unwrap_err();
        assert!(error.contains("did you mean `train.recompute`?"), "{error}");
    }

    #[test]
    fn freed_keys_need_values() {
        let none = Kept::default();
        let policies = free(&["fsdp.policy"], &none).unwrap();
        assert_eq!(
            policies[0].1,
            ["native", "fsdp2", "megatron", "megatron_v2"]
        );
        let lengths = free(&["train.seq_len=128", "train.seq_len=256"], &none).unwrap();
        assert_eq!(
            lengths,
            [(
                "train.seq_len".to_owned(),
                vec!["128".to_owned(), "256".to_owned()]
            )]
        );
        let error = free(&["train.seq_len"], &none).unwrap_err();
        assert!(error.contains("--free train.seq_len=VALUE"), "{error}");
        let both = keep(&["fsdp.policy"]).unwrap();
        let error = free(&["fsdp.policy"], &both).unwrap_err();
        assert!(error.contains("contradicts --keep fsdp.policy"), "{error}");
    }
}
