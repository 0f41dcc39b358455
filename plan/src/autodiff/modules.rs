//! The parts of blocks that selective recompute can name (`train.recompute_modules`).
//!
//! Source: `--recompute-modules` of Megatron-LM
//! (`megatron/core/transformer/transformer_config.py`).

use crate::config::RecomputeModule;
use crate::graph::{Act, Op};
use crate::ir::{Module, ModuleId, ModuleKind, OpKind};

/// Where a module is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The norm before attention or before the feed-forward layer.
    Norm,
    /// Attention, without the modules that it consists of.
    Attention,
    /// An up-projection of latent attention, or the norm before it.
    UpProjection,
    /// A dense feed-forward layer.
    Mlp,
    /// A layer of experts: its router and its sums.
    Moe,
    /// Its experts, without their projections.
    Experts,
    /// Its shared expert.
    SharedExpert,
    /// Anywhere else.
    Other,
}

/// Decides which ops belong to the parts that are recomputed.
#[derive(Debug)]
pub(super) struct Parts {
    parts: Vec<RecomputeModule>,
    /// Place of each module.
    places: Vec<Place>,
    /// Whether the attention that each module belongs to is latent.
    latent: Vec<bool>,
}

impl Parts {
    pub(super) fn new(parts: &[RecomputeModule], modules: &[Module]) -> Self {
        let places = (0..modules.len()).map(|i| place(modules, i)).collect();
        let latent = |i: usize| {
            let of = half(modules, i);
            of.is_some_and(|of| child(modules, of, "kv_b"))
        };
        Self {
            parts: parts.to_vec(),
            places,
            latent: (0..modules.len()).map(latent).collect(),
        }
    }

    /// Returns whether backward runs an op again. The results of all others are kept. Views are
    /// made again, which takes no time.
    pub(super) fn rerun(&self, op: &Op) -> bool {
        let at = op.module.index();
        let kind = match op.act {
            // A view that is not made again keeps what it is a view of.
            Act::View(_) => return true,
            Act::Compute(kind) => Some(kind),
            Act::Collective(_) => None,
        };
        let is = |part: &RecomputeModule| match (part, self.places[at]) {
            (RecomputeModule::LayerNorm, Place::Norm)
            | (RecomputeModule::MlaUpProj, Place::UpProjection)
            | (RecomputeModule::Mlp, Place::Mlp)
            | (RecomputeModule::SharedExperts, Place::SharedExpert)
            | (RecomputeModule::Moe, Place::Moe | Place::Experts | Place::SharedExpert) => true,
            (RecomputeModule::CoreAttn, Place::Attention) => kind.is_some_and(is_core),
            // Rotary embeddings, and the parts that they are joined with.
            (RecomputeModule::MlaUpProj, Place::Attention) => {
                self.latent[at] && kind.is_some_and(|k| !is_core(k) && k != OpKind::Copy)
            }
            (RecomputeModule::MoeAct, Place::Experts) => kind.is_some_and(is_activation),
            _ => false,
        };
        self.parts.iter().any(is)
    }
}

fn place(modules: &[Module], at: usize) -> Place {
    let Some(half) = half(modules, at) else {
        return Place::Other;
    };
    let module = &modules[at];
    let own = module.parent.map(ModuleId::index) == Some(half);
    let name = module.path.rsplit('.').next().unwrap_or_default();
    if own && module.kind == ModuleKind::Norm && name == "norm" {
        return Place::Norm;
    }
    if modules[half].kind == ModuleKind::Attention {
        return match name {
            _ if at == half => Place::Attention,
            "q_b" | "kv_b" | "q_a_norm" | "kv_a_norm" => Place::UpProjection,
            _ => Place::Other,
        };
    }
    if !child(modules, half, "experts") {
        return Place::Mlp;
    }
    let rest = module.path.strip_prefix(&*modules[half].path);
    match rest.and_then(|rest| rest.split('.').nth(1)) {
        Some("shared_expert") => Place::SharedExpert,
        Some("experts") if own => Place::Experts,
        _ => Place::Moe,
    }
}

/// Returns the attention or the feed-forward layer that a module is, or that it belongs to.
fn half(modules: &[Module], at: usize) -> Option<usize> {
    let parent = |i: &usize| modules[*i].parent.map(ModuleId::index);
    let mut outward = std::iter::successors(Some(at), parent);
    outward.find(|&i| matches!(modules[i].kind, ModuleKind::Attention | ModuleKind::Mlp))
}

/// Returns whether a module has a child with a name.
fn child(modules: &[Module], of: usize, name: &str) -> bool {
    let path = [&*modules[of].path, ".", name].concat();
    modules.iter().any(|m| *m.path == *path)
}

/// Returns whether an op of attention is neither a projection nor a rotary embedding.
fn is_core(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Attention(_)
            | OpKind::FlexAttention(_)
            | OpKind::BiasedAttention(_)
            | OpKind::MaskedAttention(_)
            | OpKind::SinkAttention(_)
            | OpKind::DocumentAttention(_)
            | OpKind::BatchedGemm
            | OpKind::Softmax
            | OpKind::Softcap(_)
            | OpKind::Dropout(_)
    )
}

/// Returns whether an op of experts is part of their activation, which multiplies by routing
/// weights as well.
fn is_activation(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Silu
            | OpKind::Gelu
            | OpKind::GeluErf
            | OpKind::Relu
            | OpKind::Sigmoid
            | OpKind::Mul
            | OpKind::Add
            | OpKind::Scale(_)
            | OpKind::Clamp(_)
            | OpKind::ScaleRows
    )
}
