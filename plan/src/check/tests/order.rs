//! Events, races, recycled addresses.

use super::{caught, expect};
use crate::check::testing::{AG, RS, Shape, Toy};
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::program::*;

fn is_wait(op: &Op) -> bool {
    matches!(op, Op::Wait { .. })
}

fn is_launch(op: &Op) -> bool {
    matches!(op, Op::Launch { .. })
}

#[test]
fn a_wait_for_an_event_that_was_not_recorded() {
    let mut t = Toy::new(Shape::default());
    let record = t.at(1, Phase::Forward, 0, |o| {
        matches!(o, Op::Record { stream: AG, .. })
    });
    let Op::Record { event, .. } = t.drop(record) else {
        unreachable!()
    };
    let wait = t.at(
        1,
        Phase::Forward,
        0,
        |o| matches!(o, Op::Wait { event: e, .. } if *e == event),
    );
    let r = check(&t.b.program);
    assert!(
        caught(&r, RuleId::Event, wait)
            .message
            .contains("nothing is waited for")
    );
    // It recorded the end of a gather, so the reader is also named.
    let kernel = t.at(1, Phase::Forward, 0, is_launch);
    caught(&r, RuleId::GatherDone, kernel);
}

#[test]
fn an_event_of_the_step_before_is_no_event() {
    // Recorded at the end of the section and waited for at its start, which is correct in no pass.
    let mut t = Toy::new(Shape::default());
    let record = t.at(0, Phase::Forward, 0, |o| {
        matches!(o, Op::Record { stream: AG, .. })
    });
    let end = InstrId(
        t.b.program
            .section(SectionKind::Steady)
            .expect("steady")
            .instrs
            .end,
    );
    t.delay(record, end);
    let wait = t.at(0, Phase::Forward, 1, is_wait);
    caught(&check(&t.b.program), RuleId::Event, wait);
}

#[test]
fn an_event_recorded_twice() {
    let mut t = Toy::new(Shape::default());
    let first = t.at(1, Phase::Forward, 0, |o| {
        matches!(o, Op::Record { stream: AG, .. })
    });
    let op = t.b.program.instrs[first.index()].op;
    t.insert(first, op);
    let r = check(&t.b.program);
    let v = caught(&r, RuleId::Event, InstrId(first.0 + 1));
    assert_eq!(v.other, Some(first));
}

#[test]
fn an_operand_that_nothing_wrote() {
    let mut t = Toy::new(Shape::default());
    let producer = t.at(0, Phase::Forward, 0, is_launch);
    t.drop(producer);
    let consumer = t.at(1, Phase::Forward, 0, is_launch);
    expect(&t, RuleId::Uninit, consumer, t.act[0]);
}

#[test]
fn half_a_write_leaves_the_other_half_unwritten() {
    let mut t = Toy::new(Shape::default());
    let producer = t.at(0, Phase::Forward, 0, is_launch);
    let Op::Launch { writes, .. } = t.b.program.instrs[producer.index()].op else {
        unreachable!()
    };
    t.b.program.accesses[writes as usize].bytes /= 2;
    let consumer = t.at(1, Phase::Forward, 0, is_launch);
    expect(&t, RuleId::Uninit, consumer, t.act[0]);
}

#[test]
fn padding_of_a_flat_buffer_need_not_be_written() {
    // Parameters end at element 1056 of 1088. Backward does not write beyond them, and the
    // reduction reads everything.
    let t = Toy::new(Shape::default());
    assert_eq!(t.b.program.buffers[t.grad[0].index()].bytes.0, 2176);
    assert!(check(&t.b.program).is_ok());
    // Without its layout, the same program reads memory that nothing wrote.
    let mut t = t;
    for b in t.grad.clone() {
        t.b.program.buffers[b.index()].holds = Holds::Named("gradients");
    }
    let reduce = t.at(2, Phase::Backward, 0, |o| {
        matches!(o, Op::Collective { stream: RS, .. })
    });
    expect(&t, RuleId::Uninit, reduce, t.grad[2]);
}

#[test]
fn scaling_of_the_shard_before_the_reduction_was_joined() {
    // INV-18: the accumulation runs on compute, which does not wait for the reduce stream.
    let mut t = Toy::new(Shape::default());
    let add = t.at(1, Phase::Backward, 0, |o| {
        matches!(o, Op::Launch { stream: RS, .. })
    });
    if let Op::Launch { stream, .. } = &mut t.b.program.instrs[add.index()].op {
        *stream = COMPUTE;
    }
    let v = expect(&t, RuleId::Race, add, t.reduced[1]);
    assert!(
        v.message
            .contains("expected compute to wait for an event recorded on reduce_scatter"),
        "{}",
        v.message
    );
}

#[test]
fn a_write_behind_a_read_on_another_stream() {
    // A copy on the gather stream overwrites an activation that compute still reads.
    let mut t = Toy::new(Shape::default());
    let reader = t.at(1, Phase::Forward, 0, is_launch);
    let target = t.all(t.act[0]);
    let op = t.operands(7, AG, &[], &[target]);
    let at = t.insert(InstrId(reader.0 + 1), op);
    let v = expect(&t, RuleId::Race, at, t.act[0]);
    assert!(
        v.message.contains("(its read)") || v.message.contains("(its write)"),
        "{}",
        v.message
    );
}

#[test]
fn a_gather_into_memory_that_the_unit_before_still_reads() {
    // Unit 2 gets the block of unit 0. Neither the release nor the gate makes the gather stream
    // wait.
    let mut t = Toy::new(Shape::default());
    let release = t.at(0, Phase::Forward, 0, |o| matches!(o, Op::Free(_)));
    let reshard = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 0 && i.phase == Phase::Forward && i.rule == Rule::Reshard && is_wait(&i.op)
    })[0];
    let gate = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 2 && i.phase == Phase::Forward && i.rule == Rule::GatherGate && is_wait(&i.op)
    })[0];
    let gather = t.at(2, Phase::Forward, 0, |o| matches!(o, Op::Collective { .. }));
    t.drop(reshard);
    let r = check(&t.b.program);
    assert!(
        r.is_ok() && r.warnings() == 0,
        "the gate still orders it\n{r}"
    );
    t.drop(gate);
    let v = expect(&t, RuleId::Reuse, gather, t.full[2]);
    assert!(
        v.message.contains(&t.b.program.buffer_name(t.full[0])),
        "{}",
        v.message
    );
    assert_eq!(v.other, Some(t.at(0, Phase::Forward, 0, is_launch)));
    // The stream that gets the block back does not run after its last use.
    expect(&t, RuleId::PoolStream, release, t.full[0]);
}

#[test]
fn the_next_step_reuses_memory_of_this_one() {
    // The first gather of a step recycles a block that the previous step's backward read last.
    let mut t = Toy::new(Shape {
        prefetch: false,
        ..Shape::default()
    });
    let reshards = t.find(SectionKind::Steady, |i| {
        i.rule == Rule::Reshard && is_wait(&i.op)
    });
    let gate = t.find(SectionKind::Steady, |i| {
        i.rule == Rule::GatherGate && is_wait(&i.op)
    })[0];
    t.drop(reshards[reshards.len() - 1]);
    t.drop(gate);
    let gather = t.at(0, Phase::Forward, 0, |o| matches!(o, Op::Collective { .. }));
    let v = expect(&t, RuleId::Reuse, gather, t.full[0]);
    assert!(v.message.contains("steady pass 2"), "{}", v.message);
    assert_eq!(v.other, Some(t.at(0, Phase::Backward, 0, is_launch)));
}

#[test]
fn host_waits_order_what_is_issued_later() {
    // The fence is a host wait instead of a stream wait.
    let mut t = Toy::new(Shape::default());
    let fences = t.find(SectionKind::Steady, |i| {
        i.phase == Phase::Final && is_wait(&i.op)
    });
    for f in fences {
        let Op::Wait { event, .. } = t.b.program.instrs[f.index()].op else {
            unreachable!()
        };
        t.b.program.instrs[f.index()].op = Op::HostWait(event);
    }
    let r = check(&t.b.program);
    assert!(r.is_ok(), "{r}");
}

#[test]
fn order_by_a_communicator_alone_is_a_warning() {
    let mut t = Toy::new(Shape::default());
    let gather = t.at(1, Phase::Forward, 0, |o| matches!(o, Op::Collective { .. }));
    let Op::Collective { id, .. } = t.b.program.instrs[gather.index()].op else {
        unreachable!()
    };
    let again = t.insert(InstrId(gather.0 + 1), Op::Collective { id, stream: RS });
    // The reduce stream depends on the gate's dependencies, but not on the previous gather.
    let e = t.event();
    t.insert(
        gather,
        Op::Record {
            event: e,
            stream: COMPUTE,
        },
    );
    t.insert(
        gather,
        Op::HostWork {
            kind: HostWorkKind::Hook,
            count: 0,
        },
    );
    let at = InstrId(gather.0 + 1);
    t.insert(
        InstrId(at.0 + 1),
        Op::Wait {
            event: e,
            stream: RS,
        },
    );
    let again = InstrId(again.0 + 3);
    expect(&t, RuleId::CommOrder, again, t.full[1]);
    let r = check(&t.b.program);
    assert!(r.of(RuleId::Race).next().is_none(), "{r}");
    // With a separate communicator, it is a race.
    t.b.program
        .collectives
        .push(t.b.program.collectives[id.index()].clone());
    let own = CollectiveId(t.b.program.collectives.len() as u32 - 1);
    t.b.program.collectives[own.index()].comm = CommId(1);
    t.b.program.instrs[again.index()].op = Op::Collective {
        id: own,
        stream: RS,
    };
    expect(&t, RuleId::Race, again, t.full[1]);
}

#[test]
fn waits_that_add_nothing_are_counted() {
    let mut t = Toy::new(Shape::default());
    let wait = t.at(1, Phase::Forward, 0, |o| {
        matches!(
            o,
            Op::Wait {
                stream: COMPUTE,
                ..
            }
        )
    });
    let before = crate::check::testing::implied_waits(&t.b.program).len();
    let op = t.b.program.instrs[wait.index()].op;
    let again = t.insert(InstrId(wait.0 + 1), op);
    let implied = crate::check::testing::implied_waits(&t.b.program);
    assert_eq!(implied.len(), before + 1);
    assert!(implied.contains(&again) && !implied.contains(&wait));
}
