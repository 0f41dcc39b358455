//! Pinned memory through which host data are copied to the device.
//!
//! The GPU reads it asynchronously at the full rate of its link, while the host copies the next
//! piece of large data.

mod ring;

use super::context::Context;
use super::driver::{CudaError, Event, RawStream, check};
use super::memory::Pinned;
use cudarc::driver::sys;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::{ParallelSlice, ParallelSliceMut};
use ring::{Place, Ring};
use std::sync::Arc;

/// Bytes of a block, and of a piece of larger data.
const BLOCK: usize = 8 << 20;
/// Maximum number of blocks (64 MiB): enough for a batch of images. Larger uploads (the state of a
/// resumed run) wait for the first blocks.
const BLOCKS: usize = 8;
const ALIGN: usize = 256;
/// Number of bytes that one thread copies at a time. One thread takes 5 ms for 50 MB, while the
/// link takes 1 to 2 ms.
const SHARE: usize = 1 << 20;

/// Number of bytes of inputs that are staged before a pass. The rest uses the blocks.
const AHEAD: usize = 512 << 20;

/// Blocks that are filled one after another during a pass and are all free at its start, and inputs
/// that were staged before the pass.
#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    ring: Ring,
    blocks: Vec<Block>,
    /// By input of the pass: memory that is kept between passes.
    ahead: Vec<Ahead>,
}

/// An input in pinned memory.
#[derive(Debug)]
struct Ahead {
    memory: Pinned,
    room: usize,
    /// Data that the memory is a copy of; `None` if it contains no input of this pass.
    of: Option<Arc<[u8]>>,
}

#[derive(Debug)]
struct Block {
    memory: Pinned,
    /// Streams that have copied from the block since it was free.
    readers: Vec<RawStream>,
    /// Events on these streams, recorded when the ring moved on from the block. The list may be
    /// longer than `readers` from an earlier use.
    read: Vec<Event>,
}

impl Block {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Pinned::new(context, BLOCK)?,
            readers: Vec::new(),
            read: Vec::new(),
        })
    }

    /// Marks that the ring has moved on from the block: all copies from it have been enqueued.
    fn leave(&mut self) -> Result<(), CudaError> {
        for (i, stream) in self.readers.iter().enumerate() {
            if i == self.read.len() {
                self.read.push(Event::new(false)?);
            }
            self.read[i].record(*stream)?;
        }
        Ok(())
    }

    /// Waits until the block, which the ring had moved on from, is free.
    fn wait(&mut self) -> Result<(), CudaError> {
        for (event, _) in self.read.iter().zip(&self.readers) {
            event.host_wait()?;
        }
        self.readers.clear();
        Ok(())
    }
}

impl Staging {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            ring: Ring::new(BLOCKS, BLOCK, ALIGN),
            blocks: Vec::new(),
            ahead: Vec::new(),
        }
    }

    /// Begins a pass with inputs on an idle device: all blocks are free.
    pub(crate) fn begin(&mut self, inputs: &[Arc<[u8]>]) {
        self.ring.reset();
        for block in &mut self.blocks {
            block.readers.clear();
        }
        for ahead in &mut self.ahead {
            ahead.of = None;
        }
        self.bring(inputs);
    }

    /// Copies inputs larger than a share into pinned memory, like a data loader. If the host has no
    /// pinned memory left, the inputs use the blocks.
    fn bring(&mut self, inputs: &[Arc<[u8]>]) {
        let mut total = 0;
        let large = inputs.iter().filter(|data| data.len() > SHARE);
        for (i, data) in large.enumerate() {
            total += data.len();
            if total > AHEAD {
                break;
            }
            if self.ahead.get(i).is_none_or(|a| a.room < data.len()) {
                // Memory that is too small is freed first.
                self.ahead.truncate(i);
                let Ok(memory) = Pinned::new(&self.context, data.len()) else {
                    break;
                };
                self.ahead.push(Ahead {
                    memory,
                    room: data.len(),
                    of: None,
                });
            }
            let ahead = &mut self.ahead[i];
            // SAFETY: the allocation has this length and has been initialized; nothing reads it,
            // since the device is idle.
            let room = unsafe { std::slice::from_raw_parts_mut(ahead.memory.ptr(), data.len()) };
            copy(room, data);
            ahead.of = Some(Arc::clone(data));
        }
    }

    /// Enqueues a copy of host data, which may change or be freed after this returns.
    pub(crate) fn upload(
        &mut self,
        mut data: &[u8],
        mut to: u64,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let is_same = |of: &Arc<[u8]>| std::ptr::eq(&raw const **of, data);
        let found = |a: &&Ahead| a.of.as_ref().is_some_and(is_same);
        if let Some(ahead) = self.ahead.iter().find(found) {
            return send(ahead.memory.ptr(), to, data.len(), stream);
        }
        while !data.is_empty() {
            let place = self.ring.place(data.len());
            let (piece, rest) = data.split_at(place.bytes);
            let from = self.stage(place, piece, stream)?;
            send(from, to, piece.len(), stream)?;
            to += piece.len() as u64;
            data = rest;
        }
        Ok(())
    }

    /// Copies a piece into its place in a block, from which the stream will read it.
    fn stage(
        &mut self,
        place: Place,
        piece: &[u8],
        stream: RawStream,
    ) -> Result<*const u8, CudaError> {
        if let Some(turn) = place.turn {
            self.blocks[turn.left].leave()?;
            if turn.wait {
                self.blocks[place.block].wait()?;
            }
        }
        if place.block == self.blocks.len() {
            self.blocks.push(Block::new(&self.context)?);
        }
        let block = &mut self.blocks[place.block];
        if !block.readers.contains(&stream) {
            block.readers.push(stream);
        }
        let start = block.memory.ptr().wrapping_add(place.offset);
        // SAFETY: the block has this space and has been initialized, and nothing else reads or
        // writes this part: the block was free at the start of the pass or when it was entered, and
        // the ring uses no part twice.
        let room = unsafe { std::slice::from_raw_parts_mut(start, piece.len()) };
        copy(room, piece);
        Ok(start)
    }
}

/// Copies with several threads, or with this thread if there is only one share.
fn copy(room: &mut [u8], data: &[u8]) {
    room.par_chunks_mut(SHARE)
        .zip(data.par_chunks(SHARE))
        .for_each(|(room, share)| room.copy_from_slice(share));
}

/// Enqueues a copy from pinned memory, which is not written again before the copy has completed.
fn send(from: *const u8, to: u64, bytes: usize, stream: RawStream) -> Result<(), CudaError> {
    // SAFETY: the source is staging memory, see above; the destination is the caller's.
    check("cuMemcpyHtoDAsync", unsafe {
        sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.0)
    })
}
