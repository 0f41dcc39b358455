//! Training in a process of its own, `shardlab exec`, which tells what it does and keeps the run.

use super::{Trainer, What};
use crate::cli::events::{Event, Rank};
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

/// Between two looks at whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// How long words of a process that has ended may still come.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long, beyond its own limit, it may go on without a word once it has been told to end.
const GRACE: Duration = Duration::from_secs(10);
/// Lines that are kept for the case that it ends without saying why.
const LINES_KEPT: usize = 12;

/// The processes that jobs have started, counted: none may be left when the dashboard ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Children(Arc<()>);

impl Children {
    /// Waits until there are none, so long at most. Each job ends its own when it is told to.
    pub(crate) fn wait(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while Arc::strong_count(&self.0) > 1 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Trains and hands the kept run over.
pub(super) fn train(
    what: &What<'_>,
    trainer: &Trainer,
    store: Option<&Path>,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    // Before the folder: whoever waits for the children waits until that is removed.
    let _counted = trainer.children.clone();
    // A store that cannot be written is no reason not to train: whoever keeps the run then will say
    // so.
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
    let told = watch.follow(command(what, &trainer.program, dir))?;
    if stop.leaving() {
        return Ok(Ended::Cancelled);
    }
    if let Some(id) = told.over.as_ref().and_then(|o| o.run_id.as_deref()) {
        let view = judge::open(Some(dir), id)?;
        let lanes = Arc::new(Lanes::new(Arc::new(view)));
        reporter.say(match store {
            Some(_) => News::Trained(lanes, id.to_owned()),
            None => News::Run(lanes),
        });
    }
    told.result(what.device.is_gpus(), stop)
}

/// The command that trains it and keeps the run in this folder.
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

/// Follows a process.
struct Watch<'a> {
    counted_in: BatchUnit,
    /// What it trains on, by the device's name.
    place: &'a dyn Fn(&str) -> String,
    /// How long it may be silent once it has been told to end, beyond what its steps take.
    patience: Duration,
    reporter: &'a Reporter,
    stop: &'a Stop,
}

/// A process that is killed, with what it has started, when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended. Its ranks end with it (`process::end_with_launcher`).
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Watch<'_> {
    /// Starts it, reports what it says, and ends it when that is asked for.
    fn follow(&self, mut command: Command) -> Result<Told, String> {
        // It ends when standard input does or its parent is gone, and has a group of its own: keys
        // of the terminal do not reach it.
        command
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0);
        let child = command.spawn();
        let mut child = Running(child.map_err(|e| format!("cannot start a training: {e}"))?);
        let errors = child.0.stderr.take().ok_or("its output cannot be read")?;
        let lines = read(errors)?;
        let mut told = Told::default();
        let mut ended: Option<Instant> = None;
        let mut asked: Option<Instant> = None;
        loop {
            match lines.recv_timeout(LOOK) {
                Ok(line) => {
                    self.hear(&line, &mut told);
                    asked = asked.map(|_| Instant::now());
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let gone = child.0.try_wait().map_err(|e| e.to_string())?.is_some();
                    ended = ended.or_else(|| gone.then(Instant::now));
                }
            }
            if self.stop.leaving() {
                return Ok(told);
            }
            if self.stop.asked() && asked.is_none() {
                interrupt(&child.0);
                asked = Some(Instant::now());
            }
            let patience = self.patience + 2 * told.longest;
            if asked.is_some_and(|a| a.elapsed() > patience) {
                return Err(format!(
                    "did not stop within {} s and was killed",
                    patience.as_secs()
                ));
            }
            // Somebody else may hold its standard error.
            if ended.is_some_and(|e| e.elapsed() > LAST_WORDS) {
                break;
            }
        }
        told.status = Some(self.wait(&mut child)?);
        Ok(told)
    }

    /// Waits for one that says nothing any more.
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

    fn hear(&self, line: &str, told: &mut Told) {
        let say = |news| self.reporter.say(news);
        match Event::read(line) {
            Some(Event::Begun { device, .. }) => {
                told.begun = true;
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
                told.longest = told.longest.max(time);
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
            Some(Event::Note { text }) => say(News::Note(text)),
            Some(Event::End {
                interrupted,
                run_id,
                ..
            }) => {
                told.over = Some(Over {
                    interrupted,
                    run_id,
                });
            }
            Some(Event::Error { text }) => told.error = Some(text),
            None if line.trim().is_empty() => {}
            None => {
                told.words.push_back(line.to_owned());
                if told.words.len() > LINES_KEPT {
                    told.words.pop_front();
                }
                say(News::Note(line.to_owned()));
            }
        }
    }
}

/// What a process has said and how it ended.
#[derive(Debug, Default)]
struct Told {
    /// The first step was to come.
    begun: bool,
    /// The longest step.
    longest: Duration,
    over: Option<Over>,
    error: Option<String>,
    /// The last lines that are no events.
    words: VecDeque<String>,
    status: Option<ExitStatus>,
}

/// The end of a run.
#[derive(Debug)]
struct Over {
    interrupted: bool,
    run_id: Option<String>,
}

impl Told {
    /// How it ended, or why it failed.
    fn result(self, on_gpus: bool, stop: &Stop) -> Result<Ended, String> {
        if let (Some(over), None) = (&self.over, &self.error) {
            return Ok(if over.interrupted {
                Ended::Cancelled
            } else {
                Ended::Done
            });
        }
        // It may have been told before it could listen.
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

/// Lines as they come, from a thread of their own.
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
