//! Judges budgets: upper limits for a step, independent of the baseline.

use super::{Subject, place};
use crate::gate::facts::Facts;
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::{Limit, Limits};
use crate::gate::metric::BUDGETS;
use shardlab_plan::units::Bytes;

/// Returns one finding for each budget and each number that it limits.
pub(super) fn judge(now: &Facts, limits: &Limits) -> Vec<Finding> {
    let bytes = |n: f64| Bytes(n as u64).to_string();
    let milliseconds = |ms: f64| super::time::ms(ms * 1e9);
    let measured = now.measured.as_ref().and_then(|m| m.memory.as_ref());
    let memory = [Some(&now.memory), measured];
    let reserved = memory.map(|m| m.map(|m| m.reserved as f64));
    let [predicted, measured, step] = BUDGETS;
    let mut all = Vec::new();
    if let Some(limit) = &limits.max_memory {
        for (metric, n) in [(predicted, reserved[0]), (measured, reserved[1])] {
            all.extend(n.map(|n| one(Class::Memory, metric, limit, n, &bytes, limits)));
        }
    }
    if let Some(limit) = &limits.max_step_ms {
        let n = now.time.step_ps as f64 / 1e9;
        all.push(one(Class::Time, step, limit, n, &milliseconds, limits));
    }
    all
}

fn one(
    class: Class,
    metric: &str,
    limit: &Limit,
    now: f64,
    words: &dyn Fn(f64) -> String,
    limits: &Limits,
) -> Finding {
    let over = now > limit.value;
    let subject = Subject {
        class,
        metric,
        limit: format!("≤ {}", words(limit.value)),
        place: place(limit.place.as_ref(), None, limits),
    };
    let (status, message) = if over {
        let (now, budget, over) = (words(now), words(limit.value), words(now - limit.value));
        (
            Status::Regression,
            format!("{now}, {over} over the budget of {budget}"),
        )
    } else {
        (Status::Pass, String::new())
    };
    subject.finding(status, String::new(), words(now), message)
}
