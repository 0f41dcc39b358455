//! Rules for `[fsdp]`.

use super::{Checked, cannot, refuse};
use crate::config::{
    AllocatorKind, CudaGraph, GradientSync, Loss, MomentType, Optimizer, OuterStrategy, PolicyKind,
    Reshard, Scenario, Strategy, Variant,
};
use crate::ir::{AxisId, AxisSet};
use crate::policies;
use crate::policies::spec::{Rules, fully_compiled, joins_backwards};
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::shard::placements;

/// Refuses the first impossible combination.
pub(super) fn check(s: &Scenario, d: &Document, is_default: &dyn Fn(Key) -> bool) -> Checked {
    strategy(s, d)?;
    reshard(s, d)?;
    allocator(s, d)?;
    options(s, d, is_default)?;
    reduction(s, d)?;
    next_step(s, d)?;
    in_backward(s, d)?;
    in_optimizer(s, d)?;
    decoupled(s, d)?;
    no_grad_forwards(s, d)?;
    joint_backward(s, d)?;
    cast_before_all_gather(s, d)?;
    resharded_root(s, d)?;
    for key in [
        "mesh.dp_replicate",
        "train.recompute",
        "train.validate_every",
    ] {
        refuse(s, d, key)?;
    }
    refuse(s, d, "fsdp.reshard_after_backward")?;
    refuse(s, d, "fsdp.gradient_sync")
}

/// Refuses strategies that the schedule does not have, and outer ones that shard nothing.
fn strategy(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    refuse(s, d, "fsdp.strategy")?;
    hybrid(d)?;
    if f.outer_strategy == OuterStrategy::Optim {
        let keys = [Key::OuterStrategy, Key::Placements];
        if f.strategy != Strategy::OptimGradsParams {
            let keys = [Key::OuterStrategy, Key::Placements, Key::Strategy];
            return Err(d.conflict(&keys, "outer_strategy = \"optim\" splits the shards of optim_grads_params further; other strategies have none")
                .with_help("set strategy = \"optim_grads_params\", or outer_strategy = \"no_shard\""));
        }
        refuse(s, d, "fsdp.outer_strategy")?;
        if s.mesh.dp_outer == 1 {
            return Err(d
                .conflict(
                    &keys,
                    "outer_strategy = \"optim\" has nothing to shard over: `mesh.dp_replicate` is 1",
                )
                .with_help("set mesh.dp_replicate to 2 or more"));
        }
        if s.mesh.dp_shard == 1 {
            return Err(d
                .conflict(
                    &[Key::OuterStrategy, Key::Placements, Key::DpShard],
                    "outer_strategy = \"optim\" splits the shards of dp_shard further, but with dp_shard = 1 parameters are not sharded",
                )
                .with_help("shard over the inner axis instead: set mesh.dp_shard to the number of ranks and mesh.dp_replicate to 1"));
        }
    }
    Ok(())
}

/// Refuses PyTorch's names of strategies with replicas where no number of replicas is given. They
/// would mean the strategies without.
fn hybrid(d: &Document) -> Checked {
    let written = d.written(Key::Strategy).unwrap_or_default();
    if !written.contains("HYBRID_SHARD") || d.value(Key::DpOuter).is_some() {
        return Ok(());
    }
    let message = "HYBRID_SHARD has replicas, but `mesh.dp_replicate` is not set";
    let help = "set mesh.dp_replicate, for example to the number of nodes, or use FULL_SHARD";
    Err(d.conflict(&[Key::Strategy], message).with_help(help))
}

/// Refuses values of `reshard_after_forward` that the schedule does not have, and groups that do
/// not divide `dp_shard`.
fn reshard(s: &Scenario, d: &Document) -> Checked {
    refuse(s, d, "fsdp.reshard_after_forward")?;
    let Reshard::Group(n) = s.fsdp.reshard_after_forward else {
        return Ok(());
    };
    let ranks = s.mesh.dp_shard;
    if s.fsdp.strategy != Strategy::OptimGradsParams {
        let keys = [Key::Reshard, Key::Strategy, Key::Placements];
        return Err(d.conflict(
            &keys,
            "only optim_grads_params shards parameters; other strategies have nothing to reshard to a group",
        ));
    }
    if n == 1 {
        return Err(d
            .conflict(
                &[Key::Reshard],
                "a group of 1 rank keeps the full parameters",
            )
            .with_help("write false instead"));
    }
    if n == ranks {
        let message = format!("a group of {n} ranks is all of `dp_shard`");
        return Err(d
            .conflict(&[Key::Reshard, Key::DpShard], message)
            .with_help("write true instead"));
    }
    if !ranks.is_multiple_of(n) {
        let message = format!("groups of {n} ranks do not divide `dp_shard` = {ranks}");
        return Err(d.conflict(&[Key::Reshard, Key::DpShard], message));
    }
    Ok(())
}

/// Refuses combinations of the allocator and of host offload.
fn allocator(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.allocator == AllocatorKind::TracePool && f.variant != Variant::Pr4435 {
        let message = "only variant pr4435 of policy megatron_v2 has a trace pool";
        let keys = [Key::Allocator, Key::Policy, Key::Variant];
        return Err(d.conflict(&keys, message).with_help(
            "set policy = \"megatron_v2\" and variant = \"pr4435\", or another allocator",
        ));
    }
    refuse(s, d, "fsdp.allocator")?;
    refuse(s, d, "fsdp.offload")?;
    if f.offload.any() {
        let message = if f.strategy != Strategy::OptimGradsParams || s.mesh.dp_shard < 2 {
            "host offload moves shards: it needs strategy optim_grads_params over at least two ranks"
        } else if f.outer_strategy == OuterStrategy::Optim {
            "host offload keeps inner shards, but outer_strategy = \"optim\" splits them again"
        } else {
            ""
        };
        if !message.is_empty() {
            let keys = [
                Key::Offload,
                Key::Policy,
                Key::Strategy,
                Key::OuterStrategy,
                Key::Mode,
            ];
            return Err(d.conflict(&keys, message));
        }
    }
    if f.persist_on_alloc_fail && f.allocator != AllocatorKind::DoubleBuffer {
        let message = "`persist_on_alloc_fail` is an option of the double buffer, for units that do not fit it";
        return Err(d
            .conflict(&[Key::PersistOnAllocFail, Key::Allocator], message)
            .with_help("set allocator = \"double_buffer\""));
    }
    Ok(())
}

/// Refuses options that the schedule does not have.
fn options(s: &Scenario, d: &Document, is_default: &dyn Fn(Key) -> bool) -> Checked {
    for key in Key::of_section("fsdp").filter(|key| d.says(*key)) {
        let option = key.info().key;
        let has = |rules: &Rules| !policies::is_option(option) || rules.has(option);
        if policies::rules(s).all(has) || is_default(key) {
            continue;
        }
        let why = format!("is an option of {}", policies::with_option(option));
        return Err(cannot(
            d,
            key,
            &[Key::Policy, Key::Mode],
            &why,
            key.info().default,
        ));
    }
    Ok(())
}

/// Refuses gradients that are averaged and summed, NaN checks that the schedule does not have, and
/// reductions that copy engines cannot do.
fn reduction(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.average_in_collective && f.per_token_loss {
        let keys = [Key::AverageInCollective, Key::PerTokenLoss];
        return Err(d.conflict(&keys, "`average_in_collective` averages gradients over ranks, but `per_token_loss` needs their sum")
            .with_help("set one of the two to false"));
    }
    if f.gradient_scaling_factor.is_some() && (f.average_in_collective || f.per_token_loss) {
        let key = if f.per_token_loss {
            Key::PerTokenLoss
        } else {
            Key::AverageInCollective
        };
        let message = format!(
            "`{}` sets the factor of gradients, as `gradient_scaling_factor` does",
            key.info().key
        );
        return Err(d
            .conflict(&[Key::GradientScalingFactor, key], message)
            .with_help("leave one of the two out"));
    }
    refuse(s, d, "fsdp.nan_check")?;
    copy_engines(s, d)
}

fn copy_engines(s: &Scenario, d: &Document) -> Checked {
    let (f, m) = (&s.fsdp, &s.mesh);
    if f.copy_engine_reduce {
        exchange(s, d)?;
    }
    // Without communicators of their own, gathers and reductions are on engines together or not at
    // all.
    match (f.copy_engine_gather, f.copy_engine_reduce) {
        (false, false) => return Ok(()),
        (true, false) if !f.separate_communicators => {
            let message = "`copy_engine_all_gather` needs a communicator without reductions: copy engines cannot add";
            let keys = [Key::CopyEngineGather, Key::SeparateCommunicators];
            return Err(d
                .conflict(&keys, message)
                .with_help("set fsdp.separate_communicators = true"));
        }
        (false, true) if !f.separate_communicators => {
            let message = "`copy_engine_reduce_scatter` puts its communicator on copy engines, but gathers use the same communicator";
            let keys = [Key::CopyEngineReduce, Key::SeparateCommunicators];
            let help = "set fsdp.copy_engine_all_gather = true, or separate_communicators = true";
            return Err(d.conflict(&keys, message).with_help(help));
        }
        _ => {}
    }
    let mesh = s.device_mesh();
    let shard = mesh.group(AxisSet::of(AxisId::DP_SHARD));
    if shard.is_some_and(|g| g.nodes(mesh.world(), m.gpus_per_node) > 1) {
        let (name, key) = if f.copy_engine_gather {
            ("copy_engine_all_gather", Key::CopyEngineGather)
        } else {
            ("copy_engine_reduce_scatter", Key::CopyEngineReduce)
        };
        let message = format!(
            "`{name}` works within a node: groups of dp_shard = {} ranks cross nodes of {} GPUs",
            m.dp_shard, m.gpus_per_node
        );
        return Err(d
            .conflict(&[key, Key::DpShard], message)
            .with_help("shard within the node (dp_replicate over nodes), or leave it off"));
    }
    Ok(())
}

/// Refuses exchanges of gradients where the schedule has none, or where there are no shards to sum.
fn exchange(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if !placements::grad_sharded(f.strategy) {
        let message = "`copy_engine_reduce_scatter` sums shards, but with this strategy gradients are not sharded";
        return Err(d
            .conflict(&[Key::CopyEngineReduce, Key::Strategy], message)
            .with_help("use strategy optim_grads or optim_grads_params"));
    }
    Ok(())
}

/// Refuses gathers for the next step where the end of a step cannot have them.
fn next_step(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.prefetch_next_step == 0 {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if !placements::weight_sharded(f.strategy) {
        (
            &[Key::Strategy],
            "gathers sharded weights, but with this strategy weights are not sharded",
        )
    } else if f.offload.any() {
        (
            &[Key::Offload],
            "gathers weights that the optimizer has just updated on the device, but `offload` moves them to the host",
        )
    } else if s.compile.cuda_graph == CudaGraph::FullIteration {
        (
            &[Key::CudaGraph],
            "makes the first step start with a gather that later steps do not have, which a captured iteration cannot replay",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::PrefetchNextStep, keys, why, "0"))
}

/// Refuses updates in backward that need values that are only known later.
fn in_backward(s: &Scenario, d: &Document) -> Checked {
    let (f, t) = (&s.fsdp, &s.train);
    if !f.optimizer_in_backward {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if t.clip_norm > 0.0 {
        (
            &[Key::ClipNorm],
            "updates weights before `clip_norm` knows the global gradient norm",
        )
    } else if t.grad_norm {
        (
            &[Key::GradNorm],
            "frees gradients before `grad_norm` could sum them",
        )
    } else if f.offload.any() {
        (
            &[Key::Offload],
            "needs state that stays on the device, but `offload` moves it to the host",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::OptimizerInBackward, keys, why, "false"))
}

/// Refuses passes without gradients where the first pass of a step gathers weights for all.
fn no_grad_forwards(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    let once = matches!(f.strategy, Strategy::Optim | Strategy::OptimGrads);
    if s.train.no_grad_forwards == 0 {
        return Ok(());
    }
    refuse(s, d, "train.no_grad_forwards")?;
    if f.prefetch_next_step > 0 {
        let why = "is not modeled with `prefetch_next_step`, whose units are those of a forward that \
                   backward follows";
        let keys = [Key::PrefetchNextStep];
        return Err(cannot(d, Key::NoGradForwards, &keys, why, "0"));
    }
    if !once || f.policy == PolicyKind::Fsdp2 {
        return Ok(());
    }
    let why = "is not modeled with replicated weights of which ranks update parts: their first forward \
               in a step gathers them for all others";
    Err(cannot(d, Key::NoGradForwards, &[Key::Strategy], why, "0"))
}

/// Refuses joint backwards that the engine or the schedule does not have.
fn joint_backward(s: &Scenario, d: &Document) -> Checked {
    let (t, f) = (&s.train, &s.fsdp);
    if !joins_backwards(s) {
        return Ok(());
    }
    if fully_compiled(s) {
        let why = "is not modeled with compile mode full, whose graphs have one forward each";
        return Err(cannot(d, Key::JointBackward, &[Key::Mode], why, "false"));
    }
    refuse(s, d, "train.joint_backward")?;
    let (keys, why): (&[Key], _) = if t.activation_offload {
        (
            &[Key::ActivationOffload],
            "is not modeled with `activation_offload`, which moves the activations of one forward",
        )
    } else if f.gradient_sync == GradientSync::Last || !f.no_sync_units.is_empty() {
        (
            &[Key::GradientSync, Key::NoSyncUnits],
            "reduces once anyway: `gradient_sync` = \"last\" and `no_sync_units` have no effect",
        )
    } else if t.loss == Loss::Chunked {
        (
            &[Key::Loss],
            "is not built for `loss` = \"chunked\", which computes gradients of the head in each forward",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::JointBackward, keys, why, "false"))
}

/// Refuses decoupled gradients for optimizers other than FusedAdam.
fn decoupled(s: &Scenario, d: &Document) -> Checked {
    let t = &s.train;
    if !s.fsdp.decoupled_gradients {
        return Ok(());
    }
    let (key, why) = if t.optimizer != Optimizer::Adamw {
        (
            Key::Optimizer,
            "needs FusedAdam: no other optimizer reads `decoupled_grad`",
        )
    } else if s.precision.moments == MomentType::Block8 {
        (
            Key::Moments,
            "needs FusedAdam, which has no blockwise 8-bit states",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::DecoupledGradients, &[key], why, "false"))
}

/// Refuses to leave sums to the optimizer where something else needs them first.
fn in_optimizer(s: &Scenario, d: &Document) -> Checked {
    let (f, t) = (&s.fsdp, &s.train);
    if !f.sum_in_optimizer {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if !f.copy_engine_reduce {
        (
            &[Key::CopyEngineReduce],
            "sums the pieces that `copy_engine_reduce_scatter` exchanges, but that option is off",
        )
    } else if t.grad_accum > 1 {
        (
            &[Key::GradAccum],
            "keeps the pieces of one micro-batch, but with `grad_accum` their sums have to be accumulated",
        )
    } else if s.mesh.dp_outer > 1 {
        (
            &[Key::DpOuter],
            "produces no sums that could be reduced over `dp_replicate`",
        )
    } else if t.clip_norm > 0.0 {
        (
            &[Key::ClipNorm],
            "produces no summed gradients, whose norm `clip_norm` needs",
        )
    } else if t.grad_norm {
        (
            &[Key::GradNorm],
            "produces no summed gradients, whose norm `grad_norm` needs",
        )
    } else if f.offload.grads {
        (
            &[Key::Offload],
            "keeps unsummed gradients on the device, but `offload` moves summed ones to the host",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::SumInOptimizer, keys, why, "false"))
}

/// Refuses casts before gathers where there are no shards to cast.
fn cast_before_all_gather(s: &Scenario, d: &Document) -> Checked {
    match no_shards_to_cast(s) {
        Some((keys, why)) if s.fsdp.cast_before_all_gather => {
            Err(cannot(d, Key::CastBeforeAllGather, keys, why, "false"))
        }
        _ => Ok(()),
    }
}

/// Returns why ranks have no whole shards of main weights on the device that could be cast before a
/// gather, with the keys that decide; `None` if they have.
pub(super) fn no_shards_to_cast(s: &Scenario) -> Option<(&'static [Key], &'static str)> {
    let (f, p) = (&s.fsdp, &s.precision);
    Some(if !placements::weight_sharded(f.strategy) {
        (
            &[Key::Strategy],
            "casts sharded weights, but with this strategy weights are not sharded",
        )
    } else if p.main_params.is_none_or(|main| main == p.compute) {
        (
            &[Key::MainParams, Key::Compute],
            "casts main weights, but there are none in a type other than param_dtype",
        )
    } else if f.outer_strategy == OuterStrategy::Optim {
        (
            &[Key::OuterStrategy],
            "casts whole shards, but with this outer strategy a rank has main weights of a part of its shard",
        )
    } else if f.offload.any() {
        (
            &[Key::Offload],
            "reads main weights on the device, but `offload` moves state to the host",
        )
    } else {
        return None;
    })
}

/// Refuses to reshard the root where the schedule keeps it.
fn resharded_root(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if !f.reshard_root {
        return Ok(());
    }
    if f.reshard_after_forward == Reshard::Never {
        let why = "= true has no effect: it applies `reshard_after_forward` to the root, and that does nothing here";
        return Err(cannot(d, Key::ReshardRoot, &[Key::Reshard], why, "false"));
    }
    Ok(())
}
