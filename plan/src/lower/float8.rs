//! Scales of parameters that ranks gather in 8 bits.

use crate::compile::tape::Tape;
use crate::ir::Source;
use crate::shard::Group;
use std::collections::BTreeMap;

/// Gives parameters that one matmul reads one scale (merged projections), and numbers the scales
/// again.
pub(super) fn share_scales(tape: &Tape, groups: &mut [Group]) {
    if !groups.iter().any(Group::is_float8) {
        return;
    }
    // Elements from the start of a parameter that some kernel reads as one matrix.
    let mut reach: BTreeMap<u32, u64> = BTreeMap::new();
    for operand in &tape.operands {
        if let Source::Param(p) = operand.source {
            let end = reach.entry(p.0).or_default();
            *end = (*end).max(operand.offset + operand.bytes);
        }
    }
    let mut next = 0;
    for group in groups.iter_mut().filter(|g| g.is_float8()) {
        // Elements that the matrix before still covers. A code is a byte.
        let mut covered = 0;
        for (p, scale) in group.params.iter().zip(&mut group.scales) {
            if covered == 0 {
                next += 1;
            }
            *scale = next - 1;
            let numel = tape.params[p.index()].numel();
            let reached = reach.get(&p.0).copied().unwrap_or(0);
            covered = covered.max(reached).saturating_sub(numel);
        }
    }
}
