//! Weights that ranks gather in 8 bits: scales over all ranks, and casts of shards.
//!
//! The optimizer's launches compute the amax of a rank's shards per tensor. One all-reduce turns
//! these into the amax of whole tensors, and a kernel computes the scales. Each rank then casts its
//! shards. Main weights are first rounded to bfloat16, so that the codes equal those of a bfloat16
//! weight that is cast after its gather.
//!
//! With a scale per block, ranks have whole blocks, so the cast itself computes the scales
//! (`block_scales.rs`). If blocks of the transpose are others, ranks also have codes by columns
//! (`columns.rs`).

use super::Flat;
use super::block_scales::BlockScales;
use crate::ir::{Access, AxisId, COMPUTE, DType, GroupId, ParamId, ShardOp, StreamId};
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::kernels::KernelLaunch;
use crate::lower::walk::Location;
use crate::program::{Phase, Rule};

/// Dtype to which main weights are rounded before the amax and the cast.
pub(super) const ROUNDED: DType = DType::Bf16;

impl Flat {
    /// Returns whether ranks gather any group in 8 bits with scales that depend on all ranks.
    pub(crate) fn reduces_scales(&self) -> bool {
        self.scales.is_some() || self.block_maxima.is_some()
    }

    /// Returns the reciprocal of a parameter's scale, or of that of its first block.
    ///
    /// # Panics
    /// Panics if its group is not gathered in 8 bits.
    pub(crate) fn reciprocal(&self, inputs: &LoweringInputs<'_>, p: ParamId) -> Location {
        let (g, _) = inputs.home[p.index()];
        if let Some(scales) = self.state(g).scales {
            return scales.first(inputs, p);
        }
        let scales = self.scales.expect("an 8-bit group has scales");
        scales.reciprocal(inputs, p)
    }

    /// Returns the amax buffers of a group if the optimizer's launch computes them. This only
    /// happens in the native engine. It does not happen for block-quantized moments, whose blocks
    /// would end where tensors do, or for Muon, which knows new weights only after the matmuls of a
    /// whole matrix.
    pub(super) fn maxima_with_main(&self, out: &Emitter<'_>, g: GroupId) -> Option<Access> {
        let (scales, state) = (self.scales?, self.state(g));
        let group = out.inputs.group(g);
        let blocks = || state.moments().any(|m| m.scales[0].is_some());
        let fused = out.inputs.engine.fused_optimizer && !group.muon;
        let found = state.w.is_float8() && fused && !blocks();
        found.then(|| scales.maxima(out, group.scale_range()))
    }

    /// Computes the scales of the weights after their updates. `updated` means that the optimizer
    /// has run, and may have computed the amax. Ranks reduce these on `stream`. The first gather of
    /// a step casts shards on its stream, so that the casts overlap with computation.
    pub(crate) fn refresh_float8(&self, out: &mut Emitter<'_>, updated: bool, stream: StreamId) {
        self.refresh_block_scales(out);
        let Some(scales) = self.scales else { return };
        for g in out.inputs.group_ids() {
            if !self.state(g).w.is_float8() {
                continue;
            }
            let group = out.inputs.group(g);
            if updated && self.maxima_with_main(out, g).is_some() {
                continue;
            }
            out.within(group.unit, Phase::Refresh, |out| {
                let slots = scales.maxima(out, group.scale_range());
                let (main, elements) = self.main_weights(out, g);
                out.run(KernelLaunch {
                    rule: Rule::Refresh,
                    op: ShardOp::ShardAmax { through: ROUNDED },
                    elements,
                    dtype: DType::F32,
                    stream: COMPUTE,
                    reads: &[main],
                    writes: &[slots],
                });
            });
        }
        // 8-bit weights belong to all ranks of this axis.
        scales.make(out, self.comms.along(AxisId::DP_SHARD).reduce, stream);
    }

    /// Casts all shards of 8-bit weights on the compute stream, for engines that cast once, after
    /// the optimizer step.
    pub(crate) fn cast_shards_float8(&self, out: &mut Emitter<'_>) {
        for g in out.inputs.group_ids() {
            let state = self.state(g);
            if let Some(rest) = state.weight.filter(|_| state.w.is_float8()) {
                out.within(out.inputs.group(g).unit, Phase::Refresh, |out| {
                    let shard = out.b.whole(rest);
                    self.cast_float8(out, g, shard, Rule::Refresh, COMPUTE);
                    self.cast_columns(out, g, Rule::Refresh, COMPUTE);
                });
            }
        }
    }

    /// Casts M of a group to 8-bit codes, with their scales if these belong to blocks.
    pub(super) fn cast_float8(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        to: Access,
        rule: Rule,
        stream: StreamId,
    ) {
        if let Some(scales) = self.state(g).scales {
            return self.cast_blocks(out, g, (to, scales), rule, stream);
        }
        let Some(scales) = self.scales else { return };
        let by = scales.scales(out, out.inputs.group(g).scale_range());
        let (main, elements) = self.main_weights(out, g);
        out.run(KernelLaunch {
            rule,
            op: ShardOp::ShardCast { through: ROUNDED },
            elements,
            dtype: self.state(g).w,
            stream,
            reads: &[main, by],
            writes: &[to],
        });
    }

    /// Casts M of a group to 8-bit codes with a scale per block.
    pub(super) fn cast_blocks(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        (to, scales): (Access, BlockScales),
        rule: Rule,
        stream: StreamId,
    ) {
        let (main, elements) = self.main_weights(out, g);
        let inverses = scales.own(out, self.state(g).sharded);
        out.run(KernelLaunch {
            rule,
            op: ShardOp::ShardCastBlocks {
                through: ROUNDED,
                block: scales.block,
            },
            elements,
            dtype: self.state(g).w,
            stream,
            reads: &[main],
            writes: &[to, inverses],
        });
    }

    /// Returns M of a group and its number of elements.
    ///
    /// # Panics
    /// Panics if the group has no M: scenarios reject 8-bit gathers without main weights.
    pub(super) fn main_weights(&self, out: &Emitter<'_>, g: GroupId) -> (Access, u64) {
        let state = self.state(g);
        let main = state.main.expect("an 8-bit group has main weights");
        (out.b.whole(main), self.optimizer_numel(state))
    }
}
