//! The device for a run.

use super::super::output::Failure;
use super::utilisation;
use crate::gate::collect::on_cpu;
use shardlab_exec::device::CpuFactory;
use shardlab_exec::engine::{Registration, Times};
use shardlab_exec::process::World;
use shardlab_exec::train::{Observer, Outcome, RunOptions, train_on};
use shardlab_plan::{Program, Scenario};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct DeviceArgs {
    /// Device that runs the program
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    device: Kind,
    /// Search this folder for NVIDIA libraries first, or this pip nvidia package (repeatable)
    #[arg(long, value_name = "DIR")]
    library_path: Vec<PathBuf>,
    /// Threads per kernel on the CPU, also of the optimizer there (fsdp.offload, policy fsdp2); 0:
    /// all cores, divided among the ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=1024))]
    threads: u32,
    /// First GPU to use [default: 0]
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
    /// Use TF32 tensor cores for float32 matmuls, with about three decimal digits (GPUs)
    #[arg(long)]
    tf32: bool,
    /// Do not use cuDNN (GPUs)
    #[arg(long)]
    no_cudnn: bool,
    /// Do not write into the memory of other GPUs: send pushed rows of experts through NCCL (GPUs)
    #[arg(long)]
    no_peer_memory: bool,
    /// Start one process per rank; the default for several GPUs (torchrun, srun and mpirun start
    /// the processes themselves)
    #[arg(long)]
    processes: bool,
    /// Run all ranks as threads of one process, also on several GPUs
    #[arg(long, alias = "one-process", conflicts_with = "processes")]
    single_process: bool,
    /// Let ranks share GPUs, to try a multi-GPU job on fewer GPUs: same results, no meaningful
    /// timings (one host)
    #[arg(long, conflicts_with = "single_process")]
    share_gpu: bool,
    /// How to register device memory with NCCL
    #[arg(long, alias = "register", value_name = "HOW", value_enum, default_value_t = Register::Off)]
    nccl_registration: Register,
    /// How to time the recorded step (GPUs)
    #[arg(long, alias = "times", value_name = "SOURCE", value_enum, default_value_t = Clock::Auto)]
    timing_source: Clock,
    /// Do not use CUDA graphs: issue captured scopes instruction by instruction
    #[arg(long, alias = "no-graphs")]
    no_cuda_graphs: bool,
    /// Delay random instructions, chosen by this seed (stress test; results must not change)
    #[arg(long, alias = "delays", value_name = "SEED", hide_short_help = true)]
    fuzz_schedule: Option<u64>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// GPUs, if the scenario's hardware is a GPU and this machine has one, else the CPU
    Auto,
    /// CPU: ranks are threads
    Cpu,
    /// NVIDIA GPUs, one per rank
    Cuda,
}

/// Command-line form of [`Registration`].
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    /// No registration
    Off,
    /// Buffers registered with every communicator
    Buffer,
    /// Symmetric windows of every communicator
    Window,
}

/// Command-line form of [`Times`].
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    /// Least intrusive method: CUPTI with one GPU per process, else events
    Auto,
    /// CUPTI activity records: nothing is inserted between instructions
    Cupti,
    /// CUDA events around every instruction
    Events,
}

impl DeviceArgs {
    /// Returns the command-line form of the options that differ from the defaults, for a child
    /// process or another shardlab binary. That binary may be older, so options have their first
    /// names, which remain aliases.
    pub(crate) fn words(&self) -> Vec<OsString> {
        // All fields are destructured, so that a new argument cannot be forgotten here.
        let Self {
            device,
            library_path,
            threads,
            gpu,
            tf32,
            no_cudnn,
            no_peer_memory,
            processes,
            single_process,
            share_gpu,
            nccl_registration,
            timing_source,
            no_cuda_graphs,
            fuzz_schedule,
        } = self;
        let mut words: Vec<OsString> = Vec::new();
        let mut say = |option: &str, value: &dyn AsRef<std::ffi::OsStr>| {
            words.extend([OsString::from(option), value.as_ref().to_owned()]);
        };
        if *device != Kind::Auto {
            say("--device", &self.name());
        }
        for folder in library_path {
            say("--library-path", folder);
        }
        if *threads != 1 {
            say("--threads", &threads.to_string());
        }
        if let Some(gpu) = gpu {
            say("--gpu", &gpu.to_string());
        }
        match nccl_registration {
            Register::Off => {}
            Register::Buffer => say("--register", &"buffer"),
            Register::Window => say("--register", &"window"),
        }
        match timing_source {
            Clock::Auto => {}
            Clock::Cupti => say("--times", &"cupti"),
            Clock::Events => say("--times", &"events"),
        }
        if let Some(seed) = fuzz_schedule {
            say("--delays", &seed.to_string());
        }
        let switches = [
            (tf32, "--tf32"),
            (no_cudnn, "--no-cudnn"),
            (no_peer_memory, "--no-peer-memory"),
            (processes, "--processes"),
            (single_process, "--one-process"),
            (share_gpu, "--share-gpu"),
            (no_cuda_graphs, "--no-graphs"),
        ];
        let on = switches.into_iter().filter(|(on, _)| **on);
        words.extend(on.map(|(_, word)| word.into()));
        words
    }

    /// Returns the same arguments with `auto` resolved, so that all processes of a run use the same
    /// device.
    pub(crate) fn settled(&self, scenario: &Scenario) -> Self {
        let mut settled = self.clone();
        if self.device == Kind::Auto {
            settled.device = if !on_cpu(scenario) && self.has_gpus() {
                Kind::Cuda
            } else {
                Kind::Cpu
            };
        }
        settled
    }

    /// Returns whether the driver reports any GPU; `false` without a driver.
    #[cfg(feature = "cuda")]
    fn has_gpus(&self) -> bool {
        shardlab_exec::device::cuda::gpus(&self.library_path).is_ok_and(|n| n > 0)
    }

    /// Returns `false`, because this build does not support GPUs.
    #[cfg(not(feature = "cuda"))]
    fn has_gpus(&self) -> bool {
        false
    }

    /// Returns whether each rank runs in a separate process.
    pub(crate) fn wants_processes(&self, program: &Program) -> bool {
        let several_gpus = self.device == Kind::Cuda && program.meta.mesh.world() > 1;
        self.processes || several_gpus && !self.single_process
    }

    /// Returns the same arguments with the CPU as the device.
    #[cfg(feature = "dash")]
    pub(crate) fn on_cpu(&self) -> Self {
        let mut cpu = self.clone();
        cpu.device = Kind::Cpu;
        cpu
    }

    /// Returns whether the resolved device is a GPU.
    #[cfg(feature = "dash")]
    pub(crate) fn is_gpus(&self) -> bool {
        self.device == Kind::Cuda
    }

    /// Returns the name of the device.
    pub(super) fn name(&self) -> &'static str {
        match self.device {
            Kind::Auto => "auto",
            Kind::Cpu => "cpu",
            Kind::Cuda => "cuda",
        }
    }

    /// Finds the libraries of the device. This may restart the process, so it must be called before
    /// ranks meet.
    #[cfg(feature = "cuda")]
    pub(super) fn prepare(&self) -> Result<(), Failure> {
        if self.device == Kind::Cuda {
            use_libraries(&self.library_path)?;
        }
        Ok(())
    }

    /// Does nothing, because the CPU needs no libraries.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn prepare(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// Checks that this host has a GPU for every rank, before any process is started.
    #[cfg(feature = "cuda")]
    pub(super) fn has_room(&self, program: &Program) -> Result<(), Failure> {
        if self.device != Kind::Cuda {
            return Ok(());
        }
        let base = self.gpu.unwrap_or(0);
        let ranks = if self.share_gpu {
            1
        } else {
            program.meta.mesh.world()
        };
        shardlab_exec::device::cuda::check_gpus(&self.library_path, base, ranks)
            .map_err(Failure::run)
    }

    /// Accepts any number of ranks, because this build does not use GPUs.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn has_room(&self, _: &Program) -> Result<(), Failure> {
        Ok(())
    }

    /// Makes NCCL accept ranks that share a GPU. This may restart the process, so it must be called
    /// before ranks meet.
    #[cfg(feature = "cuda")]
    pub(super) fn prepare_sharing(&self, rank: u32) -> Result<(), Failure> {
        use shardlab_exec::device::cuda::gpu_sharing::{HOST, variables};
        if !self.share_gpu || self.device != Kind::Cuda || std::env::var_os(HOST).is_some() {
            return Ok(());
        }
        again_with(&variables(rank).map(|(name, value)| (name, value.into())))
    }

    /// Does nothing, because this build does not use GPUs.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn prepare_sharing(&self, _: u32) -> Result<(), Failure> {
        Ok(())
    }

    /// Sets the engine options that depend on the device.
    pub(crate) fn apply(&self, exec: &mut shardlab_exec::engine::ExecOptions, ranks: u32) {
        exec.threads = match self.threads {
            0 => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                (cores / ranks.max(1) as usize).max(1)
            }
            n => n as usize,
        };
        exec.graphs = !self.no_cuda_graphs;
        exec.registration = match self.nccl_registration {
            Register::Off => Registration::Off,
            Register::Buffer => Registration::Buffer,
            Register::Window => Registration::Window,
        };
        exec.times = match self.timing_source {
            Clock::Auto => Times::Auto,
            Clock::Cupti => Times::Cupti,
            Clock::Events => Times::Events,
        };
        exec.delay = self
            .fuzz_schedule
            .map(|seed| shardlab_exec::engine::DelaySpec {
                seed,
                probability: 0.05,
                max: std::time::Duration::from_micros(500),
            });
    }

    /// Trains on the device, with all ranks in this process.
    pub(in crate::cli) fn train(
        &self,
        scenario: &Scenario,
        program: &Arc<Program>,
        options: RunOptions,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, Failure> {
        self.prepare()?;
        let world = World::single_process(program);
        self.train_as(scenario, program, options, world, 0, observer)
    }

    /// Trains this process's ranks of a world. `local_rank` counts the processes of the host.
    pub(super) fn train_as(
        &self,
        scenario: &Scenario,
        program: &Arc<Program>,
        options: RunOptions,
        world: World,
        local_rank: u32,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, Failure> {
        let cpu = CpuFactory::default();
        let mut outcome = match self.device {
            Kind::Auto | Kind::Cpu => train_on(scenario, program, options, world, &cpu, observer)?,
            Kind::Cuda => self.cuda(scenario, program, options, world, local_rank, observer)?,
        };
        let on_cpu = self.device != Kind::Cuda;
        outcome.run.mfu = utilisation(scenario, program, &outcome.run, on_cpu);
        if self.share_gpu && !on_cpu && program.meta.mesh.world() > 1 {
            let shared = "shared by ranks that took turns: times are not meaningful".to_owned();
            outcome
                .run
                .environment
                .insert("gpu.shared".to_owned(), shared);
        }
        Ok(outcome)
    }

    #[cfg(feature = "cuda")]
    fn cuda(
        &self,
        scenario: &Scenario,
        program: &Arc<Program>,
        options: RunOptions,
        world: World,
        local_rank: u32,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, Failure> {
        use super::super::output::{Status, say};
        use shardlab_exec::device::cuda::{CudaFactory, CudaOptions, exit_now, gpus};
        // This check comes first, because nothing else matters without a GPU.
        let count = gpus(&self.library_path).map_err(Failure::run)?;
        if count == 0 {
            return Err(Failure::run("no usable GPU: the driver shows none"));
        }
        if world.process_group().processes() == 1 {
            world.process_group().set_exit_hook(Arc::new(|cause| {
                say(format_args!(
                    "error: the run cannot shut down cleanly: {cause}"
                ));
                exit_now(Status::RUN_FAILED);
            }));
        }
        let factory = CudaFactory::new(CudaOptions {
            library_path: self.library_path.clone(),
            first_gpu: self.gpu.unwrap_or(0),
            local_rank,
            tf32: self.tf32,
            no_cudnn: self.no_cudnn,
            no_peer_memory: self.no_peer_memory,
            share_gpu: self.share_gpu,
        });
        Ok(train_on(
            scenario, program, options, world, &factory, observer,
        )?)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(
        &self,
        _: &Scenario,
        _: &Arc<Program>,
        _: RunOptions,
        _: World,
        _: u32,
        _: &mut dyn Observer,
    ) -> Result<Outcome, Failure> {
        let _ = (&self.library_path, self.gpu, self.tf32, self.no_cudnn);
        let _ = (self.share_gpu, self.no_peer_memory);
        Err(Failure::run(
            "no usable GPU: this binary was built without feature `cuda`",
        ))
    }
}

/// Loads NVIDIA's libraries. If the dynamic loader would use other libraries, restarts the process
/// with an environment in which it uses these.
#[cfg(feature = "cuda")]
pub(in crate::cli) fn use_libraries(folders: &[PathBuf]) -> Result<(), Failure> {
    known_tuning()?;
    let libraries = shardlab_exec::device::cuda::Libraries::load(folders).map_err(Failure::run)?;
    match libraries.better_path().map_err(Failure::run)? {
        // The restarted process must not restart again.
        Some(path) if std::env::var_os(TRIED).is_none() => {
            again_with(&[("LD_LIBRARY_PATH", path), (TRIED, "1".into())])
        }
        _ => Ok(()),
    }
}

/// Environment variable that marks a process that was restarted for its libraries.
#[cfg(feature = "cuda")]
const TRIED: &str = "SHARDLAB_LIBRARIES_SET";

/// Rejects an invalid value of the variable that selects matmuls, which would otherwise silently
/// mean the default.
#[cfg(feature = "cuda")]
fn known_tuning() -> Result<(), Failure> {
    use shardlab_exec::kernels::cuda::Choose;
    let Some(value) = std::env::var_os(Choose::VARIABLE) else {
        return Ok(());
    };
    let value = value.to_string_lossy();
    let known = Choose::NAMES.map(|n| n.0);
    if known.contains(&&*value) {
        return Ok(());
    }
    let near = shardlab_plan::scenario::nearest(&value, known);
    let near = near.map_or(String::new(), |n| format!("; did you mean `{n}`?"));
    Err(Failure::bad_input(format!(
        "{} is \"{value}\"; expected \"burst\" (the default) or \"sustained\"{near}",
        Choose::VARIABLE
    )))
}

/// Restarts this process with additional environment variables, for loaders and libraries that read
/// them only once. Returns only on failure, with the reason.
#[cfg(all(feature = "cuda", unix))]
fn again_with(variables: &[(&str, OsString)]) -> Result<(), Failure> {
    use std::os::unix::process::CommandExt;
    let program = std::env::current_exe().map_err(Failure::run)?;
    let error = std::process::Command::new(program)
        .args(std::env::args_os().skip(1))
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .exec();
    Err(Failure::run(error))
}

#[cfg(test)]
impl DeviceArgs {
    /// Parses command-line words.
    pub(crate) fn said(words: &[&str]) -> Self {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            device: DeviceArgs,
        }
        let all = ["x"].iter().chain(words).copied();
        let cli: Cli = clap::Parser::try_parse_from(all).unwrap();
        cli.device
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceArgs;

    #[test]
    fn words_are_what_was_said() {
        let said = [
            "--device",
            "cuda",
            "--library-path",
            "a",
            "--library-path",
            "b",
            "--threads",
            "0",
            "--gpu",
            "2",
            "--register",
            "window",
            "--times",
            "events",
            "--delays",
            "7",
            "--tf32",
            "--no-cudnn",
            "--no-peer-memory",
            "--one-process",
            "--no-graphs",
        ];
        let words = |said: &[&str]| DeviceArgs::said(said).words();
        assert_eq!(words(&said), said);
        let alone = ["--processes", "--share-gpu"];
        assert_eq!(words(&alone), alone);
        assert_eq!(
            words(&["--device", "cpu", "--threads", "1"]),
            ["--device", "cpu"]
        );
        assert!(words(&[]).is_empty());
    }
}
