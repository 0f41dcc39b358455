//! Packed weights, as matmuls read them.

use super::shard;
use super::tables::{contiguous, entry, lanes, slots};
use super::{CodegenError, Module, Request, blocks};
use crate::base::packed::NF4_TABLE;
use crate::kernels::ops::float;
use crate::kernels::strides;
use shardlab_plan::ir::{BodyOp, NF4_BLOCK, NF4_SCALES, Packed, PackedFormat, PackedScales, Slot};

/// Threads of a block.
const THREADS: usize = 256;

/// Generates `stored -> weight`: a thread reads the codes of some adjacent elements, which share a
/// scale. Every number is that of the CPU: multiplications and sums are rounded one by one.
pub(in crate::kernels) fn dequantize(
    req: &Request<'_>,
    op: &BodyOp,
    (format, scales): (PackedFormat, PackedScales),
) -> Result<Module, CodegenError> {
    let ([stored], [out]) = slots::<1, 1>(op)?;
    let packed = Packed {
        shape: out.shape.clone(),
        format,
        scales,
    };
    let numel = strides::numel(out);
    let align = alignment(req, stored)?;
    let codes_of = |l: usize| match format {
        PackedFormat::Nf4 | PackedFormat::Nf4F32 => l.div_ceil(2),
        PackedFormat::Int8 => l,
    };
    let mut l = lanes(req, numel, &[out])?;
    while l > 1 && !(align >= codes_of(l) as u64 && packed.scale_block().is_multiple_of(l as u64)) {
        l /= 2;
    }
    let (params, declared) = req.operands();
    let code = code(&packed, l, align);
    let source = format!(
        "{tables}KERNEL({THREADS}) k0({args}) {{
{before}  const u64 i = (blockIdx.x * {THREADS}ull + threadIdx.x) * {l}ull;
  if (i >= {numel}ull) return;
  const u8* stored = reinterpret_cast<const u8*>({stored});
  const u8* scales = stored + {codes}ull;
  const Pack<u8, {n}> codes = *reinterpret_cast<const Pack<u8, {n}>*>(stored + {first});
  const float scale = {scale};
  float x[{l}];
#pragma unroll
  for (int v = 0; v < {l}; v++) x[v] = {element};
  store({out} + i, x);
}}
",
        tables = code.tables,
        args = declared.join(", "),
        before = code.before,
        stored = contiguous(req, stored)?,
        codes = packed.code_bytes(),
        n = codes_of(l),
        first = code.first,
        scale = code.scale,
        element = code.element,
        out = contiguous(req, out)?,
    );
    let grid = [blocks(numel.div_ceil(l), THREADS)?, 1, 1];
    Ok(Module {
        source,
        entries: vec![entry("k0", grid, THREADS as u32, &params)],
        scratch: 0,
    })
}

/// Returns the bytes to which the stored weight is aligned.
fn alignment(req: &Request<'_>, stored: &Slot) -> Result<u64, CodegenError> {
    let arg = req.arg(stored.place)?;
    let at = stored.offset * arg.dtype.size();
    let fits = |bytes: &u64| u64::from(arg.align) >= *bytes && at.is_multiple_of(*bytes);
    Ok([16, 8, 4, 2].into_iter().find(fits).unwrap_or(1))
}

/// Parts of the kernel that depend on the format.
struct Code {
    /// Tables in the device's memory.
    tables: String,
    /// Statements of all threads of a block.
    before: String,
    /// Offset in bytes of the first code of a thread.
    first: &'static str,
    /// Scale of a thread's elements.
    scale: String,
    /// Element `v` of a thread.
    element: String,
}

/// Returns the parts of a kernel whose threads have `l` elements each. With one element, two
/// threads read halves of the same byte of NF4.
fn code(packed: &Packed, l: usize, align: u64) -> Code {
    // Scales follow whole numbers of four bytes.
    let at = |n: &str| match align {
        4.. => format!("reinterpret_cast<const float*>(scales)[{n}]"),
        _ => format!("float_at(scales, {n})"),
    };
    let unaligned = if align < 4 {
        "DEV float float_at(const u8* p, u64 n) { p += 4 * n; return __uint_as_float(p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24); }\n"
    } else {
        ""
    };
    if packed.format == PackedFormat::Int8 {
        let columns = packed.scale_block();
        return Code {
            tables: unaligned.to_owned(),
            before: String::new(),
            first: "i",
            scale: format!("__fdiv_rn({}, 127.0f)", at(&format!("i / {columns}ull"))),
            element: "__fmul_rn((float)(signed char)codes.e[v], scale)".to_owned(),
        };
    }
    let values: Vec<String> = NF4_TABLE.iter().map(|x| float(*x)).collect();
    let mut tables = format!(
        "{unaligned}__device__ const float NF4[16] = {{{}}};\n",
        values.join(", ")
    );
    let block = format!("i / {NF4_BLOCK}u");
    let scale = if packed.format == PackedFormat::Nf4F32 {
        at(&block)
    } else {
        tables += &shard::codebook("SIGNED", true);
        let factors = packed.factor_count();
        let code = format!("scales[{}ull + {block}]", 4 * factors + 4);
        let factor = at(&format!("i / {}u", NF4_BLOCK * NF4_SCALES));
        let mean = at(&format!("{factors}ull"));
        format!("__fadd_rn(__fmul_rn(SIGNED[{code}], {factor}), {mean})")
    };
    let half = match l {
        1 => "codes.e[0] >> (i & 1 ? 0 : 4) & 15",
        _ => "codes.e[v / 2] >> (v & 1 ? 0 : 4) & 15",
    };
    Code {
        tables,
        // Threads of a warp read different entries, which constant memory would serve in turn.
        before: "  __shared__ float table[16];\n  if (threadIdx.x < 16) table[threadIdx.x] = NF4[threadIdx.x];\n  __syncthreads();\n".to_owned(),
        first: "i / 2",
        scale,
        element: format!("__fmul_rn(table[{half}], scale)"),
    }
}
