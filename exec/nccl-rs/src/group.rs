//! Groups: several calls as one launch.

use crate::error::Error;
use crate::ffi::{IN_PROGRESS, RawSimInfo};
use crate::library::Nccl;
use std::cell::Cell;
use std::time::Duration;

thread_local! {
    /// Groups that this thread has open; NCCL counts by thread as well.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
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
        DEPTH.set(DEPTH.get() - 1);
        // SAFETY: the function has no arguments.
        match unsafe { (nccl.functions().group_end)() } {
            IN_PROGRESS => Ok(()),
            result => nccl.check("ncclGroupEnd", result, std::ptr::null_mut()),
        }
    }

    fn simulate(
        self,
        f: unsafe extern "C" fn(*mut RawSimInfo) -> i32,
    ) -> Result<Option<Duration>, Error> {
        let nccl = self.0;
        std::mem::forget(self);
        DEPTH.set(DEPTH.get() - 1);
        let mut info = RawSimInfo::initial();
        // SAFETY: the struct is initialised as the header asks and valid for writes.
        let result = unsafe { f(&raw mut info) };
        nccl.check("ncclGroupSimulateEnd", result, std::ptr::null_mut())?;
        let micros = f64::from(info.estimated_time);
        Ok((micros >= 0.0 && micros.is_finite()).then(|| Duration::from_secs_f64(micros * 1e-6)))
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        // SAFETY: the function has no arguments. A panic is on its way; its cause is worth more than this result.
        let _ = unsafe { (self.0.functions().group_end)() };
    }
}

impl Nccl {
    /// Performs the calls that `f` makes as one: sends and receives progress together, and collectives on several
    /// communicators or of several buffers are one launch. The group is ended also when `f` fails, whose error comes first.
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
    /// no estimate.
    ///
    /// # Errors
    /// As [`Nccl::group`]; libraries before 2.22 have no such function.
    pub fn simulate<E: From<Error>>(
        &self,
        f: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<Duration>, E> {
        let end = self.optional(self.functions().group_simulate_end, "ncclGroupSimulateEnd")?;
        let open = Open::new(self)?;
        let result = f();
        let ended = open.simulate(end);
        result?;
        Ok(ended?)
    }
}
