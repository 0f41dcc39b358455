//! Order and lifetimes of policy `megatron_v2`, as in the experimental engine of megatron-fsdp
//! 0.6.1.

use super::find::{checked, collectives, stream, waits};
use super::{collective, steady};
use crate::ir::{BufferId, COMPUTE, CollectiveKind, DType, Holds, ReduceOp, Role};
use crate::program::{Instr, Op, Phase, Program, Rule, StreamKind};

/// Returns a program of this policy that passes the checker.
fn v2(sets: &[&str]) -> Program {
    checked(&[&["fsdp.policy=megatron_v2"], sets].concat())
}

/// Returns the names of the units that gather in a phase, in the order of issue.
fn gathered(p: &Program, phase: Phase) -> Vec<String> {
    let gathers = steady(p)
        .iter()
        .filter(|i| i.phase == phase && collective(p, i) == Some(CollectiveKind::AllGather));
    gathers
        .map(|i| p.units[i.unit.index()].name.clone())
        .collect()
}

/// Returns, for each buffer of a role, the positions in the steady step between which it is live.
fn lives(p: &Program, role: Role) -> Vec<(BufferId, usize, usize)> {
    let mut open: Vec<(BufferId, usize)> = Vec::new();
    let mut lives = Vec::new();
    for (at, i) in steady(p).iter().enumerate() {
        match i.op {
            Op::Alloc(b) if p.buffers[b.index()].role == role => open.push((b, at)),
            Op::Free(b) => {
                if let Some(n) = open.iter().position(|(o, _)| *o == b) {
                    lives.push((b, open.remove(n).1, at));
                }
            }
            _ => {}
        }
    }
    assert!(open.is_empty(), "freed in the step that allocated it");
    lives
}

/// Forward follows `named_modules`; backward starts with the root, followed by its children in
/// reverse order. Each module occurs twice per micro-batch.
#[test]
fn units_are_gathered_in_fixed_orders() {
    let units = "fsdp.units=[\"tok_embeddings\", \"layers.*\", \"layers.*.mlp\"]";
    let p = v2(&[units, "train.grad_accum=2"]);
    let forward = [
        "root",
        "tok_embeddings",
        "layers.0",
        "layers.0.mlp",
        "layers.1",
        "layers.1.mlp",
    ];
    let backward = [
        "root",
        "layers.1",
        "layers.1.mlp",
        "layers.0",
        "layers.0.mlp",
        "tok_embeddings",
    ];
    assert_eq!(gathered(&p, Phase::Forward), forward.repeat(2));
    assert_eq!(gathered(&p, Phase::Backward), backward.repeat(2));
    assert_eq!(collectives(&p, CollectiveKind::ReduceScatter).len(), 12);
}

/// The root's parameters are those of the norm and the head. They are released before the loss, and
/// gathered when the gradient of the loss is available. At most two other units are full at once.
#[test]
fn the_root_is_sharded_during_the_loss() {
    let p = v2(&[
        "model.layers=4",
        "fsdp.units=[\"tok_embeddings\", \"layers.*\"]",
    ]);
    let of_loss = |i: &Instr| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name.contains("softmax"),
        _ => false,
    };
    let list = steady(&p);
    let loss: Vec<usize> = (0..list.len()).filter(|&at| of_loss(&list[at])).collect();
    assert!(loss.len() >= 2);
    let full = lives(&p, Role::FullWeight);
    let root = |b: &BufferId| p.units[p.buffers[b.index()].unit.index()].is_root;
    for &at in &loss {
        let live = full
            .iter()
            .filter(|(_, from, to)| (*from..*to).contains(&at));
        assert_eq!(live.count(), 0);
    }
    assert_eq!(full.iter().filter(|(b, ..)| root(b)).count(), 2);
    for at in 0..list.len() {
        let live = |whose: bool| {
            let all = full.iter().filter(|(b, ..)| root(b) == whose);
            all.filter(|(_, from, to)| (*from..*to).contains(&at))
                .count()
        };
        assert!(live(false) <= 2 && live(true) <= 1);
    }
}

/// Computation waits for the reduction stream before it packs. The buffer is freed once the
/// reduction has been issued, and the unit is released after that.
#[test]
fn one_buffer_of_packed_gradients_is_live() {
    let p = v2(&["model.layers=4"]);
    let (list, rs) = (steady(&p), stream(&p, StreamKind::ReduceScatter));
    let packed = lives(&p, Role::ReduceInput);
    assert_eq!(packed.len(), p.groups.len());
    for pair in packed.windows(2) {
        assert!(pair[0].2 < pair[1].1, "{pair:?}");
    }
    let gates = waits(&p, COMPUTE);
    for (b, from, to) in packed {
        let reduction = (from..to)
            .rfind(|&at| collective(&p, &list[at]) == Some(CollectiveKind::ReduceScatter));
        let (reduction, unit) = (reduction.expect("reduced"), list[from].unit);
        assert!(
            gates
                .iter()
                .any(|w| w.2 == rs && (from..reduction).contains(&w.0))
        );
        let release = (to..list.len()).find(|&at| {
            matches!(list[at].op, Op::Free(f) if p.buffers[f.index()].role == Role::FullWeight)
        });
        assert_eq!(list[release.expect("released")].unit, unit);
        assert_eq!(p.buffers[b.index()].stream, rs);
    }
}

/// A unit is reduced with its last gradient, not at the end of its module; the root is reduced long
/// before the blocks.
#[test]
fn units_are_reduced_with_their_last_gradient() {
    let p = v2(&["model.layers=3"]);
    let names: Vec<&str> = collectives(&p, CollectiveKind::ReduceScatter)
        .into_iter()
        .map(|at| p.units[steady(&p)[at].unit.index()].name.as_str())
        .collect();
    // With blocks as units, the root owns the embedding, whose gradient comes last.
    assert_eq!(names, ["layers.2", "layers.1", "layers.0", "root"]);
    let p = v2(&[
        "model.layers=3",
        "fsdp.units=[\"tok_embeddings\", \"layers.*\"]",
    ]);
    let first = collectives(&p, CollectiveKind::ReduceScatter)[0];
    assert!(p.units[steady(&p)[first].unit.index()].is_root);
}

/// Collectives average in the compute dtype. With replicas, a copy of the shard is averaged once
/// per step on the same stream.
#[test]
fn gradients_are_averaged_by_collectives() {
    for (sets, all_reduces) in [
        (&["train.grad_accum=2"][..], 0),
        (&["mesh.dp_outer=2", "train.grad_accum=2"], 3),
        (&["mesh.dp_outer=2", "precision.main_grads=f32"], 3),
    ] {
        let p = v2(sets);
        let rs = stream(&p, StreamKind::ReduceScatter);
        assert!(steady(&p).iter().all(|i| i.rule != Rule::Scale));
        let mut counted = 0;
        for i in steady(&p) {
            let Op::Collective { id, stream } = i.op else {
                continue;
            };
            let c = &p.collectives[id.index()];
            match c.kind {
                CollectiveKind::ReduceScatter => assert_eq!(c.dtype, DType::Bf16),
                CollectiveKind::AllReduce => counted += 1,
                _ => continue,
            }
            assert_eq!((c.reduce, stream), (ReduceOp::Avg, rs), "{sets:?}");
        }
        assert_eq!(counted, all_reduces, "{sets:?}");
    }
}

/// Frozen parameters also have main weights, which are never updated. Units that backward does not
/// reach are not gathered for it.
#[test]
fn frozen_units_keep_main_weights() {
    let frozen = "fsdp.frozen=[\"tok_embeddings\", \"layers.0\"]";
    let p = v2(&[frozen, "fsdp.units=[\"tok_embeddings\", \"layers.*\"]"]);
    let named = Holds::Named("frozen main weights");
    let main = p
        .buffers
        .iter()
        .filter(|b| b.role == Role::MainWeight || b.holds == named);
    assert_eq!(main.count(), p.groups.len());
    assert_eq!(gathered(&p, Phase::Backward), ["root", "layers.1"]);
    let refreshes = steady(&p)
        .iter()
        .filter(|i| i.rule == Rule::Refresh && matches!(i.op, Op::Launch { .. }));
    assert_eq!(refreshes.count(), 2);
}
