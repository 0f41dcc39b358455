//! Decides the policy, the strategy and offload, based on the engine that shards.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::DEEPSPEED;
use crate::row::{Lack, Row, Status};
use crate::table::{Engine, Fact, Format, quoted};

/// The engine that a job shards with, as far as the precision depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Fsdp,
    DeepSpeed,
    Megatron,
    /// Megatron-LM without FSDP: its DDP, with or without the distributed optimizer.
    MegatronOptimizer,
    Ddp,
}

/// Why a job with both engines is refused.
const BOTH: &str =
    "the Trainer refuses to start with both --fsdp and --deepspeed: remove one of them";
const FSDP1: &str = "FSDP1's schedule is predicted as that of FSDP2";
const UNSHARDED: &str = "offload is modeled for parameters sharded over at least two ranks only";
const ONLY_ZERO3: &str = "offload is modeled with ZeRO-3 only (stage 3); without the option, `fit` predicts the job with this state on the GPU";
const ENDS: &str = "Accelerate shards the embedding and the output layer apart from the blocks";
const NO_SYNC: &str = "Accelerate accumulates under no_sync";
const NO_SYNC_2: &str = "Accelerate accumulates under no_sync; before September 2025 (#3762), FSDP2 reduced each micro-batch (\"every\")";
const OWN_SYNC: &str = "DeepSpeed decides when it reduces gradients";
const ZERO: &str = "ZeRO's schedule is predicted as shardlab's own";

/// Sets the keys of `[fsdp]`.
pub(super) fn decide(
    draft: &mut Draft,
    formats: &[&'static Format],
    accelerated: bool,
) -> Result<Kind, ConfigError> {
    let given = draft.engine;
    if let Some(given) = given.filter(|g| g.value == Engine::Fsdp)
        && draft.rows[given.row].key == "fsdp"
        && formats.iter().any(|f| f.name == DEEPSPEED.name)
    {
        return Err(draft.error(given.row, BOTH.to_owned()));
    }
    // A model without a configuration is trained with FSDP2.
    let alone = formats.is_empty().then_some(Engine::Fsdp);
    let by_format = formats.iter().find_map(|f| f.engine).or(alone);
    let version = draft.fact(Fact::FsdpVersion);
    let stage = draft.fact(Fact::ZeroStage);
    let engine = match given.map(|g| g.value).or(by_format) {
        // Options of FSDP or DeepSpeed imply that it is on.
        Some(Engine::Ddp) | None if given.is_none() && version.is_some() => Engine::Fsdp,
        Some(Engine::Ddp) | None if given.is_none() && stage.is_some() => Engine::DeepSpeed,
        Some(engine) => engine,
        None => Engine::Ddp,
    };
    let row = match given.map(|g| g.row).or(version.or(stage).map(|v| v.row)) {
        Some(row) => row,
        None => {
            draft.rows.push(Row {
                place: None,
                key: "sharding".to_owned(),
                value: match engine {
                    Engine::Fsdp => "FSDP2",
                    Engine::DeepSpeed => "DeepSpeed",
                    Engine::Megatron => "Megatron-FSDP",
                    Engine::MegatronOptimizer => "Megatron-LM",
                    Engine::Ddp => "none (DDP)",
                }
                .to_owned(),
                status: Status::Assumed,
                settings: Vec::new(),
                why: Some("no key of the configuration says otherwise".to_owned()),
                doubt: None,
            });
            draft.rows.len() - 1
        }
    };
    let megatron = matches!(engine, Engine::Megatron | Engine::MegatronOptimizer);
    precision_aware(draft, megatron)?;
    if let Some(given) = draft.fact(Fact::OptimizerOffload).filter(|o| o.value == 1) {
        match engine {
            Engine::MegatronOptimizer => draft.none(given.row, Lack::Everything, HYBRID),
            _ => draft.none(given.row, Lack::Everything, UNPINNED),
        }
    }
    if let Some(given) = draft.fact(Fact::NcclUb) {
        draft.none(given.row, Lack::Accuracy, UNREGISTERED);
    }
    match engine {
        Engine::Fsdp => {
            // A single-device recipe does not shard.
            if given.is_none() && version.is_none() && draft.value("mesh.dp_shard") == Some("1") {
                own(draft, row, "no_shard", &[])?;
                return Ok(Kind::Fsdp);
            }
            let by_key = given.is_some() && accelerated;
            let number = version.map_or(if by_key { 1 } else { 2 }, |v| v.value);
            fsdp(draft, row, number)?;
            also(draft, row)?;
            if accelerated {
                let why = if number == 2 { NO_SYNC_2 } else { NO_SYNC };
                draft.assume("fsdp.gradient_sync", quoted("last"), why);
            }
            if accelerated && number == 2 {
                if draft.is("fsdp.units", "block") {
                    draft.replace("fsdp.units", &quoted("block_and_ends"));
                }
                draft.assume("fsdp.units", quoted("block_and_ends"), ENDS);
            }
            Ok(Kind::Fsdp)
        }
        Engine::DeepSpeed => {
            draft.unset("fsdp.gradient_sync", Lack::Nothing, OWN_SYNC);
            deepspeed(draft, row)?;
            also(draft, row)?;
            Ok(Kind::DeepSpeed)
        }
        Engine::Megatron => {
            let given = draft.value("fsdp.policy").map(str::to_owned);
            let policy = given.unwrap_or_else(|| quoted("megatron"));
            draft.set(row, "fsdp.policy", policy)?;
            draft.assume(
                "fsdp.strategy",
                quoted("optim_grads_params"),
                "Megatron-FSDP's default",
            );
            if let Some(given) = draft.fact(Fact::DistributedOptimizer) {
                draft.none(given.row, Lack::Nothing, "part of Megatron-FSDP");
            }
            registered(draft)?;
            Ok(Kind::Megatron)
        }
        Engine::MegatronOptimizer => {
            draft.set(row, "fsdp.policy", quoted("megatron"))?;
            match draft
                .fact(Fact::DistributedOptimizer)
                .filter(|d| d.value == 1)
            {
                Some(on) => {
                    draft.set(on.row, "fsdp.strategy", quoted("optim"))?;
                    draft.approximates(on.row, "predicted as ZeRO-1 of Megatron-FSDP");
                }
                None => draft.set(row, "fsdp.strategy", quoted("no_shard"))?,
            }
            Ok(Kind::MegatronOptimizer)
        }
        Engine::Ddp => {
            own(draft, row, "no_shard", &[])?;
            if accelerated {
                draft.assume("fsdp.gradient_sync", quoted("last"), NO_SYNC);
            }
            Ok(Kind::Ddp)
        }
    }
}

/// Notes that Megatron-FSDP registers the buffers of a double buffer
/// (`fsdp_double_buffer or nccl_ub`).
fn registered(draft: &mut Draft) -> Result<(), ConfigError> {
    let given = draft.fact(Fact::NcclUb).filter(|given| given.value == 1);
    let production = draft.is("fsdp.policy", "megatron");
    let Some(given) = given.filter(|_| production) else {
        return Ok(());
    };
    draft.set(given.row, "fsdp.allocator", quoted("double_buffer"))?;
    draft.rows[given.row].why = None;
    draft.approximates(
        given.row,
        "buffers registered with NCCL are predicted as a double buffer, and its kernels as without registration",
    );
    Ok(())
}

/// Why a CPU optimizer is not predicted without FSDP.
const HYBRID: &str = "it keeps weights, gradients and moments of the optimizer in host memory, which is not modeled for this engine; without the option, `fit` predicts the job with its optimizer on the GPU";

/// Why Megatron-LM cannot run the optimizer on the CPU under FSDP.
const UNPINNED: &str = "this job does not start: Megatron-LM's optimizer on the CPU cannot pin DTensors (Megatron-LM #1986)";

/// Why buffer registration with NCCL is not predicted.
const UNREGISTERED: &str = "NCCL's kernels are predicted as without registered buffers";

/// Makes Megatron-LM's precision-aware optimizer read gradients in the dtype they are stored in.
fn precision_aware(draft: &mut Draft, megatron: bool) -> Result<(), ConfigError> {
    match draft.fact(Fact::PrecisionAwareOptimizer) {
        Some(given) if megatron => {
            let value = (given.value == 1).to_string();
            draft.set(given.row, "fsdp.decoupled_gradients", value)
        }
        Some(given) => {
            draft.none(
                given.row,
                Lack::Nothing,
                "an option of Megatron-LM's optimizer",
            );
            Ok(())
        }
        None => Ok(()),
    }
}

fn fsdp(draft: &mut Draft, row: usize, version: u64) -> Result<(), ConfigError> {
    let one = version == 1;
    if let Some(given) = draft.fact(Fact::FsdpVersion)
        && !(1..=2).contains(&version)
    {
        return Err(draft.error(given.row, format!("expected version 1 or 2, got {version}")));
    }
    let strategy = draft.fact(Fact::Strategy);
    let kept = strategy.is_some_and(|s| s.value == 2 || s.value == 5);
    let reshard = draft.fact(Fact::Reshard);
    if strategy.is_some_and(|s| s.value == 3) {
        return own(draft, strategy.map_or(row, |s| s.row), "no_shard", &[]);
    }
    let policy_row = draft.fact(Fact::FsdpVersion).map_or(row, |v| v.row);
    if let Some(offload) = draft.fact(Fact::OffloadAll).filter(|o| o.value == 1) {
        if draft.value("mesh.dp_shard") == Some("1") {
            draft.none(offload.row, Lack::Everything, UNSHARDED);
        }
        let state = r#"["params", "grads", "optimizer"]"#.to_owned();
        draft.set(offload.row, "fsdp.offload", state)?;
    }
    draft.set(policy_row, "fsdp.policy", quoted("fsdp2"))?;
    if one {
        draft.approximates(policy_row, FSDP1);
    }
    let why = "the optimizer is predicted after backward: FSDP2 has no other order here";
    draft.unset("fsdp.optimizer_in_backward", Lack::Accuracy, why);
    if let Some(given) = reshard {
        draft.set(
            given.row,
            "fsdp.reshard_after_forward",
            (given.value == 1).to_string(),
        )?;
    }
    if let Some(given) = strategy {
        draft.set(given.row, "fsdp.reshard_after_forward", (!kept).to_string())?;
    }
    Ok(())
}

fn deepspeed(draft: &mut Draft, row: usize) -> Result<(), ConfigError> {
    let stage = draft.fact(Fact::ZeroStage);
    let strategy = match stage.map_or(2, |s| s.value) {
        0 => "no_shard",
        1 => "optim",
        2 => "optim_grads",
        3 => "optim_grads_params",
        other => {
            let row = stage.map_or(row, |s| s.row);
            return Err(draft.error(row, format!("expected ZeRO stage 0 to 3, got {other}")));
        }
    };
    let sharded = strategy == "optim_grads_params" && draft.value("mesh.dp_shard") != Some("1");
    let mut offload = Vec::new();
    for (fact, states) in [
        (Fact::OffloadParams, &["params"][..]),
        (Fact::OffloadOptimizer, &["grads", "optimizer"][..]),
    ] {
        match draft.fact(fact).filter(|f| f.value == 1) {
            Some(given) if strategy != "optim_grads_params" => {
                draft.none(given.row, Lack::Everything, ONLY_ZERO3);
            }
            Some(given) if !sharded => draft.none(given.row, Lack::Everything, UNSHARDED),
            Some(_) => offload.extend_from_slice(states),
            None => {}
        }
    }
    own(draft, stage.map_or(row, |s| s.row), strategy, &offload)?;
    draft.approximates(stage.map_or(row, |s| s.row), ZERO);
    Ok(())
}

/// Sets shardlab's own policy, with PyTorch's allocator.
fn own(draft: &mut Draft, row: usize, strategy: &str, offload: &[&str]) -> Result<(), ConfigError> {
    draft.set(row, "fsdp.policy", quoted("native"))?;
    draft.set(row, "fsdp.strategy", quoted(strategy))?;
    torch_allocator(draft);
    if offload.is_empty() {
        return Ok(());
    }
    let states: Vec<String> = offload.iter().map(|s| quoted(s)).collect();
    let states = format!("[{}]", states.join(", "));
    for fact in [Fact::OffloadOptimizer, Fact::OffloadParams] {
        if let Some(given) = draft.fact(fact).filter(|g| g.value == 1) {
            draft.set(given.row, "fsdp.offload", states.clone())?;
        }
    }
    Ok(())
}

/// Sets the policy in the row of the key that names the engine, too.
fn also(draft: &mut Draft, row: usize) -> Result<(), ConfigError> {
    let policy = draft.value("fsdp.policy").map(str::to_owned);
    let has = draft.rows[row]
        .settings
        .iter()
        .any(|s| s.key == "fsdp.policy");
    match policy {
        Some(policy) if !has => draft.set(row, "fsdp.policy", policy),
        _ => Ok(()),
    }
}

fn torch_allocator(draft: &mut Draft) {
    draft.assume("fsdp.allocator", quoted("caching"), "PyTorch's allocator");
}
