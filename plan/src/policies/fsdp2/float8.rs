//! 8-bit all-gathers of weights, as torchao's `WeightWithDynamicFloat8CastTensor` does with
//! precomputed scales (`precompute_float8_dynamic_scale_for_fsdp`).
//!
//! After the optimizer step, one call computes the amax of all shards, one all-reduce turns them
//! into the amax of whole weights, and the scales follow from these. Each gather casts the float32
//! shards again, one weight after another on the copy-in stream (`fsdp_pre_all_gather`): eager code
//! multiplies by the scale, clamps in float32, and casts. Weights of the unit that stay in bfloat16
//! are part of the same gather, whose buffer then consists of bytes (`torch.uint8`). Nothing is
//! kept between gathers.
//!
//! Before the first step, torchao has no scales, so the first step all-reduces an amax per weight
//! and gather. Here, the first step starts with scales, too.

use super::Fsdp2;
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, DType, GroupId, Holds, HostWorkKind, Role, ShardOp,
    StreamId, UnitId,
};
use crate::lower::builder::NewBuffer;
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::program::{Phase, Rule};

/// Dtype of the main weights that are multiplied by scales. They are not rounded first.
const MAIN: DType = DType::F32;

/// The cast of a parameter's shard to 8 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cast {
    /// Index of the scale.
    scale: u32,
    /// The shard times the scale, and the same clamped to the range of the format, both in float32.
    between: [BufferId; 2],
    codes: BufferId,
}

/// Creates the buffers of the casts, by parameter of a group; `None` for parameters in other
/// dtypes.
pub(super) fn casts(out: &mut Emitter<'_>, g: GroupId, copy_in: StreamId) -> Vec<Option<Cast>> {
    let group = out.inputs.group(g).clone();
    let pool = out.inputs.persistent_pool;
    let numel = |i: usize| group.layout.local_numel(i, 0);
    let of_param = |(i, &p)| {
        let mut buffer = |role, dtype: DType, holds| {
            out.b.buffer(NewBuffer {
                role,
                bytes: numel(i) * dtype.size(),
                dtype,
                pool,
                stream: copy_in,
                unit: group.unit,
                holds,
            })
        };
        let scale = group.scale(i)?;
        let between = ["weight times scale", "weight within limits"]
            .map(|what| buffer(Role::Temporary, MAIN, Holds::Named(what)));
        Some(Cast {
            scale,
            between,
            codes: buffer(Role::GatherInput, DType::F8E4m3, Holds::Param(p)),
        })
    };
    group.params.iter().enumerate().map(of_param).collect()
}

impl Fsdp2 {
    /// Casts the shards of a group that are gathered in 8 bits, one after another, and replaces
    /// them by their codes. Returns the buffers to free after the gather.
    pub(super) fn cast_float8(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        shards: &mut [Access],
    ) -> Vec<BufferId> {
        let Some(scales) = self.scales else {
            return Vec::new();
        };
        let mut held = Vec::new();
        for (shard, cast) in shards.iter_mut().zip(&self.groups[g.index()].casts) {
            let Some(cast) = cast else { continue };
            let [scaled, limited] = cast.between;
            for id in [scaled, limited, cast.codes] {
                out.b.alloc(Rule::CopyIn, id);
            }
            let by = scales.scales(out, cast.scale..cast.scale + 1);
            let [codes, scaled, limited] = [cast.codes, scaled, limited].map(|id| out.b.whole(id));
            out.run(KernelLaunch {
                rule: Rule::CopyIn,
                op: ShardOp::ShardCast { through: MAIN },
                elements: codes.bytes,
                dtype: DType::F8E4m3,
                stream: self.copy_in,
                reads: &[*shard, by],
                writes: &[codes, scaled, limited],
            });
            for id in cast.between {
                out.b.free(Rule::CopyIn, id);
            }
            held.push(cast.codes);
            *shard = codes;
        }
        if !held.is_empty() {
            let count = held.len() as u16;
            out.b.host(Rule::CopyIn, HostWorkKind::Subclass, count);
        }
        held
    }

    /// Computes the scales of the weights after the optimizer step.
    pub(super) fn refresh_float8(&self, out: &mut Emitter<'_>) {
        let Some(scales) = self.scales else { return };
        let mut shards = Vec::new();
        for (state, group) in self.groups.iter().zip(&out.inputs.groups) {
            let of = state.shards.iter().enumerate();
            let of = of.filter(|(i, _)| group.scale(*i).is_some());
            shards.extend(of.map(|(_, id)| out.b.whole(*id)));
        }
        out.within(UnitId(0), Phase::Refresh, |out| {
            let slots = scales.maxima(out, 0..shards.len() as u32);
            out.run(KernelLaunch {
                rule: Rule::Refresh,
                op: ShardOp::ShardAmax { through: MAIN },
                elements: shards.iter().map(|a| a.bytes / MAIN.size()).sum(),
                dtype: DType::F32,
                stream: COMPUTE,
                reads: &shards,
                writes: &[slots],
            });
            scales.make(out, self.comms.along(AxisId::DP_SHARD).reduce, COMPUTE);
        });
    }
}
