//! `[model]`.

use super::{
    Activation, AttentionOptions, AttnImplementation, Conformer, Context, Embeddings, Experts,
    ImageEncoder, Implementation, Latent, LayerPattern, LayerType, LinearAttention, Norm,
    NormPosition, OutputHead, PerLayer, Positions, Reconstruction, Residual, Rwkv, SharedBlock,
    Sound, Ssm,
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
    /// LayerNorm with bias, partial RoPE, attention parallel to the feed-forward layer.
    #[serde(rename = "gpt_neox")]
    GptNeox,
    /// Decoder whose norms, projections and positions are options.
    Decoder,
    /// Encoder of tokens, with the options of a decoder.
    Bert,
    /// Encoder of image patches, with the options of a decoder.
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
    /// Name of the preset of the model, or the path of its `config.json`, if any.
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
    /// Maximum sequence length (rows of the position table).
    pub max_seq_len: u64,
    /// Channels of the CNN.
    pub channels: u64,
    /// Image height.
    pub height: u64,
    /// Image width.
    pub width: u64,
    /// Size of the convolution kernel (odd).
    pub kernel: u64,
    /// Linear layers that have a bias.
    pub bias: Bias,
    /// The other keys.
    #[serde(flatten)]
    pub options: ModelOptions,
}

/// Keys of `[model]` whose defaults do not depend on other keys, read by the names of these fields.
/// `None` is a default that is derived where the value is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelOptions {
    /// Implementation of the model; `None`: that of the policy.
    pub implementation: Option<Implementation>,
    /// Attention implementation of transformers.
    pub attn_implementation: AttnImplementation,
    /// Dropout probability on the layer outputs that are added to the residual stream, in the code
    /// of transformers.
    pub dropout: f64,
    /// `model_type` of transformers, which determines the names of weights in files.
    pub model_type: Option<String>,
    /// Norm of the residual stream.
    pub norm: Norm,
    /// Where norms are placed around attention and the feed-forward layer.
    pub norm_position: NormPosition,
    /// How attention and the feed-forward layer are combined.
    pub residual: Residual,
    /// Activation of the feed-forward layer; `None`: the family's.
    pub activation: Option<Activation>,
    /// The activation is multiplied by a second projection of the input.
    pub gated_mlp: bool,
    /// One projection computes gate and up.
    pub packed_gate_up: bool,
    /// Number of residual streams (hyper-connections of DeepSeek-V4); 0: one stream, without
    /// weights.
    pub streams: u64,
    /// A decoder reconstructs the pixels of all patches of an image (ViT-MAE).
    pub reconstruction: Option<Reconstruction>,
    /// Convolutions over audio samples, in place of patches (wav2vec 2.0).
    pub sound: Option<Sound>,
    /// Blocks with attention and a convolution; `None`: blocks with attention and a feed-forward
    /// layer.
    pub conformer: Option<Conformer>,
    /// The first block does not normalize its input (ModernBERT).
    pub plain_first_block: bool,
    /// Each block multiplies the residual stream by a fixed number (Gemma 4).
    pub stream_scale: bool,
    /// Attention and the feed-forward layer read the same input, and both results are added to it.
    pub parallel_residual: bool,
    /// Factor of the layer outputs that are added to the residual stream.
    pub residual_multiplier: f64,
    /// The inputs of the last layer of attention and of the feed-forward layer are normalized.
    pub sub_norms: bool,
    /// Number of learned scalars of each layer's activation, which plans contain but do not use.
    pub activation_scalars: u64,
    /// Layer outputs are multiplied by a learned vector.
    pub layer_scale: bool,
    /// State-space layers.
    pub ssm: Option<Ssm>,
    /// Layers of type `rwkv`; `None`: those of RWKV-4.
    pub rwkv: Option<Rwkv>,
    /// Blocks that layers of type `shared_attention` share.
    pub shared_block: Option<SharedBlock>,
    /// Layers with linear attention.
    pub linear_attention: Option<LinearAttention>,
    /// Keys for encoders of images.
    #[serde(flatten)]
    pub image: ImageEncoder,
    /// Keys for the output of a model: its head, and the layers before it.
    #[serde(flatten)]
    pub output: OutputHead,
    /// Keys for embeddings of tokens.
    #[serde(flatten)]
    pub embedding: Embeddings,
    /// Keys for the positions that attention sees.
    #[serde(flatten)]
    pub positions: Positions,
    /// Keys for what differs between layers.
    #[serde(flatten)]
    pub layers: LayerPattern,
    /// Keys for attention.
    #[serde(flatten)]
    pub attention: AttentionOptions,
    /// Keys for encoders and towers whose rows a decoder reads.
    #[serde(flatten)]
    pub context: Context,
    /// Keys for latent attention.
    #[serde(flatten)]
    pub latent: Latent,
    /// Keys for individual layers.
    #[serde(flatten)]
    pub per_layer: PerLayer,
    /// Keys for experts.
    #[serde(flatten)]
    pub experts: Experts,
}

impl ModelOptions {
    /// Returns whether every block attends to the result of an encoder or tower, in addition to its
    /// self-attention.
    #[must_use]
    pub(crate) fn attends_to_memory(&self) -> bool {
        let instead = self.layers.layer_types.contains(&LayerType::Cross);
        self.context.encoder_layers > 0 || self.context.tower_memory().is_some() && !instead
    }
}

/// The defaults of the key table; a test compares them.
impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            implementation: None,
            attn_implementation: AttnImplementation::Sdpa,
            dropout: 0.0,
            model_type: None,
            norm: Norm::Rms,
            norm_position: NormPosition::Before,
            residual: Residual::Sequential,
            activation: None,
            gated_mlp: true,
            packed_gate_up: false,
            streams: 0,
            reconstruction: None,
            sound: None,
            conformer: None,
            plain_first_block: false,
            stream_scale: false,
            parallel_residual: true,
            residual_multiplier: 1.0,
            sub_norms: false,
            activation_scalars: 0,
            layer_scale: false,
            ssm: None,
            rwkv: None,
            shared_block: None,
            linear_attention: None,
            image: ImageEncoder::default(),
            output: OutputHead::default(),
            embedding: Embeddings::default(),
            positions: Positions::default(),
            layers: LayerPattern::default(),
            attention: AttentionOptions::default(),
            context: Context::default(),
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
    /// The projections of queries, keys and values.
    Qkv,
    /// The projections of attention.
    Attention,
    /// The layers of the feed-forward layer.
    Mlp,
    /// All except the projections of queries, keys and values (GPT-Neo).
    AllButQkv,
    /// All, and convolutions.
    All,
}

impl From<bool> for Bias {
    fn from(all: bool) -> Self {
        if all { Self::All } else { Self::None }
    }
}

/// Writes the value in the form of scenario files.
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
