//! State of a communicator that threads share: which thread is inside a call, and which one frees
//! the communicator.

use crate::error::Error;
use crate::ffi::{IN_PROGRESS, RawComm, RawResult, SUCCESS};
use crate::group;
use crate::library::Nccl;
use crate::types::Config;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Pause between two checks of a communicator that is not ready.
const PAUSE: Duration = Duration::from_micros(200);

/// State that a communicator's owner, its watches and its registrations share.
pub(crate) struct Inner {
    pub(crate) nccl: Nccl,
    /// Null before NCCL has created the communicator and after it has been freed. NCCL keeps the
    /// address of this field and writes to it when a communicator becomes ready, so it must not
    /// move.
    handle: AtomicPtr<c_void>,
    aborted: AtomicBool,
    /// Whether a call has failed. The other ranks may then never destroy the communicator with this
    /// one.
    pub(crate) failed: AtomicBool,
    gate: Mutex<Gate>,
    /// Notified when a thread leaves and when the communicator is closed.
    changed: Condvar,
    /// Communicators that NCCL may still be creating from this one: it may write to their handles.
    unborn: Mutex<Vec<Arc<Inner>>>,
    /// NCCL keeps pointers to its strings, also in communicators that inherit the configuration.
    pub(crate) config: Arc<Config>,
    /// Whether calls block until their work is done.
    pub(crate) blocks: bool,
}

/// Threads inside calls.
#[derive(Default)]
struct Gate {
    /// Whether new calls are refused.
    closed: bool,
    /// The thread that is inside, if any. Other threads may want to enter, because any thread may
    /// drop a registration.
    owner: Option<ThreadId>,
    /// Number of nested calls of the owner; an open group that has used the communicator counts as
    /// one.
    depth: usize,
    /// Number of calls that NCCL allows concurrently with others.
    concurrent: usize,
    /// How the last thread to leave frees the communicator, if it has to: the end was requested
    /// from within a call, or the requester no longer waits.
    last: Option<End>,
}

impl Gate {
    fn is_empty(&self) -> bool {
        self.depth + self.concurrent == 0
    }
}

/// How a communicator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Together with the other ranks; or by an abort if something has failed or is in progress, as
    /// NCCL requires.
    Destroy,
    /// Immediately, without the other ranks.
    Abort,
}

/// A call that has begun. The communicator is not freed while this value lives.
pub(crate) struct Entered<'a> {
    inner: &'a Inner,
    /// The live communicator.
    pub(crate) handle: RawComm,
    /// Whether NCCL allows the call concurrently with others.
    concurrent: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // The error is dropped: if the end of the communicator was requested meanwhile, that
        // request has already returned.
        let _ = if self.concurrent {
            self.inner.leave_concurrent()
        } else {
            self.inner.leave()
        };
    }
}

impl Inner {
    pub(crate) fn new(nccl: &Nccl, config: Arc<Config>) -> Self {
        Self {
            nccl: nccl.clone(),
            handle: AtomicPtr::default(),
            aborted: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            gate: Mutex::default(),
            changed: Condvar::new(),
            unborn: Mutex::default(),
            blocks: config.blocks(),
            config,
        }
    }

    /// Returns the address at which NCCL writes the handle.
    pub(crate) fn place(&self) -> *mut RawComm {
        self.handle.as_ptr()
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call as soon as no other thread is inside. Within a group of the calling thread,
    /// the communicator stays entered until the end of the group has returned, because NCCL
    /// performs the calls only then.
    pub(crate) fn enter(self: &Arc<Self>, call: &'static str) -> Result<Entered<'_>, Error> {
        group::allow(self, call)?;
        self.occupy(call)?;
        // From here on, dropping `entered` leaves the communicator.
        let mut entered = Entered {
            inner: self,
            handle: std::ptr::null_mut(),
            concurrent: false,
        };
        entered.handle = self.handle.load(Ordering::SeqCst);
        if entered.handle.is_null() {
            return Err(Error::NotReady { call });
        }
        group::hold(self, call)?;
        Ok(entered)
    }

    /// Waits until no other thread is inside, and enters; [`Inner::leave`] leaves again.
    pub(crate) fn occupy(&self, call: &'static str) -> Result<(), Error> {
        let me = std::thread::current().id();
        let mut gate = self.gate();
        loop {
            if gate.closed {
                return Err(Error::Aborted { call });
            }
            if gate.owner.is_none_or(|owner| owner == me) {
                gate.owner = Some(me);
                gate.depth += 1;
                return Ok(());
            }
            gate = self.wait(gate, None);
        }
    }

    /// Waits until the state has changed, or the timeout has passed.
    fn wait<'a>(&self, gate: MutexGuard<'a, Gate>, rest: Option<Duration>) -> MutexGuard<'a, Gate> {
        match rest {
            None => self
                .changed
                .wait(gate)
                .unwrap_or_else(PoisonError::into_inner),
            Some(rest) => {
                let woken = self.changed.wait_timeout(gate, rest);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Leaves a call. The last one frees the communicator if that was requested meanwhile.
    pub(crate) fn leave(&self) -> Result<(), Error> {
        let last = {
            let mut gate = self.gate();
            gate.depth -= 1;
            if gate.depth > 0 {
                return Ok(());
            }
            gate.owner = None;
            gate.last.take()
        };
        self.changed.notify_all();
        last.map_or(Ok(()), |end| self.end(end, None))
    }

    /// Leaves a concurrent call. Frees the communicator if that was requested meanwhile and no
    /// other call is left.
    fn leave_concurrent(&self) -> Result<(), Error> {
        let last = {
            let mut gate = self.gate();
            gate.concurrent -= 1;
            if gate.is_empty() {
                gate.last.take()
            } else {
                None
            }
        };
        self.changed.notify_all();
        last.map_or(Ok(()), |end| self.end(end, None))
    }

    /// Begins a query of the state; `None` if an operation is in progress. NCCL allows the query
    /// concurrently with a blocking call. For a nonblocking communicator, the query also joins
    /// NCCL's worker thread, which only one thread may do.
    fn look(&self, call: &'static str) -> Result<Option<Entered<'_>>, Error> {
        let me = std::thread::current().id();
        let mut gate = self.gate();
        if gate.closed {
            return Err(Error::Aborted { call });
        }
        let handle = self.handle.load(Ordering::SeqCst);
        if handle.is_null() || (!self.blocks && gate.owner.is_some_and(|owner| owner != me)) {
            return Ok(None);
        }
        if self.blocks {
            gate.concurrent += 1;
        } else {
            gate.owner = Some(me);
            gate.depth += 1;
        }
        Ok(Some(Entered {
            inner: self,
            handle,
            concurrent: self.blocks,
        }))
    }

    /// Returns the asynchronous state that NCCL reports.
    pub(crate) fn poll(&self) -> Result<State, Error> {
        const CALL: &str = "ncclCommGetAsyncError";
        let Some(entered) = self.look(CALL)? else {
            return Ok(State::InProgress);
        };
        // SAFETY: the communicator is live while entered.
        match unsafe { self.state(entered.handle) } {
            SUCCESS => Ok(State::Ready),
            IN_PROGRESS => Ok(State::InProgress),
            error => {
                self.failed.store(true, Ordering::Relaxed);
                self.nccl.check(CALL, error, entered.handle)?;
                Ok(State::Ready)
            }
        }
    }

    /// Waits until the communicator is ready, `give_up` returns true, or the timeout has passed.
    pub(crate) fn wait_ready(
        &self,
        timeout: Duration,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            if self.poll()? == State::Ready {
                return Ok(());
            }
            if give_up() || begin.elapsed() >= timeout {
                self.failed.store(true, Ordering::Relaxed);
                return Err(Error::NotReady {
                    call: "ncclCommGetAsyncError",
                });
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Queries NCCL's state of a communicator.
    ///
    /// # Safety
    /// The handle is live.
    unsafe fn state(&self, handle: RawComm) -> RawResult {
        let mut state: RawResult = SUCCESS;
        // SAFETY: the caller's contract, and the pointer is valid for a write.
        match unsafe { (self.nccl.functions().comm_get_async_error)(handle, &raw mut state) } {
            SUCCESS => state,
            error => error,
        }
    }

    /// Keeps a communicator that NCCL may still be creating from this one: NCCL may write to its
    /// handle until it is ready or this communicator is freed.
    pub(crate) fn keep(&self, child: &Arc<Self>) {
        self.unborn().push(Arc::clone(child));
    }

    fn unborn(&self) -> MutexGuard<'_, Vec<Arc<Inner>>> {
        self.unborn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the communicator when no thread is inside a call, or fails after `grace`. If the
    /// calling thread is itself inside a call or an open group, frees the communicator when it
    /// leaves.
    pub(crate) fn end(&self, end: End, grace: Option<Duration>) -> Result<(), Error> {
        let begin = Instant::now();
        if end == End::Abort {
            self.aborted.store(true, Ordering::SeqCst);
        }
        let mut gate = self.gate();
        gate.closed = true;
        self.changed.notify_all();
        if gate.owner == Some(std::thread::current().id()) {
            gate.last = Some(end);
            return Ok(());
        }
        while !gate.is_empty() {
            if grace.is_none() && gate.last.is_some() {
                // The owner no longer waits, so the last thread to leave frees it.
                return Ok(());
            }
            let rest = grace.map(|g| g.saturating_sub(begin.elapsed()));
            if rest.is_some_and(|r| r.is_zero()) {
                return Err(Error::Busy);
            }
            gate = self.wait(gate, rest);
        }
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::SeqCst);
        drop(gate);
        if handle.is_null() {
            return Ok(());
        }
        let bad = self.failed.load(Ordering::Relaxed) || self.aborted.load(Ordering::SeqCst);
        // A communicator with an error, or with an operation in progress, cannot be destroyed.
        // SAFETY: the handle was live, only this code takes it, and no call uses it: no thread is
        // inside, and no new call can begin.
        let abort = bad || unsafe { self.state(handle) } != SUCCESS;
        let functions = self.nccl.functions();
        let (call, free) = if abort {
            ("ncclCommAbort", functions.comm_abort)
        } else {
            ("ncclCommDestroy", functions.comm_destroy)
        };
        // SAFETY: as above.
        let result = unsafe { free(handle) };
        self.release_unborn(abort && result == SUCCESS);
        match result {
            // NCCL completes the operation in the background.
            IN_PROGRESS => Ok(()),
            r => self.nccl.check(call, r, std::ptr::null_mut()),
        }
    }

    /// Aborts the communicator on behalf of its owner, and waits at most for `grace`. If a thread
    /// is then still inside, it aborts the communicator when it leaves, if it ever does.
    pub(crate) fn abort_at_last(&self, grace: Duration) -> Result<(), Error> {
        let ended = self.end(End::Abort, Some(grace));
        if ended != Err(Error::Busy) {
            return ended;
        }
        let mut gate = self.gate();
        if gate.is_empty() {
            drop(gate);
            return self.end(End::Abort, None);
        }
        gate.last = Some(End::Abort);
        ended
    }

    /// Frees the communicators that were being created from this one. `certain` says that an abort
    /// has waited for the thread that creates them, so that nothing writes to their handles any
    /// longer. Otherwise, their memory is leaked.
    fn release_unborn(&self, certain: bool) {
        for child in std::mem::take(&mut *self.unborn()) {
            if certain {
                // There is no caller to return an error to.
                let _ = child.end(End::Abort, None);
            } else {
                std::mem::forget(child);
            }
        }
    }
}

/// State of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The communicator can be used.
    Ready,
    /// An operation of a nonblocking communicator is in progress.
    InProgress,
}

/// A handle of a communicator for another thread, which can poll and abort it. It does not keep the
/// communicator alive on the device.
#[derive(Clone)]
pub struct Watch(Arc<Inner>);

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("aborted", &self.is_aborted())
            .finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn new(inner: Arc<Inner>) -> Self {
        Self(inner)
    }

    /// Like [`crate::Communicator::poll`]; returns [`State::InProgress`] while another thread is
    /// inside a nonblocking communicator.
    ///
    /// # Errors
    /// As there, and [`Error::Aborted`] once the communicator is gone.
    pub fn poll(&self) -> Result<State, Error> {
        self.0.poll()
    }

    /// Aborts the communicator: its kernels end, and later calls fail. Waits at most for `grace`
    /// until a thread that is inside a call, or in a group that has used the communicator, has
    /// left.
    ///
    /// NCCL does not allow an abort while a thread is inside, so no function can release a thread
    /// that is stuck inside: `ncclCommRevoke` must not run concurrently with other calls, either.
    /// Whether threads can get stuck depends on [`crate::Config::blocking`]:
    /// - Threads of a nonblocking communicator never get stuck: its calls return, and waits of this
    ///   crate end with [`Error::Aborted`] as soon as it is closed. Use a nonblocking communicator
    ///   if it must be possible to abort at any time.
    /// - A call of a blocking communicator may never return if another rank is gone, because NCCL
    ///   connects ranks at the first use. After [`Error::Busy`], only the end of the process frees
    ///   the communicator.
    ///
    /// # Errors
    /// [`Error::Busy`] if a thread stays inside. The communicator is then closed but not freed;
    /// call this again, or let the owner abort it by dropping it. A call within a group is an
    /// error, too. Otherwise errors of NCCL.
    pub fn abort(&self, grace: Duration) -> Result<(), Error> {
        group::refuse("ncclCommAbort")?;
        self.0.end(End::Abort, Some(grace))
    }

    /// Returns whether the communicator has been aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.aborted.load(Ordering::SeqCst)
    }
}
