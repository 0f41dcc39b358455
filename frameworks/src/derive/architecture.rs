//! Decides the model that Megatron-LM's arguments describe: its family and its options.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::Lack;
use crate::table::{Fact, quoted};

const FAMILY: &str = "model.family";
const VOCAB: &str = "model.vocab";

/// Defaults of Megatron's `MLATransformerConfig`.
const KV_RANK: &str = "512";
const HEAD: u64 = 128;
const ROTATED: u64 = 64;

/// Default of `--make-vocab-size-divisible-by`, which pads the vocabulary.
const MULTIPLE: u64 = 128;

/// Activations of Megatron-LM, stored as a [`Fact::Activation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    Gelu,
    Swiglu,
    SquaredRelu,
    QuickGeglu,
}

/// Position embeddings of Megatron-LM, stored as a [`Fact::Positions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Positions {
    Learned,
    Rotary,
    None,
}

/// Sets the keys of `[model]` that depend on several arguments.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn decide(draft: &mut Draft) -> Result<(), ConfigError> {
    if draft.value("model.preset").is_some() {
        replaced(draft);
        return Ok(());
    }
    if let Some(given) = draft.fact(Fact::OtherLayers).filter(|g| g.value == 1) {
        let why = "layers of several kinds are not read from arguments: name a folder with config.json with --model";
        draft.none(given.row, Lack::Everything, why);
    }
    if draft.value("model.layers").is_none() {
        return Ok(());
    }
    let activation = draft.fact(Fact::Activation);
    let is = |a: Activation| activation.is_some_and(|g| g.value == a as u64);
    let latent = draft.fact(Fact::Latent).is_some_and(|g| g.value == 1);
    let gated = is(Activation::Swiglu) || is(Activation::QuickGeglu);
    let positions = draft.fact(Fact::Positions);
    let rotary = positions.map(|p| p.value == Positions::Rotary as u64);
    let partial = draft.value(PARTIAL).is_some_and(|v| v != "1.0");
    let plain_llama = is(Activation::Swiglu) && !latent && !partial && rotary != Some(false);
    let plain_gpt2 = !gated
        && !latent
        && !is(Activation::SquaredRelu)
        && rotary != Some(true)
        && positions.is_none_or(|p| p.value == Positions::Learned as u64)
        && draft.fact(Fact::NoBias).is_none()
        && draft.fact(Fact::RmsNorm).is_none();
    grouped_queries(draft);
    ffn(draft, gated);
    vocabulary(draft)?;
    if !latent {
        unset(draft, &LATENT, "without --multi-latent-attention");
    }
    if !partial || plain_llama || plain_gpt2 {
        unset(draft, &[PARTIAL], "the whole head is rotated");
    }
    match activation.filter(|_| plain_llama) {
        Some(given) => {
            draft.set(given.row, FAMILY, quoted("llama"))?;
            norms_of_llama(draft);
        }
        None if plain_gpt2 => draft.assume(FAMILY, quoted("gpt2"), "without --swiglu"),
        None => decoder(draft, gated, latent)?,
    }
    draft.assume(
        "model.tie_embeddings",
        "true",
        "without --untie-embeddings-and-output-weights",
    );
    if draft.fact(Fact::Experts).is_none_or(|e| e.value <= 1) && gated && !latent {
        biases(draft);
    }
    as_predicted(draft);
    Ok(())
}

/// Marks facts that decide no key, but match the predicted model.
fn as_predicted(draft: &mut Draft) {
    for fact in OF_MODEL {
        if let Some(given) = draft.fact(fact) {
            let row = &mut draft.rows[given.row];
            if row.settings.is_empty() && row.why.is_none() && fact != Fact::PreSoftmax {
                draft.none(given.row, Lack::Nothing, "as predicted");
            }
        }
    }
}

const PARTIAL: &str = "model.partial_rotary_factor";
const LATENT: [&str; 4] = [
    "model.kv_lora_rank",
    "model.q_lora_rank",
    "model.qk_rope_head_dim",
    "model.v_head_dim",
];

/// Drops the arguments that describe the model because `--model` replaces them.
pub(super) fn replaced(draft: &mut Draft) {
    let code = ["model.preset", "model.implementation"];
    let mut keys = Vec::new();
    for setting in draft.rows.iter().flat_map(|r| &r.settings) {
        let is_size = setting.key.starts_with("model.") && !setting.key.contains("implementation");
        if is_size && !code.contains(&setting.key) {
            keys.push(setting.key);
        }
    }
    unset(draft, &keys, REPLACED);
    for fact in OF_MODEL {
        if let Some(given) = draft.fact(fact) {
            draft.none(given.row, Lack::Nothing, REPLACED);
        }
    }
}

pub(super) const REPLACED: &str = "replaced by --model";
/// Facts that only describe the model.
const OF_MODEL: [Fact; 12] = [
    Fact::UnitOffset,
    Fact::OtherLayers,
    Fact::Activation,
    Fact::Positions,
    Fact::NoBias,
    Fact::RmsNorm,
    Fact::Latent,
    Fact::Vocab,
    Fact::VocabMultiple,
    Fact::GroupedQueries,
    Fact::QkHead,
    Fact::PreSoftmax,
];

fn unset(draft: &mut Draft, keys: &[&'static str], why: &str) {
    for key in keys {
        draft.unset(key, Lack::Nothing, why);
    }
}

/// Uses the number of query groups only with `--group-query-attention`.
fn grouped_queries(draft: &mut Draft) {
    if draft
        .fact(Fact::GroupedQueries)
        .is_none_or(|g| g.value == 0)
    {
        let why = "without --group-query-attention";
        draft.unset("model.kv_heads", Lack::Nothing, why);
    }
}

/// Sets the width of the feed-forward layer as Megatron-LM's `validate_args` does.
fn ffn(draft: &mut Draft, gated: bool) {
    let hidden = draft
        .value("model.hidden")
        .and_then(|v| v.parse::<u64>().ok());
    if let Some(hidden) = hidden {
        let width = if gated {
            8 * hidden / 3 / 64 * 64
        } else {
            4 * hidden
        };
        draft.assume("model.ffn", width.max(1).to_string(), "Megatron's default");
    }
}

/// Pads the vocabulary as Megatron-LM's `vocab_size_with_padding` does.
fn vocabulary(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::Vocab) else {
        return Ok(());
    };
    if draft.value(VOCAB).is_some() {
        draft.none(given.row, Lack::Nothing, "--padded-vocab-size decides");
        return Ok(());
    }
    let multiple = draft
        .fact(Fact::VocabMultiple)
        .map_or(MULTIPLE, |m| m.value);
    let ranks = draft.fact(Fact::Tensor).map_or(1, |t| t.value.max(1));
    let multiple = multiple.saturating_mul(ranks).max(1);
    let padded = given.value.div_ceil(multiple).saturating_mul(multiple);
    draft.set(given.row, VOCAB, padded.to_string())
}

/// Notes that the prediction uses RMSNorm instead of LayerNorm.
fn norms_of_llama(draft: &mut Draft) {
    let rms = draft.fact(Fact::RmsNorm).is_some_and(|g| g.value == 1);
    for fact in [Fact::RmsNorm, Fact::UnitOffset] {
        if let Some(given) = draft.fact(fact).filter(|_| !rms) {
            draft.approximates(given.row, "LayerNorm is predicted as RMSNorm");
        }
    }
}

/// Adds biases to linear layers unless `--disable-bias-linear` is given.
fn biases(draft: &mut Draft) {
    if draft.fact(Fact::NoBias).is_none_or(|b| b.value == 0) {
        draft.assume("model.bias", "true", "without --disable-bias-linear");
    }
}

/// Sets the keys of `family = "decoder"`, whose options cover models other than Llama.
fn decoder(draft: &mut Draft, gated: bool, latent: bool) -> Result<(), ConfigError> {
    let on = |draft: &Draft, fact| draft.fact(fact).is_some_and(|g| g.value == 1);
    let (rms, no_bias) = (on(draft, Fact::RmsNorm), on(draft, Fact::NoBias));
    let shifted = on(draft, Fact::UnitOffset);
    let activation = draft.fact(Fact::Activation);
    match activation {
        Some(given) => draft.set(given.row, FAMILY, quoted("decoder"))?,
        None => draft.assume(FAMILY, quoted("decoder"), "without --swiglu"),
    }
    let named = |a: Activation| activation.is_some_and(|g| g.value == a as u64);
    let name = if named(Activation::SquaredRelu) {
        "relu2"
    } else if gated {
        "silu"
    } else {
        "gelu"
    };
    if named(Activation::QuickGeglu)
        && let Some(given) = activation
    {
        draft.approximates(given.row, "the activation is predicted as SwiGLU");
    }
    let norm = match (rms, shifted) {
        (true, false) => "rms_norm",
        (true, true) => "rms_norm_unit_offset",
        (false, false) => "layer_norm",
        (false, true) => "layer_norm_unit_offset",
    };
    let positions = match draft.fact(Fact::Positions).map(|p| p.value) {
        Some(p) if p == Positions::Rotary as u64 => "rotary",
        Some(p) if p == Positions::None as u64 => "none",
        None if latent => "rotary",
        _ => "learned",
    };
    draft.assume("model.activation", quoted(name), "Megatron's activation");
    draft.assume(
        "model.gated_mlp",
        gated.to_string(),
        "Megatron's activation",
    );
    draft.assume("model.norm", quoted(norm), "Megatron's norm");
    draft.assume(
        "model.position_embedding",
        quoted(positions),
        "Megatron's positions",
    );
    if !no_bias && !latent {
        draft.assume("model.bias", "true", "without --disable-bias-linear");
    }
    if latent {
        return latent_attention(draft);
    }
    Ok(())
}

/// Sets the sizes of multi-head latent attention.
fn latent_attention(draft: &mut Draft) -> Result<(), ConfigError> {
    let dims = |draft: &Draft, fact, default| draft.fact(fact).map_or(default, |g| g.value);
    let inner = dims(draft, Fact::QkHead, HEAD);
    let turned = draft.value("model.qk_rope_head_dim");
    let turned = turned.and_then(|v| v.parse().ok()).unwrap_or(ROTATED);
    let why = "Megatron's default";
    draft.assume("model.kv_lora_rank", KV_RANK, why);
    draft.assume("model.qk_rope_head_dim", ROTATED.to_string(), why);
    draft.assume("model.v_head_dim", HEAD.to_string(), why);
    let size = inner.saturating_add(turned).to_string();
    draft.unset("model.head_dim", Lack::Nothing, "latent attention");
    let norms = "the compressed vectors are normalized";
    draft.unset("model.qk_norm", Lack::Nothing, norms);
    match draft.fact(Fact::QkHead) {
        Some(given) => draft.set(given.row, "model.head_dim", size)?,
        None => draft.assume("model.head_dim", size, why),
    }
    Ok(())
}
