//! The kernels of a rank's program, ready to launch.

use super::context::Context;
use super::driver::{RawStream, check};
use super::libraries::{Libraries, Library, versions};
use crate::kernels::cuda::{Agree, Error, HyperBlock, Kernels, Options, hyper_block};
use crate::operand::{Hyper, RawRange};
use crate::process::facts::because;
use cudarc::driver::{CudaContext, sys};
use shardlab_plan::program::{InstrId, Program, workspace};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How a rank's kernels compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// Multiply float32 matrices on tensor cores with TF32.
    pub(super) tf32: bool,
    /// Without cuDNN, even where it is there.
    pub(super) no_cudnn: bool,
}

/// See the module documentation. Workspaces are allocated when it is made, and nothing afterwards.
pub(super) struct Bodies {
    kernels: Kernels,
    workspace: sys::CUdeviceptr,
    workspace_bytes: u64,
    /// What the plan says that it is.
    planned_bytes: Bytes,
    /// Of sums, in words.
    order: &'static str,
    settings: Settings,
    context: Arc<Context>,
}

// SAFETY: handles of libraries that any one thread may use at a time; they are used by `&mut` only, with the context made
// current before.
unsafe impl Send for Bodies {}

/// Opens what a program's kernels need; nothing is compiled or chosen yet.
pub(super) fn open(
    context: &Context,
    program: &Arc<Program>,
    settings: Settings,
    agree: Option<Arc<dyn Agree>>,
) -> Result<Kernels, String> {
    let theirs = CudaContext::new(context.ordinal as usize).map_err(|e| format!("{e:?}"))?;
    // SAFETY: no event of theirs has been recorded; streams are ours, and so is their order.
    unsafe { theirs.disable_event_tracking() };
    let libraries = Libraries::load(&[]).map_err(|e| e.to_string())?;
    let options = Options {
        libraries: libraries.folders().iter().map(|f| f.path.clone()).collect(),
        tf32: settings.tf32,
        cudnn: !settings.no_cudnn && libraries.has(Library::Cudnn),
        agree,
        ..Options::default()
    };
    Kernels::new(theirs, Arc::clone(program), &options).map_err(|e| e.to_string())
}

/// What decides which kernels a rank launches and what they add up in which order. GPUs of other names may run together where
/// they agree in it; how much shared memory a block may have follows from the capability.
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
        because("none", &without_cudnn(settings, kernels))
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

/// Why there is no cuDNN.
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

impl Bodies {
    /// Compiles and chooses everything that the program launches.
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
        // SAFETY: the driver writes an address where it is told to; it is a multiple of 256.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&raw mut workspace, workspace_bytes.max(1) as usize)
        })
        .map_err(|e| format!("workspace of {workspace_bytes} bytes: {e}"))?;
        // SAFETY: so many bytes were allocated, for these kernels alone.
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

    /// Enqueues a kernel; capturable. `hyper` is the device address of the step's settings.
    ///
    /// # Safety
    /// The promise of [`RawRange`], for device memory.
    #[inline]
    pub(super) unsafe fn launch(
        &mut self,
        instr: InstrId,
        (reads, writes): (&[RawRange], &[RawRange]),
        hyper: sys::CUdeviceptr,
        stream: RawStream,
    ) -> Result<(), String> {
        // SAFETY: the caller's promise; one stream stands for each of the program's; the settings are written before the
        // pass begins.
        unsafe { self.kernels.launch(instr, reads, writes, hyper, stream.0) }
            .map_err(|e| e.to_string())
    }

    /// What kernels found wrong with their inputs (ids out of range); the device is idle.
    pub(super) fn fault(&mut self) -> Option<String> {
        self.kernels.fault().unwrap_or_else(|e| Some(e.to_string()))
    }

    /// What cuDNN was to perform and does not, and why.
    pub(super) fn refused(&self) -> &[String] {
        self.kernels.refused()
    }

    /// Facts for the run's environment.
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

/// A step's settings as kernels read them.
pub(super) fn settings_block(hyper: &Hyper) -> HyperBlock {
    hyper_block(hyper)
}

impl Drop for Bodies {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; nothing runs any more. Nothing can be done about errors here.
        unsafe {
            let _ = self.context.bind();
            let _ = sys::cuMemFree_v2(self.workspace);
        }
    }
}
