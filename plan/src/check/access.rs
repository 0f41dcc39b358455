//! Accesses: lifetimes, order of conflicting uses, recycled addresses.

use super::clock::{Known, LANES, Use};
use super::describe;
use super::factor::Factor;
use super::layout::is_padding;
use super::rules::RuleId;
use super::shadow::Zeros;
use super::state::{Reduced, at_rest};
use super::walk::{Walk, Work};
use crate::ir::{
    Access, BodyOp, Buffer, Collective, CollectiveKind, CopyDesc, Kernel, KernelClass, OpKind,
    Pieces, Role, SelectedRows, SentRows, ShardOp,
};
use crate::program::{Op, Phase, Rule};

/// Two accesses without an order between them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conflict {
    work: Work,
    access: Access,
    writes: bool,
    earlier: Use,
    earlier_wrote: bool,
    /// Buffer of the earlier access, if it is a former tenant of the address.
    tenant: Option<crate::ir::BufferId>,
}

/// Properties of an instruction's reads that determine those of its writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs {
    /// Oldest optimizer step among the weights that were read.
    pub(super) version: u32,
    /// Axes over which any gradient that was read has been reduced.
    pub(super) reduced: Reduced,
}

impl Inputs {
    pub(super) const NONE: Self = Self {
        version: u32::MAX,
        reduced: Reduced::NONE,
    };
}

/// Returns the pieces that a kernel sums and the index of the read that contains them, if the
/// kernel is the second half of a reduction, alone or in an optimizer.
fn pieces(kernel: &Kernel) -> Option<(Pieces, usize)> {
    let op = shard_op(kernel)?;
    if let ShardOp::SumPieces { ranks, factor, .. } = op {
        // A single piece is a range that is multiplied.
        return (ranks > 1).then_some((Pieces { ranks, factor }, 0));
    }
    // The pieces come after the weight.
    op.update()?.fused.pieces.map(|p| (p, 1))
}

/// Returns the operation of a sharding kernel.
fn shard_op(kernel: &Kernel) -> Option<ShardOp> {
    match kernel.body[..] {
        [
            BodyOp {
                op: OpKind::Shard(op),
                ..
            },
        ] => Some(op),
        _ => None,
    }
}

/// Returns the factor by which a kernel multiplies gradients.
fn multiplier(kernel: &Kernel) -> Option<Factor> {
    match shard_op(kernel)? {
        ShardOp::Scale { factor }
        | ShardOp::SumPieces {
            ranks: 1,
            factor,
            accumulate: false,
        } => Some(Factor(factor.0)),
        _ => None,
    }
}

/// Returns whether a kernel sums squares, for a part of the gradient norm.
fn squares(kernel: &Kernel) -> bool {
    let op = kernel.body.first().map(|b| b.op);
    op == Some(OpKind::Shard(ShardOp::SumSquares))
}

/// Returns whether a role is a gradient on its way to the optimizer.
pub(super) fn is_grad(role: Role) -> bool {
    matches!(
        role,
        Role::FullGrad | Role::ReduceInput | Role::ReduceOutput | Role::MainGrad
    )
}

/// Returns whether a role is a full-size gradient buffer.
pub(super) fn is_full_grad(role: Role) -> bool {
    matches!(role, Role::FullGrad | Role::ReduceInput)
}

impl Walk<'_> {
    pub(super) fn launch(&mut self, work: &mut Work, reads: &[Access], writes: &[Access]) {
        let mut inputs = Inputs::NONE;
        let kernel = match work.instr.op {
            Op::Launch { kernel, .. } => Some(&self.p.kernels[kernel.index()]),
            _ => None,
        };
        let sums = kernel.and_then(pieces);
        let squares = kernel.is_some_and(squares);
        let updates = kernel.is_some_and(|k| k.class == KernelClass::Optimizer);
        let looks = work.instr.rule == Rule::NanCheck;
        if !squares && !looks {
            for a in reads {
                self.norm_used(work.id, a.buffer);
            }
        }
        for (n, a) in reads.iter().enumerate() {
            self.read(work, *a, &mut inputs);
            if let Some((pieces, _)) = sums.filter(|s| s.1 == n) {
                let to = |w: &Access| w.bytes / self.p.buffers[w.buffer.index()].dtype.size();
                // An optimizer's sums are added to its first weight.
                let to = match n {
                    0 => writes.iter().map(to).sum(),
                    _ => reads.first().map_or(0, to),
                };
                inputs.reduced = self.summed(work, (pieces, inputs.reduced), (*a, to));
                if updates {
                    self.scaled(work, *a, inputs.reduced);
                }
            } else if updates {
                self.unsummed(work, inputs.reduced, *a);
            }
        }
        if let Some(factor) = kernel.and_then(multiplier) {
            inputs.reduced.factor = Some(Factor::product(inputs.reduced.factor, Some(factor)));
        }
        let fills = kernel.is_some_and(|k| k.class == KernelClass::Fill);
        for a in writes {
            let zeros = if fills {
                Zeros::Made
            } else if work.instr.rule == Rule::Scale && reads.contains(a) {
                Zeros::Kept
            } else {
                Zeros::Gone
            };
            self.write(work, *a, inputs, zeros);
            if squares {
                self.norm_summed(work.id, reads, a.buffer);
            }
        }
    }

    pub(super) fn collective(&mut self, work: &mut Work, c: &Collective) {
        let reduction = self.reduction_of(c);
        if c.kind == CollectiveKind::AllGather {
            self.before_gather(work, c);
        } else if reduction.any() {
            self.before_reduce(work, c);
        }
        if let Some(sent) = c.sent {
            let mut unused = Inputs::NONE;
            self.read(work, sent.by.input, &mut unused);
            match sent.of {
                SelectedRows::Pushed(_) => self.windows(work, c),
                SelectedRows::Counted(_) => {
                    self.read(work, sent.by.output, &mut unused);
                    self.counts(work, sent);
                }
            }
        }
        // Parts run as a single launch, so all inputs are read before any output may be reused.
        let mut inputs: smallvec::SmallVec<[Inputs; 4]> = smallvec::SmallVec::new();
        for part in &c.parts {
            let mut i = Inputs::NONE;
            self.read(work, part.input, &mut i);
            inputs.push(Inputs {
                reduced: i.reduced.then(reduction),
                ..i
            });
        }
        for (part, i) in c.parts.iter().zip(inputs) {
            self.norms.reduced(part.output.buffer, reduction.over);
            let zeros = if reduction.any() && part.input == part.output {
                Zeros::Kept
            } else {
                Zeros::Gone
            };
            self.write(work, part.output, i, zeros);
        }
        if reduction.any() {
            self.after_reduce(work, c);
        }
        for a in c.parts.iter().flat_map(|part| [part.input, part.output]) {
            self.alignment(work, c, a);
        }
    }

    /// Checks that the host knows the numbers of rows when it launches their exchange, and that no
    /// replay repeats them.
    fn counts(&mut self, work: &Work, sent: SentRows) {
        self.sink.fact(RuleId::HostCounts, 1);
        if let Some(scope) = self.captured.open {
            self.violate(RuleId::HostCounts, work.id, Some(scope), || {
                "a replay of the captured scope exchanges as many rows as the first pass".into()
            });
        }
        for counts in [sent.by.input, sent.by.output] {
            let cell = &mut self.cells[counts.buffer.index()];
            let range = cell.split(counts.offset, counts.offset + counts.bytes);
            let mut writers = cell.segments[range].iter().map(|s| s.writer);
            let Some(writer) = writers.find(|w| !self.order.host_is_after(*w)) else {
                continue;
            };
            let other = (writer.at != 0).then(|| self.id_at(writer.at));
            self.violate(RuleId::HostCounts, work.id, other, || {
                format!(
                    "the host reads {} without a wait for the work that writes it",
                    describe::range(self.p, counts)
                )
            });
        }
    }

    /// Checks that all ranks have passed a barrier since this rank last used the memory that others
    /// write to.
    fn windows(&mut self, work: &Work, c: &Collective) {
        let passed = self.barriers[c.comm.index()];
        for window in c.parts.iter().map(|part| part.output) {
            let cell = &mut self.cells[window.buffer.index()];
            if window.bytes == 0 || !cell.live {
                continue;
            }
            let (from, to) = (
                cell.address + window.offset,
                cell.address + window.offset + window.bytes,
            );
            let tenants: Vec<Use> = (cell.before.iter())
                .filter(|t| t.start < to && t.end > from)
                .filter_map(|t| passed.missing(&t.last))
                .collect();
            let range = cell.split(window.offset, window.offset + window.bytes);
            let segments = &cell.segments[range];
            let uses = segments
                .iter()
                .flat_map(|s| s.reads.iter().copied().chain([s.writer]));
            let open = uses.filter(|u| u.at != 0 && !passed.after(*u));
            let first = open.chain(tenants).min_by_key(|u| u.at);
            self.sink.fact(RuleId::Window, 1);
            if let Some(earlier) = first {
                let other = self.id_at(earlier.at);
                let them = self.describe_at(earlier.at);
                self.violate(RuleId::Window, work.id, Some(other), || {
                    format!(
                        "ranks write into {} of others, which may not be done with it: no barrier follows {them}",
                        describe::range(self.p, window)
                    )
                });
            }
        }
    }

    pub(super) fn copy(&mut self, work: &mut Work, c: &CopyDesc) {
        let mut inputs = Inputs::NONE;
        self.read(work, c.from, &mut inputs);
        self.write(work, c.to, inputs, Zeros::Gone);
    }

    fn read(&mut self, work: &mut Work, a: Access, inputs: &mut Inputs) {
        if !self.enter(work, a, false) {
            return;
        }
        let p = self.p;
        let b = &p.buffers[a.buffer.index()];
        let rule = self.read_rule(work, b);
        let cell = &mut self.cells[a.buffer.index()];
        let clock = self.order.clock(work.me.lane as usize);
        let mut holes = false;
        let range = cell.split(a.offset, a.offset + a.bytes);
        self.sink.fact(RuleId::Uninit, range.len() as u64);
        self.sink.fact(rule, range.len() as u64);
        for s in &mut cell.segments[range.clone()] {
            if s.writer.at == 0 {
                holes |= !s.filled && !is_padding(p, a.buffer, s.start..s.end);
            } else if !clock.after(s.writer) {
                self.conflicts.push(Conflict {
                    work: *work,
                    access: Access {
                        offset: s.start,
                        bytes: s.end - s.start,
                        ..a
                    },
                    writes: false,
                    earlier: s.writer,
                    earlier_wrote: true,
                    tenant: None,
                });
            }
        }
        if holes {
            self.violate(RuleId::Uninit, work.id, None, || {
                format!(
                    "reads {}, which nothing has written since its allocation",
                    describe::range(p, a)
                )
            });
        }
        self.read_state(work, a, range.clone(), inputs);
        for s in &mut self.cells[a.buffer.index()].segments[range] {
            s.read_by(work.me);
        }
    }

    fn write(&mut self, work: &mut Work, a: Access, inputs: Inputs, zeros: Zeros) {
        if !self.enter(work, a, true) {
            return;
        }
        let b = &self.p.buffers[a.buffer.index()];
        let cell = &mut self.cells[a.buffer.index()];
        let clock = self.order.clock(work.me.lane as usize);
        let range = cell.split(a.offset, a.offset + a.bytes);
        let rule = if is_full_grad(b.role) {
            RuleId::GradReuse
        } else {
            RuleId::Race
        };
        self.sink.fact(rule, range.len() as u64);
        for s in &cell.segments[range.clone()] {
            let uses = s
                .reads
                .iter()
                .map(|&r| (r, false))
                .chain((s.writer.at != 0).then_some((s.writer, true)));
            for (earlier, earlier_wrote) in uses {
                if !clock.after(earlier) {
                    self.conflicts.push(Conflict {
                        work: *work,
                        access: Access {
                            offset: s.start,
                            bytes: s.end - s.start,
                            ..a
                        },
                        writes: true,
                        earlier,
                        earlier_wrote,
                        tenant: None,
                    });
                }
            }
        }
        let (version, reduced) = self.write_state(work, a, range.clone(), inputs);
        let zeros = if work.instr.rule == Rule::ZeroGrad && is_grad(b.role) {
            Zeros::Made
        } else {
            zeros
        };
        self.cells[a.buffer.index()].overwrite(range, work.me, version, reduced, zeros);
    }

    /// Checks the lifetime, empty ranges, and earlier tenants of the address. Returns whether the
    /// access is valid.
    fn enter(&mut self, work: &mut Work, a: Access, writes: bool) -> bool {
        let p = self.p;
        let verb = if writes { "writes" } else { "reads" };
        self.sink.fact(RuleId::ZeroLength, 1);
        if a.bytes == 0 {
            self.violate(RuleId::ZeroLength, work.id, None, || {
                format!(
                    "{verb} zero bytes of {}; an empty shard takes no part",
                    describe::buffer(p, a.buffer)
                )
            });
            return false;
        }
        self.sink.fact(RuleId::Lifetime, 1);
        let lane = work.me.lane as usize;
        let cell = &mut self.cells[a.buffer.index()];
        if !cell.live {
            let freed = cell.freed;
            self.violate(RuleId::Lifetime, work.id, freed, || match freed {
                Some(f) => format!(
                    "{verb} {} after its free in #{}",
                    describe::range(p, a),
                    f.0
                ),
                None => format!(
                    "{verb} {}, which was never allocated",
                    describe::range(p, a)
                ),
            });
            return false;
        }
        cell.last[lane] = work.me.at;
        if !cell.before.is_empty() && cell.cleared & (1 << lane) == 0 {
            self.sink.fact(RuleId::Reuse, cell.before.len() as u64);
            let clock = self.order.clock(lane);
            let (from, to) = (cell.address + a.offset, cell.address + a.offset + a.bytes);
            let mut all = true;
            for t in &cell.before {
                let Some(earlier) = clock.missing(&t.last) else {
                    continue;
                };
                all = false;
                // A tenant at other addresses of this buffer does not conflict with this access.
                if t.start < to && t.end > from {
                    self.conflicts.push(Conflict {
                        work: *work,
                        access: a,
                        writes,
                        earlier,
                        earlier_wrote: false,
                        tenant: Some(t.buffer),
                    });
                }
            }
            if all {
                cell.cleared |= 1 << lane;
            }
        }
        self.scope_address(work, a);
        true
    }

    fn collective_of(&self, op: Op) -> Option<&Collective> {
        match op {
            Op::Collective { id, .. } => Some(&self.p.collectives[id.index()]),
            _ => None,
        }
    }

    /// Returns the rule that a read violates if it is not ordered after the write.
    fn read_rule(&self, work: &Work, b: &Buffer) -> RuleId {
        let collective = self.collective_of(work.instr.op);
        match collective.map(|c| c.kind) {
            Some(CollectiveKind::AllGather) => RuleId::GatherInput,
            // Packing the shard is the gather's first part.
            None if work.instr.rule == Rule::CopyIn && at_rest(b.role) => RuleId::GatherInput,
            Some(_)
                if is_grad(b.role) && collective.is_some_and(|c| self.reduction_of(c).any()) =>
            {
                RuleId::ReduceInput
            }
            // Scaling is the reduction's first part.
            None if work.instr.rule == Rule::Scale && is_full_grad(b.role) => RuleId::ReduceInput,
            None if matches!(b.role, Role::FullWeight | Role::GatherBuffer) => RuleId::GatherDone,
            None if is_grad(b.role)
                && matches!(work.instr.phase, Phase::Optimizer | Phase::Clip) =>
            {
                RuleId::ReduceMissing
            }
            _ => RuleId::Race,
        }
    }

    fn conflict_rule(&self, c: &Conflict) -> RuleId {
        let p = self.p;
        let b = &p.buffers[c.access.buffer.index()];
        let earlier = self.collective_of(p.instrs[self.id_at(c.earlier.at).index()].op);
        let reduced = earlier.is_some_and(|c| self.reduction_of(c).any());
        if let Some(t) = c.tenant {
            let grads = is_full_grad(p.buffers[t.index()].role);
            return if reduced && grads {
                RuleId::GradReuse
            } else {
                RuleId::Reuse
            };
        }
        if !c.writes {
            return self.read_rule(&c.work, b);
        }
        if reduced && !c.earlier_wrote && is_full_grad(b.role) {
            RuleId::GradReuse
        } else {
            RuleId::Race
        }
    }

    /// Turns unordered pairs into violations.
    pub(super) fn report_conflicts(&mut self) {
        let p = self.p;
        for c in std::mem::take(&mut self.conflicts) {
            let known = self.known(c.work.me.lane, c.earlier);
            let rule = if known == Known::ByCommunicator {
                RuleId::CommOrder
            } else {
                self.conflict_rule(&c)
            };
            let other = self.id_at(c.earlier.at);
            let them = self.describe_at(c.earlier.at);
            let (verb, what) = (
                if c.writes { "writes" } else { "reads" },
                describe::range(p, c.access),
            );
            let theirs = match c.tenant {
                Some(t) if t == c.access.buffer => {
                    "its use of the same address in the allocation before".to_owned()
                }
                Some(t) => format!(
                    "its use of {}, the tenant before at that address",
                    describe::buffer(p, t)
                ),
                None if c.earlier_wrote => "its write".to_owned(),
                None => "its read".to_owned(),
            };
            let lane = p.streams[self.order.stream_of(c.work.me.lane as usize).index()]
                .kind
                .name();
            let from = p.streams[self.order.stream_of(c.earlier.lane as usize).index()]
                .kind
                .name();
            self.violate(rule, c.work.id, Some(other), || {
                if known == Known::ByCommunicator {
                    format!("{verb} {what} after {them} only because both use one communicator")
                } else {
                    format!(
                        "{verb} {what} without being ordered behind {them} ({theirs}); expected {lane} to wait for an \
                         event recorded on {from} after #{}",
                        other.0
                    )
                }
            });
        }
    }
}

const _: () = assert!(LANES <= 32, "lanes are bits of a u32");
