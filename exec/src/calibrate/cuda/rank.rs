//! A rank of a bench: its device, and the operations of measurements.

use super::recipe::{BASE, EVENTS, MEMORY, SIDE, Single};
use super::watch::{At, Doing, Watch};
use crate::base::operand::RawRange;
use crate::device::cuda::CudaDevice;
use crate::device::{
    Abort, Command, Device, Failure, FailureKind, NO_HYPER, Pass, Region, Stop, TaskTimes,
};
use crate::engine::step_barrier::StepBarrier;
use shardlab_plan::ir::{CollectiveId, DType, EventId, InstrId, StreamId};
use shardlab_plan::program::Program;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A rank of a bench.
pub(super) struct Rank {
    pub(super) id: u32,
    pub(super) device: CudaDevice,
    pub(super) program: Arc<Program>,
    pub(super) barrier: Arc<StepBarrier>,
    pub(super) abort: Arc<Abort>,
    pub(super) watch: Watch,
    /// State of all ranks, which they share.
    pub(super) at: Arc<Vec<At>>,
    /// Number of commands in the pass.
    pub(super) enqueued: u32,
    /// The first rank's answer to a question that all ranks ask.
    pub(super) answer: Arc<AtomicU64>,
    pub(super) ranks: u32,
}

impl Rank {
    fn doing(&self, doing: Doing) {
        self.at[self.id as usize].set(doing, self.enqueued);
    }

    /// Waits for the other ranks.
    fn wait_for_all(&mut self) -> Result<(), Stop> {
        self.doing(Doing::Rendezvous);
        self.barrier.wait(self.id, &self.abort, "come")
    }

    /// Announces a part. Only the first rank does this.
    pub(super) fn say(&self, part: &str) {
        if self.id == 0 {
            let s = if self.ranks == 1 { "" } else { "s" };
            self.watch.say(&format!("{} rank{s}, {part}", self.ranks));
        }
    }

    /// Returns whether a share of the measuring time has passed, so that the rest of a part is
    /// skipped. Returns the first rank's answer, because all ranks must do the same.
    pub(super) fn late(&mut self, share: f64, rest: &str) -> Result<bool, Stop> {
        let late = self.id == 0 && self.watch.late(share);
        if late {
            self.say(&format!("no time for {rest}"));
        }
        Ok(self.agree(f64::from(u8::from(late)))? != 0.0)
    }

    /// Returns the first rank's number. Only the first rank records times, and if a time determines
    /// what is issued, all ranks must issue the same.
    pub(super) fn agree(&mut self, mine: f64) -> Result<f64, Stop> {
        if self.id == 0 {
            self.answer.store(mine.to_bits(), Ordering::SeqCst);
        }
        self.wait_for_all()?;
        let agreed = f64::from_bits(self.answer.load(Ordering::SeqCst));
        // The next question must wait until all ranks have read this answer.
        self.wait_for_all()?;
        Ok(agreed)
    }

    /// Runs each command once, one after another on all ranks, before anything is measured. At
    /// their first use, libraries load, allocate and connect, and the driver may wait for a GPU in
    /// the process. If a collective on that GPU waited for a rank that waits for the driver,
    /// neither would end.
    pub(super) fn prime(&mut self, commands: &[(StreamId, Command)]) -> Result<(), Stop> {
        for (stream, command) in commands {
            self.begin(false)?;
            self.issue(*stream, command.clone(), 0)?;
            self.end()?;
        }
        Ok(())
    }

    /// Starts a pass when all ranks are idle. `record` records times on the first rank.
    pub(super) fn begin(&mut self, record: bool) -> Result<(), Stop> {
        self.enqueued = 0;
        self.doing(Doing::Beginning);
        self.device.begin(Pass {
            hyper: NO_HYPER,
            slots: 0,
            record: record && self.id == 0,
            replay_as_instructions: record,
            inputs: Vec::new(),
        })?;
        self.wait_for_all()?;
        self.doing(Doing::Enqueued);
        Ok(())
    }

    /// Waits until the device is idle.
    pub(super) fn end(&mut self) -> Result<Vec<TaskTimes>, Stop> {
        self.doing(Doing::Waiting);
        self.device.idle()?;
        self.doing(Doing::Reading);
        let times = if self.id == 0 {
            self.device.times()
        } else {
            Vec::new()
        };
        self.wait_for_all()?;
        Ok(times)
    }

    /// Waits until the device is idle. Returns the microseconds of every task except the first
    /// `warm`, if times were recorded.
    pub(super) fn end_us(&mut self, warm: usize) -> Result<Vec<f64>, Stop> {
        let us = |t: &TaskTimes| (t.end - t.start) as f64 / 1e3;
        Ok(self.end()?.iter().skip(warm).map(us).collect())
    }

    pub(super) fn now(&self) -> u64 {
        self.device.now()
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    fn range(&self, offset: u64, bytes: usize, dtype: DType) -> RawRange {
        RawRange {
            ptr: self
                .device
                .pointer(BASE + offset, bytes as u64)
                .ok()
                .flatten()
                .unwrap_or(std::ptr::null_mut()),
            bytes,
            dtype,
        }
    }

    pub(super) fn command(&self, s: &Single) -> Command {
        Command::Launch {
            instr: s.instr,
            kernel: s.kernel,
            reads: s.reads,
            ranges: s
                .operands
                .iter()
                .map(|&(at, bytes, dtype)| self.range(at, bytes, dtype))
                .collect(),
        }
    }

    /// Writes an operand of a kernel while the device is idle.
    pub(super) fn write(&mut self, s: &Single, operand: usize, data: &[u8]) {
        let (at, bytes, dtype) = s.operands[operand];
        let range = self.range(at, bytes, dtype);
        self.device.write(range, data);
    }

    /// Returns a collective whose operands follow those of kernels in memory.
    pub(super) fn gather(&self, id: CollectiveId) -> Command {
        let c = &self.program.collectives[id.index()];
        let (input, output) = c.kind.operand_bytes(c.bytes.0, u64::from(self.ranks));
        let from = MEMORY / 2;
        let to = from + (2 << 30);
        let parts = (
            self.range(from, input as usize, c.dtype),
            self.range(to, output as usize, c.dtype),
        );
        Command::Collective {
            instr: InstrId(0),
            id,
            parts: smallvec::smallvec![parts],
        }
    }

    /// Returns NCCL's estimate of a collective's duration in microseconds, without running it. All
    /// ranks must call it at the same time.
    pub(super) fn estimate(&mut self, command: &Command) -> Result<Option<f64>, Stop> {
        let Command::Collective { instr, id, parts } = command else {
            return Ok(None);
        };
        self.wait_for_all()?;
        self.doing(Doing::Collective);
        let told = self.device.estimate(SIDE, *instr, *id, parts)?;
        self.wait_for_all()?;
        Ok(told.map(|t| t.as_secs_f64() * 1e6).filter(|us| *us > 0.0))
    }

    pub(super) fn issue(
        &mut self,
        stream: StreamId,
        command: Command,
        task: u32,
    ) -> Result<(), Stop> {
        self.enqueued += 1;
        self.doing(match command {
            Command::Collective { .. } => Doing::Collective,
            Command::Copy { .. } => Doing::Copy,
            Command::Record { .. } | Command::Wait { .. } => Doing::Event,
            _ => Doing::Kernel,
        });
        let done = self.device.submit(stream, command, task);
        self.doing(Doing::Enqueued);
        done
    }

    pub(super) fn event(&mut self, stream: StreamId, event: u32, wait: bool) -> Result<(), Stop> {
        let (instr, event) = (InstrId(0), EventId(event % EVENTS));
        let command = if wait {
            Command::Wait { instr, event }
        } else {
            Command::Record { instr, event }
        };
        self.issue(stream, command, 0)
    }

    pub(super) fn copy(
        &mut self,
        stream: StreamId,
        from: RawRange,
        to: RawRange,
        task: u32,
    ) -> Result<(), Stop> {
        let instr = InstrId(0);
        self.issue(stream, Command::Copy { instr, from, to }, task)
    }

    /// Returns device memory for copies.
    pub(super) fn scratch(&self, bytes: usize) -> RawRange {
        self.range(MEMORY / 2, bytes, DType::U8)
    }

    pub(super) fn host_wait(&mut self, event: u32) -> Result<(), Stop> {
        self.device.host_wait(InstrId(0), EventId(event % EVENTS))
    }

    pub(super) fn device(&mut self) -> &mut CudaDevice {
        &mut self.device
    }

    /// Fills memory with numbers between 2^-7 and 2 in every 16-bit and 32-bit float type, and with
    /// numbers below 2 in every 8-bit one. No byte is a NaN.
    fn fill(&mut self) -> Result<(), Stop> {
        const PIECE: usize = 64 << 20;
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_add(u64::from(self.id));
        let words: Vec<u8> = (0..PIECE / 8)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let word = (state & 0x83bf_83bf_83bf_83bf) | 0x3c00_3c00_3c00_3c00;
                word.to_le_bytes()
            })
            .collect();
        let first = self.range(0, PIECE, DType::U8);
        self.device.write(first, &words);
        let mut at = PIECE as u64;
        while at + PIECE as u64 <= MEMORY {
            let to = self.range(at, PIECE, DType::U8);
            self.copy(SIDE, first, to, 0)?;
            at += PIECE as u64;
        }
        self.doing(Doing::Filling);
        self.device.idle()
    }
}

/// Ends the waits of other ranks if its own rank ends early, even because of a panic.
struct Leaving {
    abort: Arc<Abort>,
    at: Arc<Vec<At>>,
    rank: u32,
    well: bool,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.at[self.rank as usize].set(Doing::Leaving, 0);
        if !self.well {
            self.abort.stop();
        }
    }
}

/// Runs a rank's part of a bench. Returns `None` if this or another rank failed.
pub(super) fn perform<R, T>(
    mut rank: Rank,
    what: &R,
    on: &impl Fn(&mut Rank, &R) -> Result<T, Stop>,
) -> Option<T> {
    // Dropped before the rank, whose device shuts down cleanly only if nothing has failed.
    let mut leaving = Leaving {
        abort: Arc::clone(&rank.abort),
        at: Arc::clone(&rank.at),
        rank: rank.id,
        well: false,
    };
    let region = Region {
        addresses: BASE..BASE + MEMORY,
        used: MEMORY,
        touched: BASE + MEMORY,
    };
    rank.doing(Doing::Mapping);
    if let Err(message) = rank.device.map(&[region]) {
        rank.abort.fail(Failure {
            kind: FailureKind::Alloc,
            rank: rank.id,
            stream: None,
            instr: None,
            text: String::new(),
            message,
        });
        return None;
    }
    rank.doing(Doing::Filling);
    let done = rank.fill().and_then(|()| on(&mut rank, what));
    leaving.well = done.is_ok();
    done.ok()
}
