//! Codes of gathered weights by columns.
//!
//! A matmul with the transpose of a weight reads blocks along columns. Blocks of 32 elements of a
//! row (recipe mxfp8) do not contain them, so a transposed copy of the codes has no scales that the
//! matmul could read. Ranks cast their shards a second time, with scales of parts of columns.
//! Forward gathers the codes by rows, backward those by columns: Transformer Engine does the same
//! (`MXFP8Tensor.fsdp_pre_all_gather`), and so does Megatron-FSDP. Both are matrices in the layout
//! of the weight.

use super::Flat;
use super::block_scales::BlockScales;
use crate::compile::tape::TapeOp;
use crate::ir::{Access, BufferId, DType, GroupId, ParamId, Part, Role, Source, StreamId};
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::walk::Location;
use crate::program::Rule;

/// Calls `f` with each weight that a kernel of a micro-batch's backward reads, including recomputed
/// forwards, and whether it reads codes by columns.
pub(crate) fn each_read_in_backward(
    inputs: &LoweringInputs<'_>,
    micro_batch: usize,
    mut f: impl FnMut(GroupId, bool),
) {
    for op in inputs.tape.backward_of(micro_batch) {
        let TapeOp::Launch { reads, writes, .. } = *op else {
            continue;
        };
        for operand in &inputs.tape.operands[reads as usize..writes as usize] {
            let (p, columns) = match operand.source {
                Source::Param(p) => (p, false),
                Source::ColumnCodes(p) => (p, true),
                _ => continue,
            };
            f(inputs.home[p.index()].0, columns);
        }
    }
}

/// Buffers of a group's codes by columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// Codes of this rank's shard; `None` if each gather casts it again.
    shard: Option<BufferId>,
    /// Gathered codes.
    full: BufferId,
    /// Scales of both.
    pub(super) scales: BlockScales,
}

impl Columns {
    /// Creates the buffers of a group with these scales of rows; `None` if the transpose has the
    /// same blocks. `kept` means that the codes of the shard are kept between gathers, whose casts
    /// run on `stream`.
    pub(super) fn new(
        out: &mut Emitter<'_>,
        g: GroupId,
        rows: BlockScales,
        (kept, stream): (bool, StreamId),
    ) -> Option<Self> {
        let block = rows.block.of_transpose();
        if block == rows.block {
            return None;
        }
        let group = out.inputs.group(g);
        let (unit, layout) = (group.unit, &group.layout);
        let [full, shard] = [layout.full_numel(), layout.shard_numel()];
        let (dtype, holds) = (DType::F8E4m3, crate::ir::Holds::Group(g));
        Some(Self {
            shard: kept.then(|| out.persistent(Role::ModelWeight, shard, dtype, unit, holds)),
            full: out.transient(Role::FullWeight, full, dtype, stream, g),
            scales: BlockScales::new(out, g, block, (kept, stream)),
        })
    }

    /// Returns what lives for the whole run.
    pub(super) fn persistent(self) -> impl Iterator<Item = BufferId> {
        self.shard.into_iter().chain(self.scales.persistent())
    }

    /// Returns the buffers that a gather writes.
    fn gathered(self) -> impl Iterator<Item = BufferId> {
        [self.full].into_iter().chain(self.scales.gathered())
    }
}

impl Flat {
    /// Returns whether backward reads codes of a group's weights by columns.
    pub(crate) fn has_columns(&self, g: GroupId) -> bool {
        self.state(g).columns.is_some()
    }

    /// Returns the buffers that gathers of a group's codes by columns write.
    pub(crate) fn gathered_columns(&self, g: GroupId) -> impl Iterator<Item = BufferId> + use<> {
        let columns = self.state(g).columns;
        columns.into_iter().flat_map(Columns::gathered)
    }

    /// Returns the gathered codes of a parameter by columns, and the reciprocal of the first scale.
    ///
    /// # Panics
    /// Panics if its group has none.
    pub(crate) fn columns(&self, inputs: &LoweringInputs<'_>, p: ParamId) -> [Location; 2] {
        let (g, _) = inputs.home[p.index()];
        let columns = self.state(g).columns;
        let columns = columns.expect("a weight with scales of parts of columns");
        let codes = Location {
            buffer: columns.full,
            offset: inputs.flat_offset(p),
            element: 1,
        };
        [codes, columns.scales.first(inputs, p)]
    }

    /// Casts a group's shard to codes by columns, if they are kept.
    pub(super) fn cast_columns(&self, out: &mut Emitter<'_>, g: GroupId, rule: Rule, on: StreamId) {
        let columns = self.state(g).columns;
        if let Some((columns, shard)) = columns.and_then(|c| Some((c, c.shard?))) {
            let to = (out.b.whole(shard), columns.scales);
            self.cast_blocks(out, g, to, rule, on);
        }
    }

    /// Issues the gather of a group's codes by columns on the gather stream, as `Flat::gather` does
    /// for the codes by rows.
    pub(crate) fn gather_columns(
        &self,
        out: &mut Emitter<'_>,
        rule: Rule,
        g: GroupId,
        stale: bool,
    ) {
        let state = self.state(g);
        let (Some(columns), Some(comm)) = (state.columns, state.sharded.comms.gather) else {
            return;
        };
        let output = out.b.whole(columns.full);
        let input: Access = match columns.shard {
            Some(shard) => out.b.whole(shard),
            None => state.sharded.part(output),
        };
        if stale || columns.shard.is_none() {
            let to = (input, columns.scales);
            self.cast_blocks(out, g, to, Rule::CopyIn, self.streams.copy_in);
        }
        let codes = Part { input, output };
        self.launch_gather(out, rule, (g, comm), codes, Some(columns.scales));
    }
}
