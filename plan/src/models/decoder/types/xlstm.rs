//! xLSTM: matrix memories with exponential gates.

use super::read::size;
use super::{NEVER_TIED, derived, number};
use crate::models::hf::{Field, Fields, Given, HIDDEN, HfType, LAYERS, Meaning, VOCAB, field};
use serde_json::{Value, json};

/// Returns the width of what a factor makes of the model's.
fn width(file: Fields<'_>, name: &str, default: f64) -> Result<u64, String> {
    let factor = file(name).and_then(|x| x.as_f64()).unwrap_or(default);
    let hidden = match file("hidden_size") {
        Some(_) => size(file, "hidden_size", 4096)?,
        None => size(file, "embedding_dim", 4096)?,
    };
    Ok((hidden as f64 * factor) as u64)
}

/// Returns the sizes of the memories.
fn memories(file: Fields<'_>) -> Result<Option<Value>, String> {
    let heads = size(file, "num_heads", 8)?;
    let (keys, values) = (
        width(file, "qk_dim_factor", 0.5)?,
        width(file, "v_dim_factor", 1.0)?,
    );
    if !keys.is_multiple_of(heads) || !values.is_multiple_of(heads) {
        return Err(format!(
            "`num_heads` ({heads}) must divide the widths of keys ({keys}) and values ({values})"
        ));
    }
    Ok(Some(json!({
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": keys / heads,
        "value_dim": values / heads,
        "exponential_gates": true,
        "chunk": size(file, "chunk_size", 64)?,
    })))
}

const FIELDS: &[Field] = &[
    VOCAB,
    Field {
        names: &["hidden_size", "embedding_dim"],
        ..HIDDEN
    },
    Field {
        names: &["num_hidden_layers", "num_blocks"],
        ..LAYERS
    },
    NEVER_TIED,
    number(
        &["num_heads"],
        "heads",
        |file| Ok(Some(size(file, "num_heads", 8)?.into())),
        |model| Some(model["heads"].clone()),
    ),
    field(
        &["norm_eps"],
        Meaning::Default("norm_eps", Given::Float(1e-6)),
    ),
    field(
        &["output_logit_soft_cap"],
        Meaning::Default("logits_softcap", Given::Float(30.0)),
    ),
    field(&["use_bias"], Meaning::Off),
    field(&["add_out_norm"], Meaning::On),
    field(&["weight_mode"], Meaning::Word(&["single"])),
    derived(
        "ffn",
        &["ffn_proj_factor", "ffn_round_up_to_multiple_of"],
        |file| {
            let unit = size(file, "ffn_round_up_to_multiple_of", 64)?;
            Ok(Some(
                width(file, "ffn_proj_factor", 2.667)?
                    .next_multiple_of(unit)
                    .into(),
            ))
        },
    ),
    derived(
        "linear_attention",
        &[
            "qk_dim_factor",
            "v_dim_factor",
            "chunk_size",
            "gate_soft_cap",
            "autocast_kernel_dtype",
            "chunkwise_kernel",
            "embedding_dim",
            "eps",
            "inference_state_dtype",
            "max_inference_chunksize",
            "mode",
            "norm_reduction_force_float32",
            "num_blocks",
            "return_last_states",
            "sequence_kernel",
            "step_kernel",
        ],
        memories,
    ),
];

pub(super) const TYPES: &[HfType] = &[HfType {
    model_type: "xlstm",
    architecture: "xLSTMForCausalLM",
    fixed: &[
        ("position_embedding", Given::Str("none")),
        ("layer_types", Given::Words(&["linear_attention"])),
    ],
    common: FIELDS,
    fields: &[],
}];
