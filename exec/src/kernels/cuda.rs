//! Kernels on NVIDIA GPUs, with the same results as the CPU's.
//!
//! [`Kernels`] prepares and launches the kernels of a program: GEMMs by cuBLASLt (`blas`),
//! attention and convolutions by cuDNN if it is available (`dnn`), everything else by generated
//! code (`codegen`, compiled by `nvrtc`, cached on disk by `cache`). Nothing is compiled, chosen or
//! allocated between [`Kernels::prepare`] and the last launch of the program's own instructions, so
//! that launches can be captured in graphs.

mod blas;
mod cache;
mod code;
pub(crate) mod codegen;
pub(in crate::kernels) mod dnn;
mod error;
mod gemm;
mod memory;
mod muon;
mod numbers;
mod nvrtc;
mod perform;
mod plans;
mod prepare;
mod ranges;
mod start;
mod target;
mod tensor;
mod variant;

pub use blas::{Candidate, Trial};
pub(crate) use code::Loader;
pub use error::{Error, ErrorKind};
pub(crate) use prepare::prepared;
pub(crate) use target::Target;

use crate::operand::{Hyper, RawRange};
use blas::Blas;
use cache::Cache;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use dnn::Dnn;
use shardlab_plan::config::{MAX_PARAM_GROUPS, MuonAdjustLr};
use shardlab_plan::ir::{InstrId, KernelId, Shape};
use shardlab_plan::program::{GroupRun, NoSlice, Program, ScaleRun};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How ranks agree on choices. Different kernels sum in different orders, and ranks that hold
/// copies of the same numbers must not diverge.
pub trait Agree: Send + Sync + std::fmt::Debug {
    /// Returns the choice that the leading rank makes by calling `choose`. Every rank asks for the
    /// same names in the same order.
    ///
    /// # Errors
    /// The error of `choose` on the leading rank, the same on all; [`ErrorKind::Ranks`] if the
    /// leading rank publishes nothing.
    fn choice(
        &self,
        name: &str,
        choose: &mut dyn FnMut() -> Result<Vec<u8>, ErrorKind>,
    ) -> Result<Vec<u8>, ErrorKind>;
}

/// Returns the autotuned choice for `name`, decoded by `read`: made by this rank, or, if ranks
/// agree, by the leading rank. `name` must not depend on the GPU, so that mismatched hardware is
/// reported instead of deadlocked on.
fn agreed<T>(
    agree: Option<&dyn Agree>,
    (name, machine): (&str, &str),
    choose: &mut dyn FnMut() -> Result<Vec<u8>, ErrorKind>,
    read: impl FnOnce(&[u8]) -> Option<T>,
) -> Result<T, ErrorKind> {
    let packed = match agree {
        None => choose()?,
        Some(agree) => agree.choice(name, choose)?,
    };
    read(&packed).ok_or_else(|| {
        ErrorKind::Ranks(format!(
            "{machine} does not have the kernel that the leading rank chose for {name}: all ranks need the same GPU and libraries"
        ))
    })
}

/// How one of the library's candidates for a GEMM is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choose {
    /// The library's first one.
    First,
    /// The fastest in a short burst.
    Burst,
    /// Of those that are nearly the fastest in a burst, the fastest while the GPU is at its power
    /// limit, as in a step. Takes seconds for each GEMM, once.
    Load,
}

impl Choose {
    /// Environment variable by which users choose.
    pub const VARIABLE: &str = "SHARDLAB_GEMM_TUNING";
    /// Its values; the first one is the default.
    pub const NAMES: [(&str, Self); 2] = [("burst", Self::Burst), ("sustained", Self::Load)];

    /// Returns the user's choice.
    fn of_user() -> Self {
        let said = std::env::var_os(Self::VARIABLE);
        let named = Self::NAMES
            .into_iter()
            .find(|n| said.as_ref().is_some_and(|s| *s == *n.0));
        named.unwrap_or(Self::NAMES[0]).1
    }

    /// Returns the kind of entry in the cache.
    const fn kind(self) -> &'static str {
        match self {
            Self::First | Self::Burst => "gemm 3",
            Self::Load => "gemm 3 under load",
        }
    }
}

/// How kernels are made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of compiled code and choices; `None` to keep none.
    pub cache: Option<PathBuf>,
    /// Folders with NVIDIA's libraries, first one first; the loader's own paths come last.
    pub libraries: Vec<PathBuf>,
    /// Multiply float32 matrices with TF32 tensor cores (about three decimal digits).
    pub tf32: bool,
    /// Use cuDNN's attention and convolutions where they fit.
    pub cudnn: bool,
    /// How kernels for GEMMs are chosen.
    pub choose: Choose,
    /// How ranks agree on the choice; alone, a rank chooses for itself.
    pub agree: Option<Arc<dyn Agree>>,
    /// Rank whose kernels they are: ranks have different parameters of a flat group.
    pub rank: u32,
}

impl Default for Options {
    /// Enables everything but TF32. The cache is `$SHARDLAB_KERNEL_CACHE` or in the user's cache
    /// directory, and `SHARDLAB_GEMM_TUNING=sustained` chooses GEMMs under load.
    fn default() -> Self {
        Self {
            cache: Cache::of_user().folder().map(PathBuf::from),
            libraries: Vec::new(),
            tf32: false,
            cudnn: true,
            choose: Choose::of_user(),
            agree: None,
            rank: 0,
        }
    }
}

/// Optimizer settings as kernels read them from device memory: the learning rate, `1 - lr *
/// weight_decay`, `1 - beta1`, `beta2`, `1 - beta2`, `lr / (1 - beta1^step)`, `sqrt(1 -
/// beta2^step)`, epsilon, the norm's limit, the weight decay, `1 - momentum` of Muon, and 1 if it
/// matches the updates of AdamW; for each parameter group. They are in memory so that captured
/// launches see the settings of a new step.
pub type HyperBlock = [[f32; 12]; MAX_PARAM_GROUPS];

/// Encodes a step's settings.
#[must_use]
pub fn hyper_block(h: &Hyper) -> HyperBlock {
    std::array::from_fn(|group| group_block(&h.of(group)))
}

fn group_block(h: &Hyper) -> [f32; 12] {
    let [b1, b2] = h.betas;
    let steps = i32::try_from(h.step.max(1)).unwrap_or(i32::MAX);
    [
        h.lr as f32,
        (1.0 - h.lr * h.weight_decay) as f32,
        (1.0 - b1) as f32,
        b2 as f32,
        (1.0 - b2) as f32,
        (h.lr / (1.0 - b1.powi(steps))) as f32,
        (1.0 - b2.powi(steps)).sqrt() as f32,
        h.eps as f32,
        h.clip_norm as f32,
        h.weight_decay as f32,
        (1.0 - h.muon.momentum) as f32,
        f32::from(u8::from(h.muon.adjust_lr == MuonAdjustLr::MatchRmsAdamw)),
    ]
}

/// All kernels of a program on one GPU. Belongs to one host thread at a time.
///
/// The order of calls: [`Kernels::new`], [`Kernels::prepare`], [`Kernels::set_workspace`], then
/// launches. The context is current on the calling thread throughout.
pub struct Kernels {
    program: Arc<Program>,
    data_rank: u32,
    /// Keeps the context alive.
    _context: Arc<CudaContext>,
    target: Target,
    loader: Loader,
    cache: Cache,
    blas: Blas,
    agree: Option<Arc<dyn Agree>>,
    dnn: Option<Dnn>,
    plans: plans::Plans,
    ranges: prepare::RangeKernels,
    muon: muon::Matmuls,
    /// Shapes of the parameters behind the operands of packing launches, and of the matrices of
    /// Muon.
    shapes: BTreeMap<InstrId, Vec<Shape>>,
    /// By launch of an optimizer: parameter groups of its weights.
    groups: BTreeMap<InstrId, Vec<GroupRun>>,
    /// By launch on shards in 8 bits: scales of its weights.
    scales: BTreeMap<InstrId, Vec<ScaleRun>>,
    /// Bytes of scratch memory by stream.
    scratch: Vec<u64>,
    /// Address of each stream's workspace, once set; then the word for faults.
    workspace: Vec<CUdeviceptr>,
    fault: CUdeviceptr,
    /// Reasons why library kernels were not used.
    refused: Vec<String>,
}

/// Returns the target of generated code for the context's GPU.
fn target_of(context: &CudaContext) -> Result<Target, ErrorKind> {
    let found = context.compute_capability();
    let (major, minor) = found.map_err(ErrorKind::driver("cuDeviceGetAttribute"))?;
    Target::of((major.unsigned_abs(), minor.unsigned_abs())).ok_or_else(|| {
        ErrorKind::Unsupported(format!(
            "compute capability {major}.{minor} is too old: generated kernels need 8.0"
        ))
    })
}

/// Returns the error of kernels whose weights have no known place.
fn no_slice(of: &'static str) -> impl Fn(NoSlice) -> Error {
    move |e| Error::new(of, ErrorKind::Unsupported(e.to_string()))
}

impl Kernels {
    /// Returns what a launch knows of its operands.
    fn parameters(&self, id: InstrId) -> ranges::Parameters<'_> {
        ranges::Parameters {
            shapes: self.shapes.get(&id).map_or(&[], Vec::as_slice),
            groups: self.groups.get(&id).map_or(&[], Vec::as_slice),
            scales: self.scales.get(&id).map_or(&[], Vec::as_slice),
        }
    }

    /// Opens the libraries of kernels on a context that is current on this thread. NVIDIA's
    /// libraries are loaded.
    ///
    /// # Errors
    /// [`Error`], if a library refuses.
    pub fn new(
        context: Arc<CudaContext>,
        program: Arc<Program>,
        options: &Options,
    ) -> Result<Self, Error> {
        let gpu = context.name().unwrap_or_default();
        let target = target_of(&context).map_err(|t| Error::new(gpu.as_str(), t))?;
        let cache = Cache::new(options.cache.clone());
        let blas =
            Blas::new(&gpu, options.tf32, options.choose).map_err(|t| Error::new("cublasLt", t))?;
        let mut refused = Vec::new();
        let dnn = options.cudnn.then(|| {
            let ordered = program.meta.deterministic;
            Dnn::open(&gpu, ordered, options.tf32, options.choose)
                .map_err(|why| refused.push(format!("all: {why}")))
        });
        Ok(Self {
            data_rank: program.meta.mesh.data_rank(options.rank),
            dnn: dnn.and_then(Result::ok),
            shapes: prepare::shapes(&program, options.rank).map_err(no_slice("optimizer"))?,
            groups: program
                .group_runs(options.rank)
                .map_err(no_slice("optimizer"))?,
            scales: program
                .scale_runs(options.rank)
                .map_err(no_slice("8-bit gathers"))?,
            scratch: vec![0; program.streams.len()],
            workspace: Vec::new(),
            fault: 0,
            refused,
            target,
            loader: Loader::new(target, cache.clone(), options.libraries.clone()),
            cache,
            blas,
            agree: options.agree.clone(),
            plans: plans::Plans::new(program.instrs.len()),
            ranges: prepare::RangeKernels::default(),
            muon: muon::Matmuls::default(),
            program,
            _context: context,
        })
    }

    /// Compiles and chooses all kernels of the program. Needs free device memory to try GEMMs and
    /// convolutions.
    ///
    /// # Errors
    /// [`Error`] for the first kernel that cannot be made.
    pub fn prepare(&mut self) -> Result<(), Error> {
        prepare::everything(self)
    }

    /// Returns the bytes of device memory that launches use in addition to their operands; valid
    /// after [`Kernels::prepare`].
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        self.scratch
            .iter()
            .map(|b| prepare::rounded(*b))
            .sum::<u64>()
            + prepare::rounded(prepare::FOUND)
    }

    /// Sets that memory, at an address that is a multiple of 256.
    ///
    /// # Errors
    /// [`Error`], if the driver refuses to clear it.
    ///
    /// # Safety
    /// It has [`Kernels::workspace_bytes`] bytes that nothing else uses until the kernels are
    /// dropped.
    pub unsafe fn set_workspace(&mut self, at: CUdeviceptr) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { prepare::set_workspace(self, at) }
    }

    /// Enqueues the launch of an instruction.
    ///
    /// # Errors
    /// [`Error`], if the operands are not those of the program, or the driver refuses.
    ///
    /// # Safety
    /// Every range is in live device memory until the stream has done the work; other streams
    /// neither write the reads nor touch the writes meanwhile; `hyper` holds a [`HyperBlock`];
    /// `stream` is the same for the instruction's stream in all launches.
    pub unsafe fn launch(
        &mut self,
        instr: InstrId,
        reads: &[RawRange],
        writes: &[RawRange],
        hyper: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { perform::launch(self, instr, reads, writes, hyper, stream) }
    }

    /// Returns the launch that has found an id outside its range, or more choices than rows for
    /// them, and describes that. The device is idle.
    ///
    /// # Errors
    /// [`Error`], if the driver refuses to read it.
    pub fn fault(&mut self) -> Result<Option<(InstrId, String)>, Error> {
        perform::fault(self)
    }

    /// Returns whether cuDNN is used where it fits.
    #[must_use]
    pub(crate) fn has_cudnn(&self) -> bool {
        self.dnn.is_some()
    }

    /// Returns the attentions and convolutions that cuDNN does not support, with the reasons:
    /// generated code performs them.
    #[must_use]
    pub fn refused(&self) -> &[String] {
        &self.refused
    }

    /// Tries the GEMMs of a steady step, in bursts and under load, heaviest first, for about
    /// `limit`. Nothing needs to be prepared.
    ///
    /// # Errors
    /// [`Error`], if a GEMM cannot be performed.
    pub fn trials(&self, limit: Duration) -> Result<Vec<Trial>, Error> {
        let gemms = prepare::gemms(&self.program, self.target)?;
        self.blas
            .trials(&gemms, &self.cache, limit)
            .map_err(|t| Error::new("matmuls", t))
    }

    /// Describes how a kernel is performed, for reports: one line for each variant that the program
    /// launches.
    #[must_use]
    pub fn describe(&self, kernel: KernelId) -> String {
        let plans = self.plans.of_kernel(kernel).into_iter();
        let mut lines: Vec<String> = plans.map(plans::Plan::describe).collect();
        lines.dedup();
        lines.join("\n")
    }
}
