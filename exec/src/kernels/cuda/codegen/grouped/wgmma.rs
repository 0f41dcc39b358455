//! Grouped matmuls on Hopper's tensor cores, of 16-bit types (`wgmma.cuh`).

use super::super::hopper::{self, Map};
use super::super::tables::contiguous;
use super::super::{CodegenError, Module, Param, Request, ctype};
use super::{Grouped, Over};
use crate::base::element;
use shardlab_plan::ir::{DType, Place, Slot};

const KERNEL: &str = include_str!("wgmma.cuh");
/// Rows and columns of a box of a tensor copy: 128 bytes, the unit that is swizzled.
const PART: [u32; 2] = [64, 64];

/// Returns the shared memory of a block: four stages of both factors' tiles, half of a rounded
/// tile, barriers and the ring of tile numbers, and the first tile of each expert.
fn shared(experts: usize) -> u64 {
    let stages = 4 * ((16 << 10) + (32 << 10));
    stages + (32 << 10) + 256 + 4 * (experts as u64 + 1)
}

/// Returns whether the kernel does this one: factors of one 16-bit type, a result of that type or a
/// weight gradient in float32, at addresses that tensor copies take, not written over what is read.
pub(super) fn fits(req: &Request<'_>, of: &Grouped<'_>) -> Result<bool, CodegenError> {
    let (a, b, c) = (
        req.arg(of.a.place)?,
        req.arg(of.b.place)?,
        req.arg(of.c.place)?,
    );
    let ty = a.dtype;
    let typed = element::cuda(ty).wgmma.is_some() && ty.size() == 2;
    let one_type = b.dtype == ty && (c.dtype == ty || has_float_result(of, c.dtype));
    let aligned = of.is_aligned(req)? && c.align >= 16 && of.c.offset.is_multiple_of(8);
    let alone = |slot: &Slot| match slot.place {
        Place::Read(i) => matches!(req.same.get(usize::from(i)), None | Some(None)),
        _ => false,
    };
    let apart = alone(of.a) && alone(of.b) && matches!(of.c.place, Place::Write(_));
    let (m, k) = match of.over {
        Over::Columns { k, .. } => (1, k),
        Over::Rows { m } => (m, 1),
    };
    let sizes = [of.experts, of.rows, of.n, m, k];
    // Places in a matrix are counted in 32 bits.
    let counted = sizes.iter().all(|&x| (1..1 << 31).contains(&x));
    let room = shared(of.experts) <= u64::from(req.target.shared());
    Ok(req.target.has_wgmma() && typed && one_type && aligned && apart && counted && room)
}

/// Returns whether a result is a weight gradient in float32.
fn has_float_result(of: &Grouped<'_>, result: DType) -> bool {
    matches!(of.over, Over::Rows { .. }) && result == DType::F32
}

pub(super) fn generate(req: &Request<'_>, of: &Grouped<'_>) -> Result<Module, CodegenError> {
    let ty = req.arg(of.a.place)?.dtype;
    let map = |slot: &Slot, size: [usize; 2], stack: Option<usize>| Map {
        place: slot.place,
        first: slot.offset,
        dtype: ty,
        size: size.map(|x| x as u64),
        stack: stack.map(|x| x as u64),
        part: PART,
    };
    let float_result = has_float_result(of, req.arg(of.c.place)?.dtype);
    let (n, rows, stack) = (of.n, of.rows, Some(of.experts));
    // The parameters of the kernel after its operands, and `M`, `K`, `TB`, `WEIGHT_GRAD` and
    // `B_COLUMNS`.
    let (maps, [m, k, tb, weight_grad, b_columns]) = match of.over {
        Over::Columns { k, tb } => {
            let b = if tb { [k, n] } else { [n, k] };
            let maps = vec![
                ("a", map(of.a, [k, rows], None)),
                ("b", map(of.b, b, stack)),
            ];
            (maps, [0, k, tb.into(), 0, (!tb).into()])
        }
        Over::Rows { m } => {
            let mut maps = vec![
                ("a", map(of.a, [m, rows], None)),
                ("b", map(of.b, [n, rows], None)),
            ];
            if !float_result {
                maps.push(("c", map(of.c, [n, m], stack)));
            }
            (maps, [m, 0, 0, 1, 1])
        }
    };
    let (mut params, mut declared) = req.operands();
    for (name, map) in maps {
        params.push(Param::Map(map));
        declared.push(format!("const __grid_constant__ Map {name}"));
    }
    params.push(Param::Tickets);
    declared.push("u32* tickets".to_owned());
    let mut source = format!("typedef {} T;\n", ctype(ty));
    for (name, value) in [
        ("EXPERTS", of.experts),
        ("M", m),
        ("N", n),
        ("K", k),
        ("TB", tb),
        ("WEIGHT_GRAD", weight_grad),
        ("B_COLUMNS", b_columns),
        ("FLOAT_GRAD", float_result.into()),
    ] {
        source += &format!("#define {name} {value}u\n");
    }
    source += hopper::PRIMITIVES;
    source += &hopper::multiply(ty, weight_grad == 1, b_columns == 1)?;
    contiguous(req, of.a)?;
    contiguous(req, of.b)?;
    source += &KERNEL
        .replace("PARAMETERS", &declared.join(", "))
        .replace("OFFSETS", &of.offsets)
        .replace("RESULT", &contiguous(req, of.c)?);
    Ok(hopper::module(source, shared(of.experts) as u32, params))
}
