//! Parameters that FSDP does not manage: faults in their gradients and layouts are found.

use super::experts::only;
use super::{drop, file, find};
use crate::check::{RuleId, check};
use crate::config::IgnoredParams;
use crate::ir::*;
use crate::program::*;
use crate::{plan, scenario};

/// Lowers the shipped mixture, with experts that policy fsdp2 does not manage, even where a
/// scenario could not say so.
fn ignoring(of: IgnoredParams, set: &[&str]) -> Program {
    let all = [
        "fsdp.policy=fsdp2",
        "train.sync=false",
        "train.grad_norm=true",
        "precision.main_params=none",
    ];
    let all: Vec<String> = all.iter().chain(set).map(|s| (*s).to_owned()).collect();
    let mut s = scenario::load(&file("small-moe"), &all).unwrap_or_else(|e| panic!("{e}"));
    s.fsdp.ignored_params = of;
    plan(&s).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

fn of_ignored(p: &Program, b: BufferId) -> bool {
    let Holds::Param(x) = p.buffers[b.index()].holds else {
        return false;
    };
    p.groups.iter().any(|g| g.ignored && g.params.contains(&x))
}

/// Nothing reduces the gradients of copies on other ranks.
#[test]
fn copies_on_other_ranks_are_found() {
    let norm = || IgnoredParams::Patterns(vec!["norm".to_owned()]);
    for (of, set, axis) in [
        (
            IgnoredParams::Experts,
            &["mesh.ep=4", "mesh.dp_replicate=2"][..],
            "the outer axis",
        ),
        (norm(), &["mesh.ep=4"], "the shard axis"),
        (norm(), &["mesh.ep=1"], "the shard axis"),
    ] {
        let p = ignoring(of, set);
        let v = only(&p, RuleId::ReduceMissing, &format!("{set:?}"));
        assert!(
            v.message.contains("reduced over no axis") && v.message.contains(axis),
            "{}",
            v.message
        );
    }
    let p = ignoring(IgnoredParams::Experts, &["mesh.ep=2"]);
    let r = check(&p);
    let missing = r.of(RuleId::ReduceMissing).next().expect("a violation");
    assert!(missing.message.contains("the edp axis"), "{r}");
    assert!(r.of(RuleId::ExpertShard).next().is_some(), "{r}");
}

/// A gradient that is not divided is found in each parameter.
#[test]
fn sums_that_are_not_means_are_found() {
    for set in [
        &["mesh.ep=4"][..],
        &["mesh.ep=4", "train.grad_accum=2"],
        &[
            "mesh.ep=4",
            "train.grad_accum=2",
            "train.joint_backward=true",
        ],
    ] {
        let p = ignoring(IgnoredParams::Experts, set);
        assert!(check(&p).is_ok(), "{set:?}\n{}", check(&p));
        let scales = find(&p, |i| {
            let writes = match i.op {
                Op::Launch { .. } => p.writes(&i.op),
                _ => &[],
            };
            i.rule == Rule::Scale && writes.iter().any(|w| of_ignored(&p, w.buffer))
        });
        assert_eq!(scales.len(), 4, "{set:?}");
        for at in scales {
            let mut q = p.clone();
            drop(&mut q, at);
            let v = only(&q, RuleId::Scale, &format!("{set:?} #{}", at.0));
            assert!(v.message.contains("multiplied by 1;"), "{}", v.message);
        }
    }
}

/// A gradient that is not added to that of earlier micro-batches is lost.
#[test]
fn lost_micro_batches_are_found() {
    let p = ignoring(IgnoredParams::Experts, &["mesh.ep=4", "train.grad_accum=2"]);
    let sums = find(&p, |i| {
        let writes = match i.op {
            Op::Launch { .. } => p.writes(&i.op),
            _ => &[],
        };
        i.rule == Rule::Accumulate && writes.iter().any(|w| of_ignored(&p, w.buffer))
    });
    assert_eq!(sums.len(), 4);
    for at in sums {
        let mut q = p.clone();
        drop(&mut q, at);
        assert!(!check(&q).is_ok(), "#{}", at.0);
    }
}

#[test]
fn ignored_groups_have_one_shard() {
    let mut p = ignoring(IgnoredParams::NONE, &["mesh.ep=2"]);
    let sharded = |g: &crate::shard::Group| match &g.layout {
        crate::shard::Layout::PerParam(l) => l.shards == 2,
        crate::shard::Layout::Flat(_) => false,
    };
    let group = p.groups.iter_mut().find(|g| sharded(g)).expect("experts");
    group.ignored = true;
    let v = only(&p, RuleId::Group, "shards");
    assert!(
        v.message
            .contains("has 2 shards, but the policy does not manage it"),
        "{}",
        v.message
    );
}
