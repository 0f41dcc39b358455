//! Choices of `moe.routing` for which no row is reserved.

use super::{Overflow, Scenario};
use serde::{Deserialize, Serialize};

/// The shortage of rows in a scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowShortage {
    /// The layer with the busiest rank, among those without enough rows.
    pub layer: u32,
    /// Number of rows that this rank needs.
    pub wanted: u64,
    /// Number of rows that a rank reserves in every layer.
    pub reserved: u64,
    /// Number of layers without enough rows.
    pub layers: usize,
    /// The smallest `moe.capacity_factor`, in hundredths, with rows for all choices.
    pub factor: f64,
    /// Fraction of the choices of all layers that find no row.
    pub share: f64,
    /// Whether these choices are dropped. If false, the run fails.
    pub drop: bool,
}

impl RowShortage {
    /// Returns a description of the fraction of choices without a row, and of what happens to them:
    /// `8.9 % of choices are dropped`.
    #[must_use]
    pub fn words(&self) -> String {
        let share = match 100.0 * self.share {
            few if few < 0.1 => "less than 0.1".to_owned(),
            share => format!("{share:.1}"),
        };
        match self.drop {
            true => format!("{share} % of choices are dropped"),
            false => format!("{share} % of choices find no row, so a run fails"),
        }
    }
}

/// The rows of a layer.
struct Layer {
    number: u32,
    /// Number of rows that the busiest rank needs.
    wanted: u64,
    /// Fraction of the choices that find no row.
    share: f64,
}

/// Rounds a number up, unless it exceeds an integer only by a rounding error.
fn up(x: f64) -> f64 {
    (x - 1e-6).ceil()
}

impl Scenario {
    /// Returns the shortage of rows with `moe.capacity_factor`; `None` if all choices of
    /// `moe.routing` find a row.
    #[must_use]
    pub fn row_shortage(&self) -> Option<RowShortage> {
        let moe = self.moe.as_ref()?;
        moe.capacity_factor?;
        let (of, ranks) = (&self.model.options.experts, u64::from(self.mesh.ep));
        let choices = [self.train.micro_batch * self.train.seq_len, of.top_k];
        let sizes = [ranks, of.experts / ranks];
        let all = choices[0] as f64 * choices[1] as f64;
        let (balanced, reserved) = match moe.dispatcher.shares_rows() {
            true => (all, moe.rows(choices, sizes)),
            false => (all / ranks as f64, moe.slots(choices, sizes)),
        };
        let layers = (0..self.model.layers).filter(|l| of.has(u64::from(*l)));
        let layers = layers.map(|number| {
            let loads = moe.loads.get(&number).map_or(&[1.0][..], Vec::as_slice);
            let wanted = |load: &f64| load * balanced;
            let beyond = |load: &f64| (wanted(load) - reserved as f64).max(0.0);
            Layer {
                number,
                wanted: up(loads.iter().map(wanted).fold(0.0, f64::max)) as u64,
                share: loads.iter().map(beyond).sum::<f64>()
                    / loads.iter().map(wanted).sum::<f64>(),
            }
        });
        let layers: Vec<Layer> = layers.collect();
        let lacks = |l: &&Layer| l.wanted > reserved;
        let busiest = layers.iter().filter(lacks);
        let busiest = busiest.reduce(|a, b| if b.wanted > a.wanted { b } else { a })?;
        Some(RowShortage {
            layer: busiest.number,
            wanted: busiest.wanted,
            reserved,
            layers: layers.iter().filter(lacks).count(),
            factor: up(busiest.wanted as f64 / balanced * 100.0) / 100.0,
            share: layers.iter().map(|l| l.share).sum::<f64>() / layers.len() as f64,
            drop: moe.on_overflow == Overflow::Drop,
        })
    }
}
