//! Reverse-mode differentiation of the forward graph: backward ops, saved tensors, recompute.
//!
//! Forward ops are visited in reverse issue order, which is the order in which PyTorch's engine
//! runs their nodes (it prefers the node created last). Each kind of op has one rule (`rules`), and
//! there are no rules for specific models. A forward value is saved if a rule refers to it:
//! lifetimes follow from uses, so there is no separate list of saved tensors.

mod modules;
pub(crate) mod recompute;
mod rules;

use crate::graph::{Act, Graph, Root, ValueId, View};
use crate::ir::{ModuleId, OpKind, ParamId};
use crate::models::ModelGraph;
use recompute::Recomputed;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ops::Range;

/// A part of the backward op list that reruns a part of the forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Module.
    pub module: ModuleId,
    /// Forward ops.
    pub forward: Range<u32>,
    /// Backward ops that rerun them.
    pub ops: Range<u32>,
    /// Whether these ops run before the hooks of the module's backward ([`Train::use_reentrant`]).
    ///
    /// [`Train::use_reentrant`]: crate::config::Train::use_reentrant
    pub reentrant: bool,
}

/// A complete gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Parameter.
    pub param: ParamId,
    /// The op that writes its last contribution, or [`Ready::after`] if forward has computed the
    /// gradient.
    pub writer: u32,
    /// The last op of that op's node. The engine passes gradients on only after it.
    pub after: u32,
}

/// The result of `differentiate`, which appends ops to a graph.
#[derive(Clone, Debug, Default)]
pub struct Backward {
    /// First backward op. The forward ops come before it.
    pub first: u32,
    /// Parameters in the order in which their gradients become complete.
    pub ready: Vec<Ready>,
    /// The initial gradient of the loss.
    pub one: Option<ValueId>,
    /// Recomputed forwards, in order.
    pub sections: Vec<Section>,
}

/// How the gradients of a value with several uses are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// Into the first one, if its node creates it only for this use.
    InPlace,
    /// As PyTorch's engine does (`can_accumulate_inplace` of torch 2.11): into the first one if
    /// nothing else refers to its memory at that time, or else into a new tensor. A view refers to
    /// its base: the weight gradient of a linear layer is a transposed view, and the gradient of
    /// its input has been folded into a matrix.
    Autograd,
}

/// A gradient that waits until its node runs.
#[derive(Clone, Copy)]
struct Pending {
    value: ValueId,
    /// Whether nothing else refers to its memory, so that later contributions can be added in
    /// place.
    exclusive: bool,
}

struct Engine<'m> {
    m: &'m mut ModelGraph,
    pending: Vec<Option<Pending>>,
    /// Number of gradient contributions that each parameter still lacks.
    uses: Vec<u32>,
    /// The result so far.
    out: Backward,
    recompute: recompute::State,
    sums: Sums,
    /// Number of waiting activation gradients in each buffer.
    held: HashMap<u32, u32>,
    /// First buffer that backward allocates.
    first_buffer: u32,
    /// Initial gradient of the objective.
    seed: f64,
}

/// Appends the backward ops of `m.objective` to `m.graph`, starting from a gradient of `seed`.
/// (With a seed of 1 over the number of micro-batches, their gradients add up to that of the step's
/// mean loss.)
pub(crate) fn differentiate(
    m: &mut ModelGraph,
    recompute: &Recomputed,
    sums: Sums,
    seed: f64,
) -> Backward {
    let first = m.graph.ops.len() as u32;
    let pending = vec![None; m.graph.values.len()];
    let uses = contributions(m);
    let state = recompute::State::new(m, recompute);
    let first_buffer = m.graph.buffers.len() as u32;
    let mut e = Engine {
        m,
        pending,
        uses,
        out: Backward {
            first,
            ..Backward::default()
        },
        recompute: state,
        sums,
        held: HashMap::new(),
        first_buffer,
        seed,
    };
    e.m.graph.in_backward = true;
    e.run();
    e.m.graph.in_backward = false;
    e.m.graph.node = None;
    (e.m.graph.module, e.m.graph.stage) = (None, None);
    e.out
}

/// Counts the gradient contributions to each parameter.
fn contributions(m: &ModelGraph) -> Vec<u32> {
    let mut uses = vec![0; m.params.len()];
    for op in &m.graph.ops {
        let trained = op.outputs.iter().any(|&v| m.graph.value(v).requires_grad);
        for (i, &v) in op.inputs.iter().enumerate() {
            let value = m.graph.value(v);
            if let Some(p) = parameter(&m.graph, v)
                && trained
                && value.requires_grad
                && rules::differentiable(op, i)
            {
                uses[p.index()] += 1;
            }
        }
    }
    uses
}

/// Returns the parameter that a value covers completely; `None` for views, whose gradients are
/// those of activations.
fn parameter(g: &Graph, v: ValueId) -> Option<ParamId> {
    match g.value(v).root {
        Root::Param(p) if g.is_leaf(v) => Some(p),
        _ => None,
    }
}

impl Engine<'_> {
    fn g(&mut self) -> &mut Graph {
        &mut self.m.graph
    }

    fn run(&mut self) {
        let loss = self.m.objective;
        if !self.m.graph.value(loss).requires_grad {
            return;
        }
        let last = self.m.graph.ops.last().map(|op| op.module);
        self.g().module = last;
        let seed = self.seed;
        let one = self.g().fill_like(loss, seed);
        self.out.one = Some(one);
        let exclusive = false;
        self.put(
            loss,
            Pending {
                value: one,
                exclusive,
            },
        );
        for at in (0..self.out.first as usize).rev() {
            self.visit(at);
        }
        self.finish_sections();
    }

    fn visit(&mut self, at: usize) {
        let op = self.m.graph.ops[at].clone();
        let grads: SmallVec<[Option<Pending>; 4]> =
            op.outputs.iter().map(|&v| self.take(v)).collect();
        if grads.iter().all(Option::is_none) {
            return;
        }
        (self.g().module, self.g().stage) = (Some(op.module), op.stage);
        let given: SmallVec<[ValueId; 4]> = grads.iter().flatten().map(|p| p.value).collect();
        self.enter_section(at, &given);
        let (mark_ops, mark_buffers) = (self.m.graph.ops.len(), self.m.graph.buffers.len() as u32);
        self.g().nodes += 1;
        self.m.graph.node = Some(self.m.graph.nodes);
        let values: SmallVec<[Option<ValueId>; 4]> =
            grads.iter().map(|p| p.map(|p| p.value)).collect();
        let needs: SmallVec<[bool; 8]> = (0..op.inputs.len())
            .map(|i| {
                rules::differentiable(&op, i) && self.m.graph.value(op.inputs[i]).requires_grad
            })
            .collect();
        let seen = self.recompute.substitute(&op);
        let contributions = rules::vjp(self.g(), &seen, &values, &needs);
        if self.m.graph.ops.len() == mark_ops {
            self.g().pass();
        }
        self.m.graph.node = None;
        // Nothing else reads what forward has computed only for this node.
        let own = op.act == Act::View(View::Precomputed);
        for &(i, value) in &contributions {
            let exclusive = own || self.exclusive(value, &contributions, &grads, mark_buffers);
            self.accumulate(op.inputs[i], Pending { value, exclusive });
        }
    }

    /// Returns whether a contribution holds the only reference to its memory.
    fn exclusive(
        &self,
        value: ValueId,
        contributions: &[(usize, ValueId)],
        grads: &[Option<Pending>],
        mark: u32,
    ) -> bool {
        let g = &self.m.graph;
        let Some(buffer) = g.buffer_of(value) else {
            return false;
        };
        if contributions
            .iter()
            .filter(|(_, v)| g.buffer_of(*v) == Some(buffer))
            .count()
            > 1
        {
            return false;
        }
        buffer >= mark
            || grads
                .iter()
                .flatten()
                .any(|p| p.exclusive && g.buffer_of(p.value) == Some(buffer))
    }

    fn accumulate(&mut self, v: ValueId, new: Pending) {
        if let Some(p) = parameter(&self.m.graph, v) {
            self.accumulate_param(v, p, new);
            return;
        }
        let sum = match self.take(v) {
            None => new,
            Some(old) => Pending {
                value: self.add(old, new.value),
                exclusive: true,
            },
        };
        self.put(v, sum);
    }

    /// Stores the gradient of an activation until its node runs.
    fn put(&mut self, v: ValueId, gradient: Pending) {
        if let Some(buffer) = self.m.graph.buffer_of(gradient.value) {
            *self.held.entry(buffer).or_insert(0) += 1;
        }
        self.pending[v.index()] = Some(gradient);
    }

    /// Takes the gradient that was stored for a node.
    fn take(&mut self, v: ValueId) -> Option<Pending> {
        let gradient = self.pending[v.index()].take()?;
        if let Some(buffer) = self.m.graph.buffer_of(gradient.value)
            && let Some(held) = self.held.get_mut(&buffer)
        {
            *held = held.saturating_sub(1);
        }
        Some(gradient)
    }

    /// Adds in place if only this node's input buffer refers to the old gradient, or else into a
    /// new tensor.
    fn add(&mut self, old: Pending, new: ValueId) -> ValueId {
        let alone = match self.sums {
            Sums::InPlace => old.exclusive,
            Sums::Autograd => self.stands_alone(old, new),
        };
        if alone {
            self.g().add_into(old.value, new)
        } else {
            self.g().binary(OpKind::Add, old.value, new)
        }
    }

    /// Returns whether a single waiting gradient is the only reference to its memory, as PyTorch
    /// counts references.
    fn stands_alone(&self, old: Pending, new: ValueId) -> bool {
        let g = &self.m.graph;
        if g.functional() {
            return old.exclusive;
        }
        let Some(buffer) = g.buffer_of(old.value) else {
            return false;
        };
        let fresh = buffer >= self.first_buffer || old.exclusive;
        let held = self.held.get(&buffer).is_some_and(|n| *n > 0);
        let shared = held || g.buffer_of(new) == Some(buffer);
        fresh && !shared && !self.is_view(old.value)
    }

    /// Returns whether PyTorch holds a gradient as a view of another tensor.
    fn is_view(&self, v: ValueId) -> bool {
        let g = &self.m.graph;
        let maker = g.ops.get(g.producer[v.index()] as usize);
        maker.is_some_and(|op| match op.act {
            Act::View(_) => true,
            Act::Compute(OpKind::Gemm { .. }) => g.value(v).shape.len() > 2,
            _ => false,
        })
    }

    /// Computes the first contribution directly into the gradient, and adds later ones (of tied
    /// parameters) according to [`Sums`].
    fn accumulate_param(&mut self, v: ValueId, p: ParamId, new: Pending) {
        let sum = match self.pending[v.index()] {
            None if self.uses[p.index()] > 1 && self.is_shared_view(new.value) => Pending {
                value: new.value,
                exclusive: false,
            },
            None => {
                // A collective's result has the activation's type, which may differ from that of a
                // gradient.
                let fits = self.covers(new.value) && !self.is_received(new.value);
                let value = if new.exclusive && fits {
                    new.value
                } else {
                    let (shape, dtype) = (
                        self.m.graph.value(v).shape.clone(),
                        self.m.graph.value(v).dtype,
                    );
                    self.g()
                        .compute(OpKind::Copy, &[new.value], &[(&shape, dtype)])[0]
                };
                self.root_in_grad(value, p);
                Pending {
                    value,
                    exclusive: true,
                }
            }
            Some(old) if old.exclusive => {
                let inputs = [old.value, new.value];
                self.g().compute_into(OpKind::Add, &inputs, old.value);
                old
            }
            Some(old) => {
                let value = self.g().binary(OpKind::Add, old.value, new.value);
                self.root_in_grad(value, p);
                Pending {
                    value,
                    exclusive: true,
                }
            }
        };
        self.pending[v.index()] = Some(sum);
        self.uses[p.index()] -= 1;
        if self.uses[p.index()] == 0 {
            self.pending[v.index()] = None;
            let after = self.m.graph.ops.len() as u32 - 1;
            let writer = self.last_writer(Root::Grad(p));
            let writer = if writer < self.out.first {
                after
            } else {
                writer
            };
            self.out.ready.push(Ready {
                param: p,
                writer,
                after,
            });
        }
    }

    /// Returns whether PyTorch holds a weight gradient as a view of another tensor.
    fn is_shared_view(&self, v: ValueId) -> bool {
        let g = &self.m.graph;
        let maker = g.ops.get(g.producer[v.index()] as usize);
        let gemm = maker.is_some_and(|op| matches!(op.act, Act::Compute(OpKind::Gemm { .. })));
        self.sums == Sums::Autograd && gemm
    }

    fn last_writer(&self, root: Root) -> u32 {
        let g = &self.m.graph;
        let writes = |i: &usize| {
            let op = &g.ops[*i];
            !op.is_view() && op.outputs.iter().any(|&v| g.value(v).root == root)
        };
        (0..g.ops.len()).rev().find(writes).map_or(0, |i| i as u32)
    }

    /// Returns whether a value covers all elements of its buffer in order.
    fn covers(&self, v: ValueId) -> bool {
        let value = self.m.graph.value(v);
        self.m.graph.buffer_of(v).is_some_and(|b| {
            value.is_contiguous()
                && value.numel() * value.dtype.size() == self.m.graph.buffers[b as usize].bytes
        })
    }

    /// Returns whether a collective created the buffer of a value.
    fn is_received(&self, v: ValueId) -> bool {
        let g = &self.m.graph;
        let Some(buffer) = g.buffer_of(v) else {
            return false;
        };
        let maker = g.producer[g.buffers[buffer as usize].first.index()];
        let maker = g.ops.get(maker as usize);
        maker.is_some_and(|op| matches!(op.act, Act::Collective(_)))
    }

    /// Moves all values of a new buffer to the gradient of a parameter.
    fn root_in_grad(&mut self, v: ValueId, p: ParamId) {
        let root = self.m.graph.value(v).root;
        let Root::Buffer(buffer) = root else { return };
        let first = self.m.graph.buffers[buffer as usize].first;
        for value in &mut self.m.graph.values[first.index()..] {
            if value.root == root {
                value.root = Root::Grad(p);
            }
        }
    }
}
