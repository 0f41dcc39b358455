//! Progress output for programs.

use crate::cli::exec::events::Event;
use shardlab_exec::engine::RankTimes;
use shardlab_exec::train::{Flow, Observer, Outcome, ParamNorm, RunStart, StepReport};
use shardlab_reports::store::Id;
use std::io::Write;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Writes events from a separate thread. A reader that stops reading must not block the ranks,
/// because that would look like a hang.
pub(in crate::cli::exec) struct Json {
    /// Times of the ranks in the step that is reported next.
    ranks: Vec<RankTimes>,
    writer: Option<(Sender<Event>, JoinHandle<()>)>,
}

impl Json {
    pub(super) fn new() -> Self {
        let (events, inbox) = channel::<Event>();
        let body = move || inbox.iter().for_each(|event| write(&event));
        let thread = std::thread::Builder::new().name("progress".to_owned());
        Self {
            ranks: Vec::new(),
            // If the thread cannot be started, events are written directly.
            writer: thread.spawn(body).ok().map(|thread| (events, thread)),
        }
    }

    fn say(&self, event: Event) {
        match &self.writer {
            Some((events, _)) => _ = events.send(event),
            None => write(&event),
        }
    }

    pub(super) fn note(&self, text: &str) {
        let text = text.to_owned();
        self.say(Event::Note { text });
    }

    pub(super) fn over(&self, outcome: &Outcome, kept: Option<&Id>) {
        self.say(Event::End {
            step: outcome.run.losses.len() as u64,
            interrupted: outcome.interrupted,
            run_id: kept.map(Id::to_string),
        });
    }
}

impl Drop for Json {
    /// Writes all remaining events before the process ends.
    fn drop(&mut self) {
        if let Some((events, thread)) = self.writer.take() {
            drop(events);
            let _ = thread.join();
        }
    }
}

/// Writes a line in one piece. A closed stderr is ignored.
pub(super) fn write(event: &Event) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(event.line().as_bytes());
    let _ = stderr.flush();
}

impl Observer for Json {
    fn begun(&mut self, begun: &RunStart) {
        self.say(Event::begun(begun));
    }

    fn ranks(&mut self, ranks: &[RankTimes]) {
        self.ranks = ranks.to_vec();
    }

    fn step(&mut self, report: &StepReport) -> Flow {
        self.say(Event::step(report, &self.ranks));
        Flow::Continue
    }

    fn validation(&mut self, step: u64, loss: f64) {
        self.say(Event::validation(step, loss));
    }

    fn param_norms(&mut self, step: u64, norms: &[ParamNorm]) {
        self.say(Event::param_norms(step, norms));
    }

    fn note(&mut self, text: &str) {
        Self::note(self, text);
    }
}
