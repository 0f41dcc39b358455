//! Runs all ranks of a program, step by step.

use super::exchange::exchange;
use super::pass::{PassInputs, PassReport};
use super::rank::{Rank, plan_regions};
use super::report::{self, Log};
use super::step::{RankInputs, StepInputs, StepResult};
use super::step_barrier::StepBarrier;
use super::{ExecError, state_blocks};
use crate::base::divergence::{LocalProgress, describe_divergence};
use crate::base::failure::panic_message;
use crate::base::operand::Hyper;
use crate::base::options::ExecOptions;
use crate::base::progress::Progress;
use crate::base::start_barrier::{StartBarrier, Ticket};
use crate::device::cpu::{CpuDevice, Launcher};
use crate::device::{
    Abort, CpuFactory, Device, DeviceFactory, Failure, FailureKind, NO_HYPER, Setup,
};
use crate::process::World;
use shardlab_plan::ir::BufferId;
use shardlab_plan::program::{Program, Section, SectionKind};
use shardlab_plan::record::Run;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A program on devices, one per rank of this process. Dropping it ends all threads.
pub struct Session<D: Device = CpuDevice> {
    program: Arc<Program>,
    options: Arc<ExecOptions>,
    abort: Arc<Abort>,
    world: World,
    progress: Arc<LocalProgress>,
    /// By index in [`World::local`].
    ranks: Vec<Rank<D>>,
    /// Training steps done in this session.
    done: u32,
    /// Index of the session's first step in the training run.
    first_step: u32,
    /// Whether passes are recorded, if the options request it.
    recording: bool,
    log: Log,
}

impl Session<CpuDevice> {
    /// Creates all ranks on the CPU, in this process, and runs `Init`. Persistent buffers are
    /// zeroed.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn new(program: Arc<Program>, options: ExecOptions) -> Result<Self, ExecError> {
        let world = World::single_process(&program);
        Self::open(program, options, world, &CpuFactory::default())
    }

    /// Like [`Session::new`], with `launcher` instead of the crate's kernels.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn with_launcher(
        program: Arc<Program>,
        options: ExecOptions,
        launcher: Launcher,
    ) -> Result<Self, ExecError> {
        let world = World::single_process(&program);
        Self::open(
            program,
            options,
            world,
            &CpuFactory::with_launcher(launcher),
        )
    }
}

impl<D: Device> Session<D> {
    /// Creates this process's ranks of a world on the devices of a factory, and runs `Init`.
    /// Persistent buffers are zeroed.
    ///
    /// # Errors
    /// Returns [`ExecError::Program`] if the program has no streams or ranks, or groups of ranks
    /// that do not divide them; [`ExecError::Device`] if the devices, their memory or their threads
    /// cannot be created; [`ExecError::Peers`] if processes cannot communicate; and
    /// [`ExecError::Failed`] if a rank fails in `Init`.
    pub fn open<F: DeviceFactory<Device = D>>(
        program: Arc<Program>,
        options: ExecOptions,
        world: World,
        factory: &F,
    ) -> Result<Self, ExecError> {
        check(&program)?;
        let progress = local_progress(&program, &options, &world);
        let abort = Arc::new(Abort::new(options.timeout));
        let setup = Setup {
            program,
            options: Arc::new(options),
            abort,
            session: world.process_group().next_session(),
            world,
        };
        setup.world.process_group().watch(&setup.abort, &progress);
        let devices = factory.devices(&setup).map_err(|e| {
            setup.world.process_group().fail(&e);
            ExecError::Device(e)
        })?;
        Self::begin(setup, devices, progress)
    }

    /// Runs `Init` on given devices, one per rank in rank order, all in this process. The devices
    /// report failures to `abort`.
    ///
    /// # Errors
    /// As [`Session::open`], except that the devices exist.
    pub fn with_devices(
        program: Arc<Program>,
        options: ExecOptions,
        abort: Arc<Abort>,
        devices: Vec<D>,
    ) -> Result<Self, ExecError> {
        check(&program)?;
        let world = World::single_process(&program);
        let progress = local_progress(&program, &options, &world);
        let setup = Setup {
            world,
            program,
            options: Arc::new(options),
            abort,
            session: 0,
        };
        Self::begin(setup, devices, progress)
    }

    fn begin(
        setup: Setup,
        devices: Vec<D>,
        progress: Arc<LocalProgress>,
    ) -> Result<Self, ExecError> {
        let Setup {
            program,
            options,
            abort,
            world,
            ..
        } = setup;
        let regions = plan_regions(&program, &options);
        let barrier = StartBarrier::new(world.local().len().min(devices.len()));
        // Reports a failure before the rank's device is dropped. Otherwise the drop would
        // disconnect from the other ranks in good order, while they may wait for this one without a
        // timeout.
        let leaving = |e: ExecError| {
            world.process_group().fail(&e.to_string());
            abort.stop();
            e
        };
        // `None`: another rank has failed and reports the error.
        let new = |id, device: D, ticket: Ticket<'_>| {
            let rank = Rank::new(id, &progress, &options, &abort, device, &regions, &leaving);
            let mut rank = rank?;
            if !ticket.arrive() {
                return Ok(None);
            }
            let registered = rank.device.register_memory();
            registered.map_err(|e| leaving(ExecError::Device(e)))?;
            Ok(Some(rank))
        };
        let new = &new;
        let ranks: Vec<_> = std::thread::scope(|scope| {
            let made: Vec<_> = world
                .local()
                .zip(devices)
                .map(|(id, device)| {
                    let ticket = barrier.ticket();
                    scope.spawn(move || new(id, device, ticket))
                })
                .collect();
            let joined = made.into_iter().map(|t| match t.join() {
                Ok(rank) => rank,
                Err(panic) => Err(ExecError::Device(panic_message(&*panic))),
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
            progress,
            ranks,
            done: 0,
            first_step: 0,
            recording: true,
        };
        let none = StepInputs::default();
        session.pass(SectionKind::Init, &none, NO_HYPER)?;
        Ok(session)
    }

    /// Returns the session's world.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Returns the program.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// Sets the index of the session's first step, for records of a resumed run.
    pub(crate) fn set_first_step(&mut self, step: u32) {
        self.first_step = step;
    }

    /// Returns whether recording is so cheap that every step may be recorded.
    #[must_use]
    pub(crate) fn records_freely(&self) -> bool {
        self.ranks.iter().all(|r| r.device.records_freely())
    }

    /// Enables or disables recording, if the options request it at all.
    pub(crate) fn set_recording(&mut self, on: bool) {
        self.recording = on;
    }

    /// Runs one training step on all ranks and waits for its end.
    ///
    /// # Errors
    /// [`ExecError::Failed`] if any rank fails; the session cannot be used afterwards.
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

    /// Runs a validation pass on all ranks, with one micro-batch of inputs each.
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
        // The preparation of inputs before the pass begins does not count as its time.
        let local = inputs.ranks.get(first..).unwrap_or_default();
        let large = local.first().is_some_and(RankInputs::are_large);
        let barrier = (large || record && !self.records_freely())
            .then(|| StepBarrier::new(self.ranks.len(), self.world.process_group(), &self.abort));
        let of = |index: usize| PassInputs {
            step,
            hyper,
            inputs: inputs.ranks.get(first + index).unwrap_or(&none),
            record: record && index == 0,
            replay_as_instructions: record,
            barrier: barrier.as_deref(),
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

    /// Returns the error of the session, and reports it to the other processes.
    fn failed(&self) -> ExecError {
        let (mut failures, group) = (self.abort.failures(), self.world.process_group());
        if let Some(first) = failures.first_mut() {
            if first.kind == FailureKind::Timeout {
                // The store knows the host positions of all processes.
                let positions = match group.processes() {
                    1 => describe_divergence(&self.progress.snapshot()),
                    _ => group.fail_timed_out(&first.to_string()),
                };
                first.message.push_str(&positions);
            } else {
                group.fail(&first.to_string());
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

    /// Reads bytes of a persistent buffer.
    ///
    /// # Errors
    /// [`ExecError::Input`] if the rank belongs to another process, the buffer is not allocated, or
    /// the range is not within it.
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

    /// Sets the contents of a buffer at its next allocation, instead of zeros: for state that the
    /// first step allocates (optimizer moments of a resumed run).
    ///
    /// # Errors
    /// [`ExecError::Input`] for an unknown rank or buffer, or data of the wrong size.
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

    /// Returns notes for the user about this process's first device.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        self.ranks
            .first()
            .map_or_else(Vec::new, |r| r.device.notes())
    }

    /// Returns the current memory of a rank.
    #[cfg(test)]
    pub(crate) fn rank_memory(&self, rank: u32) -> Option<shardlab_plan::memory::Counters> {
        self.rank(rank).map(|r| r.memory.ledger.counters())
    }

    /// Returns the device name of this process's first rank.
    #[must_use]
    pub(crate) fn device_name(&self) -> String {
        let first = self.ranks.first();
        first.map_or_else(String::new, |r| r.device.name())
    }

    /// Returns the record of the session. The caller adds the scenario and facts of the environment
    /// beyond the engine's.
    #[must_use]
    pub(crate) fn into_run(mut self) -> Run {
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
        // Ranks are dropped one by one, and none may wait for one that is gone: work in flight ends
        // on all of them first.
        self.abort.stop();
        let mut ranks = std::mem::take(&mut self.ranks);
        let ended: Vec<bool> = std::thread::scope(|scope| {
            let ending: Vec<_> = ranks
                .iter_mut()
                .map(|rank| scope.spawn(|| rank.device.shutdown()))
                .collect();
            let ended = ending.into_iter().map(|t| t.join().unwrap_or(false));
            ended.collect()
        });
        for (rank, ended) in ranks.into_iter().zip(ended) {
            if !ended {
                // Its memory is lost until the process ends, because the driver would never return
                // from freeing it.
                std::mem::forget(rank);
            }
        }
    }
}

/// Creates what publishes the host positions of a session's ranks.
fn local_progress(
    program: &Arc<Program>,
    options: &ExecOptions,
    world: &World,
) -> Arc<LocalProgress> {
    let progress = options.progress.clone();
    Arc::new(LocalProgress {
        program: Arc::clone(program),
        progress: progress.unwrap_or_else(|| Arc::new(Progress::new(world.size()))),
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
                message: panic_message(&*panic),
            });
            None
        }
    }
}

/// Rejects programs that no interpreter can run.
fn check(program: &Program) -> Result<(), ExecError> {
    state_blocks::check(program).map_err(ExecError::Program)?;
    let fail = |m: String| Err(ExecError::Program(m));
    if program.streams.is_empty() || program.meta.mesh.world() == 0 {
        return fail("it has no streams or no ranks".to_owned());
    }
    for comm in &program.communicators {
        comm.divides(program.meta.mesh.world())
            .map_err(ExecError::Program)?;
    }
    Ok(())
}
