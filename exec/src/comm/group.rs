//! Rendezvous of the members of one communicator instance.

use super::{check, moves, remote};
use crate::base::abort::{Abort, WaitLimit, Wake, lock};
use crate::base::failure::Stop;
use crate::base::operand::RawRange;
use crate::process::{PeerError, ProcessGroup};
use shardlab_plan::ir::{CollectiveKind, DType, ReduceOp, SelectedRows};
use smallvec::SmallVec;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Arguments of one rank for a collective.
#[derive(Clone, Debug)]
pub struct Call {
    /// Kind.
    pub kind: CollectiveKind,
    /// Reduction.
    pub reduce: ReduceOp,
    /// Element type.
    pub dtype: DType,
    /// Input and output of each part. They stay allocated, and nothing else uses them, until
    /// [`Group::run`] has returned on every member.
    pub parts: SmallVec<[(RawRange, RawRange); 1]>,
    /// Rows that the first part carries, if it does not carry all of them: the rows that the last
    /// part selects, see [`SentRows::by`](shardlab_plan::ir::SentRows::by). The last part is only
    /// read.
    pub rows: Option<SelectedRows>,
    /// Whether the rank fails after its arrival, for tests.
    pub crash: bool,
}

/// When a collective could start.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Time at which the communicator was free.
    pub free: Instant,
    /// Time at which the last rank had arrived.
    pub start: Instant,
}

/// Reason why a collective did not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommError {
    /// Another thread failed.
    Aborted,
    /// A rank did not arrive in time; the message names it.
    Timeout(String),
    /// The ranks' calls do not match; the message names the rank and the difference.
    Mismatch(String),
}

#[derive(Debug)]
struct State {
    /// Index of the collective that is collecting calls or running.
    sequence: u64,
    arrived: Vec<Option<Call>>,
    count: usize,
    /// Set when all have arrived.
    verdict: Option<Result<Arc<[Call]>, String>>,
    started: Option<Instant>,
    /// Number of members that have read their peers' data, if data are staged.
    staged: usize,
    /// By position: members that have completed the collective.
    left: Vec<bool>,
}

/// One communicator instance. See the module documentation.
#[derive(Debug)]
pub struct Group {
    name: String,
    /// World ranks by position.
    ranks: Vec<u32>,
    abort: Arc<Abort>,
    /// Process group, if each member is a process.
    peers: Option<Arc<ProcessGroup>>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Wake for Group {
    fn wake(&self) {
        let _held = lock(&self.state);
        self.changed.notify_all();
    }
}

impl Group {
    /// Creates an instance of the named communicator over world ranks.
    #[must_use]
    pub fn new(name: &str, ranks: Vec<u32>, abort: Arc<Abort>) -> Self {
        let n = ranks.len();
        Self {
            name: name.to_owned(),
            ranks,
            abort,
            peers: None,
            state: Mutex::new(State {
                sequence: 0,
                arrived: vec![None; n],
                count: 0,
                verdict: None,
                started: None,
                staged: 0,
                left: vec![false; n],
            }),
            changed: Condvar::new(),
        }
    }

    /// Makes each member a process of a group.
    #[must_use]
    pub(crate) fn between_processes(self, peers: Arc<ProcessGroup>) -> Self {
        Self {
            peers: Some(peers),
            ..self
        }
    }

    /// Returns the members as world ranks.
    #[must_use]
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Runs collective number `ticket` as the member at `position`. Returns when this member may
    /// reuse its ranges.
    ///
    /// # Errors
    /// Returns [`CommError`] if the members' calls differ (then to every member), if a member does
    /// not arrive in time, or if the session is aborted.
    ///
    /// # Safety
    /// The ranges of `call` are valid for reads and writes, aligned to their element, and used by
    /// nothing else until every member has returned.
    pub unsafe fn run(
        &self,
        position: usize,
        ticket: u64,
        call: Call,
    ) -> Result<Arrival, CommError> {
        if let Some(peers) = &self.peers {
            // SAFETY: the caller's contract.
            return unsafe { self.run_between(peers, position, ticket, &call) };
        }
        let (kind, crash) = (call.kind, call.crash);
        let guard = lock(&self.state);
        // Earlier collectives of this communicator must complete first.
        let (mut guard, turn) = self
            .abort
            .wait(&self.changed, guard, WaitLimit::Primary, |s| {
                (s.sequence == ticket && s.arrived[position].is_none()).then(Instant::now)
            });
        let free = self.check(turn, &guard, position, ticket, kind)?;
        guard.arrived[position] = Some(call);
        guard.count += 1;
        if guard.count == self.ranks.len() {
            let calls: Vec<Call> = guard.arrived.iter().flatten().cloned().collect();
            guard.verdict =
                Some(check::check(&self.name, &self.ranks, ticket, &calls).map(|()| calls.into()));
            guard.started = Some(Instant::now());
            self.changed.notify_all();
        }
        let (guard, verdict) = self
            .abort
            .wait(&self.changed, guard, WaitLimit::Primary, |s| {
                let start = s.started.unwrap_or(free);
                s.verdict.clone().map(|v| (v, start))
            });
        let (verdict, start) = self.check(verdict, &guard, position, ticket, kind)?;
        drop(guard);
        let calls = verdict.map_err(CommError::Mismatch)?;
        assert!(!crash, "injected panic in the middle of a collective");
        // SAFETY: all members have arrived with ranges of their own, and none returns before all
        // are done; the verdict has established that the ranges match.
        unsafe {
            if let Some(staged) = moves::perform(position, &calls) {
                self.wait_until_staged(position, ticket, kind)?;
                moves::unstage(&calls[position], &staged);
            }
        }
        self.finish(position, ticket, kind)?;
        Ok(Arrival { free, start })
    }

    /// Runs a collective whose members are processes.
    ///
    /// # Safety
    /// As [`Group::run`].
    unsafe fn run_between(
        &self,
        peers: &ProcessGroup,
        position: usize,
        ticket: u64,
        call: &Call,
    ) -> Result<Arrival, CommError> {
        let free = Instant::now();
        // SAFETY: the caller's contract.
        let met =
            unsafe { remote::exchange(peers, &self.name, &self.ranks, position, ticket, call) };
        let (calls, copies) = met.map_err(|e| match e {
            PeerError::Timeout(what) => CommError::Timeout(format!(
                "communicator {} (ranks {:?}): {what}",
                self.name, self.ranks
            )),
            PeerError::Failed(_) => CommError::Aborted,
        })?;
        let start = Instant::now();
        check::check(&self.name, &self.ranks, ticket, &calls).map_err(CommError::Mismatch)?;
        assert!(!call.crash, "injected panic in the middle of a collective");
        // SAFETY: the caller's contract for this member; the memory of the others are copies, which
        // outlive the call.
        unsafe { remote::perform(position, &calls) };
        drop(copies);
        Ok(Arrival { free, start })
    }

    /// Waits until all members have read their inputs, before any writes its output.
    fn wait_until_staged(
        &self,
        position: usize,
        ticket: u64,
        kind: CollectiveKind,
    ) -> Result<(), CommError> {
        let mut guard = lock(&self.state);
        guard.staged += 1;
        if guard.staged == self.ranks.len() {
            self.changed.notify_all();
        }
        let n = self.ranks.len();
        let (guard, r) = self
            .abort
            .wait(&self.changed, guard, WaitLimit::Primary, |s| {
                (s.sequence > ticket || s.staged == n).then_some(())
            });
        self.check(r, &guard, position, ticket, kind)
    }

    fn finish(&self, position: usize, ticket: u64, kind: CollectiveKind) -> Result<(), CommError> {
        let mut guard = lock(&self.state);
        guard.left[position] = true;
        if guard.left.iter().all(|&l| l) {
            guard.sequence += 1;
            guard.arrived.fill(None);
            guard.left.fill(false);
            (guard.count, guard.staged) = (0, 0);
            (guard.verdict, guard.started) = (None, None);
            self.changed.notify_all();
            return Ok(());
        }
        let (guard, r) = self
            .abort
            .wait(&self.changed, guard, WaitLimit::Primary, |s| {
                (s.sequence > ticket).then_some(())
            });
        self.check(r, &guard, position, ticket, kind)
    }

    /// Formats the error of a wait that ended early.
    fn check<T>(
        &self,
        r: Result<T, Stop>,
        state: &MutexGuard<'_, State>,
        position: usize,
        ticket: u64,
        kind: CollectiveKind,
    ) -> Result<T, CommError> {
        let stop = match r {
            Ok(t) => return Ok(t),
            Err(stop) => stop,
        };
        if stop == Stop::Aborted {
            return Err(CommError::Aborted);
        }
        let of = |missing: &dyn Fn(usize) -> bool| {
            let who: Vec<String> = (0..self.ranks.len())
                .filter(|&i| i != position && missing(i))
                .map(|i| self.ranks[i].to_string())
                .collect();
            format!(
                "rank{} {}",
                if who.len() == 1 { "" } else { "s" },
                who.join(", ")
            )
        };
        let late = if state.sequence < ticket {
            let what = match &state.verdict {
                None => format!("{} missing there", of(&|i| state.arrived[i].is_none())),
                Some(_) => format!("{} not done with it", of(&|i| !state.left[i])),
            };
            format!(
                "{} number {ticket} waits for number {} of the same communicator; {what}",
                kind.name(),
                state.sequence
            )
        } else if state.verdict.is_none() {
            format!(
                "{} number {ticket}: {} missing",
                kind.name(),
                of(&|i| state.arrived[i].is_none())
            )
        } else {
            format!(
                "{} number {ticket}: {} not done",
                kind.name(),
                of(&|i| !state.left[i])
            )
        };
        Err(CommError::Timeout(format!(
            "communicator {} (ranks {:?}): {late} after {:.1?}",
            self.name,
            self.ranks,
            self.abort.timeout()
        )))
    }
}
