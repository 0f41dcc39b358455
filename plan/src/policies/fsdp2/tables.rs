//! Tables that torch's copies into and out of collective buffers take from the caching allocator
//! while they are launched.
//!
//! `split_with_sizes_copy` (copy-out) and `_chunk_cat` (copy-in of reductions) run one kernel over
//! many tensors. The work of every block is sent to it as one tensor of 64-bit integers, which is
//! freed when the host has launched the kernel (`pack_vecs` in torch 2.11
//! `ATen/native/cuda/TensorShape.cu`). It grows with the largest unit: 1 MiB for a root of 525 M
//! parameters over 8 ranks. The host fills it entry by entry, in a few nanoseconds each.

use crate::ir::{Access, COMPUTE, DType, HostWorkKind, ShardOp};
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::program::Rule;

/// Bytes that a block copies in one round: 16 for each of its 128 threads.
const TILE: u64 = 128 * 16;
/// Target number of blocks of a copy-out: twice those that run at once on the 132 multiprocessors
/// of 2,048 threads of an H100 or H200. Other GPUs have other numbers, and slightly different
/// tables.
const TARGET_BLOCKS: u64 = 132 * 2048 / 128 * 2;

/// Unit of host work on tables, in bytes.
const KIB: u64 = 1024;

/// Returns the bytes of a number of entries.
const fn bytes(entries: u64) -> u64 {
    entries * 8
}

/// Returns the bytes of `_chunk_cat`'s table, from the bytes of each gradient's padded shard in the
/// result's dtype.
fn chunk_cat(shards: &[u64]) -> u64 {
    let (tensors, blocks) = (shards.len() as u64, shards.iter().map(|b| b.div_ceil(TILE)));
    // Sources, sizes, padded shards and numbers of blocks; starts in bytes and blocks, one more; a
    // tensor for every block.
    bytes(4 * tensors + 2 * (tensors + 1) + blocks.sum::<u64>())
}

/// Returns the bytes of `split_with_sizes_copy`'s table, from the bytes of each parameter's padded
/// shard on each of `ranks`.
fn copy_out(shards: &[u64], ranks: u64) -> u64 {
    let tensors = shards.len() as u64;
    let blocks = |tile: u64| shards.iter().map(|b| b.div_ceil(tile)).sum::<u64>();
    // If a block has more work than a tile, it goes to ranks and to rounds alike.
    let rounds = (blocks(TILE) * ranks).div_ceil(TARGET_BLOCKS);
    let root = rounds.isqrt();
    let ranks_a_block = (root + u64::from(root * root < rounds)).clamp(1, ranks);
    let tile = TILE * rounds.div_ceil(ranks_a_block).max(1);
    // Destinations, sources, shards; first blocks, one more; a tensor for every block.
    bytes(3 * tensors + (tensors + 1) + blocks(tile))
}

/// Returns the bytes of an operation's table, if torch makes one: not for dtypes that its kernel
/// does not convert.
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
/// `shards` are the bytes of each parameter's padded shard there.
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

    /// Elements of the parameters of a root (embedding, norm, head) and of a block of 2,048
    /// columns.
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

    /// Sizes that torch 2.11 asked its allocator for on an H200 (`torch.cuda.memory._snapshot`), as
    /// rank 0 of 8 and of 64; copies out of two ranks are those of slices that an integer reshard
    /// kept.
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
