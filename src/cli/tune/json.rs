//! The answer as JSON.

use super::Job;
use crate::analysis::verdict::Verdict;
use crate::predict::Prediction;
use crate::tune::{Answer, Proposal};
use serde_json::{Value, json};

/// Returns the answer as one object.
pub(super) fn object(
    job: &Job,
    answer: &Answer,
    best: &Prediction,
    verdict: &Verdict,
    next: &str,
) -> Value {
    let all = |set: &Proposal| proposal(job, set);
    let mut today = all(&answer.today);
    if job.fewest.is_some() {
        // Today's job has its own number of GPUs.
        today["set"] = json!(job.kept.overrides);
    }
    let warnings = job.subject.warnings(best, &job.overrides(&answer.best.set));
    json!({
        "format": 1,
        "framework": job.subject.framework(),
        "found": answer.found,
        "verdict": verdict.json(next),
        "parameters": best.program.meta.parameters,
        "warnings": warnings,
        "fewest_gpus": job.fewest.as_ref().map(|f| json!({
            "gpus": f.gpus[1],
            "gpus_today": f.gpus[0],
            "samples_per_step": f.samples[1],
            "samples_per_step_today": f.samples[0],
        })),
        "today": today,
        "best": all(&answer.best),
        "changes": answer.reasons.iter().map(|r| json!({
            "options": r.changed.iter().map(|c| json!({
                "key": c.key, "from": c.from, "to": c.to,
            })).collect::<Vec<_>>(),
            "why": r.why,
            "share": r.share,
        })).collect::<Vec<_>>(),
        "front": answer.front.iter().map(all).collect::<Vec<_>>(),
        "simplest": answer.simpler.as_ref().map(all),
        "bound_ms": answer.bound_ms,
        "gap": answer.gap(),
        "exact": answer.exact,
        "points": answer.points,
        "evaluated": answer.evaluated,
        "interrupted": answer.interrupted,
    })
}

/// Returns settings and their score.
pub(super) fn proposal(job: &Job, of: &Proposal) -> Value {
    let effect = &of.score.effect;
    json!({
        "set": job.overrides(&of.set),
        "changes": of.changes,
        "fits": of.score.fits(),
        "step_ms": effect.step_ms,
        "tokens_per_s_per_gpu": effect.tokens_per_s,
        "exposed_ms": of.score.exposed_ms,
        "memory": {
            "peak_allocated_bytes": effect.peak_allocated.0,
            "peak_reserved_bytes": effect.peak_reserved.0,
            "peak_device_bytes": effect.peak_device.0,
            "free_bytes": effect.free_bytes,
            "slack_bytes": of.score.slack,
        },
    })
}
