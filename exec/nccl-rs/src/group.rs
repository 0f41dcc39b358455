//! Groups: several calls as one launch.

use crate::error::Error;
use crate::ffi::{IN_PROGRESS, RawResult, RawSimInfo};
use crate::library::Nccl;
use crate::shared::Inner;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

thread_local! {
    /// Groups that this thread has open; NCCL counts by thread as well.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether the outermost one is there for an estimate.
    static SIMULATED: Cell<bool> = const { Cell::new(false) };
    /// Communicators that they have used: NCCL does the work of a group in its end, so they are not left before.
    static HELD: RefCell<Vec<Arc<Inner>>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// Calls that hand results out at once cannot be part of a group, which runs later.
pub(crate) fn refuse(call: &'static str) -> Result<(), Error> {
    if !is_open() {
        return Ok(());
    }
    Err(Error::Argument {
        call,
        what: "must not be called within a group: its result is not known before the group's end"
            .to_owned(),
    })
}

/// Keeps a communicator entered until the end of this thread's outermost group, if there is one.
pub(crate) fn hold(inner: &Arc<Inner>, call: &'static str) -> Result<(), Error> {
    if !is_open() || HELD.with_borrow(|held| held.iter().any(|h| Arc::ptr_eq(h, inner))) {
        return Ok(());
    }
    inner.occupy(call)?;
    HELD.with_borrow_mut(|held| held.push(Arc::clone(inner)));
    Ok(())
}

/// NCCL ends the group of an estimate like any other if its communicators do not block: it would run the calls.
pub(crate) fn allow(inner: &Inner, call: &'static str) -> Result<(), Error> {
    if !SIMULATED.get() || inner.blocks {
        return Ok(());
    }
    Err(Error::Argument {
        call,
        what: "NCCL has no estimates for communicators that do not block".to_owned(),
    })
}

/// An open group. If it is dropped by a panic, it is ended all the same: an open group would swallow all later calls of
/// the thread.
struct Open<'a>(&'a Nccl);

impl<'a> Open<'a> {
    fn new(nccl: &'a Nccl) -> Result<Self, Error> {
        // SAFETY: the function has no arguments.
        let result = unsafe { (nccl.functions().group_start)() };
        nccl.check("ncclGroupStart", result, std::ptr::null_mut())?;
        DEPTH.set(DEPTH.get() + 1);
        Ok(Self(nccl))
    }

    fn end(self) -> Result<(), Error> {
        let nccl = self.0;
        std::mem::forget(self);
        close(|| end(nccl))
    }

    fn simulate(
        self,
        f: unsafe extern "C" fn(*mut RawSimInfo) -> RawResult,
    ) -> Result<Option<Duration>, Error> {
        let nccl = self.0;
        std::mem::forget(self);
        let mut info = RawSimInfo::initial();
        close(|| {
            // SAFETY: the struct is initialised as the header asks and valid for writes.
            let result = unsafe { f(&raw mut info) };
            nccl.check("ncclGroupSimulateEnd", result, std::ptr::null_mut())
        })?;
        let micros = f64::from(info.estimated_time);
        Ok((micros >= 0.0 && micros.is_finite()).then(|| Duration::from_secs_f64(micros * 1e-6)))
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // A panic is on its way; its cause is worth more than this result.
        let _ = close(|| end(self.0));
    }
}

fn end(nccl: &Nccl) -> Result<(), Error> {
    // SAFETY: the function has no arguments; the communicators of the group are held.
    match unsafe { (nccl.functions().group_end)() } {
        IN_PROGRESS => Ok(()),
        result => nccl.check("ncclGroupEnd", result, std::ptr::null_mut()),
    }
}

/// Ends a group by `end`; with the outermost one, leaves the communicators that were used. An error is one of all of them.
fn close(end: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    DEPTH.set(DEPTH.get() - 1);
    let ended = end();
    if is_open() {
        return ended;
    }
    SIMULATED.set(false);
    let mut freed = Ok(());
    for inner in HELD.take() {
        if ended.is_err() {
            inner.failed.store(true, Ordering::Relaxed);
        }
        freed = freed.and(inner.leave());
    }
    ended.and(freed)
}

impl Nccl {
    /// Performs the calls that `f` makes as one: sends and receives progress together, and collectives on several
    /// communicators or of several buffers are one launch. The group is ended also when `f` fails, whose error comes first.
    ///
    /// Communicators that were used belong to the group until its end has returned: other threads wait, and nobody frees
    /// one before. An error at the end is one of all of them, and they are aborted when they are dropped.
    ///
    /// Communicators that do not block may not be ready afterwards: see [`crate::Communicator::wait_ready`].
    ///
    /// ```no_run
    /// # use nccl_rs::{Communicator, DataType, Error, Stream};
    /// # unsafe fn exchange(comm: &Communicator, to: *const f32, from: *mut f32, n: usize, stream: Stream) -> Result<(), Error> {
    /// let peer = comm.rank() ^ 1;
    /// comm.nccl().group(|| unsafe {
    ///     comm.send(to.cast(), n, DataType::F32, peer, stream)?;
    ///     comm.recv(from.cast(), n, DataType::F32, peer, stream)
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// The closure's; else those of the calls, which show at the group's end.
    pub fn group<T, E: From<Error>>(&self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let open = Open::new(self)?;
        let result = f();
        let ended = open.end();
        let value = result?;
        ended?;
        Ok(value)
    }

    /// NCCL's own estimate of how long the calls that `f` makes take together; nothing is launched. `None` where NCCL has
    /// no estimate. Not for communicators that do not block, whose calls NCCL would launch.
    ///
    /// # Errors
    /// As [`Nccl::group`]; within a group; libraries before 2.22 have no such function.
    pub fn simulate<E: From<Error>>(
        &self,
        f: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<Duration>, E> {
        let end = self.optional(self.functions().group_simulate_end, "ncclGroupSimulateEnd")?;
        refuse("ncclGroupSimulateEnd")?;
        let open = Open::new(self)?;
        SIMULATED.set(true);
        let result = f();
        let ended = open.simulate(end);
        result?;
        Ok(ended?)
    }
}
