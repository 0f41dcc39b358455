//! Handles the reports of jobs.

use crate::dash::app::{App, Job, Purpose, Tone};
use crate::dash::confirm::Question;
use crate::dash::event::{Effect, JobId, Judged, News, StoredRun};
use crate::dash::lanes::Lanes;
use crate::dash::tables::Page;
use crate::dash::train::End;
use crate::dash::{export, runs};
use std::sync::Arc;

/// Handles news of a job.
pub(super) fn news(app: &mut App, id: JobId, news: News) -> Vec<Effect> {
    let Some(job) = app.jobs.get(&id).cloned() else {
        return Vec::new();
    };
    let ends = matches!(news, News::Done | News::Cancelled | News::Failed(_));
    if ends {
        app.jobs.remove(&id);
    }
    if ends && job.purpose == Purpose::Train && app.question == Some(Question::Quit) {
        // The training that the question is about has ended, and there may be a run to look at.
        app.question = None;
    }
    // The view ignores further reports of a cancelled job, except the run of a training and the
    // best settings so far.
    let counts = matches!(job.purpose, Purpose::Train | Purpose::Tune);
    let stale = job.cancelled && !counts;
    match news {
        News::Done => done(app, &job, job.cancelled),
        News::Cancelled => done(app, &job, true),
        _ if stale => {}
        News::Failed(reason) => failed(app, &job, reason),
        News::Note(text) => note(app, &job, text),
        News::Run(lanes) => return run(app, job, lanes),
        News::Trained(lanes, id) => {
            let number = trained(app, lanes, Some(id.clone()));
            return runs::saved(app, number, id);
        }
        News::Kept(number, id) => return runs::saved(app, number, id),
        News::TooLarge(reason) => too_large(app, reason),
        News::RunStart(steps) => app.train.planned = Some(steps),
        News::On(place) => app.train.on = Some(place),
        News::Stepping => app.train.since = Some(app.now),
        News::Step(step) => app.train.step(step, app.now),
        News::Validation(step, loss) => app.train.validations.push((step, loss)),
        News::ParamNorms(step, norms) => app.train.param_norms = Some((step, norms)),
        News::Ranks(ranks) => app.train.ranks = ranks,
        News::Explained(found) if job.purpose == Purpose::Tune => app.tune.arrived(found),
        News::Explained(found) => app.whatif.arrived(found),
        News::Searched(text) => app.tune.progress = Some(text),
        News::Fitted(setup, page) => app.fit.arrived(setup, page),
        News::Axes(keys, total) => axes(app, keys, total),
        News::Point(index, settings, result) => app.sweep.point(index, settings, result),
        News::Stored(runs) => stored(app, runs),
        News::Exists => export::exists(app),
        News::Removed(id) => removed(app, &id),
        News::Compared(page) => compared(app, page),
        News::Gated(page, judged) => gated(app, &job, page, judged),
    }
    Vec::new()
}

/// Ends a job that did not fail.
fn done(app: &mut App, job: &Job, stopped: bool) {
    match job.purpose {
        Purpose::Train => {
            let end = if stopped { End::Stopped } else { End::Done };
            // The message that it was not started has already been shown.
            app.train.end.get_or_insert(end);
            app.train.ranks.clear();
        }
        Purpose::Tune => app.tune.progress = None,
        _ => {}
    }
    if job.cancelled && job.purpose != Purpose::Train {
        app.say(Tone::Plain, format!("{} cancelled", job.purpose.name()));
    }
}

/// Ends a job that failed, and shows why.
fn failed(app: &mut App, job: &Job, reason: String) {
    let first = reason.lines().next().unwrap_or_default();
    let message = format!("{}: {first}", job.purpose.name());
    match job.purpose {
        Purpose::Train => {
            app.train.end = Some(End::Failed(reason));
            app.train.ranks.clear();
        }
        Purpose::Sweep => app.sweep.error = Some(reason),
        Purpose::Explain => app.whatif.error = Some(reason),
        Purpose::Tune => app.tune.error = Some(reason),
        Purpose::Fit => app.fit.error = Some(reason),
        Purpose::Store => {
            app.runs.store_error = Some(reason);
            return;
        }
        _ => {}
    }
    app.say(Tone::Bad, message);
}

/// Adds a run that a job has read, simulated or trained.
fn run(app: &mut App, job: Job, lanes: Arc<Lanes>) -> Vec<Effect> {
    match job.purpose {
        Purpose::Mark => {
            let number = runs::arrived(app, lanes, Some(job.of), false);
            if !app.runs.marked.contains(&number) {
                app.runs.marked.push(number);
            }
        }
        Purpose::Open => _ = runs::arrived(app, lanes, Some(job.of), true),
        Purpose::Train => {
            let number = trained(app, lanes, None);
            // Runs that took time are saved; a simulation is quickly repeated.
            if app.keep {
                return runs::keep(app, number);
            }
        }
        _ => _ = runs::arrived(app, lanes, None, true),
    }
    Vec::new()
}

fn note(app: &mut App, job: &Job, text: String) {
    if job.purpose == Purpose::Train {
        app.train.notes.push(text.clone());
    }
    app.say(Tone::Plain, text);
}

fn too_large(app: &mut App, reason: String) {
    app.train.end = Some(End::TooLarge(reason));
    if app.question.is_none() {
        app.question = Some(Question::TooLarge);
    }
}

fn axes(app: &mut App, keys: Vec<String>, total: usize) {
    app.sweep.keys = keys;
    app.sweep.total = total;
    app.sweep.sort = app.sweep.sort.min(app.sweep.columns() - 1);
}

fn stored(app: &mut App, runs: Vec<StoredRun>) {
    app.runs.list(runs);
    app.runs.store_error = None;
}

fn removed(app: &mut App, id: &str) {
    app.runs.forget(id);
    app.say(Tone::Good, format!("{id} is removed"));
}

fn compared(app: &mut App, page: Arc<Page>) {
    app.compare.page = Some(page);
    app.compare.cursor.at = 0;
}

fn gated(app: &mut App, job: &Job, page: Arc<Page>, judged: Arc<Judged>) {
    if job.purpose == Purpose::Bless {
        app.say(Tone::Good, format!("{} is written", judged.path.display()));
    }
    app.gate.page = Some(page);
    app.gate.judged = Some(judged);
    app.gate.cursor.at = 0;
}

/// Adds the run of a training and returns its number. The run is in the timeline, but the training
/// view stays until the user leaves it.
fn trained(app: &mut App, lanes: Arc<Lanes>, stored: Option<String>) -> u32 {
    let sim = app.runs.counterpart(&lanes);
    let number = runs::arrived(app, Arc::clone(&lanes), stored, false);
    if let Some(sim) = sim {
        app.timeline.open(sim);
        app.timeline.other = Some(lanes);
    } else {
        app.timeline.open(lanes);
    }
    number
}
