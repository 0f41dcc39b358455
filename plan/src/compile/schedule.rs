//! Steps: the ops that each kernel executes, their order, and the ops that are compiled together.

use super::used_rows::{Sorted, Used};
use super::{
    Sharding, alike, epilogue, excluded, float8, fuse, gemm_fusion, inplace, merge, overlap,
    partition, zeros,
};
use crate::autodiff::{Backward, recompute::Recomputed};
use crate::config::{Compile, CompileMode, Implementation, Scenario};
use crate::graph::{Act, Graph, Op, ValueId, View};
use crate::ir::{Module, ModuleId, ModuleKind, MoeStage};
use crate::models::ModelGraph;
use crate::recipes::Recipe;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// Ops that run as one kernel (or, eagerly, one op, which may be a view without a kernel).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    /// Ops in execution order.
    pub(super) ops: SmallVec<[u32; 2]>,
    /// Module.
    pub(super) module: ModuleId,
    /// Part of a layer of experts; none for what communicates.
    pub(super) stage: Option<MoeStage>,
    /// Compiled region, counted from 1; 0 when run eagerly.
    pub(super) region: u32,
    /// Recomputed forward that the step belongs to: index into [`Backward::sections`].
    pub(super) section: Option<u32>,
    /// The rows that its kernel computes, if not all.
    pub(super) used: Option<Used>,
    /// Whether it begins eager code that breaks the graph around it.
    pub(super) breaks: bool,
}

/// What the scenario says about compiled code.
#[derive(Clone, Copy)]
pub(super) struct Options<'s> {
    compile: &'s Compile,
    /// Kernels between the matmuls of experts compute used rows only.
    used_rows: bool,
    /// AOTAutograd decides what forward saves.
    aot_autograd: bool,
}

impl<'s> Options<'s> {
    pub(super) fn of(s: &'s Scenario) -> Self {
        let moe = s.moe.as_ref();
        Self {
            compile: &s.compile,
            used_rows: moe.is_some_and(|moe| moe.stops_at_used_rows),
            aot_autograd: s.implementation() != Implementation::Native,
        }
    }
}

/// All steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) forward: Vec<Step>,
    pub(super) backward: Vec<Step>,
    pub(super) eval: Vec<Step>,
    /// Gradients become ready as soon as they are computed, even inside a region (collectives are
    /// part of the graph).
    pub(super) ready_inside: bool,
    /// Whether the entry of a region runs guards, by region.
    pub(super) guarded: Vec<bool>,
}

/// Ops in issue order, and the compiled region of each op (0: eager).
pub(super) struct Orders {
    pub(super) forward: Vec<u32>,
    pub(super) backward: Vec<u32>,
    pub(super) region: Vec<u32>,
    pub(super) section: Vec<Option<u32>>,
}

impl Orders {
    /// Returns the ops of training.
    pub(super) fn all(&self) -> Vec<u32> {
        self.forward.iter().chain(&self.backward).copied().collect()
    }

    /// Adds an op in the module, region and section of `stead`; the caller places it in the order.
    pub(super) fn add(
        &mut self,
        g: &mut Graph,
        stead: u32,
        act: Act,
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> u32 {
        let (id, stead) = (g.ops.len() as u32, stead as usize);
        g.nodes += 1;
        g.ops.push(Op {
            act,
            inputs: SmallVec::from_slice(inputs),
            outputs: SmallVec::from_slice(outputs),
            module: g.ops[stead].module,
            stage: g.ops[stead].stage,
            node: g.nodes,
            dispatches: 1,
        });
        for v in outputs {
            g.producer[v.index()] = id;
        }
        self.region.push(self.region[stead]);
        self.section.push(self.section[stead]);
        id
    }

    /// Replaces ops by new ones at their positions.
    pub(super) fn replace(&mut self, mut by: BTreeMap<u32, SmallVec<[u32; 4]>>) {
        for order in [&mut self.forward, &mut self.backward] {
            let old = std::mem::take(order);
            for i in old {
                match by.remove(&i) {
                    Some(new) => order.extend(new),
                    None => order.push(i),
                }
            }
        }
    }
}

pub(super) fn plan(
    m: &mut ModelGraph,
    b: &mut Backward,
    recompute: &Recomputed,
    Options {
        compile,
        used_rows,
        aot_autograd,
    }: Options<'_>,
    recipe: &dyn Recipe,
    sharding: Sharding<'_>,
) -> Plan {
    let mode = compile.mode;
    let end = m.graph.ops.len() as u32;
    let mut o = Orders {
        forward: (0..b.first).collect(),
        backward: (b.first..end).collect(),
        region: vec![0; end as usize],
        section: sections(b, end),
    };
    let units = nearest_units(m.modules(), sharding.is_unit);
    overlap::shared_experts(m, &mut o, &units);
    let mut guarded = vec![false];
    if compile.compiles_code() {
        guarded = regions(m, &mut o, compile, sharding.is_unit);
        let which = (compile.merge_projections, recipe);
        merge::projections(m, &mut o, &mut b.ready, which, sharding);
    }
    float8::quantize(m, &mut o, recipe);
    if compile.compiles_code() {
        let eval = needed_for_loss(m, &o.forward);
        inplace::rotations(&mut m.graph, &mut o, &eval);
        alike::neighbours(&mut m.graph, &mut o);
        if compile.epilogues {
            epilogue::additions(&mut m.graph, &m.tree.modules, &mut o);
            epilogue::tables(&mut m.graph, &mut o);
        }
        let units = (mode != CompileMode::Full).then_some(&units[..]);
        partition::recompute_cheap(&mut m.graph, &mut o, recompute, units, aot_autograd);
        if aot_autograd {
            zeros::save(&mut m.graph, &mut o);
        }
    }
    let eval = needed_for_loss(m, &o.forward);
    let fusion = Fusion::new(m, compile, sharding.is_unit);
    let mut forward = steps(m, &o, &o.forward, &fusion);
    let mut backward = steps(m, &o, &o.backward, &fusion);
    let mut eval = steps(m, &o, &eval, &fusion);
    if !compile.exclude.is_empty() && mode != CompileMode::Full {
        let frames = frames(m.modules(), compile, sharding.is_unit);
        let eager = excluded::modules(compile, m.modules());
        for steps in [&mut forward, &mut backward, &mut eval] {
            excluded::mark_breaks(steps, &frames, &eager);
        }
    }
    if used_rows || compile.fused_products {
        let g = &m.graph;
        let sorted = Sorted::new(g, &o.all());
        for step in forward.iter_mut().chain(&mut backward).chain(&mut eval) {
            // What is fused into a matmul of experts computes the rows that this has.
            let stops = used_rows || gemm_fusion::factors(g, step).is_some();
            step.used = sorted.of_step(g, step).filter(|_| stops);
        }
    }
    Plan {
        forward,
        backward,
        eval,
        ready_inside: mode == CompileMode::Full,
        guarded,
    }
}

fn sections(b: &Backward, end: u32) -> Vec<Option<u32>> {
    let mut out = vec![None; end as usize];
    for (i, s) in b.sections.iter().enumerate() {
        for op in s.ops.clone() {
            out[op as usize] = Some(i as u32);
        }
    }
    out
}

/// Assigns regions: maximal runs of ops that are compiled and not separated by a boundary or by
/// excluded modules. Returns which of them are guarded.
fn regions(
    m: &ModelGraph,
    o: &mut Orders,
    compile: &Compile,
    is_unit: &dyn Fn(ModuleId) -> bool,
) -> Vec<bool> {
    let mode = compile.mode;
    let frames = frames(m.modules(), compile, is_unit);
    let excluded = excluded::modules(compile, m.modules());
    let mut guarded = vec![false];
    for order in [&o.forward, &o.backward] {
        let mut last = None;
        let mut first_of_phase = true;
        for &op in order {
            let module = m.graph.ops[op as usize].module.index();
            let here = frames[module].filter(|_| !excluded[module]);
            let section = o.section[op as usize];
            // The caller of backward makes the initial gradient.
            let made_by_caller = op == o.backward[0];
            let eager = made_by_caller || m.graph.ops[op as usize].is_host_sizes();
            let key = here.filter(|_| !eager).map(|p| (p, section));
            if key.is_some() && key != last {
                guarded.push(mode != CompileMode::Full || first_of_phase);
                first_of_phase = false;
            }
            o.region[op as usize] = if key.is_some() {
                guarded.len() as u32 - 1
            } else {
                0
            };
            last = key;
        }
    }
    guarded
}

/// Returns, for each module, the compiled frame that its ops belong to, or would belong to if no
/// module were excluded: the nearest unit (whose hooks break the graph), or the block.
fn frames(
    modules: &[Module],
    compile: &Compile,
    is_unit: &dyn Fn(ModuleId) -> bool,
) -> Vec<Option<u32>> {
    let mut out: Vec<Option<u32>> = Vec::with_capacity(modules.len());
    for (i, module) in modules.iter().enumerate() {
        let own = i as u32;
        let up = module.parent.and_then(|p| out[p.index()]);
        out.push(match compile.mode {
            CompileMode::Full => Some(0),
            // Outside the root's hooks.
            _ if module.kind == ModuleKind::Loss => compile.compiles_loss().then_some(own),
            CompileMode::Off => None,
            CompileMode::Regions if up.is_none() || is_unit(ModuleId(own)) => Some(own),
            CompileMode::Regions => up,
            CompileMode::Blocks if module.kind == ModuleKind::Block => Some(own),
            CompileMode::Blocks if up.is_some() && is_unit(ModuleId(own)) => Some(own),
            CompileMode::Blocks => up,
        });
    }
    out
}

/// What may become one kernel.
struct Fusion {
    /// Whether column sums may join row kernels.
    mixed: bool,
    /// Nearest unit of each module, if elementwise code is fused into GEMMs.
    units: Option<Vec<u32>>,
}

impl Fusion {
    fn new(m: &ModelGraph, compile: &Compile, is_unit: &dyn Fn(ModuleId) -> bool) -> Self {
        let units = || nearest_units(m.modules(), is_unit);
        Self {
            mixed: compile.mix_order_reductions,
            units: compile.fused_products.then(units),
        }
    }
}

/// Returns, for each module, the nearest module around it (or itself) that is a unit or the
/// outermost.
fn nearest_units(modules: &[Module], is_unit: &dyn Fn(ModuleId) -> bool) -> Vec<u32> {
    let mut out: Vec<u32> = Vec::with_capacity(modules.len());
    for (i, module) in modules.iter().enumerate() {
        let own = i as u32;
        out.push(match module.parent {
            Some(p) if !is_unit(ModuleId(own)) => out[p.index()],
            _ => own,
        });
    }
    out
}

/// Makes the steps: one per eager op, and fused kernels of regions.
fn steps(m: &ModelGraph, o: &Orders, order: &[u32], fusion: &Fusion) -> Vec<Step> {
    let g = &m.graph;
    let mut out = Vec::with_capacity(order.len());
    let mut at = 0;
    while at < order.len() {
        let region = o.region[order[at] as usize];
        if region == 0 {
            out.push(single(g, o, order[at]));
            at += 1;
            continue;
        }
        let len = order[at..]
            .iter()
            .take_while(|&&op| o.region[op as usize] == region)
            .count();
        let ops = &order[at..at + len];
        let section = o.section[ops[0] as usize];
        let first = out.len();
        fuse::fuse(m, ops, fusion.mixed, |ops, place| {
            let place = &g.ops[place as usize];
            out.push(Step {
                stage: place.stage.filter(|_| !communicates(g, &ops)),
                ops,
                module: place.module,
                region,
                section,
                used: None,
                breaks: false,
            })
        });
        if let Some(units) = &fusion.units {
            let unit = |s: &Step| {
                (
                    units[s.module.index()],
                    overlap::is_shared(g, m.modules(), &s.ops),
                )
            };
            gemm_fusion::join(g, &mut out, first, |a, b| unit(a) == unit(b));
        }
        at += len;
    }
    out
}

fn single(g: &Graph, o: &Orders, op: u32) -> Step {
    let of = &g.ops[op as usize];
    Step {
        ops: smallvec![op],
        module: of.module,
        stage: of.stage.filter(|_| !communicates(g, &[op])),
        region: 0,
        section: o.section[op as usize],
        used: None,
        breaks: false,
    }
}

/// Returns whether ops exchange data with other ranks, or let the host wait for sizes.
fn communicates(g: &Graph, ops: &[u32]) -> bool {
    let mut ops = ops.iter().map(|&i| &g.ops[i as usize]);
    ops.any(|op| matches!(op.act, Act::Collective(_)) || op.is_host_sizes())
}

/// Returns the ops that the loss depends on, which a validation forward runs.
fn needed_for_loss(m: &ModelGraph, ops: &[u32]) -> Vec<u32> {
    let g = &m.graph;
    let mut used = vec![false; g.values.len()];
    used[m.loss.index()] = true;
    let mut keep: Vec<u32> = ops
        .iter()
        .copied()
        .rev()
        .filter(|&i| {
            let op = &g.ops[i as usize];
            let needed = op.outputs.iter().any(|v| used[v.index()]);
            if needed {
                let computed = op.act == Act::View(View::Precomputed);
                let n = if computed { 1 } else { op.inputs.len() };
                for v in &op.inputs[..n] {
                    used[v.index()] = true;
                }
            }
            needed
        })
        .collect();
    keep.reverse();
    keep
}
