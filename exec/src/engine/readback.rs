//! Scalars that the host reads back from a pass: losses, the gradient norm, NaN flags.

use shardlab_plan::ir::{
    Access, BufferId, DType, Holds, InstrId, Kernel, OpKind, ShardOp, StreamId,
};
use shardlab_plan::program::{Instr, Op, Phase, Program, Section, SectionKind};
use std::ops::Range;

/// Read of a scalar after an instruction, on the instruction's stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readback {
    pub(crate) after: InstrId,
    pub(crate) stream: StreamId,
    /// Buffer of the scalar.
    pub(crate) buffer: BufferId,
    pub(crate) offset: u64,
    pub(crate) slot: u32,
}

/// All readbacks of a section.
#[derive(Clone, Debug, Default)]
pub(crate) struct Readbacks {
    /// Reads, ascending by instruction.
    pub(crate) scalars: Vec<Readback>,
    /// Slots of the losses, by micro-batch.
    pub(crate) losses: Vec<u32>,
    /// Slot of the sum of squares of the gradient.
    pub(crate) norm: Option<u32>,
    /// Instruction and slot of each NaN flag.
    pub(crate) flags: Vec<(InstrId, u32)>,
    /// Optimizer launches, with the slots of the squares of their gradients and the accesses of
    /// these gradients.
    pub(crate) squares: Vec<(InstrId, StreamId, u32, Vec<u32>)>,
    /// Slots of the counts of each layer of experts and micro-batch, in the order of launches.
    pub(crate) counts: Vec<Counts>,
    pub(crate) slots: u32,
}

/// Slots of the counts that a launch of a dispatcher or a sort writes.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    slots: Range<u32>,
    /// They are the ends of experts' rows, not their numbers.
    ends: bool,
}

impl Counts {
    /// Returns the choices of each expert, from the values of slots.
    pub(crate) fn of(&self, slot: impl Fn(u32) -> f32) -> Vec<u32> {
        // The lower half of a 64-bit integer.
        let all: Vec<u32> = self.slots.clone().map(|s| slot(s).to_bits()).collect();
        match self.ends {
            true => all.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect(),
            false => all,
        }
    }
}

impl Readbacks {
    pub(crate) fn new(program: &Program, section: &Section) -> Self {
        let mut all = Self::default();
        let ids = || section.instrs.clone().map(InstrId);
        let instr = |i: InstrId| &program.instrs[i.index()];
        let mut losses: Vec<(u16, Readback)> = Vec::new();
        let mut norm = None;
        for id in ids() {
            let it = instr(id);
            if let Some(readback) = loss(program, section.kind, id, it) {
                match losses.last_mut() {
                    Some((m, last)) if *m == it.micro_batch => *last = readback,
                    _ => losses.push((it.micro_batch, readback)),
                }
            }
            if let Some(readback) = square(program, id, it) {
                norm = Some(readback);
            }
            if let Some(readback) = flag(program, id, it) {
                all.push(readback);
                let slot = all.slots - 1;
                all.flags.push((id, slot));
            }
        }
        for (_, readback) in losses {
            all.push(readback);
            let slot = all.slots - 1;
            all.losses.push(slot);
        }
        if let Some(readback) = norm {
            all.push(readback);
            all.norm = Some(all.slots - 1);
        }
        all.scalars.sort_by_key(|t| (t.after, t.slot));
        all
    }

    /// Adds slots for the squares of all gradients, if the program does not compute the norm.
    pub(crate) fn with_squares(mut self, program: &Program, section: &Section) -> Self {
        if self.norm.is_none() {
            for id in section.instrs.clone().map(InstrId) {
                let op = &program.instrs[id.index()].op;
                let Op::Launch { stream, .. } = *op else {
                    continue;
                };
                let grads = gradients(program, op);
                if !grads.is_empty() {
                    self.squares.push((id, stream, self.slots, grads));
                    self.slots += 1;
                }
            }
        }
        self
    }

    /// Adds slots for the choices of each expert in forward passes.
    pub(crate) fn with_counts(mut self, program: &Program, section: &Section) -> Self {
        let has = |k: &Kernel, is: fn(&OpKind) -> bool| k.body.iter().any(|b| is(&b.op));
        let dispatches = |k: &Kernel| has(k, |op| matches!(op, OpKind::DispatchExperts(_)));
        let sorts = |k: &Kernel| has(k, |op| matches!(op, OpKind::SortExperts(_)));
        // A rank that sends choices to their experts knows all of its own.
        let sent = program.kernels.iter().any(dispatches);
        for id in section.instrs.clone().map(InstrId) {
            let instr = &program.instrs[id.index()];
            let Op::Launch { kernel, stream, .. } = instr.op else {
                continue;
            };
            let kernel = &program.kernels[kernel.index()];
            let counts = match sent {
                true => dispatches(kernel).then_some(2),
                false => sorts(kernel).then_some(0),
            };
            let Some(written) = counts.filter(|_| instr.phase == Phase::Forward) else {
                continue;
            };
            let Some(access) = program.writes(&instr.op).get(written) else {
                continue;
            };
            let first = self.slots;
            for at in (0..access.bytes).step_by(DType::I64.size() as usize) {
                let offset = access.offset + at;
                self.push(readback(id, stream, &Access { offset, ..*access }));
            }
            self.counts.push(Counts {
                slots: first..self.slots,
                ends: !sent,
            });
        }
        self.scalars.sort_by_key(|t| (t.after, t.slot));
        self
    }

    fn push(&mut self, readback: Readback) {
        self.scalars.push(Readback {
            slot: self.slots,
            ..readback
        });
        self.slots += 1;
    }
}

fn readback(after: InstrId, stream: StreamId, a: &Access) -> Readback {
    Readback {
        after,
        stream,
        buffer: a.buffer,
        offset: a.offset,
        slot: 0,
    }
}

/// Matches launches of a forward pass that write the loss. It is complete after the last one of a
/// micro-batch. Steps do not use the loss of passes without gradients.
fn loss(program: &Program, section: SectionKind, id: InstrId, instr: &Instr) -> Option<Readback> {
    let Op::Launch { stream, .. } = instr.op else {
        return None;
    };
    let wanted = match instr.phase {
        Phase::Forward => program.loss?,
        Phase::Validation if section == SectionKind::Validation => program.eval_loss?,
        _ => return None,
    };
    // With a joint backward, every micro-batch has a buffer for it.
    let holds = |id: BufferId| program.buffers[id.index()].holds;
    let found = program
        .writes(&instr.op)
        .iter()
        .find(|a| holds(a.buffer) == holds(wanted))?;
    Some(readback(id, stream, found))
}

/// Matches the last instruction of the gradient norm, which completes the scalar.
fn square(program: &Program, id: InstrId, instr: &Instr) -> Option<Readback> {
    let is_norm =
        |a: &&Access| program.buffers[a.buffer.index()].holds == Holds::Named("gradient norm");
    if instr.phase != Phase::Clip {
        return None;
    }
    match instr.op {
        Op::Launch { stream, .. } => program
            .writes(&instr.op)
            .iter()
            .find(is_norm)
            .map(|a| readback(id, stream, a)),
        Op::Collective { id: c, stream } => program.collectives[c.index()]
            .parts
            .iter()
            .map(|p| &p.output)
            .find(is_norm)
            .map(|a| readback(id, stream, a)),
        _ => None,
    }
}

fn flag(program: &Program, id: InstrId, instr: &Instr) -> Option<Readback> {
    let Op::Launch { kernel, stream, .. } = instr.op else {
        return None;
    };
    let body = &program.kernels[kernel.index()].body;
    let checks = matches!(
        body.first().map(|b| b.op),
        Some(OpKind::Shard(ShardOp::NanCheck))
    );
    checks
        .then(|| program.writes(&instr.op).first())
        .flatten()
        .map(|a| readback(id, stream, a))
}

/// Returns the accesses of the gradients of an optimizer launch: each follows its weight, and
/// moments may follow it. Returns none if the launch sums gradients itself, because they exist
/// nowhere else.
fn gradients(program: &Program, op: &Op) -> Vec<u32> {
    let Op::Launch { reads, .. } = *op else {
        return Vec::new();
    };
    if program.sums_pieces(op) || program.moves_router_biases(op) {
        return Vec::new();
    }
    let tensors = program.updates(op).into_iter();
    tensors.map(|t| reads + t.read as u32 + 1).collect()
}
