//! Grouped matmuls on Hopper's tensor cores, of 16-bit and 8-bit types (`wgmma.cuh`).

use super::super::hopper::{self, Map, Multiplied};
use super::super::tables::{contiguous, entry};
use super::super::{Arg, CodegenError, Module, Param, Request, ctype, numel};
use super::{Grouped, Over};
use crate::base::element;
use shardlab_plan::ir::{DType, Place, Slot};
use shardlab_plan::program::workspace;

const KERNEL: &str = include_str!("wgmma.cuh");
/// Bytes of a row, and rows, of a box of a tensor copy; these bytes are the unit that is swizzled.
const PART: [u64; 2] = [128, 64];

/// Returns the shared memory of a block: four stages of both factors' tiles and half of a rounded
/// tile (a quarter in float32), or three and a whole one with an epilogue; barriers and the ring of
/// tile numbers, and the first tile of each expert.
fn shared(of: &Grouped<'_>) -> u64 {
    let (stages, rounded) = match of.epilogue.is_some() {
        true => (3, 64 << 10),
        false => (4, 32 << 10),
    };
    stages * ((16 << 10) + (32 << 10)) + rounded + 256 + 4 * (of.experts as u64 + 1)
}

/// Returns whether the kernel does this one: factors of one 16-bit type, a result of that type or a
/// weight gradient in float32, at addresses that tensor copies take, not written over what is read.
/// 8-bit factors have any 16-bit result.
pub(super) fn fits(req: &Request<'_>, of: &Grouped<'_>) -> Result<bool, CodegenError> {
    let (a, b) = (req.arg(of.a.place)?, req.arg(of.b.place)?);
    // Only an epilogue may read the result.
    let c = match of.c.place {
        Place::Register(_) if of.epilogue.is_some() => Arg {
            dtype: of.c.dtype,
            align: 16,
        },
        place => req.arg(place)?,
    };
    let has = |ty: DType, size: u64| element::cuda(ty).wgmma.is_some() && ty.size() == size;
    let typed = match of.scaled {
        Some(_) => has(a.dtype, 1) && has(b.dtype, 1),
        None => has(a.dtype, 2) && b.dtype == a.dtype,
    };
    let rounded = c.dtype == a.dtype || of.scaled.is_some() && has(c.dtype, 2);
    let result = rounded || has_float_result(of, c.dtype);
    let whole = of.n.is_multiple_of(8) && of.c.offset.is_multiple_of(8);
    let aligned = of.is_aligned(req)? && c.align >= 16 && whole;
    let alone = |slot: &Slot| match slot.place {
        Place::Read(i) => matches!(req.same.get(usize::from(i)), None | Some(None)),
        _ => false,
    };
    let apart = alone(of.a) && alone(of.b) && !matches!(of.c.place, Place::Read(_));
    let (m, k) = match of.over {
        Over::Columns { k, .. } => (1, k),
        Over::Rows { m } => (m, 1),
    };
    let sizes = [of.experts, of.rows, of.n, m, k];
    // Places in a matrix are counted in 32 bits.
    let counted = sizes.iter().all(|&x| (1..1 << 31).contains(&x));
    let room = shared(of) <= u64::from(req.target.shared());
    Ok(req.target.has_wgmma() && typed && result && aligned && apart && counted && room)
}

/// Returns whether a result is a weight gradient in float32.
fn has_float_result(of: &Grouped<'_>, result: DType) -> bool {
    matches!(of.over, Over::Rows { .. }) && result == DType::F32
}

pub(super) fn generate(req: &Request<'_>, of: &Grouped<'_>) -> Result<Module, CodegenError> {
    let types = [req.arg(of.a.place)?.dtype, req.arg(of.b.place)?.dtype];
    let c_type = match of.c.place {
        Place::Register(_) => of.c.dtype,
        place => req.arg(place)?.dtype,
    };
    let map = |slot: &Slot, dtype: DType, size: [usize; 2], stack: Option<usize>| Map {
        place: slot.place,
        first: slot.offset,
        dtype,
        size: size.map(|x| x as u64),
        stack: stack.map(|x| x as u64),
        part: [(PART[0] / dtype.size()) as u32, PART[1] as u32],
    };
    let float_result = has_float_result(of, c_type);
    let codes = of.scaled.is_some();
    let promote = of.scaled.as_ref().is_some_and(|scaled| !scaled.fast);
    let (n, rows, stack) = (of.n, of.rows, Some(of.experts));
    // The parameters of the kernel after its operands, and `M`, `K`, `TB` and `WEIGHT_GRAD`;
    // whether lines of the factors run along the rows and columns of the result.
    let (maps, [m, k, tb, weight_grad], across) = match of.over {
        Over::Columns { k, tb } => {
            let b = if tb { [k, n] } else { [n, k] };
            let maps = vec![
                ("a", map(of.a, types[0], [k, rows], None)),
                ("b", map(of.b, types[1], b, stack)),
            ];
            (maps, [0, k, tb.into(), 0], [false, !tb])
        }
        Over::Rows { m } => {
            let size = |outer| if codes { [rows, outer] } else { [outer, rows] };
            let maps = vec![
                ("a", map(of.a, types[0], size(m), None)),
                ("b", map(of.b, types[1], size(n), None)),
                ("c", map(of.c, c_type, [n, m], stack)),
            ];
            (maps, [m, 0, 0, 1], [!codes; 2])
        }
    };
    let (mut params, mut declared) = req.operands();
    for (name, map) in maps {
        params.push(Param::Map(map));
        declared.push(format!("const __grid_constant__ Map {name}"));
    }
    params.push(Param::Tickets);
    declared.push("u32* tickets".to_owned());
    if of.epilogue.as_ref().is_some_and(|e| e.code.dot.is_some()) {
        params.push(Param::Scratch(0));
        declared.push("float* dots".to_owned());
    }
    // A tile of float32 is not rounded.
    let rounded = if float_result { DType::Bf16 } else { c_type };
    let mut source = format!("typedef {} T;\n", ctype(rounded));
    for (name, value) in [
        ("EXPERTS", of.experts),
        ("M", m),
        ("N", n),
        ("K", k),
        ("TB", tb),
        ("WEIGHT_GRAD", weight_grad),
        ("A_COLUMNS", across[0].into()),
        ("B_COLUMNS", across[1].into()),
        ("FLOAT_GRAD", float_result.into()),
        ("CODES", codes.into()),
        ("PROMOTE", promote.into()),
        ("EPILOGUE", of.epilogue.is_some().into()),
        ("PAIRED", of.is_paired().into()),
    ] {
        source += &format!("#define {name} {value}u\n");
    }
    source += hopper::PRIMITIVES;
    let multiplied = Multiplied {
        types,
        across,
        columns: if promote { 128 } else { 256 },
    };
    source += &multiplied.source()?;
    contiguous(req, of.a)?;
    contiguous(req, of.b)?;
    let inverse = of.scaled.as_ref().map_or("1.0f", |scaled| &scaled.inverse);
    let mut kernel = KERNEL
        .replace("PARAMETERS", &declared.join(", "))
        .replace("OFFSETS", &of.offsets)
        .replace("INVERSE", inverse);
    match &of.epilogue {
        Some(epilogue) => {
            source += &format!(
                "typedef {} IDX;\n#define AHEAD {}\n",
                req.index(),
                epilogue.code.ahead
            );
            kernel = epilogue.code.insert(&kernel);
        }
        None => kernel = kernel.replace("RESULT", &contiguous(req, of.c)?),
    }
    source += &kernel;
    match of.epilogue.as_ref().and_then(|e| e.code.dot.as_ref()) {
        Some(dot) => with_dots(req, of, dot, (source, params), shared(of) as u32),
        None => Ok(hopper::module(source, shared(of) as u32, params)),
    }
}

/// Adds the kernel that adds up what tiles have of each row's dot product, and the memory between.
fn with_dots(
    req: &Request<'_>,
    of: &Grouped<'_>,
    dot: &Slot,
    (mut source, params): (String, Vec<Param>),
    shared: u32,
) -> Result<Module, CodegenError> {
    if numel(dot) != of.rows {
        return Err(CodegenError::new("a dot product for each row"));
    }
    let (mut own, mut declared) = req.operands();
    own.push(Param::Scratch(0));
    declared.push("const float* dots".to_owned());
    source += &format!(
        "
KERNEL(256) k1({}) {{
  const u32 r = blockIdx.x * 256 + threadIdx.x;
  if (r >= min((u32){}[EXPERTS], {}u)) return;
  float sum = 0.0f;
  for (u32 t = 0; t < ACROSS; t++) sum += dots[(u64)r * ACROSS + t];
  down(sum, {}[r]);
}}
",
        declared.join(", "),
        of.offsets,
        of.rows,
        contiguous(req, dot)?,
    );
    let mut module = hopper::module(source, shared, params);
    let blocks = of.rows.div_ceil(256) as u32;
    module.entries.push(entry("k1", [blocks, 1, 1], 256, &own));
    module.scratch = of.rows as u64 * (of.n as u64).div_ceil(workspace::GROUPED_COLUMNS) * 4;
    Ok(module)
}
