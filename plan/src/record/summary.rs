//! The JSON contract of a run.

use super::{BasisKind, ErrorBand, Run};
use crate::program::SectionKind;
use crate::units::Picos;
use serde::Serialize;
use std::collections::BTreeMap;

/// Version of [`Summary`]'s JSON. It increases when the meaning of a field changes. Fields are
/// added, but never renamed.
pub const SUMMARY_FORMAT: u32 = 1;

/// Step times in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepSummary {
    /// Median.
    pub median: f64,
    /// Mean.
    pub mean: f64,
    /// 95th percentile.
    pub p95: f64,
    /// Samples.
    pub samples: Vec<f64>,
}

/// Memory of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemorySummary {
    /// Peak of allocated bytes; `None` if memory was not recorded.
    pub peak_allocated_bytes: Option<u64>,
    /// Peak of reserved bytes; `None` if memory was not recorded.
    pub peak_reserved_bytes: Option<u64>,
    /// Peak of device bytes; `None` if it was not measured.
    pub peak_device_bytes: Option<u64>,
    /// Bytes that remain allocated between steps; `None` if memory was not recorded.
    pub persistent_bytes: Option<u64>,
    /// Device capacity.
    pub capacity_bytes: Option<u64>,
    /// Allocator retries.
    pub retries: u32,
    /// Position of the peak: step, phase, unit, instruction, host time in milliseconds.
    pub at: BTreeMap<&'static str, serde_json::Value>,
    /// Bytes by role at the peak.
    pub by_role: BTreeMap<&'static str, u64>,
}

/// Summary of a run, as `--json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Format version.
    pub format: u32,
    /// Scenario.
    pub scenario: String,
    /// Program digest.
    pub program_digest: String,
    /// `sim` or `exec`.
    pub kind: super::RunKind,
    /// Ranks.
    pub world_size: u32,
    /// Policy.
    pub policy: String,
    /// Hardware profile.
    pub hardware: String,
    /// Step times.
    pub step_ms: StepSummary,
    /// Time in seconds of the first step, which allocates optimizer states; `null` if the run does
    /// not contain it.
    pub first_step_s: Option<f64>,
    /// Tokens per second and GPU.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilization, 0 to 1; `null` if the device's peak is unknown.
    pub mfu: Option<f64>,
    /// Host time of a step, in milliseconds.
    pub host_ms: f64,
    /// Memory.
    pub memory: MemorySummary,
    /// Collectives by kind: count, bytes, busy_ms, exposed_ms, overlapped_with_gemm.
    pub collectives: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    /// Exposed time: `total`, and `by_cause`.
    pub exposed_ms: ExposedSummary,
    /// Share of busy time with measured costs, 0 to 1.
    pub measured_cost_share: f64,
    /// Losses.
    pub losses: Vec<f64>,
    /// Gradient norms.
    pub grad_norms: Vec<f64>,
    /// Environment.
    pub environment: BTreeMap<String, String>,
    /// Basis of a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub basis: Option<BasisSummary>,
    /// Errors of similar predictions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_band: Option<ErrorBand>,
}

/// Basis of a prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BasisSummary {
    /// `measured` or `estimated`.
    pub kind: BasisKind,
    /// The measured machine, or the reason why the prediction is an estimate.
    pub on: String,
}

/// Exposed time in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExposedSummary {
    /// All causes.
    pub total: f64,
    /// By cause.
    pub by_cause: BTreeMap<&'static str, f64>,
}

fn reported(norms: &[f64]) -> &[f64] {
    match norms.iter().all(|x| x.is_nan()) {
        true => &[],
        false => norms,
    }
}

impl Run {
    /// Returns the exposed time of a step over all causes.
    #[must_use]
    pub fn exposed_total(&self) -> Picos {
        self.exposed.values().copied().sum()
    }

    /// Returns the gradient norms that the run reports. Empty if no step has one, as with
    /// `fsdp.sum_in_optimizer`, with which gradients are never summed. (If a norm becomes infinite
    /// or NaN during a run, earlier norms are finite.)
    #[must_use]
    pub fn reported_grad_norms(&self) -> &[f64] {
        reported(&self.grad_norms)
    }

    /// Returns the median step time in milliseconds; NaN without samples.
    #[must_use]
    pub fn step_ms(&self) -> f64 {
        let mut sorted: Vec<f64> = self.step_samples.iter().map(|t| t.ms()).collect();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 0 => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
            n => sorted[n / 2],
        }
    }

    /// Returns the time of the first step; `None` if the run does not contain it.
    #[must_use]
    pub fn first_step(&self) -> Option<Picos> {
        let mut steps = self.steps.iter();
        let first = steps.find(|s| s.section == SectionKind::First)?;
        Some(first.end - first.start)
    }

    /// Returns the tokens (or samples) per second and GPU.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / (self.step_ms() / 1e3)
    }

    /// Returns the run's summary.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let mut sorted: Vec<f64> = self.step_samples.iter().map(|t| t.ms()).collect();
        let samples = sorted.clone();
        sorted.sort_by(f64::total_cmp);
        let quantile = |q: f64| match sorted.len() {
            0 => f64::NAN,
            n => sorted[((q * n as f64).ceil() as usize).clamp(1, n) - 1],
        };
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        let at = &self.memory.at;
        Summary {
            format: SUMMARY_FORMAT,
            scenario: self.scenario.clone(),
            program_digest: self.program_digest.clone(),
            kind: self.kind,
            world_size: self.world_size,
            policy: self.policy.clone(),
            hardware: self.hardware.clone(),
            first_step_s: self.first_step().map(|t| t.ms() / 1e3),
            tokens_per_s_per_gpu: self.tokens_per_s(),
            step_ms: StepSummary {
                median: self.step_ms(),
                mean,
                p95: quantile(0.95),
                samples,
            },
            mfu: (self.mfu > 0.0).then_some(self.mfu),
            host_ms: self.host.ms(),
            memory: MemorySummary {
                peak_allocated_bytes: self.memory.allocated().map(|b| b.0),
                peak_reserved_bytes: self.memory.reserved().map(|b| b.0),
                peak_device_bytes: self.memory.device().map(|b| b.0),
                persistent_bytes: self
                    .memory
                    .is_recorded()
                    .then_some(self.memory.persistent.0),
                capacity_bytes: self.memory.capacity.map(|b| b.0),
                retries: self.memory.retries,
                at: BTreeMap::from([
                    ("step", at.step.into()),
                    ("instr", at.instr.0.into()),
                    ("phase", at.phase.name().into()),
                    ("unit", at.unit.0.into()),
                    ("micro_batch", at.micro_batch.into()),
                    ("time_ms", at.time.ms().into()),
                ]),
                by_role: self
                    .memory
                    .by_role
                    .iter()
                    .map(|(r, b)| (r.name(), b.0))
                    .collect(),
            },
            collectives: self
                .collectives
                .iter()
                .map(|(k, s)| {
                    let fields = BTreeMap::from([
                        ("count", f64::from(s.count)),
                        ("bytes", s.bytes.0 as f64),
                        ("busy_ms", s.busy.ms()),
                        ("exposed_ms", s.exposed.ms()),
                        ("overlapped_with_gemm", f64::from(s.overlapped_with_gemm)),
                    ]);
                    (k.name(), fields)
                })
                .collect(),
            exposed_ms: ExposedSummary {
                total: self.exposed_total().ms(),
                by_cause: self
                    .exposed
                    .iter()
                    .map(|(c, t)| (c.name(), t.ms()))
                    .collect(),
            },
            measured_cost_share: {
                let all = self.costs.measured.0 + self.costs.modelled.0;
                if all == 0 {
                    0.0
                } else {
                    self.costs.measured.0 as f64 / all as f64
                }
            },
            losses: self.losses.clone(),
            grad_norms: self.grad_norms.clone(),
            environment: self.environment.clone(),
            basis: self.basis.as_ref().map(|b| BasisSummary {
                kind: b.kind,
                on: b.on.clone(),
            }),
            error_band: self.basis.as_ref().and_then(|b| b.band.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::reported;

    #[test]
    fn norms_that_nobody_tells_are_none() {
        assert!(reported(&[f64::NAN, f64::NAN]).is_empty());
        assert!(reported(&[]).is_empty());
        let becomes = reported(&[1.0, f64::NAN]);
        assert_eq!(becomes.len(), 2);
        assert!(becomes[1].is_nan());
        assert_eq!(reported(&[f64::INFINITY]), [f64::INFINITY]);
    }
}
