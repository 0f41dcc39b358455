//! Differences between a continuously busy device and one that runs single kernels: power and
//! clocks.

use super::{Measured, middle};
use crate::calibrate::steps::{Launched, Observed, means_alone, us};
use shardlab_plan::ir::{DType, Kernel};
use shardlab_plan::program::Program;
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Kernels shorter than this are not representative of rates, in microseconds.
const LONG_US: f64 = 50.0;
/// Differences between steps shorter than this, in microseconds, may be caused by the host instead
/// of arithmetic.
const SHORT_STEP_US: f64 = 20e3;
/// Maximum slowdown of arithmetic per unit of share.
const MAX_SLOPE: f64 = 0.5;
/// Number of shares between 0 and 1 that are tried as the start of the slowdown.
const SHARES: u32 = 50;
/// Minimum explained variance, relative to that of the best share, for choosing a larger share.
const MIN_EXPLAINED: f64 = 0.985;
/// Maximum slowdown or speedup of arithmetic in consecutive steps.
const MAX_CHANGE: f64 = 0.2;
/// Sum of squared differences of shares, weighted by microseconds, below which there is no slope.
const SPREAD: f64 = 1.0;

/// Arithmetic in the steps of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pace {
    /// Its share of a step without recording.
    share: f64,
    /// Slowdown in unrecorded steps, relative to recorded steps.
    slower: f64,
}

impl Pace {
    /// Attributes the difference between consecutive steps and a recorded step to arithmetic,
    /// because the clock depends on how long the device has been busy.
    fn of(observed: &Observed) -> Self {
        let spans = &observed.typical.spans;
        let first = spans.iter().map(|s| s.start.0).min().unwrap_or(0);
        let recorded = us(observed.typical.record.end.0.saturating_sub(first));
        let mut whole: Vec<f64> = observed.plain.iter().map(|p| p.0).collect();
        let whole = Some(middle(&mut whole))
            .filter(|w| w.is_finite())
            .unwrap_or(recorded);
        let kernels = &observed.program.kernels;
        let busy = observed.tasks.iter().filter_map(|&(launched, us)| {
            kernels[launched?.kernel.index()]
                .class
                .is_arithmetic()
                .then_some(us)
        });
        Self::from_times(busy.sum(), recorded, whole)
    }

    fn from_times(busy: f64, recorded: f64, whole: f64) -> Self {
        if whole < SHORT_STEP_US {
            return Self {
                share: (busy / whole.max(1.0)).min(1.0),
                slower: 1.0,
            };
        }
        let slower = 1.0 + (whole - recorded) / busy.max(1.0);
        let slower = slower.clamp(1.0 - MAX_CHANGE, 1.0 + MAX_CHANGE);
        Self {
            share: (busy * slower / whole.max(1.0)).min(1.0),
            slower,
        }
    }
}

/// Kernels of a run, and the pace of arithmetic in it.
pub(super) struct Paced {
    program: Arc<Program>,
    /// Microseconds as recorded; without overlap, if tasks without overlap were observed.
    kernels: BTreeMap<Launched, f64>,
    pace: Pace,
}

impl Paced {
    pub(super) fn of(observed: &Observed) -> Self {
        Self {
            program: Arc::clone(&observed.program),
            kernels: means_alone(observed)
                .into_iter()
                .map(|(kernel, shown)| (kernel, shown.us))
                .collect(),
            pace: Pace::of(observed),
        }
    }

    /// Returns kernels, the bytes that a launch moves, and the recorded microseconds.
    fn recorded(&self) -> impl Iterator<Item = (&Kernel, Bytes, f64)> {
        let kernels = self.kernels.iter();
        kernels.map(|(l, &us)| (&self.program.kernels[l.kernel.index()], l.moved, us))
    }

    /// Returns kernels, the bytes that a launch moves, and the microseconds at the full clock.
    pub(super) fn at_full_clock(
        &self,
        power: Power,
    ) -> impl Iterator<Item = (&Kernel, Bytes, f64)> {
        self.recorded().map(move |(kernel, moved, us)| {
            let factor = match kernel.class.is_arithmetic() {
                true => power.at_full_clock(self.pace, kernel.float8_gemm().is_some()),
                false => 1.0,
            };
            (kernel, moved, us * factor)
        })
    }
}

/// Dependence of the pace of arithmetic on its share of a step. At its power limit, a device lowers
/// its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Power {
    /// Share up to which the clock is not lowered.
    pub(super) share: f64,
    /// Slope above this share: the relative increase of times per unit of share.
    pub(super) slope: f64,
    /// The same for 8-bit matmuls, if they ran in steps of several shares.
    pub(super) float8_slope: Option<f64>,
}

impl Default for Power {
    fn default() -> Self {
        Self {
            share: 1.0,
            slope: 0.0,
            float8_slope: None,
        }
    }
}

/// Runs of a kernel: the share of arithmetic in the step, and microseconds.
type Runs = Vec<(f64, f64)>;

impl Power {
    /// Fits the dependence to equal kernels in runs with different shares.
    pub(super) fn of(runs: &[Paced]) -> Self {
        let mut seen: BTreeMap<(bool, String), Runs> = BTreeMap::new();
        for run in runs {
            for (kernel, moved, us) in run.recorded() {
                // Without tensor cores, a device is far from its power limit.
                let hot = kernel.class.is_arithmetic() && kernel.dtype != DType::F32;
                if hot && us >= LONG_US {
                    // All properties of a kernel count: GEMMs of the same shape may differ in
                    // layout, accumulation, fused epilogue and width of the result.
                    let float8 = kernel.float8_gemm().is_some();
                    let key = (float8, format!("{kernel:?} {moved:?}"));
                    let runs = seen.entry(key).or_default();
                    runs.push((run.pace.share, us * run.pace.slower));
                }
            }
        }
        let of = |float8: bool| -> Vec<Runs> {
            let all = seen.iter().filter(|((f, _), _)| *f == float8);
            all.map(|(_, runs)| runs.clone()).collect()
        };
        Self::fit(&of(false), &of(true))
    }

    /// Fits the dependence to the runs of kernels. The start of the slowdown is hard to separate
    /// from its slope. Of the shares that explain the times nearly as well as the best one, the
    /// largest is chosen, because smaller ones would predict arithmetic that is faster than ever
    /// observed. The slope of 8-bit matmuls starts at the same share, because the same clock slows
    /// all of them.
    fn fit(kernels: &[Runs], float8: &[Runs]) -> Self {
        let shares = (0..=SHARES).map(|i| f64::from(i) / f64::from(SHARES));
        let fits = shares.filter_map(|share| Some((share, line(kernels, share)?)));
        let fits: Vec<(f64, Line)> = fits.collect();
        let best = fits.iter().map(|f| f.1.explained).fold(0.0, f64::max);
        let good = |f: &&(f64, Line)| f.1.slope > 0.0 && f.1.explained >= MIN_EXPLAINED * best;
        let last = fits.iter().rev().find(good);
        last.map_or(Self::default(), |&(share, Line { slope, .. })| Self {
            share,
            slope,
            float8_slope: line(float8, share).map(|l| l.slope),
        })
    }

    /// Returns the factor that converts the recorded times of a run's arithmetic, or of its 8-bit
    /// matmuls, to times at the full clock.
    fn at_full_clock(self, pace: Pace, float8: bool) -> f64 {
        let own = self.float8_slope.filter(|_| float8);
        let slope = own.unwrap_or(self.slope);
        pace.slower / (1.0 + slope * (pace.share - self.share).max(0.0))
    }
}

/// A line that fits times as a function of shares.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    slope: f64,
    /// Fraction of the variance that the line explains.
    explained: f64,
}

/// Fits a line by least squares. The times of each kernel, relative to their mean, are a function
/// of the excess of the shares, relative to its mean. Kernels are weighted by time. Returns `None`
/// if the shares do not differ.
fn line(kernels: &[Runs], from: f64) -> Option<Line> {
    let (mut up, mut down) = (0.0, 0.0);
    for runs in kernels {
        let n = runs.len() as f64;
        let above = |share: f64| (share - from).max(0.0);
        let middle = runs.iter().map(|r| above(r.0)).sum::<f64>() / n;
        let us = runs.iter().map(|r| r.1).sum::<f64>() / n;
        for r in runs {
            up += (above(r.0) - middle) * (r.1 - us);
            down += (above(r.0) - middle).powi(2) * us;
        }
    }
    let slope = (up / down).clamp(0.0, MAX_SLOPE);
    (down > SPREAD).then_some(Line {
        slope,
        explained: slope * (2.0 * up - slope * down),
    })
}

/// Scales the times of kernels that ran in isolation to the times of equal shapes in steps, so that
/// all rows of a table have the same meaning.
pub(super) fn as_in_steps(m: &mut Measured) {
    for (kind, rows) in &mut m.gemm {
        let known = |shape: &[u64; 3]| m.steps.gemm.get(&(*kind, *shape)).map(|t| t.us());
        slow_down(rows, known);
    }
    for table in &mut m.grouped {
        let steps = m.steps.grouped.get(&table.kind);
        slow_down(&mut table.rows, |sizes| Some(steps?.get(sizes)?.us()));
    }
    for table in &mut m.attention {
        let key = (table.dtype, table.causal, table.backward);
        let steps = m.steps.attention.get(&key);
        slow_down(&mut table.rows, |shape| Some(steps?.get(shape)?.us()));
    }
}

/// Multiplies long times by the median of the known ratios, if it is above one.
fn slow_down<S>(rows: &mut [(S, f64)], known: impl Fn(&S) -> Option<f64>) {
    let ratio = |(shape, us): &(S, f64)| Some(known(shape).filter(|_| *us >= LONG_US)? / us);
    let mut ratios: Vec<f64> = rows.iter().filter_map(ratio).collect();
    let slower = middle(&mut ratios);
    if slower > 1.0 {
        for (_, us) in rows.iter_mut().filter(|r| r.1 >= LONG_US) {
            *us *= slower;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_falls_from_a_share_on() {
        // 0.3 longer per unit of share above 0.66. The runs of the longer kernel have higher
        // shares. This would look like a slope if kernels were compared with each other instead of
        // with themselves.
        let at = |share: f64, us: f64| (share, us * (1.0 + 0.3 * (share - 0.66_f64).max(0.0)));
        let short = [0.5, 0.6, 0.7, 0.8].map(|s| at(s, 1000.0)).to_vec();
        let long = [0.55, 0.65, 0.75, 0.85].map(|s| at(s, 9000.0)).to_vec();
        let power = Power::fit(&[short.clone(), long.clone()], &[]);
        assert!((power.slope - 0.3).abs() < 0.05, "{power:?}");
        assert!((0.64..=0.70).contains(&power.share), "{power:?}");
        assert_eq!(power.float8_slope, None);
        // 8-bit matmuls slow down half as much, from the same share on.
        let half = |runs: &Runs| -> Runs {
            let of = |&(share, us): &(f64, f64)| (share, 1.0 + 0.5 * (us / 1000.0 - 1.0));
            runs.iter()
                .map(of)
                .map(|(s, us)| (s, 1000.0 * us))
                .collect()
        };
        let both = Power::fit(&[short.clone(), long], &[half(&short)]);
        assert_eq!((both.share, both.slope), (power.share, power.slope));
        let eight = both.float8_slope.unwrap();
        assert!((eight - 0.15).abs() < 0.03, "{both:?}");
        let pace = Pace {
            share: 0.9,
            slower: 1.0,
        };
        let longer = |float8| 1.0 / both.at_full_clock(pace, float8) - 1.0;
        assert!((longer(true) / longer(false) - eight / both.slope).abs() < 1e-9);
        // One run per kernel contains no information, and no device gets faster with more work.
        let none = Power::default();
        let fit = |kernels: &[Runs]| Power::fit(kernels, &[]);
        assert_eq!(fit(&[vec![(0.7, 100.0)], vec![(0.9, 900.0)]]), none);
        assert_eq!(fit(&[vec![(0.6, 9000.0), (0.8, 8000.0)]]), none);
        let pace = Pace {
            share: 0.9,
            slower: 1.1,
        };
        assert!((none.at_full_clock(pace, false) - 1.1).abs() < 1e-12);
        let power = Power {
            share: 0.7,
            slope: 0.5,
            float8_slope: None,
        };
        assert!((power.at_full_clock(pace, false) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn what_steps_in_a_row_take_more_is_arithmetic() {
        // Half of a millisecond is arithmetic; the rest is unknown.
        let short = Pace::from_times(500.0, 900.0, 1000.0);
        assert_eq!((short.share, short.slower), (0.5, 1.0));
        // 80 of 100 ms in the recorded step, 104 ms in consecutive steps: 84 of 104.
        let pace = Pace::from_times(80e3, 100e3, 104e3);
        assert!((pace.slower - 1.05).abs() < 1e-12);
        assert!((pace.share - 84.0 / 104.0).abs() < 1e-12);
        assert!(Pace::from_times(80e3, 104e3, 100e3).slower < 1.0);
        // A run whose steps contain no information about arithmetic.
        assert_eq!(Pace::from_times(0.0, 100.0, 4e3).share, 0.0);
    }

    #[test]
    fn rows_alone_are_as_slow_as_the_same_shapes_in_steps() {
        // Ratios of 1.1, 1.2 and 1.3 in steps, a short kernel that is ignored, and one that was not
        // observed.
        let mut rows = vec![(1, 100.0), (2, 100.0), (3, 200.0), (4, 10.0), (5, 1000.0)];
        let steps = [110.0, 120.0, 260.0, 90.0];
        slow_down(&mut rows, |&shape: &usize| steps.get(shape - 1).copied());
        let want = [120.0, 120.0, 240.0, 10.0, 1200.0];
        assert!(
            rows.iter().zip(want).all(|(r, w)| (r.1 - w).abs() < 1e-9),
            "{rows:?}"
        );
        // Without known ratios, nothing changes.
        slow_down(&mut rows, |_| None);
        assert!((rows[4].1 - 1200.0).abs() < 1e-9);
    }
}
