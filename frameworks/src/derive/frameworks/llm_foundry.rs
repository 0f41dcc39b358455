//! Decides settings whose defaults in LLM Foundry and Composer depend on other keys.
//!
//! Sources: `calculate_batch_size_info` of `llmfoundry/utils/config_utils.py`, `MPTConfig`, and
//! `FSDPConfig`, `get_mixed_precision` and `prepare_fsdp_module` of Composer.

use super::peft;
use crate::derive::architecture::{self, Positions};
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::{BACKWARD_POST, FUSED_LOSS, UPCAST};
use crate::row::Row;
use crate::table::{Dtype, Effect, Engine, Fact, quoted};

/// Section of FSDP's options. Without it, Composer wraps the model in DDP.
const SECTION: &str = "fsdp_config.";
const BY_COMPOSER: &str = "Composer's default";
const BY_MPT: &str = "MPT's default";
const FAMILY: &str = "model.family";
const POSITIONS: &str = "model.position_embedding";

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    if draft.mixed.is_none() {
        let row = draft.suppose("precision", "amp_bf16", "LLM Foundry's default");
        draft.apply(row, Effect::Mixed(Dtype::Bf16))?;
    }
    if draft.fact(Fact::Mpt).is_some() {
        mpt(draft)?;
    }
    peft::targets(draft)?;
    fsdp(draft)
}

/// Turns on FSDP1 if the files have its section, with Composer's defaults.
fn fsdp(draft: &mut Draft) -> Result<(), ConfigError> {
    let own = |r: &Row| r.key.starts_with(SECTION) || r.key == "fsdp_config" && r.value == "{}";
    if !draft.rows.iter().any(own) {
        return Ok(());
    }
    let row = draft.suppose("fsdp_config", "FSDP1", "Composer wraps models in FSDP1");
    draft.apply(row, Effect::Engine(Engine::Fsdp))?;
    draft.apply(row, Effect::Fact(Fact::FsdpVersion, 1))?;
    let default = "fsdp_config.mixed_precision";
    draft.suppose_fact(Fact::ComputeReduction, 0, default, "DEFAULT", BY_COMPOSER);
    if let Some(given) = draft.fact(Fact::ComputeReduction)
        && draft.value("precision.reduce_dtype").is_none()
    {
        let compute = draft.mixed.map_or(Dtype::Bf16, |m| m.value);
        let dtype = if given.value == 1 {
            compute
        } else {
            Dtype::F32
        };
        draft.set(given.row, "precision.reduce_dtype", quoted(dtype.name()))?;
    }
    if draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1) {
        let why = "LLM Foundry loads models in float32";
        draft.assume("precision.frozen_params", quoted("f32"), why);
    }
    if draft.value("train.recompute").is_some() {
        let key = "fsdp_config.activation_checkpointing_reentrant";
        draft.suppose_fact(Fact::Reentrant, 1, key, "true", BY_COMPOSER);
    }
    let key = "fsdp_config.backward_prefetch";
    if !draft.rows.iter().any(|r| r.key == key) {
        draft.suppose(key, "BACKWARD_POST", BACKWARD_POST);
    }
    Ok(())
}

/// Describes an MPT model: GPT-2's code for the default options, or a decoder.
fn mpt(draft: &mut Draft) -> Result<(), ConfigError> {
    if draft.value("model.preset").is_some() {
        architecture::replaced(draft);
        return Ok(());
    }
    for (key, value) in [
        ("model.hidden", "2048"),
        ("model.heads", "16"),
        ("model.layers", "24"),
        ("model.vocab", "50368"),
        ("model.max_seq_len", "2048"),
    ] {
        draft.assume(key, value, BY_MPT);
    }
    let key = "model.attn_config.attn_impl";
    if !draft.rows.iter().any(|r| r.key == key) {
        draft.suppose_fact(Fact::AttentionLibrary, 0, key, "flash", BY_MPT);
    }
    draft.assume(UPCAST, "false", FUSED_LOSS);
    ffn(draft)?;
    let (no_bias, rms) = (on(draft, Fact::NoBias), on(draft, Fact::RmsNorm));
    let none = draft
        .fact(Fact::Positions)
        .is_some_and(|p| p.value == Positions::None as u64);
    let options = [
        POSITIONS,
        "model.kv_heads",
        "model.head_dim",
        "model.gated_mlp",
        "model.sliding_window",
    ];
    let plain = !no_bias && !rms && !none && options.iter().all(|k| draft.value(k).is_none());
    draft.assume("model.activation", quoted("gelu"), BY_MPT);
    if plain {
        draft.assume(FAMILY, quoted("gpt2"), "MPT's blocks are those of GPT-2");
    } else {
        decoder(draft, no_bias, rms, none);
    }
    draft.assume("model.tie_embeddings", "true", BY_MPT);
    for fact in [Fact::NoBias, Fact::RmsNorm, Fact::Positions, Fact::Mpt] {
        if let Some(given) = draft.fact(fact) {
            let why = &mut draft.rows[given.row].why;
            why.get_or_insert_with(|| "decides the family of the model".to_owned());
        }
    }
    Ok(())
}

/// Sets the keys of `family = "decoder"`.
fn decoder(draft: &mut Draft, no_bias: bool, rms: bool, none: bool) {
    // Without biases, norms have none either (`MPTModel.__init__`).
    let norm = match (rms, no_bias) {
        (true, _) => "rms_norm",
        (false, true) => "layer_norm_no_bias",
        (false, false) => "layer_norm",
    };
    // MPT drops learned positions where it has others.
    let positions = if none { "none" } else { "learned" };
    for (key, value) in [
        (FAMILY, "decoder"),
        ("model.norm", norm),
        (POSITIONS, positions),
        ("model.packed_qkv", "concatenated"),
    ] {
        draft.assume(key, quoted(value), BY_MPT);
    }
    draft.assume("model.gated_mlp", "false", BY_MPT);
    draft.assume("model.bias", (!no_bias).to_string(), BY_MPT);
}

/// Sets the width of the feed-forward layer, `int(d_model * expansion_ratio)`.
fn ffn(draft: &mut Draft) -> Result<(), ConfigError> {
    const KEY: &str = "model.ffn";
    let hidden = draft.value("model.hidden").and_then(|v| v.parse().ok());
    let Some(hidden) = hidden.filter(|_| draft.value(KEY).is_none()) else {
        return Ok(());
    };
    let given = draft.fact(Fact::FfnRatio);
    let ratio = given.map_or(4.0, |g| f64::from_bits(g.value));
    let width = (f64::from(hidden_width(hidden)) * ratio).max(1.0) as u64;
    match given {
        Some(given) => draft.set(given.row, KEY, width.to_string()),
        None => {
            draft.assume(KEY, width.to_string(), BY_MPT);
            Ok(())
        }
    }
}

/// Returns a width as a number that a float holds exactly.
fn hidden_width(hidden: u64) -> u32 {
    u32::try_from(hidden).unwrap_or(u32::MAX)
}

fn on(draft: &Draft, fact: Fact) -> bool {
    draft.fact(fact).is_some_and(|g| g.value == 1)
}

/// Libraries of attention kernels, and the shipped hardware profiles that have their rates.
const LIBRARIES: [(&str, &[&str]); 2] = [
    (
        "flash",
        &[
            "h100-80",
            "h100-80-nvlink",
            "h100-96-500w",
            "h200-nvlink",
            "a100-80",
            "a100-40",
        ],
    ),
    (
        "triton",
        &["h100-80", "h100-80-nvlink", "a100-80", "a100-40"],
    ),
];

/// Sets the micro-batch, and the library of MPT's attention kernels.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn batch(draft: &mut Draft, ranks: u64) -> Result<(), ConfigError> {
    micro_batch(draft, ranks)?;
    attention(draft)
}

/// Sets the library of MPT's attention kernels if the hardware profile has its rates.
fn attention(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::AttentionLibrary) else {
        return Ok(());
    };
    let place = usize::try_from(given.value).unwrap_or(usize::MAX);
    let (name, profiles) = LIBRARIES.get(place).copied().unwrap_or_default();
    let hardware = draft.value("mesh.hardware").unwrap_or_default();
    if profiles.contains(&hardware.trim_matches('"')) {
        return draft.set(given.row, "train.attention_backend", quoted(name));
    }
    let why = "this hardware profile has no rates of this library: the one that PyTorch picks is predicted";
    draft.approximates(given.row, why);
    Ok(())
}

/// Sets the micro-batch, at most the sequences that a rank has per step.
fn micro_batch(draft: &mut Draft, ranks: u64) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::RankMicroBatch) else {
        return Ok(());
    };
    let all = draft.fact(Fact::GlobalBatch).map(|g| g.value);
    let each = all.map(|all| all / ranks.max(1)).filter(|each| *each > 0);
    let micro = each.map_or(given.value, |each| each.min(given.value));
    draft.set(given.row, "train.micro_batch", micro.to_string())?;
    if micro < given.value {
        let why = "a rank has fewer sequences per step: Composer reduces the micro-batch";
        draft.approximates(given.row, why);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_have_the_rates_of_their_libraries() {
        let of = |name: &str| {
            let file = format!("../scenarios/hardware/{name}.toml");
            std::fs::read_to_string(file).unwrap()
        };
        for (library, profiles) in LIBRARIES {
            for profile in profiles {
                let mut all = of(profile);
                if all.contains("extends = \"h100-80\"") {
                    all += &of("h100-80");
                }
                let wanted = format!("backend = \"{library}\"");
                assert!(all.contains(&wanted), "{profile}: {library}");
            }
        }
    }
}
