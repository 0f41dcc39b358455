//! Types of transformers that are decoders.

mod bailing;
mod class_defaults;
mod conformers;
mod deepseek_v4;
mod delta;
mod encoders;
mod experts;
mod gemma3n;
mod gemma4;
mod gpt;
mod hybrid;
mod latent;
mod llama_like;
mod long_encoders;
mod minimax;
mod not_planned;
mod packed;
mod read;
mod recent;
mod routed;
mod rwkv;
mod seq2seq;
mod short_conv;
mod sound;
mod sparse;
mod speech;
mod t5gemma;
mod towers;
mod two_ways;
mod vision;
mod windowed;
mod wrappers;
mod xlm;
mod xlstm;
mod zamba;

use crate::models::hf::{Computed, Field, Given, HfType, HfWrapper, Meaning, field};
use serde_json::Value;

/// All decoders.
pub(super) const ALL: &[HfType] = &joined::<_, 17, { len(&PARTS) }>(&PARTS);
const PARTS: [&[HfType]; 17] = [
    windowed::TYPES,
    llama_like::TYPES,
    packed::TYPES,
    gpt::TYPES,
    hybrid::TYPES,
    delta::TYPES,
    short_conv::TYPES,
    seq2seq::TYPES,
    long_encoders::TYPES,
    t5gemma::TYPES,
    xlstm::TYPES,
    latent::TYPES,
    gemma3n::TYPES,
    rwkv::TYPES,
    zamba::TYPES,
    recent::TYPES,
    gemma4::TYPES,
];

const SIZES_ALONE: &str = "only the sizes of its plan were compared with the code of transformers";

/// Types that are planned and priced with their sizes, but may compute something else, and why.
pub(in crate::models) const APPROXIMATED: &[(&str, &str)] = &[
    ("afmoe", SIZES_ALONE),
    ("axk1", SIZES_ALONE),
    ("bailing_moe", SIZES_ALONE),
    ("bailing_moe_v2", SIZES_ALONE),
    ("cohere_compass_text", SIZES_ALONE),
    ("apertus", "unlike its plan, its activation is xIELU"),
    (
        "apertus1p5_text",
        "unlike its plan, its activation is xIELU",
    ),
    (
        "beit",
        "unlike its plan, it normalizes the mean of the patches",
    ),
    (
        "data2vec-vision",
        "unlike its plan, it normalizes the mean of the patches",
    ),
    (
        "big_bird",
        "unlike its plan, it attends to blocks of keys, some of them random",
    ),
    (
        "clip",
        "unlike its plan, it has the activation QuickGELU, and normalizes the class alone",
    ),
    (
        "clip_text_model",
        "unlike its plan, it has the activation QuickGELU, and a loss of one position",
    ),
    (
        "clip_vision_model",
        "unlike its plan, it has the activation QuickGELU, and normalizes the class alone",
    ),
    (
        "dinov3_vit",
        "unlike its plan, it rotates patches alone, by their places in two dimensions",
    ),
    (
        "cohere2_moe",
        "unlike its plan, it may halve the sum of shared and routed experts",
    ),
    (
        "laguna",
        "unlike its plan, its gates of attention are softplus, and some layers rotate half of a head",
    ),
    ("gemma4_unified_text", SIZES_ALONE),
    (
        "codegen",
        "unlike its plan, it has four blocks of queries, values and keys in one projection",
    ),
    (
        "ctrl",
        "unlike its plan, its positions have sines first, then cosines",
    ),
    (
        "openai-gpt",
        "unlike its plan, its files have transposed weights",
    ),
    (
        "deberta",
        "unlike its plan, it multiplies projected positions with queries and keys",
    ),
    (
        "deberta-v2",
        "unlike its plan, it multiplies projected positions with queries and keys",
    ),
    (
        "deepseek_ref",
        "unlike its plan, it mixes residual streams and weights positions of compressed keys by softmax",
    ),
    (
        "deepseek_v4",
        "unlike its plan, it mixes residual streams and weights positions of compressed keys by softmax",
    ),
    (
        "falcon_alibi",
        "unlike its plan, it divides the slopes with the scores",
    ),
    (
        "diffllama",
        "unlike its plan, it has exponentials of learned numbers as factors",
    ),
    (
        "distilbert",
        "unlike its plan, its layer before the scores of a sequence ends with ReLU",
    ),
    (
        "falcon_h1",
        "unlike its plan, it scales the inputs and results of layers",
    ),
    (
        "gemma4_moe_text",
        "unlike its plan, it scales the weights of experts",
    ),
    ("gemma4_text", SIZES_ALONE),
    (
        "minimax",
        "unlike its plan, it adds to normalized values, and its factors are not 1",
    ),
    (
        "minimax_m3",
        "unlike its plan, it clamps gates of experts and shifts their factors",
    ),
    (
        "minimax_m3_vl_text",
        "unlike its plan, it clamps gates of experts and shifts their factors",
    ),
    (
        "ministral3",
        "unlike its plan, it scales queries by their positions",
    ),
    ("mimo_v2_flash", "unlike its plan, it scales values"),
    (
        "mistral4",
        "unlike its plan, it scales queries by their positions",
    ),
    (
        "nanochat",
        "unlike its plan, it rotates queries and keys in the opposite direction",
    ),
    (
        "phimoe",
        "unlike its plan, its router masks scores that are far from the largest one",
    ),
    (
        "bigbird_pegasus",
        "unlike its plan, its encoder attends to blocks of keys, some of them random",
    ),
    (
        "longt5",
        "unlike its plan, sums of positions are keys in addition to the first positions",
    ),
    (
        "data2vec-audio",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "hubert",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "unispeech",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "unispeech-sat",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "parakeet_ctc",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    ("vit_mae", "unlike its plan, it chooses patches at random"),
    (
        "wav2vec2",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "wav2vec2-bert",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "wav2vec2-conformer",
        "unlike its plan, its loss is one of all alignments (CTC)",
    ),
    (
        "wavlm",
        "unlike its plan, its loss is one of all alignments (CTC), and each sample has biases of its own",
    ),
    (
        "jetmoe",
        "unlike its plan, it repeats keys for each expert of a token in another order",
    ),
    (
        "longcat_flash",
        "unlike its plan, it scales compressed queries and keys, and weights what experts without weights add by their own scores",
    ),
    (
        "xlstm",
        "unlike its plan, its gates of inputs are exponentials, and sums divide what its memories return",
    ),
    ("swin", "unlike its plan, it has masks in shifted windows"),
    (
        "donut-swin",
        "unlike its plan, it has masks in shifted windows",
    ),
    (
        "swinv2",
        "unlike its plan, it has masks in shifted windows, and exponentials of learned numbers as factors",
    ),
    ("step3p7", SIZES_ALONE),
];

/// Types that stand for another one where a field is there and not false: type, field, the other.
pub(in crate::models) const VARIANTS: &[(&str, &str, &str)] = &[
    ("minicpm", "num_experts", "minicpm_moe"),
    ("gemma4_text", "enable_moe_block", "gemma4_moe_text"),
    ("falcon", "alibi", "falcon_alibi"),
];

/// Types that are mixtures of experts.
pub(in crate::models) const EXPERTS: &[HfType] = &joined::<_, 12, { len(&SPARSE) }>(&SPARSE);
const SPARSE: [&[HfType]; 12] = [
    experts::TYPES,
    sparse::TYPES,
    hybrid::EXPERTS,
    delta::EXPERTS,
    short_conv::EXPERTS,
    routed::TYPES,
    gemma4::EXPERTS,
    minimax::TYPES,
    deepseek_v4::TYPES,
    recent::EXPERTS,
    two_ways::TYPES,
    bailing::TYPES,
];

const fn len<T, const P: usize>(parts: &[&[T]; P]) -> usize {
    let (mut all, mut part) = (0, 0);
    while part < P {
        all += parts[part].len();
        part += 1;
    }
    all
}

/// Returns the types of all parts, `N` in all.
const fn joined<T: Copy, const P: usize, const N: usize>(parts: &[&[T]; P]) -> [T; N] {
    let mut all = [parts[0][0]; N];
    let (mut part, mut at) = (0, 0);
    while part < P {
        let mut i = 0;
        while i < parts[part].len() {
            all[at] = parts[part][i];
            at += 1;
            i += 1;
        }
        part += 1;
    }
    all
}

/// Types that are encoders.
pub(super) const ENCODERS: &[HfType] = &joined::<_, 2, { len(&OF_TOKENS) }>(&OF_TOKENS);
const OF_TOKENS: [&[HfType]; 2] = [encoders::TYPES, xlm::TYPES];

/// Types that encode images, or the audio samples.
pub(super) const VISION: &[HfType] = &joined::<_, 3, { len(&INPUTS) }>(&INPUTS);
const INPUTS: [&[HfType]; 3] = [vision::TYPES, sound::TYPES, conformers::TYPES];

pub(crate) use class_defaults::text_defaults;
pub use class_defaults::{ClassDefaults, class_defaults};
pub(in crate::models) use not_planned::NOT_PLANNED;

/// Types that wrap a vision tower and a language model.
pub const WRAPPERS: &[HfWrapper] = &joined::<_, 3, { len(&TOWERS) }>(&TOWERS);
const TOWERS: [&[HfWrapper]; 3] = [wrappers::TYPES, towers::TYPES, speech::TYPES];

/// Words of transformers for the activation of gated layers. The first one is the default.
const SILU_FIRST: &[(&str, &str)] = &[
    ("silu", "silu"),
    ("swish", "silu"),
    ("gelu", "gelu"),
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("relu", "relu"),
    ("relu2", "relu2"),
];

/// Words of CLIP. `x * sigmoid(1.702 x)` costs as much as the approximation of GELU.
const QUICK_GELU: Field = field(
    &["hidden_act"],
    Meaning::Choice(
        "activation",
        &[
            ("quick_gelu", "gelu_tanh"),
            ("gelu", "gelu"),
            ("gelu_new", "gelu_tanh"),
        ],
    ),
);
const LAYER_NORM: (&str, Given) = ("norm", Given::Str("layer_norm"));
const EMBEDDING_NORM: (&str, Given) = ("embedding_norm", Given::Bool(true));
/// Norms of queries and keys, over each head.
const HEAD_NORMS: (&str, Given) = ("qk_norm", Given::Bool(true));
/// Norms follow the sum with the residual stream.
const AFTER_SUM: (&str, Given) = ("norm_position", Given::Str("sum"));
const NO_GATE: (&str, Given) = ("gated_mlp", Given::Bool(false));
const BIASES: (&str, Given) = ("bias", Given::Bool(true));
const HEAD_BIAS: (&str, Given) = ("head_bias", Given::Bool(true));
const LEARNED: (&str, Given) = ("position_embedding", Given::Str("learned"));
/// The first rows of the table of positions are those of padding.
const OFFSET: (&str, Given) = ("position_offset", Given::Int(2));
const HEAD_DIM_256: Field = field(&["head_dim"], Meaning::Default("head_dim", Given::Int(256)));
const HIDDEN_ACT: Field = field(&["hidden_act"], Meaning::Choice("activation", SILU_FIRST));
const LAYER_NORM_EPS: Field = field(&["layer_norm_eps"], Meaning::Optional("norm_eps"));
const LAYER_NORM_EPSILON: Field = field(&["layer_norm_epsilon"], Meaning::Optional("norm_eps"));
/// Epsilon of layer norms, 1e-12 unless the file says otherwise.
const EPS_12: Field = field(
    &["layer_norm_eps"],
    Meaning::Default("norm_eps", Given::Float(1e-12)),
);
/// Epsilon of layer norms, 1e-5 unless the file says otherwise.
const LAYER_EPS_5: Field = field(
    &["layer_norm_eps"],
    Meaning::Default("norm_eps", Given::Float(1e-5)),
);
const RMS_EPS_5: Field = field(&["rms_norm_eps"], Meaning::Optional("norm_eps"));
/// Base of the rotary embedding in ModernBERT's layers that see all positions.
const GLOBAL_THETA: Field = Field {
    names: &[
        "global_rope_theta",
        "rope_parameters.full_attention.rope_theta",
    ],
    meaning: Meaning::Default("rope_theta", Given::Float(160_000.0)),
};
/// That in its layers with a window.
const WINDOW_THETA: Field = Field {
    names: &[
        "local_rope_theta",
        "rope_parameters.sliding_attention.rope_theta",
    ],
    meaning: Meaning::Default("rope_local_theta", Given::Float(10_000.0)),
};
/// Classes that tie embedding and head unless the file says otherwise.
const TIED_BY_DEFAULT: Field = field(
    &["tie_word_embeddings"],
    Meaning::Default("tie_embeddings", Given::Bool(true)),
);
/// Classes whose embedding and head are two parameters whatever the file says.
const NEVER_TIED: Field = derived("tie_embeddings", &["tie_word_embeddings"], |_| {
    Ok(Some(false.into()))
});
/// As [`TIED_BY_DEFAULT`], in classes that have tables or biases of their own if they do not tie
/// them, which no plan has.
const ALWAYS_TIED: Field = field(
    &["tie_word_embeddings"],
    Meaning::Computed(
        "tie_embeddings",
        Computed {
            also: &[],
            read: |file| {
                let classes = file("architectures");
                let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
                let ends = ["LM", "Generation", "MTModel", "PreTraining", "LMHeadModel"];
                let has_logits = first.is_none_or(|c| ends.iter().any(|end| c.ends_with(end)));
                let untied = file("tie_word_embeddings") == Some(false.into());
                if untied && has_logits {
                    return Err(
                        "`tie_word_embeddings` must be true: tables and biases of their own are not planned"
                            .to_owned(),
                    );
                }
                Ok(Some(true.into()))
            },
            write: |model| Some(model["tie_embeddings"].clone()),
        },
    ),
);
const PARTIAL: Field = Field {
    names: &[
        "partial_rotary_factor",
        "rope_parameters.partial_rotary_factor",
    ],
    meaning: Meaning::Optional("partial_rotary_factor"),
};
const PARTIAL_HALF: Field = Field {
    meaning: Meaning::Default("partial_rotary_factor", Given::Float(0.5)),
    ..PARTIAL
};

/// A key that is a function of one number of the file.
const fn number(
    name: &'static [&'static str; 1],
    key: &'static str,
    read: fn(crate::models::Fields<'_>) -> Result<Option<Value>, String>,
    write: fn(&Value) -> Option<Value>,
) -> Field {
    let also = &[];
    field(name, Meaning::Computed(key, Computed { also, read, write }))
}

/// Returns a number of a file that was computed from a key: an integer, where only the rounding of
/// the computation keeps it from being one. Classes of transformers refuse other numbers.
fn rounded(number: f64) -> Value {
    let whole = number.round();
    if (number - whole).abs() > 1e-9 * whole.abs() {
        return number.into();
    }
    (whole as u64).into()
}

/// A key that is computed from the file without a field of its own.
const fn derived(
    key: &'static str,
    also: &'static [&'static str],
    read: fn(crate::models::Fields<'_>) -> Result<Option<Value>, String>,
) -> Field {
    let write = |_: &Value| None;
    let names: &[&str; 1] = &[""];
    field(
        names,
        Meaning::Computed(key, Computed { also, read, write }),
    )
}
