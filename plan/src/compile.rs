//! From graphs to the tape: eager kernels, fusion, regions, liveness.
//!
//! `schedule` puts ops into steps (one kernel each), `kernel` describes a step's kernel, `emit` decides lifetimes and writes
//! the tape, `expand` repeats the steps of a middle block for all middle blocks.

mod emit;
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
use crate::scenario::Scenario;
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
    full(scenario, tree, is_unit)
}

/// The tape of a tree, built op by op.
fn full(scenario: &Scenario, tree: Tree, is_unit: &dyn Fn(ModuleId) -> bool) -> Tape {
    let mut m = model::graph_of(scenario, tree);
    let backward = autodiff::differentiate(&mut m, scenario.train.recompute);
    let plan = schedule::plan(&mut m, &backward, scenario.compile.mode, is_unit);
    let mut tape = emit::emit(&m, &backward, &plan, is_unit);
    (tape.model_flops, tape.tokens) = build::model_flops(scenario, &m.tree);
    tape.modules = m.tree.modules;
    tape.params = m.tree.params;
    tape
}
