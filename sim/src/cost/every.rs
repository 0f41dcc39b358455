//! Checks that every shipped profile prices every operation.

use crate::cost::price_alone;
use crate::hardware::{self, MemoryClass};
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

/// Returns a kernel that consists of only this operation, with its class and its FLOPs.
fn kernel(kind: OpKind, dtype: DType) -> Kernel {
    let (inputs, outputs) = examples::operands(&kind);
    let mut graph = Graph::default();
    let mut value = |e: &examples::Example| {
        let id = ValueId(graph.values.len() as u32);
        let stride = |axis| e.shape[axis + 1..].iter().product();
        graph.values.push(Value {
            shape: e.shape[..].into(),
            strides: (0..e.shape.len()).map(stride).collect(),
            offset: 0,
            dtype: e.ids.map_or(dtype, |_| DType::I64),
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
        stage: None,
    };
    let at = Operands::new(&graph, &op);
    Kernel {
        name: kind.name().to_owned(),
        class: kind.def().class(&at),
        flops: Flops(kind.def().flops(&at)),
        read: Bytes(1 << 20),
        written: Bytes(1 << 20),
        dtype,
        body: Vec::new(),
        used_rows: None,
    }
}

#[test]
fn every_profile_prices_every_operation() {
    let floats = || DType::ALL.into_iter().filter(|d| d.is_float());
    for name in hardware::shipped() {
        let profile = hardware::load(name).unwrap();
        for (&kind, dtype) in OpKind::ALL
            .iter()
            .flat_map(|k| floats().map(move |d| (k, d)))
        {
            let kernel = kernel(kind, dtype);
            let (read, written) = (kernel.read, kernel.written);
            let us = price_alone(&kernel, Traffic { read, written }, &profile).us;
            let what = &kernel.name;
            assert!(
                us.is_finite() && us > 0.0,
                "{name}: `{what}` in {dtype}: {us}"
            );
        }
    }
}

#[test]
fn classes_have_the_names_that_profiles_give_them() {
    let mut named = 0;
    for &kind in OpKind::ALL {
        let class = kernel(kind, DType::F32).class;
        let name = class.memory_name();
        let read = name.map(|n| serde_json::from_value(n.into()).unwrap());
        assert_eq!(MemoryClass::of(&class), read, "{class:?}");
        named += usize::from(name.is_some());
    }
    assert!(named > 20, "{named}");
}
