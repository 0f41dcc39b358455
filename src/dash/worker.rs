//! The outside of the dashboard: threads that run effects and report back.
//!
//! Predictions share one thread, which answers only the newest request. Every job has its own
//! thread. A panic in a job only makes that job fail.

mod explain;
mod fit;
mod predict;
mod sweep;
mod train;
mod tune;

use super::event::{Effect, Event, JobId, Message, News, Runs, Task};
use super::export::{self, Unwritten};
use super::lanes::Lanes;
use super::{judge, state};
use crate::cli::with_source;
use crate::predict::{Profiles, predict};
use shardlab_plan::scenario;
use shardlab_reports::RunView;
use shardlab_sim::Options;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) use train::{Children, Trainer};

/// Time for training processes to end when the dashboard ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// A request to end a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicU8>);

impl Stop {
    /// End cleanly.
    const SOON: u8 = 1;
    /// End immediately, because the result is not needed.
    const NOW: u8 = 2;

    fn ask(&self) {
        self.0.fetch_max(Self::SOON, Ordering::Relaxed);
    }

    fn leave(&self) {
        self.0.fetch_max(Self::NOW, Ordering::Relaxed);
    }

    pub(crate) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= Self::SOON
    }

    /// Returns whether the dashboard is quitting.
    pub(crate) fn leaving(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= Self::NOW
    }
}

/// Channel for a job's reports.
#[derive(Clone)]
pub(crate) struct Reporter {
    id: JobId,
    events: Sender<Event>,
}

impl Reporter {
    /// Reports news. A closed channel means that the dashboard has ended.
    pub(crate) fn say(&self, news: News) {
        let _ = self
            .events
            .send(Event::Message(Message::Job(self.id, news)));
    }
}

/// How a job ended.
pub(crate) enum Ended {
    Done,
    Cancelled,
}

/// Threads and their shared state.
pub(crate) struct Worker {
    events: Sender<Event>,
    profiles: Arc<Profiles>,
    predictor: predict::Predictor,
    survey: Stop,
    jobs: BTreeMap<JobId, Stop>,
    folders: Folders,
    trainer: Arc<Trainer>,
    state: Option<PathBuf>,
}

impl Drop for Worker {
    /// Stops all work, however the dashboard ends.
    fn drop(&mut self) {
        self.stop_all();
    }
}

/// Folders that jobs read and write.
#[derive(Clone, Debug)]
pub(crate) struct Folders {
    /// Folder of saved runs; `None` if runs are not saved.
    pub(crate) store: Option<PathBuf>,
}

impl Worker {
    /// Creates a worker that reports to `events` and saves the state to the file `state`, if given.
    pub(crate) fn new(
        events: Sender<Event>,
        folders: Folders,
        trainer: Trainer,
        state: Option<PathBuf>,
    ) -> Self {
        let profiles = Arc::new(Profiles::default());
        Self {
            predictor: predict::Predictor::start(events.clone(), Arc::clone(&profiles)),
            events,
            profiles,
            survey: Stop::default(),
            jobs: BTreeMap::new(),
            folders,
            trainer: Arc::new(trainer),
            state,
        }
    }

    /// Runs an effect in the background. The caller handles the terminal's own effects.
    pub(crate) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Predict { ticket, setup } => self.predictor.ask(ticket, setup),
            Effect::Survey(setups) => {
                self.survey.ask();
                self.survey = Stop::default();
                predict::survey(
                    setups,
                    self.events.clone(),
                    Arc::clone(&self.profiles),
                    self.survey.clone(),
                );
            }
            Effect::Start(id, task) => self.start(id, task),
            Effect::Cancel(id) => {
                if let Some(stop) = self.jobs.get(&id) {
                    stop.ask();
                }
            }
            Effect::Save(saved) => {
                // A failure to save the state must not prevent the dashboard from ending.
                if let Some(path) = &self.state {
                    let _ = state::write(path, &saved);
                }
            }
            Effect::Mouse(_) | Effect::Copy(_) | Effect::Suspend | Effect::Quit => {}
        }
    }

    /// Asks all work to end, and waits for the started processes.
    pub(crate) fn stop_all(&self) {
        self.survey.ask();
        self.jobs.values().for_each(Stop::leave);
        self.trainer.children.wait(FAREWELL);
    }

    fn start(&mut self, id: JobId, task: Task) {
        let stop = Stop::default();
        self.jobs.insert(id, stop.clone());
        let reporter = Reporter {
            id,
            events: self.events.clone(),
        };
        let profiles = Arc::clone(&self.profiles);
        let folders = self.folders.clone();
        let trainer = Arc::clone(&self.trainer);
        let body = {
            let reporter = reporter.clone();
            move || {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    perform(task, &profiles, &folders, &trainer, &reporter, &stop)
                }));
                reporter.say(match result {
                    Ok(Ok(Ended::Done)) => News::Done,
                    Ok(Ok(Ended::Cancelled)) => News::Cancelled,
                    Ok(Err(reason)) => News::Failed(reason),
                    Err(panic) => News::Failed(format!("internal error: {}", panic_text(&*panic))),
                });
            }
        };
        let thread = std::thread::Builder::new().name(format!("job-{id}"));
        if let Err(e) = thread.spawn(body) {
            reporter.say(News::Failed(format!("no thread: {e}")));
        }
    }
}

fn perform(
    task: Task,
    profiles: &Profiles,
    folders: &Folders,
    trainer: &Trainer,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    match task {
        Task::Simulate(setup) => {
            let scenario =
                scenario::load(&setup.path, &setup.overrides).map_err(|e| e.to_string())?;
            let p = predict(&scenario, profiles, &Options::default()).map_err(|e| e.to_string())?;
            let view = with_source(
                RunView::of(p.run, &p.program, &p.scenario),
                &setup.path,
                &setup.overrides,
            );
            reporter.say(News::Run(Arc::new(Lanes::new(Arc::new(view)))));
            Ok(Ended::Done)
        }
        Task::Train {
            setup,
            steps,
            anyway,
            on_cpu,
        } => {
            let asked = train::Asked {
                setup: &setup,
                steps,
                anyway,
                on_cpu,
            };
            let store = folders.store.as_deref();
            train::train(asked, trainer, store, reporter, stop)
        }
        Task::Explain(setup) => explain::explain(&setup, profiles, reporter, stop),
        Task::Fit { setup, keys } => fit::fit(&setup, keys.as_deref(), profiles, reporter),
        Task::Tune(setup) => tune::tune(&setup, profiles, reporter, stop),
        Task::Sweep { setup, axes } => sweep::sweep(&setup, &axes, profiles, reporter, stop),
        Task::ListStore => {
            let runs = judge::stored(folders.store.as_deref())?;
            reporter.say(News::Stored(runs));
            Ok(Ended::Done)
        }
        Task::Open { id, .. } => {
            let view = judge::open(folders.store.as_deref(), &id)?;
            reporter.say(News::Run(Arc::new(Lanes::new(Arc::new(view)))));
            Ok(Ended::Done)
        }
        Task::Keep(number, Runs(runs)) => {
            for (_, run) in &runs {
                let id = judge::keep(folders.store.as_deref(), run)?;
                reporter.say(News::Kept(number, id));
            }
            Ok(Ended::Done)
        }
        Task::Name { id, name } => {
            judge::name(folders.store.as_deref(), &id, name.as_deref())?;
            reporter.say(News::Note(match name {
                Some(name) => format!("{id} is now called {name}"),
                None => format!("removed the name of {id}"),
            }));
            reporter.say(News::Stored(judge::stored(folders.store.as_deref())?));
            Ok(Ended::Done)
        }
        Task::Export(export) => {
            match export::write(&export) {
                Ok(()) => reporter.say(News::Note(format!("{} is written", export.path.display()))),
                Err(Unwritten::Exists) => reporter.say(News::Exists),
                Err(Unwritten::Failed(reason)) => return Err(reason),
            }
            Ok(Ended::Done)
        }
        Task::Remove(id) => {
            judge::remove(folders.store.as_deref(), &id)?;
            reporter.say(News::Removed(id));
            Ok(Ended::Done)
        }
        Task::Compare(Runs(runs)) => {
            reporter.say(News::Compared(Arc::new(judge::compare(&runs))));
            Ok(Ended::Done)
        }
        Task::Gate(setup, folder) => {
            let Some((page, judged)) = judge::gate(&setup, &folder, profiles, stop)? else {
                return Ok(Ended::Cancelled);
            };
            reporter.say(News::Gated(Arc::new(page), Arc::new(judged)));
            Ok(Ended::Done)
        }
        Task::Bless(judged) => {
            let (page, judged) = judge::bless(&judged)?;
            reporter.say(News::Gated(Arc::new(page), Arc::new(judged)));
            Ok(Ended::Done)
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it panicked")
}

/// A slot that passes the latest value from one thread to another. A newer value replaces an older
/// one.
pub(crate) struct Latest<T>(Mutex<Option<T>>);

impl<T> Latest<T> {
    pub(crate) fn empty() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    pub(crate) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
