//! From graphs to the tape: eager kernels, fusion, regions, liveness.
//!
//! `schedule` puts ops into steps (one kernel each). `excluded` knows the modules that stay eager.
//! `merge` fuses several GEMMs into one. `float8` casts factors of GEMMs to 8 bits. `epilogue` lets
//! GEMMs accumulate, and gradients of embeddings fill their tables. `gemm_fusion` fuses elementwise
//! code into GEMMs. `inplace` saves their readers memory. `kernel` describes a step's kernel,
//! `emit` decides lifetimes and writes the tape, and `expand` repeats the steps of a middle block
//! for all middle blocks. `overlap` moves kernels of shared experts behind the exchanges of tokens.

mod alike;
mod emit;
mod epilogue;
mod excluded;
mod expand;
mod float8;
mod fuse;
mod gemm_fusion;
mod inplace;
mod kernel;
mod liveness;
mod merge;
mod overlap;
mod partition;
mod schedule;
pub mod tape;
#[cfg(test)]
pub(crate) mod tests;
mod used_rows;
mod users;
mod zeros;

use crate::autodiff::{self, Sums, recompute::Recomputed};
use crate::config::{
    CompileMode, ForcedRouting, Implementation, MergeProjections, RecomputeLayers, Scenario,
};
use crate::ir::{ModuleId, Param, ParamId};
use crate::models::declare::{Blocks, Tree};
use crate::models::flops::{self, Backward};
use crate::models::{self, Declared, build};
use crate::recipes;
use crate::units::Flops;
use expand::StandIns;
use tape::Tape;

/// What is contiguous in the full buffers of a parameter and of the one registered after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightAdjacency {
    /// Nothing: separate buffers, or a gap between them.
    None,
    /// The next weight starts where this one ends; gradients are separate.
    Weights,
    /// Both weights and gradients.
    WeightsAndGradients,
}

/// Facts about the sharding that compilation needs.
#[derive(Clone, Copy)]
pub(crate) struct Sharding<'a> {
    /// Whether a module is a sharding unit.
    pub is_unit: &'a dyn Fn(ModuleId) -> bool,
    /// What is contiguous for a parameter and the next one; asked only for parameters that have a
    /// next one.
    pub adjacency: &'a dyn Fn(ParamId) -> WeightAdjacency,
}

/// Returns whether two parameters, the second registered after the first, are weights of layers
/// that `which` would merge if they were contiguous. Whether the layers really read one input
/// depends on the graph.
#[must_use]
pub(crate) fn mergeable(a: &Param, b: &Param, which: MergeProjections) -> bool {
    const ATTENTION: [(&str, &str); 2] = [
        ("attention.q", "attention.k"),
        ("attention.k", "attention.v"),
    ];
    const MLP: [(&str, &str); 1] = [("mlp.w1", "mlp.w3")];
    let pairs: &[&[(&str, &str)]] = match which {
        MergeProjections::None => &[],
        MergeProjections::Qkv => &[&ATTENTION],
        MergeProjections::Gradients | MergeProjections::All => &[&ATTENTION, &MLP],
    };
    pairs.iter().copied().flatten().any(|&(first, second)| {
        let (x, y) = (stem(a, first), stem(b, second));
        x.is_some() && x == y
    })
}

/// Returns the path of the module that contains a layer called `layer`, if the parameter is the
/// weight of one.
fn stem<'p>(p: &'p Param, layer: &str) -> Option<&'p str> {
    p.name.strip_suffix(".weight")?.strip_suffix(layer)
}

/// Builds the tape of one micro-batch of a scenario's declared model.
///
/// The boundaries of units break compiled regions (`compile.mode = "regions"`), and leaves inside a
/// block are entered and left on the tape only if they are units. The loss is entered after the
/// root has been left, since it is computed outside the model. An operand may extend beyond the end
/// of its parameter into contiguous parameters after it.
#[must_use]
pub(crate) fn tape(scenario: &Scenario, model: Declared, sharding: Sharding<'_>) -> Tape {
    let eager;
    let scenario = if frames_are_skipped(scenario, &model.tree, sharding.is_unit) {
        eager = uncompiled(scenario);
        &eager
    } else {
        scenario
    };
    match repeat(scenario, &model.tree, sharding) {
        Some(tape) => finish_repeated(scenario, model.tree, tape),
        None => full(scenario, model, sharding),
    }
}

/// Returns whether mode `regions` finds nothing to compile.
///
/// A hook in the model's loop over its layers breaks the graph there, and Dynamo skips a whole
/// frame whose graph breaks within a loop. The layers' own frames are then compiled one by one,
/// unless they are the library's (torch 2.11, "Skipped functions": `torch.nn` is never compiled as
/// a frame of its own). So a stack of library layers runs eagerly, and pays for the breaks.
/// Measured on 4 H200: 52.09 ms eager and 52.03 ms compiled for six encoder layers.
fn frames_are_skipped(
    scenario: &Scenario,
    tree: &Tree,
    is_unit: &dyn Fn(ModuleId) -> bool,
) -> bool {
    let library = scenario.model.family.spec().torch_modules;
    let hooks = || (1..tree.modules.len() as u32).any(|m| is_unit(ModuleId(m)));
    scenario.compile.mode == CompileMode::Regions && library && hooks()
}

fn uncompiled(scenario: &Scenario) -> Scenario {
    let mut changed = scenario.clone();
    changed.compile.mode = CompileMode::Off;
    changed.compile.loss = false;
    changed
}

/// Builds the tape of a deep model from that of a shallow one, if its blocks are alike.
fn repeat(scenario: &Scenario, tree: &Tree, sharding: Sharding<'_>) -> Option<Tape> {
    let all = tree.blocks()?;
    let recomputed = recomputed_first(scenario, tree)?;
    let stand_ins = StandIns::new(&[recomputed, tree.layers() - recomputed]);
    let more = stand_ins.deep() - stand_ins.shallow();
    if more == 0 || !alike(scenario, tree, all, sharding) {
        return None;
    }
    let few;
    let scenario = match stand_ins.shortened(recomputed) {
        n if n == recomputed => scenario,
        n => {
            few = recomputing(scenario, RecomputeLayers::First(n));
            &few
        }
    };
    let shallow = models::declare(scenario, stand_ins.shallow());
    let blocks = shallow.tree.blocks()?;
    // Blocks are alike, so the first ones of the deep model determine those of the shallow one.
    let after = blocks.module + stand_ins.shallow() * blocks.modules;
    let in_deep = |m: ModuleId| {
        ModuleId(
            m.0 + if m.0 < after {
                0
            } else {
                more * blocks.modules
            },
        )
    };
    let last = blocks.param + stand_ins.shallow() * blocks.params;
    let param = |p: ParamId| ParamId(p.0 + if p.0 < last { 0 } else { more * blocks.params });
    let stand_in = Sharding {
        is_unit: &|m| (sharding.is_unit)(in_deep(m)),
        adjacency: &|p| (sharding.adjacency)(param(p)),
    };
    let small = full(scenario, shallow, stand_in);
    expand::expand(&small, blocks, &stand_ins)
}

/// Returns how many blocks are recomputed if the others come after them; 0 if all are, or none.
/// `None` if they are in another order.
fn recomputed_first(scenario: &Scenario, tree: &Tree) -> Option<u32> {
    match scenario.train.recompute_layers {
        RecomputeLayers::First(n) => Some(if n < tree.layers() { n } else { 0 }),
        _ => Recomputed::new(&scenario.train, &tree.modules)
            .is_uniform()
            .then_some(0),
    }
}

fn recomputing(scenario: &Scenario, layers: RecomputeLayers) -> Scenario {
    let mut changed = scenario.clone();
    changed.train.recompute_layers = layers;
    changed
}

/// Returns whether all blocks are built alike, except that some may be recomputed: no glob freezes
/// some, the same modules of each are units, the same parameters are trained, the same run in 8
/// bits, the same are contiguous, the same stay eager, and experts are equally popular in all.
fn alike(scenario: &Scenario, tree: &Tree, b: Blocks, sharding: Sharding<'_>) -> bool {
    let unit = |l: u32, m: u32| (sharding.is_unit)(ModuleId(b.module + l * b.modules + m));
    // A block's last parameter is followed by another block's, which never matters.
    let near = |l: u32, p: u32| (sharding.adjacency)(ParamId(b.param + l * b.params + p));
    let module = |l: u32, m: u32| &tree.modules[(b.module + l * b.modules + m) as usize];
    let eager = |l: u32, m: u32| scenario.compile.excludes(&module(l, m).path);
    let param = |l: u32, p: u32| &tree.params[(b.param + l * b.params + p) as usize];
    let trained = |l: u32, p: u32| param(l, p).requires_grad;
    let recipe = recipes::of(&scenario.precision);
    let float8 = |l: u32, p: u32| recipe.float8(param(l, p), tree.block_place(param(l, p)));
    scenario.fsdp.frozen.is_empty()
        && tree.skipped.is_empty()
        && scenario
            .moe
            .as_ref()
            .is_none_or(|moe| moe.busiest.is_empty())
        && scenario
            .forced_routing
            .as_ref()
            .is_none_or(ForcedRouting::is_alike)
        && (0..b.params).all(|p| (1..b.count).all(|l| float8(l, p) == float8(0, p)))
        && (0..b.params).all(|p| (1..b.count).all(|l| trained(l, p) == trained(0, p)))
        && (0..b.modules).all(|m| (1..b.count).all(|l| unit(l, m) == unit(0, m)))
        && (0..b.modules).all(|m| (1..b.count).all(|l| eager(l, m) == eager(0, m)))
        && (1..b.params).all(|p| (1..b.count).all(|l| near(l, p - 1) == near(0, p - 1)))
}

/// Builds the tape of a model op by op.
fn full(scenario: &Scenario, model: Declared, sharding: Sharding<'_>) -> Tape {
    let mut m = models::graph_of(scenario, model);
    let recipe = recipes::of(&scenario.precision);
    recipes::convert(&mut m.graph, &*recipe);
    let seed = build::seed(scenario, m.tokens);
    let recompute = Recomputed::new(&scenario.train, m.modules());
    let mut backward = autodiff::differentiate(&mut m, &recompute, sums(scenario), seed);
    let plan = schedule::plan(
        &mut m,
        &mut backward,
        &recompute,
        schedule::Options::of(scenario),
        &*recipe,
        sharding,
    );
    let python = scenario.implementation() == Implementation::Transformers;
    let tape = emit::emit(&m, &backward, &plan, sharding.is_unit, python);
    finish(m.tree, tape, (m.model_flops, m.tokens))
}

/// Returns how gradients of tied weights are added. They belong to the root, outside of compiled
/// blocks.
fn sums(scenario: &Scenario) -> Sums {
    let eager = matches!(
        scenario.compile.mode,
        CompileMode::Off | CompileMode::Blocks
    );
    if eager && scenario.implementation() != Implementation::Native {
        Sums::Autograd
    } else {
        Sums::InPlace
    }
}

/// Finishes a tape of repeated blocks.
fn finish_repeated(scenario: &Scenario, tree: Tree, tape: Tape) -> Tape {
    let figures = if tree.params.iter().all(|p| p.requires_grad) {
        flops::model_flops(scenario, &tree, &Backward::whole(&tree))
    } else {
        // What runs backward follows from the forward graph of the whole model.
        let m = models::graph(scenario);
        (m.model_flops, m.tokens)
    };
    finish(tree, tape, figures)
}

/// Adds the tables and figures of the whole model.
fn finish(tree: Tree, tape: Tape, (model_flops, tokens): (Flops, u64)) -> Tape {
    Tape {
        modules: tree.modules,
        params: tree.params,
        model_flops,
        tokens,
        ..tape
    }
}
