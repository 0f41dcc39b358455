//! How running tasks slow one another: they share SMs, memory bandwidth and links.
//!
//! - A running collective holds a fixed number of SMs; kernels share the rest. A kernel bound by arithmetic uses all SMs,
//!   one bound by memory bandwidth is as fast on half of them.
//! - Kernels whose joint demand exceeds the memory bandwidth slow down in proportion to how much they depend on it.
//! - A collective loses a fixed share of its rate while any kernel runs, and more the more bandwidth the kernels use.
//! - Collectives on the same links divide them.

use crate::clock::ONE;
use crate::cost::{Cost, Load};
use crate::hardware::Profile;

/// Contention parameters in fixed point (units of 1/[`ONE`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Share of the SMs that one collective holds.
    held: u32,
    loss_compute: u32,
    loss_bandwidth: u32,
    /// Share of a filling kernel's duration a collective waits for SMs, default and high priority.
    pub(crate) start_wait: [u32; 2],
    /// Off: every task runs as if alone.
    pub(crate) on: bool,
}

/// Totals over the running tasks, from which each task's rate follows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pressure {
    collectives: u32,
    kernels: u32,
    sm_demand: u32,
    kernel_bandwidth: u32,
    collective_bandwidth: u32,
    nvlink: u32,
    nic: u32,
}

impl Rules {
    pub(crate) fn new(profile: &Profile, on: bool) -> Self {
        let c = &profile.contention;
        let fixed = crate::cost::fixed_share;
        Self {
            held: profile.network.sms_per_collective * ONE / profile.device.sms,
            loss_compute: fixed(c.collective_loss_compute),
            loss_bandwidth: fixed(c.collective_loss_bandwidth),
            start_wait: [fixed(c.start_wait), fixed(c.start_wait_priority)],
            on,
        }
    }

    /// Rate of a task under a pressure that includes it.
    pub(crate) fn rate(&self, p: &Pressure, task: &Cost) -> u32 {
        let over = |total: u32| if total > ONE { ONE * ONE / total } else { ONE };
        match task.load {
            Load::Collective => {
                let mut rate = ONE;
                if p.kernels > 0 {
                    rate -=
                        self.loss_compute + mul(self.loss_bandwidth, p.kernel_bandwidth.min(ONE));
                }
                let link = if task.nic > 0 {
                    over(p.nic)
                } else {
                    over(p.nvlink)
                };
                mul(rate, link).max(ONE / 64)
            }
            Load::Compute | Load::Memory => {
                let free = ONE.saturating_sub(self.held * p.collectives).max(ONE / 8);
                let sms = if p.sm_demand > free {
                    free * ONE / p.sm_demand
                } else {
                    ONE
                };
                let shortage = ONE - over(mul(p.kernel_bandwidth, sms) + p.collective_bandwidth);
                mul(sms, ONE - mul(task.bandwidth, shortage)).max(ONE / 64)
            }
            Load::Copy => ONE,
        }
    }
}

impl Pressure {
    /// Adds a running task. `idle` collectives hold SMs while they wait for other ranks, but move nothing.
    pub(crate) fn add(&mut self, task: &Cost, idle: bool) {
        match task.load {
            Load::Collective => {
                self.collectives += 1;
                if !idle {
                    self.nvlink += task.nvlink;
                    self.nic += task.nic;
                    self.collective_bandwidth += task.bandwidth;
                }
            }
            Load::Compute | Load::Memory => {
                self.kernels += 1;
                self.sm_demand += if task.load == Load::Compute {
                    ONE
                } else {
                    ONE / 2
                };
                self.kernel_bandwidth += task.bandwidth;
            }
            Load::Copy => self.collective_bandwidth += task.bandwidth,
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
            bytes: 0,
            comm: 0,
            fills: true,
            measured: true,
        }
    }

    fn rates(tasks: &[Cost]) -> Vec<f64> {
        let rules = Rules::new(&hardware::load("h200-nvlink").unwrap(), true);
        let mut pressure = Pressure::default();
        tasks.iter().for_each(|t| pressure.add(t, false));
        tasks
            .iter()
            .map(|t| f64::from(rules.rate(&pressure, t)) / f64::from(ONE))
            .collect()
    }

    #[test]
    fn alone_everything_runs_at_full_rate() {
        for load in [Load::Compute, Load::Memory, Load::Collective, Load::Copy] {
            assert_eq!(rates(&[task(load, ONE, ONE)]), [1.0]);
        }
    }

    #[test]
    fn a_matrix_product_loses_the_sms_that_a_collective_holds() {
        let r = rates(&[
            task(Load::Compute, 0, 0),
            task(Load::Collective, ONE / 5, ONE),
        ]);
        assert!((r[0] - 108.0 / 132.0).abs() < 0.01, "{r:?}");
        assert!(r[1] < 0.9 && r[1] > 0.6, "{r:?}");
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
