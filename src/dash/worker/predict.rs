//! Predicts while options change.

use super::{Latest, Stop, panic_text};
use crate::analysis::verdict::Verdict;
use crate::dash::app::Tone;
use crate::dash::event::{Event, Message, Setup};
use crate::dash::glance::{Brief, Glance};
use crate::predict::{Profiles, predict, predict_light};
use shardlab_plan::scenario::{self, ScenarioError};
use shardlab_sim::Options;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, TrySendError, sync_channel};

/// The thread that answers the newest request.
pub(super) struct Predictor {
    question: Arc<Latest<(u64, Setup)>>,
    wake: SyncSender<()>,
}

impl Predictor {
    pub(super) fn start(events: Sender<Event>, profiles: Arc<Profiles>) -> Self {
        let question = Arc::new(Latest::empty());
        let (wake, woken) = sync_channel::<()>(1);
        let asked = Arc::clone(&question);
        // Without the thread (if the system is out of threads), there are no predictions, and the
        // dashboard keeps showing "…".
        let _ = std::thread::Builder::new()
            .name("predict".into())
            .spawn(move || {
                let mut base: Option<(PathBuf, Arc<Glance>)> = None;
                while woken.recv().is_ok() {
                    while let Some((ticket, setup)) = asked.take() {
                        let message = answer(ticket, &setup, &profiles, &mut base);
                        if events.send(Event::Message(message)).is_err() {
                            return;
                        }
                    }
                }
            });
        Self { question, wake }
    }

    pub(super) fn ask(&self, ticket: u64, setup: Setup) {
        self.question.put((ticket, setup));
        match self.wake.try_send(()) {
            // A full channel wakes the thread as well.
            Ok(()) | Err(TrySendError::Full(()) | TrySendError::Disconnected(())) => {}
        }
    }
}

fn answer(
    ticket: u64,
    setup: &Setup,
    profiles: &Profiles,
    base: &mut Option<(PathBuf, Arc<Glance>)>,
) -> Message {
    if base.as_ref().is_none_or(|(path, _)| *path != setup.path) {
        *base = glance(&setup.path, &[], profiles)
            .ok()
            .map(|g| (setup.path.clone(), Arc::new(g)));
    }
    let without = base.as_ref().map(|(_, g)| Arc::clone(g));
    let now = match (&without, setup.overrides.is_empty()) {
        (Some(base), true) => Ok(Arc::clone(base)),
        _ => glance(&setup.path, &setup.overrides, profiles).map(Arc::new),
    };
    Message::Predicted {
        ticket,
        base: without,
        now,
    }
}

fn glance(path: &Path, overrides: &[String], profiles: &Profiles) -> Result<Glance, String> {
    let work = || {
        let scenario = scenario::load(path, overrides).map_err(|e| shown_error(&e))?;
        let prediction =
            predict(&scenario, profiles, &Options::default()).map_err(|e| e.reason())?;
        Ok(Glance::of(&prediction))
    };
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(format!("internal error: {}", panic_text(&*panic))))
}

/// Returns the tone in which a verdict is shown.
pub(super) fn tone(verdict: &Verdict) -> Tone {
    match (verdict.good, verdict.fits) {
        (true, _) => Tone::Good,
        (_, "?") => Tone::Plain,
        _ => Tone::Bad,
    }
}

/// Formats an error for the dashboard. An error in a change is shown next to its option, one in a
/// file with its place.
pub(super) fn shown_error(e: &ScenarioError) -> String {
    let mut text = e.message().to_owned();
    if let Some(expected) = e.expected().filter(|expected| !text.contains(expected)) {
        text = format!("{text}; expected {expected}");
    }
    if let Some(help) = e.help() {
        text = format!("{text}; {help}");
    }
    match e.position() {
        Some(at) if !e.file().starts_with("--set ") => {
            format!("{}:{}:{}: {text}", e.file(), at.line, at.column)
        }
        _ => text,
    }
}

/// Predicts scenarios one after another, without spans.
pub(super) fn survey(
    setups: Vec<Setup>,
    events: Sender<Event>,
    profiles: Arc<Profiles>,
    stop: Stop,
) {
    let body = move || {
        for setup in setups {
            if stop.asked() {
                return;
            }
            let work = || {
                let scenario = scenario::load(&setup.path, &setup.overrides)
                    .map_err(|e| e.message().to_owned())?;
                let prediction = predict_light(&scenario, &profiles).map_err(|e| e.reason())?;
                Ok(Brief::of(&prediction))
            };
            let brief = catch_unwind(AssertUnwindSafe(work))
                .unwrap_or_else(|p| Err(panic_text(&*p).to_owned()));
            if events
                .send(Event::Message(Message::Surveyed(setup, brief)))
                .is_err()
            {
                return;
            }
        }
    };
    // Without this thread the list has no numbers, which is acceptable.
    let _ = std::thread::Builder::new()
        .name("survey".into())
        .spawn(body);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn the_newest_question_is_answered_and_faults_are_texts() {
        let (events, inbox) = channel();
        let predictor = Predictor::start(events, Arc::new(Profiles::default()));
        let setup = |set: &[&str]| Setup {
            path: "small-native".into(),
            overrides: set.iter().map(|s| (*s).to_owned()).collect(),
        };
        for (ticket, set) in [
            (1, &[][..]),
            (2, &["fsdp.prefetch_forward=0"][..]),
            (3, &["fsdp.prefetch_forward=x"][..]),
        ] {
            predictor.ask(ticket, setup(set));
        }
        loop {
            let event = inbox.recv_timeout(Duration::from_secs(60)).unwrap();
            let Event::Message(Message::Predicted { ticket, base, now }) = event else {
                panic!("another message");
            };
            assert!(base.is_some());
            if ticket == 3 {
                let reason = now.unwrap_err();
                assert!(
                    reason
                        .starts_with("`fsdp.prefetch_forward` must be an integer from 0 to 64 or "),
                    "{reason}"
                );
                assert!(!reason.contains("expected"), "{reason}");
                return;
            }
            assert!(now.is_ok());
        }
    }
    /// An error in a file is reported with its place.
    #[test]
    fn a_broken_file_is_reported_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("broken.toml");
        std::fs::write(&path, "[mesh]\ndp_shard = 0\n").unwrap();
        let e = scenario::load(&path, &[]).unwrap_err();
        let text = shown_error(&e);
        assert!(text.contains("broken.toml:2:12: `mesh.dp_shard`"), "{text}");
    }
}
