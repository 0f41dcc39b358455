//! Collectives and point-to-point calls. They return when the work is enqueued on the stream, or,
//! within a group, when the call is recorded.

use crate::communicator::{Communicator, number};
use crate::error::Error;
use crate::types::{DataType, RedOp, Stream};
use std::ffi::{c_int, c_void};

/// Safety contract of every call in this file.
///
/// # Safety
/// Buffers are memory of the communicator's device, or memory that it can access, and have at least
/// the length that the call needs. Nothing else accesses them until the work has completed. The
/// stream belongs to the device and is alive. A reduction belongs to this communicator and element
/// type.
/// Numbers of elements that a rank exchanges with each rank, see [`Communicator::all_to_all_v`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splits {
    /// Elements from the start of one rank's block to the start of the next one.
    pub block: usize,
    /// Elements that this rank sends, by rank.
    pub sent: Vec<usize>,
    /// Elements that this rank receives, by rank.
    pub received: Vec<usize>,
}

impl Splits {
    /// Checks that there is a number for each rank, and that each fits a block.
    fn check(&self, ranks: usize) -> Result<(), String> {
        for (all, what) in [(&self.sent, "sent"), (&self.received, "received")] {
            if all.len() != ranks {
                return Err(format!("{} {what} parts for {ranks} ranks", all.len()));
            }
            if let Some(n) = all.iter().find(|n| **n > self.block) {
                let block = self.block;
                return Err(format!("{n} {what} elements, but blocks have {block}"));
            }
        }
        Ok(())
    }
}

impl Communicator {
    /// Gathers `count` elements of every rank, in rank order, on every rank. The call is in place
    /// if `send == recv + rank * count`.
    ///
    /// # Safety
    /// The contract of this file; `recv` has room for `count` times the number of ranks.
    ///
    /// # Errors
    /// Errors of NCCL.
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
        // SAFETY: the communicator is live while entered; the rest is the caller's contract.
        let result = unsafe { f(send, recv, count, dtype.0, c.handle, stream.0) };
        self.finish(CALL, result, &c)
    }

    /// Reduces the `i`-th chunk of `count` elements of all ranks and writes the result on rank `i`.
    /// The call is in place if `recv == send + rank * count`.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; `send` has `count` times the number of ranks.
    ///
    /// # Errors
    /// Errors of NCCL.
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

    /// Reduces `count` elements of all ranks and writes the result on every rank. The call is in
    /// place if the buffers are equal.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`].
    ///
    /// # Errors
    /// Errors of NCCL.
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

    /// Reduces `count` elements of all ranks and writes the result on the root.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; `recv` is used on the root only.
    ///
    /// # Errors
    /// Errors of NCCL, and a root that is not a rank.
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

    /// Copies `count` elements of the root to every rank.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; `send` is used on the root only.
    ///
    /// # Errors
    /// Errors of NCCL, and a root that is not a rank.
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
        // SAFETY: the caller's contract.
        unsafe { self.rooted(CALL, f, send, recv, count, dtype, root, stream) }
    }

    /// Gathers `count` elements of every rank, in rank order, on the root (since 2.28).
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; `recv` is used on the root only.
    ///
    /// # Errors
    /// Errors of NCCL, a root that is not a rank, and an older library.
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
        // SAFETY: the caller's contract.
        unsafe { self.rooted(CALL, f, send, recv, count, dtype, root, stream) }
    }

    /// Copies the `i`-th chunk of `count` elements of the root to rank `i` (since 2.28).
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; `send` is used on the root only.
    ///
    /// # Errors
    /// Errors of NCCL, a root that is not a rank, and an older library.
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
        // SAFETY: the caller's contract.
        unsafe { self.rooted(CALL, f, send, recv, count, dtype, root, stream) }
    }

    /// # Safety
    /// The contract of the call.
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

    /// Sends the `i`-th chunk of `count` elements of every rank to rank `i`, which stores the
    /// chunks in rank order. The buffers must not overlap. For libraries before 2.28, this is a
    /// group of sends and receives.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; both buffers have `count` times the number of ranks.
    ///
    /// # Errors
    /// Errors of NCCL, and, on older libraries, an element type of unknown size.
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
        // SAFETY: the caller's contract.
        unsafe { self.all_to_all_grouped(send, recv, count, dtype, stream) }
    }

    /// Like [`Communicator::all_to_all`], but always a group of sends and receives.
    ///
    /// # Safety
    /// As for [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// Errors of NCCL, and an element type of unknown size.
    pub unsafe fn all_to_all_grouped(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let all = vec![count; self.size() as usize];
        let splits = Splits {
            block: count,
            sent: all.clone(),
            received: all,
        };
        // SAFETY: the caller's contract.
        unsafe { self.all_to_all_v(send, recv, &splits, dtype, stream) }
    }

    /// Sends the first elements of the `i`-th block of every rank to rank `i`, which stores them at
    /// the start of its blocks, in rank order. What the others do not send is left unchanged. The
    /// buffers must not overlap. This is a group of sends and receives.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`]; both buffers have a block for each rank. Each rank
    /// receives as many elements from another one as that one sends to it.
    ///
    /// # Errors
    /// Errors of NCCL, an element type of unknown size, and splits that do not fit the blocks or
    /// the number of ranks.
    pub unsafe fn all_to_all_v(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        splits: &Splits,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let wrong = |what| Error::Argument {
            call: "ncclSend",
            what,
        };
        let size = dtype.size();
        let size =
            size.ok_or_else(|| wrong(format!("elements of type {} have no known size", dtype.0)))?;
        splits.check(self.size() as usize).map_err(wrong)?;
        self.nccl().group(|| {
            for peer in 0..self.size() {
                let at = peer as usize * splits.block * size;
                let [sent, received] =
                    [&splits.sent, &splits.received].map(|all| all[peer as usize]);
                // SAFETY: by the caller's contract, both buffers have a block for each rank.
                unsafe {
                    if sent > 0 {
                        self.send(send.byte_add(at), sent, dtype, peer, stream)?;
                    }
                    if received > 0 {
                        self.recv(recv.byte_add(at), received, dtype, peer, stream)?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Sends `count` elements to rank `peer`, which must receive the same number. Calls that must
    /// progress together belong in one group.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`].
    ///
    /// # Errors
    /// Errors of NCCL, and a peer that is not a rank.
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

    /// Receives `count` elements from rank `peer`.
    ///
    /// # Safety
    /// As for [`Communicator::all_gather`].
    ///
    /// # Errors
    /// Errors of NCCL, and a peer that is not a rank.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fit_their_blocks() {
        let splits = |sent: &[usize], received: &[usize]| Splits {
            block: 4,
            sent: sent.to_vec(),
            received: received.to_vec(),
        };
        assert_eq!(splits(&[4, 0], &[1, 2]).check(2), Ok(()));
        let few = splits(&[4], &[1, 2]).check(2);
        assert_eq!(few, Err("1 sent parts for 2 ranks".to_owned()));
        let many = splits(&[4, 0], &[1, 5]).check(2);
        let expected = "5 received elements, but blocks have 4";
        assert_eq!(many, Err(expected.to_owned()));
    }
}
