//! Utilisation of the device in a measured run.

use shardlab_plan::record::Run;
use shardlab_plan::units::Picos;
use shardlab_plan::{Program, Scenario};
use shardlab_sim::hardware;

/// Returns the model FLOPs utilisation of a measured run, relative to the peak in the scenario's
/// hardware profile. It is 0 if the profile describes another kind of device than the one used, or
/// cannot be read.
pub(crate) fn utilisation(scenario: &Scenario, program: &Program, run: &Run, on_cpu: bool) -> f64 {
    let Ok(profile) = hardware::load(&scenario.mesh.hardware) else {
        return 0.0;
    };
    if profile.device.shared_cores.is_some() != on_cpu {
        return 0.0;
    }
    let mut samples = run.step_samples.clone();
    samples.sort_unstable();
    let median = samples.get(samples.len() / 2).copied();
    profile.utilisation(program, median.unwrap_or(Picos::ZERO))
}
