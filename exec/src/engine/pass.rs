//! Inputs and results of one pass of a rank over a section of the program.

use super::step::{RankInputs, RankTimes};
use super::step_barrier::StepBarrier;
use crate::base::operand::Hyper;
use crate::device::TaskTimes;
use crate::process::{Reader, Writer};
use shardlab_plan::ir::{EventId, InstrId, StreamId};
use shardlab_plan::memory::PassPeaks;
use shardlab_plan::program::SectionKind;
use shardlab_plan::record::MemorySample;
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;
use std::time::Duration;

/// A task that the host has issued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issued {
    pub(crate) instr: InstrId,
    pub(crate) stream: StreamId,
    /// Index in issue order.
    pub(crate) number: u32,
}

/// Result of a pass of a local rank.
#[derive(Clone, Debug)]
pub(crate) struct PassReport {
    pub(crate) section: SectionKind,
    /// Start of the pass, in nanoseconds of the device's clock.
    pub(crate) start: u64,
    /// When the host had issued everything.
    pub(crate) issued_at: u64,
    /// When the device was idle.
    pub(crate) end: u64,
    /// Part of the issue time in which the host waited for events or for space in the device's
    /// queue.
    pub(crate) waited: u64,
    pub(crate) memory: PassPeaks,
    pub(crate) losses: Vec<f32>,
    /// Square of the global gradient norm, if the program computes it.
    pub(crate) square: Option<f32>,
    /// Sum of squares of the gradients that the optimizer reads, if it is requested.
    pub(crate) squares: f64,
    /// Sums of squares of the requested parts of gradients.
    pub(crate) part_squares: Vec<f32>,
    /// Choices of each expert, by layer of experts and micro-batch in the order of launches, if
    /// they are counted.
    pub(crate) counts: Vec<Vec<u32>>,
    pub(crate) tasks: Vec<Issued>,
    pub(crate) times: Vec<TaskTimes>,
    /// By event: the last task that was issued before it on its stream.
    pub(crate) behind: BTreeMap<EventId, u32>,
    pub(crate) samples: Vec<MemorySample>,
}

impl PassReport {
    /// Returns the nanoseconds in which the host issued work, without waits.
    pub(crate) fn host(&self) -> u64 {
        let issuing = self.issued_at.saturating_sub(self.start);
        issuing.saturating_sub(self.waited)
    }
}

/// Inputs of a pass.
#[derive(Clone, Copy)]
pub(crate) struct PassInputs<'a> {
    pub(crate) step: u32,
    pub(crate) hyper: Hyper,
    pub(crate) inputs: &'a RankInputs,
    pub(crate) record: bool,
    /// As [`Pass::replay_as_instructions`](crate::device::Pass::replay_as_instructions).
    pub(crate) replay_as_instructions: bool,
    /// Barrier of all ranks after their devices have begun the pass and after they have ended it.
    pub(crate) barrier: Option<&'a StepBarrier>,
}

/// Result of a rank's pass that all processes receive.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankPass {
    pub(crate) losses: Vec<f32>,
    /// Square of the global gradient norm, if the program computes it.
    pub(crate) square: Option<f32>,
    /// Sum of squares of the gradients that the optimizer reads, if it is requested.
    pub(crate) squares: f64,
    /// Sums of squares of the requested parts of gradients.
    pub(crate) part_squares: Vec<f32>,
    /// Choices of each expert, by layer of experts and micro-batch in the order of launches, if
    /// they are counted.
    pub(crate) counts: Vec<Vec<u32>>,
    /// Nanoseconds.
    pub(crate) duration: u64,
    /// Nanoseconds in which the host issued work, without waits.
    pub(crate) host: u64,
    pub(crate) peak_allocated: Bytes,
    pub(crate) peak_reserved: Bytes,
}

impl RankPass {
    /// Summarizes the report of a local rank.
    pub(crate) fn of(report: &PassReport) -> Self {
        Self {
            losses: report.losses.clone(),
            square: report.square,
            squares: report.squares,
            part_squares: report.part_squares.clone(),
            counts: report.counts.clone(),
            duration: report.end.saturating_sub(report.start),
            host: report.host(),
            peak_allocated: report.memory.peak_allocated,
            peak_reserved: report.memory.peak_reserved,
        }
    }

    /// Returns times and memory as those of rank `rank`.
    pub(crate) fn times(&self, rank: u32) -> RankTimes {
        RankTimes {
            rank,
            time: Duration::from_nanos(self.duration),
            host: Duration::from_nanos(self.host),
            peak_allocated: self.peak_allocated,
            peak_reserved: self.peak_reserved,
        }
    }

    /// Encodes the result for another process.
    pub(crate) fn write(&self, w: &mut Writer) {
        w.u32(self.losses.len() as u32);
        self.losses.iter().for_each(|&l| w.f32(l));
        w.u8(u8::from(self.square.is_some()));
        w.f32(self.square.unwrap_or(0.0));
        w.f64(self.squares);
        w.u32(self.part_squares.len() as u32);
        self.part_squares.iter().for_each(|&s| w.f32(s));
        w.u32(self.counts.len() as u32);
        for layer in &self.counts {
            w.u32(layer.len() as u32);
            layer.iter().for_each(|&n| w.u32(n));
        }
        w.u64(self.duration);
        w.u64(self.host);
        w.u64(self.peak_allocated.0);
        w.u64(self.peak_reserved.0);
    }

    /// Decodes the result of another process; `None` if the data are invalid.
    pub(crate) fn read(r: &mut Reader<'_>) -> Option<Self> {
        let losses = r.list(Reader::f32)?;
        let has = r.u8()? != 0;
        let square = r.f32()?;
        Some(Self {
            losses,
            square: has.then_some(square),
            squares: r.f64()?,
            part_squares: r.list(Reader::f32)?,
            counts: r.list(|r| r.list(Reader::u32))?,
            duration: r.u64()?,
            host: r.u64()?,
            peak_allocated: Bytes(r.u64()?),
            peak_reserved: Bytes(r.u64()?),
        })
    }
}
