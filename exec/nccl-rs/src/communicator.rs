//! Communicators: creation, supervision and destruction.

use crate::error::Error;
use crate::ffi::{IN_PROGRESS, NO_COLOR, RawComm, RawResult, SUCCESS};
use crate::group;
use crate::library::Nccl;
use crate::shared::{End, Entered, Inner, State, Watch};
use crate::types::{Config, UniqueId};
use std::cell::Cell;
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Default timeout of calls of nonblocking communicators.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// How long [`Communicator::abort`] waits for another thread that is inside a call.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// One rank's handle of a communicator.
///
/// All ranks make the same calls in the same order. Each call takes the stream on which its work
/// runs. A communicator can be sent to another thread, but not shared, because NCCL does not allow
/// two threads to use it at the same time. Other threads can use a [`Watch`].
///
/// Dropping a communicator destroys it together with the other ranks, all of which have to do so.
/// After a failure, or while the thread panics, it is aborted instead, without waiting for other
/// ranks.
pub struct Communicator {
    pub(crate) inner: Arc<Inner>,
    size: u32,
    rank: u32,
    timeout: Duration,
    one_thread: PhantomData<Cell<()>>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank, self.size)
    }
}

impl Communicator {
    /// Joins the communicator of a unique id as rank `rank` of `size`, with the current CUDA device
    /// of the calling thread. Waits for the other ranks, unless it is configured as nonblocking. To
    /// join as several ranks in one thread, call this within [`Nccl::group`].
    ///
    /// # Errors
    /// Errors of NCCL, and a rank that is not below the size.
    pub fn init(
        nccl: &Nccl,
        id: &UniqueId,
        size: u32,
        rank: u32,
        config: Config,
    ) -> Result<Self, Error> {
        const CALL: &str = "ncclCommInitRankConfig";
        let (n, r) = (number(CALL, "size", size)?, number(CALL, "rank", rank)?);
        if rank >= size {
            return Err(Error::Argument {
                call: CALL,
                what: format!("there is no rank {rank} of {size}"),
            });
        }
        let comm = Self::new(Arc::new(Inner::new(nccl, Arc::new(config))), size, rank);
        let mut raw = comm.inner.config.raw();
        // SAFETY: the handle's location does not move while `inner` lives; the configuration points
        // to strings that `inner` owns.
        let result = unsafe {
            (nccl.functions().comm_init_rank_config)(
                comm.inner.place(),
                n,
                id.raw(),
                r,
                &raw mut raw,
            )
        };
        comm.begun(CALL, result)
    }

    fn new(inner: Arc<Inner>, size: u32, rank: u32) -> Self {
        Self {
            inner,
            size,
            rank,
            timeout: DEFAULT_TIMEOUT,
            one_thread: PhantomData,
        }
    }

    /// Returns a new communicator, or the error of its creation. A nonblocking communicator may
    /// still be in progress, and a group creates its communicators at its end. NCCL has written the
    /// handle by now (in all versions from 2.14 to 2.30), and an abort waits for NCCL's thread, so
    /// a caller that times out may drop the communicator.
    fn begun(self, call: &'static str, result: RawResult) -> Result<Self, Error> {
        match result {
            SUCCESS | IN_PROGRESS => {
                group::hold(&self.inner, call)?;
                Ok(self)
            }
            error => {
                self.inner.failed.store(true, Ordering::Relaxed);
                self.inner
                    .nccl
                    .check(call, error, std::ptr::null_mut())
                    .map(|()| self)
            }
        }
    }

    /// Splits the communicator: ranks that pass the same color form a new one, ordered by key.
    /// Returns `None` for a rank without a color. All ranks must call it. Without a configuration,
    /// the new communicator inherits that of its parent.
    ///
    /// # Errors
    /// Errors of NCCL, and a call within a group.
    pub fn split(
        &self,
        color: Option<u32>,
        key: u32,
        config: Option<Config>,
    ) -> Result<Option<Self>, Error> {
        const CALL: &str = "ncclCommSplit";
        let nccl = &self.inner.nccl;
        let f = nccl.optional(nccl.functions().comm_split, CALL)?;
        group::refuse(CALL)?;
        let key = number(CALL, "key", key)?;
        let raw_color = color.map_or(Ok(NO_COLOR), |c| number(CALL, "color", c))?;
        // The child's copy of an inherited configuration has the same pointers.
        let own = config.map(Arc::new);
        let mut raw = own.as_deref().map(Config::raw);
        let raw = raw.as_mut().map_or(std::ptr::null_mut(), |r| &raw mut *r);
        let config = own.unwrap_or_else(|| Arc::clone(&self.inner.config));
        let child = Arc::new(Inner::new(nccl, config));
        let parent = self.inner.enter(CALL)?;
        // SAFETY: the parent is live while entered; the handle's location does not move while
        // `child` lives, which is until NCCL has written to it; the configuration points to strings
        // that `child` owns.
        let result = unsafe { f(parent.handle, raw_color, key, child.place(), raw) };
        // A nonblocking parent is ready once NCCL has written the child's handle.
        let made = self.finish_later(CALL, result, &parent);
        let begun = matches!(result, SUCCESS | IN_PROGRESS);
        if begun && made.is_err() {
            // This must happen before the parent is left, which a watch may be waiting for.
            self.inner.keep(&child);
        }
        drop(parent);
        if !begun {
            // NCCL leaves a communicator behind that can only be freed. `made` has the error to
            // report.
            let _ = child.end(End::Abort, None);
        }
        made?;
        if color.is_none() {
            return Ok(None);
        }
        let mut child = Self::new(child, 0, 0);
        child.timeout = self.timeout;
        child.wait_ready(child.timeout, || false)?;
        child.size = child.count()?;
        child.rank = child.user_rank()?;
        Ok(Some(child))
    }

    /// Sets the timeout of calls of a nonblocking communicator.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Waits until a nonblocking communicator is ready, `give_up` returns true, or the timeout has
    /// passed.
    ///
    /// # Errors
    /// The error of the operation, or [`Error::NotReady`].
    pub fn wait_ready(&self, timeout: Duration, give_up: impl Fn() -> bool) -> Result<(), Error> {
        self.inner.wait_ready(timeout, give_up)
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns this rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the library.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.inner.nccl
    }

    /// Asks NCCL for the number of ranks.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub fn count(&self) -> Result<u32, Error> {
        self.ask("ncclCommCount", self.inner.nccl.functions().comm_count)
    }

    /// Asks NCCL for this rank.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub fn user_rank(&self) -> Result<u32, Error> {
        let f = self.inner.nccl.functions().comm_user_rank;
        self.ask("ncclCommUserRank", f)
    }

    /// Returns the CUDA device of this rank.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub fn device(&self) -> Result<u32, Error> {
        let f = self.inner.nccl.functions().comm_cu_device;
        self.ask("ncclCommCuDevice", f)
    }

    fn ask(
        &self,
        call: &'static str,
        f: unsafe extern "C" fn(RawComm, *mut c_int) -> RawResult,
    ) -> Result<u32, Error> {
        let entered = self.inner.enter(call)?;
        let mut x = 0;
        // SAFETY: the communicator is live while entered, and the pointer is valid for a write.
        let result = unsafe { f(entered.handle, &raw mut x) };
        self.finish(call, result, &entered)?;
        u32::try_from(x).map_err(|_| Error::Argument {
            call,
            what: format!("it answered {x}"),
        })
    }

    /// Makes a call that this crate does not wrap: `f` receives NCCL's handle and returns the
    /// result of the call. See [`Nccl::functions`].
    ///
    /// # Safety
    /// `f` makes one call of the named function, which does not free the communicator. Its other
    /// arguments follow NCCL's rules. With a nonblocking communicator, NCCL may write to them until
    /// the communicator is ready.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub unsafe fn call(
        &self,
        call: &'static str,
        f: impl FnOnce(RawComm) -> RawResult,
    ) -> Result<(), Error> {
        let entered = self.inner.enter(call)?;
        let result = f(entered.handle);
        self.finish(call, result, &entered)
    }

    /// Checks for asynchronous errors of the network or of another rank.
    ///
    /// # Errors
    /// The asynchronous error.
    pub fn poll(&self) -> Result<State, Error> {
        self.inner.poll()
    }

    /// Returns a handle for another thread, which can check for errors and abort.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(Arc::clone(&self.inner))
    }

    /// Waits until all launched work has completed on all ranks. Only [`Communicator::destroy`] may
    /// follow.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub fn finalize(&self) -> Result<(), Error> {
        const CALL: &str = "ncclCommFinalize";
        let entered = self.inner.enter(CALL)?;
        // SAFETY: the communicator is live while entered.
        let result = unsafe { (self.inner.nccl.functions().comm_finalize)(entered.handle) };
        self.finish(CALL, result, &entered)
    }

    /// Frees the communicator; all ranks must do so. Waits for operations in progress of a
    /// nonblocking communicator. After a failure, aborts instead, as NCCL requires. Within a group,
    /// the communicator is freed at the end of the group, which then reports the errors.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub fn destroy(self) -> Result<(), Error> {
        if !group::is_open() && !self.inner.failed.load(Ordering::Relaxed) {
            match self.inner.wait_ready(self.timeout, || false) {
                // `Aborted`: a watch has already aborted it.
                Ok(()) | Err(Error::Aborted { .. }) => {}
                error => return error,
            }
        }
        self.end(End::Destroy)
    }

    /// Frees the communicator.
    fn end(&self, end: End) -> Result<(), Error> {
        self.hold_to_end();
        self.inner.end(end, None)
    }

    /// Within a group, keeps the communicator until the end of the group, because NCCL may have
    /// recorded calls that use it.
    fn hold_to_end(&self) {
        // This fails if a watch has already aborted it.
        let _ = group::hold(&self.inner, "ncclCommDestroy");
    }

    /// Stops the communicator's work on the device and frees it, without the other ranks. Within a
    /// group, this happens at the end of the group.
    ///
    /// # Errors
    /// [`Error::Busy`] if another thread stays inside the communicator, in an open group, for a
    /// second: that thread then frees it when it leaves. Otherwise errors of NCCL.
    pub fn abort(self) -> Result<(), Error> {
        self.hold_to_end();
        self.inner.abort_at_last(ABORT_GRACE)
    }

    /// Returns the result of a call whose work may still be in progress on a nonblocking
    /// communicator, even if the call has returned success. Waits until it is ready.
    pub(crate) fn finish_later(
        &self,
        call: &'static str,
        result: RawResult,
        entered: &Entered<'_>,
    ) -> Result<(), Error> {
        self.finish(call, result, entered)?;
        self.inner.wait_ready(self.timeout, || false)
    }

    /// Returns the result of a call. Waits for a nonblocking communicator, except within a group,
    /// whose calls complete later.
    pub(crate) fn finish(
        &self,
        call: &'static str,
        result: RawResult,
        entered: &Entered<'_>,
    ) -> Result<(), Error> {
        match result {
            SUCCESS => Ok(()),
            IN_PROGRESS if group::is_open() => Ok(()),
            IN_PROGRESS => self.inner.wait_ready(self.timeout, || false),
            error => {
                self.inner.failed.store(true, Ordering::Relaxed);
                self.inner.nccl.check(call, error, entered.handle)
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let end = if std::thread::panicking() {
            End::Abort
        } else {
            End::Destroy
        };
        // A drop cannot return the error; callers that need it call `destroy`.
        let _ = self.end(end);
    }
}

/// Converts a number to C's `int`.
pub(crate) fn number(call: &'static str, name: &str, x: u32) -> Result<c_int, Error> {
    c_int::try_from(x).map_err(|_| Error::Argument {
        call,
        what: format!("{name} {x} is too large"),
    })
}
