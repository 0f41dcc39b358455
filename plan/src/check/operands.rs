//! Memory ranges of the operands of a kernel's body.

use crate::ir::{Access, BufferId, Place, Slot};
use crate::program::{Op, Program};
use std::collections::BTreeMap;

/// Returns the range of a launch that contains a slot; `None` for a register.
pub(super) fn range(p: &Program, launch: &Op, slot: &Slot) -> Option<Access> {
    let (ranges, n) = match slot.place {
        Place::Read(n) => (p.reads(launch), n),
        Place::Write(n) => (p.writes(launch), n),
        Place::Register(_) => return None,
    };
    ranges.get(usize::from(n)).copied()
}

/// Facts about ranges of memory. Each is valid until the range is written again or freed.
#[derive(Clone, Debug)]
pub(super) struct Ranges<T>(BTreeMap<BufferId, Vec<(Access, T)>>);

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Ranges<T> {
    /// Returns the fact about the first range that shares bytes with this one.
    pub(super) fn get(&self, at: Access) -> Option<&T> {
        let of_buffer = self.0.get(&at.buffer)?;
        let found = of_buffer.iter().find(|(known, _)| overlap(*known, at));
        found.map(|(_, fact)| fact)
    }

    /// Replaces the facts about all ranges within this one.
    pub(super) fn set(&mut self, at: Access, fact: Option<T>) {
        let end = |a: Access| a.offset + a.bytes;
        let within = |known: Access| known.offset >= at.offset && end(known) <= end(at);
        if let Some(of_buffer) = self.0.get_mut(&at.buffer) {
            of_buffer.retain(|(known, _)| !within(*known));
        }
        if let Some(fact) = fact {
            self.0.entry(at.buffer).or_default().push((at, fact));
        }
    }

    /// Forgets a buffer.
    pub(super) fn forget(&mut self, buffer: BufferId) {
        self.0.remove(&buffer);
    }
}

/// Returns whether two ranges of a buffer share bytes.
const fn overlap(a: Access, b: Access) -> bool {
    a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}
