//! Popularity of experts in predictions. A router's actual choices are known only at run time.

use super::Experts;
use crate::ir::{DrawnColumns, ForcedChoice};
use crate::random::SplitMix64;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;

/// `moe.routing`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routing {
    /// All experts of a layer are equally popular.
    Balanced,
    /// Popularity falls geometrically from expert to expert, in an order drawn per layer.
    Seeded,
    /// Tokens take `top_k` experts each, in round-robin order. Every rank starts at the first one.
    RoundRobin,
    /// Choices recorded by a run, in a file.
    Recorded(String),
}

impl Routing {
    /// Names of the values that are not files.
    pub const WORDS: &'static [&'static str] = &["balanced", "seeded", "round_robin"];
}

/// Writes the value in the form of scenario files.
impl Serialize for Routing {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(match self {
            Self::Balanced => Self::WORDS[0],
            Self::Seeded => Self::WORDS[1],
            Self::RoundRobin => Self::WORDS[2],
            Self::Recorded(path) => path,
        })
    }
}

/// Forced choices of experts, which replace those of the router (`moe.force_routing`).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ForcedRouting {
    /// Distribution of the choices.
    pub routing: Routing,
    /// Seed of the choices.
    pub seed: u64,
    /// Popularity of experts by layer, if it is not balanced.
    #[serde(skip)]
    pub popularity: BTreeMap<u32, Vec<f64>>,
}

impl ForcedRouting {
    /// Returns the choices of a layer's tokens. Layers with equal popularities make the same
    /// choices, so they share a kernel and are planned once.
    #[must_use]
    pub fn choice(&self, of: &Experts, layer: Option<u32>) -> ForcedChoice {
        if self.routing == Routing::RoundRobin {
            return ForcedChoice::RoundRobin;
        }
        // This must be a different stream of random numbers than the one for the order of
        // popularity.
        let seed = |layer: u32| SplitMix64(!self.seed ^ (u64::from(layer) << 32)).draw();
        let own = layer.and_then(|l| Some((l, self.popularity.get(&l)?)));
        ForcedChoice::Drawn(match own {
            Some((layer, popularity)) => DrawnColumns::new(popularity, of.top_k, seed(layer)),
            None => DrawnColumns::new(&vec![1.0; of.experts as usize], of.top_k, seed(0)),
        })
    }

    /// Returns whether all layers make the same choices.
    #[must_use]
    pub fn is_alike(&self) -> bool {
        self.popularity.is_empty()
    }
}

/// Choices of a run: the number of tokens that each expert got. `shardlab exec --record-routing`
/// writes it as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    /// Version of the file format: 1.
    pub format: u32,
    /// Experts per layer.
    pub experts: u64,
    /// Experts per token.
    pub top_k: u64,
    /// Number of choices of each expert over all ranks and steps, by layer of the model.
    pub layers: BTreeMap<u32, Vec<u64>>,
}

impl Histogram {
    /// The version that this program reads and writes.
    pub const FORMAT: u32 = 1;

    /// Describes the sizes of the recorded model.
    #[must_use]
    pub fn words(&self) -> String {
        let layers: Vec<String> = self.layers.keys().map(u32::to_string).collect();
        format!(
            "{} experts, top {}, in layers {}",
            self.experts,
            self.top_k,
            layers.join(", ")
        )
    }

    /// Describes the first layer whose counts are impossible: without choices, or with more choices
    /// of an expert than tokens, where each token makes `top_k` different choices.
    pub(crate) fn impossible(&self) -> Option<String> {
        self.layers.iter().find_map(|(layer, counts)| {
            let all: u128 = counts.iter().map(|&n| u128::from(n)).sum();
            if all == 0 {
                return Some(format!("no expert of layer {layer} has a token"));
            }
            let (expert, &most) = counts.iter().enumerate().max_by_key(|(_, n)| **n)?;
            let tokens = all / u128::from(self.top_k.max(1));
            (u128::from(most) > tokens).then(|| {
                format!(
                    "expert {expert} of layer {layer} has {most} tokens, but {all} choices, {} of each token, are \
                     those of {tokens} tokens",
                    self.top_k
                )
            })
        })
    }

    /// Returns the popularity of experts by layer.
    pub(crate) fn popularity(&self) -> BTreeMap<u32, Vec<f64>> {
        let of = |counts: &Vec<u64>| counts.iter().map(|&n| n as f64).collect();
        self.layers
            .iter()
            .map(|(l, counts)| (*l, of(counts)))
            .collect()
    }
}

/// Returns, by layer, the number of choices of each of `ranks` ranks that divide the experts in
/// order, relative to a balanced load. The ranks of a layer without choices have 1.
pub(crate) fn loads(popularity: &BTreeMap<u32, Vec<f64>>, ranks: u32) -> BTreeMap<u32, Vec<f64>> {
    popularity
        .iter()
        .map(|(l, each)| (*l, load(each, ranks)))
        .collect()
}

fn load(popularity: &[f64], ranks: u32) -> Vec<f64> {
    let each = popularity.len() / ranks as usize;
    let all: f64 = popularity.iter().sum();
    let sums = popularity
        .chunks(each.max(1))
        .map(|of| of.iter().sum::<f64>());
    let relative = |sum: f64| match all > 0.0 {
        true => sum / all * f64::from(ranks),
        false => 1.0,
    };
    sums.map(relative).collect()
}

/// Returns, by layer, the number of choices of the busiest rank, given those of all ranks.
pub(crate) fn busiest_ranks(loads: &BTreeMap<u32, Vec<f64>>) -> BTreeMap<u32, f64> {
    let most = |each: &Vec<f64>| each.iter().copied().fold(0.0, f64::max);
    loads.iter().map(|(l, each)| (*l, most(each))).collect()
}

/// Returns popularities of experts that fall geometrically. The largest is `imbalance` times their
/// mean.
fn geometric(experts: usize, imbalance: f64) -> Vec<f64> {
    let series = |ratio: f64| -> Vec<f64> { (0..experts).map(|i| ratio.powi(i as i32)).collect() };
    let of = |ratio: f64| experts as f64 / series(ratio).iter().sum::<f64>();
    // A smaller ratio means a larger imbalance.
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if of(middle) > imbalance {
            low = middle;
        } else {
            high = middle;
        }
    }
    series(high)
}

/// Returns, by layer, popularities that fall geometrically, in an order drawn from `seed` and the
/// layer.
pub(crate) fn seeded(
    layers: impl Iterator<Item = u32>,
    experts: u64,
    imbalance: f64,
    seed: u64,
) -> BTreeMap<u32, Vec<f64>> {
    let popularity = geometric(experts as usize, imbalance);
    layers
        .map(|layer| {
            let mut random = SplitMix64(seed ^ (u64::from(layer) << 32));
            let mut order = popularity.clone();
            for i in (1..order.len()).rev() {
                order.swap(i, (random.draw() % (i as u64 + 1)) as usize);
            }
            (layer, order)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_popular_expert_has_the_imbalance() {
        for (experts, imbalance) in [(8, 1.0), (8, 2.0), (64, 1.5), (128, 10.0)] {
            let p = geometric(experts, imbalance);
            let mean = p.iter().sum::<f64>() / experts as f64;
            assert!(
                (p[0] / mean - imbalance).abs() < 1e-6,
                "{experts} {imbalance}"
            );
        }
    }

    #[test]
    fn the_busiest_rank_has_the_largest_part() {
        let h = Histogram {
            format: 1,
            experts: 4,
            top_k: 1,
            layers: [(1, vec![1, 2, 3, 4]), (3, vec![0; 4])].into(),
        };
        // 7 of 10 choices, twice as many as 5 of 10 would be 1.
        let busiest = |ranks| busiest_ranks(&loads(&h.popularity(), ranks));
        assert_eq!(loads(&h.popularity(), 2)[&1], [0.6, 1.4]);
        assert_eq!(busiest(2), [(1, 1.4), (3, 1.0)].into());
        assert_eq!(busiest(4)[&1], 1.6);
        assert_eq!(busiest(1)[&1], 1.0);
    }

    #[test]
    fn equal_seeds_give_equal_orders_and_layers_differ() {
        let of = |seed| busiest_ranks(&loads(&seeded(0..4, 16, 3.0, seed), 4));
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        let layers: Vec<f64> = of(1).into_values().collect();
        assert!(layers.iter().any(|x| *x != layers[0]));
        // A rank with 4 of 16 experts cannot be busier, relative to the mean, than its most popular
        // expert.
        assert!(layers.iter().all(|x| (1.0..3.0).contains(x)), "{layers:?}");
        assert!(
            busiest_ranks(&loads(&seeded(0..4, 16, 1.0, 1), 4))
                .values()
                .all(|x| (x - 1.0).abs() < 1e-9)
        );
    }
}
