//! Pinned memory through which host data go to the device.
//!
//! The GPU reads it at the full rate of its link, and on its own, so the host copies the next piece of large data meanwhile.

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
/// Blocks at most, 64 MiB: an image batch's worth. Whoever sends more (a resumed run's states) waits for the first ones.
const BLOCKS: usize = 8;
const ALIGN: usize = 256;
/// Bytes that one thread copies at a time: one alone takes 5 ms for 50 MB, the link 1 to 2.
const SHARE: usize = 1 << 20;

/// Bytes of inputs that are brought before a pass: more of them go through the blocks.
const AHEAD: usize = 512 << 20;

/// Blocks that are filled one after another during a pass and are all free at its start, and inputs that were there before it.
#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    ring: Ring,
    blocks: Vec<Block>,
    /// By input of the pass, memory that is kept from pass to pass.
    ahead: Vec<Ahead>,
}

/// An input that lies in pinned memory.
#[derive(Debug)]
struct Ahead {
    memory: Pinned,
    room: usize,
    /// What it is a copy of; nothing if it is of none of this pass.
    of: Option<Arc<[u8]>>,
}

#[derive(Debug)]
struct Block {
    memory: Pinned,
    /// Streams with copies out of it since it was free.
    readers: Vec<RawStream>,
    /// Recorded on the readers when it was left, one each; more are there if it once had more readers.
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

    /// Everything that will be read from it until it is free again has been enqueued.
    fn leave(&mut self) -> Result<(), CudaError> {
        for (i, stream) in self.readers.iter().enumerate() {
            if i == self.read.len() {
                self.read.push(Event::new(false)?);
            }
            self.read[i].record(*stream)?;
        }
        Ok(())
    }

    /// Waits until it is free; it has been left.
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

    /// A pass with these inputs comes, and the device is at rest: everything is free.
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

    /// Copies inputs larger than a share into pinned memory, as loaders of data do. Where the host has no more such memory they
    /// go through the blocks.
    fn bring(&mut self, inputs: &[Arc<[u8]>]) {
        let mut total = 0;
        let large = inputs.iter().filter(|data| data.len() > SHARE);
        for (i, data) in large.enumerate() {
            total += data.len();
            if total > AHEAD {
                break;
            }
            if self.ahead.get(i).is_none_or(|a| a.room < data.len()) {
                // Memory that is too small is given back first.
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
            // SAFETY: so many bytes were allocated and hold numbers since; nothing reads them, for the device is at rest.
            let room = unsafe { std::slice::from_raw_parts_mut(ahead.memory.ptr(), data.len()) };
            copy(room, data);
            ahead.of = Some(Arc::clone(data));
        }
    }

    /// Enqueues a copy of host data; they may change or vanish once this returns.
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

    /// Puts a piece into its place, from where the stream reads it next.
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
        // SAFETY: the block has room, holds numbers since it was made, and nothing else reads or writes this part of it: it was
        // free at the start of the pass or when it was entered, and the ring gives no part away twice.
        let room = unsafe { std::slice::from_raw_parts_mut(start, piece.len()) };
        copy(room, piece);
        Ok(start)
    }
}

/// Copies by several threads; a single share by this one.
fn copy(room: &mut [u8], data: &[u8]) {
    room.par_chunks_mut(SHARE)
        .zip(data.par_chunks(SHARE))
        .for_each(|(room, share)| room.copy_from_slice(share));
}

/// Enqueues a copy of pinned memory that is not written again before it is done.
fn send(from: *const u8, to: u64, bytes: usize, stream: RawStream) -> Result<(), CudaError> {
    // SAFETY: the source is staging memory, see above; the destination is the caller's.
    check("cuMemcpyHtoDAsync", unsafe {
        sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.0)
    })
}
