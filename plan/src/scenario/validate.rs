//! Combinations that cannot be, each with its reason and the place that caused it.

use super::error::ScenarioError;
use super::keys::Key;
use super::limits;
use super::merge::Document;
use super::modules;
use super::read;
use super::value::Value;
use crate::config::*;
use crate::models::{FamilySpec, Inputs};
use crate::shard::mesh;

/// Most ranks of a mesh.
pub(crate) const MOST_RANKS: u64 = 1 << 20;

type Checked = Result<(), ScenarioError>;

/// Refuses the first impossible combination.
pub(crate) fn check(s: &Scenario, d: &Document) -> Checked {
    unused_keys(s, d)?;
    model(s, d)?;
    modules::check(s, d)?;
    train(s, d)?;
    mesh(s, d)?;
    strategy(s, d)?;
    reshard(s, d)?;
    allocator(s, d)?;
    reduction(s, d)?;
    next_step(s, d)?;
    in_backward(s, d)?;
    in_optimizer(s, d)?;
    resharded_root(s, d)?;
    kept_parameters(s, d)?;
    gradient_sync(s, d)?;
    compile(s, d)?;
    idle_keys(s, d)?;
    limits::check(s, d)
}

/// Keys of [model] that mean nothing for the family: silence would hide a mistake.
fn unused_keys(s: &Scenario, d: &Document) -> Checked {
    let family = s.model.family;
    for key in Key::of_section("model") {
        let info = key.info();
        let belongs = |spec: &FamilySpec| spec.has(info.key);
        let others = || Family::named_all().filter(|(_, f)| belongs(f.spec()));
        if !d.says(key) || belongs(family.spec()) || others().count() == 0 {
            continue;
        }
        let of: Vec<&str> = others().map(|(name, _)| name).collect();
        let message = format!(
            "`{}` does not apply to family {}",
            key.path(),
            family.name()
        );
        return Err(d
            .conflict(&[key], message)
            .with_help(format!("it belongs to {}", of.join(", "))));
    }
    Ok(())
}

/// Keys that are set to what changes nothing under this policy, mode or mesh: silence would hide a mistake. Where a later text than the
/// key's own chose the policy, the mode or the mesh, there is none: bases are shared.
fn idle_keys(s: &Scenario, d: &Document) -> Checked {
    const FULL: &str =
        "in compile mode full, the graph alone orders collectives, bounded by `max_inflight_bytes`";
    const STREAMS: &str = "compile mode full has one stream for gathers and one for reductions";
    const ONE_RANK: &str = "with dp_shard = 1, nothing is gathered or reduced";
    const ONE_BATCH: &str = "with train.grad_accum = 1, the only micro-batch is also the last";
    const BUCKETS: &str = "only compile mode full buckets collectives";
    let (f, c, t) = (&s.fsdp, &s.compile, &s.train);
    let full = c.mode == CompileMode::Full;
    let alone = s.mesh.dp_shard == 1;
    let prefetch = read::prefetch_default(f.policy);
    let deep = f.reduce_in_flight != read::in_flight_default(f.policy);
    let workspace = d
        .value(Key::CublasWorkspaceBytes)
        .and_then(Value::bytes)
        .is_some_and(|bytes| bytes > 0);
    let once = t.grad_accum == 1;
    let rows: [(Key, bool, Key, &str); 20] = [
        (
            Key::PrefetchForward,
            full && f.prefetch_forward != prefetch,
            Key::Mode,
            FULL,
        ),
        (
            Key::PrefetchBackward,
            full && f.prefetch_backward != prefetch,
            Key::Mode,
            FULL,
        ),
        (Key::ReduceInFlight, full && deep, Key::Mode, FULL),
        (
            Key::AsyncReduce,
            full && !f.async_reduce,
            Key::Mode,
            STREAMS,
        ),
        (
            Key::UnifyCommStream,
            full && f.unify_comm_stream,
            Key::Mode,
            STREAMS,
        ),
        (
            Key::Reshard,
            full && f.reshard_after_forward == Reshard::Auto,
            Key::Mode,
            "compile mode full frees every parameter after its last use, or none (false)",
        ),
        (
            Key::ReduceInFlight,
            deep && f.policy == PolicyKind::Megatron,
            Key::Policy,
            "policy megatron bounds gradients in flight by elements, not buffers",
        ),
        (
            Key::ReshardAfterBackward,
            once && !f.reshard_after_backward,
            Key::GradAccum,
            ONE_BATCH,
        ),
        (
            Key::GradientSync,
            once && f.gradient_sync != read::gradient_sync_default(f.policy),
            Key::GradAccum,
            ONE_BATCH,
        ),
        (
            Key::PrefetchNextStep,
            alone && f.prefetch_next_step > 0,
            Key::DpShard,
            ONE_RANK,
        ),
        (
            Key::CopyEngineGather,
            alone && f.copy_engine_gather,
            Key::DpShard,
            ONE_RANK,
        ),
        (
            Key::CopyEngineReduce,
            alone && f.copy_engine_reduce,
            Key::DpShard,
            ONE_RANK,
        ),
        (
            Key::SumInOptimizer,
            alone && f.sum_in_optimizer,
            Key::DpShard,
            ONE_RANK,
        ),
        (
            Key::CublasWorkspaceBytes,
            workspace && f.policy == PolicyKind::Native,
            Key::Policy,
            "policy native plans the workspace of its matmuls with its kernels",
        ),
        (
            Key::CublasWorkspaceBytes,
            workspace && s.mesh.hardware == "cpu",
            Key::Hardware,
            "hardware `cpu` has no cuBLAS",
        ),
        (
            Key::RecomputeLayers,
            t.recompute == Recompute::None && t.recompute_layers != RecomputeLayers::All,
            Key::Recompute,
            "nothing is recomputed",
        ),
        (
            Key::LossChunkRows,
            t.loss == Loss::Materialized && t.loss_chunk_rows != read::LOSS_CHUNK_ROWS,
            Key::Loss,
            "only the chunked loss has chunks",
        ),
        (
            Key::BucketBytes,
            !full && c.bucket_bytes != read::BUCKET_BYTES,
            Key::Mode,
            BUCKETS,
        ),
        (
            Key::MaxInflightBytes,
            !full && c.max_inflight_bytes != read::MAX_INFLIGHT_BYTES,
            Key::Mode,
            BUCKETS,
        ),
        (
            Key::MemoryBudget,
            !full && c.memory_budget != read::MEMORY_BUDGET,
            Key::Mode,
            BUCKETS,
        ),
    ];
    for (key, idle, by, why) in rows {
        if idle && d.says(key) && d.layer(by) <= d.layer(key) {
            let message = format!("`{}` has no effect here: {why}", key.info().key);
            return Err(d
                .conflict(&[key, by], message)
                .with_help(format!("leave it out, or change {}", by.path())));
        }
    }
    Ok(())
}

fn model(s: &Scenario, d: &Document) -> Checked {
    let m = &s.model;
    if !m.heads.is_multiple_of(m.kv_heads) {
        let message = format!(
            "`heads` ({}) is not divisible by `kv_heads` ({})",
            m.heads, m.kv_heads
        );
        return Err(d.conflict(&[Key::KvHeads, Key::Heads], message));
    }
    (m.family.spec().check)(m).map_err(|c| {
        let keys: Vec<Key> = c
            .keys
            .iter()
            .filter_map(|k| Key::find("model", k))
            .collect();
        let error = d.conflict(&keys, c.message);
        match c.help {
            Some(help) => error.with_help(help),
            None => error,
        }
    })
}

fn train(s: &Scenario, d: &Document) -> Checked {
    let (m, t) = (&s.model, &s.train);
    let plain = m.family.spec().attention.is_none();
    if t.seq_len > m.max_seq_len {
        let message = format!(
            "`seq_len` ({}) is longer than `max_seq_len` ({})",
            t.seq_len, m.max_seq_len
        );
        let error = d.conflict(&[Key::SeqLen, Key::MaxSeqLen], message);
        return Err(error.with_help(format!(
            "set model.max_seq_len = {} to give the model more positions",
            t.seq_len
        )));
    }
    if m.family.spec().inputs == Inputs::Images && t.seq_len != 1 {
        return Err(d
            .conflict(
                &[Key::SeqLen],
                "images are not sequences: `seq_len` of a cnn must be 1",
            )
            .with_help("the number of images is `micro_batch`"));
    }
    if t.loss == Loss::Chunked && m.vocab == 0 {
        let message = format!(
            "the chunked loss needs logits over a vocabulary, which family {} does not have",
            m.family.name()
        );
        return Err(d.conflict(&[Key::Loss], message));
    }
    if t.recompute == Recompute::Selective && plain {
        let message = format!(
            "selective recompute keeps matmuls and recomputes the rest, but a block of family {} has nothing else worth recomputing",
            m.family.name()
        );
        return Err(d
            .conflict(&[Key::Recompute], message)
            .with_help("use \"none\" or \"full\""));
    }
    if t.recompute == Recompute::Pointwise && s.compile.mode == CompileMode::Off {
        let message = "pointwise recompute happens inside fused kernels, but `compile.mode = \"off\"` fuses nothing";
        return Err(d
            .conflict(&[Key::Recompute, Key::Mode], message)
            .with_help("set compile.mode = \"regions\", or train.recompute = \"selective\""));
    }
    if let RecomputeLayers::First(n) = t.recompute_layers
        && n > m.layers
    {
        let message = format!(
            "`recompute_layers` is {n}, but the model has {} blocks",
            m.layers
        );
        return Err(d
            .conflict(&[Key::RecomputeLayers, Key::Layers], message)
            .with_help("\"all\" is every block"));
    }
    if t.lr_schedule == LrSchedule::Constant && d.says(Key::MinLr) {
        return Err(d
            .conflict(
                &[Key::MinLr, Key::LrSchedule],
                "`min_lr` is the end of a cosine schedule; a constant schedule never reaches it",
            )
            .with_help("set lr_schedule = \"cosine\""));
    }
    if t.min_lr > t.lr {
        let message = format!(
            "`min_lr` ({}) is above `lr` ({}): the schedule would rise",
            t.min_lr, t.lr
        );
        return Err(d.conflict(&[Key::MinLr, Key::Lr], message));
    }
    if t.betas.iter().any(|b| *b >= 1.0) {
        return Err(d.conflict(&[Key::Betas], "both betas must be below 1"));
    }
    Ok(())
}

fn mesh(s: &Scenario, d: &Document) -> Checked {
    let (world, node) = (s.mesh.world(), s.mesh.gpus_per_node);
    if world > node && world % node != 0 {
        let message = format!("{world} ranks do not fill nodes of {node} GPUs");
        return Err(d
            .conflict(&[Key::GpusPerNode, Key::DpOuter, Key::DpShard], message)
            .with_help("`gpus_per_node` must divide dp_shard * dp_outer"));
    }
    Ok(())
}

fn strategy(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.policy == PolicyKind::Fsdp2 {
        if matches!(f.strategy, Strategy::NoShard | Strategy::Optim) {
            let keys = [Key::Strategy, Key::Placements, Key::Policy];
            return Err(d.conflict(&keys, "policy fsdp2 always shards gradients: torch `fully_shard` has no ZeRO-1 and no replication over its shard axis")
                .with_help("use optim_grads_params, optim_grads (reshard_after_forward = false), or policy native or megatron"));
        }
        if f.strategy == Strategy::OptimGrads && f.reshard_after_forward != Reshard::Never {
            let keys = [Key::Reshard, Key::Strategy, Key::Placements, Key::Policy];
            return Err(d
                .conflict(
                    &keys,
                    "with policy fsdp2, optim_grads means reshard_after_forward = false",
                )
                .with_help(
                    "set reshard_after_forward = false, or strategy = \"optim_grads_params\"",
                ));
        }
    }
    let full = s.compile.mode == CompileMode::Full;
    if full && f.policy == PolicyKind::Native && f.strategy != Strategy::OptimGradsParams {
        let keys = [Key::Strategy, Key::Placements, Key::Mode];
        return Err(d
            .conflict(
                &keys,
                "compile mode full always shards parameters, gradients and optimizer state",
            )
            .with_help("use strategy optim_grads_params, or mode regions or blocks"));
    }
    if f.outer_strategy == OuterStrategy::Optim {
        let keys = [Key::OuterStrategy, Key::Placements];
        if f.strategy != Strategy::OptimGradsParams {
            let keys = [Key::OuterStrategy, Key::Placements, Key::Strategy];
            return Err(d.conflict(&keys, "outer_strategy = \"optim\" splits the shards of optim_grads_params further; other strategies have none")
                .with_help("set strategy = \"optim_grads_params\", or outer_strategy = \"no_shard\""));
        }
        if f.policy == PolicyKind::Fsdp2 {
            return Err(d.conflict(&[Key::OuterStrategy, Key::Placements, Key::Policy], "policy fsdp2 can only replicate over dp_outer: torch `fully_shard` has HSDP, not HFSDP")
                .with_help("use policy native or megatron, or outer_strategy = \"no_shard\""));
        }
        if full {
            return Err(d
                .conflict(
                    &[Key::OuterStrategy, Key::Placements, Key::Mode],
                    "compile mode full can only replicate over dp_outer",
                )
                .with_help("use mode regions or blocks, or outer_strategy = \"no_shard\""));
        }
        if s.mesh.dp_outer == 1 {
            return Err(d
                .conflict(
                    &keys,
                    "outer_strategy = \"optim\" has nothing to shard over: `mesh.dp_outer` is 1",
                )
                .with_help("set mesh.dp_outer to 2 or more"));
        }
        if s.mesh.dp_shard == 1 {
            return Err(d
                .conflict(
                    &[Key::OuterStrategy, Key::Placements, Key::DpShard],
                    "outer_strategy = \"optim\" splits the shards of dp_shard further, but with dp_shard = 1 parameters are not sharded",
                )
                .with_help("shard over the inner axis instead: set mesh.dp_shard to the number of ranks and mesh.dp_outer to 1"));
        }
    }
    Ok(())
}

fn reshard(s: &Scenario, d: &Document) -> Checked {
    let Reshard::Group(n) = s.fsdp.reshard_after_forward else {
        return Ok(());
    };
    let ranks = s.mesh.dp_shard;
    if s.fsdp.policy == PolicyKind::Megatron {
        return Err(d
            .conflict(
                &[Key::Reshard, Key::Policy],
                "policy megatron cannot reshard to a smaller group",
            )
            .with_help("use true, false or \"auto\", or policy native or fsdp2"));
    }
    if s.compile.mode == CompileMode::Full {
        let message = "compile mode full cannot reshard to a smaller group: it frees a parameter or keeps all of it";
        return Err(d
            .conflict(&[Key::Reshard, Key::Mode], message)
            .with_help("use true or false, or mode regions or blocks"));
    }
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

fn allocator(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.policy == PolicyKind::Fsdp2
        && matches!(
            f.allocator,
            AllocatorKind::Pool | AllocatorKind::DoubleBuffer
        )
    {
        let message = "policy fsdp2 allocates through PyTorch's caching allocator: it has no planned pool and no double buffer";
        return Err(d
            .conflict(&[Key::Allocator, Key::Policy], message)
            .with_help("use \"caching\" or \"temporary\", or policy native"));
    }
    if f.offload.any() {
        if f.policy != PolicyKind::Native {
            let message = format!(
                "policy {} has no host offload; only policy native has it",
                f.policy.name()
            );
            return Err(d
                .conflict(&[Key::Offload, Key::Policy], message)
                .with_help("set fsdp.policy = \"native\", or fsdp.offload = []"));
        }
        if s.compile.mode == CompileMode::Full {
            let message = "compile mode full has no host offload: offload needs collectives outside of the graph";
            return Err(d
                .conflict(&[Key::Offload, Key::Mode], message)
                .with_help("use compile.mode off, regions or blocks, or set fsdp.offload = []"));
        }
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

/// Whose root can reshard.
fn resharded_root(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if !f.reshard_root {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if f.policy != PolicyKind::Fsdp2
        || s.compile.mode == CompileMode::Full
    {
        (
            &[Key::Policy, Key::Mode],
            "is an option of policy fsdp2 outside compile mode full: other schedules need the root's parameters as soon as backward starts",
        )
    } else if f.reshard_after_forward == Reshard::Never {
        (
            &[Key::Reshard],
            "= true has no effect: it applies `reshard_after_forward` to the root, and that does nothing here",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::ReshardRoot, keys, why, "false"))
}

/// Who can leave parameters to the next micro-batch.
fn kept_parameters(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.reshard_after_backward {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if s.compile.mode == CompileMode::Full {
        (
            &[Key::Mode],
            "= false is not possible in compile mode full, which frees a parameter after its last use in forward and in backward",
        )
    } else if f.policy == PolicyKind::Megatron {
        (
            &[Key::Policy],
            "= false is an option of policies native and fsdp2: Megatron-FSDP releases every unit after its backward",
        )
    } else if !mesh::weight_sharded(f.strategy) && f.policy == PolicyKind::Native {
        (
            &[Key::Strategy],
            "= false keeps gathered weights, but with this strategy weights are never sharded",
        )
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::ReshardAfterBackward, keys, why, "true"))
}

/// Who can leave reductions to the last micro-batch, or to none.
fn gradient_sync(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    let full = s.compile.mode == CompileMode::Full;
    let (keys, why): (&[Key], _) = match f.gradient_sync {
        GradientSync::Every if s.mesh.dp_outer > 1 && f.policy != PolicyKind::Fsdp2 && !full => (
            &[Key::Policy],
            "= \"every\" reduces over dp_outer in every micro-batch, as torch does, but policies native and megatron add up shards and reduce \
             them once per step",
        ),
        GradientSync::Last if full => (
            &[Key::Mode],
            "= \"last\" keeps full gradients between micro-batches, but compile mode full reduces them right away",
        ),
        GradientSync::Last
            if f.policy == PolicyKind::Megatron && mesh::grad_sharded(f.strategy) =>
        {
            (
                &[Key::Policy, Key::Strategy],
                "= \"last\" needs unsharded gradients: Megatron-FSDP's no_sync reduces sharded ones all the same",
            )
        }
        _ => return Ok(()),
    };
    Err(cannot(d, Key::GradientSync, keys, why, "\"outer_last\""))
}

fn reduction(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.average_in_collective && f.per_token_loss {
        let keys = [Key::AverageInCollective, Key::PerTokenLoss];
        return Err(d.conflict(&keys, "`average_in_collective` averages gradients over ranks, but `per_token_loss` needs their sum")
            .with_help("set one of the two to false"));
    }
    nan_check(s, d)?;
    copy_engines(s, d)
}

/// Who can look for NaNs around collectives.
fn nan_check(s: &Scenario, d: &Document) -> Checked {
    let (key, message) = match s.compile.mode {
        _ if !s.fsdp.nan_check => return Ok(()),
        CompileMode::Full => (
            Key::Mode,
            "compile mode full does not check for NaN around its collectives",
        ),
        _ if s.fsdp.policy == PolicyKind::Fsdp2 => (
            Key::Policy,
            "policy fsdp2 does not check for NaN: torch `fully_shard` has no such check",
        ),
        _ => return Ok(()),
    };
    Err(d
        .conflict(&[Key::NanCheck, key], message)
        .with_help("set fsdp.nan_check = false, or use policy native or megatron outside mode full; `exec --check-nan` finds the first NaN of any program"))
}

/// What can exchange gradients and sum them.
fn exchange(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.policy != PolicyKind::Native || s.compile.mode == CompileMode::Full {
        let message =
            "`copy_engine_reduce` is an option of policy native outside compile mode full";
        return Err(d
            .conflict(&[Key::CopyEngineReduce, Key::Policy, Key::Mode], message)
            .with_help("leave it off"));
    }
    if !mesh::grad_sharded(f.strategy) {
        let message =
            "`copy_engine_reduce` sums shards, but with this strategy gradients are not sharded";
        return Err(d
            .conflict(&[Key::CopyEngineReduce, Key::Strategy], message)
            .with_help("use strategy optim_grads or optim_grads_params"));
    }
    Ok(())
}

/// What can gather at the end of a step.
fn next_step(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.prefetch_next_step == 0 {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if f.policy != PolicyKind::Native
        || s.compile.mode == CompileMode::Full
    {
        (
            &[Key::Policy, Key::Mode],
            "is an option of policy native outside compile mode full",
        )
    } else if !mesh::weight_sharded(f.strategy) {
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

/// What can update a unit before all gradients are known.
fn in_backward(s: &Scenario, d: &Document) -> Checked {
    let (f, t) = (&s.fsdp, &s.train);
    if !f.optimizer_in_backward {
        return Ok(());
    }
    let (keys, why): (&[Key], _) =
        if f.policy != PolicyKind::Native || s.compile.mode == CompileMode::Full {
            (
                &[Key::Policy, Key::Mode],
                "is an option of policy native outside compile mode full",
            )
        } else if t.clip_norm > 0.0 {
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

/// What can leave the sums of gradients to the optimizer.
fn in_optimizer(s: &Scenario, d: &Document) -> Checked {
    let (f, t) = (&s.fsdp, &s.train);
    if !f.sum_in_optimizer {
        return Ok(());
    }
    let (keys, why): (&[Key], _) = if !f.copy_engine_reduce {
        (
            &[Key::CopyEngineReduce],
            "sums the pieces that `copy_engine_reduce` exchanges, but that option is off",
        )
    } else if t.grad_accum > 1 {
        (
            &[Key::GradAccum],
            "keeps the pieces of one micro-batch, but with `grad_accum` their sums have to be accumulated",
        )
    } else if s.mesh.dp_outer > 1 {
        (
            &[Key::DpOuter],
            "produces no sums that could be reduced over `dp_outer`",
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

/// An option that is impossible beside what others say, and the value that turns it off.
fn cannot(d: &Document, key: Key, others: &[Key], why: &str, off: &str) -> ScenarioError {
    let (keys, name) = ([&[key], others].concat(), key.info().key);
    d.conflict(&keys, format!("`{name}` {why}"))
        .with_help(format!("set {name} = {off}"))
}

fn copy_engines(s: &Scenario, d: &Document) -> Checked {
    let (f, m) = (&s.fsdp, &s.mesh);
    if f.copy_engine_reduce {
        exchange(s, d)?;
    }
    // Without communicators of their own, gathers and reductions are on engines together or not at all.
    match (f.copy_engine_gather, f.copy_engine_reduce) {
        (false, false) => return Ok(()),
        (true, false) if !f.separate_communicators => {
            let message = "`copy_engine_gather` needs a communicator without reductions: copy engines cannot add";
            let keys = [Key::CopyEngineGather, Key::SeparateCommunicators];
            return Err(d
                .conflict(&keys, message)
                .with_help("set fsdp.separate_communicators = true"));
        }
        (false, true) if !f.separate_communicators => {
            let message = "`copy_engine_reduce` puts its communicator on copy engines, but gathers use the same communicator";
            let keys = [Key::CopyEngineReduce, Key::SeparateCommunicators];
            let help = "set fsdp.copy_engine_gather = true, or separate_communicators = true";
            return Err(d.conflict(&keys, message).with_help(help));
        }
        _ => {}
    }
    if mesh::nodes(m.dp_shard, 1, m.world(), m.gpus_per_node) > 1 {
        let (name, key) = if f.copy_engine_gather {
            ("copy_engine_gather", Key::CopyEngineGather)
        } else {
            ("copy_engine_reduce", Key::CopyEngineReduce)
        };
        let message = format!(
            "`{name}` works within a node: groups of dp_shard = {} ranks cross nodes of {} GPUs",
            m.dp_shard, m.gpus_per_node
        );
        return Err(d
            .conflict(&[key, Key::DpShard], message)
            .with_help("shard within the node (dp_outer over nodes), or leave it off"));
    }
    Ok(())
}

fn compile(s: &Scenario, d: &Document) -> Checked {
    let (c, f) = (&s.compile, &s.fsdp);
    if c.mode == CompileMode::Full && f.policy == PolicyKind::Megatron {
        let message = "compile mode full makes collectives graph nodes, but policy megatron issues them from hooks";
        return Err(d
            .conflict(&[Key::Mode, Key::Policy], message)
            .with_help("use mode regions or blocks, or policy native or fsdp2"));
    }
    merges(s, d)?;
    match &c.cuda_graph {
        CudaGraph::Off => Ok(()),
        CudaGraph::FullIteration if f.nan_check => {
            let message = "`nan_check` reads results on the host, which a full-iteration CUDA graph cannot contain";
            Err(d
                .conflict(&[Key::NanCheck, Key::CudaGraph], message)
                .with_help("set fsdp.nan_check = false"))
        }
        CudaGraph::FullIteration if f.offload.any() => {
            let message = "`offload` waits on the host for its copies, which a full-iteration CUDA graph cannot contain";
            Err(d
                .conflict(&[Key::Offload, Key::CudaGraph], message)
                .with_help("set fsdp.offload = [], or capture scopes"))
        }
        CudaGraph::FullIteration => persistent_copies(s, d),
        CudaGraph::Scopes(scopes) => scopes_fit(s, d, scopes),
    }
}

/// Merged products need compiled code and weights side by side, epilogues, mixed orders of reduction and fused products compiled
/// code.
fn merges(s: &Scenario, d: &Document) -> Checked {
    let c = &s.compile;
    let compiled = [
        (c.epilogues, Key::Epilogues, "epilogues", "epilogues"),
        (
            c.mix_order_reductions,
            Key::MixOrderReductions,
            "mixed-order reductions",
            "mix_order_reductions",
        ),
        (
            c.fused_products,
            Key::FusedProducts,
            "fused matmuls",
            "fused_products",
        ),
    ];
    for (on, key, what, name) in compiled {
        if on && c.mode == CompileMode::Off {
            let message = format!(
                "{what} are compiled code, but with compile mode off every op is a separate kernel"
            );
            return Err(d
                .conflict(&[key, Key::Mode], message)
                .with_help(format!("use mode regions, blocks or full, or {name} false")));
        }
    }
    if c.merge_projections == MergeProjections::None {
        return Ok(());
    }
    match c.mode {
        CompileMode::Off => Err(d
            .conflict(
                &[Key::MergeProjections, Key::Mode],
                "merged projections are compiled code, but with compile mode off every op is a separate kernel",
            )
            .with_help("use mode regions or blocks, or merge_projections none")),
        CompileMode::Full => Err(d
            .conflict(
                &[Key::MergeProjections, Key::Mode],
                "compile mode full gathers every parameter into a separate buffer, but merging needs adjacent weights",
            )
            .with_help("use mode regions or blocks, or merge_projections none")),
        _ if s.fsdp.policy == PolicyKind::Fsdp2 => Err(d
            .conflict(
                &[Key::MergeProjections, Key::Policy],
                "policy fsdp2 copies every parameter into a separate buffer, but merging needs adjacent weights",
            )
            .with_help("use policy native or megatron, or merge_projections none")),
        _ => Ok(()),
    }
}

/// A double buffer has to find room for every unit once and for all.
fn persistent_copies(s: &Scenario, d: &Document) -> Checked {
    let f = &s.fsdp;
    if f.allocator != AllocatorKind::DoubleBuffer || f.persist_on_alloc_fail {
        return Ok(());
    }
    let keys = [Key::CudaGraph, Key::Allocator, Key::PersistOnAllocFail];
    let message = "a replay needs memory at the addresses of the capture, but a double buffer gives units that do not fit a new address each time";
    Err(d
        .conflict(&keys, message)
        .with_help("set fsdp.persist_on_alloc_fail = true"))
}

fn scopes_fit(s: &Scenario, d: &Document, scopes: &[Scope]) -> Checked {
    let f = &s.fsdp;
    let keys = [Key::CudaGraph, Key::Allocator, Key::Policy];
    let elsewhere = "or capture the full iteration";
    if s.compile.mode == CompileMode::Full {
        let message = "compile mode full makes collectives graph nodes, which cross the boundaries of captured scopes";
        return Err(d
            .conflict(&[Key::CudaGraph, Key::Mode], message)
            .with_help(format!("use mode regions or blocks, {elsewhere}")));
    }
    match f.allocator {
        AllocatorKind::Caching | AllocatorKind::Temporary => {
            let name = if f.allocator == AllocatorKind::Caching {
                "caching"
            } else {
                "temporary"
            };
            let help = match f.policy {
                PolicyKind::Native => "set fsdp.allocator = \"pool\"",
                PolicyKind::Fsdp2 => "use policy native",
                PolicyKind::Megatron => {
                    "set fsdp.allocator = \"double_buffer\" and persist_on_alloc_fail = true"
                }
            };
            let message = format!(
                "captured scopes replay fixed addresses, but the {name} allocator moves buffers between steps"
            );
            return Err(d
                .conflict(&keys, message)
                .with_help(format!("{help}, {elsewhere}")));
        }
        AllocatorKind::DoubleBuffer | AllocatorKind::Pool => persistent_copies(s, d)?,
    }
    let mut sorted = scopes.to_vec();
    sorted.sort_unstable();
    if sorted.windows(2).any(|w| w[0] == w[1]) {
        return Err(d.conflict(&[Key::CudaGraph], "a scope is listed twice"));
    }
    if sorted.len() > 1 && sorted.contains(&Scope::Block) {
        return Err(d
            .conflict(&[Key::CudaGraph], "scope block contains attn and mlp")
            .with_help("list block alone"));
    }
    if sorted != [Scope::Block] && s.model.family.spec().attention.is_none() {
        let message = format!(
            "a block of family {} has no attention and no mlp",
            s.model.family.name()
        );
        return Err(d
            .conflict(&[Key::CudaGraph], message)
            .with_help("use scope block"));
    }
    Ok(())
}
