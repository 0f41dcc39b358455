//! The tape: what one micro-batch executes, before any sharding decision.
//!
//! `models`, `autodiff` and `compile` together turn a scenario into a tape: kernels in host issue
//! order, the storages they read and write, when each storage is allocated and freed, and the
//! boundaries of every module, to which `lower` attaches the sharding hooks. Parameters appear as
//! operands ([`Source`]); `lower` decides which buffer holds them.

use crate::ir::{
    Const, ConstId, DType, HostWorkKind, Kernel, KernelId, ModelCollective, Module, ModuleId,
    MoeStage, Operand, Param, ParamId, Source, Storage, StorageId,
};
use crate::units::Flops;
use serde::Serialize;
use std::collections::HashMap;

/// One entry of the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TapeOp {
    /// A module's forward (in [`Tape::forward`], [`Tape::eval`]) or backward (in
    /// [`Tape::backward`]) starts.
    Enter(ModuleId),
    /// It ends.
    Exit(ModuleId),
    /// A part of a layer of experts starts, which may be captured on its own.
    EnterStage {
        /// The part.
        stage: MoeStage,
        /// The layer.
        layer: ModuleId,
    },
    /// It ends. What a layer computes in one part need not be one stretch of the tape.
    ExitStage,
    /// A module's forward is run again inside backward.
    EnterRecompute(ModuleId),
    /// It ends.
    ExitRecompute(ModuleId),
    /// Allocate a storage.
    Alloc(StorageId),
    /// Free a storage.
    Free(StorageId),
    /// Launch a kernel; operands are ranges of [`Tape::operands`].
    Launch {
        /// Kernel.
        kernel: KernelId,
        /// First read operand.
        reads: u32,
        /// First write operand (`reads..writes` are read).
        writes: u32,
        /// End of the written operands (`writes..end` are written).
        end: u32,
    },
    /// Communicate along an axis; operands are entries of [`Tape::operands`].
    Collective {
        /// The collective.
        collective: ModelCollective,
        /// Element type.
        dtype: DType,
        /// The operand that is sent; the one that is received follows it, and what selects the rows
        /// that move.
        operands: u32,
    },
    /// The host waits until all kernels before have been done.
    HostRead,
    /// The host waits until this operand has been computed, because the sizes of what follows are
    /// in it.
    HostSizes {
        /// An entry of [`Tape::operands`].
        operand: u32,
    },
    /// Host work, `count` times.
    Host {
        /// Kind.
        kind: HostWorkKind,
        /// Repetitions.
        count: u16,
    },
    /// All contributions to this parameter's gradient of this micro-batch have been issued.
    GradReady(ParamId),
}

/// Passes of micro-batches that skip blocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Variant {
    /// Whether a module is part of a skipped block, by module.
    pub skipped: Vec<bool>,
    /// As [`Tape::forward`].
    pub forward: Vec<TapeOp>,
    /// As [`Tape::backward`].
    pub backward: Vec<TapeOp>,
    /// As [`Tape::model_flops`].
    pub model_flops: Flops,
}

/// One micro-batch. See the module documentation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tape {
    /// Module tree in pre-order.
    pub modules: Vec<Module>,
    /// Unique parameters in registration order.
    pub params: Vec<Param>,
    /// Storages.
    pub storages: Vec<Storage>,
    /// Inputs and tables.
    pub consts: Vec<Const>,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Operand arena.
    pub operands: Vec<Operand>,
    /// Training forward, which ends with the loss.
    pub forward: Vec<TapeOp>,
    /// Backward, including recompute.
    pub backward: Vec<TapeOp>,
    /// Validation forward: saves nothing.
    pub eval: Vec<TapeOp>,
    /// The loss of [`Tape::forward`], a float32 scalar that lives to the end of backward.
    pub loss: Option<StorageId>,
    /// The loss of [`Tape::eval`].
    pub eval_loss: Option<StorageId>,
    /// Model FLOPs of forward and backward of one micro-batch and rank, without recompute (for
    /// MFU).
    pub model_flops: Flops,
    /// Tokens (or samples, for families without tokens) of one micro-batch and rank.
    pub tokens: u64,
    /// Passes of micro-batches that skip blocks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variants: Vec<Variant>,
    /// Variant of every micro-batch, if it is one; empty if no micro-batch skips blocks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variant_of: Vec<Option<u16>>,
}

impl Tape {
    /// Returns the variant of a micro-batch, if it skips blocks.
    #[must_use]
    pub fn variant(&self, micro_batch: usize) -> Option<&Variant> {
        let of = self.variant_of.get(micro_batch).copied().flatten()?;
        Some(&self.variants[usize::from(of)])
    }

    /// Returns the training forward of a micro-batch.
    #[must_use]
    pub fn forward_of(&self, micro_batch: usize) -> &[TapeOp] {
        let variant = self.variant(micro_batch);
        variant.map_or(&self.forward, |v| &v.forward)
    }

    /// Returns the backward of a micro-batch.
    #[must_use]
    pub(crate) fn backward_of(&self, micro_batch: usize) -> &[TapeOp] {
        let variant = self.variant(micro_batch);
        variant.map_or(&self.backward, |v| &v.backward)
    }

    /// Returns the forwards and backwards of all variants.
    pub fn training(&self) -> impl Iterator<Item = &TapeOp> {
        let whole = self.forward.iter().chain(&self.backward);
        let variants = self.variants.iter();
        whole.chain(variants.flat_map(|v| v.forward.iter().chain(&v.backward)))
    }

    /// Returns the model FLOPs of the micro-batches of a step.
    #[must_use]
    pub(crate) fn step_flops(&self, micro_batches: u32) -> Flops {
        let of = |m| self.variant(m).map_or(self.model_flops, |v| v.model_flops);
        Flops((0..micro_batches as usize).map(|m| of(m).0).sum())
    }

    /// Adds the tape of the same model without some blocks, which `skipped` names by module, as a
    /// variant. Its loss is where the whole model's is.
    pub(crate) fn add_variant(&mut self, skipped: Vec<bool>, other: Self) -> u16 {
        let consts: Vec<ConstId> = other
            .consts
            .into_iter()
            .map(|c| {
                let known = self.consts.iter().position(|own| *own == c);
                ConstId(known.unwrap_or_else(|| {
                    self.consts.push(c);
                    self.consts.len() - 1
                }) as u32)
            })
            .collect();
        let mut known: HashMap<String, Vec<KernelId>> = HashMap::new();
        for (kernel, i) in self.kernels.iter().zip(0..) {
            let alike = known.entry(kernel.name.to_string()).or_default();
            alike.push(KernelId(i));
        }
        let mut intern = |kernel: Kernel| {
            let alike = known.entry(kernel.name.to_string()).or_default();
            let same = |id: &&KernelId| self.kernels[id.index()] == kernel;
            if let Some(id) = alike.iter().find(same) {
                return *id;
            }
            self.kernels.push(kernel);
            alike.push(KernelId(self.kernels.len() as u32 - 1));
            alike[alike.len() - 1]
        };
        let kernels: Vec<KernelId> = other.kernels.into_iter().map(&mut intern).collect();
        let first = self.storages.len() as u32;
        let (own_loss, other_loss) = (self.loss, other.loss);
        let storage = |s: StorageId| match (own_loss, other_loss) {
            (Some(own), Some(loss)) if loss == s => own,
            _ => StorageId(first + s.0),
        };
        self.storages.extend(other.storages);
        let base = self.operands.len() as u32;
        self.operands
            .extend(other.operands.into_iter().map(|o| Operand {
                source: match o.source {
                    Source::Storage(s) => Source::Storage(storage(s)),
                    Source::Const(c) => Source::Const(consts[c.index()]),
                    other => other,
                },
                ..o
            }));
        let moved = |op: TapeOp| match op {
            TapeOp::Alloc(s) => TapeOp::Alloc(storage(s)),
            TapeOp::Free(s) => TapeOp::Free(storage(s)),
            TapeOp::Launch {
                kernel,
                reads,
                writes,
                end,
            } => TapeOp::Launch {
                kernel: kernels[kernel.index()],
                reads: base + reads,
                writes: base + writes,
                end: base + end,
            },
            TapeOp::Collective {
                collective,
                dtype,
                operands,
            } => TapeOp::Collective {
                collective,
                dtype,
                operands: base + operands,
            },
            TapeOp::HostSizes { operand } => TapeOp::HostSizes {
                operand: base + operand,
            },
            other => other,
        };
        self.variants.push(Variant {
            skipped,
            forward: other.forward.into_iter().map(moved).collect(),
            backward: other.backward.into_iter().map(moved).collect(),
            model_flops: other.model_flops,
        });
        self.variants.len() as u16 - 1
    }
}
