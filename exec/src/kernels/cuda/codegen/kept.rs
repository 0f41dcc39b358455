//! Reads that a kernel would overwrite before it has used them.
//!
//! An in-place update is safe if each thread writes only elements that it alone has read. If a body
//! reorders elements, or operands overlap in another way, the operand is copied to scratch memory
//! first.

use super::index::dims;
use super::{CLASH, Entry, Module, Param, Request, blocks};
use crate::kernels::ops::{self, CudaCode};
use crate::kernels::strides;
use shardlab_plan::ir::{Place, Slot};

/// Bytes that a thread copies at once.
const VECTOR: usize = 16;

fn slots<'a>(req: &Request<'a>) -> impl Iterator<Item = &'a Slot> {
    let body = req.body;
    body.iter()
        .flat_map(|op| op.inputs.iter().chain(&op.outputs))
}

/// Returns whether some operation uses a read, or what is made of it, in an order other than that
/// of its memory.
fn reorders(req: &Request<'_>, read: u8) -> bool {
    let mut of_it = vec![Place::Read(read)];
    let mut made: Vec<&Slot> = Vec::new();
    for op in req.body {
        let mut takes = op.inputs.iter().filter(|s| of_it.contains(&s.place));
        let otherwise = |slot: &Slot| {
            let by = made.iter().rev().find(|m| m.place == slot.place);
            by.is_some_and(|by| {
                (by.offset != slot.offset || dims(by) != dims(slot))
                    && strides::numel(by) == strides::numel(slot)
            })
        };
        if let Some(first) = takes.next() {
            let cat = matches!(ops::cuda(&op.op), CudaCode::Cat(_));
            if cat || otherwise(first) || takes.any(otherwise) {
                return true;
            }
            of_it.extend(op.outputs.iter().map(|s| s.place));
        }
        made.extend(&op.outputs);
    }
    false
}

/// Returns whether the body only makes equal parts, element by element, of those parts of the
/// written operand to which it writes them: a thread makes one element of every part (`pointwise`),
/// from the same elements, before it writes any.
fn rotates(req: &Request<'_>, read: u8, write: u8) -> bool {
    let Some((cat, before)) = req.body.split_last() else {
        return false;
    };
    let (CudaCode::Cat(axis), [first, ..], [out]) =
        (ops::cuda(&cat.op), &cat.inputs[..], &cat.outputs[..])
    else {
        return false;
    };
    let part = &first.shape;
    let strides = strides::of(out);
    let one = |s: &Slot| {
        let made = before.iter().flat_map(|op| &op.outputs);
        made.filter(|m| m.place == s.place).all(|m| m == s)
    };
    let registers = |s: &Slot| !matches!(s.place, Place::Register(_)) || s.shape == *part && one(s);
    let elementwise = before.iter().all(|op| {
        let local = |s: &Slot| matches!(s.place, Place::Register(_)) && s.shape == *part;
        let code = ops::cuda(&op.op);
        matches!(code, CudaCode::Elementwise(_) | CudaCode::Copy)
            && op.outputs.iter().all(local)
            && op.inputs.iter().all(registers)
    });
    let parts = cat.inputs.iter().all(|s| s.shape == *part && registers(s));
    let size = part.get(axis).map_or(0, |&n| n as usize * strides[axis]) as u64;
    let own = |s: &Slot| {
        let places = (0..cat.inputs.len() as u64).map(|p| out.offset + p * size);
        s.shape == *part && strides::of(s) == strides && places.into_iter().any(|p| p == s.offset)
    };
    let mut sources = req
        .body
        .iter()
        .flat_map(|op| &op.inputs)
        .filter(|s| s.place == Place::Read(read));
    out.place == Place::Write(write) && elementwise && parts && sources.all(own)
}

fn is_safe(req: &Request<'_>, read: u8, write: u8) -> bool {
    if write == CLASH {
        return false;
    }
    if reorders(req, read) {
        return rotates(req, read, write);
    }
    let Some(to) = slots(req).find(|s| s.place == Place::Write(write)) else {
        return true;
    };
    let mut sources = slots(req).filter(|s| s.place == Place::Read(read));
    sources.all(|s| s.offset == to.offset && dims(s) == dims(to))
}

/// Returns the number of elements from the operand's first to the last that the body touches.
fn extent(req: &Request<'_>, read: u8) -> u64 {
    let end = |s: &Slot| {
        let last: usize = dims(s).iter().map(|d| (d.n - 1) * d.stride).sum();
        s.offset + last as u64 + 1
    };
    let all = slots(req).filter(|s| s.place == Place::Read(read) && strides::numel(s) > 0);
    all.map(end).max().unwrap_or(0)
}

/// Makes a module copy the reads that it would overwrite.
pub(super) fn guard(req: &Request<'_>, mut module: Module) -> Module {
    let spoiled: Vec<u8> = (0..req.reads.len() as u8)
        .filter(|&r| {
            let same = req.same.get(usize::from(r)).copied().flatten();
            same.is_some_and(|w| !is_safe(req, r, w))
        })
        .collect();
    for r in spoiled {
        let bytes = extent(req, r) * req.reads[usize::from(r)].dtype.size();
        let at = module.scratch.next_multiple_of(16);
        module.scratch = at + bytes;
        for p in module.entries.iter_mut().flat_map(|e| &mut e.params) {
            if *p == Param::Read(r) {
                *p = Param::Scratch(at);
            }
        }
        let name = format!("keep{r}");
        module.source += &format!(
            "KERNEL(256) {name}(const u8* from, u8* to) {{
  const u64 i = (blockIdx.x * 256ull + threadIdx.x) * {VECTOR}ull;
  if (i + {VECTOR} <= {bytes}ull && ((u64)from & {mask}) == 0) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
  else for (u64 j = i; j < i + {VECTOR} && j < {bytes}ull; j++) to[j] = from[j];
}}
",
            mask = VECTOR - 1
        );
        if let Ok(grid) = blocks((bytes as usize).div_ceil(VECTOR), 256) {
            module.entries.insert(
                0,
                Entry {
                    name,
                    grid: [grid, 1, 1],
                    block: 256,
                    shared: 0,
                    params: vec![Param::Read(r), Param::Scratch(at)],
                },
            );
        }
    }
    module
}
