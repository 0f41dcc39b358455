//! What a schedule declares about its programs, because their instructions do not show it.

/// Properties of a schedule that [`check`](crate::check) needs to know. They change no instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contract {
    /// Whether the parameters of a group are either all trained or all frozen. If false, a group is
    /// trained if any of its parameters is.
    pub frozen_apart: bool,
    /// Whether shards may be gathered over the outer axis again before any rank updates its part.
    pub repeats_outer_gathers: bool,
    /// What bounds the gradient buffers whose reductions are in flight.
    pub in_flight: InFlight,
}

/// Bound on the units whose gradient buffers are allocated while their reductions run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFlight {
    /// [`ProgramMeta::reduce_in_flight`](super::ProgramMeta::reduce_in_flight) units; 0 means no
    /// bound.
    Units,
    /// The copies of the double buffer, which serves the units that reshard; no bound without a
    /// double buffer.
    DoubleBuffer,
}

impl Contract {
    /// The strictest properties.
    pub const STRICT: Self = Self {
        frozen_apart: true,
        repeats_outer_gathers: false,
        in_flight: InFlight::Units,
    };
}
