//! Cost of work: its isolated duration, and the resources that it takes while it runs.

use crate::hardware::{MemoryClass, Profile};

/// A price: an isolated duration, and whether it comes from measured rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price {
    /// Isolated duration in microseconds.
    pub(crate) us: f64,
    /// Whether a measured row matched, or measured neighbors were interpolated.
    pub(crate) measured: bool,
}

/// Kind of resource that a task takes while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// A kernel limited by arithmetic.
    Compute,
    /// A kernel limited by memory bandwidth.
    Memory,
    /// A collective.
    Collective,
    /// A copy within the device.
    Copy,
    /// A copy from host memory.
    ToDevice,
    /// A copy to host memory.
    ToHost,
    /// An operator on the CPU of a machine with GPUs.
    Cpu,
}

/// Cost of one kernel, collective, copy or input: what the engine needs to know about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Isolated duration in picoseconds.
    pub(crate) work: u64,
    /// Kind of resource that it takes.
    pub(crate) load: Load,
    /// Share of the reachable memory bandwidth that it uses when alone, in units of
    /// [`crate::clock::ONE`].
    pub(crate) bandwidth: u32,
    /// Share of the NVLink bandwidth that it uses when alone.
    pub(crate) nvlink: u32,
    /// Share of the network cards' bandwidth that it uses when alone.
    pub(crate) nic: u32,
    /// Rate that its SMs could sustain over NVLink relative to its rate across nodes, in the same
    /// units; not used within a node.
    pub(crate) headroom: u32,
    /// Payload of a collective, in bytes.
    pub(crate) bytes: u64,
    /// Communicator of a collective.
    pub(crate) comm: u8,
    /// Whether it fills the device, so that no SM is free for later kernels.
    pub(crate) fills: bool,
    /// Whether it is a collective on copy engines, which neither holds SMs nor waits for them.
    pub(crate) on_engines: bool,
    /// For collectives on copy engines only: share of the isolated duration in which SMs copy the
    /// local chunk. Copy engines carry the chunks of other ranks.
    pub(crate) local_copy_share: u32,
    /// Whether the duration comes from measured rows.
    pub(crate) measured: bool,
    /// Whether it is a kernel with 8-bit matmuls, which the power limit slows by a separate factor.
    pub(crate) float8: bool,
}

impl Cost {
    /// Makes the cost of work that takes only its resource from others.
    pub(crate) const fn of(work: u64, load: Load) -> Self {
        Self {
            work,
            load,
            bandwidth: 0,
            nvlink: 0,
            nic: 0,
            headroom: crate::clock::ONE,
            bytes: 0,
            comm: 0,
            fills: false,
            on_engines: false,
            local_copy_share: 0,
            measured: false,
            float8: false,
        }
    }
}

/// Returns a share (0 to 1) in units of [`crate::clock::ONE`].
pub(crate) fn fixed_share(x: f64) -> u32 {
    (x.clamp(0.0, 1.0) * f64::from(crate::clock::ONE)).round() as u32
}

/// Returns the rate of a plain copy on the device, bytes read plus written, in GB/s.
pub(crate) fn copy_gbps(profile: &Profile) -> f64 {
    profile.efficiency.memory[&MemoryClass::Copy] * profile.device.memory_gbps
}
