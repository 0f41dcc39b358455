//! Tables of the small program: model, groups, streams, kernels, buffers.

use super::{AG, NUMEL, RANKS, RS, SHARD, Shape, Toy, UNITS};
use crate::ir::*;
use crate::ir::{AxisId, AxisSet, DType, DeviceMesh, RankGroup};
use crate::program::*;
use crate::shard::{FlatItem, FlatLayout, Group, Layout};
use crate::units::{Bytes, Flops};
use smallvec::smallvec;

impl Toy {
    pub(super) fn buffers(&mut self) {
        let pool = self.shape.pool;
        // A double buffer here is one of weights.
        let grads = if pool == Pool::DoubleBuffer {
            Pool::Caching
        } else {
            pool
        };
        for u in 0..UNITS {
            let mut add = |role, numel: u64, dtype: DType, stream, pool| {
                self.p.buffers.push(Buffer {
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
                    key: self.p.buffers.len() as u32,
                });
                BufferId(self.p.buffers.len() as u32 - 1)
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
        let like = *self.p.buffers.last().expect("buffers");
        let mut more = |role, bytes, name| {
            self.p.buffers.push(Buffer {
                role,
                bytes: Bytes(bytes),
                holds: Holds::Named(name),
                ..like
            });
            BufferId(self.p.buffers.len() as u32 - 1)
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

/// Everything but buffers and instructions.
pub(super) fn program(shape: Shape) -> Program {
    let units = |u: usize| Unit {
        name: format!("layers.{u}"),
        modules: vec![ModuleId(u as u32 + 1)],
        is_root: false,
        reshards: true,
        groups: vec![GroupId(u as u16)],
    };
    let group = |u: usize| Group {
        unit: UnitId(u as u16),
        params: vec![ParamId(2 * u as u32), ParamId(2 * u as u32 + 1)],
        requires_grad: true,
        layout: Layout::Flat(FlatLayout {
            numel: NUMEL,
            chunk_factor: 16,
            shards: RANKS as u32,
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
    };
    let comm = |name: &str| Communicator {
        name: name.into(),
        axes: AxisSet::of(AxisId::DP_SHARD),
        ranks: RankGroup {
            size: RANKS as u32,
            stride: 1,
        },
        copy_engine: false,
    };
    Program {
        meta: ProgramMeta {
            scenario: "toy".into(),
            policy: "native",
            hardware: "cpu".into(),
            mesh: DeviceMesh::data_parallel(RANKS as u32, 1),
            gpus_per_node: RANKS as u32,
            micro_batches: shape.micro_batches,
            tokens: 1,
            model_flops: Flops(1),
            deterministic: false,
            expandable_segments: false,
            reduce_in_flight: shape.in_flight as u32,
            validate_every: u32::from(shape.validation),
            steps: 3,
            compute: DType::Bf16,
        },
        modules: std::iter::once(module(String::new(), None, ModuleKind::Root))
            .chain(
                (0..UNITS)
                    .map(|u| module(format!("layers.{u}"), Some(ModuleId(0)), ModuleKind::Block)),
            )
            .collect(),
        params: (0..UNITS)
            .flat_map(|u| [param(u, "weight", &[64, 16]), param(u, "bias", &[32])])
            .collect(),
        units: (0..UNITS).map(units).collect(),
        groups: (0..UNITS).map(group).collect(),
        streams: [
            (StreamKind::Compute, 0),
            (StreamKind::AllGather, -1),
            (StreamKind::ReduceScatter, -1),
        ]
        .map(|(kind, priority)| Stream { kind, priority })
        .to_vec(),
        communicators: vec![comm("shard"), comm("shard_rs"), comm("norm")],
        kernels: vec![
            kernel("forward", KernelClass::Pointwise),
            kernel("loss", KernelClass::Pointwise),
            kernel("backward", KernelClass::Pointwise),
            kernel("accumulate", KernelClass::Pointwise),
            kernel("square_sum", KernelClass::FullReduce),
            kernel("scale", KernelClass::Pointwise),
            kernel("adamw", KernelClass::Optimizer),
            kernel("zero", KernelClass::Fill),
            kernel("cast", KernelClass::Copy),
        ],
        buffers: vec![],
        accesses: vec![],
        collectives: vec![],
        copies: vec![],
        scopes: vec![CaptureScope {
            name: "layers.1 forward".into(),
            launches: 1,
        }],
        loss: None,
        eval_loss: None,
        events: 0,
        sections: vec![],
        instrs: vec![],
        double_buffer_copies: 0,
        persist_on_alloc_fail: false,
        placement: Default::default(),
    }
}
