//! Removing any single wait from a program either is reported or has no effect.

use super::{POLICIES, drop, small};
use crate::check::check;
use crate::check::testing::{clocks, implied_waits};
use crate::ir::*;
use crate::program::*;
use proptest::prelude::*;

fn waits(p: &Program) -> Vec<InstrId> {
    super::find(p, |i| matches!(i.op, Op::Wait { .. } | Op::HostWait(_)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Reported: an error, or a warning that did not occur before.
    Reported,
    /// Every piece of work starts after exactly the same other work, because other edges imply the
    /// wait.
    Redundant,
    /// Some work may start earlier, and `check` proves that this is harmless.
    Unneeded,
}

fn without(p: &Program, wait: InstrId) -> Outcome {
    let good = check(p);
    let mut q = p.clone();
    drop(&mut q, wait);
    let r = check(&q);
    if !r.is_ok() || r.warnings() > good.warnings() {
        Outcome::Reported
    } else if clocks(&q) == clocks(p) {
        Outcome::Redundant
    } else {
        Outcome::Unneeded
    }
}

#[test]
fn every_wait_of_a_step_is_needed_or_implied() {
    for policy in POLICIES {
        let p = small(policy, &[]).expect("lowered");
        let all = waits(&p);
        let outcomes: Vec<Outcome> = all.iter().map(|&w| without(&p, w)).collect();
        let count = |o| outcomes.iter().filter(|x| **x == o).count();
        println!(
            "{policy}: {} waits, {} reported, {} redundant",
            all.len(),
            count(Outcome::Reported),
            count(Outcome::Redundant)
        );
        // The prototype's gather stream waits for computation before each list of gathers. In
        // backward, the first wait after the root's is for memory that the root's wait has already
        // covered.
        let spare = usize::from(policy == "pr4435");
        assert_eq!(
            count(Outcome::Unneeded),
            spare,
            "{policy}: {all:?} {outcomes:?}"
        );
        assert!(count(Outcome::Reported) > all.len() / 3, "{policy}");
        // Waits that `implied_waits` lists are redundant. A wait may also be superseded by a later
        // one before any work.
        for w in implied_waits(&p) {
            if let Some(n) = all.iter().position(|x| *x == w) {
                assert_eq!(outcomes[n], Outcome::Redundant, "{policy} #{}", w.0);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// With several micro-batches and hybrid meshes, three kinds of waits are not needed although
    /// they order something: the gate at the start of a later micro-batch (weights have not
    /// changed), the fork of the root's reduction (it follows the previous fork), and the fence
    /// after a micro-batch that is not the last one (FSDP2 waits there for its all-reduces, which
    /// nothing reads before the last fence).
    #[test]
    fn no_wait_is_dropped_unseen(
        policy in 0..3usize,
        accum in 1..3u32,
        outer in 1..3u32,
        recompute in prop::sample::select(vec!["none", "full"]),
        reshard in prop::sample::select(vec!["true", "false", "\"auto\""]),
        separate in any::<bool>(),
        pick in any::<prop::sample::Index>(),
    ) {
        let set = [
            format!("train.grad_accum={accum}"),
            format!("mesh.dp_outer={outer}"),
            format!("train.recompute={recompute}"),
            format!("fsdp.reshard_after_forward={reshard}"),
            format!("fsdp.separate_communicators={separate}"),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let p = small(POLICIES[policy], &set).expect("lowered");
        let wait = *pick.get(&waits(&p));
        let i = p.instrs[wait.index()];
        let outcome = without(&p, wait);
        let known = i.rule == Rule::StepStart && i.micro_batch > 0
            || i.rule == Rule::ReduceFork && p.units[i.unit.index()].is_root
            || i.rule == Rule::FinalFence && i.micro_batch + 1 < accum as u16;
        prop_assert!(outcome != Outcome::Unneeded || known, "#{} {:?}", wait.0, i);
    }
}
