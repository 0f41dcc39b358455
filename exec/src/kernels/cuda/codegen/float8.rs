//! Scales of tensors in 8 bits, and casts with a scale per block.

use super::tables::contiguous;
use super::{CodegenError, Entry, Module, Request, blocks, ctype, is_dense, numel};
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, DType, ScaleBlock, op};

const CAST_BLOCKS: &str = include_str!("float8.cuh");

/// Threads of the only block: the maxima of a tensor's rows are a few thousand numbers.
const THREADS: u32 = 1024;

/// Generates the scale of a tensor and its reciprocal from the maxima of its rows, of those before
/// the last offset if there are offsets; `most` is the largest number of the 8-bit type.
pub(in crate::kernels) fn scale(
    req: &Request<'_>,
    op: &BodyOp,
    most: &str,
) -> Result<Module, CodegenError> {
    let ([maxima, offsets @ ..], [scale, inverse]) = (&op.inputs[..], &op.outputs[..]) else {
        return Err(CodegenError::new("a scale lacks operands"));
    };
    if !is_dense(maxima) || numel(scale) != 1 || numel(inverse) != 1 {
        return Err(CodegenError::new("maxima have gaps, or scales are many"));
    }
    let (params, declared) = req.operands();
    let [maxima_at, scale_at, inverse_at] = [maxima, scale, inverse].map(|slot| req.address(slot));
    let rows = match offsets {
        [] => format!("{}u", numel(maxima)),
        [offsets] if numel(offsets) > 0 && req.arg(offsets.place)?.dtype == DType::I64 => {
            format!("(u32){}[{}]", contiguous(req, offsets)?, numel(offsets) - 1)
        }
        _ => return Err(CodegenError::new("an offset for each expert, and the end")),
    };
    let source = format!(
        "KERNEL({THREADS}) k0({}) {{
  __shared__ float sh[32];
  float m = 0.0f;
  const u32 rows = {rows};
  for (u32 i = threadIdx.x; i < rows; i += {THREADS}u) m = fmaxf(m, fabsf(up({}[i])));
  m = row_all<Amax, {THREADS}>(m, sh);
  if (threadIdx.x != 0) return;
  const float s = scale_({most}, m);
  down(s, {}[0]);
  down(1.0f / s, {}[0]);
}}
",
        declared.join(", "),
        maxima_at?,
        scale_at?,
        inverse_at?,
    );
    Ok(Module {
        source,
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid: [1, 1, 1],
            block: THREADS,
            shared: 0,
            params,
        }],
        scratch: 0,
    })
}

/// Generates codes with a scale per block, and the reciprocals of the scales; `most` is the largest
/// number of the 8-bit type.
pub(in crate::kernels) fn cast_blocks(
    req: &Request<'_>,
    op: &BodyOp,
    of: op::Float8CastBlocks,
    most: &str,
) -> Result<Module, CodegenError> {
    let ([x], [codes, inverses]) = (&op.inputs[..], &op.outputs[..]) else {
        return Err(CodegenError::new("a cast lacks operands"));
    };
    let square = match of.block {
        ScaleBlock::ROW => false,
        ScaleBlock::SQUARE => true,
        _ => return Err(CodegenError::new("blocks of 128 elements")),
    };
    let (mut rows, mut cols) = strides::matrix(x);
    if of.transposed {
        std::mem::swap(&mut rows, &mut cols);
    }
    let [down, across] = of.block.grid([rows as u64, cols as u64]);
    let is_grid = inverses.shape[..] == [down, across];
    if !req.arg(codes.place)?.dtype.is_float8() {
        return Err(CodegenError::new("codes of 8 bits"));
    }
    if !is_dense(x) || !is_dense(codes) || numel(codes) != rows * cols || !is_grid {
        return Err(CodegenError::new("a cast of a matrix with gaps"));
    }
    let (from, to) = (req.arg(x.place)?, req.arg(codes.place)?);
    let steps = strides::of(inverses);
    let aligned = |align: u8, slot: &shardlab_plan::ir::Slot, bytes: u64| {
        u64::from(align) >= bytes && (slot.offset * slot.dtype.size()).is_multiple_of(bytes)
    };
    let vectors = rows.is_multiple_of(4)
        && cols.is_multiple_of(4)
        && aligned(from.align, x, 4 * from.dtype.size())
        && aligned(to.align, codes, 4);
    let (params, declared) = req.operands();
    let mut source = format!(
        "typedef {} X;\ntypedef {} Y;\n#define MOST {most}\n",
        ctype(from.dtype),
        ctype(to.dtype)
    );
    for (name, value) in [("R", rows), ("C", cols), ("S0", steps[0]), ("S1", steps[1])] {
        source += &format!("#define {name} {value}ull\n");
    }
    for (name, flag) in [
        ("SQUARE", square),
        ("TURNED", of.transposed),
        ("VECTORS", vectors),
    ] {
        source += &format!("#define {name} {}\n", u8::from(flag));
    }
    source += &CAST_BLOCKS
        .replace("PARAMETERS", &declared.join(", "))
        .replace("FROM", &req.address(x)?)
        .replace("INVERSE", &req.address(inverses)?)
        .replace("TO ", &format!("{} ", req.address(codes)?));
    let high = if square { 128 } else { 32 };
    let grid = [blocks(cols, 128)?, blocks(rows, high)?, 1];
    if grid[1] > 0xffff {
        return Err(CodegenError::new("too many rows for one launch"));
    }
    Ok(Module {
        source,
        entries: vec![Entry {
            name: "k0".to_owned(),
            grid,
            block: 256,
            shared: 0,
            params,
        }],
        scratch: 0,
    })
}
