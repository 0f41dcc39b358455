//! Ends a process that remains alive after its session has failed, because a library call cannot be
//! interrupted.

use crate::base::abort::{Abort, Wake, lock};
use crate::base::divergence::{LocalProgress, describe_divergence};
use crate::base::failure::FailureKind;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Time for a process to shut down after a failure before its exit is forced.
pub(super) const FORCE_EXIT_AFTER: Duration = Duration::from_secs(10);

/// Called with the cause if a session has failed and its process is still alive some time later.
pub type ExitHook = Arc<dyn Fn(&str) + Send + Sync>;

/// Calls `hook` with `cause` after `delay`, from another thread. `hook` returns `None` if the
/// process has shut down in the meantime.
pub(super) fn after(
    delay: Duration,
    cause: String,
    hook: impl FnOnce() -> Option<ExitHook> + Send + 'static,
) {
    // Without a thread, the exit is not forced.
    let _ = std::thread::Builder::new()
        .name("force exit".to_owned())
        .spawn(move || {
            std::thread::sleep(delay);
            if let Some(hook) = hook() {
                hook(&cause);
            }
        });
}

/// Forces the exit of a process without peers. The timer starts with the session's first failure.
pub(super) struct ForceExit {
    hook: Mutex<Option<ExitHook>>,
    after: Duration,
    abort: Mutex<Weak<Abort>>,
    progress: Mutex<Weak<LocalProgress>>,
    me: Weak<Self>,
}

impl std::fmt::Debug for ForceExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ForceExit(after {:?})", self.after)
    }
}

impl ForceExit {
    /// Creates a timer that calls its hook `after` a failure.
    pub(super) fn new(after: Duration) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            hook: Mutex::default(),
            after,
            abort: Mutex::default(),
            progress: Mutex::default(),
            me: Weak::clone(me),
        })
    }

    /// Sets the hook.
    pub(super) fn set_hook(&self, hook: ExitHook) {
        *lock(&self.hook) = Some(hook);
    }

    /// Watches a session: its first failure starts the timer.
    pub(super) fn watch(&self, abort: &Arc<Abort>, progress: Weak<LocalProgress>) {
        *lock(&self.abort) = Arc::downgrade(abort);
        *lock(&self.progress) = progress;
        let waker: Weak<Self> = Weak::clone(&self.me);
        abort.register(waker);
    }

    /// Returns the watched session, if it is still alive.
    pub(super) fn abort(&self) -> Option<Arc<Abort>> {
        lock(&self.abort).upgrade()
    }
}

impl Wake for ForceExit {
    fn wake(&self) {
        let Some(abort) = self.abort() else {
            return;
        };
        let mut cause = first_failure(&abort);
        // The session reports it as well, unless its host thread never returns from a library call.
        let failures = abort.failures();
        let timed_out = failures
            .first()
            .is_some_and(|f| f.kind == FailureKind::Timeout);
        if timed_out && let Some(progress) = lock(&self.progress).upgrade() {
            cause.push_str(&describe_divergence(&progress.snapshot()));
        }
        let me = Weak::clone(&self.me);
        // It no longer exists after the session and its process group have been dropped.
        after(self.after, cause, move || {
            me.upgrade().and_then(|f| lock(&f.hook).clone())
        });
    }
}

/// Formats the first failure of a session.
pub(super) fn first_failure(abort: &Abort) -> String {
    abort
        .failures()
        .first()
        .map_or_else(|| "a rank has failed".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::failure::Failure;
    use crate::base::progress::Progress;
    use shardlab_plan::ir::InstrId;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
    use std::time::Instant;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    fn fail(abort: &Abort, kind: FailureKind) {
        abort.fail(Failure {
            kind,
            rank: 1,
            stream: None,
            instr: None,
            text: String::new(),
            message: "as asked for".to_owned(),
        });
    }

    /// Returns a timer, its session, and the causes that its hook receives.
    fn timer(after: Duration) -> (Arc<ForceExit>, Arc<Abort>, Receiver<String>) {
        let (exit, abort) = (ForceExit::new(after), Arc::new(Abort::new(LONG)));
        let (sender, causes) = channel();
        exit.set_hook(Arc::new(move |cause: &str| {
            // The test may have ended.
            let _ = sender.send(cause.to_owned());
        }));
        (exit, abort, causes)
    }

    #[test]
    fn a_process_that_does_not_end_is_exited_and_one_that_does_is_not() {
        for ends in [false, true] {
            let (exit, abort, causes) = timer(4 * SHORT);
            exit.watch(&abort, Weak::new());
            assert_eq!(causes.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
            let begin = Instant::now();
            fail(&abort, FailureKind::Injected);
            if ends {
                drop(exit);
                assert!(causes.recv_timeout(8 * SHORT).is_err());
            } else {
                let cause = causes.recv_timeout(LONG).unwrap();
                assert_eq!(cause, "rank 1, host: injected fault: as asked for");
                assert!(begin.elapsed() >= 4 * SHORT);
            }
        }
    }

    #[test]
    fn the_cause_of_a_timeout_lists_host_positions() {
        let (exit, abort, causes) = timer(SHORT);
        let scenario = shardlab_plan::scenario::load("small-native".as_ref(), &[]).unwrap();
        let program = Arc::new(shardlab_plan::plan(&scenario).unwrap());
        let progress = Arc::new(Progress::new(4));
        for (rank, at) in [(0, 30), (1, 20), (2, 30)] {
            progress.set_instruction(rank, 3, InstrId(at));
        }
        let text = program.op_text(InstrId(20));
        let local = 0..4;
        let progress = Arc::new(LocalProgress {
            program,
            progress,
            local,
        });
        exit.watch(&abort, Arc::downgrade(&progress));
        fail(&abort, FailureKind::Timeout);
        let cause = causes.recv_timeout(LONG).unwrap();
        let expected = format!("host positions, slowest first: rank 1 at instruction 20 `{text}`;");
        assert!(cause.contains(&expected), "{cause}");
    }
}
