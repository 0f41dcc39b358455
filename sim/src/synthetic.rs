//! Synthetic programs for tests and benchmarks: a small builder, and a fully sharded step without a
//! model.

use shardlab_plan::ir::{
    Access, AxisId, AxisSet, Buffer, BufferId, COMPUTE, CollectiveId, CollectiveKind, CommId,
    DType, DeviceMesh, EventId, Holds, HostWorkKind, Kernel, KernelClass, KernelId, Module,
    ModuleId, ModuleKind, Part, Pool, RankGroup, ReduceOp, Role, StreamId, UnitId,
};
use shardlab_plan::program::{
    Communicator, Op, Phase, Program, ProgramBuilder, ProgramMeta, SectionKind, StreamKind, Unit,
};
use shardlab_plan::units::{Bytes, Flops};
use smallvec::smallvec;
use std::ops::{Deref, DerefMut};

/// Builds a program on one node. Only the sizes of its kernels and collectives are given.
#[derive(Clone, Debug)]
pub struct Builder {
    core: ProgramBuilder,
}

impl Deref for Builder {
    type Target = ProgramBuilder;

    fn deref(&self) -> &ProgramBuilder {
        &self.core
    }
}

impl DerefMut for Builder {
    fn deref_mut(&mut self) -> &mut ProgramBuilder {
        &mut self.core
    }
}

impl Builder {
    /// Starts a program for `world` ranks, with the compute stream and a root unit.
    #[must_use]
    pub fn new(name: &str, world: u32) -> Self {
        let mesh = DeviceMesh::data_parallel(world, 1);
        let mut core = ProgramBuilder::new(ProgramMeta::synthetic(name, mesh));
        let meta = &mut core.program.meta;
        meta.gpus_per_node = 8;
        meta.tokens = 8192;
        meta.expandable_segments = true;
        core.program.modules.push(Module {
            path: String::new(),
            parent: None,
            kind: ModuleKind::Root,
        });
        core.add_unit(Unit {
            name: "root".to_owned(),
            modules: vec![ModuleId(0)],
            is_root: true,
            reshards: false,
            keeps_storage: false,
            skipped_in: Vec::new(),
            groups: Vec::new(),
        });
        Self { core }
    }

    /// Adds a communicator of `size` ranks `stride` apart.
    pub fn communicator(&mut self, name: &str, size: u32, stride: u32) -> CommId {
        self.add_communicator(Communicator {
            name: name.to_owned(),
            axes: AxisSet::of(AxisId::DP_SHARD),
            ranks: RankGroup { size, stride },
            copy_engine: false,
        })
    }

    /// Adds a kernel.
    pub fn kernel(
        &mut self,
        name: &str,
        class: KernelClass,
        flops: u64,
        read: u64,
        written: u64,
    ) -> KernelId {
        self.add_kernel(Kernel {
            name: name.to_owned(),
            class,
            flops: Flops(flops),
            read: Bytes(read),
            written: Bytes(written),
            dtype: DType::Bf16,
            body: Vec::new(),
            used_rows: None,
        })
    }

    /// Adds a bfloat16 GEMM.
    pub fn gemm(&mut self, m: u64, n: u64, k: u64) -> KernelId {
        let class = KernelClass::Gemm { m, n, k, batch: 1 };
        self.kernel("mm", class, 2 * m * n * k, 2 * (m * k + k * n), 2 * m * n)
    }

    /// Adds an aligned collective of `bytes` (full side) from buffer 0 to buffer 1.
    pub fn collective(&mut self, kind: CollectiveKind, comm: CommId, bytes: u64) -> CollectiveId {
        let size = u64::from(self.program.communicators[comm.index()].ranks.size);
        let part = Part {
            input: access(BufferId(0), bytes / size),
            output: access(BufferId(1), bytes),
        };
        self.add_collective(
            kind,
            comm,
            ReduceOp::None,
            DType::Bf16,
            smallvec![part],
            None,
        )
    }

    /// Adds a buffer.
    pub fn buffer(&mut self, role: Role, bytes: u64, stream: StreamId) -> BufferId {
        let unit = self.tag.unit;
        self.add_buffer(Buffer {
            role,
            bytes: Bytes(bytes),
            dtype: DType::Bf16,
            align: 512,
            pool: Pool::Caching,
            stream,
            unit,
            holds: Holds::Named("synthetic"),
            key: 0,
        })
    }

    /// Adds a unit; later instructions and buffers belong to it.
    pub fn unit(&mut self, name: &str) -> UnitId {
        let unit = self.add_unit(Unit {
            name: name.to_owned(),
            modules: vec![ModuleId(0)],
            is_root: false,
            reshards: true,
            keeps_storage: false,
            skipped_in: Vec::new(),
            groups: Vec::new(),
        });
        self.tag.unit = unit;
        unit
    }

    /// Sets unit and phase of later instructions and buffers.
    pub fn at(&mut self, unit: UnitId, phase: Phase) -> &mut Self {
        self.core.at(unit, phase);
        self
    }

    /// Appends an instruction.
    pub fn op(&mut self, op: Op) -> &mut Self {
        self.emit(op);
        self
    }

    /// Launches a kernel without operands.
    pub fn launch(&mut self, kernel: KernelId, stream: StreamId) -> &mut Self {
        self.core.launch(kernel, stream, [], []);
        self
    }

    /// Launches a kernel that reads and writes a byte of these buffers.
    pub fn launch_over(
        &mut self,
        kernel: KernelId,
        stream: StreamId,
        read: &[BufferId],
        written: &[BufferId],
    ) -> &mut Self {
        let byte = |b: &BufferId| access(*b, 1);
        let (reads, writes) = (read.iter().map(byte), written.iter().map(byte));
        self.core.launch(kernel, stream, reads, writes);
        self
    }

    /// Returns the program. Instructions after the last section become the steady section.
    #[must_use]
    pub fn finish(mut self) -> Program {
        let program = &self.core.program;
        let end = program.sections.last().map_or(0, |s| s.instrs.end);
        if end < program.instrs.len() as u32 || program.sections.is_empty() {
            self.end_section(SectionKind::Steady);
        }
        self.core.program
    }
}

/// Returns the range of a buffer's first bytes, on every rank.
const fn access(buffer: BufferId, bytes: u64) -> Access {
    Access {
        buffer,
        offset: 0,
        bytes,
        per_rank: None,
    }
}

/// Shape of a synthetic fully sharded transformer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of blocks.
    pub layers: u16,
    /// Hidden size.
    pub hidden: u64,
    /// Feed-forward size.
    pub ffn: u64,
    /// Tokens per rank.
    pub tokens: u64,
    /// Number of pointwise kernels per block and direction, in addition to the seven GEMMs.
    pub pointwise: u16,
    /// Number of ranks.
    pub ranks: u32,
}

impl Shape {
    /// Returns two small layers on four ranks.
    #[must_use]
    pub const fn tiny() -> Self {
        Self {
            layers: 2,
            hidden: 1024,
            ffn: 2816,
            tokens: 2048,
            pointwise: 3,
            ranks: 4,
        }
    }

    /// Returns an eager step like that of an 8 B model on eight ranks: about 4,000 kernels and
    /// 16,000 instructions.
    #[must_use]
    pub const fn large() -> Self {
        Self {
            layers: 32,
            hidden: 4096,
            ffn: 14_336,
            tokens: 8192,
            pointwise: 26,
            ranks: 8,
        }
    }
}

/// Builds a fully sharded step: gather, compute and release for each block; backward with
/// reduce-scatters; an optimizer kernel. Gathers run on a separate stream, one unit ahead.
#[must_use]
pub fn fsdp(shape: &Shape) -> Program {
    let mut b = Builder::new("synthetic", shape.ranks);
    let step = Step::new(&mut b, shape);
    for kind in [SectionKind::First, SectionKind::Steady] {
        step.emit(&mut b);
        b.end_section(kind);
    }
    b.finish()
}

/// What the instructions of a synthetic step refer to.
struct Step {
    gather: StreamId,
    reduce: StreamId,
    all_gather: CollectiveId,
    reduce_scatter: CollectiveId,
    gemms: [KernelId; 7],
    pointwise: KernelId,
    /// Number of pointwise kernels per block in forward.
    pointwise_count: usize,
    adam: KernelId,
    temporary: BufferId,
    blocks: Vec<Block>,
}

/// A block's unit and buffers.
#[derive(Clone, Copy)]
struct Block {
    unit: UnitId,
    /// Full weights, in forward and in backward.
    full: [BufferId; 2],
    grads: BufferId,
    saved: BufferId,
}

impl Step {
    /// Adds streams, kernels, collectives and buffers, and the section that initializes them.
    fn new(b: &mut Builder, shape: &Shape) -> Self {
        let gather = b.add_stream(StreamKind::AllGather, -1);
        let reduce = b.add_stream(StreamKind::ReduceScatter, -1);
        let comm = b.communicator("shard", shape.ranks, 1);
        let comm_reduce = b.communicator("shard_rs", shape.ranks, 1);
        let (h, f, t) = (shape.hidden, shape.ffn, shape.tokens);
        let params = 4 * h * h + 3 * h * f;
        let shard = |bytes: u64| bytes * params / u64::from(shape.ranks);
        let gemms = [
            (t, h, h),
            (t, h, h),
            (t, h, h),
            (t, h, h),
            (t, f, h),
            (t, f, h),
            (t, h, f),
        ]
        .map(|(m, n, k)| b.gemm(m, n, k));
        let pointwise = b.kernel("mul", KernelClass::Pointwise, t * h, 4 * t * h, 2 * t * h);
        let adam = b.kernel("adamw", KernelClass::Optimizer, 0, shard(16), shard(12));
        let all_gather = b.collective(CollectiveKind::AllGather, comm, 2 * params);
        let reduce_scatter = b.collective(CollectiveKind::ReduceScatter, comm_reduce, 4 * params);
        b.program.meta.model_flops = Flops(6 * u64::from(shape.layers) * params * t);
        let blocks = blocks(b, shape, (params, shard(12)), reduce);
        let temporary = b.buffer(Role::Temporary, 2 * t * h, COMPUTE);
        b.end_section(SectionKind::Init);
        Self {
            gather,
            reduce,
            all_gather,
            reduce_scatter,
            gemms,
            pointwise,
            pointwise_count: usize::from(shape.pointwise),
            adam,
            temporary,
            blocks,
        }
    }

    /// Emits the instructions of one step.
    fn emit(&self, b: &mut Builder) {
        let root = self.blocks[0].unit;
        host(b.at(root, Phase::Start), HostWorkKind::Step);
        b.join(COMPUTE, self.gather);
        let forward: Vec<Block> = self.blocks.clone();
        let backward: Vec<Block> = forward.iter().rev().copied().collect();
        self.pass(b, Phase::Forward, &forward);
        self.pass(b, Phase::Backward, &backward);
        b.at(root, Phase::Final).join(self.reduce, COMPUTE);
        host(b.at(root, Phase::Optimizer), HostWorkKind::OptimizerStep);
        for _ in &self.blocks {
            b.launch(self.adam, COMPUTE);
        }
    }

    /// Emits a pass over blocks in this order.
    fn pass(&self, b: &mut Builder, phase: Phase, order: &[Block]) {
        let mut ready = self.issue(b, phase, &order[0]);
        for (n, block) in order.iter().enumerate() {
            let next = order.get(n + 1).map(|block| self.issue(b, phase, block));
            b.at(block.unit, phase).op(Op::Wait {
                event: ready,
                stream: COMPUTE,
            });
            self.compute(b, phase, block);
            // Gathers wait for the compute issued so far, so that at most two units are full at
            // once.
            b.join(COMPUTE, self.gather);
            ready = next.unwrap_or(ready);
        }
    }

    /// Gathers a block. Returns the event after it.
    fn issue(&self, b: &mut Builder, phase: Phase, block: &Block) -> EventId {
        host(b.at(block.unit, phase), HostWorkKind::Hook);
        b.op(Op::Alloc(block.full[usize::from(phase == Phase::Backward)]));
        b.op(Op::Collective {
            id: self.all_gather,
            stream: self.gather,
        });
        let event = b.add_event();
        b.op(Op::Record {
            event,
            stream: self.gather,
        });
        event
    }

    /// Computes a block, releases its weights and, in backward, reduces its gradients.
    fn compute(&self, b: &mut Builder, phase: Phase, block: &Block) {
        let backward = phase == Phase::Backward;
        let (made, kind, times) = match backward {
            false => (block.saved, HostWorkKind::Dispatch, 1),
            true => (block.grads, HostWorkKind::AutogradDispatch, 2),
        };
        b.op(Op::Alloc(made));
        for k in 0..self.gemms.len() * times {
            host(b, kind).launch(self.gemms[k % self.gemms.len()], COMPUTE);
        }
        for _ in 0..self.pointwise_count * times {
            host(b, kind)
                .op(Op::Alloc(self.temporary))
                .launch(self.pointwise, COMPUTE)
                .op(Op::Free(self.temporary));
        }
        b.op(Op::Free(block.full[usize::from(backward)]));
        if backward {
            b.op(Op::Free(block.saved)).join(COMPUTE, self.reduce);
            b.op(Op::Collective {
                id: self.reduce_scatter,
                stream: self.reduce,
            })
            .op(Op::Free(block.grads));
        }
    }
}

/// Adds the units of blocks with `params` parameters each and their buffers. Allocates their
/// shards, which have `shard` bytes.
fn blocks(
    b: &mut Builder,
    shape: &Shape,
    (params, shard): (u64, u64),
    reduce: StreamId,
) -> Vec<Block> {
    let units = (0..shape.layers).map(|i| b.unit(&format!("layers.{i}")));
    let units: Vec<UnitId> = units.collect();
    let each = |b: &mut Builder, phase, role, bytes, stream| -> Vec<BufferId> {
        let of = |unit: &UnitId| b.at(*unit, phase).buffer(role, bytes, stream);
        units.iter().map(of).collect()
    };
    let shards = each(b, Phase::Init, Role::MainWeight, shard, COMPUTE);
    let weights = |unit: &UnitId| {
        [(); 2].map(|()| {
            let at = b.at(*unit, Phase::Forward);
            at.buffer(Role::FullWeight, 2 * params, COMPUTE)
        })
    };
    let full: Vec<[BufferId; 2]> = units.iter().map(weights).collect();
    let grads = each(b, Phase::Backward, Role::ReduceInput, 4 * params, reduce);
    let activations = 24 * shape.tokens * shape.hidden;
    let saved = each(b, Phase::Forward, Role::Activation, activations, COMPUTE);
    for (&unit, &shard) in units.iter().zip(&shards) {
        b.at(unit, Phase::Init).op(Op::Alloc(shard));
    }
    let block = |(i, &unit): (usize, &UnitId)| Block {
        unit,
        full: full[i],
        grads: grads[i],
        saved: saved[i],
    };
    units.iter().enumerate().map(block).collect()
}

/// Emits one piece of host work.
fn host(b: &mut Builder, kind: HostWorkKind) -> &mut Builder {
    b.op(Op::HostWork { kind, count: 1 })
}
