//! Writes the tape: modules entered and left, allocations, launches, host work.

use super::kernel::{Launch, Table, Touch, touch};
use super::liveness::{Liveness, NONE};
use super::schedule::{Plan, Step};
use super::tape::{Tape, TapeOp};
use crate::autodiff::{Backward, Section};
use crate::graph::{Act, Graph, Op, Root, View};
use crate::ir::{
    HostWorkKind, ModelCollective, ModuleId, ModuleKind, MoeStage, Operand, ParamId, Source,
    Storage, StorageId, StorageRole,
};
use crate::models::ModelGraph;
use crate::units::Bytes;
use smallvec::SmallVec;

/// Writes the tape (all but the module and parameter tables).
pub(super) fn emit(
    m: &ModelGraph,
    b: &Backward,
    plan: &Plan,
    is_unit: &dyn Fn(ModuleId) -> bool,
    counts_modules: bool,
) -> Tape {
    let tape = Tape {
        consts: m.graph.consts.clone(),
        ..Tape::default()
    };
    let mut e = Emitter {
        m,
        g: &m.graph,
        visible: visible(m, is_unit),
        table: Table::default(),
        tape,
        storage_of: vec![NONE; m.graph.buffers.len()],
        open: Vec::new(),
        stage: None,
        again: Vec::new(),
        views: 0,
        kind: HostWorkKind::Dispatch,
        counts_modules,
        forward: true,
    };
    let training: Vec<&Step> = plan.forward.iter().chain(&plan.backward).collect();
    let split = plan.forward.len();
    let loss = m.graph.buffer_of(m.loss);
    // The caller of backward holds the loss and the initial gradient until it returns.
    let kept: SmallVec<[u32; 2]> = loss
        .into_iter()
        .chain(b.one.and_then(|v| m.graph.buffer_of(v)))
        .chain(m.graph.kept.iter().copied())
        .collect();
    let lives = Liveness::new(&m.graph, &m.tree, &training, split, &kept);
    let ready = ready(&m.graph, b, plan, &lives, split as u32);
    let mut phase = Phase {
        steps: &training[..split],
        base: 0,
        split: split as u32,
        lives: &lives,
        ready: &[],
        sections: &b.sections,
        host: HostWorkKind::Dispatch,
    };
    e.tape.forward = e.phase(&phase, plan);
    phase = Phase {
        steps: &training[split..],
        base: split as u32,
        ready: &ready,
        host: HostWorkKind::AutogradDispatch,
        ..phase
    };
    e.tape.backward = e.phase(&phase, plan);
    let eval: Vec<&Step> = plan.eval.iter().collect();
    let kept: SmallVec<[u32; 2]> = loss.into_iter().collect();
    let lives = Liveness::new(&m.graph, &m.tree, &eval, eval.len(), &kept);
    e.tape.loss = loss.map(|b| StorageId(e.storage_of[b as usize]));
    e.storage_of.fill(NONE);
    phase = Phase {
        steps: &eval,
        base: 0,
        split: eval.len() as u32,
        lives: &lives,
        ready: &[],
        host: HostWorkKind::Dispatch,
        ..phase
    };
    e.tape.eval = e.phase(&phase, plan);
    e.tape.eval_loss = loss.map(|b| StorageId(e.storage_of[b as usize]));
    e.tape.kernels = e.table.kernels;
    e.tape
}

/// A phase to write, which covers the steps `base..` of the lifetimes.
struct Phase<'a> {
    steps: &'a [&'a Step],
    base: u32,
    /// First step of backward.
    split: u32,
    lives: &'a Liveness,
    /// `(step, parameter)` sorted.
    ready: &'a [(u32, ParamId)],
    /// Recomputed parts of forward.
    sections: &'a [Section],
    host: HostWorkKind,
}

/// Returns the step after which each gradient is ready: compiled code returns all gradients of a
/// region at its end.
fn ready(
    g: &Graph,
    b: &Backward,
    plan: &Plan,
    lives: &Liveness,
    split: u32,
) -> Vec<(u32, ParamId)> {
    let mut out: Vec<(u32, ParamId)> = Vec::with_capacity(b.ready.len());
    let last = split + plan.backward.len() as u32 - 1;
    for r in &b.ready {
        // A view without a step of its own is done when the next kernel runs, but not before the
        // kernel that writes its data, which may have moved behind that.
        let step = |op: u32| {
            let steps = lives.step_of[op as usize..].iter();
            let next = steps.copied().find(|&s| s != NONE).unwrap_or(last);
            (next.max(written_by(g, lives, op)) - split) as usize
        };
        let mut at = step(r.writer);
        let region = plan.backward[at].region;
        if region == 0 {
            at = step(r.after);
        } else if !plan.ready_inside {
            while plan
                .backward
                .get(at + 1)
                .is_some_and(|s| s.region == region)
            {
                at += 1;
            }
        }
        out.push((at as u32 + split, r.param));
    }
    out.sort_by_key(|r| r.0);
    out
}

/// Returns the step of the kernel that writes what an op or a chain of views makes; 0 if there is
/// none.
fn written_by(g: &Graph, lives: &Liveness, op: u32) -> u32 {
    let mut at = op as usize;
    while lives.step_of[at] == NONE {
        let source = g.ops[at].inputs.first().map(|v| g.producer[v.index()]);
        match source {
            Some(p) if p != NONE => at = p as usize,
            _ => return 0,
        }
    }
    lives.step_of[at]
}

/// Returns the modules that appear on the tape: all except the leaves inside blocks that are not
/// units.
fn visible(m: &ModelGraph, is_unit: &dyn Fn(ModuleId) -> bool) -> Vec<bool> {
    let modules = m.modules();
    let inner = |i: usize| {
        let parent = modules[i].parent.map(|p| modules[p.index()].kind);
        !matches!(parent, None | Some(ModuleKind::Root))
            && matches!(modules[i].kind, ModuleKind::Layer | ModuleKind::Norm)
    };
    (0..modules.len())
        .map(|i| !inner(i) || is_unit(ModuleId(i as u32)))
        .collect()
}

struct Emitter<'m> {
    m: &'m ModelGraph,
    g: &'m Graph,
    visible: Vec<bool>,
    table: Table,
    tape: Tape,
    storage_of: Vec<u32>,
    open: Vec<ModuleId>,
    /// Open part of a layer of experts.
    stage: Option<(MoeStage, ModuleId)>,
    /// Modules open in a recomputed forward, outermost (the block) first.
    again: Vec<ModuleId>,
    /// Framework calls of views since the last kernel.
    views: u16,
    /// Kind of host work that these count as.
    kind: HostWorkKind,
    /// Whether modules that are entered cost host time of their own.
    counts_modules: bool,
    /// Whether a forward pass is written.
    forward: bool,
}

impl Emitter<'_> {
    fn phase(&mut self, phase: &Phase<'_>, plan: &Plan) -> Vec<TapeOp> {
        let lives = phase.lives;
        self.forward = phase.host == HostWorkKind::Dispatch;
        let mut out = Vec::with_capacity(phase.steps.len() * 4);
        let mut alloc = lives.allocs.partition_point(|a| a.0 < phase.base);
        let mut free = lives.frees.partition_point(|f| f.0 < phase.base);
        let mut ready = phase.ready;
        let mut region = 0;
        for (i, step) in phase.steps.iter().enumerate() {
            let s = phase.base + i as u32;
            let stage = self.stage_of(step);
            if stage != self.stage {
                self.leave_stage(&mut out);
            }
            match step.section {
                Some(section) => {
                    let section = &phase.sections[section as usize];
                    let module = &self.m.modules()[section.module.index()];
                    let around = match section.reentrant {
                        true => module.parent,
                        false => Some(section.module),
                    };
                    self.enter(around, &mut out);
                    self.enter_again(section.module, step.module, &mut out);
                }
                None => {
                    self.leave_again(0, &mut out);
                    self.enter(Some(step.module), &mut out);
                }
            }
            self.enter_stage(stage, &mut out);
            if step.breaks {
                out.push(TapeOp::Host {
                    kind: HostWorkKind::GraphBreak,
                    count: 1,
                });
            }
            if step.region == 0 {
                let kind = if step.section.is_some() {
                    HostWorkKind::Dispatch
                } else {
                    phase.host
                };
                self.dispatch(step, kind, &mut out);
            } else if step.region != region && plan.guarded[step.region as usize] {
                out.push(TapeOp::Host {
                    kind: HostWorkKind::Guard,
                    count: 1,
                });
            }
            region = step.region;
            while let Some(&(_, b)) = lives.allocs.get(alloc).filter(|a| a.0 == s) {
                self.alloc(b, phase, &mut out);
                alloc += 1;
            }
            self.launch(step, lives, &mut out);
            while let Some(&(_, b)) = lives.frees.get(free).filter(|f| f.0 == s) {
                if lives.taken[b as usize] == NONE {
                    out.push(TapeOp::Free(StorageId(self.storage_of[b as usize])));
                }
                free += 1;
            }
            while let Some((&(_, p), rest)) = ready.split_first().filter(|(r, _)| r.0 == s) {
                out.push(TapeOp::GradReady(p));
                ready = rest;
            }
        }
        self.leave_stage(&mut out);
        self.leave_again(0, &mut out);
        self.enter(None, &mut out);
        out
    }

    /// Returns the part of a layer of experts that a step belongs to. What is run again inside
    /// backward belongs to none, as it belongs to no half of a block.
    fn stage_of(&self, step: &Step) -> Option<(MoeStage, ModuleId)> {
        let stage = step.stage.filter(|_| step.section.is_none())?;
        let mut at = step.module;
        loop {
            let module = &self.m.modules()[at.index()];
            if module.kind == ModuleKind::Mlp {
                return Some((stage, at));
            }
            at = module.parent?;
        }
    }

    fn enter_stage(&mut self, stage: Option<(MoeStage, ModuleId)>, out: &mut Vec<TapeOp>) {
        if stage == self.stage {
            return;
        }
        if let Some((stage, layer)) = stage {
            out.push(TapeOp::EnterStage { stage, layer });
        }
        self.stage = stage;
    }

    fn leave_stage(&mut self, out: &mut Vec<TapeOp>) {
        if self.stage.take().is_some() {
            out.push(TapeOp::ExitStage);
        }
    }

    /// Inside the recomputed forward of `block`, moves to `target`.
    fn enter_again(&mut self, block: ModuleId, target: ModuleId, out: &mut Vec<TapeOp>) {
        if self.again.last() == Some(&target) {
            return;
        }
        let path = self.path(Some(target), block);
        let common = self
            .again
            .iter()
            .zip(&path)
            .take_while(|(a, b)| a == b)
            .count();
        self.leave_again(common, out);
        for &m in &path[common..] {
            self.again.push(m);
            if self.visible[m.index()] {
                out.push(TapeOp::EnterRecompute(m));
            }
        }
        self.python(&path[common..], out);
    }

    /// Adds the host time of eager modules whose forward starts.
    fn python(&self, entered: &[ModuleId], out: &mut Vec<TapeOp>) {
        let compiled = |m: &ModuleId| self.g.compiled.get(m.index()).copied().unwrap_or(false);
        let count = entered.iter().filter(|m| !compiled(m)).count() as u16;
        if self.counts_modules && count > 0 {
            let kind = HostWorkKind::Module;
            out.push(TapeOp::Host { kind, count });
        }
    }

    fn leave_again(&mut self, keep: usize, out: &mut Vec<TapeOp>) {
        while self.again.len() > keep {
            if let Some(m) = self.again.pop()
                && self.visible[m.index()]
            {
                self.flush_views(out);
                out.push(TapeOp::ExitRecompute(m));
            }
        }
    }

    /// Returns the modules from `top` (or the outermost) down to `target`.
    fn path(&self, target: Option<ModuleId>, top: ModuleId) -> SmallVec<[ModuleId; 6]> {
        let mut path: SmallVec<[ModuleId; 6]> = SmallVec::new();
        let mut at = target;
        while let Some(m) = at {
            path.push(m);
            let module = &self.m.modules()[m.index()];
            at = if m == top || module.kind == ModuleKind::Loss {
                None
            } else {
                module.parent
            };
        }
        path.reverse();
        path
    }

    fn alloc(&mut self, b: u32, phase: &Phase<'_>, out: &mut Vec<TapeOp>) {
        let bi = b as usize;
        let taken_over = phase.lives.takes[bi];
        if taken_over != NONE {
            self.storage_of[bi] = self.storage_of[taken_over as usize];
            return;
        }
        let buffer = self.g.buffers[bi];
        // Lifetime of the memory, including all buffers that take it over.
        let mut end = b;
        while phase.lives.taken[end as usize] != NONE {
            end = phase.lives.taken[end as usize];
        }
        let (first, last) = (phase.lives.first[bi], phase.lives.last[end as usize]);
        let role = match (first < phase.split, last < phase.split) {
            _ if buffer.logits => StorageRole::Logits,
            (true, true) => StorageRole::Temporary,
            (true, false) => StorageRole::Saved,
            (false, _) if buffer.grad => StorageRole::ActivationGrad,
            (false, _) => StorageRole::Saved,
        };
        let id = StorageId(self.tape.storages.len() as u32);
        self.tape.storages.push(Storage {
            bytes: Bytes(buffer.bytes),
            dtype: buffer.dtype,
            role,
            module: buffer.module,
        });
        self.storage_of[bi] = id.0;
        out.push(TapeOp::Alloc(id));
    }

    fn dispatch(&mut self, step: &Step, kind: HostWorkKind, out: &mut Vec<TapeOp>) {
        self.kind = kind;
        for &op in &step.ops {
            let op = &self.g.ops[op as usize];
            self.views += u16::from(op.dispatches);
            if !op.is_view() {
                out.push(TapeOp::Host {
                    kind,
                    count: self.views,
                });
                self.views = 0;
            }
        }
    }

    fn launch(&mut self, step: &Step, lives: &Liveness, out: &mut Vec<TapeOp>) {
        let mut acts = step.ops.iter().map(|&i| &self.g.ops[i as usize]);
        match acts.find(|op| !op.is_view()) {
            None => {
                let reads = |&i: &u32| self.g.ops[i as usize].act == Act::View(View::HostRead);
                if step.ops.iter().any(reads) {
                    self.flush_views(out);
                    out.push(TapeOp::HostRead);
                }
                let mut ops = step.ops.iter().map(|&i| &self.g.ops[i as usize]);
                if let Some(op) = ops.find(|op| op.is_host_sizes()) {
                    let operand = self.tape.operands.len() as u32;
                    self.operand(touch(self.g.value(op.inputs[1])).0);
                    self.flush_views(out);
                    out.push(TapeOp::HostSizes { operand });
                }
                return;
            }
            Some(op) => {
                if let Act::Collective(collective) = op.act {
                    self.collective(op, collective, out);
                    return;
                }
                if step.region != 0 {
                    let kind = HostWorkKind::CompiledKernel;
                    out.push(TapeOp::Host { kind, count: 1 });
                }
            }
        }
        let internal = |b: u32| lives.internal[b as usize];
        let Launch {
            kernel,
            reads,
            writes,
        } = self.table.launch(self.g, step, &internal);
        let first = self.tape.operands.len() as u32;
        for t in reads {
            self.operand(t);
        }
        let middle = self.tape.operands.len() as u32;
        for t in writes {
            self.operand(t);
        }
        let end = self.tape.operands.len() as u32;
        out.push(TapeOp::Launch {
            kernel,
            reads: first,
            writes: middle,
            end,
        });
    }

    fn collective(&mut self, op: &Op, collective: ModelCollective, out: &mut Vec<TapeOp>) {
        let operands = self.tape.operands.len() as u32;
        // What selects the rows follows what is sent.
        let by = 1..collective.operands() as usize - 1;
        let ends = [op.inputs[0], op.outputs[0]].into_iter();
        for v in ends.chain(op.inputs[by].iter().copied()) {
            self.operand(touch(self.g.value(v)).0);
        }
        let dtype = self.g.value(op.inputs[0]).dtype;
        out.push(TapeOp::Collective {
            collective,
            dtype,
            operands,
        });
    }

    fn operand(&mut self, t: Touch) {
        let source = match t.root {
            Root::Buffer(b) => Source::Storage(StorageId(self.storage_of[b as usize])),
            Root::Param(p) => Source::Param(p),
            Root::Scale(p) => Source::Scale(p),
            Root::ColumnCodes(p) => Source::ColumnCodes(p),
            Root::ColumnScale(p) => Source::ColumnScale(p),
            Root::Grad(p) => Source::Grad(p),
            Root::Const(c) => Source::Const(c),
        };
        self.tape.operands.push(Operand {
            source,
            offset: t.offset,
            bytes: t.bytes,
        });
    }

    /// Leaves and enters modules until `target` is the innermost open one.
    fn enter(&mut self, target: Option<ModuleId>, out: &mut Vec<TapeOp>) {
        if self.open.last().copied() == target {
            return;
        }
        let path = self.path(target, ModuleId(0));
        let common = self
            .open
            .iter()
            .zip(&path)
            .take_while(|(a, b)| a == b)
            .count();
        while self.open.len() > common {
            if let Some(m) = self.open.pop()
                && self.visible[m.index()]
            {
                self.flush_views(out);
                out.push(TapeOp::Exit(m));
            }
        }
        for &m in &path[common..] {
            self.open.push(m);
            if self.visible[m.index()] {
                out.push(TapeOp::Enter(m));
            }
        }
        if self.forward {
            self.python(&path[common..], out);
        }
    }

    fn flush_views(&mut self, out: &mut Vec<TapeOp>) {
        if self.views > 0 {
            out.push(TapeOp::Host {
                kind: self.kind,
                count: self.views,
            });
            self.views = 0;
        }
    }
}
