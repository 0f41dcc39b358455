//! One backward over the forwards of all micro-batches. See Note [Joint backward].

use super::find::{checked, collectives};
use super::{collective, steady};
use crate::ir::{CollectiveKind, Holds, Role, StorageId};
use crate::memory;
use crate::program::{Op, Phase, Program, Rule, SectionKind};
use std::collections::BTreeSet;

const JOINT: &str = "train.joint_backward=true";
const UNITS: &str = "fsdp.units=[\"tok_embeddings\", \"layers.*\"]";

fn joint(policy: &str, sets: &[&str]) -> Program {
    let policy = format!("fsdp.policy={policy}");
    checked(&[&[policy.as_str(), JOINT], sets].concat())
}

/// Returns the phases and micro-batches in order, without repetitions.
fn parts(p: &Program) -> Vec<(Phase, u16)> {
    let model = steady(p).iter().filter(|i| i.rule == Rule::Model);
    let mut parts: Vec<(Phase, u16)> = model.map(|i| (i.phase, i.micro_batch)).collect();
    parts.dedup();
    parts
}

#[test]
fn forwards_come_first_and_backward_runs_from_the_last() {
    for policy in ["native", "fsdp2", "megatron"] {
        let p = joint(policy, &["train.grad_accum=3"]);
        let (f, b) = (Phase::Forward, Phase::Backward);
        let wanted = [(f, 0), (f, 1), (f, 2), (b, 2), (b, 1), (b, 0)];
        assert_eq!(parts(&p), wanted, "{policy}");
        // Each unit is reduced once, in the last part.
        let reduced = collectives(&p, CollectiveKind::ReduceScatter);
        assert_eq!(reduced.len(), p.groups.len(), "{policy}");
        assert!(
            reduced.iter().all(|at| steady(&p)[*at].micro_batch == 0),
            "{policy}"
        );
    }
}

/// Returns the names of the units that FSDP2 gathers in a phase of a micro-batch.
fn gathers(p: &Program, phase: Phase, micro: u16) -> Vec<&str> {
    let of = steady(p).iter().filter(|i| {
        (i.phase, i.micro_batch) == (phase, micro)
            && collective(p, i) == Some(CollectiveKind::AllGather)
    });
    of.map(|i| p.units[i.unit.index()].name.as_str()).collect()
}

/// The root stays full from its first forward to the final callback. The embedding stays full from
/// its first backward on: none of its inputs needs a gradient, so it has no hook. Blocks are
/// gathered and freed in every part.
#[test]
fn fsdp2_leaves_units_without_hooks_to_the_final_callback() {
    let p = joint("fsdp2", &["model.layers=3", "train.grad_accum=2", UNITS]);
    let blocks = ["layers.0", "layers.1", "layers.2"];
    let forward = [&["root", "tok_embeddings"], &blocks[..]].concat();
    assert_eq!(gathers(&p, Phase::Forward, 0), forward);
    assert_eq!(gathers(&p, Phase::Forward, 1), forward[1..]);
    let back = ["layers.2", "layers.1", "layers.0", "tok_embeddings"];
    assert_eq!(gathers(&p, Phase::Backward, 1), back);
    assert_eq!(gathers(&p, Phase::Backward, 0), back[..3]);
    let freed = |name: &str| {
        let of = steady(&p).iter().filter(|i| match i.op {
            Op::Free(id) => {
                let b = &p.buffers[id.index()];
                b.role == Role::FullWeight && p.units[b.unit.index()].name == name
            }
            _ => false,
        });
        of.map(|i| (i.phase, i.micro_batch))
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(freed("root"), [(Phase::Backward, 0)].into());
    let embedding = [
        (Phase::Forward, 0),
        (Phase::Forward, 1),
        (Phase::Backward, 0),
    ];
    assert_eq!(freed("tok_embeddings"), embedding.into());
    assert_eq!(freed("layers.1").len(), 4);
}

/// Gradients of all units stay in the dtype in which autograd sums them, until the last part.
#[test]
fn fsdp2_keeps_full_gradients_in_the_type_of_computation() {
    let sets = ["train.grad_accum=2", "precision.compute=bf16"];
    let p = joint("fsdp2", &sets);
    let grads = p.buffers.iter().filter(|b| b.role == Role::FullGrad);
    assert!(grads.clone().count() > 0);
    assert!(grads.into_iter().all(|b| b.dtype == crate::ir::DType::Bf16));
}

/// Activations of all micro-batches are live when backward starts, and none after it.
#[test]
fn every_micro_batch_has_activations_of_its_own() {
    for policy in ["native", "fsdp2", "megatron"] {
        let p = joint(policy, &["train.grad_accum=2"]);
        let mut live: Vec<StorageId> = Vec::new();
        let mut at_backward = None;
        for i in steady(&p) {
            if i.phase == Phase::Backward && at_backward.is_none() {
                at_backward = Some(live.clone());
            }
            let storage = |id: crate::ir::BufferId| match p.buffers[id.index()].holds {
                Holds::Storage(s) => Some(s),
                _ => None,
            };
            match i.op {
                Op::Alloc(id) => live.extend(storage(id)),
                Op::Free(id) => {
                    if let Some(n) = storage(id).and_then(|s| live.iter().position(|l| *l == s)) {
                        live.remove(n);
                    }
                }
                _ => {}
            }
        }
        let saved = at_backward.unwrap();
        let distinct: BTreeSet<StorageId> = saved.iter().copied().collect();
        assert_eq!(saved.len(), 2 * distinct.len(), "{policy}");
        assert!(live.is_empty(), "{policy}");
        let accum = format!("fsdp.policy={policy}");
        let apart = checked(&[accum.as_str(), "train.grad_accum=2"]);
        let peak = |p: &Program| {
            let trace = memory::replay(p, 3).unwrap();
            trace.last(SectionKind::Steady).unwrap().peak_allocated
        };
        assert!(peak(&p) > peak(&apart), "{policy}");
    }
}
