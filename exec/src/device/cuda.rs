//! The CUDA device: streams, events, memory and graphs of an NVIDIA GPU behind the [`crate::device::Device`] seam.
//!
//! Nothing of CUDA is linked: [`Libraries`] finds and loads what is there when a GPU is asked for, so the same binary
//! starts anywhere. A rank has one GPU; its streams, events and memory are made once and used for the whole run, so that a
//! step enqueues work and does nothing else.

mod activity;
mod bodies;
mod collectives;
mod context;
mod driver;
mod factory;
mod graph;
mod guard;
mod leader;
mod leave;
pub mod libraries;
mod memory;
mod nccl;
mod nvtx;
mod patience;
mod places;
mod record;
pub mod sharing;
mod staging;
mod submit;
mod support;
mod wait;

pub use context::{Context, NoGpu, gpus};
pub use driver::CudaError;
pub use factory::{CudaFactory, CudaOptions};
pub use leave::leave;
pub use libraries::{Libraries, Library, MissingLibraries};
pub use places::room;

use super::abort::{Abort, Failure, FailureKind, Stop};
use super::cpu::Delays;
use super::{Command, Device, GraphId, Pass, Region, TaskTimes};
use crate::operand::{Hyper, RawRange};
use bodies::Bodies;
use collectives::Collectives;
use cudarc::driver::sys;
use driver::{CudaError as Error, Event, RawStream, check};
use guard::Guard;
use memory::{Arena, Pinned};
use record::Recorder;
use shardlab_plan::ir::{DType, EventId, InstrId, StreamId};
use shardlab_plan::program::Program;
use shardlab_plan::units::Bytes;
use staging::Staging;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use support::{SUMS, Support};

/// Device memory of the device's own: settings of the step, words of the NaN check, partial sums by stream.
const NAN_AT: u64 = 256;
const SUMS_AT: u64 = 512;

/// A captured scope.
struct Captured {
    shape: graph::Shape,
    exec: graph::Exec,
    /// Where a pass records times, the commands are enqueued one by one.
    commands: Vec<(StreamId, Command)>,
    /// By other stream: what was issued there before; then the graph itself.
    before: Vec<Event>,
    after: Event,
}

/// One rank on one GPU. See the module documentation.
pub struct CudaDevice {
    rank: u32,
    program: Arc<Program>,
    abort: Arc<Abort>,
    epoch: Instant,
    /// Synchronise after every command, to learn which one fails.
    sync: bool,
    nan_check: bool,
    crash: Option<InstrId>,
    delays: Vec<Option<Delays>>,
    ranges: Option<nvtx::Ranges>,
    /// The pass records times.
    recording: bool,
    /// The pass issues what was captured one by one.
    singly: bool,
    /// They are CUPTI's.
    records: bool,
    /// Bytes in use on the GPU before the first pass that was recorded: what records need is not the program's.
    before_records: Option<u64>,
    recorder: Option<Recorder>,
    /// What the last recorded pass took its times with.
    times_from: Option<&'static str>,
    /// Events in the order in which they were recorded in this pass, and how many of them are known to be done.
    marks: Vec<EventId>,
    passed: usize,
    // What follows is dropped in this order: what uses the context before it.
    guard: Guard,
    graphs: Vec<Option<Captured>>,
    collectives: Box<dyn Collectives>,
    bodies: Bodies,
    support: Support,
    events: Vec<Event>,
    streams: Vec<RawStream>,
    slots: Pinned,
    staging: Staging,
    own: sys::CUdeviceptr,
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

    /// Ends collectives in flight; whether the library has come back from it. NCCL frees a communicator only when no graph is
    /// left that has captured collectives of it, however it is told to: graphs go first. The driver keeps what is in flight of
    /// them until it has ended.
    fn cut(&mut self) -> bool {
        self.graphs.fill_with(|| None);
        self.collectives.abort()
    }

    /// A driver's error outside of any instruction.
    fn broken(&self, e: &Error) -> Stop {
        let hint = if self.sync {
            ""
        } else {
            " (kernel errors are asynchronous: SHARDLAB_CUDA_SYNC=1 names the instruction)"
        };
        let nowhere = InstrId(u32::MAX);
        self.fail(FailureKind::Kernel, None, nowhere, format!("{e}{hint}"))
    }

    fn slot_ptr(&self, slot: u32) -> *mut u32 {
        self.slots.ptr().cast::<u32>().wrapping_add(slot as usize)
    }

    fn write_hyper(&mut self, hyper: &Hyper) -> Result<(), Error> {
        let block = bodies::settings_block(hyper);
        // SAFETY: so many bytes of numbers; the device is idle, so nothing reads the destination.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.own, block.as_ptr().cast(), size_of_val(&block))
        })
    }

    fn start_pass(&mut self, pass: &Pass) -> Result<(), Error> {
        self.context.bind()?;
        self.write_hyper(&pass.hyper)?;
        self.staging.begin(&pass.inputs);
        self.marks.clear();
        self.passed = 0;
        for slot in 0..pass.slots {
            // SAFETY: a slot of pinned memory; the device is idle.
            unsafe { self.slot_ptr(slot).write_volatile(0) };
        }
        if self.nan_check {
            // SAFETY: two words of the device's own memory; the device is idle.
            check("cuMemsetD8", unsafe {
                sys::cuMemsetD8_v2(self.own + NAN_AT, 0, 8)
            })?;
            // SAFETY: likewise.
            check("cuMemsetD8", unsafe {
                sys::cuMemsetD8_v2(self.own + NAN_AT + 8, 0xff, 8)
            })?;
        }
        // The host does not wait for memory to be written, nor do our streams for the stream that writes it.
        // SAFETY: no conditions.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        self.recording = pass.record;
        self.singly = pass.singly;
        if pass.record {
            if self.recorder.is_none() {
                self.before_records = self.context.memory().ok().map(|(free, total)| total - free);
                let (streams, events) = (self.streams.len(), self.events.len());
                self.recorder = Some(Recorder::new(streams, events, self.records));
            }
            let (epoch, stream) = (self.epoch, self.streams[0]);
            if let Some(recorder) = &mut self.recorder {
                recorder.begin(stream, || epoch.elapsed().as_nanos() as u64)?;
                self.times_from = Some(recorder.source());
            }
        }
        Ok(())
    }

    /// What is there and not used, and why: libraries, cuDNN's kernels.
    fn unused(&self) -> Vec<(&'static str, String)> {
        let libraries = Libraries::load(&[]).map_or(&[][..], Libraries::refused);
        let libraries: Vec<String> = libraries
            .iter()
            .map(|(library, why)| format!("{library}: {why}"))
            .collect();
        let all = [
            ("libraries", libraries.join("; ")),
            ("cudnn", self.bodies.refused().join("; ")),
        ];
        all.into_iter().filter(|(_, why)| !why.is_empty()).collect()
    }

    /// What kernels left in the device's own memory.
    fn look_for_trouble(&mut self) -> Result<(), Stop> {
        if let Some(what) = self.bodies.fault() {
            return Err(self.fail(FailureKind::Kernel, None, InstrId(u32::MAX), what));
        }
        if self.nan_check {
            let mut found = [0u64; 2];
            // SAFETY: two words; the device is idle.
            check("cuMemcpyDtoH", unsafe {
                sys::cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), self.own + NAN_AT, 16)
            })
            .map_err(|e| self.broken(&e))?;
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
    /// Pinned memory beside the arena; none if the system refuses it.
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

    fn meet(&mut self) -> Result<(), String> {
        self.context.bind().map_err(|e| e.to_string())?;
        match &self.arena {
            Some(arena) => self.collectives.register(&arena.ranges()),
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
        self.context.bind().map_err(|e| self.broken(&e))?;
        self.idle()?;
        self.start_pass(&pass).map_err(|e| self.broken(&e))
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
        if let Some(ranges) = &mut self.ranges {
            ranges.close();
        }
        self.wait_for_streams()?;
        self.look_for_trouble()
    }

    fn is_busy(&mut self) -> bool {
        self.busy_stream().is_ok_and(|s| s.is_some())
    }

    fn cease(&mut self) -> bool {
        // Nothing can be done about errors here.
        let _ = self.context.bind();
        // Work in flight may wait for ranks that are gone.
        self.cut() && self.wait_briefly()
    }

    fn slot(&self, slot: u32) -> f32 {
        // SAFETY: a word of pinned memory, which the device writes and the host reads; both are whole words.
        let word = unsafe { AtomicU32::from_ptr(self.slot_ptr(slot)) };
        f32::from_bits(word.load(Ordering::Acquire))
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn times(&mut self) -> Vec<TaskTimes> {
        let Some(recorder) = &mut self.recorder else {
            return Vec::new();
        };
        match recorder.times() {
            Ok(times) => times,
            Err(what) => {
                self.fail(FailureKind::Kernel, None, InstrId(u32::MAX), what);
                Vec::new()
            }
        }
    }

    fn read(&self, range: RawRange) -> Vec<u8> {
        let mut data = vec![0; range.bytes];
        let done = self.context.bind().and_then(|()| {
            // SAFETY: the range is backed memory by the caller's promise; the buffer has its length.
            check("cuMemcpyDtoH", unsafe {
                sys::cuMemcpyDtoH_v2(
                    data.as_mut_ptr().cast(),
                    range.ptr.addr() as u64,
                    range.bytes,
                )
            })
        });
        if let Err(e) = done {
            self.broken(&e);
        }
        data
    }

    fn write(&mut self, range: RawRange, data: &[u8]) {
        assert_eq!(range.bytes, data.len(), "host data have the range's length");
        let done = self.context.bind().and_then(|()| {
            // SAFETY: the range is backed memory by the caller's promise; the data have its length.
            check("cuMemcpyHtoD", unsafe {
                sys::cuMemcpyHtoD_v2(range.ptr.addr() as u64, data.as_ptr().cast(), range.bytes)
            })
        });
        if let Err(e) = done {
            self.broken(&e);
        }
    }

    fn records_freely(&self) -> bool {
        false
    }

    fn facts(&mut self) -> BTreeMap<String, String> {
        let mut facts = self.bodies.facts();
        facts.extend(self.collectives.facts());
        facts.extend(factory::facts(&self.context));
        facts.extend(self.times_from.map(|s| ("times".to_owned(), s.to_owned())));
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
        self.before_records.or_else(used).map(Bytes)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Nothing can be done about errors here.
        let _ = self.context.bind();
        if self.is_busy() {
            self.abort.stop();
            // Whoever could do without the drop has asked before.
            let _ = self.cease();
        }
        self.graphs.clear();
        for s in &self.streams {
            // SAFETY: made for this device, used no more.
            let _ = unsafe { sys::cuStreamDestroy_v2(s.0) };
        }
        // SAFETY: allocated when the device was made, used no more.
        let _ = unsafe { sys::cuMemFree_v2(self.own) };
    }
}
