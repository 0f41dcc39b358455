//! A profile whose host speed is derived from a measured step.

use super::Onto;
use crate::cli::output::{Failure, say};
use shardlab_exec::calibrate::UserScenario;
use shardlab_plan::scenario;
use shardlab_sim::{Options, Part, simulate_light};

/// Smallest and largest factor to try.
const FACTORS: [f64; 2] = [0.1, 20.0];
/// Number of bisections of the interval of factors.
const HALVINGS: u32 = 20;
/// If a host that is 10 % slower makes a step longer by less than this share, the step contains
/// little information about the host.
const MIN_SHARE: f64 = 0.03;

/// Returns the text of a profile with which a step of the scenario takes `step_ms`. This is the
/// profile `base`, or else that of the scenario, with another factor for the host.
///
/// # Errors
/// Returns bad input if the scenario or the profile cannot be read, or if no host speed explains
/// the step.
pub(super) fn profile(
    job: &UserScenario,
    step_ms: f64,
    base: Option<&str>,
    name: Option<&str>,
) -> Result<String, Failure> {
    let s = scenario::load(&job.scenario, &job.sets).map_err(Failure::bad_input)?;
    let base = base.unwrap_or(&s.mesh.hardware).to_owned();
    let mut onto = Onto::load_any(&base, name)?;
    let program = shardlab_plan::plan(&s).map_err(Failure::bad_input)?;
    let step = |factor: f64| {
        let options = Options {
            slower: vec![(Part::Host, factor)],
            ..Options::default()
        };
        let run = simulate_light(&program, &onto.profile, &options).map_err(Failure::run)?;
        Ok(run.step_samples.last().map_or(0.0, |step| step.ms()))
    };
    let factor = factor(step_ms, step)?;
    let about = format!(
        "{} measured with {step_ms} ms per step, relative to {base}",
        program.meta.scenario
    );
    onto.text = with_host_scale(&onto.text, factor, &about);
    say(format_args!(
        "note: the host takes {factor:.2} times as long as that of {base}"
    ));
    Ok(onto.with(""))
}

/// Returns the factor for the host with which `step` returns the measured time. Both times are in
/// milliseconds.
fn factor(measured: f64, step: impl Fn(f64) -> Result<f64, Failure>) -> Result<f64, Failure> {
    let [mut low, mut high] = FACTORS;
    let (fastest, slowest) = (step(low)?, step(high)?);
    if measured <= fastest {
        return Err(Failure::bad_input(format_args!(
            "--step-ms: the device alone is predicted to take {fastest:.1} ms, so {measured} ms do not show how fast the host is; use a job with a smaller model, shorter sequences or a smaller micro-batch"
        )));
    }
    if measured >= slowest {
        return Err(Failure::bad_input(format_args!(
            "--step-ms: {measured} ms are more than the {slowest:.1} ms that are predicted with a host {high} times as slow; is it the median of steady steps of this job, without a profiler?"
        )));
    }
    for _ in 0..HALVINGS {
        let middle = (low * high).sqrt();
        if step(middle)? < measured {
            low = middle;
        } else {
            high = middle;
        }
    }
    let found = (low * high).sqrt();
    if step(1.1 * found)? < (1.0 + MIN_SHARE) * measured {
        return Err(Failure::bad_input(format_args!(
            "--step-ms: the device is the bottleneck of this job, so its step time does not show how fast the host is; use a job with a smaller model, shorter sequences or a smaller micro-batch"
        )));
    }
    Ok(found)
}

/// Returns the text of a profile in which the host takes `factor` times as long, in addition to the
/// profile's own `[scale]`.
pub(super) fn with_host_scale(text: &str, factor: f64, about: &str) -> String {
    const SECTION: &str = "[scale]";
    let lines: Vec<&str> = text.lines().collect();
    let Some(start) = lines.iter().position(|line| line.trim() == SECTION) else {
        // Arrays of tables come last.
        let at = lines.iter().position(|line| line.starts_with("[["));
        let (head, tail) = lines.split_at(at.unwrap_or(lines.len()));
        let section = format!("{SECTION}\nsource = \"host: {about}\"\nhost = {factor:.3}\n");
        return [head.join("\n"), section, tail.join("\n")].join("\n");
    };
    let section = &lines[start + 1..];
    let length = section.iter().position(|line| line.starts_with('['));
    let section = &section[..length.unwrap_or(section.len())];
    let value = |line: &&str| line.strip_prefix("host = ")?.trim().parse::<f64>().ok();
    let own = section.iter().find_map(value);
    let mut out: Vec<String> = lines[..=start].iter().map(|&l| l.to_owned()).collect();
    out.push(format!("host = {:.3}", own.unwrap_or(1.0) * factor));
    for line in section.iter().filter(|line| value(line).is_none()) {
        out.push(match line.strip_suffix('"') {
            Some(source) if line.starts_with("source = ") => {
                format!("{source}; host: {about}, times what it was\"")
            }
            _ => (*line).to_owned(),
        });
    }
    let rest = &lines[start + 1 + section.len()..];
    out.extend(rest.iter().map(|&l| l.to_owned()));
    out.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_explains_a_step_that_waits_for_it() {
        // 40 ms on the device, and 30 ms on the host at the same time.
        let step = |factor: f64| Ok(f64::max(40.0, 30.0 * factor));
        let found = factor(90.0, step).unwrap_or_default();
        assert!((found - 3.0).abs() < 1e-3, "{found}");
        for measured in [30.0, 40.0, 1000.0] {
            assert!(factor(measured, step).is_err(), "{measured}");
        }
        // A device that is nearly always the bottleneck.
        let step = |factor: f64| Ok(40.0 + 0.3 * factor);
        assert!(factor(41.0, step).is_err());
    }

    #[test]
    fn the_scale_of_the_host_is_multiplied_or_added() {
        let old = "name = \"a\"\n\n[scale]\nsource = \"one run\"\nhost = 1.2\nmemory = 1.1\n\n[device]\nsms = 1\n\n[[gemm]]\n";
        assert_eq!(
            with_host_scale(old, 1.5, "trace"),
            "name = \"a\"\n\n[scale]\nhost = 1.800\nsource = \"one run; host: trace, times what it was\"\nmemory = 1.1\n\n[device]\nsms = 1\n\n[[gemm]]\n"
        );
        let without = "name = \"a\"\n\n[device]\nsms = 1\n\n[[gemm]]\nrows = []\n";
        assert_eq!(
            with_host_scale(without, 1.5, "trace"),
            "name = \"a\"\n\n[device]\nsms = 1\n\n[scale]\nsource = \"host: trace\"\nhost = 1.500\n\n[[gemm]]\nrows = []"
        );
    }
}
