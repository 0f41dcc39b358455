//! All ranks of a program, step by step.

use super::exchange::exchange;
use super::gate::Gate;
use super::live::Live;
use super::rank::{PassInputs, PassReport, Rank, plan_regions};
use super::report::{self, Log};
use super::standing::{Standings, apart};
use super::{ExecError, ExecOptions, World};
use crate::device::cpu::{CpuDevice, Launcher, panic_text};
use crate::device::muster::{Muster, Place};
use crate::device::{
    Abort, CpuFactory, Device, DeviceFactory, Failure, FailureKind, NO_HYPER, Setup,
};
use crate::operand::Hyper;
use shardlab_plan::ir::{BufferId, ConstId};
use shardlab_plan::memory::Counters;
use shardlab_plan::program::{Program, Section, SectionKind};
use shardlab_plan::record::{MemorySample, Run, Span, StepRecord};
use shardlab_plan::units::Bytes;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Inputs of one rank: by micro-batch, the bytes of each constant that is new in every micro-batch.
#[derive(Clone, Debug, Default)]
pub struct RankInputs {
    /// By micro-batch.
    pub micro_batches: Vec<Vec<(ConstId, Arc<[u8]>)>>,
}

impl RankInputs {
    pub(crate) fn get(&self, micro_batch: u16, id: ConstId) -> Option<&Arc<[u8]>> {
        let list = self.micro_batches.get(usize::from(micro_batch))?;
        list.iter().find(|(c, _)| *c == id).map(|(_, data)| data)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<[u8]>> {
        self.micro_batches.iter().flatten().map(|(_, data)| data)
    }

    /// Whether they take so long to make that the time by which ranks differ in it could be seen in a step.
    fn are_large(&self) -> bool {
        self.all().map(|data| data.len()).sum::<usize>() > LARGE
    }
}

/// Bytes of one rank's inputs of a step beyond which they are large: a few times those of a long batch of tokens.
const LARGE: usize = 4 << 20;

/// Inputs of a step, by rank.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// By rank of the world; those of other processes' ranks are not looked at.
    pub ranks: Vec<RankInputs>,
}

/// One rank's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankTimes {
    /// Rank.
    pub rank: u32,
    /// Begin to end.
    pub time: Duration,
    /// Part of it in which the host issued, waits left out.
    pub host: Duration,
    /// Peak of allocated bytes.
    pub peak_allocated: Bytes,
    /// Peak of reserved bytes.
    pub peak_reserved: Bytes,
}

/// What a step (or a validation pass) yields.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// By rank and micro-batch.
    pub losses: Vec<Vec<f32>>,
    /// Mean over ranks and micro-batches.
    pub loss: f64,
    /// Global gradient norm before clipping, where the program computes it.
    pub grad_norm: Option<f64>,
    /// By rank: sum of squares of the gradients that its optimizer was given (see [`ExecOptions::grad_squares`]). Ranks
    /// may hold copies of one another's.
    pub grad_squares: Vec<f64>,
    /// Times (of the slowest rank) and memory peaks.
    pub record: StepRecord,
    /// Ranks of all processes, in rank order.
    pub ranks: Vec<RankTimes>,
    /// Spans of this process's first rank, if asked for.
    pub spans: Vec<Span>,
    /// That rank's memory after every allocation and free, if asked for.
    pub samples: Vec<MemorySample>,
}

/// A program on devices, one for each rank of this process. Dropping it ends all threads.
pub struct Session<D: Device = CpuDevice> {
    program: Arc<Program>,
    options: Arc<ExecOptions>,
    abort: Arc<Abort>,
    world: World,
    standings: Arc<Standings>,
    /// By place in [`World::local`].
    ranks: Vec<Rank<D>>,
    /// Training steps done in this session.
    done: u32,
    /// Number of the session's first step in the training run.
    first_step: u32,
    /// Whether passes are recorded now, where the options ask for it.
    recording: bool,
    log: Log,
}

impl Session<CpuDevice> {
    /// Sets up all ranks on the CPU, in this process, and runs `Init`. Persistent buffers hold zeros.
    ///
    /// # Errors
    /// [`ExecError`].
    pub fn new(program: Arc<Program>, options: ExecOptions) -> Result<Self, ExecError> {
        let world = World::alone(&program);
        Self::open(program, options, world, &CpuFactory::default())
    }

    /// Likewise, with kernels from elsewhere.
    ///
    /// # Errors
    /// [`ExecError`].
    pub fn with_launcher(
        program: Arc<Program>,
        options: ExecOptions,
        launcher: Launcher,
    ) -> Result<Self, ExecError> {
        let world = World::alone(&program);
        Self::open(
            program,
            options,
            world,
            &CpuFactory::with_launcher(launcher),
        )
    }
}

impl<D: Device> Session<D> {
    /// Sets up this process's ranks of a world on devices of a kind, and runs `Init`. Persistent buffers hold zeros.
    ///
    /// # Errors
    /// [`ExecError`].
    pub fn open<F: DeviceFactory<Device = D>>(
        program: Arc<Program>,
        options: ExecOptions,
        world: World,
        factory: &F,
    ) -> Result<Self, ExecError> {
        check(&program)?;
        let standings = standings(&program, &options, &world);
        let abort = Arc::new(Abort::new(options.timeout));
        let setup = Setup {
            program,
            options: Arc::new(options),
            abort,
            session: world.peers().next_session(),
            world,
        };
        setup.world.peers().watch(&setup.abort, &standings);
        let devices = factory.devices(&setup).map_err(|e| {
            setup.world.peers().fail(&e);
            ExecError::Device(e)
        })?;
        Self::begin(setup, devices, standings)
    }

    /// Runs `Init` on given devices, one a rank in rank order, all in this process, which report failures to `abort`.
    ///
    /// # Errors
    /// [`ExecError`].
    pub fn with_devices(
        program: Arc<Program>,
        options: ExecOptions,
        abort: Arc<Abort>,
        devices: Vec<D>,
    ) -> Result<Self, ExecError> {
        check(&program)?;
        let world = World::alone(&program);
        let standings = standings(&program, &options, &world);
        let setup = Setup {
            world,
            program,
            options: Arc::new(options),
            abort,
            session: 0,
        };
        Self::begin(setup, devices, standings)
    }

    fn begin(setup: Setup, devices: Vec<D>, standings: Arc<Standings>) -> Result<Self, ExecError> {
        let Setup {
            program,
            options,
            abort,
            world,
            ..
        } = setup;
        let regions = plan_regions(&program, &options);
        let muster = Muster::new(world.local().len().min(devices.len()));
        // Before the rank's device is dropped, which takes leave of the others in good order unless it knows: they may be where
        // they wait for this one, and no timeout ends that.
        let leaving = |e: ExecError| {
            world.peers().fail(&e.to_string());
            abort.stop();
            e
        };
        // `None`: another one has failed, and is there to say why.
        let new = |id, device: D, place: Place<'_>| {
            let rank = Rank::new(id, &standings, &options, &abort, device, &regions, &leaving);
            let mut rank = rank?;
            if !place.come() {
                return Ok(None);
            }
            let met = rank.device.meet();
            met.map_err(|e| leaving(ExecError::Device(e)))?;
            Ok(Some(rank))
        };
        let new = &new;
        let ranks: Vec<_> = std::thread::scope(|scope| {
            let made: Vec<_> = world
                .local()
                .zip(devices)
                .map(|(id, device)| {
                    let place = muster.place();
                    scope.spawn(move || new(id, device, place))
                })
                .collect();
            let joined = made.into_iter().map(|t| match t.join() {
                Ok(rank) => rank,
                Err(panic) => Err(ExecError::Device(panic_text(&*panic))),
            });
            joined.collect::<Result<_, ExecError>>()
        })?;
        let ranks = ranks.into_iter().flatten().collect();
        let mut session = Self {
            log: Log::default(),
            program,
            options,
            abort,
            world,
            standings,
            ranks,
            done: 0,
            first_step: 0,
            recording: true,
        };
        let none = StepInputs::default();
        session.pass(SectionKind::Init, &none, NO_HYPER)?;
        Ok(session)
    }

    /// All ranks, those of this process, and the way to the others.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// Training steps done in this session.
    #[must_use]
    pub fn steps_done(&self) -> u32 {
        self.done
    }

    /// Numbers the session's first step, for records of a resumed run.
    pub fn set_first_step(&mut self, step: u32) {
        self.first_step = step;
    }

    /// Whether recording changes times so little that every step may be recorded.
    #[must_use]
    pub fn records_freely(&self) -> bool {
        self.ranks.iter().all(|r| r.device.records_freely())
    }

    /// Records passes from now on, or does not, where the options ask for records at all.
    pub fn set_recording(&mut self, on: bool) {
        self.recording = on;
    }

    /// Runs one training step on all ranks and waits for it.
    ///
    /// # Errors
    /// [`ExecError::Failed`] if any rank fails; the session cannot go on then.
    pub fn step(&mut self, inputs: &StepInputs, hyper: Hyper) -> Result<StepResult, ExecError> {
        let kind = if self.done == 0 {
            SectionKind::First
        } else {
            SectionKind::Steady
        };
        let result = self.pass(kind, inputs, hyper)?;
        self.done += 1;
        Ok(result)
    }

    /// Runs a validation pass on all ranks: one micro-batch of inputs each.
    ///
    /// # Errors
    /// As [`Session::step`]; also if the program has no validation.
    pub fn validate(&mut self, inputs: &StepInputs) -> Result<StepResult, ExecError> {
        self.pass(SectionKind::Validation, inputs, NO_HYPER)
    }

    fn pass(
        &mut self,
        kind: SectionKind,
        inputs: &StepInputs,
        hyper: Hyper,
    ) -> Result<StepResult, ExecError> {
        if self.abort.aborted() {
            return Err(self.failed());
        }
        let program = Arc::clone(&self.program);
        let section = program
            .section(kind)
            .ok_or_else(|| ExecError::Input(format!("the program has no {kind:?} section")))?;
        let none = RankInputs::default();
        let step = self.first_step + self.done;
        let record = self.options.record && self.recording && kind != SectionKind::Init;
        let first = self.world.local().start as usize;
        // What is made, and brought near the device, before the pass begins is none of its time.
        let local = inputs.ranks.get(first..).unwrap_or_default();
        let large = local.first().is_some_and(RankInputs::are_large);
        let gate = (large || record && !self.records_freely())
            .then(|| Gate::new(self.ranks.len(), self.world.peers(), &self.abort));
        let of = |index: usize| PassInputs {
            step,
            hyper,
            inputs: inputs.ranks.get(first + index).unwrap_or(&none),
            record: record && index == 0,
            singly: record,
            gate: gate.as_deref(),
        };
        let abort = &self.abort;
        let mut reports: Vec<Option<PassReport>> = match self.ranks.as_mut_slice() {
            [one] => vec![run_rank(one, section, of(0), abort)],
            many => std::thread::scope(|scope| {
                let threads: Vec<_> = many
                    .iter_mut()
                    .enumerate()
                    .map(|(r, rank)| {
                        let with = of(r);
                        scope.spawn(move || run_rank(rank, section, with, abort))
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|t| t.join().ok().flatten())
                    .collect()
            }),
        };
        if self.abort.aborted() || reports.iter().any(Option::is_none) {
            return Err(self.failed());
        }
        let reports: Vec<PassReport> = reports.drain(..).flatten().collect();
        let all = exchange(&self.world, &reports)?;
        Ok(self.log.add(&self.program, step, &reports, &all))
    }

    /// What went wrong, which the other processes are told as well.
    fn failed(&self) -> ExecError {
        let (mut failures, peers) = (self.abort.failures(), self.world.peers());
        if let Some(first) = failures.first_mut() {
            if first.kind == FailureKind::Timeout {
                // The store knows the places of all processes' ranks.
                let apart = match peers.processes() {
                    1 => apart(&self.standings.now()),
                    _ => peers.give_up(&first.to_string()),
                };
                first.message.push_str(&apart);
            } else {
                peers.fail(&first.to_string());
            }
        }
        ExecError::from_failures(failures, self.world.size())
    }

    fn rank(&self, rank: u32) -> Option<&Rank<D>> {
        self.ranks.get(self.world.index(rank)?)
    }

    fn rank_mut(&mut self, rank: u32) -> Option<&mut Rank<D>> {
        self.ranks.get_mut(self.world.index(rank)?)
    }

    /// Whether a buffer is allocated now (between steps: whether it is persistent).
    #[must_use]
    pub fn is_live(&self, rank: u32, buffer: BufferId) -> bool {
        self.rank(rank)
            .is_some_and(|r| r.live_range(buffer, 0, 0).is_some())
    }

    /// Reads bytes of a persistent buffer.
    ///
    /// # Errors
    /// [`ExecError::Input`] if the rank is not of this process, the buffer is not allocated or the range is not within it.
    pub fn read_buffer(
        &self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, ExecError> {
        self.rank(rank)
            .and_then(|r| r.read(buffer, offset, bytes))
            .ok_or_else(|| outside(rank, buffer, offset, bytes))
    }

    /// Writes bytes of a persistent buffer.
    ///
    /// # Errors
    /// As [`Session::read_buffer`].
    pub fn write_buffer(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        data: &[u8],
    ) -> Result<(), ExecError> {
        self.rank_mut(rank)
            .and_then(|r| r.write(buffer, offset, data))
            .ok_or_else(|| outside(rank, buffer, offset, data.len() as u64))
    }

    /// Contents that a buffer gets instead of zeros when it is allocated next: for state that the first step allocates
    /// (optimizer moments of a resumed run).
    ///
    /// # Errors
    /// [`ExecError::Input`] for an unknown rank or buffer, or data of another size.
    pub fn preset_buffer(
        &mut self,
        rank: u32,
        buffer: BufferId,
        data: Arc<[u8]>,
    ) -> Result<(), ExecError> {
        let size = self.program.buffers.get(buffer.index()).map(|b| b.bytes.0);
        let ranks = self.world.local();
        match self.rank_mut(rank) {
            Some(r) if size == Some(data.len() as u64) => {
                r.preset(buffer, data);
                Ok(())
            }
            _ => Err(ExecError::Input(format!(
                "got {} bytes for buffer {} of rank {rank}, which has {size:?} bytes; this process runs ranks {ranks:?}",
                data.len(),
                buffer.0
            ))),
        }
    }

    /// What the user should know of this process's first device.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        self.ranks
            .first()
            .map_or_else(Vec::new, |r| r.device.notes())
    }

    /// Memory of a rank now.
    #[must_use]
    pub fn rank_memory(&self, rank: u32) -> Option<Counters> {
        self.rank(rank).map(|r| r.memory.counters())
    }

    /// What this process's first rank runs on.
    #[must_use]
    pub fn device_name(&self) -> String {
        let first = self.ranks.first();
        first.map_or_else(String::new, |r| r.device.name())
    }

    /// The record of everything so far. `scenario` and the environment's facts beyond the engine's are the caller's to
    /// add.
    #[must_use]
    pub fn into_run(mut self) -> Run {
        let device = self.device_name();
        let freely = self.records_freely();
        let log = std::mem::take(&mut self.log).timed(freely);
        let (facts, bytes) = self.ranks.first_mut().map_or_else(Default::default, |r| {
            (r.device.facts(), r.device.device_bytes())
        });
        let rank = self.ranks.first();
        let mut run = report::run(
            &self.program,
            &self.options,
            &device,
            rank.map(|r| &r.memory),
            rank.map(|r| &r.host_work),
            log,
        );
        run.environment.extend(facts);
        run.memory.peak_device = bytes.unwrap_or(run.memory.peak_device);
        run
    }
}

impl<D: Device> Drop for Session<D> {
    fn drop(&mut self) {
        let busy = self.ranks.iter_mut().any(|r| r.device.is_busy());
        if !busy && !self.abort.aborted() {
            return;
        }
        // Ranks are dropped one by one; none may wait for one that is gone. What is in flight ends on all at once.
        self.abort.stop();
        let mut ranks = std::mem::take(&mut self.ranks);
        let ended: Vec<bool> = std::thread::scope(|scope| {
            let ending: Vec<_> = ranks
                .iter_mut()
                .map(|rank| scope.spawn(|| rank.device.cease()))
                .collect();
            let ended = ending.into_iter().map(|t| t.join().unwrap_or(false));
            ended.collect()
        });
        for (rank, ended) in ranks.into_iter().zip(ended) {
            if !ended {
                // It is lost until the process ends: the driver would not come back from freeing any of it.
                std::mem::forget(rank);
            }
        }
    }
}

/// Where a session's ranks will stand.
fn standings(program: &Arc<Program>, options: &ExecOptions, world: &World) -> Arc<Standings> {
    let watched = options.live.clone();
    Arc::new(Standings {
        program: Arc::clone(program),
        live: watched.unwrap_or_else(|| Arc::new(Live::new(world.size()))),
        local: world.local(),
    })
}

fn outside(rank: u32, buffer: BufferId, offset: u64, bytes: u64) -> ExecError {
    ExecError::Input(format!(
        "bytes {offset}+{bytes} of buffer {} are not in the memory of rank {rank}",
        buffer.0
    ))
}

fn run_rank<D: Device>(
    rank: &mut Rank<D>,
    section: &Section,
    with: PassInputs<'_>,
    abort: &Abort,
) -> Option<PassReport> {
    let id = rank.id;
    match catch_unwind(AssertUnwindSafe(|| rank.run(section, with))) {
        Ok(result) => result.ok(),
        Err(panic) => {
            abort.fail(Failure {
                kind: FailureKind::Panic,
                rank: id,
                stream: None,
                instr: None,
                text: String::new(),
                message: panic_text(&*panic),
            });
            None
        }
    }
}

/// What no interpreter can work with.
fn check(program: &Program) -> Result<(), ExecError> {
    let fail = |m: String| Err(ExecError::Program(m));
    if program.streams.is_empty() || program.meta.world == 0 {
        return fail("it has no streams or no ranks".to_owned());
    }
    for comm in &program.communicators {
        let span = u64::from(comm.size) * u64::from(comm.stride);
        if span == 0 || u64::from(program.meta.world) % span != 0 {
            return fail(format!(
                "communicator {}: {} ranks with stride {} do not divide a world of {}",
                comm.name, comm.size, comm.stride, program.meta.world
            ));
        }
    }
    Ok(())
}
