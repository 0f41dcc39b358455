//! Emission of instructions: interning, operands, events.

use crate::ir::{
    Access, Buffer, BufferId, COMPUTE, Collective, CollectiveId, CollectiveKind, CommId, CopyDesc,
    CopyId, CopyKind, DType, EventId, Holds, HostWorkKind, Kernel, KernelId, Part, Pool, ReduceOp,
    Role, ScopeId, StreamId, UnitId,
};
use crate::program::{CaptureScope, Communicator, Instr, Op, Phase, Rule, Stream, StreamKind};
use crate::units::Bytes;
use smallvec::SmallVec;

/// What a new buffer is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBuffer {
    pub(crate) role: Role,
    pub(crate) bytes: u64,
    pub(crate) dtype: DType,
    pub(crate) pool: Pool,
    pub(crate) stream: StreamId,
    pub(crate) unit: UnitId,
    pub(crate) holds: Holds,
}

/// Launch of a collective.
#[derive(Clone, Debug)]
pub(crate) struct CollectiveLaunch {
    pub(crate) rule: Rule,
    pub(crate) stream: StreamId,
    pub(crate) kind: CollectiveKind,
    pub(crate) comm: CommId,
    pub(crate) reduce: ReduceOp,
    pub(crate) dtype: DType,
    pub(crate) parts: SmallVec<[Part; 1]>,
}

/// The growing program and the tag of the next instruction.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    pub(crate) instrs: Vec<Instr>,
    /// Instructions that only the first step has (positions in `instrs`).
    pub(crate) first_only: Vec<u32>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) collectives: Vec<Collective>,
    pub(crate) copies: Vec<CopyDesc>,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) streams: Vec<Stream>,
    pub(crate) communicators: Vec<Communicator>,
    pub(crate) scopes: Vec<CaptureScope>,
    pub(crate) events: u32,
    unit: UnitId,
    phase: Option<Phase>,
    micro_batch: u16,
    /// Event that already stands for everything issued so far on a stream.
    fresh: SmallVec<[Option<EventId>; 8]>,
    open_scope: Option<ScopeId>,
}

impl Builder {
    pub(crate) fn add_stream(&mut self, kind: StreamKind, priority: i8) -> StreamId {
        let id = StreamId(
            u8::try_from(self.streams.len()).expect("a policy makes at most eight streams"),
        );
        self.streams.push(Stream { kind, priority });
        self.fresh.push(None);
        id
    }

    pub(crate) fn add_communicator(&mut self, comm: Communicator) -> CommId {
        let id = CommId(
            u8::try_from(self.communicators.len())
                .expect("a policy makes at most eight communicators"),
        );
        self.communicators.push(comm);
        id
    }

    /// Tag of the instructions that follow.
    pub(crate) fn at(&mut self, unit: UnitId, phase: Phase) {
        self.unit = unit;
        self.phase = Some(phase);
    }

    pub(crate) fn micro_batch(&mut self, m: u16) {
        self.micro_batch = m;
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.unwrap_or(Phase::Init)
    }

    pub(crate) fn unit(&self) -> UnitId {
        self.unit
    }

    fn emit(&mut self, rule: Rule, op: Op) {
        let instr = Instr {
            op,
            unit: self.unit,
            micro_batch: self.micro_batch,
            phase: self.phase(),
            rule,
        };
        self.instrs.push(instr);
    }

    /// Runs `f` and marks what it emits as belonging to the first step only.
    pub(crate) fn first_only(&mut self, f: impl FnOnce(&mut Self)) {
        let from = self.instrs.len() as u32;
        f(self);
        self.first_only.extend(from..self.instrs.len() as u32);
    }

    /// Marks instructions that were emitted last, with the events they record, as belonging to the
    /// first step only.
    pub(crate) fn withhold_from_later(&mut self, instrs: std::ops::Range<u32>) {
        self.first_only.extend(instrs);
        // Later steps record none of their events.
        self.new_section();
    }

    pub(crate) fn buffer(&mut self, new: NewBuffer) -> BufferId {
        let id = BufferId(self.buffers.len() as u32);
        self.buffers.push(Buffer {
            role: new.role,
            bytes: Bytes(new.bytes),
            dtype: new.dtype,
            align: 256,
            pool: new.pool,
            stream: new.stream,
            unit: new.unit,
            holds: new.holds,
            key: id.0,
        });
        id
    }

    pub(crate) fn alloc(&mut self, rule: Rule, buffer: BufferId) {
        self.emit(rule, Op::Alloc(buffer));
    }

    pub(crate) fn free(&mut self, rule: Rule, buffer: BufferId) {
        self.emit(rule, Op::Free(buffer));
    }

    /// The whole of a buffer.
    pub(crate) fn whole(&self, buffer: BufferId) -> Access {
        Access {
            buffer,
            offset: 0,
            bytes: self.buffers[buffer.index()].bytes.0,
            per_rank: None,
        }
    }

    /// Interns a kernel by value (policies make few of them).
    pub(crate) fn kernel(&mut self, kernel: Kernel) -> KernelId {
        let id = KernelId(self.kernels.len() as u32);
        self.kernels.push(kernel);
        id
    }

    pub(crate) fn launch(
        &mut self,
        rule: Rule,
        kernel: KernelId,
        stream: StreamId,
        reads: impl IntoIterator<Item = Access>,
        writes: impl IntoIterator<Item = Access>,
    ) {
        let first = self.accesses.len() as u32;
        self.accesses.extend(reads);
        let middle = self.accesses.len() as u32;
        self.accesses.extend(writes);
        let end = self.accesses.len() as u32;
        self.fresh[stream.index()] = None;
        self.emit(
            rule,
            Op::Launch {
                kernel,
                stream,
                reads: first,
                writes: middle,
                end,
            },
        );
        self.count_in_scope();
    }

    fn count_in_scope(&mut self) {
        if let Some(scope) = self.open_scope {
            self.scopes[scope.index()].launches += 1;
        }
    }

    pub(crate) fn collective(&mut self, launch: CollectiveLaunch) {
        let parts = launch.parts.iter();
        let id = CollectiveId(self.collectives.len() as u32);
        self.collectives.push(Collective {
            kind: launch.kind,
            comm: launch.comm,
            reduce: launch.reduce,
            dtype: launch.dtype,
            bytes: parts
                .map(|p| Bytes(p.input.bytes.max(p.output.bytes)))
                .sum(),
            parts: launch.parts,
        });
        let stream = launch.stream;
        self.fresh[stream.index()] = None;
        self.emit(launch.rule, Op::Collective { id, stream });
        self.count_in_scope();
    }

    /// Copies the whole of one buffer to another of the same size by copy engine.
    pub(crate) fn copy(
        &mut self,
        rule: Rule,
        kind: CopyKind,
        from: BufferId,
        to: BufferId,
        stream: StreamId,
    ) {
        let id = CopyId(self.copies.len() as u32);
        let (from, to) = (self.whole(from), self.whole(to));
        self.copies.push(CopyDesc { kind, from, to });
        self.fresh[stream.index()] = None;
        self.emit(rule, Op::Copy { id, stream });
        self.count_in_scope();
    }

    /// An event after everything issued on `stream` so far; reuses the last one when nothing came
    /// since.
    pub(crate) fn record(&mut self, rule: Rule, stream: StreamId) -> EventId {
        if let Some(event) = self.fresh[stream.index()] {
            return event;
        }
        let event = EventId(self.events);
        self.events += 1;
        self.emit(rule, Op::Record { event, stream });
        self.fresh[stream.index()] = Some(event);
        event
    }

    pub(crate) fn wait(&mut self, rule: Rule, event: EventId, stream: StreamId) {
        self.fresh[stream.index()] = None;
        self.emit(rule, Op::Wait { event, stream });
    }

    /// `to` waits for everything issued on `from` so far.
    pub(crate) fn join(&mut self, rule: Rule, from: StreamId, to: StreamId) {
        if from != to {
            let event = self.record(rule, from);
            self.wait(rule, event, to);
        }
    }

    pub(crate) fn host_wait(&mut self, rule: Rule, event: EventId) {
        self.emit(rule, Op::HostWait(event));
    }

    pub(crate) fn host(&mut self, rule: Rule, kind: HostWorkKind, count: u16) {
        if count > 0 {
            self.emit(rule, Op::HostWork { kind, count });
        }
    }

    pub(crate) fn graph_begin(&mut self, name: String) -> ScopeId {
        let scope = ScopeId(
            u16::try_from(self.scopes.len())
                .expect("scopes a step are bounded by the model's depth"),
        );
        self.scopes.push(CaptureScope { name, launches: 0 });
        self.emit(Rule::Capture, Op::GraphBegin(scope));
        self.open_scope = Some(scope);
        scope
    }

    pub(crate) fn graph_end(&mut self, scope: ScopeId) {
        self.open_scope = None;
        self.emit(Rule::Capture, Op::GraphEnd(scope));
    }

    /// Forgets shared events: a new section must record its own.
    pub(crate) fn new_section(&mut self) {
        self.fresh.iter_mut().for_each(|e| *e = None);
    }

    /// Adds the compute stream, which every program has first.
    pub(crate) fn with_compute() -> Self {
        let mut b = Self::default();
        let compute = b.add_stream(StreamKind::Compute, 0);
        debug_assert_eq!(compute, COMPUTE);
        b
    }
}
