//! Deadlines of a calibration: every part ends on time, or else the calibration ends with a message
//! that names the missing ranks.
//!
//! A thread observes the ranks. If nothing makes progress for too long, or if everything takes too
//! long, it ends the waits of the part. If that is not enough, because a thread is inside a driver
//! call that does not return, the thread asks the caller of the calibration to end the process.

use crate::base::abort::lock;
use crate::device::{Abort, Failure, FailureKind};
use crate::kernels::cuda::prepared;
use shardlab_plan::ir::InstrId;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Period of the checks.
const PERIOD: Duration = Duration::from_millis(100);

/// Time limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Limit without progress: no rank continues, no kernel is prepared, and no part starts.
    pub(super) silence: Duration,
    /// Limit without progress after a failure, which the other ranks only have to notice.
    pub(super) farewell: Duration,
    /// For the whole calibration.
    pub(super) total: Duration,
    /// Time between the end of waits and the end of the process.
    pub(super) grace: Duration,
}

impl Limits {
    /// Returns the limits for a calibration with a given measuring time. Parts that cannot be
    /// skipped may take longer than a short measuring time.
    pub(super) fn of(budget: Duration) -> Self {
        Self {
            silence: Duration::from_secs(60),
            farewell: Duration::from_secs(15),
            total: (budget + Duration::from_secs(80)).max(Duration::from_secs(150)),
            grace: Duration::from_secs(8),
        }
    }
}

/// Current activity of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Doing {
    /// Creates its device: kernels and communicators.
    Joining,
    /// Allocates memory and registers it with the communication library.
    Mapping,
    /// Fills memory.
    Filling,
    /// Starts a pass.
    Beginning,
    /// Waits for the other ranks.
    Rendezvous,
    /// Is inside a call that enqueues a command.
    Kernel,
    /// The same.
    Collective,
    /// The same.
    Event,
    /// The same.
    Copy,
    /// Is between two commands.
    Enqueued,
    /// Waits for its device.
    Waiting,
    /// Reads times.
    Reading,
    /// Drops its device: memory, communicators.
    Leaving,
    /// Has ended.
    Done,
}

impl Doing {
    const ALL: [Self; 14] = [
        Self::Joining,
        Self::Mapping,
        Self::Filling,
        Self::Beginning,
        Self::Rendezvous,
        Self::Kernel,
        Self::Collective,
        Self::Event,
        Self::Copy,
        Self::Enqueued,
        Self::Waiting,
        Self::Reading,
        Self::Leaving,
        Self::Done,
    ];

    /// Describes the activity, with the number of commands of the pass that have been `enqueued`.
    fn words(self, enqueued: u32) -> String {
        let call = |what| {
            format!("is inside the call that enqueues command {enqueued} of its pass, {what}")
        };
        match self {
            Self::Joining => "creates its device (kernels, communicators)".to_owned(),
            Self::Mapping => "allocates and registers memory".to_owned(),
            Self::Filling => "fills memory".to_owned(),
            Self::Beginning => "starts a pass".to_owned(),
            Self::Rendezvous => format!("waits for other ranks ({enqueued} commands enqueued)"),
            Self::Kernel => call("a kernel"),
            Self::Collective => call("a collective"),
            Self::Event => call("an event"),
            Self::Copy => call("a copy"),
            Self::Enqueued => format!("has enqueued {enqueued} commands of its pass"),
            Self::Waiting => format!("waits for its device ({enqueued} commands enqueued)"),
            Self::Reading => "reads times".to_owned(),
            Self::Leaving => "releases its device (memory, communicators)".to_owned(),
            Self::Done => "has finished".to_owned(),
        }
    }
}

/// Publishes the activity of a rank. It costs only one store, so it does not lengthen measurements.
#[derive(Debug)]
pub(super) struct At(AtomicU64);

impl At {
    const fn new() -> Self {
        Self(AtomicU64::new(Doing::Joining as u64))
    }

    /// Publishes the number of commands of the pass that have been enqueued.
    pub(super) fn set(&self, doing: Doing, enqueued: u32) {
        let word = u64::from(enqueued) << 8 | doing as u64;
        self.0.store(word, Ordering::Relaxed);
    }

    fn get(&self) -> (Doing, u32) {
        let word = self.0.load(Ordering::Relaxed);
        let doing = Doing::ALL.get((word & 0xff) as usize).copied();
        (doing.unwrap_or(Doing::Done), (word >> 8) as u32)
    }
}

/// Ranks of a bench.
#[derive(Clone, Debug)]
struct Ranks {
    at: Arc<Vec<At>>,
    abort: Arc<Abort>,
}

#[derive(Debug, Default)]
struct State {
    /// Current part.
    part: String,
    ranks: Option<Ranks>,
    /// Reason why the calibration was ended.
    verdict: Option<String>,
}

struct Shared {
    begin: Instant,
    budget: Duration,
    note: Box<dyn Fn(&str) + Send + Sync>,
    state: Mutex<State>,
    /// Number of progress reports.
    beats: AtomicU64,
    over: AtomicBool,
}

/// See the module documentation.
#[derive(Clone)]
pub(super) struct Watch(Arc<Shared>);

impl Watch {
    /// Starts the watch. `note` is called with the name of every part; `stuck` is called on another
    /// thread if the process must end.
    pub(super) fn start(
        budget: Duration,
        limits: Limits,
        note: impl Fn(&str) + Send + Sync + 'static,
        stuck: impl FnOnce(&str) + Send + 'static,
    ) -> Self {
        let watch = Self(Arc::new(Shared {
            begin: Instant::now(),
            budget,
            note: Box::new(note),
            state: Mutex::default(),
            beats: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }));
        let it = watch.clone();
        // The thread is not joined, because the thread that could join it may be the one that
        // hangs.
        std::thread::spawn(move || it.look_on(limits, stuck));
        watch
    }

    /// Announces the start of a part.
    pub(super) fn say(&self, part: &str) {
        self.beat();
        lock(&self.0.state).part = part.to_owned();
        (self.0.note)(&format!(
            "{:>6.1} s  {part}",
            self.0.begin.elapsed().as_secs_f64()
        ));
    }

    /// Records progress.
    pub(super) fn beat(&self) {
        self.0.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether more than a share of the measuring time has passed.
    pub(super) fn late(&self, share: f64) -> bool {
        self.spent() > share
    }

    /// Returns the share of the measuring time that has passed.
    pub(super) fn spent(&self) -> f64 {
        self.0.begin.elapsed().as_secs_f64() / self.0.budget.as_secs_f64().max(1e-3)
    }

    /// Records the start of ranks. `abort` ends their waits.
    pub(super) fn ranks(&self, count: u32, abort: &Arc<Abort>) -> Arc<Vec<At>> {
        let at: Arc<Vec<At>> = Arc::new((0..count).map(|_| At::new()).collect());
        let ranks = Ranks {
            at: Arc::clone(&at),
            abort: Arc::clone(abort),
        };
        lock(&self.0.state).ranks = Some(ranks);
        self.beat();
        at
    }

    /// Records the end of the ranks.
    pub(super) fn alone(&self) {
        lock(&self.0.state).ranks = None;
        self.beat();
    }

    /// Returns the reason why the calibration was ended, if it was.
    pub(super) fn verdict(&self) -> Option<String> {
        lock(&self.0.state).verdict.clone()
    }

    /// Ends all deadlines, because everything has been measured.
    pub(super) fn end(&self) {
        self.0.over.store(true, Ordering::Relaxed);
    }

    /// Records that a failure has occurred and that the process must end within the grace time.
    pub(super) fn failed(&self, why: &str) {
        let mut state = lock(&self.0.state);
        state.verdict.get_or_insert_with(|| why.to_owned());
    }

    fn look_on(&self, limits: Limits, stuck: impl FnOnce(&str)) {
        let mut deadline = Deadline::new(limits, self.0.begin);
        loop {
            std::thread::sleep(PERIOD.min(limits.silence / 4));
            if self.0.over.load(Ordering::Relaxed) {
                return;
            }
            let mut state = lock(&self.0.state);
            let mut pulse = vec![self.0.beats.load(Ordering::Relaxed), prepared()];
            let mut failing = false;
            if let Some(ranks) = &state.ranks {
                pulse.extend(ranks.at.iter().map(|a| a.0.load(Ordering::Relaxed)));
                failing = ranks.abort.aborted();
            }
            let now = Instant::now();
            match deadline.look(now, pulse, failing, state.verdict.is_some()) {
                Verdict::Fine => {}
                Verdict::GiveUp(why) => {
                    let what = sentence(&state, &why);
                    state.verdict = Some(what.clone());
                    if let Some(ranks) = &state.ranks {
                        give_up(ranks, what);
                    }
                }
                Verdict::End => {
                    let what = state.verdict.clone().unwrap_or_default();
                    drop(state);
                    return stuck(&what);
                }
            }
        }
    }
}

fn give_up(ranks: &Ranks, message: String) {
    ranks.abort.fail(Failure {
        kind: FailureKind::Timeout,
        rank: missing(&ranks.at).first().copied().unwrap_or(0),
        stream: None,
        instr: None::<InstrId>,
        text: String::new(),
        message,
    });
}

/// Returns the ranks that others wait for, or all ranks if none waits for another.
fn missing(at: &[At]) -> Vec<u32> {
    let waits = |a: &At| matches!(a.get().0, Doing::Rendezvous | Doing::Done);
    (0..).zip(at).filter(|r| !waits(r.1)).map(|r| r.0).collect()
}

/// Describes what happened, in which part, and what every rank was doing.
fn sentence(state: &State, why: &str) -> String {
    let mut text = format!("calibration, part `{}`: {why}", state.part);
    let Some(ranks) = &state.ranks else {
        return text;
    };
    for (i, failure) in ranks.abort.failures().iter().enumerate() {
        let _ = write!(
            text,
            "{} {failure}",
            if i == 0 { "; before that:" } else { "," }
        );
    }
    let list: Vec<String> = missing(&ranks.at).iter().map(ToString::to_string).collect();
    if !list.is_empty() {
        let _ = write!(text, "; not finished: rank {}", list.join(", "));
    }
    for (rank, at) in ranks.at.iter().enumerate() {
        let (doing, enqueued) = at.get();
        let _ = write!(text, "; rank {rank} {}", doing.words(enqueued));
    }
    text
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Fine,
    /// Waits must end.
    GiveUp(String),
    /// The process must end.
    End,
}

/// Decides when to end the calibration.
struct Deadline {
    limits: Limits,
    begin: Instant,
    moved: Instant,
    pulse: Vec<u64>,
    /// Time at which the calibration was ended.
    given_up: Option<Instant>,
}

impl Deadline {
    fn new(limits: Limits, begin: Instant) -> Self {
        Self {
            limits,
            begin,
            moved: begin,
            pulse: Vec::new(),
            given_up: None,
        }
    }

    /// Checks the limits. `pulse` changes with every progress. `failing` is set when a rank has
    /// failed, and `over` when there is a verdict.
    fn look(&mut self, now: Instant, pulse: Vec<u64>, failing: bool, over: bool) -> Verdict {
        if over {
            let since = *self.given_up.get_or_insert(now);
            return if now - since >= self.limits.grace {
                Verdict::End
            } else {
                Verdict::Fine
            };
        }
        if pulse != self.pulse {
            self.pulse = pulse;
            self.moved = now;
        }
        let silence = if failing {
            self.limits.farewell
        } else {
            self.limits.silence
        };
        let why = if now - self.moved >= silence {
            format!("no progress for {silence:.0?}")
        } else if now - self.begin >= self.limits.total {
            format!("it took longer than {:.0?} in total", self.limits.total)
        } else {
            return Verdict::Fine;
        };
        self.given_up = Some(now);
        Verdict::GiveUp(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn silence_and_length_have_limits_and_progress_restarts_silence() {
        let limits = Limits::of(Duration::from_secs(200));
        assert!(limits.total + limits.grace < Duration::from_secs(300));
        let begin = Instant::now();
        let at = |s: u32| begin + s * SECOND;
        let mut d = Deadline::new(limits, begin);
        assert_eq!(d.look(at(59), vec![1, 7], false, false), Verdict::Fine);
        // A rank made progress.
        assert_eq!(d.look(at(118), vec![1, 8], false, false), Verdict::Fine);
        assert_eq!(d.look(at(177), vec![1, 8], false, false), Verdict::Fine);
        let Verdict::GiveUp(why) = d.look(at(178), vec![1, 8], false, false) else {
            panic!("60 s without progress");
        };
        assert_eq!(why, "no progress for 60s");
        assert_eq!(d.look(at(185), vec![1, 9], false, true), Verdict::Fine);
        assert_eq!(d.look(at(186), vec![1, 9], false, true), Verdict::End);

        // A failure shortens the limit.
        let mut d = Deadline::new(limits, begin);
        assert_eq!(d.look(at(1), vec![1], true, false), Verdict::Fine);
        assert!(matches!(
            d.look(at(16), vec![1], true, false),
            Verdict::GiveUp(_)
        ));

        // Progress without an end.
        let mut d = Deadline::new(limits, begin);
        for s in 0..280 {
            assert_eq!(
                d.look(at(s), vec![u64::from(s)], false, false),
                Verdict::Fine
            );
        }
        assert_eq!(
            d.look(at(280), vec![280], false, false),
            Verdict::GiveUp("it took longer than 280s in total".to_owned())
        );
    }

    fn short(total: Duration) -> (Watch, Receiver<String>) {
        let (send, stuck) = channel();
        let limits = Limits {
            silence: Duration::from_millis(80),
            farewell: Duration::from_millis(40),
            total,
            grace: Duration::from_millis(120),
        };
        let watch = Watch::start(
            SECOND,
            limits,
            |_| {},
            move |what| {
                let _ = send.send(what.to_owned());
            },
        );
        (watch, stuck)
    }

    #[test]
    fn a_missing_rank_is_named_with_its_activity() {
        let (watch, stuck) = short(60 * SECOND);
        let abort = Arc::new(Abort::new(60 * SECOND));
        watch.say("4 ranks, all-gather of bf16");
        let at = watch.ranks(4, &abort);
        for rank in [0, 2] {
            at[rank].set(Doing::Rendezvous, 10);
        }
        at[1].set(Doing::Collective, 3);
        at[3].set(Doing::Waiting, 10);
        let end = Instant::now() + 20 * SECOND;
        while !abort.aborted() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let what = watch.verdict().unwrap();
        assert_eq!(
            what,
            "calibration, part `4 ranks, all-gather of bf16`: no progress for 80ms; not finished: rank 1, 3; \
             rank 0 waits for other ranks (10 commands enqueued); \
             rank 1 is inside the call that enqueues command 3 of its pass, a collective; \
             rank 2 waits for other ranks (10 commands enqueued); \
             rank 3 waits for its device (10 commands enqueued)"
        );
        assert_eq!(abort.failures()[0].rank, 1);
        // The calibration does not end, so the process must.
        assert_eq!(stuck.recv_timeout(20 * SECOND).unwrap(), what);
    }

    #[test]
    fn a_part_without_ranks_has_a_deadline_and_the_end_has_none() {
        let (watch, stuck) = short(60 * SECOND);
        watch.say("steps");
        let what = stuck.recv_timeout(20 * SECOND).unwrap();
        assert_eq!(what, "calibration, part `steps`: no progress for 80ms");

        let (watch, stuck) = short(60 * SECOND);
        watch.end();
        assert!(stuck.recv_timeout(Duration::from_millis(400)).is_err());
        assert_eq!(watch.verdict(), None);

        // An error after which the process does not end.
        let (watch, stuck) = short(60 * SECOND);
        watch.failed("rank 2: no memory");
        assert_eq!(
            stuck.recv_timeout(20 * SECOND).unwrap(),
            "rank 2: no memory"
        );
    }
}
