//! Presents a baseline as a run, so that it can be compared with complete runs.

use super::facts::{Facts, MemoryFacts};
use crate::view::{ProgramView, RunView, ScenarioView, VIEW_FORMAT};
use serde::de::DeserializeOwned;
use shardlab_plan::ir::{InstrId, Role, UnitId};
use shardlab_plan::program::{Phase, SectionKind};
use shardlab_plan::record::{Cause, CostSources, MemoryReport, PeakAt, Run, RunKind};
use shardlab_plan::units::{Bytes, Picos};
use std::collections::BTreeMap;

/// Returns the value that a word in a baseline stands for; `None` for words of other versions.
fn named<T: DeserializeOwned>(word: &str) -> Option<T> {
    serde_json::from_value(serde_json::Value::String(word.to_owned())).ok()
}

impl Facts {
    /// Returns the baseline as a run: its prediction, or the training of its first seed (`None` if
    /// it has none). It has no spans and no memory curve, and a training run has no times.
    #[must_use]
    pub fn run_view(&self, kind: RunKind) -> Option<RunView> {
        let measured = match kind {
            RunKind::Sim => None,
            RunKind::Exec | RunKind::Import => Some(self.measured.as_ref()?),
        };
        let curve = measured.and_then(|m| m.curves.first());
        let memory = measured
            .and_then(|m| m.memory.as_ref())
            .unwrap_or(&self.memory);
        let units = units(memory);
        let mut environment =
            measured.map_or_else(BTreeMap::new, |measured| measured.environment.clone());
        if let Some(curve) = curve {
            environment.insert("seed".to_owned(), curve.seed.to_string());
        }
        let (step, host) = match kind {
            RunKind::Sim => (Some(Picos(self.time.step_ps)), Picos(self.time.host_ps)),
            RunKind::Exec | RunKind::Import => (None, Picos::ZERO),
        };
        let exposed = self
            .time
            .exposed_ps
            .iter()
            .filter(|_| kind == RunKind::Sim)
            .filter_map(|(cause, ps)| Some((named::<Cause>(cause)?, Picos(*ps))))
            .collect();
        let digest = measured.map_or(&self.program.digest, |m| &m.digest);
        let run = Run {
            scenario: self.scenario.clone(),
            program_digest: digest.clone(),
            kind,
            world_size: self.world_size,
            policy: self.policy.clone(),
            hardware: self.hardware.clone(),
            steps: Vec::new(),
            step_samples: step.into_iter().collect(),
            spans: Vec::new(),
            recorded_from: Picos::ZERO,
            recorded_to: step.unwrap_or(Picos::ZERO),
            memory: report(memory, &units),
            collectives: BTreeMap::new(),
            gaps: Vec::new(),
            exposed,
            host,
            tokens: 0,
            mfu: 0.0,
            costs: CostSources::default(),
            losses: curve.map_or_else(Vec::new, |c| c.losses.clone()),
            grad_norms: curve.map_or_else(Vec::new, |c| c.grad_norms.clone()),
            basis: None,
            other: None,
            environment,
        };
        let counts = &self.program.instructions;
        Some(RunView {
            format: VIEW_FORMAT,
            scenario: ScenarioView {
                name: self.scenario.clone(),
                overrides: self.set.clone(),
                settings: self.options.clone(),
                ..ScenarioView::default()
            },
            program: ProgramView {
                digest: digest.clone(),
                units,
                counts: counts
                    .iter()
                    .filter_map(|(section, of)| Some((named::<SectionKind>(section)?, of.clone())))
                    .collect(),
                ..ProgramView::default()
            },
            instrs: Vec::new(),
            names: Vec::new(),
            alive: Vec::new(),
            validations: Vec::new(),
            interrupted: curve.is_some_and(|c| c.ended.is_some()),
            experts: None,
            run,
        })
    }
}

/// Splits `backward layers.3` into its two words.
fn peak(memory: &MemoryFacts) -> (&str, &str) {
    memory.at.split_once(' ').unwrap_or((&memory.at, ""))
}

/// Returns the units that the numbers refer to.
fn units(memory: &MemoryFacts) -> Vec<String> {
    let mut all: Vec<String> = memory.by_unit.keys().cloned().collect();
    let (_, at) = peak(memory);
    if !all.iter().any(|u| u == at) {
        all.push(at.to_owned());
    }
    all
}

fn report(memory: &MemoryFacts, units: &[String]) -> MemoryReport {
    let (phase, unit) = peak(memory);
    let unit = units.iter().position(|u| u == unit).unwrap_or(0);
    let role = |name: &str| Role::ALL.into_iter().find(|r| r.name() == name);
    let mut by_role: Vec<(Role, Bytes)> = memory
        .by_role
        .iter()
        .filter_map(|(name, bytes)| Some((role(name)?, Bytes(*bytes))))
        .collect();
    by_role.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let mut by_unit: Vec<(String, Bytes)> = memory
        .by_unit
        .iter()
        .map(|(name, bytes)| (name.clone(), Bytes(*bytes)))
        .collect();
    by_unit.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    MemoryReport {
        peak_allocated: Bytes(memory.allocated),
        peak_reserved: Bytes(memory.reserved),
        peak_device: Bytes(memory.device),
        persistent: Bytes(memory.persistent),
        capacity: None,
        at: PeakAt {
            step: 0,
            instr: InstrId(0),
            time: Picos::ZERO,
            phase: named(phase).unwrap_or(Phase::Init),
            // Unit numbers have 16 bits, and a baseline lists only a few units.
            unit: UnitId(u16::try_from(unit).unwrap_or(0)),
            micro_batch: 0,
        },
        by_role,
        by_unit,
        retries: 0,
        timeline: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use crate::gate::testing::facts;
    use shardlab_plan::ir::Role;
    use shardlab_plan::program::{Phase, SectionKind};
    use shardlab_plan::record::{Cause, RunKind};
    use shardlab_plan::units::{Bytes, Picos};

    #[test]
    fn a_baseline_is_a_prediction_and_a_training() {
        let facts = facts();
        let sim = facts.run_view(RunKind::Sim).unwrap();
        assert_eq!(sim.samples_ms(), [2.0]);
        assert_eq!(sim.run.exposed.get(&Cause::Wire), Some(&Picos(100_000_000)));
        assert_eq!(sim.run.memory.peak_allocated, Bytes(1000));
        assert_eq!(
            sim.run.memory.by_role,
            [
                (Role::Activation, Bytes(600)),
                (Role::MainWeight, Bytes(400))
            ]
        );
        let at = &sim.run.memory.at;
        assert_eq!((at.phase, sim.unit(at.unit)), (Phase::Backward, "layers.1"));
        assert_eq!(sim.program.counts[&SectionKind::Steady]["launch"], 3);
        assert!(sim.run.losses.is_empty());
        let exec = facts.run_view(RunKind::Exec).unwrap();
        // A stored time is never compared with a time from another day.
        assert!(exec.samples_ms().is_empty() && exec.run.exposed.is_empty());
        assert_eq!(exec.run.memory.peak_allocated, Bytes(1001));
        assert_eq!(exec.run.losses.len(), 4);
        assert_eq!(exec.run.environment["seed"], "0");
        let without = super::Facts {
            measured: None,
            ..facts
        };
        assert!(without.run_view(RunKind::Exec).is_none());
    }
}
