//! Operands of a kernel launch.

use shardlab_plan::config::{GroupSettings, MAX_PARAM_GROUPS, MuonAdjustLr};
use shardlab_plan::ir::{DType, Kernel, Shape};
use shardlab_plan::program::{GroupRun, ScaleRun};
use smallvec::SmallVec;

/// A byte range of device memory, resolved for one rank, with its buffer's element type.
///
/// This is a plain address. Its creator guarantees that the range stays allocated while work that
/// uses it is in flight, and the program's waits guarantee that nothing else writes to it during
/// that time.
#[derive(Clone, Copy, Debug)]
pub struct RawRange {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub bytes: usize,
    /// Element type of the buffer.
    pub dtype: DType,
}

impl RawRange {
    /// Returns the same range as bytes.
    #[must_use]
    pub fn as_bytes(self) -> Self {
        Self {
            dtype: DType::U8,
            ..self
        }
    }
}

/// Returns the operands of a copy. If a buffer has the element type bytes, everything is copied as
/// bytes. This applies to gathers of weights in several types.
pub(crate) fn copied(reads: &[RawRange], writes: &[RawRange]) -> [SmallVec<[RawRange; 8]>; 2] {
    let bytes = |r: &RawRange| r.dtype == DType::U8;
    let all = reads.iter().chain(writes).any(bytes);
    let of = |ranges: &[RawRange]| {
        let as_copied = |r: &RawRange| if all { r.as_bytes() } else { *r };
        ranges.iter().map(as_copied).collect()
    };
    [of(reads), of(writes)]
}

// SAFETY: a range is an address; the contract in its documentation makes its uses sound on any
// thread.
unsafe impl Send for RawRange {}
// SAFETY: as above.
unsafe impl Sync for RawRange {}

/// Settings of Muon in addition to those of all optimizers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonSettings {
    /// Momentum.
    pub momentum: f64,
    /// Factor of the learning rate.
    pub adjust_lr: MuonAdjustLr,
}

/// No momentum.
pub const NO_MUON: MuonSettings = MuonSettings {
    momentum: 0.0,
    adjust_lr: MuonAdjustLr::Original,
};

/// Optimizer settings of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate of parameter group 0 in this step.
    pub lr: f64,
    /// AdamW betas.
    pub betas: [f64; 2],
    /// AdamW epsilon.
    pub eps: f64,
    /// Settings of Muon.
    pub muon: MuonSettings,
    /// Decoupled weight decay of parameter group 0.
    pub weight_decay: f64,
    /// Global norm limit; 0 means none.
    pub clip_norm: f64,
    /// Number of optimizer steps, including this one, for bias correction: 1 in the first step.
    pub step: u64,
    /// Settings of the parameter groups after group 0, whose settings are above. `None` after the
    /// last one.
    pub groups: [Option<GroupSettings>; MAX_PARAM_GROUPS - 1],
}

/// No parameter groups except group 0.
pub const ONE_GROUP: [Option<GroupSettings>; MAX_PARAM_GROUPS - 1] = [None; MAX_PARAM_GROUPS - 1];

impl Hyper {
    /// Returns the settings of a parameter group, or those of group 0 if it does not exist.
    #[must_use]
    pub fn of(&self, group: usize) -> Self {
        let settings = group.checked_sub(1).and_then(|g| *self.groups.get(g)?);
        match settings {
            Some(GroupSettings {
                weight_decay,
                lr_scale,
            }) => Self {
                lr: self.lr * lr_scale,
                weight_decay,
                ..*self
            },
            None => *self,
        }
    }
}

/// Settings for a pass without an optimizer.
pub const NO_HYPER: Hyper = Hyper {
    lr: 0.0,
    betas: [0.0; 2],
    eps: 0.0,
    muon: NO_MUON,
    weight_decay: 0.0,
    clip_norm: 0.0,
    step: 0,
    groups: ONE_GROUP,
};

/// Inputs of a launch in addition to its operands.
#[derive(Clone, Debug)]
pub struct LaunchContext<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Index of the rank among those that have separate samples.
    pub data_rank: u32,
    /// Optimizer settings of the step.
    pub hyper: Hyper,
    /// For `CopyOut` (writes) and `ChunkCat` (reads): shapes of the parameters in those operands,
    /// in order. For `Muon`: shapes of the matrices of its weights on this rank, and `[n]` for `n`
    /// elements of padding.
    pub shapes: &'a [Shape],
    /// For optimizers: parameter groups of the weights, in order. Empty if all are in group 0.
    pub groups: &'a [GroupRun],
    /// For `ShardAmax`, `ShardCast` and optimizers that compute maxima: scales of the weights, in
    /// order.
    pub scales: &'a [ScaleRun],
}
