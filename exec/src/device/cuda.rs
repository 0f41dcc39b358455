//! The CUDA device: streams, events, memory and graphs of an NVIDIA GPU behind
//! [`crate::device::Device`].
//!
//! No CUDA library is linked: [`Libraries`] finds and loads the libraries when a GPU is requested,
//! so the same binary starts on any machine. A rank has one GPU. Its streams, events and memory are
//! created once and used for the whole run, so a step only enqueues work.

mod activity;
mod autotune_broadcast;
mod collectives;
mod context;
mod device_assignment;
mod driver;
mod driver_watchdog;
mod exit;
mod factory;
pub mod gpu_sharing;
mod graph;
mod helper_kernels;
mod host_stream;
mod kernels;
pub mod libraries;
mod memory;
mod nccl;
mod nvtx;
mod pushes;
mod record;
mod staging;
mod submit;
mod visible_gpus;
mod wait;

pub use context::{Context, GpuError, gpus};
pub use device_assignment::check_gpus;
pub use driver::CudaError;
pub use exit::exit_now;
pub use factory::{CudaFactory, CudaOptions};
pub use libraries::{Libraries, Library, MissingLibraries};
pub use visible_gpus::{Gpu, NoGpu, visible_gpus};

use super::{Command, Device, GraphId, Pass, Region, TaskTimes};
use crate::base::abort::Abort;
use crate::base::delay::Delays;
use crate::base::failure::{Failure, FailureKind, Stop};
use crate::base::operand::{Hyper, RawRange};
use crate::kernels::cuda::HyperBlock;
use collectives::Collectives;
use cudarc::driver::sys;
use driver::{CudaError as Error, Event, RawStream, check, read};
use driver_watchdog::DriverWatchdog;
use helper_kernels::{HelperKernels, SUMS};
use host_stream::HostStreams;
use kernels::KernelLauncher;
use memory::{Arena, Pinned};
use record::Recorder;
use shardlab_plan::ir::{DType, EventId, InstrId, StreamId};
use shardlab_plan::program::{Program, UnfilledWrites};
use shardlab_plan::units::Bytes;
use staging::Staging;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

// Layout of the scratch memory: settings of the step, words for the NaN check, partial sums by
// stream.
const NAN_AT: u64 = 512;
const SUMS_AT: u64 = 768;
const _: () = assert!(size_of::<HyperBlock>() <= NAN_AT as usize);

/// A captured scope.
struct Captured {
    shape: graph::Shape,
    exec: graph::Exec,
    /// Commands of the scope. They are enqueued one by one if a pass records times.
    commands: Vec<(StreamId, Command)>,
    /// By other stream: an event after the work before the graph. The graph waits for it.
    before: Vec<Event>,
    /// An event at the end of the graph. The other streams wait for it.
    after: Event,
}

/// Debugging aids and injected faults.
struct Diagnostics {
    /// Synchronize after every command, to find the one that fails.
    sync: bool,
    /// Outputs that the NaN check skips, if outputs are checked.
    nan_check: Option<UnfilledWrites>,
    /// Instruction whose task fails.
    crash: Option<InstrId>,
    /// Random delays, by stream.
    delays: Vec<Option<Delays>>,
    /// Ranges for profilers.
    ranges: Option<nvtx::Ranges>,
}

/// Measurement of task times.
struct Recording {
    /// Whether the current pass records times.
    enabled: bool,
    /// Whether the current pass replays graphs as individual commands.
    replay_as_instructions: bool,
    /// Whether times are CUPTI's.
    cupti: bool,
    recorder: Option<Recorder>,
    /// Source of the times of the last recorded pass.
    source: Option<&'static str>,
    /// Bytes in use on the GPU before the first recorded pass. Memory for records is not the
    /// program's.
    bytes_before: Option<u64>,
}

/// The queues for commands. Fields are dropped in order.
struct Queues {
    events: Vec<Event>,
    streams: Vec<RawStream>,
    /// Scalars that the device writes for the host.
    slots: Pinned,
    staging: Staging,
    /// Events in the order in which this pass recorded them.
    recorded: Vec<EventId>,
    /// Number of `recorded` events that are known to have completed.
    completed: usize,
}

/// One rank on one GPU. See the module documentation.
pub struct CudaDevice {
    rank: u32,
    program: Arc<Program>,
    abort: Arc<Abort>,
    epoch: Instant,
    diagnostics: Diagnostics,
    recording: Recording,
    // The fields below are dropped in this order: users of the context before the context.
    watchdog: DriverWatchdog,
    graphs: Vec<Option<Captured>>,
    collectives: Box<dyn Collectives>,
    kernels: KernelLauncher,
    helpers: HelperKernels,
    /// Streams whose work runs on the CPU.
    host_streams: Option<HostStreams>,
    queues: Queues,
    /// The device's own device memory; see [`NAN_AT`] and [`SUMS_AT`].
    scratch: sys::CUdeviceptr,
    arena: Option<Arena>,
    context: Arc<Context>,
}

impl CudaDevice {
    fn fail(
        &self,
        kind: FailureKind,
        stream: Option<StreamId>,
        instr: InstrId,
        message: String,
    ) -> Stop {
        let known = instr.index() < self.program.instrs.len();
        self.abort.fail(Failure {
            kind,
            rank: self.rank,
            stream: stream.map(|s| self.program.streams[s.index()].kind.name()),
            instr: known.then_some(instr),
            text: self.program.op_text(instr),
            message,
        });
        Stop::Aborted
    }

    /// Aborts collectives in flight. Returns whether the library has returned from the abort. Even
    /// when it aborts a communicator, NCCL frees it only after all graphs that captured its
    /// collectives have been dropped, so graphs are dropped first. The driver keeps their work in
    /// flight until it has ended.
    fn abort_collectives(&mut self) -> bool {
        self.graphs.fill_with(|| None);
        self.collectives.abort()
    }

    /// Reports a driver error outside of any instruction.
    fn driver_error(&self, e: &Error) -> Stop {
        let hint = if self.diagnostics.sync {
            ""
        } else {
            " (kernel errors are asynchronous: SHARDLAB_CUDA_SYNC=1 names the instruction)"
        };
        let nowhere = InstrId(u32::MAX);
        self.fail(FailureKind::Kernel, None, nowhere, format!("{e}{hint}"))
    }

    fn slot_ptr(&self, slot: u32) -> *mut u32 {
        self.queues
            .slots
            .ptr()
            .cast::<u32>()
            .wrapping_add(slot as usize)
    }

    fn write_hyper(&mut self, hyper: &Hyper) -> Result<(), Error> {
        let block = kernels::settings_block(hyper);
        // SAFETY: the length is that of the host's block; the device is idle, so nothing reads the
        // destination.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.scratch, block.as_ptr().cast(), size_of_val(&block))
        })
    }

    fn start_pass(&mut self, pass: &Pass) -> Result<(), Error> {
        self.context.bind()?;
        self.write_hyper(&pass.hyper)?;
        if let Some(host) = &self.host_streams {
            host.begin(pass.hyper, pass.record);
        }
        self.queues.staging.begin(&pass.inputs);
        self.queues.recorded.clear();
        self.queues.completed = 0;
        for slot in 0..pass.slots {
            // SAFETY: a slot of pinned memory; the device is idle.
            unsafe { self.slot_ptr(slot).write_volatile(0) };
        }
        if self.diagnostics.nan_check.is_some() {
            // SAFETY: two words of the scratch memory; the device is idle.
            check("cuMemsetD8", unsafe {
                sys::cuMemsetD8_v2(self.scratch + NAN_AT, 0, 8)
            })?;
            // SAFETY: as above.
            check("cuMemsetD8", unsafe {
                sys::cuMemsetD8_v2(self.scratch + NAN_AT + 8, 0xff, 8)
            })?;
        }
        // Neither the host nor this device's streams wait for the stream that fills the memory.
        // SAFETY: no conditions.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        self.recording.enabled = pass.record;
        self.recording.replay_as_instructions = pass.replay_as_instructions;
        if pass.record {
            if self.recording.recorder.is_none() {
                self.recording.bytes_before =
                    self.context.memory().ok().map(|(free, total)| total - free);
                let (streams, events) = (self.queues.streams.len(), self.queues.events.len());
                self.recording.recorder =
                    Some(Recorder::new(streams, events, self.recording.cupti));
            }
            let (epoch, stream) = (self.epoch, self.queues.streams[0]);
            if let Some(recorder) = &mut self.recording.recorder {
                recorder.begin(stream, || epoch.elapsed().as_nanos() as u64)?;
                self.recording.source = Some(recorder.source());
            }
        }
        Ok(())
    }

    /// Returns the libraries, cuDNN kernels and peer memory that are not used, with the reasons.
    fn unused(&self) -> Vec<(&'static str, String)> {
        let libraries = Libraries::load(&[]).map_or(&[][..], Libraries::refused);
        let libraries: Vec<String> = libraries
            .iter()
            .map(|(library, why)| format!("{library}: {why}"))
            .collect();
        let all = [
            ("libraries", libraries.join("; ")),
            ("cudnn", self.kernels.refused().join("; ")),
        ];
        let all = all.into_iter().chain(self.collectives.unused());
        all.filter(|(_, why)| !why.is_empty()).collect()
    }

    /// Checks what kernels report in the scratch memory: invalid inputs and NaN.
    fn check_kernel_errors(&mut self) -> Result<(), Stop> {
        if let Some((instr, what)) = self.kernels.input_error() {
            return Err(self.fail(FailureKind::Kernel, None, instr, what));
        }
        if self.diagnostics.nan_check.is_some() {
            let mut found = [0u64; 2];
            // SAFETY: two words; the device is idle.
            check("cuMemcpyDtoH", unsafe {
                sys::cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), self.scratch + NAN_AT, 16)
            })
            .map_err(|e| self.driver_error(&e))?;
            if found[0] != 0 {
                let instr = InstrId((found[0] - 1) as u32);
                let what = format!("element {} of an output is NaN", found[1]);
                return Err(self.fail(FailureKind::Nan, None, instr, what));
            }
        }
        Ok(())
    }
}

/// Pinned host memory for measurements.
#[derive(Debug)]
pub(crate) struct HostMemory(Pinned, usize);

impl HostMemory {
    pub(crate) fn range(&self) -> RawRange {
        RawRange {
            ptr: self.0.ptr(),
            bytes: self.1,
            dtype: DType::U8,
        }
    }
}

impl CudaDevice {
    /// Allocates pinned memory outside of the arena; `None` if the system rejects the request.
    pub(crate) fn pinned(&self, bytes: usize) -> Option<HostMemory> {
        self.context.bind().ok()?;
        Pinned::new(&self.context, bytes)
            .ok()
            .map(|p| HostMemory(p, bytes))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.context.name.clone()
    }

    fn map(&mut self, regions: &[Region]) -> Result<(), String> {
        self.context.bind().map_err(|e| e.to_string())?;
        self.arena = Some(Arena::new(&self.context, regions)?);
        Ok(())
    }

    fn register_memory(&mut self) -> Result<(), String> {
        self.context.bind().map_err(|e| e.to_string())?;
        match &self.arena {
            Some(arena) => self.collectives.register(&arena.pieces()),
            None => Ok(()),
        }
    }

    fn pointer(&self, address: u64, bytes: u64) -> Result<Option<*mut u8>, (FailureKind, String)> {
        let Some(arena) = &self.arena else {
            return Ok(None);
        };
        arena.pointer(address, bytes)
    }

    fn begin(&mut self, pass: Pass) -> Result<(), Stop> {
        self.context.bind().map_err(|e| self.driver_error(&e))?;
        self.idle()?;
        self.start_pass(&pass).map_err(|e| self.driver_error(&e))
    }

    fn submit(&mut self, stream: StreamId, command: Command, task: u32) -> Result<(), Stop> {
        self.enqueue(stream, &command, task)
    }

    fn capture(&mut self, commands: Vec<(StreamId, Command)>) -> Result<GraphId, Stop> {
        self.graphs.push(None);
        let id = GraphId(self.graphs.len() - 1);
        self.graphs[id.0] = self.make_graph(commands)?;
        Ok(id)
    }

    fn replay(&mut self, graph: GraphId, first: u32) -> Result<(), Stop> {
        let Some(mut captured) = self.graphs[graph.0].take() else {
            return Ok(());
        };
        let result = self.launch_graph(&mut captured, first);
        self.graphs[graph.0] = Some(captured);
        result
    }

    fn host_wait(&mut self, instr: InstrId, event: EventId) -> Result<(), Stop> {
        self.wait_for_event(instr, event)
    }

    fn idle(&mut self) -> Result<(), Stop> {
        if let Some(ranges) = &mut self.diagnostics.ranges {
            ranges.close();
        }
        self.wait_for_streams()?;
        self.check_kernel_errors()
    }

    fn is_busy(&mut self) -> bool {
        self.busy_stream().is_ok_and(|s| s.is_some())
    }

    fn shutdown(&mut self) -> bool {
        // Errors cannot be handled here.
        let _ = self.context.bind();
        // Work in flight may wait for ranks that no longer exist.
        self.abort_collectives() && self.wait_briefly()
    }

    fn slot(&self, slot: u32) -> f32 {
        // SAFETY: a word of pinned memory, which the device writes and the host reads; both are
        // whole words.
        let word = unsafe { AtomicU32::from_ptr(self.slot_ptr(slot)) };
        f32::from_bits(word.load(Ordering::Acquire))
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn times(&mut self) -> Vec<TaskTimes> {
        let Some(recorder) = &mut self.recording.recorder else {
            return Vec::new();
        };
        let on_cpu = self.host_streams.as_ref().map(HostStreams::times);
        match recorder.times(&on_cpu.unwrap_or_default()) {
            Ok(times) => times,
            Err(what) => {
                self.fail(FailureKind::Kernel, None, InstrId(u32::MAX), what);
                Vec::new()
            }
        }
    }

    fn read(&self, range: RawRange) -> Vec<u8> {
        // SAFETY: by the caller's contract, the range is backed memory.
        let data = self.context.bind().and_then(|()| unsafe { read(&range) });
        data.unwrap_or_else(|e| {
            self.driver_error(&e);
            vec![0; range.bytes]
        })
    }

    fn write(&mut self, range: RawRange, data: &[u8]) {
        assert_eq!(range.bytes, data.len(), "host data have the range's length");
        let done = self.context.bind().and_then(|()| {
            // SAFETY: by the caller's contract, the range is backed memory; the data have its
            // length.
            check("cuMemcpyHtoD", unsafe {
                sys::cuMemcpyHtoD_v2(range.ptr.addr() as u64, data.as_ptr().cast(), range.bytes)
            })
        });
        if let Err(e) = done {
            self.driver_error(&e);
        }
    }

    fn records_freely(&self) -> bool {
        false
    }

    fn facts(&mut self) -> BTreeMap<String, String> {
        let mut facts = self.kernels.facts();
        facts.extend(self.collectives.facts());
        facts.extend(factory::facts(&self.context));
        facts.extend(
            self.recording
                .source
                .map(|s| ("times".to_owned(), s.to_owned())),
        );
        let unused = self.unused().into_iter();
        facts.extend(unused.map(|(what, why)| (format!("{what}.refused"), why)));
        if let Some(arena) = &self.arena {
            facts.insert("arena_bytes".to_owned(), arena.bytes().0.to_string());
        }
        facts
    }

    fn notes(&self) -> Vec<String> {
        let note = |(what, why)| format!("{what} is not used: {why}");
        self.unused().into_iter().map(note).collect()
    }

    fn device_bytes(&mut self) -> Option<Bytes> {
        let used = || self.context.memory().ok().map(|(free, total)| total - free);
        self.recording.bytes_before.or_else(used).map(Bytes)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Errors cannot be handled here.
        let _ = self.context.bind();
        if self.is_busy() {
            self.abort.stop();
            // A caller that must not drop a busy device has already called `shutdown`.
            let _ = self.shutdown();
        }
        self.graphs.clear();
        for s in &self.queues.streams {
            // SAFETY: created for this device, and no longer used.
            let _ = unsafe { sys::cuStreamDestroy_v2(s.0) };
        }
        // SAFETY: allocated when the device was created, and no longer used.
        let _ = unsafe { sys::cuMemFree_v2(self.scratch) };
    }
}
