//! Parts of a machine, to predict the time of a step if one of them were slower.

use crate::price::Load;
use std::ops::RangeInclusive;

/// Range of the factors by which a part may be slower.
pub(crate) const SCALES: RangeInclusive<f64> = 0.01..=1000.0;

/// A part of a machine whose work can be made longer than a profile says
/// ([`crate::Options::slower`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Work of the host thread to issue a step: launches, hooks, dispatch, allocation.
    Host,
    /// Kernels bound by arithmetic: GEMMs, convolutions, attention. A power limit treats their
    /// longer share of a step as more load, so the clock falls further.
    Arithmetic,
    /// Kernels bound by memory bandwidth, and copies within the device.
    Memory,
    /// Collectives.
    Collectives,
    /// Copies from and to host memory.
    HostCopies,
}

impl Part {
    /// All parts, in the order of tables.
    pub const ALL: [Self; 5] = [
        Self::Host,
        Self::Arithmetic,
        Self::Memory,
        Self::Collectives,
        Self::HostCopies,
    ];

    /// Returns the name on the command line and in JSON.
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

    /// Returns the part that does work of this kind; `None` for operators on the CPU, which
    /// [`Part::Host`] only issues.
    pub(crate) const fn of(load: Load) -> Option<Self> {
        Some(match load {
            Load::Compute => Self::Arithmetic,
            Load::Memory | Load::Copy => Self::Memory,
            Load::Collective => Self::Collectives,
            Load::ToDevice | Load::ToHost => Self::HostCopies,
            Load::Cpu => return None,
        })
    }
}
