//! GPT-2: LayerNorm with bias, learned positions, fused query-key-value projection, GELU, tied
//! head.

use super::Forward;
use super::activation::activate;
use super::build::Builder;
use super::classes::{self, Scores};
use super::declare::{Declare, Layer, Order, ROOT, Weights};
use super::defaults;
use super::hf::{Field, HfType, Meaning, TIED, VOCAB, field};
use super::implementation::{self, Masks};
use super::loss;
use super::spec::{Conflict, DEFAULT_SEQ_LEN, Defaults, FamilySpec, Inputs, Mask};
use crate::config::{Bias, Family, Model};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Gpt2,
    name: "gpt2",
    keys: &[
        "hidden",
        "heads",
        "ffn",
        "vocab",
        "tie_embeddings",
        "norm_eps",
        "activation",
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
        tie_embeddings: true,
        ffn: |hidden| 4 * hidden,
        ffn_multiple: 1,
        // The table of positions of the published models has 1024 rows.
        max_seq_len: |asked| Some(asked.unwrap_or(0).max(1024)),
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
    declare: |d, m| Box::new(Gpt2::new(d, m)),
};

/// Words of transformers for activations. The first one is the default of GPT-2's class.
pub(super) const ACTIVATIONS: &[(&str, &str)] = &[
    ("gelu_new", "gelu_new"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
    ("gelu", "gelu"),
    ("relu", "relu"),
    ("silu", "silu"),
    ("swish", "silu"),
    ("relu2", "relu2"),
];

const HF: &[HfType] = &[gpt2("gpt2"), gpt2("gpt-sw3")];

const FIELDS: &[Field] = &[
    VOCAB,
    field(&["n_embd"], Meaning::Required("hidden")),
    field(&["n_inner"], Meaning::Optional("ffn")),
    field(&["n_layer"], Meaning::Required("layers")),
    field(&["n_head"], Meaning::Required("heads")),
    field(&["n_positions"], Meaning::Optional("max_seq_len")),
    field(
        &["activation_function"],
        Meaning::Choice("activation", ACTIVATIONS),
    ),
    field(&["layer_norm_epsilon"], Meaning::Optional("norm_eps")),
    field(&["resid_pdrop"], Meaning::Dropout),
    field(&["embd_pdrop"], Meaning::Dropout),
    field(&["attn_pdrop"], Meaning::Dropout),
    field(&["scale_attn_by_inverse_layer_idx"], Meaning::Off),
    field(&["add_cross_attention"], Meaning::Off),
    TIED,
];

/// Returns the row of a type with GPT-2's code.
const fn gpt2(model_type: &'static str) -> HfType {
    HfType {
        model_type,
        architecture: "GPT2LMHeadModel",
        fixed: &[],
        common: &[],
        fields: FIELDS,
    }
}

fn check(m: &Model) -> Result<(), Conflict> {
    classes::check(m)?;
    Conflict::packed_projections(m)
}

struct Gpt2 {
    embedding: ModuleId,
    wte: Layer,
    wpe: Layer,
    blocks: Vec<Block>,
    norm: Layer,
    head: Scores,
}

struct Block {
    module: ModuleId,
    attention: ModuleId,
    ln_1: Layer,
    c_attn: Layer,
    attention_c_proj: Layer,
    mlp: ModuleId,
    ln_2: Layer,
    c_fc: Layer,
    mlp_c_proj: Layer,
}

impl Gpt2 {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let embedding = d.module(ROOT, "tok_embeddings", ModuleKind::Embedding);
        let mut table = |ours, theirs, rows| {
            d.table(
                embedding,
                (ours, theirs),
                ModuleKind::Layer,
                [rows, m.hidden],
            )
        };
        let wte = table("wte", "transformer.wte", m.vocab);
        let wpe = table("wpe", "transformer.wpe", m.max_seq_len);
        let blocks = d.blocks(m, "transformer.h", Block::new);
        let names = ("norm", "transformer.ln_f");
        let norm = d.norm(ROOT, names, m.hidden, true, Order::Declared);
        let head = Scores::new(d, wte, "lm_head", m);
        Self {
            embedding,
            wte,
            wpe,
            blocks,
            norm,
            head,
        }
    }
}

impl Block {
    fn new(d: &mut Declare, module: ModuleId, m: &Model) -> Self {
        let (h, ffn, bias) = (m.hidden, m.ffn, m.bias == Bias::All);
        let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
        let attention = d.module(module, "attention", ModuleKind::Attention);
        let ln_1 = d.norm(attention, ("ln_1", "ln_1"), h, true, Order::Declared);
        let c_attn = d.conv1d(attention, ("c_attn", "attn.c_attn"), [q + 2 * kv, h], bias);
        let attention_c_proj = d.conv1d(attention, ("c_proj", "attn.c_proj"), [h, q], bias);
        let mlp = d.module(module, "mlp", ModuleKind::Mlp);
        let ln_2 = d.norm(mlp, ("ln_2", "ln_2"), h, true, Order::Declared);
        let c_fc = d.conv1d(mlp, ("c_fc", "mlp.c_fc"), [ffn, h], bias);
        let mlp_c_proj = d.conv1d(mlp, ("c_proj", "mlp.c_proj"), [h, ffn], bias);
        Self {
            module,
            attention,
            ln_1,
            c_attn,
            attention_c_proj,
            mlp,
            ln_2,
            c_fc,
            mlp_c_proj,
        }
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId, masks: Masks) -> ValueId {
        let (batch, seq) = (b.batch(), b.seq());
        let (heads, hd) = (b.s.model.heads, b.s.model.head_dim);
        let y = b.layer_norm(self.ln_1, x);
        let x1 = b.within(self.attention, |b| {
            let qkv = b.linear(self.c_attn, y);
            let parts = b.g.split(qkv, 2, 3);
            let [q, k, v] = [parts[0], parts[1], parts[2]].map(|p| {
                let p = b.g.reshape(p, &[batch, seq, heads, hd]);
                b.g.transpose(p, 1, 2)
            });
            let a = implementation::causal(b, [q, k, v], masks);
            let t = b.g.transpose(a, 1, 2);
            let t = b.g.reshape(t, &[batch, seq, heads * hd]);
            let o = b.linear(self.attention_c_proj, t);
            b.g.release(qkv);
            b.g.release(t);
            let o = b.dropout(o, b.s.model.options.dropout);
            b.g.binary(OpKind::Add, x, o)
        });
        let y = b.layer_norm(self.ln_2, x1);
        let out = b.within(self.mlp, |b| {
            let up = b.linear(self.c_fc, y);
            let act = activate(b, defaults::activation(&b.s.model), up);
            let down = b.linear(self.mlp_c_proj, act);
            let down = b.dropout(down, b.s.model.options.dropout);
            b.g.binary(OpKind::Add, x1, down)
        });
        b.within(self.module, |b| {
            b.g.release(x);
            b.g.release(x1);
        });
        out
    }
}

impl Forward for Gpt2 {
    fn forward(&self, b: &mut Builder<'_>) {
        let (ids, labels) = loss::tokens(b);
        let positions = b.positional("positions", 0, &[], DType::I64);
        let mut h = b.within(self.embedding, |b| {
            let tokens = b.embedding(self.wte, ids);
            let places = b.embedding(self.wpe, positions);
            let sum = b.g.binary(OpKind::Add, tokens, places);
            b.g.release(tokens);
            b.g.release(places);
            b.dropout(sum, b.s.model.options.embedding.embedding_dropout)
        });
        let masks = Masks::new(b, h);
        for block in &self.blocks {
            if b.skips(block.module) {
                continue;
            }
            h = block.forward(b, h, masks);
        }
        let y = b.layer_norm(self.norm, h);
        masks.release(b);
        self.head.forward(b, y, labels);
    }
}
