//! What the threads that know a communicator share: who may be inside it, and who frees it.

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

/// Pause between two looks at something that is not ready.
const PAUSE: Duration = Duration::from_micros(200);

/// What a communicator's owner, its watches and what is registered with it share.
pub(crate) struct Inner {
    pub(crate) nccl: Nccl,
    /// Null before NCCL has made it and once it has been freed. NCCL keeps this place's address and writes to it when a
    /// communicator becomes ready, which is why it lies on the heap.
    handle: AtomicPtr<c_void>,
    aborted: AtomicBool,
    /// A call has failed: the other ranks may never come to a common end.
    pub(crate) failed: AtomicBool,
    gate: Mutex<Gate>,
    /// Somebody has left, or the communicator has been closed.
    changed: Condvar,
    /// Communicators that NCCL may still be making out of this one, at their places.
    unborn: Mutex<Vec<Arc<Inner>>>,
    /// NCCL keeps pointers to its strings, also in communicators that inherit it.
    pub(crate) config: Arc<Config>,
    /// Whether calls return only when they are done.
    pub(crate) blocks: bool,
}

/// Who is inside.
#[derive(Default)]
struct Gate {
    /// No call may begin any more.
    closed: bool,
    /// The one thread that may be inside: drops of what is registered may come from any.
    owner: Option<ThreadId>,
    /// Calls that the owner is inside of; an open group that has used the communicator counts as one.
    depth: usize,
    /// Calls that NCCL allows beside others.
    beside: usize,
    /// How whoever leaves last frees it: its owner asked for it from within, or no longer waits for them.
    last: Option<End>,
}

impl Gate {
    fn is_empty(&self) -> bool {
        self.depth + self.beside == 0
    }
}

/// How a communicator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// In good order, together with the other ranks; an abort instead where something has failed or is under way, which is
    /// what NCCL asks for.
    Destroy,
    /// At once and alone.
    Abort,
}

/// A call that has begun. As long as it lives the communicator is not freed.
pub(crate) struct Entered<'a> {
    inner: &'a Inner,
    /// The live communicator.
    pub(crate) handle: RawComm,
    /// Whether it is one of those that NCCL allows beside others.
    beside: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Whoever asked for the end of a communicator meanwhile has got the answer that it is under way.
        let _ = if self.beside {
            self.inner.leave_beside()
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

    /// Where NCCL writes the handle.
    pub(crate) fn place(&self) -> *mut RawComm {
        self.handle.as_ptr()
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call, once no other thread is inside. Within a group of the calling thread the communicator stays entered
    /// until the group's end has returned: only there NCCL does what the calls say.
    pub(crate) fn enter(self: &Arc<Self>, call: &'static str) -> Result<Entered<'_>, Error> {
        group::allow(self, call)?;
        self.occupy(call)?;
        // From here on its drop leaves again.
        let mut entered = Entered {
            inner: self,
            handle: std::ptr::null_mut(),
            beside: false,
        };
        entered.handle = self.handle.load(Ordering::SeqCst);
        if entered.handle.is_null() {
            return Err(Error::NotReady { call });
        }
        group::hold(self, call)?;
        Ok(entered)
    }

    /// Waits for a turn and takes it; [`Inner::leave`] gives it back.
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

    /// Until something at the gate has changed, or time is over.
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

    /// Gives a turn back; with the last one, ends the communicator if that was asked for meanwhile.
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

    /// Likewise for a call beside others, which ends the communicator only where it is the last of all.
    fn leave_beside(&self) -> Result<(), Error> {
        let last = {
            let mut gate = self.gate();
            gate.beside -= 1;
            if gate.is_empty() {
                gate.last.take()
            } else {
                None
            }
        };
        self.changed.notify_all();
        last.map_or(Ok(()), |end| self.end(end, None))
    }

    /// Begins to ask for the state; `None` where the answer is that something is under way. NCCL allows it beside a call that
    /// blocks. Where none does, it also collects the thread that did the work, which only one may do.
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
            gate.beside += 1;
        } else {
            gate.owner = Some(me);
            gate.depth += 1;
        }
        Ok(Some(Entered {
            inner: self,
            handle,
            beside: self.blocks,
        }))
    }

    /// The state that NCCL reports on its own.
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

    /// Waits until it is ready, `give_up` says so, or time is over.
    pub(crate) fn wait_ready(
        &self,
        patience: Duration,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            if self.poll()? == State::Ready {
                return Ok(());
            }
            if give_up() || begin.elapsed() >= patience {
                self.failed.store(true, Ordering::Relaxed);
                return Err(Error::NotReady {
                    call: "ncclCommGetAsyncError",
                });
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// What NCCL says of a communicator, or why it does not.
    ///
    /// # Safety
    /// The handle is live.
    unsafe fn state(&self, handle: RawComm) -> RawResult {
        let mut state: RawResult = SUCCESS;
        // SAFETY: the caller's promise, and the pointer is valid for a write.
        match unsafe { (self.nccl.functions().comm_get_async_error)(handle, &raw mut state) } {
            SUCCESS => state,
            error => error,
        }
    }

    /// Keeps a communicator that NCCL may still be making out of this one: NCCL writes to its place until it is done, or
    /// this one is gone.
    pub(crate) fn keep(&self, child: &Arc<Self>) {
        self.unborn().push(Arc::clone(child));
    }

    fn unborn(&self) -> MutexGuard<'_, Vec<Arc<Inner>>> {
        self.unborn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the communicator once nobody is inside a call, or gives up after `grace`. A thread that asks from within a
    /// call or an open group of its own does it when it leaves.
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
                // Its owner no longer waits: whoever leaves last frees it.
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
        // A communicator with an error, or with something under way, cannot be destroyed.
        // SAFETY: the handle was live, this is the only place that takes it, and no call uses it: none is inside, and none
        // can begin any more.
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
            // What is left of it ends on its own.
            IN_PROGRESS => Ok(()),
            r => self.nccl.check(call, r, std::ptr::null_mut()),
        }
    }

    /// Aborts the communicator on behalf of its owner, which waits no longer than `grace`: then whoever leaves last does it,
    /// if anybody ever does.
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

    /// What was to be made out of this one: an abort has waited for the thread that made it, so nothing writes to its place
    /// any more, and what is there is to be freed. Without that certainty the places stay for good.
    fn release_unborn(&self, certain: bool) {
        for child in std::mem::take(&mut *self.unborn()) {
            if certain {
                // Nobody is left to tell.
                let _ = child.end(End::Abort, None);
            } else {
                std::mem::forget(child);
            }
        }
    }
}

/// Whether a communicator can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It can.
    Ready,
    /// An operation of a communicator that does not block is under way.
    InProgress,
}

/// Another thread's view of a communicator. It keeps nothing alive on the device.
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

    /// As [`crate::Communicator::poll`]; [`State::InProgress`] while another thread is inside a communicator that does not
    /// block.
    ///
    /// # Errors
    /// As there; [`Error::Aborted`] once the communicator is gone.
    pub fn poll(&self) -> Result<State, Error> {
        self.0.poll()
    }

    /// Aborts the communicator: its kernels end, and calls that begin later fail. A thread that is inside a call, or in a
    /// group that has used the communicator, is given `grace` to leave.
    ///
    /// NCCL allows nobody inside while it aborts, so a thread that is stuck inside cannot be freed from outside, whatever
    /// the function: `ncclCommRevoke`, too, is an operation that must not run beside another. What is stuck depends on the
    /// communicator ([`crate::Config::blocking`]):
    /// - One that does not block is not stuck: its calls return, and the waits of this crate end as soon as it is closed,
    ///   with [`Error::Aborted`]. Who must be able to abort at any time uses such ones.
    /// - A call of one that blocks may stay inside for ever when another rank is gone: connections are made at first uses.
    ///   [`Error::Busy`] then leaves only the end of the process, which frees everything.
    ///
    /// # Errors
    /// [`Error::Busy`] if a thread stays inside: the communicator is closed but not freed, and this may be tried again; its
    /// owner aborts it when it drops it. Within a group of the calling thread nothing is done but to say so. Else what NCCL
    /// reports.
    pub fn abort(&self, grace: Duration) -> Result<(), Error> {
        group::refuse("ncclCommAbort")?;
        self.0.end(End::Abort, Some(grace))
    }

    /// Whether it has been aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.aborted.load(Ordering::SeqCst)
    }
}
