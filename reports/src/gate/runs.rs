//! Judges measured runs of the user's own jobs: one run against another, without a scenario.
//!
//! Memory is deterministic and compared directly. The times of the two jobs were not measured in
//! turns, so drift of the machine counts as a change; limits should allow for it.

use super::finding::{Class, Finding, Status, Verdict};
use super::limits::{Limit, Limits, percent};
use super::metric::{MEASURED_COLLECTIVES, MEASURED_MEMORY, MEASURED_STEP};
use crate::stats::{self, Options, Samples};
use crate::view::RunView;
use shardlab_plan::config::GatePreset;
use shardlab_plan::units::{Bytes, signed};
use std::collections::BTreeMap;

/// Minimum number of steps on each side for a statistical test.
const MIN_STEPS: usize = crate::stats::MIN_SAMPLES;

/// Why a measured run cannot be judged by a budget.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Unrecorded {
    /// The run has no record of memory.
    #[error(
        "has no record of memory, so gate.max_memory ({}) cannot be judged: give a memory snapshot of the same steps with the trace, or record the trace with profile_memory=True",
        Bytes(*budget as u64)
    )]
    Memory {
        /// Budget in bytes.
        budget: f64,
    },
    /// The run has no complete step.
    #[error(
        "has no complete step, so gate.max_step_ms ({budget} ms) cannot be judged: profile at least one whole step, including its optimizer"
    )]
    Step {
        /// Budget in milliseconds.
        budget: f64,
    },
}

/// Judges `after` against `before`: peak memory, step time and collectives.
///
/// # Errors
/// Fails if a budget is set for something that `after` did not record. A comparison with `before`
/// is skipped if one of the two did not record it.
pub fn judge(before: &RunView, after: &RunView, limits: &Limits) -> Result<Verdict, Unrecorded> {
    let [allocated, reserved] = MEASURED_MEMORY;
    let (a, b) = (&before.run.memory, &after.run.memory);
    let mut findings = vec![
        memory(
            allocated,
            [a.allocated(), b.allocated()],
            &limits.allocated,
            limits,
        ),
        memory(
            reserved,
            [a.reserved(), b.reserved()],
            &limits.reserved,
            limits,
        ),
        time(&before.samples_ms(), &after.samples_ms(), limits),
        collectives(before, after, limits),
    ];
    findings.extend(budgets(after, limits)?);
    Ok(Verdict::new(
        &after.scenario.name,
        limits.preset,
        None,
        findings,
    ))
}

/// Judges `after` by its budgets alone; `None` if there are none.
///
/// # Errors
/// Fails if a budget is set for something that `after` did not record.
pub fn judge_budgets(after: &RunView, limits: &Limits) -> Result<Option<Verdict>, Unrecorded> {
    let findings = budgets(after, limits)?;
    let name = &after.scenario.name;
    let verdict = || Verdict::new(name, limits.preset, None, findings.clone());
    Ok((!findings.is_empty()).then(verdict))
}

fn finding(class: Class, metric: &str, limit: String, limits: &Limits) -> Finding {
    Finding {
        class,
        metric: metric.to_owned(),
        status: Status::Pass,
        baseline: String::new(),
        now: String::new(),
        limit,
        message: String::new(),
        detail: String::new(),
        place: limits.scenario.clone(),
    }
}

/// Returns the outcome of a relative change.
fn outcome(change: f64, limit: f64, preset: GatePreset) -> Status {
    if change > limit {
        Status::Regression
    } else if change < -limit && preset == GatePreset::Strict {
        Status::Improvement
    } else {
        Status::Pass
    }
}

fn memory(metric: &str, sides: [Option<Bytes>; 2], limit: &Limit, limits: &Limits) -> Finding {
    let f = finding(Class::Memory, metric, limit.relative(limits.preset), limits);
    let (before, after) = match sides {
        [Some(before), Some(after)] => (before, after),
        [before, after] => {
            let lacks = match (before, after) {
                (None, None) => "neither run has a record of memory",
                (None, _) => "the baseline has no record of memory",
                _ => "this run has no record of memory",
            };
            return Finding {
                status: Status::Skipped,
                message: lacks.into(),
                ..f
            };
        }
    };
    let change = after.0 as f64 / before.0 as f64 - 1.0;
    let status = outcome(change, limit.value, limits.preset);
    Finding {
        status,
        baseline: before.to_string(),
        now: after.to_string(),
        message: if status == Status::Pass {
            String::new()
        } else {
            format!("{} %", signed(100.0 * change, 2))
        },
        ..f
    }
}

fn time(before: &[f64], after: &[f64], limits: &Limits) -> Finding {
    let limit = &limits.measured_step_time;
    let f = finding(
        Class::Time,
        MEASURED_STEP,
        limit.relative(limits.preset),
        limits,
    );
    if before.is_empty() || after.is_empty() {
        return Finding {
            status: Status::Skipped,
            message: "a run has no complete step".into(),
            ..f
        };
    }
    let [x, y] = [before, after].map(median);
    let change = y / x - 1.0;
    let (status, message) = if before.len().min(after.len()) < MIN_STEPS {
        few(before, after, change, limits)
    } else {
        tested(before, after, change, limits)
    };
    Finding {
        status,
        baseline: format!("{x:.3} ms"),
        now: format!("{y:.3} ms"),
        message,
        ..f
    }
}

/// Compares a few steps. A change counts only if the times of the two sides do not overlap.
fn few(before: &[f64], after: &[f64], change: f64, limits: &Limits) -> (Status, String) {
    let limit = limits.measured_step_time.value;
    let most = |all: &[f64]| all.iter().copied().fold(f64::MIN, f64::max);
    let least = |all: &[f64]| all.iter().copied().fold(f64::MAX, f64::min);
    let apart = match change > 0.0 {
        true => least(after) > most(before),
        false => most(after) < least(before),
    };
    let steps = format!(
        "{} % over {} and {} steps",
        signed(100.0 * change, 1),
        before.len(),
        after.len()
    );
    match outcome(change, limit, limits.preset) {
        Status::Pass => (Status::Pass, String::new()),
        status if apart => (status, steps),
        _ => (
            Status::Inconclusive,
            format!("{steps}, whose ranges overlap; {MIN_STEPS} steps or more on each side decide"),
        ),
    }
}

/// Compares many steps by the ratio of their medians, with an interval.
fn tested(before: &[f64], after: &[f64], change: f64, limits: &Limits) -> (Status, String) {
    let limit = limits.measured_step_time.value;
    let options = Options {
        threshold: limit.clamp(0.0, 0.999),
        block: Options::block_of(before.len()).max(Options::block_of(after.len())),
        ..Options::default()
    };
    let compared = stats::compare(
        Samples::Measured(before),
        Samples::Measured(after),
        &options,
    );
    let Ok(c) = compared else {
        return few(before, after, change, limits);
    };
    let sentence = format!(
        "{} % ({:.0} % interval {} to {} %)",
        signed(100.0 * c.change(), 1),
        100.0 * c.ratio.level,
        signed(100.0 * (c.ratio.low - 1.0), 1),
        signed(100.0 * (c.ratio.high - 1.0), 1)
    );
    let status = if c.ratio.low > 1.0 + limit {
        Status::Regression
    } else if c.ratio.high < 1.0 - limit && limits.preset == GatePreset::Strict {
        Status::Improvement
    } else if c.ratio.high <= 1.0 + limit {
        Status::Pass
    } else {
        Status::Inconclusive
    };
    match status {
        Status::Pass => (status, String::new()),
        _ => (status, sentence),
    }
}

/// Compares the number and the bytes of collectives per step.
fn collectives(before: &RunView, after: &RunView, limits: &Limits) -> Finding {
    let sums = |view: &RunView| -> BTreeMap<&'static str, (u64, u64)> {
        let mut all = BTreeMap::new();
        let instrs = view.instrs.iter();
        for (work, i) in instrs.filter_map(|i| Some((i.work?, i))) {
            if work.is_collective() {
                let of: &mut (u64, u64) = all.entry(work.name()).or_default();
                of.0 += 1;
                of.1 += i.bytes;
            }
        }
        all
    };
    let (a, b) = (sums(before), sums(after));
    let words = |all: &BTreeMap<&str, (u64, u64)>| {
        let each = all
            .iter()
            .map(|(name, (n, bytes))| format!("{n} {name} ({})", Bytes(*bytes)));
        each.collect::<Vec<_>>().join(", ")
    };
    let total = |all: &BTreeMap<&str, (u64, u64)>| all.values().map(|v| v.1).sum::<u64>();
    let f = finding(Class::Program, MEASURED_COLLECTIVES, String::new(), limits);
    let status = match a == b {
        true => Status::Pass,
        false if limits.preset == GatePreset::Strict => Status::Changed,
        false if total(&b) > total(&a) => Status::Regression,
        false => Status::Pass,
    };
    let message = match a == b {
        true => String::new(),
        false => format!("{} instead of {}", words(&b), words(&a)),
    };
    Finding {
        status,
        message,
        ..f
    }
}

/// Compares with absolute limits, if the user set some.
fn budgets(after: &RunView, limits: &Limits) -> Result<Vec<Finding>, Unrecorded> {
    let mut all = Vec::new();
    let mut one = |class, metric, limit: &Limit, now: f64, words: &dyn Fn(f64) -> String| {
        let f = finding(class, metric, format!("≤ {}", words(limit.value)), limits);
        let over = now > limit.value;
        all.push(Finding {
            status: if over {
                Status::Regression
            } else {
                Status::Pass
            },
            now: words(now),
            message: if over {
                format!("{} over the budget", percent(now / limit.value - 1.0))
            } else {
                String::new()
            },
            ..f
        });
    };
    let [_, memory, step] = super::metric::BUDGETS;
    if let Some(limit) = &limits.max_memory {
        let budget = limit.value;
        let now = after.run.memory.reserved();
        let now = now.ok_or(Unrecorded::Memory { budget })?.0 as f64;
        one(Class::Memory, memory, limit, now, &|n| {
            Bytes(n as u64).to_string()
        });
    }
    if let Some(limit) = &limits.max_step_ms {
        let now = after.step_ms();
        if now.is_nan() {
            return Err(Unrecorded::Step {
                budget: limit.value,
            });
        }
        one(Class::Time, step, limit, now, &|ms| format!("{ms:.3} ms"));
    }
    Ok(all)
}

fn median(all: &[f64]) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use shardlab_plan::config::Gate;
    use shardlab_plan::units::Picos;

    fn limits() -> Limits {
        Limits::new(&Gate::default(), &BTreeMap::new(), None)
    }

    fn run(steps_ms: &[f64], peak: u64) -> RunView {
        let mut view = testing::view(100);
        view.run.step_samples = steps_ms.iter().map(|ms| Picos((ms * 1e9) as u64)).collect();
        view.run.memory.peak_allocated = Bytes(peak);
        view.run.memory.peak_reserved = Bytes(peak);
        view
    }

    fn judge(before: &RunView, after: &RunView, limits: &Limits) -> Verdict {
        super::judge(before, after, limits).unwrap()
    }

    fn status(v: &Verdict, metric: &str) -> Status {
        v.finding(metric).unwrap().status
    }

    #[test]
    fn memory_and_time_may_grow_up_to_their_limits() {
        let before = run(&[10.0, 10.1, 9.9, 10.0], 1 << 30);
        let same = judge(&before, &before, &limits());
        assert!(same.pass, "{same:?}");
        let grown = judge(&before, &run(&[12.0, 12.1, 11.9, 12.0], 3 << 29), &limits());
        assert_eq!(status(&grown, MEASURED_STEP), Status::Regression);
        assert_eq!(status(&grown, MEASURED_MEMORY[0]), Status::Regression);
        // A decrease is not a failure.
        assert!(judge(&run(&[12.0, 12.1, 11.9], 2 << 30), &before, &limits()).pass);
    }

    #[test]
    fn few_steps_decide_only_if_they_are_apart() {
        let before = run(&[10.0, 12.0], 1 << 30);
        let near = judge(&before, &run(&[11.9, 13.0], 1 << 30), &limits());
        assert_eq!(status(&near, MEASURED_STEP), Status::Inconclusive);
        let far = judge(&before, &run(&[15.0, 16.0], 1 << 30), &limits());
        assert_eq!(status(&far, MEASURED_STEP), Status::Regression);
        let none = judge(&before, &run(&[], 0), &limits());
        assert_eq!(status(&none, MEASURED_STEP), Status::Skipped);
        assert_eq!(status(&none, MEASURED_MEMORY[1]), Status::Skipped);
    }

    #[test]
    fn a_budget_for_what_was_not_recorded_cannot_be_judged() {
        let with = |gate: Gate| Limits::new(&gate, &BTreeMap::new(), None);
        let memory = with(Gate {
            max_memory: Some(Bytes(1 << 30)),
            ..Gate::default()
        });
        let full = run(&[10.0], 1 << 29);
        assert!(super::judge(&full, &full, &memory).unwrap().pass);
        let lacks = super::judge(&full, &run(&[10.0], 0), &memory).unwrap_err();
        assert_eq!(
            lacks,
            Unrecorded::Memory {
                budget: f64::from(1 << 30)
            }
        );
        assert!(lacks.to_string().contains("gate.max_memory (1.00 GiB)"));
        // The budget needs no record of the baseline: only the comparison is skipped.
        let compared = super::judge(&run(&[10.0], 0), &full, &memory).unwrap();
        let skipped = compared.finding(MEASURED_MEMORY[1]).unwrap();
        assert_eq!(skipped.status, Status::Skipped);
        assert_eq!(skipped.message, "the baseline has no record of memory");
        assert!(compared.pass);
        let step = with(Gate {
            max_step_ms: Some(5.0),
            ..Gate::default()
        });
        let lacks = super::judge(&full, &run(&[], 1 << 29), &step).unwrap_err();
        assert_eq!(lacks, Unrecorded::Step { budget: 5.0 });
    }

    #[test]
    fn budgets_hold_without_a_baseline() {
        let gate = Gate {
            max_step_ms: Some(5.0),
            ..Gate::default()
        };
        let limits = Limits::new(&gate, &BTreeMap::new(), None);
        let before = run(&[10.0], 1 << 30);
        let verdict = judge(&before, &before, &limits);
        assert!(!verdict.pass && verdict.failures[0].cause.contains("step time budget"));
    }
}
