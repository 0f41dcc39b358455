//! Code that kernels for Hopper's tensor cores share: TMA copies, barriers, and the instruction
//! that multiplies tiles in shared memory.
//!
//! Forms of instructions and of tiles in shared memory are those of the PTX ISA 9.0, "Asynchronous
//! Warpgroup Level Matrix Multiply-Accumulate Instructions" and "Strides of matrices in shared
//! memory".

use super::{CodegenError, Entry, Module, Param};
use crate::base::element;
use crate::kernels::cuda::target::Target;
use shardlab_plan::ir::{DType, Place};
use std::fmt::Write as _;

/// Functions for kernels whose results are of a 16-bit type `T`.
pub(super) const PRIMITIVES: &str = include_str!("hopper.cuh");
/// Multiprocessors of the target GPUs. On smaller GPUs, blocks that do not fit start late and find
/// no work.
const PROCESSORS: u32 = 132;

/// Refuses fused matmuls where our kernels cannot run.
pub(super) fn has_epilogues(target: Target) -> Result<(), CodegenError> {
    if target.has_wgmma() {
        return Ok(());
    }
    Err(CodegenError::new(format!(
        "fused matmuls need sm_90a, not {target}; set compile.gemm_epilogue_fusion = false"
    )))
}

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

/// Factors of the instruction that multiplies.
pub(super) struct Multiplied {
    /// Type of each.
    pub(super) types: [DType; 2],
    /// Whether the lines of a factor in shared memory run along the rows or columns of the result;
    /// those of 8-bit factors are of the inner dimension.
    pub(super) across: [bool; 2],
    /// Columns of the result.
    pub(super) columns: usize,
}

impl Multiplied {
    /// Returns factors of one type, for 256 columns.
    pub(super) fn alike(ty: DType, across: [bool; 2]) -> Self {
        Self {
            types: [ty; 2],
            across,
            columns: 256,
        }
    }

    /// Returns the instruction as the function `multiply`: 64 rows by 32 bytes of the inner
    /// dimension by the columns.
    ///
    /// # Errors
    /// Types that the instruction does not take.
    pub(super) fn source(&self) -> Result<String, CodegenError> {
        let name = |ty: DType| {
            let name = element::cuda(ty).wgmma;
            name.ok_or_else(|| CodegenError::new(format!("no wgmma of {ty}")))
        };
        let [a, b] = self.types;
        let (inner, sums) = (32 / a.size(), self.columns / 2);
        if a.size() != b.size() || inner == 32 && self.across != [false; 2] {
            return Err(CodegenError::new(format!("no wgmma of {a} and {b}")));
        }
        let list = |f: &dyn Fn(usize) -> String| (0..sums).map(f).collect::<Vec<_>>().join(", ");
        let mut out = format!(
            "DEV void multiply(float (&d)[{sums}], u64 a, u64 b, int more) {{
  asm volatile(\"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{}, 0;\\n\"
    \"wgmma.mma_async.sync.aligned.m64n{}k{inner}.f32.{}.{} {{{}}}, %{sums}, %{}, p, 1, 1",
            sums + 2,
            self.columns,
            name(a)?,
            name(b)?,
            list(&|i| format!("%{i}")),
            sums + 1,
        );
        if inner < 32 {
            let [a, b] = self.across.map(u8::from);
            let _ = write!(out, ", {a}, {b}");
        }
        let _ = write!(
            out,
            ";\\n}}\\n\"\n    : {}\n    : \"l\"(a), \"l\"(b), \"r\"(more));\n}}\n",
            list(&|i| format!("\"+f\"(d[{i}])"))
        );
        Ok(out)
    }
}
