//! GEMMs with fused epilogue, by our own kernel for Hopper's tensor cores (`gemm_epilogue.cuh`).

use super::expr::{Cached, Gen};
use super::hopper::{self, Map, Multiplied};
use super::index::{self, Index};
use super::{Arg, CodegenError, Module, Param, Request, ctype, grouped, numel};
use crate::kernels::cuda::gemm;
use shardlab_plan::ir::{BodyOp, OpKind, Place, Slot, op};

/// The kernel, without the parts that depend on the body.
const KERNEL: &str = include_str!("gemm_epilogue.cuh");
/// Shared memory of a block: three stages of both factors' tiles, a rounded tile, barriers and the
/// ring of tile numbers, and the padding for alignment.
const SHARED: u32 = 3 * ((16 << 10) + (32 << 10)) + (64 << 10) + 256 + 1024;
/// Elements of a vector in memory.
const LANES: usize = 8;
/// Elements of a tile's inner dimension: 128 bytes, the unit that tensor copies swizzle.
const STEP: u32 = 64;

/// Elementwise code behind GEMMs, by vectors of the results that they have rounded.
pub(super) struct Epilogue {
    /// Vectors of each operand that are read ahead.
    pub(super) ahead: usize,
    read: String,
    take: String,
    body: String,
}

impl Epilogue {
    /// Generates the code of a body that starts with GEMMs; results have this many elements. With
    /// `halves`, these are of two halves of the GEMM's columns, each of so many.
    pub(super) fn generate(
        req: &Request<'_>,
        elements: usize,
        halves: Option<u64>,
    ) -> Result<Self, CodegenError> {
        if let Some(i) = req.same.iter().position(|s| *s == Some(super::CLASH)) {
            return Err(CodegenError::new(format!("read {i} overlaps a result")));
        }
        let mut g = Gen::new(req, LANES, None);
        (g.cache, g.packs) = (Some(Vec::new()), Some(Default::default()));
        (g.keep_shared, g.halves) = (true, halves);
        let at = Index::elem(LANES);
        let mut values = Vec::new();
        for (i, op) in req.body.iter().enumerate() {
            for (o, slot) in op.outputs.iter().enumerate() {
                let parts = match halves {
                    Some(columns) if i == 0 => halves_of(slot, columns).to_vec(),
                    _ => vec![slot.clone()],
                };
                let whole = parts.iter().all(|part| numel(part) == elements);
                if !whole || !super::is_dense(slot) {
                    return Err(CodegenError::new(
                        "a result is not as large as the GEMM's, or not in its order",
                    ));
                }
                let mut later = req.body[i + 1..].iter().flat_map(|l| &l.outputs);
                if !matches!(slot.place, Place::Write(_)) || later.any(|s| s.place == slot.place) {
                    continue;
                }
                for part in parts {
                    let var = match halves {
                        Some(_) if i == 0 => g.read(&part, 1, &index::dims(&part), &at)?,
                        _ => g.output(i, o, &at)?,
                    };
                    values.push((part, var));
                }
            }
        }
        for (slot, var) in values {
            g.store(&slot, &at, &var)?;
        }
        let kept = g.cache.take().unwrap_or_default();
        // Vectors in flight: as many as fit into a writer's 120 registers in addition to the results.
        // On an H200 the gate's gradient of 8,192 x 8,192 takes 427 us with eight of each that it
        // reads, 435 with six, 447 with four; prefetching the tile into the second-level cache takes
        // longer.
        let room = 16 - 4 * req.writes.len().saturating_sub(2).min(3);
        let ahead = match kept.len() {
            0 => 4,
            reads => (room / reads).clamp(1, 8),
        };
        Ok(Self {
            ahead,
            read: kept.iter().map(|c| c.declared(ahead)).collect(),
            take: kept.iter().map(Cached::taken).collect(),
            body: g.code,
        })
    }

    /// Inserts the code into a kernel.
    pub(super) fn insert(&self, kernel: &str) -> String {
        kernel
            .replace("READ_AHEAD", &self.read)
            .replace("TAKE", &self.take)
            .replace("BODY", &self.body)
    }
}

/// Returns the two halves of a result's columns.
fn halves_of(slot: &Slot, columns: u64) -> [Slot; 2] {
    let rows = numel(slot) as u64 / (2 * columns).max(1);
    [0, columns].map(|first| Slot {
        offset: slot.offset + first,
        shape: [rows, columns].into_iter().collect(),
        strides: [2 * columns, 1].into_iter().collect(),
        ..slot.clone()
    })
}

/// Generates the kernel of a body that is GEMMs and their elementwise epilogue.
pub(super) fn generate(
    req: &Request<'_>,
    gemms: &[BodyOp],
    epilogue: &[BodyOp],
) -> Result<Module, CodegenError> {
    if !req.target.has_wgmma() {
        return Err(CodegenError::new(format!(
            "fused matmuls need sm_90a, not {}; set compile.gemm_epilogue_fusion = false",
            req.target
        )));
    }
    if let [
        gemm @ BodyOp {
            op: OpKind::GroupedGemm(_),
            ..
        },
    ] = gemms
    {
        return grouped::with_epilogue(req, gemm, epilogue);
    }
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
