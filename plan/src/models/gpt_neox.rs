//! GPT-NeoX and Pythia: LayerNorm with bias, partial rotary embedding, query-key-value projection
//! stored per head, GELU, and attention next to the feed-forward layer (parallel residual).

use super::Forward;
use super::activation::activate;
use super::build::Builder;
use super::classes::{self, Scores};
use super::declare::{Declare, Layer, Order, ROOT, Weights};
use super::defaults;
use super::hf::{
    FFN, Field, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, VOCAB, field,
};
use super::implementation::{self, Masks};
use super::loss;
use super::rope::Rope;
use super::spec::{Conflict, DEFAULT_SEQ_LEN, Defaults, FamilySpec, Inputs, Mask};
use crate::config::{Bias, Family, Model};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::GptNeox,
    name: "gpt_neox",
    keys: &[
        "hidden",
        "heads",
        "ffn",
        "vocab",
        "tie_embeddings",
        "norm_eps",
        "activation",
        "rope_theta",
        "partial_rotary_factor",
        "parallel_residual",
        "max_seq_len",
        "model_type",
        "head",
        "num_labels",
        "implementation",
        "attn_implementation",
        "dropout",
        "attention_dropout",
        "embedding_dropout",
    ],
    defaults: Defaults {
        bias: Bias::All,
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
    keeps_type: false,
    weights: Weights::Normal,
    hf: HF,
    dimensions: |m| vec![("vocab", m.vocab), ("hidden", m.hidden), ("ffn", m.ffn)],
    check,
    declare: |d, m| Box::new(GptNeox::new(d, m)),
};

/// Words of transformers for activations. The first one is the default of the class.
const ACTIVATIONS: &[(&str, &str)] = &[
    ("gelu", "gelu"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
    ("gelu_new", "gelu_new"),
    ("relu", "relu"),
    ("silu", "silu"),
];

const HF: &[HfType] = &[HfType {
    model_type: "gpt_neox",
    architecture: "GPTNeoXForCausalLM",
    fixed: &[],
    common: &[],
    fields: &[
        VOCAB,
        HIDDEN,
        FFN,
        LAYERS,
        HEADS,
        field(&["hidden_act"], Meaning::Choice("activation", ACTIVATIONS)),
        POSITIONS,
        field(&["layer_norm_eps"], Meaning::Optional("norm_eps")),
        Field {
            names: &[
                "rope_theta",
                "rotary_emb_base",
                "rope_parameters.rope_theta",
            ],
            ..ROPE_THETA
        },
        Field {
            names: &["rotary_pct", "rope_parameters.partial_rotary_factor"],
            meaning: Meaning::Optional("partial_rotary_factor"),
        },
        field(
            &["use_parallel_residual"],
            Meaning::Optional("parallel_residual"),
        ),
        field(&["attention_bias"], Meaning::On),
        field(
            &["tie_word_embeddings"],
            Meaning::Optional("tie_embeddings"),
        ),
    ],
}];

fn check(m: &Model) -> Result<(), Conflict> {
    classes::check(m)?;
    Conflict::packed_projections(m)?;
    let rotated = rotated(m);
    if rotated >= 2 && rotated.is_multiple_of(2) {
        return Ok(());
    }
    let message = format!(
        "the rotary embedding rotates pairs: {} of the head dimension ({}) is {rotated} dimensions, not an even number",
        m.options.positions.partial_rotary_factor, m.head_dim
    );
    Err(Conflict::new(
        &["partial_rotary_factor", "heads", "hidden"],
        message,
    ))
}

/// Returns the rotated dimensions of a head.
fn rotated(m: &Model) -> u64 {
    (m.head_dim as f64 * m.options.positions.partial_rotary_factor) as u64
}

struct GptNeox {
    embedding: Layer,
    blocks: Vec<Block>,
    norm: Layer,
    head: Scores,
}

struct Block {
    module: ModuleId,
    attention: ModuleId,
    input_norm: Layer,
    qkv: Layer,
    dense: Layer,
    mlp: ModuleId,
    post_norm: Layer,
    up: Layer,
    down: Layer,
}

impl GptNeox {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let names = ("tok_embeddings", "gpt_neox.embed_in");
        let embedding = d.table(ROOT, names, ModuleKind::Embedding, [m.vocab, m.hidden]);
        let blocks = d.blocks(m, "gpt_neox.layers", Block::new);
        let names = ("norm", "gpt_neox.final_layer_norm");
        let norm = d.norm(ROOT, names, m.hidden, true, Order::Declared);
        let head = Scores::new(d, embedding, "embed_out", m);
        Self {
            embedding,
            blocks,
            norm,
            head,
        }
    }
}

impl Block {
    fn new(d: &mut Declare, module: ModuleId, m: &Model) -> Self {
        let (h, ffn, bias) = (m.hidden, m.ffn, m.bias == Bias::All);
        let attention = d.module(module, "attention", ModuleKind::Attention);
        let names = ("input_layernorm", "input_layernorm");
        let input_norm = d.norm(attention, names, h, true, Order::First);
        let names = ("query_key_value", "attention.query_key_value");
        let qkv = d.linear(attention, names, [3 * h, h], bias);
        let dense = d.linear(attention, ("dense", "attention.dense"), [h, h], bias);
        let mlp = d.module(module, "mlp", ModuleKind::Mlp);
        let names = ("post_attention_layernorm", "post_attention_layernorm");
        let post_norm = d.norm(mlp, names, h, true, Order::First);
        let up = d.linear(mlp, ("dense_h_to_4h", "mlp.dense_h_to_4h"), [ffn, h], bias);
        let down = d.linear(mlp, ("dense_4h_to_h", "mlp.dense_4h_to_h"), [h, ffn], bias);
        Self {
            module,
            attention,
            input_norm,
            qkv,
            dense,
            mlp,
            post_norm,
            up,
            down,
        }
    }

    /// Applies attention to the normalized input, without the residual stream.
    fn attend(&self, b: &mut Builder<'_>, x: ValueId, rope: Rope, masks: Masks) -> ValueId {
        let (batch, seq) = (b.batch(), b.seq());
        let (heads, hd) = (b.s.model.heads, b.s.model.head_dim);
        let y = b.layer_norm(self.input_norm, x);
        b.within(self.attention, |b| {
            let qkv = b.linear(self.qkv, y);
            let qkv = b.g.reshape(qkv, &[batch, seq, heads, 3 * hd]);
            let qkv = b.g.transpose(qkv, 1, 2);
            let parts = b.g.split(qkv, 3, 3);
            let (q, k) = (rope.rotate(b, parts[0]), rope.rotate(b, parts[1]));
            let a = implementation::causal(b, [q, k, parts[2]], masks);
            let t = b.g.transpose(a, 1, 2);
            let t = b.g.reshape(t, &[batch, seq, heads * hd]);
            let o = b.linear(self.dense, t);
            let o = b.dropout(o, b.s.model.options.dropout);
            for v in [qkv, q, k, a, t] {
                b.g.release(v);
            }
            o
        })
    }

    /// Applies the feed-forward layer to the normalized `x`, without the residual stream.
    fn feed_forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let y = b.layer_norm(self.post_norm, x);
        b.within(self.mlp, |b| {
            let up = b.linear(self.up, y);
            let act = activate(b, defaults::activation(&b.s.model), up);
            let down = b.linear(self.down, act);
            b.dropout(down, b.s.model.options.dropout)
        })
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId, rope: Rope, masks: Masks) -> ValueId {
        let attended = self.attend(b, x, rope, masks);
        let add = |b: &mut Builder<'_>, x, y| b.g.binary(OpKind::Add, x, y);
        let (out, last) = if b.s.model.options.parallel_residual {
            let fed = self.feed_forward(b, x);
            b.within(self.module, |b| {
                let sum = add(b, fed, attended);
                (add(b, sum, x), fed)
            })
        } else {
            let x1 = b.within(self.module, |b| add(b, attended, x));
            let fed = self.feed_forward(b, x1);
            b.within(self.module, |b| (add(b, fed, x1), x1))
        };
        b.within(self.module, |b| {
            for v in [attended, last, x] {
                b.g.release(v);
            }
        });
        out
    }
}

impl Forward for GptNeox {
    fn forward(&self, b: &mut Builder<'_>) {
        let (ids, labels) = loss::tokens(b);
        let rope = Rope::tables(b, rotated(&b.s.model));
        let mut h = b.embedding(self.embedding, ids);
        h = b.within(ROOT, |b| {
            b.dropout(h, b.s.model.options.embedding.embedding_dropout)
        });
        let rope = rope.cast(b);
        let masks = Masks::new(b, h);
        for block in &self.blocks {
            if b.skips(block.module) {
                continue;
            }
            h = block.forward(b, h, rope, masks);
        }
        let y = b.layer_norm(self.norm, h);
        masks.release(b);
        self.head.forward(b, y, labels);
    }
}
