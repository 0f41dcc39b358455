//! The power limit: arithmetic is the slower the larger its share of a step.

use crate::cost::Costs;
use crate::hardware::Power;
use shardlab_plan::program::{Op, Program, SectionKind};

/// Rounds until share and speed agree; each comes closer by the slope, which is below one.
const ROUNDS: usize = 40;

/// How fast arithmetic is in a program's steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pace {
    /// Share of a step's time that arithmetic takes, alone.
    pub(crate) share: f64,
    /// Its time relative to that of the profile's tables.
    pub(crate) factor: f64,
}

impl Pace {
    /// From a step of `step` picoseconds at the rates of the tables, in which arithmetic takes `busy`: what is not arithmetic
    /// takes what it took, so share and speed determine each other.
    pub(crate) fn new(power: &Power, busy: u64, step: u64) -> Self {
        let (busy, step) = (busy as f64, step.max(1) as f64);
        let rest = (step - busy).max(0.0);
        let mut pace = Self {
            share: (busy / step).min(1.0),
            factor: 1.0,
        };
        for _ in 0..ROUNDS {
            pace.factor =
                1.0 + power.arithmetic_slope * (pace.share - power.arithmetic_share).max(0.0);
            let slow = busy * pace.factor;
            pace.share = slow / (slow + rest).max(1.0);
        }
        pace
    }
}

/// Picoseconds that a steady step's arithmetic takes alone.
pub(crate) fn busy(program: &Program, costs: &Costs) -> u64 {
    let Some(steady) = program.section(SectionKind::Steady) else {
        return 0;
    };
    let instrs = program.section_instrs(steady).iter();
    let launched = instrs.filter_map(|i| match i.op {
        Op::Launch { kernel, .. } => Some(kernel.index()),
        _ => None,
    });
    launched
        .filter(|&k| program.kernels[k].class.is_arithmetic())
        .map(|k| costs.all[k].work)
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
    fn share_and_speed_agree_with_each_other() {
        // 80 of 100 ms. With f = 1 + 0.2 (s - 0.6) and s = 80 f / (80 f + 20): 80 f² - (80 · 1.08 - 20) f - 0.88 · 20 = 0.
        let pace = Pace::new(&power(0.6, 0.2), 80_000_000_000, 100_000_000_000);
        let b: f64 = 80.0 * 1.08 - 20.0;
        let f = (b + (b * b + 4.0 * 80.0 * 0.88 * 20.0).sqrt()) / 160.0;
        assert!((pace.factor - f).abs() < 1e-12, "{pace:?} {f}");
        assert!((pace.share - 80.0 * f / (80.0 * f + 20.0)).abs() < 1e-12);
        assert!(pace.factor > 1.04 && pace.share > 0.8);
    }

    #[test]
    fn up_to_the_share_nothing_changes() {
        let at = Pace::new(&power(0.75, 0.3), 75, 100);
        assert!((at.factor - 1.0).abs() < 1e-12 && (at.share - 0.75).abs() < 1e-12);
        let below = Pace::new(&power(0.75, 0.3), 30, 100);
        assert_eq!((below.share, below.factor), (0.3, 1.0));
        assert_eq!(Pace::new(&power(0.75, 0.0), 90, 100).factor, 1.0);
        // Neither steps of nothing nor arithmetic beside arithmetic make nonsense of it.
        assert_eq!(Pace::new(&power(0.75, 1.0), 0, 0).share, 0.0);
        assert_eq!(Pace::new(&power(0.5, 0.5), 200, 100).share, 1.0);
    }
}
