//! Determines what backward recomputes, and what is compiled.

use super::{Compiled, Facts, Found, Recompute};
use crate::attribute::{Attributed, Units, Work, short};
use crate::kineto::Trace;
use crate::measured::window;
use shardlab_plan::program::Phase;
use std::collections::{BTreeMap, HashSet};

/// Matmul operators and kernel kinds of a block, in forward and backward.
#[derive(Default)]
struct Passes {
    forward: HashSet<u32>,
    backward: HashSet<u32>,
    again: HashSet<u32>,
    attention_again: bool,
    other_again: bool,
    attends: bool,
}

pub(super) fn recompute(trace: &Trace, a: &Attributed, step: Option<u32>, facts: &mut Facts) {
    let mut blocks: BTreeMap<u32, Passes> = BTreeMap::new();
    for w in &a.work {
        if step.is_some_and(|s| w.place.step != s) || w.place.micro_batch != 0 {
            continue;
        }
        let of = blocks.entry(w.place.unit).or_default();
        // A matmul may launch several kernels, so operators are counted.
        let id = w.operator.unwrap_or(u32::MAX - w.device);
        match (w.place.phase, w.work) {
            (Phase::Forward, Work::Gemm) => drop(of.forward.insert(id)),
            (Phase::Backward, Work::Gemm) => drop(of.backward.insert(id)),
            (Phase::Recompute, Work::Gemm) => drop(of.again.insert(id)),
            (Phase::Forward, Work::Attention) => of.attends = true,
            (Phase::Recompute, Work::Attention) => of.attention_again = true,
            (Phase::Recompute, Work::Memory) => of.other_again = true,
            (Phase::Backward, Work::Attention) => {
                of.attention_again |=
                    is_forward_attention(trace.name(trace.device[w.device as usize].name));
            }
            _ => {}
        }
    }
    // The root's matmuls do not count, because head and embedding are not recomputed.
    let blocks: Vec<&Passes> = blocks
        .iter()
        .filter(|(unit, p)| **unit != Units::ROOT && p.forward.len() > 2)
        .map(|(_, p)| p)
        .collect();
    if blocks.is_empty() {
        let again = a.work.iter().any(|w| w.place.phase == Phase::Recompute);
        let whole = step.is_some();
        facts.recompute = whole.then(|| {
            if again {
                Found::new(Recompute::Full, "forward operators run within backward")
            } else {
                Found::new(Recompute::None, "no forward operator runs within backward")
            }
        });
        return;
    }
    let full = blocks.iter().filter(|p| {
        let spare = p.backward.len().saturating_sub(2 * p.forward.len()) + p.again.len();
        // Recomputation may skip the last matmul, because its result is not needed again.
        spare * 2 > p.forward.len() || p.attention_again && p.attends
    });
    let full = full.count();
    let selective = blocks.iter().filter(|p| p.other_again).count();
    facts.recompute = Some(if full * 2 > blocks.len() {
        Found::new(
            Recompute::Full,
            format!(
                "matmuls and attention of forward run again in backward, in {full} of {} blocks",
                blocks.len()
            ),
        )
    } else if selective > 0 || full > 0 {
        Found::new(
            Recompute::Selective,
            format!(
                "operators of forward run again in backward, without matmuls, in {} of {} blocks",
                selective.max(full),
                blocks.len()
            ),
        )
    } else {
        Found::new(
            Recompute::None,
            "backward has two matmuls for each of forward, and no attention of forward",
        )
    });
}

/// Returns whether an attention kernel belongs to forward.
fn is_forward_attention(kernel: &str) -> bool {
    let lower = kernel.to_ascii_lowercase();
    let forward = [
        "fprop",
        "flash_fwd",
        "fmha_fwd",
        "fmha_cutlassf",
        "attn_fwd",
    ];
    forward.iter().any(|w| lower.contains(w))
}

pub(super) fn compiled(trace: &Trace, a: &Attributed, step: Option<u32>, facts: &mut Facts) {
    let (from, to) = step.map_or((i64::MIN, i64::MAX), |s| window(&a.steps.all, s));
    let mut graphs: BTreeMap<u32, u32> = BTreeMap::new();
    for (i, event) in trace.host.iter().enumerate() {
        if !(from..to).contains(&event.start) {
            continue;
        }
        let name = trace.name(event.name);
        if name.contains("CompiledFxGraph")
            && let Some(place) =
                a.host[i].filter(|p| p.phase == Phase::Forward && p.micro_batch == 0)
        {
            *graphs.entry(place.unit).or_default() += 1;
        }
    }
    let generated = a.work.iter().any(|w| {
        let name = short(trace.name(trace.device[w.device as usize].name));
        name.starts_with("triton_") && matches!(w.place.phase, Phase::Forward | Phase::Backward)
    });
    if step.is_none() {
        return;
    }
    let blocks = graphs.iter().filter(|(u, _)| **u != Units::ROOT);
    let most = blocks.map(|(_, n)| *n).max();
    facts.compiled = Some(match most {
        Some(1) => Found::new(Compiled::Blocks, "one compiled graph per block"),
        Some(n) => Found::new(Compiled::Regions, format!("{n} compiled graphs per block")),
        None if graphs.contains_key(&Units::ROOT) && generated => {
            Found::new(Compiled::Full, "compiled graphs outside of blocks")
        }
        None if generated => Found::new(
            Compiled::Blocks,
            "kernels named triton_…, but no range of a compiled graph",
        ),
        None => Found::new(Compiled::Off, "no compiled graph and no generated kernel"),
    });
}
