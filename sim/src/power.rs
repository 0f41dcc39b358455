//! The power limit: the larger the share of arithmetic in a step, the slower it is.

use crate::cost::Costs;
use crate::hardware::Power;
use crate::price::Load;
use shardlab_plan::program::{Op, Program, SectionKind};
use shardlab_plan::record::Clock;

/// Number of iterations until share and clock agree. Each one reduces the difference at least
/// fourfold, because the slope is at most one.
const ROUNDS: usize = 40;

/// Isolated duration of a step's arithmetic, in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Busy {
    /// 8-bit matmuls.
    float8: u64,
    /// Everything else.
    other: u64,
}

/// Returns the slowdown of arithmetic. At the rates of the tables, a step takes `step` picoseconds,
/// of which arithmetic takes `busy`. Other work keeps its duration, so share and clock determine
/// each other.
pub(crate) fn clock(power: &Power, busy: Busy, step: u64) -> Clock {
    let (float8, other, step) = (busy.float8 as f64, busy.other as f64, step.max(1) as f64);
    let rest = (step - float8 - other).max(0.0);
    let slopes = [
        power.arithmetic_slope,
        power.float8_slope.unwrap_or(power.arithmetic_slope),
    ];
    let mut share = ((float8 + other) / step).min(1.0);
    let mut factors = [1.0; 2];
    for _ in 0..ROUNDS {
        let above = (share - power.arithmetic_share).max(0.0);
        factors = slopes.map(|slope| 1.0 + slope * above);
        let slow = other * factors[0] + float8 * factors[1];
        share = slow / (slow + rest).max(1.0);
    }
    Clock {
        arithmetic_share: share,
        arithmetic_factor: factors[0],
        float8_factor: (busy.float8 > 0).then_some(factors[1]),
    }
}

/// Returns the isolated duration of a steady step's arithmetic.
pub(crate) fn busy(program: &Program, costs: &Costs) -> Busy {
    let Some(steady) = program.section(SectionKind::Steady) else {
        return Busy::default();
    };
    let instrs = program.section_instrs(steady).iter();
    let launched = instrs.filter_map(|i| match i.op {
        Op::Launch { kernel, .. } => Some(&costs.all[kernel.index()]),
        _ => None,
    });
    let mut busy = Busy::default();
    for cost in launched.filter(|c| c.load == Load::Compute) {
        match cost.float8 {
            true => busy.float8 += cost.work,
            false => busy.other += cost.work,
        }
    }
    busy
}

#[cfg(test)]
mod tests {
    use super::*;

    fn power(share: f64, slope: f64) -> Power {
        Power {
            source: "test".to_owned(),
            arithmetic_share: share,
            arithmetic_slope: slope,
            float8_slope: None,
        }
    }

    fn others(other: u64) -> Busy {
        Busy { float8: 0, other }
    }

    #[test]
    fn share_and_clock_agree_with_each_other() {
        // 80 of 100 ms. With f = 1 + 0.2 (s - 0.6) and s = 80 f / (80 f + 20): 80 f² - (80 · 1.08 -
        // 20) f - 0.88 · 20 = 0.
        let c = clock(&power(0.6, 0.2), others(80_000_000_000), 100_000_000_000);
        let b: f64 = 80.0 * 1.08 - 20.0;
        let f = (b + (b * b + 4.0 * 80.0 * 0.88 * 20.0).sqrt()) / 160.0;
        assert!((c.arithmetic_factor - f).abs() < 1e-12, "{c:?} {f}");
        assert!((c.arithmetic_share - 80.0 * f / (80.0 * f + 20.0)).abs() < 1e-12);
        assert!(c.arithmetic_factor > 1.04 && c.arithmetic_share > 0.8);
    }

    /// 8-bit matmuls have a separate slope if the profile contains one. They and other matmuls both
    /// count for the share.
    #[test]
    fn float8_has_a_slope_of_its_own() {
        let busy = Busy {
            float8: 40_000_000_000,
            other: 40_000_000_000,
        };
        let step = 100_000_000_000;
        let alike = clock(&power(0.6, 0.2), busy, step);
        let all = clock(&power(0.6, 0.2), others(80_000_000_000), step);
        assert_eq!(alike.float8_factor, Some(alike.arithmetic_factor));
        assert!((alike.arithmetic_factor - all.arithmetic_factor).abs() < 1e-12);
        assert_eq!(all.float8_factor, None);
        let own = Power {
            float8_slope: Some(0.4),
            ..power(0.6, 0.2)
        };
        let c = clock(&own, busy, step);
        let (f16, f8) = (c.arithmetic_factor - 1.0, c.float8_factor.unwrap() - 1.0);
        assert!((f8 - 2.0 * f16).abs() < 1e-12 && f16 > all.arithmetic_factor - 1.0);
        let slow = 40.0 * (2.0 + f16 + f8);
        assert!(
            (c.arithmetic_share - slow / (slow + 20.0)).abs() < 1e-9,
            "{c:?}"
        );
    }

    #[test]
    fn up_to_the_share_nothing_changes() {
        let full = |power: &Power, busy| clock(power, others(busy), 100).arithmetic_factor;
        assert!((full(&power(0.75, 0.3), 75) - 1.0).abs() < 1e-12);
        assert_eq!(full(&power(0.75, 0.3), 30), 1.0);
        assert_eq!(full(&power(0.75, 0.0), 90), 1.0);
        // It accepts empty steps and overlapping arithmetic.
        assert_eq!(clock(&power(0.75, 1.0), others(0), 0).arithmetic_share, 0.0);
        assert_eq!(
            clock(&power(0.5, 0.5), others(200), 100).arithmetic_share,
            1.0
        );
    }
}
