//! Determines whether runs can be compared, and why.

use crate::view::{RunView, ScenarioView, differences};
use serde::Serialize;
use shardlab_plan::record::RunKind;
use shardlab_plan::scenario::{HARDWARE, key_of};
use std::collections::BTreeSet;

/// Maximum number of options that are named. For more options, only the number is given.
const MAX_NAMED: usize = 3;

/// To what extent the numbers of runs can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The same work on the same machine: one run may be called better.
    Full,
    /// Comparable with care: the reasons say what differs.
    Partial,
    /// Unrelated runs, whose times are not compared.
    None,
}

/// Whether some runs are comparable, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparable {
    /// Level.
    pub level: Level,
    /// Reasons.
    pub reasons: Vec<String>,
    /// Whether all runs are predictions, or all are measurements.
    #[serde(skip)]
    one_kind: bool,
}

impl Comparable {
    /// Compares model, tokens, hardware, kind and program of the runs.
    #[must_use]
    pub fn new(views: &[&RunView]) -> Self {
        let facts = Facts::new(views);
        let one_kind = facts.kinds.len() < 2;
        let unlike = [
            (facts.is_other_model(), "different models"),
            (!one_kind && !facts.machines_agree, "different machines"),
        ];
        let unlike: Vec<&str> = unlike.iter().filter(|u| u.0).map(|u| u.1).collect();
        if !unlike.is_empty() {
            let runs: Vec<String> = views.iter().map(|v| described(v)).collect();
            let times = "times are not compared".to_owned();
            return Self {
                level: Level::None,
                reasons: vec![runs.join(" vs. "), unlike.join(" on "), times],
                one_kind,
            };
        }
        let differing = facts.differing();
        let mut reasons = Vec::new();
        reasons.extend(facts.same());
        let level = match differing.is_empty() {
            true => Level::Full,
            false => Level::Partial,
        };
        reasons.extend(differing);
        reasons.extend(facts.options());
        Self {
            level,
            reasons,
            one_kind,
        }
    }

    /// Returns whether times, and conclusions from them, can be compared.
    #[must_use]
    pub fn times(&self) -> bool {
        self.level != Level::None
    }

    /// Returns whether one run may be called better than another. Predictions and measurements are
    /// never ranked against each other.
    #[must_use]
    pub fn ranks(&self) -> bool {
        self.times() && self.one_kind
    }

    /// Returns the result as a sentence.
    #[must_use]
    pub fn sentence(&self) -> String {
        let word = match self.level {
            Level::Full => "Comparable",
            Level::Partial => "Partly comparable",
            Level::None => "Not comparable",
        };
        format!("{word}: {}.", self.reasons.join("; "))
    }
}

/// Describes a run: `CPU training of llama-tiny`, `simulated llama3-8b-4xh200 on 4 x h200-nvlink`.
fn described(view: &RunView) -> String {
    let run = &view.run;
    let name = &view.scenario.name;
    match run.kind {
        RunKind::Sim => format!("simulated {name} on {} x {}", run.world_size, run.hardware),
        RunKind::Exec if is_cpu(&run.hardware) => format!("CPU training of {name}"),
        RunKind::Exec | RunKind::Import => format!(
            "training of {name} on {} x {}",
            run.world_size, run.hardware
        ),
    }
}

/// Name of the CPU, as a hardware profile and as a device.
const CPU: &str = "cpu";

fn is_cpu(hardware: &str) -> bool {
    hardware == CPU
}

/// Returns whether a profile may describe the device that a run was measured on. A user's profile
/// may describe any device.
fn may_be(profile: &str, device: &str) -> bool {
    if !HARDWARE.contains(&profile) {
        return true;
    }
    if is_cpu(profile) || is_cpu(device) {
        return profile == device;
    }
    // Matches `h200-nvlink-exec` with `NVIDIA H200`.
    let model = profile.split('-').next().unwrap_or(profile);
    device.to_lowercase().contains(model)
}

/// What is equal in all runs, and what differs.
struct Facts<'a> {
    views: &'a [&'a RunView],
    kinds: BTreeSet<&'static str>,
    /// Options that differ.
    keys: Vec<String>,
    /// Whether every measurement may be from the machine that every prediction describes.
    machines_agree: bool,
}

impl<'a> Facts<'a> {
    fn new(views: &'a [&'a RunView]) -> Self {
        let scenarios: Vec<&ScenarioView> = views.iter().map(|v| &v.scenario).collect();
        let keys = differences(&scenarios).into_iter().map(|d| d.key);
        let of = |measured: bool| {
            let views = views.iter();
            views.filter(move |v| v.run.kind.is_measured() == measured)
        };
        let machines_agree = of(false).all(|predicted| {
            of(true).all(|measured| may_be(&predicted.run.hardware, &measured.run.hardware))
        });
        Self {
            views,
            kinds: views.iter().map(|v| v.run.kind.word()).collect(),
            keys: keys.filter(|key| !key.starts_with("gate.")).collect(),
            machines_agree,
        }
    }

    fn all_same<T: PartialEq>(&self, of: impl Fn(&RunView) -> T) -> bool {
        let mut all = self.views.iter().map(|v| of(v));
        let first = all.next();
        all.all(|x| Some(x) == first)
    }

    fn differs_in(&self, section: &str) -> bool {
        self.keys.iter().any(|key| key.starts_with(section))
    }

    /// Returns whether the models differ and are not variants of the same scenario.
    fn is_other_model(&self) -> bool {
        // Scenarios with unknown options are distinguished by their names.
        let unknown = self.views.iter().any(|v| v.scenario.settings.is_empty());
        let other = self.differs_in("model.") || unknown;
        other && !self.all_same(|v| v.scenario.name.clone())
    }

    fn same_tokens(&self) -> bool {
        // The number of tokens is unknown for a baseline.
        let known: BTreeSet<u64> = self.views.iter().map(|v| v.run.tokens).collect();
        known.into_iter().filter(|n| *n > 0).count() < 2
    }

    fn same_hardware(&self) -> bool {
        match self.kinds.len() {
            2 => self.machines_agree,
            _ => self.all_same(|v| v.run.hardware.clone()),
        }
    }

    fn same_ranks(&self) -> bool {
        self.all_same(|v| v.run.world_size)
    }

    fn same_program(&self) -> bool {
        let known = |v: &&&RunView| !v.program.digest.is_empty();
        self.all_same(|v| v.program.digest.clone()) && self.views.first().filter(known).is_some()
    }

    /// Returns which facts are equal: `same model, hardware and batch`.
    fn same(&self) -> Option<String> {
        let aspects = [
            ("program", self.same_program()),
            ("model", !self.same_program() && !self.differs_in("model.")),
            ("hardware", self.same_hardware()),
            ("mesh", !self.same_program() && self.same_mesh()),
            ("batch", !self.same_program() && self.same_tokens()),
        ];
        let same: Vec<&str> = aspects.iter().filter(|a| a.1).map(|a| a.0).collect();
        match same.as_slice() {
            [] => None,
            [one] => Some(format!("same {one}")),
            [first @ .., last] => Some(format!("same {} and {last}", first.join(", "))),
        }
    }

    fn same_mesh(&self) -> bool {
        let of_mesh = |key: &String| key.starts_with("mesh.") && key != crate::view::HARDWARE;
        self.same_ranks() && !self.keys.iter().any(of_mesh)
    }

    /// Returns the differences that make a comparison less meaningful.
    fn differing(&self) -> Vec<String> {
        let values = |of: &dyn Fn(&RunView) -> String| {
            let mut all: Vec<String> = Vec::new();
            for value in self.views.iter().map(|v| of(v)) {
                if !all.contains(&value) {
                    all.push(value);
                }
            }
            all.join(" vs. ")
        };
        let mut all = Vec::new();
        if self.kinds.len() > 1 {
            let of = |v: &RunView| v.run.kind.word().to_owned();
            all.push(values(&of));
            if !self.same_program() {
                all.push("different programs".to_owned());
            }
        }
        if self.differs_in("model.") {
            all.push("the model differs, so the runs do different work".to_owned());
        }
        if !self.same_hardware() {
            all.push(values(&|v| v.run.hardware.clone()));
        }
        if !self.same_ranks() {
            all.push(format!(
                "{} ranks",
                values(&|v| v.run.world_size.to_string())
            ));
        }
        if !self.same_tokens() {
            let unit = RunView::counted_in(self.views.iter().copied()).name();
            let tokens = values(&|v| v.run.tokens.to_string());
            all.push(format!(
                "{tokens} {unit} per rank and step, so compare throughput rather than step time"
            ));
        }
        all
    }

    /// Returns the differing options: `differ in fsdp.prefetch_forward`.
    fn options(&self) -> Option<String> {
        let known = self.views.iter().all(|v| !v.scenario.settings.is_empty());
        // `differing` already reports these in other words.
        let unreported =
            |key: &&String| !key.starts_with("model.") && *key != crate::view::HARDWARE;
        let keys = self.keys.iter().filter(unreported);
        let keys: Vec<_> = keys.map(|k| key_of(k)).collect();
        match keys.as_slice() {
            [] if self.keys.is_empty() && known => Some("no option differs".to_owned()),
            [] => None,
            keys if keys.len() > MAX_NAMED => Some(format!(
                "differ in {} and {} more options",
                keys[..MAX_NAMED].join(", "),
                keys.len() - MAX_NAMED
            )),
            keys => Some(format!("differ in {}", keys.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn run(name: &str, options: &[(&str, &str)]) -> RunView {
        let mut view = testing::view(10);
        view.scenario.name = name.to_owned();
        view.run.kind = RunKind::Sim;
        view.run.hardware = "h200-nvlink".to_owned();
        for (key, value) in options {
            let (key, value) = ((*key).to_owned(), (*value).to_owned());
            view.scenario.settings.insert(key, value);
        }
        view
    }

    fn of(views: [&RunView; 2]) -> (Level, String) {
        let c = Comparable::new(&views);
        (c.level, c.sentence())
    }

    #[test]
    fn one_option_of_one_scenario() {
        let a = run("a", &[("fsdp.prefetch_forward", "1")]);
        let mut b = run("a", &[("fsdp.prefetch_forward", "0")]);
        b.program.digest = "other".to_owned();
        let expected =
            "Comparable: same model, hardware, mesh and batch; differ in fsdp.prefetch_forward.";
        assert_eq!(of([&a, &b]), (Level::Full, expected.to_owned()));
        assert!(Comparable::new(&[&a, &b]).ranks());
        let expected = "Comparable: same program and hardware; no option differs.";
        assert_eq!(of([&a, &a]), (Level::Full, expected.to_owned()));
    }

    #[test]
    fn a_prediction_is_not_ranked_against_a_measurement() {
        let (a, mut b) = (run("a", &[]), run("a", &[]));
        b.run.kind = RunKind::Exec;
        b.run.hardware = "NVIDIA H200".to_owned();
        let c = Comparable::new(&[&a, &b]);
        assert_eq!(
            (c.level, c.ranks(), c.times()),
            (Level::Partial, false, true)
        );
        assert_eq!(
            c.sentence(),
            "Partly comparable: same program and hardware; predicted vs. measured; no option differs."
        );
        // A run on the CPU is a measurement of another machine.
        b.run.hardware = "cpu".to_owned();
        let (level, text) = of([&a, &b]);
        assert_eq!(level, Level::None);
        assert_eq!(
            text,
            "Not comparable: simulated a on 4 x h200-nvlink vs. CPU training of a; different machines; times are not compared."
        );
    }

    #[test]
    fn unrelated_runs_are_not_compared() {
        let a = run("a", &[("model.layers", "4")]);
        let mut b = run("b", &[("model.layers", "32")]);
        b.run.kind = RunKind::Exec;
        b.run.hardware = "cpu".to_owned();
        let c = Comparable::new(&[&b, &a]);
        assert_eq!((c.level, c.ranks(), c.times()), (Level::None, false, false));
        assert_eq!(c.reasons[1], "different models on different machines");
        // A variant of the same scenario is comparable with care.
        let c = run("a", &[("model.layers", "32")]);
        let (level, text) = of([&a, &c]);
        assert_eq!(level, Level::Partial);
        assert!(text.contains("the runs do different work"), "{text}");
    }

    #[test]
    fn machines_ranks_and_batches_are_named() {
        let (a, mut b) = (run("a", &[]), run("b", &[]));
        b.run.hardware = "h100-80".to_owned();
        b.run.world_size *= 2;
        b.run.tokens *= 2;
        let (level, text) = of([&a, &b]);
        assert_eq!(level, Level::Partial);
        for part in [
            "h200-nvlink vs. h100-80",
            "4 vs. 8 ranks",
            "tokens per rank and step",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn profiles_are_of_their_devices() {
        for (profile, device, may) in [
            ("h200-nvlink-exec", "NVIDIA H200", true),
            ("h100-80", "NVIDIA H100 80GB HBM3", true),
            ("h100-80", "NVIDIA H200", false),
            ("cpu", "cpu", true),
            ("cpu", "NVIDIA H200", false),
            ("b200", "cpu", false),
            ("mine", "cpu", true),
        ] {
            assert_eq!(may_be(profile, device), may, "{profile} {device}");
        }
    }
}
