//! What work costs: times alone, and what it occupies while it runs.

use crate::hardware::{MemoryClass, Profile};

/// A price: time alone, and whether it comes from measured rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price {
    /// Microseconds alone.
    pub(crate) us: f64,
    /// A measured row was hit, or measured neighbours were interpolated.
    pub(crate) measured: bool,
}

/// What a task occupies while it runs.
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
}

/// Cost of one kernel, collective, copy or input: what the engine needs to know about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Time alone, picoseconds.
    pub(crate) work: u64,
    /// What it occupies.
    pub(crate) load: Load,
    /// Share of the reachable memory bandwidth it uses when alone, in units of
    /// [`crate::clock::ONE`].
    pub(crate) bandwidth: u32,
    /// Share of the NVLink bandwidth it uses when alone.
    pub(crate) nvlink: u32,
    /// Share of the network cards' bandwidth it uses when alone.
    pub(crate) nic: u32,
    /// How many times the rate at which it runs across nodes its SMs could keep up with over
    /// NVLink, in the same units; not used within a node.
    pub(crate) headroom: u32,
    /// Payload of a collective, bytes.
    pub(crate) bytes: u64,
    /// Communicator of a collective.
    pub(crate) comm: u8,
    /// Fills the device: later kernels find no free SM.
    pub(crate) fills: bool,
    /// A collective on copy engines: it holds no SMs and waits for none.
    pub(crate) on_engines: bool,
    /// Of such a collective, the share of its time alone in which SMs copy the rank's own part:
    /// engines carry what goes to others.
    pub(crate) local_copy_share: u32,
    /// From measured rows.
    pub(crate) measured: bool,
}

/// Returns a share (0 to 1) in units of [`crate::clock::ONE`].
pub(crate) fn fixed_share(x: f64) -> u32 {
    (x.clamp(0.0, 1.0) * f64::from(crate::clock::ONE)).round() as u32
}

/// What a plain copy on the device reaches, read and written, GB/s.
pub(crate) fn copy_gbps(profile: &Profile) -> f64 {
    profile.efficiency.memory[&MemoryClass::Copy] * profile.device.memory_gbps
}
