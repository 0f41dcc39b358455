//! Weight gradients that a GEMM accumulates into the sum of earlier micro-batches (`beta` = 1).
//!
//! A launch of a backward may do so if it is a GEMM and the only one that writes its range of the
//! gradients. A gradient with several uses, or one that another kernel completes, is added as a
//! whole.

use super::inputs::LoweringInputs;
use crate::compile::tape::TapeOp;
use crate::ir::{GroupId, Kernel, KernelId, OpKind, Operand, Place, Slot, Source};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Launches that may accumulate into a sum.
pub(crate) struct WeightGradients {
    /// Launches, by the index of the operand that they write.
    launches: HashSet<u32>,
    /// Accumulating kernels, by the kernel that overwrites.
    kernels: HashMap<KernelId, KernelId>,
}

/// Returns the group and the elements of the gradient that an operand refers to.
pub(crate) fn elements(inputs: &LoweringInputs<'_>, o: &Operand) -> Option<(GroupId, Range<u64>)> {
    let Source::Grad(p) = o.source else {
        return None;
    };
    let (g, _) = inputs.home[p.index()];
    let size = inputs.graph_type_of(p).size();
    let start = inputs.flat_offset(p) + o.offset / size;
    Some((g, start..start + o.bytes / size))
}

impl WeightGradients {
    /// Finds these launches in a backward, if compiled code accumulates in GEMMs.
    pub(crate) fn new(inputs: &LoweringInputs<'_>) -> Self {
        let mut new = Self {
            launches: HashSet::new(),
            kernels: HashMap::new(),
        };
        if !inputs.scenario.compile.epilogues {
            return new;
        }
        let tape = inputs.tape;
        new.launches
            .extend(alone(inputs, [&tape.forward, &tape.backward]));
        for variant in &tape.variants {
            new.launches
                .extend(alone(inputs, [&variant.forward, &variant.backward]));
        }
        new
    }

    /// Returns whether the launch that writes an operand may accumulate into it.
    pub(crate) fn may_add(&self, writes: u32) -> bool {
        self.launches.contains(&writes)
    }

    /// Returns the accumulating kernel, which `make` adds to the program if it is new. It reads its
    /// target after the `reads` operands of the overwriting kernel.
    pub(crate) fn adding(
        &mut self,
        kernel: KernelId,
        of: &Kernel,
        reads: usize,
        make: impl FnOnce(Kernel) -> KernelId,
    ) -> KernelId {
        *self.kernels.entry(kernel).or_insert_with(|| {
            let mut adding = of.clone();
            adding.read += adding.written;
            for op in &mut adding.body {
                if let Some(accumulate) = op.op.accumulates() {
                    *accumulate = true;
                }
                let before = op.outputs.first().map(|result| Slot {
                    place: Place::Read(reads as u8),
                    ..result.clone()
                });
                op.inputs.extend(before);
            }
            make(adding)
        })
    }
}

/// Returns the written operands of GEMMs that are the only ones to write their range of the
/// gradients in these passes of a micro-batch. A chunked loss has gradients in forward.
fn alone(inputs: &LoweringInputs<'_>, passes: [&[TapeOp]; 2]) -> Vec<u32> {
    let tape = inputs.tape;
    let mut named: Vec<(GroupId, Range<u64>)> = Vec::new();
    let mut candidates = Vec::new();
    for op in passes.into_iter().flatten() {
        let operands = match *op {
            TapeOp::Launch { reads, end, .. } => reads..end,
            TapeOp::Collective {
                collective,
                operands,
                ..
            } => operands..operands + collective.operands(),
            TapeOp::HostSizes { operand } => operand..operand + 1,
            _ => continue,
        };
        let all = &tape.operands[operands.start as usize..operands.end as usize];
        named.extend(all.iter().filter_map(|o| elements(inputs, o)));
        if let TapeOp::Launch {
            kernel,
            writes,
            end,
            ..
        } = *op
            && writes + 1 == end
            && overwrites(&tape.kernels[kernel.index()])
            && let Some(range) = elements(inputs, &tape.operands[writes as usize])
        {
            candidates.push((writes, range));
        }
    }
    let touches = |(g, r): &(GroupId, Range<u64>), (h, s): &(GroupId, Range<u64>)| {
        g == h && r.start < s.end && s.start < r.end
    };
    let alone = candidates
        .into_iter()
        .filter(|(_, range)| named.iter().filter(|other| touches(range, other)).count() == 1);
    alone.map(|(writes, _)| writes).collect()
}

/// Returns whether a kernel is one GEMM that overwrites all of its only result.
fn overwrites(kernel: &Kernel) -> bool {
    let [op] = &kernel.body[..] else {
        return false;
    };
    let mut kind: OpKind = op.op;
    let fresh = kind.accumulates().is_some_and(|accumulate| !*accumulate);
    fresh && op.outputs.len() == 1 && op.outputs[0].place == Place::Write(0) && kernel.fills(0)
}
