//! Result of interpreting a program: steps, spans, memory, collectives, exposed time.
//!
//! `sim` and `exec` both produce a [`Run`], and all later stages read only this. [`Run::summary`]
//! is the JSON contract.

mod awaited;
pub mod basis;
mod clock;
mod collectives;
mod critical_path;
pub mod float;
mod gaps;
mod inputs;
pub mod intervals;
mod queue;
mod summary;
mod work;

pub use awaited::{awaited_names, awaited_units};
pub use basis::{Basis, BasisKind, ErrorBand};
pub use clock::Clock;
pub use collectives::{add_times, collective_stats};
pub use gaps::{MIN_GAP, Reason, Reasons, exposed_gaps};
pub use inputs::Inputs;
pub use queue::{Queued, Queues, Shared};
pub use summary::{MemorySummary, SUMMARY_FORMAT, StepSummary, Summary};
pub use work::Work;

use crate::ir::{CollectiveKind, InstrId, Role, StreamId, UnitId};
use crate::program::{Phase, SectionKind};
use crate::units::{Bytes, Picos};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Origin of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunKind {
    /// Predicted.
    Sim,
    /// Measured by this engine.
    Exec,
    /// Measured by another program, and read from a profiler's trace.
    Import,
}

impl RunKind {
    /// Returns the command that makes such runs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sim => "sim",
            Self::Exec => "exec",
            Self::Import => "import",
        }
    }

    /// Returns whether times and memory were measured.
    #[must_use]
    pub const fn is_measured(self) -> bool {
        !matches!(self, Self::Sim)
    }

    /// Returns `predicted` or `measured`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        if self.is_measured() {
            "measured"
        } else {
            "predicted"
        }
    }
}

/// One pass over a step section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Step number from 0.
    pub step: u32,
    /// Section.
    pub section: SectionKind,
    /// Time at which the host started to issue it.
    pub start: Picos,
    /// Time at which its last device work had ended and the host was done.
    pub end: Picos,
    /// Time that the host spent issuing work.
    pub host: Picos,
    /// Peak of allocated bytes within the step.
    pub peak_allocated: Bytes,
    /// Peak of reserved bytes within the step.
    pub peak_reserved: Bytes,
}

/// One device task: a kernel, collective or copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Instruction.
    pub instr: InstrId,
    /// Stream.
    pub stream: StreamId,
    /// Time at which the host issued it.
    pub issued: Picos,
    /// Time at which its predecessors on the stream and its waits were done.
    pub ready: Picos,
    /// When it started.
    pub start: Picos,
    /// When it ended.
    pub end: Picos,
    /// Isolated duration.
    pub alone: Picos,
    /// The last thing that its start waited for: another span (index into [`Run::spans`]), or the
    /// host.
    pub blocker: Blocker,
}

/// The last thing that a span's start waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Blocker {
    /// The host, which had not issued it yet.
    Host,
    /// The previous span on its stream.
    Stream(u32),
    /// A span before an event that its stream waited for.
    Event(u32),
    /// The previous collective on its communicator.
    Communicator(u32),
    /// A rank that arrived later (stragglers).
    Rank,
    /// A kernel that held all SMs when the collective was ready.
    Sms,
    /// Nothing, because it started the step.
    None,
}

/// Memory after an allocation or a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Instruction.
    pub instr: InstrId,
    /// Host time.
    pub time: Picos,
    /// Allocated bytes.
    pub allocated: Bytes,
    /// Reserved bytes.
    pub reserved: Bytes,
}

/// Position of the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeakAt {
    /// Step.
    pub step: u32,
    /// Instruction.
    pub instr: InstrId,
    /// Host time.
    pub time: Picos,
    /// Phase.
    pub phase: Phase,
    /// Unit.
    pub unit: UnitId,
    /// Micro-batch.
    pub micro_batch: u16,
}

/// Memory of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Peak of allocated bytes (blocks).
    pub peak_allocated: Bytes,
    /// Peak of reserved bytes.
    pub peak_reserved: Bytes,
    /// Peak of the whole device: reserved plus context, communicators and libraries. 0 if it was
    /// not measured: see [`Self::device`].
    pub peak_device: Bytes,
    /// Bytes that remain allocated between steps.
    pub persistent: Bytes,
    /// Device capacity, if known.
    pub capacity: Option<Bytes>,
    /// Position of the allocated peak.
    pub at: PeakAt,
    /// Bytes allocated at the peak, by role, largest first.
    pub by_role: Vec<(Role, Bytes)>,
    /// Bytes allocated at the peak, by unit, largest first.
    pub by_unit: Vec<(String, Bytes)>,
    /// Number of allocator retries (each one synchronizes the device).
    pub retries: u32,
    /// Timeline of the recorded step.
    pub timeline: Vec<MemorySample>,
}

impl MemoryReport {
    /// Returns whether memory was recorded. A trace may contain no events of the allocator, and no
    /// step runs without memory.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.peak_allocated > Bytes::ZERO || self.peak_reserved > Bytes::ZERO
    }

    /// Returns the peak of allocated bytes; `None` if memory was not recorded.
    #[must_use]
    pub fn allocated(&self) -> Option<Bytes> {
        self.is_recorded().then_some(self.peak_allocated)
    }

    /// Returns the peak of reserved bytes; `None` if memory was not recorded.
    #[must_use]
    pub fn reserved(&self) -> Option<Bytes> {
        self.is_recorded().then_some(self.peak_reserved)
    }

    /// Returns the peak of the whole device; `None` if it was not measured. A profiler's trace
    /// records the allocator, but not other uses of the device.
    #[must_use]
    pub fn device(&self) -> Option<Bytes> {
        (self.peak_device > Bytes::ZERO).then_some(self.peak_device)
    }
}

/// Totals of one kind of collective over the recorded step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveStats {
    /// Number of launches.
    pub count: u32,
    /// Payload bytes (full side).
    pub bytes: Bytes,
    /// Time during which at least one was running.
    pub busy: Picos,
    /// Part of this time during which the compute stream ran nothing.
    pub exposed: Picos,
    /// Number of launches during which a GEMM or attention kernel ran on the compute stream.
    pub overlapped_with_gemm: u32,
}

/// Reason why the compute stream had nothing to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The host had not issued the next kernel.
    Host,
    /// The collective was issued late, or a prefetch or reduce gate allowed it to start only late.
    Gate,
    /// The collective was issued and ready, but waited for its turn after a collective of another
    /// kind, see [`Queues`].
    Queue,
    /// The collective ran as early as its input allowed, so the link is the limit.
    Wire,
    /// The collective was slowed by other work, or waited for SMs that other kernels held.
    Contention,
    /// End of the step, with nothing left to compute.
    Tail,
    /// Another rank was late.
    Straggler,
}

impl Cause {
    /// All causes, in the order of tables and legends.
    pub const ALL: [Self; 7] = [
        Self::Host,
        Self::Gate,
        Self::Queue,
        Self::Wire,
        Self::Contention,
        Self::Tail,
        Self::Straggler,
    ];

    /// Returns the name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gate => "gate",
            Self::Queue => "queue",
            Self::Wire => "wire",
            Self::Contention => "contention",
            Self::Tail => "tail",
            Self::Straggler => "straggler",
        }
    }
}

/// An interval during which the compute stream had nothing to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExposedGap {
    /// Start.
    pub start: Picos,
    /// End.
    pub end: Picos,
    /// Cause.
    pub cause: Cause,
    /// The span that the compute stream waited for (index into [`Run::spans`]), if any.
    pub waited_for: Option<u32>,
}

/// Busy time with measured and with modeled costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostSources {
    /// Busy time priced from measured tables.
    pub measured: Picos,
    /// Busy time priced from rooflines or formulas.
    pub modelled: Picos,
    /// Names of kernels and collectives with modeled costs, with their time, largest first.
    pub modelled_by_name: Vec<(String, Picos)>,
}

/// The result of interpreting a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Scenario name.
    pub scenario: String,
    /// Digest of the program.
    pub program_digest: String,
    /// Kind.
    pub kind: RunKind,
    /// Number of ranks.
    pub world_size: u32,
    /// Policy.
    pub policy: String,
    /// Hardware profile.
    pub hardware: String,
    /// Steps in order.
    pub steps: Vec<StepRecord>,
    /// Step times of the steady state. With jitter, there is one per sample.
    pub step_samples: Vec<Picos>,
    /// Spans of the recorded steady step, in issue order.
    pub spans: Vec<Span>,
    /// Start of the recorded step.
    pub recorded_from: Picos,
    /// End of the recorded step.
    pub recorded_to: Picos,
    /// Memory.
    pub memory: MemoryReport,
    /// Collectives of the recorded step.
    pub collectives: BTreeMap<CollectiveKind, CollectiveStats>,
    /// Gaps of the compute stream in the recorded step.
    pub gaps: Vec<ExposedGap>,
    /// Exposed time by cause.
    pub exposed: BTreeMap<Cause, Picos>,
    /// Host time of the recorded step.
    pub host: Picos,
    /// Tokens per rank and step.
    pub tokens: u64,
    /// Model FLOPs utilization relative to the device's dense peak, 0 to 1; 0 if that peak is
    /// unknown.
    #[serde(with = "float")]
    pub mfu: f64,
    /// Cost sources.
    pub costs: CostSources,
    /// Losses, one per step (`exec` only).
    #[serde(with = "float::list")]
    pub losses: Vec<f64>,
    /// Gradient norms, one per step (`exec` only).
    #[serde(with = "float::list")]
    pub grad_norms: Vec<f64>,
    /// Environment: versions, devices, seeds.
    pub environment: BTreeMap<String, String>,
    /// Basis of a prediction; `None` for measured runs, and for predictions saved before the basis
    /// was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basis: Option<Basis>,
    /// The recorded step on a rank that differs from rank 0 (for recorded `sim` runs with
    /// stragglers). It is used for timelines and not stored.
    #[serde(skip)]
    pub other: Option<OtherRank>,
}

/// A step as run by a rank other than rank 0.
#[derive(Clone, Debug, PartialEq)]
pub struct OtherRank {
    /// Rank.
    pub rank: u32,
    /// Its spans, in issue order, on the same clock as [`Run::spans`]. Their blockers are indices
    /// into these spans.
    pub spans: Vec<Span>,
}
