//! Scalars that the host wants from a pass: losses, the gradient norm, NaN flags.

use shardlab_plan::compile::tape::OpKind;
use shardlab_plan::program::{
    Access, BufferId, Holds, Instr, InstrId, Op, Phase, Program, Role, Section, ShardOp, StreamId,
};

/// A read that follows an instruction on its stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tap {
    pub(crate) after: InstrId,
    pub(crate) stream: StreamId,
    /// The scalar.
    pub(crate) buffer: BufferId,
    pub(crate) offset: u64,
    pub(crate) slot: u32,
}

/// All taps of a section.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taps {
    /// Ascending by instruction.
    pub(crate) taps: Vec<Tap>,
    /// Slots of the losses, by micro-batch.
    pub(crate) losses: Vec<u32>,
    /// Slot of the sum of squares of the gradient.
    pub(crate) norm: Option<u32>,
    /// Instruction and slot of each NaN flag.
    pub(crate) flags: Vec<(InstrId, u32)>,
    /// Optimizer launches with the slots of their gradients' squares.
    pub(crate) squares: Vec<(InstrId, StreamId, u32, Vec<u32>)>,
    pub(crate) slots: u32,
}

impl Taps {
    pub(crate) fn new(program: &Program, section: &Section) -> Self {
        let mut all = Self::default();
        let ids = || section.instrs.clone().map(InstrId);
        let instr = |i: InstrId| &program.instrs[i.index()];
        let mut losses: Vec<(u16, Tap)> = Vec::new();
        let mut norm = None;
        for id in ids() {
            let it = instr(id);
            if let Some(tap) = loss(program, id, it) {
                match losses.last_mut() {
                    Some((m, last)) if *m == it.micro_batch => *last = tap,
                    _ => losses.push((it.micro_batch, tap)),
                }
            }
            if let Some(tap) = square(program, id, it) {
                norm = Some(tap);
            }
            if let Some(tap) = flag(program, id, it) {
                all.push(tap);
                let slot = all.slots - 1;
                all.flags.push((id, slot));
            }
        }
        for (_, tap) in losses {
            all.push(tap);
            let slot = all.slots - 1;
            all.losses.push(slot);
        }
        if let Some(tap) = norm {
            all.push(tap);
            all.norm = Some(all.slots - 1);
        }
        all.taps.sort_by_key(|t| (t.after, t.slot));
        all
    }

    /// Adds slots for the squares of all gradients, where the program has no norm of its own.
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

    fn push(&mut self, tap: Tap) {
        self.taps.push(Tap {
            slot: self.slots,
            ..tap
        });
        self.slots += 1;
    }
}

fn tap(after: InstrId, stream: StreamId, a: &Access) -> Tap {
    Tap {
        after,
        stream,
        buffer: a.buffer,
        offset: a.offset,
        slot: 0,
    }
}

/// A launch of a forward that writes the loss; the last one of a micro-batch leaves it complete.
fn loss(program: &Program, id: InstrId, instr: &Instr) -> Option<Tap> {
    let Op::Launch { stream, .. } = instr.op else {
        return None;
    };
    let wanted = match instr.phase {
        Phase::Forward => program.loss?,
        Phase::Validation => program.eval_loss?,
        _ => return None,
    };
    let found = program
        .writes(&instr.op)
        .iter()
        .find(|a| a.buffer == wanted)?;
    Some(tap(id, stream, found))
}

/// The last step of the gradient norm: the scalar is complete.
fn square(program: &Program, id: InstrId, instr: &Instr) -> Option<Tap> {
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
            .map(|a| tap(id, stream, a)),
        Op::Collective { id: c, stream } => program.collectives[c.index()]
            .parts
            .iter()
            .map(|p| &p.output)
            .find(is_norm)
            .map(|a| tap(id, stream, a)),
        _ => None,
    }
}

fn flag(program: &Program, id: InstrId, instr: &Instr) -> Option<Tap> {
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
        .map(|a| tap(id, stream, a))
}

/// Accesses of the gradients of an optimizer launch: each follows its weight, and moments may follow it. None where it sums gradients
/// itself: nobody else could.
fn gradients(program: &Program, op: &Op) -> Vec<u32> {
    let Op::Launch { kernel, reads, .. } = *op else {
        return Vec::new();
    };
    let body = &program.kernels[kernel.index()].body;
    if !matches!(
        body.first().map(|b| b.op),
        Some(OpKind::Shard(
            ShardOp::AdamW { pieces: None, .. } | ShardOp::Sgd { pieces: None, .. }
        ))
    ) {
        return Vec::new();
    }
    let role = |a: &Access| program.buffers[a.buffer.index()].role;
    let list = program.reads(op);
    let mut found = Vec::new();
    let mut i = 0;
    while i + 1 < list.len() {
        found.push(reads + i as u32 + 1);
        i += 2;
        if list.get(i).is_some_and(|a| role(a) == Role::OptimizerState) {
            i += 2;
        }
    }
    found
}
