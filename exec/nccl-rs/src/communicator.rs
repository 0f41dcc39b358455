//! Communicators: how they begin, are watched, and end.

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

/// How long calls of communicators that do not block wait by default.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// How long an owner that aborts waits for a thread that is inside.
const PATIENCE_OF_ABORT: Duration = Duration::from_secs(1);

/// One rank's end of a communicator.
///
/// All ranks make the same calls in the same order; calls name the stream on which the work runs, and streams may differ
/// from call to call. A communicator may be sent to another thread, but NCCL allows no two threads in it at a time, so it
/// is not shared; a [`Watch`] is what another thread may have.
///
/// Dropping it destroys it in good order, which all ranks have to do; after a failure, or while a thread panics, it is
/// aborted instead, which waits for nobody.
pub struct Communicator {
    pub(crate) inner: Arc<Inner>,
    size: u32,
    rank: u32,
    patience: Duration,
    one_thread: PhantomData<Cell<()>>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank, self.size)
    }
}

impl Communicator {
    /// Joins the communicator of this identity as rank `rank` of `size`, with the calling thread's current CUDA device.
    /// Waits for the other ranks, unless it is configured not to block. One thread that joins as several ranks does so
    /// within [`Nccl::group`].
    ///
    /// # Errors
    /// What NCCL reports; a rank that is not below the size.
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
        // SAFETY: the place for the handle stays where it is for as long as `inner` lives; the configuration points to
        // strings that `inner` owns.
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
            patience: PATIENCE,
            one_thread: PhantomData,
        }
    }

    /// A communicator that does not block may still be under way, and one that is made within a group is made at its end.
    /// NCCL has written the handle by now (all versions from 2.14 to 2.30 do), and an abort waits for its thread, so that
    /// whoever has no patience left may drop this.
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

    /// A communicator of those ranks of this one that name the same colour, ordered by key; `None` for a rank that names
    /// no colour. All ranks call it. Without a configuration the parent's is inherited.
    ///
    /// # Errors
    /// What NCCL reports; within a group.
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
        // What NCCL makes of a configuration that is inherited is a copy with the same pointers.
        let own = config.map(Arc::new);
        let mut raw = own.as_deref().map(Config::raw);
        let raw = raw.as_mut().map_or(std::ptr::null_mut(), |r| &raw mut *r);
        let config = own.unwrap_or_else(|| Arc::clone(&self.inner.config));
        let child = Arc::new(Inner::new(nccl, config));
        let parent = self.inner.enter(CALL)?;
        // SAFETY: the parent is live while entered; the place for the handle stays where it is for as long as `child` lives,
        // which is until NCCL has written to it; the configuration points to strings that `child` owns.
        let result = unsafe { f(parent.handle, raw_color, key, child.place(), raw) };
        // A parent that does not block is ready once NCCL has written the child's handle.
        let made = self.finish_later(CALL, result, &parent);
        let begun = matches!(result, SUCCESS | IN_PROGRESS);
        if begun && made.is_err() {
            // Before the parent is left, which a watch may wait for.
            self.inner.keep(&child);
        }
        drop(parent);
        if !begun {
            // NCCL leaves one behind that is good for nothing else. The first error is the one to know.
            let _ = child.end(End::Abort, None);
        }
        made?;
        if color.is_none() {
            return Ok(None);
        }
        let mut child = Self::new(child, 0, 0);
        child.patience = self.patience;
        child.wait_ready(child.patience, || false)?;
        child.size = child.count()?;
        child.rank = child.user_rank()?;
        Ok(Some(child))
    }

    /// How long calls of a communicator that does not block wait.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Waits until a communicator that does not block is ready, `give_up` says so, or time is over.
    ///
    /// # Errors
    /// The operation's error; [`Error::NotReady`].
    pub fn wait_ready(&self, patience: Duration, give_up: impl Fn() -> bool) -> Result<(), Error> {
        self.inner.wait_ready(patience, give_up)
    }

    /// Ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// This end's rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The library.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.inner.nccl
    }

    /// Number of ranks as NCCL knows it.
    ///
    /// # Errors
    /// What NCCL reports.
    pub fn count(&self) -> Result<u32, Error> {
        self.ask("ncclCommCount", self.inner.nccl.functions().comm_count)
    }

    /// This end's rank as NCCL knows it.
    ///
    /// # Errors
    /// What NCCL reports.
    pub fn user_rank(&self) -> Result<u32, Error> {
        let f = self.inner.nccl.functions().comm_user_rank;
        self.ask("ncclCommUserRank", f)
    }

    /// The CUDA device of this end.
    ///
    /// # Errors
    /// What NCCL reports.
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

    /// Makes a call that this crate does not wrap: `f` gets NCCL's handle, and its result is that of `call`. See
    /// [`Nccl::functions`].
    ///
    /// # Safety
    /// `f` makes one call of the function that is named, which does not free the communicator, and keeps to NCCL's rules on
    /// everything else that it passes: a communicator that does not block may still write to it until it is ready.
    ///
    /// # Errors
    /// What NCCL reports.
    pub unsafe fn call(
        &self,
        call: &'static str,
        f: impl FnOnce(RawComm) -> RawResult,
    ) -> Result<(), Error> {
        let entered = self.inner.enter(call)?;
        let result = f(entered.handle);
        self.finish(call, result, &entered)
    }

    /// Errors that came up on their own: of the network, or of another rank.
    ///
    /// # Errors
    /// Such an error.
    pub fn poll(&self) -> Result<State, Error> {
        self.inner.poll()
    }

    /// What another thread may do: look for errors, and abort.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(Arc::clone(&self.inner))
    }

    /// Waits until everything that was launched is done, on all ranks; only [`Communicator::destroy`] may follow.
    ///
    /// # Errors
    /// What NCCL reports.
    pub fn finalize(&self) -> Result<(), Error> {
        const CALL: &str = "ncclCommFinalize";
        let entered = self.inner.enter(CALL)?;
        // SAFETY: the communicator is live while entered.
        let result = unsafe { (self.inner.nccl.functions().comm_finalize)(entered.handle) };
        self.finish(CALL, result, &entered)
    }

    /// Frees it in good order; all ranks do so. What is under way in a communicator that does not block is waited for. After
    /// a failure it is aborted instead, as NCCL asks for. Within a group it is freed at the group's end, which then has the
    /// errors.
    ///
    /// # Errors
    /// What NCCL reports.
    pub fn destroy(self) -> Result<(), Error> {
        if !group::is_open() && !self.inner.failed.load(Ordering::Relaxed) {
            match self.inner.wait_ready(self.patience, || false) {
                // A watch was first.
                Ok(()) | Err(Error::Aborted { .. }) => {}
                error => return error,
            }
        }
        self.end(End::Destroy)
    }

    /// Frees it.
    fn end(&self, end: End) -> Result<(), Error> {
        self.hold_to_end();
        self.inner.end(end, None)
    }

    /// Within a group it is freed when that has ended, for NCCL may have noted calls.
    fn hold_to_end(&self) {
        // It fails if a watch was first.
        let _ = group::hold(&self.inner, "ncclCommDestroy");
    }

    /// Stops what runs on the device and frees it, without the other ranks. Within a group, at the group's end.
    ///
    /// # Errors
    /// [`Error::Busy`] if another thread stays inside of it, in an open group, for a second: that thread frees it when it
    /// leaves. Else what NCCL reports.
    pub fn abort(self) -> Result<(), Error> {
        self.hold_to_end();
        self.inner.abort_at_last(PATIENCE_OF_ABORT)
    }

    /// The result of a call whose work is done later if the communicator does not block, also where it says success at once.
    pub(crate) fn finish_later(
        &self,
        call: &'static str,
        result: RawResult,
        entered: &Entered<'_>,
    ) -> Result<(), Error> {
        self.finish(call, result, entered)?;
        self.inner.wait_ready(self.patience, || false)
    }

    /// A call's result. A communicator that does not block is waited for, except within a group, which is over later.
    pub(crate) fn finish(
        &self,
        call: &'static str,
        result: RawResult,
        entered: &Entered<'_>,
    ) -> Result<(), Error> {
        match result {
            SUCCESS => Ok(()),
            IN_PROGRESS if group::is_open() => Ok(()),
            IN_PROGRESS => self.inner.wait_ready(self.patience, || false),
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
        // Nobody is left to tell; the owner of a communicator that matters calls `destroy`.
        let _ = self.end(end);
    }
}

/// A number that C's `int` can hold.
pub(crate) fn number(call: &'static str, name: &str, x: u32) -> Result<c_int, Error> {
    c_int::try_from(x).map_err(|_| Error::Argument {
        call,
        what: format!("{name} {x} is too large"),
    })
}
