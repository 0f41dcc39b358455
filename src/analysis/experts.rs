//! The effects of dividing experts among other numbers of ranks, of sending tokens in another way,
//! of reserving other numbers of rows, and of unequally popular experts.

use super::whatif::{Change, Load, WhatIf, expert_parallel_sizes, try_one};
use crate::predict::{Prediction, Profiles};
use rayon::prelude::*;
use serde::Serialize;
use shardlab_plan::Scenario;
use shardlab_plan::config::Dispatcher;

/// Subject of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum About {
    /// Number of ranks among which experts are divided.
    Ep,
    /// How tokens reach them.
    Dispatcher,
    /// Imbalance in the popularity of experts.
    Imbalance,
    /// Number of rows that ranks reserve.
    Capacity,
}

impl About {
    /// Returns the title of a part of a table.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Ep => "expert parallelism (mesh.ep):",
            Self::Dispatcher => "dispatcher:",
            Self::Imbalance => "imbalance of routing:",
            Self::Capacity => "rows that ranks reserve:",
        }
    }
}

/// Largest size of expert parallelism that is compared.
const MAX_EP: u32 = 8;

/// Ratios of the most popular expert's tokens to the mean.
const IMBALANCES: [f64; 2] = [1.5, 2.0];

/// Factors on the rows of balanced routing.
const CAPACITIES: [&str; 3] = ["1.0", "1.25", "2.0"];

/// Factor that jobs with a limit usually have.
const USUAL_CAPACITY: &str = "1.25";

/// Predicts every change that a scenario with experts allows. Returns none without experts.
#[must_use]
pub(crate) fn try_all(
    base: &Prediction,
    profiles: &Profiles,
    load: Load<'_>,
) -> Vec<(About, WhatIf)> {
    changes(&base.scenario)
        .into_par_iter()
        .filter_map(|(about, change)| {
            let tried = try_one(change, &base.scenario, profiles, load)?;
            Some((about, tried))
        })
        .collect()
}

/// Returns the changes that are tried. Those that need divided experts come with the largest `ep`
/// if the scenario does not divide experts.
fn changes(base: &Scenario) -> Vec<(About, Change)> {
    let now = base.mesh.ep;
    let legal: Vec<u32> = expert_parallel_sizes(base, MAX_EP).collect();
    let Some(&largest) = legal.iter().max().filter(|n| **n > 1) else {
        return Vec::new();
    };
    let mut all: Vec<(About, Change)> = legal
        .iter()
        .filter(|n| **n != now)
        .map(|n| (About::Ep, Change::experts_over(*n, base)))
        .collect();
    let divided = (now == 1).then(|| format!("mesh.ep={largest}"));
    let mut add = |about: About, sets: &[String]| {
        let overrides: Vec<String> = divided.iter().chain(sets).cloned().collect();
        let label = overrides.join(" ");
        all.push((about, Change { label, overrides }));
    };
    for word in Dispatcher::WORDS {
        add(About::Dispatcher, &[format!("moe.dispatcher={word}")]);
    }
    let of = &base.model.options.experts;
    let most = of.experts as f64 / of.top_k as f64;
    for imbalance in IMBALANCES.into_iter().filter(|i| *i <= most) {
        let sets = [
            "moe.routing=seeded".to_owned(),
            format!("moe.imbalance={imbalance}"),
        ];
        add(About::Imbalance, &sets);
    }
    for factor in CAPACITIES {
        let factor = format!("moe.capacity_factor={factor}");
        add(About::Capacity, &[factor]);
    }
    // These send all rows that ranks reserve, which takes long in the worst case.
    for dispatcher in [Dispatcher::AllToAll, Dispatcher::Padded] {
        let sets = [
            format!("moe.dispatcher={}", dispatcher.name()),
            format!("moe.capacity_factor={USUAL_CAPACITY}"),
        ];
        add(About::Capacity, &sets);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn labels(scenario: &str, set: &[&str]) -> Vec<(About, String)> {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let base = shardlab_plan::scenario::load(Path::new(scenario), &set).unwrap();
        changes(&base)
            .into_iter()
            .map(|(about, change)| (about, change.label))
            .collect()
    }

    #[test]
    fn all_sizes_are_compared_from_any() {
        for (set, others) in [
            ("mesh.ep=1", ["mesh.ep=2", "mesh.ep=4"]),
            ("mesh.ep=2", ["mesh.ep=1", "mesh.ep=4"]),
        ] {
            // Four ranks, eight experts.
            let all = labels("small-moe", &[set]);
            let ep = all.iter().filter(|(about, _)| *about == About::Ep);
            assert_eq!(ep.map(|(_, l)| l).collect::<Vec<_>>(), others, "{set}");
        }
    }

    /// FSDP manages experts that several ranks have.
    #[test]
    fn other_sizes_of_ignored_experts_are_managed() {
        let ignored = [
            "mesh.ep=4",
            "fsdp.policy=fsdp2",
            "precision.main_params=none",
            "fsdp.ignored_params=experts",
        ];
        let all = labels("small-moe", &ignored);
        let ep = all.iter().filter(|(about, _)| *about == About::Ep);
        let ep: Vec<&String> = ep.map(|(_, label)| label).collect();
        let [one, two] = [1, 2].map(|n| format!("mesh.ep={n} fsdp.ignored_params=[]"));
        assert_eq!(ep, [&one, &two]);
        let set = ignored.iter().copied().chain(two.split(' '));
        let set: Vec<String> = set.map(str::to_owned).collect();
        shardlab_plan::scenario::load(Path::new("small-moe"), &set).unwrap();
    }

    #[test]
    fn undivided_experts_are_divided_first() {
        let whole = labels("small-moe", &[]);
        let others = || whole.iter().filter(|(about, _)| *about != About::Ep);
        assert!(others().all(|(_, label)| label.starts_with("mesh.ep=4 ")));
        assert_eq!(others().count(), 5 + 2 + 3 + 2);
        let divided = labels("small-moe", &["mesh.ep=2", "moe.dispatcher=peer"]);
        let capacity = (About::Capacity, "moe.capacity_factor=1.25".to_owned());
        assert!(divided.contains(&capacity), "{divided:?}");
        // With two experts and top 2, no expert is more popular than the other.
        let two = labels("small-moe", &["model.experts=2", "mesh.ep=2"]);
        assert!(two.iter().all(|(about, _)| *about != About::Imbalance));
        assert_eq!(labels("small-native", &[]), []);
    }
}
