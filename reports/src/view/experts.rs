//! Experts of a run: how they are divided among ranks, how many rows are reserved, and how long the
//! exchange of tokens takes.

use serde::{Deserialize, Serialize};
use shardlab_plan::config::RowShortage;
use shardlab_plan::ir::{
    AxisId, AxisSet, BodyOp, COMPUTE, Collective, CollectiveKind, InstrId, OpKind, UnitId,
};
use shardlab_plan::program::{Op, Phase};
use shardlab_plan::record::{Run, RunKind, Span, intervals};
use shardlab_plan::units::{Bytes, Picos};
use shardlab_plan::{Program, Scenario};
use std::collections::{BTreeMap, BTreeSet};

/// Experts of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsView {
    /// Experts of a layer.
    pub experts: u64,
    /// Number of experts per layer and rank.
    pub experts_per_rank: u64,
    /// Number of experts that process each token.
    pub top_k: u64,
    /// Number of ranks among which the experts are divided.
    pub ep: u32,
    /// How tokens reach their experts; `None` if each rank has all experts.
    pub dispatcher: Option<String>,
    /// What chooses the experts: `balanced`, `seeded` or a file for predictions and forced choices,
    /// `model` for routers.
    pub routing: String,
    /// Rows of the busiest rank in any layer, relative to the mean, according to `routing`.
    pub imbalance: f64,
    /// Rows that a rank reserves for the choices of a layer.
    pub rows_reserved: u64,
    /// Expected number of used rows in the busiest layer.
    pub rows_expected: u64,
    /// Choices of `routing` that find no row, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_shortage: Option<RowShortage>,
    /// Time of the collectives that bring tokens (in backward, gradients) to experts, milliseconds
    /// of the recorded step.
    pub dispatch_ms: f64,
    /// Time of the collectives that bring the results back.
    pub combine_ms: f64,
    /// Time of the experts' matmuls.
    pub matmul_ms: f64,
    /// Bytes of pushed rows that a rank receives from other nodes per step, for itself and for
    /// other ranks of its node.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub network_bytes: u64,
    /// These collectives by kind. Other collectives of the same kind carry weights and gradients.
    pub exchanges: BTreeMap<CollectiveKind, Exchange>,
}

/// Collectives of one kind that carry tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// Number per step.
    pub count: u32,
    /// Payload per step, with only those pushed rows that are expected to travel.
    pub bytes: u64,
    /// Time, milliseconds.
    pub busy_ms: f64,
    /// Time of these collectives during which no kernel computes.
    pub exposed_ms: f64,
}

impl ExpertsView {
    /// Returns the experts of a run of this program; `None` if the model has none.
    #[must_use]
    pub fn new(run: &Run, program: &Program, scenario: &Scenario) -> Option<Self> {
        if !scenario.model.has_experts() {
            return None;
        }
        let (of, ep) = (&scenario.model.options.experts, scenario.mesh.ep);
        let moe = scenario.moe.as_ref();
        let [rows_reserved, rows_expected] = rows(program);
        let mut view = Self {
            experts: of.experts,
            experts_per_rank: of.experts / u64::from(ep.max(1)),
            top_k: of.top_k,
            ep,
            dispatcher: moe.map(|moe| moe.dispatcher.name().to_owned()),
            routing: routing(run, scenario),
            imbalance: moe.map_or(1.0, |moe| moe.busiest.values().copied().fold(1.0, f64::max)),
            rows_reserved,
            rows_expected,
            row_shortage: shortage(run, scenario),
            dispatch_ms: 0.0,
            combine_ms: 0.0,
            matmul_ms: 0.0,
            network_bytes: 0,
            exchanges: BTreeMap::new(),
        };
        view.add_times(run, program);
        Some(view)
    }

    /// Describes in two lines how experts are divided among ranks, and how long the exchange of
    /// tokens takes.
    #[must_use]
    pub fn lines(&self) -> [String; 2] {
        let dispatcher = self.dispatcher.as_deref();
        let sent = dispatcher.map_or_else(String::new, |word| format!(", {word}"));
        let division = format!(
            "{} of {} on each rank, top {}; ep {}{sent}; routing {}, imbalance {:.2}",
            self.experts_per_rank, self.experts, self.top_k, self.ep, self.routing, self.imbalance
        );
        let short = self.row_shortage.as_ref();
        let short = short.map_or_else(String::new, |short| format!(", {}", short.words()));
        let rows = format!(
            "{} rows, {} expected{short}",
            self.rows_reserved, self.rows_expected
        );
        let network = match self.network_bytes {
            0 => String::new(),
            bytes => format!(", {} over the network", Bytes(bytes)),
        };
        let times = format!(
            "dispatch {:.2} ms, combine {:.2} ms, matmuls {:.2} ms{network}",
            self.dispatch_ms, self.combine_ms, self.matmul_ms
        );
        [division, format!("{rows}; {times}")]
    }

    /// Adds the times of the recorded step.
    fn add_times(&mut self, run: &Run, program: &Program) {
        let busy = computing(run);
        // The passes over a unit in which the experts have already computed.
        let mut computed: BTreeSet<(UnitId, Phase, u16)> = BTreeSet::new();
        let mut spans: Vec<&Span> = run.spans.iter().collect();
        spans.sort_by_key(|s| s.instr);
        for span in spans {
            let Some(instr) = program.instrs.get(span.instr.index()) else {
                continue;
            };
            let pass = (instr.unit, instr.phase, instr.micro_batch);
            let took = span.end.saturating_sub(span.start);
            if is_matmul(program, span.instr) {
                computed.insert(pass);
                self.matmul_ms += took.ms();
            } else if let Some(c) = exchange(program, &instr.op) {
                let back = match c.kind {
                    CollectiveKind::ReduceScatter | CollectiveKind::PeerReturn => true,
                    CollectiveKind::AllToAll => computed.contains(&pass),
                    _ => false,
                };
                let part = match back {
                    true => &mut self.combine_ms,
                    false => &mut self.dispatch_ms,
                };
                *part += took.ms();
                let of = self.exchanges.entry(c.kind).or_default();
                of.count += 1;
                of.bytes += c.expected_bytes();
                self.network_bytes += c.network_bytes();
                of.busy_ms += took.ms();
                of.exposed_ms += took.saturating_sub(overlap(&busy, span)).ms();
            }
        }
    }
}

/// Returns whether nothing crosses the network.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Returns what chooses experts.
fn routing(run: &Run, s: &Scenario) -> String {
    let forced = s.forced_routing.as_ref().map(|forced| &forced.routing);
    let predicted = s.moe.as_ref().map(|moe| &moe.routing);
    let known = match run.kind {
        RunKind::Sim => forced.or(predicted),
        _ => forced,
    };
    let text = known.and_then(|routing| serde_json::to_value(routing).ok());
    let text = text.as_ref().and_then(|value| value.as_str());
    text.unwrap_or("model").to_owned()
}

/// Returns the choices that find no row, where something else than a router chooses.
fn shortage(run: &Run, s: &Scenario) -> Option<RowShortage> {
    let known = run.kind == RunKind::Sim || s.forced_routing.is_some();
    s.row_shortage().filter(|_| known)
}

/// For a matmul of experts, returns the number of rows of its factor, and how many of them are
/// expected to be used.
fn of_experts(op: &BodyOp) -> Option<[u64; 2]> {
    let (routed, weight) = match op.op {
        OpKind::GroupedGemm(of) => (of.routed, false),
        OpKind::ScaledGroupedGemm(of) => (of.routed, false),
        OpKind::GroupedGemmWeightGrad(of) => (of.routed, true),
        OpKind::ScaledGroupedGemmWeightGrad(of) => (of.routed, true),
        _ => return None,
    };
    let shape = &op.inputs.first()?.shape;
    let (cols, all) = (shape.last().copied()?, shape.iter().product::<u64>());
    // Weight gradients do not count: with 8-bit factors, their rows are columns of the factor.
    let rows = if weight { 0 } else { all / cols.max(1) };
    Some([rows, if weight { 0 } else { routed.unwrap_or(rows) }])
}

/// Returns the rows that a rank reserves for a layer, and the rows that are expected to be used.
fn rows(program: &Program) -> [u64; 2] {
    let ops = program.kernels.iter().flat_map(|k| &k.body);
    ops.filter_map(of_experts)
        .fold([0, 0], |a, b| [a[0].max(b[0]), a[1].max(b[1])])
}

fn is_matmul(program: &Program, id: InstrId) -> bool {
    match program.instrs[id.index()].op {
        Op::Launch { kernel, .. } => {
            let body = &program.kernels[kernel.index()].body;
            body.iter().any(|op| of_experts(op).is_some())
        }
        _ => false,
    }
}

/// Returns a collective that carries tokens, their gradients or counts between the ranks among
/// which experts are divided.
fn exchange<'p>(program: &'p Program, op: &Op) -> Option<&'p Collective> {
    let Op::Collective { id, .. } = *op else {
        return None;
    };
    let c = &program.collectives[id.index()];
    let axes = program.communicators[c.comm.index()].axes;
    let carries = c.kind != CollectiveKind::Barrier && axes == AxisSet::of(AxisId::EP);
    carries.then_some(c)
}

/// Returns the intervals in which the compute stream is busy.
fn computing(run: &Run) -> Vec<(u64, u64)> {
    let on = run.spans.iter().filter(|s| s.stream == COMPUTE);
    let mut all: Vec<(u64, u64)> = on.map(|s| (s.start.0, s.end.0)).collect();
    intervals::union(&mut all)
}

/// Returns the part of a span's time that is within the intervals.
fn overlap(busy: &[(u64, u64)], span: &Span) -> Picos {
    let first = busy.partition_point(|(_, end)| *end <= span.start.0);
    let span = [(span.start.0, span.end.0)];
    Picos(intervals::overlap(&busy[first..], &span))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64) -> Span {
        let view = crate::testing::view(100);
        let mut span = view.run.spans[0];
        (span.start, span.end) = (Picos(start), Picos(end));
        span
    }

    #[test]
    fn time_next_to_kernels_counts_once() {
        let busy = [(0, 10), (20, 30)];
        assert_eq!(overlap(&busy, &span(5, 25)), Picos(10));
        assert_eq!(overlap(&busy, &span(10, 20)), Picos(0));
        assert_eq!(overlap(&busy, &span(40, 50)), Picos(0));
    }

    #[test]
    fn intervals_that_touch_are_one() {
        let mut view = crate::testing::view(100);
        view.run.spans = vec![span(20, 30), span(0, 10), span(5, 12)];
        for s in &mut view.run.spans {
            s.stream = COMPUTE;
        }
        let all = [(0, 12), (20, 30)];
        assert_eq!(computing(&view.run), all);
    }
}
