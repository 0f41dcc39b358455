//! Family `decoder`.

use super::Decoder;
use super::types;
use crate::config::{
    AttentionGate, Bias, Family, Head, ImagePooling, LayerType, Model, NormPosition, PackedQkv,
    PositionEmbedding, QkNorm, Residual, TextEncoder,
};
use crate::models::declare::Weights;
use crate::models::llama::check_rotary;
use crate::models::spec::{Conflict, DEFAULT_SEQ_LEN, Defaults, FamilySpec, Inputs, Mask};
use crate::models::stages::{self, Staged};

/// Keys of decoders and encoders.
pub(in crate::models) const KEYS: &[&str] = &[
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "tie_embeddings",
    "norm",
    "norm_eps",
    "norm_position",
    "residual",
    "activation",
    "gated_mlp",
    "packed_qkv",
    "packed_gate_up",
    "key_bias",
    "qk_norm",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "position_embedding",
    "token_types",
    "position_offset",
    "partial_rotary_factor",
    "rope_theta",
    "rope_local_theta",
    "rope_scaling",
    "sliding_window",
    "window_from",
    "attention_chunk",
    "attention_temperature",
    "attention_temperature_floor",
    "layer_types",
    "mlp_layer_types",
    "differential",
    "attention_gate",
    "attention_sinks",
    "value_head_dim",
    "full_head_dim",
    "keys_as_values",
    "value_norm",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "indexer_types",
    "layer_embedding_width",
    "layer_embedding_rows",
    "shared_kv_layers",
    "activation_sparsity",
    "altup",
    "sub_norms",
    "activation_scalars",
    "layer_scale",
    "ssm",
    "rwkv",
    "shared_block",
    "linear_attention",
    "encoder_layers",
    "encoder",
    "relative_buckets",
    "relative_bias_per_layer",
    "vision",
    "vision_patches",
    "layer_kv_heads",
    "layer_ffn",
    "max_seq_len",
    "attention_softcap",
    "logits_softcap",
    "embedding_norm",
    "embedding_width",
    "inner_norm",
    "rotary_table",
    "plain_first_block",
    "output_transform",
    "stream_scale",
    "layer_groups",
    "group_layers",
    "streams",
    "output_groups",
    "output_rank",
    "compress_rates",
    "disentangled_rows",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "extra_tokens",
    "head_bias",
    "head",
    "pooler",
    "unused_pooler",
    "contact_head",
    "box_rows",
    "global_projections",
    "head_transform",
    "num_labels",
    "vector_width",
    "sigmoid_loss",
    "implementation",
    "attn_implementation",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "model_type",
];

pub(in crate::models) const SPEC: FamilySpec = FamilySpec {
    family: Family::Decoder,
    name: "decoder",
    keys: KEYS,
    defaults: Defaults {
        bias: Bias::None,
        tie_embeddings: false,
        ffn: |hidden| 4 * hidden,
        ffn_multiple: 1,
        max_seq_len: |asked| Some(asked.unwrap_or(DEFAULT_SEQ_LEN)),
        seq_len: |max| max.unwrap_or(DEFAULT_SEQ_LEN).min(DEFAULT_SEQ_LEN),
    },
    inputs: Inputs::Tokens,
    attention: Some(Mask::Causal),
    tensor_parallel: None,
    expert_parallel: None,
    torch_modules: false,
    keeps_type: true,
    weights: Weights::Normal,
    hf: types::ALL,
    dimensions: |m| {
        vec![
            ("vocab", m.vocab),
            ("hidden", m.hidden),
            ("ffn", m.ffn),
            ("heads x head_dim", m.heads * m.head_dim),
            ("kv_heads x head_dim", m.kv_heads * m.head_dim),
        ]
    },
    check,
    declare: |d, m| Box::new(Decoder::new(d, m)),
};

/// Encoders of tokens: the same blocks, without a causal mask.
pub(in crate::models) const BERT: FamilySpec = FamilySpec {
    family: Family::Bert,
    name: "bert",
    attention: Some(Mask::Full),
    hf: types::ENCODERS,
    defaults: Defaults {
        seq_len: |max| max.unwrap_or(512).min(512),
        ..SPEC.defaults
    },
    ..SPEC
};

/// Encoders of images: a row for the class, then one for each patch.
pub(in crate::models) const VIT: FamilySpec = FamilySpec {
    family: Family::Vit,
    name: "vit",
    keys: &[
        "hidden",
        "heads",
        "ffn",
        "norm",
        "norm_eps",
        "norm_position",
        "activation",
        "gated_mlp",
        "position_embedding",
        "patch_dim",
        "patch_bias",
        "embedding_norm",
        "mask_token",
        "class_token",
        "distillation_token",
        "second_classifier",
        "register_tokens",
        "attention_pooling",
        "image_pooling",
        "reconstruction",
        "sound",
        "stages",
        "relative_buckets",
        "relative_bias_per_layer",
        "key_bias",
        "rope_theta",
        "layer_scale",
        "pooler",
        "max_seq_len",
        "head",
        "num_labels",
        "model_type",
    ],
    attention: Some(Mask::Full),
    inputs: Inputs::Features,
    hf: types::VISION,
    defaults: Defaults {
        max_seq_len: |asked| Some(asked.unwrap_or(197)),
        seq_len: |max| max.unwrap_or(197),
        ..SPEC.defaults
    },
    dimensions: |m| {
        vec![
            ("hidden", m.hidden),
            ("ffn", m.ffn),
            ("patch_dim", m.options.patch_dim),
        ]
    },
    check: check_images,
    declare: |d, m| match &m.options.stages {
        Some(of) => Box::new(Staged::new(d, m, of)),
        None => Box::new(Decoder::new(d, m)),
    },
    ..SPEC
};

/// Refuses what encoders of images do not have.
fn check_images(m: &Model) -> Result<(), Conflict> {
    check(m)?;
    check_reconstruction(m)?;
    check_sound(m)?;
    stages::check(m)
}

/// Refuses decoders of images whose sizes do not fit.
fn check_reconstruction(m: &Model) -> Result<(), Conflict> {
    let (o, Some(of)) = (&m.options, &m.options.reconstruction) else {
        return Ok(());
    };
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    if !of.hidden.is_multiple_of(of.heads) {
        let message = format!(
            "`reconstruction`: hidden ({}) is not divisible by heads ({})",
            of.hidden, of.heads
        );
        return conflict(&["reconstruction"], message);
    }
    if m.max_seq_len < 2 || m.max_seq_len >= of.rows() {
        let message = format!(
            "`reconstruction`: the encoder must see some of the {} patches and the class, not {} rows (`max_seq_len`)",
            of.patches, m.max_seq_len
        );
        return conflict(&["reconstruction", "max_seq_len"], message);
    }
    let plain = o.class_token && !o.distillation_token && o.register_tokens == 0;
    let learned = o.position_embedding == PositionEmbedding::Learned;
    let alone = o.sound.is_none() && o.stages.is_none() && !o.attention_pooling;
    if !plain || !learned || o.head != Head::None || o.pooler || !alone {
        let message = "`reconstruction` needs a row of the class alone (`class_token`), `position_embedding` = \"learned\", and no output layer (`head` = \"none\", `pooler` false)";
        let keys = &["reconstruction", "head", "pooler", "position_embedding"];
        return conflict(keys, message.to_owned());
    }
    Ok(())
}

/// Samples of the longest sound.
const MOST_SAMPLES: u64 = 1 << 32;

/// Refuses convolutions over sounds that do not fit together.
fn check_sound(m: &Model) -> Result<(), Conflict> {
    let (o, Some(of)) = (&m.options, &m.options.sound) else {
        return Ok(());
    };
    let conflict = |keys, message: String| Err(Conflict::new(keys, message));
    let lengths = [of.widths.len(), of.kernels.len(), of.strides.len()];
    if lengths[0] == 0 || lengths != [lengths[0]; 3] {
        let message = format!(
            "`sound`: widths, kernels and strides must have a number for each convolution, not {}, {} and {}",
            lengths[0], lengths[1], lengths[2]
        );
        return conflict(&["sound"], message);
    }
    let samples = of.positions(m.max_seq_len)[0];
    if samples > MOST_SAMPLES {
        let message = format!(
            "`sound`: {} rows need {samples} samples, more than the {MOST_SAMPLES} that are planned",
            m.max_seq_len
        );
        return conflict(&["sound", "max_seq_len"], message);
    }
    if !m.hidden.is_multiple_of(of.position_groups) {
        let message = format!(
            "`sound`: position_groups ({}) must divide `hidden` ({})",
            of.position_groups, m.hidden
        );
        return conflict(&["sound", "hidden"], message);
    }
    let alone = !o.class_token && !o.mask_token && o.register_tokens == 0 && o.stages.is_none();
    if !alone || o.position_embedding != PositionEmbedding::None {
        let message = "`sound` has rows of a sound alone: `class_token` and `mask_token` must be false, `position_embedding` \"none\", without `register_tokens` and `stages`";
        let keys = &[
            "sound",
            "class_token",
            "mask_token",
            "position_embedding",
            "register_tokens",
            "stages",
        ];
        return conflict(keys, message.to_owned());
    }
    if !matches!(o.head, Head::TokenClassification | Head::None) || o.pooler {
        let message = "`sound` has scores of every row (`head` = \"token_classification\") or none, and no pooler";
        return conflict(&["sound", "head", "pooler"], message.to_owned());
    }
    if of.gated_biases && o.relative_buckets == 0 {
        let message = "`sound`: gated_biases need biases: `relative_buckets` is 0";
        return conflict(&["sound", "relative_buckets"], message.to_owned());
    }
    Ok(())
}

/// Refuses sizes and options that latent attention does not have.
fn check_latent(m: &Model) -> Result<(), Conflict> {
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
    if m.kv_heads != m.heads || !o.layer_kv_heads.is_empty() {
        let message = "latent attention has a key for each query".to_owned();
        return conflict(&["kv_heads", "layer_kv_heads", "kv_lora_rank"], message);
    }
    if o.qk_norm != QkNorm::None {
        let message = "latent attention normalizes what it compresses only".to_owned();
        return conflict(&["qk_norm", "kv_lora_rank"], message);
    }
    if o.packed_qkv != PackedQkv::None {
        let message = "latent attention has no packed projection".to_owned();
        return conflict(&["packed_qkv", "kv_lora_rank"], message);
    }
    let knows_order =
        o.position_embedding.rotates() || o.position_embedding == PositionEmbedding::None;
    if !knows_order {
        let message =
            "latent attention needs a rotary embedding, or `position_embedding` = \"none\""
                .to_owned();
        return conflict(&["position_embedding", "kv_lora_rank"], message);
    }
    Ok(())
}

/// Refuses chunks in attention that has no form for them.
fn check_chunks(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if !o.layer_types.contains(&LayerType::Chunked) {
        return Ok(());
    }
    let biased = o.relative_buckets > 0 || o.disentangled_rows > 0;
    if biased || o.output_groups > 0 || o.encoder_layers > 0 {
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
fn check_values(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let Some(width) = o.value_head_dim else {
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
    let other = match o.packed_qkv {
        _ if o.latent.is_used() => Some(("kv_lora_rank", "latent attention has `v_head_dim`")),
        PackedQkv::None => None,
        _ => Some((
            "packed_qkv",
            "a packed projection makes values of one width",
        )),
    };
    let other = other.or_else(|| {
        let gated = o.attention_gate == AttentionGate::Element;
        gated.then_some(("attention_gate", "its gate has the width of queries"))
    });
    match other {
        None => Ok(()),
        Some((key, why)) => Err(Conflict::new(
            match key {
                "kv_lora_rank" => &["value_head_dim", "kv_lora_rank"],
                "packed_qkv" => &["value_head_dim", "packed_qkv"],
                _ => &["value_head_dim", "attention_gate"],
            },
            format!("`value_head_dim` needs separate values: {why}"),
        )),
    }
}

/// Refuses heads that differential attention cannot divide into halves.
fn check_differential(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if !o.differential {
        return Ok(());
    }
    let plain = !o.latent.is_used() && o.output_groups == 0 && o.value_head_dim.is_none();
    let shares = o.tower_memory().is_some() || o.encoder_layers > 0 || !o.layer_kv_heads.is_empty();
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
fn check_shared_keys(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.streams > 0 && (o.residual != Residual::Sequential || o.vision.is_some()) {
        let message = "residual streams need `residual` = \"sequential\", without a vision tower";
        return Err(Conflict::new(
            &["streams", "residual", "vision"],
            message.to_owned(),
        ));
    }
    if o.streams > 0 && (o.encoder_layers > 0 || normalized_otherwise(o.norm_position)) {
        let message = "residual streams need `norm_position` = \"before\", without an encoder";
        return Err(Conflict::new(
            &["streams", "norm_position", "encoder_layers"],
            message.to_owned(),
        ));
    }
    if o.output_groups == 0 {
        return match o.compress_rates.is_empty() {
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
    if !wide.is_multiple_of(o.output_groups) {
        let message = format!(
            "`output_groups` ({}) must divide the heads' width, {wide}",
            o.output_groups
        );
        return Err(Conflict::new(&["output_groups", "heads"], message));
    }
    Ok(())
}

/// Refuses groups of layers that cannot share weights.
fn check_groups(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.layer_groups == 0 {
        return match o.group_layers {
            1 => Ok(()),
            _ => Err(Conflict::new(
                &["group_layers", "layer_groups"],
                "`group_layers` are those of `layer_groups`, of which there are none".to_owned(),
            )),
        };
    }
    if m.family != Family::Bert || o.embedding_norm && o.norm_position != NormPosition::Sum {
        let message = "blocks share weights in encoders with `norm_position` = \"sum\" only";
        return Err(Conflict::new(
            &["layer_groups", "family", "norm_position"],
            message.to_owned(),
        ));
    }
    let own = o.layer_groups * o.group_layers;
    if !u64::from(m.layers).is_multiple_of(own) {
        let message = format!(
            "`layers` ({}) must be divisible by `layer_groups` x `group_layers` ({own})",
            m.layers
        );
        let keys = &["layers", "layer_groups", "group_layers"];
        return Err(Conflict::new(keys, message));
    }
    let differs =
        !o.layer_types.is_empty() || !o.layer_ffn.is_empty() || !o.layer_kv_heads.is_empty();
    if differs {
        let message = "blocks that share weights cannot differ".to_owned();
        let keys = &["layer_groups", "layer_types", "layer_ffn", "layer_kv_heads"];
        return Err(Conflict::new(keys, message));
    }
    Ok(())
}

/// Refuses layers that attend to a tower that is not there, and tables that a tied head cannot
/// share.
fn check_memory(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let crosses = o.layer_types.contains(&LayerType::Cross);
    if crosses && o.tower_memory().is_none() {
        let message = "`layer_types` has layers with cross attention: they need a tower, `vision` with `memory`";
        let keys = &["layer_types", "vision"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let separate = o.packed_qkv == PackedQkv::None && !o.latent.is_used() && o.output_groups == 0;
    if o.tower_memory().is_some() && (!separate || o.residual != Residual::Sequential) {
        let message =
            "attention to a tower needs separate projections and `residual` = \"sequential\"";
        let keys = &["vision", "packed_qkv", "kv_lora_rank", "residual"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.extra_tokens > 0 && m.tie_embeddings {
        let message = "`extra_tokens` are rows that logits have no columns for: `tie_embeddings` must be false";
        let keys = &["extra_tokens", "tie_embeddings"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses sizes of an encoder that do not fit together.
fn check_encoder(m: &Model) -> Result<(), Conflict> {
    let Some(of) = &m.options.encoder else {
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
    if m.options.position_embedding.rotates() && !inner.head_dim.is_multiple_of(2) {
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
    plain.options.encoder = None;
    plain.options.head = Head::LanguageModel;
    check(&plain)
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
    let slides = inner.options.layer_types.contains(&LayerType::Sliding);
    if slides && inner.options.sliding_window.is_none() {
        let message =
            "`encoder`: layer_types has layers with a window, whose size sliding_window gives";
        return conflict(&["encoder", "sliding_window"], message.to_owned());
    }
    if of.summary_block > 0 && (m.options.relative_buckets == 0 || of.sliding_window.is_none()) {
        let message = "`encoder`: sums of positions (summary_block) are seen next to a window (sliding_window), by biases of `relative_buckets`";
        return conflict(&["encoder", "relative_buckets"], message.to_owned());
    }
    Ok(())
}

/// Refuses layers with a shared block that lack its sizes, or are not those of Zamba 2.
fn check_shared_block(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if !o.layer_types.iter().any(|kind| kind.has_shared_block()) {
        return Ok(());
    }
    if o.shared_block.is_none() || o.ssm.is_none() {
        let message = "layers of type shared_attention need the sizes of `shared_block` and `ssm`";
        let keys = &["layer_types", "shared_block", "ssm"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let plain = o.residual == Residual::Sequential
        && o.norm_position == NormPosition::Before
        && o.streams == 0
        && o.layer_groups == 0
        && o.rope_local_theta.is_none();
    if !plain {
        let message = "layers of type shared_attention need `residual` = \"sequential\" and `norm_position` = \"before\", without residual streams";
        let keys = &["layer_types", "residual", "norm_position", "streams"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses heads that do not divide the widths of RWKV.
fn check_rwkv(m: &Model) -> Result<(), Conflict> {
    let Some(of) = &m.options.rwkv else {
        return Ok(());
    };
    for (name, width) in [("keys", of.keys), ("values", of.values)] {
        if !width.is_multiple_of(of.heads) {
            let message = format!("`heads` ({}) must divide `{name}` ({width})", of.heads);
            return Err(Conflict::new(&["rwkv"], message));
        }
    }
    if of.version == 7 && of.keys != of.values {
        let message = "RWKV-7 has values as wide as keys".to_owned();
        return Err(Conflict::new(&["rwkv"], message));
    }
    Ok(())
}

/// Refuses what only decoders of certain blocks have at their ends.
fn check_ends(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let decodes = matches!(m.family, Family::Decoder | Family::Moe);
    let plain = decodes && o.residual == Residual::Sequential && o.streams == 0;
    let blocks = plain || m.family == Family::Bert && o.residual == Residual::Sequential;
    let first = blocks && m.layer_type(0).is_attention();
    if o.plain_first_block && !(first && o.norm_position == NormPosition::Before) {
        let message = "`plain_first_block` needs blocks of which the first one has attention, with `residual` = \"sequential\" and `norm_position` = \"before\"";
        let keys = &[
            "plain_first_block",
            "residual",
            "norm_position",
            "layer_types",
        ];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.stream_scale && (!plain || o.per_layer.altup.is_some()) {
        let message = "`stream_scale` needs a decoder with `residual` = \"sequential\" and one residual stream";
        let keys = &["stream_scale", "residual", "streams", "altup"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let known = matches!(
        o.head,
        Head::LanguageModel | Head::SequenceClassification | Head::None
    );
    if o.rotary_table && (!o.position_embedding.rotates() || o.latent.is_used()) {
        let message = "`rotary_table` needs a rotary embedding of whole heads";
        let keys = &["rotary_table", "position_embedding", "kv_lora_rank"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.output_transform && (!decodes || !known || o.embedding_width.is_some()) {
        let message = "`output_transform` is one of decoders with logits, or scores of sequences";
        let keys = &["output_transform", "head", "family", "embedding_width"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses layers that have the keys of others, embedded tokens or residual streams, where their
/// parts are not those of Gemma 3n and 4.
fn check_per_layer(m: &Model) -> Result<(), Conflict> {
    let (o, of) = (&m.options, &m.options.per_layer);
    let conflict = |keys, message: &str| Err(Conflict::new(keys, message.to_owned()));
    let decodes = matches!(m.family, Family::Decoder | Family::Moe);
    let plain = decodes && o.residual == Residual::Sequential && o.encoder_layers == 0;
    if of.layer_embedding_width > 0 && !plain {
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
    if of.shared_kv_layers > 0 {
        let separate = o.packed_qkv == PackedQkv::None
            && !o.latent.is_used()
            && o.output_groups == 0
            && o.attention_gate == AttentionGate::None
            && o.tower_memory().is_none();
        if !plain || !separate {
            return conflict(
                &[
                    "shared_kv_layers",
                    "packed_qkv",
                    "kv_lora_rank",
                    "attention_gate",
                ],
                "layers that share keys and values need separate projections and `residual` = \"sequential\"",
            );
        }
        let lacks =
            |layer: &usize| m.layer_type(*layer).is_attention() && m.keys_of(*layer).is_none();
        if let Some(layer) = (m.layers_with_keys()..m.layers as usize).find(lacks) {
            let message = format!(
                "layer {layer} has no layer of its type ({}) among the first {}, whose keys and values it could share",
                m.layer_type(layer).name(),
                m.layers_with_keys()
            );
            let keys = &["shared_kv_layers", "layers", "layer_types"];
            return Err(Conflict::new(keys, message));
        }
    }
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
    let fits = plain && whole && o.streams == 0 && o.norm_position != NormPosition::Sum;
    if !fits || o.layer_scale || o.tower_memory().is_some() {
        return conflict(
            &[
                "altup",
                "layer_types",
                "norm_position",
                "streams",
                "layer_scale",
            ],
            "`altup` needs a decoder of plain blocks, each with attention and a feed-forward layer",
        );
    }
    Ok(())
}

fn normalized_otherwise(at: NormPosition) -> bool {
    at != NormPosition::Before
}

pub(in crate::models) fn check(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.position_embedding.rotates() {
        check_rotary(m)?;
    } else if o.qk_norm.follows_rope() {
        let message = "`qk_norm` after the rotation needs a rotary embedding".to_owned();
        return Err(Conflict::new(&["qk_norm", "position_embedding"], message));
    }
    if o.norm_position == NormPosition::After && o.residual == Residual::ParallelOneNorm {
        let message =
            "a norm that attention and the feed-forward layer share is one of what they read"
                .to_owned();
        return Err(Conflict::new(&["residual", "norm_position"], message));
    }
    if o.packed_qkv == PackedQkv::PerHead && m.heads != m.kv_heads {
        let message = format!(
            "`packed_qkv` = \"per_head\" needs a key for each query: {} heads, {} kv_heads",
            m.heads, m.kv_heads
        );
        return Err(Conflict::new(&["packed_qkv", "kv_heads"], message));
    }
    if o.layer_types.contains(&LayerType::Hybrid) && o.ssm.is_none() {
        let message = "`layer_types` has hybrid layers, whose sizes `ssm` gives".to_owned();
        return Err(Conflict::new(&["layer_types", "ssm"], message));
    }
    check_chunks(m)?;
    check_memory(m)?;
    check_rwkv(m)?;
    check_shared_block(m)?;
    check_encoder(m)?;
    check_per_layer(m)?;
    check_ends(m)?;
    check_latent(m)?;
    check_values(m)?;
    if o.packed_gate_up && !o.gated_mlp {
        let message = "`packed_gate_up` needs a gate: `gated_mlp` is false".to_owned();
        return Err(Conflict::new(&["packed_gate_up", "gated_mlp"], message));
    }
    if o.encoder_layers > 0
        && matches!(o.head, Head::Pretraining | Head::Vector | Head::Contrastive)
    {
        let message = "encoders with decoders have no such `head`".to_owned();
        return Err(Conflict::new(&["head", "encoder_layers"], message));
    }
    if o.encoder_layers > 0 && o.residual != Residual::Sequential {
        let message = "an encoder needs `residual` = \"sequential\"".to_owned();
        return Err(Conflict::new(&["residual", "encoder_layers"], message));
    }
    if o.relative_buckets > 0 && (o.position_embedding.rotates() || o.latent.is_used()) {
        let message = "`relative_buckets` are positions: `position_embedding` must be \"none\"";
        return Err(Conflict::new(
            &["relative_buckets", "position_embedding"],
            message.to_owned(),
        ));
    }
    check_shared_keys(m)?;
    check_differential(m)?;
    check_groups(m)?;
    if o.disentangled_rows > 0 {
        let other = match () {
            () if o.packed_qkv != PackedQkv::None => Some("packed_qkv"),
            () if m.kv_heads != m.heads => Some("kv_heads"),
            () if o.relative_buckets > 0 => Some("relative_buckets"),
            () if o.latent.is_used() => Some("kv_lora_rank"),
            () => None,
        };
        if let Some(other) = other {
            let message = format!(
                "`disentangled_rows` needs a key for each query, with projections of their own and no other biases: `{other}` excludes that"
            );
            let keys = &["disentangled_rows", "packed_qkv", "kv_heads"];
            return Err(Conflict::new(keys, message));
        }
    }
    if o.relative_bias_per_layer && o.relative_buckets == 0 {
        let message = "there is no table of relative biases: `relative_buckets` is 0".to_owned();
        return Err(Conflict::new(
            &["relative_bias_per_layer", "relative_buckets"],
            message,
        ));
    }
    let lists = [
        ("layer_kv_heads", &o.layer_kv_heads),
        ("layer_ffn", &o.layer_ffn),
    ];
    for (name, list) in lists {
        if !list.is_empty() && list.len() < m.layers as usize {
            let message = format!(
                "`{name}` has {} numbers for {} layers",
                list.len(),
                m.layers
            );
            return Err(Conflict::new(
                &["layer_kv_heads", "layer_ffn", "layers"],
                message,
            ));
        }
    }
    let misfit = |kv: &&u64| **kv > 0 && !m.heads.is_multiple_of(**kv);
    if let Some(kv) = o.layer_kv_heads.iter().find(misfit) {
        let message = format!(
            "`heads` ({}) is not divisible by {kv} of `layer_kv_heads`",
            m.heads
        );
        return Err(Conflict::new(&["layer_kv_heads", "heads"], message));
    }
    if !lists.iter().all(|(_, list)| list.is_empty()) && o.residual != Residual::Sequential {
        let message = "layers that differ need `residual` = \"sequential\"".to_owned();
        return Err(Conflict::new(
            &["residual", "layer_kv_heads", "layer_ffn"],
            message,
        ));
    }
    let images = m.family == Family::Vit;
    let known = matches!(
        o.position_embedding,
        PositionEmbedding::Learned | PositionEmbedding::Rotary | PositionEmbedding::None
    );
    if o.head == Head::Pretraining && (m.family != Family::Bert || !o.head_transform) {
        let message =
            "`head` = \"pretraining\" is one of encoders of family bert, with `head_transform`";
        let keys = &["head", "family", "head_transform"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let separate = o.packed_qkv == PackedQkv::None && !o.latent.is_used();
    if o.global_projections && (m.family != Family::Bert || !separate) {
        let message =
            "`global_projections` are those of encoders of family bert, with separate projections";
        let keys = &["global_projections", "family", "packed_qkv"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.head == Head::Contrastive && o.vision.as_ref().is_none_or(|of| of.memory) {
        let message = "`head` = \"contrastive\" compares texts with images of a tower: `vision`, without `memory`";
        return Err(Conflict::new(&["head", "vision"], message.to_owned()));
    }
    let vector = o.vision.as_ref().is_some_and(|of| of.vector);
    if vector != (o.head == Head::Contrastive) {
        let message = "`vision` with `vector` and `head` = \"contrastive\" need each other";
        return Err(Conflict::new(&["head", "vision"], message.to_owned()));
    }
    if images
        && (!known
            || matches!(o.head, Head::Vector | Head::Contrastive)
            || o.head == Head::LanguageModel)
    {
        let message =
            "family vit has learned or rotary positions or none, and a classification head or none"
                .to_owned();
        return Err(Conflict::new(
            &["head", "position_embedding", "family"],
            message,
        ));
    }
    let classless = o.head != Head::None && o.image_pooling != ImagePooling::Mean;
    let classless = classless && o.sound.is_none();
    if images && !o.class_token && (o.distillation_token || classless || o.pooler) {
        let message = "without a row of the class (`class_token`), family vit has no distillation token or pooler, and classifies the mean of the patches (`image_pooling`)";
        let keys = &[
            "class_token",
            "distillation_token",
            "head",
            "pooler",
            "image_pooling",
        ];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let classifies_images = images && o.head == Head::SequenceClassification;
    if o.second_classifier && !(classifies_images && o.distillation_token) {
        let message = "`second_classifier` classifies the row of `distillation_token`: `head` must be \"sequence_classification\"";
        let keys = &["second_classifier", "distillation_token", "head"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if images && o.attention_pooling && (o.head != Head::None || o.pooler) {
        let message =
            "`attention_pooling` is the last layer: `head` must be \"none\" and `pooler` false";
        let keys = &["attention_pooling", "head", "pooler"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    if o.residual != Residual::Sequential && o.norm_position == NormPosition::Sum {
        let message = "`norm_position` = \"sum\" needs `residual` = \"sequential\"".to_owned();
        return Err(Conflict::new(&["norm_position", "residual"], message));
    }
    Ok(())
}
