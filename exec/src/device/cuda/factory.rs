//! Creation of the CUDA devices of a session's ranks.

use super::autotune_broadcast::AutotuneBroadcast;
use super::collectives::{Collectives, SingleRank};
use super::context::{Context, gpus};
use super::device_assignment;
use super::driver::{Event, check};
use super::driver_watchdog::{DriverWatchdog, WatchdogActions};
use super::helper_kernels::{HelperKernels, SUMS};
use super::host_stream::HostStreams;
use super::kernels::{self, KernelLauncher, Settings};
use super::libraries::{Libraries, Library};
use super::memory::Pinned;
use super::nccl::{self, InitTimeout, NcclCollectives};
use super::pushes::{self, PushKernels, Pushes};
use super::staging::Staging;
use super::{CudaDevice, Diagnostics, Queues, Recording, SUMS_AT};
use crate::base::delay::Delays;
use crate::base::fault::FaultKind;
use crate::base::start_barrier::{StartBarrier, Ticket};
use crate::device::{DeviceFactory, Failure, FailureKind, Setup};
use crate::kernels::cuda::Agree;
use cudarc::driver::sys;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::Op;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Options of CUDA devices.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Folders that are searched for NVIDIA's libraries before all others.
    pub library_path: Vec<PathBuf>,
    /// First GPU to use, among those that the driver shows.
    pub first_gpu: u32,
    /// Index of this process among those of its host. It offsets the GPUs of the process.
    pub local_rank: u32,
    /// Multiply float32 matrices on tensor cores with TF32, which has about three decimal digits.
    pub tf32: bool,
    /// Do not use cuDNN, even if it is available.
    pub no_cudnn: bool,
    /// Do not write into the memory of other GPUs; NCCL carries pushed rows.
    pub no_peer_memory: bool,
    /// Assign GPUs to processes in turn, so that several processes may share one: see
    /// [`gpu_sharing`].
    ///
    /// [`gpu_sharing`]: super::gpu_sharing
    pub share_gpu: bool,
}

/// Creates CUDA devices.
#[derive(Clone, Debug, Default)]
pub struct CudaFactory {
    options: CudaOptions,
}

impl CudaFactory {
    /// Creates a factory with options.
    #[must_use]
    pub fn new(options: CudaOptions) -> Self {
        Self { options }
    }

    /// Creates the device of a rank. Returns `None` if another rank of this process has failed.
    /// That rank reports the error.
    fn device(
        &self,
        setup: &Setup,
        rank: u32,
        gpu: u32,
        (opened, ready): (Ticket<'_>, Ticket<'_>),
    ) -> Result<Option<CudaDevice>, String> {
        let words = |e: super::Error| e.to_string();
        let context = Context::new(gpu, &self.options.library_path).map_err(|e| e.to_string())?;
        let program = &setup.program;
        let streams = program
            .streams
            .iter()
            .map(|s| context.stream(s.priority))
            .collect::<Result<Vec<_>, _>>()
            .map_err(words)?;
        let events = (0..program.events)
            .map(|_| Event::new(false))
            .collect::<Result<Vec<_>, _>>()
            .map_err(words)?;
        let launches = program
            .instrs
            .iter()
            .filter(|i| matches!(i.op, Op::Launch { .. }))
            .count();
        // As on the CPU.
        let params = program.params.len();
        let slots = launches + usize::from(program.meta.micro_batches) + 2 * params + 2;
        let mut scratch = 0;
        let bytes = SUMS_AT as usize + streams.len() * SUMS as usize * 8;
        // SAFETY: the output is a local address.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&raw mut scratch, bytes)
        })
        .map_err(words)?;
        let options = &setup.options;
        let settings = Settings {
            tf32: self.options.tf32,
            no_cudnn: self.options.no_cudnn,
        };
        let broadcast = AutotuneBroadcast::of(setup, rank);
        let agree = broadcast.clone().map(|b| b as Arc<dyn Agree>);
        let kernels = kernels::open(&context, program, settings, (agree, rank))?;
        // All ranks of this process must arrive, because rank 0 waits for the configuration of
        // each.
        if !opened.arrive() {
            return Ok(None);
        }
        if let Some(broadcast) = broadcast {
            broadcast.check_equal(&kernels::decisive(&context, settings, &kernels))?;
        }
        let kernels = KernelLauncher::new(&context, program, settings, kernels)?;
        // Everything that may fail precedes the barrier, because the other ranks would wait for a
        // rank that joins NCCL and then fails.
        let helpers = HelperKernels::new(&context)?;
        let push_kernels = pushes::communicator(program)
            .map(|_| PushKernels::new(&context))
            .transpose()?;
        let slots = Pinned::new(&context, slots * 4).map_err(words)?;
        let epoch = Instant::now();
        let host_streams = HostStreams::new(program, rank, &setup.abort, epoch, options.threads)?;
        let cupti = self.uses_cupti(setup)?;
        // A rank that joins a communicator waits until all have joined.
        if !ready.arrive() {
            return Ok(None);
        }
        let fault = |kind| options.fault.filter(|f| f.kind == kind && f.rank == rank);
        if fault(FaultKind::Absent).is_some() {
            setup.abort.idle_until_aborted();
            return Ok(None);
        }
        let collectives = self.collectives(setup, rank, &context, push_kernels)?;
        let watchdog = DriverWatchdog::start(
            &setup.abort,
            watchdog_actions(setup, rank, collectives.aborter()),
        )?;
        Ok(Some(CudaDevice {
            rank,
            program: Arc::clone(program),
            abort: Arc::clone(&setup.abort),
            epoch,
            diagnostics: Diagnostics {
                sync: std::env::var_os("SHARDLAB_CUDA_SYNC").is_some_and(|v| v != "0"),
                nan_check: options.nan_check.then(|| program.unfilled_writes()),
                crash: fault(FaultKind::DevicePanic).map(|f| f.instr),
                delays: (0..streams.len())
                    .map(|s| options.delay.map(|d| Delays::new(d, rank, s as u32)))
                    .collect(),
                ranges: super::nvtx::Ranges::new(),
            },
            recording: Recording {
                enabled: false,
                replay_as_instructions: false,
                cupti,
                recorder: None,
                source: None,
                bytes_before: None,
            },
            watchdog,
            graphs: Vec::new(),
            collectives,
            kernels,
            helpers,
            host_streams,
            queues: Queues {
                events,
                streams,
                slots,
                staging: Staging::new(&context),
                recorded: Vec::new(),
                completed: 0,
            },
            scratch,
            arena: None,
            context,
        }))
    }
}

impl CudaFactory {
    /// Returns whether times come from CUPTI.
    fn uses_cupti(&self, setup: &Setup) -> Result<bool, String> {
        let libraries = Libraries::load(&self.options.library_path).map_err(|e| e.to_string())?;
        let ranks = setup.world.local().len();
        setup
            .options
            .times
            .records(ranks, libraries.missing(Library::Cupti))
    }

    fn collectives(
        &self,
        setup: &Setup,
        rank: u32,
        context: &Arc<Context>,
        push_kernels: Option<PushKernels>,
    ) -> Result<Box<dyn Collectives>, String> {
        if !nccl::needed(&setup.program) {
            return Ok(Box::new(SingleRank::new(context, &setup.program)?));
        }
        let libraries = Libraries::load(&self.options.library_path).map_err(|e| e.to_string())?;
        let folders: Vec<PathBuf> = libraries.folders().iter().map(|f| f.path.clone()).collect();
        let nccl = nccl::library(&folders)?;
        let join = nccl::Join {
            program: &setup.program,
            rank,
            session: setup.session,
            peers: setup.world.process_group(),
            abort: &setup.abort,
            init_timeout: init_timeout(setup, rank),
            registration: setup.options.registration,
            copy_engines: !self.options.share_gpu,
        };
        let nccl = NcclCollectives::join(&nccl, &join)?;
        let Some(kernels) = push_kernels else {
            return Ok(Box::new(nccl));
        };
        let allowed = !self.options.no_peer_memory;
        Ok(Box::new(Pushes::new(
            nccl, setup, rank, context, kernels, allowed,
        )?))
    }
}

impl DeviceFactory for CudaFactory {
    type Device = CudaDevice;

    fn devices(&self, setup: &Setup) -> Result<Vec<CudaDevice>, String> {
        let local = setup.world.local();
        let count = gpus(&self.options.library_path).map_err(|e| e.to_string())?;
        let (base, place) = (self.options.first_gpu, self.options.local_rank);
        let peers = setup.world.process_group();
        let ranks = local.len() as u32;
        let first = if self.options.share_gpu {
            device_assignment::in_turn(base, place, ranks, count)?
        } else {
            let first = device_assignment::first(base, place, ranks, count, peers.processes())?;
            device_assignment::check_distinct(peers, first..first + ranks)?;
            first
        };
        let (opened, ready) = (
            StartBarrier::new(local.len()),
            StartBarrier::new(local.len()),
        );
        let made: Vec<Option<CudaDevice>> = std::thread::scope(|scope| {
            let made: Vec<_> = (first..)
                .zip(local)
                .map(|(gpu, rank)| {
                    let tickets = (opened.ticket(), ready.ticket());
                    scope.spawn(move || {
                        let made = self.device(setup, rank, gpu, tickets);
                        // Other ranks of this process may be waiting for this rank without a
                        // timeout.
                        made.inspect_err(|e| setup.abort.fail(no_device(rank, e)))
                    })
                })
                .collect();
            let joined = made.into_iter().map(|t| {
                t.join()
                    .unwrap_or_else(|panic| Err(crate::base::failure::panic_message(&*panic)))
            });
            joined.collect::<Result<_, String>>()
        })?;
        Ok(made.into_iter().flatten().collect())
    }
}

/// Creates the failure of a rank whose device could not be created.
fn no_device(rank: u32, message: &str) -> Failure {
    Failure {
        kind: FailureKind::NoDevice,
        rank,
        stream: None,
        instr: None,
        text: String::new(),
        message: message.to_owned(),
    }
}

/// Creates the actions for a driver call that does not return. They notify other processes, because
/// the rank's own thread may never be able to.
fn watchdog_actions(setup: &Setup, rank: u32, abort: Box<dyn Fn() + Send>) -> WatchdogActions {
    let (program, timeout) = (Arc::clone(&setup.program), setup.abort.timeout());
    let report = report_timeout(setup, rank);
    let fail = move |instr: InstrId| {
        let why = format!(
            "the driver call has not returned after {timeout:.1?}: earlier work on the device does not finish"
        );
        report(Some(instr), program.op_text(instr), why);
    };
    WatchdogActions {
        fail: Box::new(fail),
        abort,
    }
}

/// Creates the limit for calls in which NCCL waits for the other ranks without a timeout.
fn init_timeout(setup: &Setup, rank: u32) -> InitTimeout {
    let report = report_timeout(setup, rank);
    let late = move |why: String| report(None, String::new(), why);
    InitTimeout::new(setup.abort.timeout(), Arc::new(late))
}

/// Returns a function that ends the run in this process and the others because a wait timed out: at
/// an instruction with its text, or before the first instruction.
fn report_timeout(setup: &Setup, rank: u32) -> impl Fn(Option<InstrId>, String, String) + use<> {
    let (abort, group) = (
        Arc::clone(&setup.abort),
        Arc::clone(setup.world.process_group()),
    );
    move |instr, text, message| {
        let failure = Failure {
            kind: FailureKind::Timeout,
            rank,
            stream: None,
            instr,
            text,
            message,
        };
        let words = failure.to_string();
        abort.fail(failure);
        let _ = group.fail_timed_out(&words);
    }
}

/// Returns facts about a GPU and the libraries for a run's environment.
pub(super) fn facts(context: &Context) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut fact = |k: &str, v: String| facts.insert(k.to_owned(), v);
    fact("gpu", context.name.clone());
    let (major, minor) = context.capability;
    fact("gpu.capability", format!("{major}.{minor}"));
    fact("gpu.multiprocessors", context.multiprocessors.to_string());
    let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    fact("cuda.driver", version(context.driver));
    if let Ok((free, total)) = context.memory() {
        fact("gpu.memory_bytes", total.to_string());
        fact("gpu.memory_used_bytes", (total - free).to_string());
    }
    facts.extend(super::libraries::versions());
    facts
}
