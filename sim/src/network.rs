//! Collective times by kind, payload, group and topology.

mod formula;
mod place;
mod tables;
mod without;

pub use without::{CollectiveCheck, check_collectives};

use crate::clock::ONE;
use crate::hardware::Profile;
use crate::price::{Cost, Load, Price, copy_gbps, fixed_share};
use formula::{Group, Pushed};
use place::place;
use shardlab_plan::ir::{Collective, CollectiveKind};
use shardlab_plan::program::Program;
use shardlab_plan::units::Picos;
use tables::Asked;

/// Payload in bytes that is small enough for the time to be all latency.
const SMALL: u64 = 1 << 10;

/// The network, from the point of view of one program's communicators.
#[derive(Debug)]
pub(crate) struct Network<'a> {
    profile: &'a Profile,
    groups: Vec<Group>,
    /// For each communicator, whether its collectives run on copy engines. Collectives that reduce
    /// never do.
    engines: Vec<bool>,
}

impl<'a> Network<'a> {
    pub(crate) fn new(program: &Program, profile: &'a Profile) -> Self {
        let per_node = program.meta.gpus_per_node.max(1);
        let groups = program
            .communicators
            .iter()
            .map(|c| place(c, program.meta.mesh.world(), per_node, profile))
            .collect();
        let engines = program.communicators.iter().map(|c| c.copy_engine);
        Self {
            profile,
            groups,
            engines: engines.collect(),
        }
    }

    /// Returns the cost of a collective.
    pub(crate) fn cost(&self, collective: &Collective) -> Cost {
        let group = self.groups[collective.comm.index()];
        let price = self.price(collective);
        let seconds = price.us * 1e-6;
        // The load of the links: bus bytes over their time, as a share of what the links can reach.
        let sent = collective.expected_bytes();
        let per_second = |bytes: f64| bytes / seconds.max(1e-12);
        // Rows that nodes pass on use both kinds of links.
        let relays = collective.network_bytes() > 0 && group.nodes > 1;
        let bus = per_second(match relays {
            true => pushed(collective).nvlink_bytes(&group),
            false => formula::bus_factor(collective.kind, group.size) * sent as f64,
        });
        let load = match relays {
            true => per_second(collective.network_bytes() as f64) / (group.network_gbps * 1e9),
            false => bus / (group.bandwidth_gbps * 1e9),
        };
        let load = load.min(1.0);
        // Contention was fitted to collectives that run at NVLink's rate. Kernels of collectives
        // across nodes wait for the network cards most of the time, so they take less from compute
        // kernels and have more spare rate.
        let fitted = self.profile.network.nvlink_gbps * self.profile.network.nvlink_efficiency;
        let moved = (bus / (fitted * 1e9)).min(1.0);
        let link = match relays {
            true => moved,
            false => formula::rate_gbps(collective.kind, &group) / fitted,
        };
        let on_engines = self.on_engines(collective);
        let local_copy_share = if on_engines {
            self.local_copy_us(collective) / price.us.max(1e-6)
        } else {
            0.0
        };
        Cost {
            work: Picos::from_us(price.us).0,
            load: Load::Collective,
            bandwidth: fixed_share(self.profile.contention.collective_bandwidth * moved),
            headroom: headroom(link.max(moved)),
            nvlink: if group.nodes == 1 {
                fixed_share(load)
            } else {
                0
            },
            nic: if group.nodes > 1 {
                fixed_share(load)
            } else {
                0
            },
            bytes: sent,
            comm: collective.comm.0,
            fills: false,
            on_engines,
            local_copy_share: fixed_share(local_copy_share),
            measured: price.measured,
            float8: false,
        }
    }

    /// Prices a collective that runs alone.
    pub(crate) fn price(&self, collective: &Collective) -> Price {
        let group = self.groups[collective.comm.index()];
        let (kind, bytes) = (collective.kind, collective.expected_bytes());
        if group.size <= 1 {
            // NCCL replaces it by a copy on the device.
            let us = 2.0 * bytes as f64 / (self.profile.device.memory_gbps * 0.8) / 1e3;
            return Price {
                us: self.profile.device.min_kernel_us + us,
                measured: false,
            };
        }
        // If ranks share cores, all of this consists of copies.
        let pushes = kind.pushes() || kind == CollectiveKind::Barrier;
        if pushes && group.reached_by.is_some() {
            let launch_us = self.profile.device.min_kernel_us;
            return Price {
                us: formula::pushed_us(pushed(collective), &group, launch_us),
                measured: false,
            };
        }
        let kind = if pushes {
            CollectiveKind::AllToAll
        } else {
            kind
        };
        let bytes = bytes.max(1);
        let asked = Asked {
            kind,
            bytes,
            dtype: Some(collective.dtype),
        };
        let of_kernels = |bytes: u64| {
            let asked = Asked { bytes, ..asked };
            tables::price(self.profile, asked, &group).unwrap_or_else(|| Price {
                us: formula::time_us(kind, bytes as f64, &group),
                measured: false,
            })
        };
        let mut price = of_kernels(bytes);
        let launch_us = of_kernels(bytes.min(SMALL)).us;
        if let Some(us) = self.on_engines_us(collective, launch_us) {
            price.us = price.us.min(us);
        }
        if self.profile.device.shared_cores.is_some() {
            price.us += self.profile.contention.shared_wait_us;
        }
        let misaligned = self.misalignment_us(collective);
        if misaligned > 0.0 {
            price = Price {
                us: price.us + misaligned,
                measured: false,
            };
        }
        price
    }

    /// Returns the microseconds of a collective whose data copy engines move within a node, if
    /// their rate is known. Its latency is that of a collective on SMs, for which `launch_us` is
    /// the time of a small payload. NCCL copies the rank's own part before it starts to send.
    fn on_engines_us(&self, collective: &Collective, launch_us: f64) -> Option<f64> {
        let group = &self.groups[collective.comm.index()];
        let rate = self.profile.network.copy_engine_gbps?;
        let bytes = collective.expected_bytes() as f64;
        let bus = formula::bus_factor(collective.kind, group.size) * bytes;
        let sent_us = bus / rate / 1e3;
        (self.on_engines(collective) && group.nodes == 1)
            .then(|| launch_us + self.local_copy_us(collective) + sent_us)
    }

    /// Returns whether copy engines move a collective's data. They cannot add.
    fn on_engines(&self, collective: &Collective) -> bool {
        self.engines[collective.comm.index()] && !collective.kind.reduces()
    }

    /// Returns the microseconds of the copy of a rank's own part, which a collective on copy
    /// engines leaves to the SMs.
    fn local_copy_us(&self, collective: &Collective) -> f64 {
        if collective.in_place() {
            return 0.0;
        }
        let ranks = self.groups[collective.comm.index()].size.max(1);
        let own = 2.0 * collective.expected_bytes() as f64 / f64::from(ranks);
        own / copy_gbps(self.profile) / 1e3
    }

    /// Returns the additional microseconds for a misaligned payload. NCCL's kernels move it element
    /// by element, at a lower rate than NVLink's. If the network is slower than that, nothing is
    /// lost.
    fn misalignment_us(&self, collective: &Collective) -> f64 {
        let group = &self.groups[collective.comm.index()];
        if group.size <= 1 || !collective.misaligned(group.size) {
            return 0.0;
        }
        let n = &self.profile.network;
        let factor = if collective.kind.reduces() {
            n.misaligned_reduction_factor.unwrap_or(n.misaligned_factor)
        } else {
            n.misaligned_factor
        };
        let reached = formula::rate_gbps(collective.kind, group);
        let moved = reached.min(n.nvlink_gbps * n.nvlink_efficiency / factor);
        let bytes = formula::bus_factor(collective.kind, group.size) * collective.bytes.0 as f64;
        bytes * (1.0 / moved - 1.0 / reached) / 1e3
    }
}

/// Returns the bytes of pushed rows.
fn pushed(collective: &Collective) -> Pushed {
    Pushed {
        bytes: collective.expected_bytes() as f64,
        network_bytes: collective.network_bytes() as f64,
    }
}

/// Returns the additional time for a misaligned payload for each collective of a program; see
/// [`Collective::misaligned`].
#[must_use]
pub fn misalignment(program: &Program, profile: &Profile) -> Vec<Picos> {
    let network = Network::new(program, profile);
    let all = program.collectives.iter();
    all.map(|c| Picos::from_us(network.misalignment_us(c)))
        .collect()
}

/// Returns NVLink's rate relative to a collective's rate in engine units. `share` is the inverse of
/// this ratio.
fn headroom(share: f64) -> u32 {
    // At a 64th of NVLink's rate and below, kernels take nothing that would affect the collective.
    (f64::from(ONE) / share.clamp(1.0 / 64.0, 1.0)).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::CollectiveTable;
    use crate::{hardware, synthetic};
    use shardlab_plan::ir::{
        AxisId, AxisSet, DeviceMesh, PushedRows, RankGroup, SelectedRows, SentRows,
    };
    use shardlab_plan::program::Communicator;

    fn priced(
        kind: CollectiveKind,
        bytes: u64,
        size: u32,
        stride: u32,
        gpus_per_node: u32,
        profile: &str,
    ) -> Price {
        let profile = hardware::load(profile).unwrap();
        priced_on(kind, bytes, size, stride, gpus_per_node, &profile)
    }

    fn priced_on(
        kind: CollectiveKind,
        bytes: u64,
        size: u32,
        stride: u32,
        gpus_per_node: u32,
        profile: &Profile,
    ) -> Price {
        let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
        program.meta.mesh = DeviceMesh::data_parallel(size * stride, 1);
        program.meta.gpus_per_node = gpus_per_node;
        program.communicators[0] = Communicator {
            name: "c".into(),
            axes: AxisSet::of(AxisId::DP_SHARD),
            ranks: RankGroup { size, stride },
            copy_engine: false,
        };
        let mut c = program.collectives[0].clone();
        c.kind = kind;
        c.bytes.0 = bytes;
        c.parts[0].input.bytes = bytes / u64::from(size);
        c.parts[0].output.bytes = bytes;
        Network::new(&program, profile).price(&c)
    }

    #[test]
    fn ranks_that_share_cores_wait_for_one_another() {
        let mut profile = hardware::load("cpu").unwrap();
        let mut price = |ranks: u32, wait: f64| {
            profile.contention.shared_wait_us = wait;
            priced_on(CollectiveKind::AllGather, 1 << 20, ranks, 1, 8, &profile).us
        };
        assert!((price(2, 40.0) - price(2, 0.0) - 40.0).abs() < 1e-9);
        assert_eq!(price(1, 40.0), price(1, 0.0));
    }

    #[test]
    fn measured_sizes_are_returned_exactly() {
        let p = priced(CollectiveKind::AllGather, 256 << 20, 4, 1, 8, "h200-nvlink");
        assert_eq!((p.us, p.measured), (660.03, true));
    }

    #[test]
    fn eight_ranks_scale_from_four_by_what_they_receive_and_copy() {
        // Each of n ranks receives n - 1 chunks and copies its own, which takes 0.4 times as long:
        // 7.4 eighths against 3.4 quarters.
        let p = priced(CollectiveKind::AllGather, 1 << 30, 8, 1, 8, "h200-nvlink");
        assert!(!p.measured);
        let ratio = (7.4 / 8.0) / (3.4 / 4.0);
        assert!((p.us / 2458.31 / ratio - 1.0).abs() < 0.005, "{p:?}");
    }

    /// Between eight H100s, `all_gather_perf` of nccl-tests shows about 360 GB/s of bus bandwidth
    /// for 16 GB (github.com/NVIDIA/nccl-tests/issues/326). Nothing was fitted to this value: one
    /// profile has measurements of two and four GPUs but not of eight, and the other has none.
    #[test]
    fn large_gathers_of_eight_reach_what_others_have_measured() {
        let bytes = 16 << 30;
        for profile in ["h100-80-exec", "h100-80"] {
            let p = priced(CollectiveKind::AllGather, bytes, 8, 1, 8, profile);
            assert!(!p.measured);
            let gbps = 7.0 / 8.0 * bytes as f64 / p.us / 1e3;
            assert!((gbps / 360.0 - 1.0).abs() < 0.03, "{profile}: {gbps}");
        }
    }

    #[test]
    fn crossing_nodes_is_bound_by_the_cards() {
        // 16 ranks on 2 nodes: 15/16 of 1 GiB over the lower bandwidth of NVLink and 8 cards of 50
        // GB/s at the profile's efficiency.
        let profile = hardware::load("h200-nvlink").unwrap();
        let n = &profile.network;
        let gbps = (n.nvlink_gbps * n.nvlink_efficiency).min(8.0 * n.nic_gbps * n.nic_efficiency);
        let wire = f64::from(1 << 30) * 15.0 / 16.0 / gbps / 1e3;
        let p = priced(CollectiveKind::AllGather, 1 << 30, 16, 1, 8, "h200-nvlink");
        assert!(p.us > wire && p.us < 1.15 * wire, "{p:?} against {wire}");
        // One rank per node (an outer axis) uses only one card.
        let outer = priced(CollectiveKind::AllReduce, 1 << 30, 2, 8, 8, "h200-nvlink");
        let wire = f64::from(1 << 30) / (n.nic_gbps * n.nic_efficiency) / 1e3;
        assert!(
            outer.us > wire && outer.us < 1.15 * wire,
            "{outer:?} against {wire}"
        );
    }

    /// Rows that no rank asks for cost nothing: on average, a token of Mixtral is sent to 1.857 of
    /// 4 ranks. A barrier takes the time of a kernel and a flag.
    #[test]
    fn pushed_rows_take_the_time_of_those_that_travel() {
        let profile = hardware::load("h100-80").unwrap();
        let us = |kind: CollectiveKind, bytes: u64, expected: u64| {
            let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
            program.meta.mesh = DeviceMesh::data_parallel(4, 1);
            program.communicators[0].ranks = RankGroup { size: 4, stride: 1 };
            let mut c = program.collectives[0].clone();
            (c.kind, c.bytes.0) = (kind, bytes);
            let of = PushedRows {
                experts: 2,
                rows: 1000,
                expected,
                over_network: 0,
            };
            let (by, of) = (c.parts[0], SelectedRows::Pushed(of));
            c.sent = kind.pushes().then_some(SentRows { by, of });
            let network = Network::new(&program, &profile);
            assert_eq!(network.cost(&c).bytes, c.expected_bytes());
            network.price(&c).us
        };
        let (launch, flag) = (profile.device.min_kernel_us, 0.6);
        let all = us(CollectiveKind::PeerPush, 1 << 30, 1000) - launch - flag;
        let some = us(CollectiveKind::PeerPush, 1 << 30, 464) - launch - flag;
        // The rate grows with the payload.
        assert!((0.464..0.48).contains(&(some / all)), "{some} {all}");
        assert_eq!(
            us(CollectiveKind::PeerReturn, 1 << 30, 464),
            us(CollectiveKind::PeerPush, 1 << 30, 464)
        );
        // Three quarters of the rows come from other ranks, at NVLink's rate.
        let rate = 0.75 * f64::from(1 << 30) / all / 1e3;
        let nvlink = profile.network.nvlink_gbps * profile.network.nvlink_efficiency;
        assert!((0.8..1.2).contains(&(rate / nvlink)), "{rate} {nvlink}");
        let barrier = us(CollectiveKind::Barrier, 0, 0);
        assert!((barrier - launch - flag).abs() < 1e-9, "{barrier}");
    }

    /// Rates that DeepEP and HybridEP publish for 4,096 tokens per rank, `top_k` = 8 and rows of
    /// 7,168 elements in bf16: the bytes that a rank sends to all nodes, its own included, in GB/s;
    /// within one node, those that it receives. Nothing was fitted to them. The shares of tokens
    /// that reach a node and a rank are hypergeometric (`reach::balanced`).
    ///
    /// - `Hybrid-EP_Implementation.md` of deepseek-ai/DeepEP at 07eea0c: eight experts per rank on
    ///   H100, the range of dispatch and combination by kernels with 8 and 16 SMs.
    /// - `docs/legacy.md` at dd758ca: combination of 256 experts on H800, whose NVLink has 200
    ///   GB/s. On eight nodes, a token chooses among the experts of four.
    #[test]
    fn published_rates_of_deepep_and_hybridep() {
        let (h100, h800) = (450.0, 200.0);
        for (nvlink, nodes, [node, rank], published, error) in [
            (h100, 2, [0.996_904, 0.412_282], 62.95..76.80, 0.11),
            (h100, 4, [0.903_554, 0.227_087], 54.50..57.69, 0.01),
            (h100, 8, [0.659_093, 0.119_146], 49.77..51.03, 0.04),
            (h800, 1, [1.0, 0.661_832], 158.0..158.0, 0.16),
            (h800, 2, [0.996_510, 0.407_705], 43.0..43.0, 0.31),
            (h800, 4, [0.903_554, 0.227_087], 57.0..57.0, 0.02),
            (h800, 8, [0.453_626, 0.114_990], 50.0..50.0, 0.04),
        ] {
            let (tokens, row, ranks) = (4096.0, 14_336.0, 8 * nodes);
            let mut profile = hardware::load("h100-80").unwrap();
            profile.network.nvlink_gbps = nvlink;
            let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
            program.meta.mesh = DeviceMesh::data_parallel(ranks, 1);
            program.meta.gpus_per_node = 8;
            program.communicators[0].ranks = RankGroup {
                size: ranks,
                stride: 1,
            };
            let mut c = program.collectives[0].clone();
            let all = f64::from(ranks) * tokens;
            (c.kind, c.bytes.0) = (CollectiveKind::PeerPush, (all * row) as u64);
            let others = f64::from(nodes - 1) * tokens;
            let of = PushedRows {
                experts: 8,
                rows: all as u64,
                expected: (rank * all) as u64,
                over_network: (node * others) as u64,
            };
            let (by, of) = (c.parts[0], SelectedRows::Pushed(of));
            c.sent = Some(SentRows { by, of });
            let us = Network::new(&program, &profile).price(&c).us;
            let rows = match nodes {
                1 => rank * all,
                _ => node * f64::from(nodes) * tokens,
            };
            let is = rows * row / us / 1e3;
            let within = published.start * (1.0 - error)..published.end * (1.0 + error);
            assert!(
                within.contains(&is),
                "{nodes} nodes, {nvlink}: {is} instead of {published:?}"
            );
        }
    }

    /// What crosses the network loads the cards, what nodes pass on loads NVLink, and the slower of
    /// both decides.
    #[test]
    fn rows_that_nodes_pass_on_use_both_kinds_of_links() {
        let cost = |over_network: u64| {
            let mut profile = hardware::load("h100-80").unwrap();
            profile.network.nic_gbps = 25.0;
            let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
            program.meta.mesh = DeviceMesh::data_parallel(16, 1);
            program.meta.gpus_per_node = 8;
            program.communicators[0].ranks = RankGroup {
                size: 16,
                stride: 1,
            };
            let mut c = program.collectives[0].clone();
            (c.kind, c.bytes.0) = (CollectiveKind::PeerReturn, 16 << 26);
            let of = PushedRows {
                experts: 8,
                rows: 16_000,
                expected: 6_400,
                over_network,
            };
            let (by, of) = (c.parts[0], SelectedRows::Pushed(of));
            c.sent = Some(SentRows { by, of });
            assert_eq!(c.network_bytes(), (over_network << 26) / 1_000);
            Network::new(&program, &profile).cost(&c)
        };
        let us = |c: Cost| c.work as f64 / 1e6;
        let share = |x: u32| f64::from(x) / f64::from(ONE);
        // 64 MiB over one card of 25 GB/s at 85 %.
        let slow = cost(1_000);
        let wire = f64::from(1 << 26) / (25.0 * 0.85) / 1e3;
        assert!(us(slow) > wire && us(slow) < wire + 15.0, "{}", us(slow));
        assert!(share(slow.nic) > 0.99 && slow.nvlink == 0);
        // Seven eighths of 0.4 GiB over NVLink, at 450 GB/s and 82 %.
        let fast = cost(100);
        let wire = 0.875 * 0.4 * f64::from(1 << 30) / (450.0 * 0.82) / 1e3;
        assert!((1.0..1.15).contains(&(us(fast) / wire)), "{}", us(fast));
        assert!(fast.bandwidth > slow.bandwidth && fast.headroom < slow.headroom);
    }

    /// Copy engines cannot add, so a reduction on their communicator runs on SMs.
    #[test]
    fn reductions_hold_sms_on_any_communicator() {
        let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
        program.communicators[0].copy_engine = true;
        let profile = hardware::load("h200-nvlink").unwrap();
        let network = Network::new(&program, &profile);
        let on_engines = |kind| {
            let c = Collective {
                kind,
                ..program.collectives[0].clone()
            };
            network.cost(&c).on_engines
        };
        assert!(on_engines(CollectiveKind::AllGather) && on_engines(CollectiveKind::AllToAll));
        assert!(!on_engines(CollectiveKind::AllReduce));
    }

    /// An all-gather of 1 GiB among four ranks: the local quarter is read and written at the rate
    /// of a copy, 4,800 GB/s times the profile's efficiency.
    #[test]
    fn engines_leave_a_rank_its_own_part_to_copy() {
        let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
        program.communicators[0].ranks = RankGroup { size: 4, stride: 1 };
        let gather = Collective {
            kind: CollectiveKind::AllGather,
            bytes: shardlab_plan::units::Bytes(1 << 30),
            ..program.collectives[0].clone()
        };
        let profile = hardware::load("h200-nvlink").unwrap();
        let mut own = |engines| {
            program.communicators[0].copy_engine = engines;
            let cost = Network::new(&program, &profile).cost(&gather);
            (f64::from(cost.local_copy_share) / f64::from(ONE), cost.work)
        };
        assert_eq!(own(false).0, 0.0);
        let (share, picos) = own(true);
        let efficiency = profile.efficiency.memory[&crate::hardware::MemoryClass::Copy];
        let us = 2.0 * f64::from(1 << 28) / (4_800.0 * efficiency) / 1e3;
        assert!(
            (share * picos as f64 / 1e6 / us - 1.0).abs() < 0.01,
            "{share} of {picos}"
        );
    }

    /// Measured on two H200: gathers of 2.9 GB that do not work in place take 4.38 to 4.48 ms, and
    /// exchanges 4.39 to 4.51 ms. Gathers in place of 101 MB take 131 us.
    #[test]
    fn own_parts_are_copied_before_engines_send() {
        let profile = hardware::load("h200-nvlink-exec").unwrap();
        let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
        program.communicators[0].ranks = RankGroup { size: 2, stride: 1 };
        program.communicators[0].copy_engine = true;
        let network = Network::new(&program, &profile);
        let us = |kind, bytes, in_place| {
            let mut c = program.collectives[0].clone();
            (c.kind, c.bytes.0) = (kind, bytes);
            for part in &mut c.parts {
                match in_place {
                    true => part.input = part.output,
                    false => part.input.offset = part.output.offset + (1 << 20),
                }
            }
            assert_eq!(c.in_place(), in_place);
            network.price(&c).us
        };
        for (kind, bytes, in_place, measured) in [
            (CollectiveKind::AllGather, 2_902_638_592, false, 4_400.0),
            (CollectiveKind::AllToAll, 2_902_638_592, false, 4_450.0),
            (CollectiveKind::AllGather, 262_144_000, false, 409.0),
            (CollectiveKind::AllGather, 100_663_296, true, 131.2),
        ] {
            let us = us(kind, bytes, in_place);
            assert!((us / measured - 1.0).abs() < 0.07, "{kind:?} {bytes}: {us}");
        }
    }

    /// Groups of six on nodes of eight: the second group has two ranks on the first node and four
    /// on the next. The slowest group determines the price.
    #[test]
    fn a_group_that_straddles_nodes_crosses_the_network() {
        let of = |size: u32, per_node: u32| {
            let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
            program.meta.mesh = DeviceMesh::data_parallel(24, 1);
            program.meta.gpus_per_node = per_node;
            program.communicators[0].ranks = RankGroup { size, stride: 1 };
            let profile = hardware::load("h200-nvlink").unwrap();
            Network::new(&program, &profile).groups[0]
        };
        assert_eq!((of(6, 6).nodes, of(8, 8).nodes, of(4, 8).nodes), (1, 1, 1));
        let straddles = of(6, 8);
        assert_eq!((straddles.nodes, straddles.per_node), (2, 3));
        assert!(straddles.bandwidth_gbps < of(6, 6).bandwidth_gbps);
    }

    /// All-gathers of 1 GiB over groups of nodes with eight H100s and eight cards of 50 GB/s at 85
    /// %.
    #[test]
    fn tables_of_several_nodes_price_groups_that_span_nodes() {
        let mut profile = hardware::load("h100-80").unwrap();
        let table = |ranks: u32, nodes: u32, us: f64| CollectiveTable {
            source: "test".into(),
            kind: crate::hardware::CollectiveName::AllGather,
            ranks,
            nodes,
            dtype: None,
            rows: vec![(1 << 30, us), (1 << 31, 2.0 * us)],
            nccl_rows: Vec::new(),
        };
        let gather = |size, stride, profile: &Profile| {
            priced_on(CollectiveKind::AllGather, 1 << 30, size, stride, 8, profile)
        };
        let within = gather(8, 1, &profile);
        let formula = gather(16, 1, &profile);
        // A table for one node does not apply to two.
        profile.collective = vec![table(16, 1, 1.0)];
        assert_eq!(gather(16, 1, &profile), formula);
        profile.collective = vec![table(16, 2, 5_000.0), table(2, 2, 40_000.0)];
        let price = gather(16, 1, &profile);
        assert_eq!((price.us, price.measured), (5_000.0, true));
        // One rank per node and eight groups at the same time, each with its own card, take as long
        // as one group alone.
        let price = gather(2, 8, &profile);
        assert_eq!((price.us, price.measured), (40_000.0, true));
        // Eight nodes, priced from the table with the same number of ranks per node, by NCCL's
        // Simple protocol: its steps take 3.4 us within a node and 14 us between nodes, plus 8 us
        // for the network. The eight cards carry 340 GB/s.
        let simple = |ranks: f64, nodes: f64| {
            let steps = (ranks - nodes) * 3.4 + (nodes - 1.0) * (14.0 + 8.0);
            8.4 + steps + (ranks - 1.0) / ranks * f64::from(1 << 30) / 340e3
        };
        let price = gather(64, 1, &profile);
        let us = 5_000.0 * simple(64.0, 8.0) / simple(16.0, 2.0);
        assert!(
            !price.measured && (price.us / us - 1.0).abs() < 1e-9,
            "{price:?}"
        );
        // Four cards for the eight groups with one rank per node: half a card per group, while the
        // group in the table had a whole one.
        profile.network.nics_per_node = 4;
        let price = gather(2, 8, &profile);
        assert!(
            !price.measured && (price.us / 80_000.0 - 1.0).abs() < 0.01,
            "{price:?}"
        );
        // Within a node, nothing changes.
        assert_eq!(gather(8, 1, &profile), within);
    }

    /// All-gathers over two nodes of eight H100s with eight cards of 6.25 GB/s at 85 %, which is
    /// 42.5 GB/s compared with NVLink's 369. The time in seconds is 15/16 of the bytes divided by
    /// that rate.
    #[test]
    fn a_collective_across_nodes_weighs_on_neighbours_by_what_it_moves() {
        let mut profile = hardware::load("h100-80").unwrap();
        profile.network.nic_gbps = 6.25;
        let mut program = synthetic::fsdp(&synthetic::Shape::tiny());
        let mut cost = |per_node: u32| {
            program.meta.mesh = DeviceMesh::data_parallel(16, 1);
            program.meta.gpus_per_node = per_node;
            program.communicators[0].ranks = RankGroup {
                size: 16,
                stride: 1,
            };
            let mut c = program.collectives[0].clone();
            c.kind = CollectiveKind::AllGather;
            c.bytes.0 = 1 << 34;
            c.parts[0].input.bytes = c.bytes.0 / 16;
            c.parts[0].output.bytes = c.bytes.0;
            Network::new(&program, &profile).cost(&c)
        };
        let shares = |c: Cost| [c.bandwidth, c.headroom].map(|x| f64::from(x) / f64::from(ONE));
        let near =
            |is: f64, wanted: f64| assert!((is / wanted - 1.0).abs() < 0.01, "{is} {wanted}");
        let [bandwidth, headroom] = shares(cost(8));
        near(bandwidth, 0.2 * 42.5 / 369.0);
        near(headroom, 369.0 / 42.5);
        // Within one node the whole loss applies, as it was fitted.
        let [bandwidth, headroom] = shares(cost(16));
        near(bandwidth, 0.2);
        near(headroom, 1.0);
    }

    /// Returns the price of a payload of `bytes` per rank relative to that of an aligned payload.
    fn misaligned(kind: CollectiveKind, bytes: u64, ranks: u32, profile: &Profile) -> f64 {
        let us = |bytes| priced_on(kind, u64::from(ranks) * bytes, ranks, 1, 8, profile).us;
        us(bytes / 16 * 16 + 2) / us(bytes / 16 * 16)
    }

    /// Ratios that `misaligned.py` measured on four H200 for payloads that are 2 bytes too large.
    #[test]
    fn misaligned_payloads_take_as_long_as_measured() {
        let profile = hardware::load("h200-nvlink").unwrap();
        for (kind, mib, ratio) in [
            (CollectiveKind::AllGather, 1, 1.03),
            (CollectiveKind::AllGather, 4, 1.26),
            (CollectiveKind::AllGather, 64, 1.56),
            (CollectiveKind::AllGather, 1024, 1.62),
            (CollectiveKind::ReduceScatter, 1, 1.00),
            (CollectiveKind::ReduceScatter, 64, 1.20),
            (CollectiveKind::ReduceScatter, 1024, 1.20),
        ] {
            let is = misaligned(kind, (mib << 20) / 4, 4, &profile);
            assert!((is - ratio).abs() < 0.11, "{kind:?} of {mib} MiB: {is}");
        }
    }

    /// With ranks that exchange through sockets, misaligned payloads of 4 and 64 MiB took 0.83 to
    /// 1.10 times as long as aligned ones on four H200.
    #[test]
    fn a_slow_network_hides_misalignment() {
        let mut profile = hardware::load("h100-80").unwrap();
        let bytes = 1 << 26;
        assert!(misaligned(CollectiveKind::AllGather, bytes, 16, &profile) > 1.3);
        profile.network.nic_gbps = 25.0;
        let slow = misaligned(CollectiveKind::AllGather, bytes, 16, &profile);
        assert!((slow - 1.0).abs() < 1e-6, "{slow}");
    }

    #[test]
    fn time_grows_with_bytes_and_ranks() {
        for profile in ["h100-80", "a100-40", "cpu"] {
            for kind in [
                CollectiveKind::AllGather,
                CollectiveKind::AllReduce,
                CollectiveKind::AllToAll,
            ] {
                let mut last = 0.0;
                for bytes in (10..32).map(|i| 1u64 << i) {
                    let us = priced(kind, bytes, 16, 1, 8, profile).us;
                    assert!(us >= last, "{profile} {kind:?} {bytes}: {us} < {last}");
                    last = us;
                }
                let small = priced(kind, 1 << 20, 16, 1, 8, profile).us;
                assert!(priced(kind, 1 << 20, 64, 1, 8, profile).us > small);
            }
        }
    }
}
