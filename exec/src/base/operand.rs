//! Operands of a kernel launch.

use shardlab_plan::ir::{DType, Kernel, Shape};

/// A byte range of device memory, resolved for one rank, with its buffer's element type.
///
/// It is a plain address. Its creator guarantees that the range stays allocated while work that
/// uses it is in flight, and the program's waits guarantee that nothing else writes it meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct RawRange {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub bytes: usize,
    /// Element type of the buffer.
    pub dtype: DType,
}

// SAFETY: a range is an address; the contract in its documentation makes its uses sound on any
// thread.
unsafe impl Send for RawRange {}
// SAFETY: as above.
unsafe impl Sync for RawRange {}

/// Optimizer settings of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate of this step.
    pub lr: f64,
    /// AdamW betas.
    pub betas: [f64; 2],
    /// AdamW epsilon.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Global norm limit; 0 means none.
    pub clip_norm: f64,
    /// Optimizer steps including this one (for bias correction): 1 in the first step.
    pub step: u64,
}

/// Settings of a pass that runs no optimizer.
pub const NO_HYPER: Hyper = Hyper {
    lr: 0.0,
    betas: [0.0; 2],
    eps: 0.0,
    weight_decay: 0.0,
    clip_norm: 0.0,
    step: 0,
};

/// Inputs of a launch in addition to its operands.
#[derive(Clone, Debug)]
pub struct LaunchContext<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Optimizer settings of the step.
    pub hyper: Hyper,
    /// For `CopyOut` (writes) and `ChunkCat` (reads): shapes of the parameters behind those
    /// operands, in order.
    pub shapes: &'a [Shape],
}
