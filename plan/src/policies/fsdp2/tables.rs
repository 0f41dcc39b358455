//! Temporary tables in the caching allocator for torch's copies into and out of collective buffers.
//! They exist while the host launches a copy.
//!
//! `split_with_sizes_copy` (copy-out) and `_chunk_cat` (copy-in of reductions) run one kernel over
//! many tensors. The kernel gets a tensor of 64-bit integers that describes the work of every
//! block. The tensor is freed when the host has launched the kernel (`pack_vecs` in torch 2.11
//! `ATen/native/cuda/TensorShape.cu`). Its size grows with the largest unit: 1 MiB for a root of
//! 525 M parameters over 8 ranks. The host fills it entry by entry, in a few nanoseconds each.

use crate::ir::{Access, COMPUTE, DType, HostWorkKind, ShardOp};
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::program::Rule;

/// Bytes that a block copies in one iteration: 16 for each of its 128 threads.
const TILE: u64 = 128 * 16;
/// Target number of blocks of a copy-out: twice the number that runs at once on the 132 SMs of an
/// H100 or H200, with 2,048 threads each. On other GPUs, this number and the tables differ
/// slightly.
const TARGET_BLOCKS: u64 = 132 * 2048 / 128 * 2;

/// Unit of the host work for tables, in bytes.
const KIB: u64 = 1024;

/// Returns the size of a number of entries in bytes.
const fn bytes(entries: u64) -> u64 {
    entries * 8
}

/// Returns the size of `_chunk_cat`'s table in bytes, given the bytes of each gradient's padded
/// shard in the dtype of the result.
fn chunk_cat(shards: &[u64]) -> u64 {
    let (tensors, blocks) = (shards.len() as u64, shards.iter().map(|b| b.div_ceil(TILE)));
    // Per tensor: source, size, padded shard and number of blocks. Per tensor and one more: start
    // in bytes and start in blocks. Per block: a tensor index.
    bytes(4 * tensors + 2 * (tensors + 1) + blocks.sum::<u64>())
}

/// Returns the size of `split_with_sizes_copy`'s table in bytes, given the bytes of each
/// parameter's padded shard on each of `ranks`.
fn copy_out(shards: &[u64], ranks: u64) -> u64 {
    let tensors = shards.len() as u64;
    let blocks = |tile: u64| shards.iter().map(|b| b.div_ceil(tile)).sum::<u64>();
    // Work beyond one tile per block is split over both ranks and iterations.
    let rounds = (blocks(TILE) * ranks).div_ceil(TARGET_BLOCKS);
    let root = rounds.isqrt();
    let ranks_a_block = (root + u64::from(root * root < rounds)).clamp(1, ranks);
    let tile = TILE * rounds.div_ceil(ranks_a_block).max(1);
    // Per tensor: destination, source and shard. Per tensor and one more: first block. Per block: a
    // tensor index.
    bytes(3 * tensors + (tensors + 1) + blocks(tile))
}

/// Returns the size of an operation's table in bytes. torch makes no table for dtypes that the
/// kernel does not convert.
fn size(
    out: &Emitter<'_>,
    op: ShardOp,
    reads: &[Access],
    writes: &[Access],
    shards: &[u64],
) -> Option<u64> {
    let dtype = |a: &Access| out.b.program().buffers[a.buffer.index()].dtype;
    match op {
        ShardOp::ChunkCat { .. } => {
            let (from, to) = (reads.first().map(dtype)?, writes.first().map(dtype)?);
            let alike = reads.iter().all(|r| dtype(r) == from);
            let converts = from == to || (from, to) == (DType::Bf16, DType::F32);
            (alike && converts).then(|| chunk_cat(shards))
        }
        ShardOp::CopyOut { ranks } => Some(copy_out(shards, u64::from(ranks))),
        _ => None,
    }
}

/// Launches a copy into or out of a collective's buffer on the compute stream, with its table.
/// `shards` are the sizes of each parameter's padded shard in that buffer, in bytes.
pub(super) fn run(
    out: &mut Emitter<'_>,
    rule: Rule,
    op: ShardOp,
    dtype: DType,
    reads: &[Access],
    writes: &[Access],
    shards: &[u64],
) {
    let scenario = out.inputs.scenario;
    let torch = out
        .inputs
        .engine
        .allocates_workspaces(&scenario.mesh.hardware);
    let bytes = if torch {
        size(out, op, reads, writes, shards)
    } else {
        None
    };
    let table = bytes.map(|bytes| out.scratch("copy table", bytes));
    if let Some(id) = table {
        let kib = out.b.whole(id).bytes.saturating_add(KIB / 2) / KIB;
        let kib = u16::try_from(kib).unwrap_or(u16::MAX);
        out.b.host(rule, HostWorkKind::CopyTable, kib);
        out.b.alloc(rule, id);
    }
    let ranks = match op {
        ShardOp::ChunkCat { ranks } | ShardOp::CopyOut { ranks } => u64::from(ranks),
        _ => 1,
    };
    let elements = shards.iter().sum::<u64>() / dtype.size() * ranks;
    out.run(KernelLaunch {
        rule,
        op,
        elements,
        dtype,
        stream: COMPUTE,
        reads,
        writes,
    });
    if let Some(id) = table {
        out.b.free(rule, id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of elements of the parameters of a root (embedding, norm, head) and of a block with
    /// hidden size 2,048.
    const ROOT: [u64; 3] = [128_256 * 2048, 2048, 128_256 * 2048];
    const BLOCK: [u64; 9] = [
        2048,
        2048,
        2048 * 2048,
        512 * 2048,
        512 * 2048,
        2048 * 2048,
        8192 * 2048,
        8192 * 2048,
        8192 * 2048,
    ];

    fn shards(params: &[u64], ranks: u64, size: u64) -> Vec<u64> {
        params.iter().map(|n| n / ranks * size).collect()
    }

    /// Sizes that torch 2.11 requested from its allocator on an H200
    /// (`torch.cuda.memory._snapshot`), as rank 0 of 8 and of 64. Copies out of two ranks belong to
    /// slices that an integer reshard kept.
    #[test]
    fn tables_are_as_large_as_those_that_torch_makes() {
        for (params, ranks, size) in [
            (&ROOT[..], 8, 1_026_216),
            (&BLOCK, 8, 119_248),
            (&ROOT, 64, 128_424),
            (&BLOCK, 64, 15_312),
        ] {
            assert_eq!(chunk_cat(&shards(params, ranks, 4)), size, "over {ranks}");
        }
        for (params, ranks, size) in [
            (&ROOT[..], 8, 32_176),
            (&BLOCK, 8, 15_160),
            (&ROOT, 2, 33_760),
            (&BLOCK, 2, 30_008),
            (&ROOT, 64, 5_952),
            (&BLOCK, 64, 2_168),
        ] {
            assert_eq!(
                copy_out(&shards(params, ranks, 2), ranks),
                size,
                "of {ranks}"
            );
        }
    }
}
