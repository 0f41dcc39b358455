//! Access of the host to buffers between passes.

use super::{POISON, Pending, Rank};
use crate::base::operand::RawRange;
use crate::device::Device;
use shardlab_plan::ir::BufferId;
use std::sync::Arc;

impl<D: Device> Rank<D> {
    /// Sets the contents of a buffer at its next allocation, or now if it is allocated already
    /// (resident state in host memory).
    pub(crate) fn preset(&mut self, buffer: BufferId, data: Arc<[u8]>) {
        if self.write(buffer, 0, &data).is_none() {
            self.buffers.presets.insert(buffer, data);
        }
    }

    /// Returns a range of a live buffer. The device is idle.
    pub(crate) fn live_range(&self, buffer: BufferId, offset: u64, bytes: u64) -> Option<RawRange> {
        let b = self.program.buffers.get(buffer.index())?;
        let base = self.buffers.base[buffer.index()];
        let fits = offset.checked_add(bytes)? <= b.bytes.0;
        (base != 0 && fits).then(|| RawRange {
            ptr: std::ptr::with_exposed_provenance_mut(base + offset as usize),
            bytes: bytes as usize,
            dtype: b.dtype,
        })
    }

    /// Reads a live buffer: what its first use would see, if that has not happened yet. The device
    /// is idle.
    pub(crate) fn read(&self, buffer: BufferId, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        let range = self.live_range(buffer, offset, bytes)?;
        Some(match self.buffers.pending[buffer.index()] {
            Pending::Nothing => self.device.read(range),
            Pending::Zero => vec![0; range.bytes],
            Pending::Poison => vec![POISON; range.bytes],
            Pending::Preset => {
                let from = offset as usize;
                self.buffers.presets.get(&buffer)?[from..from + range.bytes].to_vec()
            }
        })
    }

    /// Writes a live buffer. The device is idle.
    pub(crate) fn write(&mut self, buffer: BufferId, offset: u64, data: &[u8]) -> Option<()> {
        let range = self.live_range(buffer, offset, data.len() as u64)?;
        if self.buffers.pending[buffer.index()] != Pending::Nothing {
            let size = self.program.buffers[buffer.index()].bytes.0;
            let whole = self.live_range(buffer, 0, size)?;
            let now = self.read(buffer, 0, size)?;
            self.device.write(whole, &now);
            self.buffers.pending[buffer.index()] = Pending::Nothing;
            self.buffers.presets.remove(&buffer);
        }
        self.device.write(range, data);
        Some(())
    }
}
