//! A small, correct fully sharded program, and ways to break it.
//!
//! Three units of one flat group each over four ranks: gathers on their own stream behind a gate,
//! prefetched by one; weights freed behind a wait; gradients written straight into flat buffers,
//! reduced with K in flight, accumulated into a shard; fence, clipping, optimizer, zeroing,
//! refresh.

mod observed;
mod tables;

pub(crate) use observed::{clocks, implied_waits};

use crate::ir::*;
use crate::program::*;
use crate::units::Bytes;
use smallvec::smallvec;

pub(crate) const AG: StreamId = StreamId(1);
pub(crate) const RS: StreamId = StreamId(2);
pub(crate) const UNITS: usize = 3;
const RANKS: u64 = 4;
const NUMEL: u64 = 1088;
const SHARD: u64 = NUMEL / RANKS;
/// Bytes of the two parameters within a bf16 full buffer.
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
    pub(crate) p: Program,
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
    at: (UnitId, u16, Phase, Rule),
}

impl Toy {
    /// Builds a variant.
    pub(crate) fn new(shape: Shape) -> Self {
        let mut t = Self {
            p: tables::program(shape),
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
            at: (UnitId(0), 0, Phase::Init, Rule::State),
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

    /// Instructions of a section that match.
    pub(crate) fn find(&self, kind: SectionKind, f: impl Fn(&Instr) -> bool) -> Vec<InstrId> {
        let r = self.p.section(kind).expect("section").instrs.clone();
        r.filter(|&i| f(&self.p.instrs[i as usize]))
            .map(InstrId)
            .collect()
    }

    /// The steady instruction with this operation (by predicate) of a unit and phase, the n-th.
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

    /// Makes an instruction do nothing.
    pub(crate) fn drop(&mut self, id: InstrId) -> Op {
        let nothing = Op::HostWork {
            kind: HostWorkKind::Hook,
            count: 0,
        };
        std::mem::replace(&mut self.p.instrs[id.index()].op, nothing)
    }

    /// Inserts an operation before an instruction, with its provenance.
    pub(crate) fn insert(&mut self, before: InstrId, op: Op) -> InstrId {
        let instr = Instr {
            op,
            ..self.p.instrs[before.index()]
        };
        self.p.instrs.insert(before.index(), instr);
        for s in &mut self.p.sections {
            if s.instrs.start > before.0 {
                s.instrs.start += 1;
            }
            if s.instrs.end > before.0 {
                s.instrs.end += 1;
            }
        }
        before
    }

    /// Moves an instruction before another (later) one; where it is then.
    pub(crate) fn delay(&mut self, from: InstrId, before: InstrId) -> InstrId {
        assert!(from < before);
        let i = self.p.instrs.remove(from.index());
        self.p.instrs.insert(before.index() - 1, i);
        InstrId(before.0 - 1)
    }

    /// Moves an instruction before an earlier one; where the others are then: one later.
    pub(crate) fn hoist(&mut self, from: InstrId, before: InstrId) {
        assert!(from > before);
        let i = self.p.instrs.remove(from.index());
        self.p.instrs.insert(before.index(), i);
    }

    /// A new event.
    pub(crate) fn event(&mut self) -> EventId {
        self.p.events += 1;
        EventId(self.p.events - 1)
    }

    /// A whole buffer.
    pub(crate) fn all(&self, b: BufferId) -> Access {
        Access {
            buffer: b,
            offset: 0,
            bytes: self.p.buffers[b.index()].bytes.0,
            per_rank: None,
        }
    }

    /// Adds a collective descriptor.
    pub(crate) fn descriptor(
        &mut self,
        kind: CollectiveKind,
        comm: u8,
        input: Access,
        output: Access,
    ) -> CollectiveId {
        let reduces = matches!(
            kind,
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce
        );
        self.p.collectives.push(Collective {
            kind,
            comm: CommId(comm),
            reduce: if reduces {
                ReduceOp::Avg
            } else {
                ReduceOp::None
            },
            dtype: self.p.buffers[input.buffer.index()].dtype,
            bytes: Bytes(input.bytes.max(output.bytes)),
            parts: smallvec![Part { input, output }],
        });
        CollectiveId(self.p.collectives.len() as u32 - 1)
    }

    fn emit(&mut self, op: Op) -> InstrId {
        let (unit, micro_batch, phase, rule) = self.at;
        self.p.instrs.push(Instr {
            op,
            unit,
            micro_batch,
            phase,
            rule,
        });
        InstrId(self.p.instrs.len() as u32 - 1)
    }

    fn rule(&mut self, u: usize, rule: Rule) {
        self.at.0 = UnitId(u as u16);
        self.at.3 = rule;
    }

    fn alloc(&mut self, b: BufferId) {
        self.emit(Op::Alloc(b));
    }

    fn free(&mut self, b: BufferId) {
        self.emit(Op::Free(b));
    }

    fn record(&mut self, stream: StreamId) -> EventId {
        let event = self.event();
        self.emit(Op::Record { event, stream });
        event
    }

    fn wait(&mut self, event: EventId, stream: StreamId) {
        self.emit(Op::Wait { event, stream });
    }

    fn launch(&mut self, k: K, stream: StreamId, r: &[Access], w: &[Access]) {
        let op = self.operands(k as u32, stream, r, w);
        self.emit(op);
    }

    /// A launch of the n-th kernel of the table over these ranges.
    pub(crate) fn operands(
        &mut self,
        kernel: u32,
        stream: StreamId,
        r: &[Access],
        w: &[Access],
    ) -> Op {
        let reads = self.p.accesses.len() as u32;
        self.p.accesses.extend_from_slice(r);
        let writes = self.p.accesses.len() as u32;
        self.p.accesses.extend_from_slice(w);
        let end = self.p.accesses.len() as u32;
        Op::Launch {
            kernel: KernelId(kernel),
            stream,
            reads,
            writes,
            end,
        }
    }

    fn section(&mut self, kind: SectionKind, from: usize) {
        let instrs = from as u32..self.p.instrs.len() as u32;
        self.p.sections.push(Section { kind, instrs });
    }

    fn init(&mut self) {
        for u in 0..UNITS {
            self.rule(u, Rule::State);
            for b in [self.model[u], self.main[u], self.rest[u]] {
                self.alloc(b);
            }
        }
        self.section(SectionKind::Init, 0);
    }

    fn unshard(&mut self, u: usize, rule: Rule) {
        if self.is_full[u] {
            return;
        }
        self.is_full[u] = true;
        self.rule(u, Rule::GatherGate);
        self.alloc(self.full[u]);
        let e = self.record(COMPUTE);
        self.wait(e, AG);
        self.rule(u, rule);
        self.emit(Op::Collective {
            id: CollectiveId(2 * u as u32),
            stream: AG,
        });
        self.done[u] = Some(self.record(AG));
    }

    fn ready(&mut self, u: usize) {
        self.unshard(u, Rule::Unshard);
        self.rule(u, Rule::GatherDone);
        let e = self.done[u].expect("gathered");
        self.wait(e, COMPUTE);
    }

    fn reshard(&mut self, u: usize) {
        self.rule(u, Rule::Reshard);
        let e = self.record(COMPUTE);
        self.wait(e, AG);
        self.free(self.full[u]);
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
            self.alloc(self.act[u]);
            let scope = self.shape.scope && u == 1;
            if scope {
                self.emit(Op::GraphBegin(ScopeId(0)));
            }
            let [w, b] = self.weights(u);
            self.launch(
                K::Forward,
                COMPUTE,
                &[w, b, self.below(u)],
                &[self.all(self.act[u])],
            );
            if scope {
                self.emit(Op::GraphEnd(ScopeId(0)));
            }
            if self.at.2 == Phase::Validation && u > 0 {
                self.free(self.act[u - 1]);
            }
            self.reshard(u);
        }
    }

    fn backward(&mut self) {
        let last = UNITS - 1;
        self.rule(last, Rule::Model);
        self.alloc(self.dact[last]);
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
                self.at.2 = Phase::Recompute;
                self.rule(u, Rule::Model);
                self.launch(
                    K::Forward,
                    COMPUTE,
                    &[w, b, self.below(u)],
                    &[self.all(self.act[u])],
                );
                self.at.2 = Phase::Backward;
            }
            while self.queue.iter().any(|q| q.0 == u) {
                self.release();
            }
            self.rule(u, Rule::Grad);
            self.alloc(self.grad[u]);
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
                self.alloc(self.dact[u - 1]);
                let d = self.all(self.dact[u - 1]);
                self.launch(K::Backward, COMPUTE, &[w, b, below, above], &[gw, gb, d]);
            } else {
                self.launch(K::Backward, COMPUTE, &[w, b, below, above], &[gw, gb]);
            }
            self.free(self.dact[u]);
            self.free(self.act[u]);
            self.reshard(u);
            self.reduce(u);
        }
    }

    fn release(&mut self) {
        let (u, e) = self.queue.remove(0);
        let unit = self.at.0;
        self.rule(u, Rule::ReduceRelease);
        self.wait(e, COMPUTE);
        self.free(self.grad[u]);
        self.at.0 = unit;
    }

    fn reduce(&mut self, u: usize) {
        while self.queue.len() >= self.shape.in_flight {
            self.release();
        }
        self.rule(u, Rule::ReduceFork);
        let e = self.record(COMPUTE);
        self.wait(e, RS);
        self.rule(u, Rule::Reduce);
        self.alloc(self.reduced[u]);
        self.emit(Op::Collective {
            id: CollectiveId(2 * u as u32 + 1),
            stream: RS,
        });
        self.rule(u, Rule::ReduceAccumulate);
        let rest = self.all(self.rest[u]);
        self.launch(K::Add, RS, &[self.all(self.reduced[u]), rest], &[rest]);
        self.free(self.reduced[u]);
        let e = self.record(RS);
        self.queue.push((u, e));
    }

    fn step(&mut self, kind: SectionKind) {
        let from = self.p.instrs.len();
        self.at = (UnitId(0), 0, Phase::Start, Rule::StepStart);
        self.alloc(self.input);
        if kind == SectionKind::First {
            for u in 0..UNITS {
                self.rule(u, Rule::State);
                self.alloc(self.moments[u]);
                self.launch(K::Zero, COMPUTE, &[], &[self.all(self.moments[u])]);
            }
        }
        for m in 0..self.shape.micro_batches {
            self.at.1 = m;
            self.at.2 = Phase::Forward;
            self.forward();
            self.at.2 = Phase::Backward;
            self.backward();
        }
        self.at.2 = Phase::Final;
        while !self.queue.is_empty() {
            self.release();
        }
        self.rule(0, Rule::FinalFence);
        let e = self.record(RS);
        self.wait(e, COMPUTE);
        self.optimizer();
        self.rule(0, Rule::StepStart);
        self.free(self.input);
        self.section(kind, from);
    }

    fn optimizer(&mut self) {
        self.at.2 = Phase::Clip;
        self.rule(0, Rule::Clip);
        self.alloc(self.norm);
        let norm = self.all(self.norm);
        let rests: Vec<Access> = self.rest.iter().map(|&b| self.all(b)).collect();
        self.launch(K::Square, COMPUTE, &rests, &[norm]);
        self.emit(Op::Collective {
            id: CollectiveId(2 * UNITS as u32),
            stream: COMPUTE,
        });
        let mut reads = rests.clone();
        reads.push(norm);
        self.launch(K::Scale, COMPUTE, &reads, &rests);
        self.free(self.norm);
        for (u, &rest) in rests.iter().enumerate() {
            self.at.2 = Phase::Optimizer;
            self.rule(u, Rule::Optimizer);
            let [w, m] = [self.main[u], self.moments[u]].map(|b| self.all(b));
            self.launch(K::Adam, COMPUTE, &[rest, w, m], &[w, m]);
            self.rule(u, Rule::ZeroGrad);
            self.launch(K::Zero, COMPUTE, &[], &[rest]);
            self.at.2 = Phase::Refresh;
            self.rule(u, Rule::Refresh);
            self.launch(K::Cast, COMPUTE, &[w], &[self.all(self.model[u])]);
        }
    }

    fn validation(&mut self) {
        let from = self.p.instrs.len();
        self.at = (UnitId(0), 0, Phase::Validation, Rule::StepStart);
        self.alloc(self.input);
        self.forward();
        self.rule(0, Rule::StepStart);
        self.free(self.act[UNITS - 1]);
        self.free(self.input);
        self.section(SectionKind::Validation, from);
    }
}
