//! Zamba 2: layers of Mamba-2, some of which follow shared blocks of attention.

use super::read::{Listed, flag, size};
use super::{HIDDEN_ACT, derived, number};
use crate::models::hf::{
    Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, VOCAB,
    field,
};
use crate::models::llama::NORM_EPS;
use crate::models::windows::{layers, repeated};
use serde_json::{Value, json};

/// Returns which layers are behind a shared block: as listed, or as the class has them.
fn kinds(file: Fields<'_>) -> Vec<&'static str> {
    let listed = Listed::of(file, &["layers_block_type"]);
    let kind = |layer: u64| {
        let default =
            layer.is_multiple_of(6) && (6..=42).contains(&layer) || matches!(layer, 47 | 51);
        match listed.is(layer, "hybrid", default && listed.is_missing()) {
            true => "shared_attention",
            false => "mamba2",
        }
    };
    (0..layers(file)).map(kind).collect()
}

fn state(file: Fields<'_>) -> Result<Option<Value>, String> {
    let inner = size(file, "mamba_expand", 2)? * size(file, "hidden_size", 2560)?;
    let heads = size(file, "n_mamba_heads", 8)?;
    if !inner.is_multiple_of(heads) {
        return Err(format!(
            "`n_mamba_heads` ({heads}) must divide the width of layers ({inner})"
        ));
    }
    Ok(Some(json!({
        "inner": inner, "heads": heads,
        "state": size(file, "mamba_d_state", 64)?,
        "conv": size(file, "mamba_d_conv", 4)?,
        "groups": size(file, "mamba_ngroups", 1)?,
        "chunk": size(file, "chunk_size", 256)?,
        "bias": flag(file, "add_bias_linear", false),
    })))
}

fn shared(file: Fields<'_>) -> Result<Option<Value>, String> {
    let hidden = size(file, "hidden_size", 2560)?;
    Ok(Some(json!({
        "blocks": size(file, "num_mem_blocks", 1)?,
        "ffn": size(file, "intermediate_size", 4 * hidden)?,
        "bias": flag(file, "add_bias_linear", false),
        "adapter_rank": size(file, "adapter_rank", 128)?,
        "attention_adapters": flag(file, "use_shared_attention_adapter", false),
    })))
}

const STATE_FIELDS: &[&str] = &[
    "mamba_expand",
    "n_mamba_heads",
    "mamba_headdim",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_ngroups",
    "chunk_size",
    "add_bias_linear",
    "use_conv_bias",
    "use_mamba_kernels",
    "use_mem_eff_path",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_limit",
];

/// Classes of transformers tie nothing, blocks included, if they do not tie embedding and head.
const TIED: Field = number(
    &["tie_word_embeddings"],
    "tie_embeddings",
    |file| {
        match flag(file, "tie_word_embeddings", true) {
        true => Ok(Some(true.into())),
        false => Err(
            "`tie_word_embeddings` must be true: otherwise the class shares no blocks either, which is not planned"
                .to_owned(),
        ),
    }
    },
    |model| Some(model["tie_embeddings"].clone()),
);

const FIELDS: &[Field] = &[
    VOCAB,
    HIDDEN,
    LAYERS,
    HEADS,
    POSITIONS,
    ROPE_THETA,
    NORM_EPS,
    TIED,
    Field {
        meaning: Meaning::Choice("activation", &[("gelu", "gelu"), ("silu", "silu")]),
        ..HIDDEN_ACT
    },
    field(&["num_key_value_heads"], Meaning::Optional("kv_heads")),
    // Attention is twice as wide as the model.
    derived(
        "head_dim",
        &["attention_head_dim", "attention_hidden_size", "kv_channels"],
        |file| {
            let (hidden, heads) = (
                size(file, "hidden_size", 2560)?,
                size(file, "num_attention_heads", 32)?,
            );
            let dim = 2 * hidden / heads;
            let whole = size(file, "attention_hidden_size", 2 * hidden)?;
            if whole != 2 * hidden {
                return Err(format!(
                    "`attention_hidden_size` must be 2 x `hidden_size` ({}), not {whole}",
                    2 * hidden
                ));
            }
            let given = size(file, "attention_head_dim", dim)?;
            match given == dim {
                true => Ok(Some(dim.into())),
                false => Err(format!(
                    "`attention_head_dim` must be 2 x `hidden_size` / `num_attention_heads` ({dim}), not {given}"
                )),
            }
        },
    ),
    derived(
        "position_embedding",
        &["use_mem_rope", "use_long_context"],
        |file| {
            let rotates = flag(file, "use_mem_rope", false);
            Ok(Some(if rotates { "rotary" } else { "none" }.into()))
        },
    ),
    derived(
        "layer_types",
        &["layers_block_type", "hybrid_layer_ids"],
        |file| Ok(Some(repeated(&kinds(file)))),
    ),
    derived("ssm", STATE_FIELDS, state),
    derived(
        "shared_block",
        &[
            "num_mem_blocks",
            "intermediate_size",
            "adapter_rank",
            "use_shared_attention_adapter",
            "num_query_groups",
            "num_logits_to_keep",
        ],
        shared,
    ),
];

pub(super) const TYPES: &[HfType] = &[HfType {
    model_type: "zamba2",
    architecture: "Zamba2ForCausalLM",
    fixed: &[("mlp_layer_types", Given::Words(&["none"]))],
    common: FIELDS,
    fields: &[],
}];
