//! Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU. With `qk_norm`, Qwen3; with
//! multipliers, Granite.

use super::build::Builder;
use super::declare::{Declare, Layer, Order, ROOT, Weights};
use super::hf::{
    FFN, Field, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, ROPE_THETA, TIED, VOCAB, field,
};
use super::rope::Rope;
use super::spec::{Conflict, DEFAULT_SEQ_LEN, Defaults, FamilySpec, Inputs, Mask};
use super::{Forward, loss};
use crate::config::{Bias, Family, Model};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Llama,
    name: "llama",
    keys: &[
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "tie_embeddings",
        "norm_eps",
        "rope_theta",
        "max_seq_len",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ],
    defaults: Defaults {
        bias: Bias::None,
        tie_embeddings: false,
        ffn: |hidden| (8 * hidden).div_ceil(3).next_multiple_of(FFN_MULTIPLE),
        ffn_multiple: FFN_MULTIPLE,
        max_seq_len: |asked| Some(asked.unwrap_or(DEFAULT_SEQ_LEN)),
        seq_len: |max| max.unwrap_or(DEFAULT_SEQ_LEN).min(DEFAULT_SEQ_LEN),
    },
    inputs: Inputs::Tokens,
    attention: Some(Mask::Causal),
    tensor_parallel: None,
    torch_modules: false,
    weights: Weights::Normal,
    hf: HF,
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
    declare: |d, m| Box::new(Llama::new(d, m)),
};

pub(super) const SILU: Field = field(&["hidden_act"], Meaning::Word(&["silu", "swish"]));
pub(super) const KV_HEADS: Field = field(&["num_key_value_heads"], Meaning::Optional("kv_heads"));
pub(super) const HEAD_DIM: Field = field(&["head_dim"], Meaning::Optional("head_dim"));
pub(super) const NORM_EPS: Field = field(
    &["rms_norm_eps"],
    Meaning::Default("norm_eps", Given::Float(1e-6)),
);
const POSITIONS: Field = field(
    &["max_position_embeddings"],
    Meaning::Positions { slides: false },
);
pub(super) const SLIDES: Field = field(&["use_sliding_window"], Meaning::Slides);
const ATTENTION_BIAS: Field = field(&["attention_bias"], Meaning::HasBias);
const MLP_BIAS: Field = field(&["mlp_bias"], Meaning::HasBias);

const HF: &[HfType] = &[
    HfType {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        fixed: &[],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            SILU,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "granite",
        architecture: "GraniteForCausalLM",
        fixed: &[],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            SILU,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
            field(
                &["embedding_multiplier"],
                Meaning::Optional("embedding_multiplier"),
            ),
            field(
                &["attention_multiplier"],
                Meaning::Default("attention_multiplier", Given::Float(1.0)),
            ),
            field(
                &["residual_multiplier"],
                Meaning::Optional("residual_multiplier"),
            ),
            field(&["logits_scaling"], Meaning::Optional("logits_scaling")),
        ],
    },
    HfType {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        fixed: &[("bias", Given::Bool(false))],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(8)),
            ),
            HEAD_DIM,
            SILU,
            field(
                &["max_position_embeddings"],
                Meaning::Positions { slides: true },
            ),
            NORM_EPS,
            ROPE_THETA,
            TIED,
        ],
    },
    HfType {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        fixed: &[("bias", Given::Str("qkv"))],
        fields: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, SILU, POSITIONS, NORM_EPS,
            ROPE_THETA, SLIDES, TIED,
        ],
    },
    HfType {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        fixed: &[("qk_norm", Given::Bool(true)), ("bias", Given::Bool(false))],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            field(&["head_dim"], Meaning::Default("head_dim", Given::Int(128))),
            SILU,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            SLIDES,
            field(&["attention_bias"], Meaning::Off),
            TIED,
        ],
    },
];

/// The default width of the feed-forward layer is a multiple of this.
pub(super) const FFN_MULTIPLE: u64 = 256;

pub(super) fn check(m: &Model) -> Result<(), Conflict> {
    if m.head_dim.is_multiple_of(2) {
        return Ok(());
    }
    let message = format!(
        "the rotary embedding rotates pairs: the head dimension ({}) must be even",
        m.head_dim
    );
    Err(Conflict::new(&["head_dim", "heads", "hidden"], message))
}

struct Llama {
    embedding: Layer,
    blocks: Vec<Block>,
    norm: Layer,
    head: Layer,
}

struct Block {
    module: ModuleId,
    attention: Attention,
    mlp: Mlp,
}

pub(super) struct Attention {
    module: ModuleId,
    pub(super) norm: Layer,
    q: Layer,
    k: Layer,
    v: Layer,
    o: Layer,
    q_norm: Option<Layer>,
    k_norm: Option<Layer>,
}

pub(super) struct Mlp {
    module: ModuleId,
    pub(super) norm: Layer,
    w1: Layer,
    w3: Layer,
    w2: Layer,
}

impl Llama {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let names = ("tok_embeddings", "model.embed_tokens");
        let embedding = d.table(ROOT, names, ModuleKind::Embedding, [m.vocab, m.hidden]);
        let blocks = d.blocks(m, "model.layers", Block::new);
        let norm = d.norm(
            ROOT,
            ("norm", "model.norm"),
            m.hidden,
            false,
            Order::Declared,
        );
        let head = d.lm_head(embedding, "lm_head", m);
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
        Self {
            module,
            attention: Attention::new(d, module, m),
            mlp: Mlp::new(d, module, m),
        }
    }
}

impl Attention {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let (h, bias, qkv) = (m.hidden, m.bias == Bias::All, m.bias != Bias::None);
        let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
        let at = d.module(block, "attention", ModuleKind::Attention);
        let norm = d.norm(at, ("norm", "input_layernorm"), h, false, Order::First);
        let (wq, wk) = (
            d.linear(at, ("q", "self_attn.q_proj"), [q, h], qkv),
            d.linear(at, ("k", "self_attn.k_proj"), [kv, h], qkv),
        );
        let wv = d.linear(at, ("v", "self_attn.v_proj"), [kv, h], qkv);
        let wo = d.linear(at, ("o", "self_attn.o_proj"), [h, q], bias);
        let mut per_head = |ours, theirs| {
            let names = (ours, theirs);
            m.options
                .qk_norm
                .then(|| d.norm(at, names, m.head_dim, false, Order::Declared))
        };
        Self {
            module: at,
            norm,
            q: wq,
            k: wk,
            v: wv,
            o: wo,
            q_norm: per_head("q_norm", "self_attn.q_norm"),
            k_norm: per_head("k_norm", "self_attn.k_norm"),
        }
    }

    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        y: ValueId,
        rope: Rope,
    ) -> Attended {
        let (batch, seq) = (b.batch(), b.seq());
        let (heads, kv, hd) = (b.s.model.heads, b.s.model.kv_heads, b.s.model.head_dim);
        b.within(self.module, |b| {
            let project = |b: &mut Builder<'_>, layer, heads, norm: Option<Layer>| {
                let p = b.linear(layer, y);
                let mut p = b.g.reshape(p, &[batch, seq, heads, hd]);
                if let Some(norm) = norm {
                    p = b.rms_norm(norm, p);
                }
                b.g.transpose(p, 1, 2)
            };
            let q = project(b, self.q, heads, self.q_norm);
            let k = project(b, self.k, kv, self.k_norm);
            let v = project(b, self.v, kv, None);
            let (q_rope, k_rope) = (rope.rotate(b, q), rope.rotate(b, k));
            // `q, k = rope(q), rope(k)`: the unrotated ones live until both are done.
            b.g.release(q);
            b.g.release(k);
            let scale = b.s.model.options.attention_multiplier;
            let scale = scale.unwrap_or(1.0 / (hd as f64).sqrt());
            let a = b.scaled_attention([q_rope, k_rope, v], true, scale);
            let t = b.g.transpose(a, 1, 2);
            let t = b.g.reshape(t, &[batch, seq, heads * hd]);
            let o = b.linear(self.o, t);
            let o = scaled(b, o, b.s.model.options.residual_multiplier);
            Attended {
                sum: b.g.binary(OpKind::Add, x, o),
                locals: [q_rope, k_rope, v, a],
            }
        })
    }
}

/// Result of attention.
pub(super) struct Attended {
    /// The residual stream.
    pub(super) sum: ValueId,
    /// Local variables of the block's forward, which live until it returns.
    pub(super) locals: [ValueId; 4],
}

impl Mlp {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let (h, ffn, bias) = (m.hidden, m.ffn, m.bias == Bias::All);
        let at = d.module(block, "mlp", ModuleKind::Mlp);
        Self {
            module: at,
            norm: d.norm(
                at,
                ("norm", "post_attention_layernorm"),
                h,
                false,
                Order::First,
            ),
            w1: d.linear(at, ("w1", "mlp.gate_proj"), [ffn, h], bias),
            w3: d.linear(at, ("w3", "mlp.up_proj"), [ffn, h], bias),
            w2: d.linear(at, ("w2", "mlp.down_proj"), [h, ffn], bias),
        }
    }

    pub(super) fn forward(&self, b: &mut Builder<'_>, x: ValueId, y: ValueId) -> ValueId {
        b.within(self.module, |b| {
            let gate = b.linear(self.w1, y);
            let gate = b.g.unary(OpKind::Silu, gate);
            let up = b.linear(self.w3, y);
            let product = b.g.binary(OpKind::Mul, gate, up);
            let down = b.linear(self.w2, product);
            let down = scaled(b, down, b.s.model.options.residual_multiplier);
            b.g.binary(OpKind::Add, x, down)
        })
    }
}

impl Block {
    fn forward(&self, b: &mut Builder<'_>, x: ValueId, rope: Rope) -> ValueId {
        let y1 = b.rms_norm(self.attention.norm, x);
        let attended = self.attention.forward(b, x, y1, rope);
        let x1 = attended.sum;
        let y2 = b.rms_norm(self.mlp.norm, x1);
        b.g.release(y1);
        let out = self.mlp.forward(b, x1, y2);
        b.within(self.module, |b| {
            for v in attended.locals.into_iter().chain([x, x1, y2]) {
                b.g.release(v);
            }
        });
        out
    }
}

/// Returns `by * x`, without an op for a factor of 1.
pub(super) fn scaled(b: &mut Builder<'_>, x: ValueId, by: f64) -> ValueId {
    match by {
        1.0 => x,
        by => b.scale(x, by),
    }
}

/// Traces one micro-batch. The order of ops, views and local variables is that of the usual eager
/// PyTorch code.
impl Forward for Llama {
    fn forward(&self, b: &mut Builder<'_>) {
        let (ids, labels) = loss::tokens(b);
        let rope = Rope::tables(b, b.s.model.head_dim);
        let multiplier = b.s.model.options.embedding_multiplier;
        let h = b.embedding(self.embedding, ids);
        let mut h = b.within(ROOT, |b| scaled(b, h, multiplier));
        let rope = rope.cast(b);
        for block in &self.blocks {
            h = block.forward(b, h, rope);
        }
        let y = b.rms_norm(self.norm, h);
        let divisor = b.s.model.options.logits_scaling;
        let scale = (divisor != 1.0).then(|| 1.0 / divisor);
        loss::head_and_loss(b, self.head, y, labels, scale);
    }
}
