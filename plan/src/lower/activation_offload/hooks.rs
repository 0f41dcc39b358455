//! What hooks on saved tensors see under FSDP2: `OffloadActivations` of TRL around forward, loss
//! and backward, without the output layer.
//!
//! - A linear layer saves its input and a transposed view of its weight. The hook takes the view
//!   for an activation, because it is no `Parameter` and does not lie in the memory of a shard. It
//!   makes the view contiguous and offloads the copy. Compiled code saves parameters themselves,
//!   which stay on the device.
//! - A tensor that several layers save is copied once, but the later ones keep it on the device.
//!   The copy is copied back all the same, for the first one.
//! - The loss saves the logarithms of its probabilities.
//! - The output layer turns the hooks off. Blocks that are recomputed have hooks of their own.
//! - The limit of copies in flight is one of tensors that have been saved since. It also counts
//!   those that stay on the device: weights of norms, tensors that are saved again, and the
//!   targets.

use super::storages;
use crate::compile::tape::{Tape, TapeOp};
use crate::config::CompileMode;
use crate::ir::{
    KernelClass, KernelId, ModuleId, ModuleKind, Operand, ParamId, Source, StorageId, StorageRole,
};
use crate::lower::inputs::LoweringInputs;
use std::collections::{HashMap, HashSet};

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Hooks {
    /// Weights whose views are offloaded, by the position of the op of forward that saves them.
    pub(super) weights: HashMap<u32, Vec<ParamId>>,
    /// Tensors that stay on the device although they are copied.
    pub(super) kept: HashSet<StorageId>,
    /// Tensors that the output layer saves.
    pub(super) exempt: HashSet<StorageId>,
    /// Number of weights of norms that ops of forward save, by their position.
    pub(super) norms: HashMap<u32, u32>,
    /// How often matmuls save a tensor.
    times: HashMap<StorageId, u32>,
}

/// What matmuls of backward read, without those of recomputed blocks.
#[derive(Default)]
struct Needed {
    weights: HashSet<ParamId>,
    /// Number of matmuls that read a tensor.
    readers: HashMap<StorageId, u32>,
    recomputed: HashSet<ModuleId>,
}

impl Hooks {
    pub(super) fn of(inputs: &LoweringInputs<'_>) -> Self {
        let tape = inputs.tape;
        let eager = inputs.scenario.compile.mode == CompileMode::Off;
        let needed = Needed::of(tape);
        let several = needed.readers.iter().filter(|(_, n)| eager && **n > 1);
        let times: HashMap<StorageId, u32> = several.map(|(s, n)| (*s, *n)).collect();
        let mut new = Self {
            kept: times.keys().copied().collect(),
            times,
            ..Self::default()
        };
        let (mut seen, mut apart, mut head) = (HashSet::new(), 0u32, 0u32);
        // Weights that a recomputed block, the output layer or a loss in chunks reads.
        let is_apart = |m: ModuleId| {
            let kind = inputs.module_kind(m);
            let output = matches!(kind, ModuleKind::Head | ModuleKind::Loss);
            u32::from(output || needed.recomputed.contains(&m))
        };
        for (position, op) in (0u32..).zip(&tape.forward) {
            match *op {
                TapeOp::Enter(m) => {
                    apart += is_apart(m);
                    head += u32::from(inputs.module_kind(m) == ModuleKind::Head);
                }
                TapeOp::Exit(m) => {
                    apart -= is_apart(m);
                    head -= u32::from(inputs.module_kind(m) == ModuleKind::Head);
                }
                TapeOp::Launch { reads, writes, .. } if head > 0 => {
                    new.exempt.extend(storages(range(tape, reads, writes)));
                }
                TapeOp::Launch {
                    kernel,
                    reads,
                    writes,
                    ..
                } if eager && apart == 0 && is_matmul(tape, kernel) => {
                    let read = weights(range(tape, reads, writes));
                    let saved = read.filter(|p| needed.weights.contains(p) && seen.insert(*p));
                    let saved: Vec<ParamId> = saved
                        .filter(|p| tape.params[p.index()].packed.is_none())
                        .collect();
                    if !saved.is_empty() {
                        new.weights.insert(position, saved);
                    }
                }
                TapeOp::Launch {
                    kernel,
                    reads,
                    writes,
                    ..
                } if apart == 0 && is_norm(tape, kernel) => {
                    let read = weights(range(tape, reads, writes)).count();
                    new.norms.insert(position, read as u32);
                }
                _ => {}
            }
        }
        new
    }

    /// Returns how often a tensor is saved again after the first time, including tensors that are
    /// saved together with it: the loss saves its logarithms twice, and the targets.
    pub(super) fn again(&self, s: StorageId, role: StorageRole) -> u32 {
        match role {
            StorageRole::Logits => 2,
            _ => self.times.get(&s).map_or(0, |n| n - 1),
        }
    }
}

impl Needed {
    fn of(tape: &Tape) -> Self {
        let mut new = Self::default();
        let mut depth = 0u32;
        for op in &tape.backward {
            match *op {
                TapeOp::EnterRecompute(m) => {
                    depth += 1;
                    new.recomputed.insert(m);
                }
                TapeOp::ExitRecompute(_) => depth -= 1,
                TapeOp::Launch {
                    kernel,
                    reads,
                    writes,
                    ..
                } if depth == 0 && is_matmul(tape, kernel) => {
                    let operands = range(tape, reads, writes);
                    new.weights.extend(weights(operands));
                    for s in storages(operands) {
                        *new.readers.entry(s).or_default() += 1;
                    }
                }
                _ => {}
            }
        }
        new
    }
}

fn range(tape: &Tape, from: u32, to: u32) -> &[Operand] {
    &tape.operands[from as usize..to as usize]
}

fn is_norm(tape: &Tape, kernel: KernelId) -> bool {
    let class = &tape.kernels[kernel.index()].class;
    matches!(class, KernelClass::Norm { backward: false })
}

fn is_matmul(tape: &Tape, kernel: KernelId) -> bool {
    matches!(tape.kernels[kernel.index()].class, KernelClass::Gemm { .. })
}

/// Returns the parameters among operands.
fn weights(operands: &[Operand]) -> impl Iterator<Item = ParamId> {
    operands.iter().filter_map(|o| match o.source {
        Source::Param(p) => Some(p),
        _ => None,
    })
}
