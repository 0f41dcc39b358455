//! Predicts the run of a scenario: plans it, simulates it, and determines whether it fits.

mod basis;

pub use basis::Residual;

use shardlab_plan::ir::{Buffer, Pool, Role};
use shardlab_plan::program::Phase;
use shardlab_plan::record::Run;
use shardlab_plan::scenario::ScenarioError;
use shardlab_plan::units::Bytes;
use shardlab_plan::{Program, Scenario, lower::PlanError};
use shardlab_sim::hardware::{self, ProfileError};
use shardlab_sim::{Options, Profile, SimError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Hardware profiles. Each is read only once.
#[derive(Debug, Default)]
pub struct Profiles(Mutex<BTreeMap<String, Arc<Profile>>>);

impl Profiles {
    /// Returns the profile with this name or path.
    ///
    /// # Errors
    /// Fails if there is no such profile, or it is invalid.
    pub fn get(&self, name: &str) -> Result<Arc<Profile>, ProfileError> {
        // The map stays consistent after a panic in another thread, because entries are only
        // inserted.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(profile) = known.get(name) {
            return Ok(Arc::clone(profile));
        }
        let profile = Arc::new(hardware::load(name)?);
        known.insert(name.to_owned(), Arc::clone(&profile));
        Ok(profile)
    }
}

/// Reason why there is no prediction.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PredictError {
    /// The scenario is not valid.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// The scenario cannot be planned.
    #[error("{scenario}: {error}")]
    Plan {
        /// Scenario.
        scenario: String,
        /// Reason.
        error: PlanError,
    },
    /// The hardware profile cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The simulation failed.
    #[error("{scenario}: {error}")]
    Sim {
        /// Scenario.
        scenario: String,
        /// Reason.
        error: SimError,
    },
}

impl PredictError {
    /// Returns whether the user's input is the cause, rather than the run.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        !matches!(self, Self::Sim { error, .. } if !matches!(error, SimError::Options(_)))
    }

    /// Returns the reason as one sentence, without the scenario's name or an excerpt of its text.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Scenario(e) => e.message().to_owned(),
            Self::Plan { error, .. } => error.to_string(),
            Self::Profile(e) => e.to_string(),
            Self::Sim { error, .. } => error.to_string(),
        }
    }
}

/// Peaks of memory on a device with enough memory. On a device with less, they are cut to its
/// capacity, so they no longer show which of two runs takes more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Peak of reserved memory.
    pub reserved: Bytes,
    /// Peak of device memory.
    pub device: Bytes,
}

impl Needs {
    fn of(run: &Run) -> Self {
        Self {
            reserved: run.memory.peak_reserved,
            device: run.memory.peak_device,
        }
    }
}

/// Whether a run fits the device's memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// It fits.
    Fits,
    /// It fits, but the allocator has to free cached memory during the step, which synchronises the
    /// device.
    Tight {
        /// Number of times the allocator does so over the simulated steps.
        retries: u32,
        /// Memory that the run takes on a device with enough memory.
        needs: Needs,
    },
    /// It does not fit. The numbers are those of a device with enough memory.
    Exceeds {
        /// Bytes needed beyond the device's capacity, at the peak.
        over: Bytes,
        /// Where device memory runs out, if that was simulated: the phase, and the memory in use by
        /// role.
        out_of_memory: Option<(Phase, Vec<(Role, Bytes)>)>,
    },
    /// The capacity of the device is unknown.
    Unknown,
}

impl Fit {
    /// Returns whether the run fits, as far as is known.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        !matches!(self, Self::Exceeds { .. })
    }

    /// Compares the peak of a run with unlimited memory with the device's capacity.
    fn of_peak(run: &Run) -> Self {
        let needed = run.memory.peak_device;
        match run.memory.capacity {
            None => Self::Unknown,
            Some(capacity) if needed <= capacity => Self::Fits,
            Some(capacity) => Self::Exceeds {
                over: Bytes(needed.0 - capacity.0),
                out_of_memory: None,
            },
        }
    }

    /// Returns one word for tables.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Fits => "yes",
            Self::Tight { .. } => "tight",
            Self::Exceeds { .. } => "no",
            Self::Unknown => "?",
        }
    }
}

/// Explains [`Fit::Tight`] below a table.
pub(crate) const TIGHT: &str = "tight: fits, but only after the caching allocator frees blocks mid-step (each cudaFree synchronizes the device).";

/// A scenario's program and predicted run.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// Scenario.
    pub scenario: Scenario,
    /// Program.
    pub program: Program,
    /// Hardware.
    pub profile: Arc<Profile>,
    /// Run.
    pub run: Run,
    /// Whether it fits.
    pub fit: Fit,
}

impl Prediction {
    /// Returns the step time, milliseconds: the median of the samples.
    #[must_use]
    pub fn step_ms(&self) -> f64 {
        self.run.step_ms()
    }

    /// Returns the device memory that the run never uses, bytes. The result is negative if the run
    /// needs more than the device has, and `None` if the capacity is unknown.
    #[must_use]
    pub fn free_bytes(&self) -> Option<i64> {
        self.free_of(self.run.memory.peak_device)
    }

    /// Returns the host memory of a rank that holds offloaded state between its uses
    /// (`fsdp.offload`): parameters, gradients and moments. Zero if none is offloaded.
    #[must_use]
    pub fn host_state(&self) -> Bytes {
        let is_state = |b: &&Buffer| {
            let state = [Role::OptimizerState, Role::MainWeight, Role::MainGrad];
            b.pool == Pool::Host && state.contains(&b.role)
        };
        let all = self.program.buffers.iter().filter(is_state);
        all.map(|b| b.bytes).sum()
    }

    /// Returns the number of ranks of a node, at most.
    #[must_use]
    pub fn ranks_per_node(&self) -> u64 {
        let mesh = &self.scenario.mesh;
        u64::from(mesh.gpus_per_node.min(mesh.world()))
    }

    /// Returns the device memory that is left if the run takes `device` at its peak.
    pub(crate) fn free_of(&self, device: Bytes) -> Option<i64> {
        let signed = |b: Bytes| i64::try_from(b.0).unwrap_or(i64::MAX);
        Some(signed(self.run.memory.capacity?) - signed(device))
    }

    /// Returns the memory that the run takes without the limit of the device.
    #[must_use]
    pub fn needs(&self) -> Needs {
        match self.fit {
            Fit::Tight { needs, .. } => needs,
            // All other runs were simulated without the limit.
            _ => Needs::of(&self.run),
        }
    }

    /// Returns whether the run fits and leaves at least `share` (0 to 1) of the device's memory
    /// free, as far as is known.
    #[must_use]
    pub fn leaves(&self, share: f64) -> bool {
        let capacity = self.run.memory.capacity;
        let enough = |free: i64| free as f64 >= share * capacity.map_or(0.0, |c| c.0 as f64);
        self.fit.is_ok() && self.free_bytes().is_none_or(enough)
    }

    /// Returns tokens per second and GPU.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        self.run.tokens_per_s()
    }
}

/// Plans and simulates a scenario.
///
/// Memory is unlimited at first, so that a step that does not fit also has a prediction. If the
/// peak exceeds the device's capacity, a second simulation enforces the limit. If freeing cached
/// memory is enough, the step still fits, and the result is that of the second simulation.
///
/// # Errors
/// See [`PredictError`]. Insufficient memory is not an error; see [`Fit`].
pub fn predict(
    scenario: &Scenario,
    profiles: &Profiles,
    options: &Options,
) -> Result<Prediction, PredictError> {
    planned(scenario, profiles, |program, profile| {
        predict_program(scenario, program, profile, options)
    })
}

/// Plans a scenario, and adds the basis to the prediction of `simulate`.
fn planned(
    scenario: &Scenario,
    profiles: &Profiles,
    simulate: impl FnOnce(Program, Arc<Profile>) -> Result<Prediction, PredictError>,
) -> Result<Prediction, PredictError> {
    let profile = profiles.get(&scenario.mesh.hardware)?;
    let program = shardlab_plan::plan(scenario).map_err(|error| PredictError::Plan {
        scenario: scenario.name.clone(),
        error,
    })?;
    let mut prediction = simulate(program, profile)?;
    prediction.run.basis = Some(basis::basis(&prediction));
    Ok(prediction)
}

/// Simulates a program of a scenario.
fn simulate(
    scenario: &Scenario,
    program: &Program,
    profile: &Profile,
    options: &Options,
) -> Result<Run, PredictError> {
    shardlab_sim::simulate(program, profile, options).map_err(|error| PredictError::Sim {
        scenario: scenario.name.clone(),
        error,
    })
}

/// Like [`predict`], but uses only the peak, from a single simulation: a step that fits only after
/// cached memory is freed counts as one that does not fit.
///
/// # Errors
/// See [`predict`].
pub(crate) fn predict_peak(
    scenario: &Scenario,
    profiles: &Profiles,
    options: &Options,
) -> Result<Prediction, PredictError> {
    planned(scenario, profiles, |program, profile| {
        let run = simulate(scenario, &program, &profile, options)?;
        let fit = Fit::of_peak(&run);
        Ok(Prediction {
            scenario: scenario.clone(),
            program,
            profile,
            run,
            fit,
        })
    })
}

/// Simulates a program that was planned with the options of this scenario.
///
/// # Errors
/// Returns [`PredictError`] if the simulation fails.
pub(crate) fn predict_program(
    scenario: &Scenario,
    program: Program,
    profile: Arc<Profile>,
    options: &Options,
) -> Result<Prediction, PredictError> {
    let mut run = simulate(scenario, &program, &profile, options)?;
    let mut fit = Fit::of_peak(&run);
    if let Fit::Exceeds { out_of_memory, .. } = &mut fit {
        let enforced = Options {
            enforce_memory: true,
            ..options.clone()
        };
        match simulate(scenario, &program, &profile, &enforced) {
            Ok(limited) => {
                let needs = Needs::of(&run);
                run = limited;
                fit = Fit::Tight {
                    retries: run.memory.retries,
                    needs,
                };
            }
            Err(PredictError::Sim {
                error: SimError::OutOfMemory { phase, by_role, .. },
                ..
            }) => *out_of_memory = Some((phase, by_role)),
            // A pool has no cached memory that could be freed. It needs all the memory that it
            // plans.
            Err(PredictError::Sim {
                error: SimError::Alloc { .. },
                ..
            }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Prediction {
        scenario: scenario.clone(),
        program,
        profile,
        run,
        fit,
    })
}

/// Like [`predict`], but without spans, gaps and the memory timeline, for predicting many points.
///
/// # Errors
/// See [`predict`].
pub(crate) fn predict_light(
    scenario: &Scenario,
    profiles: &Profiles,
) -> Result<Prediction, PredictError> {
    let options = Options {
        record: false,
        ..Options::default()
    };
    predict(scenario, profiles, &options)
}
