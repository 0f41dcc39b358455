//! Access of the host to buffers between passes.

use super::{POISON, Pending, Rank};
use crate::device::Device;
use crate::operand::RawRange;
use shardlab_plan::ir::BufferId;
use std::sync::Arc;

impl<D: Device> Rank<D> {
    /// Contents that a buffer gets when it is allocated next; at once where it is allocated already (state that rests in
    /// host memory).
    pub(crate) fn preset(&mut self, buffer: BufferId, data: Arc<[u8]>) {
        if self.write(buffer, 0, &data).is_none() {
            self.presets.insert(buffer, data);
        }
    }

    /// A range of a live buffer while the device is idle.
    pub(crate) fn live_range(&self, buffer: BufferId, offset: u64, bytes: u64) -> Option<RawRange> {
        let b = self.program.buffers.get(buffer.index())?;
        let base = self.base[buffer.index()];
        let fits = offset.checked_add(bytes)? <= b.bytes.0;
        (base != 0 && fits).then(|| RawRange {
            ptr: std::ptr::with_exposed_provenance_mut(base + offset as usize),
            bytes: bytes as usize,
            dtype: b.dtype,
        })
    }

    /// Bytes of a live buffer while the device is idle: what its first use would see, if that is still to come.
    pub(crate) fn read(&self, buffer: BufferId, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        let range = self.live_range(buffer, offset, bytes)?;
        Some(match self.pending[buffer.index()] {
            Pending::Nothing => self.device.read(range),
            Pending::Zero => vec![0; range.bytes],
            Pending::Poison => vec![POISON; range.bytes],
            Pending::Preset => {
                let from = offset as usize;
                self.presets.get(&buffer)?[from..from + range.bytes].to_vec()
            }
        })
    }

    /// Writes bytes of a live buffer while the device is idle.
    pub(crate) fn write(&mut self, buffer: BufferId, offset: u64, data: &[u8]) -> Option<()> {
        let range = self.live_range(buffer, offset, data.len() as u64)?;
        if self.pending[buffer.index()] != Pending::Nothing {
            let size = self.program.buffers[buffer.index()].bytes.0;
            let whole = self.live_range(buffer, 0, size)?;
            let now = self.read(buffer, 0, size)?;
            self.device.write(whole, &now);
            self.pending[buffer.index()] = Pending::Nothing;
            self.presets.remove(&buffer);
        }
        self.device.write(range, data);
        Some(())
    }
}
