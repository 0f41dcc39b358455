//! Synthetic programs for tests and benchmarks: a small builder, and a fully sharded step without a
//! model.

use shardlab_plan::ir::{
    Access, AxisId, AxisSet, Buffer, BufferId, COMPUTE, CollectiveId, CollectiveKind, CommId,
    DType, DeviceMesh, Holds, HostWorkKind, Kernel, KernelClass, KernelId, Module, ModuleId,
    ModuleKind, Part, Pool, RankGroup, ReduceOp, Role, StreamId, UnitId,
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
    let gather = b.add_stream(StreamKind::AllGather, -1);
    let reduce = b.add_stream(StreamKind::ReduceScatter, -1);
    let comm = b.communicator("shard", shape.ranks, 1);
    let comm_reduce = b.communicator("shard_rs", shape.ranks, 1);
    let (h, f, t) = (shape.hidden, shape.ffn, shape.tokens);
    let params = 4 * h * h + 3 * h * f;
    let ranks = u64::from(shape.ranks);
    let gemms: Vec<KernelId> = [
        (t, h, h),
        (t, h, h),
        (t, h, h),
        (t, h, h),
        (t, f, h),
        (t, f, h),
        (t, h, f),
    ]
    .map(|(m, n, k)| b.gemm(m, n, k))
    .into();
    let pointwise = b.kernel("mul", KernelClass::Pointwise, t * h, 4 * t * h, 2 * t * h);
    let adam = b.kernel(
        "adamw",
        KernelClass::Optimizer,
        0,
        16 * params / ranks,
        12 * params / ranks,
    );
    let all_gather = b.collective(CollectiveKind::AllGather, comm, 2 * params);
    let reduce_scatter = b.collective(CollectiveKind::ReduceScatter, comm_reduce, 4 * params);
    let units: Vec<UnitId> = (0..shape.layers)
        .map(|i| b.unit(&format!("layers.{i}")))
        .collect();
    let shards: Vec<BufferId> = units
        .iter()
        .map(|&u| {
            b.at(u, Phase::Init)
                .buffer(Role::MainWeight, 12 * params / ranks, COMPUTE)
        })
        .collect();
    let full: Vec<[BufferId; 2]> = units
        .iter()
        .map(|&u| {
            [(); 2].map(|()| {
                b.at(u, Phase::Forward)
                    .buffer(Role::FullWeight, 2 * params, COMPUTE)
            })
        })
        .collect();
    let grads: Vec<BufferId> = units
        .iter()
        .map(|&u| {
            b.at(u, Phase::Backward)
                .buffer(Role::ReduceInput, 4 * params, reduce)
        })
        .collect();
    let saved: Vec<BufferId> = units
        .iter()
        .map(|&u| {
            b.at(u, Phase::Forward)
                .buffer(Role::Activation, 24 * t * h, COMPUTE)
        })
        .collect();
    let temporary = b.buffer(Role::Temporary, 2 * t * h, COMPUTE);
    for (&u, &shard) in units.iter().zip(&shards) {
        b.at(u, Phase::Init).op(Op::Alloc(shard));
    }
    b.end_section(SectionKind::Init);
    let (passes, backward) = (
        [SectionKind::First, SectionKind::Steady],
        u64::from(shape.layers) * params * t,
    );
    b.program.meta.model_flops = Flops(6 * backward);
    for kind in passes {
        b.at(units[0], Phase::Start).op(Op::HostWork {
            kind: HostWorkKind::Step,
            count: 1,
        });
        b.join(COMPUTE, gather);
        for forward in [true, false] {
            let phase = if forward {
                Phase::Forward
            } else {
                Phase::Backward
            };
            let order: Vec<usize> = if forward {
                (0..units.len()).collect()
            } else {
                (0..units.len()).rev().collect()
            };
            let issue = |b: &mut Builder, i: usize| {
                b.at(units[i], phase);
                b.op(Op::HostWork {
                    kind: HostWorkKind::Hook,
                    count: 1,
                });
                b.op(Op::Alloc(full[i][usize::from(!forward)]));
                b.op(Op::Collective {
                    id: all_gather,
                    stream: gather,
                });
                let event = b.add_event();
                b.op(Op::Record {
                    event,
                    stream: gather,
                });
                event
            };
            let mut ready = issue(&mut b, order[0]);
            for (n, &i) in order.iter().enumerate() {
                let next = order.get(n + 1).map(|&j| issue(&mut b, j));
                b.at(units[i], phase).op(Op::Wait {
                    event: ready,
                    stream: COMPUTE,
                });
                if forward {
                    b.op(Op::Alloc(saved[i]));
                } else {
                    b.op(Op::Alloc(grads[i]));
                }
                let kind = if forward {
                    HostWorkKind::Dispatch
                } else {
                    HostWorkKind::AutogradDispatch
                };
                let times = if forward { 1 } else { 2 };
                for k in 0..gemms.len() * times {
                    b.op(Op::HostWork { kind, count: 1 })
                        .launch(gemms[k % gemms.len()], COMPUTE);
                }
                for _ in 0..usize::from(shape.pointwise) * times {
                    b.op(Op::HostWork { kind, count: 1 });
                    b.op(Op::Alloc(temporary))
                        .launch(pointwise, COMPUTE)
                        .op(Op::Free(temporary));
                }
                if forward {
                    b.op(Op::Free(full[i][0]));
                } else {
                    b.op(Op::Free(full[i][1])).op(Op::Free(saved[i]));
                    b.join(COMPUTE, reduce);
                    b.op(Op::Collective {
                        id: reduce_scatter,
                        stream: reduce,
                    })
                    .op(Op::Free(grads[i]));
                }
                // Gathers wait for the compute issued so far, so that at most two units are full at
                // once.
                b.join(COMPUTE, gather);
                ready = next.unwrap_or(ready);
            }
        }
        b.at(units[0], Phase::Final).join(reduce, COMPUTE);
        b.at(units[0], Phase::Optimizer).op(Op::HostWork {
            kind: HostWorkKind::OptimizerStep,
            count: 1,
        });
        for _ in &units {
            b.launch(adam, COMPUTE);
        }
        b.end_section(kind);
    }
    b.finish()
}
