//! Inputs of lowering: the scenario, its tape, its units and groups, and values derived from these.

use super::engine::Engine;
use crate::compile::tape::{Tape, TapeOp};
use crate::config::pattern::matches;
use crate::config::{AllocatorKind, OuterStrategy, Prefetch, Reshard, Scenario, Strategy};
use crate::ir::{
    Access, AxisId, AxisSet, DType, DeviceMesh, GroupId, ModuleId, ModuleKind, OpKind, ParamId,
    Place, Placements, Pool, ScaleBlock, Source, StorageId, UnitId,
};
use crate::models::parameter_count;
use crate::program::ProgramMeta;
use crate::recipes::{self, ParamTypes};
use crate::shard::{Group, Layout, UnitSpec, placements};
use std::collections::BTreeSet;

/// A unit with the properties that policies use.
#[derive(Clone, Debug)]
pub(crate) struct UnitPlan {
    pub(crate) spec: UnitSpec,
    /// All of its groups, including those that the policy does not manage.
    pub(crate) groups: Vec<GroupId>,
    /// Whether full weights are freed after forward.
    pub(crate) reshards: bool,
    /// Number of elements of its full buffers.
    pub(crate) numel: u64,
    /// Number of parameters that the policy manages.
    pub(crate) params: u16,
}

/// Hooks of units that fire at a module.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hooks {
    /// Unit whose forward starts when this module is entered. Its backward ends when the module is
    /// left.
    pub(crate) first_of: Option<UnitId>,
    /// Unit whose forward ends when this module is left. Its backward starts when the module is
    /// entered.
    pub(crate) last_of: Option<UnitId>,
}

/// Inputs of lowering: the scenario and values derived from it. Policies only read them.
pub(crate) struct LoweringInputs<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) engine: &'a Engine,
    /// Dtypes in which the state of parameters is kept and sent.
    pub(crate) types: ParamTypes,
    pub(crate) tape: &'a Tape,
    pub(crate) units: Vec<UnitPlan>,
    pub(crate) groups: Vec<Group>,
    /// Hooks by module.
    pub(crate) hooks: Vec<Hooks>,
    /// Units with parameters, in the order in which forward first enters them.
    pub(crate) forward_order: Vec<UnitId>,
    /// Units with parameters, in the order in which backward first enters them.
    pub(crate) backward_order: Vec<UnitId>,
    /// Units with parameters, in the order in which forward enters them. A unit occurs several
    /// times if a forward uses it several times.
    pub(crate) forward_uses: Vec<UnitId>,
    /// The same for backward.
    pub(crate) backward_uses: Vec<UnitId>,
    /// Whether a micro-batch uses a unit, by micro-batch and unit; empty if all micro-batches use
    /// all units.
    used: Vec<Vec<bool>>,
    /// Group of each parameter, and its index in the group.
    pub(crate) home: Vec<(GroupId, u32)>,
    /// The device mesh.
    pub(crate) mesh: DeviceMesh,
    /// Size of the outer axis.
    pub(crate) outer: u32,
    /// Strategy in effect for groups that are sharded over all ranks of the inner axis; see
    /// [`LoweringInputs::strategy_of`].
    pub(crate) strategy: Strategy,
    /// Pool of transient full-size buffers.
    pub(crate) transient_pool: Pool,
    /// Pool of all other buffers.
    pub(crate) persistent_pool: Pool,
}

impl<'a> LoweringInputs<'a> {
    pub(crate) fn new(
        scenario: &'a Scenario,
        engine: &'a Engine,
        tape: &'a Tape,
        specs: Vec<UnitSpec>,
        groups: Vec<Group>,
    ) -> Self {
        let mesh = scenario.device_mesh();
        let strategy = strategy(scenario, engine);
        let last_block = last_block(&specs);
        let mut home = vec![(GroupId(0), 0); tape.params.len()];
        for (g, group) in groups.iter().enumerate() {
            for (i, p) in group.params.iter().enumerate() {
                home[p.index()] = (GroupId(g as u16), i as u32);
            }
        }
        let units: Vec<UnitPlan> = specs
            .into_iter()
            .enumerate()
            .map(|(u, spec)| {
                let own: Vec<GroupId> = groups
                    .iter()
                    .enumerate()
                    .filter(|(_, g)| g.unit.index() == u)
                    .map(|(g, _)| GroupId(g as u16))
                    .collect();
                let root = scenario.fsdp.reshard_root || engine.reshards_root;
                let sharded = placements::weight_sharded(strategy) || engine.shards_params;
                let reshards = sharded
                    && (!spec.is_root || root)
                    && !spec.keep
                    && match scenario.fsdp.reshard_after_forward {
                        Reshard::Always | Reshard::Group(_) => true,
                        Reshard::Never => false,
                        Reshard::Auto => Some(u) != last_block,
                    };
                let managed = || {
                    own.iter()
                        .map(|g| &groups[g.index()])
                        .filter(|g| !g.ignored)
                };
                UnitPlan {
                    reshards,
                    numel: managed().map(|g| g.layout.full_numel()).sum(),
                    params: managed().map(|g| g.params.len() as u16).sum(),
                    groups: own,
                    spec,
                }
            })
            .collect();
        let hooks = hooks(&units, tape.modules.len());
        let (transient_pool, persistent_pool) = pools(scenario, engine);
        let mut inputs = Self {
            scenario,
            engine,
            types: recipes::of(&scenario.precision).param_types(),
            tape,
            forward_order: Vec::new(),
            backward_order: Vec::new(),
            forward_uses: Vec::new(),
            backward_uses: Vec::new(),
            used: Vec::new(),
            units,
            groups,
            hooks,
            home,
            mesh,
            outer: mesh.size(AxisId::DP_OUTER),
            strategy,
            transient_pool,
            persistent_pool,
        };
        inputs.forward_uses = inputs.entries(&tape.forward, |h| h.first_of);
        inputs.backward_uses = inputs.entries(&tape.backward, |h| h.last_of);
        inputs.forward_order = inputs.each_once(&inputs.forward_uses);
        inputs.backward_order = inputs.each_once(&inputs.backward_uses);
        let micro_batches = 0..tape.variant_of.len();
        inputs.used = micro_batches.map(|m| inputs.used_by(m)).collect();
        inputs
    }

    /// Returns the metadata of the program.
    pub(crate) fn meta(&self) -> ProgramMeta {
        let scenario = self.scenario;
        let mesh = &scenario.mesh;
        let accum = u64::from(scenario.train.grad_accum);
        ProgramMeta {
            scenario: scenario.name.clone(),
            policy: scenario.fsdp.policy.name(),
            hardware: mesh.hardware.clone(),
            mesh: self.mesh,
            gpus_per_node: mesh.gpus_per_node,
            micro_batches: scenario.train.grad_accum as u16,
            tokens: self.tape.tokens * accum,
            model_flops: self.tape.step_flops(scenario.train.grad_accum),
            parameters: parameter_count(&scenario.model, &self.tape.params, &self.mesh),
            deterministic: scenario.precision.deterministic,
            gradient_factor: scenario.fsdp.gradient_scaling_factor,
            attention_backend: scenario.train.attention_backend,
            expandable_segments: scenario.fsdp.expandable_segments,
            reduce_in_flight: scenario.fsdp.reduce_in_flight,
            validate_every: scenario.train.validate_every,
            steps: scenario.train.steps,
            compute: self.types.compute,
        }
    }

    /// Returns the units with managed parameters that a pass enters, in order. `of` returns the
    /// unit that starts at a module.
    pub(crate) fn entries(
        &self,
        ops: &[TapeOp],
        of: impl Fn(&Hooks) -> Option<UnitId>,
    ) -> Vec<UnitId> {
        let unit = |op: &TapeOp| match op {
            TapeOp::Enter(m) => of(&self.hooks[m.index()]),
            _ => None,
        };
        let units = ops.iter().filter_map(unit);
        units.filter(|u| self.is_managed(*u)).collect()
    }

    fn each_once(&self, units: &[UnitId]) -> Vec<UnitId> {
        let mut seen = vec![false; self.units.len()];
        let mut order = units.to_vec();
        order.retain(|u| !std::mem::replace(&mut seen[u.index()], true));
        order
    }

    /// Returns which units a micro-batch uses: those whose forward it runs.
    fn used_by(&self, micro_batch: usize) -> Vec<bool> {
        let run = self.entries(self.tape.forward_of(micro_batch), |h| h.first_of);
        let mut used = vec![true; self.units.len()];
        for u in self.forward_order.iter().filter(|u| !run.contains(u)) {
            used[u.index()] = false;
        }
        used
    }

    /// Returns whether any micro-batch skips a unit.
    pub(crate) fn skips_units(&self) -> bool {
        !self.used.is_empty()
    }

    /// Returns whether the training passes of a micro-batch use a unit.
    pub(crate) fn uses(&self, micro_batch: u16, u: UnitId) -> bool {
        let used = self.used.get(usize::from(micro_batch));
        used.is_none_or(|used| used[u.index()])
    }

    /// Returns the micro-batches that use a unit.
    pub(crate) fn uses_of(&self, u: UnitId) -> impl DoubleEndedIterator<Item = u16> {
        let micro_batches = 0..self.scenario.train.grad_accum as u16;
        micro_batches.filter(move |&m| self.uses(m, u))
    }

    /// Returns the micro-batches that skip a unit.
    pub(crate) fn skips_of(&self, u: UnitId) -> impl Iterator<Item = u16> {
        let micro_batches = 0..self.used.len() as u16;
        micro_batches.filter(move |&m| !self.uses(m, u))
    }

    /// Returns the units that a micro-batch skips, in the order of their modules.
    pub(crate) fn unused(&self, micro_batch: u16) -> Vec<UnitId> {
        let all = (0..self.units.len() as u16).map(UnitId);
        let mut units: Vec<UnitId> = all.filter(|u| !self.uses(micro_batch, *u)).collect();
        units.sort_by_key(|u| self.unit(*u).spec.modules.first().copied());
        units
    }

    pub(crate) fn unit(&self, u: UnitId) -> &UnitPlan {
        &self.units[u.index()]
    }

    pub(crate) fn group(&self, g: GroupId) -> &Group {
        &self.groups[g.index()]
    }

    /// Returns the dtype in which a group's weights are gathered.
    pub(crate) fn gathered_type(&self, g: GroupId) -> DType {
        let group = self.group(g);
        match group.is_float8() {
            true => DType::F8E4m3,
            false => self.graph_type_of(group.params[0]),
        }
    }

    /// Returns the blocks of weights that ranks gather with a scale per block; `None` if gathers
    /// have one scale per tensor, or no codes.
    pub(crate) fn scale_block(&self) -> Option<ScaleBlock> {
        recipes::gathered_block(&self.scenario.precision.float8)
    }

    /// Returns the dtype in which the model reads a parameter and backward writes its gradient.
    pub(crate) fn graph_type_of(&self, p: ParamId) -> DType {
        match self.tape.params[p.index()].router_bias {
            true => DType::F32,
            false => self.types.compute,
        }
    }

    /// Returns the dtype in which a parameter is gathered.
    pub(crate) fn gathered_type_of(&self, p: ParamId) -> DType {
        let (g, i) = self.home[p.index()];
        match self.group(g).scale(i as usize) {
            Some(_) => DType::F8E4m3,
            None => self.graph_type_of(p),
        }
    }

    /// Returns the placements that all parameters of a group share.
    fn placements(&self, g: GroupId) -> Placements {
        let first = self.group(g).params[0];
        self.tape.params[first.index()].placements
    }

    /// Returns the model-parallel axes along which ranks have different parameters of this group.
    pub(crate) fn divided(&self, g: GroupId) -> AxisSet {
        self.placements(g).divided()
    }

    /// Returns the inner axis over which a group is sharded.
    pub(crate) fn shard_axis(&self, g: GroupId) -> AxisId {
        placements::shard_axis(self.placements(g))
    }

    /// Returns the number of ranks of the inner axis.
    pub(crate) fn ranks(&self) -> u32 {
        self.mesh.size(AxisId::DP_SHARD)
    }

    /// Returns the number of ranks over which a group is sharded.
    pub(crate) fn inner(&self, g: GroupId) -> u32 {
        self.mesh.size(self.shard_axis(g))
    }

    /// Returns the number of ranks over which the model has already summed a group's gradient:
    /// those that send tokens to the group's experts.
    pub(crate) fn summed_by_model(&self, g: GroupId) -> u32 {
        self.ranks() / self.inner(g)
    }

    /// Returns whether the optimizer's kernel sums the pieces of a group's gradient that ranks
    /// exchange.
    pub(crate) fn sums_in_optimizer(&self, g: GroupId) -> bool {
        self.scenario.sums_in_optimizer() && self.inner(g) > 1 && !self.group(g).router_biases
    }

    /// Returns the strategy in effect for a group. An axis with one rank shards nothing, and router
    /// biases are replicated on all ranks.
    pub(crate) fn strategy_of(&self, g: GroupId) -> Strategy {
        if self.inner(g) == 1 || self.group(g).router_biases {
            Strategy::NoShard
        } else {
            self.strategy
        }
    }

    /// Returns whether the gradients of a group in a micro-batch are reduced over `dp_shard` (or,
    /// with `outer`, over `dp_replicate`). `last` means that it is the last micro-batch of the
    /// step.
    pub(crate) fn reduces(&self, g: GroupId, outer: bool, last: bool) -> bool {
        if self.scenario.train.joint_backward {
            return last;
        }
        let fsdp = &self.scenario.fsdp;
        let unit = &self.unit(self.group(g).unit).spec.name;
        let waits = fsdp.no_sync_units.iter().any(|glob| matches(glob, unit));
        last || !waits && fsdp.reduces(outer, last)
    }

    /// Returns, by unit, whether a trained parameter precedes the unit in forward. One of its
    /// inputs then needs a gradient, so PyTorch can run a hook after its backward.
    pub(crate) fn units_after_trained(&self) -> Vec<bool> {
        let mut after = vec![false; self.units.len()];
        let mut trained = false;
        for op in &self.tape.forward {
            match *op {
                TapeOp::Enter(m) => {
                    if let Some(unit) = self.hooks[m.index()].first_of {
                        after[unit.index()] = trained;
                    }
                }
                TapeOp::Launch { reads, writes, .. } => {
                    let operands = &self.tape.operands[reads as usize..writes as usize];
                    trained |= operands.iter().any(|o| match o.source {
                        Source::Param(p) => self.tape.params[p.index()].requires_grad,
                        _ => false,
                    });
                }
                _ => {}
            }
        }
        after
    }

    /// Returns the groups in the order of their first parameters, as an optimizer gets them from
    /// `Module.parameters`.
    pub(crate) fn groups_by_param(&self) -> Vec<GroupId> {
        let mut groups: Vec<GroupId> = self.group_ids().collect();
        groups.sort_by_key(|g| self.group(*g).params.first().copied());
        groups
    }

    /// Returns the groups of a unit that the policy manages.
    pub(crate) fn groups_of(&self, u: UnitId) -> Vec<GroupId> {
        self.managed(u).collect()
    }

    /// Returns those of them that are trained.
    pub(crate) fn trained_groups_of(&self, u: UnitId) -> Vec<GroupId> {
        let trained = |g: &GroupId| self.group(*g).requires_grad;
        self.managed(u).filter(trained).collect()
    }

    /// Returns whether the policy manages any parameter of a unit. The hooks of other units have
    /// nothing to do.
    pub(crate) fn is_managed(&self, u: UnitId) -> bool {
        self.managed(u).next().is_some()
    }

    fn managed(&self, u: UnitId) -> impl Iterator<Item = GroupId> {
        let groups = self.units[u.index()].groups.iter().copied();
        groups.filter(|g| !self.group(*g).ignored)
    }

    pub(crate) fn group_ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.groups.len() as u16).map(GroupId)
    }

    /// Returns the offset of a parameter in its group's flat buffer, in elements.
    pub(crate) fn flat_offset(&self, p: ParamId) -> u64 {
        let (g, i) = self.home[p.index()];
        match &self.group(g).layout {
            Layout::Flat(l) => l.items[i as usize].offset,
            Layout::PerParam(_) => 0,
        }
    }

    /// Returns the place of a parameter within a range that has its whole flat group in a dtype.
    pub(crate) fn flat_place(&self, p: ParamId, group: Access, dtype: DType) -> Access {
        Access {
            offset: group.offset + self.flat_offset(p) * dtype.size(),
            bytes: self.tape.params[p.index()].numel() * dtype.size(),
            ..group
        }
    }

    /// Returns the number of ranks over which gradients are averaged.
    pub(crate) fn data_ranks(&self) -> u32 {
        self.mesh.data_ranks()
    }

    /// Returns the storages of transposed copies of weights that ranks gather in 8 bits, if these
    /// copies stay in memory.
    pub(crate) fn kept_transposes(&self) -> BTreeSet<StorageId> {
        let (mut all, tape) = (BTreeSet::new(), self.tape);
        if !self.scenario.fsdp.keep_fp8_transpose_cache {
            return all;
        }
        for op in &tape.backward {
            let TapeOp::Launch {
                kernel,
                reads,
                writes,
                end,
            } = *op
            else {
                continue;
            };
            let reads = &tape.operands[reads as usize..writes as usize];
            let writes = &tape.operands[writes as usize..end as usize];
            for op in &tape.kernels[kernel.index()].body {
                let ([from], [to]) = (&op.inputs[..], &op.outputs[..]) else {
                    continue;
                };
                let (Place::Read(from_at), Place::Write(to_at)) = (from.place, to.place) else {
                    continue;
                };
                let sources = (
                    reads[usize::from(from_at)].source,
                    writes[usize::from(to_at)].source,
                );
                if let (OpKind::Copy, Source::Param(_), Source::Storage(copy)) =
                    (op.op, sources.0, sources.1)
                    && from.dtype.is_float8()
                {
                    all.insert(copy);
                }
            }
        }
        all
    }

    pub(crate) fn module_kind(&self, m: ModuleId) -> ModuleKind {
        self.tape.modules[m.index()].kind
    }
}

/// Returns the strategy in effect for the scenario.
fn strategy(scenario: &Scenario, engine: &Engine) -> Strategy {
    if scenario.mesh.dp_shard == 1 {
        Strategy::NoShard
    } else if engine.shards_params {
        Strategy::OptimGradsParams
    } else {
        scenario.fsdp.strategy
    }
}

/// Returns whether the outer axis shards the optimizer's state.
pub(crate) fn outer_optim(scenario: &Scenario) -> bool {
    scenario.mesh.dp_outer > 1 && scenario.fsdp.outer_strategy == OuterStrategy::Optim
}

/// Returns whether no axis shards anything, so that each parameter has a separate buffer.
pub(crate) fn params_apart(scenario: &Scenario, engine: &Engine) -> bool {
    strategy(scenario, engine) == Strategy::NoShard && !outer_optim(scenario)
}

fn last_block(specs: &[UnitSpec]) -> Option<usize> {
    specs
        .iter()
        .enumerate()
        .filter(|(_, s)| s.is_block)
        .max_by_key(|(_, s)| s.modules[0])
        .map(|(i, _)| i)
}

fn hooks(units: &[UnitPlan], modules: usize) -> Vec<Hooks> {
    let mut hooks = vec![Hooks::default(); modules];
    for (u, unit) in units.iter().enumerate() {
        let id = UnitId(u as u16);
        if let (Some(first), Some(last)) = (unit.spec.modules.first(), unit.spec.modules.last()) {
            hooks[first.index()].first_of = Some(id);
            hooks[last.index()].last_of = Some(id);
        }
    }
    hooks
}

fn pools(scenario: &Scenario, engine: &Engine) -> (Pool, Pool) {
    let planned = scenario.fsdp.allocator == AllocatorKind::Pool;
    let persistent = if engine.plans_persistent && planned {
        Pool::Planned
    } else {
        Pool::Caching
    };
    let transient = match scenario.fsdp.allocator {
        AllocatorKind::Pool => Pool::Planned,
        AllocatorKind::DoubleBuffer => Pool::DoubleBuffer,
        AllocatorKind::TracePool => Pool::Traced,
        AllocatorKind::Caching | AllocatorKind::Temporary => Pool::Caching,
    };
    (transient, persistent)
}

/// Returns the units that the first unit of `order` prefetches in a micro-batch, based on a list of
/// the scenario or on the rule of the direction. `order` is the order of the direction, starting
/// with this unit. `implicit` is the depth of [`Prefetch::Implicit`], counted over used units.
pub(crate) fn prefetch_targets(
    inputs: &LoweringInputs<'_>,
    order: &[UnitId],
    (micro_batch, backward): (u16, bool),
    implicit: u32,
) -> Vec<UnitId> {
    let Some((&unit, later)) = order.split_first() else {
        return Vec::new();
    };
    prefetch_list(inputs, unit, later, backward)
        .unwrap_or_else(|| prefetch_rule(inputs, later, (micro_batch, backward), implicit))
}

/// Returns the units that `unit` prefetches according to a list of the scenario, in the order of
/// the list; `None` if it has no list for the direction.
fn prefetch_list(
    inputs: &LoweringInputs<'_>,
    unit: UnitId,
    later: &[UnitId],
    backward: bool,
) -> Option<Vec<UnitId>> {
    let lists = &inputs.scenario.fsdp.prefetch_lists;
    let name = |u: UnitId| inputs.unit(u).spec.name.as_str();
    let mut of_unit = lists.iter().filter(|l| matches(&l.unit, name(unit)));
    let targets = of_unit.find_map(|l| l.targets(backward))?;
    let found = targets.iter().flat_map(|glob| {
        let later = later.iter().copied();
        later.filter(move |u| matches(glob, name(*u)))
    });
    Some(found.collect())
}

/// Returns the units that the prefetch rule of a direction covers.
fn prefetch_rule(
    inputs: &LoweringInputs<'_>,
    later: &[UnitId],
    (micro_batch, backward): (u16, bool),
    implicit: u32,
) -> Vec<UnitId> {
    let fsdp = &inputs.scenario.fsdp;
    let rule = if backward {
        fsdp.prefetch_backward
    } else {
        fsdp.prefetch_forward
    };
    let first = |n: u32| later.iter().take(n as usize).copied().collect();
    match rule {
        Prefetch::Implicit => {
            let used = later.iter().filter(|u| inputs.uses(micro_batch, **u));
            used.take(implicit as usize).copied().collect()
        }
        Prefetch::Depth(d) => first(d),
        Prefetch::Elements(budget) => {
            let mut left = i128::from(budget);
            later
                .iter()
                .take_while(|u| {
                    let go = left > 0;
                    left -= i128::from(inputs.unit(**u).numel);
                    go
                })
                .copied()
                .collect()
        }
    }
}
