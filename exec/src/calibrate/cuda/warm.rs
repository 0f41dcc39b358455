//! What a device that never rests does differently from one that runs a kernel now and then: power and clocks.

use super::{Measured, middle};
use crate::calibrate::steps::Observed;
use shardlab_plan::program::KernelClass;

/// Shorter kernels say nothing about rates, microseconds.
const LONG_US: f64 = 50.0;

/// How steps differ from what was recorded of them: by an end, and by how much slower arithmetic is on a device that
/// never rests than right after a recording begins.
#[derive(Clone, Debug, Default)]
pub(super) struct Warm {
    /// By run, microseconds: arithmetic, and what a step takes beyond its recorded tasks and the gaps between them.
    rests: Vec<(f64, f64)>,
}

impl Warm {
    pub(super) fn add(&mut self, observed: &Observed) {
        let spans = &observed.typical.spans;
        let (Some(first), Some(last)) = (
            spans.iter().map(|s| s.start.0).min(),
            spans.iter().map(|s| s.end.0).max(),
        ) else {
            return;
        };
        let arithmetic = |class: &KernelClass| {
            matches!(
                class,
                KernelClass::Gemm { .. } | KernelClass::Attention { .. } | KernelClass::Conv { .. }
            )
        };
        let kernels = &observed.program.kernels;
        let busy = observed.tasks.iter().filter_map(|&(kernel, us)| {
            let class = &kernels[kernel?.index()].class;
            arithmetic(class).then_some(us)
        });
        let mut whole: Vec<f64> = observed.plain.iter().map(|p| p.0).collect();
        let rest = middle(&mut whole) - crate::calibrate::steps::us(last - first);
        if rest.is_finite() {
            self.rests.push((busy.sum(), rest));
        }
    }

    /// The end of a step, microseconds, and the rate of arithmetic: the line through the observations whose slopes are the
    /// middle one of all pairs'.
    pub(super) fn settle(&self) -> (f64, f64) {
        let mut slopes = Vec::new();
        for (i, a) in self.rests.iter().enumerate() {
            for b in &self.rests[..i] {
                if (a.0 - b.0).abs() > 1000.0 {
                    slopes.push((a.1 - b.1) / (a.0 - b.0));
                }
            }
        }
        let slope = middle(&mut slopes);
        let slope = if slope.is_finite() {
            slope.clamp(0.0, 0.25)
        } else {
            0.0
        };
        let mut ends: Vec<f64> = self.rests.iter().map(|r| r.1 - slope * r.0).collect();
        (middle(&mut ends).clamp(0.0, 500.0), 1.0 / (1.0 + slope))
    }
}

/// Makes what ran alone, now and then, as slow as steps have shown the same shapes to be: rows of one table mean one thing.
pub(super) fn as_in_steps(m: &mut Measured) {
    for (dtype, rows) in &mut m.gemm {
        let known = |shape: &[u64; 3]| m.steps.gemm.get(&(*dtype, *shape)).map(|t| t.us());
        slow_down(rows, known);
    }
    for table in &mut m.attention {
        let key = (table.dtype, table.causal, table.backward);
        let steps = m.steps.attention.get(&key);
        slow_down(&mut table.rows, |shape| Some(steps?.get(shape)?.us()));
    }
}

/// Multiplies long times by the middle of what is known over them, where that is more than one.
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
    fn a_warm_device_is_told_from_the_end_of_a_step() {
        // 100 us behind each step, and arithmetic at 0.95 of what was recorded.
        let slow = 1.0 / 0.95 - 1.0;
        let warm = Warm {
            rests: [5_000.0, 20_000.0, 60_000.0]
                .map(|a| (a, 100.0 + slow * a))
                .to_vec(),
        };
        let (end, rate) = warm.settle();
        assert!(
            (end - 100.0).abs() < 1e-6 && (rate - 0.95).abs() < 1e-9,
            "{end} {rate}"
        );
        // One observation tells nothing of the rate.
        let one = Warm {
            rests: vec![(5_000.0, 120.0)],
        };
        assert_eq!(one.settle(), (120.0, 1.0));
    }

    #[test]
    fn rows_alone_are_as_slow_as_the_same_shapes_in_steps() {
        // Seen in steps: 1.1, 1.2 and 1.3 times as long; a short one that says nothing; and one that was not seen.
        let mut rows = vec![(1, 100.0), (2, 100.0), (3, 200.0), (4, 10.0), (5, 1000.0)];
        let steps = [110.0, 120.0, 260.0, 90.0];
        slow_down(&mut rows, |&shape: &usize| steps.get(shape - 1).copied());
        let want = [120.0, 120.0, 240.0, 10.0, 1200.0];
        assert!(
            rows.iter().zip(want).all(|(r, w)| (r.1 - w).abs() < 1e-9),
            "{rows:?}"
        );
        // Nothing known, nothing changed.
        slow_down(&mut rows, |_| None);
        assert!((rows[4].1 - 1200.0).abs() < 1e-9);
    }
}
