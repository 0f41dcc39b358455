//! `[moe]`: how tokens reach experts under expert parallelism.

use super::{NodeReach, Reach, Routing};
use serde::Serialize;
use std::collections::BTreeMap;

/// `[moe]`; not present if each rank has all experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moe {
    /// How tokens are sent to the ranks of their experts.
    pub dispatcher: Dispatcher,
    /// Rows that a rank reserves for choices, relative to their number with a balanced load;
    /// `None`: the largest possible number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// The number of reserved rows is a multiple of this, because 8-bit matmuls sum over as many
    /// elements as their tensor cores read at once.
    #[serde(skip)]
    pub row_multiple: u64,
    /// Kernels between the matmuls of experts only compute reserved rows that are in use.
    #[serde(skip)]
    pub stops_at_used_rows: bool,
    /// What happens to choices without a row.
    pub on_overflow: Overflow,
    /// Kernels of the shared expert overlap with the token exchange: they run before the dispatched
    /// rows are first used, and before the combined ones are. False without a shared expert.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shared_expert_overlap: bool,
    /// Distribution of choices over experts in predictions.
    pub routing: Routing,
    /// Number of tokens that reach a rank, if they are sent once per rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reach: Option<Reach>,
    /// Number of tokens that reach a node, if ranks of several nodes divide the experts and tokens
    /// are sent over the network once per node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_reach: Option<NodeReach>,
    /// By layer: rows of the busiest rank, relative to a balanced load. Layers without an entry are
    /// balanced.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub busiest: BTreeMap<u32, f64>,
    /// By layer: rows of each rank. [`busiest`](Self::busiest) has their maximum.
    #[serde(skip)]
    pub loads: BTreeMap<u32, Vec<f64>>,
}

impl Moe {
    /// Returns the number of rows that a rank reserves for the choices of one rank, which has
    /// `tokens` tokens with `k` choices each. There are `ranks` ranks with `experts` experts each.
    #[must_use]
    pub fn slots(&self, [tokens, k]: [u64; 2], [ranks, experts]: [u64; 2]) -> u64 {
        let most = Self::most_slots([tokens, k], experts);
        self.reserved((tokens * k) as f64 / ranks as f64, most)
    }

    /// Returns the number of rows that a rank reserves for the choices of all `ranks` ranks, if
    /// these share its rows.
    #[must_use]
    pub fn rows(&self, [tokens, k]: [u64; 2], [ranks, experts]: [u64; 2]) -> u64 {
        let most = Self::most_slots([ranks * tokens, k], experts);
        self.reserved((tokens * k) as f64, most)
    }

    /// Returns the capacity factor times the number of rows with a balanced load, at most the
    /// largest possible number.
    fn reserved(&self, balanced: f64, most: u64) -> u64 {
        self.capacity_factor.map_or(most, |factor| {
            let rows = ((factor * balanced).ceil() as u64).max(1);
            rows.next_multiple_of(self.row_multiple).min(most)
        })
    }

    /// Returns the number of rows of a layer's busiest rank, for which all ranks wait in each
    /// exchange. `rows` is the number with a balanced load.
    #[must_use]
    pub fn used(&self, layer: Option<u32>, rows: u64) -> u64 {
        let factor = layer.and_then(|l| self.busiest.get(&l));
        factor.map_or(rows, |f| (f * rows as f64).round() as u64)
    }

    /// Returns the maximum number of choices of `tokens` tokens that fall on the experts of one
    /// rank.
    #[must_use]
    pub fn most_slots([tokens, k]: [u64; 2], experts: u64) -> u64 {
        tokens * k.min(experts)
    }
}

/// `moe.dispatcher`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatcher {
    /// An all-gather of all tokens, and a reduce-scatter of partial sums.
    Gather,
    /// An all-to-all of the choices. Ranks first exchange the numbers of rows, which the host
    /// reads.
    AllToAll,
    /// An all-to-all of a fixed number of rows.
    Padded,
    /// Each token is written to the memory of the ranks that have its experts, once per rank.
    Peer,
    /// Each token is sent once to every node that has one of its experts, and from there once to
    /// every rank of the node that has one, as by DeepEP and HybridEP. The host reads how many rows
    /// arrive.
    Deepep,
}

words!(Dispatcher {
    Gather = "gather",
    AllToAll = "all_to_all",
    Padded = "padded",
    Peer = "peer",
    Deepep = "deepep",
});

impl Dispatcher {
    /// Returns whether the choices of all ranks share the rows of a rank. Otherwise, each rank has
    /// a fixed number of them.
    #[must_use]
    pub(crate) const fn shares_rows(self) -> bool {
        matches!(self, Self::Gather | Self::Peer | Self::Deepep)
    }

    /// Returns whether a token is sent once to every rank that has one of its experts.
    #[must_use]
    pub(crate) const fn pushes_rows(self) -> bool {
        matches!(self, Self::Peer | Self::Deepep)
    }

    /// Returns whether the host waits until it has read how many rows arrive.
    #[must_use]
    pub const fn host_reads(self) -> bool {
        matches!(self, Self::AllToAll | Self::Deepep)
    }
}

/// `moe.on_overflow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// The run fails.
    Error,
    /// The last choices, in token order, are dropped.
    Drop,
}

words!(Overflow {
    Error = "error",
    Drop = "drop",
});

#[cfg(test)]
mod tests {
    use super::*;

    fn moe(capacity_factor: Option<f64>) -> Moe {
        Moe {
            dispatcher: Dispatcher::Padded,
            capacity_factor,
            row_multiple: 1,
            stops_at_used_rows: false,
            on_overflow: Overflow::Drop,
            shared_expert_overlap: false,
            routing: Routing::Balanced,
            reach: None,
            node_reach: None,
            busiest: [(1, 1.25)].into(),
            loads: BTreeMap::new(),
        }
    }

    #[test]
    fn the_busiest_rank_decides() {
        let moe = moe(None);
        assert_eq!(moe.used(Some(1), 1000), 1250);
        assert_eq!(moe.used(Some(0), 1000), 1000);
        assert_eq!(moe.used(None, 1000), 1000);
    }

    #[test]
    fn slots_are_the_balanced_number_times_the_factor() {
        let slots = |factor| moe(factor).slots([100, 4], [4, 8]);
        assert_eq!(slots(Some(1.0)), 100);
        assert_eq!(slots(Some(1.25)), 125);
        assert_eq!(slots(Some(0.333)), 34);
        // All four choices of each token go to the rank.
        assert_eq!(slots(Some(9.0)), 400);
        assert_eq!(slots(None), 400);
        // A rank with one expert gets at most one choice of each token.
        assert_eq!(moe(None).slots([100, 4], [32, 1]), 100);
        let in_8_bits = |factor| Moe {
            row_multiple: 16,
            ..moe(Some(factor))
        };
        assert_eq!(in_8_bits(1.0).slots([96, 4], [4, 8]), 96);
        assert_eq!(in_8_bits(1.01).slots([96, 4], [4, 8]), 112);
        assert_eq!(in_8_bits(9.0).slots([96, 4], [4, 8]), 384);
    }

    /// Four ranks with 100 tokens and four choices each share 400 rows with a balanced load, and at
    /// most 1,600.
    #[test]
    fn ranks_share_rows() {
        let rows = |factor| moe(factor).rows([100, 4], [4, 8]);
        assert_eq!(rows(Some(1.0)), 400);
        assert_eq!(rows(Some(1.251)), 501);
        assert_eq!(rows(Some(0.001)), 1);
        assert_eq!(rows(Some(4.0)), 1600);
        assert_eq!(rows(Some(9.0)), 1600);
        assert_eq!(rows(None), 1600);
        // With two experts, a rank gets at most two of a token's choices.
        assert_eq!(moe(None).rows([100, 4], [4, 2]), 800);
        let in_8_bits = Moe {
            row_multiple: 16,
            ..moe(Some(1.01))
        };
        assert_eq!(in_8_bits.rows([100, 4], [4, 8]), 416);
    }
}
