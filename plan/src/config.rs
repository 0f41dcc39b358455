//! The resolved scenario: every option has a value, and all combinations are valid.
//!
//! Values of these types come from [`scenario::load`](crate::scenario::load), which checks them.
//! Code that builds a value by hand (tests) must follow the rules of `scenario/validate.rs`.

#[macro_use]
mod words;

mod attention;
mod compile;
mod conformer;
mod context;
mod decoder;
mod documents;
mod embedding;
mod encoder;
mod experts;
mod expression;
mod float8;
mod fsdp;
mod gate;
mod head;
mod hybrid;
mod image;
mod latent;
mod layers;
mod lora;
mod mesh;
mod model;
mod module_selector;
mod moe;
mod param_groups;
pub(crate) mod pattern;
mod per_layer;
mod positions;
mod precision;
pub(crate) mod reach;
mod reconstruction;
mod rope;
mod routing;
mod row_shortage;
mod sound;
mod stages;
mod subsampling;
mod tokens;
mod train;
mod vision;

use crate::ir::{AxisId, DeviceMesh, Documents, PackedScales};
pub use attention::AttentionOptions;
pub use compile::{Compile, CompileMode, CudaGraph, MergeProjections, Scope};
pub use conformer::{Conformer, ConvolutionNorm, Distances};
pub use context::Context;
pub(crate) use decoder::ExpertCode;
pub use decoder::{
    Activation, AttnImplementation, Head, ImagePooling, Implementation, LayerType, Norm,
    NormPosition, PackedQkv, PositionEmbedding, QkNorm, Residual,
};
pub use documents::{DataDocuments, DocumentLengths, LengthDistribution, MeasuredLengths};
pub use embedding::Embeddings;
pub use encoder::TextEncoder;
pub use experts::{AuxLoss, Experts, Glu, Router};
pub use expression::{Expression, Patterns};
pub use float8::{Float8, Float8Format, Float8Recipe, Float8Saved};
pub use fsdp::{
    AllocatorKind, Atomic, Fsdp, GradientSync, IgnoredParams, Offload, OuterStrategy, PolicyKind,
    Prefetch, PrefetchList, Reshard, Strategy, UnitPattern, Units, Variant,
};
pub use gate::{Gate, GatePreset, GateProgram};
pub use head::OutputHead;
pub use hybrid::{AttentionGate, AttentionSinks, LinearAttention, MlpType, Rwkv, SharedBlock, Ssm};
pub use image::ImageEncoder;
pub use latent::{IndexerType, Latent};
pub use layers::LayerPattern;
pub use lora::{LayerAdapter, Lora, LoraTargets};
pub use mesh::Mesh;
pub use model::{Bias, Family, Model, ModelOptions};
pub use module_selector::ModuleSelector;
pub(crate) use module_selector::saves;
pub use moe::{Dispatcher, Moe, Overflow};
pub use param_groups::{GroupSettings, MAX_PARAM_GROUPS, ParamGroup};
pub use per_layer::{AltUp, PerLayer};
pub use positions::Positions;
pub use precision::{FrozenType, MomentType, Precision};
pub use reach::{NodeReach, Reach};
pub use reconstruction::Reconstruction;
pub use rope::{RopeScaling, RopeType};
pub use routing::{ForcedRouting, Histogram, Routing};
pub(crate) use routing::{busiest_ranks, loads, seeded};
pub use row_shortage::RowShortage;
use serde::Serialize;
pub use sound::Sound;
pub use stages::{Stage, Stages};
use std::path::PathBuf;
pub use subsampling::Subsampling;
pub use tokens::TokenWidth;
pub(crate) use train::chunk_by_size;
pub use train::{
    AttentionBackend, Loss, LrSchedule, MuonAdjustLr, Optimizer, Recompute, RecomputeLayers,
    RecomputeModule, SkippedBlocks, Train,
};
pub use vision::{LearnedRows, Projector, ProjectorNorm, TowerInput, Vision};
pub(crate) use words::Words;

/// A complete, checked scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scenario {
    /// The file's stem, or the name given by the caller.
    pub name: String,
    /// First comment lines of the file: what the scenario shows.
    pub about: String,
    /// `[model]`
    pub model: Model,
    /// The `config.json` that `model.preset` names, as a path from the working directory.
    #[serde(skip)]
    pub model_file: Option<PathBuf>,
    /// `[lora]`; `None` without adapters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// `[train]`
    pub train: Train,
    /// `[mesh]`
    pub mesh: Mesh,
    /// `[moe]`; `None` if there are no experts or each rank has all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe: Option<Moe>,
    /// `[moe]`: forced choices of experts that replace the routers'; `None` if the routers choose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forced_routing: Option<ForcedRouting>,
    /// `[fsdp]`
    pub fsdp: Fsdp,
    /// `[precision]`
    pub precision: Precision,
    /// `[compile]`
    pub compile: Compile,
    /// `[gate]`
    pub gate: Gate,
}

impl Scenario {
    /// Returns the implementation of the model's code.
    #[must_use]
    pub fn implementation(&self) -> Implementation {
        let default = match self.fsdp.policy {
            PolicyKind::Native => Implementation::Native,
            PolicyKind::Fsdp2 | PolicyKind::Megatron | PolicyKind::MegatronV2 => {
                Implementation::Torchtitan
            }
        };
        self.model.options.implementation.unwrap_or(default)
    }

    /// Returns the documents of a sequence as a layer's attention sees them: cut into chunks, if
    /// attention stays within chunks.
    ///
    /// # Panics
    /// Never panics: scenarios with documents and chunks that no pattern describes are rejected.
    #[must_use]
    pub fn documents(&self, layer: usize) -> Documents {
        let whole = self.train.documents();
        match self.model.chunk(layer, self.train.seq_len) {
            None => whole,
            Some(chunk) => (whole.cut(chunk)).expect("scenarios without a pattern are refused"),
        }
    }

    /// Returns the implementation of experts. Megatron-LM has separate kernels, which weight rows
    /// between the matmuls.
    #[must_use]
    pub(crate) fn expert_code(&self) -> ExpertCode {
        let chosen = self.model.options.implementation;
        let moves_rows = self
            .moe
            .as_ref()
            .is_some_and(|moe| moe.dispatcher.shares_rows());
        match self.implementation() {
            _ if moves_rows => ExpertCode::Rows,
            Implementation::Native => ExpertCode::Rows,
            Implementation::Transformers if self.moe.is_none() => ExpertCode::Transformers,
            _ if chosen.is_none() && self.fsdp.policy != PolicyKind::Fsdp2 => ExpertCode::Rows,
            Implementation::Transformers | Implementation::Torchtitan => ExpertCode::Torchtitan,
        }
    }

    /// Returns the layout of the scales of packed weights: transformers uses that of bitsandbytes,
    /// torchtitan and torchtune use that of torchao.
    #[must_use]
    pub(crate) fn packed_scales(&self) -> PackedScales {
        match self.implementation() {
            Implementation::Transformers => PackedScales::Replicated,
            Implementation::Torchtitan | Implementation::Native => PackedScales::Sharded,
        }
    }

    /// Returns the mesh with its axes.
    #[must_use]
    pub fn device_mesh(&self) -> DeviceMesh {
        let mesh = &self.mesh;
        let sub_shard = match self.fsdp.reshard_after_forward {
            Reshard::Group(ranks) => ranks,
            Reshard::Auto | Reshard::Always | Reshard::Never => 1,
        };
        DeviceMesh::new(&[
            (AxisId::DP_SHARD, mesh.dp_shard),
            (AxisId::DP_OUTER, mesh.dp_outer),
            (AxisId::SUB_SHARD, sub_shard),
            (AxisId::TP, mesh.tp),
            (AxisId::EP, mesh.ep),
        ])
    }

    /// Returns whether the optimizer's kernel sums the exchanged gradients. A single rank exchanges
    /// nothing.
    #[must_use]
    pub const fn sums_in_optimizer(&self) -> bool {
        self.fsdp.sum_in_optimizer && self.fsdp.copy_engine_reduce && self.mesh.dp_shard > 1
    }

    /// Returns the sharding strategy in the terms of the policy: `ZeRO-3 (FULL_SHARD)`, for
    /// Megatron-FSDP `ZeRO-3 (optim_grads_params)`.
    #[must_use]
    pub fn sharding(&self) -> String {
        let strategy = self.fsdp.strategy;
        let outer = self.mesh.dp_outer > 1;
        let replicated = outer && self.fsdp.outer_strategy == OuterStrategy::NoShard;
        let known = match self.fsdp.policy {
            PolicyKind::Megatron | PolicyKind::MegatronV2 => Some(strategy.name()),
            // HFSDP is not a strategy of torch.
            _ if outer && !replicated => None,
            _ => strategy.torch(replicated),
        };
        match known {
            Some(name) => format!("{} ({name})", strategy.zero()),
            None => strategy.zero().to_owned(),
        }
    }
}
