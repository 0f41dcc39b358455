//! Synthetic programs for tests and benchmarks: a small builder, and a fully sharded step without a
//! model behind it.

use shardlab_plan::ir::{
    Access, AxisId, AxisSet, Buffer, BufferId, COMPUTE, Collective, CollectiveId, CollectiveKind,
    CommId, DType, DeviceMesh, EventId, Holds, HostWorkKind, Kernel, KernelClass, KernelId, Module,
    ModuleId, ModuleKind, Part, Pool, RankGroup, ReduceOp, Role, ScopeId, StreamId, UnitId,
};
use shardlab_plan::program::{
    CaptureScope, Communicator, Instr, Op, Phase, Program, ProgramMeta, Rule, Section, SectionKind,
    Stream, StreamKind, Unit,
};
use shardlab_plan::units::{Bytes, Flops};
use smallvec::smallvec;

/// Builds a program instruction by instruction.
#[derive(Clone, Debug)]
pub struct Builder {
    program: Program,
    unit: UnitId,
    phase: Phase,
}

impl Builder {
    /// An empty program for a world of `world` ranks in one node, with the compute stream.
    #[must_use]
    pub fn new(name: &str, world: u32) -> Self {
        let meta = ProgramMeta {
            scenario: name.to_owned(),
            policy: "synthetic",
            hardware: String::new(),
            mesh: DeviceMesh::data_parallel(world, 1),
            gpus_per_node: 8,
            micro_batches: 1,
            tokens: 8192,
            model_flops: Flops(0),
            deterministic: false,
            expandable_segments: true,
            reduce_in_flight: 1,
            validate_every: 0,
            steps: 1,
            compute: DType::Bf16,
        };
        let root = Module {
            path: String::new(),
            parent: None,
            kind: ModuleKind::Root,
        };
        let unit = Unit {
            name: "root".to_owned(),
            modules: vec![ModuleId(0)],
            is_root: true,
            reshards: false,
            groups: Vec::new(),
        };
        let program = Program {
            meta,
            modules: vec![root],
            params: Vec::new(),
            units: vec![unit],
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
        Self {
            program,
            unit: UnitId(0),
            phase: Phase::Forward,
        }
    }

    /// Adds a stream.
    pub fn stream(&mut self, kind: StreamKind, priority: i8) -> StreamId {
        self.program.streams.push(Stream { kind, priority });
        StreamId(self.program.streams.len() as u8 - 1)
    }

    /// Adds a communicator of `size` ranks `stride` apart.
    pub fn communicator(&mut self, name: &str, size: u32, stride: u32) -> CommId {
        let comm = Communicator {
            name: name.to_owned(),
            axes: AxisSet::of(AxisId::DP_SHARD),
            ranks: RankGroup { size, stride },
            copy_engine: false,
        };
        self.program.communicators.push(comm);
        CommId(self.program.communicators.len() as u8 - 1)
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
        self.program.kernels.push(Kernel {
            name: name.to_owned(),
            class,
            flops: Flops(flops),
            read: Bytes(read),
            written: Bytes(written),
            dtype: DType::Bf16,
            body: Vec::new(),
        });
        KernelId(self.program.kernels.len() as u32 - 1)
    }

    /// Adds a bf16 matrix product.
    pub fn gemm(&mut self, m: u64, n: u64, k: u64) -> KernelId {
        let class = KernelClass::Gemm { m, n, k, batch: 1 };
        self.kernel("mm", class, 2 * m * n * k, 2 * (m * k + k * n), 2 * m * n)
    }

    /// Adds a collective of `bytes` (full side), aligned, within buffer 0.
    pub fn collective(&mut self, kind: CollectiveKind, comm: CommId, bytes: u64) -> CollectiveId {
        let size = u64::from(self.program.communicators[comm.index()].ranks.size);
        let part = Part {
            input: access(BufferId(0), bytes / size),
            output: access(BufferId(0), bytes),
        };
        let reduce = ReduceOp::None;
        let bytes = Bytes(bytes);
        let parts = smallvec![part];
        self.program.collectives.push(Collective {
            kind,
            comm,
            reduce,
            dtype: DType::Bf16,
            bytes,
            parts,
        });
        CollectiveId(self.program.collectives.len() as u32 - 1)
    }

    /// Adds a buffer.
    pub fn buffer(&mut self, role: Role, bytes: u64, stream: StreamId) -> BufferId {
        let id = self.program.buffers.len() as u32;
        self.program.buffers.push(Buffer {
            role,
            bytes: Bytes(bytes),
            dtype: DType::Bf16,
            align: 512,
            pool: Pool::Caching,
            stream,
            unit: self.unit,
            holds: Holds::Named("synthetic"),
            key: id,
        });
        BufferId(id)
    }

    /// Adds an event.
    pub fn event(&mut self) -> EventId {
        self.program.events += 1;
        EventId(self.program.events - 1)
    }

    /// Adds a captured scope.
    pub fn scope(&mut self, name: &str) -> ScopeId {
        self.program.scopes.push(CaptureScope {
            name: name.to_owned(),
            launches: 0,
        });
        ScopeId(self.program.scopes.len() as u16 - 1)
    }

    /// Adds a unit; later instructions and buffers belong to it.
    pub fn unit(&mut self, name: &str) -> &mut Self {
        self.program.units.push(Unit {
            name: name.to_owned(),
            modules: vec![ModuleId(0)],
            is_root: false,
            reshards: true,
            groups: Vec::new(),
        });
        self.unit = UnitId(self.program.units.len() as u16 - 1);
        self
    }

    /// Makes later instructions belong to a unit and phase.
    pub fn at(&mut self, unit: UnitId, phase: Phase) -> &mut Self {
        self.unit = unit;
        self.phase = phase;
        self
    }

    /// Appends an instruction.
    pub fn op(&mut self, op: Op) -> &mut Self {
        let (unit, phase) = (self.unit, self.phase);
        self.program.instrs.push(Instr {
            op,
            unit,
            micro_batch: 0,
            phase,
            rule: Rule::Model,
        });
        self
    }

    /// Launches a kernel without operands.
    pub fn launch(&mut self, kernel: KernelId, stream: StreamId) -> &mut Self {
        self.op(Op::Launch {
            kernel,
            stream,
            reads: 0,
            writes: 0,
            end: 0,
        })
    }

    /// Launches a kernel that reads and writes a byte of these buffers.
    pub fn launch_over(
        &mut self,
        kernel: KernelId,
        stream: StreamId,
        read: &[BufferId],
        written: &[BufferId],
    ) -> &mut Self {
        let at = |accesses: &Vec<Access>| accesses.len() as u32;
        let reads = at(&self.program.accesses);
        self.program
            .accesses
            .extend(read.iter().map(|&b| access(b, 1)));
        let writes = at(&self.program.accesses);
        self.program
            .accesses
            .extend(written.iter().map(|&b| access(b, 1)));
        let end = at(&self.program.accesses);
        self.op(Op::Launch {
            kernel,
            stream,
            reads,
            writes,
            end,
        })
    }

    /// Records a new event on one stream and makes another wait for it.
    pub fn join(&mut self, from: StreamId, to: StreamId) -> EventId {
        let event = self.event();
        self.op(Op::Record {
            event,
            stream: from,
        });
        self.op(Op::Wait { event, stream: to });
        event
    }

    /// Ends a section that began where the previous one ended.
    pub fn section(&mut self, kind: SectionKind) -> &mut Self {
        let start = self.program.sections.last().map_or(0, |s| s.instrs.end);
        self.program.sections.push(Section {
            kind,
            instrs: start..self.program.instrs.len() as u32,
        });
        self
    }

    /// Model FLOPs of a step, for utilisation.
    pub fn model_flops(&mut self, flops: u64) -> &mut Self {
        self.program.meta.model_flops = Flops(flops);
        self
    }

    /// The program; what was appended since the last section becomes the steady one.
    #[must_use]
    pub fn finish(mut self) -> Program {
        let end = self.program.sections.last().map_or(0, |s| s.instrs.end);
        if end < self.program.instrs.len() as u32 || self.program.sections.is_empty() {
            self.section(SectionKind::Steady);
        }
        self.program
    }
}

/// The first bytes of a buffer, on every rank.
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
    /// Blocks.
    pub layers: u16,
    /// Width.
    pub hidden: u64,
    /// Feed-forward width.
    pub ffn: u64,
    /// Tokens a rank.
    pub tokens: u64,
    /// Pointwise kernels a block and direction, beside the seven matrix products.
    pub pointwise: u16,
    /// Ranks.
    pub ranks: u32,
}

impl Shape {
    /// Two small layers on four ranks.
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

    /// Like an 8 B model on eight ranks, eager: about 4,000 kernels and 16,000 instructions a step.
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

/// A fully sharded step: per block gather, compute, release; backward with reduce-scatters; an
/// optimizer kernel. Gathers run on a stream of their own, one unit ahead.
#[must_use]
pub fn fsdp(shape: &Shape) -> Program {
    let mut b = Builder::new("synthetic", shape.ranks);
    let gather = b.stream(StreamKind::AllGather, -1);
    let reduce = b.stream(StreamKind::ReduceScatter, -1);
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
        .map(|i| b.unit(&format!("layers.{i}")).unit)
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
    b.section(SectionKind::Init);
    let (passes, backward) = (
        [SectionKind::First, SectionKind::Steady],
        u64::from(shape.layers) * params * t,
    );
    b.model_flops(6 * backward);
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
                let event = b.event();
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
                // Gathers wait for the compute issued so far, so that at most two units are whole
                // at once.
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
        b.section(kind);
    }
    b.finish()
}
