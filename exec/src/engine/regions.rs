//! Determines which allocator addresses need memory.
//!
//! Allocations follow from the program alone, so a dry run finds every address that a run will use.
//! Allocators spread their regions over a large address space; each region is backed by one range
//! of memory with room to grow.

use crate::device::Region;
use shardlab_plan::memory::Memory;
use shardlab_plan::program::{Op, Program, SectionKind};
use shardlab_plan::units::Bytes;

const MIB: u64 = 1 << 20;
/// Ranges closer than this, in bytes, share a region.
const JOIN: u64 = 32 * MIB;
/// Bytes to grow at the end of a region, in addition to a quarter of its size. Untouched pages cost
/// nothing.
const ROOM: u64 = 64 * MIB;
const PAGE: u64 = 4096;

/// Passes of the dry run: until steady steps repeat, with validation at several places.
const PASSES: [SectionKind; 13] = {
    use SectionKind::{First, Init, Steady, Validation};
    [
        Init, First, Steady, Steady, Steady, Validation, Steady, Steady, Validation, Validation,
        Steady, Steady, Steady,
    ]
};

/// Returns the regions of a program, ascending and disjoint. If the capacity is insufficient, they
/// end where it is reached.
pub(crate) fn regions(program: &Program, capacity: Option<Bytes>) -> Vec<Region> {
    let mut ranges = Vec::new();
    let mut memory = Memory::new(program, capacity);
    'run: for kind in PASSES {
        let Some(section) = program.section(kind) else {
            continue;
        };
        for instr in program.section_instrs(section) {
            match instr.op {
                Op::Alloc(id) => {
                    let Ok(address) = memory.alloc(program, id) else {
                        break 'run;
                    };
                    let bytes = program.buffers[id.index()]
                        .bytes
                        .max(memory.block_bytes(id))
                        .0;
                    if program.buffers[id.index()].bytes > Bytes::ZERO {
                        ranges.push((address, address + bytes));
                    }
                }
                Op::Free(id) => {
                    memory.free(program, id);
                }
                _ => {}
            }
        }
    }
    merge(ranges)
}

fn merge(mut ranges: Vec<(u64, u64)>) -> Vec<Region> {
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match merged.last_mut() {
            Some((_, last, used)) if start <= last.saturating_add(JOIN) => {
                *used += end.max(*last) - start.max(*last);
                *last = end.max(*last);
            }
            _ => merged.push((start, end, end - start)),
        }
    }
    let mut regions: Vec<Region> = Vec::with_capacity(merged.len());
    for (i, &(start, end, used)) in merged.iter().enumerate() {
        let limit = merged
            .get(i + 1)
            .map_or(u64::MAX, |next| next.0 / PAGE * PAGE);
        let start = start / PAGE * PAGE;
        let wanted = end.saturating_add((end - start) / 4).saturating_add(ROOM);
        regions.push(Region {
            addresses: start..wanted.min(limit),
            used,
            touched: end,
        });
    }
    regions
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::memory::HOST_BASE;
    use shardlab_plan::memory::pool::POOL_BASE;

    #[test]
    fn close_ranges_share_a_region_and_far_ones_do_not() {
        let far = 1 << 62;
        let r = merge(vec![
            (20 * MIB, 21 * MIB),
            (far, far + 512),
            (20 * MIB + 512, 20 * MIB + 1024),
            (23 * MIB, 24 * MIB),
        ]);
        assert_eq!(r.len(), 2);
        // Two mebibytes are used: the second range is within the first, and the gap is unused.
        assert_eq!((r[0].addresses.start, r[0].used), (20 * MIB, 2 * MIB));
        assert_eq!(r[0].addresses.end, 24 * MIB + MIB + ROOM);
        assert_eq!((r[1].addresses.start, r[1].used), (far, 512));
    }

    #[test]
    fn room_to_grow_stops_at_the_next_region() {
        let r = merge(vec![(0, 100 * MIB), (140 * MIB, 141 * MIB)]);
        assert_eq!(r.len(), 2);
        assert_eq!(r[0].addresses, 0..140 * MIB);
    }

    /// A device that backs the used addresses takes the memory that a prediction says allocators
    /// reserve.
    #[test]
    fn what_is_backed_is_what_is_reserved() {
        const GRANULE: u64 = 2 * MIB;
        for (name, sets) in [
            ("peers-1b", &["fsdp.policy=\"native\""][..]),
            (
                "peers-1b",
                &[
                    "fsdp.policy=\"native\"",
                    "compile.mode=\"regions\"",
                    "train.loss=\"chunked\"",
                ],
            ),
            (
                "peers-1b",
                &[
                    "fsdp.policy=\"native\"",
                    "compile.cuda_graph=\"full_iteration\"",
                ],
            ),
            (
                "peers-1b",
                &["fsdp.policy=\"native\"", "fsdp.allocator=\"caching\""],
            ),
            ("peers-1b", &[]),
            ("peers-1b", &["fsdp.policy=\"megatron\""]),
            ("peers-tiny", &[]),
            ("peers-tiny", &["fsdp.policy=\"native\""]),
            (
                "peers-tiny",
                &["fsdp.policy=\"native\"", "train.recompute=\"full\""],
            ),
            ("peers-3b", &["fsdp.policy=\"native\""]),
        ] {
            let sets: Vec<String> = sets.iter().map(|&s| s.to_owned()).collect();
            let scenario = shardlab_plan::scenario::load(name.as_ref(), &sets).unwrap();
            let program = shardlab_plan::plan(&scenario).unwrap();
            let mut memory = Memory::new(&program, None);
            let mut reserved = 0;
            for kind in PASSES {
                let section = program.section(kind);
                let instrs = section.map(|s| program.section_instrs(s));
                for instr in instrs.unwrap_or_default() {
                    match instr.op {
                        Op::Alloc(id) => drop(memory.alloc(&program, id).unwrap()),
                        Op::Free(id) => drop(memory.free(&program, id)),
                        _ => {}
                    }
                    reserved = reserved.max(memory.counters().reserved.0);
                }
            }
            let backed: u64 = regions(&program, None)
                .iter()
                .filter(|r| !(HOST_BASE..POOL_BASE).contains(&r.addresses.start))
                .map(|r| {
                    r.touched.next_multiple_of(GRANULE) - r.addresses.start / GRANULE * GRANULE
                })
                .sum();
            let off = backed as f64 / reserved as f64 - 1.0;
            assert!(off.abs() < 0.01, "{name} {sets:?}: {backed} of {reserved}");
        }
    }
}
