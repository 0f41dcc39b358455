//! Recompute: the forward of a block runs again at the start of its backward, and the rules refer
//! to its new values.

use super::modules::Parts;
use super::{Engine, Section};
use crate::config::{Recompute, RecomputeLayers, Train};
use crate::graph::{Act, Buffer, Op, Root, Value, ValueId, View};
use crate::ir::{ModelCollective, Module, ModuleId, ModuleKind, OpKind, SelectedRows};
use crate::models::ModelGraph;
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Which modules backward recomputes, and how.
pub(crate) struct Recomputed {
    /// Mode.
    pub(crate) mode: Recompute,
    /// Names of operations whose results selective recompute keeps, if they are not the default
    /// ones.
    save: Option<Vec<String>>,
    /// Parts of blocks that selective recompute runs again, if they are named.
    parts: Option<Parts>,
    /// Selective recompute runs every n-th matmul of a block again; 0 means none.
    nth_matmul: u32,
    /// Eager code keeps all results that selective recompute keeps, including those that backward
    /// does not need (see `Train::caches_unneeded`).
    caches_unneeded: bool,
    /// Blocks are recomputed by `CheckpointFunction` (see `Train::use_reentrant`).
    pub(crate) reentrant: bool,
    /// Block that each module belongs to.
    block_of: Vec<Option<ModuleId>>,
    /// For each module, whether the mode applies to it: to the chosen blocks and their contents, or
    /// to all modules.
    chosen: Vec<bool>,
}

impl Recomputed {
    pub(crate) fn new(train: &Train, modules: &[Module]) -> Self {
        let which = &train.recompute_layers;
        let mut block_of: Vec<Option<ModuleId>> = Vec::with_capacity(modules.len());
        let mut chosen: Vec<bool> = Vec::with_capacity(modules.len());
        let mut blocks = 0;
        for (i, module) in modules.iter().enumerate() {
            if module.kind == ModuleKind::Block {
                block_of.push(Some(ModuleId(i as u32)));
                chosen.push(which.has(blocks, &module.path));
                blocks += 1;
            } else {
                let block = module.parent.and_then(|p| block_of[p.index()]);
                block_of.push(block);
                chosen.push(match block {
                    Some(b) => chosen[b.index()],
                    None => *which == RecomputeLayers::All,
                });
            }
        }
        Self {
            mode: train.recompute,
            save: train.recompute_save.clone(),
            parts: (!train.recompute_modules.is_empty())
                .then(|| Parts::new(&train.recompute_modules, modules)),
            nth_matmul: train.recompute_nth_matmul,
            caches_unneeded: train.caches_unneeded,
            reentrant: train.use_reentrant,
            block_of,
            chosen,
        }
    }

    /// Returns, for each op of a forward graph, whether selective recompute saves its results.
    /// Matmuls are counted from the start of their block (`_get_custom_policy` of torchtitan, which
    /// counts only `mm`).
    fn kept(&self, ops: &[Op]) -> Vec<bool> {
        let (mut block, mut matmuls) = (None, 0);
        let mut keeps = |op: &Op| {
            let kind = match op.act {
                Act::Collective(_) => return ModelCollective::SAVED_BY_SELECTIVE_RECOMPUTE,
                Act::View(_) => return false,
                Act::Compute(kind) => kind,
            };
            let at = self.block_of[op.module.index()];
            if std::mem::replace(&mut block, at) != at {
                matmuls = 0;
            }
            if matches!(kind, OpKind::Gemm(g) if !g.bias) {
                matmuls += 1;
                if self.nth_matmul > 0 && matmuls % self.nth_matmul == 0 {
                    return false;
                }
            }
            let name = kind.def().name();
            self.save.as_ref().map_or_else(
                || kind.def().saved_by_selective_recompute(),
                |names| names.iter().any(|n| n == name),
            )
        };
        match (self.mode, &self.parts) {
            (Recompute::Selective, Some(parts)) => ops.iter().map(|op| !parts.rerun(op)).collect(),
            (Recompute::Selective, None) => {
                let counts = counts_of_exchanges(ops);
                let is_count = |op: &Op| op.outputs.iter().any(|v| counts.contains(v));
                ops.iter().map(|op| keeps(op) || is_count(op)).collect()
            }
            _ => vec![false; ops.len()],
        }
    }

    /// Returns whether the mode applies to the ops of a module.
    pub(crate) fn applies(&self, m: ModuleId) -> bool {
        self.chosen[m.index()]
    }

    /// Returns whether the mode applies to all blocks or to none.
    pub(crate) fn is_uniform(&self) -> bool {
        let mut blocks = self.block_of.iter().zip(&self.chosen);
        let first = blocks.find(|(block, _)| block.is_some());
        first.is_none_or(|(_, all)| blocks.all(|(block, chosen)| block.is_none() || chosen == all))
    }
}

/// Returns the counts that the host reads before exchanges of as many rows. Autograd functions of
/// saved exchanges keep them as numbers.
fn counts_of_exchanges(ops: &[Op]) -> HashSet<ValueId> {
    let counted = |op: &&Op| match op.act {
        Act::Collective(c) => matches!(c.rows, Some(SelectedRows::Counted(_))),
        _ => false,
    };
    let exchanges = ops.iter().filter(counted);
    exchanges
        .flat_map(|op| op.inputs.iter().skip(1).copied())
        .collect()
}

/// Consecutive forward ops that backward reruns together.
struct Region {
    /// The block that they form, or the module whose code checkpoints them.
    module: ModuleId,
    ops: Range<usize>,
    /// Whether they have a separate backward, which keeps their inputs, their results and the
    /// results' gradients until it ends.
    reentrant: bool,
}

/// Ops that are recomputed, and the values that replace those of forward.
#[derive(Default)]
pub(super) struct State {
    regions: Vec<Region>,
    /// Region of each forward op; empty if there are none.
    region_of: Vec<Option<u32>>,
    /// Whether the results of each forward op are saved.
    kept: Vec<bool>,
    /// Whether eager code keeps them even if backward does not need them.
    caches_unneeded: bool,
    /// Recomputed values by forward value.
    stands_for: Vec<Option<ValueId>>,
    current: Option<u32>,
    /// Buffers that the current region keeps (see [`Engine::leave_section`]).
    held: Vec<u32>,
}

/// Returns whether forward ops of a block run again before its backward. For
/// [`Recompute::Pointwise`], kernel fusion decides what is dropped.
const fn reruns(mode: Recompute) -> bool {
    matches!(mode, Recompute::Full | Recompute::Selective)
}

impl State {
    pub(super) fn new(m: &ModelGraph, what: &Recomputed) -> Self {
        let g = &m.graph;
        let mut out = Self {
            region_of: vec![None; g.ops.len()],
            ..Self::default()
        };
        if reruns(what.mode) {
            out.add_blocks(m, what);
        }
        for ops in &g.checkpoints {
            let module = g.ops[ops.start].module;
            out.region_of[ops.clone()].fill(Some(out.regions.len() as u32));
            out.regions.push(Region {
                module,
                ops: ops.clone(),
                reentrant: false,
            });
        }
        if out.regions.is_empty() {
            return Self::default();
        }
        out.kept = what.kept(&g.ops);
        for ops in &g.checkpoints {
            out.kept[ops.clone()].fill(false);
        }
        out.caches_unneeded = what.caches_unneeded;
        out.stands_for = vec![None; g.values.len()];
        out
    }

    /// Turns each block that the mode applies to into a region.
    fn add_blocks(&mut self, m: &ModelGraph, what: &Recomputed) {
        let mut region_of: Vec<Option<u32>> = vec![None; m.modules().len()];
        for (i, op) in m.graph.ops.iter().enumerate() {
            let Some(block) = what.block_of[op.module.index()] else {
                continue;
            };
            if !what.applies(op.module) {
                continue;
            }
            let known = region_of[block.index()];
            let region = *region_of[block.index()].get_or_insert(self.regions.len() as u32);
            if known.is_none() {
                self.regions.push(Region {
                    module: block,
                    ops: i..i,
                    reentrant: what.reentrant,
                });
            }
            self.regions[region as usize].ops.end = i + 1;
            self.region_of[i] = Some(region);
        }
    }

    /// Returns the op with recomputed operands.
    pub(super) fn substitute(&self, op: &Op) -> Op {
        let mut op = op.clone();
        if self.current.is_some() {
            for v in op.inputs.iter_mut().chain(op.outputs.iter_mut()) {
                *v = self.get(*v);
            }
        }
        op
    }

    fn get(&self, v: ValueId) -> ValueId {
        self.stands_for
            .get(v.index())
            .copied()
            .flatten()
            .unwrap_or(v)
    }
}

/// Returns whether an op has no operands and no results.
fn is_dropped(op: &Op) -> bool {
    op.act == Act::View(View::Pass) && op.outputs.is_empty()
}

impl Engine<'_> {
    /// Recomputes the region of op `at`, unless it has been recomputed or the op has none.
    /// `gradients` are those of the op's results, with which the region's backward starts.
    pub(super) fn enter_section(&mut self, at: usize, gradients: &[ValueId]) {
        let region = self.recompute.region_of.get(at).copied().flatten();
        if region == self.recompute.current {
            return;
        }
        self.leave_section();
        self.recompute.current = region;
        let Some(region) = region else { return };
        let Region {
            module,
            ref ops,
            reentrant,
        } = self.recompute.regions[region as usize];
        let (ops, start) = (ops.clone(), self.m.graph.ops.len() as u32);
        let forward = ops.start as u32..ops.end as u32;
        let (current, stage) = (self.m.graph.module, self.m.graph.stage);
        // Last op of the section after each op of the region has run again.
        let mut after = Vec::with_capacity(ops.len());
        for i in ops.clone() {
            self.recompute_op(i);
            after.push((self.m.graph.ops.len() as u32).checked_sub(1));
        }
        self.repeat_holds(&ops, start, &after);
        self.recompute.held = match reentrant {
            true => self.reentrant_locals(ops, at, gradients),
            false => self.region_inputs(ops).collect(),
        };
        (self.g().module, self.g().stage) = (current, stage);
        let end = self.m.graph.ops.len() as u32;
        self.out.sections.push(Section {
            module,
            forward,
            ops: start..end,
            reentrant,
        });
    }

    /// Makes the local variables of a region's code hold recomputed buffers where they hold those
    /// of forward. `after` has the last op of the section, which starts at `start`, after each op
    /// of the region has run again.
    fn repeat_holds(&mut self, region: &Range<usize>, start: u32, after: &[Option<u32>]) {
        let g = &self.m.graph;
        let ops = &g.ops[region.clone()];
        let mut stands_for: HashMap<u32, u32> = HashMap::new();
        for &v in ops.iter().flat_map(|op| &op.outputs) {
            let again = self.recompute.get(v);
            if let (Some(b), Some(c)) = (g.buffer_of(v), g.buffer_of(again))
                && b != c
            {
                stands_for.insert(b, c);
            }
        }
        let inside = g.holds.iter().filter_map(|&(op, b)| {
            let at = (op as usize).checked_sub(region.start)?;
            let last = after.get(at).copied().flatten()?;
            Some((last, *stands_for.get(&b)?))
        });
        let more: Vec<_> = inside.filter(|(last, _)| *last >= start).collect();
        self.g().holds.extend(more);
    }

    /// Returns the buffers of the local variables of `CheckpointFunction.backward`: the inputs of
    /// the region, its results, and their gradients.
    fn reentrant_locals(&self, region: Range<usize>, at: usize, gradients: &[ValueId]) -> Vec<u32> {
        let g = &self.m.graph;
        let results = g.ops[at].outputs.iter().map(|&v| self.recompute.get(v));
        let all = results.chain(gradients.iter().copied());
        let all = all.filter_map(|v| g.buffer_of(v));
        self.region_inputs(region).chain(all).collect()
    }

    /// Returns the buffers of the inputs of a region.
    fn region_inputs(&self, region: Range<usize>) -> impl Iterator<Item = u32> {
        let g = &self.m.graph;
        let from_outside = move |v: &ValueId| (g.producer[v.index()] as usize) < region.start;
        let inputs = g.ops[region.clone()].iter().flat_map(|op| &op.inputs);
        let inputs = inputs.copied().filter(from_outside);
        inputs.filter_map(|v| g.buffer_of(v))
    }

    /// Ends the lifetimes of the values that a recomputed region has kept. If the region's backward
    /// is reentrant, they end with it. Otherwise the region's inputs belong to its saved tensors,
    /// and their lifetimes end with the last of these.
    pub(super) fn leave_section(&mut self) {
        let held = std::mem::take(&mut self.recompute.held);
        if held.is_empty() {
            return;
        }
        let last = self.m.graph.ops.len() - 1;
        let last = match self.out.sections.last() {
            Some(section) if !section.reentrant => {
                self.last_use(section.ops.clone()).unwrap_or(last)
            }
            _ => last,
        };
        let ends = held.into_iter().map(|buffer| (last as u32, buffer));
        self.g().holds.extend(ends);
    }

    /// Returns the last op after a section that reads a recomputed value of the section.
    fn last_use(&self, section: Range<u32>) -> Option<usize> {
        let g = &self.m.graph;
        let recomputed = |v: &ValueId| section.contains(&g.producer[v.index()]);
        let mut after = section.end as usize..g.ops.len();
        after.rfind(|&i| g.ops[i].inputs.iter().any(recomputed))
    }

    fn recompute_op(&mut self, i: usize) {
        let op = self.m.graph.ops[i].clone();
        if self.recompute.kept[i] {
            return;
        }
        let inputs: SmallVec<[ValueId; 4]> =
            op.inputs.iter().map(|&v| self.recompute.get(v)).collect();
        // Views of saved values are reused, and in-place updates of saved values are not repeated.
        let shares = |v: &ValueId| {
            let root = self.m.graph.value(*v).root;
            op.inputs
                .iter()
                .zip(&inputs)
                .any(|(a, b)| a == b && self.m.graph.value(*a).root == root)
        };
        if op.outputs.iter().any(shares) {
            return;
        }
        let producer = self.m.graph.ops.len() as u32;
        let mut outputs: SmallVec<[ValueId; 2]> = SmallVec::new();
        for &out in &op.outputs {
            let root = self.recomputed_root(&op, &inputs, out);
            let value = Value {
                root,
                requires_grad: false,
                ..self.m.graph.value(out).clone()
            };
            let id = self.m.graph.push_value(value, producer);
            self.recompute.stands_for[out.index()] = Some(id);
            outputs.push(id);
        }
        let node = {
            self.g().nodes += 1;
            self.m.graph.nodes
        };
        self.g().ops.push(Op {
            inputs,
            outputs,
            node,
            ..op
        });
    }

    /// Returns the root of the operand whose memory an output shares, or a new buffer.
    fn recomputed_root(&mut self, op: &Op, inputs: &[ValueId], out: ValueId) -> Root {
        let root = self.m.graph.value(out).root;
        if let Some(i) = op
            .inputs
            .iter()
            .position(|&v| self.m.graph.value(v).root == root)
        {
            return self.m.graph.value(inputs[i]).root;
        }
        let Some(b) = self.m.graph.buffer_of(out) else {
            return root;
        };
        let buffer = Buffer {
            grad: false,
            first: ValueId(self.m.graph.values.len() as u32),
            ..self.m.graph.buffers[b as usize]
        };
        self.g().buffers.push(buffer);
        Root::Buffer(self.m.graph.buffers.len() as u32 - 1)
    }

    /// Drops recomputed ops that nothing uses. Recomputation stops when every saved tensor is
    /// available, unless it is reentrant.
    pub(super) fn finish_sections(&mut self) {
        self.leave_section();
        if self.out.sections.is_empty() {
            return;
        }
        let g = &mut self.m.graph;
        let mut used = vec![false; g.values.len()];
        let mut sections = self.out.sections.iter().rev().peekable();
        for i in (self.out.first as usize..g.ops.len()).rev() {
            while sections.peek().is_some_and(|s| (i as u32) < s.ops.start) {
                sections.next();
            }
            let inside = sections
                .peek()
                .is_some_and(|s| !s.reentrant && s.ops.contains(&(i as u32)));
            let op = &mut g.ops[i];
            if inside && !op.outputs.iter().any(|v| used[v.index()]) {
                op.act = Act::View(View::Pass);
                op.inputs.clear();
                op.outputs.clear();
                op.dispatches = 0;
                continue;
            }
            for v in &op.inputs {
                used[v.index()] = true;
            }
        }
        // Where recomputation stops, the lifetimes of the code's local variables end.
        let first = self.out.first;
        for (op, _) in g.holds.iter_mut().filter(|(op, _)| *op >= first) {
            while *op > first && is_dropped(&g.ops[*op as usize]) {
                *op -= 1;
            }
        }
        if self.recompute.caches_unneeded {
            self.hold_cached();
        }
    }

    /// Keeps the results that selective recompute saves until the block's forward is rerun, which
    /// takes them out of the cache.
    fn hold_cached(&mut self) {
        let g = &mut self.m.graph;
        for section in self.out.sections.iter().filter(|s| !s.reentrant) {
            let mut rest = (section.ops.start as usize)..g.ops.len();
            let Some(first) = rest.find(|&i| !g.ops[i].is_view()) else {
                continue;
            };
            for i in section.forward.clone().map(|i| i as usize) {
                if !self.recompute.kept[i] {
                    continue;
                }
                for &out in &g.ops[i].outputs {
                    if let Some(buffer) = g.buffer_of(out) {
                        g.holds.push((first as u32, buffer));
                    }
                }
            }
        }
    }
}
