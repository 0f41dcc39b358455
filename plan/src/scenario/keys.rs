//! Every key of a scenario file, once: the reader, its errors, the JSON Schema, the reference and
//! the dashboard read this table.

mod applies;

pub use applies::Need;
pub(crate) use applies::families;

use super::huggingface;
use super::presets::PRESETS;
use crate::config::{
    Activation, AllocatorKind, AttentionBackend, AttentionGate, AttentionSinks, AttnImplementation,
    AuxLoss, CompileMode, ConvolutionNorm, Dispatcher, Distances, Float8Format, Float8Recipe,
    Float8Saved, FrozenType, GatePreset, GateProgram, Glu, GradientSync, Head, ImagePooling,
    Implementation, IndexerType, LayerType, Loss, LrSchedule, MergeProjections, MlpType,
    MomentType, MuonAdjustLr, Norm, NormPosition, Optimizer, OuterStrategy, Overflow, PackedQkv,
    PolicyKind, PositionEmbedding, ProjectorNorm, QkNorm, Recompute, RecomputeModule, Residual,
    RopeType, Router, Routing, Scope, Strategy, TokenWidth, Variant,
};
use crate::ir::MAX_DOCUMENTS;
use crate::models;
use applies::{
    ADAPTERS, ATTENTION, CASTS_FOR_GATHERS, CHUNKED_LAYERS, CHUNKED_LOSS, CLAMPED_GLU, COMPILED,
    DIVIDED_EXPERTS, DRAWN_ROUTING, EXPERTS, FLOAT8, FULL_RECOMPUTE, HALF_PRECISION, LOSS_FUNCTION,
    MODE_FULL, MUON, NO_ROPE_LAYERS, RECOMPUTE, ROUTED, ROW_FACTOR, SEEDED_ROUTING, SELECTIVE,
    SEVERAL_DATA_RANKS, SEVERAL_MICRO_BATCHES, SEVERAL_RANKS, SHARED_EXPERT, SOME_FROZEN,
    SOME_SKIPPED, TEMPERATURE, TRANSFORMED_LAYERS, TRANSFORMERS, WHOLE_LOGITS,
};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Sections of a scenario file that hold keys (`[sweep]` holds paths of keys instead).
pub const SECTIONS: [&str; 9] = [
    "model",
    "lora",
    "train",
    "mesh",
    "moe",
    "fsdp",
    "precision",
    "compile",
    "gate",
];

/// Names of the shipped hardware profiles.
pub const HARDWARE: [&str; 10] = [
    "h200-nvlink",
    "h200-nvlink-exec",
    "h100-80",
    "h100-80-nvlink",
    "h100-80-exec",
    "h100-96-500w",
    "a100-80",
    "a100-40",
    "b200",
    "cpu",
];

/// One form that a key's value may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Accept {
    /// `true` or `false`.
    Bool,
    /// An integer, both ends included.
    Integer(u64, u64),
    /// A finite number (an integer too), both ends included. `f64::MIN_POSITIVE` as the lower end
    /// means "above 0".
    Number(f64, f64),
    /// Bytes, both ends included: an integer, or a string with a unit such as `"25MiB"`.
    Bytes(u64, u64),
    /// The same with a unit, always: a bare number would be read as bytes and meant as GiB.
    Size(u64, u64),
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A path that ends in this suffix, for example `.toml`.
    Path(&'static str),
    /// A string that is not empty.
    Text,
    /// A list that is not empty.
    List(&'static Accept),
    /// A list of exactly this length.
    Tuple(&'static Accept, usize),
    /// A list of up to this length that is not empty.
    Short(&'static Accept, usize),
    /// The empty list.
    Empty,
    /// An inline table with any of these keys, at least one.
    Table(&'static [(&'static str, Accept)]),
    /// A table from regular expressions to values of this form.
    Map(&'static Accept),
}

/// What a scenario file may say under one key.
#[derive(Clone, Copy, Debug)]
pub struct KeyInfo {
    /// Section, without brackets.
    pub section: &'static str,
    /// Key.
    pub key: &'static str,
    /// Name of the resolved option, in JSON and in baselines of the gate. It never changes: a key
    /// that gets a better name keeps it here, and as an alias.
    pub field: &'static str,
    /// Other names that are accepted: those of PyTorch, torchtitan, Megatron-FSDP and Hugging Face.
    pub aliases: &'static [&'static str],
    /// The forms its value may take.
    pub accepts: &'static [Accept],
    /// The default as a JSON (and TOML) literal, which is what the reader takes, or, in
    /// parentheses, how it is derived.
    pub default: &'static str,
    /// One line.
    pub doc: &'static str,
    /// What has to hold for it to have an effect, whatever the model and the policy. See
    /// [`applies`](Self::applies) for all limits.
    pub needs: &'static [Need],
}

impl KeyInfo {
    /// Returns `fsdp.policy`.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.key)
    }

    /// Returns the path of its resolved option in JSON.
    #[must_use]
    pub fn json_path(&self) -> String {
        format!("{}.{}", self.section, self.field)
    }

    /// Returns whether this is the key's name or one of its aliases.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        self.key == name || self.aliases.contains(&name)
    }

    /// Returns the strings that are valid values, for shell completion and suggestions.
    pub fn values(&self) -> impl Iterator<Item = &'static str> {
        self.accepts
            .iter()
            .flat_map(|a| match a {
                Accept::Bool => &["true", "false"][..],
                Accept::Choice(c) => c,
                Accept::List(Accept::Choice(c)) => c,
                _ => &[],
            })
            .copied()
    }

    /// Returns all accepted forms in words, for example `an integer from 1 to 64 or "implicit"`.
    #[must_use]
    pub fn expected(&self) -> String {
        expected(self.accepts)
    }
}

/// Forms in words, joined by "or".
pub(crate) fn expected(accepts: &[Accept]) -> String {
    accepts
        .iter()
        .map(Accept::describe)
        .collect::<Vec<_>>()
        .join(" or ")
}

impl Accept {
    pub(crate) fn describe(&self) -> String {
        match *self {
            Self::Bool => "true or false".into(),
            Self::Integer(a, b) => format!("an integer from {a} to {b}"),
            Self::Number(a, b) if a == f64::MIN_POSITIVE => {
                format!("a number above 0 and up to {b}")
            }
            Self::Number(a, b) => format!("a number from {a} to {b}"),
            Self::Bytes(_, b) => {
                format!("bytes up to {b}, as an integer or as a string such as \"25MiB\"")
            }
            Self::Size(..) => "a size with a unit, such as \"60GiB\"".into(),
            Self::Choice(c) => c
                .iter()
                .map(|s| format!("{s:?}"))
                .collect::<Vec<_>>()
                .join(" | "),
            Self::Path(ending) => format!("a path that ends in {ending}"),
            Self::Text => "a string".into(),
            Self::List(of) => format!("a list of {}", of.describe_many()),
            Self::Tuple(of, n) => format!("a list of {n} {}", of.describe_many()),
            Self::Short(of, n) => format!("a list of up to {n} {}", of.describe_many()),
            Self::Empty => "an empty list".into(),
            Self::Table(fields) => {
                let f: Vec<String> = fields
                    .iter()
                    .map(|(k, a)| format!("{k} = {}", a.describe()))
                    .collect();
                format!("a table {{ {} }}", f.join(", "))
            }
            Self::Map(of) => format!("a table from patterns to {}", of.describe_many()),
        }
    }

    /// Returns the form of a list's items.
    pub(crate) fn items(&self) -> Option<Self> {
        match self {
            Self::List(of) | Self::Tuple(of, _) | Self::Short(of, _) => Some(**of),
            _ => None,
        }
    }

    /// Returns the keys of an inline table.
    pub(crate) fn fields(&self) -> Option<&'static [(&'static str, Self)]> {
        match self {
            Self::Table(fields) => Some(fields),
            _ => None,
        }
    }

    fn describe_many(&self) -> String {
        match self {
            Self::Text => "strings".into(),
            Self::Integer(a, b) => format!("integers from {a} to {b}"),
            Self::Number(a, b) if *a == ABOVE_0 => format!("numbers above 0 and up to {b}"),
            Self::Number(a, b) => format!("numbers from {a} to {b}"),
            other => other.describe(),
        }
    }
}

macro_rules! keys {
    ($($id:ident: $section:literal $key:literal $(as $field:literal)? $(also [$($alias:literal),+])? [$($accept:expr),+] $default:literal $doc:literal $(needs [$($need:expr),+])?;)*) => {
        /// A key, as index into [`KEYS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Key {
            $($id),*
        }

        /// The table, grouped by section.
        pub(crate) static KEYS: &[KeyInfo] = &[
            $(KeyInfo { section: $section, key: $key, field: keys!(@field $key $($field)?), aliases: &[$($($alias),+)?], accepts: &[$($accept),+], default: $default, doc: $doc, needs: &[$($($need),+)?] }),*
        ];

        const IDS: &[Key] = &[$(Key::$id),*];
    };
    (@field $key:literal) => { $key };
    (@field $key:literal $field:literal) => { $field };
}

/// Keys by section and name, aliases included.
static BY_NAME: LazyLock<HashMap<(&str, &str), Key>> = LazyLock::new(|| {
    let mut all = HashMap::new();
    for key in Key::all() {
        let info = key.info();
        for name in std::iter::once(info.key).chain(info.aliases.iter().copied()) {
            all.entry((info.section, name)).or_insert(key);
        }
    }
    all
});

impl Key {
    pub(crate) fn info(self) -> &'static KeyInfo {
        &KEYS[self as usize]
    }

    /// `fsdp.policy`
    pub(crate) fn path(self) -> String {
        self.info().path()
    }

    /// Returns the key at a path such as `fsdp.policy`.
    pub(crate) fn at(path: &str) -> Option<Self> {
        let (section, key) = path.split_once('.')?;
        Self::find(section, key)
    }

    /// Returns the key of a section with this name or alias.
    pub(crate) fn find(section: &str, key: &str) -> Option<Self> {
        BY_NAME.get(&(section, key)).copied()
    }

    /// Keys of this name in any section.
    pub(crate) fn named(key: &str) -> Option<Self> {
        IDS.iter().copied().find(|id| id.info().is_named(key))
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        IDS.iter().copied()
    }

    pub(crate) fn of_section(section: &str) -> impl Iterator<Item = Self> {
        Self::all().filter(move |id| id.info().section == section)
    }
}

/// Returns the path of the key whose resolved option is at a path of JSON: `mesh.dp_replicate` of
/// `mesh.dp_outer`. Other text comes back as it is.
#[must_use]
pub fn key_of(field: &str) -> Cow<'_, str> {
    let at = |k: &&KeyInfo| k.field != k.key && k.json_path() == field;
    match KEYS.iter().find(at) {
        Some(info) => info.path().into(),
        None => field.into(),
    }
}

/// Returns the path in JSON of the resolved option of a key, which may have any of its names.
#[must_use]
pub fn json_path_of(key: &str) -> Option<String> {
    Key::at(key).map(|key| key.info().json_path())
}

/// All keys, section by section.
#[must_use]
pub fn keys() -> &'static [KeyInfo] {
    KEYS
}

use Accept::{
    Bool, Bytes, Choice, Empty, Integer, List, Map, Number, Path, Short, Size, Table, Text, Tuple,
};

const ABOVE_0: f64 = f64::MIN_POSITIVE;
const MIB: u64 = 1 << 20;
const MAX_SEED: u64 = u32::MAX as u64;
const DTYPES: &[&str] = &["f32", "bf16", "f16"];
const DTYPES_OR_NONE: &[&str] = &["f32", "bf16", "f16", "none"];
const PLACEMENT: Accept = Tuple(&Choice(&["flat", "replicate"]), 3);
const LOOKAHEAD: &[(&str, Accept)] = &[("elements", Integer(1, 1 << 50))];
const FACTOR: Accept = Number(ABOVE_0, 1e9);
const ROPE_SCALING: &[(&str, Accept)] = &[
    ("rope_type", Choice(RopeType::WORDS)),
    ("factor", FACTOR),
    ("original_max_position_embeddings", FACTOR),
    ("low_freq_factor", FACTOR),
    ("high_freq_factor", FACTOR),
    ("beta_fast", FACTOR),
    ("beta_slow", FACTOR),
    ("truncate", Bool),
    ("attention_factor", FACTOR),
    ("mscale", Number(0.0, 1e9)),
    ("mscale_all_dim", Number(0.0, 1e9)),
    ("short_factor", List(&FACTOR)),
    ("long_factor", List(&FACTOR)),
];
const SIZE: Accept = Integer(1, 4 * MIB);
const COUNT: Accept = Integer(0, 4 * MIB);
const SSM: &[(&str, Accept)] = &[
    ("inner", SIZE),
    ("state", SIZE),
    ("conv", Integer(1, 64)),
    ("dt_rank", SIZE),
    ("heads", SIZE),
    ("groups", SIZE),
    ("chunk", SIZE),
    ("conv_bias", Bool),
    ("bias", Bool),
    ("norms", Bool),
    ("gate_norm", Bool),
];
const RWKV: &[(&str, Accept)] = &[
    ("version", Integer(5, 7)),
    ("heads", SIZE),
    ("keys", SIZE),
    ("values", SIZE),
    ("mix_rank", SIZE),
    ("decay_rank", SIZE),
    ("rate_rank", SIZE),
    ("value_rank", SIZE),
    ("gate_rank", SIZE),
];
const SHARED_BLOCK: &[(&str, Accept)] = &[
    ("blocks", SIZE),
    ("ffn", SIZE),
    ("bias", Bool),
    ("adapter_rank", SIZE),
    ("attention_adapters", Bool),
];
const ENCODER: &[(&str, Accept)] = &[
    ("hidden", SIZE),
    ("heads", SIZE),
    ("kv_heads", SIZE),
    ("head_dim", SIZE),
    ("ffn", SIZE),
    ("max_seq_len", SIZE),
    ("sliding_window", SIZE),
    ("window_from", COUNT),
    ("layer_types", List(&Choice(LayerType::WORDS))),
    ("own_tokens", Bool),
    ("global_projections", Bool),
    ("summary_block", COUNT),
];
const RECONSTRUCTION: &[(&str, Accept)] = &[
    ("patches", SIZE),
    ("layers", Integer(1, 4096)),
    ("hidden", SIZE),
    ("heads", SIZE),
    ("ffn", SIZE),
];
const SOUND: &[(&str, Accept)] = &[
    ("widths", List(&SIZE)),
    ("kernels", List(&Integer(1, 4096))),
    ("strides", List(&Integer(1, 4096))),
    ("bias", Bool),
    ("norms", Bool),
    ("bands", COUNT),
    ("subsampling", Table(SUBSAMPLING)),
    ("scaled", Bool),
    ("input_norm", Bool),
    ("masked", Bool),
    ("position_layers", Integer(0, 256)),
    ("positions_used", Bool),
    ("position_kernel", Integer(1, 4096)),
    ("position_groups", SIZE),
    ("weight_norm", Bool),
    ("gated_biases", Bool),
];
const LINEAR_ATTENTION: &[(&str, Accept)] = &[
    ("key_heads", SIZE),
    ("value_heads", SIZE),
    ("key_dim", SIZE),
    ("value_dim", SIZE),
    ("conv", Integer(1, 64)),
    ("projections", Integer(2, 6)),
    ("gate_rank", COUNT),
    ("channel_decays", Bool),
    ("fixed_decays", Bool),
    ("exponential_gates", Bool),
    ("chunk", SIZE),
];
const STAGES: &[(&str, Accept)] = &[
    ("depths", List(&SIZE)),
    ("widths", List(&SIZE)),
    ("heads", List(&SIZE)),
    ("edge", SIZE),
    ("window", Integer(1, 4096)),
    ("kernel", Integer(1, 255)),
    ("response_norm", Bool),
    ("positions", Bool),
    ("cosine", Bool),
    ("last_norm", Bool),
];
const ALTUP: &[(&str, Accept)] = &[
    ("streams", Integer(2, 64)),
    ("active", Integer(0, 63)),
    ("scale", Bool),
    ("laurel_rank", SIZE),
];
const CONFORMER: &[(&str, Accept)] = &[
    ("kernel", Integer(1, 4096)),
    ("expansion", Integer(1, 64)),
    ("pointwise_bias", Bool),
    ("depthwise_bias", Bool),
    ("norm", Choice(ConvolutionNorm::WORDS)),
    ("linear", Bool),
    ("distances", Choice(Distances::WORDS)),
    ("distance_rows", COUNT),
    ("packed_kv", Bool),
    ("chunk", COUNT),
    ("past", COUNT),
    ("future", COUNT),
    ("softcap", Number(ABOVE_0, 1e9)),
    ("post_norms", Bool),
    ("clamps", Bool),
    ("scored_block", Integer(0, 4096)),
    ("scores", COUNT),
];
const SUBSAMPLING: &[(&str, Accept)] = &[
    ("channels", List(&SIZE)),
    ("bias", Bool),
    ("separable", Bool),
    ("norms", Bool),
    ("activation", Choice(Activation::WORDS)),
    ("projection_bias", Bool),
    ("chunk", COUNT),
];
const VISION: &[(&str, Accept)] = &[
    ("layers", Integer(1, 4096)),
    ("hidden", SIZE),
    ("heads", SIZE),
    ("kv_heads", SIZE),
    ("ffn", SIZE),
    ("bias", Bool),
    ("attention_bias", Bool),
    ("qkv_bias", Bool),
    ("key_bias", Bool),
    ("norm", Choice(Norm::WORDS)),
    ("norm_position", Choice(NormPosition::WORDS)),
    ("qk_norm", Bool),
    ("whole_qk_norm", Bool),
    ("activation", Choice(Activation::WORDS)),
    ("gated_mlp", Bool),
    ("packed_qkv", Bool),
    ("layer_scale", Bool),
    ("rotary", Bool),
    ("conformer", Table(CONFORMER)),
    ("attention_chunk", SIZE),
    ("mel_bins", COUNT),
    ("subsampling", Table(SUBSAMPLING)),
    ("patch_dim", SIZE),
    ("patch_bias", Bool),
    ("patches", SIZE),
    ("positions", COUNT),
    ("fixed_positions", Bool),
    ("sinusoids", Bool),
    ("class_token", Bool),
    ("tiles", Integer(1, 256)),
    ("tile_rows", Integer(0, 65536)),
    ("gated_layers", Integer(0, 4096)),
    ("picked", List(&COUNT)),
    ("pre_norm", Bool),
    ("vector", Bool),
    ("post_norm", Bool),
    ("pooling_head", Bool),
    ("memory", Bool),
    ("projector", Bool),
    ("merge", SIZE),
    ("pool", Bool),
    ("projector_norm", Choice(ProjectorNorm::WORDS)),
    ("patch_layers", List(&SIZE)),
    ("patch_layer_bias", Bool),
    ("projector_layers", List(&SIZE)),
    ("projector_inputs", List(&SIZE)),
    ("projector_halves", Bool),
    ("projector_bias", Bool),
    ("projector_gate", Integer(0, 4 * MIB)),
    ("latents", COUNT),
    ("latent_window", COUNT),
    ("latent_width", COUNT),
    ("latent_cross", Integer(1, 4096)),
    ("latent_vocab", COUNT),
    ("latent_positions", SIZE),
    ("latent_tokens", SIZE),
    ("latent_ffn", SIZE),
    ("latent_layers", Integer(1, 4096)),
    ("latent_heads", List(&SIZE)),
    ("separators", Integer(0, 64)),
    ("newline", Bool),
    ("unused_rows", COUNT),
    ("deepstack", List(&COUNT)),
];
const PARAM_GROUP: &[(&str, Accept)] = &[
    ("params", List(&Text)),
    ("weight_decay", Number(0.0, 1e3)),
    ("lr_scale", Number(0.0, 1e6)),
];
const LENGTHS: &[(&str, Accept)] = &[
    ("mean", Integer(1, 4 * MIB)),
    ("std", Number(ABOVE_0, 4.0 * MIB as f64)),
    ("data", Text),
    ("eos_token_id", Integer(0, u32::MAX as u64)),
    ("dtype", Choice(TokenWidth::WORDS)),
];
const PREFETCH_LIST: &[(&str, Accept)] = &[
    ("unit", Text),
    ("forward", List(&Text)),
    ("backward", List(&Text)),
];
const SKIPPED_BLOCKS: &[(&str, Accept)] = &[
    ("blocks", List(&Text)),
    ("micro_batches", List(&Integer(0, 4095))),
];
const PLACEMENTS: &[(&str, Accept)] = &[("dp_shard", PLACEMENT), ("dp_replicate", PLACEMENT)];

keys! {
    Preset: "model" "preset" [Choice(PRESETS), Path(huggingface::ENDING)] "(none)" "Shapes of a known model, or the path of a Hugging Face config.json (relative to the file that names it); other keys of this section override them";
    Family: "model" "family" [Choice(&models::FAMILY_NAMES)] "(the preset's)" "Model family without a preset: llama (decoder with rotary embeddings and SwiGLU), gpt2 (decoder with learned positions and GELU), gpt_neox (decoder with partial rotary embeddings and parallel residuals, such as Pythia), decoder (decoder with a choice of norms, activations, biases, windows and position embeddings), moe (decoder with mixtures of experts, such as Mixtral), bert (text encoder), vit (encoder of image patches), encoder (post-norm transformer encoder), linear (a stack of linear layers), cnn (convolutions and a linear layer)";
    Layers: "model" "layers" also ["num_hidden_layers", "n_layer", "n_layers"] [Integer(1, 4096)] "(required without preset)" "Number of transformer blocks, linear layers or convolutions";
    Hidden: "model" "hidden" also ["hidden_size", "n_embd", "dim"] [Integer(1, MIB)] "(required without preset)" "Width of the model (embedding dimension)";
    Heads: "model" "heads" also ["num_attention_heads", "n_head", "n_heads"] [Integer(1, 65536)] "(required without preset)" "Number of query heads";
    KvHeads: "model" "kv_heads" also ["num_key_value_heads", "n_kv_heads"] [Integer(1, 65536)] "(heads)" "Number of key and value heads; must divide heads; fewer than heads means grouped-query attention";
    HeadDim: "model" "head_dim" [Integer(1, 65536)] "(hidden / heads)" "Dimension of one head; must be even";
    Ffn: "model" "ffn" also ["intermediate_size"] [Integer(1, 4 * MIB)] "(4 hidden; llama: 8/3 hidden, rounded up to 256)" "Width of the feed-forward layer; if hidden overrides that of a preset, the preset's ffn is scaled in proportion";
    Vocab: "model" "vocab" also ["vocab_size"] [Integer(1, 16 * MIB)] "(required without preset)" "Vocabulary size";
    TieEmbeddings: "model" "tie_embeddings" also ["tie_word_embeddings"] [Bool] "(gpt2: true, llama: false)" "Embedding and output head share a parameter";
    NormEps: "model" "norm_eps" also ["rms_norm_eps"] [Number(ABOVE_0, 1.0)] "1e-5" "Epsilon of LayerNorm and RMSNorm";
    RopeTheta: "model" "rope_theta" [Number(1.0, 1e12)] "(llama: 10000)" "Base of the rotary position embedding";
    MaxSeqLen: "model" "max_seq_len" also ["max_position_embeddings"] [Integer(1, 16 * MIB)] "(llama: seq_len, gpt2: at least 1024)" "Size of the table of positions; the longest sequence that the model accepts";
    Channels: "model" "channels" [Integer(1, 65536)] "(required without preset)" "Channels of every convolution";
    Height: "model" "height" [Integer(1, 16384)] "(cnn: 64)" "Image height";
    Width: "model" "width" [Integer(1, 16384)] "(cnn: 64)" "Image width";
    Kernel: "model" "kernel" [Integer(1, 255)] "(cnn: 3)" "Edge length of the convolution kernels; must be odd";
    Bias: "model" "bias" [Bool, Choice(&["qkv", "attention", "mlp", "all_but_qkv"])] "(llama, decoder: false, others: true)" "Which linear layers and convolutions have a bias: true (all), false (none), qkv (only queries, keys and values, as in Qwen2), attention (these and the output projection of attention), mlp (only the feed-forward layer), all_but_qkv (all but queries, keys and values, as in GPT-Neo); the last four are for llama and decoder only";
    BiasOfKeys: "model" "key_bias" [Bool] "true" "The projection of keys has a bias if those of queries and values have one (Whisper: false)";
    QkNorm: "model" "qk_norm" [Bool, Choice(QkNorm::WORDS)] "false" "Normalize queries and keys: true (per head before the rotary embedding, as in Qwen3), full (all heads together, as in OLMo 2), each_head (a LayerNorm weight per head, as in Command R+), after_rope (per head after the rotary embedding, as in Hunyuan), after_rope_no_weight (the same without a weight, in layers with a rotary embedding only, as in Llama 4)";
    Implementation: "model" "implementation" [Choice(Implementation::WORDS)] "(policy native: \"native\", others: \"torchtitan\")" "Code of the model, which determines kernels and saved tensors: torchtitan (fused norms), transformers (the modeling code of transformers 5: norms, rotary embeddings and softcaps as separate operators, masks that synchronize with the CPU), native (the code of shardlab exec)";
    AttnImplementation: "model" "attn_implementation" [Choice(AttnImplementation::WORDS)] "\"sdpa\"" "How transformers computes attention: sdpa (one kernel; with a mask and repeated keys and values if a sliding window is not longer than the sequence), eager (matmuls and a softmax in float32), flash_attention_2 (one kernel, which supports windows)" needs [TRANSFORMERS];
    Dropout: "model" "dropout" [Number(0.0, 1.0)] "0.0" "Dropout probability of the outputs of attention and of the feed-forward layer, for predictions; a config.json sets it. Only implementation transformers; others run without dropout";
    AttentionDropout: "model" "attention_dropout" [Number(0.0, 1.0)] "0.0" "Dropout probability of attention weights, for predictions. Costs memory with attn_implementation eager. Only implementation transformers";
    EmbeddingDropout: "model" "embedding_dropout" [Number(0.0, 1.0)] "0.0" "Dropout probability of token embeddings, for predictions. Only implementation transformers";
    ModelType: "model" "model_type" [Text] "(none)" "model_type of transformers that determines the names of weights in files; none: the names of Llama";
    Norm: "model" "norm" [Choice(Norm::WORDS)] "\"rms_norm\"" "Norm of the residual stream: rms_norm, rms_norm_no_weight (no parameters: nanochat), rms_norm_unit_offset (the weight is stored minus 1: Gemma), layer_norm, layer_norm_no_bias, layer_norm_no_weight (no parameters: OLMo), layer_norm_unit_offset (Nemotron)";
    NormPosition: "model" "norm_position" [Choice(NormPosition::WORDS)] "\"before\"" "What is normalized: before (the inputs of attention and of the feed-forward layer), after (their outputs: OLMo 2), both (Gemma 2), sum (the residual stream after each addition: BERT)";
    Residual: "model" "residual" [Choice(Residual::WORDS)] "\"sequential\"" "Order of attention and feed-forward layer: sequential (one after the other), parallel (both read the residual stream, each through its own norm), parallel_one_norm (through the same norm: Phi-2, Command R)";
    Activation: "model" "activation" [Choice(Activation::WORDS)] "(decoder: silu, gpt2: gelu_new, gpt_neox: gelu)" "Activation of the feed-forward layer: silu, gelu (exact), gelu_tanh, gelu_new (the same, as eight operators with implementation transformers), relu, relu2 (squared)";
    GatedMlp: "model" "gated_mlp" [Bool] "true" "The activation is multiplied by a second projection of the input (SwiGLU, GeGLU)";
    PackedQkv: "model" "packed_qkv" [Choice(PackedQkv::WORDS)] "\"none\"" "One projection computes queries, keys and values. Its layout: none (separate projections), concatenated (all queries, all keys, all values), per_head (query, key and value of each head), per_group (queries, key and value of each key head)";
    PackedGateUp: "model" "packed_gate_up" [Bool] "false" "One projection computes gate and up of the feed-forward layer (Phi-3)";
    PositionEmbedding: "model" "position_embedding" [Choice(PositionEmbedding::WORDS)] "\"rotary\"" "Position embedding: rotary (pairs of the two halves), rotary_interleaved (adjacent pairs: GPT-J, Command R), learned (a table), sinusoidal (sines and cosines are added: M2M-100), sinusoidal_table (the same as an untrained parameter: Pegasus), alibi (a penalty on the scores: BLOOM, MPT), none (other layers encode the order: Jamba)";
    PatchDim: "model" "patch_dim" [Integer(1, MIB)] "768" "Values per image patch: channels times the area of the patch (vit)";
    PatchBias: "model" "patch_bias" [Bool] "true" "The projection of patches has a bias; false: no bias (CLIP)";
    MaskToken: "model" "mask_token" [Bool] "false" "A learned vector for masked patches; the plan masks no patches (DINOv2)";
    ClassToken: "model" "class_token" [Bool] "true" "A learned class token comes before the patches; false: no class token (SigLIP)";
    DistillationToken: "model" "distillation_token" [Bool] "false" "A second learned token follows the class token (DeiT)";
    SecondClassifier: "model" "second_classifier" [Bool] "false" "A second layer classifies the distillation token; scores are the mean of both (DeiT)";
    RegisterTokens: "model" "register_tokens" [Integer(0, 65536)] "0" "Learned tokens between the class token and the patches (DINOv3: 4)";
    ImagePooling: "model" "image_pooling" [Choice(ImagePooling::WORDS)] "\"class\"" "Input of the image classifier: class (the class token), mean (the mean of the patches: BEiT), class_and_mean (both: DINOv2)";
    Stages: "model" "stages" [Table(STAGES)] "(none)" "An image encoder in stages, each with half as many patches along an edge as the previous one (Swin, ConvNeXt): depths (blocks), widths and heads of each stage (heads = []: convolutions instead of attention), edge (patches along an edge of the image in the first stage), window (edge length of an attention window, in patches), kernel (edge length of the convolutions), response_norm (activations are divided by the mean over their channels: ConvNeXt V2), positions (position embeddings are added to the patches), cosine (attention scores are cosines with learned factors, a network computes their relative position biases, and block outputs are normalized: Swin V2), last_norm (a norm after the last stage)";
    Reconstruction: "model" "reconstruction" [Table(RECONSTRUCTION)] "(none)" "A decoder that reconstructs the pixels of all patches after an encoder of the visible ones (ViT-MAE): patches (of an image; the encoder reads max_seq_len rows, including the class token), layers, hidden, heads, ffn";
    Conformer: "model" "conformer" [Table(CONFORMER)] "(none)" "Blocks of attention and a convolution over positions, between two halves of a feed-forward layer: kernel and expansion (of the width) of the convolution of each channel, pointwise_bias (of the layers before and after it), depthwise_bias, norm (of its output), linear (the layers before and after it are linear, not convolutions); distances (how attention knows the distance of two positions: keys of each distance, with distance_rows rows, or projected sines and cosines), packed_kv (one projection of keys and values), chunk (positions that see each other and their neighbors; 0: all) with past and future (neighbors), softcap (of scores), post_norms (of what is added), clamps (values are limited to a range), scored_block (block whose scores are added to its output; 0: none) and scores (their number)";
    Sound: "model" "sound" [Table(SOUND)] "(none)" "Convolutions over audio samples, instead of image patches (wav2vec 2.0): widths (channels), kernels and strides of each, bias (of the convolutions), norms (true: over the channels of each convolution, false: over the positions of the first one), input_norm (before the projection to the width of the model), masked (a learned vector replaces masked rows); for the convolutional position embeddings: position_layers, position_kernel, position_groups, weight_norm (false: the outputs are normalized instead); positions_used (false: nothing reads these convolutions); gated_biases (gates multiply the biases of attention scores: WavLM); bands: numbers of a frame, from which rows are computed instead of from samples, by subsampling (as in `vision`) or a layer; scaled: rows are multiplied by the square root of the width";
    AttentionPooling: "model" "attention_pooling" [Bool] "false" "Attention with a single learned query and a feed-forward layer pool an image into one vector (SigLIP)";
    TokenTypes: "model" "token_types" also ["type_vocab_size"] [Integer(0, 65536)] "0" "Number of token types; 0: no table of token types (BERT: 2)";
    PositionOffset: "model" "position_offset" [Integer(0, 1024)] "0" "Rows of the table of positions that precede the first position (OPT: 2)";
    RopeScaling: "model" "rope_scaling" [Table(ROPE_SCALING)] "(none)" "Scaling of rotary frequencies, with the fields of transformers. It changes results, but not the time or memory of a step";
    RopeLocalTheta: "model" "rope_local_theta" also ["rope_local_base_freq"] [Number(1.0, 1e12)] "(rope_theta)" "Base of the rotary embedding of layers with a sliding window (Gemma 3)";
    SlidingWindow: "model" "sliding_window" [Integer(1, 4 * MIB)] "(none)" "Number of positions that a query of sliding-window attention attends to, including its own";
    WindowFrom: "model" "window_from" [Integer(0, 16 * MIB)] "0" "Sequence length up to which layers with a sliding window attend to the whole sequence (BigBird)";
    AttentionChunk: "model" "attention_chunk" also ["attention_chunk_size"] [Integer(1, 4 * MIB)] "(none: the whole sequence)" "Number of positions of a chunk: in layers of type chunked_attention, a query attends only to keys of its own chunk (Llama 4); chunks start with each document of a packed sequence" needs [CHUNKED_LAYERS];
    AttentionTemperature: "model" "attention_temperature" also ["attn_scale"] [Number(0.0, 1e6)] "0.0" "In layers without a rotary embedding, queries are multiplied by `1 + attention_temperature * ln(1 + floor((position + 1) / attention_temperature_floor))`, with positions from 0 in the sequence (Llama 4); 0: no factor" needs [NO_ROPE_LAYERS];
    AttentionTemperatureFloor: "model" "attention_temperature_floor" also ["floor_scale"] [Integer(1, 16 * MIB)] "8192" "Number of positions after which the factor of queries grows" needs [TEMPERATURE, NO_ROPE_LAYERS];
    LayerTypes: "model" "layer_types" [List(&Choice(LayerType::WORDS)), Empty] "[]" "Type of each layer, repeated over the layers: full_attention, sliding_attention, full_attention_no_rope, chunked_attention (within chunks of attention_chunk positions: Llama 4); or instead of attention: linear_attention (gated delta rule: Qwen3-Next), mamba, mamba2, hybrid (attention and mamba2 in parallel: Falcon-H1), conv (a gated short convolution, with the sizes in ssm: LFM2), shared_attention (mamba2 after a block that layers share: Zamba 2), none; empty: sliding windows in every layer, if there is a window";
    MlpLayerTypes: "model" "mlp_layer_types" [List(&Choice(MlpType::WORDS)), Empty] "[]" "What follows attention in each block, repeated over the layers: dense (a feed-forward layer), sparse (experts), none; empty: determined by dense_layers and moe_every";
    Differential: "model" "differential" [Bool] "false" "Attention subtracts the results of two halves of its heads, with learned factors (DiffLlama)";
    AttentionGate: "model" "attention_gate" [Choice(AttentionGate::WORDS)] "\"none\"" "Gate of the attention output: none, element (a sigmoid per element, from the projection of queries: Qwen3-Next), separate (the same, from a separate projection: AFMoE), head (a sigmoid per head: Step-3)";
    SubNorms: "model" "sub_norms" [Bool] "false" "Normalize the inputs of attention's output projection and of the feed-forward layer's last projection (BitNet)";
    ActivationScalars: "model" "activation_scalars" [Integer(0, 64)] "0" "Learned scalars of each layer's activation (Apertus: 2), which the plan contains but does not use";
    LayerScale: "model" "layer_scale" [Bool] "false" "Multiply the outputs of attention and of the feed-forward layer by a learned vector (InternViT)";
    Ssm: "model" "ssm" [Table(SSM)] "(none)" "Sizes of layers of type mamba and mamba2: inner (width), state (states per channel), conv (positions of the convolution), dt_rank (mamba), heads, groups and chunk (mamba2), conv_bias, bias (of the projections), norms (of time steps and states: Jamba), gate_norm (mamba2: a norm after the gate)";
    LinearAttention: "model" "linear_attention" [Table(LINEAR_ATTENTION)] "(none)" "Sizes of layers of type linear_attention: key_heads, value_heads, key_dim, value_dim, conv (positions of the convolution), projections (2: Qwen3-Next, 4: Qwen3.5, 6: OLMo Hybrid), gate_rank (width between the two projections of each gate: Kimi Linear; 0: each gate has a single projection), channel_decays (each channel has a separate decay: Ling 3), fixed_decays (sums of keys times values instead of the delta rule, with untrained decays, computed in chunks of chunk positions: MiniMax-Text-01), exponential_gates (the same with input and decay gates of each head: xLSTM)";
    Rwkv: "model" "rwkv" [Table(RWKV)] "(none)" "Sizes of layers of type rwkv in versions later than 4: version (5, 6 or 7), heads, keys and values (widths), and the widths between the two projections that compute token-shift factors (mix_rank: version 6), decays (decay_rank: 6, 7), in-context learning rates (rate_rank: 7), the share of the first layer's values (value_rank: 7) and gates (gate_rank: 7)";
    SharedBlock: "model" "shared_block" [Table(SHARED_BLOCK)] "(none)" "Blocks of attention and a feed-forward layer that layers of type shared_attention use in turn (Zamba 2): blocks, ffn (width), bias (of the feed-forward layer), adapter_rank (of each layer's adapters), attention_adapters (also for queries, keys and values)";
    EncoderLayers: "model" "encoder_layers" [Integer(0, 4096)] "0" "Blocks of an encoder with the same sequence length, whose output the decoder blocks attend to (T5); 0: no encoder";
    Encoder: "model" "encoder" [Table(ENCODER)] "(none)" "Keys of the encoder (encoder_layers) whose values differ from the decoder's: hidden (width), heads, kv_heads, head_dim, ffn, max_seq_len (rows of its table of positions), sliding_window (positions to each side, including the position itself) in sequences longer than window_from, layer_types (empty: those of the decoder), own_tokens (a separate token embedding: T5Gemma), global_projections (attention has projections for global positions; the plan has no such positions: LED), summary_block (number of positions whose sum is an additional key for all others: LongT5; 0: none)";
    RelativeBuckets: "model" "relative_buckets" also ["relative_attention_num_buckets"] [Integer(0, 65536)] "0" "Buckets of learned attention biases by distance, in one table for the encoder and one for the decoder (T5); 0: none";
    RelativeBiasPerLayer: "model" "relative_bias_per_layer" [Bool] "false" "Each layer has its own table of relative_buckets (UMT5); false: all layers share the first layer's";
    Vision: "model" "vision" [Table(VISION)] "(none)" "A vision or audio tower with its projector before a language model; its output rows replace the first tokens of a sample. The tower's keys are those of the model; kv_heads: number of key heads, if there are fewer (EXAONE 4.5); patches: patches per sample; mel_bins: mel bins of the audio, from which convolutions compute the rows instead of from patches (0: images); positions: rows of the table of positions (0: none); fixed_positions: this table is not trained; tiles: number of tiles of an image, which divide its patches (Llama 3.2 Vision); tile_rows: rows of the tables of tiles (0: none); gated_layers: number of blocks with learned gates after the last norm; picked: further blocks whose outputs the projector reads; memory: the language model attends to the rows, which replace no tokens (Whisper); vector: the class token or the pooled rows become one vector of an image, which is compared with texts (CLIP); projector: false if the rows are as wide as the language model; merge: patches that become one token, concatenated or (pool) averaged; patch_layers: widths of layers that project each patch before patches are merged (MiniMax-M3), with a bias or not (patch_layer_bias); projector_layers: widths of the projector's layers before the last one; projector_inputs: input widths of its layers, padded with zeros; projector_halves: half of the first layer's output is a gate; projector_gate: width of a gated layer after it (0: none); latents: number of learned rows that attend to those of the image and replace them (Idefics2; 0: none), with the width of the gated layer before (latent_ffn), the number of layers (latent_layers), and the numbers of query heads and key heads and their dimension (latent_heads); latent_width: width of these rows in a Q-Former (BLIP-2; 0: none), whose every latent_cross-th layer attends to the image, to all rows or to latent_window of them at a time; latent_vocab: vocabulary size of a text that it also reads (InstructBLIP; 0: none), with latent_positions rows of a table of positions and latent_tokens tokens per sample; separators: number of learned rows after those that the projector reads (Phi-3-vision); newline: a learned row follows those of the image; deepstack: blocks whose outputs are added to the first layers of the language model; pooling_head: a head that the loss does not depend on; attention_chunk: number of rows that attend to each other (default: all); subsampling: two-dimensional convolutions over frames and bands, each of which halves both: channels (of each), bias, separable (all but the first convolve each channel alone, and mix channels afterward), norms (after each), activation, projection_bias (of the layer after them), chunk (frames that are convolved together; 0: all); sinusoids: sines and cosines of the positions are added; unused_rows: rows of a table that nothing reads";
    Audio: "model" "audio" [Table(VISION)] "(none)" "A second tower, for audio, next to `vision` and with the same keys; its output rows follow those of the first tower";
    VisionPatches: "model" "vision_patches" [Integer(1, 4 * MIB)] "(that of vision)" "Patches of a sample that the vision tower encodes";
    LayerKvHeads: "model" "layer_kv_heads" [List(&Integer(0, 65536)), Empty] "[]" "Key and value heads of each layer, if layers differ (Nemotron-NAS); 0: no attention; empty: kv_heads everywhere";
    LayerFfn: "model" "layer_ffn" [List(&Integer(0, 4 * MIB)), Empty] "[]" "Width of each block's feed-forward layer, if they differ; 0: none; empty: ffn everywhere";
    AttentionSoftcap: "model" "attention_softcap" also ["attn_logit_softcapping"] [Number(ABOVE_0, 1e6)] "(none)" "Softcap of attention scores: cap * tanh(score / cap) (Gemma 2)";
    LogitsSoftcap: "model" "logits_softcap" also ["final_logit_softcapping"] [Number(ABOVE_0, 1e6)] "(none)" "Softcap of the logits (Gemma 2)";
    Streams: "model" "streams" also ["hc_mult"] [Integer(0, 64)] "0" "Parallel residual streams (hyper-connections of DeepSeek-V4; planned without mixing them); 0: one stream, without weights";
    OutputGroups: "model" "output_groups" also ["o_groups"] [Integer(0, 1024)] "0" "Groups of heads with separate output projections, in attention with a single key head whose keys are also the values (DeepSeek-V4); 0: other attention";
    OutputRank: "model" "output_rank" also ["o_lora_rank"] [SIZE] "1024" "Output width of the projection of each of output_groups";
    CompressRates: "model" "compress_rates" [List(&Integer(0, MIB)), Empty] "[]" "Positions that one compressed key stands for, per layer (DeepSeek-V4); 0: no compressed keys. Layers with an indexer choose among them";
    DisentangledRows: "model" "disentangled_rows" [Integer(0, MIB)] "0" "Size of a table of relative positions, which each layer projects with its query and key projections and adds to the scores (DeBERTa; planned with biases that all samples share); 0: no table";
    DisentangledProjections: "model" "disentangled_projections" [Bool] "false" "Each layer has separate projections for the table of relative positions, which is not normalized (DeBERTa v1)";
    EmbeddingWidth: "model" "embedding_width" [Integer(1, MIB)] "(hidden)" "Width of token embeddings, which a linear layer projects to the width of the model; in encoders, position embeddings and the norm have the same width (ELECTRA), in decoders they do not (OPT 350M)";
    InnerNorm: "model" "inner_norm" [Choice(Norm::WORDS)] "(norm)" "Norm of queries, keys and the output of the last block, if it differs from that of blocks (ESMC: layer_norm_no_bias); values as for norm: rms_norm, rms_norm_no_weight, rms_norm_unit_offset, layer_norm, layer_norm_no_weight, layer_norm_unit_offset";
    RotaryTable: "model" "rotary_table" [Bool] "false" "The sines and cosines of rotary embeddings are untrained parameters (RoFormer)";
    PlainFirstBlock: "model" "plain_first_block" [Bool] "false" "The first block does not normalize its input (ModernBERT)";
    OutputTransform: "model" "output_transform" [Bool] "false" "A decoder has a linear layer and a norm before its logits (ModernBERT's decoder)";
    StreamScale: "model" "stream_scale" [Bool] "false" "Each block multiplies the residual stream by an untrained scalar (Gemma 4)";
    LayerGroups: "model" "layer_groups" also ["num_hidden_groups"] [Integer(0, 4096)] "0" "Number of groups of consecutive layers that share the weights of their first `group_layers` blocks (ALBERT): shared weights belong to the root, as tied weights do; 0: every block has its own weights";
    GroupLayers: "model" "group_layers" also ["inner_group_num"] [Integer(1, 4096)] "1" "Blocks with separate weights in each of `layer_groups`; they repeat within the group";
    EmbeddingNorm: "model" "embedding_norm" [Bool] "false" "Normalize the token embeddings (BLOOM)";
    ExtraTokens: "model" "extra_tokens" [Integer(0, 65536)] "0" "Rows of the token embedding beyond the vocabulary (Llama 3.2 Vision: 8)";
    HeadBias: "model" "head_bias" [Bool] "false" "The output layer has a bias (Phi-2, GPT-J)";
    Head: "model" "head" [Choice(Head::WORDS)] "\"language_model\"" "Output layer: language_model (in encoders: of masked tokens), pretraining (the same, and two scores of whether sentences follow each other: BERT), sequence_classification (scores of the last position; with one label a reward model), token_classification (scores of every position), vector (a vector for the last position; the loss is its mean square), contrastive (such a vector, compared with the vision tower's vectors of the images of a micro-batch, as in CLIP), none (the hidden states, or the pooler's output; the loss is its mean square)";
    Pooler: "model" "pooler" [Bool] "true" "An encoder without an output layer, or one that classifies sequences, has a pooler of the first position (BERT); false: its output are the hidden states, and it classifies through the layer and the norm of the masked-token head (ModernBERT)";
    UnusedPooler: "model" "unused_pooler" [Bool] "false" "An encoder has a pooler whose output is not used (BigBird)";
    ContactHead: "model" "contact_head" [Bool] "false" "An encoder computes scores from the attention weights of all heads, which are not used (ESM)";
    BoxRows: "model" "box_rows" [Integer(0, MIB)] "0" "Size of each of four tables of page coordinates; six of their rows are added to each token embedding (LayoutLM); 0: none";
    GlobalProjections: "model" "global_projections" [Bool] "false" "Attention has separate projections for global positions; the plan has no global positions (Longformer)";
    HeadTransform: "model" "head_transform" [Bool] "true" "An encoder has a linear layer and a norm before the logits of masked tokens, and before classes if `pooler` is false; false: it classifies sequences by the mean of scores, through a linear layer without a norm, and has no layers before other outputs (EuroBERT)";
    NumLabels: "model" "num_labels" [Integer(1, 65536)] "2" "Classes of a classification head";
    VectorWidth: "model" "vector_width" [SIZE] "512" "Width of the vector of head = vector or contrastive";
    SigmoidLoss: "model" "sigmoid_loss" [Bool] "false" "With head = contrastive: the loss is the sigmoid loss, with a learned bias (SigLIP)";
    PartialRotaryFactor: "model" "partial_rotary_factor" also ["rotary_pct"] [Number(ABOVE_0, 1.0)] "1.0" "Share of a head's dimensions that the rotary embedding rotates";
    ParallelResidual: "model" "parallel_residual" also ["use_parallel_residual"] [Bool] "true" "Attention and the feed-forward layer read the same input, and both outputs are added to it; false: one after the other";
    EmbeddingMultiplier: "model" "embedding_multiplier" [Number(ABOVE_0, 1e6)] "1.0" "Factor of the token embeddings, before positions are added (Granite)";
    AttentionMultiplier: "model" "attention_multiplier" [Number(ABOVE_0, 1e6)] "(1 / sqrt(head_dim))" "Factor of attention scores (Granite)";
    ResidualMultiplier: "model" "residual_multiplier" [Number(ABOVE_0, 1e6)] "1.0" "Factor of the outputs of attention and of the feed-forward layer (Granite)";
    LogitsScaling: "model" "logits_scaling" [Number(ABOVE_0, 1e6)] "1.0" "Divisor of the logits (Granite)";
    KvLoraRank: "model" "kv_lora_rank" [Integer(0, MIB)] "0" "Width of the compressed keys and values of latent attention (DeepSeek); 0: attention is not latent";
    QLoraRank: "model" "q_lora_rank" [Integer(0, MIB)] "0" "Width of the compressed queries of latent attention; 0: queries are not compressed";
    QkRopeHeadDim: "model" "qk_rope_head_dim" [Integer(2, 65536)] "64" "Dimensions of a head that latent attention rotates, a part of `head_dim`; all heads share these dimensions of the key";
    VHeadDim: "model" "v_head_dim" [Integer(1, 65536)] "128" "Dimension of a value head in latent attention, at most `head_dim`";
    IndexNHeads: "model" "index_n_heads" [Integer(0, 65536)] "0" "Heads of the indexer that chooses the positions that a query attends to (DeepSeek-V3.2, MiniMax-M3); 0: all positions. The model's loss does not depend on the indexer, so it is not trained";
    IndexHeadDim: "model" "index_head_dim" [Integer(1, 65536)] "128" "Dimension of a head of the indexer";
    IndexTopK: "model" "index_topk" [Integer(1, 4 * MIB)] "2048" "Positions that the indexer chooses; attention is priced as with a window of this size";
    IndexerTypes: "model" "indexer_types" [List(&Choice(IndexerType::WORDS)), Empty] "[]" "Indexer of each layer: full (its own), shared (the positions that an earlier layer chose: GLM-5.2), none (the layer attends to all positions: MiniMax-M3); empty: full everywhere";
    LayerEmbeddingWidth: "model" "layer_embedding_width" also ["hidden_size_per_layer_input"] [Integer(0, 65536)] "0" "Width of each layer's own token embeddings, which are gated with the residual stream (Gemma 3n); 0: none";
    LayerEmbeddingRows: "model" "layer_embedding_rows" also ["vocab_size_per_layer_input"] [Integer(1, 16 * MIB)] "(vocab)" "Vocabulary size of these per-layer embeddings";
    SharedKvLayers: "model" "shared_kv_layers" also ["num_kv_shared_layers"] [Integer(0, 4096)] "0" "Number of last layers that attend to the keys and values of the last earlier layer of their type (Gemma 3n)";
    ActivationSparsity: "model" "activation_sparsity" also ["activation_sparsity_pattern"] [List(&Number(0.0, 1.0)), Empty] "[]" "Share of its inputs that each layer's activation sets to 0, based on their mean and standard deviation (Gemma 3n); empty: none";
    AltUp: "model" "altup" [Table(ALTUP)] "(none)" "Alternating updates of residual streams (Gemma 3n): streams, active (the stream that blocks compute), scale (a learned vector multiplies that stream before per-layer embeddings are gated with it), laurel_rank (width between the two projections that are added to the attention output)";
    ExpertBias: "model" "expert_bias" [Bool] "false" "Routers and experts have biases (gpt-oss)";
    Glu: "model" "glu" [Choice(Glu::WORDS)] "\"activation\"" "Output of gated experts: activation (`activation(gate) * up`), gpt_oss (`gate * sigmoid(1.702 * gate) * (up + 1)`, with gates clamped to at most `glu_limit`, and up projections to the range from `-glu_limit` to `glu_limit`)";
    GluLimit: "model" "glu_limit" also ["swiglu_limit"] [Number(ABOVE_0, 1e6)] "7.0" "Limit to which gates and up projections are clamped" needs [CLAMPED_GLU];
    RouterBias: "model" "router_bias" [Bool] "false" "Experts are chosen by the sum of their scores and a bias that is not trained by gradients (ERNIE 4.5; `e_score_correction_bias` of DeepSeek-V3 and other types, which `exec` loads and saves). It is only updated with `router_bias_update_speed`";
    RouterBiasUpdateSpeed: "model" "router_bias_update_speed" also ["load_balance_coeff", "moe_router_bias_update_rate"] [Number(0.0, 1.0)] "0.0" "Step size of the biases of routers: it is added for an expert with fewer tokens than the mean, and subtracted for one with more (load balancing without an auxiliary loss: DeepSeek-V3). Then all biases of a router are shifted so that their sum does not change, as in torchtitan. 0: biases are not updated";
    AttentionSinks: "model" "attention_sinks" [Bool, Choice(AttentionSinks::WORDS)] "false" "The softmax of attention has an additional learned logit per head: true (in every layer: gpt-oss), sliding (in layers with a sliding window: MiMo-V2-Flash)";
    ValueHeadDim: "model" "value_head_dim" [Integer(1, 65536)] "(head_dim)" "Dimension of a value head if it is smaller than that of queries and keys (MiMo-V2-Flash)";
    FullHeadDim: "model" "full_head_dim" also ["global_head_dim"] [Integer(1, 65536)] "(head_dim)" "Dimension of a head in layers without a sliding window, if it differs from that of layers with one (Gemma 4)";
    KeysAsValues: "model" "keys_as_values" also ["attention_k_eq_v"] [Bool] "false" "Layers without a sliding window have no projection of values: the projected keys are the values (Gemma 4)";
    ValueNorm: "model" "value_norm" [Bool] "false" "Normalize values by an RMSNorm without a weight (Gemma 4)";
    Experts: "model" "experts" also ["num_experts", "num_local_experts", "n_routed_experts"] [Integer(2, 4096)] "8" "Number of experts per layer";
    TopK: "model" "top_k" also ["num_experts_per_tok", "moe_router_topk"] [Integer(1, 4096)] "2" "Number of experts per token";
    ExpertFfn: "model" "expert_ffn" also ["moe_intermediate_size", "moe_ffn_hidden_size"] [Integer(1, 4 * MIB)] "(ffn)" "Width of one expert";
    ExpertLatent: "model" "expert_latent" also ["moe_latent_size"] [Integer(1, MIB)] "(hidden)" "Width of the routed experts' inputs and outputs, between two projections (Nemotron 3 Ultra)";
    SharedExpertFfn: "model" "shared_expert_ffn" also ["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"] [Integer(0, 4 * MIB)] "0" "Width of the shared expert, which processes every token; 0: none";
    SharedExpertGate: "model" "shared_expert_gate" also ["moe_shared_expert_gate"] [Bool] "false" "Multiply the result of the shared expert by the sigmoid of a projection of its input (Qwen2-MoE)";
    ExpertNorm: "model" "expert_norm" [Bool] "false" "Normalize the output of layers of experts, and no other outputs (A.X K1)";
    DenseAndExperts: "model" "dense_and_experts" also ["enable_moe_block"] [Bool] "false" "Each layer has both a dense feed-forward layer and experts; their outputs are added (Gemma 4)";
    ZeroExperts: "model" "zero_experts" also ["zero_expert_num"] [Integer(0, MIB)] "0" "Number of experts that return their input unchanged: each layer has rows for their gates, which are not used (LongCat-Flash)";
    ShortcutExperts: "model" "shortcut_experts" [Bool] "false" "Each block has two attention layers and two dense feed-forward layers; experts have the same input as the first dense layer, and their output is added after the second one (LongCat-Flash)";
    RoutedAttention: "model" "routed_attention" [Bool] "false" "Experts compute the queries and the output projection of attention, each expert for kv_heads heads; the outputs of experts have a bias (JetMoE)";
    DenseLayers: "model" "dense_layers" also ["first_k_dense_replace"] [Integer(0, 4096)] "0" "Number of first layers with a dense feed-forward layer of width `ffn` instead of experts";
    MoeEvery: "model" "moe_every" also ["decoder_sparse_step", "interleave_moe_layer_step"] [Integer(1, 4096)] "1" "Every n-th layer has experts, and the others a dense feed-forward layer of width `ffn`";
    Router: "model" "router" [Choice(Router::WORDS)] "\"softmax_topk\"" "Weights of experts: softmax_topk (softmax over all experts, of which the largest are chosen), topk_softmax (softmax over the chosen experts), sigmoid (sigmoids, of which the largest are chosen)";
    NormalizeTopK: "model" "normalize_top_k" also ["norm_topk_prob"] [Bool] "true" "Divide the weights of a token's experts by their sum";
    RouteScale: "model" "route_scale" also ["routed_scaling_factor", "moe_router_topk_scaling_factor"] [Number(ABOVE_0, 1e6)] "1.0" "Factor of the weights of experts";
    ScoreBeforeExperts: "model" "score_before_experts" [Bool] "false" "Multiply the inputs of experts by the weights of choices (torchtitan's `score_before_experts`, Llama 4); false: multiply their outputs, or the activations between their matmuls";
    MaskExpertRows: "model" "mask_expert_rows" [Bool] "true" "The code of transformers sets rows of experts that other ranks have to zero around its matmuls, also where there are no such rows: versions 5.8 to 5.17; false: 5.18 and later, which do so only with expert parallelism" needs [TRANSFORMERS];
    RouterGroups: "model" "router_groups" also ["n_group", "moe_router_num_groups"] [Integer(1, 64)] "1" "Groups of adjacent experts, of which a token uses `router_group_top_k`: those with the largest sum of two scores";
    RouterGroupTopK: "model" "router_group_top_k" also ["topk_group", "moe_router_group_topk"] [Integer(1, 64)] "1" "Groups of experts that a token uses";
    AuxLoss: "model" "aux_loss" also ["router_aux_loss_coef", "moe_aux_loss_coeff"] [Number(0.0, 1e6)] "0.0" "Coefficient of the load-balancing loss of routers, which is part of the gradient but not of the logged loss; 0: none";
    AuxLossKind: "model" "aux_loss_kind" [Choice(AuxLoss::WORDS)] "\"layer\"" "Load-balancing loss: layer (of each layer over the tokens of a micro-batch; `aux_loss` at perfect balance), sequence (of each layer and sequence), hf (over the tokens of all layers, `top_k` times as large, as in transformers)";
    ZLoss: "model" "z_loss" also ["moe_z_loss_coeff"] [Number(0.0, 1e6)] "0.0" "Coefficient of the mean squared log-sum-exp of the logits of routers; 0: none";

    LoraR: "lora" "r" also ["rank"] [Integer(1, 65536)] "(none: no adapters)" "Rank of low-rank adapters, which are trained instead of the model's own parameters (PEFT: LoraConfig)";
    LoraAlpha: "lora" "lora_alpha" also ["alpha"] [Number(ABOVE_0, 1e6)] "8.0" "An adapter's result is scaled by lora_alpha / r" needs [ADAPTERS];
    LoraTargets: "lora" "target_modules" [Text, List(&Text)] "\"all-linear\"" "Linear layers that get an adapter: all-linear (all linear layers of the blocks), those whose path ends in a match of a list of globs, with names as in `shardlab plan` or Hugging Face, for example [\"q_proj\", \"v_proj\"], or those whose whole path one regular expression matches, as in PEFT" needs [ADAPTERS];
    ExcludeModules: "lora" "exclude_modules" [Text, List(&Text), Empty] "[]" "Layers without an adapter among the targets: globs as in `target_modules`, or one regular expression for the whole path, as in PEFT" needs [ADAPTERS];
    LayersToTransform: "lora" "layers_to_transform" [Integer(0, 4095), List(&Integer(0, 4095)), Empty] "[]" "Numbers of the blocks that have adapters; empty: all. A layer whose full path is in `target_modules` has one in any block" needs [ADAPTERS];
    LayersPattern: "lora" "layers_pattern" [Text, List(&Text), Empty] "[]" "Names of the lists of blocks, in Hugging Face's code, that layers_to_transform counts; empty: the first numbered list of a path" needs [TRANSFORMED_LAYERS];
    RankPattern: "lora" "rank_pattern" [Map(&Integer(1, 65536))] "{}" "Ranks of layers that differ from `r`: a table from regular expressions, which match the last components of a path, to ranks. The first one that matches counts, as in PEFT, for example { \"down_proj\" = 32 }" needs [ADAPTERS];
    AlphaPattern: "lora" "alpha_pattern" [Map(&Number(ABOVE_0, 1e6))] "{}" "The same for lora_alpha" needs [ADAPTERS];
    LoraDropout: "lora" "lora_dropout" [Number(0.0, 1.0)] "0.0" "Dropout probability of adapter inputs, for predictions. Above 0 only with implementation transformers" needs [ADAPTERS];
    UseDora: "lora" "use_dora" [Bool] "false" "Weight-decomposed adapters (DoRA): each row of the adapted weight has a learned magnitude, which is initialized with the norm of the row" needs [ADAPTERS];
    ModulesToSave: "lora" "modules_to_save" [List(&Text), Empty] "[]" "Modules that are trained in full next to the adapters: globs that the end of a module's path matches, with names as in `shardlab plan` or Hugging Face, for example [\"embed_tokens\", \"lm_head\"]" needs [ADAPTERS];
    UseRslora: "lora" "use_rslora" [Bool] "false" "Scale by lora_alpha / sqrt(r) instead of lora_alpha / r" needs [ADAPTERS];

    SeqLen: "train" "seq_len" [Integer(1, 4 * MIB)] "(max_seq_len up to 8192; encoder: 512; linear, cnn: 1)" "Tokens per sequence";
    DocumentLengths: "train" "document_lengths" also ["document_length"] [Integer(1, 4 * MIB), Short(&Integer(1, 4 * MIB), MAX_DOCUMENTS), Table(LENGTHS), Empty] "[]" "Packed sequences: lengths of the documents in a sequence, repeated until it is full, or the mean and the standard deviation (std) of a log-normal distribution of lengths, or a file of tokens (data, from the folder of the scenario) in which each document ends with eos_token_id (dtype: how it stores tokens; default: uint16 for .bin and .u16, uint32 for .u32). A query attends to its own document only, and positions restart with each document; empty: a sequence is one document" needs [ATTENTION];
    MicroBatch: "train" "micro_batch" also ["micro_batch_size", "local_batch_size", "per_device_train_batch_size"] [Integer(1, MIB)] "1" "Sequences per rank and micro-batch";
    GradAccum: "train" "grad_accum" also ["gradient_accumulation_steps", "grad_accum_steps"] [Integer(1, 4096)] "1" "Micro-batches per step (gradient accumulation)";
    Recompute: "train" "recompute" also ["activation_checkpoint"] [Choice(Recompute::WORDS)] "\"none\"" "Activation checkpointing: none (keep all activations), full (recompute whole blocks in backward), selective (keep the results of matmuls and attention, recompute the rest), pointwise (compiled code only: recompute elementwise results inside backward kernels that read their operands anyway)";
    RecomputeLayers: "train" "recompute_layers" also ["recompute_num_layers"] [Choice(&["all"]), Integer(1, 4096), List(&Text)] "\"all\"" "Blocks that `recompute` applies to: all, the first N (Megatron's recompute_num_layers with method block), or those in modules that match a list of globs, for example [\"layers.*0\"]; other blocks keep their activations" needs [RECOMPUTE];
    RecomputeSave: "train" "recompute_save" also ["op_sac_save_list"] [List(&Text)] "(mm, addmm, attention, conv)" "Operations whose results selective recompute keeps, by the kernel names in `shardlab plan` (create_selective_checkpoint_contexts); results of collectives are always kept" needs [SELECTIVE];
    RecomputeModules: "train" "recompute_modules" [List(&Choice(RecomputeModule::WORDS)), Empty] "[]" "Parts of blocks that selective recompute runs again, while the results of all others are kept (Megatron's --recompute-modules): core_attn (attention without its projections), layernorm (the norms before attention and the feed-forward layer), mla_up_proj (up-projections of latent attention), mlp (dense feed-forward layers), moe (layers of experts), moe_act (the activation of experts), shared_experts" needs [SELECTIVE];
    RecomputeNthMatmul: "train" "recompute_nth_matmul" [Integer(0, 64)] "0" "Selective recompute runs every Nth matmul (mm) of a block again; torchtitan's per-op policy: 2; 0: none" needs [SELECTIVE];
    UseReentrant: "train" "use_reentrant" [Bool] "false" "Full recompute by an autograd function (torch.utils.checkpoint with use_reentrant=True): the whole block runs again, without early stop, before its backward hooks run" needs [FULL_RECOMPUTE];
    ActivationOffload: "train" "activation_offload" also ["activation_offloading", "enable_activation_offloading"] [Bool] "false" "Copy saved activations to pinned host memory on a separate stream, and back before backward uses them (OffloadActivations of torchtune and TRL); tensors below 1 KiB stay on the device";
    Loss: "train" "loss" [Choice(Loss::WORDS)] "\"materialized\"" "Cross entropy: materialized (all logits at once), chunked (computes logits, loss and their gradients chunk by chunk, so that the full logits never exist, as Liger's fused linear cross entropy does), checkpointed_chunks (computes logits and loss chunk by chunk, and again in backward: `torch.utils.checkpoint` around each chunk), saved_chunks (computes logits and loss chunk by chunk and saves for backward what the chunk's operations need: torchtune's LinearCrossEntropyLoss), split_logits (computes all logits, then the loss chunk by chunk, so that one chunk at a time is cast to float32: torchtune's CEWithChunkedOutputLoss)";
    LossChunkRows: "train" "loss_chunk_tokens" as "loss_chunk_rows" also ["loss_chunk_rows"] [Integer(1, 4 * MIB), Choice(&["auto"])] "4096" "Tokens per chunk of a chunked loss: smaller chunks use less memory, larger ones are faster. auto: equal chunks whose logits take up to 512 MiB, of 1,024 tokens or more" needs [CHUNKED_LOSS];
    KeepLogits: "train" "keep_logits" [Bool] "false" "The logits stay alive until the end of backward, because the training loop has them in a local variable: `logits = model(tokens); loss = loss_fn(logits, labels); loss.backward()`. false: they are freed when the loss has been computed, as in `del logits`, or in a function that returns the loss only" needs [WHOLE_LOGITS];
    AttentionBackend: "train" "attention_backend" also ["sdpa_backend"] [Choice(AttentionBackend::WORDS)] "(the one that PyTorch picks)" "Library of the fused attention kernels, for predictions (torch.nn.attention.sdpa_kernel): cudnn, flash (FlashAttention 2), efficient (CUTLASS), triton (FlashAttention 1 in Triton)";
    Optimizer: "train" "optimizer" [Choice(Optimizer::WORDS)] "\"adamw\"" "Optimizer: adamw (two moments per parameter), lion (one momentum), sgd (no state), muon (one momentum for the matrices of blocks, whose updates are orthogonalized; AdamW for all other parameters)";
    Lr: "train" "lr" [Number(0.0, 1e6)] "3e-4" "Peak learning rate";
    WarmupSteps: "train" "warmup_steps" [Integer(0, 1_000_000)] "0" "Steps of linear warm-up from 0 to `lr`; 0: no warm-up";
    LrSchedule: "train" "lr_schedule" [Choice(LrSchedule::WORDS)] "\"constant\"" "Learning rate after warm-up: constant (`lr` to the end), cosine (half a cosine from `lr` down to `min_lr`)";
    MinLr: "train" "min_lr" [Number(0.0, 1e6)] "0.0" "Learning rate of the last step of the cosine schedule";
    Betas: "train" "betas" [Tuple(&Number(0.0, 1.0), 2)] "[0.9, 0.95]" "Decay rates of AdamW's first and second moment; for Lion, the interpolation factor of the update and the decay of the momentum, usually [0.9, 0.99]. Each below 1";
    MuonMomentum: "train" "muon_momentum" [Number(0.0, 1.0)] "0.95" "Momentum of Muon (Nesterov). Below 1" needs [MUON];
    MuonAdjustLr: "train" "muon_adjust_lr" also ["adjust_lr_fn"] [Choice(MuonAdjustLr::WORDS)] "\"original\"" "Factor of Muon's learning rate that depends on the shape of a matrix: original (`sqrt(max(1, rows / columns))`), match_rms_adamw (`0.2 * sqrt(max(rows, columns))`, which allows AdamW's learning rate)" needs [MUON];
    Eps: "train" "eps" [Number(ABOVE_0, 1.0)] "1e-8" "Epsilon of AdamW";
    WeightDecay: "train" "weight_decay" [Number(0.0, 1e3)] "0.1" "Decoupled weight decay";
    DecayNormsAndBiases: "train" "decay_norms_and_biases" [Bool] "true" "Weight decay also applies to one-dimensional parameters: norms and biases. This is the default of torchtitan and torch; the Hugging Face Trainer and Megatron-LM never decay them";
    ParamGroups: "train" "param_groups" [List(&Table(PARAM_GROUP)), Empty] "[]" "Parameter groups of the optimizer: tables of params (globs that match consecutive components of a parameter's name, here or in Hugging Face's code), weight_decay (default: `weight_decay`) and lr_scale (factor of the learning rate). A parameter belongs to the first group that matches";
    ClipNorm: "train" "clip_norm" also ["max_norm", "max_grad_norm"] [Number(0.0, 1e9)] "0.0" "Clip gradients to this global norm; 0: do not clip";
    Sync: "train" "sync_each_step" as "sync" also ["sync"] [Bool] "false" "The host waits for the device at the end of every step, like a training loop that reads the loss";
    GradNorm: "train" "grad_norm" [Bool] "false" "Compute the global gradient norm in every step, even without clipping";
    Steps: "train" "steps" [Integer(1, 1_000_000)] "20" "Number of steps of a run";
    ValidateEvery: "train" "validate_every" [Integer(0, 1_000_000)] "0" "Run a validation forward every N steps; 0: never";
    NoGradForwards: "train" "no_grad_forwards" [Integer(0, 64)] "0" "Number of forward passes without gradients (`torch.no_grad`) over each micro-batch before its forward and backward, as reinforcement learning needs them for log-probabilities of the old policy; their results are not used";
    JointBackward: "train" "joint_backward" [Bool] "false" "The micro-batches of a step run their forwards one after another, and a single backward covers all of them, last to first, as contrastive and preference losses need it. The activations of all micro-batches are in memory at once, and gradients are reduced once. Policies native, fsdp2 and megatron" needs [SEVERAL_MICRO_BATCHES];
    SkippedBlocks: "train" "skipped_blocks" [List(&Table(SKIPPED_BLOCKS)), Empty] "[]" "Blocks that forward skips, as LayerDrop and conditional models do; the input of a skipped block passes through unchanged. Tables of blocks (globs over paths such as layers.3) and micro_batches (those of a step that skip the blocks, counted from 0; default: all). All ranks skip the same blocks. Validation runs every block. Policies native, fsdp2 and megatron";
    ParamNormsEvery: "train" "param_norms_every" [Integer(0, 1_000_000)] "0" "Report the norm of every parameter and of its gradient (before clipping) every N steps of a run; 0: never. Predictions do not include the time for this";

    Hardware: "mesh" "hardware" [Choice(&HARDWARE), Path(".toml")] "(required)" "Hardware profile: the name of a shipped profile, or the path of a profile file (relative to the scenario file, or to the working directory with --set)";
    DpShard: "mesh" "dp_shard" also ["data_parallel_shard_degree"] [Integer(1, MIB)] "(required)" "Number of ranks that shard parameters: the inner data-parallel mesh dimension (torchtitan: data_parallel_shard_degree)";
    DpOuter: "mesh" "dp_replicate" as "dp_outer" also ["dp_outer", "data_parallel_replicate_degree"] [Integer(1, MIB)] "1" "Outer data-parallel mesh dimension: number of replicas (HSDP), or of outer shards with `outer_strategy = \"optim\"` (torchtitan: data_parallel_replicate_degree)";
    Tp: "mesh" "tp" also ["tensor_parallel_degree"] [Integer(1, 1024)] "1" "Tensor parallelism: number of ranks that divide the layers among themselves, within the data-parallel dimensions (family linear; torchtitan: tensor_parallel_degree)";
    Ep: "mesh" "ep" also ["expert_parallel_degree", "expert_model_parallel_size", "ep_size"] [Integer(1, MIB)] "1" "Expert parallelism: number of ranks that divide the experts of a layer among themselves. They are adjacent ranks of `dp_shard`, which must be a multiple of it (torchtitan: expert_parallel_degree)";
    GpusPerNode: "mesh" "gpus_per_node" also ["nproc_per_node"] [Integer(1, 1024)] "(8, or fewer when there are fewer ranks)" "GPUs per node, connected by NVLink";

    Dispatcher: "moe" "dispatcher" also ["moe_token_dispatcher_type"] [Choice(Dispatcher::WORDS)] "(native, or captured or fully compiled: gather; fsdp2, megatron: all_to_all)" "How tokens reach the ranks of their experts: gather (an all-gather of all tokens, a reduce-scatter of partial sums), all_to_all (each token is sent once per chosen expert; ranks first exchange the numbers of tokens, which the host reads, as in torchtitan and Megatron-LM), padded (an all-to-all of a fixed number of tokens, without a host read), peer (each token is written once to the memory of every rank that has one of its experts, and each of these ranks writes one partial sum back, without a host read; within a node), deepep (each token is sent once to every node that has one of its experts, to the rank with the same position there, and from it once to every rank that has one; results return in the same way; the host reads the numbers of tokens, as with DeepEP and HybridEP)" needs [DIVIDED_EXPERTS];
    CapacityFactor: "moe" "capacity_factor" also ["moe_expert_capacity_factor"] [Number(ABOVE_0, 1e6), Choice(&["worst"])] "(native, gather: worst; fsdp2, megatron: 1)" "Rows that a rank reserves for tokens of its experts, relative to balanced routing: for the tokens of all ranks together (gather, peer), or for those of each rank (all_to_all, padded). worst: enough for every case" needs [DIVIDED_EXPERTS];
    OnOverflow: "moe" "on_overflow" [Choice(Overflow::WORDS)] "(padded: drop; others: error)" "What happens to tokens beyond the reserved rows: error (the run fails) or drop (the last ones, in token order, add nothing; with gather and peer, tokens of later ranks come after those of earlier ones)" needs [DIVIDED_EXPERTS, ROW_FACTOR];
    SharedExpertOverlap: "moe" "shared_expert_overlap" also ["moe_shared_expert_overlap"] [Bool] "(native: true; fsdp2, megatron: false)" "The shared expert overlaps with the exchange of tokens: its first layers with the dispatch, its last one with the return of results, and the same in backward (`--moe-shared-expert-overlap` of Megatron-LM). false: it starts when the results of the routed experts are being returned" needs [DIVIDED_EXPERTS, SHARED_EXPERT];
    Routing: "moe" "routing" [Choice(Routing::WORDS), Path(".json")] "(balanced)" "Popularity of experts in predictions: balanced (all are equally popular), seeded (popularity decreases from expert to expert, in a random order per layer), round_robin (each token takes the next `top_k` experts, as in benchmarks of torchtitan and NeMo Automodel; only with `force_routing`), or the path of a histogram written by `shardlab exec --record-routing` (relative to the file that names it). In runs of `exec`, the router decides unless `force_routing` is true" needs [ROUTED];
    ForceRouting: "moe" "force_routing" also ["moe_force_load_balance", "moe_router_force_load_balancing"] [Bool] "false" "In runs of `exec`, `routing` determines the experts of each token instead of the router's scores; the scores still weight the outputs of experts. Choices are the same in every step. With `round_robin`, this is `debug.moe_force_load_balance` of torchtitan; with `balanced`, `--moe-router-force-load-balancing` of Megatron-LM" needs [EXPERTS];
    Imbalance: "moe" "imbalance" [Number(1.0, 1e4)] "(2)" "Tokens of the most popular expert of a layer, relative to the mean" needs [SEEDED_ROUTING];
    RoutingSeed: "moe" "routing_seed" [Integer(0, MAX_SEED)] "(0)" "Seed of the order of experts, and of forced choices" needs [DRAWN_ROUTING];

    Policy: "fsdp" "policy" [Choice(PolicyKind::WORDS)] "\"native\"" "Engine to model: native (the engine of `shardlab exec`), fsdp2 (fully_shard of torch 2.11), megatron (megatron-fsdp 0.6.1), megatron_v2 (its experimental engine)";
    Variant: "fsdp" "variant" [Choice(Variant::WORDS)] "\"released\"" "Engine behind policy megatron_v2: released (megatron-fsdp 0.6.1), pr4435 (the prototype of Megatron-LM #4435, with a sliding drain of gradients and the allocator trace_pool)";
    Strategy: "fsdp" "strategy" also ["sharding_strategy", "data_parallel_sharding_strategy"] [Choice(Strategy::WORDS)] "\"optim_grads_params\"" "What is sharded over dp_shard: no_shard (nothing: DDP), optim (optimizer state and master weights: ZeRO-1), optim_grads (and gradients: ZeRO-2), optim_grads_params (and parameters: ZeRO-3, FULL_SHARD)";
    OuterStrategy: "fsdp" "outer_strategy" also ["outer_dp_sharding_strategy"] [Choice(OuterStrategy::WORDS)] "\"no_shard\"" "What is sharded over dp_replicate: no_shard (nothing: HSDP), optim (optimizer state and master weights: HFSDP)";
    Placements: "fsdp" "placements" [Table(PLACEMENTS)] "(from the strategies)" "Explicit placement (flat: sharded, replicate: not sharded) of [parameters, gradients, optimizer state] on each mesh dimension; replaces `strategy` and `outer_strategy`";
    Units: "fsdp" "units" [Choice(&["block", "block_and_ends", "root"]), List(&Text)] "\"block\"" "Modules that are gathered together (one fully_shard call each): block (every block), block_and_ends (every block, the embedding, and the last norm with the output layer, which stay gathered after forward, as Accelerate 1.15 does; block if embeddings are tied), root (one unit for the whole model), or a list of globs; + joins modules into one unit, =keep exempts a unit from resharding";
    IgnoredParams: "fsdp" "ignored_params" [Choice(&["experts"]), List(&Text), Empty] "[]" "Parameters that fully_shard does not manage (its argument `ignored_params`): experts (those that the ranks of `mesh.ep` divide, as NeMo Automodel does if no two ranks have the same expert), or globs of modules, with their submodules. Each rank keeps them whole and in their own dtype, without gathers, copies or reductions; their gradients are accumulated in that dtype, and the optimizer updates them directly. Trained ones must not have copies on other data-parallel ranks";
    Atomic: "fsdp" "atomic" [Choice(&["row", "tensor"]), Integer(2, 65_536)] "\"row\"" "The piece of a parameter that shard boundaries in a unit's flat buffer must not cut: row (a row of a parameter), tensor (a whole parameter: TensorAtomic; always used for the matrices of Muon), N (N rows, so that blocks of N x N stay whole: BlockAtomic, for block-wise quantization; 128 in place of row for weights that `float8_all_gather` gathers with recipe blockwise). All shards have the same size; smaller ones are padded" needs [SEVERAL_RANKS];
    Reshard: "fsdp" "reshard_after_forward" [Bool, Choice(&["auto"]), Integer(1, MIB)] "true" "Free full parameters after forward: true (gather them again in backward), false (keep them), auto (all units but the last block), N (keep them sharded over groups of N ranks)";
    ReshardRoot: "fsdp" "reshard_root" [Bool] "false" "Also reshard the root after forward and gather it again for backward, like `fully_shard(root, reshard_after_forward=True)` (Accelerate up to 1.13); false: the root keeps its parameters, which is torch's default, because backward needs them at once";
    ReshardAfterBackward: "fsdp" "reshard_after_backward" [Bool] "true" "Free full parameters after the backward of every micro-batch; false: only after the last one (`set_reshard_after_backward(False)`), so the next micro-batch does not gather them again" needs [SEVERAL_MICRO_BATCHES];
    KeepUnshardedStorage: "fsdp" "keep_unsharded_storage" [Bool] "false" "Resharding keeps the storage of full parameters, so that their addresses never change (`set_keep_unsharded_storage` of torch 2.15). All full parameters are in memory at once; the number of gathers does not change";
    PrefetchForward: "fsdp" "prefetch_forward" [Integer(0, 64), Choice(&["implicit"]), Table(LOOKAHEAD)] "(native: 1, others: \"implicit\")" "Units prefetched in forward: N (a fixed depth; 0: gather on demand), implicit (the engine's default; fsdp2: overlap of its streams), { elements = N } (until N elements are in flight)";
    PrefetchBackward: "fsdp" "prefetch_backward" [Integer(0, 64), Choice(&["implicit"]), Table(LOOKAHEAD)] "(native: 1, others: \"implicit\")" "Units prefetched in backward: N, implicit or { elements = N }, as for `prefetch_forward`";
    PrefetchLists: "fsdp" "prefetch_lists" [List(&Table(PREFETCH_LIST)), Empty] "[]" "Explicit prefetching, instead of `prefetch_forward` and `prefetch_backward`: tables of unit (a glob over names of units), forward and backward (globs over the units that it prefetches, which have to be later in that direction), like `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`. The first table that matches a unit counts" needs [SEVERAL_RANKS];
    GradientSync: "fsdp" "gradient_sync" [Choice(GradientSync::WORDS)] "(fsdp2: \"every\", others: \"outer_last\")" "Micro-batches that reduce gradients: every (all), outer_last (all over dp_shard, only the last over dp_replicate: `set_requires_all_reduce`), last (only the last: `set_requires_gradient_sync`, no_sync; full gradients accumulate until then)" needs [SEVERAL_MICRO_BATCHES];
    NoSyncUnits: "fsdp" "no_sync_units" [List(&Text), Empty] "[]" "Globs over names of units that reduce their gradients in the last micro-batch only, independently of `gradient_sync` (`set_requires_gradient_sync(False, recurse=False)` on these units before the others); full gradients accumulate until then" needs [SEVERAL_MICRO_BATCHES];
    ReduceUnused: "fsdp" "reduce_unused" [Bool] "false" "Units that a micro-batch skips reduce gradients of zero if another micro-batch of the step uses them, so that ranks could skip different units and still launch the same reductions (`set_reduce_scatter_unused_params` of torch 2.15). Policy megatron always does this" needs [SOME_SKIPPED];
    ReduceInFlight: "fsdp" "reduce_in_flight" [Integer(1, 64)] "(fsdp2: 1, native: 2)" "Number of gradient buffers that may be in flight before the next reduction has to wait; policy native counts units, some of which have several buffers";
    OptimizerInBackward: "fsdp" "optimizer_in_backward" [Bool] "false" "Update each unit as soon as its gradient is reduced, on the reduction's stream, instead of after backward; frees the gradient at once";
    PrefetchNextStep: "fsdp" "prefetch_next_step" [Integer(0, 64)] "0" "Number of units gathered for the next forward as soon as the optimizer has updated them, which overlaps with the remaining updates; 0: none" needs [SEVERAL_RANKS];
    AsyncReduce: "fsdp" "async_reduce" [Bool] "true" "Reduce gradients on a side stream; false: on the compute stream";
    SeparateCommunicators: "fsdp" "separate_communicators" [Bool] "(native: true, others: false)" "All-gather and reduce-scatter use separate NCCL communicators";
    CopyEngineGather: "fsdp" "copy_engine_all_gather" as "copy_engine_gather" also ["copy_engine_gather"] [Bool] "false" "Run all-gathers on copy engines, so that they take no SMs from matmuls (NCCL 2.28: zero-CTA policy with symmetric windows)" needs [SEVERAL_RANKS];
    CopyEngineReduce: "fsdp" "copy_engine_reduce_scatter" as "copy_engine_reduce" also ["copy_engine_reduce"] [Bool] "false" "Exchange gradients with an all-to-all on copy engines and sum them in a float32 kernel, instead of a reduce-scatter on SMs" needs [SEVERAL_RANKS];
    SumInOptimizer: "fsdp" "fuse_reduce_into_optimizer" as "sum_in_optimizer" also ["sum_in_optimizer"] [Bool] "false" "The optimizer kernel sums the gradients that `copy_engine_reduce_scatter` exchanged, instead of a separate kernel after each exchange: saves a write and a read of every gradient, but keeps the gradients of all ranks until the update" needs [SEVERAL_RANKS];
    CastBeforeAllGather: "fsdp" "cast_before_all_gather" [Bool] "false" "Cast each unit's shard of the main weights to the compute dtype right before its all-gather, as fsdp2 does, instead of keeping a shard in the compute dtype: saves its memory at the cost of another kernel per gather" needs [SEVERAL_RANKS];
    CopyInStream: "fsdp" "copy_in_stream" [Bool] "false" "Cast shards for all-gathers on a separate stream, as fsdp2 does (`all_gather_copy_in_stream`), instead of on the stream of all-gathers: a cast then waits neither for the previous all-gather nor, behind it, for a matmul that fills the GPU" needs [CASTS_FOR_GATHERS];
    UnifyCommStream: "fsdp" "unify_comm_stream" [Bool] "false" "All-gather and reduce-scatter share one side stream";
    Allocator: "fsdp" "allocator" [Choice(AllocatorKind::WORDS)] "(native: \"pool\", others: \"caching\")" "Allocator of full-size buffers: caching (PyTorch's caching allocator), pool (fixed addresses, planned from one step), double_buffer (two persistent buffers of the largest unit's size), temporary (allocated and freed on every use, by the caching allocator), trace_pool (slots planned from the first micro-batch while it runs: TracePoolAllocator of Megatron-LM #4435; variant pr4435 of policy megatron_v2 only)";
    ExpandableSegments: "fsdp" "expandable_segments" [Bool] "(model.implementation transformers: false, others: true)" "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the caching allocator, as torchtitan's launcher sets it; the default of torch, which Accelerate and the Trainer keep, is off";
    CublasWorkspaceBytes: "fsdp" "cublas_workspace_bytes" [Bytes(0, 1 << 40)] "(native, cpu: 0; a100-40, a100-80: 8519680; others: 33554432)" "Size of one cuBLAS workspace (CUBLAS_WORKSPACE_CONFIG); all policies but native hold two, one per PyTorch thread";
    PersistOnAllocFail: "fsdp" "persist_on_alloc_fail" [Bool] "false" "With allocator double_buffer: a unit that does not fit into the buffers gets a separate persistent buffer";
    AverageInCollective: "fsdp" "average_in_collective" [Bool] "false" "Average gradients in the collective (ReduceOp.AVG) instead of scaling by 1/dp in a kernel";
    PerTokenLoss: "fsdp" "per_token_loss" also ["calculate_per_token_loss"] [Bool] "false" "The loss is a sum over tokens, so gradients are not scaled by 1/dp";
    GradientScalingFactor: "fsdp" "gradient_scaling_factor" [Number(ABOVE_0, 1e9)] "(1 over all data-parallel ranks)" "Factor of the sum of gradients over ranks, applied during their reduction (Megatron-FSDP: gradient_scaling_factor; `set_gradient_divide_factor` of fully_shard takes its inverse)" needs [SEVERAL_DATA_RANKS];
    DecoupledGradients: "fsdp" "decoupled_gradients" also ["use_decoupled_grad", "megatron_fsdp_use_decoupled_grad"] [Bool] "false" "The optimizer reads gradients in the dtype of `main_grads`, instead of casting them to that of main weights (Megatron-FSDP's `decoupled_grad`, with TransformerEngine's FusedAdam, which keeps no step counters on the device)";
    KeepFp8TransposeCache: "fsdp" "keep_fp8_transpose_cache" also ["fp8_keep_transpose"] [Bool] "false" "Keep transposed 8-bit copies of gathered weights in memory between steps, one byte per parameter on every rank (Megatron-FSDP). Its backward still writes them again in every micro-batch" needs [FLOAT8];
    NanCheck: "fsdp" "nan_check" also ["check_for_nan_in_grad"] [Bool] "false" "Check operands of collectives for NaN before each of them, and results after it";
    Offload: "fsdp" "offload" [List(&Choice(&["params", "grads", "optimizer"])), Empty] "[]" "State in host memory: any of params, grads, optimizer under policy native, which copies it to the device for use; all or none under fsdp2, with the optimizer on the CPU (CPUOffloadPolicy)";
    Frozen: "fsdp" "frozen" [List(&Text), Empty] "[]" "Globs of modules whose parameters, including those of their submodules, are not trained";

    Compute: "precision" "param_dtype" as "compute" also ["compute"] [Choice(DTYPES)] "\"bf16\"" "Dtype of gathered parameters, activations and matmuls (MixedPrecisionPolicy: param_dtype)";
    MainParams: "precision" "main_params" also ["main_params_dtype"] [Choice(DTYPES_OR_NONE)] "\"f32\"" "Dtype of the optimizer's master weights; none: the optimizer updates the compute weights";
    FrozenParams: "precision" "frozen_params" [Choice(FrozenType::WORDS)] "(with adapters: param_dtype, else main_params)" "Dtype in which parameters that are not trained are stored: `param_dtype`, that of `main_params`, or, with adapters, nf4: weights of linear layers have 4 bits per element, an 8-bit scale per 64 elements and a float32 factor per 256 scales (QLoRA with double quantization); nf4_f32: float32 scales; int8: 8 bits per element and a float32 scale per row (load_in_8bit)" needs [SOME_FROZEN];
    MainGrads: "precision" "main_grads" also ["main_grads_dtype"] [Choice(DTYPES)] "(megatron: \"bf16\", megatron_v2: param_dtype, others: \"f32\"; f32 with f32 compute)" "Dtype in which gradients are accumulated and kept";
    CommGrads: "precision" "reduce_dtype" as "comm_grads" also ["comm_grads", "grad_comm_dtype"] [Choice(DTYPES)] "(fsdp2: \"f32\", megatron_v2: param_dtype, others: main_grads)" "Dtype of gradients in the reduction over dp_shard (MixedPrecisionPolicy: reduce_dtype); policy native reduces over dp_replicate in main_grads";
    Moments: "precision" "moments" also ["exp_avg_dtype"] [Choice(MomentType::WORDS)] "\"f32\"" "Dtype of the optimizer's moments; 8bit: a byte per element and a float32 scale per 256 elements, as in bitsandbytes and torchao (moments of fewer than 4096 elements stay f32)";
    LossFp32Upcast: "precision" "loss_fp32_upcast" also ["fp32_upcast"] [Bool] "true" "Cast logits to float32 before the cross entropy (`logits.float()`); false: compute it on logits in param_dtype, which needs half the memory (`fp32_upcast` of NeMo AutoModel's MaskedCrossEntropy)" needs [HALF_PRECISION];
    Deterministic: "precision" "deterministic" [Bool] "false" "Fix the order of every sum, so that runs are bitwise reproducible; on GPUs, the backward of attention is then slower and needs a workspace as large as the scores (the CPU device is always deterministic)";
    Float8Recipe: "precision" "float8_recipe" also ["fp8_recipe"] [Choice(Float8Recipe::WORDS)] "\"none\"" "Run the matmuls of the linear layers of blocks in 8 bits. none: in param_dtype; tensorwise: one scale per tensor, from its own maximum (torchao: tensorwise, Transformer Engine: current scaling); rowwise: one per row, a power of two (torchao: rowwise); blockwise: one per 128 elements of a row, and per 128x128 of weights, a power of two (Transformer Engine: block scaling); mxfp8: one per 32 elements of a row, a power of two, on GPUs of compute capability 10.0. Activations and weights are e4m3. Embeddings, the head, norms and attention stay as they are, and so do experts without `float8_experts`";
    Float8Grad: "precision" "float8_grad" also ["fp8_grad"] [Choice(Float8Format::WORDS)] "(tensorwise: \"e5m2\", others: \"e4m3\")" "8-bit format of the gradients of layer outputs: e4m3 (3 bits of mantissa, up to 448) or e5m2 (2 bits, up to 57344)" needs [FLOAT8];
    Float8Saved: "precision" "float8_saved" also ["fp8_saved"] [Choice(Float8Saved::WORDS)] "\"compute\"" "What forward saves for the gradients of weights: compute (the layer's input, which backward casts: torchao), float8 (its transposed 8-bit copy, with half the bytes: Transformer Engine)" needs [FLOAT8];
    Float8Exclude: "precision" "float8_exclude" also ["filter_fqns", "fp8_exclude"] [List(&Text), Empty] "[]" "Globs of linear layers, or of modules that contain them, that stay in param_dtype: consecutive components of a name in shardlab, torchtitan or Hugging Face's code, such as attention.o, attention.wo, self_attn.o_proj, *.w2 or layers.3" needs [FLOAT8];
    Float8FirstBf16: "precision" "float8_first_bf16" also ["num_layers_at_start_in_bf16", "fp8_first_bf16"] [Integer(0, 65535)] "0" "Number of blocks at the start of the stack that stay in param_dtype" needs [FLOAT8];
    Float8LastBf16: "precision" "float8_last_bf16" also ["num_layers_at_end_in_bf16", "fp8_last_bf16"] [Integer(0, 65535)] "0" "Number of blocks at the end of the stack that stay in param_dtype" needs [FLOAT8];
    Float8FastAccum: "precision" "float8_fast_accum" also ["use_fast_accum", "fp8_fast_accum"] [Bool] "true" "Forward matmuls accumulate with the precision of tensor cores; backward matmuls always accumulate in float32" needs [FLOAT8];
    Float8AllGather: "precision" "float8_all_gather" also ["enable_fsdp_float8_all_gather", "fp8_gather", "fp8_param_gather"] [Bool] "false" "All-gathers transfer weights in 8 bits, one byte per element. Recipe tensorwise: after the optimizer, one all-reduce computes the largest absolute values of whole weights, and each rank casts its shards. Recipe blockwise (policy native): shards hold whole blocks of 128 rows, each rank casts its shards alone, and gathers also transfer the scales, four bytes per 128x128 weights. Recipe mxfp8 (policies native and megatron): the same with blocks of 32 rows and a byte per 32 weights; forward gathers codes with scales of rows, backward codes with scales of columns. Policy native gathers weights that stay in param_dtype separately; losses are the same as with casts after the gather. Policy fsdp2 does the same as torchao with precomputed scales" needs [FLOAT8, SEVERAL_RANKS];
    Float8Experts: "precision" "float8_experts" [Bool] "false" "Also run the grouped matmuls of experts in 8 bits, with one scale for the weights of all experts that a rank has in a layer; routers stay in param_dtype. Recipe tensorwise" needs [FLOAT8];

    Mode: "compile" "mode" [Choice(CompileMode::WORDS)] "\"off\"" "Compiled code: off (none: eager kernels), regions (code between FSDP hooks; every hook breaks the graph), blocks (each block as one graph, hooks outside: torch.compile(block) before fully_shard), full (the whole step as one graph with bucketed collectives)";
    CompileLoss: "compile" "loss" also ["compile_loss"] [Bool] "(true with mode regions or full)" "The loss is compiled: in modes off and blocks as a function of its own, like torchtitan's compile.components with \"loss\" and `torch.compile(F.cross_entropy)`. Its kernels read logits in their dtype, without a copy in float32, and backward computes the softmax again from one number per row" needs [LOSS_FUNCTION];
    CompileExclude: "compile" "exclude" [List(&Text), Empty] "[]" "Globs of modules that stay eager, with all that they contain (`torch.compiler.disable`), for example [\"layers.*.mlp\"]. Their kernels are not fused, and their activations are saved as in eager code. In modes regions and blocks, each such module breaks the graph of the code around it; in mode full it is an opaque operator of the graph" needs [COMPILED];
    BucketBytes: "compile" "bucket_bytes" [Bytes(0, 1 << 40)] "104857600" "Merge collectives into buckets of up to this size; 0: one collective per parameter" needs [MODE_FULL];
    MaxInflightBytes: "compile" "max_inflight_bytes" [Bytes(1, 1 << 50)] "5000000000" "Limit on the bytes of collectives in flight" needs [MODE_FULL];
    MemoryBudget: "compile" "memory_budget" [Number(0.0, 100.0)] "0.05" "Additional peak memory that reordering may cost, as a fraction of the peak" needs [MODE_FULL];
    MergeProjections: "compile" "fuse_projections" as "merge_projections" also ["merge_projections", "fuse_qkv"] [Choice(MergeProjections::WORDS)] "(native with mode regions or blocks: \"qkv\", else \"none\")" "Run linear layers that read the same input as one matmul, if their weights are adjacent: none, gradients (only their gradients), qkv (queries, keys and values), all (qkv, and gate with up)";
    Epilogues: "compile" "gemm_accumulate" as "epilogues" also ["epilogues"] [Bool] "(true with policy native and a compile mode)" "Matmuls add a residual or another gradient in their epilogue, rounded once, and add weight gradients to the sum of earlier micro-batches if full gradients are accumulated (policy native); the gradient kernel of an embedding also writes the zeros of its table";
    MixOrderReductions: "compile" "mix_order_reductions" also ["mix_order_reduction"] [Bool] "(true with policy native and a compile mode)" "The backward kernel of a norm also computes the gradient of its weight, so that their common input is read once";
    FusedProducts: "compile" "gemm_epilogue_fusion" as "fused_products" also ["fused_products"] [Bool] "false" "Fuse elementwise code that reads a 16-bit matmul result (the feed-forward gate and its gradient) into the matmul; on GPUs with a custom kernel for compute capability 9.0 (H100, H200). Matmuls in 8 bits keep separate kernels";
    CudaGraph: "compile" "cuda_graph" [Choice(&["off", "full_iteration"]), List(&Choice(Scope::WORDS))] "\"off\"" "CUDA-graph capture: off, full_iteration (the whole step in one graph), or a list of scopes captured in every block: attn, mlp (a dense feed-forward layer), moe_router (norm and router of a layer of experts, and the shared expert unless it overlaps with the exchange of tokens), moe_preprocess (sorting and copying of tokens, up to the exchange), moe (the whole layer of experts; not with dispatcher all_to_all, whose host waits for counts), block (the whole block)";

    GatePreset: "gate" "preset" [Choice(GatePreset::WORDS)] "\"budget\"" "Defaults of the other keys. budget: the step has to fit and stay within its budgets, and growth beyond a tolerance fails; strict: every change fails, whether better or worse";
    GateStepTime: "gate" "step_time" [Number(0.0, 1e6)] "0.005" "Relative tolerance of the predicted step time";
    GateMeasuredStepTime: "gate" "measured_step_time" [Number(0.0, 1e6)] "0.05" "Relative tolerance of the measured step time; the old and the new version are measured in one invocation";
    GateAllocated: "gate" "allocated" [Number(0.0, 1e6)] "(budget: 0.02, strict: 0.0)" "Relative tolerance of peak allocated memory; 0: equal to the byte";
    GateReserved: "gate" "reserved" [Number(0.0, 1e6)] "(budget: 0.02, strict: 0.01)" "Relative tolerance of peak reserved memory";
    GateDevice: "gate" "device" [Number(0.0, 1e6)] "(budget: 0.02, strict: 0.01)" "Relative tolerance of the memory that the device has in use";
    GateMaxMemory: "gate" "max_memory" [Size(1, 1 << 50)] "(none)" "Budget: maximum reserved memory per GPU, with or without a baseline";
    GateMaxStepMs: "gate" "max_step_ms" [Number(1e-9, 1e12)] "(none)" "Budget: maximum predicted step time in milliseconds, with or without a baseline";
    GateLoss: "gate" "loss" [Number(0.0, 1e6)] "1e-3" "Relative tolerance of each loss; 0 with loss_absolute 0: bitwise equal";
    GateLossAbsolute: "gate" "loss_absolute" [Number(0.0, 1e6)] "0.0" "Absolute tolerance of each loss, in addition to the relative one";
    GateLossArea: "gate" "loss_area" [Number(0.0, 1e6)] "5e-4" "Area between the loss curves, relative to the area under the baseline's";
    GateFinalLoss: "gate" "final_loss" [Number(0.0, 1e6)] "1e-3" "Relative tolerance of a final loss above the baseline's";
    GateGradNorm: "gate" "grad_norm" [Number(0.0, 1e6)] "0.01" "Relative tolerance of each gradient norm; 0: bitwise equal";
    GateSeeds: "gate" "seeds" [Integer(1, 64)] "1" "Number of runs, with seeds 0, 1, …; with 3 or more, their final losses are tested instead of a single curve";
    GateProgram: "gate" "program" [Choice(GateProgram::WORDS)] "(budget: \"off\", strict: \"exact\")" "Parts of the program that must not change: exact (all of it), counts (instruction counts), off (none)";
}
