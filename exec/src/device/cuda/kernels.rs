//! Launches the kernels of a rank's program.

use super::context::Context;
use super::driver::{RawStream, check};
use super::libraries::{Libraries, Library, versions};
use crate::base::operand::{Hyper, RawRange};
use crate::kernels::cuda::{Agree, Error, HyperBlock, Kernels, Options, hyper_block};
use crate::process::config_check::with_reason;
use cudarc::driver::{CudaContext, sys};
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::{Program, workspace};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Options of a rank's kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// Multiply float32 matrices on tensor cores with TF32.
    pub(super) tf32: bool,
    /// Do not use cuDNN, even if it is available.
    pub(super) no_cudnn: bool,
}

/// See the module documentation. Allocates workspaces on creation, and nothing afterwards.
pub(super) struct KernelLauncher {
    kernels: Kernels,
    workspace: sys::CUdeviceptr,
    workspace_bytes: u64,
    /// Bytes of the workspace according to the plan.
    planned_bytes: Bytes,
    /// Description of the order of sums.
    order: &'static str,
    settings: Settings,
    context: Arc<Context>,
}

// SAFETY: handles of libraries that one thread at a time may use; they are used through `&mut`
// only, after the context was made current.
unsafe impl Send for KernelLauncher {}

/// Opens the libraries that the kernels of a rank's program need. Does not compile or autotune
/// anything yet.
pub(super) fn open(
    context: &Context,
    program: &Arc<Program>,
    settings: Settings,
    (agree, rank): (Option<Arc<dyn Agree>>, u32),
) -> Result<Kernels, String> {
    let theirs = CudaContext::new(context.ordinal as usize).map_err(|e| format!("{e:?}"))?;
    // SAFETY: no event of this context has been recorded; streams and their order are managed by
    // this crate.
    unsafe { theirs.disable_event_tracking() };
    let libraries = Libraries::load(&[]).map_err(|e| e.to_string())?;
    let options = Options {
        libraries: libraries.folders().iter().map(|f| f.path.clone()).collect(),
        tf32: settings.tf32,
        cudnn: !settings.no_cudnn && libraries.has(Library::Cudnn),
        agree,
        rank,
        ..Options::default()
    };
    Kernels::new(theirs, Arc::clone(program), &options).map_err(|e| e.to_string())
}

/// Returns the values that determine which kernels a rank launches and the order of their sums.
/// Different GPU models may run together if these values agree; the shared memory per block follows
/// from the capability.
pub(super) fn decisive(
    context: &Context,
    settings: Settings,
    kernels: &Kernels,
) -> Vec<(&'static str, String)> {
    let versions = versions();
    let version = |name| versions.get(name).cloned().unwrap_or_default();
    let (major, minor) = context.capability;
    let cudnn = if kernels.has_cudnn() {
        version("cudnn")
    } else {
        with_reason("none", &without_cudnn(settings, kernels))
    };
    vec![
        ("gpu.capability", format!("{major}.{minor}")),
        ("gpu.multiprocessors", context.multiprocessors.to_string()),
        ("cudnn", cudnn),
        ("cublaslt", version("cublaslt")),
        ("nvrtc", version("nvrtc")),
        ("tf32", on(settings.tf32)),
    ]
}

/// Explains why cuDNN is not used.
fn without_cudnn(settings: Settings, kernels: &Kernels) -> String {
    if settings.no_cudnn {
        return "--no-cudnn".to_owned();
    }
    let missing = Libraries::load(&[])
        .ok()
        .and_then(|l| l.missing(Library::Cudnn));
    missing.unwrap_or_else(|| kernels.refused().join("; "))
}

fn on(is: bool) -> String {
    if is { "on" } else { "off" }.to_owned()
}

impl KernelLauncher {
    /// Compiles and autotunes all kernels that the program launches.
    pub(super) fn new(
        context: &Arc<Context>,
        program: &Program,
        settings: Settings,
        mut kernels: Kernels,
    ) -> Result<Self, String> {
        let words = |e: Error| e.to_string();
        kernels.prepare().map_err(words)?;
        let workspace_bytes = kernels.workspace_bytes();
        let mut workspace = 0;
        // SAFETY: the output is a local address, which is a multiple of 256.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&raw mut workspace, workspace_bytes.max(1) as usize)
        })
        .map_err(|e| format!("workspace of {workspace_bytes} bytes: {e}"))?;
        // SAFETY: the workspace has the requested size and belongs to these kernels.
        unsafe { kernels.set_workspace(workspace) }.map_err(words)?;
        Ok(Self {
            kernels,
            workspace,
            workspace_bytes,
            planned_bytes: workspace::of(program),
            order: if program.meta.deterministic {
                "all sums are deterministic for given shapes"
            } else {
                "all sums are deterministic for given shapes, except those of attention's gradients"
            },
            settings,
            context: Arc::clone(context),
        })
    }

    /// Enqueues a kernel. Can be captured. `hyper` is the device address of the step's settings.
    ///
    /// # Safety
    /// The contract of [`RawRange`], for device memory.
    #[inline]
    pub(super) unsafe fn launch(
        &mut self,
        instr: InstrId,
        (reads, writes): (&[RawRange], &[RawRange]),
        hyper: sys::CUdeviceptr,
        stream: RawStream,
    ) -> Result<(), String> {
        // SAFETY: the caller's contract; every stream of the program has its own CUDA stream; the
        // settings are written before the pass begins.
        unsafe { self.kernels.launch(instr, reads, writes, hyper, stream.0) }
            .map_err(|e| e.to_string())
    }

    /// Returns what a kernel reports about invalid inputs (indices out of range, more choices than
    /// rows of experts), with its launch. The device must
    /// be idle.
    pub(super) fn input_error(&mut self) -> Option<(InstrId, String)> {
        let nowhere = InstrId(u32::MAX);
        let found = self.kernels.fault();
        found.unwrap_or_else(|e| Some((nowhere, e.to_string())))
    }

    /// Returns the operations that cuDNN does not support, with the reasons.
    pub(super) fn refused(&self) -> &[String] {
        self.kernels.refused()
    }

    /// Returns facts for the run's environment.
    pub(super) fn facts(&self) -> BTreeMap<String, String> {
        [
            ("kernels.tf32", on(self.settings.tf32)),
            ("kernels.cudnn", on(self.kernels.has_cudnn())),
            ("kernels.workspace_bytes", self.workspace_bytes.to_string()),
            (
                "kernels.workspace_planned_bytes",
                self.planned_bytes.0.to_string(),
            ),
            ("kernels.order", self.order.to_owned()),
        ]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v))
        .collect()
    }
}

/// Encodes a step's settings in the form that kernels read.
pub(super) fn settings_block(hyper: &Hyper) -> HyperBlock {
    hyper_block(hyper)
}

impl Drop for KernelLauncher {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; no work is running. Errors cannot be handled here.
        unsafe {
            let _ = self.context.bind();
            let _ = sys::cuMemFree_v2(self.workspace);
        }
    }
}
