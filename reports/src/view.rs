//! A run with the names of everything that it refers to. It can be read without its program.

mod alive;
mod counts;
mod experts;
mod instr;
mod memory;
mod settings;
mod work;

pub use alive::{Alive, alive_at, largest, launched_after};
pub(crate) use counts::{changed_counts, deltas};
pub use experts::{Exchange, ExpertsView};
pub use instr::InstrView;
pub(crate) use instr::Names;
pub use memory::{Family, MemoryCurve, Sample, Stack};
pub(crate) use settings::HARDWARE;
pub use settings::{Difference, ScenarioView, differences, what_if};
pub use shardlab_plan::record::Work;
pub use work::{bytes, flops, name};

use serde::{Deserialize, Serialize};
use shardlab_plan::ir::{AxisId, ParameterCount, UnitId};
use shardlab_plan::program::{Op, SectionKind};
use shardlab_plan::record::{ExposedGap, Run, Span, awaited_names, awaited_units};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::Picos;
use shardlab_plan::{Program, Scenario};
use std::collections::{BTreeMap, BTreeSet};

/// Version of [`RunView`]'s JSON. New fields have a default, and fields are never renamed.
pub const VIEW_FORMAT: u32 = 1;

/// Maximum number of groups of buffers alive at the peak that a view lists.
const MAX_ALIVE: usize = 24;

/// A run, and everything that its numbers refer to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunView {
    /// Format version.
    pub format: u32,
    /// The run itself: steps, spans, memory, losses and environment.
    pub run: Run,
    /// Scenario.
    pub scenario: ScenarioView,
    /// Program.
    pub program: ProgramView,
    /// Instructions that spans and memory samples refer to, by increasing id.
    pub instrs: Vec<InstrView>,
    /// Names that [`InstrView::name`] and [`InstrView::rule`] index.
    pub names: Vec<String>,
    /// Groups of equal buffers alive at the memory peak, largest total first.
    pub alive: Vec<Alive>,
    /// Validation losses (`exec` only).
    #[serde(default)]
    pub validations: Vec<Validation>,
    /// Whether the run was stopped before its end.
    #[serde(default)]
    pub interrupted: bool,
    /// Experts, if the model has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsView>,
}

/// One validation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Number of training steps before the checkpoint.
    pub steps: u64,
    /// Loss.
    #[serde(with = "shardlab_plan::record::float")]
    pub loss: f64,
}

/// Numbers of a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProgramView {
    /// Content digest, see [`Program::digest`].
    pub digest: String,
    /// Unit names by id.
    pub units: Vec<String>,
    /// Stream names by id; the first is the compute stream.
    pub streams: Vec<String>,
    /// Number of instructions by section, then by kind (`launch`, `all_gather`, `alloc`, …).
    pub counts: BTreeMap<SectionKind, BTreeMap<String, u32>>,
    /// Number of trainable and frozen parameters.
    pub parameters: u64,
    /// Numbers of all, active and trainable parameters; unknown in runs of older versions and in
    /// imported ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter_count: Option<ParameterCount>,
    /// Size of the inner axis.
    pub dp_shard: u32,
    /// Size of the outer axis.
    pub dp_outer: u32,
    /// Micro-batches per step.
    pub micro_batches: u16,
    /// Model FLOPs per rank and step.
    pub model_flops: u64,
}

impl ProgramView {
    /// Returns the numbers of a program.
    #[must_use]
    pub fn new(program: &Program) -> Self {
        let mut counts: BTreeMap<SectionKind, BTreeMap<String, u32>> = BTreeMap::new();
        for section in &program.sections {
            let of = counts.entry(section.kind).or_default();
            for instr in program.section_instrs(section) {
                *of.entry(kind(program, &instr.op).to_owned()).or_default() += 1;
            }
        }
        Self {
            digest: program.digest(),
            units: program.units.iter().map(|u| u.name.clone()).collect(),
            streams: program
                .streams
                .iter()
                .map(|s| s.kind.name().to_owned())
                .collect(),
            counts,
            parameters: program
                .params
                .iter()
                .map(|p| p.weight_numel(&program.meta.mesh))
                .sum(),
            parameter_count: Some(program.meta.parameters),
            dp_shard: program.meta.mesh.size(AxisId::DP_SHARD),
            dp_outer: program.meta.mesh.size(AxisId::DP_OUTER),
            micro_batches: program.meta.micro_batches,
            model_flops: program.meta.model_flops.0,
        }
    }
}

/// Returns the kind of an instruction, as counts name it.
fn kind(program: &Program, op: &Op) -> &'static str {
    match op {
        Op::Alloc(_) => "alloc",
        Op::Free(_) => "free",
        Op::Launch { .. } => "launch",
        Op::Collective { id, .. } => program.collectives[id.index()].kind.name(),
        Op::Copy { .. } => "copy",
        Op::Record { .. } => "record",
        Op::Wait { .. } => "wait",
        Op::HostWait(_) => "host_wait",
        Op::HostWork { .. } => "host_work",
        Op::GraphBegin(_) => "graph_begin",
        Op::GraphEnd(_) => "graph_end",
    }
}

impl RunView {
    /// Returns the value of a filter key: a field, an option or a fact of the environment, as
    /// [`crate::store::Entry::field`] does for a saved run. An unsaved run has neither id nor date.
    #[must_use]
    pub fn field(&self, key: &str) -> Option<String> {
        Some(match key {
            "kind" => self.kind().to_owned(),
            "scenario" => self.scenario.name.clone(),
            "policy" => self.run.policy.clone(),
            "hardware" => self.run.hardware.clone(),
            "world_size" => self.run.world_size.to_string(),
            "digest" | "program_digest" => self.program.digest.clone(),
            "scenario_digest" => self.scenario.digest.clone(),
            _ => {
                let own = self.scenario.settings.get(key);
                return own.or_else(|| self.run.environment.get(key)).cloned();
            }
        })
    }

    /// Returns the view of a run of this program, made for this scenario.
    #[must_use]
    pub fn new(run: &Run, program: &Program, scenario: &Scenario) -> Self {
        Self::of(run.clone(), program, scenario)
    }

    /// Like [`RunView::new`], but takes ownership of the run.
    #[must_use]
    pub fn of(run: Run, program: &Program, scenario: &Scenario) -> Self {
        let mut program_view = ProgramView::new(program);
        if !run.program_digest.is_empty() {
            program_view.digest.clone_from(&run.program_digest);
        }
        let (instrs, names) = instr::table(&run, program);
        let experts = ExpertsView::new(&run, program, scenario);
        let mut scenario = ScenarioView::new(scenario);
        scenario.settings.extend(what_if(&run.environment));
        Self {
            format: VIEW_FORMAT,
            scenario,
            alive: largest(program, run.memory.at.instr, MAX_ALIVE),
            program: program_view,
            instrs,
            names,
            validations: Vec::new(),
            interrupted: false,
            experts,
            run,
        }
    }

    /// Returns the instruction of a span or memory sample. Instructions that the run refers to
    /// always exist.
    #[must_use]
    pub fn instr(&self, id: shardlab_plan::ir::InstrId) -> Option<&InstrView> {
        let at = self.instrs.binary_search_by_key(&id, |i| i.id).ok()?;
        self.instrs.get(at)
    }

    /// Returns the name of an instruction: its kernel, collective or copy; `input`, `alloc` or
    /// `free`.
    #[must_use]
    pub fn name_of(&self, instr: &InstrView) -> &str {
        self.names.get(instr.name as usize).map_or("", |n| n)
    }

    /// Returns the rule of the policy that emitted an instruction.
    #[must_use]
    pub fn rule_of(&self, instr: &InstrView) -> &str {
        self.names.get(instr.rule as usize).map_or("", |n| n)
    }

    /// Returns the name of a unit; empty for one that the program does not have.
    #[must_use]
    pub fn unit(&self, id: UnitId) -> &str {
        self.program.units.get(id.index()).map_or("", |n| n)
    }

    /// Returns the name of the stream that a span ran on.
    #[must_use]
    pub fn stream(&self, span: &Span) -> &str {
        let streams = &self.program.streams;
        streams.get(span.stream.index()).map_or("", |n| n)
    }

    /// Returns the name and unit of a span, for example `mm layers.3`.
    #[must_use]
    pub fn span_label(&self, span: &Span) -> String {
        self.instr(span.instr).map_or_else(
            || format!("#{}", span.instr.0),
            |i| format!("{} {}", self.name_of(i), self.unit(i.unit)),
        )
    }

    /// Returns whether single instructions were recorded. A gate's baseline has none.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        !self.run.spans.is_empty()
    }

    /// Returns whether this is the content of a gate's baseline: numbers and options, without
    /// instructions.
    #[must_use]
    pub fn is_baseline(&self) -> bool {
        self.instrs.is_empty()
    }

    /// Returns the indices of the spans whose ends a gap waited for, see [`Run::awaited`].
    #[must_use]
    pub fn awaited(&self, gap: &ExposedGap) -> Vec<u32> {
        self.run.awaited(gap, |i| {
            let at = self.instr(i)?;
            Some((at.unit, at.phase, at.micro_batch))
        })
    }

    /// Describes what a gap waited for: the distinct names of these spans, then their units.
    #[must_use]
    pub fn awaited_label(&self, awaited: &[u32]) -> String {
        let instrs = || awaited.iter().filter_map(|&i| self.instr_of(i));
        let units: BTreeSet<UnitId> = instrs().map(|i| i.unit).collect();
        let units: Vec<&str> = units.into_iter().map(|u| self.unit(u)).collect();
        if awaited.is_empty() {
            return "nothing on the device".to_owned();
        }
        let names = awaited_names(instrs().map(|i| self.name_of(i)));
        format!("{names} {}", awaited_units(&units))
    }

    /// Returns the instruction of the span with this index.
    pub(crate) fn instr_of(&self, span: u32) -> Option<&InstrView> {
        self.instr(self.run.spans.get(span as usize)?.instr)
    }

    /// Returns the length of the recorded step.
    #[must_use]
    pub fn recorded(&self) -> Picos {
        let run = &self.run;
        run.recorded_to.saturating_sub(run.recorded_from)
    }

    /// Returns steady step times in order, milliseconds.
    #[must_use]
    pub(crate) fn samples_ms(&self) -> Vec<f64> {
        self.run.step_samples.iter().map(|t| t.ms()).collect()
    }

    /// Returns the median step time, milliseconds; NaN without samples.
    #[must_use]
    pub fn step_ms(&self) -> f64 {
        self.run.step_ms()
    }

    /// Returns the batch unit that some runs have in common. Runs with unknown options are ignored.
    #[must_use]
    pub fn counted_in<'a>(views: impl IntoIterator<Item = &'a Self>) -> BatchUnit {
        BatchUnit::common(views.into_iter().filter_map(|v| v.scenario.counted_in()))
    }

    /// Returns tokens (rows, images: [`RunView::counted_in`]) per second and rank; NaN if steps
    /// have no tokens.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        match self.run.tokens {
            0 => f64::NAN,
            _ => self.run.tokens_per_s(),
        }
    }

    /// Returns whether the steps of all runs have the same number of tokens (or rows, or images).
    /// If not, their times do not rank the runs.
    pub(crate) fn have_same_tokens<'a>(views: impl IntoIterator<Item = &'a Self>) -> bool {
        let mut tokens = views.into_iter().map(|v| v.run.tokens);
        let first = tokens.next();
        tokens.all(|t| Some(t) == first)
    }

    /// Returns the exposed time of the recorded step, milliseconds.
    #[must_use]
    pub fn exposed_ms(&self) -> f64 {
        self.run.exposed_total().ms()
    }

    /// Returns whether the peak is within the device's memory; `None` if the capacity is unknown. A
    /// run whose device memory was not measured did fit.
    #[must_use]
    pub fn fits(&self) -> Option<bool> {
        let memory = &self.run.memory;
        let capacity = memory.capacity?;
        Some(memory.device().is_none_or(|used| used <= capacity))
    }

    /// `sim`, `exec` or `import`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.run.kind.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_view_survives_json_to_the_byte() {
        let view = testing::view(100);
        let text = serde_json::to_string(&view).unwrap();
        let back: RunView = serde_json::from_str(&text).unwrap();
        // NaN does not equal itself, so the texts are compared.
        assert_eq!(serde_json::to_string(&back).unwrap(), text);
        assert!(back.run.losses[1].is_nan());
        assert_eq!(back.run.spans, view.run.spans);
    }

    #[test]
    fn spans_and_samples_have_their_instructions() {
        let view = testing::view(100);
        let spans = view.run.spans.iter().map(|s| s.instr);
        let samples = view.run.memory.timeline.iter().map(|s| s.instr);
        for id in spans.chain(samples) {
            assert_eq!(view.instr(id).map(|i| i.id), Some(id));
        }
        assert_eq!(view.span_label(&view.run.spans[0]), "all_gather layers.0");
        let awaited = view.awaited(&view.run.gaps[1]);
        assert_eq!(awaited, [10]);
        assert_eq!(view.awaited_label(&awaited), "all_gather layers.1");
        assert_eq!(view.awaited_label(&[]), "nothing on the device");
    }
}
