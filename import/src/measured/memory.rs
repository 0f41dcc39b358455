//! Memory of a step, from the profiler's own events (`profile_memory=True`).

use super::names::IMPORTED;
use super::{Instr, StepTime, window};
use crate::attribute::{Attributed, Place, Step, Units};
use crate::kineto::Trace;
use crate::names::Names;
use shardlab_plan::ir::{COMPUTE, InstrId, Role, UnitId};
use shardlab_plan::program::Phase;
use shardlab_plan::record::{MemoryReport, MemorySample, PeakAt};
use shardlab_plan::units::{Bytes, Picos};
use std::collections::{BTreeMap, HashMap};

/// Name of the owner of memory allocated before the trace began.
const BEFORE: &str = "before the trace";

/// Returns the role of memory from the place of its allocation: the operators around it (outermost
/// last) and the phase.
#[must_use]
pub(crate) fn role_at<'a>(phase: Phase, mut around: impl Iterator<Item = &'a str>) -> Role {
    let found = around.find_map(|name| {
        Some(match name {
            n if n.starts_with("FSDP::all_gather_copy_out") => Role::FullWeight,
            n if n.starts_with("FSDP::all_gather") || n.starts_with("fsdp::all_gather") => {
                Role::GatherBuffer
            }
            n if n.starts_with("FSDP::post_backward_reduce") => Role::ReduceInput,
            // Gradients of micro-batches that do not reduce.
            n if n.starts_with("FSDP::post_backward_accumulate") => Role::FullGrad,
            n if n.ends_with("AccumulateGrad") => Role::FullGrad,
            n if n.starts_with("c10d::_reduce_scatter")
                || n.starts_with("c10d::reduce_scatter") =>
            {
                Role::ReduceOutput
            }
            n if n.starts_with("c10d::") => Role::GatherBuffer,
            n if n.contains("cross_entropy") || n.contains("log_softmax") => Role::Logits,
            _ => return None,
        })
    });
    found.unwrap_or(match phase {
        Phase::Forward | Phase::Recompute => Role::Activation,
        Phase::Start => Role::Input,
        Phase::Optimizer | Phase::Clip => Role::OptimizerState,
        Phase::Refresh => Role::ModelWeight,
        _ => Role::Temporary,
    })
}

/// Returns the peaks of allocated and reserved bytes within a step.
pub(super) fn peak(trace: &Trace, steps: &[Step], step: u32) -> (u64, u64) {
    let (from, to) = window(steps, step);
    let within = trace.memory.iter().filter(|m| m.at >= from && m.at < to);
    within.fold((0, 0), |p, m| (p.0.max(m.allocated), p.1.max(m.reserved)))
}

/// A tensor that the model's code allocates in the first micro-batch of a step, and frees in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Bytes.
    pub bytes: u64,
    /// Unit, an index into [`super::Measured::units`].
    pub unit: u32,
    /// Whether forward allocates it.
    pub in_forward: bool,
    /// Whether the engine takes it over, as it does with a gradient that it reduces.
    pub is_gradient: bool,
    /// Host time of the allocation, since the trace's start.
    pub from: Picos,
    /// Host time of the free.
    pub to: Picos,
}

/// Returns the activations of the shown step, in the order of their frees. Memory that is not freed
/// within the micro-batch, such as a gradient that is accumulated, is not an activation.
pub(super) fn activations(
    trace: &Trace,
    a: &Attributed,
    shown: Option<StepTime>,
    origin: i64,
) -> Vec<Activation> {
    let Some(shown) = shown else {
        return Vec::new();
    };
    let (from, to) = window(&a.steps.all, shown.step);
    let within = trace.memory.iter().filter(|m| m.at >= from && m.at < to);
    let time = |at: i64| Picos((at - origin).max(0).cast_unsigned() * 1000);
    let mut live: HashMap<u64, Activation> = HashMap::new();
    let mut all = Vec::new();
    let mut micro_batch = 0;
    for event in within {
        let op = a.tree.at(trace, event.thread, event.at);
        let place = op.and_then(|o| a.host[o]);
        micro_batch = place.map_or(micro_batch, |p| p.micro_batch);
        let around = op.into_iter().flat_map(|o| a.tree.around(o));
        let names = around.map(|o| trace.name(trace.host[o].name));
        if event.bytes < 0 {
            // Python frees tensors outside of operators.
            let role = place.map(|p| role_at(p.phase, names));
            let freed = live.remove(&event.address).filter(|_| micro_batch == 0);
            all.extend(freed.map(|f| Activation {
                is_gradient: !f.in_forward && role == Some(Role::ReduceInput),
                to: time(event.at),
                ..f
            }));
            continue;
        }
        let Some(place) = place else { continue };
        let role = role_at(place.phase, names);
        let in_forward = match (place.phase, role) {
            (Phase::Forward, Role::Activation | Role::Logits) => true,
            (
                Phase::Backward | Phase::Recompute,
                Role::Activation | Role::Temporary | Role::Logits,
            ) => false,
            _ => continue,
        };
        if place.micro_batch == 0 {
            let activation = Activation {
                bytes: event.bytes.cast_unsigned(),
                unit: place.unit,
                in_forward,
                is_gradient: false,
                from: time(event.at),
                to: Picos::ZERO,
            };
            live.insert(event.address, activation);
        }
    }
    all
}

/// Returns the memory of the shown step. Its samples get new instructions, numbered after those of
/// device work.
pub(super) fn build(
    trace: &Trace,
    a: &Attributed,
    shown: Option<StepTime>,
    origin: i64,
    instrs: &mut Vec<Instr>,
    table: &mut Names,
) -> MemoryReport {
    let mut report = empty(trace);
    let Some(shown) = shown.filter(|_| !trace.memory.is_empty()) else {
        return report;
    };
    let (from, to) = window(&a.steps.all, shown.step);
    let before = trace.memory.iter().rfind(|m| m.at < from);
    let first = trace.memory.iter().find(|m| m.at >= from);
    let at_rest = before.map_or_else(
        || first.map_or(0, |m| m.allocated.saturating_add_signed(-m.bytes)),
        |m| m.allocated,
    );
    report.persistent = Bytes(at_rest);
    let mut live: HashMap<u64, (u64, u32, Role)> = HashMap::new();
    let mut peak: Option<(u64, MemorySample, Place)> = None;
    let mut next = instrs.iter().map(|i| i.id.0 + 1).max().unwrap_or(0);
    for event in &trace.memory {
        if event.at >= to {
            break;
        }
        let op = a.tree.at(trace, event.thread, event.at);
        let place = op.and_then(|o| a.host[o]).unwrap_or(Place {
            step: shown.step,
            unit: Units::ROOT,
            phase: Phase::Start,
            micro_batch: 0,
        });
        let around = op
            .into_iter()
            .flat_map(|o| a.tree.around(o))
            .map(|o| trace.name(trace.host[o].name));
        let role = role_at(place.phase, around);
        if event.bytes >= 0 {
            live.insert(
                event.address,
                (event.bytes.cast_unsigned(), place.unit, role),
            );
        } else {
            live.remove(&event.address);
        }
        if event.at < from {
            continue;
        }
        let id = InstrId(next);
        next += 1;
        instrs.push(Instr {
            id,
            name: table.number(if event.bytes >= 0 { "alloc" } else { "free" }),
            ranks: 0,
            rule: IMPORTED,
            work: None,
            role: Some(role),
            unit: UnitId(place.unit as _),
            phase: place.phase,
            micro_batch: place.micro_batch,
            stream: COMPUTE,
            bytes: event.bytes.unsigned_abs(),
            flops: 0,
        });
        let sample = MemorySample {
            instr: id,
            time: Picos((event.at - origin).max(0).cast_unsigned() * 1000),
            allocated: Bytes(event.allocated),
            reserved: Bytes(event.reserved),
        };
        report.peak_reserved = report.peak_reserved.max(sample.reserved);
        report.timeline.push(sample);
        if peak.is_none_or(|p| event.allocated > p.0) {
            peak = Some((event.allocated, sample, place));
            (report.by_role, report.by_unit) = shares(&live, event.allocated, a.units.names());
        }
    }
    if let Some((allocated, sample, place)) = peak {
        report.peak_allocated = Bytes(allocated);
        report.at = PeakAt {
            step: 0,
            instr: sample.instr,
            time: sample.time,
            phase: place.phase,
            unit: UnitId(place.unit as _),
            micro_batch: place.micro_batch,
        };
    }
    report
}

fn empty(trace: &Trace) -> MemoryReport {
    MemoryReport {
        peak_allocated: Bytes::ZERO,
        peak_reserved: Bytes::ZERO,
        peak_device: Bytes::ZERO,
        persistent: Bytes::ZERO,
        capacity: trace.head.device_bytes.map(Bytes),
        at: PeakAt {
            step: 0,
            instr: InstrId(0),
            time: Picos::ZERO,
            phase: Phase::Start,
            unit: UnitId(0),
            micro_batch: 0,
        },
        by_role: Vec::new(),
        by_unit: Vec::new(),
        retries: 0,
        timeline: Vec::new(),
    }
}

type Shares = (Vec<(Role, Bytes)>, Vec<(String, Bytes)>);

/// Returns the allocated bytes by role and by unit, largest first. Memory from before the trace has
/// no known role: it contains weights, optimizer states, and anything else that a job keeps.
fn shares(live: &HashMap<u64, (u64, u32, Role)>, allocated: u64, units: &[String]) -> Shares {
    let mut roles: BTreeMap<Role, u64> = BTreeMap::new();
    let mut of_units: BTreeMap<&str, u64> = BTreeMap::new();
    let mut known = 0;
    for (bytes, unit, role) in live.values() {
        *roles.entry(*role).or_default() += bytes;
        *of_units.entry(&units[*unit as usize]).or_default() += bytes;
        known += bytes;
    }
    let before = allocated.saturating_sub(known);
    if before > 0 {
        of_units.insert(BEFORE, before);
    }
    let mut by_role: Vec<(Role, Bytes)> = roles.into_iter().map(|(r, b)| (r, Bytes(b))).collect();
    let mut by_unit: Vec<(String, Bytes)> = of_units
        .into_iter()
        .map(|(u, b)| (u.to_owned(), Bytes(b)))
        .collect();
    by_role.sort_by_key(|(_, b)| std::cmp::Reverse(*b));
    by_unit.sort_by_key(|(_, b)| std::cmp::Reverse(*b));
    (by_role, by_unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accumulated_gradients_have_a_role() {
        let at = |around: &[&'static str]| role_at(Phase::Backward, around.iter().copied());
        for name in [
            "FSDP::post_backward_accumulate (layers.0)",
            "torch::autograd::AccumulateGrad",
        ] {
            assert_eq!(at(&["aten::_to_copy", name]), Role::FullGrad, "{name}");
        }
        assert_eq!(at(&["aten::mm"]), Role::Temporary);
    }
}
