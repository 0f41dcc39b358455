//! Rules for attention: projections, heads, values and positions.

use crate::config::{
    AttentionGate, Family, LayerType, Model, NormPosition, PackedQkv, PositionEmbedding, QkNorm,
    Residual,
};
use crate::models::llama::check_rotary;
use crate::models::spec::Conflict;

/// Refuses positions, norms and packed projections that do not fit together, and hybrid layers
/// without sizes.
pub(super) fn check_projections(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.positions.position_embedding.rotates() {
        check_rotary(m)?;
    } else if o.attention.qk_norm.follows_rope() {
        let message = "`qk_norm` after the rotation needs a rotary embedding".to_owned();
        return Err(Conflict::new(&["qk_norm", "position_embedding"], message));
    }
    if o.norm_position == NormPosition::After && o.residual == Residual::ParallelOneNorm {
        let message = "`residual` = \"parallel_one_norm\" shares a norm on the input, so \
                       `norm_position` cannot be \"after\"";
        let keys = &["residual", "norm_position"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.attention.packed_qkv == PackedQkv::PerHead && m.heads != m.kv_heads {
        let message = format!(
            "`packed_qkv` = \"per_head\" needs a key for each query: {} heads, {} kv_heads",
            m.heads, m.kv_heads
        );
        return Err(Conflict::new(&["packed_qkv", "kv_heads"], message));
    }
    if o.layers.layer_types.contains(&LayerType::Hybrid) && o.ssm.is_none() {
        let message = "`layer_types` has hybrid layers, whose sizes `ssm` gives".to_owned();
        return Err(Conflict::new(&["layer_types", "ssm"], message));
    }
    Ok(())
}

/// Refuses sizes and options that latent attention does not have.
pub(super) fn check_latent(m: &Model) -> Result<(), Conflict> {
    let (o, of) = (&m.options, &m.options.latent);
    if !of.is_used() {
        return Ok(());
    }
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    if of.qk_rope_head_dim >= m.head_dim {
        let message = format!(
            "`qk_rope_head_dim` ({}) is a part of `head_dim` ({})",
            of.qk_rope_head_dim, m.head_dim
        );
        return conflict(&["qk_rope_head_dim", "head_dim", "hidden"], message);
    }
    if of.v_head_dim > m.head_dim {
        let message = format!(
            "values (`v_head_dim` {}) must not be wider than queries (`head_dim` {})",
            of.v_head_dim, m.head_dim
        );
        return conflict(&["v_head_dim", "head_dim", "hidden"], message);
    }
    if of.index_n_heads > 0 && of.q_lora_rank == 0 {
        let message = "the indexer reads compressed queries: `q_lora_rank` is 0".to_owned();
        return conflict(&["index_n_heads", "q_lora_rank"], message);
    }
    if m.kv_heads != m.heads || !o.layers.layer_kv_heads.is_empty() {
        let message = "latent attention has a key for each query".to_owned();
        return conflict(&["kv_heads", "layer_kv_heads", "kv_lora_rank"], message);
    }
    if o.attention.qk_norm != QkNorm::None {
        let message = "latent attention normalizes what it compresses only".to_owned();
        return conflict(&["qk_norm", "kv_lora_rank"], message);
    }
    if o.attention.packed_qkv != PackedQkv::None {
        let message = "latent attention has no packed projection".to_owned();
        return conflict(&["packed_qkv", "kv_lora_rank"], message);
    }
    let knows_order = o.positions.position_embedding.rotates()
        || o.positions.position_embedding == PositionEmbedding::None;
    if !knows_order {
        let message =
            "latent attention needs a rotary embedding, or `position_embedding` = \"none\""
                .to_owned();
        return conflict(&["position_embedding", "kv_lora_rank"], message);
    }
    Ok(())
}

/// Refuses chunks in attention that has no form for them.
pub(super) fn check_chunks(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if !o.layers.layer_types.contains(&LayerType::Chunked) {
        return Ok(());
    }
    let biased = o.positions.relative_buckets > 0 || o.positions.disentangled_rows > 0;
    if biased || o.attention.output_groups > 0 || o.context.encoder_layers > 0 {
        let message =
            "layers of type chunked_attention have no biases of scores, compressed keys or encoder";
        let keys = &[
            "layer_types",
            "relative_buckets",
            "disentangled_rows",
            "output_groups",
            "encoder_layers",
        ];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses values that attention cannot fill up to the width of queries.
pub(super) fn check_values(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let Some(width) = o.attention.value_head_dim else {
        return Ok(());
    };
    if width > m.head_dim {
        let message = format!(
            "values (`value_head_dim` {width}) must not be wider than queries (`head_dim` {})",
            m.head_dim
        );
        let keys = &["value_head_dim", "head_dim", "hidden"];
        return Err(Conflict::new(keys, message));
    }
    let gated = o.attention.attention_gate == AttentionGate::Element;
    let conflict: Option<(&'static [_], _)> = match o.attention.packed_qkv {
        _ if o.latent.is_used() => Some((
            &["value_head_dim", "kv_lora_rank"],
            "latent attention has `v_head_dim`",
        )),
        PackedQkv::None if gated => Some((
            &["value_head_dim", "attention_gate"],
            "its gate has the width of queries",
        )),
        PackedQkv::None => None,
        _ => Some((
            &["value_head_dim", "packed_qkv"],
            "a packed projection makes values of one width",
        )),
    };
    conflict.map_or(Ok(()), |(keys, why)| {
        let message = format!("`value_head_dim` needs separate values: {why}");
        Err(Conflict::new(keys, message))
    })
}

/// Refuses heads that differential attention cannot divide into halves.
pub(super) fn check_differential(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if !o.attention.differential {
        return Ok(());
    }
    let plain = !o.latent.is_used()
        && o.attention.output_groups == 0
        && o.attention.value_head_dim.is_none();
    let shares = o.context.tower_memory().is_some()
        || o.context.encoder_layers > 0
        || !o.layers.layer_kv_heads.is_empty();
    if !plain || shares || !m.kv_heads.is_multiple_of(2) {
        let message = format!(
            "`differential` divides heads into halves: it needs even `kv_heads`, not {}, of one kind of attention",
            m.kv_heads
        );
        let keys = &["differential", "kv_heads", "kv_lora_rank", "layer_kv_heads"];
        return Err(Conflict::new(keys, message));
    }
    Ok(())
}

/// Refuses sizes and options that attention with one head of keys does not have.
pub(super) fn check_shared_keys(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.streams > 0 && (o.residual != Residual::Sequential || o.context.vision.is_some()) {
        let message = "residual streams need `residual` = \"sequential\", without a vision tower";
        return Err(Conflict::new(
            &["streams", "residual", "vision"],
            message.to_owned(),
        ));
    }
    if o.streams > 0 && (o.context.encoder_layers > 0 || normalized_otherwise(o.norm_position)) {
        let message = "residual streams need `norm_position` = \"before\", without an encoder";
        return Err(Conflict::new(
            &["streams", "norm_position", "encoder_layers"],
            message.to_owned(),
        ));
    }
    if o.attention.output_groups == 0 {
        return match o.layers.compress_rates.is_empty() {
            true => Ok(()),
            false => Err(Conflict::new(
                &["compress_rates", "output_groups"],
                "`compress_rates` need attention with `output_groups`".to_owned(),
            )),
        };
    }
    let wide = m.heads * m.head_dim;
    if m.kv_heads != 1 || o.latent.is_used() || o.latent.q_lora_rank == 0 {
        let message = "attention with `output_groups` has one head of keys and compressed queries (`q_lora_rank`)";
        let keys = &["output_groups", "kv_heads", "q_lora_rank", "kv_lora_rank"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if !wide.is_multiple_of(o.attention.output_groups) {
        let message = format!(
            "`output_groups` ({}) must divide the heads' width, {wide}",
            o.attention.output_groups
        );
        return Err(Conflict::new(&["output_groups", "heads"], message));
    }
    Ok(())
}

fn normalized_otherwise(at: NormPosition) -> bool {
    at != NormPosition::Before
}

/// Refuses groups of layers that cannot share weights.
pub(super) fn check_groups(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.layers.layer_groups == 0 {
        return match o.layers.group_layers {
            1 => Ok(()),
            _ => Err(Conflict::new(
                &["group_layers", "layer_groups"],
                "`group_layers` are those of `layer_groups`, of which there are none".to_owned(),
            )),
        };
    }
    if m.family != Family::Bert
        || o.embedding.embedding_norm && o.norm_position != NormPosition::Sum
    {
        let message = "blocks share weights in encoders with `norm_position` = \"sum\" only";
        return Err(Conflict::new(
            &["layer_groups", "family", "norm_position"],
            message.to_owned(),
        ));
    }
    let own = o.layers.layer_groups * o.layers.group_layers;
    if !u64::from(m.layers).is_multiple_of(own) {
        let message = format!(
            "`layers` ({}) must be divisible by `layer_groups` x `group_layers` ({own})",
            m.layers
        );
        let keys = &["layers", "layer_groups", "group_layers"];
        return Err(Conflict::new(keys, message));
    }
    let differs = !o.layers.layer_types.is_empty()
        || !o.layers.layer_ffn.is_empty()
        || !o.layers.layer_kv_heads.is_empty();
    if differs {
        let message = "blocks that share weights cannot differ".to_owned();
        let keys = &["layer_groups", "layer_types", "layer_ffn", "layer_kv_heads"];
        return Err(Conflict::new(keys, message));
    }
    Ok(())
}

/// Refuses attention with positions as keys that shares keys or has other biases, and tables of
/// relative biases that are not there.
pub(super) fn check_disentangled(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.positions.disentangled_rows > 0 {
        let other = match () {
            () if o.attention.packed_qkv != PackedQkv::None
                && !o.positions.disentangled_projections =>
            {
                Some("packed_qkv")
            }
            () if m.kv_heads != m.heads => Some("kv_heads"),
            () if o.positions.relative_buckets > 0 => Some("relative_buckets"),
            () if o.latent.is_used() => Some("kv_lora_rank"),
            () => None,
        };
        if let Some(other) = other {
            let message = format!(
                "`disentangled_rows` needs separate projections, one key head per query head and no other position biases; `{other}` conflicts"
            );
            let keys = &["disentangled_rows", "packed_qkv", "kv_heads"];
            return Err(Conflict::new(keys, message));
        }
    }
    if o.positions.relative_bias_per_layer && o.positions.relative_buckets == 0 {
        let message = "there is no table of relative biases: `relative_buckets` is 0".to_owned();
        return Err(Conflict::new(
            &["relative_bias_per_layer", "relative_buckets"],
            message,
        ));
    }
    Ok(())
}
