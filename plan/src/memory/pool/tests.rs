use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn life(key: u32, mib: u64, start: u32, end: u32) -> Lifetime {
    Lifetime {
        key,
        bytes: Bytes(mib * MIB),
        align: 256,
        start,
        end,
    }
}

fn take(pool: &mut PoolAllocator, key: u32, bytes: u64) -> Result<Block, AllocError> {
    let index = pool.plan().index(key).unwrap();
    pool.take(index, Bytes(bytes))
}

fn offsets(plan: &PoolPlan) -> Vec<u64> {
    plan.slots().iter().map(|s| s.offset / MIB).collect()
}

/// Two gathered units in flight and three units in total: there are two slots, and the third unit
/// reuses the first.
#[test]
fn keys_apart_in_time_share_a_slot() {
    let plan = PoolPlan::plan(&[life(0, 4, 0, 4), life(1, 4, 2, 6), life(2, 4, 4, 8)]);
    assert_eq!(offsets(&plan), [0, 4, 0]);
    assert_eq!(
        (plan.total(), plan.most_live()),
        (Bytes(8 * MIB), Bytes(8 * MIB))
    );
}

/// A key that lives in forward and again in backward keeps one slot, and avoids what is live in
/// both.
#[test]
fn one_slot_for_several_lives() {
    let lives = [
        life(0, 2, 0, 3),
        life(1, 4, 2, 4),
        life(0, 2, 10, 14),
        life(2, 4, 12, 16),
    ];
    let plan = PoolPlan::plan(&lives);
    assert_eq!(offsets(&plan), [4, 0, 0]);
    assert_eq!(plan.total(), Bytes(6 * MIB));
}

#[test]
fn what_is_never_freed_shares_with_nobody() {
    let plan = PoolPlan::plan(&[
        life(7, 3, 5, Lifetime::FOREVER),
        life(3, 2, 0, 2),
        life(4, 2, 6, 8),
    ]);
    assert_eq!(plan.index(7), Some(2));
    assert_eq!(offsets(&plan), [3, 3, 0]);
    assert_eq!(plan.total(), Bytes(5 * MIB));
}

/// First fit in time order would grow the first slot to 8 and open a second one of 8 for a step
/// that never has more than 9 live. Largest first does not.
#[test]
fn bytes_matter_not_slots() {
    let plan = PoolPlan::plan(&[
        life(0, 1, 0, 4),
        life(1, 8, 2, 6),
        life(2, 8, 8, 12),
        life(3, 1, 10, 14),
    ]);
    assert_eq!(plan.total(), Bytes(9 * MIB));
}

#[test]
fn repeated_micro_batches_change_nothing() {
    let one = [life(0, 4, 0, 4), life(1, 4, 2, 6), life(2, 4, 4, 8)];
    let mut many = Vec::new();
    for m in 0..5 {
        many.extend(one.iter().map(|l| Lifetime {
            start: l.start + 8 * m,
            end: l.end + 8 * m,
            ..*l
        }));
    }
    assert_eq!(PoolPlan::plan(&one), PoolPlan::plan(&many));
}

/// Lifetimes on two streams. The regions are stacked, with the alignment that the second one needs.
#[test]
fn streams_share_no_address() {
    let wide = Lifetime {
        align: 1 << 22,
        ..life(2, 4, 4, 8)
    };
    let plan = PoolPlan::by_stream([vec![life(0, 5, 0, 2), life(1, 3, 2, 4)], vec![wide]]);
    assert_eq!(offsets(&plan), [0, 0, 8]);
    assert_eq!(
        (plan.total(), plan.most_live()),
        (Bytes(12 * MIB), Bytes(9 * MIB))
    );
}

#[test]
fn allocator_refuses_what_the_plan_does_not_allow() {
    let plan = PoolPlan::plan(&[life(0, 4, 0, 4), life(1, 4, 2, 6), life(2, 4, 4, 8)]);
    let mut pool = PoolAllocator::new(plan);
    let first = take(&mut pool, 0, 4 * MIB).unwrap();
    assert_eq!(pool.plan().index(9), None);
    assert_eq!(
        take(&mut pool, 1, 5 * MIB),
        Err(AllocError::SizeChanged {
            key: 1,
            slot: Bytes(4 * MIB),
            requested: Bytes(5 * MIB)
        })
    );
    assert_eq!(
        take(&mut pool, 2, MIB),
        Err(AllocError::SlotInUse { key: 2, holder: 0 })
    );
    assert_eq!(
        take(&mut pool, 0, MIB),
        Err(AllocError::SlotInUse { key: 0, holder: 0 })
    );
    take(&mut pool, 1, 3 * MIB).unwrap();
    let c = pool.counters();
    assert_eq!(
        (c.requested, c.allocated, c.reserved),
        (Bytes(7 * MIB), Bytes(8 * MIB), Bytes(8 * MIB))
    );
    assert!(pool.release(0));
    // A free by a key that does not hold its slot must not release the slot of another key.
    assert_eq!(take(&mut pool, 2, MIB).unwrap().address, first.address);
    assert!(!pool.release(0));
    assert_eq!(
        take(&mut pool, 0, MIB),
        Err(AllocError::SlotInUse { key: 0, holder: 2 })
    );
}

/// Returns the lifetimes of one step as FSDP creates them: `layers` units are gathered two at a
/// time in both directions, each saves some activations and uses some scratch memory, and gradients
/// live until their reduction one unit later.
fn training_step(layers: u32, sizes: &[u64], micro_batches: u32) -> Vec<Lifetime> {
    let mut lives = Vec::new();
    let mut open = std::collections::BTreeMap::new();
    let mut now = 0u32;
    let mut key = 0;
    let mut size = sizes.iter().copied().cycle();
    let mut sized = std::collections::BTreeMap::new();
    let mut act = |lives: &mut Vec<Lifetime>, now: &mut u32, k: u32, alloc: bool| {
        if alloc {
            let bytes = *sized.entry(k).or_insert_with(|| size.next().unwrap());
            open.insert(k, lives.len());
            lives.push(Lifetime {
                key: k,
                bytes: Bytes(bytes),
                align: 512,
                start: *now,
                end: Lifetime::FOREVER,
            });
        } else if let Some(i) = open.remove(&k) {
            lives[i].end = *now;
        }
        *now += 1;
    };
    let mut unit = |n: u32| {
        key += n;
        key - n
    };
    let weights: Vec<u32> = (0..layers).map(|_| unit(1)).collect();
    let grads: Vec<u32> = (0..layers).map(|_| unit(1)).collect();
    let saved: Vec<u32> = (0..layers).map(|_| unit(12)).collect();
    let scratch: Vec<u32> = (0..layers).map(|_| unit(50)).collect();
    for _ in 0..micro_batches {
        let a = &mut act;
        a(&mut lives, &mut now, weights[0], true);
        for l in 0..layers as usize {
            if l + 1 < layers as usize {
                a(&mut lives, &mut now, weights[l + 1], true);
            }
            for i in 0..12 {
                a(&mut lives, &mut now, scratch[l] + i, true);
                a(&mut lives, &mut now, saved[l] + i, true);
                a(&mut lives, &mut now, scratch[l] + i, false);
            }
            a(&mut lives, &mut now, weights[l], false);
        }
        a(&mut lives, &mut now, weights[layers as usize - 1], true);
        for l in (0..layers as usize).rev() {
            if l > 0 {
                a(&mut lives, &mut now, weights[l - 1], true);
            }
            a(&mut lives, &mut now, grads[l], true);
            for i in 0..36 {
                a(&mut lives, &mut now, scratch[l] + 12 + i, true);
                if i > 0 {
                    a(&mut lives, &mut now, scratch[l] + 11 + i, false);
                }
                if i % 3 == 0 {
                    a(&mut lives, &mut now, saved[l] + 11 - i / 3, false);
                }
            }
            a(&mut lives, &mut now, scratch[l] + 47, false);
            a(&mut lives, &mut now, weights[l], false);
            if l + 1 < layers as usize {
                a(&mut lives, &mut now, grads[l + 1], false);
            }
        }
        a(&mut lives, &mut now, grads[0], false);
    }
    lives
}

#[track_caller]
fn check_plan(lives: &[Lifetime]) -> f64 {
    let plan = PoolPlan::plan(lives);
    assert!(plan.total() >= plan.most_live());
    let slot = |l: &Lifetime| plan.slots()[plan.index(l.key).unwrap()];
    for l in lives {
        assert!(slot(l).bytes >= l.bytes);
        assert_eq!(slot(l).offset % u64::from(l.align.max(1)), 0);
        assert!(slot(l).offset + slot(l).bytes.0 <= plan.total().0);
    }
    // A sweep: sorts events by time (frees first), and keeps live slots by offset.
    let mut events: Vec<(u32, bool, usize)> = Vec::new();
    for (i, l) in lives.iter().enumerate() {
        events.push((l.start, true, i));
        if l.end != Lifetime::FOREVER {
            events.push((l.end.max(l.start + 1), false, i));
        }
    }
    events.sort_unstable();
    let mut live = std::collections::BTreeMap::new();
    for (_, alloc, i) in events {
        let s = slot(&lives[i]);
        if !alloc {
            live.remove(&s.offset);
            continue;
        }
        if s.bytes == Bytes::ZERO {
            continue;
        }
        let end = s.offset + s.bytes.0;
        let below = live.range(..end).next_back();
        assert!(
            below.is_none_or(|(_, &e)| e <= s.offset),
            "{s:?} overlaps {below:?}"
        );
        live.insert(s.offset, end);
    }
    plan.total().0 as f64 / plan.most_live().0.max(1) as f64
}

#[test]
fn a_llama_like_step_is_packed_tightly() {
    let sizes = [
        64 * MIB,
        436 * MIB,
        32 * MIB,
        32 * 1024,
        224 * MIB,
        16 * MIB,
        64 * MIB,
        448 * MIB,
    ];
    let ratio = check_plan(&training_step(32, &sizes, 2));
    println!("pool over live: {ratio:.4}");
    assert!(ratio <= 1.1, "{ratio}");
}

/// Twice the number of layers takes twice the work, apart from a logarithm, both for an eager step
/// and for a fully compiled one, in which all gradients end at the same time.
#[test]
fn planning_scales_with_depth() {
    let work = |layers: u32, mode: &str| {
        let set = [
            format!("model.layers={layers}"),
            format!("compile.mode={mode}"),
        ];
        let path = std::path::Path::new("llama3-8b-4xh200");
        let scenario = crate::scenario::load(path, &set).unwrap();
        let lives = trace(&crate::plan(&scenario).unwrap());
        occupancy::work::take();
        let _ = PoolPlan::by_stream(lives);
        occupancy::work::take() as f64
    };
    for mode in ["off", "full"] {
        let (n, twice) = (work(256, mode), work(512, mode));
        let times = twice / n;
        println!("{mode}: {n} and {twice} steps, {times:.2} times as many");
        assert!(n > 0.0 && times <= 2.2, "{mode}: {times:.2}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn steps_of_any_sizes_are_packed(
        layers in 1u32..12,
        sizes in prop::collection::vec(prop_oneof![1u64..4096, MIB..64 * MIB], 3..40),
        micro_batches in 1u32..3,
    ) {
        let ratio = check_plan(&training_step(layers, &sizes, micro_batches));
        prop_assert!(ratio <= 1.3, "{}", ratio);
    }

    #[test]
    fn random_lives_never_overlap(
        lives in prop::collection::vec((0u32..200, 0u64..100_000, 0u32..4000, 0u32..400), 0..400),
    ) {
        // One lifetime of a key at a time, as in any program.
        let mut busy = std::collections::BTreeMap::new();
        let mut lives: Vec<Lifetime> = lives
            .into_iter()
            .map(|(key, bytes, start, length)| Lifetime { key, bytes: Bytes(bytes), align: 256, start, end: start + length })
            .collect();
        lives.sort_by_key(|l| l.start);
        lives.retain(|l| {
            let free = busy.get(&l.key).is_none_or(|&end| end <= l.start);
            if free { busy.insert(l.key, l.end.max(l.start + 1)); }
            free
        });
        check_plan(&lives);
    }
}
