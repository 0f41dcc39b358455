//! Fits how much ranks on shared cores slow each other down, so that the predicted steps of several
//! ranks match the measured ones.

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use shardlab_exec::calibrate::{Calibration, Together, Trial};
use shardlab_plan::units::Picos;
use shardlab_sim::{Options, Profile, hardware, simulate_light};

/// Number of waiting times to try.
const WAITS: u32 = 4;
/// Number of bisections of the loss interval.
const HALVINGS: u32 = 6;
/// Largest loss to try.
const MAX_LOSS: f64 = 0.5;
const MAX_WAIT_US: f64 = 160.0;

/// Returns the profile with the smallest error over the measured steps.
pub(super) fn fit(c: &Calibration, note: &mut dyn FnMut(&str)) -> Result<String, String> {
    let plain = c.profile(Together::default());
    let mut profile = hardware::parse("the measured profile", &plain).map_err(|e| e.to_string())?;
    let ranks = |t: &&Trial| t.program.meta.mesh.world();
    let (few, many): (Vec<&Trial>, Vec<&Trial>) =
        c.trials().iter().partition(|t| ranks(t) <= c.cores());
    let mut best = (f64::INFINITY, Together::default());
    for i in 0..=WAITS {
        let wait_us = MAX_WAIT_US * f64::from(i) / f64::from(WAITS);
        let (a, shared_loss) = loss(&mut profile, &few, wait_us)?;
        let (b, turn_loss) = loss(&mut profile, &many, wait_us)?;
        let together = Together {
            shared_loss,
            turn_loss: if many.is_empty() {
                shared_loss
            } else {
                turn_loss
            },
            wait_us,
        };
        if a + b < best.0 {
            best = (a + b, together);
        }
    }
    let (error, together) = best;
    let n = c.trials().len().max(1);
    note(&format!(
        "{n} steps of several ranks: mean prediction error {:.1} %, if ranks on busy cores lose {:.0} % of \
         their speed ({:.0} % if they outnumber the cores) and wait {:.0} us for each other",
        100.0 * error / n as f64,
        100.0 * together.shared_loss,
        100.0 * together.turn_loss,
        together.wait_us,
    ));
    Ok(c.profile(together))
}

/// Returns the loss that fits these runs best, and the sum of their errors.
fn loss(profile: &mut Profile, trials: &[&Trial], wait_us: f64) -> Result<(f64, f64), String> {
    profile.contention.shared_wait_us = wait_us;
    // The errors are signed: a larger loss makes every prediction longer.
    let mut errors = |loss: f64| -> Result<(f64, f64), String> {
        profile.contention.shared_loss = loss;
        profile.contention.turn_loss = None;
        let profile = &*profile;
        let off = |t: &&Trial| predicted(t, profile).map(|p| distance(p, t.step));
        let all: Vec<f64> = trials.par_iter().map(off).collect::<Result<_, _>>()?;
        Ok((all.iter().sum(), all.iter().map(|off| off.abs()).sum()))
    };
    let (mut low, mut high) = (0.0, MAX_LOSS);
    let mut best = (errors(low)?.1, low);
    for _ in 0..HALVINGS {
        let middle = 0.5 * (low + high);
        let (sum, distances) = errors(middle)?;
        if sum < 0.0 {
            low = middle;
        } else {
            high = middle;
        }
        if distances < best.0 {
            best = (distances, middle);
        }
    }
    Ok(best)
}

pub(super) fn predicted(t: &Trial, profile: &Profile) -> Result<Picos, String> {
    let run =
        simulate_light(&t.program, profile, &Options::default()).map_err(|e| e.to_string())?;
    Ok(run.step_samples.last().copied().unwrap_or(Picos::ZERO))
}

/// Returns the error of a prediction as a logarithm; negative if the prediction is too short.
pub(super) fn distance(predicted: Picos, measured: Picos) -> f64 {
    (predicted.ms().max(1e-9) / measured.ms().max(1e-9)).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_and_double_are_as_wrong() {
        let ms = |x: f64| Picos::from_us(1e3 * x);
        assert_eq!(distance(ms(2.0), ms(2.0)), 0.0);
        assert!((distance(ms(1.0), ms(2.0)) + distance(ms(4.0), ms(2.0))).abs() < 1e-12);
        assert!(distance(ms(1.0), ms(2.0)) < 0.0);
    }
}
