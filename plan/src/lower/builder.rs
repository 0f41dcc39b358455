//! Emits instructions with the rule that requires them, and reuses events.

use crate::ir::{
    Access, Buffer, BufferId, COMPUTE, CollectiveKind, CommId, CopyKind, DType, EventId, Holds,
    HostWorkKind, Kernel, KernelId, Part, Pool, ReduceOp, Role, ScopeId, SentRows, StreamId,
    UnitId,
};
use crate::program::{
    Communicator, Op, Phase, Program, ProgramBuilder, ProgramMeta, Rule, SectionKind, StreamKind,
};
use crate::units::Bytes;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Properties of a new buffer.
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
    pub(crate) sent: Option<SentRows>,
}

/// The program being built. It marks instructions that only the first step has, and reuses an event
/// until more work is issued on its stream.
#[derive(Debug)]
pub(crate) struct Builder {
    core: ProgramBuilder,
    /// Positions of instructions that only the first step has.
    first_only: Vec<u32>,
    /// By stream: an event that covers all work issued so far.
    fresh: SmallVec<[Option<EventId>; 8]>,
    open_scope: Option<ScopeId>,
}

/// Instructions of both steps per tape operation, rounded up.
const INSTRS_PER_OP: usize = 3;

impl Builder {
    pub(crate) fn new(meta: ProgramMeta) -> Self {
        Self {
            core: ProgramBuilder::new(meta),
            first_only: Vec::new(),
            // The compute stream.
            fresh: smallvec![None],
            open_scope: None,
        }
    }

    /// Reserves memory for a first step that runs `ops` tape operations with `operands`, and for
    /// the steady step that is copied from it. Growing tables of a hundred thousand instructions
    /// costs as much as filling them.
    pub(crate) fn reserve(&mut self, ops: usize, operands: usize) {
        let program = &mut self.core.program;
        program.instrs.reserve(INSTRS_PER_OP * ops);
        program.accesses.reserve(operands);
    }

    /// Returns the program so far.
    pub(crate) fn program(&self) -> &Program {
        &self.core.program
    }

    /// Returns the program so far for changes to its tables.
    pub(crate) fn program_mut(&mut self) -> &mut Program {
        &mut self.core.program
    }

    pub(crate) fn into_program(self) -> Program {
        self.core.program
    }

    pub(crate) fn add_stream(&mut self, kind: StreamKind, priority: i8) -> StreamId {
        self.fresh.push(None);
        self.core.add_stream(kind, priority)
    }

    pub(crate) fn add_communicator(&mut self, comm: Communicator) -> CommId {
        self.core.add_communicator(comm)
    }

    /// Sets the tag of the instructions that follow.
    pub(crate) fn at(&mut self, unit: UnitId, phase: Phase) {
        self.core.at(unit, phase);
    }

    pub(crate) fn micro_batch(&mut self, m: u16) {
        self.core.tag.micro_batch = m;
    }

    pub(crate) fn phase(&self) -> Phase {
        self.core.tag.phase
    }

    pub(crate) fn unit(&self) -> UnitId {
        self.core.tag.unit
    }

    fn emit(&mut self, rule: Rule, op: Op) {
        self.core.tag.rule = rule;
        self.core.emit(op);
    }

    /// Returns the position of the next instruction.
    pub(crate) fn next_instr(&self) -> u32 {
        self.core.program.instrs.len() as u32
    }

    /// Runs `f` and marks the instructions that it emits as belonging to the first step only.
    pub(crate) fn first_only(&mut self, f: impl FnOnce(&mut Self)) {
        let from = self.next_instr();
        f(self);
        self.first_only.extend(from..self.next_instr());
    }

    /// Marks the instructions emitted last, and the events that they record, as belonging to the
    /// first step only.
    pub(crate) fn withhold_from_later(&mut self, instrs: Range<u32>) {
        self.first_only.extend(instrs);
        // Later steps do not record any of their events.
        self.forget_events();
    }

    pub(crate) fn buffer(&mut self, new: NewBuffer) -> BufferId {
        self.core.add_buffer(Buffer {
            role: new.role,
            bytes: Bytes(new.bytes),
            dtype: new.dtype,
            align: 256,
            pool: new.pool,
            stream: new.stream,
            unit: new.unit,
            holds: new.holds,
            key: 0,
        })
    }

    /// Adds a buffer with the same properties as another one.
    pub(crate) fn twin(&mut self, of: BufferId) -> BufferId {
        let buffer = self.program().buffers[of.index()];
        self.core.add_buffer(buffer)
    }

    pub(crate) fn alloc(&mut self, rule: Rule, buffer: BufferId) {
        self.emit(rule, Op::Alloc(buffer));
    }

    pub(crate) fn free(&mut self, rule: Rule, buffer: BufferId) {
        self.emit(rule, Op::Free(buffer));
    }

    /// Returns the access range of a whole buffer.
    pub(crate) fn whole(&self, buffer: BufferId) -> Access {
        self.core.whole(buffer)
    }

    pub(crate) fn kernel(&mut self, kernel: Kernel) -> KernelId {
        self.core.add_kernel(kernel)
    }

    pub(crate) fn launch(
        &mut self,
        rule: Rule,
        kernel: KernelId,
        stream: StreamId,
        reads: impl IntoIterator<Item = Access>,
        writes: impl IntoIterator<Item = Access>,
    ) {
        let op = self.core.launch_op(kernel, stream, reads, writes);
        self.work(rule, stream, op);
    }

    /// Emits work on a stream. Earlier events then no longer cover the stream.
    fn work(&mut self, rule: Rule, stream: StreamId, op: Op) {
        self.fresh[stream.index()] = None;
        self.emit(rule, op);
        if let Some(scope) = self.open_scope {
            self.core.program.scopes[scope.index()].launches += 1;
        }
    }

    pub(crate) fn collective(&mut self, launch: CollectiveLaunch) {
        let id = self.core.add_collective(
            launch.kind,
            launch.comm,
            launch.reduce,
            launch.dtype,
            launch.parts,
            launch.sent,
        );
        let stream = launch.stream;
        self.work(launch.rule, stream, Op::Collective { id, stream });
    }

    /// Copies a whole buffer to another one of the same size with a copy engine.
    pub(crate) fn copy(
        &mut self,
        rule: Rule,
        kind: CopyKind,
        from: BufferId,
        to: BufferId,
        stream: StreamId,
    ) {
        let (from, to) = (self.whole(from), self.whole(to));
        self.copy_range(rule, kind, from, to, stream);
    }

    /// Copies a range to another one of the same size with a copy engine.
    pub(crate) fn copy_range(
        &mut self,
        rule: Rule,
        kind: CopyKind,
        from: Access,
        to: Access,
        stream: StreamId,
    ) {
        let id = self.core.add_copy(kind, from, to);
        self.work(rule, stream, Op::Copy { id, stream });
    }

    /// Moves a buffer that has not been used yet to host memory, where operators of `stream` use
    /// it.
    pub(crate) fn move_to_host(&mut self, id: BufferId, stream: StreamId) {
        let buffer = &mut self.core.program.buffers[id.index()];
        (buffer.pool, buffer.stream) = (Pool::Host, stream);
    }

    /// Returns an event after everything issued on `stream` so far. Reuses the last one if nothing
    /// has been issued since.
    pub(crate) fn record(&mut self, rule: Rule, stream: StreamId) -> EventId {
        if let Some(event) = self.fresh[stream.index()] {
            return event;
        }
        let event = self.core.add_event();
        self.emit(rule, Op::Record { event, stream });
        self.fresh[stream.index()] = Some(event);
        event
    }

    pub(crate) fn wait(&mut self, rule: Rule, event: EventId, stream: StreamId) {
        self.fresh[stream.index()] = None;
        self.emit(rule, Op::Wait { event, stream });
    }

    /// Makes `to` wait for everything issued on `from` so far.
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

    /// Emits the host work of a hook, and its work for each of `params` parameters.
    pub(crate) fn hook(&mut self, rule: Rule, params: u16) {
        self.host(rule, HostWorkKind::Hook, 1);
        self.host(rule, HostWorkKind::HookParam, params);
    }

    pub(crate) fn graph_begin(&mut self, name: String) -> ScopeId {
        let scope = self.core.add_scope(name);
        self.emit(Rule::Capture, Op::GraphBegin(scope));
        // Another stream becomes part of the capture only by an event of the scope.
        self.fresh[COMPUTE.index()] = None;
        self.open_scope = Some(scope);
        scope
    }

    pub(crate) fn graph_end(&mut self, scope: ScopeId) {
        self.open_scope = None;
        self.emit(Rule::Capture, Op::GraphEnd(scope));
    }

    /// Returns whether a scope is open, so that instructions emitted now become part of a graph.
    pub(crate) const fn is_capturing(&self) -> bool {
        self.open_scope.is_some()
    }

    /// Ends a section and returns its range. The next section has to record its own events.
    pub(crate) fn end_section(&mut self, kind: SectionKind) -> Range<u32> {
        self.forget_events();
        self.core.end_section(kind).instrs.clone()
    }

    /// Appends a steady step: a copy of the first step without its one-time allocations.
    pub(crate) fn steady_after(&mut self, first: Range<u32>) {
        let mut once = std::mem::take(&mut self.first_only).into_iter().peekable();
        let instrs = &mut self.core.program.instrs;
        for i in first {
            if once.next_if_eq(&i).is_none() {
                instrs.push(instrs[i as usize]);
            }
        }
    }

    fn forget_events(&mut self) {
        self.fresh.fill(None);
    }
}
