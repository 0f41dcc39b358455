//! Trains in a separate process, `shardlab exec`, which reports events and saves the run.

use super::{Trainer, What};
use crate::cli::events::{Event, Norms, Rank};
use crate::dash::event::{News, RankStep, StepNews};
use crate::dash::judge;
use crate::dash::keys::{self, Command as Key, Place};
use crate::dash::lanes::Lanes;
use crate::dash::worker::{Ended, Reporter, Stop};
use shardlab_exec::engine::ExecOptions;
use shardlab_exec::process::{PARENT, describe_exit, interrupt};
use shardlab_plan::scenario::BatchUnit;
use shardlab_reports::store::Store;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Interval between checks of whether to end the process.
const LOOK: Duration = Duration::from_millis(50);
/// Time during which output of an ended process may still arrive.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Time for which a process may be silent, beyond its own limit, after it was asked to end.
const GRACE: Duration = Duration::from_secs(10);
/// Number of output lines kept in case the process ends without a reason.
const LINES_KEPT: usize = 12;

/// Counts the processes that jobs have started. None may remain when the dashboard ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Children(Arc<()>);

impl Children {
    /// Waits until all processes have ended, for at most `limit`. Each job ends its own process
    /// when asked to.
    pub(crate) fn wait(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while Arc::strong_count(&self.0) > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Trains and delivers the saved run.
pub(super) fn train(
    what: &What<'_>,
    trainer: &Trainer,
    store: Option<&Path>,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    // Declared before the folder, so that waiting for the children includes its removal.
    let _counted = trainer.children.clone();
    // An unwritable store does not prevent training. The code that saves the run reports it.
    let store = store.filter(|dir| Store::at(*dir).writable().is_ok());
    let passing = match store {
        Some(_) => None,
        None => Some(tempfile::tempdir().map_err(|e| format!("no folder for the run: {e}"))?),
    };
    let dir = store.or(passing.as_ref().map(tempfile::TempDir::path));
    let dir = dir.ok_or("no folder for the run")?;
    let watch = Watch {
        counted_in: what.scenario.model.family.counted_in(),
        place: &|name| what.place(Some(name)),
        patience: ExecOptions::default().timeout + GRACE,
        reporter,
        stop,
    };
    let report = watch.follow(command(what, &trainer.program, dir))?;
    if stop.leaving() {
        return Ok(Ended::Cancelled);
    }
    if let Some(id) = report.over.as_ref().and_then(|o| o.run_id.as_deref()) {
        let view = judge::open(Some(dir), id)?;
        let lanes = Arc::new(Lanes::new(Arc::new(view)));
        reporter.say(match store {
            Some(_) => News::Trained(lanes, id.to_owned()),
            None => News::Run(lanes),
        });
    }
    report.result(what.device.is_gpus(), stop)
}

/// Returns the command that trains the scenario and saves the run in this folder.
pub(super) fn command(what: &What<'_>, program: &Path, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["exec", "--progress", "json"]);
    command.args(what.device.words());
    if let Some(steps) = what.steps {
        command.args(["--steps", &steps.to_string()]);
    }
    for change in &what.setup.overrides {
        command.args(["--set", change]);
    }
    command.arg("--store").arg(dir);
    command.arg("--").arg(&what.setup.path);
    command
}

/// Settings for following a process.
struct Watch<'a> {
    counted_in: BatchUnit,
    /// Returns the device as a phrase, given the device's name.
    place: &'a dyn Fn(&str) -> String,
    /// Time for which the process may be silent after it was asked to end, in addition to its step
    /// time.
    patience: Duration,
    reporter: &'a Reporter,
    stop: &'a Stop,
}

/// A child process. Dropping it kills the process and everything it started.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already. Its ranks end with it (`process::end_with_launcher`).
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Watch<'_> {
    /// Starts the command, reports its events, and ends it on request.
    fn follow(&self, mut command: Command) -> Result<Report, String> {
        // The child ends when its standard input closes or its parent no longer exists. It has its
        // own process group, so keys in the terminal do not reach it.
        command
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0);
        let child = command.spawn();
        let mut child = Running(child.map_err(|e| format!("cannot start training: {e}"))?);
        let errors = child.0.stderr.take().ok_or("its output cannot be read")?;
        let lines = read(errors)?;
        let mut report = Report::default();
        let mut ended: Option<Instant> = None;
        let mut asked: Option<Instant> = None;
        loop {
            match lines.recv_timeout(LOOK) {
                Ok(line) => {
                    self.hear(&line, &mut report);
                    asked = asked.map(|_| Instant::now());
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let gone = child.0.try_wait().map_err(|e| e.to_string())?.is_some();
                    ended = ended.or_else(|| gone.then(Instant::now));
                }
            }
            if self.stop.leaving() {
                return Ok(report);
            }
            if self.stop.asked() && asked.is_none() {
                interrupt(&child.0);
                asked = Some(Instant::now());
            }
            let patience = self.patience + 2 * report.longest;
            if asked.is_some_and(|a| a.elapsed() > patience) {
                return Err(format!(
                    "did not stop within {} s and was killed",
                    patience.as_secs()
                ));
            }
            // Another process may still hold its standard error open.
            if ended.is_some_and(|e| e.elapsed() > LAST_WORDS) {
                break;
            }
        }
        report.status = Some(self.wait(&mut child)?);
        Ok(report)
    }

    /// Waits for a process that has closed its output.
    fn wait(&self, child: &mut Running) -> Result<ExitStatus, String> {
        let end = Instant::now() + self.patience;
        loop {
            if let Some(status) = child.0.try_wait().map_err(|e| e.to_string())? {
                return Ok(status);
            }
            if self.stop.leaving() || Instant::now() > end {
                let _ = child.0.kill();
                return child.0.wait().map_err(|e| e.to_string());
            }
            std::thread::sleep(LOOK);
        }
    }

    fn hear(&self, line: &str, report: &mut Report) {
        let say = |news| self.reporter.say(news);
        match Event::read(line) {
            Some(Event::Begun { device, .. }) => {
                report.begun = true;
                say(News::On((self.place)(&device)));
                say(News::Stepping);
            }
            Some(Event::Step {
                step,
                steps,
                loss,
                grad_norm,
                lr,
                time_ns,
                tokens,
                ranks,
            }) => {
                let time = Duration::from_nanos(time_ns);
                report.longest = report.longest.max(time);
                say(News::Step(StepNews {
                    step,
                    steps,
                    loss: loss.unwrap_or(f64::NAN),
                    grad_norm,
                    lr,
                    time,
                    tokens,
                    counted_in: self.counted_in,
                    ranks: ranks.iter().map(rank).collect(),
                }));
            }
            Some(Event::Validation { step, loss }) => {
                say(News::Validation(step, loss.unwrap_or(f64::NAN)));
            }
            Some(Event::ParamNorms { step, params }) => {
                let norms = params.into_iter().map(Norms::norm).collect();
                say(News::ParamNorms(step, norms));
            }
            Some(Event::Note { text }) => say(News::Note(text)),
            Some(Event::End {
                interrupted,
                run_id,
                ..
            }) => {
                report.over = Some(Over {
                    interrupted,
                    run_id,
                });
            }
            Some(Event::Error { text }) => report.error = Some(text),
            None if line.trim().is_empty() => {}
            None => {
                report.words.push_back(line.to_owned());
                if report.words.len() > LINES_KEPT {
                    report.words.pop_front();
                }
                say(News::Note(line.to_owned()));
            }
        }
    }
}

/// The output of a process, and how it ended.
#[derive(Debug, Default)]
struct Report {
    /// Whether setup was complete and the first step was next.
    begun: bool,
    /// Longest step time.
    longest: Duration,
    over: Option<Over>,
    error: Option<String>,
    /// The last lines that are not events.
    words: VecDeque<String>,
    status: Option<ExitStatus>,
}

/// The end of a run.
#[derive(Debug)]
struct Over {
    interrupted: bool,
    run_id: Option<String>,
}

impl Report {
    /// Returns how the process ended, or the reason why it failed.
    fn result(self, on_gpus: bool, stop: &Stop) -> Result<Ended, String> {
        if let (Some(over), None) = (&self.over, &self.error) {
            return Ok(if over.interrupted {
                Ended::Cancelled
            } else {
                Ended::Done
            });
        }
        // It may have been stopped before it could listen.
        if stop.asked() && !self.begun {
            return Ok(Ended::Cancelled);
        }
        let mut reason = match (self.error, self.status) {
            (Some(error), _) => error,
            (None, status) => {
                let how = status.map_or_else(|| "has ended".to_owned(), describe_exit);
                let words = self.words.iter().map(|w| format!("\n{w}"));
                format!("the training's process {how}{}", words.collect::<String>())
            }
        };
        if on_gpus && !self.begun {
            let key = keys::first(Place::Training, Key::TrainOnCpu);
            reason.push_str(&format!("\n{key} trains it on the CPU"));
        }
        Err(reason)
    }
}

fn rank(r: &Rank) -> RankStep {
    RankStep {
        time: Duration::from_nanos(r.time_ns),
        host: Duration::from_nanos(r.host_ns),
        allocated: r.peak_allocated_bytes,
        reserved: r.peak_reserved_bytes,
    }
}

/// Reads lines on a separate thread.
fn read(from: impl Read + Send + 'static) -> Result<Receiver<String>, String> {
    let (lines, inbox) = channel();
    let body = move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if lines.send(text).is_err() {
                return;
            }
            line.clear();
        }
    };
    let thread = std::thread::Builder::new().name("training".to_owned());
    thread.spawn(body).map_err(|e| format!("no thread: {e}"))?;
    Ok(inbox)
}

#[cfg(test)]
mod tests;
