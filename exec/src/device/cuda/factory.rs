//! Devices for the ranks of a session.

use super::bodies::{self, Bodies, Settings};
use super::collectives::{Alone, Collectives};
use super::context::{Context, gpus};
use super::driver::{Event, check};
use super::guard::{Guard, Means};
use super::leader::Leader;
use super::libraries::{Libraries, Library};
use super::memory::Pinned;
use super::nccl::{self, NcclCollectives};
use super::patience::Patience;
use super::places;
use super::staging::Staging;
use super::support::{SUMS, Support};
use super::{CudaDevice, SUMS_AT};
use crate::device::cpu::Delays;
use crate::device::muster::{Muster, Place};
use crate::device::{DeviceFactory, Failure, FailureKind, Setup};
use crate::engine::FaultKind;
use crate::kernels::cuda::Agree;
use cudarc::driver::sys;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::Op;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// How CUDA devices are made.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Folders to look for NVIDIA's libraries in before all others.
    pub library_path: Vec<PathBuf>,
    /// The first GPU to use among those that the driver shows.
    pub first_gpu: u32,
    /// Place of this process among those of its host: it takes as many GPUs further on.
    pub local_rank: u32,
    /// Multiply float32 matrices on tensor cores, with about three decimal digits.
    pub tf32: bool,
    /// Do without cuDNN, even where it is there.
    pub no_cudnn: bool,
    /// Processes take GPUs in turn, several the same one where there are fewer: see [`sharing`].
    ///
    /// [`sharing`]: super::sharing
    pub share_gpu: bool,
}

/// Makes CUDA devices.
#[derive(Clone, Debug, Default)]
pub struct CudaFactory {
    options: CudaOptions,
}

impl CudaFactory {
    /// With options.
    #[must_use]
    pub fn new(options: CudaOptions) -> Self {
        Self { options }
    }

    /// The device of a rank; `None` if another rank of this process could not begin, and is there to say why.
    fn device(
        &self,
        setup: &Setup,
        rank: u32,
        gpu: u32,
        (opened, ready): (Place<'_>, Place<'_>),
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
        // A slot for each launch at most, as on the CPU.
        let slots = launches + usize::from(program.meta.micro_batches) + 2;
        let mut own = 0;
        let bytes = SUMS_AT as usize + streams.len() * SUMS as usize * 8;
        // SAFETY: the driver writes an address where it is told to.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&raw mut own, bytes)
        })
        .map_err(words)?;
        let options = &setup.options;
        let settings = Settings {
            tf32: self.options.tf32,
            no_cudnn: self.options.no_cudnn,
        };
        let leader = Leader::of(setup, rank);
        let agree = leader.clone().map(|l| l as Arc<dyn Agree>);
        let kernels = bodies::open(&context, program, settings, agree)?;
        // Rank 0 waits for the facts of all.
        if !opened.come() {
            return Ok(None);
        }
        if let Some(leader) = leader {
            leader.same(&bodies::decisive(&context, settings, &kernels))?;
        }
        let bodies = Bodies::new(&context, program, settings, kernels)?;
        // What may fail comes before: the others would wait for whoever has joined and goes.
        let support = Support::new(&context)?;
        let slots = Pinned::new(&context, slots * 4).map_err(words)?;
        let records = self.records(setup)?;
        // Whoever joins a communicator is there until all have joined.
        if !ready.come() {
            return Ok(None);
        }
        let faulty = |kind| options.fault.filter(|f| f.kind == kind && f.rank == rank);
        if faulty(FaultKind::Absent).is_some() {
            setup.abort.idle_until_aborted();
            return Ok(None);
        }
        let collectives = self.collectives(setup, rank, &context)?;
        let guard = Guard::start(&setup.abort, means(setup, rank, collectives.cutter()))?;
        Ok(Some(CudaDevice {
            guard,
            rank,
            program: Arc::clone(program),
            abort: Arc::clone(&setup.abort),
            epoch: Instant::now(),
            sync: std::env::var_os("SHARDLAB_CUDA_SYNC").is_some_and(|v| v != "0"),
            nan_check: options.nan_check,
            crash: faulty(FaultKind::DevicePanic).map(|f| f.instr),
            delays: (0..streams.len())
                .map(|s| options.delay.map(|d| Delays::new(d, rank, s as u32)))
                .collect(),
            ranges: super::nvtx::Ranges::new(),
            recording: false,
            singly: false,
            records,
            before_records: None,
            recorder: None,
            times_from: None,
            marks: Vec::new(),
            passed: 0,
            graphs: Vec::new(),
            collectives,
            bodies,
            support,
            events,
            streams,
            slots,
            staging: Staging::new(&context),
            own,
            arena: None,
            context,
        }))
    }
}

impl CudaFactory {
    /// Whether times are to be CUPTI's.
    fn records(&self, setup: &Setup) -> Result<bool, String> {
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
    ) -> Result<Box<dyn Collectives>, String> {
        if !nccl::needed(&setup.program) {
            return Ok(Box::new(Alone::new(context, &setup.program)?));
        }
        let libraries = Libraries::load(&self.options.library_path).map_err(|e| e.to_string())?;
        let folders: Vec<PathBuf> = libraries.folders().iter().map(|f| f.path.clone()).collect();
        let nccl = nccl::library(&folders)?;
        let join = nccl::Join {
            program: &setup.program,
            rank,
            session: setup.session,
            peers: setup.world.peers(),
            abort: &setup.abort,
            patience: patience(setup, rank),
            registration: setup.options.registration,
            copy_engines: !self.options.share_gpu,
        };
        Ok(Box::new(NcclCollectives::join(&nccl, &join)?))
    }
}

impl DeviceFactory for CudaFactory {
    type Device = CudaDevice;

    fn devices(&self, setup: &Setup) -> Result<Vec<CudaDevice>, String> {
        let local = setup.world.local();
        let count = gpus(&self.options.library_path).map_err(|e| e.to_string())?;
        let (base, place) = (self.options.first_gpu, self.options.local_rank);
        let peers = setup.world.peers();
        let ranks = local.len() as u32;
        let first = if self.options.share_gpu {
            places::in_turn(base, place, ranks, count)?
        } else {
            let first = places::first(base, place, ranks, count, peers.processes())?;
            places::apart(peers, first..first + ranks)?;
            first
        };
        let (opened, ready) = (Muster::new(local.len()), Muster::new(local.len()));
        let made: Vec<Option<CudaDevice>> = std::thread::scope(|scope| {
            let made: Vec<_> = (first..)
                .zip(local)
                .map(|(gpu, rank)| {
                    let places = (opened.place(), ready.place());
                    scope.spawn(move || {
                        let made = self.device(setup, rank, gpu, places);
                        // Others of this process may be where they wait for this one, and no timeout ends that.
                        made.inspect_err(|e| setup.abort.fail(no_device(rank, e)))
                    })
                })
                .collect();
            let joined = made.into_iter().map(|t| {
                t.join()
                    .unwrap_or_else(|panic| Err(crate::device::cpu::panic_text(&*panic)))
            });
            joined.collect::<Result<_, String>>()
        })?;
        Ok(made.into_iter().flatten().collect())
    }
}

/// A rank whose device could not be made.
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

/// What to do about a call of the driver that does not return. Other processes hear of it here, since the rank's own thread
/// may never tell them.
fn means(setup: &Setup, rank: u32, cut: Box<dyn Fn() + Send>) -> Means {
    let (program, timeout) = (Arc::clone(&setup.program), setup.abort.timeout());
    let waited = waited(setup, rank);
    let fail = move |instr: InstrId| {
        let why = format!(
            "the driver call has not returned after {timeout:.1?}: earlier work on the device does not finish"
        );
        waited(Some(instr), program.op_text(instr), why);
    };
    Means {
        fail: Box::new(fail),
        cut,
    }
}

/// What to do where NCCL lets a rank wait for the others without an end.
fn patience(setup: &Setup, rank: u32) -> Patience {
    let waited = waited(setup, rank);
    let late = move |why: String| waited(None, String::new(), why);
    Patience::new(setup.abort.timeout(), Arc::new(late))
}

/// Ends the run, for this process and the others: a rank has waited in vain, at an instruction with its words or before the first one.
fn waited(setup: &Setup, rank: u32) -> impl Fn(Option<InstrId>, String, String) + use<> {
    let (abort, peers) = (Arc::clone(&setup.abort), Arc::clone(setup.world.peers()));
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
        let _ = peers.give_up(&words);
    }
}

/// Facts about a GPU and the libraries for a run's environment.
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
