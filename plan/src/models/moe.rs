//! Mixtures of experts: decoders with experts in place of some feed-forward layers (Mixtral,
//! Qwen2-MoE, Qwen3-MoE).

#[cfg(test)]
mod tests;

use super::decoder::{self, Decoder};
use super::defaults;
use super::llama::FFN_MULTIPLE;
use super::spec::{Conflict, Defaults, FamilySpec};
use crate::config::{
    Activation, AttentionGate, AttentionSinks, Experts, Family, Glu, LayerType, MlpType, Model,
    NormPosition, PackedQkv, PositionEmbedding, QkNorm, Residual,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Moe,
    name: "moe",
    keys: &KEYS,
    defaults: Defaults {
        ffn: |hidden| (8 * hidden).div_ceil(3).next_multiple_of(FFN_MULTIPLE),
        ffn_multiple: FFN_MULTIPLE,
        ..decoder::spec::SPEC.defaults
    },
    expert_parallel: Some(|m| ("experts", m.options.experts.experts)),
    hf: decoder::EXPERT_TYPES,
    dimensions,
    check,
    declare: |d, m| Box::new(Decoder::new(d, m)),
    ..decoder::spec::SPEC
};

/// Keys of experts, which follow those of decoders.
const OF_EXPERTS: [&str; 28] = [
    "experts",
    "top_k",
    "expert_ffn",
    "expert_latent",
    "expert_bias",
    "glu",
    "glu_limit",
    "router_bias",
    "router_bias_update_speed",
    "shared_expert_ffn",
    "shared_expert_gate",
    "expert_norm",
    "dense_and_experts",
    "zero_experts",
    "shortcut_experts",
    "routed_attention",
    "dense_layers",
    "moe_every",
    "router",
    "normalize_top_k",
    "route_scale",
    "score_before_experts",
    "mask_expert_rows",
    "router_groups",
    "router_group_top_k",
    "aux_loss",
    "aux_loss_kind",
    "z_loss",
];

const KEYS: [&str; decoder::spec::KEYS.len() + OF_EXPERTS.len()] = {
    let mut keys = [""; _];
    let shared = decoder::spec::KEYS;
    let mut i = 0;
    while i < keys.len() {
        keys[i] = if i < shared.len() {
            shared[i]
        } else {
            OF_EXPERTS[i - shared.len()]
        };
        i += 1;
    }
    keys
};

fn dimensions(m: &Model) -> Vec<(&'static str, u64)> {
    vec![
        ("vocab", m.vocab),
        ("hidden", m.hidden),
        ("expert_ffn", decoder::expert_width(m)),
        ("heads x head_dim", m.heads * m.head_dim),
        ("kv_heads x head_dim", m.kv_heads * m.head_dim),
    ]
}

fn check(m: &Model) -> Result<(), Conflict> {
    decoder::rules::check(m)?;
    let e = &m.options.experts;
    if m.bias.mlp() {
        return Err(Conflict {
            help: Some("use false, or \"qkv\" for queries, keys and values"),
            ..Conflict::new(
                &["bias", "family"],
                "experts and routers have no bias".to_owned(),
            )
        });
    }
    if e.router_bias_update_speed > 0.0 && !e.router_bias {
        let message = "`router_bias_update_speed` has no effect without `router_bias`";
        let keys = &["router_bias_update_speed", "router_bias"];
        return Err(Conflict {
            help: Some("set router_bias = true"),
            ..Conflict::new(keys, message.to_owned())
        });
    }
    check_choices(e)?;
    check_blocks(m)?;
    check_glu(m)?;
    if e.shared_expert_gate && e.shared_expert_ffn == 0 {
        let message = "`shared_expert_gate` needs a shared expert".to_owned();
        return Err(Conflict {
            help: Some("set shared_expert_ffn"),
            ..Conflict::new(&["shared_expert_gate", "shared_expert_ffn"], message)
        });
    }
    let listed = !m.options.layers.mlp_layer_types.is_empty();
    if !listed && !(0..u64::from(m.layers)).any(|layer| e.has(layer)) {
        let message = format!("none of the {} layers has experts", m.layers);
        return Err(Conflict {
            help: Some("families llama and decoder have dense layers only"),
            ..Conflict::new(&["dense_layers", "moe_every", "layers"], message)
        });
    }
    Ok(())
}

/// Refuses routers that choose more experts than they have, at the nearest value that they have.
fn check_choices(e: &Experts) -> Result<(), Conflict> {
    let (experts, k, groups, kept) = (e.experts, e.top_k, e.router_groups, e.router_group_top_k);
    let conflict = |keys, message, nearest| {
        Err(Conflict {
            nearest: Some(nearest),
            ..Conflict::new(keys, message)
        })
    };
    if k > experts {
        let message = format!("`top_k` ({k}) is larger than `experts` ({experts})");
        return conflict(&["top_k", "experts"], message, ("top_k", experts));
    }
    if !experts.is_multiple_of(groups) {
        let message =
            format!("`experts` ({experts}) is not divisible by `router_groups` ({groups})");
        let divisors = (1..=experts).filter(|n| experts.is_multiple_of(*n));
        let nearest = divisors.min_by_key(|n| (n.abs_diff(groups), u64::MAX - n));
        let nearest = ("router_groups", nearest.unwrap_or(1));
        return conflict(&["router_groups", "experts"], message, nearest);
    }
    if kept > groups {
        let message =
            format!("`router_group_top_k` ({kept}) is larger than `router_groups` ({groups})");
        let nearest = ("router_group_top_k", groups);
        return conflict(&["router_group_top_k", "router_groups"], message, nearest);
    }
    let choices = experts / groups * kept;
    if k > choices {
        let message = format!(
            "`top_k` ({k}) is larger than the {choices} experts of {kept} of {groups} groups"
        );
        let keys = &["top_k", "router_group_top_k", "router_groups", "experts"];
        return conflict(keys, message, ("top_k", choices));
    }
    Ok(())
}

/// Refuses gates of gpt-oss in experts without gates, and with another activation.
fn check_glu(m: &Model) -> Result<(), Conflict> {
    if m.options.experts.glu != Glu::GptOss {
        return Ok(());
    }
    if !m.options.gated_mlp {
        let message = "`glu` \"gpt_oss\" needs experts with gates".to_owned();
        let conflict = Conflict::new(&["glu", "gated_mlp"], message);
        return Err(Conflict {
            help: Some("set gated_mlp = true"),
            ..conflict
        });
    }
    let activation = defaults::activation(m);
    if activation != Activation::Silu {
        let message = format!(
            "`glu` \"gpt_oss\" is `gate * sigmoid(1.702 * gate)`: it has no use for `activation` \"{}\"",
            activation.name()
        );
        let conflict = Conflict::new(&["glu", "activation"], message);
        return Err(Conflict {
            help: Some("use activation = \"silu\""),
            ..conflict
        });
    }
    Ok(())
}

/// Refuses blocks whose parts do not fit together.
fn check_blocks(m: &Model) -> Result<(), Conflict> {
    let (o, e) = (&m.options, &m.options.experts);
    let groups = e.router_groups;
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    let plain = o.residual == Residual::Sequential
        && o.norm_position == NormPosition::Before
        && o.streams == 0
        && o.context.encoder_layers == 0
        && o.per_layer.altup.is_none()
        && o.context.tower_memory().is_none()
        && !e.dense_and_experts;
    if e.zero_experts > 0 && (groups > 1 || e.aux_loss > 0.0) {
        let message = "`zero_experts` need a router without groups and a load-balancing loss";
        let keys = &["zero_experts", "router_groups", "aux_loss"];
        return conflict(keys, message.to_owned());
    }
    let alone = o.shared_block.is_none() && o.per_layer.layer_embedding_width == 0;
    if e.shortcut_experts && (!plain || !alone || o.layers.mlp_layer_types[..] != [MlpType::Dense])
    {
        let message = "`shortcut_experts` are next to dense layers: `mlp_layer_types` must be [\"dense\"], `residual` \"sequential\" and `norm_position` \"before\"";
        let keys = &["shortcut_experts", "mlp_layer_types", "residual"];
        return conflict(keys, message.to_owned());
    }
    check_routed_attention(m, plain)
}

/// Refuses what attention by experts does not have; `plain` says whether blocks are.
fn check_routed_attention(m: &Model, plain: bool) -> Result<(), Conflict> {
    let (o, e) = (&m.options, &m.options.experts);
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    if !e.routed_attention {
        return Ok(());
    }
    if m.heads != m.kv_heads * e.top_k {
        let message = format!(
            "`routed_attention` has `kv_heads` ({}) heads for each of `top_k` ({}) experts, not {} `heads`",
            m.kv_heads, e.top_k, m.heads
        );
        return conflict(&["routed_attention", "heads", "kv_heads", "top_k"], message);
    }
    let whole = (0..m.layers as usize).all(|layer| m.layer_type(layer) == LayerType::Full);
    let separate = o.attention.packed_qkv == PackedQkv::None
        && !o.latent.is_used()
        && o.attention.output_groups == 0
        && o.attention.qk_norm == QkNorm::None
        && o.attention.attention_gate == AttentionGate::None
        && o.attention.attention_sinks == AttentionSinks::None
        && o.attention.attention_softcap.is_none()
        && o.positions.position_embedding != PositionEmbedding::Alibi
        && o.attention.value_head_dim.is_none()
        && o.attention.full_head_dim.is_none()
        && o.positions.relative_buckets == 0
        && o.positions.disentangled_rows == 0
        && o.latent.index_n_heads == 0
        && o.layers.layer_kv_heads.is_empty()
        && o.per_layer.shared_kv_layers == 0;
    let separate = separate && !o.attention.differential && !o.attention.value_norm && !o.sub_norms;
    if !plain || !whole || !separate || m.bias.qkv() {
        let message = "`routed_attention` sees all positions, without biases, norms of queries or gates: `residual` must be \"sequential\" and `norm_position` \"before\"";
        let keys = &[
            "routed_attention",
            "residual",
            "layer_types",
            "sliding_window",
            "qk_norm",
        ];
        return conflict(keys, message.to_owned());
    }
    Ok(())
}
