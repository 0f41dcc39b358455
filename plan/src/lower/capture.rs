//! Contents of captures: the scopes of a block, and the memory of a captured iteration.

use super::PlanError;
use super::inputs::LoweringInputs;
use crate::compile::tape::{Tape, TapeOp};
use crate::config::{CudaGraph, Scenario, Scope};
use crate::ir::{Module, ModuleId, ModuleKind, MoeStage, Pool};
use crate::program::{Op, Program};
use std::collections::BTreeSet;

// Note [Captured addresses]
//
// A CUDA graph contains the addresses of its operands, so each replay must find all buffers at the
// addresses they had at capture. torch gives a graph a private pool for that. Here, the program
// guarantees it:
//
// - buffers that a captured iteration allocates and frees get planned slots (`fix_addresses`),
//   which keep their addresses for any order of sections;
// - smaller scopes need an allocator whose addresses repeat; otherwise, the scenario is rejected
//   (`PolicySpec::fixed_addresses`);
// - `check` compares the addresses of each pass with those of the previous one (`scope_address`).
//   `exec` compares them before every replay, because a graph that reads freed memory fails
//   silently.

/// Moves buffers that are freed within a step from the caching allocator to planned slots; see
/// Note [Captured addresses].
pub(super) fn fix_addresses(program: &mut Program) {
    for instr in &program.instrs {
        if let Op::Free(id) = instr.op {
            let buffer = &mut program.buffers[id.index()];
            if buffer.pool == Pool::Caching {
                buffer.pool = Pool::Planned;
            }
        }
    }
}

/// The scopes that a scenario captures in the blocks of its model.
pub(super) struct Captures<'a> {
    /// Empty for a whole iteration, too.
    scopes: &'a [Scope],
    modules: &'a [Module],
    /// MoE layers.
    experts: BTreeSet<ModuleId>,
}

impl<'a> Captures<'a> {
    pub(super) fn new(scenario: &'a Scenario, tape: &'a Tape) -> Self {
        let scopes = match &scenario.compile.cuda_graph {
            CudaGraph::Scopes(scopes) => scopes.as_slice(),
            CudaGraph::Off | CudaGraph::FullIteration => &[],
        };
        let stages = tape.training().filter_map(|op| match op {
            TapeOp::EnterStage { layer, .. } => Some(*layer),
            _ => None,
        });
        Self {
            scopes,
            modules: &tape.modules,
            experts: stages.collect(),
        }
    }

    /// Returns whether a module is captured.
    pub(super) fn module(&self, m: ModuleId) -> bool {
        let scope = match self.modules[m.index()].kind {
            ModuleKind::Attention => Scope::Attn,
            ModuleKind::Mlp if self.experts.contains(&m) => Scope::Moe,
            ModuleKind::Mlp => Scope::Mlp,
            ModuleKind::Block => Scope::Block,
            _ => return false,
        };
        self.scopes.contains(&scope)
    }

    /// Returns whether a part of an MoE layer is captured separately.
    pub(super) fn stage(&self, stage: MoeStage) -> bool {
        self.scopes.contains(&match stage {
            MoeStage::Router | MoeStage::SharedExpert => Scope::MoeRouter,
            MoeStage::Preprocess => Scope::MoePreprocess,
        })
    }

    /// Returns the name of a part of an MoE layer.
    pub(super) fn stage_name(&self, stage: MoeStage, layer: ModuleId) -> String {
        format!("{} {}", self.modules[layer.index()].path, stage.name())
    }
}

/// Rejects scopes that contain the hooks of a unit.
pub(super) fn check_scopes(inputs: &LoweringInputs<'_>) -> Result<(), PlanError> {
    let captures = Captures::new(inputs.scenario, inputs.tape);
    for unit in &inputs.units {
        for m in &unit.spec.modules {
            let mut up = inputs.tape.modules[m.index()].parent;
            while let Some(p) = up {
                let module = &inputs.tape.modules[p.index()];
                if captures.module(p) {
                    return Err(PlanError::CapturedUnit {
                        unit: unit.spec.name.clone(),
                        scope: module.path.clone(),
                    });
                }
                up = module.parent;
            }
        }
    }
    check_stages(inputs, &captures)
}

/// Rejects parts of MoE layers that contain the hooks of a unit.
fn check_stages(inputs: &LoweringInputs<'_>, captures: &Captures<'_>) -> Result<(), PlanError> {
    let mut open = None;
    for op in inputs.tape.training() {
        match *op {
            TapeOp::EnterStage { stage, layer } if captures.stage(stage) => {
                open = Some((stage, layer));
            }
            TapeOp::ExitStage => open = None,
            TapeOp::Enter(m) | TapeOp::Exit(m) => {
                let hooks = inputs.hooks[m.index()];
                if let Some(((stage, layer), u)) = open.zip(hooks.first_of.or(hooks.last_of)) {
                    return Err(PlanError::CapturedUnit {
                        unit: inputs.unit(u).spec.name.clone(),
                        scope: captures.stage_name(stage, layer),
                    });
                }
            }
            _ => {}
        }
    }
    Ok(())
}
