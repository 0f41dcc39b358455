//! Kernels over elements: one thread for a few adjacent ones.

use super::expr::{Cached, Gen, Var};
use super::index::{self, Index};
use super::{CodegenError, Entry, Module, Request, blocks, numel};
use crate::kernels::ops::copy::is_integer_copy;
use crate::kernels::ops::{self, CudaCode};
use shardlab_plan::ir::{DType, Place, Slot};

/// Threads of a block.
const THREADS: usize = 256;
/// Number of threads that fill a large GPU: fewer find shared operands in a cache, in any order.
const ENOUGH: usize = 128 << 10;

/// An output in memory, and how its elements are made.
#[derive(Clone, Copy)]
enum Job {
    /// Each from its dependencies: output `o` of operation `i`.
    Pull(usize, usize),
    /// From the parts of a concatenation of equal ones, element by element of a part, so that
    /// operands shared by the parts are read once; through a copy into another order, if there is
    /// one.
    Push { cat: usize, copy: Option<usize> },
}

impl Job {
    fn new(req: &Request<'_>, i: usize, o: usize) -> Self {
        let body = req.body;
        let equal = |at: usize| {
            let op = &body[at];
            matches!(ops::cuda(&op.op), CudaCode::Cat(_))
                && op.inputs.iter().all(|s| s.shape == op.inputs[0].shape)
        };
        if equal(i) {
            return Self::Push { cat: i, copy: None };
        }
        if let (CudaCode::Copy, [from]) = (ops::cuda(&body[i].op), &body[i].inputs[..])
            && matches!(from.place, Place::Register(_))
            && let Some(w) = (0..i)
                .rev()
                .find(|&w| body[w].outputs.iter().any(|s| s.place == from.place))
            && equal(w)
            && super::is_dense(&body[w].outputs[0])
            && from.offset == body[w].outputs[0].offset
            && numel(from) == numel(&body[w].outputs[0])
        {
            return Self::Push {
                cat: w,
                copy: Some(i),
            };
        }
        Self::Pull(i, o)
    }

    /// Returns the shape that threads walk over.
    fn shape<'a>(self, req: &Request<'a>) -> &'a [u64] {
        match self {
            Self::Pull(i, o) => &req.body[i].outputs[o].shape,
            Self::Push { cat, .. } => &req.body[cat].inputs[0].shape,
        }
    }
}

/// Generates a body of elementwise operations: an entry for all outputs over the same number of
/// elements.
pub(super) fn generate(req: &Request<'_>, lanes: usize) -> Result<Module, CodegenError> {
    if let Some(module) = integers(req)? {
        return Ok(module);
    }
    let mut jobs: Vec<(usize, Vec<Job>)> = Vec::new();
    for (i, op) in req.body.iter().enumerate() {
        for (o, slot) in op.outputs.iter().enumerate() {
            let again = req.body[i + 1..].iter();
            let last = !again
                .flat_map(|l| &l.outputs)
                .any(|s| s.place == slot.place);
            if !matches!(slot.place, Place::Write(_)) || numel(slot) == 0 || !last {
                continue;
            }
            let job = Job::new(req, i, o);
            let n = job.shape(req).iter().product::<u64>() as usize;
            match jobs.iter_mut().find(|j| j.0 == n) {
                Some(j) => j.1.push(job),
                None => jobs.push((n, vec![job])),
            }
        }
    }
    let mut module = Module {
        source: String::new(),
        entries: Vec::new(),
        scratch: 0,
    };
    for (k, (n, jobs)) in jobs.iter().enumerate() {
        let n = *n;
        let mut lanes = lanes;
        while !n.is_multiple_of(lanes) {
            lanes /= 2;
        }
        let walk = Walk::new(req, jobs, lanes);
        let mut g = Gen::new(req, lanes, None);
        if walk.is_some() {
            // All is read before anything is computed.
            (g.cache, g.keep_shared) = (Some(Vec::new()), true);
        }
        let mut values = Vec::new();
        for job in jobs {
            make(&mut g, *job, lanes, &mut values)?;
        }
        for (slot, at, var) in values {
            g.store(slot, &at, &var)?;
        }
        let name = format!("k{k}");
        let (params, declared) = req.operands();
        let index = req.index();
        let mut head = match walk {
            None => format!(
                "  const {index} i = (({index})blockIdx.x * {THREADS}u + threadIdx.x) * {lanes}u;\n  if (i >= {n}u) return;\n"
            ),
            Some(w) => format!(
                "  const {index} t = ({index})blockIdx.x * {THREADS}u + threadIdx.x;\n  if (t >= {}u) return;\n  const {index} i = {};\n  const int k = 0;\n",
                n / lanes,
                w.element(lanes)
            ),
        };
        if let Some((used, reserved)) = req.used()? {
            if !n.is_multiple_of(reserved) {
                return Err(CodegenError::new("results without the rows of experts"));
            }
            // A vector may reach into the next row, which no one uses.
            head += &format!("  if (i >= {used} * ({index}){}u) return;\n", n / reserved);
        }
        let kept = g.cache.take().unwrap_or_default();
        head.extend(kept.iter().map(|c| c.declared(1)));
        head.extend(kept.iter().map(Cached::taken));
        module.source += &format!(
            "KERNEL({THREADS}) {name}({}) {{\n{head}{}}}\n",
            declared.join(", "),
            g.code
        );
        module.entries.push(Entry {
            name,
            grid: [blocks(n, THREADS * lanes)?, 1, 1],
            block: THREADS as u32,
            shared: 0,
            params,
        });
    }
    // Concatenations of unequal parts count in it.
    if module.source.contains("IDX") {
        let index = req.index();
        module.source = format!("typedef {index} IDX;\n{}", module.source);
    }
    Ok(module)
}

/// Order in which threads walk over elements if some operand has fewer: threads that share its
/// elements are adjacent. `[outer, repeats, rows, inner]` in the order of the elements becomes
/// `[outer, rows, repeats, inner]`.
#[derive(Clone, Copy, Debug)]
struct Walk {
    repeats: usize,
    rows: usize,
    inner: usize,
}

impl Walk {
    fn new(req: &Request<'_>, jobs: &[Job], lanes: usize) -> Option<Self> {
        let shape = jobs.first()?.shape(req);
        let n = shape.iter().product::<u64>() as usize;
        let below = req.body.iter().find_map(|op| {
            let to = &op.outputs.first()?.shape;
            let fewer =
                |s: &&Slot| matches!(s.place, Place::Read(_)) && numel(s) < n && numel(s) > 1;
            let slot = op.inputs.iter().find(fewer)?;
            if to.iter().product::<u64>() as usize != n {
                return None;
            }
            let dims = index::broadcast(slot, to).ok()?;
            let still = dims.iter().position(|d| d.stride == 0)?;
            Some(dims[still + 1..].iter().map(|d| d.n).product::<usize>())
        })?;
        let inner = *shape.last()? as usize;
        let mut after = 1;
        for &repeats in shape.iter().rev() {
            let repeats = repeats as usize;
            if after == below
                && repeats > 1
                && below.is_multiple_of(inner)
                && inner.is_multiple_of(lanes)
            {
                return (n / lanes >= ENOUGH).then_some(Self {
                    repeats,
                    rows: below / inner,
                    inner,
                });
            }
            after *= repeats;
        }
        None
    }

    /// Returns the first element of thread `t`.
    fn element(&self, lanes: usize) -> String {
        let (repeats, each) = (self.repeats, self.inner / lanes);
        let line = each * repeats;
        format!(
            "t / {}u * {}u + t / {each}u % {repeats}u * {}u + t / {line}u % {rows}u * {inner}u + t % {each}u * {lanes}u",
            line * self.rows,
            repeats * self.rows * self.inner,
            self.rows * self.inner,
            rows = self.rows,
            inner = self.inner,
        )
    }
}

/// Generates the values of a job: for each, where it is written.
fn make<'a>(
    g: &mut Gen<'a>,
    job: Job,
    lanes: usize,
    values: &mut Vec<(&'a Slot, Index, Var)>,
) -> Result<(), CodegenError> {
    let at = Index::elem(lanes);
    let body = g.req.body;
    let (cat, copy) = match job {
        Job::Pull(i, o) => {
            let var = g.output(i, o, &at)?;
            values.push((&body[i].outputs[o], at, var));
            return Ok(());
        }
        Job::Push { cat, copy } => (&body[cat], copy.map(|c| &body[c])),
    };
    let CudaCode::Cat(axis) = ops::cuda(&cat.op) else {
        return Err(CodegenError::new("no concatenation"));
    };
    let index = body.iter().position(|o| std::ptr::eq(o, cat)).unwrap_or(0);
    let tail = |s: &Slot| -> Result<usize, CodegenError> {
        let rest = s.shape.get(axis..);
        let rest =
            rest.ok_or_else(|| CodegenError::new(format!("no axis {axis} in {:?}", s.shape)))?;
        Ok(rest.iter().product::<u64>() as usize)
    };
    let (whole, part) = (tail(&cat.outputs[0])?, tail(&cat.inputs[0])?);
    if part * cat.inputs.len() != whole {
        return Err(CodegenError::new(
            "the parts do not make up the concatenation",
        ));
    }
    if !part.is_multiple_of(lanes) {
        return Err(CodegenError::lanes());
    }
    for (p, slot) in cat.inputs.iter().enumerate() {
        let value = g.input(index, p, &slot.shape, &at)?;
        let var = g.define(&value.lane(), true);
        let mut to = Index {
            code: format!("(i / {part}u * {whole}u + {}u + i % {part}u)", p * part),
            step: 1,
            multiple: lanes,
            own: None,
        };
        // Values that are already this coarse need not be rounded again.
        let mut held = g.rounding(slot)?;
        let mut round = |g: &mut Gen<'_>, to: &Slot| -> Result<(), CodegenError> {
            let ty = g.rounding(to)?;
            if ty != held {
                g.round(&var, ty);
            }
            held = ty;
            Ok(())
        };
        round(g, &cat.outputs[0])?;
        let out = match copy {
            None => &cat.outputs[0],
            Some(copy) => {
                to = index::position(&to, &index::dims(&copy.inputs[0]), lanes)?;
                round(g, &copy.outputs[0])?;
                &copy.outputs[0]
            }
        };
        values.push((out, to, var));
    }
    Ok(())
}

/// Generates a copy of integers, which floats could not represent.
fn integers(req: &Request<'_>) -> Result<Option<Module>, CodegenError> {
    let [op] = req.body else { return Ok(None) };
    if !is_integer_copy(op) {
        return Ok(None);
    }
    for slot in op.inputs.iter().chain(&op.outputs) {
        if req.arg(slot.place)?.dtype != DType::I64 {
            return Err(CodegenError::new("integers are copied to integers"));
        }
    }
    let (from, to) = (&op.inputs[0], &op.outputs[0]);
    let n = numel(to);
    if numel(from) != n {
        return Err(CodegenError::new(
            "a copy's shapes hold different numbers of elements",
        ));
    }
    let at = Index::elem(1);
    let source = index::offset(&at, &index::dims(from), 1, None)?;
    let target = index::offset(&at, &index::dims(to), 1, None)?;
    let (params, declared) = req.operands();
    let index = req.index();
    Ok(Some(Module {
        source: format!(
            "KERNEL({THREADS}) k0({}) {{\n  const {index} i = ({index})blockIdx.x * {THREADS}u + threadIdx.x;\n  if (i >= {n}u) return;\n  {}[{}] = {}[{}];\n}}\n",
            declared.join(", "),
            req.address(to)?,
            target.code,
            req.address(from)?,
            source.code
        ),
        entries: if n == 0 {
            Vec::new()
        } else {
            vec![Entry {
                name: "k0".to_owned(),
                grid: [blocks(n, THREADS)?, 1, 1],
                block: THREADS as u32,
                shared: 0,
                params,
            }]
        },
        scratch: 0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_meets_every_element_once() {
        let w = Walk {
            repeats: 6,
            rows: 5,
            inner: 8,
        };
        let (lanes, outer) = (4u64, 3u64);
        let n = outer * 6 * 5 * 8;
        let mut met = vec![0; n as usize];
        for t in 0..n / lanes {
            // The digits of `t`, last first: part of a row, repeat, row, outer.
            let (part, t1) = (t % 2, t / 2);
            let (repeat, t2) = (t1 % 6, t1 / 6);
            let (row, outer) = (t2 % 5, t2 / 5);
            let first = index::tests::eval(&w.element(lanes as usize).replace('t', "i"), t);
            assert_eq!(first, ((outer * 6 + repeat) * 5 + row) * 8 + part * lanes);
            for v in 0..lanes {
                met[(first + v) as usize] += 1;
            }
        }
        assert!(met.iter().all(|m| *m == 1));
    }
}
