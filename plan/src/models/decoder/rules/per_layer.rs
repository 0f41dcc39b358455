//! Rules for layers that share keys, embed tokens or have several residual streams (Gemma 3n, 4).

use crate::config::{AttentionGate, Family, Model, NormPosition, PackedQkv, Residual};
use crate::models::spec::Conflict;

/// Refuses layers that have the keys of others, embedded tokens or residual streams, where their
/// parts are not those of Gemma 3n and 4.
pub(super) fn check_per_layer(m: &Model) -> Result<(), Conflict> {
    let (o, of) = (&m.options, &m.options.per_layer);
    let conflict = |keys, message: &str| Err(Conflict::new(keys, message.to_owned()));
    if of.layer_embedding_width > 0 && !is_plain(m) {
        return conflict(
            &[
                "layer_embedding_width",
                "family",
                "residual",
                "encoder_layers",
            ],
            "embedded tokens of single layers need a decoder with `residual` = \"sequential\", without an encoder",
        );
    }
    check_shared(m)?;
    let n = of.activation_sparsity.len();
    if n > 0 && (n < m.layers as usize || !o.gated_mlp || o.packed_gate_up) {
        return conflict(
            &[
                "activation_sparsity",
                "layers",
                "gated_mlp",
                "packed_gate_up",
            ],
            "`activation_sparsity` has a number for each layer, and needs separate gates",
        );
    }
    check_altup(m)
}

/// Returns whether blocks add up in one residual stream of a decoder without an encoder.
fn is_plain(m: &Model) -> bool {
    let o = &m.options;
    let decodes = matches!(m.family, Family::Decoder | Family::Moe);
    decodes && o.residual == Residual::Sequential && o.context.encoder_layers == 0
}

/// Refuses layers without keys that have none to share.
fn check_shared(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.per_layer.shared_kv_layers == 0 {
        return Ok(());
    }
    let separate = o.attention.packed_qkv == PackedQkv::None
        && !o.latent.is_used()
        && o.attention.output_groups == 0
        && o.attention.attention_gate == AttentionGate::None
        && o.context.tower_memory().is_none();
    if !is_plain(m) || !separate {
        return Err(Conflict::new(
            &[
                "shared_kv_layers",
                "packed_qkv",
                "kv_lora_rank",
                "attention_gate",
            ],
            "layers that share keys and values need separate projections and `residual` = \"sequential\"".to_owned(),
        ));
    }
    let lacks = |layer: &usize| m.layer_type(*layer).is_attention() && m.keys_of(*layer).is_none();
    if let Some(layer) = (m.layers_with_keys()..m.layers as usize).find(lacks) {
        let message = format!(
            "layer {layer} has no layer of its type ({}) among the first {}, whose keys and values it could share",
            m.layer_type(layer).name(),
            m.layers_with_keys()
        );
        let keys = &["shared_kv_layers", "layers", "layer_types"];
        return Err(Conflict::new(keys, message));
    }
    Ok(())
}

/// Refuses several residual streams of blocks that have other parts than attention and a
/// feed-forward layer.
fn check_altup(m: &Model) -> Result<(), Conflict> {
    let (o, of) = (&m.options, &m.options.per_layer);
    let Some(altup) = &of.altup else {
        return Ok(());
    };
    if altup.active >= altup.streams {
        let message = format!(
            "`active` ({}) must be less than `streams` ({})",
            altup.active, altup.streams
        );
        return Err(Conflict::new(&["altup"], message));
    }
    if altup.scale && of.layer_embedding_width == 0 {
        let message =
            "`scale` of `altup` multiplies what embeddings per layer gate, and there are none";
        return Err(Conflict::new(
            &["altup", "layer_embedding_width"],
            message.to_owned(),
        ));
    }
    let whole = (0..m.layers as usize).all(|layer| {
        let of = m.of_layer(layer);
        m.layer_type(layer).is_attention()
            && !m.layer_type(layer).is_gated()
            && of.kv_heads > 0
            && of.ffn > 0
    });
    let fits = is_plain(m) && whole && o.streams == 0 && o.norm_position != NormPosition::Sum;
    if !fits || o.layer_scale || o.context.tower_memory().is_some() {
        return Err(Conflict::new(
            &[
                "altup",
                "layer_types",
                "norm_position",
                "streams",
                "layer_scale",
            ],
            "`altup` needs a decoder of plain blocks, each with attention and a feed-forward layer"
                .to_owned(),
        ));
    }
    Ok(())
}
