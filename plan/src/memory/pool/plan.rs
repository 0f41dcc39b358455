//! Slots for keys: offline dynamic storage allocation.
//!
//! The largest key comes first, and each key gets the lowest address that is free during all its
//! lifetimes. No plan can need less than the maximum number of bytes that are live at the same
//! time. For traces of training steps, the result is a few percent above that.

use super::lifetimes::Lifetime;
use super::occupancy::Occupancy;
use crate::units::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;

/// Minimum alignment of a slot, which is the alignment that devices provide and kernels expect.
const ALIGN: u64 = 512;

/// Slot of a key in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Key.
    pub key: u32,
    /// First byte, relative to the start of the pool.
    pub offset: u64,
    /// Size: the largest request in the trace.
    pub bytes: Bytes,
}

/// Fixed slots for keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolPlan {
    /// By key.
    slots: Vec<Slot>,
    total: Bytes,
    most_live: Bytes,
}

impl PoolPlan {
    /// Plans slots for all keys in `lifetimes`. Two keys that are live at the same time never share
    /// an address.
    ///
    /// The result is deterministic: equal lifetimes give equal plans.
    #[must_use]
    pub fn plan(lifetimes: &[Lifetime]) -> Self {
        let mut keys = Keys::collect(lifetimes);
        let lives = Columns::of(lifetimes, &keys);
        let mut most_live = 0;
        let mut top = 0;
        for key in keys.table.iter_mut().filter(|k| k.forever) {
            key.offset = top;
            // Persistent slots come first, in order of their keys.
            top = (key.offset + key.bytes).next_multiple_of(key.align);
            most_live += key.bytes;
        }
        let bottom =
            top.next_multiple_of(keys.table.iter().map(|k| k.align).max().unwrap_or(ALIGN));
        if keys.table.iter().any(|k| !k.forever) {
            top = bottom;
        }

        let mut order: Vec<(u64, u32, u32)> = (0..)
            .zip(&keys.table)
            .filter(|(_, k)| !k.forever && k.bytes > 0)
            .map(|(i, k)| (u64::MAX - k.bytes, u32::MAX - lives.columns(i), i))
            .collect();
        order.sort_unstable();
        let mut occupancy = Occupancy::new(lives.count);
        for (_, _, i) in order {
            let key = &mut keys.table[i as usize];
            let offset = occupancy.lowest_gap(lives.of_key(i), key.bytes, key.align);
            for columns in lives.of_key(i) {
                occupancy.take(columns.clone(), offset, offset + key.bytes);
            }
            key.offset = bottom + offset;
            top = top.max(key.offset + key.bytes);
        }
        most_live += lives.most_live(&keys);
        let slots = keys
            .table
            .iter()
            .map(|k| Slot {
                key: k.key,
                offset: k.offset,
                bytes: Bytes(k.bytes),
            })
            .collect();
        Self {
            slots,
            total: Bytes(top),
            most_live: Bytes(most_live),
        }
    }

    /// Plans one region per stream and stacks the regions. Keys of different streams never share an
    /// address, because a free in host order does not show when another stream's kernels have run.
    /// Every key belongs to one region.
    #[must_use]
    pub fn by_stream(lifetimes: impl IntoIterator<Item = Vec<Lifetime>>) -> Self {
        let mut all = Self::default();
        for region in lifetimes {
            let plan = Self::plan(&region);
            let align = region.iter().map(alignment).max().unwrap_or(ALIGN);
            let base = all.total.round_up(align).0;
            all.slots.extend(plan.slots.into_iter().map(|s| Slot {
                offset: base + s.offset,
                ..s
            }));
            all.total = Bytes(base) + plan.total;
            all.most_live += plan.most_live;
        }
        all.slots.sort_unstable_by_key(|s| s.key);
        all
    }

    /// Returns the slots by key.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Returns the index of a key's slot in [`PoolPlan::slots`].
    #[must_use]
    pub fn index(&self, key: u32) -> Option<usize> {
        self.slots.binary_search_by_key(&key, |s| s.key).ok()
    }

    /// Returns the bytes of the pool.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.total
    }

    /// Returns the maximum number of bytes in slots that are live at the same time, summed over the
    /// regions. No plan needs fewer.
    #[must_use]
    pub fn most_live(&self) -> Bytes {
        self.most_live
    }
}

#[derive(Clone, Copy, Debug)]
struct Key {
    key: u32,
    bytes: u64,
    align: u64,
    forever: bool,
    offset: u64,
}

/// Returns the alignment of a slot that serves this lifetime.
fn alignment(life: &Lifetime) -> u64 {
    u64::from(life.align).next_power_of_two().max(ALIGN)
}

/// Keys in ascending order, and the index of each lifetime's key.
struct Keys {
    table: Vec<Key>,
    of_life: Vec<u32>,
}

impl Keys {
    fn collect(lifetimes: &[Lifetime]) -> Self {
        let index = Self::index(lifetimes);
        let mut table: Vec<Key> = Vec::new();
        let mut of_life = Vec::with_capacity(lifetimes.len());
        // Keeps every sum below 2^62. No scenario's buffers reach that, and buffers of 16 TiB do
        // not fit on any device either.
        let sum: u128 = lifetimes.iter().map(|l| u128::from(l.bytes.0)).sum();
        let most = if sum < 1 << 61 { 1 << 61 } else { 1 << 44 };
        for life in lifetimes {
            let i = index(life.key);
            if table.len() <= i as usize {
                table.resize(
                    i as usize + 1,
                    Key {
                        key: 0,
                        bytes: 0,
                        align: ALIGN,
                        forever: false,
                        offset: 0,
                    },
                );
            }
            let key = &mut table[i as usize];
            key.key = life.key;
            key.bytes = key
                .bytes
                .max(life.bytes.0.min(most).next_multiple_of(ALIGN));
            key.align = key.align.max(alignment(life));
            key.forever |= life.end == Lifetime::FOREVER;
            of_life.push(i);
        }
        Self { table, of_life }
    }

    /// Returns a function that computes the rank of a key among all keys.
    fn index(lifetimes: &[Lifetime]) -> impl Fn(u32) -> u32 + use<> {
        let mut distinct: Vec<u32> = lifetimes.iter().map(|l| l.key).collect();
        distinct.sort_unstable();
        distinct.dedup();
        // Keys are usually small numbers, so a table replaces the search.
        let dense = distinct
            .last()
            .is_some_and(|&max| (max as usize) < 8 * lifetimes.len() + 1024);
        let mut table = Vec::new();
        if dense {
            table = vec![0; distinct.last().map_or(0, |&max| max as usize + 1)];
            for (rank, &key) in (0..).zip(&distinct) {
                table[key as usize] = rank;
            }
        }
        move |key| {
            if dense {
                table[key as usize]
            } else {
                distinct.partition_point(|&k| k < key) as u32
            }
        }
    }
}

/// Lifetimes on a time axis with one column for each. A lifetime spans the columns of all lifetimes
/// that start within it.
///
/// Keys that live forever are left out. So are periods of time that repeat an earlier one (every
/// micro-batch, the second step), because they add no conflict.
struct Columns {
    count: usize,
    /// Spans grouped by key.
    spans: Vec<Range<u32>>,
    /// Start of each key's spans in `spans`. There is one more entry than there are keys.
    first: Vec<u32>,
}

impl Columns {
    fn of(lifetimes: &[Lifetime], keys: &Keys) -> Self {
        let mut lives: Vec<(u32, u32, u32)> = lifetimes
            .iter()
            .zip(&keys.of_life)
            .filter(|(_, k)| !keys.table[**k as usize].forever)
            .map(|(l, &k)| (l.start, l.end.max(l.start.saturating_add(1)), k))
            .collect();
        if !lives.is_sorted_by_key(|l| l.0) {
            lives.sort_by_key(|l| l.0);
        }
        drop_repetitions(&mut lives);

        let mut first = vec![0u32; keys.table.len() + 1];
        for l in &lives {
            first[l.2 as usize + 1] += 1;
        }
        for k in 1..first.len() {
            first[k] += first[k - 1];
        }
        let mut fill = first.clone();
        let mut spans = vec![0..0; lives.len()];
        for (column, &(_, end, key)) in (0u32..).zip(&lives) {
            let after = &lives[column as usize + 1..];
            let until = column + 1 + after.partition_point(|l| l.0 < end) as u32;
            let at = &mut fill[key as usize];
            spans[*at as usize] = column..until;
            *at += 1;
        }
        Self {
            count: lives.len(),
            spans,
            first,
        }
    }

    fn of_key(&self, key: u32) -> &[Range<u32>] {
        &self.spans[self.first[key as usize] as usize..self.first[key as usize + 1] as usize]
    }

    fn columns(&self, key: u32) -> u32 {
        self.of_key(key).iter().map(|c| c.end - c.start).sum()
    }

    /// Returns the maximum number of bytes that are live in one column.
    fn most_live(&self, keys: &Keys) -> u64 {
        let mut change = vec![(0u64, 0u64); self.count + 1];
        for (i, key) in (0..).zip(&keys.table) {
            for columns in self.of_key(i) {
                change[columns.start as usize].0 += key.bytes;
                change[columns.end as usize].1 += key.bytes;
            }
        }
        let mut live = 0;
        change.into_iter().fold(0, |most, (more, less)| {
            live = live + more - less;
            most.max(live)
        })
    }
}

/// Of equal periods of time between moments in which nothing is live, keeps only one.
fn drop_repetitions(lives: &mut Vec<(u32, u32, u32)>) {
    let mut seen: BTreeMap<u64, Vec<Range<usize>>> = BTreeMap::new();
    let mut keep = vec![true; lives.len()];
    let mut from = 0;
    while from < lives.len() {
        let mut until = from + 1;
        let mut end = lives[from].1;
        while until < lives.len() && lives[until].0 < end {
            end = end.max(lives[until].1);
            until += 1;
        }
        let origin = lives[from].0;
        let shape = |r: Range<usize>| {
            let origin = lives[r.start].0;
            lives[r]
                .iter()
                .map(move |l| (l.0 - origin, l.1 - origin, l.2))
        };
        let mut hash = (until - from) as u64;
        for l in &lives[from..until] {
            let word = u64::from(l.1 - origin) << 32 | u64::from(l.2);
            hash = (hash ^ word)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .rotate_left(29);
        }
        let alike = seen.entry(hash).or_default();
        if alike
            .iter()
            .any(|r| shape(r.clone()).eq(shape(from..until)))
        {
            keep[from..until].fill(false);
        } else {
            alike.push(from..until);
        }
        from = until;
    }
    let mut kept = keep.into_iter();
    lives.retain(|_| kept.next().unwrap_or(true));
}
