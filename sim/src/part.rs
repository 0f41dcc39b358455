//! Parts of a machine, for asking what a step would take if one of them were slower.

use crate::price::Load;
use std::ops::RangeInclusive;

/// How many times as long a part may take.
pub(crate) const SCALES: RangeInclusive<f64> = 0.01..=1000.0;

/// A part of a machine whose work can be made longer than a profile says
/// ([`crate::Options::slower`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What the host thread does to issue work: launches, hooks, dispatch, allocation.
    Host,
    /// Kernels bound by arithmetic: products, convolutions, attention. A power limit takes the
    /// longer share that they have of a step for more load, so the clock goes down further.
    Arithmetic,
    /// Kernels bound by memory bandwidth, and copies within the device.
    Memory,
    /// Collectives.
    Collectives,
    /// Copies from and to host memory.
    HostCopies,
}

impl Part {
    /// All of them, as tables list them.
    pub const ALL: [Self; 5] = [
        Self::Host,
        Self::Arithmetic,
        Self::Memory,
        Self::Collectives,
        Self::HostCopies,
    ];

    /// Its name on the command line and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Arithmetic => "arithmetic",
            Self::Memory => "memory",
            Self::Collectives => "collectives",
            Self::HostCopies => "host_copies",
        }
    }

    /// What does work of this kind on the device.
    pub(crate) const fn of(load: Load) -> Self {
        match load {
            Load::Compute => Self::Arithmetic,
            Load::Memory | Load::Copy => Self::Memory,
            Load::Collective => Self::Collectives,
            Load::ToDevice | Load::ToHost => Self::HostCopies,
        }
    }
}
