//! What compile modes save in kernel time and memory, and what they cost in guards and graph
//! breaks.

use crate::predict::{PredictError, Prediction, Profiles, predict};
use serde::Serialize;
use shardlab_plan::Scenario;
use shardlab_plan::config::CompileMode;
use shardlab_plan::ir::{COMPUTE, HostWorkKind};
use shardlab_plan::program::{Op, SectionKind};
use shardlab_plan::record::Span;
use shardlab_plan::scenario::ScenarioError;
use shardlab_plan::units::{Bytes, Picos};
use shardlab_sim::Options;

/// Share of the step below which two values count as equal.
const CHANGE: f64 = 0.001;

/// One compile mode.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mode {
    /// Mode.
    pub mode: CompileMode,
    /// Step time, milliseconds.
    pub step_ms: f64,
    /// Number of launches on the compute stream.
    pub kernels: u32,
    /// Total time of those kernels, without contention.
    pub kernel_time: Picos,
    /// Host time per step.
    pub host: Picos,
    /// Host time spent in guards of compiled regions; part of `host`.
    pub guards: Picos,
    /// Host time spent in graph breaks; part of `host`.
    pub graph_breaks: Picos,
    /// Exposed time caused by late issue from the host.
    pub host_exposed: Picos,
    /// Peak of allocated memory.
    pub peak_allocated: Bytes,
}

impl Mode {
    /// Returns the compile mode of a prediction with its numbers.
    #[must_use]
    pub fn of(p: &Prediction) -> Self {
        let launched = |s: &&Span| {
            let op = p.program.instrs[s.instr.index()].op;
            s.stream == COMPUTE && matches!(op, Op::Launch { .. })
        };
        let compute = p.run.spans.iter().filter(launched);
        let work = &p.profile.host.work;
        let count = |kind| {
            Picos::from_us(
                host_work(p, kind) as f64
                    * match kind {
                        HostWorkKind::Guard => work.guard_us,
                        _ => work.graph_break_us,
                    },
            )
        };
        Self {
            mode: p.scenario.compile.mode,
            step_ms: p.step_ms(),
            kernels: compute.clone().count() as u32,
            kernel_time: compute.map(|s| s.alone).sum(),
            host: p.run.host,
            guards: count(HostWorkKind::Guard),
            graph_breaks: count(HostWorkKind::GraphBreak),
            host_exposed: p
                .run
                .exposed
                .get(&shardlab_plan::record::Cause::Host)
                .copied()
                .unwrap_or_default(),
            peak_allocated: p.run.memory.peak_allocated,
        }
    }

    /// Returns the gain or loss compared with `off`, as a sentence.
    #[must_use]
    pub fn against(&self, off: &Self) -> String {
        let kernels = off.kernel_time.ms() - self.kernel_time.ms();
        let host = self.host.ms() - off.host.ms();
        let step = self.step_ms - off.step_ms;
        let verdict = if step < -CHANGE * off.step_ms {
            format!("gains {:.2} ms", -step)
        } else if step > CHANGE * off.step_ms {
            format!("loses {step:.2} ms")
        } else {
            "changes nothing".into()
        };
        let extra = self.guards + self.graph_breaks;
        let alike = self.kernels == off.kernels && self.kernel_time == off.kernel_time;
        if self.mode == CompileMode::Regions && self.guards == Picos(0) && alike {
            return format!(
                "regions {verdict}: nothing is compiled, because hooks break the graph inside the loop over layers and \
                 the layers call library code."
            );
        }
        let saves = if kernels >= 0.0 {
            format!("saves {kernels:.2} ms of kernels")
        } else {
            format!("adds {:.2} ms of kernels", -kernels)
        };
        let hosts = if host >= 0.0 {
            format!("adds {host:.2} ms of host time")
        } else {
            format!("saves {:.2} ms of host time", -host)
        };
        let bound = if self.host_exposed.ms() > 0.05 * self.step_ms {
            "the step is host-bound"
        } else {
            "the kernels bound the step"
        };
        format!(
            "{} {verdict}: it {saves} ({} launches instead of {}) and {hosts} (guards and graph breaks take {:.2} ms); \
             {bound}.",
            name(self.mode),
            self.kernels,
            off.kernels,
            extra.ms()
        )
    }
}

/// Returns the name that scenario files use.
#[must_use]
pub const fn name(mode: CompileMode) -> &'static str {
    match mode {
        CompileMode::Off => "off",
        CompileMode::Regions => "regions",
        CompileMode::Blocks => "blocks",
        CompileMode::Full => "full",
    }
}

/// Returns the prediction for every mode, or the reason why a mode is impossible.
///
/// `load` loads the scenario with a mode.
#[must_use]
pub fn modes(
    base: &Prediction,
    profiles: &Profiles,
    load: &(dyn Fn(&str) -> Result<Scenario, ScenarioError> + Sync),
) -> Vec<(CompileMode, Result<Mode, PredictError>)> {
    use rayon::prelude::*;
    [
        CompileMode::Off,
        CompileMode::Regions,
        CompileMode::Blocks,
        CompileMode::Full,
    ]
    .into_par_iter()
    .map(|mode| {
        if mode == base.scenario.compile.mode {
            return (mode, Ok(Mode::of(base)));
        }
        let made = load(&format!("compile.mode={}", name(mode)))
            .map_err(PredictError::from)
            .and_then(|s| predict(&s, profiles, &Options::default()))
            .map(|p| Mode::of(&p));
        (mode, made)
    })
    .collect()
}

/// Returns how often the host does work of this kind in a steady step.
fn host_work(p: &Prediction, wanted: HostWorkKind) -> u64 {
    let Some(steady) = p.program.section(SectionKind::Steady) else {
        return 0;
    };
    p.program
        .section_instrs(steady)
        .iter()
        .filter_map(|i| match i.op {
            Op::HostWork { kind, count } if kind == wanted => Some(u64::from(count)),
            _ => None,
        })
        .sum()
}
