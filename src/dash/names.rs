//! Names of runs that are shown together.

use crate::cli::option_of;
use shardlab_reports::RunView;
use shardlab_reports::view::differences;

/// Returns the letter of the n-th compared run, counted from 0: A, B, … Z, 27, …
#[must_use]
pub fn letter(n: usize) -> String {
    u8::try_from(n)
        .ok()
        .filter(|n| *n < 26)
        .map_or_else(|| (n + 1).to_string(), |n| char::from(b'A' + n).to_string())
}

/// Returns what distinguishes each run from the others: `prefetch_forward=2` if all have the same
/// scenario, otherwise the run's own changes, because different scenarios differ in more than a
/// title can show. Empty if nothing distinguishes it.
#[must_use]
pub fn apart(runs: &[&RunView]) -> Vec<String> {
    let one = runs
        .windows(2)
        .all(|w| w[0].scenario.name == w[1].scenario.name);
    if !one {
        return runs
            .iter()
            .map(|r| changes(&r.scenario.overrides))
            .collect();
    }
    let scenarios: Vec<_> = runs.iter().map(|r| &r.scenario).collect();
    let differ = differences(&scenarios);
    let of = |i: usize| {
        let parts = differ.iter().map(|d| {
            let value = d.values[i].as_deref().unwrap_or("-");
            format!("{}={value}", option_of(&d.name()))
        });
        parts.collect::<Vec<_>>().join(" ")
    };
    (0..runs.len()).map(of).collect()
}

/// Returns overrides without their sections.
#[must_use]
pub fn changes(overrides: &[String]) -> String {
    let short: Vec<&str> = overrides.iter().map(|o| option_of(o)).collect();
    short.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, prefetch: &str, overrides: &[&str]) -> RunView {
        let mut view = shardlab_reports::testing::view(1);
        view.scenario.name = name.into();
        let settings = &mut view.scenario.settings;
        settings.insert("fsdp.prefetch_forward".into(), prefetch.into());
        settings.insert("train.micro_batch".into(), "1".into());
        view.scenario.overrides = overrides.iter().map(|o| (*o).to_owned()).collect();
        view
    }

    #[test]
    fn runs_of_one_scenario_are_distinguished_by_options_and_others_by_their_changes() {
        let (a, b) = (
            run("x", "1", &[]),
            run("x", "2", &["fsdp.prefetch_forward=2"]),
        );
        assert_eq!(
            apart(&[&a, &b]),
            ["prefetch_forward=1", "prefetch_forward=2"]
        );
        assert_eq!(apart(&[&a, &a]), ["", ""]);
        let c = run("y", "2", &["fsdp.policy=fsdp2", "train.steps=3"]);
        assert_eq!(apart(&[&a, &c]), ["", "policy=fsdp2 steps=3"]);
    }

    #[test]
    fn letters_go_on_as_numbers() {
        assert_eq!([0, 25, 26].map(letter), ["A", "Z", "27"]);
    }
}
