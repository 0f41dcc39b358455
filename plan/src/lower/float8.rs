//! Scales of parameters that ranks gather in 8 bits.

use super::builder::CollectiveLaunch;
use super::emitter::Emitter;
use super::inputs::LoweringInputs;
use super::kernels::KernelLaunch;
use super::walk::Location;
use crate::compile::tape::Tape;
use crate::ir::{
    Access, BufferId, COMPUTE, CollectiveKind, CommId, DType, Holds, ParamId, Part,
    RECIPROCAL_STRIDE, ReduceOp, Role, ShardOp, Source, StreamId, UnitId,
};
use crate::program::{Phase, Rule};
use crate::shard::Group;
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::ops::Range;

/// Size of a scale in bytes.
const SCALE: u64 = DType::F32.size();

/// Buffers with a float32 for each scale of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    amax: BufferId,
    scales: BufferId,
    inverses: BufferId,
}

impl Scales {
    /// Creates the buffers; `None` if no parameter is gathered in 8 bits, or if scales belong to
    /// blocks of a parameter, which ranks compute alone.
    pub(crate) fn new(out: &mut Emitter<'_>) -> Option<Self> {
        if out.inputs.scale_block().is_some() {
            return None;
        }
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

    pub(crate) fn init(self, out: &mut Emitter<'_>) {
        out.b.at(UnitId(0), Phase::Init);
        for id in [self.amax, self.scales, self.inverses] {
            out.b.alloc(Rule::State, id);
        }
    }

    /// Returns the amax buffers of scales with these indices.
    pub(crate) fn maxima(self, out: &Emitter<'_>, numbers: Range<u32>) -> Access {
        of_numbers(out, self.amax, numbers)
    }

    /// Returns the scales with these indices.
    pub(crate) fn scales(self, out: &Emitter<'_>, numbers: Range<u32>) -> Access {
        of_numbers(out, self.scales, numbers)
    }

    /// Returns the reciprocal of a parameter's scale.
    ///
    /// # Panics
    /// Panics if the parameter is not gathered in 8 bits.
    pub(crate) fn reciprocal(self, inputs: &LoweringInputs<'_>, p: ParamId) -> Location {
        let (g, i) = inputs.home[p.index()];
        let number = inputs.group(g).scale(i as usize);
        let number = number.expect("an 8-bit parameter has a scale");
        Location {
            buffer: self.inverses,
            offset: u64::from(number) * RECIPROCAL_STRIDE * SCALE,
            element: SCALE,
        }
    }

    /// Reduces the amax of ranks' shards to the amax of whole tensors over the ranks of a
    /// communicator, and computes all scales, on `stream`, which waits for the compute stream.
    pub(crate) fn make(self, out: &mut Emitter<'_>, comm: Option<CommId>, stream: StreamId) {
        out.within(UnitId(0), Phase::Refresh, |out| {
            out.b.join(Rule::Refresh, COMPUTE, stream);
            let [amax, made, inverses] =
                [self.amax, self.scales, self.inverses].map(|id| out.b.whole(id));
            if let Some(comm) = comm {
                out.collective(CollectiveLaunch {
                    rule: Rule::Refresh,
                    stream,
                    kind: CollectiveKind::AllReduce,
                    comm,
                    reduce: ReduceOp::Max,
                    dtype: DType::F32,
                    parts: smallvec![Part {
                        input: amax,
                        output: amax
                    }],
                    sent: None,
                });
            }
            out.run(KernelLaunch {
                rule: Rule::Refresh,
                op: ShardOp::ShardScales { to: DType::F8E4m3 },
                elements: amax.bytes / SCALE,
                dtype: DType::F32,
                stream,
                reads: &[amax],
                writes: &[made, inverses],
            });
        });
    }
}

/// Returns the range of a buffer of scales with these indices.
fn of_numbers(out: &Emitter<'_>, buffer: BufferId, numbers: Range<u32>) -> Access {
    let at = |number: u32| u64::from(number) * SCALE;
    out.b.whole(buffer).part(at(numbers.start)..at(numbers.end))
}

/// Gives parameters that one matmul reads (merged projections) a common scale, and renumbers the
/// scales.
pub(super) fn share_scales(tape: &Tape, groups: &mut [Group]) {
    if !groups.iter().any(Group::has_float8) {
        return;
    }
    // Number of elements, from the start of a parameter, that a kernel reads as one matrix.
    let mut reach: BTreeMap<u32, u64> = BTreeMap::new();
    for operand in &tape.operands {
        if let Source::Param(p) = operand.source {
            let end = reach.entry(p.0).or_default();
            *end = (*end).max(operand.offset + operand.bytes);
        }
    }
    let mut next = 0;
    for group in groups.iter_mut() {
        // Elements that the previous matrix still covers. A code is one byte.
        let mut covered = 0;
        let scales = group.scales.iter_mut().map(Option::as_mut);
        for (p, scale) in group.params.iter().zip(scales) {
            let Some(scale) = scale else { continue };
            if covered == 0 {
                next += 1;
            }
            *scale = next - 1;
            let numel = tape.params[p.index()].numel();
            let reached = reach.get(&p.0).copied().unwrap_or(0);
            covered = covered.max(reached).saturating_sub(numel);
        }
    }
}
