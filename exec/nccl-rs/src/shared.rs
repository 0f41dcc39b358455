//! What the threads that know a communicator share: who may be inside it, and who frees it.

use crate::error::Error;
use crate::ffi::{IN_PROGRESS, RawComm, RawResult, SUCCESS};
use crate::library::Nccl;
use crate::types::Config;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Pause between two looks at something that is not ready.
pub(crate) const PAUSE: Duration = Duration::from_micros(200);

/// What a communicator's owner, its watches and what is registered with it share.
pub(crate) struct Inner {
    pub(crate) nccl: Nccl,
    /// Null before NCCL has made it and once it has been freed. NCCL keeps this place's address and writes to it when a
    /// communicator becomes ready, which is why it lies on the heap.
    handle: AtomicPtr<c_void>,
    /// No call may begin any more.
    closed: AtomicBool,
    aborted: AtomicBool,
    /// A call has failed: the other ranks may never come to a common end.
    pub(crate) failed: AtomicBool,
    /// Threads inside a call.
    inside: AtomicUsize,
    /// Held by the one thread that may be inside: drops of what is registered may come from any.
    turn: Mutex<()>,
    /// NCCL may keep pointers to its strings.
    _config: Config,
}

/// A call that has begun. As long as it lives the communicator is not freed.
pub(crate) struct Entered<'a> {
    inner: &'a Inner,
    /// The live communicator.
    pub(crate) handle: RawComm,
    _turn: Option<MutexGuard<'a, ()>>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.inner.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Inner {
    pub(crate) fn new(nccl: &Nccl, config: Config) -> Self {
        Self {
            nccl: nccl.clone(),
            handle: AtomicPtr::default(),
            closed: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            inside: AtomicUsize::new(0),
            turn: Mutex::default(),
            _config: config,
        }
    }

    /// Where NCCL writes the handle.
    pub(crate) fn place(&self) -> *mut RawComm {
        self.handle.as_ptr()
    }

    /// Begins a call, once no other thread is inside.
    pub(crate) fn enter(&self, call: &'static str) -> Result<Entered<'_>, Error> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entered = self.peek(call)?;
        entered._turn = Some(turn);
        Ok(entered)
    }

    /// Begins a call that NCCL allows beside others.
    fn peek(&self, call: &'static str) -> Result<Entered<'_>, Error> {
        // Count first, then look: whoever frees closes first, then looks at the count.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let entered = Entered {
            inner: self,
            handle: self.handle.load(Ordering::SeqCst),
            _turn: None,
        };
        if self.closed.load(Ordering::SeqCst) || entered.handle.is_null() {
            return Err(Error::Aborted { call });
        }
        Ok(entered)
    }

    /// The state that NCCL reports on its own.
    pub(crate) fn poll(&self) -> Result<State, Error> {
        const CALL: &str = "ncclCommGetAsyncError";
        let entered = self.peek(CALL)?;
        let mut state: RawResult = SUCCESS;
        // SAFETY: the communicator is live while entered, and the pointer is valid for a write.
        let result =
            unsafe { (self.nccl.functions().comm_get_async_error)(entered.handle, &raw mut state) };
        self.nccl.check(CALL, result, entered.handle)?;
        match state {
            SUCCESS => Ok(State::Ready),
            IN_PROGRESS => Ok(State::InProgress),
            error => {
                self.failed.store(true, Ordering::Relaxed);
                self.nccl.check(CALL, error, entered.handle)?;
                Ok(State::Ready)
            }
        }
    }

    /// Frees the communicator by `free` once nobody is inside a call, or gives up after `grace`.
    pub(crate) fn free(
        &self,
        grace: Option<Duration>,
        call: &'static str,
        free: unsafe extern "C" fn(RawComm) -> RawResult,
    ) -> Result<(), Error> {
        self.closed.store(true, Ordering::SeqCst);
        let begin = Instant::now();
        while self.inside.load(Ordering::SeqCst) > 0 {
            if grace.is_some_and(|g| begin.elapsed() >= g) {
                return Err(Error::Busy);
            }
            std::thread::sleep(PAUSE);
        }
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::SeqCst);
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: it was live, this is the only place that takes it, and no call uses it: none is inside, and none can
        // begin any more.
        let result = unsafe { free(handle) };
        match result {
            // What is left of it ends on its own.
            IN_PROGRESS => Ok(()),
            r => self.nccl.check(call, r, std::ptr::null_mut()),
        }
    }

    pub(crate) fn abort(&self, grace: Duration) -> Result<(), Error> {
        self.aborted.store(true, Ordering::SeqCst);
        let f = self.nccl.functions().comm_abort;
        self.free(Some(grace), "ncclCommAbort", f)
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

    /// As [`crate::Communicator::poll`].
    ///
    /// # Errors
    /// As there; [`Error::Aborted`] once the communicator is gone.
    pub fn poll(&self) -> Result<State, Error> {
        self.0.poll()
    }

    /// Aborts the communicator: its kernels end, and calls that begin later fail. A thread that is inside a call is given
    /// `grace` to leave it.
    ///
    /// # Errors
    /// [`Error::Busy`] if a thread stays inside: the communicator is closed but not freed, and this may be tried again.
    /// Else what NCCL reports.
    pub fn abort(&self, grace: Duration) -> Result<(), Error> {
        self.0.abort(grace)
    }

    /// Whether it has been aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.aborted.load(Ordering::SeqCst)
    }
}
