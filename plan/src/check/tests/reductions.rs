//! Reductions, gradient buffers, and gradients as the optimizer reads them.

use super::{caught, expect};
use crate::check::testing::{RS, Shape, Toy};
use crate::check::{RuleId, check};
use crate::ir::AxisId;
use crate::ir::*;
use crate::program::*;

fn reduce(t: &Toy, unit: usize) -> InstrId {
    t.at(unit, Phase::Backward, 0, |o| {
        matches!(o, Op::Collective { stream: RS, .. })
    })
}

fn release(t: &Toy, unit: usize) -> (InstrId, InstrId) {
    let of = |f: &dyn Fn(&Op) -> bool| {
        t.find(SectionKind::Steady, |i| {
            i.unit.index() == unit && i.rule == Rule::ReduceRelease && f(&i.op)
        })[0]
    };
    (
        of(&|o| matches!(o, Op::Wait { .. })),
        of(&|o| matches!(o, Op::Free(_))),
    )
}

#[test]
fn a_reduction_that_does_not_wait_for_the_gradients() {
    let mut t = Toy::new(Shape::default());
    let fork = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 1 && i.rule == Rule::ReduceFork && matches!(i.op, Op::Wait { .. })
    })[0];
    t.drop(fork);
    let v = expect(&t, RuleId::ReduceInput, reduce(&t, 1), t.grad[1]);
    assert_eq!(
        v.other,
        Some(t.at(1, Phase::Backward, 0, |o| matches!(
            o,
            Op::Launch {
                stream: COMPUTE,
                ..
            }
        )))
    );
}

#[test]
fn an_output_over_another_ranks_part_of_the_input() {
    let mut t = Toy::new(Shape::default());
    let Op::Collective { id, .. } = t.b.program.instrs[reduce(&t, 1).index()].op else {
        unreachable!()
    };
    let input = t.b.program.collectives[id.index()].parts[0].input;
    let shard = input.bytes / 4;
    let name = t.b.program.buffer_name(input.buffer);
    let mut output = |offset, axis: Option<AxisId>| {
        t.b.program.collectives[id.index()].parts[0].output = Access {
            offset,
            bytes: shard,
            per_rank: axis.map(Into::into),
            ..input
        };
        let r = check(&t.b.program);
        let first = t.find(SectionKind::First, |i| {
            i.op == Op::Collective { id, stream: RS }
        })[0];
        r.of(RuleId::ReduceAlias)
            .find(|v| v.instr == Some(first))
            .map(|v| v.message.clone())
    };
    // NCCL documents the form in which each rank's input is its slice of the output. Rank 0's slice
    // is at the start.
    assert_eq!(output(0, Some(AxisId::DP_SHARD)), None);
    for bad in [output(shard, None), output(16, None), output(0, None)] {
        let m = bad.expect("reported");
        assert!(m.contains(&name), "{m}");
    }
}

#[test]
fn an_inverted_drain_frees_a_buffer_in_flight() {
    let mut t = Toy::new(Shape::default());
    let (wait, free) = release(&t, 2);
    t.drop(wait);
    let v = expect(&t, RuleId::ReduceRelease, free, t.grad[2]);
    assert!(
        v.other
            .is_some_and(|o| t.b.program.instrs[o.index()].unit.0 == 2)
    );
    // The next buffer at that address writes during the reduction.
    let kernel = t.at(0, Phase::Backward, 0, |o| {
        matches!(
            o,
            Op::Launch {
                stream: COMPUTE,
                ..
            }
        )
    });
    let r = check(&t.b.program);
    let next = r.of(RuleId::GradReuse).chain(r.of(RuleId::Reuse)).next();
    assert!(next.is_none_or(|v| v.instr >= Some(kernel)), "{r}");
}

#[test]
fn weight_gradients_written_under_the_reduction_before() {
    // Units 1 and 2 share a slot of a planned pool. Unit 1 takes it only after a wait for unit 2's
    // reduction.
    let mut t = Toy::new(Shape {
        in_flight: 1,
        pool: Pool::Planned,
        ..Shape::default()
    });
    t.b.program.buffers[t.grad[1].index()].key = t.b.program.buffers[t.grad[2].index()].key;
    for kind in [SectionKind::First, SectionKind::Steady] {
        let mut released = t.find(kind, |i| i.unit.0 == 2 && i.rule == Rule::ReduceRelease);
        let grad = t.find(kind, |i| i.op == Op::Alloc(t.grad[1]))[0];
        let (free, wait) = (released.pop().expect("free"), released.pop().expect("wait"));
        t.hoist(free, grad);
        t.hoist(InstrId(wait.0 + 1), grad);
    }
    let good = check(&t.b.program);
    assert!(good.is_ok(), "{good}");
    let (wait, _) = release(&t, 2);
    t.drop(wait);
    let kernel = t.at(1, Phase::Backward, 0, |o| {
        matches!(
            o,
            Op::Launch {
                stream: COMPUTE,
                ..
            }
        )
    });
    let v = expect(&t, RuleId::GradReuse, kernel, t.grad[2]);
    assert!(
        v.message.contains(&t.b.program.buffer_name(t.grad[1])),
        "{}",
        v.message
    );
    assert_eq!(
        t.b.program.instrs[v.other.expect("reduction").index()]
            .unit
            .0,
        2
    );
}

#[test]
fn gradients_written_into_a_buffer_that_is_being_reduced() {
    let mut t = Toy::new(Shape::default());
    let after = InstrId(reduce(&t, 1).0 + 1);
    let target = t.all(t.grad[1]);
    let op = t.operands(7, COMPUTE, &[], &[target]);
    let at = t.insert(after, op);
    expect(&t, RuleId::GradReuse, at, t.grad[1]);
}

#[test]
fn a_wait_straight_after_the_reduction() {
    let mut t = Toy::new(Shape::default());
    let done = t.at(2, Phase::Backward, 0, |o| {
        matches!(o, Op::Record { stream: RS, .. })
    });
    let Op::Record { event, .. } = t.b.program.instrs[done.index()].op else {
        unreachable!()
    };
    let wait = t.insert(
        InstrId(done.0 + 1),
        Op::Wait {
            event,
            stream: COMPUTE,
        },
    );
    let r = check(&t.b.program);
    let v = caught(&r, RuleId::ReduceSerial, wait);
    assert_eq!(v.other, Some(reduce(&t, 2)));
    assert!(r.is_ok(), "slow, not wrong\n{r}");
    // After the last unit there is nothing to overlap with.
    let mut t = Toy::new(Shape::default());
    let done = t.at(0, Phase::Backward, 0, |o| {
        matches!(o, Op::Record { stream: RS, .. })
    });
    let Op::Record { event, .. } = t.b.program.instrs[done.index()].op else {
        unreachable!()
    };
    t.insert(
        InstrId(done.0 + 1),
        Op::Wait {
            event,
            stream: COMPUTE,
        },
    );
    assert_eq!(check(&t.b.program).warnings(), 0);
}

#[test]
fn more_gradient_buffers_in_flight_than_allowed() {
    let mut t = Toy::new(Shape::default());
    let (wait, free) = release(&t, 2);
    let end = t.find(SectionKind::Steady, |i| i.phase == Phase::Final)[0];
    t.delay(wait, end);
    t.delay(InstrId(free.0 - 1), end);
    let v = expect(&t, RuleId::ReduceInFlight, reduce(&t, 0), t.grad[0]);
    assert!(
        v.message.contains(&t.b.program.buffer_name(t.grad[2])),
        "{}",
        v.message
    );
}

#[test]
fn a_skipped_reduction() {
    let mut t = Toy::new(Shape::default());
    let r = reduce(&t, 1);
    t.drop(r);
    let (_, free) = release(&t, 1);
    expect(&t, RuleId::ReduceMissing, free, t.grad[1]);
}

#[test]
fn a_unit_whose_reduction_and_accumulation_are_skipped() {
    // A stale "already reduced" flag: neither hook nor callback reduces the unit.
    let mut t = Toy::new(Shape::default());
    let add = t.at(1, Phase::Backward, 0, |o| {
        matches!(o, Op::Launch { stream: RS, .. })
    });
    let r = reduce(&t, 1);
    t.drop(r);
    t.drop(add);
    let norm = t.at(0, Phase::Clip, 0, |o| matches!(o, Op::Launch { .. }));
    expect(&t, RuleId::ReduceMissing, norm, t.rest[1]);
}

#[test]
fn a_reduction_in_one_micro_batch_only() {
    let mut t = Toy::new(Shape {
        micro_batches: 2,
        ..Shape::default()
    });
    let second = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 2 && i.micro_batch == 1 && matches!(i.op, Op::Collective { stream: RS, .. })
    })[0];
    t.drop(second);
    let free = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 2 && i.micro_batch == 1 && matches!(i.op, Op::Free(b) if b == t.grad[2])
    })[0];
    expect(&t, RuleId::ReduceMissing, free, t.grad[2]);
}

#[test]
fn the_optimizer_does_not_wait_for_the_reductions() {
    let mut t = Toy::new(Shape::default());
    for i in t.find(SectionKind::Steady, |i| {
        i.phase == Phase::Final && matches!(i.op, Op::Wait { .. })
    }) {
        t.drop(i);
    }
    let norm = t.at(0, Phase::Clip, 0, |o| matches!(o, Op::Launch { .. }));
    let v = expect(&t, RuleId::ReduceMissing, norm, t.rest[0]);
    assert!(
        v.message.contains("without being ordered behind"),
        "{}",
        v.message
    );
}

#[test]
fn the_optimizer_before_the_fence() {
    // Moved before the fence of the last accumulation.
    let mut t = Toy::new(Shape::default());
    let fence = t.find(SectionKind::Steady, |i| {
        i.rule == Rule::FinalFence && matches!(i.op, Op::Wait { .. })
    })[0];
    let norm = t.at(0, Phase::Clip, 0, |o| matches!(o, Op::Launch { .. }));
    for i in t.find(SectionKind::Steady, |i| {
        i.rule == Rule::ReduceRelease && i.phase == Phase::Final
    }) {
        if matches!(t.b.program.instrs[i.index()].op, Op::Wait { .. }) {
            t.drop(i);
        }
    }
    t.delay(fence, InstrId(norm.0 + 1));
    expect(&t, RuleId::ReduceMissing, InstrId(norm.0 - 1), t.rest[0]);
}

#[test]
fn a_micro_batch_that_overwrites_the_one_before() {
    // The prototype's replicated gradients are written instead of added.
    let mut t = Toy::new(Shape {
        micro_batches: 2,
        ..Shape::default()
    });
    let add = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 1
            && i.micro_batch == 1
            && i.rule == Rule::ReduceAccumulate
            && matches!(i.op, Op::Launch { .. })
    })[0];
    let from = t.all(t.reduced[1]);
    let to = t.all(t.rest[1]);
    t.b.program.instrs[add.index()].op = t.operands(3, RS, &[from], &[to]);
    expect(&t, RuleId::ReduceMissing, add, t.rest[1]);
}

#[test]
fn gradients_of_the_step_before() {
    let mut t = Toy::new(Shape::default());
    let zero = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 1 && i.rule == Rule::ZeroGrad
    })[0];
    t.drop(zero);
    let add = t.at(1, Phase::Backward, 0, |o| {
        matches!(o, Op::Launch { stream: RS, .. })
    });
    let v = expect(&t, RuleId::StaleGrad, add, t.rest[1]);
    assert!(v.message.contains("steady pass 2"), "{}", v.message);
}

#[test]
fn a_gradient_reduced_twice() {
    let mut t = Toy::new(Shape::default());
    let rest = t.all(t.rest[1]);
    let id = t.descriptor(CollectiveKind::AllReduce, 1, rest, rest);
    let done = t.at(1, Phase::Backward, 0, |o| {
        matches!(o, Op::Record { stream: RS, .. })
    });
    let at = t.insert(done, Op::Collective { id, stream: RS });
    expect(&t, RuleId::DoubleReduce, at, t.rest[1]);
}

#[test]
fn a_tied_parameter_reduced_once_for_each_of_its_modules() {
    let mut t = Toy::new(Shape::default());
    let first = reduce(&t, 1);
    let op = t.b.program.instrs[first.index()].op;
    t.insert(first, op);
    let v = expect(&t, RuleId::Tied, InstrId(first.0 + 1), t.grad[1]);
    assert_eq!(v.other, Some(first));
}

#[test]
fn hybrid_sharding_needs_both_axes() {
    // The same program on a mesh of 2 x 4. Nothing reduces over the outer axis.
    let mut t = Toy::new(Shape::default());
    t.b.program.meta.mesh = t.b.program.meta.mesh.with(AxisId::DP_OUTER, 2);
    let norm = t.find(SectionKind::First, |i| {
        i.phase == Phase::Clip && matches!(i.op, Op::Launch { .. })
    })[0];
    let v = expect(&t, RuleId::ReduceMissing, norm, t.rest[0]);
    assert!(
        v.message
            .contains("reduced over the shard axis; expected both axes"),
        "{}",
        v.message
    );
}
