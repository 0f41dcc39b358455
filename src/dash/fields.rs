//! The fields that filters compare: the fields of each list, their completion, and messages on
//! unknown fields.

use super::app::App;
use super::glance;
use super::options;
use super::prompt::Asks;
use super::query::{Fields as _, Query, unfinished};
use super::runs::FIELDS;
use shardlab_plan::scenario::nearest;
use shardlab_reports::store::Entry;
use std::collections::BTreeSet;

/// Maximum number of values of a field that are offered as completions.
const MAX_VALUES: usize = 12;

/// Returns a field by its name, or an option by its key without section, such as
/// `prefetch_forward`.
pub(super) fn find(name: &str, get: impl Fn(&str) -> Option<String>) -> Option<String> {
    get(name).or_else(|| {
        let mut named = options::all().iter().filter(|i| i.is_named(name));
        named.find_map(|i| get(&options::path(i)))
    })
}

/// Returns a key with and without its section.
fn both(key: &str) -> [String; 2] {
    let short = crate::cli::option_of(key);
    [short.to_owned(), key.to_owned()]
}

/// Returns the fields of a list, its own ones first. Empty if its filter searches only for words.
fn names(app: &App, asks: Asks) -> Vec<String> {
    let own = |all: &[&str]| all.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    let mut all = match asks {
        Asks::FilterScenarios => [own(&glance::FIELDS), own(&["name"])].concat(),
        Asks::FilterSweep => {
            let axes = app.sweep.keys.iter().flat_map(|k| both(k)).collect();
            [own(&glance::FIELDS), own(&["front"]), axes].concat()
        }
        Asks::FilterRuns => {
            let keys = app.runs.kept.iter().flat_map(|k| {
                let view = &k.lanes.view;
                view.scenario
                    .settings
                    .keys()
                    .chain(view.run.environment.keys())
            });
            let keys = keys.chain(&app.runs.stored_keys);
            let keys: BTreeSet<String> = keys
                .cloned()
                .chain(options::all().iter().map(|i| options::path(i)))
                .flat_map(|k| both(&k))
                .collect();
            [
                own(&FIELDS),
                own(&Entry::FIELDS),
                keys.into_iter().collect(),
            ]
            .concat()
        }
        _ => Vec::new(),
    };
    let mut seen = BTreeSet::new();
    all.retain(|n| seen.insert(n.clone()));
    all
}

/// Returns the values of a field in a list, if there are few.
fn values(app: &App, asks: Asks, name: &str) -> Vec<String> {
    let all: BTreeSet<String> = match asks {
        Asks::FilterScenarios => {
            let briefs = app
                .scenarios
                .sources
                .iter()
                .filter_map(|s| s.brief.as_ref()?.as_ref().ok());
            briefs.filter_map(|b| b.field(name)).collect()
        }
        Asks::FilterSweep => {
            let front = (name == "front").then(|| ["no", "yes"].map(str::to_owned));
            let points = app
                .sweep
                .points
                .iter()
                .filter_map(|p| app.sweep.field(p, name));
            points.chain(front.into_iter().flatten()).collect()
        }
        Asks::FilterRuns => app.runs.listed().filter_map(|r| r.field(name)).collect(),
        _ => BTreeSet::new(),
    };
    if all.len() > MAX_VALUES {
        return Vec::new();
    }
    all.into_iter().collect()
}

/// Returns the completions for the last word of a filter: field names, or values after `=`. Each
/// completion is a whole line.
pub(super) fn complete(app: &App, asks: Asks, text: &str) -> Vec<String> {
    let at = text.rfind(char::is_whitespace).map_or(0, |i| i + 1);
    let (before, word) = text.split_at(at);
    let all = match unfinished(word) {
        Some((begin, name, value)) => {
            let all = values(app, asks, &name.to_lowercase());
            let fit = all
                .into_iter()
                .filter(|v| v.to_lowercase().starts_with(&value.to_lowercase()));
            fit.map(|v| format!("{begin}{v}")).collect::<Vec<_>>()
        }
        None => {
            let fit = names(app, asks)
                .into_iter()
                .filter(|n| n.starts_with(&word.to_lowercase()));
            fit.map(|n| format!("{n}=")).collect()
        }
    };
    all.into_iter().map(|w| format!("{before}{w}")).collect()
}

/// Returns the reason why a filter is invalid: it compares a field that the list does not have.
pub(super) fn refusal(app: &App, asks: Asks, text: &str) -> Option<String> {
    let query = Query::parse(text);
    let names = names(app, asks);
    let known = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    let name = query.unknown(known)?;
    let near = nearest(name, names.iter().map(String::as_str));
    Some(match (near, asks) {
        (Some(near), _) => format!("unknown field `{name}`; the nearest is `{near}`"),
        // There are too many options to list.
        (None, Asks::FilterRuns) => format!(
            "unknown field `{name}`; there are {}, {}, and options such as prefetch_forward",
            FIELDS.join(", "),
            Entry::FIELDS.join(", ")
        ),
        (None, _) => format!("unknown field `{name}`; there are {}", names.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::event::StoredRun;
    use crate::dash::testing::Stage;
    use std::time::{Duration, Instant};

    /// Returns saved runs that differ in one key. Each has about as many other keys as a real run.
    fn stored(count: usize) -> Vec<StoredRun> {
        let run = |n: usize| StoredRun {
            id: format!("run-{n}"),
            scenario: "small-native".into(),
            kind: "sim".into(),
            made: String::new(),
            step_ms: 1.0,
            allocated: 0,
            loss: None,
            changes: String::new(),
            name: None,
            fields: (0..200)
                .map(|k| (format!("environment.key_{k}"), "1".into()))
                .chain([(format!("own.of_{n}"), "1".into())])
                .collect(),
        };
        (0..count).map(run).collect()
    }

    /// Returns the shortest of several times, because other work on the machine only makes them
    /// longer.
    fn shortest(mut body: impl FnMut()) -> Duration {
        let times = [(); 3].map(|()| {
            let begin = Instant::now();
            body();
            begin.elapsed()
        });
        times.into_iter().min().expect("there are three")
    }

    /// Typing ten keys into a filter costs less than collecting the keys of all runs once.
    #[test]
    fn keys_of_stored_runs_are_collected_when_they_are_listed() {
        let mut stage = Stage::new();
        let asks = Asks::FilterRuns;
        stage.app.runs.list(stored(3));
        assert_eq!(refusal(&stage.app, asks, "own.of_2=1 of_0=1 key_7=1"), None);
        assert!(refusal(&stage.app, asks, "of_3=1").is_some());
        // Many runs with the same keys, as in a real store.
        let runs = vec![stored(1).remove(0); 3000];
        stage.app.runs.list(runs.clone());
        let all = shortest(|| {
            let keys = runs.iter().flat_map(|r| r.fields.keys());
            let distinct: BTreeSet<String> = keys.cloned().collect();
            assert_eq!(distinct.len(), 201);
        });
        let ten = shortest(|| {
            for _ in 0..10 {
                assert_eq!(refusal(&stage.app, asks, "key_7=1"), None);
            }
        });
        assert!(ten < all, "{ten:?} for ten keys, {all:?} for all runs");
    }
}
