//! `[gate]`.

use crate::units::Bytes;
use serde::Serialize;

/// What of the program `shardlab gate` holds fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateProgram {
    /// Its digest.
    Exact,
    /// How many instructions of each kind there are.
    Counts,
    /// Nothing.
    Off,
}

words!(GateProgram {
    Exact = "exact",
    Counts = "counts",
    Off = "off",
});

/// What `shardlab gate` is for: it sets the defaults of the other keys of `[gate]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatePreset {
    /// The step has to fit and to stay within its budgets; growth beyond a tolerance fails,
    /// improvements and other changes of the program do not.
    #[default]
    Budget,
    /// Every change fails, for better or worse: allocated bytes and the program have to be equal.
    Strict,
}

words!(GatePreset {
    Budget = "budget",
    Strict = "strict",
});

/// `[gate]`: limits for `shardlab gate`, checked for form here and used there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// What the gate is for.
    pub preset: GatePreset,
    /// Relative tolerance of the predicted step time.
    pub step_time: f64,
    /// Relative tolerance of the ratio of measured step times, old against new.
    pub measured_step_time: f64,
    /// Relative tolerance of peak allocated bytes.
    pub allocated: f64,
    /// Relative tolerance of peak reserved bytes.
    pub reserved: f64,
    /// Relative tolerance of device bytes.
    pub device: f64,
    /// Most reserved memory of a rank, whatever the baseline has.
    pub max_memory: Option<Bytes>,
    /// Longest predicted step in milliseconds, likewise.
    pub max_step_ms: Option<f64>,
    /// Relative tolerance of each loss.
    pub loss: f64,
    /// Absolute tolerance of each loss, added to the relative one.
    pub loss_absolute: f64,
    /// Area between the loss curves over the area under the baseline's.
    pub loss_area: f64,
    /// How much worse the final loss may be, relative.
    pub final_loss: f64,
    /// Relative tolerance of each gradient norm.
    pub grad_norm: f64,
    /// Runs with different seeds.
    pub seeds: u32,
    /// What of the program may not change.
    pub program: GateProgram,
}

impl Default for Gate {
    fn default() -> Self {
        Self::of(GatePreset::default())
    }
}

impl Gate {
    /// The limits of a preset.
    #[must_use]
    pub const fn of(preset: GatePreset) -> Self {
        let (memory, allocated, program) = match preset {
            GatePreset::Budget => (0.02, 0.02, GateProgram::Off),
            GatePreset::Strict => (0.01, 0.0, GateProgram::Exact),
        };
        Self {
            preset,
            step_time: 0.005,
            measured_step_time: 0.05,
            allocated,
            reserved: memory,
            device: memory,
            max_memory: None,
            max_step_ms: None,
            loss: 1e-3,
            loss_absolute: 0.0,
            loss_area: 5e-4,
            final_loss: 1e-3,
            grad_norm: 0.01,
            seeds: 1,
            program,
        }
    }
}
