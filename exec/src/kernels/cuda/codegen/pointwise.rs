//! Kernels over elements: one thread for a few neighbouring ones.

use super::expr::Gen;
use super::index::Index;
use super::{Entry, Module, Refusal, Request, blocks, numel};
use shardlab_plan::model::OpKind;
use shardlab_plan::program::Place;
use shardlab_plan::units::DType;

/// Threads of a block.
const THREADS: usize = 256;

/// Generates a body of elementwise operations: an entry for all outputs of the same number of elements.
pub(super) fn generate(req: &Request<'_>, lanes: usize) -> Result<Module, Refusal> {
    if let Some(module) = integers(req)? {
        return Ok(module);
    }
    let mut sizes: Vec<usize> = Vec::new();
    for slot in req.body.iter().flat_map(|op| &op.outputs) {
        let n = numel(slot);
        if matches!(slot.place, Place::Write(_)) && n > 0 && !sizes.contains(&n) {
            sizes.push(n);
        }
    }
    let mut module = Module {
        source: String::new(),
        entries: Vec::new(),
        scratch: 0,
    };
    let lanes_that_divide = |n: usize| {
        let mut l = lanes;
        while !n.is_multiple_of(l) {
            l /= 2;
        }
        l
    };
    for (k, &n) in sizes.iter().enumerate() {
        let lanes = lanes_that_divide(n);
        let mut g = Gen::new(req, lanes, None);
        let at = Index::elem(lanes);
        let mut values = Vec::new();
        for (i, op) in req.body.iter().enumerate() {
            for (o, slot) in op.outputs.iter().enumerate() {
                let last = !req.body[i + 1..]
                    .iter()
                    .any(|later| later.outputs.iter().any(|s| s.place == slot.place));
                if matches!(slot.place, Place::Write(_)) && numel(slot) == n && last {
                    values.push((slot, g.output(i, o, &at)?));
                }
            }
        }
        for (slot, var) in values {
            g.store(slot, &at, &var)?;
        }
        let name = format!("k{k}");
        let (params, declared) = req.operands();
        let index = if n < 1 << 31 { "u32" } else { "u64" };
        module.source += &format!(
            "KERNEL({THREADS}) {name}({}) {{\n  const {index} i = (({index})blockIdx.x * {THREADS}u + threadIdx.x) * {lanes}u;\n  if (i >= {n}u) return;\n{}}}\n",
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
    Ok(module)
}

/// A copy of integers, which floats could not carry.
fn integers(req: &Request<'_>) -> Result<Option<Module>, Refusal> {
    let [op] = req.body else { return Ok(None) };
    let all = op.inputs.iter().chain(&op.outputs);
    if op.op != OpKind::Copy || all.clone().any(|s| s.dtype != DType::I64) {
        return Ok(None);
    }
    for slot in all {
        if req.arg(slot.place)?.dtype != DType::I64 {
            return Err(Refusal::new("integers are copied to integers"));
        }
    }
    let (from, to) = (&op.inputs[0], &op.outputs[0]);
    let n = numel(to);
    if numel(from) != n {
        return Err(Refusal::new(
            "a copy's shapes hold different numbers of elements",
        ));
    }
    let at = Index::elem(1);
    let source = super::index::offset(&at, &super::index::dims(from), 1, None)?;
    let target = super::index::offset(&at, &super::index::dims(to), 1, None)?;
    let (params, declared) = req.operands();
    let index = if n < 1 << 31 { "u32" } else { "u64" };
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
