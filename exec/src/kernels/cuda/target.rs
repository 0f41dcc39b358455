//! Target of generated code.

use std::fmt;

/// A compute capability that the generator writes code for.
///
/// Limits are those of the CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute
/// Capability".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    major: u32,
    minor: u32,
}

impl Target {
    /// H100 and H200, on which everything here was measured.
    #[cfg(test)]
    pub(crate) const HOPPER: Self = Self { major: 9, minor: 0 };

    /// Returns the target of a GPU of this compute capability; `None` before 8.0, which has neither
    /// bf16 nor asynchronous copies.
    pub(crate) const fn of((major, minor): (u32, u32)) -> Option<Self> {
        if major >= 8 {
            Some(Self { major, minor })
        } else {
            None
        }
    }

    /// Returns whether the blocks of a cluster can write into one another's shared memory.
    pub(crate) const fn has_clusters(self) -> bool {
        // Desktop GPUs (12.x) are not used this way.
        matches!(self.major, 9..=11)
    }

    /// Returns whether a kernel can start before the previous one of its stream ends, and wait for
    /// it.
    pub(crate) const fn has_dependent_launches(self) -> bool {
        self.major >= 9
    }

    /// Returns whether groups of warps multiply tiles in shared memory: only Hopper's tensor cores
    /// do.
    pub(crate) const fn has_wgmma(self) -> bool {
        self.major == 9
    }

    /// Returns whether there are instructions for 8-bit floats.
    pub(crate) const fn has_float8(self) -> bool {
        self.major > 8 || self.major == 8 && self.minor >= 9
    }

    /// Returns the maximum number of bytes of shared memory per block.
    pub(crate) const fn shared(self) -> u32 {
        let kib = match (self.major, self.minor) {
            (8, 0 | 7) => 163,
            (8, _) | (12.., _) => 99,
            _ => 227,
        };
        kib << 10
    }
}

impl fmt::Display for Target {
    /// Writes the name for compilers: `sm_90a`, because code for Hopper's tensor cores runs nowhere
    /// else; `sm_80`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alone = if self.has_wgmma() { "a" } else { "" };
        write!(f, "sm_{}{}{alone}", self.major, self.minor)
    }
}
