//! Contents of each collective. They depend on the graph alone.

use crate::compile::tape::TapeOp;
use crate::ir::{AxisId, ParamId, Source};
use crate::lower::inputs::LoweringInputs;
use crate::lower::unmanaged::Unmanaged;
use crate::shard::Layout;

/// Parameters gathered, or gradients reduced, by one collective.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// Axis over which all of these parameters are sharded.
    pub(super) axis: AxisId,
    pub(super) params: Vec<ParamId>,
    /// Bytes of the full parameters in the compute dtype.
    pub(super) bytes: u64,
}

/// Adds a parameter to the last bucket, or to a new one if that bucket is full or of another axis.
/// Returns the number of buckets.
fn push(buckets: &mut Vec<Bucket>, inputs: &LoweringInputs<'_>, p: ParamId, cap: u64) -> u32 {
    let bytes = padded_bytes(inputs, p);
    let axis = inputs.shard_axis(inputs.home[p.index()].0);
    let fits = |b: &&mut Bucket| b.axis == axis && b.bytes + bytes <= cap;
    match buckets.last_mut().filter(fits) {
        Some(b) => {
            b.params.push(p);
            b.bytes += bytes;
        }
        None => buckets.push(Bucket {
            axis,
            params: vec![p],
            bytes,
        }),
    }
    buckets.len() as u32
}

/// Gathers of one direction: buckets in order of first use, and the parameters whose last use is at
/// each position of the tape.
#[derive(Clone, Debug, Default)]
pub(super) struct Direction {
    pub(super) buckets: Vec<Bucket>,
    /// Bucket index of each parameter.
    pub(super) of: Vec<Option<u32>>,
    /// Parameters with the position of their last use on the tape, ascending by position.
    pub(super) last_uses: Vec<(u32, ParamId)>,
}

/// Merges parameters in order of first use into buckets of at most `cap` bytes, and finds last
/// uses.
pub(super) fn direction(inputs: &LoweringInputs<'_>, ops: &[TapeOp], cap: u64) -> Direction {
    let mut out = Direction {
        of: vec![None; inputs.tape.params.len()],
        ..Direction::default()
    };
    let mut last = vec![None; inputs.tape.params.len()];
    for (at, op) in ops.iter().enumerate() {
        let TapeOp::Launch { reads, end, .. } = *op else {
            continue;
        };
        for o in &inputs.tape.operands[reads as usize..end as usize] {
            let Source::Param(p) = o.source else { continue };
            if Unmanaged::has(inputs, p) {
                continue;
            }
            last[p.index()] = Some(at as u32);
            if out.of[p.index()].is_none() {
                let buckets = push(&mut out.buckets, inputs, p, cap);
                out.of[p.index()] = Some(buckets - 1);
            }
        }
    }
    out.last_uses = last
        .iter()
        .enumerate()
        .filter_map(|(p, at)| Some(((*at)?, ParamId(p as u32))))
        .collect();
    out.last_uses.sort_unstable();
    out
}

fn padded_bytes(inputs: &LoweringInputs<'_>, p: ParamId) -> u64 {
    let (g, i) = inputs.home[p.index()];
    let numel = match &inputs.group(g).layout {
        Layout::PerParam(l) => l.items[i as usize].shard_numel * u64::from(l.shards),
        Layout::Flat(_) => inputs.tape.params[p.index()].numel(),
    };
    numel * inputs.types.compute.size()
}

/// Merges gradients in the order in which they complete.
pub(super) fn reductions(inputs: &LoweringInputs<'_>, cap: u64) -> (Vec<Bucket>, Vec<Option<u32>>) {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut of = vec![None; inputs.tape.params.len()];
    for op in &inputs.tape.backward {
        let TapeOp::GradReady(p) = *op else { continue };
        if Unmanaged::has(inputs, p) {
            continue;
        }
        of[p.index()] = Some(push(&mut buckets, inputs, p, cap) - 1);
    }
    (buckets, of)
}

/// Returns the number of bytes that may be gathered ahead: the in-flight limit, and at most
/// `max(1 GB, budget x peak of the tape)` of extra memory (defaults of `overlap_scheduling.py`).
pub(super) fn window(inputs: &LoweringInputs<'_>) -> u64 {
    let (mut live, mut peak) = (0u64, 0u64);
    for op in inputs.tape.forward.iter().chain(&inputs.tape.backward) {
        match *op {
            TapeOp::Alloc(s) => live += inputs.tape.storages[s.index()].bytes.0,
            TapeOp::Free(s) => live -= inputs.tape.storages[s.index()].bytes.0,
            _ => {}
        }
        peak = peak.max(live);
    }
    let budget = (inputs.scenario.compile.memory_budget * peak as f64) as u64;
    inputs
        .scenario
        .compile
        .max_inflight_bytes
        .min(budget.max(1_000_000_000))
}
