//! Losses of routers: once per micro-batch, the gradient of each loss is added to that of its
//! router's logits, with the coefficient of the loss and the factor of the other losses.

use super::describe;
use super::operands::{self, Ranges};
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{Access, BodyOp, BufferId, InstrId, OpKind, Place, Real};
use crate::ops::Fusion;
use crate::program::{Instr, Op, Phase, Program};
use std::collections::BTreeMap;

/// Start of the logits, and the name of their loss.
type Loss = (BufferId, u64, &'static str);

/// A loss in forward that backward has to differentiate.
#[derive(Clone, Copy)]
struct Forward {
    by: InstrId,
    scale: Real,
    /// Instruction of its gradient.
    backward: Option<InstrId>,
}

/// A gradient of logits.
#[derive(Clone, Copy)]
struct Gradient {
    by: InstrId,
    /// Whether an operation other than a sum has read it.
    used: bool,
}

#[derive(Default)]
struct State {
    losses: BTreeMap<Loss, Forward>,
    /// Buffers whose contents were copied from another one, in host memory and back.
    origins: BTreeMap<BufferId, BufferId>,
    /// Constants in memory.
    filled: Ranges<f64>,
    gradients: Vec<Gradient>,
    /// Gradients whose sum the memory contains, as indices of `gradients`.
    sums: Ranges<Vec<usize>>,
    /// Seed of the first gradient, and its instruction.
    seed: Option<(f64, InstrId)>,
}

/// Checks the losses of all routers.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    let body = p.kernels.iter().flat_map(|k| &k.body);
    if !body.clone().any(|op| loss(&op.op).is_some()) {
        return;
    }
    let mut state = State::default();
    for section in &p.sections {
        for i in section.instrs.clone() {
            let id = InstrId(i);
            match &p.instrs[id.index()] {
                Instr {
                    op: Op::Free(b), ..
                } => state.forget(*b),
                Instr {
                    op: Op::Copy { id, .. },
                    ..
                } => {
                    let copy = &p.copies[id.index()];
                    let origin = state.origin(copy.from.buffer);
                    state.origins.insert(copy.to.buffer, origin);
                }
                instr @ Instr {
                    op: Op::Launch { kernel, .. },
                    ..
                } => {
                    let launch = Launch { p, id, instr };
                    launch.follow(&p.kernels[kernel.index()].body, &mut state, sink);
                }
                _ => {}
            }
        }
        state.finish(p, sink);
    }
}

/// Returns the name and the coefficient of a router's loss, and whether the operation is its
/// gradient.
fn loss(op: &OpKind) -> Option<(&'static str, Real, bool)> {
    Some(match op {
        OpKind::LoadBalance(of) => ("load_balance", of.scale, false),
        OpKind::LoadBalanceGrad(of) => ("load_balance", of.scale, true),
        OpKind::ZLoss(of) => ("z_loss", of.scale, false),
        OpKind::ZLossGrad(of) => ("z_loss", of.scale, true),
        _ => return None,
    })
}

impl State {
    /// Returns the buffer where forward wrote what a buffer contains.
    fn origin(&self, b: BufferId) -> BufferId {
        self.origins.get(&b).copied().unwrap_or(b)
    }

    fn forget(&mut self, b: BufferId) {
        self.filled.forget(b);
        self.sums.forget(b);
    }

    /// Checks at the end of a section that all losses have a gradient, and that routers use it.
    fn finish(&mut self, p: &Program, sink: &mut Sink) {
        // The losses of frozen routers have no gradient.
        let trained = p.params.iter().all(|x| x.requires_grad);
        for ((.., name), loss) in std::mem::take(&mut self.losses) {
            missing(p, name, loss, trained, sink);
        }
        for gradient in self.gradients.drain(..) {
            sink.fact(RuleId::RouterLoss, 1);
            if !gradient.used {
                sink.violation(RuleId::RouterLoss, Some(gradient.by), None, || {
                    format!(
                        "the result of {} reaches no weight of the router; expected a part of the gradient of its logits",
                        describe::instr(p, gradient.by, None)
                    )
                });
            }
        }
        self.sums = Ranges::default();
    }
}

/// Checks that backward has differentiated a loss.
fn missing(p: &Program, name: &str, loss: Forward, trained: bool, sink: &mut Sink) {
    if loss.backward.is_none() && trained {
        sink.violation(RuleId::RouterLoss, Some(loss.by), None, || {
            format!(
                "{} computes {name}, which backward does not differentiate; expected once per micro-batch",
                describe::instr(p, loss.by, None)
            )
        });
    }
}

/// A launch.
struct Launch<'p> {
    p: &'p Program,
    id: InstrId,
    instr: &'p Instr,
}

/// Contents of a kernel's registers, and its writes.
#[derive(Default)]
struct Inside {
    filled: BTreeMap<Place, f64>,
    sums: BTreeMap<Place, Vec<usize>>,
}

impl Launch<'_> {
    /// Follows the operations of a kernel. All reads happen before its writes.
    fn follow(&self, body: &[BodyOp], state: &mut State, sink: &mut Sink) {
        let mut inside = Inside::default();
        for op in body {
            match (&op.op, loss(&op.op)) {
                (_, Some((name, scale, false))) => self.forward(op, (name, scale), state, sink),
                (_, Some((name, scale, true))) => {
                    self.backward(op, (name, scale), &inside, state, sink);
                    state.gradients.push(Gradient {
                        by: self.id,
                        used: false,
                    });
                    let own = state.gradients.len() - 1;
                    inside.sums.insert(op.outputs[0].place, vec![own]);
                }
                (OpKind::Fill(fill), _) => {
                    inside.filled.insert(op.outputs[0].place, fill.value.0);
                }
                _ => self.other(op, &mut inside, state, sink),
            }
        }
        for (n, &range) in self.p.writes(&self.instr.op).iter().enumerate() {
            let place = Place::Write(n as u8);
            state.filled.set(range, inside.filled.remove(&place));
            state.sums.set(range, inside.sums.remove(&place));
        }
    }

    fn range(&self, op: &BodyOp, input: usize) -> Option<Access> {
        operands::range(self.p, &self.instr.op, &op.inputs[input])
    }

    /// Records a loss of forward.
    fn forward(&self, op: &BodyOp, of: (&'static str, Real), state: &mut State, sink: &mut Sink) {
        let (Some(logits), true) = (self.range(op, 0), self.instr.phase == Phase::Forward) else {
            return;
        };
        let (name, scale) = of;
        let new = Forward {
            by: self.id,
            scale,
            backward: None,
        };
        let before = state
            .losses
            .insert((logits.buffer, logits.offset, name), new);
        if let Some(before) = before {
            let trained = self.p.params.iter().all(|x| x.requires_grad);
            missing(self.p, name, before, trained, sink);
        }
    }

    /// Checks the gradient of a loss: its coefficient, its seed, and that it is the only one.
    fn backward(
        &self,
        op: &BodyOp,
        (name, scale): (&'static str, Real),
        inside: &Inside,
        state: &mut State,
        sink: &mut Sink,
    ) {
        sink.fact(RuleId::RouterLoss, 1);
        self.seed(op, inside, state, sink);
        let Some(logits) = self.range(op, 1) else {
            return;
        };
        let at = (state.origin(logits.buffer), logits.offset, name);
        let found = state.losses.get_mut(&at);
        let (other, wrong) = match found {
            None => (
                None,
                "of which forward computed no loss in this micro-batch".to_owned(),
            ),
            Some(Forward {
                backward: Some(before),
                ..
            }) => (
                Some(*before),
                format!("again after #{}; expected once per micro-batch", before.0),
            ),
            Some(loss) => {
                loss.backward = Some(self.id);
                if loss.scale == scale {
                    return;
                }
                let both = format!(
                    "with the coefficient {}; expected {}",
                    scale.0, loss.scale.0
                );
                (Some(loss.by), format!("{both}, as in #{}", loss.by.0))
            }
        };
        sink.violation(RuleId::RouterLoss, Some(self.id), other, || {
            format!(
                "{} differentiates {name} of {} {wrong}",
                describe::instr(self.p, self.id, None),
                describe::range(self.p, logits)
            )
        });
    }

    /// Checks that the backward of a loss starts from the gradient of the step's mean loss, or of
    /// its sum over tokens, as for all other losses.
    fn seed(&self, op: &BodyOp, inside: &Inside, state: &mut State, sink: &mut Sink) {
        let p = self.p;
        let local = inside.filled.get(&op.inputs[0].place);
        let memory = || state.filled.get(self.range(op, 0)?);
        let value = local.or_else(memory).copied();
        let parts = f64::from(p.meta.micro_batches.max(1));
        let expected = [1.0 / parts, p.meta.tokens as f64 / parts];
        let right = |value: f64| expected.iter().any(|e| (e - value).abs() <= 1e-6 * e);
        let first = value.map(|value| *state.seed.get_or_insert((value, self.id)));
        match (value, first) {
            (Some(value), Some((first, _))) if value == first && right(value) => return,
            _ => {}
        }
        let other = first.map(|(_, at)| at).filter(|at| *at != self.id);
        sink.violation(RuleId::RouterLoss, Some(self.id), other, || {
            format!(
                "{} starts from {}; expected {} for the mean over {parts} micro-batches, or {} for a sum over tokens, \
                 and the same in all layers",
                describe::instr(p, self.id, None),
                value.map_or("an unknown number".to_owned(), |value| value.to_string()),
                expected[0],
                expected[1]
            )
        });
    }

    /// Follows sums of gradients to the first operation that is neither a sum nor a copy. That
    /// operation must read each of them once.
    fn other(&self, op: &BodyOp, inside: &mut Inside, state: &mut State, sink: &mut Sink) {
        let mut all = Vec::new();
        for (n, slot) in op.inputs.iter().enumerate() {
            let local = inside.sums.get(&slot.place);
            let memory = || state.sums.get(self.range(op, n)?);
            let Some(sum) = local.or_else(memory) else {
                continue;
            };
            all.extend(sum);
            if op.op.fusion() == Fusion::Pointwise {
                continue;
            }
            let mut once = sum.clone();
            once.sort_unstable();
            for pair in once.windows(2).filter(|pair| pair[0] == pair[1]) {
                let by = state.gradients[pair[0]].by;
                sink.violation(RuleId::RouterLoss, Some(self.id), Some(by), || {
                    format!(
                        "{} reads a sum with the result of #{} more than once; expected once",
                        describe::instr(self.p, self.id, None),
                        by.0
                    )
                });
            }
            once.iter().for_each(|&n| state.gradients[n].used = true);
        }
        if op.op.fusion() == Fusion::Pointwise && !all.is_empty() {
            for slot in &op.outputs {
                inside.sums.insert(slot.place, all.clone());
            }
        }
    }
}
