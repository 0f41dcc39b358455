//! Work of CPU streams: operators on operands in pinned memory, run as host functions of the
//! driver.
//!
//! The driver calls a host function after the earlier work of its CUDA stream has completed, and
//! starts later work after it has returned. Events therefore order the CPU and the GPU as they
//! order streams. A host function must not call the driver.

use super::driver::{CudaError, RawStream, check};
use crate::base::abort::{Abort, lock};
use crate::base::failure::{Failure, FailureKind, panic_message};
use crate::base::operand::{Hyper, NO_HYPER};
use crate::device::Command;
use crate::device::cpu::{LaunchContexts, sum_of_squares};
use crate::kernels;
use cudarc::driver::sys;
use shardlab_plan::ir::StreamId;
use shardlab_plan::program::{Program, StreamKind};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Start and end of tasks on the CPU, by task, in nanoseconds since the device's epoch.
pub(super) type HostTimes = BTreeMap<u32, (u64, u64)>;

/// State that a rank shares with its host functions.
struct Shared {
    rank: u32,
    contexts: LaunchContexts,
    abort: Arc<Abort>,
    epoch: Instant,
    /// Number of threads that a kernel may use.
    threads: usize,
    hyper: Mutex<Hyper>,
    recording: AtomicBool,
    times: Mutex<HostTimes>,
}

/// The CPU streams of a rank.
pub(super) struct HostStreams {
    shared: Arc<Shared>,
}

/// A command that is passed to a host function.
struct Work {
    shared: Arc<Shared>,
    command: Command,
    task: u32,
    /// Word of pinned memory that receives a scalar.
    slot: *mut u32,
}

impl HostStreams {
    /// Returns the CPU streams of a rank; `None` if its program has none.
    ///
    /// # Errors
    /// Returns a message if a launch's operands are not those of parameters.
    pub(super) fn new(
        program: &Arc<Program>,
        rank: u32,
        abort: &Arc<Abort>,
        epoch: Instant,
        threads: usize,
    ) -> Result<Option<Self>, String> {
        if !program.streams.iter().any(|s| s.kind == StreamKind::Cpu) {
            return Ok(None);
        }
        Ok(Some(Self {
            shared: Arc::new(Shared {
                rank,
                contexts: LaunchContexts::new(program, rank)?,
                abort: Arc::clone(abort),
                epoch,
                threads,
                hyper: Mutex::new(NO_HYPER),
                recording: AtomicBool::new(false),
                times: Mutex::default(),
            }),
        }))
    }

    /// Starts a pass on an idle device.
    pub(super) fn begin(&self, hyper: Hyper, record: bool) {
        *lock(&self.shared.hyper) = hyper;
        self.shared.recording.store(record, Ordering::Relaxed);
        lock(&self.shared.times).clear();
    }

    /// Returns the times of the tasks of the pass.
    pub(super) fn times(&self) -> HostTimes {
        lock(&self.shared.times).clone()
    }

    /// Returns whether a command is for the CPU. All commands are, except events and data from the
    /// host, which the driver handles on every stream.
    pub(super) fn takes(&self, stream: StreamId, command: &Command) -> bool {
        let streams = &self.shared.contexts.program().streams;
        streams[stream.index()].kind == StreamKind::Cpu
            && matches!(
                command,
                Command::Launch { .. }
                    | Command::Copy { .. }
                    | Command::Fill { .. }
                    | Command::Squares { .. }
                    | Command::Read { .. }
            )
    }

    /// Enqueues a command that [`Self::takes`] accepts. `slot` is where a scalar is written, in
    /// pinned memory that lives until the device is idle.
    pub(super) fn enqueue(
        &self,
        command: &Command,
        task: u32,
        slot: *mut u32,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let work = Box::new(Work {
            shared: Arc::clone(&self.shared),
            command: command.clone(),
            task,
            slot,
        });
        let data = Box::into_raw(work);
        // SAFETY: the stream is alive, and `run` gets the box, which nothing else uses.
        let enqueued = check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(stream.0, Some(run), data.cast())
        });
        if enqueued.is_err() {
            // SAFETY: the driver has rejected the function, so it never gets the box.
            drop(unsafe { Box::from_raw(data) });
        }
        enqueued
    }
}

/// Runs a command when its turn has come.
unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: `enqueue` passes a box, once.
    let work = unsafe { Box::from_raw(data.cast::<Work>()) };
    let shared = Arc::clone(&work.shared);
    if shared.abort.aborted() {
        return;
    }
    let (instr, task) = (work.command.instr(), work.task);
    let running = shared.abort.running();
    let start = shared.epoch.elapsed();
    // A panic must not reach the driver.
    let result = catch_unwind(AssertUnwindSafe(|| work.execute()));
    let end = shared.epoch.elapsed();
    drop(running);
    let (kind, message) = match result {
        Ok(Ok(())) => {
            shared.abort.progressed();
            if shared.recording.load(Ordering::Relaxed) {
                let span = (start.as_nanos() as u64, end.as_nanos() as u64);
                lock(&shared.times).insert(task, span);
            }
            return;
        }
        Ok(Err(message)) => (FailureKind::Kernel, message),
        Err(panic) => (FailureKind::Panic, panic_message(&*panic)),
    };
    shared.abort.fail(Failure {
        kind,
        rank: shared.rank,
        stream: Some(StreamKind::Cpu.name()),
        instr: Some(instr),
        text: shared.contexts.program().op_text(instr),
        message,
    });
}

impl Work {
    fn execute(&self) -> Result<(), String> {
        match self.command {
            Command::Launch {
                instr,
                kernel,
                reads,
                ref ranges,
            } => {
                let hyper = *lock(&self.shared.hyper);
                let context = self.shared.contexts.of(instr, kernel, hyper);
                let (reads, writes) = ranges.split_at(reads as usize);
                kernels::use_threads(self.shared.threads);
                // SAFETY: the interpreter's contract for ranges that it submits. Buffers of a CPU
                // stream are in pinned memory.
                unsafe { kernels::launch(&context, reads, writes) }.map_err(|e| e.to_string())?;
            }
            Command::Copy { from, to, .. } => {
                // SAFETY: as above; `copy` allows overlap.
                unsafe { from.ptr.cast_const().copy_to(to.ptr, to.bytes) };
            }
            Command::Fill { to, byte, .. } => {
                // SAFETY: as above.
                unsafe { to.ptr.write_bytes(byte, to.bytes) };
            }
            Command::Squares { ref from, .. } => {
                // SAFETY: as above; nothing writes what an optimizer has read before the next
                // backward pass.
                let sum = unsafe { sum_of_squares(from) };
                self.write_slot(sum.to_bits());
            }
            Command::Read { from, .. } => {
                // SAFETY: as above, for four bytes of float32.
                self.write_slot(unsafe { from.ptr.cast::<u32>().read_unaligned() });
            }
            _ => return Err("not a command for the CPU".to_owned()),
        }
        Ok(())
    }

    fn write_slot(&self, bits: u32) {
        // SAFETY: an aligned word that lives until the device is idle; the host reads whole words.
        unsafe { AtomicU32::from_ptr(self.slot) }.store(bits, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::failure::FailureKind;
    use crate::base::operand::RawRange;
    use shardlab_plan::ir::{COMPUTE, DType, InstrId, KernelId};
    use shardlab_plan::program::Op;
    use smallvec::smallvec;
    use std::time::Duration;

    fn program(sets: &[&str]) -> Arc<Program> {
        let sets: Vec<String> = sets.iter().map(|&s| s.to_owned()).collect();
        let scenario = shardlab_plan::scenario::load("small-fsdp2".as_ref(), &sets).unwrap();
        Arc::new(shardlab_plan::plan(&scenario).unwrap())
    }

    fn streams(program: &Arc<Program>) -> (Option<HostStreams>, Arc<Abort>) {
        let abort = Arc::new(Abort::new(Duration::from_secs(1)));
        let made = HostStreams::new(program, 0, &abort, Instant::now(), 1);
        (made.unwrap(), abort)
    }

    /// Calls a host function as the driver does.
    fn call(streams: &HostStreams, command: Command, slot: *mut u32) {
        let work = Box::new(Work {
            shared: Arc::clone(&streams.shared),
            command,
            task: 7,
            slot,
        });
        // SAFETY: the box is passed once.
        unsafe { run(Box::into_raw(work).cast()) };
    }

    fn floats(of: &mut [f32]) -> RawRange {
        RawRange {
            ptr: of.as_mut_ptr().cast(),
            bytes: size_of_val(of),
            dtype: DType::F32,
        }
    }

    const OFFLOAD: &str = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";

    #[test]
    fn only_work_of_cpu_streams_is_taken() {
        assert!(streams(&program(&[])).0.is_none());
        let program = program(&[OFFLOAD]);
        let (host, _) = streams(&program);
        let host = host.unwrap();
        let cpu = program
            .streams
            .iter()
            .position(|s| s.kind == StreamKind::Cpu);
        let cpu = StreamId(cpu.unwrap() as u8);
        let instr = InstrId(0);
        let launch = Command::Launch {
            instr,
            kernel: KernelId(0),
            reads: 0,
            ranges: smallvec![],
        };
        assert!(host.takes(cpu, &launch) && !host.takes(COMPUTE, &launch));
        let event = shardlab_plan::ir::EventId(0);
        assert!(!host.takes(cpu, &Command::Record { instr, event }));
        assert!(!host.takes(cpu, &Command::Wait { instr, event }));
        // The optimizer is there.
        let on_cpu = |op: &Op| matches!(op, Op::Launch { stream, .. } if *stream == cpu);
        assert!(program.instrs.iter().any(|i| on_cpu(&i.op)));
    }

    /// Copies are tasks with times; sums of squares are written to their slot.
    #[test]
    fn commands_run_on_the_cpu() {
        let (host, abort) = streams(&program(&[OFFLOAD]));
        let host = host.unwrap();
        let (mut from, mut to, mut slot) = ([3.0_f32, 4.0], [0.0_f32; 2], 0_u32);
        let instr = InstrId(0);
        let copy = Command::Copy {
            instr,
            from: floats(&mut from),
            to: floats(&mut to),
        };
        host.begin(NO_HYPER, true);
        call(&host, copy, std::ptr::null_mut());
        assert_eq!(to, [3.0, 4.0]);
        let times = host.times();
        assert!(times[&7].0 <= times[&7].1 && times.len() == 1);
        let squares = Command::Squares {
            instr,
            from: smallvec![floats(&mut to)],
            slot: 0,
        };
        call(&host, squares, &raw mut slot);
        assert_eq!(f32::from_bits(slot), 25.0);
        host.begin(NO_HYPER, false);
        assert!(host.times().is_empty());
        assert!(!abort.aborted());
    }

    /// An error ends the run, and functions that the driver calls after it do nothing.
    #[test]
    fn a_failure_ends_the_run() {
        let (host, abort) = streams(&program(&[OFFLOAD]));
        let host = host.unwrap();
        let (mut from, mut to) = ([1.0_f32], [0.0_f32]);
        let launch = Command::Launch {
            instr: InstrId(0),
            kernel: KernelId(0),
            reads: 0,
            ranges: smallvec![],
        };
        call(&host, launch, std::ptr::null_mut());
        let failure = abort.failures().remove(0);
        assert!(matches!(
            failure.kind,
            FailureKind::Kernel | FailureKind::Panic
        ));
        assert_eq!(failure.stream, Some("cpu"));
        let copy = Command::Copy {
            instr: InstrId(0),
            from: floats(&mut from),
            to: floats(&mut to),
        };
        call(&host, copy, std::ptr::null_mut());
        assert_eq!(to, [0.0]);
    }
}
