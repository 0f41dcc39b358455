//! Storages of a micro-batch's tensors, before sharding.

use super::{ConstId, DType, ModuleId, ParamId, StorageId};
use crate::units::Bytes;
use serde::Serialize;

/// Contents of a storage, for the breakdown of a memory peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageRole {
    /// Saved in forward for backward.
    Saved,
    /// Lives within forward or within backward.
    Temporary,
    /// Logits and tensors of their shape in the loss.
    Logits,
    /// Gradient with respect to an activation.
    ActivationGrad,
}

/// One allocation of the tape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Storage {
    /// Size before allocator rounding.
    pub bytes: Bytes,
    /// Element type of its first use.
    pub dtype: DType,
    /// Role.
    pub role: StorageRole,
    /// Module that allocated it.
    pub module: ModuleId,
}

/// A tensor that exists for the whole run, or is an input of the step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Const {
    /// Name, for example `tokens`, `rope_cos`.
    pub name: &'static str,
    /// Size.
    pub bytes: Bytes,
    /// Element type.
    pub dtype: DType,
    /// Whether every micro-batch has a fresh buffer (tokens, labels), rather than one for the whole
    /// run (tables).
    pub per_micro_batch: bool,
}

/// What an operand refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A storage of the tape.
    Storage(StorageId),
    /// The full (unsharded) compute weight of a parameter.
    Param(ParamId),
    /// The full gradient of a parameter.
    Grad(ParamId),
    /// An input or table.
    Const(ConstId),
    /// The reciprocal of the scale of a parameter that is gathered in 8 bits, as a float32 scalar,
    /// or those of its blocks.
    Scale(ParamId),
    /// The codes of a parameter that is gathered in 8 bits whose scales belong to parts of columns.
    ColumnCodes(ParamId),
    /// The reciprocals of these scales.
    ColumnScale(ParamId),
}

/// A byte range that a kernel touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Operand {
    /// Source.
    pub source: Source,
    /// First byte within it.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}
