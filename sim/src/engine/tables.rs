//! What all ranks of a run share, read-only.

use crate::contention::Rules;
use crate::host::SectionCode;
use crate::price::Cost;

/// An interruption of the host by the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    /// Before which code of the section.
    pub(crate) code: u32,
    /// Host time.
    pub(crate) cost: u64,
    /// The device has to be idle first (cached memory is being released).
    pub(crate) drain: bool,
}

/// One pass over a section.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    /// Index into [`Tables::sections`].
    pub(crate) section: usize,
    /// Keep spans and host times (at most one pass of a run).
    pub(crate) recorded: bool,
    /// Allocator interruptions, in order.
    pub(crate) stalls: Vec<Stall>,
}

/// Everything that does not change while simulating.
pub(crate) struct Tables<'a> {
    /// Costs of kernels, collectives and copies.
    pub(crate) costs: &'a [Cost],
    /// Sections.
    pub(crate) sections: &'a [SectionCode],
    /// Passes in order.
    pub(crate) passes: Vec<Pass>,
    /// Priorities of the streams.
    pub(crate) priorities: Vec<i8>,
    /// Streams from the most to the least urgent.
    pub(crate) by_priority: Vec<u8>,
    /// Events of the program.
    pub(crate) events: usize,
    /// Communicators of the program.
    pub(crate) comms: usize,
    /// Entries a stream's queue holds.
    pub(crate) queue_depth: u32,
    /// From the end of a task to the start of the next.
    pub(crate) gap: u64,
    /// The same inside a captured graph.
    pub(crate) graph_gap: u64,
    /// From issue to start.
    pub(crate) latency: u64,
    /// From an event to the start of what waited for it on another stream, beyond `gap`.
    pub(crate) event_latency: u64,
    /// Passes that may be in flight, at most [`super::IN_FLIGHT`].
    pub(crate) in_flight: usize,
    /// Waking up the host.
    pub(crate) host_wait: u64,
    /// Contention.
    pub(crate) rules: Rules,
}
