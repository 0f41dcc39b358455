//! Rules for decoders that attend to an encoder or a tower.

use crate::config::{Head, LayerType, Model, PackedQkv, Residual, TextEncoder};
use crate::models::spec::Conflict;

/// Refuses layers that attend to a tower that is not there, and tables that a tied head cannot
/// share.
pub(super) fn check_memory(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let crosses = o.layers.layer_types.contains(&LayerType::Cross);
    if crosses && o.context.tower_memory().is_none() {
        let message = "`layer_types` has layers with cross attention: they need a tower, `vision` with `memory`";
        let keys = &["layer_types", "vision"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let separate = o.attention.packed_qkv == PackedQkv::None
        && !o.latent.is_used()
        && o.attention.output_groups == 0;
    if o.context.tower_memory().is_some() && (!separate || o.residual != Residual::Sequential) {
        let message =
            "attention to a tower needs separate projections and `residual` = \"sequential\"";
        let keys = &["vision", "packed_qkv", "kv_lora_rank", "residual"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.embedding.extra_tokens > 0 && m.tie_embeddings {
        let message = "`extra_tokens` are rows that logits have no columns for: `tie_embeddings` must be false";
        let keys = &["extra_tokens", "tie_embeddings"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses sizes of an encoder that do not fit together.
pub(super) fn check_encoder(m: &Model) -> Result<(), Conflict> {
    let Some(of) = &m.options.context.encoder else {
        return Ok(());
    };
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    let Some(inner) = m.text_encoder() else {
        let message = "`encoder` has sizes of blocks that are not there: `encoder_layers` is 0";
        return conflict(&["encoder", "encoder_layers"], message.to_owned());
    };
    if inner.heads == 0 || !inner.heads.is_multiple_of(inner.kv_heads.max(1)) {
        let message = format!(
            "`encoder`: heads ({}) is not divisible by kv_heads ({})",
            inner.heads, inner.kv_heads
        );
        return conflict(&["encoder", "heads", "kv_heads"], message);
    }
    if of.head_dim.is_none() && !inner.hidden.is_multiple_of(inner.heads) {
        let message = format!(
            "`encoder`: hidden ({}) is not divisible by heads ({})",
            inner.hidden, inner.heads
        );
        return conflict(&["encoder", "heads"], message);
    }
    if m.options.positions.position_embedding.rotates() && !inner.head_dim.is_multiple_of(2) {
        let message = format!(
            "`encoder`: head_dim ({}) must be even, as rotary embeddings need it",
            inner.head_dim
        );
        return conflict(&["encoder", "position_embedding"], message);
    }
    if inner.hidden != m.hidden && !of.own_tokens {
        let message = format!(
            "`encoder`: hidden ({}) is not that of the decoder ({}), whose table of tokens it has without own_tokens",
            inner.hidden, m.hidden
        );
        return conflict(&["encoder", "hidden"], message);
    }
    check_encoder_windows(m, of, &inner)?;
    // Its blocks follow the same rules.
    let mut plain = inner;
    plain.options.context.encoder = None;
    plain.options.output.head = Head::LanguageModel;
    super::check(&plain)
}

/// Refuses windows of an encoder that have no size, or sums of positions without a window.
fn check_encoder_windows(m: &Model, of: &TextEncoder, inner: &Model) -> Result<(), Conflict> {
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    let known = [LayerType::Full, LayerType::FullNoRope, LayerType::Sliding];
    if let Some(other) = of.layer_types.iter().find(|kind| !known.contains(kind)) {
        let message = format!(
            "`encoder`: layer_types must be full_attention, full_attention_no_rope or sliding_attention, not {}",
            other.name()
        );
        return conflict(&["encoder"], message);
    }
    let slides = inner
        .options
        .layers
        .layer_types
        .contains(&LayerType::Sliding);
    if slides && inner.options.layers.sliding_window.is_none() {
        let message =
            "`encoder`: layer_types has layers with a window, whose size sliding_window gives";
        return conflict(&["encoder", "sliding_window"], message.to_owned());
    }
    if of.summary_block > 0
        && (m.options.positions.relative_buckets == 0 || of.sliding_window.is_none())
    {
        let message = "`encoder`: sums of positions (summary_block) are seen next to a window (sliding_window), by biases of `relative_buckets`";
        return conflict(&["encoder", "relative_buckets"], message.to_owned());
    }
    Ok(())
}

/// Refuses gates, heads, residual streams and positions that encoders with decoders do not have.
pub(super) fn check_combinations(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.packed_gate_up && !o.gated_mlp {
        let message = "`packed_gate_up` needs a gate: `gated_mlp` is false".to_owned();
        return Err(Conflict::new(&["packed_gate_up", "gated_mlp"], message));
    }
    if o.context.encoder_layers > 0
        && matches!(
            o.output.head,
            Head::Pretraining | Head::Vector | Head::Contrastive
        )
    {
        let message = "encoders with decoders have no such `head`".to_owned();
        return Err(Conflict::new(&["head", "encoder_layers"], message));
    }
    if o.context.encoder_layers > 0 && o.residual != Residual::Sequential {
        let message = "an encoder needs `residual` = \"sequential\"".to_owned();
        return Err(Conflict::new(&["residual", "encoder_layers"], message));
    }
    if o.positions.relative_buckets > 0
        && (o.positions.position_embedding.rotates() || o.latent.is_used())
    {
        let message = "`relative_buckets` are positions: `position_embedding` must be \"none\"";
        return Err(Conflict::new(
            &["relative_buckets", "position_embedding"],
            message.to_owned(),
        ));
    }
    Ok(())
}
