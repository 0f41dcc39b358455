//! How running tasks slow each other down: they share SMs, memory bandwidth and links.
//!
//! - A running collective holds a fixed number of SMs; kernels share the rest. A kernel bound by
//!   arithmetic uses all SMs; a kernel bound by memory bandwidth is equally fast on half of them.
//!   Two kernels that fill the device take turns if at least one of them is bound by arithmetic:
//!   blocks of a GEMM need the whole shared memory of an SM. On an H200, the rates of a cast of 2
//!   GiB and of a concurrent kernel, each relative to running alone, sum to 0.96 to 1.0 for cuBLAS
//!   and grouped GEMMs, 1.0 for the forward of attention and 1.1 for its backward, at any stream
//!   priority. In traces of steps on two H200, one starts as the other ends.
//! - Kernels whose joint demand exceeds the memory bandwidth slow down in proportion to how much
//!   they depend on it.
//! - A collective loses a fixed share of its rate while any kernel runs, and a further share that
//!   grows with the bandwidth that kernels use. Both shares are relative to what its SMs can carry
//!   over NVLink. A collective across nodes keeps the rate of the network cards while its SMs can
//!   still carry more than that, and it takes only as much memory bandwidth from kernels as its
//!   data needs. It nevertheless holds its SMs.
//! - Collectives on the same links divide their bandwidth.
//! - Copies to and from the host slow each other down by fixed shares of their rates, because they
//!   share host memory and the link.
//!
//! Ranks that share cores instead of having one device each follow simpler rules: every running
//! task takes a core, and all ranks do the same things at the same time.

use crate::clock::ONE;
use crate::hardware::Profile;
use crate::price::{Cost, Load};

/// Contention parameters in fixed point (units of 1/[`ONE`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Share of the SMs that one collective holds.
    held: u32,
    loss_compute: u32,
    loss_bandwidth: u32,
    /// Share of its rate that a copy to the device loses while a copy to the host runs, and the
    /// reverse.
    loss_to_device: u32,
    loss_to_host: u32,
    /// How long a collective waits for SMs, as a share of the duration of a kernel that fills the
    /// device: at default and at high priority.
    pub(crate) start_wait: [u32; 2],
    /// Cores that the ranks of a node share, in units of [`ONE`]; 0 if each rank has a device.
    cores: u32,
    /// Number of ranks that share the cores.
    ranks: u32,
    shared_loss: u32,
    /// If false, every task runs as if alone.
    pub(crate) on: bool,
}

/// Totals over the running tasks. They determine the rate of each task.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pressure {
    collectives: u32,
    to_device: u32,
    to_host: u32,
    /// Number of running collectives that move data and of running copies. Each of them keeps a
    /// core busy.
    moves: u32,
    /// Numbers of kernels: of all, of those bound by arithmetic, and of memory-bound ones that fill
    /// the device.
    kernels: u32,
    arithmetic: u32,
    filling: u32,
    kernel_bandwidth: u32,
    collective_bandwidth: u32,
    /// Sum over collectives on copy engines: the share of the time in which each counts as a
    /// memory-bound kernel that fills the device.
    local_copies: u32,
    nvlink: u32,
    nic: u32,
}

impl Rules {
    /// Derives the rules for a node with this many ranks.
    pub(crate) fn new(profile: &Profile, on: bool, ranks: u32) -> Self {
        let c = &profile.contention;
        let fixed = crate::price::fixed_share;
        Self {
            held: profile.network.sms_per_collective * ONE / profile.device.sms,
            loss_compute: fixed(c.collective_loss_compute),
            loss_bandwidth: fixed(c.collective_loss_bandwidth),
            loss_to_device: fixed(c.h2d_loss),
            loss_to_host: fixed(c.d2h_loss),
            start_wait: [fixed(c.start_wait), fixed(c.start_wait_priority)],
            cores: profile.device.shared_cores.unwrap_or(0).min(1 << 16) * ONE,
            ranks,
            shared_loss: fixed(if Some(ranks) > profile.device.shared_cores {
                c.turn_loss.unwrap_or(c.shared_loss)
            } else {
                c.shared_loss
            }),
            on,
        }
    }

    /// Returns whether ranks slow each other down, so that no task runs alone.
    pub(crate) fn shares(&self) -> bool {
        self.cores > 0 && self.ranks > 1
    }

    /// Returns whether a task cannot start before a running one has ended: blocks of a GEMM need
    /// the whole shared memory or all registers of an SM, and the GPU starts the blocks of a kernel
    /// only after all blocks of earlier kernels have started.
    pub(crate) fn excludes(&self, running: &Cost, task: &Cost) -> bool {
        let kernel = |of: &Cost| of.fills && matches!(of.load, Load::Compute | Load::Memory);
        let arithmetic = running.load == Load::Compute || task.load == Load::Compute;
        self.on && self.cores == 0 && arithmetic && kernel(running) && kernel(task)
    }

    /// Returns the rate of a task under a pressure that includes it.
    pub(crate) fn rate(&self, p: &Pressure, task: &Cost) -> u32 {
        if self.cores > 0 {
            return self.core_rate(p, task);
        }
        let over = |total: u32| if total > ONE { ONE * ONE / total } else { ONE };
        let slowed_by = |others: u32, loss: u32| if others > 0 { ONE - loss } else { ONE };
        match task.load {
            Load::Collective => {
                let mut rate = ONE;
                if p.kernels > 0 && !task.on_engines {
                    rate -=
                        self.loss_compute + mul(self.loss_bandwidth, p.kernel_bandwidth.min(ONE));
                }
                let rate = if task.nic > 0 {
                    mul(rate, task.headroom).min(over(p.nic))
                } else {
                    mul(rate, over(p.nvlink))
                };
                rate.max(ONE / 64)
            }
            Load::Compute | Load::Memory => {
                let free = ONE.saturating_sub(self.held * p.collectives).max(ONE / 8);
                let demand = p.sm_demand();
                let sms = if demand > free {
                    free * ONE / demand
                } else {
                    ONE
                };
                let shortage = ONE - over(mul(p.kernel_bandwidth, sms) + p.collective_bandwidth);
                mul(sms, ONE - mul(task.bandwidth, shortage)).max(ONE / 64)
            }
            Load::Copy | Load::Cpu => ONE,
            Load::ToDevice => slowed_by(p.to_host, self.loss_to_device),
            Load::ToHost => slowed_by(p.to_device, self.loss_to_host),
        }
    }

    /// Returns the rate of a task on a core of a shared pool.
    fn core_rate(&self, p: &Pressure, task: &Cost) -> u32 {
        let share = |tasks: u32| {
            let busy = tasks.saturating_mul(self.ranks).saturating_mul(ONE);
            let turn = if busy > self.cores {
                (u64::from(self.cores) * u64::from(ONE) / u64::from(busy)) as u32
            } else {
                ONE
            };
            let others = busy.min(self.cores) - ONE.min(busy);
            let most = self.cores - ONE;
            let crowd = if most == 0 {
                0
            } else {
                (u64::from(others) * u64::from(ONE) / u64::from(most)) as u32
            };
            mul(turn, ONE - mul(self.shared_loss, crowd))
        };
        let now = share(p.kernels + p.moves);
        // Collectives were measured while all of their ranks ran them.
        let measured = if task.load == Load::Collective {
            share(1)
        } else {
            ONE
        };
        (u64::from(now) * u64::from(ONE) / u64::from(measured))
            .clamp(u64::from(ONE / 64), u64::from(ONE)) as u32
    }
}

impl Pressure {
    /// Returns the share of the SMs that kernels would use if no collective ran.
    fn sm_demand(&self) -> u32 {
        let halves = (self.kernels + self.arithmetic) * ONE + self.local_copies;
        let more = if self.arithmetic > 0 {
            self.filling * ONE + self.local_copies
        } else {
            0
        };
        (halves + more) / 2
    }

    /// Adds a running task. An `idle` collective waits for other ranks: it holds SMs but moves
    /// nothing.
    pub(crate) fn add(&mut self, task: &Cost, idle: bool) {
        match task.load {
            Load::Collective => {
                self.collectives += u32::from(!task.on_engines);
                if !idle {
                    self.moves += 1;
                    self.local_copies += task.local_copy_share;
                    self.nvlink += task.nvlink;
                    self.nic += task.nic;
                    self.collective_bandwidth += task.bandwidth;
                }
            }
            Load::Compute | Load::Memory => {
                self.kernels += 1;
                if task.load == Load::Compute {
                    self.arithmetic += 1;
                } else {
                    self.filling += u32::from(task.fills);
                }
                self.kernel_bandwidth += task.bandwidth;
            }
            Load::Copy | Load::ToDevice | Load::ToHost => {
                self.to_device += u32::from(task.load == Load::ToDevice);
                self.to_host += u32::from(task.load == Load::ToHost);
                self.moves += 1;
                self.collective_bandwidth += task.bandwidth;
            }
            Load::Cpu => {}
        }
    }
}

fn mul(a: u32, b: u32) -> u32 {
    (u64::from(a) * u64::from(b) / u64::from(ONE)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware;

    fn task(load: Load, bandwidth: u32, nvlink: u32) -> Cost {
        Cost {
            work: 1,
            load,
            bandwidth,
            nvlink,
            nic: 0,
            headroom: ONE,
            bytes: 0,
            comm: 0,
            fills: true,
            on_engines: false,
            local_copy_share: 0,
            measured: true,
            float8: false,
        }
    }

    fn rates(tasks: &[Cost]) -> Vec<f64> {
        let rules = Rules::new(&hardware::load("h200-nvlink").unwrap(), true, 1);
        let mut pressure = Pressure::default();
        tasks.iter().for_each(|t| pressure.add(t, false));
        tasks
            .iter()
            .map(|t| f64::from(rules.rate(&pressure, t)) / f64::from(ONE))
            .collect()
    }

    #[test]
    fn alone_everything_runs_at_full_rate() {
        use Load::{Collective, Compute, Copy, Memory, ToDevice, ToHost};
        for load in [Compute, Memory, Collective, Copy, ToDevice, ToHost] {
            assert_eq!(rates(&[task(load, ONE, ONE)]), [1.0]);
        }
    }

    #[test]
    fn a_gemm_loses_the_sms_that_a_collective_holds() {
        let r = rates(&[
            task(Load::Compute, 0, 0),
            task(Load::Collective, ONE / 5, ONE),
        ]);
        assert!((r[0] - 108.0 / 132.0).abs() < 0.01, "{r:?}");
        assert!(r[1] < 0.9 && r[1] > 0.6, "{r:?}");
    }

    /// During a GEMM a collective keeps 85 % of NVLink's rate, and during a kernel that uses all of
    /// the memory bandwidth 55 %. That is 1.7 and 1.1 times the rate that a collective at half of
    /// NVLink's rate needs, and 1.0625 and 0.6875 times the rate of one at four fifths.
    #[test]
    fn a_collective_bound_by_the_cards_loses_what_its_sms_cannot_keep_up_with() {
        let at = |headroom: f64, bandwidth: u32| {
            let collective = Cost {
                nvlink: 0,
                nic: ONE,
                headroom: (headroom * f64::from(ONE)) as u32,
                ..task(Load::Collective, 0, 0)
            };
            let gemm = task(Load::Compute, bandwidth, 0);
            rates(&[collective, gemm])
        };
        let near = |is: f64, wanted: f64| assert!((is - wanted).abs() < 0.01, "{is}");
        near(at(2.0, 0)[0], 1.0);
        near(at(2.0, ONE)[0], 1.0);
        near(at(1.25, 0)[0], 1.0);
        near(at(1.25, ONE)[0], 0.6875);
        // The GEMM loses the SMs, whatever the collective's rate is.
        near(at(64.0, 0)[1], 108.0 / 132.0);
        // Two collectives across nodes divide the cards; either could run at half of its rate
        // during the GEMM.
        let collective = Cost {
            nvlink: 0,
            nic: ONE,
            headroom: 2 * ONE,
            ..task(Load::Collective, 0, 0)
        };
        let all = rates(&[collective, collective, task(Load::Compute, ONE, 0)]);
        near(all[0], 0.5);
    }

    #[test]
    fn an_update_takes_from_a_gemm_what_it_uses() {
        // Alone, each runs at rate 1. Together, each runs at half the rate, so that both take as
        // long as one after the other.
        let update = Cost {
            bandwidth: ONE,
            ..task(Load::Memory, 0, 0)
        };
        let gemm = task(Load::Compute, 0, 0);
        let r = rates(&[gemm, update]);
        assert!((r[0] + r[1] - 1.0).abs() < 0.01, "{r:?}");
        // A short kernel finds room next to the GEMM's blocks.
        let short = Cost {
            fills: false,
            ..update
        };
        let r = rates(&[gemm, short]);
        assert!((r[0] - 2.0 / 3.0).abs() < 0.01, "{r:?}");
        // Two memory-bound kernels divide the bandwidth, however many SMs they have.
        let r = rates(&[update, update]);
        assert!((r[0] - 0.5).abs() < 0.01, "{r:?}");
    }

    #[test]
    fn copies_to_and_from_the_host_slow_one_another() {
        let mut profile = hardware::load("h200-nvlink").unwrap();
        (profile.contention.h2d_loss, profile.contention.d2h_loss) = (0.25, 0.125);
        let rules = Rules::new(&profile, true, 1);
        let rate = |tasks: &[Cost]| {
            let mut p = Pressure::default();
            tasks.iter().for_each(|t| p.add(t, false));
            let rate = |t| f64::from(rules.rate(&p, t)) / f64::from(ONE);
            tasks.iter().map(rate).collect::<Vec<_>>()
        };
        let [up, down] = [Load::ToDevice, Load::ToHost].map(|load| task(load, 0, 0));
        assert_eq!(rate(&[up, down]), [0.75, 0.875]);
        assert_eq!(rate(&[up]), [1.0]);
        assert_eq!(rate(&[down, task(Load::Copy, 0, 0)]), [1.0, 1.0]);
    }

    #[test]
    fn copy_engines_take_no_sms() {
        let gemm = task(Load::Compute, 0, 0);
        let engines = Cost {
            on_engines: true,
            ..task(Load::Collective, ONE / 5, ONE)
        };
        assert_eq!(rates(&[gemm, engines]), [1.0, 1.0]);
    }

    /// The collective counts as an update for a third of its time, so the GEMM takes a third
    /// longer.
    #[test]
    fn a_rank_copies_its_own_part_by_sms() {
        let engines = Cost {
            on_engines: true,
            local_copy_share: ONE / 3,
            ..task(Load::Collective, ONE / 5, ONE)
        };
        let r = rates(&[task(Load::Compute, 0, 0), engines]);
        assert!((r[0] - 0.75).abs() < 0.01, "{r:?}");
        assert_eq!(r[1], 1.0);
        // There is room for it during a memory-bound kernel.
        assert_eq!(rates(&[task(Load::Memory, 0, 0), engines]), [1.0, 1.0]);
    }

    #[test]
    fn a_memory_bound_kernel_loses_bandwidth_only() {
        let r = rates(&[
            task(Load::Memory, ONE, 0),
            task(Load::Collective, ONE / 5, ONE),
        ]);
        assert!((r[0] - 1.0 / 1.2).abs() < 0.01, "{r:?}");
    }

    #[test]
    fn ranks_that_share_cores_take_turns() {
        let mut profile = hardware::load("h200-nvlink").unwrap();
        profile.device.shared_cores = Some(2);
        profile.contention.shared_loss = 0.1;
        let rate = |ranks: u32, tasks: &[Cost], i: usize| {
            let rules = Rules::new(&profile, true, ranks);
            let mut pressure = Pressure::default();
            tasks.iter().for_each(|t| pressure.add(t, false));
            f64::from(rules.rate(&pressure, &tasks[i])) / f64::from(ONE)
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-3, "{a} instead of {b}");
        let kernel = task(Load::Compute, 0, 0);
        let collective = task(Load::Collective, 0, ONE);
        near(rate(1, &[kernel], 0), 1.0);
        // A second busy core costs only what contention for caches and memory costs; more ranks
        // divide the cores.
        near(rate(2, &[kernel], 0), 0.9);
        near(rate(4, &[kernel], 0), 0.9 / 2.0);
        near(rate(2, &[kernel, collective], 0), 0.9 / 2.0);
        // Collectives were measured while all ranks ran them.
        near(rate(4, &[collective], 0), 1.0);
        near(rate(2, &[kernel, collective], 1), 0.5);
        // Ranks that take turns lose more if that loss was measured.
        profile.contention.turn_loss = Some(0.2);
        let rate = |ranks: u32| {
            let rules = Rules::new(&profile, true, ranks);
            let mut pressure = Pressure::default();
            pressure.add(&kernel, false);
            f64::from(rules.rate(&pressure, &kernel)) / f64::from(ONE)
        };
        near(rate(2), 0.9);
        near(rate(4), 0.8 / 2.0);
    }

    #[test]
    fn two_collectives_divide_a_link_but_not_two_links() {
        let nvlink = task(Load::Collective, 0, ONE);
        assert_eq!(rates(&[nvlink, nvlink]), [0.5, 0.5]);
        let nic = Cost {
            nvlink: 0,
            nic: ONE,
            ..nvlink
        };
        assert_eq!(rates(&[nvlink, nic]), [1.0, 1.0]);
    }
}
