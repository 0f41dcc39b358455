//! Kernels that sharding adds to those of the model: copies, casts, scaling, optimizer.

use super::builder::Builder;
use crate::ir::{
    Access, BodyOp, DType, Kernel, KernelClass, KernelId, NewtonSchulz, OpKind, Pieces, ShardOp,
    StreamId,
};
use crate::program::Rule;
use crate::units::{Bytes, Flops};
use smallvec::SmallVec;
use std::collections::HashMap;

/// Launch of a sharding kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelLaunch<'a> {
    pub(crate) rule: Rule,
    pub(crate) op: ShardOp,
    /// Number of elements, from which FLOPs are computed.
    pub(crate) elements: u64,
    pub(crate) dtype: DType,
    pub(crate) stream: StreamId,
    pub(crate) reads: &'a [Access],
    pub(crate) writes: &'a [Access],
}

const fn class(op: ShardOp) -> KernelClass {
    match op {
        ShardOp::Copy => KernelClass::Copy,
        ShardOp::MultiCopy | ShardOp::CopyOut { .. } | ShardOp::ChunkCat { .. } => {
            KernelClass::MultiCopy
        }
        ShardOp::Accumulate
        | ShardOp::SumPieces { .. }
        | ShardOp::Scale { .. }
        | ShardOp::ClipScale
        | ShardOp::ShardCast { .. }
        | ShardOp::ShardCastBlocks { .. }
        | ShardOp::ShardBlockScales { .. }
        | ShardOp::MuonApply { .. } => KernelClass::Pointwise,
        ShardOp::Zero => KernelClass::Fill,
        ShardOp::SumSquares
        | ShardOp::NanCheck
        | ShardOp::ShardAmax { .. }
        | ShardOp::ShardScales { .. }
        | ShardOp::ShardBlockAmax { .. } => KernelClass::FullReduce,
        ShardOp::AdamW { .. }
        | ShardOp::Lion { .. }
        | ShardOp::Sgd { .. }
        | ShardOp::Muon { .. }
        | ShardOp::MuonMomentum
        | ShardOp::Orthogonalize { .. }
        | ShardOp::RouterBias { .. } => KernelClass::Optimizer,
    }
}

/// Returns the FLOPs per element.
const fn flops(op: ShardOp) -> u64 {
    if let Some(update) = op.update() {
        return update.rule.flops() + sums(update.fused.pieces);
    }
    match op {
        ShardOp::Accumulate
        | ShardOp::Scale { .. }
        | ShardOp::ClipScale
        | ShardOp::ShardAmax { .. }
        | ShardOp::ShardScales { .. }
        | ShardOp::ShardBlockScales { .. }
        | ShardOp::ShardCast { .. } => 1,
        // The maximum and the cast, or two maxima.
        ShardOp::ShardCastBlocks { .. } | ShardOp::ShardBlockAmax { .. } => 2,
        ShardOp::SumSquares | ShardOp::MuonApply { .. } => 2,
        // The norm and the division by it.
        ShardOp::Orthogonalize { .. } => 3,
        ShardOp::SumPieces { ranks, .. } => 2 * ranks as u64,
        _ => 0,
    }
}

/// Returns the FLOPs that do not depend on the number of elements.
fn further_flops(op: ShardOp) -> u64 {
    match op {
        ShardOp::Muon { newton_schulz, .. } => newton_schulz.flops,
        ShardOp::Orthogonalize { matrix } => NewtonSchulz::of_one(matrix).flops,
        _ => 0,
    }
}

/// Returns the FLOPs per element to sum the pieces of a gradient.
const fn sums(pieces: Option<Pieces>) -> u64 {
    match pieces {
        Some(p) => 2 * p.ranks as u64,
        None => 0,
    }
}

/// Interned sharding kernels.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    known: HashMap<(ShardOp, u64, u64, u64, DType), KernelId>,
}

impl Kernels {
    /// Returns the kernel of a launch.
    pub(crate) fn get(&mut self, b: &mut Builder, launch: &KernelLaunch<'_>) -> KernelId {
        let sum = |a: &[Access]| a.iter().map(|x| x.bytes).sum::<u64>();
        let (op, elements, dtype) = (launch.op, launch.elements, launch.dtype);
        let again = match op {
            // Each intermediate result is read once.
            ShardOp::ShardCast { .. } => launch.writes.get(1..).unwrap_or(&[]),
            _ => &[],
        };
        let (read, written) = (sum(launch.reads) + sum(again), sum(launch.writes));
        *self
            .known
            .entry((op, elements, read, written, dtype))
            .or_insert_with(|| {
                b.kernel(Kernel {
                    name: op.name().to_owned(),
                    class: class(op),
                    flops: Flops(flops(op) * elements + further_flops(op)),
                    read: Bytes(read),
                    written: Bytes(written),
                    dtype,
                    body: vec![BodyOp {
                        op: OpKind::Shard(op),
                        inputs: SmallVec::new(),
                        outputs: SmallVec::new(),
                    }],
                    used_rows: None,
                })
            })
    }
}
