//! GEMMs with fused epilogue, by our own kernel for Hopper's tensor cores (`gemm_epilogue.cuh`).

use super::epilogue::{Epilogue, LANES};
use super::hopper::{self, Map, Multiplied};
use super::{Arg, CodegenError, Module, Param, Request, ctype};
use crate::kernels::cuda::gemm;
use shardlab_plan::ir::{BodyOp, OpKind, Place, op};

/// The kernel, without the parts that depend on the body.
const KERNEL: &str = include_str!("gemm_epilogue.cuh");
/// Shared memory of a block: three stages of both factors' tiles, a rounded tile, barriers and the
/// ring of tile numbers, and the padding for alignment.
const SHARED: u32 = 3 * ((16 << 10) + (32 << 10)) + (64 << 10) + 256 + 1024;
/// Elements of a tile's inner dimension: 128 bytes, the unit that tensor copies swizzle.
const STEP: u32 = 64;

/// Generates the kernel of a body that is GEMMs and their elementwise epilogue.
pub(super) fn generate(
    req: &Request<'_>,
    gemms: &[BodyOp],
    epilogue: &[BodyOp],
) -> Result<Module, CodegenError> {
    hopper::has_epilogues(req.target)?;
    let count = gemms.len();
    if count > 2 || epilogue.iter().any(|op| op.op.takes_epilogue()) {
        return Err(CodegenError::new("more GEMMs than tiles have room for"));
    }
    let (m, n, k, maps) = factors(req, gemms)?;
    let ty = maps[0].dtype;
    let tb = matches!(gemms[0].op, OpKind::Gemm(op::Gemm { tb: true, .. }));
    // Tiles, and rounds of tile numbers, are counted in 32 bits.
    if [m, n, k].iter().any(|&x| x >= 1 << 31) {
        return Err(CodegenError::new("a GEMM has too many rows or columns"));
    }
    let code = Epilogue::generate(req, (m * n) as usize, None)?;
    let (mut params, mut declared) = req.operands();
    for (map, name) in maps.into_iter().zip(["a", "b0", "b1"]) {
        params.push(Param::Map(map));
        declared.push(format!("const __grid_constant__ Map {name}"));
    }
    params.push(Param::Tickets);
    declared.push("u32* tickets".to_owned());
    let kernel = code.insert(&KERNEL.replace("PARAMETERS", &declared.join(", ")));
    let mut source = format!(
        "typedef {} T;\ntypedef {} IDX;\n#define M {m}\n#define N {n}\n#define K {k}\n#define PRODUCTS {count}\n#define TB {}\n#define AHEAD {}\n",
        ctype(ty),
        req.index(),
        u8::from(tb),
        code.ahead,
    );
    source += hopper::PRIMITIVES;
    source += &Multiplied::alike(ty, [false, !tb]).source()?;
    source += &kernel;
    Ok(hopper::module(source, SHARED, params))
}

/// Returns the size of the GEMM (rows, columns of one factor's result, inner dimension), and the
/// factors in memory.
fn factors(req: &Request<'_>, gemms: &[BodyOp]) -> Result<(u64, u64, u64, Vec<Map>), CodegenError> {
    let mut maps: Vec<Map> = Vec::new();
    let mut size = None;
    for op in gemms {
        let (p, o) = gemm::problem(req, op)?;
        let alike = p.factors == [p.result; 2] && p.result.size() == 2;
        let plain = !p.ta && alike && p.bias.is_none();
        let widths = [p.k, if p.tb { p.k } else { p.n }];
        let dense = p.pitch[0] == widths[0] && p.pitch[1] == widths[1];
        let whole = p.align[0] == 16
            && p.align[1] == 16
            && widths.iter().all(|w| w.is_multiple_of(LANES as u64))
            && p.n.is_multiple_of(LANES as u64);
        if !plain || p.accumulate || !dense || !whole {
            return Err(CodegenError::new(
                "factors are not in 16 bits, row after row, at addresses that tensor copies take",
            ));
        }
        let of = |(place, first): (Place, u64), size, part| Map {
            place,
            first,
            dtype: p.result,
            size,
            stack: None,
            part,
        };
        let a = of(o.a, [p.k, p.m], [STEP, 128]);
        let b = if p.tb {
            of(o.b, [p.k, p.n], [STEP, 128])
        } else {
            of(o.b, [p.n, p.k], [64, STEP])
        };
        for map in [&a, &b] {
            let Place::Read(i) = map.place else {
                return Err(CodegenError::new("a factor is made in the kernel"));
            };
            if req.same.get(usize::from(i)).is_some_and(Option::is_some) {
                return Err(CodegenError::new("a factor is written over"));
            }
        }
        match (maps.first(), size) {
            (None, _) => maps.push(a),
            (Some(first), Some(s)) if *first == a && s == (p.m, p.n, p.k) && p.tb => {}
            _ => {
                return Err(CodegenError::new(
                    "GEMMs of one kernel must have a factor in common",
                ));
            }
        }
        size = Some((p.m, p.n, p.k));
        maps.push(b);
    }
    let (m, n, k) = size.ok_or_else(|| CodegenError::new("not a matmul"))?;
    let fits = |a: &Arg| a.dtype == maps[0].dtype && a.align == 16;
    if m * n * k == 0 || !req.writes.iter().all(fits) {
        return Err(CodegenError::new("results are not of the factors' type"));
    }
    Ok((m, n, k, maps))
}
