//! Types with gated short convolutions in place of attention in some layers: LFM2 and LFM3.

use super::experts::{NORMALIZED, ROUTE_SCALE};
use super::read::{FULL, Listed, SLIDING, by_layer, flag, integer};
use super::routed::mlp_types;
use super::windowed::{LARGE_THETA, LOCAL_THETA};
use super::{HEAD_NORMS, TIED_BY_DEFAULT, derived};
use crate::models::hf::{
    FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA,
    VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM_128, KV_HEADS};
use serde_json::{Value, json};

const CONV: &str = "conv";
const EPS: Field = field(&["norm_eps"], Meaning::Optional("norm_eps"));
const TIED: Field = Field {
    names: &["tie_word_embeddings", "tie_embedding"],
    ..TIED_BY_DEFAULT
};

/// Returns the width of LFM2's feed-forward layers (`Lfm2MLP`): two thirds of the field, times a
/// factor, rounded up.
fn lfm2_ffn(file: Fields<'_>) -> u64 {
    let given = integer(
        file,
        "block_ff_dim",
        integer(file, "intermediate_size", 12288),
    );
    if !flag(file, "block_auto_adjust_ff_dim", true) {
        return given;
    }
    let factor = file("block_ffn_dim_multiplier").and_then(|x| x.as_f64());
    let ffn = (factor.unwrap_or(1.0) * (2 * given / 3) as f64) as u64;
    ffn.next_multiple_of(integer(file, "block_multiple_of", 256).max(1))
}

/// LFM2 has gated short convolutions in place of attention in some layers.
const CONV_LAYERS: Field = derived("layer_types", &["layer_types", "full_attn_idxs"], |file| {
    let (listed, indices) = (Listed::of(file, &["layer_types"]), file("full_attn_idxs"));
    let indices = indices.as_ref().and_then(Value::as_array);
    let indices = indices.filter(|_| listed.is_missing());
    by_layer(file, |layer| {
        let named = indices.is_none_or(|all| all.iter().any(|n| *n == layer));
        let attends = listed.is(layer, FULL, named);
        if attends { FULL } else { CONV }
    })
});

/// LFM3's layers attend, with a window or without one, where the place among four says so.
const MIXED_LAYERS: Field = derived("layer_types", &["layer_types"], |file| {
    let listed = Listed::of(file, &["layer_types"]);
    by_layer(file, |layer| match listed.word(layer) {
        Some(FULL) => FULL,
        Some(SLIDING) => SLIDING,
        Some(_) => CONV,
        None if layer % 4 == 2 => FULL,
        None if layer % 4 == 0 && layer > 0 => SLIDING,
        None => CONV,
    })
});

/// Sizes of short convolutions, which see `SEEN` positions unless the file says otherwise.
const fn short_conv<const SEEN: u64>() -> Field {
    derived("ssm", &["conv_L_cache", "conv_bias", "conv_dim"], |file| {
        let bias = flag(file, "conv_bias", false);
        Ok(Some(json!({
            "inner": integer(file, "hidden_size", 2560),
            "conv": integer(file, "conv_L_cache", SEEN),
            "conv_bias": bias,
            "bias": bias,
        })))
    })
}

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "lfm2",
        architecture: "Lfm2ForCausalLM",
        fixed: &[HEAD_NORMS],
        common: &[
            VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, POSITIONS, ROPE_THETA,
        ],
        fields: &[
            EPS,
            TIED,
            derived(
                "ffn",
                &[
                    "intermediate_size",
                    "block_ff_dim",
                    "block_multiple_of",
                    "block_ffn_dim_multiplier",
                    "block_auto_adjust_ff_dim",
                ],
                |file| Ok(Some(lfm2_ffn(file).into())),
            ),
            CONV_LAYERS,
            short_conv::<3>(),
        ],
    },
    // A part of the pairs is rotated by angles of 0 in layers that see all positions.
    HfType {
        model_type: "lfm3",
        architecture: "Lfm3ForCausalLM",
        fixed: &[HEAD_NORMS],
        common: &[VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS],
        fields: &[
            HEAD_DIM_128,
            Field {
                names: &["norm_eps", "rms_norm_eps"],
                ..EPS
            },
            TIED,
            ATTENTION_BIAS,
            LARGE_THETA,
            LOCAL_THETA,
            field(
                &["sliding_window"],
                Meaning::Default("sliding_window", Given::Int(256)),
            ),
            derived("norm_position", &["use_sandwich_norm"], |file| {
                let both = flag(file, "use_sandwich_norm", true);
                Ok(both.then(|| "both".into()))
            }),
            derived("attention_gate", &["use_attention_gate"], |file| {
                let gated = flag(file, "use_attention_gate", true);
                Ok(gated.then(|| "head".into()))
            }),
            MIXED_LAYERS,
            short_conv::<7>(),
        ],
    },
];

/// Types of family `moe`.
pub(super) const EXPERTS: &[HfType] = &[HfType {
    model_type: "lfm2_moe",
    architecture: "Lfm2MoeForCausalLM",
    fixed: &[HEAD_NORMS, ("router", Given::Str("sigmoid"))],
    common: &[
        VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS, ROPE_THETA,
    ],
    fields: &[
        EPS,
        TIED,
        CONV_LAYERS,
        short_conv::<3>(),
        field(
            &["num_experts"],
            Meaning::Default("experts", Given::Int(32)),
        ),
        field(
            &["num_experts_per_tok"],
            Meaning::Default("top_k", Given::Int(4)),
        ),
        field(
            &["moe_intermediate_size"],
            Meaning::Default("expert_ffn", Given::Int(1792)),
        ),
        NORMALIZED,
        ROUTE_SCALE,
        mlp_types::<2>(),
        derived("z_loss", &["use_expert_bias"], |_| Ok(None)),
    ],
}];
