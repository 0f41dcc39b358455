//! `[model]`.

use super::{
    Activation, AttentionGate, AttentionSinks, AttnImplementation, Experts, Head, ImagePooling,
    Implementation, Latent, LayerType, LinearAttention, MlpType, Norm, NormPosition, PackedQkv,
    PerLayer, PositionEmbedding, QkNorm, Reconstruction, Residual, RopeScaling, Rwkv, SharedBlock,
    Sound, Ssm, Stages, TextEncoder, Vision,
};
use serde::{Deserialize, Serialize};

/// Model family: decides the graph that `models` builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// RMSNorm, RoPE, grouped-query attention, SwiGLU.
    Llama,
    /// Llama's layers, with experts.
    Moe,
    /// LayerNorm with bias, learned positions, GELU, tied head.
    Gpt2,
    /// LayerNorm with bias, partial RoPE, attention next to the feed-forward layer.
    #[serde(rename = "gpt_neox")]
    GptNeox,
    /// Decoder whose norms, projections and positions are options.
    Decoder,
    /// Encoder of tokens, with the options of a decoder.
    Bert,
    /// Encoder of the patches of images, with the options of a decoder.
    Vit,
    /// Post-norm `TransformerEncoderLayer` stack.
    Encoder,
    /// `layers` times Linear(hidden, hidden) with ReLU.
    Linear,
    /// `layers` same-padded convolutions with ReLU, then a dense layer.
    Cnn,
}

/// `[model]`: shapes. Fields that a family does not use keep their defaults.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Name of the preset the model came from, or the path of its `config.json`, if any.
    pub preset: Option<String>,
    /// Family.
    pub family: Family,
    /// Number of blocks (or linear layers, or convolutions).
    pub layers: u32,
    /// Model width in elements.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Elements of one head.
    pub head_dim: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Vocabulary size.
    pub vocab: u64,
    /// Embedding and head share one parameter.
    pub tie_embeddings: bool,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Longest sequence (rows of the position table).
    pub max_seq_len: u64,
    /// Channels of the CNN.
    pub channels: u64,
    /// Image height.
    pub height: u64,
    /// Image width.
    pub width: u64,
    /// Convolution kernel edge (odd).
    pub kernel: u64,
    /// Which linear layers carry a bias.
    pub bias: Bias,
    /// The other keys.
    #[serde(flatten)]
    pub options: ModelOptions,
}

/// Keys of `[model]` whose defaults do not depend on others, read by the names of these fields.
/// `None` is a default that is derived where the value is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelOptions {
    /// Code that the model consists of; `None`: that of the policy.
    pub implementation: Option<Implementation>,
    /// How transformers computes attention.
    pub attn_implementation: AttnImplementation,
    /// Probability of dropout of what layers add to the residual stream, in the code of
    /// transformers.
    pub dropout: f64,
    /// That of the weights of attention.
    pub attention_dropout: f64,
    /// That of the embedded tokens.
    pub embedding_dropout: f64,
    /// `model_type` of transformers: how its files name the weights.
    pub model_type: Option<String>,
    /// Norm of the residual stream.
    pub norm: Norm,
    /// Where attention and the feed-forward layer are normalized.
    pub norm_position: NormPosition,
    /// How attention and the feed-forward layer follow each other.
    pub residual: Residual,
    /// Activation of the feed-forward layer; `None`: the family's.
    pub activation: Option<Activation>,
    /// The activation is multiplied by a second projection of the input.
    pub gated_mlp: bool,
    /// One projection makes queries, keys and values.
    pub packed_qkv: PackedQkv,
    /// One projection makes gate and up.
    pub packed_gate_up: bool,
    /// Keys have a bias if queries and values have one.
    pub key_bias: bool,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// What attention knows the positions of tokens by.
    pub position_embedding: PositionEmbedding,
    /// Numbers of one patch of an image.
    pub patch_dim: u64,
    /// The projection of patches has a bias.
    pub patch_bias: bool,
    /// A learned row stands for masked patches, which the plan has none of.
    pub mask_token: bool,
    /// A second layer classifies the row of distillation; scores are the mean of both (DeiT).
    pub second_classifier: bool,
    /// A learned row for the class comes before the patches.
    pub class_token: bool,
    /// A second learned row follows that of the class.
    pub distillation_token: bool,
    /// Learned rows between that of the class and the patches (DINOv3).
    pub register_tokens: u64,
    /// What of an image is classified.
    pub image_pooling: ImagePooling,
    /// Blocks in stages of different widths; `None`: all blocks have the same.
    pub stages: Option<Stages>,
    /// Attention with one learned query, then a feed-forward layer, makes one vector of an image
    /// (SigLIP).
    pub attention_pooling: bool,
    /// Rows of the table of token types; 0: no such table.
    pub token_types: u64,
    /// Rows of the position table before that of the first position.
    pub position_offset: u64,
    /// Scaling of rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Base of the rotary embedding of layers with a sliding window, if it differs.
    pub rope_local_theta: Option<f64>,
    /// Positions that attention with a sliding window sees.
    pub sliding_window: Option<u64>,
    /// Longest sequence that attention with a window sees as a whole.
    pub window_from: u64,
    /// Positions of a chunk of a sequence, in layers that see one chunk.
    pub attention_chunk: Option<u64>,
    /// Queries of layers without a rotary embedding are multiplied by `1 + this * ln(1 + n)`, of
    /// which `n` is the number of whole [`ModelOptions::attention_temperature_floor`] in the
    /// positions up to their own.
    pub attention_temperature: f64,
    /// Positions after which that factor grows.
    pub attention_temperature_floor: u64,
    /// What each layer's attention sees, repeated; none: the window, if there is one.
    pub layer_types: Vec<LayerType>,
    /// Key and value heads of each layer, if they differ; 0: a layer without attention.
    pub layer_kv_heads: Vec<u64>,
    /// Width of the feed-forward layer of each block, if they differ; 0: a block without one.
    pub layer_ffn: Vec<u64>,
    /// Soft limit of attention scores.
    pub attention_softcap: Option<f64>,
    /// Soft limit of the logits.
    pub logits_softcap: Option<f64>,
    /// The embedded tokens are normalized.
    pub embedding_norm: bool,
    /// Residual streams next to each other (hyper-connections of DeepSeek-V4); 0: one, without
    /// weights.
    pub streams: u64,
    /// Groups of heads with output projections of their own, in attention with one head of keys
    /// that are also the values (DeepSeek-V4); 0: another attention.
    pub output_groups: u64,
    /// Width of what the projection of each such group makes.
    pub output_rank: u64,
    /// Positions of one compressed key in each layer; 0: no such keys.
    pub compress_rates: Vec<u64>,
    /// Rows of a table of relative positions that each layer projects as its queries and keys
    /// (DeBERTa); 0: no such table.
    pub disentangled_rows: u64,
    /// Width of embedded tokens, which a linear layer projects to that of the model; `None`: they
    /// are as wide.
    pub embedding_width: Option<u64>,
    /// A decoder makes the pixels of all patches of an image (ViT-MAE).
    pub reconstruction: Option<Reconstruction>,
    /// Convolutions over the samples of a sound, in place of patches (wav2vec 2.0).
    pub sound: Option<Sound>,
    /// Norm of queries, of keys, and of the last rows, if it is not that of blocks (ESMC).
    pub inner_norm: Option<Norm>,
    /// Waves of rotary embeddings are a table of parameters that are not trained (RoFormer).
    pub rotary_table: bool,
    /// The first block has no norm for what it reads (ModernBERT).
    pub plain_first_block: bool,
    /// A decoder has a linear layer and a norm before its logits (ModernBERT's decoder).
    pub output_transform: bool,
    /// Each block multiplies the residual stream by a number that is not trained (Gemma 4).
    pub stream_scale: bool,
    /// Groups of following layers that share the weights of their first blocks; 0: every block has
    /// its own.
    pub layer_groups: u64,
    /// Blocks of each group that have weights of their own, and repeat.
    pub group_layers: u64,
    /// The output layer has a bias.
    pub head_bias: bool,
    /// Output layer.
    pub head: Head,
    /// Rows of the table of tokens beyond the vocabulary (Llama 3.2 Vision).
    pub extra_tokens: u64,
    /// An encoder makes one vector of the first position.
    pub pooler: bool,
    /// An encoder has a pooler that nothing uses (BigBird).
    pub unused_pooler: bool,
    /// An encoder has scores of the weights of all heads, which nothing uses (ESM).
    pub contact_head: bool,
    /// Rows of each table of places on a page (LayoutLM); 0: none.
    pub box_rows: u64,
    /// Attention has projections for global positions, of which there are none (Longformer).
    pub global_projections: bool,
    /// An encoder has a linear layer and a norm before its logits; otherwise sequences alone are
    /// classified through a linear layer.
    pub head_transform: bool,
    /// Classes of a classification head.
    pub num_labels: u64,
    /// Width of the vector that the head `vector` or `contrastive` makes.
    pub vector_width: u64,
    /// The loss of vectors that are compared is one of sigmoids, with a learned bias (SigLIP), not
    /// cross entropies of rows and columns.
    pub sigmoid_loss: bool,
    /// Share of a head's dimensions that are rotated.
    pub partial_rotary_factor: f64,
    /// Attention and feed-forward layer read the same input, and their results are added to it.
    pub parallel_residual: bool,
    /// Factor of the embedded tokens.
    pub embedding_multiplier: f64,
    /// Factor of attention scores; `1 / sqrt(head_dim)` if there is none.
    pub attention_multiplier: Option<f64>,
    /// Factor of what a block adds to the residual stream.
    pub residual_multiplier: f64,
    /// Divisor of the logits.
    pub logits_scaling: f64,
    /// Attention makes differences of the results of two halves of its heads, with learned factors
    /// (Differential Transformer).
    pub differential: bool,
    /// What attention makes is multiplied by a gate.
    pub attention_gate: AttentionGate,
    /// The softmax of attention has one more, learned column for each head.
    pub attention_sinks: AttentionSinks,
    /// Width of a head's values, if it is not that of queries and keys.
    pub value_head_dim: Option<u64>,
    /// Dimension of a head in layers without a window, if it differs.
    pub full_head_dim: Option<u64>,
    /// Layers without a window take keys, before norm and rotation, for values.
    pub keys_as_values: bool,
    /// Values are normalized, without a weight.
    pub value_norm: bool,
    /// What the last layer of attention and of the feed-forward layer reads is normalized.
    pub sub_norms: bool,
    /// Learned numbers of the activation, which the plan does not use.
    pub activation_scalars: u64,
    /// What the blocks add is multiplied by a learned vector.
    pub layer_scale: bool,
    /// What each block has after attention, repeated; none: as `dense_layers` and `moe_every` say.
    pub mlp_layer_types: Vec<MlpType>,
    /// State-space layers.
    pub ssm: Option<Ssm>,
    /// Layers of type `rwkv`, if they are not those of RWKV-4.
    pub rwkv: Option<Rwkv>,
    /// Blocks that layers of type `shared_attention` share.
    pub shared_block: Option<SharedBlock>,
    /// Layers with linear attention.
    pub linear_attention: Option<LinearAttention>,
    /// Blocks of an encoder, whose result the blocks of the decoder attend to; 0: no encoder.
    pub encoder_layers: u64,
    /// What the encoder has otherwise than the decoder.
    pub encoder: Option<TextEncoder>,
    /// Rows of the tables of learned biases of attention scores, by distance; 0: no such tables.
    pub relative_buckets: u64,
    /// Each layer has such a table, not the first one for all.
    pub relative_bias_per_layer: bool,
    /// Vision tower and projector.
    pub vision: Option<Vision>,
    /// Patches of a sample, in place of those of `vision`, which has the same number.
    pub vision_patches: Option<u64>,
    /// Keys for latent attention.
    #[serde(flatten)]
    pub latent: Latent,
    /// Keys for what single layers have.
    #[serde(flatten)]
    pub per_layer: PerLayer,
    /// Keys for experts.
    #[serde(flatten)]
    pub experts: Experts,
}

impl ModelOptions {
    /// Returns whether every block attends to what an encoder or a tower computes, besides its own
    /// attention.
    #[must_use]
    pub fn attends_to_memory(&self) -> bool {
        let instead = self.layer_types.contains(&LayerType::Cross);
        self.encoder_layers > 0 || self.tower_memory().is_some() && !instead
    }

    /// Returns the tower to whose rows blocks attend, if there is one.
    #[must_use]
    pub fn tower_memory(&self) -> Option<&Vision> {
        self.vision.as_ref().filter(|of| of.memory)
    }
}

/// The defaults of the key table; a test compares them.
impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            implementation: None,
            attn_implementation: AttnImplementation::Sdpa,
            dropout: 0.0,
            attention_dropout: 0.0,
            embedding_dropout: 0.0,
            model_type: None,
            norm: Norm::Rms,
            norm_position: NormPosition::Before,
            residual: Residual::Sequential,
            activation: None,
            gated_mlp: true,
            packed_qkv: PackedQkv::None,
            packed_gate_up: false,
            key_bias: true,
            qk_norm: QkNorm::None,
            position_embedding: PositionEmbedding::Rotary,
            patch_dim: 768,
            patch_bias: true,
            mask_token: false,
            second_classifier: false,
            class_token: true,
            distillation_token: false,
            register_tokens: 0,
            image_pooling: ImagePooling::Class,
            stages: None,
            attention_pooling: false,
            token_types: 0,
            position_offset: 0,
            rope_scaling: None,
            rope_local_theta: None,
            sliding_window: None,
            window_from: 0,
            attention_chunk: None,
            attention_temperature: 0.0,
            attention_temperature_floor: 8192,
            layer_types: Vec::new(),
            layer_kv_heads: Vec::new(),
            layer_ffn: Vec::new(),
            attention_softcap: None,
            logits_softcap: None,
            embedding_norm: false,
            streams: 0,
            output_groups: 0,
            output_rank: 1024,
            compress_rates: Vec::new(),
            disentangled_rows: 0,
            embedding_width: None,
            reconstruction: None,
            sound: None,
            inner_norm: None,
            rotary_table: false,
            plain_first_block: false,
            output_transform: false,
            stream_scale: false,
            layer_groups: 0,
            group_layers: 1,
            head_bias: false,
            head: Head::LanguageModel,
            extra_tokens: 0,
            pooler: true,
            unused_pooler: false,
            contact_head: false,
            box_rows: 0,
            global_projections: false,
            head_transform: true,
            num_labels: 2,
            vector_width: 512,
            sigmoid_loss: false,
            partial_rotary_factor: 1.0,
            parallel_residual: true,
            embedding_multiplier: 1.0,
            attention_multiplier: None,
            residual_multiplier: 1.0,
            logits_scaling: 1.0,
            differential: false,
            attention_gate: AttentionGate::None,
            attention_sinks: AttentionSinks::None,
            value_head_dim: None,
            full_head_dim: None,
            keys_as_values: false,
            value_norm: false,
            sub_norms: false,
            activation_scalars: 0,
            layer_scale: false,
            mlp_layer_types: Vec::new(),
            ssm: None,
            rwkv: None,
            shared_block: None,
            linear_attention: None,
            encoder_layers: 0,
            encoder: None,
            relative_buckets: 0,
            relative_bias_per_layer: false,
            vision: None,
            vision_patches: None,
            latent: Latent::default(),
            per_layer: PerLayer::default(),
            experts: Experts::default(),
        }
    }
}

/// Linear layers with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bias {
    /// None of them.
    None,
    /// Those that make queries, keys and values.
    Qkv,
    /// Those of attention.
    Attention,
    /// Those of the feed-forward layer.
    Mlp,
    /// All but those that make queries, keys and values (GPT-Neo).
    AllButQkv,
    /// All, and convolutions.
    All,
}

impl From<bool> for Bias {
    fn from(all: bool) -> Self {
        if all { Self::All } else { Self::None }
    }
}

/// Writes the value as scenario files do.
impl Serialize for Bias {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_bool(false),
            Self::Qkv => to.serialize_str("qkv"),
            Self::Attention => to.serialize_str("attention"),
            Self::Mlp => to.serialize_str("mlp"),
            Self::AllButQkv => to.serialize_str("all_but_qkv"),
            Self::All => to.serialize_bool(true),
        }
    }
}
