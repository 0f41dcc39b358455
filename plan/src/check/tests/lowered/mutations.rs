//! The historical bugs, planted in programs of all three policies.

use super::{POLICIES, RELEASED, drop, find, small, try_lower};
use crate::check::{Report, RuleId, Violation, check};
use crate::ir::*;
use crate::ir::{AxisId, AxisSet, OpKind};
use crate::program::*;

fn good(policy: &str, set: &[&str]) -> Program {
    let p = small(policy, set).unwrap_or_else(|| panic!("{policy} {set:?} is refused"));
    let r = check(&p);
    assert!(r.is_ok(), "{policy} {set:?}\n{r}");
    p
}

/// Returns the first violation of a rule. It must name its instruction and a buffer.
fn first<'r>(p: &Program, r: &'r Report, rule: RuleId, what: &str) -> &'r Violation {
    let v = r
        .of(rule)
        .next()
        .unwrap_or_else(|| panic!("{what}: {rule} is not reported\n{r}"));
    let i = v.instr.expect("an instruction");
    assert!(
        v.message.contains(&format!("#{}", i.0)),
        "{what}: {}",
        v.message
    );
    let names = |b: usize| v.message.contains(&p.buffer_name(BufferId(b as u32)));
    assert!(
        (0..p.buffers.len()).any(names),
        "{what}: no buffer is named: {}",
        v.message
    );
    v
}

fn collective(p: &Program, i: &Instr) -> Option<CollectiveKind> {
    match i.op {
        Op::Collective { id, .. } => Some(p.collectives[id.index()].kind),
        _ => None,
    }
}

fn gathers(p: &Program, phase: Phase) -> Vec<InstrId> {
    find(p, |i| {
        i.phase == phase && collective(p, i) == Some(CollectiveKind::AllGather)
    })
}

fn reductions(p: &Program) -> Vec<InstrId> {
    find(p, |i| {
        i.phase == Phase::Backward && collective(p, i) == Some(CollectiveKind::ReduceScatter)
    })
}

fn is_wait(i: &Instr) -> bool {
    matches!(i.op, Op::Wait { .. })
}

fn is_launch(i: &Instr) -> bool {
    matches!(i.op, Op::Launch { .. })
}

/// A kernel whose body exceeds an operand, even by one column.
#[test]
fn operands_shorter_than_what_a_kernel_takes_of_them() {
    // Queries, keys and values are columns of one buffer.
    let p = try_lower("small-merged", &[]).expect("accepted");
    let attention = |i: &Instr| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name.starts_with("attention"),
        _ => false,
    };
    let launches = find(&p, attention);
    assert!(launches.len() > 2);
    for (&i, short) in launches.iter().zip([2, 64, 1 << 10]) {
        let mut q = p.clone();
        let Op::Launch { reads, .. } = q.instrs[i.index()].op else {
            unreachable!()
        };
        q.accesses[reads as usize].bytes -= short;
        let r = check(&q);
        let v = r.of(RuleId::Form).next();
        let v = v.unwrap_or_else(|| panic!("{short} bytes\n{r}"));
        // Operands are created once, so the first step launches the same ones.
        let op = v.instr.map(|i| q.instrs[i.index()].op);
        assert_eq!(op, Some(q.instrs[i.index()].op), "{}", v.message);
        assert!(
            v.message.contains("into read 0, which has"),
            "{}",
            v.message
        );
    }
}

/// The range of a gradient must not be short by one element of its storage type, which differs from
/// the kernel's type.
#[test]
fn gradients_shorter_than_what_a_kernel_makes_of_them() {
    for (compute, grads) in [("f32", "bf16"), ("bf16", "f32")] {
        let set = [
            &*format!("precision.compute={compute}"),
            &format!("precision.main_grads={grads}"),
        ];
        let p = small("native", &set).expect("accepted");
        let gemm = |i: &Instr| match i.op {
            Op::Launch { kernel, .. } => {
                let full = |a: &Access| p.buffers[a.buffer.index()].role == Role::FullGrad;
                p.kernels[kernel.index()].name == "mm" && p.writes(&i.op).iter().any(full)
            }
            _ => false,
        };
        let mut q = p.clone();
        let at = find(&p, gemm)[0];
        let Op::Launch { writes, .. } = q.instrs[at.index()].op else {
            unreachable!()
        };
        let a = &mut q.accesses[writes as usize];
        a.bytes -= p.buffers[a.buffer.index()].dtype.size();
        let r = check(&q);
        let v = r.of(RuleId::Form).next();
        let v = v.unwrap_or_else(|| panic!("{set:?}\n{r}"));
        assert!(v.message.contains("into write 0"), "{}", v.message);
    }
}

#[test]
fn computation_before_its_gather() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let waits = find(&p, |i| {
            i.rule == Rule::GatherDone && i.phase == Phase::Forward
        });
        let wait = waits[waits.len() / 2];
        let mut q = p.clone();
        drop(&mut q, wait);
        let r = check(&q);
        let v = first(&q, &r, RuleId::GatherDone, policy);
        // The first kernel after the dropped wait that reads gathered data.
        let gathered = |a: &Access| {
            matches!(
                q.buffers[a.buffer.index()].role,
                Role::FullWeight | Role::GatherBuffer
            )
        };
        let next = find(&q, |i| q.reads(&i.op).iter().any(gathered))
            .into_iter()
            .find(|x| *x > wait);
        assert_eq!(v.instr, next, "{policy}: {}", v.message);
        assert_eq!(
            collective(&q, &q.instrs[v.other.expect("gather").index()]),
            Some(CollectiveKind::AllGather)
        );
    }
}

#[test]
fn gathers_that_do_not_wait_for_the_optimizer() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let gather = gathers(&p, Phase::Forward)[0];
        let mut q = p.clone();
        for w in find(&p, is_wait).into_iter().filter(|w| *w < gather) {
            if !matches!(p.instrs[w.index()].rule, Rule::CopyIn) {
                drop(&mut q, w);
            }
        }
        let r = check(&q);
        let v = first(&q, &r, RuleId::GatherInput, policy);
        assert!(v.instr <= Some(gather), "{policy}: {}", v.message);
        let other = q.instrs[v.other.expect("a write").index()];
        assert!(
            matches!(other.phase, Phase::Optimizer | Phase::Refresh),
            "{policy}: {}",
            v.message
        );
    }
}

#[test]
fn reductions_that_do_not_wait_for_gradients() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let reduce = reductions(&p)[1];
        let fork = *find(&p, |i| i.rule == Rule::ReduceFork && is_wait(i))
            .iter()
            .rfind(|w| **w < reduce)
            .expect("fork");
        let mut q = p.clone();
        drop(&mut q, fork);
        let r = check(&q);
        let v = first(&q, &r, RuleId::ReduceInput, policy);
        assert!(
            v.instr.is_some_and(|i| i > fork && i <= reduce),
            "{policy}: {}",
            v.message
        );
    }
}

#[test]
fn a_skipped_reduction() {
    for policy in POLICIES {
        let p = good(policy, &["train.grad_accum=2"]);
        let all = reductions(&p);
        for reduce in [all[0], all[all.len() / 2 + 1]] {
            let mut q = p.clone();
            drop(&mut q, reduce);
            let r = check(&q);
            let input = match p.instrs[reduce.index()].op {
                Op::Collective { id, .. } => p.collectives[id.index()].parts[0].input.buffer,
                _ => unreachable!(),
            };
            // The input is freed without having been read, or the optimizer gets a gradient that is
            // not this step's sum.
            let v = first(&q, &r, RuleId::ReduceMissing, policy);
            assert!(
                v.message.contains(&p.buffer_name(input)) || v.message.contains("main_grad"),
                "{policy}: {}",
                v.message
            );
        }
    }
}

/// Both halves of a reduction by copy engines: the exchange, and the sum of its pieces.
#[test]
fn half_a_reduction() {
    let set = ["fsdp.copy_engine_reduce=true", "train.grad_accum=2"];
    let p = good("native", &set);
    let exchanges = find(&p, |i| collective(&p, i) == Some(CollectiveKind::AllToAll));
    let is_sum = |i: &Instr| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name == "sum_pieces",
        _ => false,
    };
    let sums = find(&p, is_sum);
    assert_eq!(exchanges.len(), sums.len());
    for missing in [exchanges[0], exchanges[3], sums[0], sums[3]] {
        let mut q = p.clone();
        drop(&mut q, missing);
        first(&q, &check(&q), RuleId::ReduceMissing, "native");
    }
    // Twice.
    let mut q = p.clone();
    let again = q.instrs[exchanges[1].index()].op;
    q.instrs[sums[1].index()].op = again;
    first(&q, &check(&q), RuleId::Tied, "native");
    // Pieces of a different number of ranks.
    let mut q = p.clone();
    for k in &mut q.kernels {
        if let OpKind::Shard(ShardOp::SumPieces { ranks, .. }) = &mut k.body[0].op {
            *ranks /= 2;
        }
    }
    first(&q, &check(&q), RuleId::ReduceMissing, "native");
}

/// The same, if the optimizer sums the pieces.
#[test]
fn half_a_reduction_before_the_optimizer() {
    let set = [
        "fsdp.copy_engine_reduce=true",
        "fsdp.sum_in_optimizer=true",
        "train.clip_norm=0",
    ];
    let p = good("native", &set);
    let exchanges = find(&p, |i| collective(&p, i) == Some(CollectiveKind::AllToAll));
    for missing in [exchanges[0], exchanges[3]] {
        let mut q = p.clone();
        drop(&mut q, missing);
        first(&q, &check(&q), RuleId::ReduceMissing, "native");
    }
    // Pieces of a different number of ranks, and no pieces at all.
    for of in [2, 0] {
        let mut q = p.clone();
        let mut changed = 0;
        for k in &mut q.kernels {
            if let OpKind::Shard(ShardOp::AdamW(Fused { pieces, .. })) = &mut k.body[0].op {
                *pieces = pieces.filter(|_| of > 0).map(|p| Pieces {
                    ranks: p.ranks / of,
                    ..p
                });
                changed += 1;
            }
        }
        assert!(changed > 0);
        first(&q, &check(&q), RuleId::ReduceMissing, "native");
    }
}

#[test]
fn an_output_over_the_wrong_part_of_the_input() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let reduce = reductions(&p)[1];
        let Op::Collective { id, .. } = p.instrs[reduce.index()].op else {
            unreachable!()
        };
        let mut q = p.clone();
        let part = &mut q.collectives[id.index()].parts[0];
        let bytes = part.output.bytes;
        part.output = Access {
            offset: part.input.offset + bytes,
            bytes,
            ..part.input
        };
        let r = check(&q);
        let v = first(&q, &r, RuleId::ReduceAlias, policy);
        // Descriptors are created once, so the first step launches another one with the same shape.
        assert_eq!(
            v.instr.map(|i| q.instrs[i.index()].op),
            Some(q.instrs[reduce.index()].op),
            "{policy}"
        );
    }
}

#[test]
fn buffers_freed_under_their_reduction() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let release = find(&p, |i| {
            matches!(i.rule, Rule::ReduceGate | Rule::FinalFence)
                && matches!(
                    i.op,
                    Op::Wait {
                        stream: COMPUTE,
                        ..
                    }
                )
        });
        let mut q = p.clone();
        drop(&mut q, release[0]);
        if policy != "megatron_v2" {
            let r = check(&q);
            let v = first(&q, &r, RuleId::ReduceRelease, policy);
            assert!(v.instr > Some(release[0]), "{policy}: {}", v.message);
            assert!(matches!(
                q.instrs[v.instr.expect("free").index()].op,
                Op::Free(_)
            ));
        }
    }
}

/// Slots of a trace pool move from stream to stream, and only the schedule orders them: the drain
/// before a bucket is released, and the gather stream's wait before it takes a slot.
#[test]
fn slots_of_a_trace_pool_without_their_waits() {
    let set = ["fsdp.allocator=trace_pool", "train.grad_accum=2"];
    let p = good("pr4435", &set);
    for (rule, phase) in [
        (Rule::ReduceGate, Phase::Backward),
        (Rule::GatherGate, Phase::Forward),
        (Rule::GatherGate, Phase::Backward),
    ] {
        let waits = find(&p, |i| i.rule == rule && i.phase == phase && is_wait(i));
        let caught = waits.iter().filter(|wait| {
            let mut q = p.clone();
            drop(&mut q, **wait);
            let r = check(&q);
            let found = r.of(RuleId::Reuse).chain(r.of(RuleId::ReduceRelease));
            found.into_iter().any(|v| v.instr > Some(**wait))
        });
        assert!(caught.count() > 0, "{rule:?} {phase:?}");
    }
    // A buffer that is not freed is requested again.
    let full = |i: &Instr| matches!(i.op, Op::Free(b) if p.buffers[b.index()].pool == Pool::Traced);
    let free = find(&p, full)[0];
    let mut q = p.clone();
    drop(&mut q, free);
    let r = check(&q);
    assert!(r.of(RuleId::Alloc).next().is_some(), "{r}");
}

#[test]
fn a_unit_gathered_twice() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let gather = gathers(&p, Phase::Forward)[2];
        let mut q = p.clone();
        // It replaces the event that is recorded after it, which the first gather no longer needs.
        let op = q.instrs[gather.index()].op;
        let at = gather.index() + 1;
        assert!(matches!(q.instrs[at].op, Op::Record { .. }), "{policy}");
        q.instrs.insert(
            at,
            Instr {
                op,
                ..q.instrs[gather.index()]
            },
        );
        for s in &mut q.sections {
            if s.kind == SectionKind::Steady {
                s.instrs.end += 1;
            } else if s.kind == SectionKind::Validation {
                s.instrs = s.instrs.start + 1..s.instrs.end + 1;
            }
        }
        let r = check(&q);
        if policy == "fsdp2" {
            // The gather writes a separate buffer. It counts as a second gather only if the unit is
            // already full.
            assert!(r.of(RuleId::DoubleGather).next().is_none() || r.errors() > 0);
            continue;
        }
        let v = first(&q, &r, RuleId::DoubleGather, policy);
        assert_eq!(
            (v.instr, v.other),
            (Some(InstrId(at as u32)), Some(gather)),
            "{policy}"
        );
    }
}

#[test]
fn a_shard_refreshed_twice() {
    let p = good("native", &["mesh.dp_outer=2", "fsdp.outer_strategy=optim"]);
    let outer = find(&p, |i| {
        i.rule == Rule::OuterGather && matches!(i.op, Op::Collective { .. })
    })[2];
    // It replaces the wait of the outer stream before it.
    let mut q = p.clone();
    let again = outer.index() - 1;
    assert!(is_wait(&q.instrs[again]));
    q.instrs[again].op = q.instrs[outer.index()].op;
    let r = check(&q);
    let v = first(&q, &r, RuleId::DoubleGather, "native");
    assert_eq!(v.instr, Some(outer), "{}", v.message);
    assert_eq!(v.other, Some(InstrId(again as u32)), "{}", v.message);
}

#[test]
fn a_prefetch_in_recompute() {
    for policy in POLICIES {
        let p = good(policy, &["train.recompute=full"]);
        let prefetched = find(&p, |i| {
            i.rule == Rule::Prefetch && collective(&p, i) == Some(CollectiveKind::AllGather)
        });
        let gather = prefetched[prefetched.len() - 1];
        let mut q = p.clone();
        q.instrs[gather.index()].phase = Phase::Recompute;
        let r = check(&q);
        assert_eq!(
            first(&q, &r, RuleId::RecomputePrefetch, policy).instr,
            Some(gather),
            "{policy}"
        );
    }
}

#[test]
fn the_optimizer_before_the_fence() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let mut q = p.clone();
        for w in find(&p, |i| i.rule == Rule::FinalFence && is_wait(i)) {
            drop(&mut q, w);
        }
        let r = check(&q);
        let norm = find(&p, |i| i.phase == Phase::Clip && is_launch(i));
        let racing = r
            .of(RuleId::ReduceMissing)
            .find(|v| v.message.contains("without being ordered behind"));
        let v = racing.unwrap_or_else(|| panic!("{policy}\n{r}"));
        assert!(
            v.instr.is_some_and(|i| norm.contains(&i)) && v.message.contains("main_grad"),
            "{policy}: {}",
            v.message
        );
    }
}

#[test]
fn weights_that_were_not_refreshed() {
    for policy in ["native", "megatron"] {
        let p = good(
            policy,
            &["precision.main_params=f32", "precision.compute=bf16"],
        );
        let mut q = p.clone();
        if policy == "native" {
            // The optimizer's launch writes both. The compute weights are removed from the second
            // one's writes.
            let update = find(&p, |i| i.rule == Rule::Optimizer && is_launch(i))[1];
            let Op::Launch { end, .. } = &mut q.instrs[update.index()].op else {
                panic!("a launch");
            };
            *end -= 1;
        } else {
            let refresh = find(&p, |i| i.phase == Phase::Refresh && is_launch(i));
            drop(&mut q, refresh[1]);
        }
        let r = check(&q);
        let v = first(&q, &r, RuleId::StaleWeight, policy);
        assert!(
            gathers(&p, Phase::Forward).contains(&v.instr.expect("gather")),
            "{policy}: {}",
            v.message
        );
    }
}

/// Storage that is kept contains the weights of the last step until new ones are copied there.
#[test]
fn kept_storage_that_is_not_gathered_again() {
    let p = good("fsdp2", &["fsdp.keep_unsharded_storage=true"]);
    let copies = find(&p, |i| {
        i.rule == Rule::CopyOut && i.phase == Phase::Forward && is_launch(i)
    });
    let mut q = p.clone();
    drop(&mut q, copies[1]);
    let r = check(&q);
    let v = first(&q, &r, RuleId::StaleWeight, "fsdp2");
    let unit = |i: InstrId| q.instrs[i.index()].unit;
    assert_eq!(unit(v.instr.expect("a kernel")), unit(copies[1]));
}

/// Only units that keep their storage may leave it allocated.
#[test]
fn storage_that_is_kept_without_saying_so() {
    let mut p = good("fsdp2", &["fsdp.keep_unsharded_storage=true"]);
    p.units[1].keeps_storage = false;
    let r = check(&p);
    let v = first(&p, &r, RuleId::Unsharded, "fsdp2");
    assert!(v.message.contains("still allocated"), "{}", v.message);
    assert!(r.of(RuleId::DoubleGather).next().is_some(), "{r}");
}

#[test]
fn an_optimizer_that_forgets_a_unit() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let steps = find(&p, |i| i.rule == Rule::Optimizer && is_launch(i));
        let mut q = p.clone();
        drop(&mut q, steps[0]);
        let r = check(&q);
        let unit = &p.units[p.instrs[steps[0].index()].unit.index()].name;
        assert!(
            r.of(RuleId::ReduceMissing).any(
                |v| v.message.contains("without updating") && v.message.contains(unit.as_str())
            ),
            "{policy}\n{r}"
        );
    }
}

#[test]
fn weights_freed_before_their_last_use() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let full = |i: &Instr| matches!(i.op, Op::Free(b) if p.buffers[b.index()].role == Role::FullWeight);
        let free = find(&p, |i| i.phase == Phase::Forward && full(i))[0];
        let unit = p.instrs[free.index()].unit;
        let kernel = *find(&p, |i| {
            i.rule == Rule::Model && is_launch(i) && i.unit == unit
        })
        .first()
        .expect("a kernel");
        assert!(kernel < free, "{policy}");
        let mut q = p.clone();
        let i = q.instrs.remove(free.index());
        q.instrs.insert(kernel.index(), i);
        let r = check(&q);
        let v = first(&q, &r, RuleId::Lifetime, policy);
        assert!(
            v.instr > Some(kernel) && v.other == Some(kernel),
            "{policy}: {}",
            v.message
        );
    }
}

#[test]
fn weights_that_stay_full() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let full = |i: &Instr| matches!(i.op, Op::Free(b) if p.buffers[b.index()].role == Role::FullWeight);
        let free = *find(&p, full).last().expect("a free");
        let mut q = p.clone();
        drop(&mut q, free);
        let r = check(&q);
        let v = first(&q, &r, RuleId::Unsharded, policy);
        assert!(
            matches!(q.instrs[v.instr.expect("alloc").index()].op, Op::Alloc(_)),
            "{policy}: {}",
            v.message
        );
    }
}

#[test]
fn activations_that_stay() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        let act = |i: &Instr| matches!(i.op, Op::Free(b) if p.buffers[b.index()].role == Role::Activation);
        let free = *find(&p, act).last().expect("a free");
        let mut q = p.clone();
        drop(&mut q, free);
        first(&q, &check(&q), RuleId::Leak, policy);
    }
}

#[test]
fn a_kernel_that_did_not_run() {
    for policy in POLICIES {
        let p = good(policy, &[]);
        // An accumulation that does not work in place. Its output is then memory that was never
        // written.
        let apart = |i: &Instr| {
            let reads = p.reads(&i.op);
            p.writes(&i.op)
                .iter()
                .all(|w| reads.iter().all(|r| r.buffer != w.buffer))
        };
        let kernels = find(&p, |i| {
            i.phase == Phase::Forward && i.rule == Rule::Model && is_launch(i) && apart(i)
        });
        for kernel in [kernels[0], kernels[kernels.len() / 2]] {
            let mut q = p.clone();
            drop(&mut q, kernel);
            let r = check(&q);
            let v = first(&q, &r, RuleId::Uninit, policy);
            let output = p.buffer_name(p.writes(&p.instrs[kernel.index()].op)[0].buffer);
            assert!(
                v.instr > Some(kernel) && v.message.contains(&output),
                "{policy}: {}",
                v.message
            );
        }
    }
}

#[test]
fn a_micro_batch_that_is_not_added() {
    // The second micro-batch's accumulation loses its second operand.
    for policy in POLICIES {
        let p = good(policy, &["train.grad_accum=2"]);
        let add = find(&p, |i| {
            i.micro_batch == 1 && i.rule == Rule::ReduceAccumulate && is_launch(i)
        })[0];
        let mut q = p.clone();
        let Op::Launch { writes, .. } = &mut q.instrs[add.index()].op else {
            unreachable!()
        };
        let target = q.accesses[*writes as usize];
        let Op::Launch { reads, .. } = p.instrs[add.index()].op else {
            unreachable!()
        };
        let other = (reads..*writes)
            .find(|r| q.accesses[*r as usize].buffer != target.buffer)
            .expect("a reduced shard");
        let own = (reads..*writes)
            .find(|r| q.accesses[*r as usize] == target)
            .expect("the gradient at rest");
        q.accesses[own as usize] = q.accesses[other as usize];
        let r = check(&q);
        let v = first(&q, &r, RuleId::ReduceMissing, policy);
        assert!(v.message.contains("overwrites"), "{policy}: {}", v.message);
    }
}

/// A GEMM that overwrites the sum that it should add to.
#[test]
fn a_weight_gradient_that_is_not_added_to_its_sum() {
    let set = [
        "compile.mode=blocks",
        "train.grad_accum=2",
        "fsdp.gradient_sync=last",
    ];
    let p = good("native", &set);
    let adds = find(&p, |i| {
        let sums = |a: &Access| p.buffers[a.buffer.index()].role == Role::FullGrad;
        let (reads, writes) = (p.reads(&i.op), p.writes(&i.op));
        i.rule == Rule::Model
            && writes.len() == 1
            && reads.last() == writes.first()
            && sums(&writes[0])
    });
    assert!(adds.len() > 4);
    let mut q = p.clone();
    let Op::Launch { reads, .. } = q.instrs[adds[0].index()].op else {
        unreachable!()
    };
    // It reads the place of the sum once more as a factor, but does not read the sum.
    let n = p.reads(&p.instrs[adds[0].index()].op).len();
    q.accesses[reads as usize + n - 1] = q.accesses[reads as usize];
    let r = check(&q);
    let v = r.of(RuleId::ReduceMissing).next();
    let v = v.unwrap_or_else(|| panic!("{r}"));
    assert!(v.message.contains("nothing has read"), "{}", v.message);
}

/// A joint backward that omits the gradients of one of its parts, and a unit that remains in the
/// state in which one part left it.
#[test]
fn a_part_of_a_joint_backward() {
    for policy in ["native", "fsdp2", "megatron"] {
        let p = good(policy, &["train.joint_backward=true", "train.grad_accum=2"]);
        let added = find(&p, |i| i.rule == Rule::Accumulate && is_launch(i));
        let mut q = p.clone();
        drop(&mut q, added[added.len() / 2]);
        first(&q, &check(&q), RuleId::ReduceMissing, policy);
        // The gather for a unit's second part. The unit was released after the first part.
        let parts = find(&p, |i| {
            let gather = collective(&p, i) == Some(CollectiveKind::AllGather);
            gather && i.phase == Phase::Backward && i.micro_batch == 0
        });
        let mut q = p.clone();
        drop(&mut q, parts[1]);
        let r = check(&q);
        assert!(r.of(RuleId::Uninit).next().is_some(), "{policy}\n{r}");
    }
}

/// A unit that stays full although its micro-batch skips it, gradients of its earlier micro-batch
/// that nothing reduces, and kernels of a block that should not run or that are missing.
#[test]
fn a_skipped_unit() {
    const SECOND: &str = "train.skipped_blocks=[{ blocks = [\"layers.1\"], micro_batches = [1] }]";
    let base = ["train.grad_accum=2", SECOND];
    for policy in ["native", "fsdp2", "megatron"] {
        let p = good(policy, &base);
        let unit = p.units.iter().position(|u| u.name == "layers.1").unwrap();
        let mut q = p.clone();
        q.units[unit].skipped_in = vec![0, 1];
        let r = check(&q);
        let v = first(&q, &r, RuleId::Skipped, policy);
        assert!(v.message.contains("which skips its unit"), "{}", v.message);
        let mut q = p.clone();
        q.units[unit].skipped_in = vec![0];
        let r = check(&q);
        let missing = |v: &Violation| v.message.contains("micro-batch 1, which uses it");
        assert!(r.of(RuleId::Skipped).any(missing), "{policy}\n{r}");
    }
    // The gather that a prefetch list requests is never dropped.
    let p = good("fsdp2", &[&base[..], &["fsdp.prefetch_forward=1"]].concat());
    let dropped = find(&p, |i| match i.op {
        Op::Free(id) => i.phase == Phase::Final && p.buffers[id.index()].role == Role::GatherBuffer,
        _ => false,
    });
    assert_eq!(dropped.len(), 1);
    let mut q = p.clone();
    drop(&mut q, dropped[0]);
    let r = check(&q);
    assert!(r.of(RuleId::Unsharded).next().is_some(), "{r}");
    // The gradients of an earlier micro-batch are never reduced.
    let p = good("fsdp2", &[&base[..], &["fsdp.gradient_sync=last"]].concat());
    let late = find(&p, |i| {
        i.phase == Phase::Final && collective(&p, i) == Some(CollectiveKind::ReduceScatter)
    });
    assert_eq!(late.len(), 1);
    let mut q = p.clone();
    drop(&mut q, late[0]);
    let r = check(&q);
    assert!(!r.is_ok(), "{r}");
    // The optimizer leaves out a unit that a micro-batch uses.
    let p = good(
        "fsdp2",
        &["train.skipped_blocks=[{ blocks = [\"layers.1\"] }]"],
    );
    let mut q = p.clone();
    let unit = p.units.iter().position(|u| u.name == "layers.1").unwrap();
    q.units[unit].skipped_in.clear();
    let r = check(&q);
    let v = r.of(RuleId::ReduceMissing).next();
    assert!(
        v.is_some_and(|v| v.message.contains("without updating")),
        "{r}"
    );
}

#[test]
fn a_reduction_over_one_axis_of_two() {
    for policy in RELEASED {
        let p = good(policy, &["mesh.dp_outer=2"]);
        let outer = find(&p, |i| {
            i.rule == Rule::OuterReduce && matches!(i.op, Op::Collective { .. })
        });
        let mut q = p.clone();
        drop(&mut q, outer[0]);
        let r = check(&q);
        let v = first(&q, &r, RuleId::ReduceMissing, policy);
        // The experimental engine reduces a copy, which then has no reader.
        let expected = match policy {
            "megatron_v2" => "nothing has read it; expected its reduction",
            _ => "reduced over the shard axis; expected both axes",
        };
        assert!(v.message.contains(expected), "{policy}: {}", v.message);
    }
}

/// A norm over only this rank's part, or over the same gradients counted once per rank.
#[test]
fn a_norm_over_the_wrong_ranks() {
    let sum = |p: &Program| {
        let sum = |i: &Instr| i.rule == Rule::Clip && matches!(i.op, Op::Collective { .. });
        find(p, sum)[0]
    };
    for policy in POLICIES {
        for more in ["compile.mode=off", "compile.mode=full"] {
            let clips = [more, "train.clip_norm=1.0"];
            let reports = [more, "train.clip_norm=0.0", "train.grad_norm=true"];
            for set in [&clips[..], &reports] {
                if small(policy, set).is_none() {
                    continue;
                }
                let mut q = good(policy, set);
                let missing = sum(&q);
                drop(&mut q, missing);
                let r = check(&q);
                let v = first(&q, &r, RuleId::Norm, policy);
                assert!(
                    v.message
                        .contains("summed over no axis; expected the shard axis"),
                    "{policy}: {}",
                    v.message
                );
            }
        }
    }
    let hfsdp = ["mesh.dp_outer=2", "fsdp.outer_strategy=optim"];
    let mut q = good("native", &hfsdp);
    let Op::Collective { id, .. } = q.instrs[sum(&q).index()].op else {
        unreachable!()
    };
    let shard = |c: &Communicator| c.axes == AxisSet::of(AxisId::DP_SHARD);
    let shard = q.communicators.iter().position(shard).expect("shard");
    q.collectives[id.index()].comm = CommId(shard as u8);
    let r = check(&q);
    let v = first(&q, &r, RuleId::Norm, "native");
    assert!(
        v.message.contains("the shard axis; expected both axes"),
        "{}",
        v.message
    );
}

#[test]
fn a_captured_step_with_an_unjoined_stream() {
    let p = good(
        "native",
        &["compile.cuda_graph=full_iteration", "fsdp.allocator=pool"],
    );
    let end = find(&p, |i| matches!(i.op, Op::GraphEnd(_)))[0];
    let mut q = p.clone();
    for w in find(&p, |i| i.rule == Rule::FinalFence && is_wait(i))
        .into_iter()
        .filter(|w| *w < end)
    {
        drop(&mut q, w);
    }
    let r = check(&q);
    let v = r
        .of(RuleId::CaptureJoin)
        .next()
        .unwrap_or_else(|| panic!("{r}"));
    assert_eq!(v.instr, Some(end));
    assert!(
        v.message
            .contains("reduce_scatter was forked into the scope"),
        "{}",
        v.message
    );
}

/// A collective whose operand or result is not checked, in a program that checks for NaN.
#[test]
fn a_collective_without_its_check_for_nan() {
    for policy in RELEASED {
        for set in [
            &["fsdp.nan_check=true"][..],
            &["fsdp.nan_check=true", "mesh.dp_outer=2"],
        ] {
            let p = good(policy, set);
            let collectives = find(&p, |i| collective(&p, i).is_some());
            let checks = find(&p, |i| is_launch(i) && i.rule == Rule::NanCheck);
            assert_eq!(checks.len(), 2 * collectives.len(), "{policy} {set:?}");
            for i in checks.iter().step_by(5) {
                let mut q = p.clone();
                drop(&mut q, *i);
                let r = check(&q);
                first(&q, &r, RuleId::NanCheck, policy);
                assert_eq!(r.of(RuleId::NanCheck).count(), 1, "{policy} {set:?}");
            }
        }
    }
}
