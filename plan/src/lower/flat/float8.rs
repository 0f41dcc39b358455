//! Weights that ranks gather in 8 bits: scales over all ranks, and casts of shards.
//!
//! The optimizer's launches find the largest absolute values of a rank's shards, by tensor; one
//! all-reduce makes them those of whole tensors; a kernel makes the scales, and each rank casts
//! its shards. Main weights are rounded to bfloat16 before, so that codes equal those of a bfloat16
//! weight that is cast after its gather.

use super::Flat;
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, CollectiveKind, DType, GroupId, Holds, ParamId, Part,
    RECIPROCAL_STRIDE, ReduceOp, Role, ShardOp, StreamId, UnitId,
};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::kernels::KernelLaunch;
use crate::lower::walk::Location;
use crate::program::{Phase, Rule};
use smallvec::smallvec;
use std::ops::Range;

/// Bytes of a scale.
const SCALE: u64 = DType::F32.size();

/// Buffers with a float32 for each of the program's scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales {
    amax: BufferId,
    scales: BufferId,
    inverses: BufferId,
}

impl Scales {
    /// Makes the buffers; `None` if no group is gathered in 8 bits.
    pub(super) fn new(out: &mut Emitter<'_>) -> Option<Self> {
        let ends = out.inputs.groups.iter().map(|g| g.scale_range().end);
        let count = u64::from(ends.max().unwrap_or(0));
        let mut buffer = |name, stride| {
            let holds = Holds::Named(name);
            out.persistent(
                Role::ModelWeight,
                count * stride * SCALE,
                DType::F32,
                UnitId(0),
                holds,
            )
        };
        (count > 0).then(|| Self {
            amax: buffer("maxima of weights", 1),
            scales: buffer("scales of weights", 1),
            inverses: buffer("reciprocals of scales", RECIPROCAL_STRIDE),
        })
    }

    pub(super) fn init(self, out: &mut Emitter<'_>) {
        out.b.at(UnitId(0), Phase::Init);
        for id in [self.amax, self.scales, self.inverses] {
            out.b.alloc(Rule::State, id);
        }
    }
}

/// Returns the part of a buffer of scales that belongs to a group.
fn of_group(out: &Emitter<'_>, buffer: BufferId, scales: &Range<u32>) -> Access {
    let at = |scale: u32| u64::from(scale) * SCALE;
    out.b.whole(buffer).part(at(scales.start)..at(scales.end))
}

impl Flat {
    /// Returns whether ranks gather any group in 8 bits.
    pub(crate) fn gathers_float8(&self) -> bool {
        self.scales.is_some()
    }

    /// Returns the reciprocal of a parameter's scale.
    ///
    /// # Panics
    /// If its group is not gathered in 8 bits.
    pub(crate) fn reciprocal(&self, inputs: &LoweringInputs<'_>, p: ParamId) -> Location {
        let (g, i) = inputs.home[p.index()];
        let scales = self.scales.expect("a group in 8 bits has scales");
        Location {
            buffer: scales.inverses,
            offset: u64::from(inputs.group(g).scales[i as usize]) * RECIPROCAL_STRIDE * SCALE,
            element: SCALE,
        }
    }

    /// Returns the maxima of a group, if the optimizer's launch finds them: in the native engine,
    /// unless moments have blocks, which would end where tensors do, and unless it is Muon's, which
    /// knows new weights only after the matmuls of a whole matrix.
    pub(super) fn maxima_with_main(&self, out: &Emitter<'_>, g: GroupId) -> Option<Access> {
        let (scales, state) = (self.scales?, self.state(g));
        let group = out.inputs.group(g);
        let blocks = || state.moments().any(|m| m.scales[0].is_some());
        let fused = out.inputs.engine.fused_optimizer && !group.muon;
        let found = state.w.is_float8() && fused && !blocks();
        found.then(|| of_group(out, scales.amax, &group.scale_range()))
    }

    /// Makes the scales of the weights as the optimizer has left them; `updated` says that it has
    /// run, and may have found the maxima. Communicates on the compute stream, as the gradient norm
    /// does. The first gather of a step casts shards, on its stream, where casts overlap with
    /// computation.
    pub(crate) fn refresh_float8(&self, out: &mut Emitter<'_>, updated: bool) {
        let Some(scales) = self.scales else { return };
        let (unit, phase) = (out.b.unit(), out.b.phase());
        for g in out.inputs.group_ids() {
            if !self.state(g).w.is_float8() {
                continue;
            }
            let group = out.inputs.group(g);
            if updated && self.maxima_with_main(out, g).is_some() {
                continue;
            }
            out.b.at(group.unit, Phase::Refresh);
            let slots = of_group(out, scales.amax, &group.scale_range());
            let (main, elements) = self.main_weights(out, g);
            out.run(KernelLaunch {
                rule: Rule::Refresh,
                op: ShardOp::ShardAmax,
                elements,
                dtype: DType::F32,
                stream: COMPUTE,
                reads: &[main],
                writes: &[slots],
            });
        }
        out.b.at(UnitId(0), Phase::Refresh);
        let [amax, made, inverses] =
            [scales.amax, scales.scales, scales.inverses].map(|id| out.b.whole(id));
        // Weights in 8 bits are those of all ranks of this axis.
        if let Some(comm) = self.comms.along(AxisId::DP_SHARD).reduce {
            out.collective(CollectiveLaunch {
                rule: Rule::Refresh,
                stream: COMPUTE,
                kind: CollectiveKind::AllReduce,
                comm,
                reduce: ReduceOp::Max,
                dtype: DType::F32,
                parts: smallvec![Part {
                    input: amax,
                    output: amax
                }],
            });
        }
        out.run(KernelLaunch {
            rule: Rule::Refresh,
            op: ShardOp::ShardScales { to: DType::F8E4m3 },
            elements: amax.bytes / SCALE,
            dtype: DType::F32,
            stream: COMPUTE,
            reads: &[amax],
            writes: &[made, inverses],
        });
        out.b.at(unit, phase);
    }

    /// Casts a group's M to codes.
    pub(super) fn cast_float8(
        &self,
        out: &mut Emitter<'_>,
        g: GroupId,
        to: Access,
        rule: Rule,
        stream: StreamId,
    ) {
        let Some(scales) = self.scales else { return };
        let by = of_group(out, scales.scales, &out.inputs.group(g).scale_range());
        let (main, elements) = self.main_weights(out, g);
        out.run(KernelLaunch {
            rule,
            op: ShardOp::ShardCast,
            elements,
            dtype: self.state(g).w,
            stream,
            reads: &[main, by],
            writes: &[to],
        });
    }

    /// Returns a group's M, and the number of its elements.
    ///
    /// # Panics
    /// If it has none: scenarios refuse 8-bit gathers without main weights.
    fn main_weights(&self, out: &Emitter<'_>, g: GroupId) -> (Access, u64) {
        let state = self.state(g);
        let main = state.main.expect("a group in 8 bits has main weights");
        (out.b.whole(main), self.optimizer_numel(state))
    }
}
