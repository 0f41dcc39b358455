//! Collectives and point-to-point calls. They return when the work is in the stream (or, within a group, noted).

use crate::communicator::{Communicator, number};
use crate::error::Error;
use crate::types::{DataType, RedOp, Stream};
use std::ffi::{c_int, c_void};

/// The promise of every call here.
///
/// # Safety
/// Buffers are memory of the communicator's device (or reachable by it), of at least the length that the call says, and
/// nothing else touches them until the work is done; the stream belongs to the device and is alive. A reduction belongs to
/// this communicator and element type.
impl Communicator {
    /// Every rank gets the concatenation of all ranks' `count` elements, by rank. In place where
    /// `send == recv + rank * count`.
    ///
    /// # Safety
    /// Memory as the implementation's documentation says; `recv` has room for `count` times the size.
    ///
    /// # Errors
    /// What NCCL reports.
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclAllGather";
        let c = self.inner.enter(CALL)?;
        let f = self.nccl().functions().all_gather;
        // SAFETY: the communicator is live while entered; the rest is the caller's promise.
        let result = unsafe { f(send, recv, count, dtype.0, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    /// Rank `i` gets the reduction of the `i`-th `count` elements of all ranks. In place where
    /// `recv == send + rank * count`.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`]; `send` has `count` times the size.
    ///
    /// # Errors
    /// What NCCL reports.
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        op: RedOp,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclReduceScatter";
        let c = self.inner.enter(CALL)?;
        let f = self.nccl().functions().reduce_scatter;
        // SAFETY: as in `all_gather`.
        let result = unsafe { f(send, recv, count, dtype.0, op.0, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    /// Every rank gets the reduction of all ranks' `count` elements. In place where the buffers are equal.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`].
    ///
    /// # Errors
    /// What NCCL reports.
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        op: RedOp,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclAllReduce";
        let c = self.inner.enter(CALL)?;
        let f = self.nccl().functions().all_reduce;
        // SAFETY: as in `all_gather`.
        let result = unsafe { f(send, recv, count, dtype.0, op.0, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    /// The root gets the reduction of all ranks' `count` elements.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`]; `recv` is used on the root only.
    ///
    /// # Errors
    /// What NCCL reports; a root that is no rank.
    #[allow(clippy::too_many_arguments, reason = "those of ncclReduce")]
    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        op: RedOp,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclReduce";
        let root = self.peer(CALL, root)?;
        let c = self.inner.enter(CALL)?;
        let f = self.nccl().functions().reduce;
        // SAFETY: as in `all_gather`.
        let result = unsafe { f(send, recv, count, dtype.0, op.0, root, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    /// Every rank gets the root's `count` elements.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`]; `send` is used on the root only.
    ///
    /// # Errors
    /// What NCCL reports; a root that is no rank.
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclBroadcast";
        let f = self.nccl().functions().broadcast;
        // SAFETY: the caller's promise.
        unsafe { self.rooted(CALL, f, send, recv, count, dtype, root, stream) }
    }

    /// The root gets the concatenation of all ranks' `count` elements (since 2.28).
    ///
    /// # Safety
    /// As [`Communicator::all_gather`]; `recv` is used on the root only.
    ///
    /// # Errors
    /// What NCCL reports; a root that is no rank; an older library.
    pub unsafe fn gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclGather";
        let f = self.nccl().optional(self.nccl().functions().gather, CALL)?;
        // SAFETY: the caller's promise.
        unsafe { self.rooted(CALL, f, send, recv, count, dtype, root, stream) }
    }

    /// Rank `i` gets the root's `i`-th `count` elements (since 2.28).
    ///
    /// # Safety
    /// As [`Communicator::all_gather`]; `send` is used on the root only.
    ///
    /// # Errors
    /// What NCCL reports; a root that is no rank; an older library.
    pub unsafe fn scatter(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclScatter";
        let f = self
            .nccl()
            .optional(self.nccl().functions().scatter, CALL)?;
        // SAFETY: the caller's promise.
        unsafe { self.rooted(CALL, f, send, recv, count, dtype, root, stream) }
    }

    /// # Safety
    /// That of the call.
    #[allow(clippy::too_many_arguments, reason = "those of the C functions")]
    unsafe fn rooted(
        &self,
        call: &'static str,
        f: unsafe extern "C" fn(
            *const c_void,
            *mut c_void,
            usize,
            c_int,
            c_int,
            *mut c_void,
            *mut c_void,
        ) -> c_int,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        let root = self.peer(call, root)?;
        let c = self.inner.enter(call)?;
        // SAFETY: as in `all_gather`.
        let result = unsafe { f(send, recv, count, dtype.0, root, c.handle, stream.0) };
        self.finish(call, result, &c)
    }

    /// Rank `i` gets the `i`-th `count` elements of every rank, by rank. Not in place. Libraries before 2.28 do it as a
    /// group of sends and receives.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`]; both buffers have `count` times the size.
    ///
    /// # Errors
    /// What NCCL reports; on older libraries an element type of unknown size.
    pub unsafe fn all_to_all(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclAlltoAll";
        if let Some(f) = self.nccl().functions().all_to_all {
            let c = self.inner.enter(CALL)?;
            // SAFETY: as in `all_gather`.
            let result = unsafe { f(send, recv, count, dtype.0, c.handle, stream.0) };
            return self.finish(CALL, result, &c);
        }
        // SAFETY: the caller's promise.
        unsafe { self.all_to_all_grouped(send, recv, count, dtype, stream) }
    }

    /// The same as a group of sends and receives, whatever the library has.
    ///
    /// # Safety
    /// As [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// What NCCL reports; an element type of unknown size.
    pub unsafe fn all_to_all_grouped(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let bytes = dtype
            .size()
            .map(|s| s * count)
            .ok_or_else(|| Error::Argument {
                call: "ncclSend",
                what: format!("elements of type {} have no known size", dtype.0),
            })?;
        self.nccl().group(|| {
            for peer in 0..self.size() {
                let at = peer as usize * bytes;
                // SAFETY: the caller's promise: both buffers have a part for each rank.
                unsafe {
                    self.send(send.byte_add(at), count, dtype, peer, stream)?;
                    self.recv(recv.byte_add(at), count, dtype, peer, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Sends elements to a rank, which receives as many. Calls that have to progress together belong into one group.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`].
    ///
    /// # Errors
    /// What NCCL reports; a peer that is no rank.
    pub unsafe fn send(
        &self,
        send: *const c_void,
        count: usize,
        dtype: DataType,
        peer: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclSend";
        let peer = self.peer(CALL, peer)?;
        let c = self.inner.enter(CALL)?;
        let f = self.nccl().functions().send;
        // SAFETY: as in `all_gather`.
        let result = unsafe { f(send, count, dtype.0, peer, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    /// Receives elements from a rank.
    ///
    /// # Safety
    /// As [`Communicator::all_gather`].
    ///
    /// # Errors
    /// What NCCL reports; a peer that is no rank.
    pub unsafe fn recv(
        &self,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        peer: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        const CALL: &str = "ncclRecv";
        let peer = self.peer(CALL, peer)?;
        let c = self.inner.enter(CALL)?;
        let f = self.nccl().functions().recv;
        // SAFETY: as in `all_gather`.
        let result = unsafe { f(recv, count, dtype.0, peer, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    fn peer(&self, call: &'static str, rank: u32) -> Result<c_int, Error> {
        if rank >= self.size() {
            return Err(Error::Argument {
                call,
                what: format!("there is no rank {rank} of {}", self.size()),
            });
        }
        number(call, "rank", rank)
    }
}
