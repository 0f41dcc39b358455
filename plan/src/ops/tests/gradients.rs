//! Compares the derivative of each operation with finite differences in float64.

use super::examples::{Example, operands};
use crate::compile::tests::semantics;
use crate::graph::{Act, Graph, Op, Root, ValueId};
use crate::ir::{BodyOp, DType, OpKind, Place, Real, Slot, op};
use crate::ops::Vjp;
use std::collections::BTreeMap;

/// Contents of the graph's memory.
type Memory = BTreeMap<Root, Vec<f64>>;

/// Returns deterministic numbers in (-1, 1).
fn random(state: &mut u64) -> f64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Returns the positions of a value's elements in its memory, in logical order.
fn positions(g: &Graph, v: ValueId) -> Vec<usize> {
    let value = g.value(v);
    let mut at = vec![value.offset as usize];
    for (&n, &stride) in value.shape.iter().zip(&value.strides) {
        let along = |a: usize| (0..n).map(move |i| a + (i * stride) as usize);
        at = at.into_iter().flat_map(along).collect();
    }
    at
}

fn read(g: &Graph, memory: &Memory, v: ValueId) -> Vec<f64> {
    let from = &memory[&g.value(v).root];
    positions(g, v).into_iter().map(|i| from[i]).collect()
}

fn write(g: &Graph, memory: &mut Memory, v: ValueId, values: &[f64]) {
    let to = memory.get_mut(&g.value(v).root).unwrap();
    for (i, x) in positions(g, v).into_iter().zip(values) {
        to[i] = *x;
    }
}

/// Computes the graph's operations in order.
fn run(g: &Graph, memory: &mut Memory) {
    let slot = |&v: &ValueId| Slot {
        place: Place::Register(0),
        offset: 0,
        shape: g.value(v).shape.clone(),
        strides: Default::default(),
        dtype: g.value(v).dtype,
    };
    for op in &g.ops {
        let Act::Compute(kind) = op.act else {
            continue;
        };
        let body = BodyOp {
            op: kind,
            inputs: op.inputs.iter().map(slot).collect(),
            outputs: op.outputs.iter().map(slot).collect(),
        };
        let inputs: Vec<_> = op.inputs.iter().map(|&v| read(g, memory, v)).collect();
        let results = semantics::apply(&body, &inputs);
        for (&v, y) in op.outputs.iter().zip(&results) {
            write(g, memory, v, y);
        }
    }
}

/// The graph of one operation, its inputs, and the gradient of its first output.
struct Case {
    g: Graph,
    inputs: Vec<ValueId>,
    memory: Memory,
}

impl Case {
    /// Returns output `n` after a change of one input element.
    fn moved(&self, n: usize, input: ValueId, element: usize, by: f64) -> Vec<f64> {
        let mut memory = self.memory.clone();
        let mut values = read(&self.g, &memory, input);
        values[element] += by;
        write(&self.g, &mut memory, input, &values);
        run(&self.g, &mut memory);
        read(&self.g, &memory, self.op().outputs[n])
    }

    fn new(kind: OpKind, inputs: &[Example], outputs: &[Example]) -> Self {
        let dtype = |e: &Example| e.ids.map_or(DType::F32, |_| DType::I64);
        let mut g = Graph::default();
        let made = inputs.iter().map(|e| {
            let v = g.empty(&e.shape, dtype(e));
            g.values[v.index()].requires_grad = e.ids.is_none();
            v
        });
        let made: Vec<ValueId> = made.collect();
        let results: Vec<_> = outputs.iter().map(|e| (&e.shape[..], dtype(e))).collect();
        if kind == OpKind::LogProbs {
            // Its second input is a function of the first.
            g.compute_into(OpKind::LogSumExp, &made[..1], made[1]);
        }
        g.compute(kind, &made, &results);
        let mut case = Self {
            g,
            inputs: made,
            memory: Memory::new(),
        };
        case.allocate();
        let mut state = 5;
        for (&v, e) in case.inputs.iter().zip(inputs) {
            let n = e.shape.iter().product::<u64>();
            let one = |_| match e.ids {
                Some(below) => ((random(&mut state) + 1.0) / 2.0 * below as f64).floor(),
                None => random(&mut state),
            };
            let values: Vec<f64> = match &e.values {
                Some(values) => values.clone(),
                None => (0..n).map(one).collect(),
            };
            write(&case.g, &mut case.memory, v, &values);
        }
        case
    }

    fn op(&self) -> &Op {
        self.g.ops.last().unwrap()
    }

    /// Allocates buffers that have no memory yet. They are filled with NaN, so that a read before a
    /// write is visible.
    fn allocate(&mut self) {
        for (b, buffer) in self.g.buffers.iter().enumerate() {
            let n = (buffer.bytes / buffer.dtype.size()) as usize;
            let root = Root::Buffer(b as u32);
            self.memory.entry(root).or_insert_with(|| vec![f64::NAN; n]);
        }
    }

    /// Returns the weighted sum of the first output after a change of one input element.
    fn weighted(&self, weights: &[f64], input: ValueId, element: usize, by: f64) -> f64 {
        let y = self.moved(0, input, element, by);
        y.iter().zip(weights).map(|(y, w)| y * w).sum()
    }

    /// Returns the gradients of the inputs, if the operation is differentiable.
    fn gradients(mut self, kind: OpKind, weights: &[f64]) -> Vec<(usize, Vec<f64>)> {
        let op = self.op().clone();
        let shape = self.g.value(op.outputs[0]).shape.clone();
        let dy = self.g.empty(&shape, DType::F32);
        let needs: Vec<bool> = (0..op.inputs.len())
            .map(|n| self.g.value(op.inputs[n]).requires_grad && kind.def().differentiable(n))
            .collect();
        let at = Vjp {
            g: &mut self.g,
            op: &op,
            dy,
            needs: &needs,
        };
        let contributions = kind.def().vjp(at);
        self.allocate();
        write(&self.g, &mut self.memory, dy, weights);
        run(&self.g, &mut self.memory);
        let value = |&(n, v): &(usize, ValueId)| (n, read(&self.g, &self.memory, v));
        contributions.iter().map(value).collect()
    }
}

/// Returns the forms of an operation that occur in forward graphs: for matmuls, `x w^T` and
/// `x w^T + b`.
fn forms(kind: &OpKind) -> Vec<OpKind> {
    let OpKind::Gemm(gemm) = *kind else {
        return vec![*kind];
    };
    let form = |bias| {
        OpKind::Gemm(op::Gemm {
            tb: true,
            bias,
            ..gemm
        })
    };
    vec![form(false), form(true)]
}

#[test]
fn derivatives_equal_finite_differences() {
    let runs = |kind: &&OpKind| !kind.def().is_priced_only();
    for kind in OpKind::ALL.iter().filter(runs).flat_map(forms) {
        let (inputs, outputs) = operands(&kind);
        let weights: Vec<f64> = {
            let mut state = 9;
            let n = outputs[0].shape.iter().product::<u64>();
            (0..n).map(|_| random(&mut state)).collect()
        };
        let name = kind.name();
        let case = Case::new(kind, &inputs, &outputs);
        // Backward graphs are not differentiated again. The cross entropy of a chunk computes its
        // gradient itself (below), and a log-sum-exp is only saved for backward.
        let never = matches!(kind, OpKind::CrossEntropy(_) | OpKind::LogSumExp);
        if kind.def().is_backward() || never || inputs.is_empty() {
            continue;
        }
        let found = Case::new(kind, &inputs, &outputs).gradients(kind, &weights);
        let needed = (0..inputs.len())
            .filter(|&n| inputs[n].ids.is_none() && kind.def().differentiable(n))
            .collect::<Vec<_>>();
        let mut given: Vec<usize> = found.iter().map(|f| f.0).collect();
        given.sort_unstable();
        assert_eq!(given, needed, "`{name}`: inputs with a gradient");
        for (n, gradient) in found {
            assert_eq!(
                gradient.len() as u64,
                inputs[n].shape.iter().product::<u64>(),
                "`{name}`: gradient of input {n}"
            );
            for (i, &exact) in gradient.iter().enumerate() {
                let h = 1e-5;
                let at = |by| case.weighted(&weights, case.inputs[n], i, by);
                let numeric = (at(h) - at(-h)) / (2.0 * h);
                let scale = numeric.abs().max(exact.abs()).max(1e-2);
                assert!(
                    (numeric - exact).abs() < 1e-6 * scale,
                    "`{name}`: input {n}, element {i}: {exact} instead of {numeric}"
                );
            }
        }
    }
}

#[test]
fn the_gradient_that_a_chunked_cross_entropy_makes_equals_finite_differences() {
    let (scale, gradient) = (Real(0.5), Real(3.0));
    let kind = OpKind::CrossEntropy(op::CrossEntropy { scale, gradient });
    let (inputs, outputs) = operands(&kind);
    let case = Case::new(kind, &inputs, &outputs);
    let logits = case.inputs[0];
    let made = case.moved(0, logits, 0, 0.0);
    for (i, &exact) in made.iter().enumerate() {
        let h = 1e-5;
        let at = |by| case.moved(1, logits, i, by)[0];
        // One factor scales the loss, the other one its gradient.
        let numeric = (at(h) - at(-h)) / (2.0 * h) / scale.0 * gradient.0;
        assert!(
            (numeric - exact).abs() < 1e-6,
            "element {i}: {exact} instead of {numeric}"
        );
    }
}
