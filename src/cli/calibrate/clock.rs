//! Fits the GPU clock for the user's scenarios, so that the predicted step times match the measured
//! ones.

use super::fit::{distance, predicted};
use shardlab_exec::calibrate::{AddedKernels, Trial};
use shardlab_sim::hardware;

/// Number of bisections of the interval of factors, and of rounds over the scenarios. Kernels that
/// several scenarios share get the mean of their factors.
const FINER: u32 = 9;
const ROUNDS: u32 = 2;
/// Step time in milliseconds below which the host may cause the error of a prediction.
const SHORT_STEP_MS: f64 = 20.0;
/// Maximum factor by which arithmetic in training may be slower or faster than when measured alone.
const MAX_FACTOR: f64 = 1.25;

/// Returns the profile with which predictions for the user's scenarios match the measurements.
/// `whole` makes a profile from tables.
pub(super) fn fit(
    added: &AddedKernels,
    whole: impl Fn(&str) -> String,
    note: &mut dyn FnMut(&str),
) -> Result<String, String> {
    let trials: Vec<&Trial> = added.trials().collect();
    let off = |i: usize, factors: &[f64]| -> Result<f64, String> {
        let text = whole(&added.tables(factors));
        let profile = hardware::parse("the measured profile", &text).map_err(|e| e.to_string())?;
        Ok(distance(predicted(trials[i], &profile)?, trials[i].step))
    };
    let informative: Vec<bool> = trials
        .iter()
        .map(|t| t.step.ms() >= SHORT_STEP_MS)
        .collect();
    let factors = factors(&informative, off)?;
    let as_measured = vec![1.0; trials.len()];
    for (i, trial) in trials.iter().enumerate() {
        let after = if informative[i] {
            let off = 100.0 * off(i, &factors)?.exp_m1();
            format!(
                ", {off:+.1} % with matmuls and attention scaled by {:.3}",
                factors[i]
            )
        } else {
            ", not scaled: the step is too short to separate kernels from host work".to_owned()
        };
        note(&format!(
            "{:.3} ms/step of {}: predicted {:+.1} % with kernels as measured{after}",
            trial.step.ms(),
            trial.program.meta.scenario,
            100.0 * off(i, &as_measured)?.exp_m1(),
        ));
    }
    Ok(whole(&added.tables(&factors)))
}

/// Returns for each scenario the factor on the time of arithmetic with which `off` is 0, if the
/// scenario is `informative`. `off` is negative if a scenario's prediction with all factors is too
/// short. Longer arithmetic makes every prediction longer.
fn factors(
    informative: &[bool],
    off: impl Fn(usize, &[f64]) -> Result<f64, String>,
) -> Result<Vec<f64>, String> {
    let mut factors = vec![1.0; informative.len()];
    for _ in 0..ROUNDS {
        for i in (0..informative.len()).filter(|&i| informative[i]) {
            let (mut low, mut high) = (1.0 / MAX_FACTOR, MAX_FACTOR);
            for _ in 0..FINER {
                factors[i] = 0.5 * (low + high);
                if off(i, &factors)? < 0.0 {
                    low = factors[i];
                } else {
                    high = factors[i];
                }
            }
        }
    }
    Ok(factors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_found_for_informative_scenarios() {
        // The second scenario shares a tenth of its kernels with the first, the third determines
        // nothing, and the fourth cannot be matched.
        let wanted = [1.1, 0.95, 1.0, 2.0];
        let off = |i: usize, f: &[f64]| {
            let shared = if i == 1 {
                0.1 * (f[0] - wanted[0])
            } else {
                0.0
            };
            Ok(f[i] - wanted[i] + shared)
        };
        let found = factors(&[true, true, false, true], off).unwrap();
        assert!((found[0] - 1.1).abs() < 2e-3, "{found:?}");
        assert!((found[1] - 0.95).abs() < 2e-3, "{found:?}");
        assert_eq!(found[2], 1.0);
        assert!(MAX_FACTOR - found[3] < 2e-3, "{found:?}");
        let failed = factors(&[true], |_, _| Err("why".to_owned()));
        assert_eq!(failed, Err("why".to_owned()));
    }
}
