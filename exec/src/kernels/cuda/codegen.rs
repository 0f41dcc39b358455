//! CUDA C++ for kernel bodies.
//!
//! A body becomes a few entry points (usually one) whose shapes are constants. Values are generated
//! on demand from the outputs backwards (`expr`), so that views, concatenations and broadcasts are
//! index arithmetic (`index`) and only outputs are written to memory. The code of each operation is
//! in `kernels/ops`.
//!
//! - `pointwise`: kernels over elements; `tiles`: those that write some results transposed;
//! - `rows`: kernels over rows whose statistics later operations need, which may also compute
//!   column sums of the same data;
//! - `columns`: sums over rows, channels or everything;
//! - `tables`: gathers and scatters;
//! - `dequantize`: packed weights;
//! - `entropy`: the chunked cross entropy;
//! - `float8`: scales of tensors in 8 bits;
//! - `convolution`, `attention`: fallbacks of library kernels;
//! - `route`, `balance`: routers and their losses;
//! - `permute`, `grouped`: rows in the order of experts, and their matmuls;
//! - `gemm_epilogue`: GEMMs with fused epilogue; `epilogue`: that code, also behind `grouped`;
//! - `hopper`: what kernels for the tensor cores of compute capability 9.0 share;
//! - `shard`: kernels of the sharding engine; `shard/float8` those of weights in 8 bits.
//!
//! Reductions have an order that depends on shapes alone. Every operation's result is rounded to
//! its slot's type, fused or not, as on the CPU.

pub(in crate::kernels) mod attention;
pub(in crate::kernels) mod balance;
pub(in crate::kernels) mod columns;
pub(in crate::kernels) mod convolution;
mod dependent;
pub(in crate::kernels) mod dequantize;
pub(in crate::kernels) mod entropy;
mod epilogue;
pub(in crate::kernels) mod expr;
pub(in crate::kernels) mod float8;
mod gemm_epilogue;
pub(in crate::kernels) mod grouped;
pub(super) mod hopper;
pub(in crate::kernels) mod index;
mod kept;
pub(in crate::kernels) mod lanes;
pub(in crate::kernels) mod permute;
mod pointwise;
pub(in crate::kernels) mod repeat;
pub(in crate::kernels) mod route;
pub(in crate::kernels) mod rows;
pub(crate) mod shard;
pub(in crate::kernels) mod tables;
#[cfg(test)]
mod tests;
mod tiles;

pub(super) use dependent::waiting;

use super::target::Target;
use crate::base::element;
use crate::kernels::ops::{self, CudaCode, float};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, Slot, UsedRows};

/// Common start of every source.
pub(super) const PREAMBLE: &str = include_str!("codegen/preamble.cuh");

/// An operand, as seen by the generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Arg {
    /// Element type of the buffer.
    pub(crate) dtype: DType,
    /// Alignment of its address in bytes, at most 16.
    pub(crate) align: u8,
}

/// A kernel body with the operands of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// Target of the code.
    pub(crate) target: Target,
    /// Operations.
    pub(crate) body: &'a [BodyOp],
    /// Rows that elementwise and row operations compute, if not all.
    pub(crate) used_rows: Option<&'a UsedRows>,
    /// Operands that are read.
    pub(crate) reads: &'a [Arg],
    /// Operands that are written.
    pub(crate) writes: &'a [Arg],
    /// For each read, the write that has the same memory; [`CLASH`] if it shares only part of its
    /// memory with one.
    pub(crate) same: &'a [Option<u8>],
}

/// Marks a write that shares some memory with a read without being the same.
pub(crate) const CLASH: u8 = u8::MAX;

/// Kind of an entry point's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Param {
    /// Address of a read.
    Read(u8),
    /// Address of a write.
    Write(u8),
    /// Address this many bytes into the launch's scratch memory.
    Scratch(u64),
    /// Address of [`TICKETS`] words by which the blocks of a launch determine which is the last.
    /// They are zero before and after it.
    Tickets,
    /// Address of the word that receives what is wrong with inputs: an id outside its range, or
    /// the rows of choices that find none.
    Fault,
    /// The number of the launch's instruction, for that word.
    Launch,
    /// Number of the rank among those that have samples of their own.
    DataRank,
    /// Tensor map of an operand: 128 bytes by value.
    Map(hopper::Map),
}

/// Words for finding the last block of a launch: what is left after the word for faults.
pub(crate) const TICKETS: usize = 62;

/// One launch of an entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Name.
    pub(crate) name: String,
    /// Number of blocks.
    pub(crate) grid: [u32; 3],
    /// Threads per block.
    pub(crate) block: u32,
    /// Dynamic shared memory per block, in bytes.
    pub(crate) shared: u32,
    /// Arguments.
    pub(crate) params: Vec<Param>,
}

/// A generated source and its launches, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// CUDA C++.
    pub(crate) source: String,
    /// Launches, in order.
    pub(crate) entries: Vec<Entry>,
    /// Bytes of scratch memory.
    pub(crate) scratch: u64,
}

/// Why the generator does not support a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct CodegenError {
    reason: String,
    /// Whether fewer lanes might work.
    lanes: bool,
}

impl CodegenError {
    pub(in crate::kernels) fn new(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            lanes: false,
        }
    }

    fn lanes() -> Self {
        Self {
            reason: "neighbouring elements do not stay together".to_owned(),
            lanes: true,
        }
    }
}

/// Refuses 8-bit floats where the target has none.
pub(crate) fn float8_of(
    target: Target,
    op: &BodyOp,
    mut types: impl Iterator<Item = DType>,
) -> Result<(), CodegenError> {
    if target.has_float8() || !types.any(DType::is_float8) {
        return Ok(());
    }
    let name = op.op.name();
    let message = format!("`{name}`: 8-bit floats need compute capability 8.9");
    Err(CodegenError::new(message))
}

/// Generates the kernel of a body.
pub(crate) fn generate(req: &Request<'_>) -> Result<Module, CodegenError> {
    for op in req.body {
        if let CudaCode::Absent(why) = ops::cuda(&op.op) {
            return Err(CodegenError::new(format!("`{}`: {why}", op.op.name())));
        }
        let slots = op.inputs.iter().chain(&op.outputs);
        float8_of(req.target, op, slots.map(|s| s.dtype))?;
    }
    let mut module = match req.body {
        [only] => alone(req, only)?,
        body => match BodyOp::split_gemm_epilogue(body) {
            Some(([gemm], epilogue)) if matches!(gemm.op, OpKind::GroupedGemm(_)) => {
                grouped::with_epilogue(req, gemm, epilogue)?
            }
            Some((gemms, epilogue)) => gemm_epilogue::generate(req, gemms, epilogue)?,
            None => fused(req)?,
        },
    };
    module.source = format!("{PREAMBLE}\n{}", module.source);
    Ok(module)
}

/// Generates the conversion of the gradient of a convolution's weights from the type of its
/// factors.
pub(crate) fn widen(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    let mut module = convolution::widen(req, op)?;
    module.source = format!("{PREAMBLE}\n{}", module.source);
    Ok(module)
}

/// Generates the kernel of a body that is one operation.
fn alone(req: &Request<'_>, op: &BodyOp) -> Result<Module, CodegenError> {
    match ops::cuda(&op.op) {
        CudaCode::Elementwise(_)
        | CudaCode::Copy
        | CudaCode::Cat(_)
        | CudaCode::Row(_)
        | CudaCode::Loss(_) => fused(req),
        CudaCode::Label(code) => code.labels_only(req, op).unwrap_or_else(|| fused(req)),
        CudaCode::Columns(_) => columns::generate(req, op),
        CudaCode::Kernel(generate) | CudaCode::Library(_, Some(generate)) => generate(req, op),
        CudaCode::Library(_, None) => Err(CodegenError::new("matmuls are library kernels")),
        CudaCode::Ranges(_) => Err(CodegenError::new("sharding kernels have no body")),
        CudaCode::Absent(why) => Err(CodegenError::new(why)),
    }
}

/// Generates a body of elementwise and row operations, with as many lanes as possible.
fn fused(req: &Request<'_>) -> Result<Module, CodegenError> {
    let narrow = req
        .reads
        .iter()
        .chain(req.writes)
        .any(|a| a.dtype.size() <= 2);
    let in_rows = rows::applies(req);
    // Tiles have one number of lanes. Where it does not suit a body, elements are written one by
    // one.
    if !in_rows
        && let Some(tiles) = tiles::Tiles::of(req)
        && let Ok(module) = tiles.generate(req)
    {
        return Ok(kept::guard(req, module));
    }
    let mut lanes = if narrow { 8 } else { 4 };
    loop {
        let made = if in_rows {
            rows::generate(req, lanes)
        } else {
            pointwise::generate(req, lanes)
        };
        match made {
            Err(refusal) if refusal.lanes && lanes > 1 => lanes /= 2,
            other => return Ok(kept::guard(req, other?)),
        }
    }
}

/// Returns the name of an element type in the generated code.
pub(in crate::kernels) const fn ctype(dtype: DType) -> &'static str {
    element::cuda(dtype).ctype
}

impl Request<'_> {
    pub(in crate::kernels) fn arg(&self, place: Place) -> Result<Arg, CodegenError> {
        let found = match place {
            Place::Read(i) => self.reads.get(usize::from(i)),
            Place::Write(i) => self.writes.get(usize::from(i)),
            Place::Register(_) => None,
        };
        let missing = || {
            CodegenError::new(format!(
                "the body uses {place:?}, which the launch does not have"
            ))
        };
        found.copied().ok_or_else(missing)
    }

    /// Returns a slot's address as C code, `at` elements further.
    pub(in crate::kernels) fn address(&self, slot: &Slot) -> Result<String, CodegenError> {
        self.arg(slot.place)?;
        let name = pointer(slot.place);
        Ok(if slot.offset == 0 {
            name
        } else {
            format!("({name} + {}ull)", slot.offset)
        })
    }

    /// Returns the C type of indices that reach every element of every slot.
    fn index(&self) -> &'static str {
        let slots = self
            .body
            .iter()
            .flat_map(|b| b.inputs.iter().chain(&b.outputs));
        let most = slots.map(index::extent).max().unwrap_or(0);
        if most < 1 << 31 { "u32" } else { "u64" }
    }

    /// Returns how many of how many rows the kernel computes, the first number in C; `None` if it
    /// computes all.
    fn used(&self) -> Result<Option<(String, usize)>, CodegenError> {
        let Some(of) = self.used_rows else {
            return Ok(None);
        };
        let (offsets, reserved) = (&of.offsets, of.reserved as usize);
        if self.arg(offsets.place)?.dtype != DType::I64 || numel(offsets) == 0 {
            return Err(CodegenError::new("an offset for each expert, and the end"));
        }
        let last = numel(offsets) - 1;
        let address = tables::contiguous(self, offsets)?;
        let used = format!("min((u32){address}[{last}], {reserved}u)");
        Ok(Some((used, reserved)))
    }

    /// Returns the C type of a slot's memory.
    fn memory(&self, slot: &Slot) -> Result<&'static str, CodegenError> {
        Ok(ctype(self.arg(slot.place)?.dtype))
    }

    /// Returns the parameters of an entry that takes all operands, and their declaration.
    fn operands(&self) -> (Vec<Param>, Vec<String>) {
        let mut params = Vec::new();
        let mut declared = Vec::new();
        for (i, arg) in self.reads.iter().enumerate() {
            params.push(Param::Read(i as u8));
            declared.push(format!("const {}* r{i}", ctype(arg.dtype)));
        }
        for (i, arg) in self.writes.iter().enumerate() {
            params.push(Param::Write(i as u8));
            declared.push(format!("{}* w{i}", ctype(arg.dtype)));
        }
        (params, declared)
    }
}

/// Returns the name of an operand's address.
fn pointer(place: Place) -> String {
    match place {
        Place::Read(i) => format!("r{i}"),
        Place::Write(i) => format!("w{i}"),
        Place::Register(i) => format!("reg{i}"),
    }
}

/// Returns whether a slot's elements are contiguous.
pub(super) fn is_dense(slot: &Slot) -> bool {
    index::is_contiguous(&index::dims(slot))
}

/// Returns the number of elements of a slot.
fn numel(slot: &Slot) -> usize {
    strides::numel(slot)
}

/// Returns how many blocks cover `n` items, `per` each.
pub(super) fn blocks(n: usize, per: usize) -> Result<u32, CodegenError> {
    u32::try_from(n.div_ceil(per))
        .ok()
        .filter(|&b| b < 1 << 31)
        .ok_or_else(|| CodegenError::new("too many blocks for one launch"))
}
