//! Judges measured time: old and new runs, interleaved in one call.
//!
//! A stored time depends on the state of the machine as much as on the program, so measured time is
//! never compared with a baseline file. Runs of both sides alternate (A B B A …), so drift affects
//! both sides. Each run is represented by its median, because steps within a run are not
//! independent.

use super::finding::{Class, Finding, Status};
use super::limits::{Limits, percent};
use crate::stats::{Comparison, Options, Samples, StatsError, compare};
use shardlab_plan::units::signed;

/// Minimum number of runs per side.
pub const MIN_RUNS: usize = 3;

/// Returns the order of runs. The side that runs first alternates from pair to pair.
#[must_use]
pub fn order(pairs: usize) -> Vec<Side> {
    (0..pairs)
        .flat_map(|i| {
            if i % 2 == 0 {
                [Side::Old, Side::New]
            } else {
                [Side::New, Side::Old]
            }
        })
        .collect()
}

/// A side of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The old version.
    Old,
    /// The new version.
    New,
}

/// Compares interleaved runs. Each number is the median step time of one run, milliseconds.
///
/// # Errors
/// Fails if a side has fewer than [`MIN_RUNS`] runs or a time that is not positive.
pub fn judge(old: &[f64], new: &[f64], limits: &Limits) -> Result<Finding, StatsError> {
    if old.len().min(new.len()) < MIN_RUNS {
        return Err(StatsError::Options(
            "measured time needs three runs of each side",
        ));
    }
    let limit = &limits.measured_step_time;
    let c = compare(
        Samples::Measured(old),
        Samples::Measured(new),
        &Options::default(),
    )?;
    // A faster program needs no new baseline, because measured times have none. Only the upper
    // limit counts.
    let above = 1.0 + limit.value;
    let status = if c.ratio.low > above {
        Status::Regression
    } else if c.ratio.high <= above {
        Status::Pass
    } else {
        Status::Inconclusive
    };
    Ok(Finding {
        class: Class::Time,
        metric: "step, measured".to_owned(),
        status,
        baseline: format!("{:.3} ms", c.medians[0]),
        now: format!("{:.3} ms", c.medians[1]),
        limit: format!("≤ +{}", percent(limit.value)),
        message: sentence(&c, limit.value),
        detail: String::new(),
        place: limit.place.clone().or_else(|| limits.scenario.clone()),
    })
}

fn sentence(c: &Comparison, limit: f64) -> String {
    let relative = |x: f64| format!("{} %", signed(100.0 * x, 1));
    // The interval alone shows whether a change is significant. The gate also requires that the
    // change is significantly beyond the limit.
    let seen = c.detectable.map_or_else(String::new, |least| {
        let least = (1000.0 * (limit + least)).ceil() / 1000.0;
        format!(
            "; a slow-down of {} would fail about four times in five",
            percent(least)
        )
    });
    format!(
        "{} ({:.0} % interval {} to {}) over {} interleaved pairs{seen}",
        relative(c.change()),
        100.0 * c.ratio.level,
        relative(c.ratio.low - 1.0),
        relative(c.ratio.high - 1.0),
        c.n[0].min(c.n[1]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::config::Gate;
    use std::collections::BTreeMap;

    fn limits() -> Limits {
        Limits::new(&Gate::default(), &BTreeMap::new(), Some("s.toml"))
    }

    #[test]
    fn both_sides_come_first_equally_often() {
        use Side::{New, Old};
        assert_eq!(order(2), [Old, New, New, Old]);
        assert_eq!(order(5).iter().filter(|s| **s == Old).count(), 5);
    }

    #[test]
    fn a_slow_down_fails_and_says_by_how_much() {
        let old = [10.0, 10.1, 9.9, 10.05, 9.95];
        let new = old.map(|x| 1.2 * x);
        let f = judge(&old, &new, &limits()).unwrap();
        assert_eq!(f.status, Status::Regression);
        assert!(
            f.message.starts_with("+20.0 % (95 % interval "),
            "{}",
            f.message
        );
        assert!(
            f.message.ends_with(
                "5 interleaved pairs; a slow-down of 6.8 % would fail about four times in five"
            ),
            "{}",
            f.message
        );
        let f = judge(&new, &old, &limits()).unwrap();
        assert_eq!(f.status, Status::Pass);
        assert_eq!(judge(&old, &old, &limits()).unwrap().status, Status::Pass);
    }

    #[test]
    fn the_limit_may_be_any_and_better_is_simply_better() {
        let old = [10.0, 10.1, 9.9, 10.05, 9.95];
        let with = |limit, new: &[f64]| {
            let gate = Gate {
                measured_step_time: limit,
                ..Gate::default()
            };
            let limits = Limits::new(&gate, &BTreeMap::new(), None);
            judge(&old, new, &limits).unwrap().status
        };
        assert_eq!(with(3.0, &old.map(|x| 2.5 * x)), Status::Pass);
        assert_eq!(with(3.0, &old.map(|x| 4.5 * x)), Status::Regression);
        // Between 8 % less and 1 % more: no slow-down beyond the limit.
        assert_eq!(with(0.05, &[9.2, 10.1, 9.3, 10.0, 9.6]), Status::Pass);
    }

    #[test]
    fn noise_is_inconclusive_and_few_runs_are_rejected() {
        let old = [10.0, 14.0, 9.0, 12.0];
        let new = [11.0, 13.5, 9.5, 12.5];
        let f = judge(&old, &new, &limits()).unwrap();
        assert_eq!(f.status, Status::Inconclusive, "{}", f.message);
        assert!(judge(&old[..2], &new, &limits()).is_err());
        assert!(judge(&[1.0, 0.0, 1.0], &new, &limits()).is_err());
    }
}
