//! Groups of calls that NCCL launches together.

use crate::error::Error;
use crate::ffi::{IN_PROGRESS, RawResult, RawSimInfo};
use crate::library::Nccl;
use crate::shared::Inner;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

thread_local! {
    /// Number of groups that this thread has open; NCCL counts per thread as well.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether the outermost group is an estimate.
    static SIMULATED: Cell<bool> = const { Cell::new(false) };
    /// Communicators used in the group. They stay entered until its end, when NCCL performs the
    /// calls.
    static HELD: RefCell<Vec<Arc<Inner>>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// Returns an error within a group, for calls that must return a result immediately.
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

/// Returns an error for a nonblocking communicator in an estimate: NCCL would run its calls.
pub(crate) fn allow(inner: &Inner, call: &'static str) -> Result<(), Error> {
    if !SIMULATED.get() || inner.blocks {
        return Ok(());
    }
    Err(Error::Argument {
        call,
        what: "NCCL has no estimates for communicators that do not block".to_owned(),
    })
}

/// An open group. Also ends when a panic drops it, since an open group would capture all later
/// calls of the thread.
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
            // SAFETY: the struct is initialized as the header requires and valid for writes.
            let result = unsafe { f(&raw mut info) };
            nccl.check("ncclGroupSimulateEnd", result, std::ptr::null_mut())
        })?;
        let micros = f64::from(info.estimated_time);
        Ok((micros >= 0.0 && micros.is_finite()).then(|| Duration::from_secs_f64(micros * 1e-6)))
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // A panic is in progress, which matters more than this result.
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

/// Ends a group by calling `end`. For the outermost group, also leaves the communicators that it
/// has used, and marks all of them as failed on an error.
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
    /// Performs the calls of `f` as one operation: sends and receives progress together, and
    /// collectives on several communicators or of several buffers are one launch. The group also
    /// ends if `f` fails; the error of `f` then takes precedence.
    ///
    /// Communicators that `f` uses belong to the group until its end has returned: other threads
    /// wait for them, and none is freed before. If the end fails, all of them are aborted when they
    /// are dropped.
    ///
    /// Nonblocking communicators may not be ready afterwards: see
    /// [`crate::Communicator::wait_ready`].
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
    /// The error of the closure, or else an error of the calls, which NCCL reports at the end.
    pub fn group<T, E: From<Error>>(&self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let open = Open::new(self)?;
        let result = f();
        let ended = open.end();
        let value = result?;
        ended?;
        Ok(value)
    }

    /// Returns NCCL's estimate of the total duration of the calls of `f`, without launching them;
    /// `None` if NCCL has no estimate. Not available for nonblocking communicators, whose calls
    /// NCCL would launch.
    ///
    /// # Errors
    /// As for [`Nccl::group`]; a call within a group; libraries before 2.22, which do not have the
    /// function.
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
