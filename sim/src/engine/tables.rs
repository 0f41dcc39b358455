//! Read-only data that all ranks of a run share.

use crate::contention::Rules;
use crate::host::SectionCode;
use crate::price::Cost;

/// An interruption of the host by the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    /// Index of the code in the section before which it happens.
    pub(crate) code: u32,
    /// Host time.
    pub(crate) cost: u64,
    /// Whether the device has to be idle first, because cached memory is released.
    pub(crate) drain: bool,
}

/// One execution of a section.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    /// Index into [`Tables::sections`].
    pub(crate) section: usize,
    /// Whether to keep spans and host times. At most one pass of a run does.
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
    /// Number of events of the program.
    pub(crate) events: usize,
    /// Number of communicators of the program.
    pub(crate) comms: usize,
    /// Maximum number of entries in a stream's queue.
    pub(crate) queue_depth: u32,
    /// Gap between the end of a task and the start of the next one.
    pub(crate) gap: u64,
    /// The same gap within a captured graph.
    pub(crate) graph_gap: u64,
    /// Latency from issue to start.
    pub(crate) latency: u64,
    /// Latency from an event to the start of work on another stream that waited for it, in addition
    /// to `gap`.
    pub(crate) event_latency: u64,
    /// Maximum number of passes in flight, at most [`super::IN_FLIGHT`].
    pub(crate) in_flight: usize,
    /// Cost of waking up the host.
    pub(crate) host_wait: u64,
    /// Contention.
    pub(crate) rules: Rules,
}
