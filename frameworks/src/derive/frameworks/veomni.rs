//! Decides settings that VeOmni's defaults and code fix.
//!
//! Sources: `veomni/arguments/arguments_types.py` and `build_parallelize_model` of
//! `veomni/distributed/torch_parallelize.py` with their history, and `veomni/trainer/base.py`.

use crate::draft::{Draft, Given};
use crate::error::ConfigError;
use crate::formats::{veomni_flat, veomni_section};
use crate::row::Lack;
use crate::table::{Dtype, Effect, Engine, Fact, quoted};

const WHY: &str = "VeOmni's default";
/// Keys that turn recompute on or off.
const RECOMPUTE: [&str; 3] = [
    "train.gradient_checkpointing.enable",
    "model.accelerator.gradient_checkpointing.enable",
    "train.enable_gradient_checkpointing",
];
const REDUCE: &str = "precision.reduce_dtype";
const ONE_GPU: &str = "this job does not start: on one GPU, VeOmni needs DDP (`ddp`) and a model that is initialized on the GPU";

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value, or if arguments of two versions are mixed.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    let flat = is_flat(draft)?;
    draft.assume("train.seq_len", "2048", WHY);
    if draft.engine.is_none() {
        let (key, name, engine) = if flat {
            ("train.data_parallel_mode", "ddp", Engine::Ddp)
        } else {
            let key = "train.accelerator.fsdp_config.fsdp_mode";
            (key, "fsdp2", Engine::Fsdp)
        };
        let row = draft.suppose(key, name, WHY);
        draft.apply(row, Effect::Engine(engine))?;
    }
    if !draft.rows.iter().any(|r| RECOMPUTE.contains(&&*r.key)) {
        draft.assume("train.recompute", quoted("full"), WHY);
    }
    let why = "VeOmni's default: Liger's fused loss is predicted as the chunked one";
    draft.assume("train.loss", quoted("chunked"), why);
    kernels(draft)?;
    precision(draft, flat)
}

/// Returns whether the arguments are those of versions without sections.
///
/// # Errors
/// Fails if there are arguments of versions with and without sections: VeOmni ignores the latter.
fn is_flat(draft: &Draft) -> Result<bool, ConfigError> {
    let flat = draft.rows.iter().position(|r| veomni_flat(&r.key));
    let section = draft.rows.iter().position(|r| veomni_section(&r.key));
    let (Some(row), Some(section)) = (flat, section) else {
        return Ok(flat.is_some());
    };
    let (old, new) = (&draft.rows[row].key, &draft.rows[section].key);
    let message = format!(
        "VeOmni ignores `{old}` next to `{new}`: it is an argument of versions before March 2026, and has another \
         path now (docs/usage/arguments.md of VeOmni lists them)"
    );
    Err(draft.error(row, message))
}

/// Decides whether norms, rotary embeddings and gates run in fused kernels, as the key of norms
/// says. Liger's kernels are the default.
fn kernels(draft: &mut Draft) -> Result<(), ConfigError> {
    const KEY: &str = "model.implementation";
    let facts = [Fact::FusedNorms, Fact::FusedRotary, Fact::FusedGates];
    let given = facts.map(|fact| draft.fact(fact));
    // Norms move the most bytes.
    let fused = given[0].is_none_or(|g| g.value == 1);
    let (name, why) = if fused {
        let why = "Liger's fused kernels are predicted as those of PyTorch";
        ("torchtitan", why)
    } else {
        ("transformers", "kernels of transformers")
    };
    for given in given.into_iter().flatten() {
        if (given.value == 1) == fused {
            draft.set(given.row, KEY, quoted(name))?;
            if fused {
                draft.approximates(given.row, why);
            }
        } else {
            let why = "predicted with the kind of kernels that norms have";
            draft.none(given.row, Lack::Accuracy, why);
        }
    }
    draft.assume(KEY, quoted(name), why);
    Ok(())
}

/// Computes in bfloat16 with float32 weights, or keeps all state in bfloat16 if mixed precision is
/// off. DDP has no mixed precision in versions with sections.
fn precision(draft: &mut Draft, flat: bool) -> Result<(), ConfigError> {
    let on = draft.fact(Fact::MixedPrecision);
    let ddp = draft.engine.filter(|e| e.value == Engine::Ddp);
    if let Some(off) = on.filter(|m| m.value == 0) {
        if let Some(mixed) = draft.mixed.take() {
            draft.none(mixed.row, Lack::Nothing, "mixed precision is off");
        }
        draft.unset(REDUCE, Lack::Nothing, "mixed precision is off");
        return draft.apply(off.row, Effect::Weights(Dtype::Bf16));
    }
    if let Some(ddp) = ddp.filter(|_| !flat) {
        for row in on.iter().map(|m| m.row).chain(draft.mixed.map(|m| m.row)) {
            let why = "mixed precision is an option of FSDP: VeOmni's DDP computes in float32";
            draft.none(row, Lack::Nothing, why);
        }
        draft.unset(REDUCE, Lack::Nothing, "an option of FSDP");
        let (row, value) = (ddp.row, Dtype::F32);
        draft.mixed = Some(Given { value, row });
        return Ok(());
    }
    if draft.mixed.is_none() {
        let row = match on {
            Some(on) => on.row,
            None => draft.suppose("mixed_precision.param_dtype", "bfloat16", WHY),
        };
        draft.apply(row, Effect::Mixed(Dtype::Bf16))?;
    }
    if let Some(on) = on
        && draft.mixed.is_some_and(|m| m.row != on.row)
    {
        let why = "as the types say";
        draft.rows[on.row].why.get_or_insert(why.to_owned());
    }
    draft.assume(REDUCE, quoted("f32"), WHY);
    if draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1) {
        let why = "VeOmni loads the model in float32 under mixed precision";
        draft.assume("precision.frozen_params", quoted("f32"), why);
    }
    Ok(())
}

/// Sets what depends on the mesh: how FSDP shards, prefetches and reduces.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn sharding(draft: &mut Draft, ranks: u64) -> Result<(), ConfigError> {
    let flat = is_flat(draft)?;
    compiled(draft)?;
    let version = draft.fact(Fact::FsdpVersion).map_or(2, |v| v.value);
    let Some(engine) = draft.engine.filter(|e| e.value == Engine::Fsdp) else {
        for fact in [Fact::ExplicitPrefetch, Fact::FullShard, Fact::OffloadAll] {
            unused(draft, fact, "an option of FSDP");
        }
        return Ok(());
    };
    let divided = draft.fact(Fact::Ulysses).is_some_and(|u| u.value > 1);
    if ranks <= 1 && !divided {
        draft.none(engine.row, Lack::Everything, ONE_GPU);
    }
    if version == 1 {
        return one(draft);
    }
    unused(draft, Fact::FullShard, "an option of FSDP1");
    if flat {
        let why = "an option of FSDP1 in versions of VeOmni without sections";
        unused(draft, Fact::OffloadAll, why);
        root(draft)?;
    } else {
        // `_configure_hsdp_allreduce`
        let replicas = draft.value("mesh.dp_replicate");
        if replicas.is_some_and(|n| n != "1") {
            let why = "replicas reduce gradients after the last micro-batch only";
            draft.assume("fsdp.gradient_sync", quoted("outer_last"), why);
        }
    }
    prefetch(draft)
}

/// Compiles each block, unless this job does not start.
fn compiled(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::CompiledBlocks).filter(|c| c.value == 1) else {
        return Ok(());
    };
    let fsdp2 = draft.engine.is_some_and(|e| e.value == Engine::Fsdp)
        && draft.fact(Fact::FsdpVersion).is_none_or(|v| v.value == 2);
    let why = if !fsdp2 {
        "this job does not start: VeOmni compiles under FSDP2 only"
    } else if draft.value("mesh.ep").is_some() {
        "this job does not start: VeOmni does not compile models with expert parallelism"
    } else {
        return draft.set(given.row, "compile.mode", quoted("blocks"));
    };
    draft.none(given.row, Lack::Everything, why);
    Ok(())
}

/// Resharding of the root: versions with the option passed it to the root as well, until sections
/// came.
fn root(draft: &mut Draft) -> Result<(), ConfigError> {
    match draft.fact(Fact::Reshard).filter(|r| r.value == 1) {
        Some(given) => draft.set(given.row, "fsdp.reshard_root", "true".to_owned()),
        None => Ok(()),
    }
}

/// Sets explicit prefetching, which VeOmni has with expert parallelism only. In backward, it
/// prefetches the same unit as FSDP2 does by itself.
fn prefetch(draft: &mut Draft) -> Result<(), ConfigError> {
    const KEY: &str = "fsdp.prefetch_forward";
    let given = draft.fact(Fact::ExplicitPrefetch);
    let off = given.is_some_and(|g| g.value == 0);
    if draft.value("mesh.ep").is_none() {
        let why = "VeOmni sets explicit prefetching with expert parallelism only";
        unused(draft, Fact::ExplicitPrefetch, why);
        return Ok(());
    }
    match given {
        Some(_) if off => Ok(()),
        Some(given) => draft.set(given.row, KEY, "1".to_owned()),
        None => {
            let why = "VeOmni prefetches the next block with expert parallelism";
            draft.assume(KEY, "1", why);
            Ok(())
        }
    }
}

/// Sets what `FullyShardedDataParallel` gets. Without full sharding, it shards nothing.
fn one(draft: &mut Draft) -> Result<(), ConfigError> {
    const NO_SHARD: u64 = 3;
    if let Some(given) = draft.fact(Fact::FullShard) {
        if given.value == 0 {
            draft.apply(given.row, Effect::Fact(Fact::Strategy, NO_SHARD))?;
        } else {
            draft.apply(given.row, Effect::Fact(Fact::Reshard, 1))?;
        }
    } else if draft.fact(Fact::Reshard).is_some() {
        unused(draft, Fact::Reshard, "an option of FSDP2");
        draft.forget(Fact::Reshard);
    }
    draft.unset(
        "fsdp.reshard_after_backward",
        Lack::Nothing,
        "an option of FSDP2",
    );
    match draft.fact(Fact::ExplicitPrefetch) {
        Some(given) if given.value == 0 => {
            draft.set(given.row, "fsdp.prefetch_backward", "0".to_owned())
        }
        Some(given) => draft.set(given.row, "fsdp.prefetch_forward", "1".to_owned()),
        None => {
            draft.assume("fsdp.prefetch_forward", "1", WHY);
            Ok(())
        }
    }
}

/// Drops a quantity that this job does not use, and notes why.
fn unused(draft: &mut Draft, fact: Fact, why: &str) {
    if let Some(given) = draft.fact(fact) {
        draft.forget(fact);
        draft.none(given.row, Lack::Nothing, why);
    }
}
