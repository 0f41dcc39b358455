//! The power limit: arithmetic is slower the larger its share of a step.

use crate::cost::Costs;
use crate::hardware::Power;
use crate::price::Load;
use shardlab_plan::program::{Op, Program, SectionKind};
use shardlab_plan::record::Clock;

/// Rounds until share and clock agree; each reduces the difference at least fourfold, since the
/// slope is at most one.
const ROUNDS: usize = 40;

/// Returns the slowdown of arithmetic in steps that take `step` picoseconds at the rates of the
/// tables, of which arithmetic takes `busy`. Other work keeps its duration, so share and clock
/// determine each other.
pub(crate) fn clock(power: &Power, busy: u64, step: u64) -> Clock {
    let (busy, step) = (busy as f64, step.max(1) as f64);
    let rest = (step - busy).max(0.0);
    let mut clock = Clock {
        arithmetic_share: (busy / step).min(1.0),
        arithmetic_factor: 1.0,
    };
    for _ in 0..ROUNDS {
        let above = (clock.arithmetic_share - power.arithmetic_share).max(0.0);
        clock.arithmetic_factor = 1.0 + power.arithmetic_slope * above;
        let slow = busy * clock.arithmetic_factor;
        clock.arithmetic_share = slow / (slow + rest).max(1.0);
    }
    clock
}

/// Returns the isolated duration in picoseconds of a steady step's arithmetic.
pub(crate) fn busy(program: &Program, costs: &Costs) -> u64 {
    let Some(steady) = program.section(SectionKind::Steady) else {
        return 0;
    };
    let instrs = program.section_instrs(steady).iter();
    let launched = instrs.filter_map(|i| match i.op {
        Op::Launch { kernel, .. } => Some(&costs.all[kernel.index()]),
        _ => None,
    });
    launched
        .filter(|c| c.load == Load::Compute)
        .map(|c| c.work)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn power(share: f64, slope: f64) -> Power {
        Power {
            source: "test".to_owned(),
            arithmetic_share: share,
            arithmetic_slope: slope,
        }
    }

    #[test]
    fn share_and_clock_agree_with_each_other() {
        // 80 of 100 ms. With f = 1 + 0.2 (s - 0.6) and s = 80 f / (80 f + 20): 80 f² - (80 · 1.08 -
        // 20) f - 0.88 · 20 = 0.
        let c = clock(&power(0.6, 0.2), 80_000_000_000, 100_000_000_000);
        let b: f64 = 80.0 * 1.08 - 20.0;
        let f = (b + (b * b + 4.0 * 80.0 * 0.88 * 20.0).sqrt()) / 160.0;
        assert!((c.arithmetic_factor - f).abs() < 1e-12, "{c:?} {f}");
        assert!((c.arithmetic_share - 80.0 * f / (80.0 * f + 20.0)).abs() < 1e-12);
        assert!(c.arithmetic_factor > 1.04 && c.arithmetic_share > 0.8);
    }

    #[test]
    fn up_to_the_share_nothing_changes() {
        let full = |power: &Power, busy| clock(power, busy, 100).arithmetic_factor;
        assert!((full(&power(0.75, 0.3), 75) - 1.0).abs() < 1e-12);
        assert_eq!(full(&power(0.75, 0.3), 30), 1.0);
        assert_eq!(full(&power(0.75, 0.0), 90), 1.0);
        // Neither empty steps nor overlapping arithmetic break it.
        assert_eq!(clock(&power(0.75, 1.0), 0, 0).arithmetic_share, 0.0);
        assert_eq!(clock(&power(0.5, 0.5), 200, 100).arithmetic_share, 1.0);
    }
}
