//! Variants of decoder blocks.

use super::{Bias, Family, IndexerType, MlpType, Model};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Implementation of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// Fused norms, as in torchtitan.
    Torchtitan,
    /// The modeling code of transformers 5.
    Transformers,
    /// The implementation of `shardlab exec`.
    Native,
}

words!(Implementation {
    Torchtitan = "torchtitan",
    Transformers = "transformers",
    Native = "native",
});

/// How the code of transformers computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttnImplementation {
    /// `scaled_dot_product_attention`, with a mask if a window is not longer than the sequence.
    Sdpa,
    /// Matmuls and a softmax in float32.
    Eager,
    /// The kernels of the flash-attn package, which support windows and soft capping.
    FlashAttention2,
}

words!(AttnImplementation {
    Sdpa = "sdpa",
    Eager = "eager",
    FlashAttention2 = "flash_attention_2",
});

/// Implementation of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertCode {
    /// Kernels that index the row of each choice; weights are applied between the matmuls.
    Rows,
    /// torchtitan's PyTorch code.
    Torchtitan,
    /// The code of transformers.
    Transformers,
}

/// Norm of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm.
    Rms,
    /// RMSNorm without a weight (nanochat).
    RmsNoWeight,
    /// RMSNorm whose stored weight is the factor minus 1 (Gemma).
    RmsUnitOffset,
    /// LayerNorm with weight and bias.
    Layer,
    /// LayerNorm with a weight only.
    LayerNoBias,
    /// LayerNorm without parameters (OLMo).
    LayerNoWeight,
    /// LayerNorm with a bias, whose stored weight is the factor minus 1 (Nemotron).
    LayerUnitOffset,
}

words!(Norm {
    Rms = "rms_norm",
    RmsNoWeight = "rms_norm_no_weight",
    RmsUnitOffset = "rms_norm_unit_offset",
    Layer = "layer_norm",
    LayerNoBias = "layer_norm_no_bias",
    LayerNoWeight = "layer_norm_no_weight",
    LayerUnitOffset = "layer_norm_unit_offset",
});

/// Where norms are placed around attention and the feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPosition {
    /// On their inputs.
    Before,
    /// On their outputs, before these are added to the residual stream (OLMo 2).
    After,
    /// Both (Gemma 2).
    Both,
    /// On the residual stream, after each addition (BERT).
    Sum,
}

words!(NormPosition {
    Before = "before",
    After = "after",
    Both = "both",
    Sum = "sum",
});

/// How attention and the feed-forward layer are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// One after the other.
    Sequential,
    /// Both read the residual stream, each through its own norm.
    Parallel,
    /// Both read the same norm of the residual stream.
    ParallelOneNorm,
}

words!(Residual {
    Sequential = "sequential",
    Parallel = "parallel",
    ParallelOneNorm = "parallel_one_norm",
});

/// Activation of the feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Exact GELU.
    Gelu,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// The same in eight elementwise operations (`NewGELUActivation` of transformers). Other
    /// implementations compute it in one.
    GeluNew,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    Relu2,
}

words!(Activation {
    Silu = "silu",
    Gelu = "gelu",
    GeluTanh = "gelu_tanh",
    GeluNew = "gelu_new",
    Relu = "relu",
    Relu2 = "relu2",
});

/// Position embedding of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionEmbedding {
    /// Rotation of queries and keys; dimension `i` is paired with `i + rotated / 2`.
    Rotary,
    /// Rotation of queries and keys; dimension `2 i` is paired with `2 i + 1`.
    RotaryInterleaved,
    /// A learned table whose rows are added to the token embeddings.
    Learned,
    /// Sines and cosines of the positions, which are added to the token embeddings.
    Sinusoidal,
    /// The same, stored as a frozen parameter.
    SinusoidalTable,
    /// A penalty on the scores that grows with the distance.
    Alibi,
    /// None: other layers encode the order.
    None,
}

words!(PositionEmbedding {
    Rotary = "rotary",
    RotaryInterleaved = "rotary_interleaved",
    Learned = "learned",
    Sinusoidal = "sinusoidal",
    SinusoidalTable = "sinusoidal_table",
    Alibi = "alibi",
    None = "none",
});

impl PositionEmbedding {
    /// Returns whether rows of a table are added to the token embeddings.
    #[must_use]
    pub(crate) fn is_table(self) -> bool {
        matches!(self, Self::Learned | Self::SinusoidalTable)
    }

    /// Returns whether queries and keys are rotated.
    #[must_use]
    pub fn rotates(self) -> bool {
        matches!(self, Self::Rotary | Self::RotaryInterleaved)
    }
}

/// Layout of queries, keys and values in a packed projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedQkv {
    /// Three separate projections.
    None,
    /// All queries, all keys, all values (Phi-3).
    Concatenated,
    /// Query, key and value of each head (BLOOM).
    PerHead,
    /// The queries, the key and the value of each key head (Falcon 40B).
    PerGroup,
}

words!(PackedQkv {
    None = "none",
    Concatenated = "concatenated",
    PerHead = "per_head",
    PerGroup = "per_group",
});

/// The positions that a layer's attention sees, or the layer that replaces attention. The names are
/// those of `layer_types` in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// All earlier positions.
    Full,
    /// The positions of the sliding window.
    Sliding,
    /// All earlier positions, without a rotary embedding (SmolLM3).
    FullNoRope,
    /// The earlier positions in the same chunk of the sequence (Llama 4).
    Chunked,
    /// The gated delta rule in place of attention (Qwen3-Next).
    Linear,
    /// A selective scan in place of attention (Mamba).
    Mamba,
    /// The same by heads and chunks (Mamba-2).
    Mamba2,
    /// Attention and a Mamba-2 layer with the same input; their results are added (Falcon-H1).
    Hybrid,
    /// A gated short convolution in place of attention (LFM2).
    Conv,
    /// The recurrence of RWKV in place of attention, with a feed-forward layer that also reads the
    /// previous position.
    Rwkv,
    /// A gated linear recurrence in place of attention (RecurrentGemma).
    RgLru,
    /// Rows of a tower, in place of earlier positions. Learned gates multiply the layer's output
    /// (Llama 3.2 Vision).
    Cross,
    /// All positions. Learned gates multiply the layer's output (the tower of Llama 3.2 Vision).
    FullGated,
    /// A Mamba-2 layer after an attention block that several layers share (Zamba 2).
    Shared,
    /// Nothing in place of attention.
    None,
}

words!(LayerType {
    Full = "full_attention",
    Sliding = "sliding_attention",
    FullNoRope = "full_attention_no_rope",
    Chunked = "chunked_attention",
    Linear = "linear_attention",
    Mamba = "mamba",
    Mamba2 = "mamba2",
    Hybrid = "hybrid",
    Conv = "conv",
    Rwkv = "rwkv",
    RgLru = "rg_lru",
    Cross = "cross_attention",
    FullGated = "full_attention_gated",
    Shared = "shared_attention",
    None = "none",
});

impl LayerType {
    /// Returns whether a layer has softmax attention.
    #[must_use]
    pub(crate) fn is_attention(self) -> bool {
        matches!(
            self,
            Self::Full
                | Self::Sliding
                | Self::FullNoRope
                | Self::Chunked
                | Self::Hybrid
                | Self::Shared
                | Self::Cross
                | Self::FullGated
        )
    }

    /// Returns whether a layer has a recurrent state in addition to its attention.
    #[must_use]
    pub(crate) fn attends_with_state(self) -> bool {
        matches!(self, Self::Hybrid | Self::Shared)
    }

    /// Returns whether a block that several layers share comes before the layer.
    #[must_use]
    pub(crate) fn has_shared_block(self) -> bool {
        self == Self::Shared
    }

    /// Returns whether learned gates multiply the outputs of attention and the feed-forward layer.
    #[must_use]
    pub(crate) fn is_gated(self) -> bool {
        matches!(self, Self::Cross | Self::FullGated)
    }
}

/// Output layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Logits of the vocabulary at every position; in encoders, only for masked tokens.
    LanguageModel,
    /// Logits for masked tokens, and two scores for next sentence prediction (BERT).
    Pretraining,
    /// Scores for the last position (a single one: a reward model); in encoders, for the first one.
    SequenceClassification,
    /// Scores for every position.
    TokenClassification,
    /// A vector that a linear layer computes from the last position.
    Vector,
    /// The same vector, compared with the vector that the tower computes from an image: each text
    /// with all images of the micro-batch (CLIP).
    Contrastive,
    /// None: the output is the hidden states, or a pooled one.
    None,
}

words!(Head {
    LanguageModel = "language_model",
    Pretraining = "pretraining",
    SequenceClassification = "sequence_classification",
    TokenClassification = "token_classification",
    Vector = "vector",
    Contrastive = "contrastive",
    None = "none",
});

/// Which rows of an image are classified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePooling {
    /// The class token.
    Class,
    /// The mean of the patches.
    Mean,
    /// Both, concatenated (DINOv2).
    ClassAndMean,
}

words!(ImagePooling {
    Class = "class",
    Mean = "mean",
    ClassAndMean = "class_and_mean",
});

/// Norms on queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// On each head, with one weight for all heads (Qwen3).
    Head,
    /// On all heads together (OLMo 2).
    Full,
    /// On each head, with a separate LayerNorm weight (Command R+).
    EachHead,
    /// On each head, after the rotation (Hunyuan).
    AfterRope,
    /// On each head, after the rotation, without a weight, and only in layers with rotary
    /// embeddings (Llama 4).
    AfterRopeNoWeight,
}

impl QkNorm {
    /// Names of the values other than `true` and `false`.
    pub const WORDS: &'static [&'static str] =
        &["full", "each_head", "after_rope", "after_rope_no_weight"];

    /// Returns the value with a name.
    #[must_use]
    pub(crate) fn of_word(word: &str) -> Option<Self> {
        Some(match word {
            "full" => Self::Full,
            "each_head" => Self::EachHead,
            "after_rope" => Self::AfterRope,
            "after_rope_no_weight" => Self::AfterRopeNoWeight,
            _ => return None,
        })
    }

    /// Returns whether queries and keys are normalized after the rotation.
    #[must_use]
    pub(crate) fn follows_rope(self) -> bool {
        matches!(self, Self::AfterRope | Self::AfterRopeNoWeight)
    }
}

impl From<bool> for QkNorm {
    fn from(head: bool) -> Self {
        if head { Self::Head } else { Self::None }
    }
}

/// Writes the value in the form of scenario files.
impl Serialize for QkNorm {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_bool(false),
            Self::Head => to.serialize_bool(true),
            Self::Full => to.serialize_str("full"),
            Self::EachHead => to.serialize_str("each_head"),
            Self::AfterRope => to.serialize_str("after_rope"),
            Self::AfterRopeNoWeight => to.serialize_str("after_rope_no_weight"),
        }
    }
}

impl<'de> Deserialize<'de> for QkNorm {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Flag(bool),
            Word(String),
        }
        let found = match Form::deserialize(from)? {
            Form::Flag(head) => Some(Self::from(head)),
            Form::Word(word) => Self::of_word(&word),
        };
        found.ok_or_else(|| serde::de::Error::custom("no kind of norm"))
    }
}

impl Bias {
    /// Returns whether the projections of queries, keys and values have a bias.
    #[must_use]
    pub fn qkv(self) -> bool {
        matches!(self, Self::Qkv | Self::Attention | Self::All)
    }

    /// Returns whether the output projection of attention has a bias.
    #[must_use]
    pub(crate) fn attention_output(self) -> bool {
        matches!(self, Self::Attention | Self::AllButQkv | Self::All)
    }

    /// Returns whether the feed-forward layer has biases.
    #[must_use]
    pub fn mlp(self) -> bool {
        matches!(self, Self::Mlp | Self::AllButQkv | Self::All)
    }
}

impl Model {
    /// Returns the type of a layer.
    #[must_use]
    pub(crate) fn layer_type(&self, layer: usize) -> LayerType {
        let types = &self.options.layers.layer_types;
        match (types.len(), self.options.layers.sliding_window) {
            (0, None) => LayerType::Full,
            (0, Some(_)) => LayerType::Sliding,
            (n, _) => types[layer % n],
        }
    }

    /// Returns the block whose weights a block shares, if it has no weights of its own.
    #[must_use]
    pub(crate) fn weights_of(&self, layer: u32) -> Option<u32> {
        let (groups, own) = (
            self.options.layers.layer_groups,
            self.options.layers.group_layers,
        );
        if groups == 0 {
            return None;
        }
        let size = (u64::from(self.layers) / groups).max(1);
        let inside = u64::from(layer) % size;
        let back = (inside - inside % own) as u32;
        (back > 0).then(|| layer - back)
    }

    /// Returns the layer whose shared block a layer reuses, if the layer is not the first to use
    /// it.
    #[must_use]
    pub fn block_of(&self, layer: usize) -> Option<usize> {
        let blocks = self.options.shared_block.as_ref()?.blocks.max(1) as usize;
        let mut users = (0..layer).filter(|&n| self.layer_type(n).has_shared_block());
        let before = users.clone().count();
        (before >= blocks)
            .then(|| users.nth(before % blocks))
            .flatten()
    }

    /// Returns the kind of layer that follows attention in a block.
    #[must_use]
    pub(crate) fn mlp_type(&self, layer: usize) -> MlpType {
        let types = &self.options.layers.mlp_layer_types;
        match types.len() {
            0 if self.family == Family::Moe && self.options.experts.has(layer as u64) => {
                MlpType::Sparse
            }
            0 => MlpType::Dense,
            n => types[layer % n],
        }
    }

    /// Returns whether some layer has experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        self.expert_layers() > 0
    }

    /// Returns the number of layers that have experts.
    #[must_use]
    pub fn expert_layers(&self) -> u64 {
        let sparse = |layer: &usize| self.mlp_type(*layer) == MlpType::Sparse;
        (0..self.layers as usize).filter(sparse).count() as u64
    }

    /// Returns the model with the sizes of one of its layers. `kv_heads` is 0 for a layer without
    /// attention; `ffn` is 0 for a layer without a feed-forward layer.
    #[must_use]
    pub(crate) fn of_layer(&self, layer: usize) -> Self {
        let pick = |list: &[u64], all: u64| list.get(layer).copied().unwrap_or(all);
        let attends = self.layer_type(layer).is_attention();
        let has_mlp = self.mlp_type(layer) != MlpType::None;
        let full = matches!(
            self.layer_type(layer),
            LayerType::Full | LayerType::FullNoRope | LayerType::Chunked
        );
        let head_dim = self.options.attention.full_head_dim.filter(|_| full);
        let mut options = self.options.clone();
        // In OLMo Hybrid, layers without attention use pre-norm.
        let recurs = self.layer_type(layer) == LayerType::Linear;
        if recurs && options.norm_position == NormPosition::After {
            options.norm_position = NormPosition::Before;
        }
        let rotates = self.layer_type(layer) != LayerType::FullNoRope;
        if options.attention.qk_norm == QkNorm::AfterRopeNoWeight && !rotates {
            options.attention.qk_norm = QkNorm::None;
        }
        Self {
            head_dim: head_dim.unwrap_or(self.head_dim),
            kv_heads: pick(&self.options.layers.layer_kv_heads, self.kv_heads) * u64::from(attends),
            ffn: pick(&self.options.layers.layer_ffn, self.ffn) * u64::from(has_mlp),
            options,
            ..self.clone()
        }
    }

    /// Returns the model with `inner_norm`, the norm of queries, keys and last rows, in place of
    /// the norm of blocks.
    #[must_use]
    pub(crate) fn with_inner_norm(&self) -> Self {
        let mut inner = self.clone();
        inner.options.norm = self
            .options
            .attention
            .inner_norm
            .unwrap_or(self.options.norm);
        inner
    }

    /// Returns whether a layer has a sliding window.
    #[must_use]
    pub(crate) fn slides(&self, layer: usize) -> bool {
        self.layer_type(layer) == LayerType::Sliding
    }

    /// Returns the chunk size of a layer's attention in positions, if `seq` positions are more than
    /// one chunk.
    #[must_use]
    pub fn chunk(&self, layer: usize, seq: u64) -> Option<u64> {
        let chunked = self.layer_type(layer) == LayerType::Chunked;
        self.options
            .layers
            .attention_chunk
            .filter(|&n| chunked && n < seq)
    }

    /// Returns whether any layer scales queries by a factor that depends on their position.
    #[must_use]
    pub(crate) fn has_temperature(&self) -> bool {
        let mut layers = 0..self.layers as usize;
        self.options.positions.attention_temperature > 0.0
            && layers.any(|layer| self.layer_type(layer) == LayerType::FullNoRope)
    }

    /// Returns the window of a layer's attention over `seq` positions; `None` if it sees all of
    /// them.
    #[must_use]
    pub fn window(&self, layer: usize, seq: u64) -> Option<u64> {
        let slides = self.slides(layer) && seq > self.options.layers.window_from;
        let window = self.options.layers.sliding_window.filter(|_| slides);
        // Compressed keys follow the keys of the window.
        let rate = self.options.layers.compress_rates.get(layer).copied();
        if let Some(rate) = rate {
            let more = seq.checked_div(rate).unwrap_or(0);
            let chosen = match self.options.latent.indexer_type(layer) {
                IndexerType::None => more,
                _ => more.min(self.options.latent.index_topk),
            };
            return window.map(|w| w + chosen).filter(|&w| w < seq);
        }
        // The positions that an indexer chooses cost as much as a window of that size.
        let latent = &self.options.latent;
        let chosen = latent.indexer_type(layer) != IndexerType::None;
        let chosen = chosen.then_some(latent.index_topk);
        let window = window.or(chosen);
        // Queries see sums of positions on both sides.
        let window = window.map(|w| w + self.summaries(seq).div_ceil(2));
        window.filter(|&w| w < seq)
    }
}
