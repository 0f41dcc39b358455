//! Times according to a formula that follows NCCL's tuner (`src/graph/tuning.cc` of NCCL 2.28): the
//! fastest of ring and tree with the LL, LL128 and Simple protocols, each with a base latency, a
//! latency per step and a share of the bandwidth.
//!
//! Within a node, the formula adds two terms that the tuner does not have and whose absence makes
//! NCCL's own estimates too short (benchmarks/exec-h100.md): a rank also copies its local chunk in
//! addition to what it receives, and the rate grows with the payload. Their constants are fitted to
//! collectives of 1 MiB to 1 GiB between two and four H200 and between two H100. For groups of
//! eight, which were not part of the fit, they predict 366 GB/s for an all-gather of 16 GB between
//! H100s, where nccl-tests show about 360 (github.com/NVIDIA/nccl-tests/issues/326).

use shardlab_plan::ir::CollectiveKind;

/// Placement of a group and its links.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    /// Number of ranks.
    pub(super) size: u32,
    /// Number of its ranks on one node.
    pub(super) per_node: u32,
    /// Number of nodes that it spans.
    pub(super) nodes: u32,
    /// Bus bandwidth that large collectives reach, in GB/s.
    pub(super) bandwidth_gbps: f64,
    /// The part of it within a node: NVLink's rate, in GB/s.
    pub(super) nvlink_gbps: f64,
    /// Rate at which one rank sends over the network while the others of its node do so, in GB/s;
    /// infinite within a node.
    pub(super) network_gbps: f64,
    /// Size of the groups within a node that reach this bandwidth. `None` if ranks share the cores
    /// of a processor, for which the rules of GPUs do not hold.
    pub(super) reached_by: Option<u32>,
    /// Extra time of a network hop, in microseconds.
    pub(super) nic_latency_us: f64,
}

impl Group {
    /// Returns whether another group has the same placement and the same share of its links.
    pub(super) fn like(&self, other: &Self) -> bool {
        let near = (self.bandwidth_gbps / other.bandwidth_gbps - 1.0).abs() < 1e-9;
        (self.size, self.per_node, self.nodes) == (other.size, other.per_node, other.nodes) && near
    }
}

/// A protocol of NCCL. It has a base latency, latencies of a ring step inside a node, a ring step
/// between nodes, a tree step inside a node and a tree step between nodes (all in microseconds),
/// and a share of the bandwidth.
struct Protocol {
    base: [f64; 2],
    nvlink: [f64; 2],
    net: [f64; 2],
    share: f64,
    /// Whether the bandwidth ramps up with the payload. It does not for LL, which is not pipelined.
    ramps: bool,
}

const RING: usize = 0;
const TREE: usize = 1;

const PROTOCOLS: [Protocol; 3] = [
    // LL: one flag for every 4 bytes.
    Protocol {
        base: [6.6, 6.8],
        nvlink: [0.6, 0.6],
        net: [2.7, 5.0],
        share: 0.25,
        ramps: false,
    },
    // LL128: 120 of 128 bytes are payload.
    Protocol {
        base: [14.0, 14.0],
        nvlink: [1.9, 1.25],
        net: [4.0, 8.5],
        share: 0.92,
        ramps: true,
    },
    // Simple: full bandwidth, and a fence per step.
    Protocol {
        base: [8.4, 8.4],
        nvlink: [3.4, 4.0],
        net: [14.0, 14.0],
        share: 1.0,
        ramps: true,
    },
];

/// Returns the time that a rank needs to copy its local chunk, relative to receiving the same
/// number of bytes.
const fn local_copy(kind: CollectiveKind) -> f64 {
    match kind {
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => 0.4,
        // The local chunk is only in one of two rounds, or is copied while chunks of other ranks
        // arrive.
        _ => 0.15,
    }
}

/// Additional time for payloads that do not reach the full rate: this factor times the square root
/// of their time at that rate, in microseconds.
const RAMP: f64 = 2.5;

/// Returns the microseconds on the wire within a node, and the additional time for payloads that do
/// not reach the full rate.
fn within(kind: CollectiveKind, bytes: f64, group: &Group, reached_by: u32) -> (f64, f64) {
    let share = |kind, ranks: u32| 1.0 + local_copy(kind) / f64::from(ranks.max(2) - 1);
    // The known rate is that of an all-gather.
    let links = group.bandwidth_gbps * share(CollectiveKind::AllGather, reached_by);
    let wire = bus_factor(kind, group.size) * bytes * share(kind, group.size) / links / 1e3;
    (wire, RAMP * wire.sqrt())
}

/// Returns the bytes over the bottleneck link relative to the payload.
pub(super) fn bus_factor(kind: CollectiveKind, ranks: u32) -> f64 {
    let n = f64::from(ranks.max(1));
    match kind {
        CollectiveKind::AllReduce => 2.0 * (n - 1.0) / n,
        _ => (n - 1.0) / n,
    }
}

/// Returns the rate at which a rank sends during a large collective, in GB/s.
pub(super) fn rate_gbps(kind: CollectiveKind, group: &Group) -> f64 {
    match kind {
        // A ring enters and leaves a node once and passes through all of its ranks. In an
        // all-to-all, each rank has its share of the node's cards.
        CollectiveKind::AllToAll if group.nodes > 1 => {
            group.bandwidth_gbps / f64::from(group.per_node)
        }
        _ => group.bandwidth_gbps,
    }
}

/// Bytes that a rank receives of pushed rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pushed {
    /// All rows for its experts, its own included.
    pub(super) bytes: f64,
    /// Rows from other nodes for the experts of its node, which it passes on.
    pub(super) network_bytes: f64,
}

impl Pushed {
    /// Returns the bytes that a rank receives over NVLink. Of the rows for its experts, its share
    /// of the node's ranks is its own or reaches it from the network directly.
    pub(super) fn nvlink_bytes(&self, group: &Group) -> f64 {
        bus_factor(CollectiveKind::AllToAll, group.per_node) * self.bytes
    }
}

/// Returns the microseconds in which each rank of a group writes rows into the memory of other
/// ranks and observes that all ranks have done so. Stores have the rate of an all-to-all, and a
/// flag takes the time of an LL step, which also waits for a flag. A kernel takes at least
/// `launch_us`.
///
/// Rows of other nodes are passed on over NVLink while others arrive from the network, in many
/// small chunks, so the slower of both decides. This repeats the rates that DeepEP and HybridEP
/// publish for two to eight nodes (`published_rates_of_deepep_and_hybridep`).
pub(super) fn pushed_us(of: Pushed, group: &Group, launch_us: f64) -> f64 {
    let kind = CollectiveKind::AllToAll;
    let node = Group {
        size: group.per_node,
        nodes: 1,
        bandwidth_gbps: group.nvlink_gbps,
        ..*group
    };
    let ranks = node.reached_by.unwrap_or(node.size);
    let (wire, ramp) = within(kind, of.bytes, &node, ranks);
    let start = launch_us + PROTOCOLS[0].nvlink[RING];
    if group.nodes == 1 {
        return start + wire + ramp;
    }
    let network = of.network_bytes / group.network_gbps / 1e3;
    start + group.nic_latency_us + network.max(wire + ramp)
}

/// Returns the isolated duration in microseconds.
pub(super) fn time_us(kind: CollectiveKind, bytes: f64, group: &Group) -> f64 {
    let (wire, ramp) = match group.reached_by {
        Some(ranks) if group.nodes == 1 => within(kind, bytes, group, ranks),
        _ => {
            let wire = bus_factor(kind, group.size) * bytes / group.bandwidth_gbps / 1e3;
            (wire, 0.0)
        }
    };
    let steps = f64::from(group.size - 1);
    let between = f64::from(group.nodes - 1);
    if kind == CollectiveKind::AllToAll {
        let p = &PROTOCOLS[2];
        let start = p.base[RING] + p.nvlink[RING] + steps * 0.3;
        if group.nodes == 1 {
            return start + wire + ramp;
        }
        // Everything except the node's own chunks passes through the cards.
        let outside = f64::from(group.size - group.per_node) / f64::from((group.size - 1).max(1));
        let rail = rate_gbps(kind, group);
        let wire = bus_factor(kind, group.size) * bytes * outside / rail / 1e3;
        return start + group.nic_latency_us + wire;
    }
    let rounds = if kind == CollectiveKind::AllReduce {
        2.0
    } else {
        1.0
    };
    let mut best = f64::INFINITY;
    for p in &PROTOCOLS {
        let ramp = if p.ramps { ramp } else { 0.0 };
        let hops =
            (steps - between) * p.nvlink[RING] + between * (p.net[RING] + group.nic_latency_us);
        best = best.min(p.base[RING] + rounds * hops + wire / p.share + ramp);
        if kind == CollectiveKind::AllReduce && group.size > 2 {
            let depth = f64::from(group.nodes).log2().ceil();
            let inside = f64::from(group.per_node - 1) * p.nvlink[TREE];
            let hops = inside + depth * (p.net[TREE] + group.nic_latency_us);
            // A tree does not reach the full bandwidth on several nodes. This is NCCL's own
            // estimate of its efficiency.
            best = best.min(p.base[TREE] + 2.0 * hops + wire / (p.share * 0.85) + ramp);
        }
    }
    best
}
