//! Experts divided among ranks: programs with them pass, and faults planted in their gradients,
//! norms and shards are found.

use super::{drop, find, passes, try_lower};
use crate::check::{RuleId, Severity, Violation, check};
use crate::ir::*;
use crate::program::*;

/// Policies with expert parallelism.
pub(super) const POLICIES: [&str; 3] = ["native", "fsdp2", "megatron"];

/// Lowers the shipped mixture of experts on four ranks; `None` if the policy rejects an option.
fn try_experts(policy: &str, set: &[&str]) -> Option<Program> {
    let policy = format!("fsdp.policy={policy}");
    let mut all = vec!["train.sync=false", "mesh.ep=2", policy.as_str()];
    all.extend(set);
    try_lower("small-moe", &all)
}

pub(super) fn experts(policy: &str, set: &[&str]) -> Program {
    try_experts(policy, set).unwrap_or_else(|| panic!("{policy} {set:?}"))
}

/// Returns the first violation of a rule. No other rule may be violated.
pub(super) fn only(q: &Program, rule: RuleId, what: &str) -> Violation {
    let r = check(q);
    let all = &r.violations;
    let alone = all
        .iter()
        .all(|v| v.rule == rule || v.rule.severity() == Severity::Warning);
    assert!(alone, "{what}\n{r}");
    let first = r.of(rule).next();
    first
        .unwrap_or_else(|| panic!("{what}: not found\n{r}"))
        .clone()
}

/// Returns whether a buffer is that of a group of experts.
fn of_experts(p: &Program, b: BufferId) -> bool {
    let x = match p.buffers[b.index()].holds {
        Holds::Group(g) => p.groups[g.index()].params[0],
        Holds::Param(x) => x,
        _ => return false,
    };
    p.params[x.index()].placements.on(AxisId::EP) != Placement::Replicate
}

/// Gate and down projections of experts as separate units.
const PROJECTIONS: &str = "fsdp.units=[\"layers.*\", \"layers.*.mlp.experts.gate_up\", \
                           \"layers.*.mlp.experts.down\", \"tok_embeddings\", \"norm+output=keep\"]";

const WAYS: [&[&str]; 31] = [
    &[PROJECTIONS],
    &[],
    &["mesh.ep=4"],
    &["mesh.dp_outer=2"],
    &["mesh.dp_outer=2", "mesh.ep=4"],
    &["train.recompute=full"],
    &["compile.mode=regions", "train.recompute=selective"],
    &["compile.mode=full"],
    &["compile.mode=full", "mesh.ep=4"],
    &["compile.cuda_graph=[\"block\"]"],
    &["fsdp.strategy=optim", "mesh.ep=4"],
    &["train.grad_accum=2", "fsdp.gradient_sync=last"],
    &["moe.dispatcher=all_to_all", "train.recompute=full"],
    &["moe.dispatcher=padded", "moe.capacity_factor=1.25"],
    &["moe.dispatcher=padded", "compile.mode=full", "mesh.ep=4"],
    &[
        "moe.dispatcher=padded",
        "compile.cuda_graph=full_iteration",
        "fsdp.allocator=caching",
    ],
    &["moe.dispatcher=peer", "train.recompute=full"],
    &["moe.dispatcher=deepep"],
    &[
        "moe.dispatcher=deepep",
        "mesh.ep=4",
        "mesh.gpus_per_node=2",
        "train.recompute=full",
        "compile.mode=regions",
    ],
    &[
        "moe.dispatcher=deepep",
        "moe.capacity_factor=0.7",
        "moe.on_overflow=drop",
        "train.recompute=selective",
    ],
    &[
        "moe.dispatcher=peer",
        "mesh.ep=4",
        "compile.cuda_graph=[\"block\"]",
    ],
    &[
        "moe.dispatcher=peer",
        "train.recompute=selective",
        "compile.mode=regions",
    ],
    &["moe.dispatcher=peer", "compile.mode=full", "mesh.ep=4"],
    &[
        "moe.dispatcher=peer",
        "compile.cuda_graph=full_iteration",
        "fsdp.allocator=caching",
    ],
    &["moe.dispatcher=gather", "moe.capacity_factor=1.25"],
    &[
        "moe.dispatcher=gather",
        "moe.capacity_factor=0.7",
        "moe.on_overflow=drop",
        "train.recompute=full",
        "mesh.ep=4",
    ],
    &[
        "moe.dispatcher=gather",
        "moe.capacity_factor=1.1",
        "compile.mode=full",
    ],
    &[
        "moe.dispatcher=gather",
        "moe.capacity_factor=1.1",
        "compile.cuda_graph=full_iteration",
        "fsdp.allocator=caching",
    ],
    &[
        "moe.dispatcher=peer",
        "moe.capacity_factor=0.7",
        "moe.on_overflow=drop",
        "train.recompute=selective",
        "compile.mode=regions",
    ],
    &[
        "moe.dispatcher=all_to_all",
        "moe.capacity_factor=0.7",
        "moe.on_overflow=drop",
    ],
    &[
        "moe.dispatcher=gather",
        "moe.capacity_factor=1.25",
        "train.activation_offload=true",
    ],
];

/// Returns the steady barriers before rows are pushed.
fn barriers(p: &Program) -> Vec<InstrId> {
    find(p, |i| match i.op {
        Op::Collective { id, .. } => p.collectives[id.index()].kind == CollectiveKind::Barrier,
        _ => false,
    })
}

/// Tokens and gradients are exchanged in both passes, each after a barrier, and the host waits for
/// none of them.
#[test]
fn rows_are_pushed_behind_barriers() {
    let p = experts("native", &["moe.dispatcher=peer"]);
    let of = |kind| {
        let kind_of = |id: CollectiveId| p.collectives[id.index()].kind;
        find(
            &p,
            |i| matches!(i.op, Op::Collective { id, .. } if kind_of(id) == kind),
        )
        .len()
    };
    let layers = 2;
    assert_eq!(of(CollectiveKind::PeerPush), 2 * layers);
    assert_eq!(of(CollectiveKind::PeerReturn), 2 * layers);
    assert_eq!(barriers(&p).len(), 4 * layers);
    let waits = find(&p, |i| {
        i.rule == Rule::Model && matches!(i.op, Op::HostWait(_))
    });
    assert!(waits.is_empty());
    // Half of the pairs of top-2 choices among four experts are on both ranks.
    for c in p.collectives.iter().filter(|c| c.kind.pushes()) {
        let of = c.sent.expect("rows").of;
        let share = of.expected() as f64 / of.rows() as f64;
        let all = p.collectives.iter().filter(|c| c.sent.is_some());
        assert!(all.count() > 0 && (0.5..1.0).contains(&share), "{share}");
        assert!(c.expected_bytes() < c.bytes.0);
    }
}

/// Two nodes with two ranks each, eight experts and `top_k` = 2. Of all pairs of experts, 13 of 28
/// have one on a rank, and 22 of 28 have one on a node. A rank gets the tokens of one rank of the
/// other node over the network.
#[test]
fn rows_cross_the_network_once_per_node() {
    let nodes = ["mesh.ep=4", "mesh.gpus_per_node=2"];
    let p = experts("native", &[&["moe.dispatcher=deepep"], &nodes[..]].concat());
    let pushes = |p: &Program| -> Vec<Collective> {
        let all = p.collectives.iter().filter(|c| c.kind.pushes());
        all.cloned().collect()
    };
    let pushed = pushes(&p);
    assert_eq!(pushed.len(), 2 * 2 * 2);
    for c in &pushed {
        let sent = c.sent.expect("rows");
        let (all, width) = (sent.of.rows(), c.bytes.0 / sent.of.rows());
        let of = |share: f64, rows: u64| (share * rows as f64).round() as u64;
        let (ranks, network) = (of(13.0 / 28.0, all), of(22.0 / 28.0, all / 4));
        let found = (sent.of.expected(), sent.of.over_network());
        assert_eq!(found, (ranks, network));
        assert_eq!(c.expected_bytes(), ranks * width);
        assert_eq!(c.network_bytes(), network * width);
    }
    // On one node, rows and memory are those of `peer`.
    let [deepep, peer] = ["deepep", "peer"]
        .map(|d| experts("native", &["mesh.ep=4", &format!("moe.dispatcher={d}")]));
    let shapes = |p: &Program| -> Vec<_> {
        let all = pushes(p).into_iter();
        all.map(|c| (c.kind, c.bytes, c.sent.map(|s| s.of)))
            .collect()
    };
    assert_eq!(shapes(&deepep), shapes(&peer));
    assert!(pushes(&deepep).iter().all(|c| c.network_bytes() == 0));
    let bytes = |p: &Program| p.buffers.iter().map(|b| b.bytes.0).sum::<u64>();
    assert_eq!(bytes(&deepep), bytes(&peer));
}

/// Without a barrier, a fast rank writes to memory that another rank still uses: the gathered rows
/// or results of the previous layer, or the previous content of that address. A barrier that starts
/// before the last use does not help.
#[test]
fn windows_are_written_before_their_last_use() {
    for set in [
        &["moe.dispatcher=peer"][..],
        &["moe.dispatcher=peer", "train.recompute=full"],
        &["moe.dispatcher=peer", "fsdp.allocator=caching"],
        &["moe.dispatcher=deepep", "mesh.ep=4", "mesh.gpus_per_node=2"],
    ] {
        let p = experts("native", set);
        let mut found = 0;
        for missing in barriers(&p) {
            let mut q = p.clone();
            drop(&mut q, missing);
            let r = check(&q);
            let others = r.violations.iter().filter(|v| v.rule != RuleId::Window);
            assert!(
                others
                    .clone()
                    .all(|v| v.rule.severity() == Severity::Warning),
                "{r}"
            );
            if let Some(v) = r.of(RuleId::Window).next() {
                assert!(v.message.contains("no barrier follows"), "{v:?}");
                found += 1;
            }
        }
        // A collective of choices directly before it also acts as a barrier.
        assert!(found >= 4, "{set:?}: {found}");
        let mut q = p.clone();
        for early in barriers(&p) {
            // The stream's wait for computation comes after the barrier.
            let before = (0..early.0).rev().find(|&i| {
                matches!(q.instrs[i as usize].op, Op::Wait { stream, .. } if stream != COMPUTE)
            });
            q.instrs
                .swap(before.expect("a wait") as usize, early.index());
        }
        assert!(check(&q).of(RuleId::Window).next().is_some(), "{set:?}");
    }
}

/// The host reads how many rows ranks exchange, once per expert layer and forward.
#[test]
fn only_exchanged_counts_stop_the_host() {
    for policy in POLICIES {
        let waits = |set: &[&str]| {
            let p = experts(policy, set);
            let found = find(&p, |i| {
                i.rule == Rule::Model && matches!(i.op, Op::HostWait(_))
            });
            (p, found)
        };
        let (_, none) = waits(&["moe.dispatcher=gather"]);
        let (padded, also_none) = waits(&["moe.dispatcher=padded"]);
        assert_eq!((none.len(), also_none.len()), (0, 0), "{policy}");
        let (p, found) = waits(&["moe.dispatcher=all_to_all"]);
        let layers = 2;
        assert_eq!(found.len(), layers, "{policy}");
        assert!(
            found
                .iter()
                .all(|i| p.instrs[i.index()].phase == Phase::Forward)
        );
        let (_, again) = waits(&["moe.dispatcher=all_to_all", "train.recompute=full"]);
        assert_eq!(again.len(), 2 * layers, "{policy}");
        // The choices of other ranks say how many rows will be pushed.
        let (pushed, counted) = waits(&["moe.dispatcher=deepep"]);
        assert_eq!(counted.len(), layers, "{policy}");
        for wait in &counted {
            let next = pushed.instrs[wait.index()..]
                .iter()
                .find_map(|i| match i.op {
                    Op::Collective { id, .. } => Some(pushed.collectives[id.index()].kind),
                    _ => None,
                });
            assert_eq!(next, Some(CollectiveKind::Barrier), "{policy}");
        }
        // Otherwise, the programs differ only by the exchange of counts.
        let exchanges = |p: &Program| {
            find(p, |i| {
                i.rule == Rule::ModelCollective && matches!(i.op, Op::Collective { .. })
            })
            .len()
        };
        assert_eq!(exchanges(&p), exchanges(&padded) + layers, "{policy}");
    }
}

/// Without its wait, the host exchanges as many rows as there were in the previous step. An
/// exchange in backward needs no wait of its own.
#[test]
fn the_host_reads_counts_before_they_have_arrived() {
    for policy in POLICIES {
        for set in [
            &["moe.dispatcher=all_to_all"][..],
            &["moe.dispatcher=all_to_all", "train.recompute=full"],
        ] {
            let p = experts(policy, set);
            let waits = find(&p, |i| {
                i.rule == Rule::Model && matches!(i.op, Op::HostWait(_))
            });
            assert!(!waits.is_empty(), "{policy}");
            for missing in waits {
                let mut q = p.clone();
                drop(&mut q, missing);
                let r = check(&q);
                let first = r.of(RuleId::HostCounts).next();
                let message = &first.unwrap_or_else(|| panic!("{policy} {set:?}")).message;
                assert!(message.contains("without a wait"), "{message}");
            }
        }
    }
}

/// Backward exchanges the same rows the other way: counts of sent and received rows are swapped.
#[test]
fn counted_rows_return_the_way_they_came() {
    let p = experts(
        "native",
        &["moe.dispatcher=all_to_all", "moe.capacity_factor=2"],
    );
    let counted: Vec<_> = (p.collectives.iter())
        .filter_map(|c| {
            Some((
                c,
                c.sent
                    .filter(|s| matches!(s.of, SelectedRows::Counted(_)))?,
            ))
        })
        .collect();
    let pairs: Vec<_> = (counted.iter())
        .map(|(_, s)| [s.by.input.buffer, s.by.output.buffer])
        .collect();
    let of = |pair| pairs.iter().filter(|p| **p == pair).count();
    for &[a, b] in &pairs {
        assert_eq!(of([a, b]), of([b, a]));
    }
    for (c, sent) in &counted {
        assert_eq!(c.kind, CollectiveKind::AllToAll);
        // Twice the rows of a balanced load are reserved.
        assert_eq!(sent.of.rows(), 2 * sent.of.expected());
        assert_eq!(2 * c.expected_bytes(), c.bytes.0);
    }
    assert!(counted.len() >= 2 * 2 * 2, "{}", counted.len());
}

#[test]
fn programs_with_divided_experts_pass() {
    for policy in POLICIES {
        let ways = WAYS.map(|set| (set, try_experts(policy, set)));
        let accepted = ways.iter().filter(|(_, p)| p.is_some()).count();
        assert!(accepted >= WAYS.len() - 8, "{policy}: {accepted}");
        for (set, p) in ways {
            let Some(p) = p else { continue };
            let r = check(&p);
            passes(&r, &format!("{policy} {set:?}"));
            let pushes = ["moe.dispatcher=peer", "moe.dispatcher=deepep"];
            let window = set.iter().any(|option| pushes.contains(option));
            let window = window.then_some(RuleId::Window);
            let counts = set.contains(&"moe.dispatcher=all_to_all");
            let counts = counts.then_some(RuleId::HostCounts);
            let rules = [
                RuleId::Scale,
                RuleId::Norm,
                RuleId::ExpertShard,
                RuleId::RouterLoss,
                RuleId::ExpertTail,
                RuleId::ExpertEmpty,
                RuleId::ExpertRows,
            ];
            for rule in rules.into_iter().chain(window).chain(counts) {
                let row = r.rules.iter().find(|x| x.id == rule).expect("listed");
                assert!(row.checked > 0, "{policy} {set:?}: {rule}");
            }
        }
    }
}

/// A rank keeps its share of all state, for any number of ranks that divide the experts.
#[test]
fn state_does_not_depend_on_the_ranks_that_divide_experts() {
    for policy in POLICIES {
        let state = |ep: &str| -> u64 {
            // Rows with few different lengths, so that layouts have little padding.
            let widths = [
                "model.expert_ffn=32",
                "model.shared_expert_ffn=32",
                "model.ffn=64",
            ];
            let p = experts(policy, &[&[ep][..], &widths].concat());
            let kept = |b: &&Buffer| {
                let moments = b.role == Role::OptimizerState;
                moments || b.role == Role::MainWeight || b.role == Role::ModelWeight
            };
            p.buffers.iter().filter(kept).map(|b| b.bytes.0).sum()
        };
        let whole = state("mesh.ep=1");
        for ep in ["mesh.ep=2", "mesh.ep=4"] {
            // Layouts of two groups instead of one differ only in padding.
            let off = state(ep).abs_diff(whole);
            assert!(off * 50 < whole, "{policy} {ep}: {off} of {whole}");
        }
    }
}

/// The bug that most engines had: experts are averaged over the ranks that reduce them, not over
/// all ranks. It also occurs if no rank shares them.
#[test]
fn experts_averaged_over_the_ranks_of_their_reduction() {
    for policy in POLICIES {
        for ep in ["mesh.ep=2", "mesh.ep=4"] {
            for mode in ["compile.mode=off", "compile.mode=full"] {
                let what = format!("{policy} {ep} {mode}");
                let Some(p) = try_experts(policy, &[ep, mode]) else {
                    assert_eq!((policy, mode), ("megatron", "compile.mode=full"));
                    continue;
                };
                let mut q = p.clone();
                // The factor of the engine, in a kernel or in a collective.
                let scale = find(&p, |i| {
                    i.rule == Rule::Scale && matches!(i.op, Op::Launch { .. })
                });
                let mut planted = 0;
                for &i in &scale {
                    let Op::Launch { kernel, .. } = q.instrs[i.index()].op else {
                        unreachable!("only kernels were looked for");
                    };
                    match &mut q.kernels[kernel.index()].body[0].op {
                        OpKind::Shard(ShardOp::SumPieces { factor, .. }) => *factor = Real(1.0),
                        _ => drop(&mut q, i),
                    }
                    planted += 1;
                }
                for c in &mut q.collectives {
                    if of_experts(&p, c.parts[0].input.buffer)
                        && matches!(c.reduce, ReduceOp::PremulSum(_))
                    {
                        c.reduce = ReduceOp::Avg;
                        planted += 1;
                    }
                }
                assert!(planted > 0, "{what}: no factor");
                let v = only(&q, RuleId::Scale, &what);
                assert!(v.message.contains("is multiplied by"), "{what}: {v:?}");
            }
        }
    }
}

/// A norm without experts, and one over only the ranks of an expert-parallel group.
#[test]
fn a_norm_without_experts_or_of_some_ranks() {
    for policy in POLICIES {
        let p = experts(policy, &[]);
        let squares = find(&p, |i| {
            let Op::Launch { kernel, .. } = i.op else {
                return false;
            };
            let op = p.kernels[kernel.index()].body.first().map(|b| b.op);
            op == Some(OpKind::Shard(ShardOp::SumSquares))
        });
        // The first one replaces the previous content of the scalar.
        for &missing in &squares[1..] {
            let mut q = p.clone();
            drop(&mut q, missing);
            let r = check(&q);
            let v = r.of(RuleId::Norm).next();
            let v = v.unwrap_or_else(|| panic!("{policy} #{}\n{r}", missing.0));
            assert!(
                v.message.contains("gradients that the optimizer reads"),
                "{v:?}"
            );
        }
        let sums = find(&p, |i| {
            i.rule == Rule::Clip && matches!(i.op, Op::Collective { .. })
        });
        let mut q = p.clone();
        let Op::Collective { id, .. } = q.instrs[sums[0].index()].op else {
            unreachable!()
        };
        let edp = |c: &Communicator| c.axes == AxisSet::of(AxisId::EDP);
        let edp = q.communicators.iter().position(edp).expect("edp");
        q.collectives[id.index()].comm = CommId(edp as u8);
        let v = only(&q, RuleId::Norm, policy);
        assert!(v.message.contains("summed over the edp axis"), "{v:?}");
    }
}

/// Experts that are gathered from ranks with other experts, and shards of a share that is not
/// theirs.
#[test]
fn experts_sharded_over_ranks_that_do_not_have_them() {
    for policy in POLICIES {
        let p = experts(policy, &[]);
        let mut q = p.clone();
        let ep = |c: &Communicator| c.axes == AxisSet::of(AxisId::EP);
        let ep = p.communicators.iter().position(ep).expect("ep");
        // The same number of ranks, but different ones.
        for c in &mut q.collectives {
            if of_experts(&p, c.parts[0].output.buffer) {
                c.comm = CommId(ep as u8);
            }
        }
        let r = check(&q);
        let v = r.of(RuleId::ExpertShard).next();
        let v = v.unwrap_or_else(|| panic!("{policy}\n{r}"));
        assert!(v.message.contains("along axis ep; expected edp"), "{v:?}");
    }
    let p = experts("native", &[]);
    let mut q = p.clone();
    let group = (q.groups.iter_mut())
        .find(|g| of_experts(&p, holding(&p, g.params[0])))
        .expect("experts");
    let crate::shard::Layout::Flat(layout) = &mut group.layout else {
        unreachable!()
    };
    layout.shards = 4;
    let r = check(&q);
    let v = r.of(RuleId::ExpertShard).next().expect("found");
    assert!(v.message.contains("have 4 shards; expected 2"), "{v:?}");
}

/// Returns a buffer of a parameter's group.
fn holding(p: &Program, x: ParamId) -> BufferId {
    let of = |b: &Buffer| match b.holds {
        Holds::Group(g) => p.groups[g.index()].params.contains(&x),
        _ => false,
    };
    BufferId(p.buffers.iter().position(of).expect("a buffer") as u32)
}
