//! Biases of routers that steps update: each is updated once per step, after the last router has
//! read it, by the choices of all micro-batches and ranks, each counted once. Biases are not part
//! of the gradient norm and are not clipped, and evaluation does not count choices.

mod counts;

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use super::state::axes;
use crate::ir::{AxisId, AxisSet, BodyOp, InstrId, OpKind, ParamId, ShardOp};
use crate::program::{Instr, Op, Phase, Program, Section, SectionKind, Updated};
use counts::{Contents, Counts};
use std::collections::BTreeMap;

/// Checks all trained biases of routers.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    let moves = |x: &ParamId| p.params[x.index()].router_bias && p.params[x.index()].requires_grad;
    let biases: Vec<ParamId> = (0..p.params.len() as u32)
        .map(ParamId)
        .filter(moves)
        .collect();
    if biases.is_empty() {
        return;
    }
    // What a step leaves is there in the next one, so the steady step is followed twice.
    let again = p.sections.iter().filter(|s| s.kind == SectionKind::Steady);
    let mut contents = Contents::default();
    for (pass, section) in (0..).zip(p.sections.iter().chain(again)) {
        let mut step = Step {
            p,
            pass,
            kind: section.kind,
            contents: &mut contents,
            routers: BTreeMap::new(),
        };
        step.follow(section, sink);
        if section.kind.is_training() {
            biases.iter().for_each(|x| step.finish(*x, section, sink));
        }
    }
}

/// What a step does with one bias.
#[derive(Default)]
struct Router {
    /// Routers of forward that choose by it, by micro-batch.
    routes: BTreeMap<u16, usize>,
    /// The last router that reads it, including those of recompute.
    last: Option<InstrId>,
    /// Updates, with what they read.
    updates: Vec<(InstrId, Counts)>,
}

/// A pass over a section.
struct Step<'a> {
    p: &'a Program,
    pass: u32,
    kind: SectionKind,
    contents: &'a mut Contents,
    routers: BTreeMap<ParamId, Router>,
}

impl Step<'_> {
    fn follow(&mut self, section: &Section, sink: &mut Sink) {
        let p = self.p;
        for id in section.instrs.clone().map(InstrId) {
            let instr = &p.instrs[id.index()];
            match instr.op {
                Op::Free(b) => self.contents.forget(b),
                Op::Collective { id, .. } => {
                    self.contents.reduce(p, &p.collectives[id.index()]);
                }
                Op::Launch { kernel, .. } => {
                    for op in &p.kernels[kernel.index()].body {
                        self.launch((id, instr), op, sink);
                    }
                }
                _ => {}
            }
        }
    }

    fn launch(&mut self, (id, instr): (InstrId, &Instr), op: &BodyOp, sink: &mut Sink) {
        match op.op {
            OpKind::Route(route) if route.bias => self.route((id, instr), op),
            OpKind::CountExperts => self.count((id, instr), op, sink),
            OpKind::Shard(shard) => match shard.update() {
                Some(update) => {
                    let moves = !update.rule.has_gradients();
                    self.update((id, instr), moves, sink);
                }
                None => self.shard((id, instr), shard, sink),
            },
            _ => {}
        }
    }

    /// Notes a router that chooses by a bias.
    fn route(&mut self, (id, instr): (InstrId, &Instr), op: &BodyOp) {
        let Some(bias) = super::operands::range(self.p, &instr.op, &op.inputs[1]) else {
            return;
        };
        for x in counts::biases(self.p, bias) {
            let router = self.routers.entry(x).or_default();
            router.last = Some(id);
            if instr.phase == Phase::Forward {
                *router.routes.entry(instr.micro_batch).or_default() += 1;
            }
        }
    }

    /// Notes counted choices.
    fn count(&mut self, (id, instr): (InstrId, &Instr), op: &BodyOp, sink: &mut Sink) {
        sink.fact(RuleId::RouterBias, 1);
        self.in_training(id, "counts choices", sink);
        let to = super::operands::range(self.p, &instr.op, &op.outputs[0]);
        let biases: Vec<ParamId> = to
            .map(|to| counts::biases(self.p, to).collect())
            .unwrap_or_default();
        for (to, x) in to.into_iter().zip(biases) {
            let new = Counts::new(self.pass, instr.micro_batch);
            self.contents.set(to.buffer, x, Some(new));
        }
    }

    /// Follows counts through a kernel of the sharding engine.
    fn shard(&mut self, (id, instr): (InstrId, &Instr), op: ShardOp, sink: &mut Sink) {
        let (reads, writes) = (self.p.reads(&instr.op), self.p.writes(&instr.op));
        match op {
            ShardOp::Accumulate => {
                if let Some(from) = reads.first() {
                    writes
                        .iter()
                        .for_each(|to| self.contents.add(self.p, *from, *to));
                }
            }
            ShardOp::Copy | ShardOp::MultiCopy => {
                for (from, to) in reads.iter().zip(writes) {
                    self.contents.copy(self.p, *from, *to);
                }
            }
            ShardOp::Zero => {
                for to in writes {
                    let all: Vec<ParamId> = counts::biases(self.p, *to).collect();
                    all.iter()
                        .for_each(|x| self.contents.set(to.buffer, *x, None));
                }
            }
            ShardOp::SumSquares | ShardOp::ClipScale => {
                sink.fact(RuleId::RouterBias, 1);
                let counts = reads.iter().find(|a| self.contents.any(self.p, **a));
                if let Some(counts) = counts {
                    violation(self.p, sink, id, None, |launch| {
                        format!(
                            "{launch} reads {}: counts of choices are no gradients, and are neither part of the norm nor \
                             clipped",
                            describe::range(self.p, *counts)
                        )
                    });
                }
            }
            _ => {}
        }
    }

    /// Checks that a launch that `does` something for the balance of experts is part of training.
    fn in_training(&self, id: InstrId, does: &str, sink: &mut Sink) {
        if !self.kind.is_training() {
            violation(self.p, sink, id, None, |launch| {
                format!("{launch} {does} outside training; expected nothing")
            });
        }
    }

    /// Notes updates of biases. `moves` says that the update is one by counts.
    fn update(&mut self, (id, instr): (InstrId, &Instr), moves: bool, sink: &mut Sink) {
        let p = self.p;
        let all = p.updates(&instr.op);
        let clips = p.reads(&instr.op).len() > all.iter().map(|u| 2 + u.state.len()).sum();
        for update in all {
            let Updated { weight, grad, .. } = update;
            let biases: Vec<ParamId> = counts::biases(p, weight).collect();
            for x in biases {
                let name = &p.params[x.index()].name;
                self.in_training(id, "moves biases", sink);
                if !moves || clips {
                    let wrong = if moves {
                        "clips the counts of"
                    } else {
                        "trains by gradients"
                    };
                    violation(p, sink, id, None, |launch| {
                        format!(
                            "{launch} {wrong} `{name}`; expected a step by counts of choices alone"
                        )
                    });
                }
                let read = self
                    .contents
                    .get(grad.buffer, x)
                    .cloned()
                    .unwrap_or_default();
                let router = self.routers.entry(x).or_default();
                router.updates.push((id, read));
            }
        }
    }

    /// Checks at the end of a step what it did with a bias.
    fn finish(&self, x: ParamId, section: &Section, sink: &mut Sink) {
        let (p, none) = (self.p, Router::default());
        let name = &p.params[x.index()].name;
        let router = self.routers.get(&x).unwrap_or(&none);
        sink.fact(RuleId::RouterBias, 1);
        let Some((id, read)) = router.updates.first() else {
            if !router.routes.is_empty() {
                let last = InstrId(section.instrs.end - 1);
                violation(p, sink, last, None, |_| {
                    format!("no step moves `{name}`; expected once, at the end")
                });
            }
            return;
        };
        for (again, _) in &router.updates[1..] {
            violation(p, sink, *again, Some(*id), |launch| {
                format!(
                    "{launch} moves `{name}` again after #{}; expected once per step",
                    id.0
                )
            });
        }
        if let Some(last) = router.last.filter(|last| last > id) {
            violation(p, sink, *id, Some(last), |launch| {
                format!(
                    "{launch} moves `{name}`, by which #{} still chooses in this step",
                    last.0
                )
            });
        }
        self.complete((x, *id), router, read, sink);
    }

    /// Checks that an update has read all choices of the step, and each once.
    fn complete(&self, (x, id): (ParamId, InstrId), of: &Router, read: &Counts, sink: &mut Sink) {
        let (p, name) = (self.p, &self.p.params[x.index()].name);
        let mut wrong = |what: String| {
            violation(p, sink, id, None, |launch| {
                format!("{launch} moves `{name}` {what}")
            });
        };
        if read.has_other_than(self.pass) {
            wrong("by choices of an earlier step".to_owned());
            return;
        }
        if read.is_partial() {
            wrong("by a part of the counts that a rank has; expected all experts".to_owned());
            return;
        }
        let averages = [AxisId::DP_SHARD, AxisId::DP_OUTER].into_iter();
        let averages = averages.filter(|axis| p.meta.mesh.size(*axis) > 1);
        let expected = averages.fold(AxisSet::EMPTY, AxisSet::with);
        // A communicator of several axes may include some with one rank.
        let over = read.over().iter();
        let over = over.filter(|axis| p.meta.mesh.size(*axis) > 1);
        let over = over.fold(AxisSet::EMPTY, AxisSet::with);
        if over != expected {
            let (over, expected) = (axes(over), axes(expected));
            wrong(format!(
                "by counts that are added up over {over}; expected {expected}"
            ));
        }
        for m in 0..p.meta.micro_batches {
            let chosen = of.routes.get(&m).copied().unwrap_or(0);
            let counted = read.of(self.pass, m);
            if counted != chosen {
                wrong(format!(
                    "by {counted} counts of micro-batch {m}, in which {chosen} routers choose by it"
                ));
            }
        }
    }
}

fn violation(
    p: &Program,
    sink: &mut Sink,
    id: InstrId,
    other: Option<InstrId>,
    message: impl Fn(&str) -> String,
) {
    sink.violation(RuleId::RouterBias, Some(id), other, || {
        message(&describe::instr(p, id, None))
    });
}
