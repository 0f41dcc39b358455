//! A process alone: where its rank threads leave words for one another, and how it ends where they cannot.

use super::client::LastResort;
use super::peers::PeerError;
use crate::device::FailureKind;
use crate::device::abort::{Abort, Wake, lock};
use crate::engine::standing::{Standings, apart};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long rank threads of one process wait for one another at least: one may choose kernels by their times, or compile them,
/// while the watchdog's time is meant for steps.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks whether the session has failed.
const LOOK: Duration = Duration::from_millis(200);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Alone {
    kept: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
    resort: Arc<Resort>,
}

/// What is left when a session has failed and the process has not ended a while later.
struct Resort {
    act: Mutex<Option<LastResort>>,
    after: Duration,
    abort: Mutex<Weak<Abort>>,
    standings: Mutex<Weak<Standings>>,
    me: Weak<Self>,
}

impl std::fmt::Debug for Resort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Resort(after {:?})", self.after)
    }
}

impl Alone {
    /// The last resort comes so long after the first failure.
    pub(super) fn new(after: Duration) -> Self {
        Self {
            kept: Mutex::default(),
            changed: Condvar::new(),
            resort: Arc::new_cyclic(|me| Resort {
                act: Mutex::default(),
                after,
                abort: Mutex::default(),
                standings: Mutex::default(),
                me: Weak::clone(me),
            }),
        }
    }

    pub(super) fn set_last_resort(&self, f: LastResort) {
        *lock(&self.resort.act) = Some(f);
    }

    /// From now on a failure of the session ends waits, and begins the time of the last resort.
    pub(super) fn watch(&self, abort: &Arc<Abort>, standings: Weak<Standings>) {
        *lock(&self.resort.abort) = Arc::downgrade(abort);
        *lock(&self.resort.standings) = standings;
        let resort: Weak<Resort> = Arc::downgrade(&self.resort);
        abort.register(resort);
    }

    pub(super) fn put(&self, key: &str, data: Vec<u8>) {
        lock(&self.kept).insert(key.to_owned(), data);
        self.changed.notify_all();
    }

    pub(super) fn get(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        let abort = lock(&self.resort.abort).upgrade();
        let patience = abort
            .as_ref()
            .map_or(PATIENCE, |a| a.timeout().max(PATIENCE));
        let end = Instant::now() + patience;
        let mut kept = lock(&self.kept);
        loop {
            if let Some(data) = kept.get(key) {
                return Ok(data.clone());
            }
            if let Some(abort) = &abort
                && abort.aborted()
            {
                return Err(PeerError::Failed(cause(abort)));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(PeerError::Timeout(format!(
                    "no rank published `{key}` within {patience:.1?}"
                )));
            }
            kept = self
                .changed
                .wait_timeout(kept, left.min(LOOK))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Wake for Resort {
    fn wake(&self) {
        let Some(abort) = lock(&self.abort).upgrade() else {
            return;
        };
        let mut cause = cause(&abort);
        // The session says so too, where it comes to that: a host may stay inside of a call.
        let waited = abort
            .failures()
            .first()
            .is_some_and(|f| f.kind == FailureKind::Timeout);
        if waited && let Some(standings) = lock(&self.standings).upgrade() {
            cause.push_str(&apart(&standings.now()));
        }
        let (me, after) = (Weak::clone(&self.me), self.after);
        // Without a thread nothing is forced to end.
        let _ = std::thread::Builder::new()
            .name("last resort".to_owned())
            .spawn(move || {
                std::thread::sleep(after);
                // It has gone where the session and all that belongs to it has ended.
                let act = me.upgrade().and_then(|r| lock(&r.act).clone());
                if let Some(act) = act {
                    act(&cause);
                }
            });
    }
}

fn cause(abort: &Abort) -> String {
    abort
        .failures()
        .first()
        .map_or_else(|| "a rank has failed".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Failure;
    use crate::engine::Live;
    use shardlab_plan::program::InstrId;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    fn fail(abort: &Abort) {
        fail_as(abort, FailureKind::Injected);
    }

    fn fail_as(abort: &Abort, kind: FailureKind) {
        abort.fail(Failure {
            kind,
            rank: 1,
            stream: None,
            instr: None,
            text: String::new(),
            message: "as asked for".to_owned(),
        });
    }

    #[test]
    fn a_process_that_does_not_end_is_left_and_one_that_does_is_not() {
        for ends in [false, true] {
            let (alone, abort) = (Alone::new(4 * SHORT), Arc::new(Abort::new(LONG)));
            let (told, causes) = channel();
            alone.set_last_resort(Arc::new(move |cause: &str| {
                // The test may be over.
                let _ = told.send(cause.to_owned());
            }));
            alone.watch(&abort, Weak::new());
            assert_eq!(causes.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
            let begin = Instant::now();
            fail(&abort);
            if ends {
                drop(alone);
                assert!(causes.recv_timeout(8 * SHORT).is_err());
            } else {
                let cause = causes.recv_timeout(LONG).unwrap();
                assert_eq!(cause, "rank 1, host: injected fault: as asked for");
                assert!(begin.elapsed() >= 4 * SHORT);
            }
        }
    }

    #[test]
    fn a_process_that_is_left_says_who_was_waited_for() {
        let (alone, abort) = (Alone::new(SHORT), Arc::new(Abort::new(LONG)));
        let (told, causes) = channel();
        alone.set_last_resort(Arc::new(move |cause: &str| {
            // The test may be over.
            let _ = told.send(cause.to_owned());
        }));
        let scenario = shardlab_plan::scenario::load("small-native".as_ref(), &[]).unwrap();
        let program = Arc::new(shardlab_plan::plan(&scenario).unwrap());
        let live = Arc::new(Live::new(4));
        for (rank, at) in [(0, 30), (1, 20), (2, 30)] {
            live.issues(rank, 3, InstrId(at));
        }
        let text = program.op_text(InstrId(20));
        let local = 0..4;
        let standings = Arc::new(Standings {
            program,
            live,
            local,
        });
        alone.watch(&abort, Arc::downgrade(&standings));
        fail_as(&abort, FailureKind::Timeout);
        let cause = causes.recv_timeout(LONG).unwrap();
        let expected = format!("host positions, slowest first: rank 1 at instruction 20 `{text}`;");
        assert!(cause.contains(&expected), "{cause}");
    }

    #[test]
    fn a_failure_ends_the_waits_of_rank_threads() {
        let (alone, abort) = (Alone::new(LONG), Arc::new(Abort::new(LONG)));
        alone.watch(&abort, Weak::new());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| alone.get("a choice of rank 0's"));
            std::thread::sleep(SHORT);
            fail(&abort);
            let error = waiting.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("as asked for"), "{error}");
        });
        alone.put("another", vec![7]);
        assert_eq!(alone.get("another"), Ok(vec![7]));
    }
}
