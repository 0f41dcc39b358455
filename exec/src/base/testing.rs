//! Hand-written programs, and kernels that support only sharding operations on float32.

use crate::base::operand::{LaunchContext, RawRange};
use shardlab_plan::ir::{
    Access, AxisId, AxisSet, BodyOp, Buffer, BufferId, COMPUTE, CollectiveKind, CommId, CopyKind,
    DType, DeviceMesh, Holds, InstrId, Kernel, KernelClass, OpKind, Part, Pool, ReduceOp, Role,
    ShardOp, StreamId, UnitId,
};
use shardlab_plan::program::*;
use shardlab_plan::units::{Bytes, Flops};
use smallvec::{SmallVec, smallvec};
use std::ops::{Deref, DerefMut};

pub(crate) const WORLD: u32 = 4;
pub(crate) const AG: StreamId = StreamId(1);
pub(crate) const RS: StreamId = StreamId(2);
pub(crate) const SHARD: CommId = CommId(0);
pub(crate) const OUTER: CommId = CommId(1);

/// Builds a program with the streams compute, all-gather and reduce-scatter and the communicators
/// shard, outer and world.
pub(crate) struct Build {
    core: ProgramBuilder,
}

impl Deref for Build {
    type Target = ProgramBuilder;

    fn deref(&self) -> &ProgramBuilder {
        &self.core
    }
}

impl DerefMut for Build {
    fn deref_mut(&mut self) -> &mut ProgramBuilder {
        &mut self.core
    }
}

impl Build {
    pub(crate) fn new(world: u32, dp_shard: u32, dp_outer: u32) -> Self {
        assert_eq!(world, dp_shard * dp_outer);
        let mesh = DeviceMesh::data_parallel(dp_shard, dp_outer);
        let mut core = ProgramBuilder::new(ProgramMeta::synthetic("hand-built", mesh));
        core.program.meta.policy = "native";
        core.program.meta.hardware = "cpu".to_owned();
        core.program.meta.compute = DType::F32;
        core.add_unit(Unit {
            name: "block".to_owned(),
            modules: vec![],
            is_root: true,
            reshards: true,
            keeps_storage: false,
            skipped_in: Vec::new(),
            groups: vec![],
        });
        core.add_stream(StreamKind::AllGather, 0);
        core.add_stream(StreamKind::ReduceScatter, 0);
        let mut b = Self { core };
        b.communicator("shard", AxisSet::of(AxisId::DP_SHARD));
        b.communicator("outer", AxisSet::of(AxisId::DP_OUTER));
        b.communicator("world", AxisSet::DATA);
        b
    }

    fn communicator(&mut self, name: &str, axes: AxisSet) -> CommId {
        let ranks = self.program.meta.mesh.group(axes).unwrap();
        self.add_communicator(Communicator {
            name: name.to_owned(),
            axes,
            ranks,
            copy_engine: false,
        })
    }

    pub(crate) fn sub_communicator(&mut self, size: u32) -> CommId {
        let mesh = &mut self.program.meta.mesh;
        *mesh = mesh.with(AxisId::SUB_SHARD, size);
        self.communicator("sub", AxisSet::of(AxisId::SUB_SHARD))
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
        self.add_buffer(Buffer {
            role,
            bytes: Bytes(bytes),
            dtype: DType::F32,
            align: 256,
            pool,
            stream,
            unit: UnitId(0),
            holds: Holds::Named("data"),
            key: 0,
        })
    }

    /// Returns a rank's slice of a buffer that holds the slices of all ranks.
    pub(crate) fn slice(&self, buffer: BufferId) -> Access {
        let all = self.whole(buffer);
        Access {
            bytes: all.bytes / u64::from(self.program.meta.mesh.size(AxisId::DP_SHARD)),
            per_rank: Some(AxisId::DP_SHARD.into()),
            ..all
        }
    }

    /// Launches a sharding operation.
    pub(crate) fn shard_op(
        &mut self,
        op: ShardOp,
        stream: StreamId,
        reads: &[Access],
        writes: &[Access],
    ) -> InstrId {
        let kernel = self.add_kernel(Kernel {
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
            used_rows: None,
        });
        let (reads, writes) = (reads.iter().copied(), writes.iter().copied());
        self.launch(kernel, stream, reads, writes)
    }

    pub(crate) fn collective(
        &mut self,
        kind: CollectiveKind,
        comm: CommId,
        stream: StreamId,
        input: Access,
        output: Access,
    ) -> InstrId {
        let reduce = if kind.reduces() {
            ReduceOp::Sum
        } else {
            ReduceOp::None
        };
        let parts = smallvec![Part { input, output }];
        let id = self.add_collective(kind, comm, reduce, DType::F32, parts, None);
        self.emit(Op::Collective { id, stream })
    }

    pub(crate) fn copy(&mut self, stream: StreamId, from: Access, to: Access) -> InstrId {
        let id = self.add_copy(CopyKind::D2d, from, to);
        self.emit(Op::Copy { id, stream })
    }

    /// Appends a steady section with the instructions of the first step.
    pub(crate) fn repeat(&mut self) {
        let first = self.program.section(SectionKind::First).unwrap();
        let instrs = self.program.section_instrs(first).to_vec();
        self.program.instrs.extend(instrs);
        self.end_section(SectionKind::Steady);
    }

    pub(crate) fn finish(self) -> Program {
        self.core.program
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
