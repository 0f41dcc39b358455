//! Captured scopes.

use super::{caught, expect};
use crate::check::testing::{AG, Shape, Toy};
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::program::*;

fn scope() -> Shape {
    Shape {
        scope: true,
        validation: true,
        ..Shape::default()
    }
}

fn bounds(t: &Toy) -> (InstrId, InstrId) {
    let of = |f: fn(&Op) -> bool| t.find(SectionKind::Steady, |i| f(&i.op))[0];
    (
        of(|o| matches!(o, Op::GraphBegin(_))),
        of(|o| matches!(o, Op::GraphEnd(_))),
    )
}

/// Forks the gather stream within the scope and launches a kernel there that reads `act[0]`.
fn fork(t: &mut Toy) -> InstrId {
    let (begin, _) = bounds(t);
    let e = t.event();
    let from = t.all(t.act[0]);
    let to = t.all(t.norm);
    let kernel = t.operands(4, AG, &[from], &[to]);
    let at = InstrId(begin.0 + 1);
    t.insert(at, Op::Free(t.norm));
    t.insert(at, kernel);
    t.insert(
        at,
        Op::Wait {
            event: e,
            stream: AG,
        },
    );
    t.insert(
        at,
        Op::Record {
            event: e,
            stream: COMPUTE,
        },
    );
    t.insert(at, Op::Alloc(t.norm));
    InstrId(at.0 + 3)
}

/// A dispatcher that reads sizes on the host cannot be replayed.
#[test]
fn a_host_wait_inside_a_scope() {
    let mut t = Toy::new(scope());
    let (begin, _) = bounds(&t);
    let e = t.event();
    let at = InstrId(begin.0 + 1);
    t.insert(at, Op::HostWait(e));
    t.insert(
        at,
        Op::Record {
            event: e,
            stream: COMPUTE,
        },
    );
    let wait = InstrId(at.0 + 1);
    let r = check(&t.b.program);
    assert_eq!(caught(&r, RuleId::CaptureHost, wait).other, Some(begin));
}

#[test]
fn a_forked_stream_that_is_not_joined() {
    let mut t = Toy::new(scope());
    let kernel = fork(&mut t);
    let (_, end) = bounds(&t);
    let r = check(&t.b.program);
    let v = caught(&r, RuleId::CaptureJoin, end);
    assert_eq!(v.other, Some(kernel));
    assert!(
        v.message.contains("all_gather was forked into the scope"),
        "{}",
        v.message
    );
    // With the join, the program is correct.
    let e = t.event();
    t.insert(
        end,
        Op::Wait {
            event: e,
            stream: COMPUTE,
        },
    );
    t.insert(
        end,
        Op::Record {
            event: e,
            stream: AG,
        },
    );
    assert!(check(&t.b.program).of(RuleId::CaptureJoin).next().is_none());
}

#[test]
fn work_on_a_stream_outside_of_the_capture() {
    let mut t = Toy::new(scope());
    let kernel = fork(&mut t);
    // Without the wait that brings the stream into the capture.
    let wait = InstrId(kernel.0 - 1);
    t.drop(wait);
    let r = check(&t.b.program);
    assert!(
        caught(&r, RuleId::CaptureJoin, kernel)
            .message
            .contains("not part of the capture")
    );
}

#[test]
fn a_replay_does_not_follow_work_issued_before_on_a_side_stream() {
    // The fork does not depend on the gather, because the stream's own order is not captured.
    let mut t = Toy::new(scope());
    let (begin, end) = bounds(&t);
    let done = t.find(SectionKind::Steady, |i| {
        i.unit.0 == 1 && i.phase == Phase::Forward && i.rule == Rule::GatherDone
    })[0];
    let e = t.event();
    let from = t.all(t.full[1]);
    let to = t.all(t.norm);
    let kernel = t.operands(4, AG, &[from], &[to]);
    let join = t.event();
    for op in [
        Op::Free(t.norm),
        Op::Wait {
            event: join,
            stream: COMPUTE,
        },
        Op::Record {
            event: join,
            stream: AG,
        },
        kernel,
        Op::Wait {
            event: e,
            stream: AG,
        },
        Op::Record {
            event: e,
            stream: COMPUTE,
        },
        Op::Alloc(t.norm),
    ] {
        t.insert(InstrId(begin.0 + 1), op);
    }
    let kernel = InstrId(begin.0 + 4);
    assert!(end > begin && check(&t.b.program).is_ok());
    t.drop(done);
    // Outside of a capture, the gather stream itself would order the two.
    expect(&t, RuleId::GatherDone, kernel, t.full[1]);
}

#[test]
fn a_buffer_that_moves_between_replays() {
    // Validation takes the block of an activation and keeps it, so the next step gets another one.
    let mut t = Toy::new(scope());
    let r =
        t.b.program
            .section(SectionKind::Validation)
            .expect("validation")
            .instrs
            .clone();
    let mut thief = t.b.program.buffers[t.act[1].index()];
    thief.holds = Holds::Named("kept by validation");
    thief.key = 1000;
    t.b.program.buffers.push(thief);
    let b = BufferId(t.b.program.buffers.len() as u32 - 1);
    t.insert(InstrId(r.start + 1), Op::Alloc(b));
    let r = check(&t.b.program);
    let v = r
        .of(RuleId::CaptureAddress)
        .next()
        .unwrap_or_else(|| panic!("not reported\n{r}"));
    assert!(
        v.message.contains("a replay would use the old address"),
        "{}",
        v.message
    );
    assert!(
        v.message.contains(&t.b.program.buffer_name(t.act[1]))
            || v.message.contains(&t.b.program.buffer_name(t.act[0])),
        "{}",
        v.message
    );
}

#[test]
fn scopes_are_closed_and_do_not_nest() {
    let mut t = Toy::new(scope());
    let (begin, end) = bounds(&t);
    let op = t.b.program.instrs[begin.index()].op;
    let second = t.insert(InstrId(begin.0 + 1), op);
    caught(&check(&t.b.program), RuleId::CaptureJoin, second);
    let mut t = Toy::new(scope());
    t.drop(end);
    caught(&check(&t.b.program), RuleId::CaptureJoin, begin);
    let mut t = Toy::new(scope());
    t.drop(begin);
    caught(&check(&t.b.program), RuleId::CaptureJoin, end);
}
