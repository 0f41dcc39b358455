//! `[train]`.

use super::pattern::{covers, matches};
use super::{DocumentLengths, ParamGroup};
use crate::ir::{Documents, UpdateRule};
use serde::{Deserialize, Serialize};

/// Activation recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Keep every saved tensor.
    None,
    /// Keep block inputs only; rerun the block's forward in backward.
    Full,
    /// Keep the results of GEMMs and attention; rerun the rest.
    Selective,
    /// Keep only tensors that no fused backward kernel can recompute from its other inputs.
    /// Requires compiled code.
    Pointwise,
}

words!(Recompute {
    None = "none",
    Full = "full",
    Selective = "selective",
    Pointwise = "pointwise",
});

/// A part of a block that selective recompute runs again, by the names of Megatron-LM's
/// `--recompute-modules`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecomputeModule {
    /// Attention without its projections.
    CoreAttn,
    /// The norms before attention and before the feed-forward layer.
    LayerNorm,
    /// The projections of latent attention from compressed to whole queries, keys and values, with
    /// their norms and rotary embeddings.
    MlaUpProj,
    /// Dense feed-forward layers.
    Mlp,
    /// Layers of experts: router, dispatch, experts and shared expert.
    Moe,
    /// The activation of experts.
    MoeAct,
    /// Shared experts.
    SharedExperts,
}

words!(RecomputeModule {
    CoreAttn = "core_attn",
    LayerNorm = "layernorm",
    MlaUpProj = "mla_up_proj",
    Mlp = "mlp",
    Moe = "moe",
    MoeAct = "moe_act",
    SharedExperts = "shared_experts",
});

/// Blocks to which [`Train::recompute`] applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecomputeLayers {
    /// All blocks, and modules outside of blocks.
    All,
    /// The first `n` blocks of the stack.
    First(u32),
    /// Blocks whose paths a glob covers.
    Patterns(Vec<String>),
}

/// Writes the value in the form of scenario files.
impl Serialize for RecomputeLayers {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => to.serialize_str("all"),
            Self::First(n) => to.serialize_u32(*n),
            Self::Patterns(globs) => globs.serialize(to),
        }
    }
}

impl RecomputeLayers {
    /// Returns whether block `number` of the stack, a module with this path, is one of these
    /// blocks.
    #[must_use]
    pub fn has(&self, number: u32, path: &str) -> bool {
        match self {
            Self::All => true,
            Self::First(n) => number < *n,
            Self::Patterns(globs) => globs.iter().any(|glob| covers(glob, path)),
        }
    }
}

/// How the cross entropy is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// All logits at once, as float32.
    Materialized,
    /// In chunks of rows, including the head and the gradients; there is no full logits tensor.
    Chunked,
    /// In chunks of rows, including the head; backward recomputes each chunk
    /// (`torch.utils.checkpoint`).
    CheckpointedChunks,
    /// In chunks of rows, including the head; each chunk's operations save what backward needs.
    SavedChunks,
    /// All logits, then the cross entropy in chunks of rows, one of which is in float32 at a time.
    SplitLogits,
}

impl Loss {
    /// Returns whether the head and the loss work on chunks of rows.
    #[must_use]
    pub(crate) const fn is_chunked(self) -> bool {
        !matches!(self, Self::Materialized)
    }
}

/// Largest size of the logits of a loss chunk that is chosen by size. With 128,256 tokens in the
/// vocabulary, chunks of 2,048 tokens in bfloat16 are below it.
const CHUNK_LOGITS: u64 = 512 << 20;
/// Smallest chunk that is chosen by size. Below it, matmuls of the head do not fill a GPU, and the
/// gradient of its weight is read and written too often.
const MIN_CHUNK: u64 = 1024;
/// Number of tokens of which chunks are multiples, so that matmuls have whole tiles.
const CHUNK_STEP: u64 = 256;

/// Returns the tokens per chunk of a chunked loss, chosen by size: as few chunks as possible, of
/// about equal numbers of tokens, whose logits take up to 512 MiB. `rows` is the number of tokens
/// of a micro-batch, and `row_bytes` the size of the logits of one of them.
pub(crate) fn chunk_by_size(rows: u64, row_bytes: u64) -> u64 {
    let chunks = rows.saturating_mul(row_bytes).div_ceil(CHUNK_LOGITS).max(1);
    let tokens = rows.div_ceil(chunks).next_multiple_of(CHUNK_STEP);
    tokens.max(MIN_CHUNK).min(rows.max(1))
}

words!(Loss {
    Materialized = "materialized",
    Chunked = "chunked",
    CheckpointedChunks = "checkpointed_chunks",
    SavedChunks = "saved_chunks",
    SplitLogits = "split_logits",
});

/// Backend of fused attention, by the names of `torch.nn.attention.SDPBackend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionBackend {
    /// cuDNN's.
    Cudnn,
    /// FlashAttention 2.
    Flash,
    /// CUTLASS's memory-efficient attention.
    Efficient,
    /// FlashAttention 1 in Triton, as used by training frameworks of 2022 and 2023.
    Triton,
}

words!(AttentionBackend {
    Cudnn = "cudnn",
    Flash = "flash",
    Efficient = "efficient",
    Triton = "triton",
});

/// Optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Optimizer {
    /// AdamW with decoupled weight decay; two moments per parameter.
    Adamw,
    /// Lion; one momentum per parameter.
    Lion,
    /// Plain SGD; no state.
    Sgd,
    /// Muon for the matrices of blocks, with one momentum; AdamW for everything else.
    Muon,
}

impl Optimizer {
    /// Returns the update rule; for Muon, that of the parameters that it leaves to AdamW.
    #[must_use]
    pub const fn rule(self) -> UpdateRule {
        match self {
            Self::Adamw | Self::Muon => UpdateRule::AdamW,
            Self::Lion => UpdateRule::Lion,
            Self::Sgd => UpdateRule::Sgd,
        }
    }
}

words!(Optimizer {
    Adamw = "adamw",
    Lion = "lion",
    Sgd = "sgd",
    Muon = "muon",
});

/// Factor of Muon's learning rate that depends on the shape of a matrix (`adjust_lr_fn`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MuonAdjustLr {
    /// `sqrt(max(1, rows / columns))`.
    #[default]
    Original,
    /// `0.2 * sqrt(max(rows, columns))`: updates are as large as AdamW's.
    MatchRmsAdamw,
}

words!(MuonAdjustLr {
    Original = "original",
    MatchRmsAdamw = "match_rms_adamw",
});

/// Learning rate schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LrSchedule {
    /// `lr` until the end.
    Constant,
    /// Half a cosine from `lr` at the end of the warm-up to `min_lr` at the last step.
    Cosine,
}

words!(LrSchedule {
    Constant = "constant",
    Cosine = "cosine",
});

/// An entry of `skipped_blocks`: blocks that some micro-batches skip, as with LayerDrop or
/// conditional branches. The input of a skipped block passes through unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedBlocks {
    /// Globs over block paths.
    #[serde(default)]
    pub blocks: Vec<String>,
    /// Micro-batches that skip the blocks, counted from 0; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<Vec<u32>>,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Train {
    /// Tokens per sample (rows per sample for `linear`; 1 for `cnn`).
    pub seq_len: u64,
    /// Lengths of the documents that a sequence is packed from.
    pub document_lengths: DocumentLengths,
    /// Samples per rank and micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per step.
    pub grad_accum: u32,
    /// Recompute.
    pub recompute: Recompute,
    /// Blocks to which recompute applies.
    pub recompute_layers: RecomputeLayers,
    /// Names of operations whose results selective recompute saves; `None`: matmuls, attention and
    /// convolutions.
    pub recompute_save: Option<Vec<String>>,
    /// Parts of blocks that selective recompute reruns, while it saves all other results; empty:
    /// `recompute_save` decides.
    pub recompute_modules: Vec<RecomputeModule>,
    /// Selective recompute reruns every n-th matmul of a block, although it saves the results of
    /// the others; 0: none.
    pub recompute_nth_matmul: u32,
    /// Blocks are recomputed by an autograd function that reruns the whole block and then runs a
    /// nested backward (`torch.utils.checkpoint` with `use_reentrant=True`).
    pub use_reentrant: bool,
    /// Saved activations are in host memory between forward and backward.
    pub activation_offload: bool,
    /// Eager selective recompute keeps all saved results until the block's forward is rerun,
    /// including those that backward does not need, as `create_selective_checkpoint_contexts` does.
    /// Compiled code only keeps results that backward needs.
    pub caches_unneeded: bool,
    /// Loss.
    pub loss: Loss,
    /// Rows per chunk of a chunked loss.
    pub loss_chunk_rows: u64,
    /// Whether the training loop holds the logits until the end of backward.
    pub keep_logits: bool,
    /// Attention backend; `None`: the one that PyTorch picks.
    pub attention_backend: Option<AttentionBackend>,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Peak learning rate.
    pub lr: f64,
    /// Steps over which the learning rate rises linearly to `lr`; 0 for none.
    pub warmup_steps: u32,
    /// Learning rate schedule after the warm-up.
    pub lr_schedule: LrSchedule,
    /// Learning rate at the end of a cosine schedule.
    pub min_lr: f64,
    /// AdamW betas.
    pub betas: [f64; 2],
    /// AdamW epsilon.
    pub eps: f64,
    /// Muon's momentum.
    pub muon_momentum: f64,
    /// Factor of Muon's learning rate.
    pub muon_adjust_lr: MuonAdjustLr,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Whether weight decay also applies to one-dimensional parameters.
    pub decay_norms_and_biases: bool,
    /// Groups of parameters with other settings; a parameter belongs to the first group that
    /// matches.
    pub param_groups: Vec<ParamGroup>,
    /// Global gradient norm limit; 0 turns clipping off.
    pub clip_norm: f64,
    /// Compute the global gradient norm even when nothing is clipped.
    pub grad_norm: bool,
    /// The host waits for the device at the end of every step.
    pub sync: bool,
    /// Steps of a run.
    pub steps: u32,
    /// Number of forward passes without gradients over each micro-batch's samples, before its own
    /// forward.
    pub no_grad_forwards: u32,
    /// One backward over the forwards of all micro-batches.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub joint_backward: bool,
    /// Blocks that some micro-batches skip.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped_blocks: Vec<SkippedBlocks>,
    /// Steps between validation forwards; 0 for none.
    pub validate_every: u32,
    /// Steps between reports of the norms of single parameters and gradients; 0 for none.
    pub param_norms_every: u32,
}

impl Train {
    /// Returns whether a micro-batch skips the block at a path.
    #[must_use]
    pub(crate) fn skips(&self, micro_batch: u32, path: &str) -> bool {
        self.skipped_blocks.iter().any(|s| {
            let now = s
                .micro_batches
                .as_ref()
                .is_none_or(|m| m.contains(&micro_batch));
            now && s.blocks.iter().any(|glob| matches(glob, path))
        })
    }

    /// Returns the documents of a sequence; [`Documents::NONE`] if the sequence is one document.
    #[must_use]
    pub fn documents(&self) -> Documents {
        self.document_lengths.in_sequence(self.seq_len)
    }
}
