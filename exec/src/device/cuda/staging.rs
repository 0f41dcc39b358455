//! Pinned memory through which host data go to the device.

use super::context::Context;
use super::driver::{CudaError, RawStream, check};
use super::memory::Pinned;
use cudarc::driver::sys;
use std::sync::Arc;

/// Size of a block.
const BLOCK: usize = 8 << 20;
/// Data beyond this are rare (a resumed run's states); the driver stages them itself.
const LARGE: usize = BLOCK;
const ALIGN: usize = 256;

/// Blocks that are filled one after another during a pass and are all free at its start.
#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    blocks: Vec<Pinned>,
    /// The block being filled, and how full it is.
    at: (usize, usize),
}

impl Staging {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            blocks: Vec::new(),
            at: (0, 0),
        }
    }

    /// The device has come to rest: everything is free.
    pub(crate) fn reset(&mut self) {
        self.at = (0, 0);
    }

    /// Enqueues a copy of host data; they may change or vanish once this returns.
    pub(crate) fn upload(
        &mut self,
        data: &[u8],
        to: u64,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let from = if data.len() > LARGE {
            data.as_ptr()
        } else {
            self.stage(data)?
        };
        // SAFETY: the source is pageable memory, which the driver has read when it returns, or a staging block that is not
        // written again before the device comes to rest; the destination is the caller's.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), data.len(), stream.0)
        })
    }

    fn stage(&mut self, data: &[u8]) -> Result<*const u8, CudaError> {
        let (mut block, mut offset) = self.at;
        if offset + data.len() > BLOCK {
            (block, offset) = (block + 1, 0);
        }
        if block == self.blocks.len() {
            self.blocks.push(Pinned::new(&self.context, BLOCK)?);
        }
        let place = self.blocks[block].ptr().wrapping_add(offset);
        // SAFETY: the block has room, and nothing reads this part of it: it was free at the start of the pass.
        unsafe { place.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        self.at = (block, (offset + data.len()).next_multiple_of(ALIGN));
        Ok(place)
    }
}
