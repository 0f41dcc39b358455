//! Gathers, weights and their freshness.

use super::{caught, expect};
use crate::check::testing::{AG, Shape, Toy};
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::program::*;

fn gather(t: &Toy, unit: usize, phase: Phase) -> InstrId {
    t.at(unit, phase, 0, |o| {
        matches!(o, Op::Collective { stream: AG, .. })
    })
}

#[test]
fn the_gather_stream_does_not_wait_for_the_optimizer() {
    let mut t = Toy::new(Shape::default());
    let gate = t.find(SectionKind::Steady, |i| {
        i.rule == Rule::GatherGate && matches!(i.op, Op::Wait { .. })
    })[0];
    t.drop(gate);
    let v = expect(
        &t,
        RuleId::GatherInput,
        gather(&t, 0, Phase::Forward),
        t.model[0],
    );
    // It is not ordered after the refresh of the previous step.
    let refresh = v.other.expect("the write");
    assert_eq!(t.b.program.instrs[refresh.index()].phase, Phase::Refresh);
}

#[test]
fn computation_before_its_gather_is_done() {
    for phase in [Phase::Forward, Phase::Backward] {
        let mut t = Toy::new(Shape::default());
        let wait = t.find(SectionKind::Steady, |i| {
            i.unit.0 == 1 && i.phase == phase && i.rule == Rule::GatherDone
        })[0];
        t.drop(wait);
        let kernel = t.at(1, phase, 0, |o| matches!(o, Op::Launch { .. }));
        let v = expect(&t, RuleId::GatherDone, kernel, t.full[1]);
        assert_eq!(v.other, Some(gather(&t, 1, phase)));
    }
}

#[test]
fn a_gather_for_a_unit_that_is_full() {
    let mut t = Toy::new(Shape::default());
    let first = gather(&t, 1, Phase::Forward);
    let op = t.b.program.instrs[first.index()].op;
    t.insert(first, op);
    let v = expect(&t, RuleId::DoubleGather, InstrId(first.0 + 1), t.full[1]);
    assert_eq!(v.other, Some(first));
}

#[test]
fn recompute_prefetches_nothing() {
    let mut t = Toy::new(Shape {
        recompute: true,
        ..Shape::default()
    });
    assert!(check(&t.b.program).is_ok());
    let g = gather(&t, 0, Phase::Backward);
    assert_eq!(t.b.program.instrs[g.index()].rule, Rule::Prefetch);
    t.b.program.instrs[g.index()].phase = Phase::Recompute;
    expect(&t, RuleId::RecomputePrefetch, g, t.full[0]);
}

#[test]
fn a_unit_gathered_in_recompute_stays_full_into_the_next_step() {
    // The flag logic of the prototype: a finished unit is gathered again and never freed.
    let mut t = Toy::new(Shape::default());
    let last = t
        .find(
            SectionKind::Steady,
            |i| matches!(i.op, Op::Free(b) if t.full.contains(&b)),
        )
        .pop()
        .expect("a free");
    let Op::Free(b) = t.drop(last) else {
        unreachable!()
    };
    assert_eq!(b, t.full[0]);
    let alloc = t.at(
        0,
        Phase::Backward,
        0,
        |o| matches!(o, Op::Alloc(x) if *x == b),
    );
    expect(&t, RuleId::Unsharded, alloc, b);
}

#[test]
fn a_resident_unit_may_stay_full() {
    // A unit that never reshards keeps its weights from the first step on.
    let mut t = Toy::new(Shape::default());
    t.b.program.units[0].reshards = false;
    let b = t.full[0];
    let mut first = true;
    for i in 0..t.b.program.instrs.len() {
        let drop = match t.b.program.instrs[i].op {
            Op::Alloc(x) if x == b => !std::mem::take(&mut first),
            Op::Free(x) => x == b,
            // The gather of backward is not needed either.
            Op::Collective {
                id: CollectiveId(0),
                ..
            } => t.b.program.instrs[i].phase == Phase::Backward,
            _ => false,
        };
        if drop {
            t.drop(InstrId(i as u32));
        }
    }
    let r = check(&t.b.program);
    assert!(r.is_ok(), "{r}");
    t.b.program.units[0].reshards = true;
    assert!(check(&t.b.program).of(RuleId::Unsharded).next().is_some());
}

#[test]
fn gathered_and_never_read() {
    let mut t = Toy::new(Shape::default());
    let kernel = t.at(0, Phase::Backward, 0, |o| {
        matches!(
            o,
            Op::Launch {
                stream: COMPUTE,
                ..
            }
        )
    });
    if let Op::Launch { reads, .. } = &mut t.b.program.instrs[kernel.index()].op {
        *reads += 2;
    }
    let free = t.at(
        0,
        Phase::Backward,
        0,
        |o| matches!(o, Op::Free(b) if *b == t.full[0]),
    );
    expect(&t, RuleId::UnusedGather, free, t.full[0]);
    let r = check(&t.b.program);
    assert!(r.is_ok() && r.warnings() == 1, "{r}");
}

#[test]
fn weights_that_were_not_refreshed() {
    let mut t = Toy::new(Shape::default());
    let refresh = t.at(1, Phase::Refresh, 0, |o| matches!(o, Op::Launch { .. }));
    t.drop(refresh);
    let v = expect(
        &t,
        RuleId::StaleWeight,
        gather(&t, 1, Phase::Forward),
        t.model[1],
    );
    assert!(v.message.contains("steady pass 2"), "{}", v.message);
    assert!(
        v.message.contains("of optimizer step 1, the latest is 2"),
        "{}",
        v.message
    );
}

#[test]
fn a_gather_before_the_refresh() {
    let mut t = Toy::new(Shape::default());
    let refresh = t.at(0, Phase::Refresh, 0, |o| matches!(o, Op::Launch { .. }));
    let op = t.b.program.instrs[refresh.index()];
    let g = gather(&t, 0, Phase::Forward);
    // The refresh of step n runs in step n + 1, after the first gather.
    t.drop(refresh);
    t.b.program.instrs.insert(g.index() + 1, op);
    for s in &mut t.b.program.sections {
        if s.kind == SectionKind::Steady {
            s.instrs.end += 1;
        }
    }
    expect(&t, RuleId::StaleWeight, g, t.model[0]);
}

#[test]
fn a_partial_refresh_is_stale() {
    let mut t = Toy::new(Shape::default());
    let refresh = t.at(2, Phase::Refresh, 0, |o| matches!(o, Op::Launch { .. }));
    let Op::Launch { writes, .. } = t.b.program.instrs[refresh.index()].op else {
        unreachable!()
    };
    t.b.program.accesses[writes as usize].bytes -= 16;
    expect(
        &t,
        RuleId::StaleWeight,
        gather(&t, 2, Phase::Forward),
        t.model[2],
    );
}

#[test]
fn the_optimizer_forgets_a_unit() {
    let mut t = Toy::new(Shape::default());
    let adam = t.at(1, Phase::Optimizer, 0, |o| matches!(o, Op::Launch { .. }));
    t.drop(adam);
    let r = check(&t.b.program);
    let last = t
        .find(SectionKind::Steady, |i| i.rule == Rule::Optimizer)
        .pop()
        .expect("optimizer");
    let v = caught(&r, RuleId::ReduceMissing, last);
    assert!(v.message.contains("layers.1"), "{}", v.message);
}

#[test]
fn frozen_groups_never_are_stale() {
    let mut t = Toy::new(Shape::default());
    t.b.program.groups[1].requires_grad = false;
    for p in [2, 3] {
        t.b.program.params[p].requires_grad = false;
    }
    for kind in [SectionKind::First, SectionKind::Steady] {
        for i in t.find(kind, |i| {
            i.unit.0 == 1 && matches!(i.phase, Phase::Optimizer | Phase::Refresh)
        }) {
            t.drop(i);
        }
    }
    let r = check(&t.b.program);
    assert!(r.of(RuleId::StaleWeight).next().is_none(), "{r}");
}
