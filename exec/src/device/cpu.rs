//! The CPU device: streams are threads with queues, events are real, and memory is an arena.
//!
//! Only streams, events and communicators order work, so a wait that is missing from a program is a
//! race on this device, just as on a GPU.

mod arena;
mod contexts;
mod events;
mod queue;
mod shapes;
mod worker;

#[cfg(feature = "cuda")]
pub(crate) use contexts::LaunchContexts;
pub(crate) use worker::first_nan;
#[cfg(feature = "cuda")]
pub(crate) use worker::sum_of_squares;

use super::{Command, Device, GraphId, NO_HYPER, Pass, Region, TaskTimes};
use crate::base::abort::{Abort, Wake, lock};
use crate::base::delay::Delays;
use crate::base::failure::{Failure, FailureKind, Stop};
use crate::base::fault::FaultKind;
use crate::base::operand::{Hyper, LaunchContext, RawRange};
use crate::base::options::{DEFAULT_QUEUE_DEPTH, DelaySpec, ExecOptions};
use crate::comm::Communicators;
use crate::kernels;
use crate::process::ProcessGroup;
use arena::Arena;
use events::Events;
use queue::{Entry, Queue};
use shapes::Shapes;
use shardlab_plan::ir::{BufferId, COMPUTE, EventId, InstrId, StreamId};
use shardlab_plan::program::{Op, Program, UnfilledWrites};
use shardlab_plan::units::Bytes;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

/// Runs a kernel. Returns a message on failure.
///
/// # Safety
/// The ranges fulfill the contract of [`RawRange`]: they are valid, and nothing else uses them
/// during the call except as the program allows.
pub type Launcher = unsafe fn(&LaunchContext<'_>, &[RawRange], &[RawRange]) -> Result<(), String>;

/// Runs a kernel of this crate.
///
/// # Safety
/// As [`Launcher`].
pub unsafe fn launch(
    context: &LaunchContext<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), String> {
    // SAFETY: the kernels' contract is the caller's.
    unsafe { crate::kernels::launch(context, reads, writes) }.map_err(|e| e.to_string())
}

/// Options of a CPU device.
#[derive(Clone, Debug)]
pub(crate) struct CpuOptions {
    /// Number of commands that a stream's queue holds before the host has to wait.
    pub queue_depth: usize,
    /// Random sleeps, if any.
    pub delay: Option<DelaySpec>,
    /// Check every output for NaN.
    pub nan_check: bool,
    /// Number of threads that a kernel of the compute stream may use.
    pub threads: usize,
    /// Rank and instruction at which a worker panics, for tests.
    pub crash: Option<(u32, InstrId)>,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            queue_depth: DEFAULT_QUEUE_DEPTH,
            delay: None,
            nan_check: false,
            threads: 1,
            crash: None,
        }
    }
}

impl From<&ExecOptions> for CpuOptions {
    fn from(options: &ExecOptions) -> Self {
        Self {
            queue_depth: options.queue_depth,
            delay: options.delay,
            nan_check: options.nan_check,
            threads: options.threads,
            crash: options
                .fault
                .filter(|f| f.kind == FaultKind::DevicePanic)
                .map(|f| (f.rank, f.instr)),
        }
    }
}

/// State that the host and the workers of a rank share.
struct Shared {
    rank: u32,
    program: Arc<Program>,
    contexts: contexts::LaunchContexts,
    queues: Vec<Queue>,
    events: Events,
    comms: Arc<Communicators>,
    abort: Arc<Abort>,
    hyper: Mutex<Hyper>,
    slots: Vec<AtomicU32>,
    recording: AtomicBool,
    times: Vec<Mutex<Vec<TaskTimes>>>,
    epoch: Instant,
    /// Outputs that the NaN check skips, if outputs are checked.
    nan_check: Option<UnfilledWrites>,
    crash: Option<InstrId>,
}

impl Shared {
    fn now(&self) -> u64 {
        self.since(Instant::now())
    }

    fn since(&self, t: Instant) -> u64 {
        t.saturating_duration_since(self.epoch).as_nanos() as u64
    }
}

impl Wake for Shared {
    fn wake(&self) {
        self.queues.iter().for_each(Wake::wake);
        self.events.wake();
    }
}

/// State that the devices of one process share.
pub(crate) struct CpuWorld {
    program: Arc<Program>,
    shapes: Arc<Shapes>,
    comms: Arc<Communicators>,
    abort: Arc<Abort>,
    /// Memory of every rank. A collective on one rank reads the memory of others, so all memory
    /// lives until the last worker has ended.
    arenas: Arc<Mutex<Vec<Arc<Arena>>>>,
    epoch: Instant,
}

impl CpuWorld {
    /// Creates the state for all ranks of a program.
    #[must_use]
    pub(crate) fn new(program: Arc<Program>, abort: Arc<Abort>) -> Self {
        let comms = Communicators::new(&program, &abort);
        Self::with(program, abort, comms)
    }

    /// Creates the state of one of several processes, each of which runs one rank.
    #[must_use]
    pub(crate) fn of_process(
        program: Arc<Program>,
        abort: Arc<Abort>,
        peers: &Arc<ProcessGroup>,
    ) -> Self {
        let comms = Communicators::between_processes(&program, &abort, peers);
        Self::with(program, abort, comms)
    }

    fn with(program: Arc<Program>, abort: Arc<Abort>, comms: Communicators) -> Self {
        Self {
            shapes: Arc::new(Shapes::new(&program)),
            comms: Arc::new(comms),
            program,
            abort,
            arenas: Arc::default(),
            epoch: Instant::now(),
        }
    }

    /// Creates the device of a rank.
    ///
    /// # Errors
    /// Returns a message if a thread cannot be started.
    pub(crate) fn device(
        &self,
        rank: u32,
        options: &CpuOptions,
        launcher: Launcher,
    ) -> Result<CpuDevice, String> {
        let program = &self.program;
        let streams = program.streams.len();
        let slots = program
            .instrs
            .iter()
            .filter(|i| matches!(i.op, Op::Launch { .. }))
            .count();
        let shared = Arc::new(Shared {
            rank,
            program: Arc::clone(program),
            contexts: contexts::LaunchContexts::with(program, &self.shapes, rank)?,
            queues: (0..streams)
                .map(|_| Queue::new(options.queue_depth, Arc::clone(&self.abort)))
                .collect(),
            events: Events::new(program.events, Arc::clone(&self.abort)),
            comms: Arc::clone(&self.comms),
            abort: Arc::clone(&self.abort),
            hyper: Mutex::new(NO_HYPER),
            slots: (0..slots
                + usize::from(program.meta.micro_batches)
                + 2 * program.params.len()
                + 2)
                .map(|_| AtomicU32::new(0))
                .collect(),
            recording: AtomicBool::new(false),
            times: (0..streams).map(|_| Mutex::default()).collect(),
            epoch: self.epoch,
            nan_check: options.nan_check.then(|| program.unfilled_writes()),
            crash: options.crash.filter(|c| c.0 == rank).map(|c| c.1),
        });
        let waker: Weak<Shared> = Arc::downgrade(&shared);
        self.abort.register(waker);
        let mut device = CpuDevice {
            shared: Arc::clone(&shared),
            workers: Vec::new(),
            arena: Arc::default(),
            arenas: Arc::clone(&self.arenas),
            graphs: Vec::new(),
            tickets: vec![0; program.communicators.len()],
        };
        for (s, stream) in program.streams.iter().enumerate() {
            let delays = options.delay.map(|d| Delays::new(d, rank, s as u32));
            let worker =
                worker::Worker::new(Arc::clone(&shared), StreamId(s as u8), launcher, delays);
            // The worker keeps the memory of all ranks alive.
            let memory = Arc::clone(&self.arenas);
            let threads = if s == COMPUTE.index() {
                options.threads
            } else {
                1
            };
            let handle = std::thread::Builder::new()
                .name(format!("r{rank} {}", stream.kind.name()))
                .spawn(move || {
                    kernels::use_threads(threads);
                    worker.run();
                    drop(memory);
                })
                .map_err(|e| format!("cannot start a thread: {e}"))?;
            device.workers.push(handle);
        }
        Ok(device)
    }
}

/// One rank on the CPU. See the module documentation.
pub struct CpuDevice {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    arena: Arc<Arena>,
    arenas: Arc<Mutex<Vec<Arc<Arena>>>>,
    graphs: Vec<Vec<(StreamId, Command)>>,
    /// Number of collectives issued, by communicator.
    tickets: Vec<u64>,
}

impl CpuDevice {
    fn enqueue(&mut self, stream: StreamId, command: Command, task: u32) -> Result<(), Stop> {
        let ticket = match command {
            Command::Collective { id, .. } => {
                let comm = self.shared.program.collectives[id.index()].comm;
                let next = &mut self.tickets[comm.index()];
                *next += 1;
                *next - 1
            }
            _ => 0,
        };
        let issued = if self.shared.recording.load(Ordering::Relaxed) {
            self.shared.now()
        } else {
            0
        };
        let entry = Entry {
            command,
            task,
            issued,
            ticket,
        };
        let instr = entry.command.instr();
        self.shared.queues[stream.index()]
            .push(entry)
            .map(|_| ())
            .map_err(|s| {
                self.timed_out(s, instr, || {
                    format!(
                        "the queue of stream {} is full",
                        self.shared.program.streams[stream.index()].kind.name()
                    )
                })
            })
    }

    /// Reports a host wait that timed out.
    fn timed_out(&self, stop: Stop, instr: InstrId, what: impl FnOnce() -> String) -> Stop {
        if stop == Stop::TimedOut {
            self.shared.abort.fail(Failure {
                kind: FailureKind::Timeout,
                rank: self.shared.rank,
                stream: None,
                instr: Some(instr),
                text: self.shared.program.op_text(instr),
                message: format!("{} after {:.1?}", what(), self.shared.abort.timeout()),
            });
        }
        Stop::Aborted
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn map(&mut self, regions: &[Region]) -> Result<(), String> {
        let touched: Bytes = regions.iter().map(|r| Bytes(r.used)).sum();
        let needed = touched * u64::from(self.shared.program.meta.mesh.world());
        if let Some(available) = available().filter(|a| needed > *a) {
            return Err(format!(
                "{} ranks need {needed} of memory, {available} are available",
                self.shared.program.meta.mesh.world()
            ));
        }
        self.arena = Arc::new(Arena::new(regions)?);
        lock(&self.arenas).push(Arc::clone(&self.arena));
        Ok(())
    }

    fn pointer(&self, address: u64, bytes: u64) -> Result<Option<*mut u8>, (FailureKind, String)> {
        Ok(self.arena.pointer(address, bytes))
    }

    fn begin(&mut self, pass: Pass) -> Result<(), Stop> {
        self.idle()?;
        self.shared.events.reset();
        *lock(&self.shared.hyper) = pass.hyper;
        let slots = self.shared.slots.iter().take(pass.slots as usize);
        slots.for_each(|s| s.store(0, Ordering::Relaxed));
        self.shared.recording.store(pass.record, Ordering::Relaxed);
        self.shared.times.iter().for_each(|t| lock(t).clear());
        Ok(())
    }

    fn submit(&mut self, stream: StreamId, command: Command, task: u32) -> Result<(), Stop> {
        self.enqueue(stream, command, task)
    }

    fn capture(&mut self, commands: Vec<(StreamId, Command)>) -> Result<GraphId, Stop> {
        self.graphs.push(commands);
        Ok(GraphId(self.graphs.len() - 1))
    }

    fn replay(&mut self, graph: GraphId, first: u32) -> Result<(), Stop> {
        let commands = std::mem::take(&mut self.graphs[graph.0]);
        let mut task = first;
        let mut result = Ok(());
        for (stream, command) in &commands {
            let is_task = command.is_task();
            result = self.enqueue(*stream, command.clone(), task);
            if result.is_err() {
                break;
            }
            task += u32::from(is_task);
        }
        self.graphs[graph.0] = commands;
        result
    }

    fn host_wait(&mut self, instr: InstrId, event: EventId) -> Result<(), Stop> {
        let waited = self.shared.events.wait(event).map(|_| ());
        waited.map_err(|s| {
            self.timed_out(s, instr, || {
                format!(
                    "event e{} has not completed ({})",
                    event.0,
                    recorder(&self.shared.program, instr, event)
                )
            })
        })
    }

    fn idle(&mut self) -> Result<(), Stop> {
        for (s, queue) in self.shared.queues.iter().enumerate() {
            if let Err(stop) = queue.idle() {
                if stop == Stop::TimedOut {
                    self.shared.abort.fail(Failure {
                        kind: FailureKind::Timeout,
                        rank: self.shared.rank,
                        stream: None,
                        instr: None,
                        text: String::new(),
                        message: format!(
                            "stream {} has not finished its work after {:.1?}",
                            self.shared.program.streams[s].kind.name(),
                            self.shared.abort.timeout()
                        ),
                    });
                }
                return Err(Stop::Aborted);
            }
        }
        Ok(())
    }

    fn is_busy(&mut self) -> bool {
        self.shared.queues.iter().any(|q| !q.is_idle())
    }

    fn slot(&self, slot: u32) -> f32 {
        f32::from_bits(self.shared.slots[slot as usize].load(Ordering::Acquire))
    }

    fn now(&self) -> u64 {
        self.shared.now()
    }

    fn times(&mut self) -> Vec<TaskTimes> {
        self.shared
            .times
            .iter()
            .flat_map(|t| std::mem::take(&mut *lock(t)))
            .collect()
    }

    fn read(&self, range: RawRange) -> Vec<u8> {
        // SAFETY: by the caller's contract, the range is backed memory that nothing in flight
        // writes.
        unsafe { std::slice::from_raw_parts(range.ptr.cast_const(), range.bytes) }.to_vec()
    }

    fn write(&mut self, range: RawRange, data: &[u8]) {
        assert_eq!(range.bytes, data.len(), "host data have the range's length");
        // SAFETY: by the caller's contract, the range is backed memory that nothing in flight uses.
        unsafe {
            range
                .ptr
                .copy_from_nonoverlapping(data.as_ptr(), data.len())
        };
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        if self.is_busy() {
            // Work in flight may wait for ranks that no longer exist.
            self.shared.abort.stop();
        }
        self.shared.queues.iter().for_each(Queue::close);
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a command, so there is no result to inspect.
            let _ = worker.join();
        }
    }
}

/// Returns the memory that the system has available, if known.
fn available() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(Bytes(kib * 1024))
}

/// Describes which instruction records an event that another instruction waits for.
fn recorder(program: &Program, waiting: InstrId, event: EventId) -> String {
    let section = program
        .sections
        .iter()
        .find(|s| s.instrs.contains(&waiting.0));
    let found = section.and_then(|s| {
        s.instrs.clone().map(InstrId).find(
            |i| matches!(program.instrs[i.index()].op, Op::Record { event: e, .. } if e == event),
        )
    });
    found.map_or_else(
        || "nothing records it".to_owned(),
        |i| format!("instruction {} `{}` records it", i.0, program.op_text(i)),
    )
}

/// Returns the first buffer that an instruction writes.
fn written_buffer(program: &Program, instr: InstrId) -> Option<BufferId> {
    let op = program.instrs[instr.index()].op;
    match op {
        Op::Launch { .. } => program.writes(&op).first().map(|a| a.buffer),
        Op::Collective { id, .. } => program.collectives[id.index()]
            .parts
            .first()
            .map(|p| p.output.buffer),
        Op::Copy { id, .. } => Some(program.copies[id.index()].to.buffer),
        _ => None,
    }
}
