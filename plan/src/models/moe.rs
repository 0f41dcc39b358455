//! Mixtures of experts: Llama's blocks, with experts in place of some feed-forward layers (Mixtral,
//! Qwen2-MoE, Qwen3-MoE).

mod hf;
mod layer;
#[cfg(test)]
mod tests;

use super::build::Builder;
use super::declare::{Declare, Layer, Order, ROOT, Weights};
use super::llama::{self, Attention, FFN_MULTIPLE, Mlp};
use super::rope::Rope;
use super::spec::{Conflict, DEFAULT_SEQ_LEN, Defaults, FamilySpec, Inputs, Mask};
use super::{Forward, loss};
use crate::config::{AuxLoss, Bias, Family, Model, Router};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use layer::{Experts, Logits};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Moe,
    name: "moe",
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
        "experts",
        "top_k",
        "expert_ffn",
        "shared_expert_ffn",
        "shared_expert_gate",
        "dense_layers",
        "moe_every",
        "router",
        "normalize_top_k",
        "route_scale",
        "router_groups",
        "router_group_top_k",
        "aux_loss",
        "aux_loss_kind",
        "z_loss",
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
    hf: hf::TYPES,
    dimensions: |m| {
        vec![
            ("vocab", m.vocab),
            ("hidden", m.hidden),
            ("expert_ffn", layer::width(m)),
            ("heads x head_dim", m.heads * m.head_dim),
            ("kv_heads x head_dim", m.kv_heads * m.head_dim),
        ]
    },
    check,
    declare: |d, m| Box::new(Mixture::new(d, m)),
};

fn check(m: &Model) -> Result<(), Conflict> {
    llama::check(m)?;
    let e = &m.options.experts;
    let (experts, k, groups, kept) = (e.experts, e.top_k, e.router_groups, e.router_group_top_k);
    if m.bias == Bias::All {
        return Err(Conflict {
            help: Some("use false, or \"qkv\" for queries, keys and values"),
            ..Conflict::new(
                &["bias", "family"],
                "experts and routers have no bias".to_owned(),
            )
        });
    }
    if k > experts {
        let message = format!("`top_k` ({k}) is larger than `experts` ({experts})");
        return Err(Conflict::new(&["top_k", "experts"], message));
    }
    if !experts.is_multiple_of(groups) {
        let message =
            format!("`experts` ({experts}) is not divisible by `router_groups` ({groups})");
        return Err(Conflict::new(&["router_groups", "experts"], message));
    }
    if kept > groups {
        let message =
            format!("`router_group_top_k` ({kept}) is larger than `router_groups` ({groups})");
        return Err(Conflict::new(
            &["router_group_top_k", "router_groups"],
            message,
        ));
    }
    let choices = experts / groups * kept;
    if k > choices {
        let message = format!(
            "`top_k` ({k}) is larger than the {choices} experts of {kept} of {groups} groups"
        );
        return Err(Conflict::new(
            &["top_k", "router_group_top_k", "router_groups", "experts"],
            message,
        ));
    }
    if e.shared_expert_gate && e.shared_expert_ffn == 0 {
        let message = "`shared_expert_gate` needs a shared expert".to_owned();
        return Err(Conflict {
            help: Some("set shared_expert_ffn"),
            ..Conflict::new(&["shared_expert_gate", "shared_expert_ffn"], message)
        });
    }
    if !(0..u64::from(m.layers)).any(|layer| e.has(layer)) {
        let message = format!("none of the {} layers has experts", m.layers);
        return Err(Conflict {
            help: Some("family llama has dense layers only"),
            ..Conflict::new(&["dense_layers", "moe_every", "layers"], message)
        });
    }
    Ok(())
}

struct Mixture {
    embedding: Layer,
    blocks: Vec<Block>,
    norm: Layer,
    head: Layer,
}

struct Block {
    module: ModuleId,
    attention: Attention,
    feed_forward: FeedForward,
}

enum FeedForward {
    Dense(Mlp),
    Experts(Experts),
}

impl Mixture {
    fn new(d: &mut Declare, m: &Model) -> Self {
        let names = ("tok_embeddings", "model.embed_tokens");
        let embedding = d.table(ROOT, names, ModuleKind::Embedding, [m.vocab, m.hidden]);
        let blocks = d.blocks(m, "model.layers", Block::new);
        let of = &m.options.experts;
        if of.aux_loss > 0.0 || of.z_loss > 0.0 {
            // The losses of all routers are added up after the last block.
            d.blocks_differ();
        }
        let names = ("norm", "model.norm");
        let norm = d.norm(ROOT, names, m.hidden, false, Order::Declared);
        let head = d.lm_head(embedding, "lm_head", m);
        Self {
            embedding,
            blocks,
            norm,
            head,
        }
    }

    /// Adds the losses of the routers to what backward differentiates.
    fn router_losses(&self, b: &mut Builder<'_>, logits: &[Logits]) {
        let of = b.s.model.options.experts.clone();
        let batch = b.batch();
        let module = b.tree.loss();
        let mut terms = Vec::new();
        if of.aux_loss > 0.0 {
            let (parts, sequences, coefficient) = match of.aux_loss_kind {
                AuxLoss::Pooled => {
                    let all = logits.iter().map(|l| l.value).collect::<Vec<_>>();
                    let all = match all[..] {
                        [one] => one,
                        _ => b.within(module, |b| b.g.cat(&all, 0)),
                    };
                    let pooled = Logits { module, value: all };
                    (vec![pooled], 1, of.aux_loss)
                }
                AuxLoss::Layer => (logits.to_vec(), 1, of.aux_loss / of.top_k as f64),
                AuxLoss::Sequence => (logits.to_vec(), batch, of.aux_loss / of.top_k as f64),
            };
            let kind = OpKind::LoadBalance(op::LoadBalance {
                k: of.top_k,
                sequences,
                sigmoid: of.router == Router::Sigmoid,
                scale: Real(coefficient),
            });
            let counts = [sequences, of.experts];
            for part in parts {
                let of_part = b.within(part.module, |b| {
                    b.compute(kind, &[part.value], &[&[], &counts])
                });
                terms.push(of_part[0]);
            }
        }
        if of.z_loss > 0.0 {
            let kind = OpKind::ZLoss(op::ZLoss {
                scale: Real(of.z_loss),
            });
            for part in logits {
                let z = b.within(part.module, |b| b.compute(kind, &[part.value], &[&[]]));
                terms.push(z[0]);
            }
        }
        for term in terms {
            b.add_to_objective(term);
        }
    }
}

impl Block {
    fn new(d: &mut Declare, module: ModuleId, m: &Model) -> Self {
        let layer = d.layer() as u64;
        Self {
            module,
            attention: Attention::new(d, module, m),
            feed_forward: if m.options.experts.has(layer) {
                FeedForward::Experts(Experts::new(d, module, m))
            } else {
                FeedForward::Dense(Mlp::new(d, module, m))
            },
        }
    }

    /// Returns the residual stream, and the logits of the router if there is one.
    fn forward(&self, b: &mut Builder<'_>, x: ValueId, rope: Rope) -> (ValueId, Option<Logits>) {
        let y1 = b.rms_norm(self.attention.norm, x);
        let attended = self.attention.forward(b, x, y1, rope);
        let x1 = attended.sum;
        let norm = match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.norm,
            FeedForward::Experts(experts) => experts.norm,
        };
        let y2 = b.rms_norm(norm, x1);
        b.g.release(y1);
        let (out, logits) = match &self.feed_forward {
            FeedForward::Dense(mlp) => (mlp.forward(b, x1, y2), None),
            FeedForward::Experts(experts) => {
                let (out, logits) = experts.forward(b, x1, y2);
                (out, Some(logits))
            }
        };
        b.within(self.module, |b| {
            for v in attended.locals.into_iter().chain([x, x1, y2]) {
                b.g.release(v);
            }
        });
        (out, logits)
    }
}

/// Traces one micro-batch. The order of ops, views and local variables is that of the usual eager
/// PyTorch code.
impl Forward for Mixture {
    fn forward(&self, b: &mut Builder<'_>) {
        let (ids, labels) = loss::tokens(b);
        let rope = Rope::tables(b, b.s.model.head_dim);
        let mut h = b.embedding(self.embedding, ids);
        let rope = rope.cast(b);
        let mut routers = Vec::new();
        for block in &self.blocks {
            let (out, logits) = block.forward(b, h, rope);
            h = out;
            routers.extend(logits);
        }
        let y = b.rms_norm(self.norm, h);
        loss::head_and_loss(b, self.head, y, labels, None);
        self.router_losses(b, &routers);
    }
}
