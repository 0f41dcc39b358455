//! Rendezvous of one communicator instance.

use super::{agree, moves, remote};
use crate::device::abort::{Abort, Patience, Stop, Wake, lock};
use crate::operand::RawRange;
use crate::process::{PeerError, Peers};
use shardlab_plan::ir::{CollectiveKind, DType, ReduceOp};
use smallvec::SmallVec;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// What one rank brings to a collective.
#[derive(Clone, Debug)]
pub struct Call {
    /// Kind.
    pub kind: CollectiveKind,
    /// Reduction.
    pub reduce: ReduceOp,
    /// Element type.
    pub dtype: DType,
    /// Input and output of each part. They stay allocated, and nothing else touches them, until [`Group::run`] returns on
    /// every member.
    pub parts: SmallVec<[(RawRange, RawRange); 1]>,
    /// A test wants the rank to die after its arrival.
    pub crash: bool,
}

/// When a collective could begin.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The communicator was free.
    pub free: Instant,
    /// The last rank had arrived.
    pub start: Instant,
}

/// Why a collective did not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommError {
    /// Somebody failed elsewhere.
    Aborted,
    /// Somebody did not come in time; names who is missing.
    Timeout(String),
    /// The ranks' calls do not fit together; names who differs in what.
    Mismatch(String),
}

#[derive(Debug)]
struct State {
    /// Number of the collective that is collecting or running.
    sequence: u64,
    arrived: Vec<Option<Call>>,
    count: usize,
    /// Set when all have arrived.
    verdict: Option<Result<Arc<[Call]>, String>>,
    started: Option<Instant>,
    /// Members done reading their peers, where data is staged.
    staged: usize,
    /// Who has left.
    left: Vec<bool>,
}

/// One communicator instance. See the module documentation.
#[derive(Debug)]
pub struct Group {
    name: String,
    /// World ranks in order of position.
    ranks: Vec<u32>,
    abort: Arc<Abort>,
    /// The way to the other members, where each is a process.
    peers: Option<Arc<Peers>>,
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
    /// An instance of the named communicator over these world ranks.
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

    /// Its members are processes that find one another this way.
    #[must_use]
    pub fn between_processes(self, peers: Arc<Peers>) -> Self {
        Self {
            peers: Some(peers),
            ..self
        }
    }

    /// Members, as world ranks.
    #[must_use]
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Performs collective number `ticket` as the member at `position`; returns when this member may reuse its ranges.
    ///
    /// # Errors
    /// [`CommError`]. Every member gets the mismatch.
    ///
    /// # Safety
    /// The ranges of `call` are valid for reads and writes, aligned to their element, and used by nothing else until every
    /// member has returned.
    pub unsafe fn run(
        &self,
        position: usize,
        ticket: u64,
        call: Call,
    ) -> Result<Arrival, CommError> {
        if let Some(peers) = &self.peers {
            // SAFETY: the caller's promise.
            return unsafe { self.run_between(peers, position, ticket, &call) };
        }
        let (kind, crash) = (call.kind, call.crash);
        let guard = lock(&self.state);
        // Earlier collectives of this communicator first.
        let (mut guard, turn) = self.abort.wait(&self.changed, guard, Patience::Cause, |s| {
            (s.sequence == ticket && s.arrived[position].is_none()).then(Instant::now)
        });
        let free = self.check(turn, &guard, position, ticket, kind)?;
        guard.arrived[position] = Some(call);
        guard.count += 1;
        if guard.count == self.ranks.len() {
            let calls: Vec<Call> = guard.arrived.iter().flatten().cloned().collect();
            guard.verdict =
                Some(agree::check(&self.name, &self.ranks, ticket, &calls).map(|()| calls.into()));
            guard.started = Some(Instant::now());
            self.changed.notify_all();
        }
        let (guard, verdict) = self.abort.wait(&self.changed, guard, Patience::Cause, |s| {
            let start = s.started.unwrap_or(free);
            s.verdict.clone().map(|v| (v, start))
        });
        let (verdict, start) = self.check(verdict, &guard, position, ticket, kind)?;
        drop(guard);
        let calls = verdict.map_err(CommError::Mismatch)?;
        assert!(!crash, "injected panic in the middle of a collective");
        // SAFETY: all members have arrived with ranges that are theirs, and none returns before all are done; the
        // verdict has established that the ranges fit together.
        unsafe {
            if let Some(staged) = moves::perform(position, &calls) {
                self.everybody_staged(position, ticket, kind)?;
                moves::unstage(&calls[position], &staged);
            }
        }
        self.leave(position, ticket, kind)?;
        Ok(Arrival { free, start })
    }

    /// A collective whose members are processes.
    ///
    /// # Safety
    /// As [`Group::run`].
    unsafe fn run_between(
        &self,
        peers: &Peers,
        position: usize,
        ticket: u64,
        call: &Call,
    ) -> Result<Arrival, CommError> {
        let free = Instant::now();
        // SAFETY: the caller's promise.
        let met = unsafe { remote::meet(peers, &self.name, &self.ranks, position, ticket, call) };
        let (calls, copies) = met.map_err(|e| match e {
            PeerError::Timeout(what) => CommError::Timeout(format!(
                "communicator {} (ranks {:?}): {what}",
                self.name, self.ranks
            )),
            PeerError::Failed(_) => CommError::Aborted,
        })?;
        let start = Instant::now();
        agree::check(&self.name, &self.ranks, ticket, &calls).map_err(CommError::Mismatch)?;
        assert!(!call.crash, "injected panic in the middle of a collective");
        // SAFETY: the caller's promise for this member; the others' memory are copies, which outlive the call.
        unsafe { remote::perform(position, &calls) };
        drop(copies);
        Ok(Arrival { free, start })
    }

    /// Nobody may write its output before all have read their inputs.
    fn everybody_staged(
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
        let (guard, r) = self.abort.wait(&self.changed, guard, Patience::Cause, |s| {
            (s.sequence > ticket || s.staged == n).then_some(())
        });
        self.check(r, &guard, position, ticket, kind)
    }

    fn leave(&self, position: usize, ticket: u64, kind: CollectiveKind) -> Result<(), CommError> {
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
        let (guard, r) = self.abort.wait(&self.changed, guard, Patience::Cause, |s| {
            (s.sequence > ticket).then_some(())
        });
        self.check(r, &guard, position, ticket, kind)
    }

    /// Words for a wait that ended early.
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
