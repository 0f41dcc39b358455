//! Builds a program: appends to its tables and hands out ids.
//!
//! The lowering emits every schedule through [`ProgramBuilder`]. Tests and benchmarks use it to
//! write small programs by hand.

use super::{
    CaptureScope, Communicator, Contract, Instr, Op, Phase, Program, ProgramMeta, Rule, Section,
    SectionKind, Stream, StreamKind, Unit,
};
use crate::ir::{
    Access, Buffer, BufferId, Collective, CollectiveId, CollectiveKind, CommId, CopyDesc, CopyId,
    CopyKind, DType, DeviceMesh, EventId, InstrId, Kernel, KernelId, ParameterCount, Part,
    ReduceOp, ScopeId, SentRows, StreamId, UnitId,
};
use crate::units::{Bytes, Flops};
use smallvec::SmallVec;

/// Provenance of the instructions that a [`ProgramBuilder`] emits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Unit.
    pub unit: UnitId,
    /// Micro-batch.
    pub micro_batch: u16,
    /// Phase.
    pub phase: Phase,
    /// Rule.
    pub rule: Rule,
}

/// Builds a program instruction by instruction.
///
/// ```
/// use shardlab_plan::ir::{Buffer, COMPUTE, DType, DeviceMesh, Holds, Pool, Role, UnitId};
/// use shardlab_plan::program::{ProgramBuilder, ProgramMeta, SectionKind};
/// use shardlab_plan::units::Bytes;
///
/// let mesh = DeviceMesh::data_parallel(4, 1);
/// let mut b = ProgramBuilder::new(ProgramMeta::synthetic("example", mesh));
/// let buffer = b.add_buffer(Buffer {
///     role: Role::Temporary,
///     bytes: Bytes(1024),
///     dtype: DType::Bf16,
///     align: 256,
///     pool: Pool::Caching,
///     stream: COMPUTE,
///     unit: UnitId(0),
///     holds: Holds::Named("scratch"),
///     key: 0,
/// });
/// b.alloc(buffer);
/// b.free(buffer);
/// b.end_section(SectionKind::Steady);
/// assert_eq!(b.program.instrs.len(), 2);
/// ```
#[derive(Clone, Debug)]
pub struct ProgramBuilder {
    /// The program so far.
    pub program: Program,
    /// Tag of the next instruction.
    pub tag: Tag,
}

impl ProgramMeta {
    /// Labels a program without a scenario: one node, one micro-batch of one token, one step, in
    /// bfloat16.
    #[must_use]
    pub fn synthetic(name: &str, mesh: DeviceMesh) -> Self {
        Self {
            scenario: name.to_owned(),
            policy: "synthetic",
            hardware: String::new(),
            gpus_per_node: mesh.world(),
            mesh,
            micro_batches: 1,
            tokens: 1,
            model_flops: Flops(0),
            parameters: ParameterCount::default(),
            deterministic: false,
            gradient_factor: None,
            attention_backend: None,
            expandable_segments: false,
            reduce_in_flight: 1,
            validate_every: 0,
            steps: 1,
            compute: DType::Bf16,
        }
    }
}

impl ProgramBuilder {
    /// Starts a program with only the compute stream.
    #[must_use]
    pub fn new(meta: ProgramMeta) -> Self {
        let program = Program {
            meta,
            contract: Contract::STRICT,
            modules: Vec::new(),
            params: Vec::new(),
            units: Vec::new(),
            groups: Vec::new(),
            streams: vec![Stream {
                kind: StreamKind::Compute,
                priority: 0,
            }],
            communicators: Vec::new(),
            kernels: Vec::new(),
            buffers: Vec::new(),
            accesses: Vec::new(),
            collectives: Vec::new(),
            copies: Vec::new(),
            scopes: Vec::new(),
            loss: None,
            eval_loss: None,
            events: 0,
            sections: Vec::new(),
            instrs: Vec::new(),
            double_buffer_copies: 0,
            persist_on_alloc_fail: false,
            placement: Default::default(),
        };
        let tag = Tag {
            unit: UnitId(0),
            micro_batch: 0,
            phase: Phase::Forward,
            rule: Rule::Model,
        };
        Self { program, tag }
    }

    /// Adds a stream.
    ///
    /// # Panics
    /// Panics if ids run out, at 256 streams.
    pub fn add_stream(&mut self, kind: StreamKind, priority: i8) -> StreamId {
        let streams = &mut self.program.streams;
        let id = u8::try_from(streams.len()).expect("a program has few streams");
        streams.push(Stream { kind, priority });
        StreamId(id)
    }

    /// Adds a communicator.
    ///
    /// # Panics
    /// Panics if ids run out, at 256 communicators.
    pub fn add_communicator(&mut self, comm: Communicator) -> CommId {
        let comms = &mut self.program.communicators;
        let id = u8::try_from(comms.len()).expect("a program has few communicators");
        comms.push(comm);
        CommId(id)
    }

    /// Adds a unit.
    ///
    /// # Panics
    /// Panics if ids run out, at 65,536 units.
    pub fn add_unit(&mut self, unit: Unit) -> UnitId {
        let units = &mut self.program.units;
        let id = u16::try_from(units.len()).expect("a model has a unit per block");
        units.push(unit);
        UnitId(id)
    }

    /// Adds a buffer, whose key becomes its id.
    pub fn add_buffer(&mut self, buffer: Buffer) -> BufferId {
        let id = BufferId(self.program.buffers.len() as u32);
        self.program.buffers.push(Buffer {
            key: id.0,
            ..buffer
        });
        id
    }

    /// Adds a kernel.
    pub fn add_kernel(&mut self, kernel: Kernel) -> KernelId {
        let id = KernelId(self.program.kernels.len() as u32);
        self.program.kernels.push(kernel);
        id
    }

    /// Adds a collective with these parts. Its size is the sum of their larger sides.
    pub fn add_collective(
        &mut self,
        kind: CollectiveKind,
        comm: CommId,
        reduce: ReduceOp,
        dtype: DType,
        parts: SmallVec<[Part; 1]>,
        sent: Option<SentRows>,
    ) -> CollectiveId {
        let id = CollectiveId(self.program.collectives.len() as u32);
        self.program.collectives.push(Collective {
            kind,
            comm,
            reduce,
            dtype,
            bytes: parts
                .iter()
                .map(|p| Bytes(p.input.bytes.max(p.output.bytes)))
                .sum(),
            parts,
            sent,
        });
        id
    }

    /// Adds a copy.
    pub fn add_copy(&mut self, kind: CopyKind, from: Access, to: Access) -> CopyId {
        let id = CopyId(self.program.copies.len() as u32);
        self.program.copies.push(CopyDesc { kind, from, to });
        id
    }

    /// Adds a captured scope.
    ///
    /// # Panics
    /// Panics if ids run out, at 65,536 scopes.
    pub fn add_scope(&mut self, name: String) -> ScopeId {
        let scopes = &mut self.program.scopes;
        let id = u16::try_from(scopes.len()).expect("the model's depth bounds the scopes per step");
        scopes.push(CaptureScope { name, launches: 0 });
        ScopeId(id)
    }

    /// Adds an event.
    pub fn add_event(&mut self) -> EventId {
        let id = EventId(self.program.events);
        self.program.events += 1;
        id
    }

    /// Returns the range of a whole buffer.
    #[must_use]
    pub fn whole(&self, buffer: BufferId) -> Access {
        Access {
            buffer,
            offset: 0,
            bytes: self.program.buffers[buffer.index()].bytes.0,
            per_rank: None,
        }
    }

    /// Sets unit and phase of the next instructions.
    pub fn at(&mut self, unit: UnitId, phase: Phase) -> &mut Self {
        self.tag.unit = unit;
        self.tag.phase = phase;
        self
    }

    /// Appends an instruction with the current tag.
    pub fn emit(&mut self, op: Op) -> InstrId {
        let Tag {
            unit,
            micro_batch,
            phase,
            rule,
        } = self.tag;
        let id = InstrId(self.program.instrs.len() as u32);
        self.program.instrs.push(Instr {
            op,
            unit,
            micro_batch,
            phase,
            rule,
        });
        id
    }

    /// Allocates a buffer.
    pub fn alloc(&mut self, buffer: BufferId) -> InstrId {
        self.emit(Op::Alloc(buffer))
    }

    /// Frees a buffer.
    pub fn free(&mut self, buffer: BufferId) -> InstrId {
        self.emit(Op::Free(buffer))
    }

    /// Records a new event after everything issued on a stream so far.
    pub fn record(&mut self, stream: StreamId) -> EventId {
        let event = self.add_event();
        self.emit(Op::Record { event, stream });
        event
    }

    /// Makes a stream wait for an event.
    pub fn wait(&mut self, event: EventId, stream: StreamId) -> InstrId {
        self.emit(Op::Wait { event, stream })
    }

    /// Makes one stream wait for all work issued on another stream so far. Returns the wait.
    pub fn join(&mut self, from: StreamId, to: StreamId) -> InstrId {
        let event = self.record(from);
        self.wait(event, to)
    }

    /// Adds operands and returns the launch of a kernel on them, without appending it.
    pub(crate) fn launch_op(
        &mut self,
        kernel: KernelId,
        stream: StreamId,
        reads: impl IntoIterator<Item = Access>,
        writes: impl IntoIterator<Item = Access>,
    ) -> Op {
        let accesses = &mut self.program.accesses;
        let first = accesses.len() as u32;
        accesses.extend(reads);
        let middle = accesses.len() as u32;
        accesses.extend(writes);
        Op::Launch {
            kernel,
            stream,
            reads: first,
            writes: middle,
            end: accesses.len() as u32,
        }
    }

    /// Launches a kernel on these ranges.
    pub fn launch(
        &mut self,
        kernel: KernelId,
        stream: StreamId,
        reads: impl IntoIterator<Item = Access>,
        writes: impl IntoIterator<Item = Access>,
    ) -> InstrId {
        let op = self.launch_op(kernel, stream, reads, writes);
        self.emit(op)
    }

    /// Ends a section that started where the previous one ended.
    pub fn end_section(&mut self, kind: SectionKind) -> &Section {
        let start = self.program.sections.last().map_or(0, |s| s.instrs.end);
        let instrs = start..self.program.instrs.len() as u32;
        self.program.sections.push(Section { kind, instrs });
        self.program.sections.last().expect("just pushed")
    }
}
