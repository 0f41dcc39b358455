//! Every shipped profile prices every operation.

use crate::cost::price;
use crate::hardware;
use shardlab_plan::graph::{Act, Graph, Op, Root, Value, ValueId};
use shardlab_plan::ir::{DType, Kernel, ModuleId, OpKind};
use shardlab_plan::ops::Operands;
use shardlab_plan::program::Traffic;
use shardlab_plan::units::{Bytes, Flops};

#[path = "../../../plan/src/ops/tests/examples.rs"]
mod examples;

/// Names for `examples`.
mod terms {
    pub(super) use shardlab_plan::ir::OpKind;
    pub(super) use shardlab_plan::ops::{Extent, Operand};
}

/// The kernel that does only this, with its class and its arithmetic.
fn kernel(kind: OpKind) -> Kernel {
    let (inputs, outputs) = examples::operands(&kind);
    let mut graph = Graph::default();
    let mut value = |e: &examples::Example| {
        let id = ValueId(graph.values.len() as u32);
        let stride = |axis| e.shape[axis + 1..].iter().product();
        graph.values.push(Value {
            shape: e.shape[..].into(),
            strides: (0..e.shape.len()).map(stride).collect(),
            offset: 0,
            dtype: e.ids.map_or(DType::Bf16, |_| DType::I64),
            root: Root::Buffer(id.0),
            requires_grad: false,
        });
        id
    };
    let op = Op {
        act: Act::Compute(kind),
        inputs: inputs.iter().map(&mut value).collect(),
        outputs: outputs.iter().map(&mut value).collect(),
        module: ModuleId(0),
        node: 0,
        dispatches: 1,
    };
    let at = Operands::new(&graph, &op);
    Kernel {
        name: kind.name().to_owned(),
        class: kind.def().class(&at),
        flops: Flops(kind.def().flops(&at)),
        read: Bytes(1 << 20),
        written: Bytes(1 << 20),
        dtype: DType::Bf16,
        body: Vec::new(),
    }
}

#[test]
fn every_profile_prices_every_operation() {
    for name in hardware::shipped() {
        let profile = hardware::load(name).unwrap();
        for &kind in OpKind::ALL {
            let kernel = kernel(kind);
            let (read, written) = (kernel.read, kernel.written);
            let us = price(&kernel, Traffic { read, written }, &profile).us;
            assert!(us.is_finite() && us > 0.0, "{name}: `{}` {us}", kernel.name);
        }
    }
}
