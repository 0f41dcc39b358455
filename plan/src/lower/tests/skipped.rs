//! Blocks that some micro-batches skip. See Note [Skipped blocks].

use super::find::checked;
use super::{LLAMA, collective, scenario, steady};
use crate::check::{RuleId, check_symmetry};
use crate::ir::{CollectiveKind, Holds, KernelClass, Role};
use crate::plan;
use crate::program::{Op, Phase, Program, Rule};
use std::collections::BTreeSet;

const POLICIES: [&str; 3] = ["native", "fsdp2", "megatron"];
const UNITS: &str = "fsdp.units=[\"tok_embeddings\", \"layers.*\"]";
/// The second of two micro-batches skips the middle block of three.
const SECOND: &str = "train.skipped_blocks=[{ blocks = [\"layers.1\"], micro_batches = [1] }]";
/// Every micro-batch skips the block.
const ALL: &str = "train.skipped_blocks=[{ blocks = [\"layers.1\"] }]";

fn skipping(policy: &str, sets: &[&str]) -> Program {
    let policy = format!("fsdp.policy={policy}");
    checked(&[&[policy.as_str(), "model.layers=3", UNITS], sets].concat())
}

fn two(policy: &str, sets: &[&str]) -> Program {
    skipping(policy, &[&[SECOND, "train.grad_accum=2"], sets].concat())
}

/// Returns the names of the units of collectives of a kind in the steady step, with their phases.
fn units(p: &Program, kind: CollectiveKind, micro: u16) -> Vec<(&str, Phase)> {
    let of = steady(p)
        .iter()
        .filter(|i| i.micro_batch == micro && collective(p, i) == Some(kind));
    of.map(|i| (p.units[i.unit.index()].name.as_str(), i.phase))
        .collect()
}

fn names(p: &Program, kind: CollectiveKind, micro: u16, phase: Phase) -> Vec<&str> {
    let all = units(p, kind, micro).into_iter();
    all.filter(|u| u.1 == phase).map(|u| u.0).collect()
}

/// The order is the same as in a log of torch 2.15 on two CPU ranks: a unit whose forward does not
/// run has no hooks, and the unit before it in backward prefetches the next unit that ran in
/// forward.
#[test]
fn fsdp2_gathers_and_reduces_what_ran() {
    let p = two("fsdp2", &[]);
    let gathers = |micro, phase| names(&p, CollectiveKind::AllGather, micro, phase);
    let (f, b) = (Phase::Forward, Phase::Backward);
    let all = ["root", "tok_embeddings", "layers.0", "layers.1", "layers.2"];
    assert_eq!(gathers(0, f), all);
    assert_eq!(
        gathers(1, f),
        ["root", "tok_embeddings", "layers.0", "layers.2"]
    );
    let back = ["layers.2", "layers.1", "layers.0", "tok_embeddings"];
    assert_eq!(gathers(0, b), back);
    assert_eq!(gathers(1, b), ["layers.2", "layers.0", "tok_embeddings"]);
    let reduced = |micro| {
        let all = units(&p, CollectiveKind::ReduceScatter, micro).into_iter();
        all.map(|u| u.0).collect::<Vec<_>>()
    };
    assert!(reduced(0).contains(&"layers.1"));
    assert!(!reduced(1).contains(&"layers.1"));
}

/// The root's final callback reduces the gradients of an earlier micro-batch.
#[test]
fn fsdp2_reduces_sums_of_unused_units_in_the_final_callback() {
    let p = two("fsdp2", &["fsdp.gradient_sync=last"]);
    assert!(units(&p, CollectiveKind::ReduceScatter, 0).is_empty());
    let reduced = units(&p, CollectiveKind::ReduceScatter, 1);
    let at = reduced.iter().find(|u| u.0 == "layers.1");
    assert_eq!(at, Some(&("layers.1", Phase::Final)));
    assert_eq!(reduced.last(), at);
}

/// A prefetch list gathers a unit that does not run; the end of backward frees it.
#[test]
fn fsdp2_drops_what_a_list_gathered_for_nothing() {
    let list = "fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"layers.1\"] }]";
    for set in [list, "fsdp.prefetch_forward=1"] {
        let p = two("fsdp2", &[set]);
        let gathered = names(&p, CollectiveKind::AllGather, 1, Phase::Forward);
        assert!(gathered.contains(&"layers.1"), "{set}");
        let mut freed = steady(&p).iter().filter(|i| match i.op {
            Op::Free(id) => {
                let b = &p.buffers[id.index()];
                b.role == Role::GatherBuffer && p.units[b.unit.index()].name == "layers.1"
            }
            _ => false,
        });
        let last = freed.next_back().unwrap();
        assert_eq!((last.micro_batch, last.phase), (1, Phase::Final), "{set}");
        assert_eq!(last.rule, Rule::FinalFence);
    }
    // The native schedule does not gather it.
    let p = two("native", &[list]);
    for micro in [0, 1] {
        let gathered = names(&p, CollectiveKind::AllGather, micro, Phase::Forward);
        assert_eq!(gathered.contains(&"layers.1"), micro == 0);
    }
}

/// Zero gradients are reduced in the micro-batch that skips the unit, but not for a unit that no
/// micro-batch uses.
#[test]
fn fsdp2_may_reduce_zeros() {
    let p = two("fsdp2", &["fsdp.reduce_unused=true"]);
    let reduced = units(&p, CollectiveKind::ReduceScatter, 1);
    assert_eq!(reduced.last(), Some(&("layers.1", Phase::Final)));
    let p = skipping("fsdp2", &[ALL, "fsdp.reduce_unused=true"]);
    let reduced = units(&p, CollectiveKind::ReduceScatter, 0);
    assert!(reduced.iter().all(|u| u.0 != "layers.1"));
}

/// Returns the units whose weights the optimizer updates.
fn updated(p: &Program) -> BTreeSet<String> {
    let optimizer = steady(p).iter().filter(|i| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].class == KernelClass::Optimizer,
        _ => false,
    });
    let weights = optimizer.flat_map(|i| p.reads(&i.op));
    let weights = weights.filter(|a| {
        let role = p.buffers[a.buffer.index()].role;
        matches!(role, Role::MainWeight | Role::ModelWeight)
    });
    let units = weights.map(|a| p.buffers[a.buffer.index()].unit);
    units.map(|u| p.units[u.index()].name.clone()).collect()
}

/// Parameters without a gradient have no update, no state and no part in the norm. Megatron-FSDP
/// updates them with zero gradients.
#[test]
fn a_unit_that_no_micro_batch_uses_is_not_updated() {
    for policy in POLICIES {
        let p = skipping(policy, &[ALL, "train.clip_norm=1"]);
        let zeros = policy == "megatron";
        assert_eq!(updated(&p).contains("layers.1"), zeros, "{policy}");
        assert!(updated(&p).contains("layers.2"), "{policy}");
        let reduced = units(&p, CollectiveKind::ReduceScatter, 0);
        let at = reduced.iter().find(|u| u.0 == "layers.1");
        assert_eq!(at.map(|u| u.1), zeros.then_some(Phase::Final), "{policy}");
        let unit = p.units.iter().find(|u| u.name == "layers.1").unwrap();
        assert_eq!(unit.skipped_in, [0], "{policy}");
        let groups = &unit.groups;
        let state = p.buffers.iter().zip(0u32..).filter(|(b, _)| {
            let of_unit = match b.holds {
                Holds::Group(g) => groups.contains(&g),
                Holds::Param(x) => groups
                    .iter()
                    .any(|g| p.groups[g.index()].params.contains(&x)),
                _ => false,
            };
            b.role == Role::OptimizerState && of_unit
        });
        let made = |id: u32| {
            let is = |i: &&crate::program::Instr| i.op == Op::Alloc(crate::ir::BufferId(id));
            p.instrs.iter().any(|i| is(&i))
        };
        let mut state = state.map(|(_, id)| id);
        assert_eq!(state.any(made), zeros, "{policy}");
    }
}

/// Megatron-FSDP reduces units that a micro-batch skips in every backward, and releases units that
/// were prefetched but not used.
#[test]
fn megatron_reduces_zeros_of_unused_units() {
    let p = two("megatron", &[]);
    for (micro, phase) in [(0, Phase::Backward), (1, Phase::Final)] {
        let reduced = units(&p, CollectiveKind::ReduceScatter, micro);
        assert!(reduced.contains(&("layers.1", phase)), "{micro}");
    }
    let gathered = names(&p, CollectiveKind::AllGather, 1, Phase::Forward);
    assert!(gathered.contains(&"layers.1"));
    let gathered = names(&p, CollectiveKind::AllGather, 1, Phase::Backward);
    assert!(!gathered.contains(&"layers.1"));
}

/// Work is that of the blocks that run.
#[test]
fn skipped_blocks_compute_nothing() {
    let flops = |sets: &[&str]| {
        let base = ["train.grad_accum=2", UNITS];
        plan(&scenario(LLAMA, &[&base, sets].concat()))
            .unwrap()
            .meta
            .model_flops
            .0
    };
    let (deep, shallow) = (flops(&["model.layers=3"]), flops(&["model.layers=2"]));
    assert_eq!(flops(&["model.layers=3", ALL]), shallow);
    assert_eq!(2 * flops(&["model.layers=3", SECOND]), deep + shallow);
}

#[test]
fn every_family_skips_blocks() {
    for (family, units) in [
        ("family=gpt2", "block"),
        ("family=gpt_neox", "block"),
        ("family=encoder", "block"),
        ("family=linear", "block"),
    ] {
        let text = format!(
            "[model]\n{}\nlayers = 3\nhidden = 64\n{}[train]\nmicro_batch = 2\nseq_len = 16\ngrad_accum = 2\n\
             [mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 2\n[fsdp]\nunits = \"{units}\"\n",
            family.replace('=', " = \"") + "\"",
            match family {
                "family=linear" => "",
                "family=encoder" => "heads = 4\nffn = 128\n",
                _ => "heads = 4\nffn = 128\nvocab = 250\n",
            }
        );
        for policy in POLICIES {
            let policy = format!("fsdp.policy={policy}");
            let p = plan(&scenario(&text, &[SECOND, &policy])).unwrap();
            let r = crate::check::check(&p);
            assert!(r.is_ok(), "{family} {policy}\n{r}");
            let unit = p.units.iter().find(|u| u.name == "layers.1").unwrap();
            assert_eq!(unit.skipped_in, [1], "{family}");
        }
    }
}

/// Ranks with different programs hang if one gathers a unit that the other skips.
#[test]
fn ranks_that_disagree_are_found() {
    for policy in POLICIES {
        let p = skipping(policy, &[ALL]);
        let q = skipping(policy, &[]);
        assert!(check_symmetry(&[p.clone(), p.clone()]).is_ok());
        let r = check_symmetry(&[p, q]);
        assert!(r.of(RuleId::Symmetry).next().is_some(), "{policy}");
    }
}

#[test]
fn what_cannot_be_skipped_is_refused() {
    for (sets, message) in [
        (
            &[ALL, "fsdp.units=\"root\""][..],
            "skips `layers.1.attention.norm`, but not all of unit `root`",
        ),
        (
            &[
                "train.skipped_blocks=[{ blocks = [\"layers.*\"] }]",
                "fsdp.frozen=[\"tok_embeddings\", \"norm\", \"output\"]",
            ],
            "micro-batch 0 skips every parameter that is trained",
        ),
        (
            &[
                SECOND,
                "train.grad_accum=2",
                "fsdp.policy=fsdp2",
                "mesh.dp_replicate=2",
                "fsdp.gradient_sync=outer_last",
            ],
            "the last micro-batch skips unit `layers.1`",
        ),
    ] {
        let s = scenario(LLAMA, &[&["model.layers=3"], sets].concat());
        let e = plan(&s).unwrap_err().to_string();
        assert!(e.contains(message), "{sets:?}: {e}");
    }
}
