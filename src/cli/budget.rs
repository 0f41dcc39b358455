//! Verdicts for scripts: whether predictions fit the device and stay within budgets.

use super::args::size;
use super::output::{Status, say};
use crate::analysis::basis::step_time;
use crate::predict::{Fit, Prediction};
use shardlab_plan::units::Bytes;

/// `--check` and budgets. Neither needs a baseline.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct Check {
    /// Exit with status 1 if a prediction does not fit the device's memory
    #[arg(long)]
    check: bool,
    /// Exit with status 1 if a prediction reserves more memory than this, such as 60GiB; implies
    /// --check
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_memory: Option<Bytes>,
    /// Exit with status 1 if a step takes longer than this many milliseconds; implies --check
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    max_step_ms: Option<f64>,
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix("ms").unwrap_or(text).trim_end();
    let ms = number.parse::<f64>().ok();
    ms.filter(|ms| ms.is_finite() && *ms > 0.0)
        .ok_or_else(|| "expected a number of milliseconds above 0, such as 950".to_owned())
}

impl Check {
    /// Judges a prediction if a check is requested. The verdict goes to stderr, because stdout is
    /// for the prediction.
    pub(super) fn judge(&self, p: &Prediction) -> Status {
        if !(self.check || self.max_memory.is_some() || self.max_step_ms.is_some()) {
            return Status::Done;
        }
        let name = &p.scenario.name;
        let failures = self.failures(p);
        if failures.is_empty() {
            let note = match &p.fit {
                Fit::Fits | Fit::Exceeds { .. } => String::new(),
                Fit::Tight { retries, .. } => format!(
                    " (tight: the allocator frees cached memory {retries} times, each time waiting for the device)"
                ),
                Fit::Unknown => " (the device's memory is not known)".to_owned(),
            };
            say(format_args!("check passed: {name}{note}"));
            return Status::Done;
        }
        for failure in failures {
            say(format_args!("check failed: {name}: {failure}"));
        }
        Status::CheckFailed
    }

    /// Returns the limits that a prediction violates, one sentence each.
    fn failures(&self, p: &Prediction) -> Vec<String> {
        let memory = &p.run.memory;
        let mut all = Vec::new();
        if let (Fit::Exceeds { .. }, Some(capacity)) = (&p.fit, memory.capacity) {
            let needed = memory.peak_device;
            all.push(format!(
                "does not fit: needs {needed}, the device has {capacity}"
            ));
        }
        if let Some(most) = self.max_memory.filter(|m| memory.peak_reserved > *m) {
            let reserved = memory.peak_reserved;
            all.push(format!("reserves {reserved}, --max-memory allows {most}"));
        }
        if let Some(most) = self.max_step_ms.filter(|ms| p.step_ms() > *ms) {
            let step = step_time(p.step_ms(), p.run.basis.as_ref());
            all.push(format!("a step takes {step}, --max-step-ms allows {most}"));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_above_zero() {
        assert_eq!(milliseconds("950"), Ok(950.0));
        assert_eq!(milliseconds("9.5 ms"), Ok(9.5));
        for bad in ["", "0", "-1", "inf", "NaN", "1s"] {
            assert!(milliseconds(bad).is_err(), "{bad}");
        }
    }
}
