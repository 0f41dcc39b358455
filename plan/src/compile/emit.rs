//! Lifetimes and the tape.
//!
//! A buffer is allocated by the first step that writes it and freed after the last that uses it. Run eagerly, two things
//! hold it longer: all operands of an autograd node live until the node returns, and local variables of the model's code live
//! until they go out of scope.

use super::kernel::{Launch, Table, Touch};
use super::schedule::{Plan, Step};
use super::tape::{
    HostWorkKind, ModuleId, ModuleKind, Operand, Source, Storage, StorageId, StorageRole, Tape,
    TapeOp,
};
use crate::autodiff::Backward;
use crate::model::graph::{Act, Graph, ModelGraph, Root};
use crate::units::Bytes;
use smallvec::SmallVec;

const NONE: u32 = u32::MAX;

/// Writes the tape (all but the module and parameter tables).
pub(super) fn emit(
    m: &ModelGraph,
    b: &Backward,
    plan: &Plan,
    is_unit: &dyn Fn(ModuleId) -> bool,
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
        again: Vec::new(),
        views: 0,
    };
    let training: Vec<&Step> = plan.forward.iter().chain(&plan.backward).collect();
    let lives = Lives::new(&m.graph, &training);
    let (fwd, bwd) = training.split_at(plan.forward.len());
    e.tape.forward = e.phase(fwd, 0, &lives, plan.forward.len() as u32, None);
    e.tape.backward = e.phase(
        bwd,
        plan.forward.len() as u32,
        &lives,
        plan.forward.len() as u32,
        Some(b),
    );
    let eval: Vec<&Step> = plan.eval.iter().collect();
    let lives = Lives::new(&m.graph, &eval);
    e.storage_of.fill(NONE);
    e.tape.eval = e.phase(&eval, 0, &lives, eval.len() as u32, None);
    e.tape.kernels = e.table.kernels;
    e.tape
}

/// Modules that appear on the tape: all but the leaves inside blocks, unless these are units.
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

/// First and last step of each buffer.
struct Lives {
    first: Vec<u32>,
    last: Vec<u32>,
    /// `(step, buffer)` sorted.
    allocs: Vec<(u32, u32)>,
    frees: Vec<(u32, u32)>,
}

impl Lives {
    fn new(g: &Graph, steps: &[&Step]) -> Self {
        let n = g.buffers.len();
        let (mut first, mut last) = (vec![NONE; n], vec![0; n]);
        let mut step_of = vec![NONE; g.ops.len()];
        let mut eager = vec![false; n];
        // Eager nodes hold their operands to their end; walk backwards to know it.
        let mut node_end = vec![NONE; g.nodes as usize + 1];
        for (s, step) in steps.iter().enumerate().rev() {
            for &op in &step.ops {
                step_of[op as usize] = s as u32;
                let op = &g.ops[op as usize];
                let end = &mut node_end[op.node as usize];
                if *end == NONE {
                    *end = s as u32;
                }
            }
        }
        for (s, step) in steps.iter().enumerate() {
            let s = s as u32;
            for &op in &step.ops {
                let op = &g.ops[op as usize];
                if matches!(op.act, Act::View(_)) {
                    continue;
                }
                let end = if step.region == 0 {
                    node_end[op.node as usize]
                } else {
                    s
                };
                for &v in op.inputs.iter().chain(&op.outputs) {
                    if let Root::Buffer(b) = g.value(v).root {
                        let b = b as usize;
                        if first[b] == NONE {
                            first[b] = s;
                            eager[b] = step.region == 0;
                        }
                        last[b] = last[b].max(end);
                    }
                }
            }
        }
        for &(op, b) in &g.holds {
            let (s, b) = (step_of[op as usize], b as usize);
            if s != NONE && first[b] != NONE && eager[b] {
                last[b] = last[b].max(s);
            }
        }
        let mut allocs: Vec<(u32, u32)> = (0..n)
            .filter(|&b| first[b] != NONE)
            .map(|b| (first[b], b as u32))
            .collect();
        let mut frees: Vec<(u32, u32)> =
            allocs.iter().map(|&(_, b)| (last[b as usize], b)).collect();
        allocs.sort_unstable();
        frees.sort_unstable();
        Self {
            first,
            last,
            allocs,
            frees,
        }
    }
}

struct Emitter<'m> {
    m: &'m ModelGraph,
    g: &'m Graph,
    visible: Vec<bool>,
    table: Table,
    tape: Tape,
    storage_of: Vec<u32>,
    open: Vec<ModuleId>,
    /// Modules open in a recomputed forward, outermost (the block) first.
    again: Vec<ModuleId>,
    /// Framework calls of views since the last kernel.
    views: u16,
}

impl Emitter<'_> {
    /// One phase: steps `base..base + steps.len()` of the lifetimes.
    fn phase(
        &mut self,
        steps: &[&Step],
        base: u32,
        lives: &Lives,
        backward_from: u32,
        backward: Option<&Backward>,
    ) -> Vec<TapeOp> {
        let mut out = Vec::with_capacity(steps.len() * 4);
        let mut alloc = lives.allocs.partition_point(|a| a.0 < base);
        let mut free = lives.frees.partition_point(|f| f.0 < base);
        let mut ready = backward.map_or(&[][..], |b| &b.ready[..]);
        let mut sections = backward.map_or(&[][..], |b| &b.sections[..]);
        for (i, step) in steps.iter().enumerate() {
            let s = base + i as u32;
            while let Some((section, rest)) = sections.split_first()
                && section.ops.end <= step.ops[0]
            {
                sections = rest;
            }
            let section = sections
                .first()
                .filter(|section| section.ops.contains(&step.ops[0]));
            match section {
                Some(section) => {
                    self.enter(Some(section.module), &mut out);
                    self.enter_again(section.module, step.module, &mut out);
                }
                None => {
                    self.leave_again(0, &mut out);
                    self.enter(Some(step.module), &mut out);
                }
            }
            self.host(step, backward.is_some() && section.is_none(), &mut out);
            while lives.allocs.get(alloc).is_some_and(|a| a.0 == s) {
                let b = lives.allocs[alloc].1;
                let id = self.storage(b, lives, backward_from);
                out.push(TapeOp::Alloc(id));
                alloc += 1;
            }
            self.launch(step, &mut out);
            while lives.frees.get(free).is_some_and(|f| f.0 == s) {
                out.push(TapeOp::Free(StorageId(
                    self.storage_of[lives.frees[free].1 as usize],
                )));
                free += 1;
            }
            while let Some((&(op, p), rest)) = ready.split_first()
                && step.ops.last().is_some_and(|&last| op <= last)
            {
                out.push(TapeOp::GradReady(p));
                ready = rest;
            }
        }
        self.enter(None, &mut out);
        out
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

    /// Modules from `top` (or the outermost) down to `target`.
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

    fn storage(&mut self, b: u32, lives: &Lives, backward_from: u32) -> StorageId {
        let buffer = self.g.buffers[b as usize];
        let (first, last) = (lives.first[b as usize], lives.last[b as usize]);
        let role = match (first < backward_from, last < backward_from) {
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
        self.storage_of[b as usize] = id.0;
        id
    }

    fn host(&mut self, step: &Step, backward: bool, out: &mut Vec<TapeOp>) {
        let kind = if backward {
            HostWorkKind::AutogradDispatch
        } else {
            HostWorkKind::Dispatch
        };
        for &op in &step.ops {
            let op = &self.g.ops[op as usize];
            self.views += u16::from(op.dispatches);
            if matches!(op.act, Act::Compute(_)) {
                out.push(TapeOp::Host {
                    kind,
                    count: self.views,
                });
                self.views = 0;
            }
        }
    }

    fn launch(&mut self, step: &Step, out: &mut Vec<TapeOp>) {
        let kernel = |&op: &u32| matches!(self.g.ops[op as usize].act, Act::Compute(_));
        if !step.ops.iter().any(kernel) {
            return;
        }
        let Launch {
            kernel,
            reads,
            writes,
        } = self.table.launch(self.g, &step.ops, &|_| false);
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

    fn operand(&mut self, t: Touch) {
        let source = match t.root {
            Root::Buffer(b) => Source::Storage(StorageId(self.storage_of[b as usize])),
            Root::Param(p) => Source::Param(p),
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
    }

    fn flush_views(&mut self, out: &mut Vec<TapeOp>) {
        if self.views > 0 {
            out.push(TapeOp::Host {
                kind: HostWorkKind::Dispatch,
                count: self.views,
            });
            self.views = 0;
        }
    }
}
