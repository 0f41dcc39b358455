//! Scales of blocks that all ranks compute, for engines of frameworks.
//!
//! Transformer Engine's `quantize_master_weights` supports shards that split blocks: it reduces the
//! largest absolute values of all blocks, by rows and by columns, in bfloat16, and each rank
//! computes all scales, so that gathers send codes alone. Shards here do not split blocks, which
//! changes no value: the maximum over ranks is that of the rank with the block.

use super::Flat;
use super::block_scales::BlockScales;
use super::float8::ROUNDED;
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, CollectiveKind, DType, GroupId, Holds, Part, ReduceOp, Role,
    ShardOp, UnitId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::program::{Phase, Rule};
use smallvec::smallvec;

impl Flat {
    /// Returns the scales that all ranks compute, by rows and by columns of each group.
    fn scales_everywhere(&self) -> impl Iterator<Item = (GroupId, [BlockScales; 2])> {
        let states = (0..).map(GroupId).zip(&self.groups);
        states.filter_map(|(g, state)| {
            let scales = [state.scales?, state.columns?.scales];
            scales[0].everywhere.then_some((g, scales))
        })
    }

    /// Creates the buffer of the largest absolute values of all blocks, in bfloat16; `None` if
    /// ranks do not reduce them.
    pub(super) fn new_block_maxima(&self, out: &mut Emitter<'_>) -> Option<BufferId> {
        let all = self.scales_everywhere().flat_map(|(_, scales)| scales);
        let count: u64 = all.map(|scales| out.b.whole(scales.full).bytes).sum();
        let (bytes, holds) = (count * ROUNDED.size(), Holds::Named("maxima of blocks"));
        let role = Role::FullWeight;
        (count > 0).then(|| out.persistent(role, bytes, ROUNDED, UnitId(0), holds))
    }

    /// Computes the scales of all blocks after the optimizer step.
    pub(super) fn refresh_block_scales(&self, out: &mut Emitter<'_>) {
        let Some(maxima) = self.block_maxima else {
            return;
        };
        out.within(UnitId(0), Phase::Refresh, |out| {
            self.make_block_scales(out, maxima)
        });
    }

    /// Computes the scales of all blocks from `maxima`, which it allocates and frees.
    fn make_block_scales(&self, out: &mut Emitter<'_>, maxima: BufferId) {
        out.b.alloc(Rule::Refresh, maxima);
        let all = out.b.whole(maxima);
        let elements = all.bytes / ROUNDED.size();
        refresh(out, ShardOp::Zero, elements, &[], &[all]);
        let (mut at, mut made) = (all.offset, Vec::new());
        for (g, scales) in self.scales_everywhere() {
            out.within(out.inputs.group(g).unit, Phase::Refresh, |out| {
                let own = scales.map(|scales| {
                    let scales = out.b.whole(scales.full);
                    made.push(scales);
                    let bytes = scales.bytes * ROUNDED.size();
                    let of_group = all.part(at - all.offset..at - all.offset + bytes);
                    at += bytes;
                    self.state(g).sharded.part(of_group)
                });
                let (main, elements) = self.main_weights(out, g);
                let op = ShardOp::ShardBlockAmax {
                    through: ROUNDED,
                    block: scales[0].block,
                };
                refresh(out, op, elements, &[main], &own);
            });
        }
        // 8-bit weights belong to all ranks of this axis.
        if let Some(comm) = self.comms.along(AxisId::DP_SHARD).reduce {
            out.collective(CollectiveLaunch {
                rule: Rule::Refresh,
                stream: COMPUTE,
                kind: CollectiveKind::AllReduce,
                comm,
                reduce: ReduceOp::Max,
                dtype: ROUNDED,
                parts: smallvec![Part {
                    input: all,
                    output: all
                }],
                sent: None,
            });
        }
        let to = DType::F8E4m3;
        let op = ShardOp::ShardBlockScales { to };
        refresh(out, op, elements, &[all], &made);
        out.b.free(Rule::Refresh, maxima);
    }
}

/// Launches a kernel on the compute stream.
fn refresh(out: &mut Emitter<'_>, op: ShardOp, elements: u64, reads: &[Access], writes: &[Access]) {
    out.run(KernelLaunch {
        rule: Rule::Refresh,
        op,
        elements,
        dtype: ROUNDED,
        stream: COMPUTE,
        reads,
        writes,
    });
}
