//! State that the threads of a communicator share: which thread is inside a call, and which one
//! frees it.

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

/// Pause between two checks of something that is not ready.
const PAUSE: Duration = Duration::from_micros(200);

/// State that a communicator's owner, its watches and its registrations share.
pub(crate) struct Inner {
    pub(crate) nccl: Nccl,
    /// Null before NCCL has created the communicator and after it has been freed. NCCL keeps this
    /// address and writes to it when a communicator becomes ready, which is why it is on the heap.
    handle: AtomicPtr<c_void>,
    aborted: AtomicBool,
    /// Whether a call has failed: the other ranks may never destroy the communicator with this one.
    pub(crate) failed: AtomicBool,
    gate: Mutex<Gate>,
    /// Notified when a thread has left, or the communicator has been closed.
    changed: Condvar,
    /// Communicators that NCCL may still be creating from this one, at their locations.
    unborn: Mutex<Vec<Arc<Inner>>>,
    /// NCCL keeps pointers to the strings, also in communicators that inherit the configuration.
    pub(crate) config: Arc<Config>,
    /// Whether calls return only when their work is done.
    pub(crate) blocks: bool,
}

/// Threads inside calls.
#[derive(Default)]
struct Gate {
    /// Whether no call may begin any more.
    closed: bool,
    /// The one thread that may be inside: registrations may be dropped by any thread.
    owner: Option<ThreadId>,
    /// Number of calls that the owner is inside; an open group that has used the communicator
    /// counts as one.
    depth: usize,
    /// Number of calls that NCCL allows concurrently with others.
    concurrent: usize,
    /// How the last thread to leave frees the communicator: its owner requested it from within a
    /// call, or no longer waits.
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
    /// In good order, together with the other ranks; or by an abort if something has failed or is
    /// in progress, as NCCL requires.
    Destroy,
    /// Immediately, without the other ranks.
    Abort,
}

/// A call that has begun. The communicator is not freed while it lives.
pub(crate) struct Entered<'a> {
    inner: &'a Inner,
    /// Returns the live communicator.
    pub(crate) handle: RawComm,
    /// Whether NCCL allows the call concurrently with others.
    concurrent: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // If the end of the communicator was requested meanwhile, its requester has been answered
        // that it is in progress.
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

    /// Begins a call, once no other thread is inside. Within a group of the calling thread, the
    /// communicator stays entered until the group's end has returned, because only then NCCL
    /// performs the calls.
    pub(crate) fn enter(self: &Arc<Self>, call: &'static str) -> Result<Entered<'_>, Error> {
        group::allow(self, call)?;
        self.occupy(call)?;
        // From here on, the drop of the call leaves again.
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

    /// Waits for a turn and takes it; [`Inner::leave`] returns it.
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

    /// Returns a turn. With the last one, frees the communicator if that was requested meanwhile.
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

    /// Ends a concurrent call, which frees the communicator only if it is the last of all calls.
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
    /// concurrently with a call that blocks. For a nonblocking communicator, the query also joins
    /// the thread that did the work, which only one thread may do.
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

    /// Keeps a communicator that NCCL may still be creating from this one: NCCL writes to its
    /// location until it is ready, or this one is gone.
    pub(crate) fn keep(&self, child: &Arc<Self>) {
        self.unborn().push(Arc::clone(child));
    }

    fn unborn(&self) -> MutexGuard<'_, Vec<Arc<Inner>>> {
        self.unborn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the communicator once no thread is inside a call, or fails after `grace`. If the
    /// calling thread is itself inside a call or an open group, the communicator is freed when it
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
                // The owner no longer waits: the last thread to leave frees it.
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
        // inside, and no call can begin any more.
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
            // Other operations end on their own.
            IN_PROGRESS => Ok(()),
            r => self.nccl.check(call, r, std::ptr::null_mut()),
        }
    }

    /// Aborts the communicator on behalf of its owner, which waits for `grace` at most; after that,
    /// the last thread to leave does it, if it ever leaves.
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

    /// Frees the communicators that were being created from this one: an abort has waited for the
    /// thread that creates them, so nothing writes to their locations any more. Without that
    /// certainty, the locations are leaked.
    fn release_unborn(&self, certain: bool) {
        for child in std::mem::take(&mut *self.unborn()) {
            if certain {
                // No one is left to notify.
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
    /// It can be used.
    Ready,
    /// An operation of a nonblocking communicator is in progress.
    InProgress,
}

/// Another thread's handle of a communicator. It keeps nothing alive on the device.
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

    /// Aborts the communicator: its kernels end, and later calls fail. Waits for `grace` until a
    /// thread that is inside a call, or in a group that has used the communicator, has left.
    ///
    /// NCCL allows no thread inside while it aborts, so a thread that is stuck inside cannot be
    /// released from outside, by any function: `ncclCommRevoke` is also an operation that must not
    /// run concurrently with another. Which threads can be stuck depends on the communicator
    /// ([`crate::Config::blocking`]):
    /// - A nonblocking one is never stuck: its calls return, and the waits of this crate end with
    ///   [`Error::Aborted`] as soon as it is closed. Use one if it must be possible to abort at any
    ///   time.
    /// - A call of a blocking one may stay inside forever when another rank is gone, because
    ///   connections are made at first uses. After [`Error::Busy`], only the end of the process
    ///   frees everything.
    ///
    /// # Errors
    /// [`Error::Busy`] if a thread stays inside: the communicator is closed but not freed, and this
    /// may be retried; its owner aborts it when it drops it. Within a group of the calling thread,
    /// only this error is returned. Otherwise errors of NCCL.
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
