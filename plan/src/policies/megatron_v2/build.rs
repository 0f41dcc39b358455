//! Allocations left over from building and sharding the model, before the first step.
//!
//! `fully_shard` takes a model whose parameters are already allocated. It copies each group into
//! its shards, and makes the parameters views of the gathered storage. The blocks allocated for
//! this stay in PyTorch's caching allocator, and later allocations are placed between them.

use super::MegatronV2;
use crate::config::Units;
use crate::config::pattern::matches;
use crate::ir::{BufferId, DType, GroupId, Holds, ParamId, Role, UnitId};
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::unmanaged::Unmanaged;
use crate::program::{Phase, Rule};
use std::collections::BTreeMap;

/// Maximum size of the float32 parameters, in bytes, for a model built on the device. Larger models
/// do not fit next to their casts, so users build them in host memory.
const ON_DEVICE: u64 = 40 << 30;

/// Returns whether the model is built on the device.
fn is_built_there(inputs: &LoweringInputs<'_>) -> bool {
    let numel: u64 = inputs.tape.params.iter().map(|p| p.numel()).sum();
    let hardware = &inputs.scenario.mesh.hardware;
    inputs.engine.allocates_workspaces(hardware) && numel * DType::F32.size() <= ON_DEVICE
}

/// Returns the units in the order of the `fully_shard` calls: the order of `units`, then the root.
fn call_order(inputs: &LoweringInputs<'_>) -> Vec<UnitId> {
    let units = (0..inputs.units.len() as u16).map(UnitId);
    let place = |u: &UnitId| {
        let spec = &inputs.unit(*u).spec;
        let of_pattern = |name: &str| match &inputs.scenario.fsdp.units {
            Units::Patterns(all) => all
                .iter()
                .position(|p| p.modules.iter().any(|glob| matches(glob, name))),
            Units::Block | Units::BlockAndEnds | Units::Root => None,
        };
        (spec.is_root, of_pattern(&spec.name))
    };
    let mut order: Vec<UnitId> = units.collect();
    order.sort_by_key(place);
    order
}

impl MegatronV2 {
    /// Emits section `Init`: the model in float32, its cast, and the buffers of each group.
    pub(super) fn build(&self, out: &mut Emitter<'_>) {
        if !is_built_there(out.inputs) {
            self.flat.init(out);
            return;
        }
        out.b.at(UnitId(0), Phase::Init);
        // Biases of routers are buffers, which `fully_shard` leaves as they are.
        for g in out.inputs.group_ids() {
            if out.inputs.group(g).ignored {
                let state = self.flat.state(g);
                for id in state.weight.iter().chain(&state.params) {
                    out.b.alloc(Rule::State, *id);
                }
            }
        }
        let params: Vec<ParamId> = (0..out.inputs.tape.params.len() as u32)
            .map(ParamId)
            .filter(|p| !Unmanaged::has(out.inputs, *p))
            .collect();
        let mut model: BTreeMap<ParamId, BufferId> = params
            .iter()
            .map(|p| (*p, alloc_param(out, *p, DType::F32)))
            .collect();
        let compute = out.inputs.types.compute;
        if compute != DType::F32 {
            for p in params {
                let cast = alloc_param(out, p, compute);
                if let Some(whole) = model.insert(p, cast) {
                    out.b.free(Rule::State, whole);
                }
            }
        }
        for unit in call_order(out.inputs) {
            out.b.at(unit, Phase::Init);
            for g in out.inputs.groups_of(unit) {
                self.shard(out, g, &model);
            }
        }
    }

    /// Emits the construction of a `FsdpParameterGroup`.
    fn shard(&self, out: &mut Emitter<'_>, g: GroupId, model: &BTreeMap<ParamId, BufferId>) {
        let params = out.inputs.group(g).params.clone();
        let types = out.inputs.types;
        let state = self.flat.state(g).clone();
        let main = types.stored();
        let copies: Vec<BufferId> = if main == types.compute {
            Vec::new()
        } else {
            params.iter().map(|p| alloc_param(out, *p, main)).collect()
        };
        let mut at_rest = state
            .main
            .into_iter()
            .chain(state.weight)
            .chain(state.params);
        if let Some(first) = at_rest.next() {
            out.b.alloc(Rule::State, first);
        }
        for copy in copies {
            out.b.free(Rule::State, copy);
        }
        // The gathered storage belongs to the stream that allocates it until it is released.
        let bytes = state.numel * types.compute.size();
        let unit = out.inputs.group(g).unit;
        let holds = Holds::Group(g);
        let gathered = out.persistent(Role::Temporary, bytes, types.compute, unit, holds);
        out.b.alloc(Rule::State, gathered);
        for id in at_rest {
            out.b.alloc(Rule::State, id);
        }
        if let Some(grad) = state.grad {
            out.b.alloc(Rule::State, grad.buffer);
        }
        for p in params {
            out.b.free(Rule::State, model[&p]);
        }
        out.b.free(Rule::State, gathered);
    }
}

/// Allocates a parameter of the model.
fn alloc_param(out: &mut Emitter<'_>, p: ParamId, dtype: DType) -> BufferId {
    let (g, _) = out.inputs.home[p.index()];
    let unit = out.inputs.group(g).unit;
    let bytes = out.inputs.tape.params[p.index()].numel() * dtype.size();
    let id = out.persistent(Role::Temporary, bytes, dtype, unit, Holds::Param(p));
    out.b.alloc(Rule::State, id);
    id
}
