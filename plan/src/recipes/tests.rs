use super::*;
use crate::autodiff::{self, Sums, recompute::Recomputed};
use crate::graph::{Act, Value};
use crate::models::testing::{llama, tiny};
use crate::models::{self, ModelGraph};

/// Returns every type of a computation's operand that a recipe names.
fn operands(m: &ModelGraph, recipe: &dyn Recipe) -> Vec<(DType, DType)> {
    let mut out = Vec::new();
    for op in &m.graph.ops {
        let Act::Compute(kind) = op.act else { continue };
        for (n, &v) in op.inputs.iter().enumerate() {
            if let Some(wanted) = recipe.operand(&kind, n) {
                out.push((wanted, m.graph.value(v).dtype));
            }
        }
    }
    out
}

#[test]
fn results_of_every_family_have_the_types_that_operations_say() {
    for (_, family) in crate::config::Family::named_all() {
        for compute in [DType::Bf16, DType::F32] {
            let mut s = tiny(family);
            s.precision.compute = compute;
            let m = models::graph(&s);
            for op in &m.graph.ops {
                let Act::Compute(kind) = op.act else { continue };
                let dtype = |v: &crate::graph::ValueId| m.graph.value(*v).dtype;
                let inputs: Vec<DType> = op.inputs.iter().map(dtype).collect();
                // Casts define their own type.
                if kind == OpKind::Copy {
                    continue;
                }
                for (n, v) in op.outputs.iter().enumerate() {
                    let said = kind.def().result(n, &inputs);
                    assert_eq!(dtype(v), said, "{family:?} {kind:?} {n}");
                }
            }
        }
    }
}

#[test]
fn models_are_traced_in_the_types_of_mixed_precision() {
    for (_, family) in crate::config::Family::named_all() {
        let s = tiny(family);
        let recipe = of(&s.precision);
        let mut m = models::graph(&s);
        let traced = m.graph.ops.clone();
        convert(&mut m.graph, &*recipe);
        assert_eq!(m.graph.ops, traced, "{family:?}");
        let seen = operands(&m, &*recipe);
        assert!(!seen.is_empty() && seen.iter().all(|(wanted, got)| wanted == got));
    }
}

/// GEMMs that read float32.
struct Wide(Box<dyn Recipe>);

impl Recipe for Wide {
    fn param(&self, p: &Param) -> DType {
        self.0.param(p)
    }

    fn activation(&self) -> DType {
        self.0.activation()
    }

    fn operand(&self, op: &OpKind, n: usize) -> Option<DType> {
        match op {
            OpKind::Gemm(_) => (n < 2).then_some(DType::F32),
            _ => self.0.operand(op, n),
        }
    }

    fn param_types(&self) -> ParamTypes {
        self.0.param_types()
    }
}

#[test]
fn operands_are_converted_in_front_of_the_operations_that_ask_for_it() {
    let s = llama(32, 4, 2, 64, 2, 50);
    let wide = Wide(of(&s.precision));
    let before = models::graph(&s);
    let mut m = before.clone();
    convert(&mut m.graph, &wide);
    assert!(
        operands(&m, &wide)
            .iter()
            .all(|(wanted, got)| wanted == got)
    );
    let gemms = operands(&before, &wide)
        .iter()
        .filter(|(w, g)| w != g)
        .count();
    assert!(gemms > 20, "{gemms}");
    assert_eq!(m.graph.ops.len(), before.graph.ops.len() + gemms);
    // Every value is still computed by the op that writes it, before it is read.
    for (at, op) in m.graph.ops.iter().enumerate() {
        for v in &op.outputs {
            assert_eq!(m.graph.producer[v.index()], at as u32);
        }
        for v in &op.inputs {
            let producer = m.graph.producer[v.index()];
            assert!(producer == u32::MAX || producer < at as u32, "{op:?}");
        }
    }
    let held = |m: &ModelGraph| -> Vec<(Act, u32)> {
        let holds = m.graph.holds.iter();
        holds
            .map(|&(op, b)| (m.graph.ops[op as usize].act, b))
            .collect()
    };
    assert_eq!(
        held(&m).iter().map(|h| h.0).collect::<Vec<_>>(),
        held(&before).iter().map(|h| h.0).collect::<Vec<_>>()
    );
    // Gradients have the types of the values they belong to.
    let recompute = Recomputed::new(&s.train, m.modules());
    let backward = autodiff::differentiate(&mut m, &recompute, Sums::InPlace, 1.0);
    assert_eq!(backward.ready.len(), m.params.len());
    let trained =
        |v: &&Value| v.requires_grad && v.root == crate::graph::Root::Param(crate::ir::ParamId(0));
    assert!(m.graph.values.iter().any(|v| trained(&v)));
}
