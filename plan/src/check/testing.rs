//! A small, correct fully sharded program, and ways to break it.
//!
//! It has three units with one flat group each, over four ranks. Gathers run on a separate stream
//! after a gate, prefetched by one unit; weights are freed after a wait. Gradients are written
//! directly into flat buffers, reduced with K in flight, and accumulated into a shard. A step ends
//! with a fence, clipping, the optimizer, zeroing and a refresh.

mod observed;
mod tables;

pub(crate) use observed::{clocks, implied_waits};

use crate::ir::*;
use crate::program::*;
use smallvec::smallvec;

pub(crate) const AG: StreamId = StreamId(1);
pub(crate) const RS: StreamId = StreamId(2);
pub(crate) const UNITS: usize = 3;
const RANKS: u64 = 4;
const NUMEL: u64 = 1088;
const SHARD: u64 = NUMEL / RANKS;
/// Offset and bytes of the two parameters within a bf16 full buffer.
const WEIGHT: (u64, u64) = (0, 2048);
const BIAS: (u64, u64) = (2048, 64);

/// Variants of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) micro_batches: u16,
    pub(crate) in_flight: usize,
    pub(crate) prefetch: bool,
    pub(crate) recompute: bool,
    /// Capture the forward kernel of the middle unit.
    pub(crate) scope: bool,
    pub(crate) validation: bool,
    pub(crate) one_communicator: bool,
    pub(crate) pool: Pool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            micro_batches: 1,
            in_flight: 2,
            prefetch: true,
            recompute: false,
            scope: false,
            validation: false,
            one_communicator: false,
            pool: Pool::Caching,
        }
    }
}

#[derive(Clone, Copy)]
enum K {
    Forward,
    Loss,
    Backward,
    Add,
    Square,
    Scale,
    Adam,
    Zero,
    Cast,
}

/// The program with the buffers of each unit.
#[derive(Clone, Debug)]
pub(crate) struct Toy {
    pub(crate) b: ProgramBuilder,
    pub(crate) model: Vec<BufferId>,
    pub(crate) main: Vec<BufferId>,
    pub(crate) rest: Vec<BufferId>,
    pub(crate) moments: Vec<BufferId>,
    pub(crate) full: Vec<BufferId>,
    pub(crate) grad: Vec<BufferId>,
    pub(crate) reduced: Vec<BufferId>,
    pub(crate) act: Vec<BufferId>,
    pub(crate) dact: Vec<BufferId>,
    pub(crate) input: BufferId,
    pub(crate) norm: BufferId,
    shape: Shape,
    is_full: [bool; UNITS],
    done: [Option<EventId>; UNITS],
    queue: Vec<(usize, EventId)>,
}

impl Toy {
    /// Builds a variant of the program.
    pub(crate) fn new(shape: Shape) -> Self {
        let mut t = Self {
            b: tables::program(shape),
            model: vec![],
            main: vec![],
            rest: vec![],
            moments: vec![],
            full: vec![],
            grad: vec![],
            reduced: vec![],
            act: vec![],
            dact: vec![],
            input: BufferId(0),
            norm: BufferId(0),
            shape,
            is_full: [false; UNITS],
            done: [None; UNITS],
            queue: vec![],
        };
        t.buffers();
        t.init();
        t.step(SectionKind::First);
        t.step(SectionKind::Steady);
        if shape.validation {
            t.validation();
        }
        t
    }

    /// Returns the instructions of a section that match.
    pub(crate) fn find(&self, kind: SectionKind, f: impl Fn(&Instr) -> bool) -> Vec<InstrId> {
        let r = self
            .b
            .program
            .section(kind)
            .expect("section")
            .instrs
            .clone();
        r.filter(|&i| f(&self.b.program.instrs[i as usize]))
            .map(InstrId)
            .collect()
    }

    /// Returns the `n`-th steady instruction of a unit and phase whose operation matches.
    pub(crate) fn at(
        &self,
        unit: usize,
        phase: Phase,
        n: usize,
        f: impl Fn(&Op) -> bool,
    ) -> InstrId {
        self.find(SectionKind::Steady, |i| {
            i.unit.index() == unit && i.phase == phase && f(&i.op)
        })[n]
    }

    /// Replaces an instruction by one that does nothing.
    pub(crate) fn drop(&mut self, id: InstrId) -> Op {
        let nothing = Op::HostWork {
            kind: HostWorkKind::Hook,
            count: 0,
        };
        std::mem::replace(&mut self.b.program.instrs[id.index()].op, nothing)
    }

    /// Inserts an operation before an instruction. It gets the tag of that instruction.
    pub(crate) fn insert(&mut self, before: InstrId, op: Op) -> InstrId {
        let instr = Instr {
            op,
            ..self.b.program.instrs[before.index()]
        };
        self.b.program.instrs.insert(before.index(), instr);
        for s in &mut self.b.program.sections {
            if s.instrs.start > before.0 {
                s.instrs.start += 1;
            }
            if s.instrs.end > before.0 {
                s.instrs.end += 1;
            }
        }
        before
    }

    /// Moves an instruction before a later one. Returns its new position.
    pub(crate) fn delay(&mut self, from: InstrId, before: InstrId) -> InstrId {
        assert!(from < before);
        let i = self.b.program.instrs.remove(from.index());
        self.b.program.instrs.insert(before.index() - 1, i);
        InstrId(before.0 - 1)
    }

    /// Moves an instruction before an earlier one, so that the instructions between them move back
    /// by one.
    pub(crate) fn hoist(&mut self, from: InstrId, before: InstrId) {
        assert!(from > before);
        let i = self.b.program.instrs.remove(from.index());
        self.b.program.instrs.insert(before.index(), i);
    }

    /// Adds an event.
    pub(crate) fn event(&mut self) -> EventId {
        self.b.add_event()
    }

    /// Returns the range of a whole buffer.
    pub(crate) fn all(&self, b: BufferId) -> Access {
        self.b.whole(b)
    }

    /// Adds a collective descriptor.
    pub(crate) fn descriptor(
        &mut self,
        kind: CollectiveKind,
        comm: u8,
        input: Access,
        output: Access,
    ) -> CollectiveId {
        let reduce = if kind.reduces() {
            ReduceOp::Avg
        } else {
            ReduceOp::None
        };
        let dtype = self.b.program.buffers[input.buffer.index()].dtype;
        let parts = smallvec![Part { input, output }];
        self.b
            .add_collective(kind, CommId(comm), reduce, dtype, parts, None)
    }

    fn collective(&mut self, id: usize, stream: StreamId) {
        let id = CollectiveId(id as u32);
        self.b.emit(Op::Collective { id, stream });
    }

    fn rule(&mut self, u: usize, rule: Rule) {
        self.b.tag.unit = UnitId(u as u16);
        self.b.tag.rule = rule;
    }

    fn phase(&mut self, phase: Phase) {
        self.b.tag.phase = phase;
    }

    fn launch(&mut self, k: K, stream: StreamId, r: &[Access], w: &[Access]) {
        let op = self.operands(k as u32, stream, r, w);
        self.b.emit(op);
    }

    /// Returns a launch of the n-th kernel of the table on these ranges.
    pub(crate) fn operands(
        &mut self,
        kernel: u32,
        stream: StreamId,
        r: &[Access],
        w: &[Access],
    ) -> Op {
        let (reads, writes) = (r.iter().copied(), w.iter().copied());
        self.b.launch_op(KernelId(kernel), stream, reads, writes)
    }

    fn init(&mut self) {
        self.phase(Phase::Init);
        for u in 0..UNITS {
            self.rule(u, Rule::State);
            for b in [self.model[u], self.main[u], self.rest[u]] {
                self.b.alloc(b);
            }
        }
        self.b.end_section(SectionKind::Init);
    }

    fn unshard(&mut self, u: usize, rule: Rule) {
        if self.is_full[u] {
            return;
        }
        self.is_full[u] = true;
        self.rule(u, Rule::GatherGate);
        self.b.alloc(self.full[u]);
        let e = self.b.record(COMPUTE);
        self.b.wait(e, AG);
        self.rule(u, rule);
        self.collective(2 * u, AG);
        self.done[u] = Some(self.b.record(AG));
    }

    fn ready(&mut self, u: usize) {
        self.unshard(u, Rule::Unshard);
        self.rule(u, Rule::GatherDone);
        let e = self.done[u].expect("gathered");
        self.b.wait(e, COMPUTE);
    }

    fn reshard(&mut self, u: usize) {
        self.rule(u, Rule::Reshard);
        let e = self.b.record(COMPUTE);
        self.b.wait(e, AG);
        self.b.free(self.full[u]);
        self.is_full[u] = false;
    }

    fn weights(&self, u: usize) -> [Access; 2] {
        let b = self.full[u];
        [WEIGHT, BIAS].map(|(offset, bytes)| Access {
            buffer: b,
            offset,
            bytes,
            per_rank: None,
        })
    }

    fn below(&self, u: usize) -> Access {
        self.all(if u == 0 { self.input } else { self.act[u - 1] })
    }

    fn forward(&mut self) {
        for u in 0..UNITS {
            self.ready(u);
            if self.shape.prefetch && u + 1 < UNITS {
                self.unshard(u + 1, Rule::Prefetch);
            }
            self.rule(u, Rule::Model);
            self.b.alloc(self.act[u]);
            let scope = self.shape.scope && u == 1;
            if scope {
                self.b.emit(Op::GraphBegin(ScopeId(0)));
            }
            let [w, b] = self.weights(u);
            self.launch(
                K::Forward,
                COMPUTE,
                &[w, b, self.below(u)],
                &[self.all(self.act[u])],
            );
            if scope {
                self.b.emit(Op::GraphEnd(ScopeId(0)));
            }
            if self.b.tag.phase == Phase::Validation && u > 0 {
                self.b.free(self.act[u - 1]);
            }
            self.reshard(u);
        }
    }

    fn backward(&mut self) {
        let last = UNITS - 1;
        self.rule(last, Rule::Model);
        self.b.alloc(self.dact[last]);
        self.launch(
            K::Loss,
            COMPUTE,
            &[self.all(self.act[last])],
            &[self.all(self.dact[last])],
        );
        for u in (0..UNITS).rev() {
            self.ready(u);
            if self.shape.prefetch && u > 0 {
                self.unshard(u - 1, Rule::Prefetch);
            }
            let [w, b] = self.weights(u);
            if self.shape.recompute {
                self.phase(Phase::Recompute);
                self.rule(u, Rule::Model);
                self.launch(
                    K::Forward,
                    COMPUTE,
                    &[w, b, self.below(u)],
                    &[self.all(self.act[u])],
                );
                self.phase(Phase::Backward);
            }
            while self.queue.iter().any(|q| q.0 == u) {
                self.release();
            }
            self.rule(u, Rule::Grad);
            self.b.alloc(self.grad[u]);
            self.rule(u, Rule::Model);
            let g = self.grad[u];
            let [gw, gb] = [WEIGHT, BIAS].map(|(offset, bytes)| Access {
                buffer: g,
                offset,
                bytes,
                per_rank: None,
            });
            let (above, below) = (self.all(self.dact[u]), self.below(u));
            if u > 0 {
                self.b.alloc(self.dact[u - 1]);
                let d = self.all(self.dact[u - 1]);
                self.launch(K::Backward, COMPUTE, &[w, b, below, above], &[gw, gb, d]);
            } else {
                self.launch(K::Backward, COMPUTE, &[w, b, below, above], &[gw, gb]);
            }
            self.b.free(self.dact[u]);
            self.b.free(self.act[u]);
            self.reshard(u);
            self.reduce(u);
        }
    }

    fn release(&mut self) {
        let (u, e) = self.queue.remove(0);
        let unit = self.b.tag.unit;
        self.rule(u, Rule::ReduceRelease);
        self.b.wait(e, COMPUTE);
        self.b.free(self.grad[u]);
        self.b.tag.unit = unit;
    }

    fn reduce(&mut self, u: usize) {
        while self.queue.len() >= self.shape.in_flight {
            self.release();
        }
        self.rule(u, Rule::ReduceFork);
        let e = self.b.record(COMPUTE);
        self.b.wait(e, RS);
        self.rule(u, Rule::Reduce);
        self.b.alloc(self.reduced[u]);
        self.collective(2 * u + 1, RS);
        self.rule(u, Rule::ReduceAccumulate);
        let rest = self.all(self.rest[u]);
        self.launch(K::Add, RS, &[self.all(self.reduced[u]), rest], &[rest]);
        self.b.free(self.reduced[u]);
        let e = self.b.record(RS);
        self.queue.push((u, e));
    }

    fn step(&mut self, kind: SectionKind) {
        self.b.tag = Tag {
            unit: UnitId(0),
            micro_batch: 0,
            phase: Phase::Start,
            rule: Rule::StepStart,
        };
        self.b.alloc(self.input);
        if kind == SectionKind::First {
            for u in 0..UNITS {
                self.rule(u, Rule::State);
                self.b.alloc(self.moments[u]);
                self.launch(K::Zero, COMPUTE, &[], &[self.all(self.moments[u])]);
            }
        }
        for m in 0..self.shape.micro_batches {
            self.b.tag.micro_batch = m;
            self.phase(Phase::Forward);
            self.forward();
            self.phase(Phase::Backward);
            self.backward();
        }
        self.phase(Phase::Final);
        while !self.queue.is_empty() {
            self.release();
        }
        self.rule(0, Rule::FinalFence);
        let e = self.b.record(RS);
        self.b.wait(e, COMPUTE);
        self.optimizer();
        self.rule(0, Rule::StepStart);
        self.b.free(self.input);
        self.b.end_section(kind);
    }

    fn optimizer(&mut self) {
        self.phase(Phase::Clip);
        self.rule(0, Rule::Clip);
        self.b.alloc(self.norm);
        let norm = self.all(self.norm);
        let rests: Vec<Access> = self.rest.iter().map(|&b| self.all(b)).collect();
        self.launch(K::Square, COMPUTE, &rests, &[norm]);
        self.collective(2 * UNITS, COMPUTE);
        let mut reads = rests.clone();
        reads.push(norm);
        self.launch(K::Scale, COMPUTE, &reads, &rests);
        self.b.free(self.norm);
        for (u, &rest) in rests.iter().enumerate() {
            self.phase(Phase::Optimizer);
            self.rule(u, Rule::Optimizer);
            let [w, m] = [self.main[u], self.moments[u]].map(|b| self.all(b));
            self.launch(K::Adam, COMPUTE, &[rest, w, m], &[w, m]);
            self.rule(u, Rule::ZeroGrad);
            self.launch(K::Zero, COMPUTE, &[], &[rest]);
            self.phase(Phase::Refresh);
            self.rule(u, Rule::Refresh);
            self.launch(K::Cast, COMPUTE, &[w], &[self.all(self.model[u])]);
        }
    }

    fn validation(&mut self) {
        self.b.tag = Tag {
            unit: UnitId(0),
            micro_batch: 0,
            phase: Phase::Validation,
            rule: Rule::StepStart,
        };
        self.b.alloc(self.input);
        self.forward();
        self.rule(0, Rule::StepStart);
        self.b.free(self.act[UNITS - 1]);
        self.b.free(self.input);
        self.b.end_section(SectionKind::Validation);
    }
}
