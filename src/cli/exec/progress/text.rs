//! Progress output for people: one line that is redrawn on a terminal, occasional lines otherwise.

use shardlab_exec::train::{Flow, Observer, ParamNorm, StepReport};
use shardlab_plan::units::thousands;
use std::io::Write;
use std::time::{Duration, Instant};

/// Approximate number of lines that a run writes to a log.
const LINES: u64 = 20;
/// Approximate number of steps over which the rate is averaged.
const SMOOTHING: f64 = 10.0;

/// Where steps are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// Output on one line that is redrawn.
    Terminal,
    /// On occasional lines.
    Log,
    /// Not at all.
    Nowhere,
}

pub(in crate::cli::exec) struct Text {
    output: Output,
    /// Unit of the rate, per second.
    unit: &'static str,
    /// Smoothed step time.
    time: Option<f64>,
    /// Time at which the line on the terminal was last drawn.
    drawn: Option<Instant>,
    /// Whether the current line has no newline yet.
    open: bool,
}

impl Text {
    /// Creates a reporter for a terminal or a log; `unit` is the unit of the rate.
    pub(super) fn new(unit: &'static str, terminal: bool) -> Self {
        let output = if terminal {
            Output::Terminal
        } else {
            Output::Log
        };
        Self::output(unit, output)
    }

    /// Reports no steps.
    pub(super) fn silent(unit: &'static str) -> Self {
        Self::output(unit, Output::Nowhere)
    }

    fn output(unit: &'static str, output: Output) -> Self {
        Self {
            output,
            unit,
            time: None,
            drawn: None,
            open: false,
        }
    }

    /// Ends the current line.
    pub(super) fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            eprintln!();
        }
    }

    fn line(&self, r: &StepReport, time: f64) -> String {
        let left = Duration::from_secs_f64(time * r.steps.saturating_sub(r.step) as f64);
        let gradient = match r.grad_norm {
            Some(norm) => format!("  gradient {norm:.3}"),
            None => String::new(),
        };
        format!(
            "step {}/{}  loss {:.4}{gradient}  {} {}  ETA {}",
            r.step,
            r.steps,
            r.loss,
            thousands(r.tokens as f64 / time, 0),
            self.unit,
            short(left)
        )
    }
}

/// Formats a duration: `45 s`, `12 min`, `3.5 h`.
fn short(d: Duration) -> String {
    match d.as_secs_f64() {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

impl Observer for Text {
    fn step(&mut self, r: &StepReport) -> Flow {
        let now = r.time.as_secs_f64().max(1e-9);
        // The first step prepares what later ones reuse, so its time counts only until another step
        // has ended.
        let first = self.drawn.is_none();
        let time = match self.time {
            Some(t) => t + (now - t) / SMOOTHING,
            None => now,
        };
        self.time = (!first).then_some(time);
        let last = r.step == r.steps;
        // A closed stderr is ignored.
        let mut err = std::io::stderr().lock();
        match self.output {
            Output::Terminal => {
                let due = self
                    .drawn
                    .is_none_or(|d| d.elapsed() > Duration::from_millis(100));
                if due || last {
                    let _ = write!(err, "\r\x1b[2K{}", self.line(r, time));
                    let _ = err.flush();
                    self.open = true;
                    self.drawn = Some(Instant::now());
                }
            }
            Output::Log => {
                if first || last || r.step.is_multiple_of((r.steps / LINES).max(1)) {
                    let _ = writeln!(err, "{}", self.line(r, time));
                }
                self.drawn = Some(Instant::now());
            }
            Output::Nowhere => {}
        }
        Flow::Continue
    }

    fn validation(&mut self, step: u64, loss: f64) {
        if self.output == Output::Nowhere {
            return;
        }
        self.end();
        eprintln!("validation after step {step}: loss {loss:.4}");
    }

    fn param_norms(&mut self, step: u64, norms: &[ParamNorm]) {
        if self.output == Output::Nowhere {
            return;
        }
        let trained = norms.iter().filter_map(|n| Some((n, n.gradient?)));
        if let Some((n, gradient)) = trained.max_by(|a, b| a.1.total_cmp(&b.1)) {
            self.end();
            eprintln!(
                "norms after step {step}: largest gradient {gradient:.4} of {}",
                n.name
            );
        }
    }

    fn note(&mut self, text: &str) {
        self.end();
        eprintln!("note: {text}");
    }
}
