//! From graphs to the tape: eager kernels, fusion, regions, liveness.
//!
//! `schedule` puts ops into steps (one kernel each), `kernel` describes a step's kernel, `emit` decides lifetimes and writes
//! the tape, `expand` repeats the steps of a middle block for all middle blocks.

mod emit;
mod expand;
mod fuse;
mod kernel;
mod lives;
mod partition;
mod schedule;
pub mod tape;
#[cfg(test)]
mod tests;

use crate::autodiff;
use crate::model::{self, build, tree::Tree};
use crate::scenario::{CompileMode, Family, Scenario};
use tape::{Module, ModuleId, Param, Tape};

/// Modules in pre-order and parameters in registration order, without building any graph.
#[must_use]
pub fn modules_and_params(scenario: &Scenario) -> (Vec<Module>, Vec<Param>) {
    let tree = Tree::new(scenario, scenario.model.layers);
    (tree.modules, tree.params)
}

/// Builds the tape of one micro-batch.
///
/// `is_unit` tells which modules are sharding units: their boundaries break compiled regions (`compile.mode = "regions"`), and
/// leaves inside a block are entered and left on the tape only when they are units. The loss is entered after the root has
/// been left, since it is computed outside the model.
#[must_use]
pub fn tape(scenario: &Scenario, is_unit: &dyn Fn(ModuleId) -> bool) -> Tape {
    let tree = Tree::new(scenario, scenario.model.layers);
    let eager;
    let scenario = if frames_are_skipped(scenario, &tree, is_unit) {
        eager = with_mode(scenario, CompileMode::Off);
        &eager
    } else {
        scenario
    };
    match repeat(scenario, &tree, is_unit) {
        Some(tape) => finish(scenario, tree, tape),
        None => full(scenario, tree, is_unit),
    }
}

/// Whether mode `regions` finds nothing to compile.
///
/// A hook in the model's loop over its layers breaks the graph there, and a frame whose graph breaks within a loop is
/// skipped as a whole; the layers' own frames are then compiled one by one, unless they are the library's (torch 2.11,
/// "Skipped functions": `torch.nn` is among what is never compiled as a frame of its own). So a stack of library layers
/// runs eagerly, and pays for the breaks. Measured on 4 H200: 52.09 ms eager and 52.03 ms compiled for six encoder layers.
fn frames_are_skipped(
    scenario: &Scenario,
    tree: &Tree,
    is_unit: &dyn Fn(ModuleId) -> bool,
) -> bool {
    let library = matches!(
        scenario.model.family,
        Family::Encoder | Family::Linear | Family::Cnn
    );
    let hooks = || (1..tree.modules.len() as u32).any(|m| is_unit(ModuleId(m)));
    scenario.compile.mode == CompileMode::Regions && library && hooks()
}

fn with_mode(scenario: &Scenario, mode: CompileMode) -> Scenario {
    let mut changed = scenario.clone();
    changed.compile.mode = mode;
    changed
}

/// The tape of a deep model from that of a shallow one, if its blocks are alike.
fn repeat(scenario: &Scenario, tree: &Tree, is_unit: &dyn Fn(ModuleId) -> bool) -> Option<Tape> {
    let layers = tree.blocks.count;
    if layers <= expand::SHALLOW || !alike(scenario, tree, is_unit) {
        return None;
    }
    let shallow = Tree::new(scenario, expand::SHALLOW);
    let blocks = shallow.blocks;
    let after = blocks.module + expand::SHALLOW * blocks.modules;
    // Blocks are alike, so the first five of the deep model answer for those of the shallow one.
    let in_deep = |m: ModuleId| {
        if m.0 < after {
            m
        } else {
            ModuleId(m.0 + (layers - expand::SHALLOW) * blocks.modules)
        }
    };
    let small = full(scenario, shallow, &|m| is_unit(in_deep(m)));
    expand::expand(&small, blocks, layers)
}

/// Whether all blocks are built alike: none frozen, and the same modules of each are units.
fn alike(scenario: &Scenario, tree: &Tree, is_unit: &dyn Fn(ModuleId) -> bool) -> bool {
    let b = tree.blocks;
    let at = |layer: u32, local: u32| is_unit(ModuleId(b.module + layer * b.modules + local));
    scenario.fsdp.frozen.is_empty()
        && (0..b.modules).all(|m| (1..b.count).all(|l| at(l, m) == at(0, m)))
}

/// The tape of a tree, built op by op.
fn full(scenario: &Scenario, tree: Tree, is_unit: &dyn Fn(ModuleId) -> bool) -> Tape {
    let mut m = model::graph_of(scenario, tree);
    let seed = build::seed(scenario, m.tokens);
    let backward = autodiff::differentiate(&mut m, scenario.train.recompute, seed);
    let plan = schedule::plan(&mut m, &backward, scenario.compile.mode, is_unit);
    let tape = emit::emit(&m, &backward, &plan, is_unit);
    finish(scenario, m.tree, tape)
}

/// Adds the tables and figures of the whole model.
fn finish(scenario: &Scenario, tree: Tree, tape: Tape) -> Tape {
    let (model_flops, tokens) = build::model_flops(scenario, &tree);
    Tape {
        modules: tree.modules,
        params: tree.params,
        model_flops,
        tokens,
        ..tape
    }
}
