//! Buffers of the tape, and of the libraries that its kernels call.

use super::emitter::Emitter;
use super::inputs::LoweringInputs;
use crate::ir::{BufferId, ConstId, DType, Holds, Packed, Role, StorageId, StorageRole, UnitId};
use crate::program::Rule;

/// Buffers of the tape, created once and used by every micro-batch.
pub(crate) struct TapeBuffers {
    /// Buffers of all storages: one set, or one per micro-batch with a joint backward.
    storages: Vec<Vec<BufferId>>,
    /// Buffers of each constant: one, or one per micro-batch.
    pub(super) consts: Vec<Vec<BufferId>>,
    /// Scales of packed weights that are not parameters.
    quantization_state: Option<BufferId>,
    /// Bases of library workspaces, allocated in the first step.
    pub(super) workspaces: Vec<BufferId>,
}

impl TapeBuffers {
    pub(crate) fn new(out: &mut Emitter<'_>) -> Self {
        let unit_of_module = unit_of_module(out.inputs);
        let tape = out.inputs.tape;
        let train = &out.inputs.scenario.train;
        let copies = if train.joint_backward {
            train.grad_accum
        } else {
            1
        };
        let kept = out.inputs.kept_transposes();
        let mut set = |_| {
            let storages = tape.storages.iter().enumerate();
            let made = storages.map(|(i, s)| {
                let id = StorageId(i as u32);
                let role = match s.role {
                    _ if kept.contains(&id) => Role::ModelWeight,
                    StorageRole::Saved => Role::Activation,
                    StorageRole::Logits => Role::Logits,
                    StorageRole::Temporary | StorageRole::ActivationGrad => Role::Temporary,
                };
                let unit = unit_of_module[s.module.index()];
                out.persistent(role, s.bytes.0, s.dtype, unit, Holds::Storage(id))
            });
            made.collect()
        };
        let storages: Vec<Vec<BufferId>> = (0..copies).map(&mut set).collect();
        let consts = tape
            .consts
            .iter()
            .enumerate()
            .map(|(i, c)| {
                let copies = if c.per_micro_batch {
                    out.inputs.scenario.train.grad_accum
                } else {
                    1
                };
                let holds = Holds::Const(ConstId(i as u32));
                let mut make =
                    |_| out.persistent(Role::Input, c.bytes.0, c.dtype, UnitId(0), holds);
                (0..copies).map(&mut make).collect()
            })
            .collect();
        let packed = tape.params.iter().filter_map(|p| p.packed.as_ref());
        let replicated: u64 = packed.map(Packed::replicated_bytes).sum();
        let quantization_state = (replicated > 0).then(|| {
            let holds = Holds::Named("quantization state");
            out.persistent(Role::Input, replicated, DType::U8, UnitId(0), holds)
        });
        let workspace = out.inputs.scenario.fsdp.cublas_workspace_bytes;
        let workspaces = if workspace == 0 {
            Vec::new()
        } else {
            [
                "cublas workspace, forward thread",
                "cublas workspace, autograd thread",
            ]
            .into_iter()
            .map(|name| {
                out.persistent(
                    Role::Workspace,
                    workspace,
                    DType::U8,
                    UnitId(0),
                    Holds::Named(name),
                )
            })
            .collect()
        };
        Self {
            storages,
            consts,
            quantization_state,
            workspaces,
        }
    }

    /// Returns the buffer of a storage, in the first micro-batch if each has a separate one.
    pub(crate) fn storage(&self, s: StorageId) -> BufferId {
        self.storage_of(0, s)
    }

    /// Returns the buffer of a storage in a micro-batch.
    pub(super) fn storage_of(&self, micro: usize, s: StorageId) -> BufferId {
        self.storages[micro.min(self.storages.len() - 1)][s.index()]
    }

    /// Allocates the tables that live for the whole run.
    pub(crate) fn init(&self, out: &mut Emitter<'_>) {
        for (c, ids) in out.inputs.tape.consts.iter().zip(&self.consts) {
            if !c.per_micro_batch {
                out.b.alloc(Rule::State, ids[0]);
            }
        }
        if let Some(id) = self.quantization_state {
            out.b.alloc(Rule::State, id);
        }
    }
}

/// Returns, for each module, the unit that parameters of this module belong to.
pub(super) fn unit_of_module(inputs: &LoweringInputs<'_>) -> Vec<UnitId> {
    let mut own = vec![None; inputs.tape.modules.len()];
    for (u, unit) in inputs.units.iter().enumerate() {
        for m in &unit.spec.modules {
            own[m.index()] = Some(UnitId(u as u16));
        }
    }
    let mut out = vec![UnitId(0); own.len()];
    for (i, m) in inputs.tape.modules.iter().enumerate() {
        out[i] = own[i]
            .or_else(|| m.parent.map(|p| out[p.index()]))
            .unwrap_or(UnitId(0));
    }
    out
}
