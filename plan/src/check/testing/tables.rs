//! Tables of the small program: model, groups, streams, kernels, buffers.

use super::{AG, NUMEL, RANKS, RS, SHARD, Shape, Toy, UNITS};
use crate::config::Atomic;
use crate::ir::*;
use crate::program::*;
use crate::shard::{FlatItem, FlatLayout, Group, Layout};
use crate::units::{Bytes, Flops};
use smallvec::smallvec;

impl Toy {
    pub(super) fn buffers(&mut self) {
        let pool = self.shape.pool;
        // Only weights are double-buffered here.
        let grads = if pool == Pool::DoubleBuffer {
            Pool::Caching
        } else {
            pool
        };
        for u in 0..UNITS {
            let mut add = |role, numel: u64, dtype: DType, stream, pool| {
                self.b.add_buffer(Buffer {
                    role,
                    bytes: Bytes(numel * dtype.size()),
                    dtype,
                    align: 16,
                    pool,
                    stream,
                    unit: UnitId(u as u16),
                    holds: match role {
                        Role::Activation | Role::Temporary => Holds::Named("activation"),
                        _ => Holds::Group(GroupId(u as u16)),
                    },
                    key: 0,
                })
            };
            let caching = Pool::Caching;
            self.model
                .push(add(Role::ModelWeight, SHARD, DType::Bf16, COMPUTE, caching));
            self.main
                .push(add(Role::MainWeight, SHARD, DType::F32, COMPUTE, caching));
            self.rest
                .push(add(Role::MainGrad, SHARD, DType::F32, COMPUTE, caching));
            self.moments.push(add(
                Role::OptimizerState,
                SHARD,
                DType::F32,
                COMPUTE,
                caching,
            ));
            self.full
                .push(add(Role::FullWeight, NUMEL, DType::Bf16, AG, pool));
            self.grad
                .push(add(Role::FullGrad, NUMEL, DType::Bf16, COMPUTE, grads));
            self.reduced
                .push(add(Role::ReduceOutput, SHARD, DType::Bf16, RS, grads));
            self.act
                .push(add(Role::Activation, 4096, DType::Bf16, COMPUTE, caching));
            self.dact
                .push(add(Role::Temporary, 4096, DType::Bf16, COMPUTE, caching));
        }
        let like = *self.b.program.buffers.last().expect("buffers");
        let mut more = |role, bytes, name| {
            self.b.add_buffer(Buffer {
                role,
                bytes: Bytes(bytes),
                holds: Holds::Named(name),
                ..like
            })
        };
        self.input = more(Role::Input, 8192, "input");
        self.norm = more(Role::Temporary, 512, "norm");
        for u in 0..UNITS {
            let (m, f, g, r) = (
                self.all(self.model[u]),
                self.all(self.full[u]),
                self.all(self.grad[u]),
                self.all(self.reduced[u]),
            );
            self.descriptor(CollectiveKind::AllGather, 0, m, f);
            self.descriptor(
                CollectiveKind::ReduceScatter,
                u8::from(!self.shape.one_communicator),
                g,
                r,
            );
        }
        let n = self.all(self.norm);
        self.descriptor(CollectiveKind::AllReduce, 2, n, n);
    }
}

/// Returns the program without buffers and instructions.
pub(super) fn program(shape: Shape) -> ProgramBuilder {
    let units = |u: usize| Unit {
        name: format!("layers.{u}"),
        modules: vec![ModuleId(u as u32 + 1)],
        is_root: false,
        reshards: true,
        keeps_storage: false,
        skipped_in: Vec::new(),
        groups: vec![GroupId(u as u16)],
    };
    let group = |u: usize| Group {
        muon: false,
        muon_rows: Vec::new(),
        router_biases: false,
        ignored: false,
        unit: UnitId(u as u16),
        params: vec![ParamId(2 * u as u32), ParamId(2 * u as u32 + 1)],
        requires_grad: true,
        scales: Vec::new(),
        layout: Layout::Flat(FlatLayout {
            numel: NUMEL,
            chunk_factor: 16,
            shards: RANKS as u32,
            atomic: Atomic::Row,
            items: vec![
                FlatItem {
                    param: ParamId(2 * u as u32),
                    offset: 0,
                    numel: 1024,
                },
                FlatItem {
                    param: ParamId(2 * u as u32 + 1),
                    offset: 1024,
                    numel: 32,
                },
            ],
        }),
    };
    let param = |u: usize, name: &str, dims: &[u64]| Param {
        name: format!("layers.{u}.{name}"),
        modules: smallvec![ModuleId(u as u32 + 1)],
        shape: dims.into(),
        placements: Default::default(),
        requires_grad: true,
        router_bias: false,
        group: 0,
        packed: None,
        init: Init::Zeros,
        hf: None,
    };
    let module = |path: String, parent, kind| Module { path, parent, kind };
    let kernel = |name: &str, class| Kernel {
        name: name.into(),
        class,
        flops: Flops(0),
        read: Bytes(0),
        written: Bytes(0),
        dtype: DType::Bf16,
        body: vec![],
        used_rows: None,
    };
    let mesh = DeviceMesh::data_parallel(RANKS as u32, 1);
    let shard = AxisSet::of(AxisId::DP_SHARD);
    let mut b = ProgramBuilder::new(ProgramMeta::synthetic("toy", mesh));
    b.add_stream(StreamKind::AllGather, -1);
    b.add_stream(StreamKind::ReduceScatter, -1);
    for name in ["shard", "shard_rs", "norm"] {
        b.add_communicator(Communicator {
            name: name.into(),
            axes: shard,
            ranks: mesh.group(shard).expect("several ranks"),
            copy_engine: false,
        });
    }
    for (name, class) in [
        ("forward", KernelClass::Pointwise),
        ("loss", KernelClass::Pointwise),
        ("backward", KernelClass::Pointwise),
        ("accumulate", KernelClass::Pointwise),
        ("square_sum", KernelClass::FullReduce),
        ("scale", KernelClass::Pointwise),
        ("adamw", KernelClass::Optimizer),
        ("zero", KernelClass::Fill),
        ("cast", KernelClass::Copy),
    ] {
        b.add_kernel(kernel(name, class));
    }
    let p = &mut b.program;
    p.meta.hardware = "cpu".into();
    p.meta.policy = "native";
    p.meta.micro_batches = shape.micro_batches;
    p.meta.model_flops = Flops(1);
    p.meta.reduce_in_flight = shape.in_flight as u32;
    p.meta.validate_every = u32::from(shape.validation);
    p.meta.steps = 3;
    let blocks =
        (0..UNITS).map(|u| module(format!("layers.{u}"), Some(ModuleId(0)), ModuleKind::Block));
    p.modules = std::iter::once(module(String::new(), None, ModuleKind::Root))
        .chain(blocks)
        .collect();
    p.params = (0..UNITS)
        .flat_map(|u| [param(u, "weight", &[64, 16]), param(u, "bias", &[32])])
        .collect();
    p.units = (0..UNITS).map(units).collect();
    p.groups = (0..UNITS).map(group).collect();
    p.scopes = vec![CaptureScope {
        name: "layers.1 forward".into(),
        launches: 1,
    }];
    b
}
