//! What kernels for Hopper's tensor cores share: tensor copies, barriers, the instruction that
//! multiplies tiles in shared memory.
//!
//! Forms of instructions and of tiles in shared memory are those of the PTX ISA 9.0, "Asynchronous
//! Warpgroup Level Matrix Multiply-Accumulate Instructions" and "Strides of matrices in shared
//! memory".

use super::{CodegenError, Entry, Module, Param};
use crate::base::element;
use shardlab_plan::ir::{DType, Place};
use std::fmt::Write as _;

/// Functions for kernels of a 16-bit type `T`.
pub(super) const PRIMITIVES: &str = include_str!("hopper.cuh");
/// Multiprocessors of the target GPUs. On smaller GPUs, blocks that do not fit start late and find
/// no work.
const PROCESSORS: u32 = 132;

/// A matrix in memory, as tensor copies address it: rows without gaps, in boxes of some rows and
/// columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Map {
    /// Operand.
    pub(crate) place: Place,
    /// Its first element there.
    pub(crate) first: u64,
    /// Element type.
    pub(crate) dtype: DType,
    /// Columns and rows.
    pub(crate) size: [u64; 2],
    /// Number of such matrices, if there are several, one after another. A copy names one of them,
    /// and ends at its edges.
    pub(crate) stack: Option<u64>,
    /// Columns and rows of a box.
    pub(crate) part: [u32; 2],
}

/// Returns a module whose blocks, one per multiprocessor, share all tiles of a result.
pub(super) fn module(source: String, shared: u32, params: Vec<Param>) -> Module {
    Module {
        source,
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid: [PROCESSORS, 1, 1],
            block: 384,
            shared,
            params,
        }],
        scratch: 0,
    }
}

/// Returns the instruction that multiplies 64 rows by 16 by 256 columns, as the function
/// `multiply`. The lines of a factor in shared memory are of its inner dimension, or run along the
/// rows of the result (`a_columns`) or its columns (`b_columns`).
pub(super) fn multiply(
    ty: DType,
    a_columns: bool,
    b_columns: bool,
) -> Result<String, CodegenError> {
    let name = element::cuda(ty).wgmma;
    let name = name.ok_or_else(|| CodegenError::new(format!("no wgmma of {ty}")))?;
    let mut out = String::from(
        "DEV void multiply(float (&d)[128], u64 a, u64 b, int more) {\n  asm volatile(\"{\\n.reg .pred p;\\nsetp.ne.b32 p, %130, 0;\\n\"\n    \"wgmma.mma_async.sync.aligned.m64n256k16.f32.",
    );
    let _ = write!(out, "{name}.{name} {{");
    let list = |f: &dyn Fn(usize) -> String| (0..128).map(f).collect::<Vec<_>>().join(", ");
    out += &list(&|i| format!("%{i}"));
    let _ = write!(
        out,
        "}}, %128, %129, p, 1, 1, {}, {};\\n}}\\n\"\n    : {}\n    : \"l\"(a), \"l\"(b), \"r\"(more));\n}}\n",
        u8::from(a_columns),
        u8::from(b_columns),
        list(&|i| format!("\"+f\"(d[{i}])"))
    );
    Ok(out)
}
