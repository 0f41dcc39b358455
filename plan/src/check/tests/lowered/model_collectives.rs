//! Collectives of the model graph: programs with them pass, and faults planted in them are found.

use super::{POLICIES, drop, find, passes, try_lower};
use crate::check::{RuleId, check, check_symmetry};
use crate::ir::*;
use crate::program::*;

/// Lowers eight layers that are divided among two ranks, with a gradient norm; `None` if the policy
/// rejects an option.
fn try_divided(policy: &str, set: &[&str]) -> Option<Program> {
    let policy = format!("fsdp.policy={policy}");
    let mut all = vec!["model.layers=8", "train.sync=false", policy.as_str()];
    all.extend(set);
    try_lower("small-tensor-parallel", &all)
}

fn divided(policy: &str, set: &[&str]) -> Program {
    try_divided(policy, set).unwrap_or_else(|| panic!("{policy} {set:?}"))
}

fn model_collectives(p: &Program) -> Vec<InstrId> {
    find(p, |i| {
        i.rule == Rule::ModelCollective && matches!(i.op, Op::Collective { .. })
    })
}

/// All ways to compile, recompute and capture, on meshes with one to three axes.
const WAYS: [&[&str]; 9] = [
    &[],
    &["mesh.dp_shard=1"],
    &["mesh.dp_outer=2"],
    &["train.recompute=full"],
    &["compile.mode=blocks"],
    &["compile.mode=regions", "train.recompute=full"],
    &["compile.mode=full"],
    &["compile.cuda_graph=[\"block\"]"],
    &[
        "compile.cuda_graph=full_iteration",
        "fsdp.allocator=caching",
    ],
];

#[test]
fn programs_that_communicate_along_a_third_axis_pass() {
    for policy in POLICIES {
        let ways = WAYS.map(|set| (set, try_divided(policy, set)));
        let accepted = ways.iter().filter(|(_, p)| p.is_some()).count();
        // The experimental engines do not compile, and the variant has no outer axis.
        let refused = match policy {
            "megatron_v2" => 4,
            "pr4435" => 5,
            _ => 2,
        };
        assert!(accepted >= WAYS.len() - refused, "{policy}: {accepted}");
        for (set, p) in ways {
            let Some(p) = p else { continue };
            passes(&check(&p), &format!("{policy} {set:?}"));
            let steady = model_collectives(&p);
            // Eight layers are four pairs, with one sum each: in backward for all pairs except the
            // first.
            assert!(steady.len() >= 7, "{policy} {set:?}");
            for &i in &steady {
                let Op::Collective { id, stream } = p.instrs[i.index()].op else {
                    unreachable!()
                };
                let comm = &p.communicators[p.collectives[id.index()].comm.index()];
                assert_eq!(comm.axes, AxisSet::of(AxisId::TP));
                assert_eq!(comm.ranks, RankGroup { size: 2, stride: 1 });
                assert_eq!(p.streams[stream.index()].kind, StreamKind::Model);
            }
        }
    }
}

#[test]
fn a_missing_collective() {
    for policy in POLICIES {
        let p = divided(policy, &[]);
        for missing in model_collectives(&p) {
            let mut q = p.clone();
            drop(&mut q, missing);
            let r = check(&q);
            let v = r.of(RuleId::Uninit).next();
            let v = v.unwrap_or_else(|| panic!("{policy} #{}\n{r}", missing.0));
            assert!(v.instr.is_some_and(|i| i > missing));
        }
    }
}

/// Without the wait before it, a collective sends data that are not ready yet. Without the wait
/// after it, computation reads data that have not arrived.
#[test]
fn a_missing_wait_on_either_side() {
    let wait = |i: &Instr| i.rule == Rule::ModelCollective && matches!(i.op, Op::Wait { .. });
    for policy in POLICIES {
        let p = divided(policy, &[]);
        let waits = find(&p, wait);
        assert!(waits.len() >= 14);
        for missing in waits {
            let mut q = p.clone();
            drop(&mut q, missing);
            let r = check(&q);
            assert!(
                r.of(RuleId::Race).next().is_some(),
                "{policy} #{}\n{r}",
                missing.0
            );
        }
    }
}

/// Two ranks that sum in different orders, and one that does not sum at all.
#[test]
fn ranks_that_disagree() {
    let p = divided("native", &[]);
    let all = model_collectives(&p);
    let mut q = p.clone();
    drop(&mut q, all[2]);
    let r = check_symmetry(&[p.clone(), q]);
    assert!(r.of(RuleId::Symmetry).next().is_some(), "{r}");
    let mut q = p.clone();
    let Op::Collective { id, .. } = q.instrs[all[2].index()].op else {
        unreachable!()
    };
    q.collectives[id.index()].bytes.0 /= 2;
    let r = check_symmetry(&[p, q]);
    assert!(r.of(RuleId::Symmetry).next().is_some(), "{r}");
}

/// A gather along the wrong axis, which has the same number of ranks.
#[test]
fn a_communicator_of_another_axis() {
    let p = divided("native", &[]);
    let mut q = p.clone();
    let tp = |c: &Communicator| c.axes == AxisSet::of(AxisId::TP);
    let comm = q.communicators.iter().position(tp).expect("tp");
    q.communicators[comm].ranks = RankGroup { size: 2, stride: 2 };
    let r = check(&q);
    let v = r.of(RuleId::Collective).next().expect("found");
    assert!(
        v.message
            .contains("2 ranks with stride 2 on axis tp of a mesh of 1 x 2"),
        "{}",
        v.message
    );
}

/// Biases that all ranks hold are counted once per rank, and slices are not summed.
#[test]
fn a_norm_that_counts_what_ranks_have_alike_twice() {
    for policy in POLICIES {
        let p = divided(policy, &[]);
        let sums = find(&p, |i| {
            i.rule == Rule::Clip && matches!(i.op, Op::Collective { .. })
        });
        let axes = |i: &InstrId| match p.instrs[i.index()].op {
            Op::Collective { id, .. } => {
                p.communicators[p.collectives[id.index()].comm.index()].axes
            }
            _ => AxisSet::EMPTY,
        };
        let wanted = [AxisId::TP, AxisId::DP_SHARD].map(AxisSet::of);
        assert_eq!(
            sums.iter().map(axes).collect::<Vec<_>>(),
            wanted,
            "{policy}"
        );
        for missing in sums {
            let mut q = p.clone();
            drop(&mut q, missing);
            let r = check(&q);
            assert!(r.of(RuleId::Norm).next().is_some(), "{policy}\n{r}");
        }
    }
}
