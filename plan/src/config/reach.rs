//! Number of tokens that a rank receives if each token is sent once to every rank that has one of
//! its experts.

use super::Experts;
use crate::divisors::gcd;
use crate::ir;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Fraction of all ranks' tokens that choose an expert of the busiest rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reach {
    /// The fraction with a balanced load.
    pub balanced: f64,
    /// The fraction by layer, for layers that are not balanced.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub layers: BTreeMap<u32, f64>,
}

impl Reach {
    /// Returns the fraction for a layer.
    #[must_use]
    pub fn of(&self, layer: Option<u32>) -> f64 {
        let known = layer.and_then(|l| self.layers.get(&l));
        *known.unwrap_or(&self.balanced)
    }
}

/// Tokens that reach the nodes of a group of expert-parallel ranks, if each token is sent over the
/// network once to every other node that has one of its experts: to the rank with the same position
/// within its node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeReach {
    /// Number of nodes that the group spans, at least two.
    pub nodes: u64,
    /// Fraction of all tokens that choose an expert of the busiest node.
    #[serde(flatten)]
    pub reach: Reach,
}

impl NodeReach {
    /// Returns the number of tokens that a rank of the busiest node receives over the network if
    /// each rank has `tokens` tokens: it gets those of one rank on each other node.
    #[must_use]
    pub fn rows(&self, layer: Option<u32>, tokens: u64) -> u64 {
        let sent = (self.nodes - 1) * tokens;
        (self.reach.of(layer) * sent as f64).round() as u64
    }
}

/// Returns the hypergeometric probability of drawing `n` marked items: `drawn` items are drawn at
/// once from `all` items, `marked` of which are marked.
fn hypergeometric([all, marked, drawn]: [u64; 3], n: u64) -> f64 {
    let ways = |of: u64, n: u64| -> f64 {
        if n > of {
            return 0.0;
        }
        (0..n).map(|i| (of - i) as f64 / (n - i) as f64).product()
    };
    if n > marked || drawn < n {
        return 0.0;
    }
    ways(marked, n) * ways(all - marked, drawn - n) / ways(all, drawn)
}

/// Returns the fraction of tokens that choose an expert of one of `ranks` ranks, which divide
/// equally popular experts in order. If tokens are limited to groups of experts, they choose the
/// groups first.
pub(crate) fn balanced(of: &Experts, ranks: u64) -> f64 {
    let (own, k) = (of.experts / ranks, of.top_k);
    let groups = of.router_groups.max(1);
    let kept = if of.router_groups > 1 {
        of.router_group_top_k.clamp(1, groups)
    } else {
        groups
    };
    let group = of.experts / groups;
    // Counts the groups on the rank, or the one group that the rank has a part of.
    let (of_rank, there) = if own >= group {
        (own / group, group)
    } else {
        (1, own)
    };
    let among = kept * group;
    let missed = |n: u64| {
        let chosen = hypergeometric([groups, of_rank, kept], n);
        chosen * hypergeometric([among, n * there, k.min(among)], 0)
    };
    1.0 - (0..=of_rank.min(kept)).map(missed).sum::<f64>()
}

/// Returns the fraction of tokens that choose an expert of the busiest rank, if tokens take `top_k`
/// experts in round-robin order. `ranks` ranks divide the experts in order.
pub(crate) fn round_robin(of: &Experts, ranks: u64) -> f64 {
    let own = of.experts / ranks;
    let period = of.experts / gcd(of.experts, of.top_k);
    let mut tokens = vec![0; ranks as usize];
    for token in 0..period {
        let reached: BTreeSet<u64> = ir::round_robin(token, of.top_k, of.experts)
            .map(|expert| expert / own)
            .collect();
        reached
            .into_iter()
            .for_each(|rank| tokens[rank as usize] += 1);
    }
    let most = tokens.into_iter().max().unwrap_or(0);
    f64::from(most) / period as f64
}

/// Returns the elementary symmetric polynomials of these numbers, of degree 0 to `k`.
fn symmetric(weights: impl Iterator<Item = f64>, k: usize) -> Vec<f64> {
    let mut sums = vec![0.0; k + 1];
    sums[0] = 1.0;
    for w in weights {
        for n in (1..=k).rev() {
            sums[n] += w * sums[n - 1];
        }
    }
    sums
}

/// Maximum number of iterations in which weights are fitted to popularities, and the relative
/// change at which the iteration stops.
const ROUNDS: usize = 200;
const FITTED: f64 = 1e-9;

/// Returns weights of experts such that, if sets of `k` experts are as likely as the product of
/// their weights, each expert gets its number of choices. Nothing else is known about which experts
/// are chosen together. Returns `None` without choices.
fn weights(popularity: &[f64], k: usize) -> Option<Vec<f64>> {
    let all: f64 = popularity.iter().sum();
    if all <= 0.0 {
        return None;
    }
    // A token chooses an expert at most once.
    let wanted: Vec<f64> = (popularity.iter())
        .map(|p| (k as f64 * p / all).min(1.0 - 1e-6))
        .collect();
    let mut weights: Vec<f64> = wanted.iter().map(|q| q / (1.0 - q)).collect();
    for _ in 0..ROUNDS {
        // The weights are scaled so that polynomials neither vanish nor overflow.
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        weights.iter_mut().for_each(|w| *w /= mean);
        let sets = symmetric(weights.iter().copied(), k)[k];
        let mut change = 0.0f64;
        let next = (0..weights.len()).map(|e| {
            let others = weights.iter().enumerate().filter(|(i, _)| *i != e);
            let without = symmetric(others.map(|(_, w)| *w), k - 1)[k - 1];
            let has = weights[e] * without / sets;
            if has <= 0.0 {
                return 0.0;
            }
            change = change.max((wanted[e] / has - 1.0).abs());
            weights[e] * wanted[e] / has
        });
        weights = next.collect();
        if change < FITTED {
            break;
        }
    }
    Some(weights)
}

/// Returns, by layer, the fraction of tokens that choose an expert of the rank that receives the
/// most tokens. `popularity` has the relative number of choices of each expert.
pub(crate) fn busiest(
    popularity: &BTreeMap<u32, Vec<f64>>,
    k: u64,
    ranks: u32,
) -> BTreeMap<u32, f64> {
    // Layers often have the same popularities in a different order.
    let mut known: Option<(Vec<f64>, Vec<f64>)> = None;
    let mut of = |each: &[f64]| {
        let k = (k as usize).min(each.len());
        let mut order: Vec<usize> = (0..each.len()).collect();
        order.sort_by(|a, b| each[*a].total_cmp(&each[*b]));
        let sorted: Vec<f64> = order.iter().map(|i| each[*i]).collect();
        if known.as_ref().is_none_or(|(of, _)| *of != sorted) {
            known = weights(&sorted, k).map(|w| (sorted, w));
        }
        let (_, fitted) = known.as_ref()?;
        let mut weights = vec![0.0; each.len()];
        order.iter().zip(fitted).for_each(|(i, w)| weights[*i] = *w);
        let all = symmetric(weights.iter().copied(), k)[k];
        let own = each.len() / ranks as usize;
        let missed = (0..ranks as usize).map(|r| {
            let others = weights.iter().enumerate().filter(|(e, _)| e / own != r);
            symmetric(others.map(|(_, w)| *w), k)[k] / all
        });
        Some(1.0 - missed.fold(1.0, f64::min))
    };
    popularity
        .iter()
        .filter_map(|(l, each)| Some((*l, of(each)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(experts: u64, top_k: u64) -> Experts {
        Experts {
            experts,
            top_k,
            ..Experts::default()
        }
    }

    /// Numbers of ranks per token, including its own rank: Qwen3, DeepSeek, gpt-oss, Mixtral.
    #[test]
    fn equally_popular_experts_are_on_known_numbers_of_ranks() {
        for (all, k, ranks, number) in [
            (128, 8, 2, 1.994),
            (128, 8, 4, 3.629),
            (128, 8, 8, 5.339),
            (256, 8, 8, 5.295),
            (32, 4, 4, 2.818),
            (8, 2, 2, 1.571),
            (8, 2, 4, 1.857),
            (8, 2, 8, 2.0),
        ] {
            let is = balanced(&experts(all, k), ranks) * ranks as f64;
            assert!((is - number).abs() < 1e-3, "{all} {k} {ranks}: {is}");
        }
    }

    /// The expected value counts all choices of groups and experts.
    #[test]
    fn groups_limit_the_ranks_of_a_token() {
        for (ranks, groups, kept) in [(2, 4, 2), (4, 4, 2), (8, 4, 1), (4, 2, 1)] {
            let of = Experts {
                router_groups: groups,
                router_group_top_k: kept,
                ..experts(8, 2)
            };
            let (group, own) = (8 / groups, 8 / ranks);
            let (mut all, mut hit) = (0.0, 0.0);
            let sets = |n: u64, size: u64| {
                (0u64..1 << n).filter(move |s| u64::from(s.count_ones()) == size)
            };
            for chosen in sets(groups, kept) {
                let open = |e: &u64| chosen >> (e / group) & 1 == 1;
                let pairs: Vec<u64> = sets(8, 2)
                    .filter(|s| (0..8).filter(|e| s >> e & 1 == 1).all(|e| open(&e)))
                    .collect();
                // All choices of groups are equally likely.
                all += 1.0;
                let first = pairs.iter().filter(|s| **s & ((1 << own) - 1) != 0).count();
                hit += first as f64 / pairs.len() as f64;
            }
            let is = balanced(&of, ranks);
            assert!(
                (is - hit / all).abs() < 1e-12,
                "{ranks} {groups} {kept}: {is} {}",
                hit / all
            );
        }
    }

    /// Qwen3 on 8 ranks and gpt-oss-20b on 8 ranks have `top_k` neighbors on one rank. Of
    /// gpt-oss-120b on 64 ranks, a token reaches two ranks, which are on one of eight nodes. With
    /// three of eight experts, tokens 0 to 7 start at 0, 3, 6, 1, 4, 7, 2 and 5, and four of these
    /// reach experts 0 and 1.
    #[test]
    fn tokens_in_round_robin_order_reach_few_ranks() {
        for (all, k, ranks, fraction) in [
            (128, 8, 8, 1.0 / 8.0),
            (32, 4, 8, 1.0 / 8.0),
            (128, 4, 64, 2.0 / 64.0),
            (128, 4, 8, 1.0 / 8.0),
            (8, 3, 4, 4.0 / 8.0),
            (8, 8, 4, 1.0),
        ] {
            let is = round_robin(&experts(all, k), ranks);
            assert!((is - fraction).abs() < 1e-12, "{all} {k} {ranks}: {is}");
        }
    }

    #[test]
    fn equal_popularities_are_balanced_and_others_are_not() {
        let share = |each: &[f64], k, ranks| {
            let found = busiest(&[(3, each.to_vec())].into(), k, ranks);
            found.get(&3).copied()
        };
        for (all, k, ranks) in [(8, 2, 4), (128, 8, 8)] {
            let flat = share(&vec![3.0; all as usize], k, ranks).unwrap();
            let exact = balanced(&experts(all, k), u64::from(ranks));
            assert!((flat - exact).abs() < 1e-9, "{flat} {exact}");
        }
        // One expert has every token, and so has its rank.
        let mut one = vec![1.0; 8];
        one[5] = 7.0;
        let is = share(&one, 2, 4).unwrap();
        assert!(is > 0.999 && is <= 1.0, "{is}");
        // Weights 2, 1 and 1 give the pairs probabilities 2/5, 2/5 and 1/5, so the experts have 4,
        // 3 and 3 of 10 choices.
        let is = share(&[3.0, 4.0, 3.0], 2, 3).unwrap();
        assert!((is - 0.8).abs() < 1e-6, "{is}");
        assert_eq!(share(&[0.0; 4], 2, 2), None);
    }
}
