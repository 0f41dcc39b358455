//! Step time if one component were slower. It shows what limits the step, and how much other hosts
//! or networks matter.

use crate::predict::{Fit, Prediction};
use rayon::prelude::*;
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
