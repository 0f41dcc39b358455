//! Contents of captures: the scopes of a module, and the memory of a captured iteration.

use super::PlanError;
use super::inputs::LoweringInputs;
use crate::config::{CudaGraph, Scope};
use crate::ir::{ModuleKind, Pool};
use crate::program::{Op, Program};

// Note [Captured addresses]
//
// A CUDA graph contains the addresses of its operands, so a replay must find every buffer where it
// was at capture. torch gives a graph a private pool for that. Here the program guarantees it:
//
// - buffers that a captured iteration allocates and frees get planned slots (`fix_addresses`),
//   which keep their addresses for any order of sections;
// - smaller scopes need an allocator whose addresses repeat: the scenario is refused otherwise
//   (`PolicySpec::fixed_addresses`);
// - `check` compares the addresses of each pass with those of the pass before (`scope_address`),
//   and `exec` compares them before every replay, because a graph that reads freed memory fails
//   silently.

/// Moves buffers that steps free from the caching allocator to planned slots; see
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

/// Returns whether one of the scopes is this kind of module.
pub(super) fn captured(scopes: &[Scope], kind: ModuleKind) -> bool {
    match kind {
        ModuleKind::Attention => scopes.contains(&Scope::Attn),
        ModuleKind::Mlp => scopes.contains(&Scope::Mlp),
        ModuleKind::Block => scopes.contains(&Scope::Block),
        _ => false,
    }
}

/// Refuses scopes that contain a unit's hooks.
pub(super) fn check_scopes(inputs: &LoweringInputs<'_>) -> Result<(), PlanError> {
    let CudaGraph::Scopes(scopes) = &inputs.scenario.compile.cuda_graph else {
        return Ok(());
    };
    for unit in &inputs.units {
        for m in &unit.spec.modules {
            let mut up = inputs.tape.modules[m.index()].parent;
            while let Some(p) = up {
                let module = &inputs.tape.modules[p.index()];
                if captured(scopes, module.kind) {
                    return Err(PlanError::CapturedUnit {
                        unit: unit.spec.name.clone(),
                        scope: module.path.clone(),
                    });
                }
                up = module.parent;
            }
        }
    }
    Ok(())
}
