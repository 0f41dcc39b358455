//! Lifetimes, leaks and allocators.

use super::{caught, expect};
use crate::check::testing::{Shape, Toy, UNITS};
use crate::check::{RuleId, check};
use crate::ir::AxisId;
use crate::ir::*;
use crate::program::*;

#[test]
fn use_after_free() {
    let mut t = Toy::new(Shape::default());
    let kernel = t.at(0, Phase::Forward, 0, |o| matches!(o, Op::Launch { .. }));
    let free = t.at(
        0,
        Phase::Forward,
        0,
        |o| matches!(o, Op::Free(b) if *b == t.full[0]),
    );
    let op = t.drop(free);
    t.insert(kernel, op);
    let v = expect(&t, RuleId::Lifetime, InstrId(kernel.0 + 1), t.full[0]);
    assert_eq!(v.other, Some(kernel));
}

#[test]
fn use_before_allocation() {
    let mut t = Toy::new(Shape::default());
    let alloc = t.find(
        SectionKind::First,
        |i| matches!(i.op, Op::Alloc(b) if b == t.act[1]),
    )[0];
    let kernel = t.find(SectionKind::First, |i| {
        i.unit.0 == 1 && matches!(i.op, Op::Launch { .. })
    })[1];
    t.delay(alloc, InstrId(kernel.0 + 1));
    let v = expect(&t, RuleId::Lifetime, InstrId(kernel.0 - 1), t.act[1]);
    assert!(v.message.contains("never allocated"), "{}", v.message);
}

#[test]
fn a_buffer_freed_twice() {
    let mut t = Toy::new(Shape::default());
    let free = t.at(
        0,
        Phase::Forward,
        0,
        |o| matches!(o, Op::Free(b) if *b == t.full[0]),
    );
    let op = t.b.program.instrs[free.index()].op;
    t.insert(free, op);
    let v = expect(&t, RuleId::Lifetime, InstrId(free.0 + 1), t.full[0]);
    assert_eq!(v.other, Some(free));
}

#[test]
fn a_buffer_allocated_twice() {
    let mut t = Toy::new(Shape::default());
    let alloc = t.at(
        1,
        Phase::Forward,
        0,
        |o| matches!(o, Op::Alloc(b) if *b == t.full[1]),
    );
    let op = t.b.program.instrs[alloc.index()].op;
    t.insert(alloc, op);
    expect(&t, RuleId::Lifetime, InstrId(alloc.0 + 1), t.full[1]);
}

#[test]
fn a_third_unit_in_a_double_buffer() {
    let shape = Shape {
        pool: Pool::DoubleBuffer,
        ..Shape::default()
    };
    let mut t = Toy::new(shape);
    t.b.program.double_buffer_copies = 2;
    let good = check(&t.b.program);
    assert!(good.of(RuleId::Alloc).next().is_none(), "{good}");
    // Unit 0 is not freed before unit 2 is gathered.
    let free = t.at(
        0,
        Phase::Forward,
        0,
        |o| matches!(o, Op::Free(b) if *b == t.full[0]),
    );
    let wait = InstrId(free.0 - 1);
    let third = t.at(2, Phase::Forward, 0, |o| matches!(o, Op::Alloc(_)));
    let end = t.at(2, Phase::Forward, 0, |o| matches!(o, Op::Launch { .. }));
    t.delay(wait, end);
    t.delay(InstrId(free.0 - 1), end);
    expect(&t, RuleId::Alloc, InstrId(third.0 - 2), t.full[2]);
}

#[test]
fn a_step_that_keeps_what_it_allocates() {
    let mut t = Toy::new(Shape::default());
    let free = t.at(
        1,
        Phase::Backward,
        0,
        |o| matches!(o, Op::Free(b) if *b == t.act[1]),
    );
    t.drop(free);
    let alloc = t.at(
        1,
        Phase::Forward,
        0,
        |o| matches!(o, Op::Alloc(b) if *b == t.act[1]),
    );
    expect(&t, RuleId::Leak, alloc, t.act[1]);
}

#[test]
fn a_step_that_frees_what_it_found() {
    let mut t = Toy::new(Shape::default());
    let last = InstrId(
        t.b.program
            .section(SectionKind::Steady)
            .expect("steady")
            .instrs
            .end
            - 1,
    );
    let at = t.insert(last, Op::Free(t.model[0]));
    expect(&t, RuleId::Leak, at, t.model[0]);
}

#[test]
fn the_first_step_may_keep_state_only() {
    let mut t = Toy::new(Shape::default());
    let first = t.find(
        SectionKind::First,
        |i| matches!(i.op, Op::Free(b) if b == t.act[2]),
    )[0];
    t.drop(first);
    let alloc = t.find(
        SectionKind::First,
        |i| matches!(i.op, Op::Alloc(b) if b == t.act[2]),
    )[0];
    expect(&t, RuleId::Leak, alloc, t.act[2]);
    assert!(t.moments.len() == UNITS && check(&Toy::new(Shape::default()).b.program).is_ok());
}

#[test]
fn an_empty_shard_is_not_touched() {
    let mut t = Toy::new(Shape::default());
    let kernel = t.at(1, Phase::Optimizer, 0, |o| matches!(o, Op::Launch { .. }));
    let Op::Launch { writes, .. } = t.b.program.instrs[kernel.index()].op else {
        unreachable!()
    };
    t.b.program.accesses[writes as usize].bytes = 0;
    let buffer = t.b.program.accesses[writes as usize].buffer;
    expect(&t, RuleId::ZeroLength, kernel, buffer);
}

#[test]
fn a_malformed_program_is_not_walked() {
    let mut t = Toy::new(Shape::default());
    let i = t.at(1, Phase::Forward, 0, |o| matches!(o, Op::Collective { .. }));
    t.b.program.instrs[i.index()].op = Op::Collective {
        id: CollectiveId(999),
        stream: StreamId(1),
    };
    let r = check(&t.b.program);
    caught(&r, RuleId::Form, i);
    assert_eq!(r.instructions, 0);
    let mut t = Toy::new(Shape::default());
    t.b.program.accesses[0].bytes += 1;
    assert!(
        check(&t.b.program)
            .of(RuleId::Form)
            .any(|v| v.message.contains("operand 0"))
    );
}

#[test]
fn a_range_that_leaves_its_buffer_on_the_last_rank() {
    let mut t = Toy::new(Shape::default());
    let Op::Collective { id, .. } = t.b.program.instrs[t
        .at(1, Phase::Backward, 0, |o| {
            matches!(
                o,
                Op::Collective {
                    stream: StreamId(2),
                    ..
                }
            )
        })
        .index()]
    .op
    else {
        unreachable!()
    };
    let part = &mut t.b.program.collectives[id.index()].parts[0];
    // Rank 0's half fits. The second of four ranks has no space left.
    part.output = Access {
        bytes: part.input.bytes / 2,
        per_rank: Some(AxisId::DP_SHARD.into()),
        ..part.input
    };
    let r = check(&t.b.program);
    assert!(
        r.of(RuleId::Form)
            .any(|v| v.message.contains("4 times 1088 bytes from 0 leave")),
        "{r}"
    );
}
