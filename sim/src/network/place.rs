//! Placement of a communicator's ranks, and the share of the node's network cards that they have.

use super::formula::Group;
use crate::hardware::Profile;
use shardlab_plan::ir::{AxisId, AxisSet, RankGroup};
use shardlab_plan::program::Communicator;
use std::collections::BTreeMap;

/// Returns the placement of a communicator's groups and the rate of their links. If groups differ,
/// the slowest one counts.
pub(super) fn place(
    comm: &Communicator,
    world: u32,
    gpus_per_node: u32,
    profile: &Profile,
) -> Group {
    let nodes = comm.ranks.nodes(world, gpus_per_node);
    let per_node = comm.ranks.size.div_ceil(nodes).max(1);
    let n = &profile.network;
    let nvlink = n.nvlink_gbps * n.nvlink_efficiency;
    let network = match nodes {
        1 => f64::INFINITY,
        _ => network_gbps(comm, world, gpus_per_node, profile),
    };
    let bandwidth_gbps = if nodes == 1 || per_node > 1 {
        nvlink.min(network)
    } else {
        network
    };
    Group {
        size: comm.ranks.size,
        per_node,
        nodes,
        bandwidth_gbps,
        nvlink_gbps: nvlink,
        network_gbps: network / f64::from(per_node),
        reached_by: match profile.device.shared_cores {
            None => Some(n.nvlink_ranks),
            Some(_) => None,
        },
        nic_latency_us: n.nic_latency_us,
    }
}

/// Returns the placement of a group that is alone on its nodes, with the same number of ranks on
/// each, like the groups in the tables. It uses the cards close to its GPUs.
pub(super) fn alone(ranks: u32, nodes: u32, profile: &Profile) -> Group {
    let comm = Communicator {
        name: String::new(),
        axes: AxisSet::of(AxisId::DP_SHARD),
        ranks: RankGroup {
            size: ranks,
            stride: 1,
        },
        copy_engine: false,
    };
    place(&comm, ranks, ranks / nodes, profile)
}

/// Returns the rate in GB/s at which a group's ranks on one node send over the network together,
/// for the node with the lowest rate. Ranks are SPMD, so all groups that cross the border of a node
/// do so at the same time and divide its cards in proportion to their ranks. Groups within the node
/// do not use the cards.
fn network_gbps(comm: &Communicator, world: u32, gpus_per_node: u32, profile: &Profile) -> f64 {
    let mut least = f64::INFINITY;
    for first in (0..world).step_by(gpus_per_node as usize) {
        let mut members: BTreeMap<Option<u32>, u32> = BTreeMap::new();
        for rank in first..world.min(first + gpus_per_node) {
            *members.entry(comm.ranks.members(rank).next()).or_default() += 1;
        }
        members.retain(|_, here| *here < comm.ranks.size);
        let sending: u32 = members.values().sum();
        let cards = f64::from(profile.network.nics_per_node) / f64::from(sending.max(1));
        if let Some(&here) = members.values().min() {
            least = least.min(f64::from(here) * gpu_gbps(cards, profile));
        }
    }
    least
}

/// Returns the rate in GB/s at which one GPU sends over the network if it may use this many of the
/// node's cards (or a share of one). It uses the cards close to it: as many as its link to the host
/// can feed, but at least one, and no faster than that link.
fn gpu_gbps(cards: f64, profile: &Profile) -> f64 {
    let (n, d) = (&profile.network, &profile.device);
    let link = d.h2d_gbps.min(d.d2h_gbps);
    let near = (link / n.nic_gbps).floor().max(1.0);
    (cards.min(near) * n.nic_gbps * n.nic_efficiency).min(link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware;

    /// Returns the rate of groups of `size` ranks, `stride` apart, on nodes with `gpus` GPUs and
    /// `nics` cards of 50 GB/s at 85 %.
    fn of(size: u32, stride: u32, world: u32, gpus: u32, nics: u32) -> Group {
        let mut profile = hardware::load("h100-80").unwrap();
        profile.network.nics_per_node = nics;
        let comm = Communicator {
            name: "c".into(),
            axes: AxisSet::of(AxisId::DP_SHARD),
            ranks: RankGroup { size, stride },
            copy_engine: false,
        };
        place(&comm, world, gpus, &profile)
    }

    fn near(group: Group, gbps: f64) {
        let is = group.bandwidth_gbps;
        assert!((is - gbps).abs() < 1e-9 * gbps, "{is} instead of {gbps}");
    }

    /// One rank per node and group, and eight groups per node. If there are fewer cards than GPUs,
    /// the groups divide them.
    #[test]
    fn groups_that_send_at_the_same_time_divide_the_cards() {
        for (nics, cards) in [(8, 1.0), (4, 0.5), (2, 0.25), (1, 0.125)] {
            near(of(2, 8, 16, 8, nics), cards * 42.5);
        }
        // Two ranks per node and group.
        near(of(4, 4, 16, 8, 4), 2.0 * 0.5 * 42.5);
    }

    #[test]
    fn a_group_alone_on_the_wire_has_all_cards() {
        for nics in [1, 2, 4] {
            near(of(16, 1, 16, 8, nics), f64::from(nics) * 42.5);
        }
        // Groups of five on nodes of eight with one card. The first node has a whole group, whose
        // ranks do not use the network, and three ranks of the next group. The second node has the
        // other two ranks of that group, a whole group, and one rank of the fourth, which gets a
        // third of the card.
        near(of(5, 1, 40, 8, 1), 42.5 / 3.0);
        // Groups of six: the second node has four ranks of each of two groups.
        near(of(6, 1, 24, 8, 1), 42.5 / 2.0);
    }

    /// A GPU's link to the host carries 53 GB/s in the slower direction.
    #[test]
    fn a_gpu_draws_what_its_link_to_the_host_feeds() {
        // One card of 50 GB/s is close to the GPU, no matter how many cards the node has.
        near(of(2, 1, 2, 1, 8), 42.5);
        near(of(8, 1, 8, 4, 8), 4.0 * 42.5);
        let mut profile = hardware::load("h100-80").unwrap();
        let mut with = |nics: u32, gbps: f64| {
            profile.network.nics_per_node = nics;
            profile.network.nic_gbps = gbps;
            gpu_gbps(f64::from(nics), &profile)
        };
        // Four slower cards per GPU, then a card faster than the link.
        assert!((with(32, 12.5) - 4.0 * 12.5 * 0.85).abs() < 1e-9);
        assert!((with(8, 100.0) - 53.0).abs() < 1e-9);
    }
}
