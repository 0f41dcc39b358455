//! The options of a scenario in the editor: order, values in the syntax of scenario files, and
//! completion.

use serde_json::Value;
use shardlab_plan::Scenario;
use shardlab_plan::scenario::{Accept, KeyInfo, keys};
use std::sync::OnceLock;

/// Sections in the order of the editor, most frequently tuned ones first.
const ORDER: [&str; 9] = [
    "fsdp",
    "compile",
    "train",
    "precision",
    "mesh",
    "moe",
    "model",
    "lora",
    "gate",
];

/// Returns all options in the editor's order.
#[must_use]
pub fn all() -> &'static [&'static KeyInfo] {
    static ALL: OnceLock<Vec<&'static KeyInfo>> = OnceLock::new();
    ALL.get_or_init(|| {
        ORDER
            .iter()
            .flat_map(|section| keys().iter().filter(move |k| k.section == *section))
            .collect()
    })
}

/// Returns the path of an option: `fsdp.prefetch_forward`.
#[must_use]
pub fn path(info: &KeyInfo) -> String {
    info.path()
}

/// Returns the values of all options in a scenario, in the order of [`all`] and in the syntax of
/// `--set`. `None` marks an option that is not set and has no default.
#[must_use]
pub fn values(scenario: &Scenario) -> Vec<Option<String>> {
    // A scenario is plain data and always has a JSON form.
    let json = serde_json::to_value(scenario).unwrap_or_default();
    all()
        .iter()
        .map(|info| {
            let value = json.get(info.section)?.get(info.field)?;
            text(info, value)
        })
        .collect()
}

/// Formats a resolved value as in a scenario file.
fn text(info: &KeyInfo, value: &Value) -> Option<String> {
    let quoted = |s: &str| format!("{s:?}");
    Some(match (info.key, value) {
        // The only key for which "nothing" is a value.
        ("main_params", Value::Null) => "none".into(),
        (_, Value::Null) => return None,
        ("reshard_after_forward", Value::String(s)) => match s.as_str() {
            "always" => "true".into(),
            "never" => "false".into(),
            other => other.into(),
        },
        (_, Value::String(s)) => s.clone(),
        ("offload", Value::Object(pieces)) => {
            let on = pieces.iter().filter(|(_, v)| **v == Value::Bool(true));
            list(on.map(|(k, _)| quoted(k)))
        }
        ("rank_pattern" | "alpha_pattern", Value::Object(patterns)) => {
            let each = patterns.iter().map(|(k, v)| format!("{} = {v}", quoted(k)));
            format!("{{ {} }}", each.collect::<Vec<_>>().join(", "))
        }
        (_, Value::Object(variant)) => {
            let (name, inner) = variant.iter().next()?;
            match (name.as_str(), inner) {
                ("elements", n) => format!("{{ elements = {n} }}"),
                ("patterns", Value::Array(patterns)) => {
                    list(patterns.iter().map(|p| quoted(&pattern(p))))
                }
                ("scopes", Value::Array(scopes)) => list(scopes.iter().map(Value::to_string)),
                (_, inner) => inner.to_string(),
            }
        }
        (_, Value::Array(items)) => list(items.iter().map(Value::to_string)),
        (_, other) => other.to_string(),
    })
}

fn pattern(value: &Value) -> String {
    let modules = value["modules"].as_array().into_iter().flatten();
    let mut text = modules
        .filter_map(Value::as_str)
        .collect::<Vec<_>>()
        .join("+");
    if value["keep"] == Value::Bool(true) {
        text.push_str("=keep");
    }
    text
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

/// Returns the values to offer for an option with this current value, whatever text has been typed.
#[must_use]
pub fn candidates(info: &KeyInfo, current: Option<&str>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for accept in info.accepts {
        match accept {
            Accept::Bool => all.extend(["true".into(), "false".into()]),
            // Long names of types are the same values again.
            Accept::Choice(names) => all.extend(
                names
                    .iter()
                    .filter(|n| !(n.contains("float")))
                    .map(|n| (*n).to_owned()),
            ),
            Accept::Integer(low, high) => all.extend(integers(*low, *high, current)),
            Accept::List(Accept::Choice(names)) => {
                all.extend(names.iter().map(|n| format!("[{n:?}]")));
            }
            Accept::Empty => all.push("[]".into()),
            Accept::Table(fields) => {
                all.extend(fields.iter().filter_map(|(name, accept)| match accept {
                    Accept::Integer(least, most) => {
                        let value = 1_000_000.clamp(*least, *most);
                        Some(format!("{{ {name} = {value} }}"))
                    }
                    _ => None,
                }));
            }
            _ => {}
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|v| seen.insert(v.clone()));
    all
}

/// Returns all values of a small range, or for a large range, halves and doubles of the current
/// value.
fn integers(low: u64, high: u64, current: Option<&str>) -> Vec<String> {
    const SMALL: u64 = 8;
    if high <= 64 {
        return (low..=high.min(low + SMALL))
            .map(|n| n.to_string())
            .collect();
    }
    let Some(now) = current.and_then(|c| c.parse::<u64>().ok()) else {
        return Vec::new();
    };
    let mut near = vec![
        now / 4,
        now / 2,
        now,
        now.saturating_mul(2),
        now.saturating_mul(4),
    ];
    near.retain(|n| (low..=high).contains(n));
    near.dedup();
    near.iter().map(u64::to_string).collect()
}

/// Returns the candidates that start with the typed text, followed by those that contain it.
#[must_use]
pub fn completions(info: &KeyInfo, current: Option<&str>, typed: &str) -> Vec<String> {
    let typed = typed.trim().to_lowercase();
    let all = candidates(info, current);
    let begins = |c: &String| c.to_lowercase().starts_with(&typed);
    let contains = |c: &String| c.to_lowercase().contains(&typed);
    let first = all.iter().filter(|c| begins(c)).cloned();
    let second = all.iter().filter(|c| !begins(c) && contains(c)).cloned();
    first.chain(second).collect()
}

/// Returns the next or previous value: the adjacent candidate, or an adjacent integer or number;
/// `None` if there is none.
#[must_use]
pub fn neighbour(info: &KeyInfo, current: Option<&str>, forward: bool) -> Option<String> {
    let current = current.unwrap_or_default();
    if let (Ok(n), Some((low, high))) = (
        current.parse::<u64>(),
        info.accepts.iter().find_map(|a| match a {
            Accept::Integer(low, high) => Some((*low, *high)),
            _ => None,
        }),
    ) {
        let next = match (forward, high > 64) {
            (true, true) => n.saturating_mul(2),
            (true, false) => n + 1,
            (false, true) => n / 2,
            (false, false) => n.checked_sub(1)?,
        };
        if (low..=high).contains(&next) && next != n {
            return Some(next.to_string());
        }
    }
    let all = candidates(info, Some(current));
    let at = all.iter().position(|c| c == current);
    let next = match (at, forward) {
        (Some(i), true) => i + 1,
        (Some(i), false) => i.checked_sub(1)?,
        (None, true) => 0,
        (None, false) => all.len().checked_sub(1)?,
    };
    all.get(next).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::scenario::{load, shipped};
    use std::path::Path;

    fn info(path_: &str) -> &'static KeyInfo {
        all().iter().find(|i| path(i) == path_).unwrap()
    }

    #[test]
    fn every_key_is_an_option_once() {
        assert_eq!(all().len(), keys().len());
    }

    /// The editor shows values in the syntax of `--set`, so setting every option to its shown value
    /// changes nothing.
    #[test]
    fn shown_values_are_valid_and_mean_the_same() {
        for (name, _) in shipped() {
            let scenario = load(Path::new(name), &[]).unwrap();
            let set: Vec<String> = all()
                .iter()
                .zip(values(&scenario))
                .filter_map(|(info, value)| Some(format!("{}={}", path(info), value?)))
                // Setting the values of a preset in addition to its name is redundant, and a
                // constant schedule rejects a final learning rate.
                .filter(|s| !s.starts_with("model.") && !s.starts_with("train.min_lr="))
                .collect();
            let again = load(Path::new(name), &set).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(again, scenario, "{name}");
        }
    }

    /// Patterns of adapters have keys with any characters.
    #[test]
    fn patterns_are_shown_as_they_are_set() {
        let name = Path::new("lora-tiny");
        let set = [
            r"lora.rank_pattern={ 'layers\.0\..*' = 2, down_proj = 8 }".to_owned(),
            "lora.alpha_pattern={ q_proj = 2.5 }".to_owned(),
            "lora.exclude_modules=.*layers.1.*up_proj".to_owned(),
            "lora.layers_to_transform=[0, 1]".to_owned(),
        ];
        let scenario = load(name, &set).unwrap();
        let shown = all().iter().zip(values(&scenario));
        let of = |key: &str| {
            let found = shown.clone().find(|(info, _)| path(info) == key);
            found.and_then(|(_, value)| value).unwrap()
        };
        assert_eq!(
            of("lora.rank_pattern"),
            r#"{ "layers\\.0\\..*" = 2, "down_proj" = 8 }"#
        );
        let again: Vec<String> = set
            .iter()
            .map(|s| s.split_once('=').unwrap().0)
            .map(|key| format!("{key}={}", of(key)))
            .collect();
        assert_eq!(load(name, &again).unwrap(), scenario);
    }

    #[test]
    fn candidates_are_valid_values() {
        let name = Path::new("llama3-8b-4xh200");
        let shown = values(&load(name, &[]).unwrap());
        for (info, current) in all().iter().zip(&shown) {
            for candidate in candidates(info, current.as_deref()) {
                let set = format!("{}={candidate}", path(info));
                if let Err(e) = load(name, &[set]) {
                    assert!(e.expected().is_none(), "{} = {candidate}: {e}", path(info));
                }
            }
        }
    }

    #[test]
    fn neighbours_go_through_a_range_and_stop_at_its_ends() {
        let prefetch = info("fsdp.prefetch_forward");
        assert_eq!(neighbour(prefetch, Some("1"), true).as_deref(), Some("2"));
        assert_eq!(neighbour(prefetch, Some("1"), false).as_deref(), Some("0"));
        assert_eq!(neighbour(prefetch, Some("0"), false), None);
        let policy = info("fsdp.policy");
        assert_eq!(
            neighbour(policy, Some("native"), true).as_deref(),
            Some("fsdp2")
        );
        assert_eq!(neighbour(policy, Some("megatron_v2"), true), None);
        let batch = info("train.micro_batch");
        assert_eq!(neighbour(batch, Some("4"), true).as_deref(), Some("8"));
        assert_eq!(neighbour(batch, Some("1"), false), None);
        assert_eq!(
            neighbour(info("train.sync_each_step"), Some("true"), true).as_deref(),
            Some("false")
        );
    }

    #[test]
    fn completion_prefers_what_begins_as_typed() {
        let policy = info("fsdp.policy");
        assert_eq!(completions(policy, None, "M"), ["megatron", "megatron_v2"]);
        assert_eq!(completions(policy, None, "p2"), ["fsdp2"]);
        assert_eq!(
            completions(policy, None, ""),
            ["native", "fsdp2", "megatron", "megatron_v2"]
        );
        assert!(completions(policy, None, "zz").is_empty());
    }
}
