use super::*;
use crate::ir::COMPUTE;
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const SIDE: StreamId = StreamId(1);

fn native() -> CachingAllocator {
    CachingAllocator::new(false, None)
}

fn expandable() -> CachingAllocator {
    CachingAllocator::new(true, None)
}

fn take(a: &mut CachingAllocator, bytes: u64) -> BlockId {
    a.take(Bytes(bytes), COMPUTE).unwrap()
}

fn address(a: &CachingAllocator, b: BlockId) -> u64 {
    a.block(b).address
}

/// Returns (requested, allocated, reserved).
fn counters(a: &CachingAllocator) -> (u64, u64, u64) {
    let c = a.counters();
    (c.requested.0, c.allocated.0, c.reserved.0)
}

#[test]
fn requests_round_to_512() {
    let mut a = native();
    take(&mut a, 1);
    assert_eq!(counters(&a), (1, 512, 2 * MIB));
    take(&mut a, 513);
    assert_eq!(counters(&a), (514, 512 + 1024, 2 * MIB));
}

#[test]
fn segment_sizes() {
    for (bytes, segment) in [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (436_224_000, 418 * MIB),
    ] {
        let mut a = native();
        take(&mut a, bytes);
        assert_eq!(counters(&a).2, segment, "{bytes}");
    }
}

#[test]
fn small_and_large_pools_do_not_mix() {
    let mut a = native();
    take(&mut a, 9 * MIB);
    take(&mut a, 512);
    assert_eq!(counters(&a).2, 22 * MIB);
}

/// 9 MiB of a 20 MiB segment leave 11 MiB. 10 MiB of those leave 1 MiB, which is not more than 1
/// MiB.
#[test]
fn a_rest_up_to_1_mib_stays_with_a_large_block() {
    let mut a = native();
    take(&mut a, 9 * MIB);
    let b = take(&mut a, 10 * MIB);
    assert_eq!(a.block(b).bytes, Bytes(11 * MIB));
    assert_eq!(counters(&a), (19 * MIB, 20 * MIB, 20 * MIB));

    let mut a = native();
    take(&mut a, 9 * MIB);
    take(&mut a, 10 * MIB - 512);
    assert_eq!(counters(&a).1, 19 * MIB - 512);
}

#[test]
fn a_rest_of_512_is_split_off_a_small_block() {
    let mut a = native();
    let first = take(&mut a, MIB);
    let b = take(&mut a, MIB - 512);
    let c = take(&mut a, 1);
    assert_eq!(counters(&a), (2 * MIB - 511, 2 * MIB, 2 * MIB));
    assert_eq!(address(&a, b), address(&a, first) + MIB);
    assert_eq!(address(&a, c), address(&a, first) + 2 * MIB - 512);
}

#[test]
fn the_smallest_sufficient_block_wins_then_the_lowest() {
    let mut a = native();
    // Four blocks and separators in three 20 MiB segments.
    let sizes = [6, 2, 4, 2, 4, 2, 3, 2, 3].map(|m| m * MIB);
    let blocks = sizes.map(|s| take(&mut a, s));
    let at = blocks.map(|b| address(&a, b));
    for i in [0, 2, 4] {
        a.release(blocks[i]);
    }
    // Free: 6, 4 (lower), 4 (higher).
    let first = take(&mut a, 4 * MIB);
    assert_eq!(address(&a, first), at[2]);
    let second = take(&mut a, 3 * MIB + 512 * KIB);
    assert_eq!(address(&a, second), at[4]);
    let third = take(&mut a, 5 * MIB);
    assert_eq!(address(&a, third), at[0]);
}

#[test]
fn freed_neighbours_merge() {
    let mut a = native();
    let b = [6, 6, 8].map(|m| take(&mut a, m * MIB));
    let start = address(&a, b[0]);
    assert_eq!(counters(&a).2, 20 * MIB);
    a.release(b[0]);
    a.release(b[2]);
    let other = take(&mut a, 20 * MIB);
    assert_eq!(
        counters(&a).2,
        40 * MIB,
        "two free pieces do not hold 20 MiB"
    );
    assert!(
        address(&a, other) < start,
        "segments lie below earlier ones"
    );
    a.release(b[1]);
    let whole = take(&mut a, 20 * MIB);
    assert_eq!((address(&a, whole), counters(&a).2), (start, 40 * MIB));
}

#[test]
fn no_block_serves_another_stream() {
    let mut a = native();
    let b = take(&mut a, 100 * MIB);
    a.release(b);
    a.take(Bytes(100 * MIB), SIDE).unwrap();
    assert_eq!(counters(&a).2, 200 * MIB);
    assert_eq!(
        (a.reserved_of(COMPUTE), a.reserved_of(SIDE)),
        (Bytes(100 * MIB), Bytes(100 * MIB))
    );
}

#[test]
fn a_full_device_returns_whole_segments_of_every_stream_once() {
    let mut a = CachingAllocator::new(false, Some(Bytes(60 * MIB)));
    let side = a.take(Bytes(20 * MIB), SIDE).unwrap();
    let [low, high] = [4, 4].map(|m| take(&mut a, m * MIB));
    a.release(side);
    a.release(high);
    take(&mut a, 40 * MIB);
    // The side stream's segment was released; the one with a live block remained.
    assert_eq!(
        (counters(&a), a.counters().retries),
        ((44 * MIB, 44 * MIB, 60 * MIB), 1)
    );
    let e = a.take(Bytes(20 * MIB), COMPUTE).unwrap_err();
    assert_eq!(
        e,
        AllocError::OutOfMemory {
            requested: Bytes(20 * MIB),
            allocated: Bytes(44 * MIB),
            reserved: Bytes(60 * MIB),
            limit: Bytes(60 * MIB),
        }
    );
    assert_eq!(a.counters().retries, 2);
    a.release(low);
    // The 20 MiB are whole again and serve the request without a retry.
    take(&mut a, 20 * MIB);
    assert_eq!(a.counters().retries, 2);
}

#[test]
fn impossible_sizes_are_refused() {
    for mut a in [native(), expandable()] {
        for bytes in [u64::MAX, u64::MAX - 512, 1 << 62, (1 << 62) - 1024] {
            assert!(
                matches!(
                    a.take(Bytes(bytes), COMPUTE),
                    Err(AllocError::OutOfMemory { .. })
                ),
                "{bytes}"
            );
        }
        take(&mut a, 1);
        assert_eq!(counters(&a), (1, 512, 2 * MIB));
    }
}

#[test]
fn a_range_grows_by_the_missing_pages() {
    let mut a = expandable();
    let b = take(&mut a, 30 * MIB);
    assert_eq!(counters(&a).2, 40 * MIB);
    // 10 MiB are free at the end; 15 more need one page.
    let c = take(&mut a, 25 * MIB);
    assert_eq!(address(&a, c), address(&a, b) + 30 * MIB);
    assert_eq!(counters(&a), (55 * MIB, 55 * MIB, 60 * MIB));
    // The small pool has a separate range, in pages of 2 MiB.
    take(&mut a, 512);
    assert_eq!(counters(&a).2, 62 * MIB);
    // The same holds for every stream.
    a.take(Bytes(2 * MIB), SIDE).unwrap();
    assert_eq!(a.reserved_of(SIDE), Bytes(20 * MIB));
}

#[test]
fn expandable_blocks_keep_no_slack() {
    let mut a = expandable();
    take(&mut a, 20 * MIB - 1024);
    let b = take(&mut a, 1025 * KIB);
    assert_eq!(counters(&a).1, 20 * MIB - 1024 + 1025 * KIB);
    a.release(b);
    let c = take(&mut a, 15 * MIB);
    // 1024 bytes of the first page and all of the second page are free, so 15 MiB fit without
    // another page.
    assert_eq!(counters(&a).2, 40 * MIB);
    assert_eq!(a.block(c).bytes, Bytes(15 * MIB));
}

/// A block at the end of the range counts with the size that it can grow to, so an inner block that
/// suffices is preferred.
#[test]
fn the_end_of_a_range_is_the_last_choice() {
    let mut a = expandable();
    let inner = take(&mut a, 25 * MIB);
    let wall = take(&mut a, 13 * MIB);
    // 2 MiB are left of the second page.
    let inner_at = address(&a, inner);
    a.release(inner);
    let b = take(&mut a, 2 * MIB);
    assert_eq!(address(&a, b), inner_at);
    a.release(wall);
    assert_eq!(counters(&a).2, 40 * MIB);
}

#[test]
fn holes_are_unmapped_and_mapped_again() {
    let mut a = CachingAllocator::new(true, Some(Bytes(100 * MIB)));
    let low = take(&mut a, 50 * MIB);
    let wall = take(&mut a, 5 * MIB);
    let low_at = address(&a, low);
    a.release(low);
    a.release_cached();
    // Pages 0 and 1 (0 to 40) are released; 40 to 50 shares a page with the live block.
    assert_eq!(counters(&a).2, 20 * MIB);
    // 45 MiB fit in the hole and the free piece after it: 35 MiB are missing, so two pages are
    // mapped again.
    let again = take(&mut a, 45 * MIB);
    assert_eq!((address(&a, again), counters(&a).2), (low_at, 60 * MIB));
    // 60 MiB do not fit: after the live block come 5 free MiB, so 55 MiB are missing, and the
    // device has 40 left.
    assert!(a.take(Bytes(60 * MIB), COMPUTE).is_err());
    a.release(again);
    a.release(wall);
    a.release_cached();
    assert_eq!(counters(&a), (0, 0, 0));
}

#[test]
fn a_full_device_unmaps_free_pages_of_every_stream() {
    let mut a = CachingAllocator::new(true, Some(Bytes(100 * MIB)));
    let side = a.take(Bytes(60 * MIB), SIDE).unwrap();
    a.release(side);
    take(&mut a, 80 * MIB);
    assert_eq!(
        (counters(&a), a.counters().retries),
        ((80 * MIB, 80 * MIB, 80 * MIB), 1)
    );
}

#[test]
#[should_panic(expected = "freed but not live")]
fn double_free_panics() {
    let mut a = native();
    let block = take(&mut a, 7);
    a.release(block);
    a.release(block);
}

#[derive(Clone, Debug)]
enum Step {
    Take(u64, u8),
    Release(prop::sample::Index),
    Empty,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![1u64..4096, 100 * KIB..2 * MIB, MIB..40 * MIB];
    prop::collection::vec(
        prop_oneof![
            10 => (bytes, 0u8..3).prop_map(|(b, s)| Step::Take(b, s)),
            9 => any::<prop::sample::Index>().prop_map(Step::Release),
            1 => Just(Step::Empty),
        ],
        0..200,
    )
}

fn drive(
    expandable: bool,
    capacity: Option<Bytes>,
    steps: &[Step],
) -> Result<Vec<(u64, Counters)>, TestCaseError> {
    let mut a = CachingAllocator::new(expandable, capacity);
    let mut live: Vec<(BlockId, u64)> = Vec::new();
    let mut seen = Vec::new();
    for step in steps {
        let mut at = 0;
        match step {
            Step::Take(bytes, stream) => match a.take(Bytes(*bytes), StreamId(*stream)) {
                Ok(b) => {
                    let new = a.block(b);
                    at = new.address;
                    prop_assert!(new.bytes.0 >= *bytes && at % GRANULE == 0);
                    for &(other, _) in &live {
                        let o = a.block(other);
                        prop_assert!(
                            o.address + o.bytes.0 <= at || at + new.bytes.0 <= o.address,
                            "overlap"
                        );
                    }
                    live.push((b, *bytes));
                }
                Err(_) => prop_assert!(capacity.is_some()),
            },
            Step::Release(i) if !live.is_empty() => {
                a.release(live.swap_remove(i.index(live.len())).0)
            }
            Step::Release(_) => {}
            Step::Empty => a.release_cached(),
        }
        let c = a.counters();
        let blocks: u64 = live.iter().map(|(b, _)| a.block(*b).bytes.0).sum();
        let rounded: u64 = live
            .iter()
            .map(|(_, bytes)| bytes.next_multiple_of(GRANULE))
            .sum();
        prop_assert_eq!(c.allocated.0, blocks);
        prop_assert_eq!(c.requested.0, live.iter().map(|l| l.1).sum::<u64>());
        prop_assert!(blocks == rounded || (blocks > rounded && !expandable));
        prop_assert!(c.reserved >= c.allocated);
        prop_assert!(capacity.is_none_or(|limit| c.reserved <= limit));
        prop_assert_eq!(
            c.reserved,
            (0..3).map(|s| a.reserved_of(StreamId(s))).sum::<Bytes>()
        );
        seen.push((at, c));
    }
    for (b, _) in live {
        a.release(b);
    }
    prop_assert_eq!(
        (a.counters().allocated, a.counters().requested),
        (Bytes::ZERO, Bytes::ZERO)
    );
    a.release_cached();
    prop_assert_eq!(a.counters().reserved, Bytes::ZERO);
    Ok(seen)
}

proptest! {
    #[test]
    fn any_sequence(steps in steps(), expandable in any::<bool>(), limit in prop::option::of(20u64..300)) {
        let capacity = limit.map(|m| Bytes(m * MIB));
        let once = drive(expandable, capacity, &steps)?;
        prop_assert_eq!(once, drive(expandable, capacity, &steps)?);
    }
}

/// Allocations, frees and mappings of PyTorch 2.11 on an H200 in four steps of FSDP2. After every
/// allocation, the same bytes are reserved for each stream (`tests/data/README.md`).
#[test]
fn a_recorded_run_of_torch_reserves_what_it_did() {
    let recorded = include_str!("../../../../tests/data/torch_allocations.txt");
    let mut a = expandable();
    let (mut blocks, mut mapped, mut taken) = (Vec::new(), [0; 3], 0);
    for line in recorded.lines() {
        let mut fields = line.split(' ');
        let kind = fields.next().unwrap();
        let mut number = || fields.next().unwrap().parse::<u64>().unwrap();
        let first = number();
        match kind {
            "m" => mapped[number() as usize] += first,
            "+" => {
                blocks.push(a.take(Bytes(first), StreamId(number() as u8)).unwrap());
                taken += 1;
                for (stream, bytes) in (0..).zip(mapped) {
                    let reserved = a.reserved_of(StreamId(stream)).0;
                    assert_eq!(reserved, bytes, "stream {stream}, allocation {taken}");
                }
            }
            _ => a.release(blocks[first as usize]),
        }
    }
    assert_eq!((taken, mapped.iter().sum::<u64>()), (8043, 10_086 << 20));
}
