//! What a step would take on a machine of which one part is slower: what binds it, and by how much hosts or networks that differ matter.

use crate::predict::{Fit, Prediction};
use rayon::prelude::*;
use shardlab_sim::{Options, Part, simulate_light};

/// How much longer a part takes: a little, as one machine beside another of its kind, and twice as long.
pub const FACTORS: [f64; 2] = [1.1, 2.0];

/// A part of the machine, and the step that comes of it at each of [`FACTORS`].
#[derive(Clone, Debug, PartialEq)]
pub struct Slower {
    /// Part.
    pub part: Part,
    /// Step time at each factor, milliseconds; none where it is beyond what is simulated (tasks of 1000 s).
    pub step_ms: [Option<f64>; 2],
}

/// Every part of the machine.
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
