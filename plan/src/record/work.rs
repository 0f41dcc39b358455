//! Kinds of device work.

use crate::ir::{CollectiveKind, InstrId, KernelClass};
use crate::program::{Op, Program};
use serde::{Deserialize, Serialize};

/// Kind of device work, for breakdowns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// GEMMs and convolutions.
    Gemm,
    /// Fused attention.
    Attention,
    /// Norms, pointwise operations, softmax, embeddings: bound by memory bandwidth.
    Memory,
    /// Copies into and out of communication buffers, inputs from the host, casts, fills.
    Copy,
    /// Optimizer and gradient norm.
    Optimizer,
    /// All-gathers.
    AllGather,
    /// Reduce-scatters.
    ReduceScatter,
    /// All-reduces.
    AllReduce,
    /// Other collectives.
    OtherCollective,
}

impl Work {
    /// Returns the kind of an instruction; `None` if it does not run on a device stream.
    #[must_use]
    pub fn of(program: &Program, instr: InstrId) -> Option<Self> {
        Some(match program.instrs[instr.index()].op {
            Op::Launch { kernel, .. } => match program.kernels[kernel.index()].class {
                KernelClass::Gemm { .. }
                | KernelClass::Conv { .. }
                | KernelClass::GroupedGemm { .. } => Self::Gemm,
                KernelClass::Attention { .. } => Self::Attention,
                KernelClass::Copy | KernelClass::MultiCopy | KernelClass::Fill => Self::Copy,
                KernelClass::Optimizer | KernelClass::FullReduce => Self::Optimizer,
                _ => Self::Memory,
            },
            Op::Collective { id, .. } => match program.collectives[id.index()].kind {
                CollectiveKind::AllGather => Self::AllGather,
                CollectiveKind::ReduceScatter => Self::ReduceScatter,
                CollectiveKind::AllReduce => Self::AllReduce,
                _ => Self::OtherCollective,
            },
            Op::Copy { .. } => Self::Copy,
            _ => {
                program.upload(instr)?;
                Self::Copy
            }
        })
    }

    /// Returns the name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gemm => "gemm",
            Self::Attention => "attention",
            Self::Memory => "memory_bound",
            Self::Copy => "copy",
            Self::Optimizer => "optimizer",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::OtherCollective => "other_collective",
        }
    }

    /// Every kind, in display order.
    pub const ALL: [Self; 9] = [
        Self::Gemm,
        Self::Attention,
        Self::Memory,
        Self::Copy,
        Self::Optimizer,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::OtherCollective,
    ];

    /// Returns whether it is communication.
    #[must_use]
    pub const fn is_collective(self) -> bool {
        matches!(
            self,
            Self::AllGather | Self::ReduceScatter | Self::AllReduce | Self::OtherCollective
        )
    }
}
