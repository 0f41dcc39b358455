//! Whole synthetic steps: symmetry, stragglers, jitter, and invariants over random programs.

mod common;

use common::{Machine, step_us};
use proptest::prelude::*;
use shardlab_plan::ir::{COMPUTE, EventId};
use shardlab_plan::program::{Op, StreamKind};
use shardlab_plan::record::{Blocker, Cause, Queues, Run, Span};
use shardlab_plan::units::Picos;
use shardlab_sim::synthetic::{Shape, fsdp};
use shardlab_sim::{Options, Profile, hardware, simulate, simulate_light};

fn h200() -> Profile {
    let mut profile = hardware::load("h200-nvlink").unwrap();
    profile.scale = None;
    profile
}

#[test]
fn every_rank_simulated_equals_one_rank_simulated() {
    let program = fsdp(&Shape {
        layers: 6,
        ..Shape::tiny()
    });
    let one = simulate(
        &program,
        &h200(),
        &Options {
            steps: 3,
            ..Options::default()
        },
    )
    .unwrap();
    let all = simulate(
        &program,
        &h200(),
        &Options {
            steps: 3,
            full_ranks: true,
            ..Options::default()
        },
    )
    .unwrap();
    assert_eq!(one.step_samples, all.step_samples);
    let same = one.spans.iter().zip(&all.spans).position(|(a, b)| a != b);
    assert_eq!(
        same,
        None,
        "{:?} {:?}",
        one.spans[same.unwrap_or(0)],
        all.spans[same.unwrap_or(0)]
    );
    assert!(one.gaps == all.gaps);
}

#[test]
fn a_straggler_slows_everyone() {
    let program = fsdp(&Shape {
        layers: 6,
        ..Shape::tiny()
    });
    let base = Options {
        steps: 4,
        ..Options::default()
    };
    // The device, not the host, is the bottleneck of this small program.
    let mut profile = h200();
    profile.host.work.hook_us = 50.0;
    let even = simulate(&program, &profile, &base).unwrap();
    let uneven = Options {
        stragglers: vec![(2, 1.5)],
        ..base
    };
    let run = simulate(&program, &profile, &uneven).unwrap();
    assert!(
        step_us(&run) > 1.2 * step_us(&even),
        "{} {}",
        step_us(&run),
        step_us(&even)
    );
    // Rank 0 is not a straggler: it waits in collectives.
    assert!(run.spans.iter().any(|s| s.blocker == Blocker::Rank));
    // Contention does not slow down collectives that start late because of the straggler any
    // further.
    let contention = |run: &Run| run.exposed.get(&Cause::Contention).map_or(0.0, |t| t.us());
    assert!(
        run.exposed.contains_key(&Cause::Straggler) && contention(&run) <= contention(&even) + 1.0,
        "{:?} after {:?}",
        run.exposed,
        even.exposed
    );
    // A longer wait at the end of backward does not count as the tail of a step.
    let tail = |run: &Run| run.exposed.get(&Cause::Tail).map_or(0.0, |t| t.us());
    assert!(
        tail(&run) <= tail(&even) + 1.0,
        "{:?} after {:?}",
        run.exposed,
        even.exposed
    );
}

#[test]
fn jitter_repeats_with_its_seed_and_costs_time() {
    let program = fsdp(&Shape {
        layers: 4,
        ranks: 4,
        ..Shape::large()
    });
    let options = |seed, jitter| Options {
        seed,
        jitter,
        ..Options::default()
    };
    let a = simulate(&program, &h200(), &options(1, 0.1)).unwrap();
    assert!(a == simulate(&program, &h200(), &options(1, 0.1)).unwrap());
    let b = simulate(&program, &h200(), &options(2, 0.1)).unwrap();
    assert_ne!(a.step_samples, b.step_samples);
    assert!(a.step_samples.len() >= 9);
    let still = simulate(&program, &h200(), &options(1, 0.0)).unwrap();
    let mean =
        |r: &Run| r.step_samples.iter().map(|t| t.us()).sum::<f64>() / r.step_samples.len() as f64;
    // The slowest of four ranks determines the time of every collective.
    assert!(mean(&a) > mean(&still), "{} {}", mean(&a), mean(&still));
}

#[test]
fn a_light_run_agrees_with_a_full_one() {
    let program = fsdp(&Shape {
        layers: 6,
        ..Shape::tiny()
    });
    let full = simulate(&program, &h200(), &Options::default()).unwrap();
    let light = simulate_light(&program, &h200(), &Options::default()).unwrap();
    let ratio = step_us(&light) / step_us(&full);
    assert!((ratio - 1.0).abs() < 0.002, "{ratio}");
    assert_eq!(full.memory.peak_allocated, light.memory.peak_allocated);
    assert!(light.spans.is_empty() && light.gaps.is_empty());
}

#[test]
fn contention_costs_time_and_hides_nothing() {
    let program = fsdp(&Shape {
        layers: 8,
        ..Shape::large()
    });
    let with = simulate(&program, &h200(), &Options::default()).unwrap();
    let without = simulate(
        &program,
        &h200(),
        &Options {
            contention: false,
            ..Options::default()
        },
    )
    .unwrap();
    let ratio = step_us(&with) / step_us(&without);
    assert!(ratio > 1.01 && ratio < 1.4, "{ratio}");
}

#[test]
fn memory_of_a_synthetic_step_is_the_sum_of_what_is_alive() {
    let shape = Shape {
        layers: 6,
        ..Shape::tiny()
    };
    let program = fsdp(&shape);
    let run = simulate(&program, &h200(), &Options::default()).unwrap();
    let roles: u64 = run.memory.by_role.iter().map(|r| r.1.0).sum();
    let units: u64 = run.memory.by_unit.iter().map(|u| u.1.0).sum();
    assert_eq!(
        (roles, units),
        (run.memory.peak_allocated.0, run.memory.peak_allocated.0)
    );
    let top = run
        .memory
        .timeline
        .iter()
        .map(|s| s.allocated)
        .max()
        .unwrap();
    assert_eq!(top, run.memory.peak_allocated);
    assert!(
        run.memory
            .timeline
            .windows(2)
            .all(|w| w[0].time <= w[1].time)
    );
    let tight = Profile {
        device: hardware::Device {
            memory_mib: 2200,
            ..h200().device
        },
        ..h200()
    };
    let refused = simulate(
        &program,
        &tight,
        &Options {
            enforce_memory: true,
            ..Options::default()
        },
    );
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("out of memory") && message.contains("main_weight"),
        "{message}"
    );
    let run = simulate(&program, &tight, &Options::default()).unwrap();
    assert!(run.memory.peak_device > run.memory.capacity.unwrap());
}

/// A random valid program: kernels and gathers on four streams, joined by events in issue order.
#[derive(Clone, Debug)]
enum Step {
    Kernel(u8, u64),
    Gather(u8, u64),
    Reduce(u8, u64),
    Join(u8, u8),
    HostWait(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u8..4, 1u64..200).prop_map(|(s, us)| Step::Kernel(s, us)),
        (1u8..4, 1u64..200).prop_map(|(s, us)| Step::Gather(s, us)),
        (1u8..4, 1u64..200).prop_map(|(s, us)| Step::Reduce(s, us)),
        (0u8..4, 0u8..4).prop_map(|(a, b)| Step::Join(a, b)),
        (0u8..4).prop_map(Step::HostWait),
    ];
    proptest::collection::vec(step, 1..60)
}

fn machine(steps: &[Step]) -> Machine {
    let mut m = Machine::new(4);
    let mut streams = vec![COMPUTE];
    for kind in [
        StreamKind::AllGather,
        StreamKind::ReduceScatter,
        StreamKind::CopyIn,
    ] {
        streams.push(m.b.add_stream(kind, -1));
    }
    let comm = m.b.communicator("shard", 4, 1);
    for step in steps {
        match *step {
            Step::Kernel(s, us) => {
                m.run(us, streams[usize::from(s)]);
            }
            Step::Gather(s, us) => {
                m.collect(us, comm, streams[usize::from(s)]);
            }
            Step::Reduce(s, us) => {
                m.reduce(us, comm, streams[usize::from(s)]);
            }
            Step::Join(a, b) => {
                m.b.join(streams[usize::from(a)], streams[usize::from(b)]);
            }
            Step::HostWait(s) => {
                let event: EventId = m.b.add_event();
                m.b.op(Op::Record {
                    event,
                    stream: streams[usize::from(s)],
                })
                .op(Op::HostWait(event));
            }
        }
    }
    m
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// The engine's invariants hold (otherwise it returns an error), spans on a stream do not
    /// overlap, nothing runs before it was issued, and the recorded step is within its bounds.
    #[test]
    fn random_programs_run(steps in steps(), host in 0.0f64..20.0, contention: bool, full_ranks: bool) {
        let m = machine(&steps);
        let mut profile = m.profile();
        profile.host.launch_us = host;
        profile.host.queue_depth = 4;
        let options = Options { steps: 3, contention, full_ranks, ..Options::default() };
        let run = simulate(&m.program(), &profile, &options).unwrap();
        let mut last = [0u64; 4];
        for span in &run.spans {
            let s = usize::from(span.stream.0);
            prop_assert!(span.start.0 >= last[s] && span.end >= span.start + span.alone);
            prop_assert!(span.issued <= span.start && span.end <= run.recorded_to);
            last[s] = span.end.0;
        }
        let again = simulate(&m.program(), &profile, &options).unwrap();
        prop_assert!(run == again);
    }

    /// Every moment in which the compute stream is idle has one cause, waits in a queue are as long
    /// as reported, and there is no contention if nothing is slowed down.
    #[test]
    fn exposed_time_has_one_cause(steps in steps(), host in 0.0f64..20.0, contention: bool, full_ranks: bool) {
        let m = machine(&steps);
        let mut profile = m.profile();
        profile.host.launch_us = host;
        let options = Options { steps: 3, contention, full_ranks, ..Options::default() };
        let program = m.program();
        let run = simulate(&program, &profile, &options).unwrap();
        let mut free = run.recorded_from;
        let mut idle = Vec::new();
        let ends = run.spans.iter().filter(|s| s.stream == COMPUTE).map(|s| (s.start, s.end));
        for (start, end) in ends.chain([(run.recorded_to, run.recorded_to)]) {
            if start > free {
                idle.push((free, start));
            }
            free = free.max(end);
        }
        let mut pieces: Vec<_> = run.gaps.iter().map(|g| (g.start, g.end)).collect();
        pieces.dedup_by(|next, last| last.1 == next.0 && { last.1 = next.1; true });
        // Adjacent gaps of different kernels touch if a kernel takes no time, which does not happen
        // here.
        prop_assert_eq!(pieces, idle);
        let of = |cause| run.gaps.iter().filter(move |g| g.cause == cause);
        let sum: Picos = run.gaps.iter().map(|g| g.end - g.start).sum();
        prop_assert_eq!(sum, run.exposed.values().copied().sum());
        let slowed = |s: &Span| s.end > s.start + s.alone || s.blocker == Blocker::Sms;
        prop_assert!(of(Cause::Contention).count() == 0 || run.spans.iter().any(slowed));
        let queues = Queues::new(&program, &run.spans);
        let waits = (0..run.spans.len() as u32).filter_map(|x| queues.of(x));
        let all: Picos = waits.map(|q| q.time()).sum();
        prop_assert!(of(Cause::Queue).map(|g| g.end - g.start).all(|t| t <= all));
        for gap in of(Cause::Queue) {
            let queued = queues.of_gap(gap).unwrap();
            let [waited, behind] = [queued.waited, queued.behind].map(|i| run.spans[i as usize]);
            prop_assert!(queued.time() > Picos::ZERO && queued.until == behind.end);
            prop_assert!(queued.since >= waited.issued && queued.until <= waited.start);
        }
    }

    /// Without contention, a faster memory system never makes a fixed program slower.
    #[test]
    fn faster_is_never_slower(steps in steps(), speedup in 1.0f64..4.0) {
        let m = machine(&steps);
        let slow = m.profile();
        let mut fast = slow.clone();
        fast.gemm[0].rows.iter_mut().for_each(|r| r.3 /= speedup);
        for table in &mut fast.collective {
            table.rows.iter_mut().for_each(|r| r.1 /= speedup);
        }
        let total = |run: Run| run.recorded_to;
        let (slow, fast) = (total(m.simulate(&slow)), total(m.simulate(&fast)));
        prop_assert!(fast <= slow, "{fast} {slow}");
    }
}
