//! Descriptors and ranks.

use super::{caught, expect};
use crate::check::testing::{AG, Shape, Toy};
use crate::check::{RuleId, check, check_symmetry};
use crate::ir::*;
use crate::ir::{AxisId, RankGroup};
use crate::program::*;
use crate::units::Bytes;

fn first(t: &Toy, id: CollectiveId) -> InstrId {
    t.find(
        SectionKind::First,
        |i| matches!(i.op, Op::Collective { id: x, .. } if x == id),
    )[0]
}

#[test]
fn sizes_that_do_not_fit() {
    let mut t = Toy::new(Shape::default());
    t.b.program.collectives[2].parts[0].input.bytes -= 16;
    expect(
        &t,
        RuleId::Collective,
        first(&t, CollectiveId(2)),
        t.model[1],
    );
}

#[test]
fn half_an_element() {
    let mut t = Toy::new(Shape::default());
    let part = &mut t.b.program.collectives[2].parts[0];
    part.input.bytes = 543;
    part.output.bytes = 4 * 543;
    t.b.program.collectives[2].bytes = Bytes(4 * 543);
    let v = expect(
        &t,
        RuleId::Collective,
        first(&t, CollectiveId(2)),
        t.model[1],
    );
    assert!(v.message.contains("whole number of bf16"), "{}", v.message);
}

#[test]
fn a_payload_or_reduction_that_is_not_there() {
    let mut t = Toy::new(Shape::default());
    t.b.program.collectives[3].bytes = Bytes(1);
    caught(
        &check(&t.b.program),
        RuleId::Collective,
        first(&t, CollectiveId(3)),
    );
    let mut t = Toy::new(Shape::default());
    t.b.program.collectives[3].reduce = ReduceOp::None;
    caught(
        &check(&t.b.program),
        RuleId::Collective,
        first(&t, CollectiveId(3)),
    );
}

#[test]
fn a_communicator_of_one_rank_or_of_another_mesh() {
    for (size, stride) in [(1, 1), (4, 2)] {
        let mut t = Toy::new(Shape::default());
        t.b.program.communicators[1].ranks = RankGroup { size, stride };
        let r = check(&t.b.program);
        let v = caught(&r, RuleId::Collective, first(&t, CollectiveId(1)));
        assert!(v.message.contains("shard_rs"), "{}", v.message);
    }
}

#[test]
fn parts_out_of_order() {
    // Iteration over a set: the parts of a coalesced launch have a different order each time.
    let mut t = Toy::new(Shape::default());
    let other = t.b.program.collectives[4].parts[0];
    t.b.program.collectives[2].parts.push(other);
    t.b.program.collectives[2].bytes = Bytes(2 * 2176);
    assert!(check(&t.b.program).of(RuleId::Collective).next().is_none());
    t.b.program.collectives[2].parts.reverse();
    expect(
        &t,
        RuleId::Collective,
        first(&t, CollectiveId(2)),
        t.model[2],
    );
}

#[test]
fn unaligned_payloads_are_slow() {
    let mut t = Toy::new(Shape::default());
    let part = &mut t.b.program.collectives[2].parts[0];
    part.input.bytes = 540;
    part.output.bytes = 2160;
    t.b.program.collectives[2].bytes = Bytes(2160);
    let v = expect(&t, RuleId::Align, first(&t, CollectiveId(2)), t.model[1]);
    assert!(v.message.contains("16 bytes"));
}

#[test]
fn ranks_that_agree() {
    let t = Toy::new(Shape {
        micro_batches: 2,
        ..Shape::default()
    });
    let r = check_symmetry(&[
        t.b.program.clone(),
        t.b.program.clone(),
        t.b.program.clone(),
    ]);
    assert!(r.is_ok(), "{r}");
    let collectives =
        t.b.program
            .instrs
            .iter()
            .filter(|i| matches!(i.op, Op::Collective { .. }))
            .count() as u64;
    let facts: u64 = r.rules.iter().map(|x| x.checked).sum();
    assert_eq!(facts, 2 * (collectives + 1));
}

#[test]
fn two_collectives_in_another_order_on_one_rank() {
    let a = Toy::new(Shape {
        prefetch: false,
        ..Shape::default()
    });
    let mut b = a.clone();
    let at = |t: &Toy, u| {
        t.at(u, Phase::Forward, 0, |o| {
            matches!(o, Op::Collective { stream: AG, .. })
        })
    };
    let (x, y) = (at(&b, 0), at(&b, 1));
    let op = b.b.program.instrs[x.index()].op;
    b.b.program.instrs[x.index()].op = b.b.program.instrs[y.index()].op;
    b.b.program.instrs[y.index()].op = op;
    // For equal units, the order differs in what is moved but not in sizes, so only the shape can
    // show it.
    b.b.program.collectives[2].bytes = Bytes(4352);
    let mut a = a;
    a.b.program.collectives[2].bytes = Bytes(4352);
    let r = check_symmetry(&[a.b.program, b.b.program]);
    let v = caught(&r, RuleId::Symmetry, x);
    assert!(
        v.message
            .contains("rank 1, collective 0 of communicator shard"),
        "{}",
        v.message
    );
}

#[test]
fn a_unit_skipped_on_one_rank() {
    let a = Toy::new(Shape::default());
    let mut b = a.clone();
    let last = b.find(SectionKind::Steady, |i| {
        matches!(
            i.op,
            Op::Collective {
                id: CollectiveId(1),
                ..
            }
        )
    })[0];
    b.drop(last);
    let r = check_symmetry(&[a.b.program.clone(), a.b.program, b.b.program]);
    let v = caught(&r, RuleId::Symmetry, last);
    assert!(
        v.message
            .contains("rank 2 launches 2 collectives on communicator shard_rs, rank 0 3"),
        "{}",
        v.message
    );
}

#[test]
fn unequal_sizes_on_one_rank() {
    let a = Toy::new(Shape::default());
    let mut b = a.clone();
    b.b.program.collectives[1].bytes = Bytes(2160);
    let r = check_symmetry(&[a.b.program, b.b.program]);
    assert!(!r.is_ok());
    assert!(
        r.of(RuleId::Symmetry)
            .all(|v| v.message.contains("2160 bytes"))
    );
}

#[test]
fn an_in_place_gather_from_the_wrong_part() {
    // A replicated weight of which each rank has refreshed only its own slice.
    let mut t = Toy::new(Shape::default());
    let full = t.all(t.full[1]);
    let mut gather = |offset, axis: Option<AxisId>| {
        t.b.program.collectives[2].parts[0].input = Access {
            offset,
            bytes: full.bytes / 4,
            per_rank: axis.map(Into::into),
            ..full
        };
        check(&t.b.program)
            .of(RuleId::Collective)
            .next()
            .map(|v| v.message.clone())
    };
    assert_eq!(gather(0, Some(AxisId::DP_SHARD)), None);
    assert!(gather(544, None).is_some_and(|m| m.contains("overlaps")));
    assert!(
        gather(0, None).is_some_and(|m| m.contains("each rank's own part (shard from byte 0)"))
    );
}
