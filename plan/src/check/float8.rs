//! 8-bit matmuls: their factors are read with the scales that they were cast with.
//!
//! The pass follows the instructions in issue order. The rules about races prove that kernels also
//! run in this order.

use super::describe;
use super::operands;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{
    Access, AxisId, AxisSet, BodyOp, BufferId, Collective, CollectiveKind, DType, Holds, InstrId,
    OpKind, Place, RECIPROCAL_STRIDE, ReduceOp, Role, ScaleBlock, ShardOp, Slot,
};
use crate::program::{Op, Phase, Program, UnfilledWrites};
use crate::shard::Layout;
use std::collections::BTreeMap;

/// First byte of a tensor.
type Start = (BufferId, u64);

/// Codes in memory.
#[derive(Clone, Copy)]
struct Codes {
    /// Instruction that wrote their scale.
    scale: InstrId,
    /// Instruction that cast them.
    cast: InstrId,
    /// Whether they are the codes of a gathered weight.
    of_weight: bool,
    /// Position among the blocks of a gathered buffer, if a scale belongs to a block.
    block: Option<u64>,
    /// Blocks of gathered codes that a matmul reads where a gather has written them.
    in_place: Option<ScaleBlock>,
}

/// A scale, or its reciprocal, in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Scale {
    /// Instruction that wrote it.
    by: InstrId,
    /// As in [`Codes`].
    block: Option<u64>,
}

/// Codes of weight shards, or scales of their blocks, and the results of gathering them.
#[derive(Clone, Copy)]
struct Gathered {
    /// Instruction that wrote the scales.
    scale: InstrId,
    /// Instruction that cast the codes.
    cast: InstrId,
    /// Blocks, if each has a scale.
    block: Option<ScaleBlock>,
}

/// What memory holds.
#[derive(Default)]
struct State {
    scales: BTreeMap<Start, Scale>,
    codes: BTreeMap<Start, Codes>,
    gathered: BTreeMap<BufferId, Gathered>,
    /// Maxima of a rank's shards that have not been reduced over the other ranks.
    partial: BTreeMap<Start, InstrId>,
    /// Bytes of maxima of blocks that this rank has written since scales were last made of them.
    block_maxima: BTreeMap<Start, u64>,
    /// Maxima of rows, some of which contain what was in memory before.
    unfilled: BTreeMap<Start, InstrId>,
}

/// Checks all 8-bit matmuls.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    if !p.has_scaled_gemms() {
        return;
    }
    let mut state = State::default();
    let unfilled = p.unfilled_writes();
    for section in &p.sections {
        for i in section.instrs.clone() {
            let id = InstrId(i);
            match &p.instrs[id.index()].op {
                Op::Free(b) => state.forget(*b),
                Op::Launch { kernel, .. } => {
                    for op in &p.kernels[kernel.index()].body {
                        let launch = Launch { p, id, op };
                        launch.rows(&unfilled, &mut state, sink);
                        launch.formats(sink);
                        launch.shards(&mut state, sink);
                        launch.follow(&mut state, sink);
                    }
                }
                Op::Collective { id: c, .. } => state.exchange(p, &p.collectives[c.index()]),
                _ => {}
            }
        }
    }
}

impl State {
    /// Follows codes through gathers, and maxima through reductions over the ranks that hold parts
    /// of a weight.
    fn exchange(&mut self, p: &Program, c: &Collective) {
        for part in &c.parts {
            match (c.kind, c.reduce) {
                (CollectiveKind::AllGather, _) => {
                    match self.gathered.get(&part.input.buffer).copied() {
                        Some(codes) => self.gathered.insert(part.output.buffer, codes),
                        None => self.gathered.remove(&part.output.buffer),
                    };
                }
                (CollectiveKind::AllReduce, ReduceOp::Max) => {
                    let axes = p.communicators[c.comm.index()].axes;
                    let holders = AxisSet::of(AxisId::DP_SHARD);
                    let whole = |at: &Start| axes.contains(holders) && covers(part.output, *at);
                    self.partial.retain(|at, _| !whole(at));
                }
                _ => {}
            }
        }
    }

    /// Returns the codes that start at a position.
    fn codes_at(&self, at: Start) -> Option<Codes> {
        let gathered = || {
            let of = self.gathered.get(&at.0)?;
            Some(Codes {
                scale: of.scale,
                cast: of.cast,
                of_weight: false,
                block: of.block.map(|block| at.1 / block.numel()),
                in_place: of.block,
            })
        };
        self.codes.get(&at).copied().or_else(gathered)
    }

    /// Returns the scale that starts at a position.
    fn scale_at(&self, at: Start) -> Option<Scale> {
        let gathered = || {
            let of = self.gathered.get(&at.0)?;
            let size = of.block?.inverse_type().size();
            Some(Scale {
                by: of.scale,
                block: Some(at.1 / size),
            })
        };
        self.scales.get(&at).copied().or_else(gathered)
    }

    fn forget(&mut self, b: BufferId) {
        self.gathered.remove(&b);
        self.partial.retain(|at, _| at.0 != b);
        self.unfilled.retain(|at, _| at.0 != b);
        self.scales.retain(|at, _| at.0 != b);
        self.codes.retain(|at, _| at.0 != b);
    }
}

/// Returns what may share a scale of a factor, according to the shape of their reciprocals: a
/// tensor, a row, a block of 128 elements or a block of 32. For small factors, several of these
/// have the same shape.
fn granularity(factor: &Slot, inverse: &Slot) -> [bool; 4] {
    let [matrix, grid] = [factor, inverse].map(|slot| {
        let cols = slot.shape.last().copied().unwrap_or(1);
        [slot.shape.iter().product::<u64>() / cols.max(1), cols]
    });
    let float = inverse.dtype == DType::F32;
    let fits = |b: ScaleBlock| b.inverse_type() == inverse.dtype && b.grid(matrix) == grid;
    [
        float && grid == [1, 1],
        float && grid == [matrix[0], 1],
        fits(ScaleBlock::ROW) || fits(ScaleBlock::SQUARE),
        fits(ScaleBlock::MX),
    ]
}

/// Returns whether a factor is a view of a matrix whose rows are its columns.
fn is_transposed(factor: &Slot) -> bool {
    matches!((&factor.shape[..], &factor.strides[..]), (&[rows, _], &[1, row]) if row >= rows)
}

/// Returns whether a range contains a byte.
fn covers(range: Access, at: Start) -> bool {
    range.buffer == at.0 && (range.offset..range.offset + range.bytes).contains(&at.1)
}

/// One operation of a launch.
struct Launch<'p> {
    p: &'p Program,
    id: InstrId,
    op: &'p BodyOp,
}

impl Launch<'_> {
    fn access(&self, slot: &Slot) -> Option<Access> {
        operands::range(self.p, &self.p.instrs[self.id.index()].op, slot)
    }

    fn start(&self, slot: &Slot) -> Option<Start> {
        let at = self.access(slot)?;
        Some((at.buffer, at.offset + slot.offset * slot.dtype.size()))
    }

    /// Follows the maxima, scales and codes of sharded weights. Checks that scales follow from
    /// maxima over all ranks, and that the number of written codes equals the number of weights.
    fn shards(&self, state: &mut State, sink: &mut Sink) {
        let p = self.p;
        let launch = &p.instrs[self.id.index()].op;
        let (reads, writes) = (p.reads(launch), p.writes(launch));
        let OpKind::Shard(op) = self.op.op else {
            return;
        };
        let updates = op.update().is_some_and(|update| update.fused.maxima);
        match (op, reads, writes) {
            (_, _, [.., maxima]) if updates || matches!(op, ShardOp::ShardAmax { .. }) => {
                let several = p.meta.mesh.size(AxisId::DP_SHARD) > 1;
                let at = (maxima.buffer, maxima.offset);
                state.partial.extend(several.then_some((at, self.id)));
            }
            (ShardOp::ShardBlockAmax { .. }, _, maxima) => {
                let several = p.meta.mesh.size(AxisId::DP_SHARD) > 1;
                for range in maxima {
                    let at = (range.buffer, range.offset);
                    state.partial.extend(several.then_some((at, self.id)));
                    state.block_maxima.insert(at, range.bytes);
                }
            }
            (ShardOp::ShardBlockScales { .. }, [maxima], scales) => {
                self.of_all_ranks(*maxima, state, sink);
                self.of_all_blocks(*maxima, state, sink);
                let blocks = [ScaleBlock::MX, ScaleBlock::MX_COLUMN];
                for (range, block) in scales.iter().zip(blocks.into_iter().cycle()) {
                    let of_blocks = Gathered {
                        scale: self.id,
                        cast: self.id,
                        block: Some(block),
                    };
                    state.gathered.insert(range.buffer, of_blocks);
                }
            }
            (ShardOp::ShardScales { .. }, [maxima], scales) => {
                self.of_all_ranks(*maxima, state, sink);
                for range in scales {
                    let starts = range.offset..range.offset + range.bytes;
                    let each = starts.step_by(DType::F32.size() as usize);
                    let scale = Scale {
                        by: self.id,
                        block: None,
                    };
                    let written = each.map(|at| ((range.buffer, at), scale));
                    state.scales.extend(written);
                }
            }
            (ShardOp::ShardCast { .. }, [main, by], [codes, ..]) => {
                let numel = |a: &Access| a.bytes / p.buffers[a.buffer.index()].dtype.size();
                sink.fact(RuleId::Float8Format, 1);
                if numel(main) != numel(codes) {
                    sink.violation(RuleId::Float8Format, Some(self.id), None, || {
                        format!(
                            "casts {} to {}; expected as many codes as weights",
                            describe::range(p, *main),
                            describe::range(p, *codes)
                        )
                    });
                }
                match state.scales.get(&(by.buffer, by.offset)) {
                    Some(&Scale { by: scale, .. }) => state.gathered.insert(
                        codes.buffer,
                        Gathered {
                            scale,
                            cast: self.id,
                            block: None,
                        },
                    ),
                    None => state.gathered.remove(&codes.buffer),
                };
            }
            (ShardOp::ShardCastBlocks { block, .. }, [main], [codes, scales]) => {
                self.whole_blocks(block, [*main, *codes, *scales], sink);
                // Ranks that compute the scales of all blocks write their own once more.
                let others = scales.per_rank.is_some().then_some(scales.buffer);
                let known = others.and_then(|scales| state.gathered.get(&scales));
                let known = known.filter(|of| of.scale == of.cast && of.block == Some(block));
                let written = Gathered {
                    scale: known.map_or(self.id, |of| of.scale),
                    cast: self.id,
                    block: Some(block),
                };
                if known.is_none() {
                    state.gathered.insert(scales.buffer, written);
                }
                state.gathered.insert(codes.buffer, written);
            }
            (ShardOp::Copy | ShardOp::MultiCopy | ShardOp::CopyOut { .. }, from, to) => {
                // PyTorch packs codes and other weights into one buffer.
                let mut packed = from.iter().map(|a| state.gathered.get(&a.buffer));
                let codes = packed.find_map(|codes| codes.copied());
                for a in to {
                    let dtype = p.buffers[a.buffer.index()].dtype;
                    let bytes = dtype.is_float8() || dtype == DType::U8;
                    match codes.filter(|_| bytes) {
                        Some(codes) => state.gathered.insert(a.buffer, codes),
                        None => state.gathered.remove(&a.buffer),
                    };
                }
            }
            _ => {}
        }
    }

    /// Checks that maxima from which scales follow are those of all ranks.
    fn of_all_ranks(&self, maxima: Access, state: &State, sink: &mut Sink) {
        let p = self.p;
        sink.fact(RuleId::Float8Amax, 1);
        let mut partial = state.partial.iter();
        if let Some((_, &by)) = partial.find(|(at, _)| covers(maxima, **at)) {
            sink.violation(RuleId::Float8Amax, Some(self.id), Some(by), || {
                format!(
                    "makes scales of {}, where #{} wrote the maxima of this rank's shard; expected those of all \
                     ranks of the dp_shard axis, by an all-reduce with max",
                    describe::range(p, maxima),
                    by.0
                )
            });
        }
    }

    /// Checks that every block has a maximum of this step: each rank has written those of its
    /// blocks of all weights.
    fn of_all_blocks(&self, maxima: Access, state: &mut State, sink: &mut Sink) {
        let p = self.p;
        let ranks = u64::from(p.meta.mesh.size(AxisId::DP_SHARD));
        let written: u64 = std::mem::take(&mut state.block_maxima).values().sum();
        sink.fact(RuleId::Float8Amax, 1);
        if written * ranks != maxima.bytes {
            sink.violation(RuleId::Float8Amax, Some(self.id), None, || {
                format!(
                    "makes scales of {}, of which {ranks} ranks have written {} bytes; expected the maxima of all blocks",
                    describe::range(p, maxima),
                    written * ranks
                )
            });
        }
    }

    /// Checks a cast of a shard with a scale per block: it writes a code per weight and a scale per
    /// block, and no block belongs to several ranks, because its scale would be that of a part.
    fn whole_blocks(&self, block: ScaleBlock, [main, codes, scales]: [Access; 3], sink: &mut Sink) {
        let p = self.p;
        let numel = |a: Access| a.bytes / p.buffers[a.buffer.index()].dtype.size();
        let counts = [main, codes, scales].map(numel);
        sink.fact(RuleId::Float8Format, 1);
        if counts[0] != counts[1] || counts[1] != counts[2] * block.numel() {
            sink.violation(RuleId::Float8Format, Some(self.id), None, || {
                format!(
                    "casts {} to {} with the scales {}; expected as many codes as weights, and a scale for each {} \
                     of them",
                    describe::range(p, main),
                    describe::range(p, codes),
                    describe::range(p, scales),
                    block.numel()
                )
            });
        }
        let Holds::Group(g) = p.buffers[codes.buffer.index()].holds else {
            return;
        };
        let Layout::Flat(layout) = &p.groups[g.index()].layout else {
            return;
        };
        sink.fact(RuleId::Float8Amax, 1);
        let shard = layout.shard_numel().max(1);
        let split = layout.items.iter().find(|item| {
            let cols = p.params[item.param.index()].shape.last();
            let rows = block.rows * cols.copied().unwrap_or(1);
            let end = item.offset + item.numel;
            let mut boundaries = (item.offset / shard + 1..end.div_ceil(shard)).map(|n| n * shard);
            !item.offset.is_multiple_of(block.numel())
                || boundaries.any(|at| !(at - item.offset).is_multiple_of(rows))
        });
        if let Some(item) = split {
            sink.violation(RuleId::Float8Amax, Some(self.id), None, || {
                format!(
                    "makes scales of blocks of {}, which shards of {shard} elements split; expected shards of whole \
                     blocks of {} rows",
                    p.params[item.param.index()].name,
                    block.rows
                )
            });
        }
    }

    /// Follows maxima of rows, and checks that scales exclude rows that no expert reads.
    fn rows(&self, unfilled: &UnfilledWrites, state: &mut State, sink: &mut Sink) {
        let (op, p) = (self.op, self.p);
        match op.op {
            OpKind::RowAmax => {
                let (slot, Some(at)) = (&op.outputs[0], self.start(&op.outputs[0])) else {
                    return;
                };
                match slot.place {
                    Place::Write(n) if unfilled.contains(self.id, usize::from(n)) => {
                        state.unfilled.insert(at, self.id);
                    }
                    _ => _ = state.unfilled.remove(&at),
                }
            }
            OpKind::Float8Scale(scale) => {
                let maxima = &op.inputs[0];
                sink.fact(RuleId::Float8Rows, 1);
                let by = self.start(maxima).and_then(|at| state.unfilled.get(&at));
                let (Some(&by), false, Some(at)) = (by, scale.routed, self.access(maxima)) else {
                    return;
                };
                sink.violation(RuleId::Float8Rows, Some(self.id), Some(by), || {
                    format!(
                        "makes a scale of {}, where #{} wrote the maxima of all rows, also of those that no choice \
                         fills; expected maxima of the rows before the last offset of experts",
                        describe::range(p, at),
                        by.0
                    )
                });
            }
            _ => {}
        }
    }

    /// Follows scales and codes, and checks the matmuls that read them.
    fn follow(&self, state: &mut State, sink: &mut Sink) {
        let (inputs, outputs) = (&self.op.inputs, &self.op.outputs);
        match self.op.op {
            OpKind::Float8Scale(_) => {
                for at in outputs.iter().filter_map(|slot| self.start(slot)) {
                    state.scales.insert(at, self.written());
                }
            }
            OpKind::Float8Cast => {
                let scale = self.start(&inputs[1]).and_then(|at| state.scale_at(at));
                if let (Some(scale), Some(at)) = (scale, self.start(&outputs[0])) {
                    state.codes.insert(at, self.codes(scale));
                }
            }
            OpKind::Copy => {
                let (Some(from), Some(at)) = (self.start(&inputs[0]), self.start(&outputs[0]))
                else {
                    return;
                };
                // A copy of the scales of blocks of a gathered weight, or a transposed copy of its
                // codes.
                if inputs[0].dtype.is_float8() {
                    let codes = state.codes_at(from).map(|codes| Scale {
                        by: codes.scale,
                        block: codes.block,
                    });
                    state
                        .codes
                        .extend(codes.map(|scale| (at, self.codes(scale))));
                } else {
                    let scale = state.scale_at(from);
                    state.scales.extend(scale.map(|scale| (at, scale)));
                }
            }
            OpKind::Float8CastRows(_) | OpKind::Float8CastBlocks(_) => {
                if let Some(at) = self.start(&outputs[0]) {
                    state.codes.insert(at, self.codes(self.written()));
                }
                if let Some(at) = self.start(&outputs[1]) {
                    state.scales.insert(at, self.written());
                }
            }
            op if op.float8_fast_accum().is_some() => {
                for n in 0..2 {
                    self.factor(&inputs[n], &inputs[n + 2], state, sink);
                }
            }
            _ => {}
        }
    }

    /// Returns the scale that this launch writes.
    fn written(&self) -> Scale {
        Scale {
            by: self.id,
            block: None,
        }
    }

    /// Returns the codes that this launch writes with a scale.
    fn codes(&self, Scale { by: scale, block }: Scale) -> Codes {
        let from = self.access(&self.op.inputs[0]);
        let role = from.map(|at| self.p.buffers[at.buffer.index()].role);
        Codes {
            scale,
            cast: self.id,
            of_weight: role == Some(Role::FullWeight),
            block,
            in_place: None,
        }
    }

    /// Checks that the first code and the first scale that a matmul reads belong to the same block
    /// of a gathered buffer.
    fn blocks_match(&self, codes: Access, blocks: [Option<u64>; 2], sink: &mut Sink) {
        if blocks[0] == blocks[1] {
            return;
        }
        let p = self.p;
        sink.violation(RuleId::Float8Scale, Some(self.id), None, || {
            let [of_codes, of_scales] =
                blocks.map(|n| n.map_or("no block".to_owned(), |n| format!("block {n}")));
            format!(
                "{} reads {}, which starts with {of_codes} of its group, and scales from {of_scales} on; expected the \
                 scales of the same blocks",
                describe::instr(p, self.id, None),
                describe::range(p, codes)
            )
        });
    }

    /// Checks that blocks of gathered codes lie along the inner dimension of a matmul. Codes by
    /// rows are for matmuls with the weight, codes by columns for those with its transpose.
    fn blocks_lie_along(
        &self,
        factor: &Slot,
        codes: Access,
        block: Option<ScaleBlock>,
        sink: &mut Sink,
    ) {
        let Some(block) = block.filter(|block| *block != block.of_transpose()) else {
            return;
        };
        let by_columns = block.rows > block.cols;
        if by_columns == is_transposed(factor) {
            return;
        }
        let p = self.p;
        sink.violation(RuleId::Float8Scale, Some(self.id), None, || {
            let names = ["by rows", "by columns"];
            let [found, wanted] = [by_columns, !by_columns].map(|n| names[usize::from(n)]);
            format!(
                "{} reads {}, codes {found}; expected codes {wanted}, whose blocks lie along the inner dimension",
                describe::instr(p, self.id, None),
                describe::range(p, codes)
            )
        });
    }

    /// Checks that a factor and its scale belong together, and that the codes of a weight are those
    /// of this pass over its unit.
    fn factor(&self, factor: &Slot, inverse: &Slot, state: &State, sink: &mut Sink) {
        let (Some(at), Some(by)) = (self.access(factor), self.start(inverse)) else {
            return;
        };
        let codes = self.start(factor).and_then(|at| state.codes_at(at));
        let scale = state.scale_at(by);
        sink.fact(RuleId::Float8Scale, 1);
        let p = self.p;
        match (codes, scale) {
            (Some(codes), Some(scale)) if codes.scale == scale.by => {
                self.blocks_match(at, [codes.block, scale.block], sink);
                self.blocks_lie_along(factor, at, codes.in_place, sink);
            }
            (codes, scale) => {
                let scale = scale.map(|scale| scale.by);
                let shown = |i: Option<InstrId>| match i {
                    Some(i) => format!("of #{}", i.0),
                    None => "that nothing wrote".to_owned(),
                };
                let other = scale.or(codes.map(|c| c.cast));
                sink.violation(RuleId::Float8Scale, Some(self.id), other, || {
                    format!(
                        "{} reads {}, cast with the scale {}, and the reciprocal of the scale {}; expected the same one",
                        describe::instr(p, self.id, None),
                        describe::range(p, at),
                        shown(codes.map(|c| c.scale)),
                        shown(scale)
                    )
                });
            }
        }
        let Some(codes) = codes.filter(|codes| codes.of_weight) else {
            return;
        };
        sink.fact(RuleId::Float8Weight, 1);
        let phase = |i: InstrId| p.instrs[i.index()].phase;
        if phase(codes.cast) != phase(self.id) {
            sink.violation(RuleId::Float8Weight, Some(self.id), Some(codes.cast), || {
                format!(
                    "{} reads {}, the codes of a gathered weight that #{} cast in {}; expected codes of this pass over \
                     the unit, so that full weights do not stay",
                    describe::instr(p, self.id, None),
                    describe::range(p, at),
                    codes.cast.0,
                    phase(codes.cast).name()
                )
            });
        }
    }

    /// Checks that tensor cores can read the factors, and that gradients accumulate in float32.
    fn formats(&self, sink: &mut Sink) {
        let Some(fast) = self.op.op.float8_fast_accum() else {
            return;
        };
        let p = self.p;
        sink.fact(RuleId::Float8Format, 1);
        let factors = &self.op.inputs[..2];
        let gradients = factors.iter().filter(|f| f.dtype == DType::F8E5m2).count();
        let bytes = factors.iter().all(|f| f.dtype.is_float8());
        let inner = |f: &Slot| f.shape.last().is_some_and(|k| k.is_multiple_of(16));
        // Tensor cores with MXFP8 (compute capability 10) read both layouts.
        let dense = |(f, inverse): (&Slot, &Slot)| {
            f.strides.is_empty()
                || inverse.dtype == DType::U8 && is_transposed(f) && f.shape[0].is_multiple_of(16)
        };
        let layouts = factors.iter().zip(&self.op.inputs[2..4]).all(dense);
        if gradients > 1 || !bytes || !layouts || !factors.iter().all(inner) {
            sink.violation(RuleId::Float8Format, Some(self.id), None, || {
                let shown = factors.iter().map(|f| format!("{} {:?}", f.dtype, f.shape.as_slice()));
                format!(
                    "{} multiplies {}; expected 8-bit factors, at most one of e5m2, whose inner dimensions are \
                     contiguous (or, with MXFP8, strided) and multiples of 16",
                    describe::instr(p, self.id, None),
                    shown.collect::<Vec<_>>().join(" and ")
                )
            });
        }
        let scales = [0, 1].map(|n| granularity(&self.op.inputs[n], &self.op.inputs[n + 2]));
        if !scales[0].iter().zip(scales[1]).any(|(a, b)| *a && b) {
            sink.violation(RuleId::Float8Format, Some(self.id), None, || {
                let shown = (0..2).map(|n| {
                    let (factor, inverse) = (&self.op.inputs[n], &self.op.inputs[n + 2]);
                    format!("{:?} scales of {:?}", inverse.shape.as_slice(), factor.shape.as_slice())
                });
                format!(
                    "{} reads {}; expected one of each factor, of each row, or of each block of 128 or 32 elements",
                    describe::instr(p, self.id, None),
                    shown.collect::<Vec<_>>().join(" and ")
                )
            });
        }
        for (buffer, at) in self.op.inputs[2..4]
            .iter()
            .filter_map(|slot| self.start(slot))
        {
            if !at.is_multiple_of(RECIPROCAL_STRIDE * DType::F32.size()) {
                sink.violation(RuleId::Float8Format, Some(self.id), None, || {
                    format!(
                        "{} reads the reciprocal of a scale at byte {at} of {}; expected a multiple of 16 bytes",
                        describe::instr(p, self.id, None),
                        describe::buffer(p, buffer)
                    )
                });
            }
        }
        let backward = p.instrs[self.id.index()].phase == Phase::Backward;
        sink.fact(RuleId::Float8Sum, 1);
        if fast && (backward || gradients > 0) {
            sink.violation(RuleId::Float8Sum, Some(self.id), None, || {
                format!(
                    "{} accumulates a gradient with the precision of tensor cores; expected float32",
                    describe::instr(p, self.id, None)
                )
            });
        }
    }
}
