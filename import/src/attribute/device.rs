//! Attributes device work that no host operator launched: traces without host events, and whole
//! steps in CUDA graphs.
//!
//! Kernels of the loss, of backward and of the optimizer divide device time into steps and phases.
//! The order of all-gathers identifies units.

use super::kinds::{collective, is_nccl};
use super::places::Place;
use super::steps::{MicroBatch, Step, Steps};
use super::units::Units;
use crate::kineto::{DeviceEvent, DeviceKind, Trace};
use shardlab_plan::program::Phase;
use shardlab_plan::record::Work;

/// The stage of a step that the name of a kernel indicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    LossForward,
    Backward,
    Optimizer,
}

fn stage(name: &str) -> Option<Stage> {
    if is_nccl(name) {
        return (collective(name) == Some(Work::ReduceScatter)).then_some(Stage::Backward);
    }
    let lower = name.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|w| lower.contains(w));
    if has(&["adam", "fusedoptimizer", "fusedsgd", "fusedlamb"])
        || lower.contains("multi_tensor_apply")
            && has(&["pointwiseop", "addcdiv", "addcmul", "lerp"])
    {
        return Some(Stage::Optimizer);
    }
    if has(&["softmaxforward", "nll_loss_forward", "cross_entropy_f"]) {
        return Some(Stage::LossForward);
    }
    if has(&[
        "softmaxbackward",
        "nll_loss_backward",
        "cross_entropy_b",
        "bprop",
        "flash_bwd",
        "fmha_bwd",
        "_backward",
        "norm_grad",
    ]) {
        return Some(Stage::Backward);
    }
    None
}

/// Finds steps by their kernels, in device time.
pub(super) fn steps(trace: &Trace) -> Steps {
    let stages: Vec<(&DeviceEvent, Stage)> = trace
        .device
        .iter()
        .filter(|e| e.kind == DeviceKind::Kernel)
        .filter_map(|e| Some((e, stage(trace.name(e.name))?)))
        .collect();
    let mut all: Vec<Step> = Vec::new();
    let mut start = i64::MIN;
    let mut batches: Vec<MicroBatch> = Vec::new();
    let mut optimizer: Option<(i64, i64)> = None;
    let mut seen_loss = false;
    let close = |all: &mut Vec<Step>,
                 start: i64,
                 batches: &mut Vec<MicroBatch>,
                 optimizer: Option<(i64, i64)>| {
        if !batches.is_empty() {
            all.push(Step {
                start,
                micro_batches: std::mem::take(batches),
                optimizer,
                norm: false,
                is_cut_off: false,
            });
        }
    };
    for (event, stage) in stages {
        if stage != Stage::Optimizer
            && let Some((_, end)) = optimizer
        {
            close(&mut all, start, &mut batches, optimizer);
            (start, optimizer, seen_loss) = (end, None, false);
        }
        match stage {
            Stage::LossForward => {
                let begun = batches.last().is_some_and(|b| b.backward.is_none());
                if !begun {
                    // Forward begins after the last backward before its loss.
                    let from = batches.last().map_or(start, |b| b.end);
                    batches.push(MicroBatch {
                        forward: Some(from),
                        backward: None,
                        end: from,
                    });
                }
                seen_loss = true;
            }
            Stage::Backward => {
                if !seen_loss && batches.is_empty() {
                    batches.push(MicroBatch {
                        forward: Some(start),
                        backward: None,
                        end: start,
                    });
                }
                if let Some(batch) = batches.last_mut() {
                    batch.backward.get_or_insert(event.start);
                    batch.end = batch.end.max(event.end);
                }
            }
            Stage::Optimizer => {
                let from = optimizer.map_or(event.start, |o| o.0);
                optimizer = Some((from, event.end));
            }
        }
    }
    close(&mut all, start, &mut batches, optimizer);
    Steps {
        all,
        found_by: "kernels of loss, backward and optimizer (no host operator launches them)",
    }
}

/// Returns the places of all device work, by index.
pub(super) fn places(trace: &Trace, steps: &Steps, units: &mut Units) -> Vec<Option<Place>> {
    let gathers = Gathers::new(trace, steps, units);
    let place = |event: &DeviceEvent| {
        let step = steps.at(event.start)?;
        let (phase, micro_batch) = steps.all[step].phase(event.start);
        let phase = if phase == Phase::Start {
            Phase::Forward
        } else {
            phase
        };
        Some(Place {
            step: step as u32,
            unit: gathers.unit(event.start, phase),
            phase,
            micro_batch,
        })
    };
    trace.device.iter().map(place).collect()
}

/// Device times at which the use of a unit starts.
struct Gathers(Vec<(i64, u32)>);

impl Gathers {
    fn new(trace: &Trace, steps: &Steps, units: &mut Units) -> Self {
        let mut switches = Vec::new();
        let ends: Vec<i64> = trace
            .device
            .iter()
            .filter(|e| {
                is_nccl(trace.name(e.name))
                    && collective(trace.name(e.name)) == Some(Work::AllGather)
            })
            .map(|e| e.end)
            .collect();
        for step in &steps.all {
            for batch in &step.micro_batches {
                let (Some(from), Some(turn)) = (batch.forward, batch.backward) else {
                    continue;
                };
                let within =
                    |a: i64, b: i64| ends.iter().copied().filter(move |e| (a..b).contains(e));
                let forward: Vec<i64> = within(from, turn).collect();
                let backward: Vec<i64> = within(turn, batch.end).collect();
                // The first unit is the root if it is not gathered again.
                let root = backward.len() + 1 == forward.len();
                let ids: Vec<u32> = (0..forward.len())
                    .map(|k| {
                        if root && k == 0 {
                            Units::ROOT
                        } else {
                            units.id(&format!("unit.{k}"))
                        }
                    })
                    .collect();
                switches.extend(forward.iter().copied().zip(ids.iter().copied()));
                switches.extend(backward.iter().copied().zip(ids.iter().rev().copied()));
            }
        }
        switches.sort_unstable();
        Self(switches)
    }

    fn unit(&self, at: i64, phase: Phase) -> u32 {
        if !matches!(phase, Phase::Forward | Phase::Backward) {
            return Units::ROOT;
        }
        let i = self.0.partition_point(|s| s.0 <= at);
        i.checked_sub(1).map_or(Units::ROOT, |i| self.0[i].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_tell_their_stage() {
        for (name, expected) in [
            (
                "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
                Some(Stage::Backward),
            ),
            ("ncclDevKernel_AllGather_RING_LL", None),
            (
                "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
                Some(Stage::Optimizer),
            ),
            (
                "void cunn_SoftMaxForward<4, float>",
                Some(Stage::LossForward),
            ),
            ("void cunn_SoftMaxBackward<4, float>", Some(Stage::Backward)),
            ("cudnn_sdpa_flash_bprop", Some(Stage::Backward)),
            (
                "elementwise_kernel<copy_kernel(TensorIteratorBase&)::{lambda()#3}>",
                None,
            ),
            ("nvjet_sm90", None),
        ] {
            assert_eq!(stage(name), expected, "{name}");
        }
    }
}
