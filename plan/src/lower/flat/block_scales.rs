//! Scales of weights that ranks gather in 8 bits with a scale per block.
//!
//! Shards contain whole blocks, so each rank computes the scales of its blocks alone, in the kernel
//! that casts its shard. A gather sends them together with the codes. All matrices start at
//! multiples of a block's elements, so a scale has the position of its block: element
//! `n / block.numel()` belongs to the row of blocks around code `n`. Scales are not padded.
//!
//! Engines of frameworks do not gather scales: all ranks compute those of all blocks
//! (`block_maxima.rs`).

use super::Sharded;
use crate::ir::{Access, BufferId, GroupId, Holds, ParamId, Part, Role, ScaleBlock, StreamId};
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::walk::Location;

/// Buffers of reciprocals of the scales of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockScales {
    /// Blocks.
    pub(super) block: ScaleBlock,
    /// Those of this rank's shard; `None` if each gather casts it again, or if `everywhere`.
    shard: Option<BufferId>,
    /// Those of all shards.
    pub(super) full: BufferId,
    /// Whether all ranks keep those of all shards, which are not gathered.
    pub(super) everywhere: bool,
}

impl BlockScales {
    /// Creates the buffers of a group. `kept` means that the codes of the shard are kept between
    /// gathers, which run on `stream`.
    pub(super) fn new(
        out: &mut Emitter<'_>,
        g: GroupId,
        block: ScaleBlock,
        (kept, stream): (bool, StreamId),
    ) -> Self {
        let layout = &out.inputs.group(g).layout;
        let dtype = block.inverse_type();
        let bytes = |numel: u64| numel / block.numel() * dtype.size();
        let [full, shard] = [layout.full_numel(), layout.shard_numel()].map(bytes);
        let unit = out.inputs.group(g).unit;
        let holds = Holds::Named(match block {
            ScaleBlock::MX_COLUMN => "scales of columns of weights",
            _ => "scales of weights",
        });
        let (weight, gathered) = (Role::ModelWeight, Role::FullWeight);
        let everywhere = out.inputs.engine.framework;
        let sharded = kept && !everywhere;
        Self {
            block,
            shard: sharded.then(|| out.persistent(weight, shard, dtype, unit, holds)),
            full: match everywhere {
                true => out.persistent(weight, full, dtype, unit, holds),
                false => out.transient_of(gathered, full, dtype, stream, (g, holds)),
            },
            everywhere,
        }
    }

    /// Returns what lives for the whole run.
    pub(super) fn persistent(self) -> Option<BufferId> {
        match self.everywhere {
            true => Some(self.full),
            false => self.shard,
        }
    }

    /// Returns the buffer that a gather writes.
    pub(super) fn gathered(self) -> Option<BufferId> {
        (!self.everywhere).then_some(self.full)
    }

    /// Returns the gathered reciprocal of the scale of a parameter's first block.
    pub(super) fn first(self, inputs: &LoweringInputs<'_>, p: ParamId) -> Location {
        let element = self.block.inverse_type().size();
        Location {
            buffer: self.full,
            offset: inputs.flat_offset(p) / self.block.numel() * element,
            element,
        }
    }

    /// Returns the range that this rank computes.
    pub(super) fn own(self, out: &Emitter<'_>, sharded: Sharded) -> Access {
        match self.shard {
            Some(shard) => out.b.whole(shard),
            None => sharded.part(out.b.whole(self.full)),
        }
    }

    /// Returns the part of a gather that sends them.
    pub(super) fn part(self, out: &Emitter<'_>, sharded: Sharded) -> Option<Part> {
        let output = out.b.whole(self.gathered()?);
        Some(Part {
            input: self.own(out, sharded),
            output,
        })
    }
}
