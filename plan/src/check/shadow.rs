//! Shadow memory of the walk: the last write of every range of every buffer, the reads since then,
//! and the earlier users of an address.

use super::clock::{LANES, Times, Use};
use super::state::Reduced;
use crate::ir::{BufferId, InstrId};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// A range whose bytes share one history.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// First byte within the buffer.
    pub(super) start: u64,
    /// One past the last.
    pub(super) end: u64,
    /// Last write in this lifetime. Position 0 means none.
    pub(super) writer: Use,
    /// Whether it had content before any write (inputs, state from `Init`).
    pub(super) filled: bool,
    /// Reads since the last write: the last one on each lane.
    pub(super) reads: SmallVec<[Use; 2]>,
    /// Number of optimizer steps that these weights carry; `u32::MAX` for buffers without weights.
    pub(super) version: u32,
    /// Axes over which this gradient has been reduced.
    pub(super) reduced: Reduced,
    /// Whether the write wrote zeros, which need no reader.
    pub(super) zeros: bool,
}

impl Segment {
    fn new(bytes: u64, filled: bool, version: u32) -> Self {
        Self {
            start: 0,
            end: bytes,
            writer: Use::default(),
            filled,
            reads: SmallVec::new(),
            version,
            reduced: Reduced::NONE,
            zeros: false,
        }
    }

    /// Records a read.
    #[inline]
    pub(super) fn read_by(&mut self, u: Use) {
        match self.reads.iter_mut().find(|r| r.lane == u.lane) {
            Some(r) => r.at = u.at,
            None => self.reads.push(u),
        }
    }

    /// Returns whether a written value has not been read yet.
    pub(super) fn unread(&self) -> bool {
        self.writer.at != 0 && self.reads.is_empty() && !self.zeros
    }
}

/// Effect of a write on zeros, which need no reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Zeros {
    /// Writes only zeros.
    Made,
    /// Leaves them as they are: scaling and summing in place.
    Kept,
    /// Overwrites them.
    Gone,
}

/// Uses of an address range by an earlier tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tenant {
    /// Tenant.
    pub(super) buffer: BufferId,
    /// First address.
    pub(super) start: u64,
    /// One past the last.
    pub(super) end: u64,
    /// Last use of every lane.
    pub(super) last: Times,
}

/// State of one buffer.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    /// Whether it is allocated now.
    pub(super) live: bool,
    /// Instruction that allocated it last.
    pub(super) allocated: Option<InstrId>,
    /// Instruction that freed it last.
    pub(super) freed: Option<InstrId>,
    /// Address.
    pub(super) address: u64,
    /// History of its ranges, in order, without gaps.
    pub(super) segments: Vec<Segment>,
    /// Last use of every lane in this lifetime.
    pub(super) last: Times,
    /// Earlier tenants of its addresses.
    pub(super) before: SmallVec<[Tenant; 1]>,
    /// Lanes (as bits) that are known to run after all earlier tenants.
    pub(super) cleared: u32,
    /// Last reduction that read it in this lifetime.
    pub(super) reduction: Use,
}

impl Cell {
    /// Starts a lifetime.
    pub(super) fn start(
        &mut self,
        instr: InstrId,
        address: u64,
        bytes: u64,
        filled: bool,
        version: u32,
    ) {
        self.live = true;
        self.allocated = Some(instr);
        self.address = address;
        self.segments.clear();
        if bytes > 0 {
            self.segments.push(Segment::new(bytes, filled, version));
        }
        self.last = [0; LANES];
        self.before.clear();
        self.cleared = 0;
        self.reduction = Use::default();
    }

    /// Splits the segments at `start` and `end` (`start < end <= bytes`). Returns the indices of
    /// the segments between them.
    pub(super) fn split(&mut self, start: u64, end: u64) -> std::ops::Range<usize> {
        let s = &mut self.segments;
        let mut i = if s.len() > 8 {
            s.partition_point(|x| x.end <= start)
        } else {
            s.iter().position(|x| x.end > start).unwrap_or(s.len())
        };
        if s[i].start < start {
            let mut right = s[i].clone();
            s[i].end = start;
            right.start = start;
            i += 1;
            s.insert(i, right);
        }
        let mut j = i;
        while s[j].end < end {
            j += 1;
        }
        if s[j].end > end {
            let mut right = s[j].clone();
            s[j].end = end;
            right.start = end;
            s.insert(j + 1, right);
        }
        i..j + 1
    }

    /// Replaces segments by a new write: a single segment, except that zeros that remain zeros keep
    /// their segments.
    pub(super) fn overwrite(
        &mut self,
        range: std::ops::Range<usize>,
        by: Use,
        version: u32,
        reduced: Reduced,
        zeros: Zeros,
    ) {
        let before = &self.segments[range.clone()];
        let was = before[0].zeros;
        let split = zeros == Zeros::Kept && before.iter().any(|s| s.zeros != was);
        let last = if split { range.end } else { range.start + 1 };
        let end = before[before.len() - 1].end;
        for s in &mut self.segments[range.start..last] {
            s.writer = by;
            s.filled = true;
            s.reads.clear();
            s.version = version;
            s.reduced = reduced;
            s.zeros = zeros == Zeros::Made || (zeros == Zeros::Kept && s.zeros);
        }
        if !split {
            self.segments[range.start].end = end;
            self.segments.drain(last..range.end);
        }
    }
}

/// Known users of a range of addresses.
#[derive(Clone, Debug)]
struct Span {
    tenant: Tenant,
    live: bool,
}

/// The current or last user of every address of one address space.
#[derive(Clone, Debug, Default)]
pub(super) struct Space {
    /// By first address, disjoint.
    spans: BTreeMap<u64, Span>,
}

impl Space {
    /// Registers a buffer at its addresses. Appends their earlier tenants, and returns a tenant
    /// that is still live at these addresses.
    pub(super) fn enter(
        &mut self,
        buffer: BufferId,
        address: u64,
        bytes: u64,
        before: &mut SmallVec<[Tenant; 1]>,
    ) -> Option<BufferId> {
        let mut holder = None;
        let tenant = Tenant {
            buffer,
            start: address,
            end: address + bytes,
            last: [0; LANES],
        };
        self.replace(Span { tenant, live: true }, |s| {
            if s.live {
                holder = Some(s.tenant.buffer);
            }
            before.push(s.tenant);
        });
        holder
    }

    /// Removes a buffer and stores its last uses. A buffer that was never touched restores the uses
    /// that it found.
    pub(super) fn leave(
        &mut self,
        buffer: BufferId,
        address: u64,
        bytes: u64,
        last: &Times,
        before: &[Tenant],
        cleared: bool,
    ) {
        let own = |start, end| Span {
            tenant: Tenant {
                buffer,
                start,
                end,
                last: *last,
            },
            live: false,
        };
        let (start, end) = (address, address + bytes);
        self.replace(own(start, end), |_| ());
        if cleared || before.is_empty() {
            return;
        }
        // No lane is known to run after the earlier tenants, so later work must wait for both.
        for earlier in before {
            let mut tenant = *earlier;
            for (a, b) in tenant.last.iter_mut().zip(last) {
                *a = (*a).max(*b);
            }
            let live = false;
            self.replace(Span { tenant, live }, |_| ());
        }
    }

    /// Replaces the known users of a span's addresses, and keeps the parts outside. Calls `removed`
    /// with the replaced parts, clipped to the span.
    fn replace(&mut self, span: Span, mut removed: impl FnMut(&Span)) {
        let (start, end) = (span.tenant.start, span.tenant.end);
        if start >= end {
            return;
        }
        // Most buffers replace one of equal size.
        if let Some(there) = self.spans.get_mut(&start)
            && there.tenant.end == end
        {
            removed(there);
            *there = span;
            return;
        }
        self.carve(start, end, removed);
        self.spans.insert(start, span);
    }

    /// Removes the known users of `[start, end)`, and keeps the parts outside. Calls `removed` with
    /// the removed parts, clipped to the range.
    fn carve(&mut self, start: u64, end: u64, mut removed: impl FnMut(&Span)) {
        let first = self
            .spans
            .range(..=start)
            .next_back()
            .map_or(start, |(&k, _)| k);
        let keys: SmallVec<[u64; 4]> = self
            .spans
            .range(first..end)
            .filter(|(_, s)| s.tenant.end > start)
            .map(|(&k, _)| k)
            .collect();
        for k in keys {
            let Some(mut s) = self.spans.remove(&k) else {
                continue;
            };
            if k < start {
                let mut left = s.clone();
                left.tenant.end = start;
                self.spans.insert(k, left);
                s.tenant.start = start;
            }
            if s.tenant.end > end {
                let mut right = s.clone();
                right.tenant.start = end;
                self.spans.insert(end, right);
                s.tenant.end = end;
            }
            removed(&s);
        }
    }
}
