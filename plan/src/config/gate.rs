//! `[gate]`.

use crate::units::Bytes;
use serde::Serialize;

/// The property of the program that must stay the same for `shardlab gate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateProgram {
    /// Its digest.
    Exact,
    /// The number of instructions of each kind.
    Counts,
    /// Nothing.
    Off,
}

words!(GateProgram {
    Exact = "exact",
    Counts = "counts",
    Off = "off",
});

/// Purpose of `shardlab gate`: it sets the defaults of the other keys of `[gate]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatePreset {
    /// The step has to fit in memory and stay within its budgets. Increases beyond a tolerance
    /// fail; improvements and other changes of the program pass.
    #[default]
    Budget,
    /// All changes fail, including improvements: allocated bytes and the program must be equal.
    Strict,
}

words!(GatePreset {
    Budget = "budget",
    Strict = "strict",
});

/// `[gate]`: limits for `shardlab gate`. Their form is checked here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// Purpose of the gate.
    pub preset: GatePreset,
    /// Relative tolerance of the predicted step time.
    pub step_time: f64,
    /// Relative tolerance of the measured step time of the new version against the old one.
    pub measured_step_time: f64,
    /// Relative tolerance of peak allocated bytes.
    pub allocated: f64,
    /// Relative tolerance of peak reserved bytes.
    pub reserved: f64,
    /// Relative tolerance of device bytes.
    pub device: f64,
    /// Maximum reserved memory of a rank, regardless of the baseline.
    pub max_memory: Option<Bytes>,
    /// Maximum predicted step time in milliseconds, regardless of the baseline.
    pub max_step_ms: Option<f64>,
    /// Relative tolerance of each loss.
    pub loss: f64,
    /// Absolute tolerance of each loss, added to the relative one.
    pub loss_absolute: f64,
    /// Maximum area between the loss curves, divided by the area under the baseline's curve.
    pub loss_area: f64,
    /// Maximum relative increase of the final loss.
    pub final_loss: f64,
    /// Relative tolerance of each gradient norm.
    pub grad_norm: f64,
    /// Number of runs with different seeds.
    pub seeds: u32,
    /// Property of the program that must not change.
    pub program: GateProgram,
}

impl Default for Gate {
    fn default() -> Self {
        Self::of(GatePreset::default())
    }
}

impl Gate {
    /// Returns the limits of a preset.
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
