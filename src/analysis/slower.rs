//! Step time if one component were slower. It shows what limits the step, and how much other hosts
//! or networks matter.

use crate::predict::{Fit, Prediction};
use rayon::prelude::*;
use shardlab_plan::record::Basis;
use shardlab_plan::record::basis::milliseconds;
use shardlab_sim::{Options, Part, simulate_light};

/// Slowdown factors: a small one, like the difference between two machines of the same kind, and
/// 2x.
pub const FACTORS: [f64; 2] = [1.1, 2.0];

/// A component, and the step time for each of [`FACTORS`].
#[derive(Clone, Debug, PartialEq)]
pub struct Slower {
    /// Component.
    pub part: Part,
    /// Step time for each factor, milliseconds; `None` beyond the simulator's range (tasks of 1000
    /// s).
    pub step_ms: [Option<f64>; 2],
}

impl Slower {
    /// Returns the cells of a table for a step of `base` milliseconds: the component, and for each
    /// of [`FACTORS`] the step time and its change.
    #[must_use]
    pub fn cells(&self, base: f64, basis: Option<&Basis>) -> [String; 5] {
        let time = |ms: Option<f64>| ms.map_or_else(|| "-".into(), |ms| milliseconds(ms, basis));
        let more = |ms: Option<f64>| {
            let share = |ms: f64| format!("{:+.1} %", 100.0 * (ms / base - 1.0));
            ms.map_or_else(String::new, share)
        };
        let [a, b] = self.step_ms;
        [
            self.part.name().to_owned(),
            time(a),
            more(a),
            time(b),
            more(b),
        ]
    }
}

/// Returns the step times with each component slowed down.
#[must_use]
pub fn parts(p: &Prediction) -> Vec<Slower> {
    let step = |part: Part, factor: f64| {
        let options = Options {
            slower: vec![(part, factor)],
            enforce_memory: matches!(p.fit, Fit::Tight { .. }),
            ..Options::default()
        };
        let run = simulate_light(&p.program, &p.profile, &options).ok()?;
        Some(run.step_ms())
    };
    Part::ALL
        .into_par_iter()
        .map(|part| Slower {
            part,
            step_ms: FACTORS.map(|factor| step(part, factor)),
        })
        .collect()
}
