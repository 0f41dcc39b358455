//! Order and lifetimes of variant `pr4435` of policy `megatron_v2`, as in Megatron-LM #4435.

use super::find::{checked, collectives, stream, waits};
use super::{collective, steady};
use crate::ir::{BufferId, COMPUTE, CollectiveKind, ReduceOp, Role};
use crate::memory::{Memory, replay_on};
use crate::program::{Instr, Op, Phase, Program, Rule, SectionKind, StreamKind};
use std::collections::BTreeSet;

/// Returns a program of this variant that passes the checker.
fn pr4435(sets: &[&str]) -> Program {
    checked(&[&["fsdp.policy=megatron_v2", "fsdp.variant=pr4435"], sets].concat())
}

fn unit<'p>(p: &'p Program, i: &Instr) -> &'p str {
    &p.units[i.unit.index()].name
}

/// Returns the names of the units of the instructions that `keep` selects.
fn named(p: &Program, keep: impl Fn(&Instr) -> bool) -> Vec<&str> {
    let kept = steady(p).iter().filter(|i| keep(i));
    kept.map(|i| unit(p, i)).collect()
}

fn gathers(p: &Program, phase: Phase) -> Vec<&str> {
    named(p, |i| {
        i.phase == phase && collective(p, i) == Some(CollectiveKind::AllGather)
    })
}

const UNITS: &str = "fsdp.units=[\"tok_embeddings\", \"layers.*\"]";

/// Units are in registration order, or its reverse. The root is last in reverse order, so the unit
/// of its gradient prefetches nothing, and the gather of the last layer is exposed.
#[test]
fn backward_is_in_the_reverse_of_the_forward_order() {
    let p = pr4435(&["model.layers=3", UNITS]);
    let forward = ["root", "tok_embeddings", "layers.0", "layers.1", "layers.2"];
    assert_eq!(gathers(&p, Phase::Forward), forward);
    let backward = ["root", "layers.2", "layers.1", "layers.0", "tok_embeddings"];
    assert_eq!(gathers(&p, Phase::Backward), backward);
    let ahead = named(&p, |i| {
        i.rule == Rule::Prefetch && collective(&p, i) == Some(CollectiveKind::AllGather)
    });
    let behind = ["layers.1", "layers.0", "tok_embeddings"];
    assert_eq!(ahead, [&forward[1..], &behind[..]].concat());
}

/// No input of the root and the embedding needs a gradient, so the final callback reduces them, the
/// root last.
#[test]
fn units_without_gradients_of_inputs_are_reduced_at_the_end() {
    let p = pr4435(&["model.layers=3", UNITS]);
    let reduced = |phase: Phase| {
        named(&p, |i| {
            i.phase == phase && collective(&p, i) == Some(CollectiveKind::ReduceScatter)
        })
    };
    assert_eq!(
        reduced(Phase::Backward),
        ["layers.2", "layers.1", "layers.0"]
    );
    assert_eq!(reduced(Phase::Final), ["tok_embeddings", "root"]);
    // In the released engine, the root is reduced with its last gradient.
    let released = checked(&["fsdp.policy=megatron_v2", "model.layers=3", UNITS]);
    let first = collectives(&released, CollectiveKind::ReduceScatter)[0];
    assert!(released.units[steady(&released)[first].unit.index()].is_root);
}

/// The sliding drain: when a unit stages its gradients, computation has waited for all reductions
/// except that of the previous unit, and full gradients of at most two units are live.
#[test]
fn gradients_of_two_units_are_live() {
    let p = pr4435(&["model.layers=5", "train.grad_accum=2"]);
    let rs = stream(&p, StreamKind::ReduceScatter);
    let bucket = |id: BufferId| {
        let b = &p.buffers[id.index()];
        matches!(b.holds, crate::ir::Holds::Group(_)) && b.role == Role::FullGrad
    };
    let (mut live, mut most) = (Vec::new(), 0);
    let gates = waits(&p, COMPUTE);
    for (at, i) in steady(&p).iter().enumerate() {
        match i.op {
            Op::Alloc(id) if bucket(id) => {
                live.push(i.unit);
                let units: BTreeSet<_> = live.iter().collect();
                most = most.max(units.len());
            }
            Op::Free(id) if bucket(id) => {
                let unit = p.buffers[id.index()].unit;
                let n = live.iter().position(|u| *u == unit).unwrap();
                live.remove(n);
                // It follows a wait for its reduction.
                assert!(gates.iter().any(|w| w.0 < at && w.2 == rs), "{at}");
            }
            _ => {}
        }
    }
    assert_eq!(most, 2);
    assert!(live.is_empty());
    // Computation waits for the event of the unit two before.
    let gated = named(&p, |i| i.rule == Rule::ReduceGate);
    let each = ["layers.2", "layers.1", "layers.0", "root"];
    assert_eq!(gated, each.repeat(2));
}

/// Without the flags, both kinds of collectives are on the compute stream, no unit is prefetched,
/// and a bucket is released with its reduction.
#[test]
fn without_its_flags_everything_is_on_one_stream() {
    let p = pr4435(&[
        "model.layers=3",
        "fsdp.prefetch_forward=0",
        "fsdp.prefetch_backward=0",
        "fsdp.async_reduce=false",
    ]);
    assert_eq!(p.streams.len(), 1);
    assert!(named(&p, |i| i.rule == Rule::Prefetch).is_empty());
    assert!(waits(&p, COMPUTE).is_empty());
}

/// 16-bit gradients are multiplied before the sum, others by NCCL. They are never averaged.
#[test]
fn gradients_are_scaled_by_their_type() {
    let ops = |sets: &[&str]| -> Vec<ReduceOp> {
        let p = pr4435(sets);
        let of = |at: &usize| match steady(&p)[*at].op {
            Op::Collective { id, .. } => p.collectives[id.index()].reduce,
            _ => unreachable!(),
        };
        let all = collectives(&p, CollectiveKind::ReduceScatter);
        all.iter().map(of).collect()
    };
    let bf16 = ["precision.compute=bf16", "precision.main_grads=bf16"];
    assert!(ops(&bf16).iter().all(|op| *op == ReduceOp::Sum));
    let wide = ["precision.compute=bf16", "precision.main_grads=f32"];
    let premul = |op: &ReduceOp| matches!(op, ReduceOp::PremulSum(_));
    assert!(ops(&wide).iter().all(premul));
}

/// A reduction writes a tensor that is separate from its input and from the shard.
#[test]
fn reductions_write_a_separate_tensor() {
    let p = pr4435(&["train.grad_accum=2"]);
    for at in collectives(&p, CollectiveKind::ReduceScatter) {
        let Op::Collective { id, .. } = steady(&p)[at].op else {
            unreachable!()
        };
        let part = p.collectives[id.index()].parts[0];
        assert_ne!(part.input.buffer, part.output.buffer);
        let role = p.buffers[part.output.buffer.index()].role;
        assert_eq!(role, Role::ReduceOutput);
    }
}

/// From the second micro-batch on, full buffers come from the pool, at the addresses of the
/// previous micro-batch, whether a step has one or two micro-batches.
#[test]
fn full_buffers_repeat_their_addresses() {
    for accum in ["train.grad_accum=1", "train.grad_accum=2"] {
        let p = pr4435(&["model.layers=4", accum, "fsdp.allocator=trace_pool"]);
        let mut memory = Memory::new(&p, None);
        let trace = replay_on(&p, 4, &mut memory, |_, _, _| {}).unwrap();
        let steady: Vec<_> = trace.passes.iter().filter(|s| s.step > 1).collect();
        assert!(steady.len() >= 2);
        for pass in &steady[1..] {
            assert_eq!(pass.peak_allocated, steady[0].peak_allocated);
            assert_eq!(pass.end, steady[0].end);
        }
        // All slots are unused between steps.
        let plan: u64 = memory.idle_slots().0;
        assert!(plan > 0);
        let section = p.section(SectionKind::Steady).unwrap();
        assert!(p.section_instrs(section).len() > 100);
    }
}

/// The pool has no more slots than the maximum number of live full buffers.
#[test]
fn the_pool_has_as_many_slots_as_buffers_are_live() {
    let p = pr4435(&["model.layers=4", "fsdp.allocator=trace_pool"]);
    let mut memory = Memory::new(&p, None);
    let mut most = 0;
    let traced = |id: &BufferId| p.buffers[id.index()].pool == crate::ir::Pool::Traced;
    replay_on(&p, 3, &mut memory, |_, _, m| {
        most = most.max(m.live_buffers().iter().filter(|id| traced(id)).count());
    })
    .unwrap();
    assert_eq!(memory.trace_plan().unwrap().slots().len(), most);
}
