//! Speed of the allocators' state machines, and of planning a pool:
//! `cargo bench -p shardlab-plan --bench allocators`.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use shardlab_plan::ir::StreamId;
use shardlab_plan::memory::{CachingAllocator, Lifetime, PoolAllocator, PoolPlan};
use shardlab_plan::units::Bytes;
use std::hint::black_box;

const MIB: u64 = 1 << 20;

/// One allocation (`true`) or free of a key.
type Event = (bool, u32);

/// Host-order events of a training step: two units gathered at once, `saved` activations a layer
/// that live until backward, short-lived scratch in both directions, gradients until the next unit
/// is reduced.
struct Step {
    events: Vec<Event>,
    bytes: Vec<u64>,
}

fn training_step(layers: u32, saved: u32, scratch: u32) -> Step {
    let sizes = [
        64 * MIB,
        16 * MIB,
        224 * MIB,
        32 * 1024,
        64 * MIB,
        448 * MIB,
        112 * MIB,
    ];
    let mut bytes = Vec::new();
    let mut keys = |n: u32, of: &dyn Fn(u32) -> u64| {
        let first = bytes.len() as u32;
        bytes.extend((0..n).map(of));
        first
    };
    let weights = keys(layers, &|_| 416 * MIB + 16 * 1024);
    let grads = keys(layers, &|_| 416 * MIB + 16 * 1024);
    let acts = keys(layers * saved, &|i| {
        sizes[(i % saved) as usize % sizes.len()]
    });
    let temps = keys(layers * scratch * 3, &|i| {
        sizes[(i * 5 + 1) as usize % sizes.len()]
    });
    let mut e = vec![(true, weights)];
    for l in 0..layers {
        if l + 1 < layers {
            e.push((true, weights + l + 1));
        }
        for i in 0..scratch.max(saved) {
            if i < scratch {
                e.push((true, temps + l * scratch * 3 + i));
            }
            if i < saved {
                e.push((true, acts + l * saved + i));
            }
            if i < scratch {
                e.push((false, temps + l * scratch * 3 + i));
            }
        }
        e.push((false, weights + l));
    }
    e.push((true, weights + layers - 1));
    for l in (0..layers).rev() {
        if l > 0 {
            e.push((true, weights + l - 1));
        }
        e.push((true, grads + l));
        let first = temps + l * scratch * 3 + scratch;
        for i in 0..2 * scratch {
            e.push((true, first + i));
            if i > 0 {
                e.push((false, first + i - 1));
            }
            if i % 2 == 1 && i / 2 < saved {
                e.push((false, acts + l * saved + saved - 1 - i / 2));
            }
        }
        e.push((false, first + 2 * scratch - 1));
        for i in scratch..saved {
            e.push((false, acts + l * saved + saved - 1 - i));
        }
        e.push((false, weights + l));
        if l + 1 < layers {
            e.push((false, grads + l + 1));
        }
    }
    e.push((false, grads));
    Step { events: e, bytes }
}

fn lifetimes(step: &Step, passes: u32) -> Vec<Lifetime> {
    let mut open = vec![0; step.bytes.len()];
    let mut lives = Vec::new();
    let events = (0..passes).flat_map(|_| &step.events);
    for (now, &(alloc, key)) in (0..).zip(events) {
        if alloc {
            open[key as usize] = lives.len();
            let bytes = Bytes(step.bytes[key as usize]);
            lives.push(Lifetime {
                key,
                bytes,
                align: 512,
                start: now,
                end: Lifetime::FOREVER,
            });
        } else {
            lives[open[key as usize]].end = now;
        }
    }
    lives
}

fn caching(c: &mut Criterion) {
    let mut group = c.benchmark_group("caching");
    let step = training_step(32, 12, 20);
    group.throughput(Throughput::Elements(step.events.len() as u64 / 2));
    for (name, expandable) in [("segments", false), ("expandable", true)] {
        let mut a = CachingAllocator::new(expandable, None);
        let mut held = vec![None; step.bytes.len()];
        group.bench_function(format!("training step, {name}"), |b| {
            b.iter(|| {
                for &(alloc, key) in &step.events {
                    let slot = &mut held[key as usize];
                    if alloc {
                        let bytes = Bytes(step.bytes[key as usize]);
                        *slot = Some(a.take(bytes, StreamId(0)).expect("no limit"));
                    } else if let Some(block) = slot.take() {
                        a.release(block);
                    }
                }
            });
        });
        let mut a = CachingAllocator::new(expandable, None);
        group.bench_function(format!("one block again, {name}"), |b| {
            b.iter(|| {
                for _ in 0..step.events.len() / 2 {
                    let block = a
                        .take(black_box(Bytes(64 * MIB)), StreamId(0))
                        .expect("no limit");
                    a.release(block);
                }
            });
        });
    }
    group.finish();
}

fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool");
    for (layers, saved, scratch) in [(32, 12, 20), (126, 14, 21)] {
        let step = training_step(layers, saved, scratch);
        for passes in [1, 2, 4] {
            let lives = lifetimes(&step, passes);
            let plan = PoolPlan::plan(&lives);
            println!(
                "{} keys, {} lives: {:.4} of the most bytes alive",
                step.bytes.len(),
                lives.len(),
                plan.total().0 as f64 / plan.most_live().0 as f64
            );
            group.throughput(Throughput::Elements(lives.len() as u64));
            group.bench_function(
                format!("plan {} keys, {passes} passes", step.bytes.len()),
                |b| {
                    b.iter(|| PoolPlan::plan(black_box(&lives)));
                },
            );
        }
    }
    let step = training_step(32, 12, 20);
    let plan = PoolPlan::plan(&lifetimes(&step, 1));
    let index: Vec<usize> = (0..step.bytes.len() as u32)
        .map(|k| plan.index(k).expect("planned"))
        .collect();
    group.throughput(Throughput::Elements(step.events.len() as u64 / 2));
    group.bench_function("training step", |b| {
        b.iter_batched_ref(
            || PoolAllocator::new(plan.clone()),
            |pool| {
                for &(alloc, key) in &step.events {
                    let slot = index[key as usize];
                    if alloc {
                        pool.take(slot, Bytes(step.bytes[key as usize]))
                            .expect("as planned");
                    } else {
                        pool.release(slot);
                    }
                }
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, caching, pool);
criterion_main!(benches);
