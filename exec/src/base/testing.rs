//! Hand-built programs, and kernels that support only sharding operations on float32.

use crate::base::operand::{LaunchContext, RawRange};
use shardlab_plan::ir::{
    Access, AxisId, AxisSet, BodyOp, Buffer, BufferId, COMPUTE, Collective, CollectiveId,
    CollectiveKind, CommId, CopyDesc, CopyId, CopyKind, DType, DeviceMesh, EventId, Holds, InstrId,
    Kernel, KernelClass, KernelId, OpKind, Part, Pool, ReduceOp, Role, ScopeId, ShardOp, StreamId,
    UnitId,
};
use shardlab_plan::program::*;
use shardlab_plan::units::{Bytes, Flops};
use smallvec::{SmallVec, smallvec};

pub(crate) const WORLD: u32 = 4;
pub(crate) const AG: StreamId = StreamId(1);
pub(crate) const RS: StreamId = StreamId(2);
pub(crate) const SHARD: CommId = CommId(0);
pub(crate) const OUTER: CommId = CommId(1);

/// A program under construction, with the streams compute, all-gather and reduce-scatter and the
/// communicators shard, outer and world.
pub(crate) struct Build {
    pub(crate) p: Program,
    pub(crate) phase: Phase,
    pub(crate) micro_batch: u16,
    from: u32,
}

impl Build {
    pub(crate) fn new(world: u32, dp_shard: u32, dp_outer: u32) -> Self {
        assert_eq!(world, dp_shard * dp_outer);
        let mesh = DeviceMesh::data_parallel(dp_shard, dp_outer);
        let comm = |name: &str, axes| Communicator {
            name: name.to_owned(),
            axes,
            ranks: mesh.group(axes).unwrap(),
            copy_engine: false,
        };
        let stream = |kind| Stream { kind, priority: 0 };
        Self {
            p: Program {
                meta: ProgramMeta {
                    scenario: "hand-built".to_owned(),
                    policy: "native",
                    hardware: "cpu".to_owned(),
                    mesh,
                    gpus_per_node: world,
                    micro_batches: 1,
                    tokens: 1,
                    model_flops: Flops(0),
                    deterministic: false,
                    expandable_segments: false,
                    reduce_in_flight: 1,
                    validate_every: 0,
                    steps: 1,
                    compute: DType::F32,
                },
                modules: vec![],
                params: vec![],
                units: vec![Unit {
                    name: "block".to_owned(),
                    modules: vec![],
                    is_root: true,
                    reshards: true,
                    groups: vec![],
                }],
                groups: vec![],
                streams: vec![
                    stream(StreamKind::Compute),
                    stream(StreamKind::AllGather),
                    stream(StreamKind::ReduceScatter),
                ],
                communicators: vec![
                    comm("shard", AxisSet::of(AxisId::DP_SHARD)),
                    comm("outer", AxisSet::of(AxisId::DP_OUTER)),
                    comm("world", AxisSet::DATA),
                ],
                kernels: vec![],
                buffers: vec![],
                accesses: vec![],
                collectives: vec![],
                copies: vec![],
                scopes: vec![],
                loss: None,
                eval_loss: None,
                events: 0,
                sections: vec![],
                instrs: vec![],
                double_buffer_copies: 0,
                persist_on_alloc_fail: false,
                placement: Default::default(),
            },
            phase: Phase::Forward,
            micro_batch: 0,
            from: 0,
        }
    }

    pub(crate) fn sub_communicator(&mut self, size: u32) -> CommId {
        let mesh = &mut self.p.meta.mesh;
        *mesh = mesh.with(AxisId::SUB_SHARD, size);
        let axes = AxisSet::of(AxisId::SUB_SHARD);
        self.p.communicators.push(Communicator {
            name: "sub".to_owned(),
            axes,
            ranks: mesh.group(axes).unwrap(),
            copy_engine: false,
        });
        CommId(self.p.communicators.len() as u8 - 1)
    }

    pub(crate) fn buffer(&mut self, role: Role, bytes: u64) -> BufferId {
        self.buffer_on(role, bytes, COMPUTE, Pool::Caching)
    }

    pub(crate) fn buffer_on(
        &mut self,
        role: Role,
        bytes: u64,
        stream: StreamId,
        pool: Pool,
    ) -> BufferId {
        let key = self.p.buffers.len() as u32;
        self.p.buffers.push(Buffer {
            role,
            bytes: Bytes(bytes),
            dtype: DType::F32,
            align: 256,
            pool,
            stream,
            unit: UnitId(0),
            holds: Holds::Named("data"),
            key,
        });
        BufferId(key)
    }

    pub(crate) fn all(&self, buffer: BufferId) -> Access {
        Access {
            buffer,
            offset: 0,
            bytes: self.p.buffers[buffer.index()].bytes.0,
            per_rank: None,
        }
    }

    /// Returns a rank's slice of a buffer that holds the slices of all ranks.
    pub(crate) fn slice(&self, buffer: BufferId) -> Access {
        let all = self.all(buffer);
        Access {
            bytes: all.bytes / u64::from(self.p.meta.mesh.size(AxisId::DP_SHARD)),
            per_rank: Some(AxisId::DP_SHARD),
            ..all
        }
    }

    pub(crate) fn emit(&mut self, op: Op) -> InstrId {
        self.p.instrs.push(Instr {
            op,
            unit: UnitId(0),
            micro_batch: self.micro_batch,
            phase: self.phase,
            rule: Rule::Model,
        });
        InstrId(self.p.instrs.len() as u32 - 1)
    }

    pub(crate) fn alloc(&mut self, b: BufferId) {
        self.emit(Op::Alloc(b));
    }

    pub(crate) fn free(&mut self, b: BufferId) {
        self.emit(Op::Free(b));
    }

    pub(crate) fn record(&mut self, stream: StreamId) -> EventId {
        let event = EventId(self.p.events);
        self.p.events += 1;
        self.emit(Op::Record { event, stream });
        event
    }

    pub(crate) fn wait(&mut self, event: EventId, stream: StreamId) -> InstrId {
        self.emit(Op::Wait { event, stream })
    }

    pub(crate) fn join(&mut self, from: StreamId, to: StreamId) -> InstrId {
        let e = self.record(from);
        self.wait(e, to)
    }

    pub(crate) fn launch(
        &mut self,
        op: ShardOp,
        stream: StreamId,
        reads: &[Access],
        writes: &[Access],
    ) -> InstrId {
        let kernel = KernelId(self.p.kernels.len() as u32);
        self.p.kernels.push(Kernel {
            name: op.name().to_owned(),
            class: KernelClass::Copy,
            flops: Flops(0),
            read: Bytes(0),
            written: Bytes(0),
            dtype: DType::F32,
            body: vec![BodyOp {
                op: OpKind::Shard(op),
                inputs: SmallVec::new(),
                outputs: SmallVec::new(),
            }],
        });
        let first = self.p.accesses.len() as u32;
        self.p.accesses.extend_from_slice(reads);
        let middle = self.p.accesses.len() as u32;
        self.p.accesses.extend_from_slice(writes);
        let end = self.p.accesses.len() as u32;
        self.emit(Op::Launch {
            kernel,
            stream,
            reads: first,
            writes: middle,
            end,
        })
    }

    pub(crate) fn collective(
        &mut self,
        kind: CollectiveKind,
        comm: CommId,
        stream: StreamId,
        input: Access,
        output: Access,
    ) -> InstrId {
        let reduces = matches!(
            kind,
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce
        );
        self.p.collectives.push(Collective {
            kind,
            comm,
            reduce: if reduces {
                ReduceOp::Sum
            } else {
                ReduceOp::None
            },
            dtype: DType::F32,
            bytes: Bytes(input.bytes.max(output.bytes)),
            parts: smallvec![Part { input, output }],
        });
        let id = CollectiveId(self.p.collectives.len() as u32 - 1);
        self.emit(Op::Collective { id, stream })
    }

    pub(crate) fn copy(&mut self, stream: StreamId, from: Access, to: Access) -> InstrId {
        self.p.copies.push(CopyDesc {
            kind: CopyKind::D2d,
            from,
            to,
        });
        let id = CopyId(self.p.copies.len() as u32 - 1);
        self.emit(Op::Copy { id, stream })
    }

    pub(crate) fn scope(&mut self) -> ScopeId {
        self.p.scopes.push(CaptureScope {
            name: "scope".to_owned(),
            launches: 0,
        });
        ScopeId(self.p.scopes.len() as u16 - 1)
    }

    /// Ends a section.
    pub(crate) fn section(&mut self, kind: SectionKind) {
        let to = self.p.instrs.len() as u32;
        self.p.sections.push(Section {
            kind,
            instrs: std::mem::replace(&mut self.from, to)..to,
        });
    }

    /// Appends a steady section with the instructions of the first step.
    pub(crate) fn repeat(&mut self) {
        let first = self.p.section(SectionKind::First).unwrap().instrs.clone();
        for i in first {
            let instr = self.p.instrs[i as usize];
            self.p.instrs.push(instr);
        }
        self.section(SectionKind::Steady);
    }

    pub(crate) fn finish(self) -> Program {
        self.p
    }
}

/// Runs a sharding operation on float32 ranges of equal lengths.
///
/// # Safety
/// As for every launcher.
pub(crate) unsafe fn shard_ops(
    c: &LaunchContext<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), String> {
    // SAFETY: the caller's contract. Volatile element-wise access, so that races that tests provoke
    // are plain stale data.
    unsafe {
        let n = |r: &RawRange| r.bytes / 4;
        let get = |r: &RawRange, i: usize| r.ptr.cast::<f32>().add(i).read_volatile();
        let set = |r: &RawRange, i: usize, x: f32| r.ptr.cast::<f32>().add(i).write_volatile(x);
        let Some(OpKind::Shard(op)) = c.kernel.body.first().map(|b| b.op) else {
            return Err("not a sharding kernel".to_owned());
        };
        for (k, w) in writes.iter().enumerate() {
            for i in 0..n(w) {
                let x = match op {
                    ShardOp::Copy => get(&reads[k], i),
                    ShardOp::Accumulate => get(w, i) + get(&reads[0], i),
                    ShardOp::Scale { factor } => get(w, i) * factor.0 as f32,
                    ShardOp::Zero => 0.0,
                    ShardOp::SumSquares => {
                        (0..n(&reads[0])).map(|j| get(&reads[0], j).powi(2)).sum()
                    }
                    ShardOp::NanCheck => {
                        f32::from((0..n(&reads[0])).any(|j| get(&reads[0], j).is_nan()))
                    }
                    other => return Err(format!("no test kernel for {}", other.name())),
                };
                set(w, i, x);
            }
        }
    }
    Ok(())
}
