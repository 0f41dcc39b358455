//! Numbers of tokens of each expert, as a histogram that predictions read.

use crate::engine::StepResult;
use shardlab_plan::config::{Histogram, Scenario};
use shardlab_plan::ir::{AxisId, DeviceMesh};

/// Counts of a run.
#[derive(Debug)]
pub(super) struct Recorder {
    mesh: DeviceMesh,
    /// Layers of the model that have experts.
    layers: Vec<u32>,
    histogram: Histogram,
}

impl Recorder {
    /// Creates counts of zero for the layers of a model.
    pub(super) fn new(scenario: &Scenario) -> Self {
        let of = &scenario.model.options.experts;
        let layers: Vec<u32> = (0..scenario.model.layers)
            .filter(|l| of.has(u64::from(*l)))
            .collect();
        let none = vec![0; of.experts as usize];
        Self {
            mesh: scenario.device_mesh(),
            histogram: Histogram {
                format: Histogram::FORMAT,
                experts: of.experts,
                top_k: of.top_k,
                layers: layers.iter().map(|l| (*l, none.clone())).collect(),
            },
            layers,
        }
    }

    /// Adds a step. Ranks count the choices of their own tokens, or, of gathered tokens, those that
    /// fall on their own experts.
    pub(super) fn add(&mut self, result: &StepResult) {
        for (rank, counts) in (0..).zip(&result.counts) {
            let place = u64::from(self.mesh.coordinate(AxisId::EP, rank));
            for (counts, layer) in counts.iter().zip(self.layers.iter().cycle()) {
                let whole = counts.len() as u64 == self.histogram.experts;
                let first = if whole {
                    0
                } else {
                    place * counts.len() as u64
                };
                let all = self.histogram.layers.get_mut(layer);
                let own = all.into_iter().flatten().skip(first as usize);
                own.zip(counts).for_each(|(sum, n)| *sum += u64::from(*n));
            }
        }
    }

    pub(super) fn finish(self) -> Histogram {
        self.histogram
    }
}
