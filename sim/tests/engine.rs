//! Programs that are small enough to schedule by hand.

mod common;

use common::{Machine, quiet, step_us, times};
use shardlab_plan::ir::{BufferId, COMPUTE, HostWorkKind, KernelClass, Role, UnitId};
use shardlab_plan::program::{Op, Phase, SectionKind, StreamKind};
use shardlab_plan::record::{Blocker, Cause, Queues, Shared};
use shardlab_plan::units::Picos;
use shardlab_sim::hardware::{Power, Scale};
use shardlab_sim::{Options, Part, SimError, hardware, simulate};

#[test]
fn one_stream_is_a_sum() {
    let mut m = Machine::new(1);
    m.run(10, COMPUTE).run(20, COMPUTE).run(5, COMPUTE);
    let run = m.simulate(&m.profile());
    assert_eq!(times(&run), [(0.0, 10.0), (10.0, 30.0), (30.0, 35.0)]);
    assert_eq!(step_us(&run), 35.0);
    assert_eq!(run.critical_path(), [0, 1, 2]);
    assert!(run.gaps.is_empty(), "{:?}", run.gaps);
}

/// A launch takes 3 us on the host; a kernel of 100 us follows a gather of 40 us. The profile's
/// `[scale]` applies, and with `slower`, the GEMM also takes longer.
#[test]
fn a_profiles_scale_lengthens_what_the_parts_do() {
    let mut m = Machine::new(4);
    let side = m.b.add_stream(StreamKind::AllGather, 0);
    let comm = m.b.communicator("shard", 4, 1);
    m.collect(40, comm, side);
    m.b.join(side, COMPUTE);
    m.run(100, COMPUTE);
    let mut profile = m.profile();
    let mut step = |collectives: f64, slower: &[(Part, f64)]| {
        profile.scale = Some(Scale {
            source: "test".into(),
            host: 1.0,
            arithmetic: 1.5,
            memory: 1.0,
            collectives,
            host_copies: 1.0,
        });
        let options = Options {
            slower: slower.to_vec(),
            steps: 1,
            ..quiet()
        };
        let run = simulate(&m.program(), &profile, &options).unwrap();
        let told = run.environment["scale"].clone();
        let ends: Vec<f64> = run.spans.iter().map(|s| (s.end - s.start).us()).collect();
        (ends, told)
    };
    assert_eq!(step(1.0, &[]), (vec![40.0, 150.0], "arithmetic=1.5".into()));
    let (ends, told) = step(2.0, &[(Part::Collectives, 1.25), (Part::Arithmetic, 2.0)]);
    assert_eq!(
        (ends, told.as_str()),
        (vec![100.0, 300.0], "arithmetic=1.5 collectives=2")
    );
}

#[test]
fn an_event_joins_two_streams() {
    // Compute: A(10) ... B(7) after the side stream's C(30), which starts after A.
    let mut m = Machine::new(1);
    let side = m.b.add_stream(StreamKind::CopyIn, 0);
    m.run(10, COMPUTE);
    m.b.join(COMPUTE, side);
    m.run(30, side);
    m.b.join(side, COMPUTE);
    m.run(7, COMPUTE);
    let run = m.isolated(&m.profile());
    assert_eq!(times(&run), [(0.0, 10.0), (10.0, 40.0), (40.0, 47.0)]);
    assert_eq!(run.spans[2].blocker, Blocker::Event(1));
    assert_eq!(run.spans[1].blocker, Blocker::Event(0));
    assert_eq!(run.critical_path(), [0, 1, 2]);
    assert_eq!(run.gaps.len(), 1);
    assert_eq!((run.gaps[0].end - run.gaps[0].start).us(), 30.0);
}

#[test]
fn slower_parts_lengthen_what_they_do() {
    // Compute: A(10), then B(7), which waits for a gather of 30 that starts after A.
    let mut m = Machine::new(4);
    let side = m.b.add_stream(StreamKind::AllGather, 0);
    let comm = m.b.communicator("shard", 4, 1);
    m.run(10, COMPUTE);
    m.b.join(COMPUTE, side);
    m.collect(30, comm, side);
    m.b.join(side, COMPUTE);
    m.run(7, COMPUTE);
    let step = |slower: &[(Part, f64)]| {
        let options = Options {
            slower: slower.to_vec(),
            ..quiet()
        };
        let run = simulate(&m.program(), &m.profile(), &options).unwrap();
        (step_us(&run), run.environment.get("slower").cloned())
    };
    assert_eq!(step(&[]), (47.0, None));
    assert_eq!(step(&[(Part::Arithmetic, 2.0)]).0, 64.0);
    assert_eq!(step(&[(Part::Collectives, 2.0)]).0, 77.0);
    for nothing in [Part::Host, Part::Memory, Part::HostCopies] {
        assert_eq!(step(&[(nothing, 2.0)]).0, 47.0);
    }
    let both = [(Part::Collectives, 0.5), (Part::Arithmetic, 3.0)];
    let told = Some("collectives=0.5 arithmetic=3".to_owned());
    assert_eq!(step(&both), (66.0, told));
}

#[test]
fn an_event_covers_only_what_was_issued_before_it() {
    let mut m = Machine::new(1);
    let side = m.b.add_stream(StreamKind::CopyIn, 0);
    m.run(10, side);
    m.b.join(side, COMPUTE);
    m.run(50, side);
    m.run(1, COMPUTE);
    let run = m.isolated(&m.profile());
    assert_eq!(run.spans[2].start.0 - run.spans[0].start.0, 10_000_000);
}

#[test]
fn a_slow_host_sets_the_pace() {
    let mut m = Machine::new(1);
    for _ in 0..4 {
        m.run(2, COMPUTE);
    }
    let mut profile = m.profile();
    profile.host.launch_us = 5.0;
    let run = m.simulate(&profile);
    assert_eq!(step_us(&run), 20.0);
    assert_eq!(run.host.us(), 20.0);
    assert!(run.spans.iter().all(|s| s.blocker == Blocker::Host));
    // 8 us of kernels in 20 us; the host takes the rest.
    assert_eq!(run.exposed[&Cause::Host].us(), 12.0);
    let slower = Options {
        slower: vec![(Part::Host, 1.5)],
        ..quiet()
    };
    let run = simulate(&m.program(), &profile, &slower).unwrap();
    assert_eq!((step_us(&run), run.host.us()), (30.0, 30.0));
}

#[test]
fn gaps_and_latencies_add_up() {
    let mut m = Machine::new(1);
    m.run(10, COMPUTE).run(10, COMPUTE);
    let mut profile = m.profile();
    profile.device.kernel_gap_us = 1.5;
    assert_eq!(step_us(&m.simulate(&profile)), 23.0);
}

#[test]
fn what_is_saved_beside_arithmetic_is_paid_back_in_part_at_the_power_limit() {
    let mut m = Machine::new(1);
    for _ in 0..4 {
        m.run(20, COMPUTE);
    }
    let mut profile = m.profile();
    profile.power = Some(Power {
        source: "test".to_owned(),
        arithmetic_share: 0.6,
        arithmetic_slope: 0.2,
        float8_slope: None,
    });
    // 80 of 100 us: f = 1 + 0.2 (s - 0.6) with s = 80 f / (80 f + 20), so 80 f² - 66.4 f - 17.6 =
    // 0.
    profile.device.kernel_gap_us = 5.0;
    let factor = (66.4 + f64::sqrt(66.4 * 66.4 + 4.0 * 80.0 * 17.6)) / 160.0;
    let gaps = m.simulate(&profile);
    assert!((step_us(&gaps) - (80.0 * factor + 20.0)).abs() < 1e-4);
    let told = &gaps.environment["power.arithmetic_factor"];
    assert_eq!(*told, format!("{factor:.4}"));
    // Without gaps, only arithmetic is slower, by 8 %. Of 20 us, 17.2 are saved.
    profile.device.kernel_gap_us = 0.0;
    assert!((step_us(&m.simulate(&profile)) - 86.4).abs() < 1e-4);
    // Light simulations, and those of all ranks, give the same result.
    let light = shardlab_sim::simulate_light(&m.program(), &profile, &quiet()).unwrap();
    assert!((step_us(&light) - 86.4).abs() < 1e-4);
    let slow = Options {
        stragglers: vec![(0, 1.5)],
        ..quiet()
    };
    let slow = simulate(&m.program(), &profile, &slow).unwrap();
    assert!(
        (step_us(&slow) - 1.5 * 86.4).abs() < 1e-3,
        "{}",
        step_us(&slow)
    );
    // Below the share, nothing is faster than in the tables.
    profile.device.kernel_gap_us = 30.0;
    assert_eq!(step_us(&m.simulate(&profile)), 200.0);
}

#[test]
fn a_communicator_serialises_streams_in_launch_order() {
    let mut m = Machine::new(4);
    let (a, b) = (
        m.b.add_stream(StreamKind::AllGather, -1),
        m.b.add_stream(StreamKind::ReduceScatter, -1),
    );
    let comm = m.b.communicator("shard", 4, 1);
    // The collective of stream b is second in launch order, so it waits although its stream is
    // free.
    m.run(10, COMPUTE);
    m.b.join(COMPUTE, a);
    m.collect(20, comm, a);
    m.collect(5, comm, b);
    let shared = m.isolated(&m.profile());
    assert_eq!(times(&shared)[1..], [(10.0, 30.0), (30.0, 35.0)]);
    assert_eq!(shared.spans[2].blocker, Blocker::Communicator(1));

    let mut m = Machine::new(4);
    let (a, b) = (
        m.b.add_stream(StreamKind::AllGather, -1),
        m.b.add_stream(StreamKind::ReduceScatter, -1),
    );
    let (first, second) = (
        m.b.communicator("shard", 4, 1),
        m.b.communicator("shard_rs", 4, 1),
    );
    m.run(10, COMPUTE);
    m.b.join(COMPUTE, a);
    m.b.join(COMPUTE, b);
    m.collect(20, first, a);
    m.collect(5, second, b);
    let separate = m.isolated(&m.profile());
    assert_eq!(times(&separate)[1..], [(10.0, 30.0), (10.0, 15.0)]);
}

#[test]
fn waiting_for_what_was_not_recorded_is_an_error() {
    let mut m = Machine::new(1);
    let event = m.b.add_event();
    m.b.op(Op::Wait {
        event,
        stream: COMPUTE,
    });
    m.run(1, COMPUTE);
    match simulate(&m.program(), &m.profile(), &quiet()) {
        Err(SimError::Internal(message)) => assert!(message.contains("event 0"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_host_waits_for_an_event() {
    let mut m = Machine::new(1);
    m.run(10, COMPUTE);
    let event = m.b.add_event();
    m.b.op(Op::Record {
        event,
        stream: COMPUTE,
    })
    .op(Op::HostWait(event));
    m.run(5, COMPUTE);
    let mut profile = m.profile();
    profile.host.launch_us = 1.0;
    // 1 launch, 10 kernel, 1 launch, 5 kernel. The next step's first launch overlaps with the last
    // kernel.
    let run = m.simulate(&profile);
    assert_eq!(times(&run).iter().map(|t| t.1 - t.0).sum::<f64>(), 15.0);
    assert_eq!(run.spans[1].issued.0 - run.spans[0].end.0, 1_000_000);
    assert_eq!(run.spans[1].blocker, Blocker::Host);
    assert_eq!(step_us(&run), 16.0);
}

#[test]
fn a_full_queue_holds_the_host_up() {
    // Side work is issued after 8 long kernels. With 2 places in the queue, the host waits until 6
    // of them have started.
    let build = || {
        let mut m = Machine::new(1);
        let side = m.b.add_stream(StreamKind::CopyIn, 0);
        let k = m.kernel(100);
        for _ in 0..8 {
            m.b.launch(k, COMPUTE);
        }
        m.run(1, side);
        m
    };
    let m = build();
    let mut profile = m.profile();
    let deep = m.simulate(&profile);
    let issued = |run: &shardlab_plan::record::Run| {
        run.spans[8].issued.0.saturating_sub(run.spans[0].start.0) / 1_000_000
    };
    assert_eq!(issued(&deep), 0);
    profile.host.queue_depth = 2;
    let shallow = m.simulate(&profile);
    // The eighth launch enters the queue when the sixth kernel starts, after 500 us.
    assert_eq!(issued(&shallow), 500);
    assert_eq!(step_us(&shallow), 800.0);
}

#[test]
fn a_replayed_scope_costs_one_launch() {
    let mut m = Machine::new(1);
    let scope = m.b.add_scope("block".into());
    for kind in [SectionKind::First, SectionKind::Steady] {
        m.b.op(Op::GraphBegin(scope));
        for _ in 0..10 {
            m.b.op(Op::HostWork {
                kind: HostWorkKind::Dispatch,
                count: 1,
            });
            m.run(2, COMPUTE);
        }
        m.b.op(Op::GraphEnd(scope));
        m.b.end_section(kind);
    }
    let mut profile = m.profile();
    profile.host.launch_us = 3.0;
    profile.host.work.dispatch_us = 4.0;
    profile.host.graph_launch_us = 12.0;
    profile.device.graph_gap_us = 0.5;
    let run = m.simulate(&profile);
    assert_eq!(
        run.steps[0].host.us(),
        70.0,
        "the capturing step pays for every launch"
    );
    assert_eq!(run.host.us(), 12.0);
    assert_eq!(step_us(&run), 25.0, "ten nodes of 2 us, 0.5 us apart");
}

#[test]
fn the_urgent_stream_goes_first() {
    // Two collectives are issued while a kernel uses all SMs: one waits for the end of the kernel,
    // the other for a part of it.
    let mut m = Machine::new(4);
    let (low, high) = (
        m.b.add_stream(StreamKind::AllGather, 0),
        m.b.add_stream(StreamKind::ReduceScatter, -1),
    );
    let (first, second) = (m.b.communicator("a", 4, 1), m.b.communicator("b", 4, 1));
    let gemm = m.b.gemm(8192, 8192, 2048);
    m.b.launch(gemm, COMPUTE);
    m.collect(10, first, low);
    m.collect(10, second, high);
    let mut profile = m.profile();
    profile.gemm = hardware::load("h200-nvlink").unwrap().gemm;
    profile.contention.start_wait = 1.0;
    profile.contention.start_wait_priority = 0.25;
    profile.host.collective_us = 1.0;
    let options = Options {
        contention: true,
        ..quiet()
    };
    let run = simulate(&m.program(), &profile, &options).unwrap();
    let waits: Vec<f64> = run.spans[1..]
        .iter()
        .map(|s| (s.start - s.ready.max(s.issued)).us())
        .collect();
    assert!(waits[1] < waits[0], "{waits:?}");
}

#[test]
fn bandwidth_of_a_link_is_divided() {
    // Two all-gathers of 20 us on separate communicators share NVLink: 40 us for both.
    let mut m = Machine::new(4);
    let (a, b) = (
        m.b.add_stream(StreamKind::AllGather, -1),
        m.b.add_stream(StreamKind::ReduceScatter, -1),
    );
    let (first, second) = (m.b.communicator("a", 4, 1), m.b.communicator("b", 4, 1));
    let bytes = 1u64 << 30;
    let (x, y) = (
        m.b.collective(shardlab_plan::ir::CollectiveKind::AllGather, first, bytes),
        m.b.collective(shardlab_plan::ir::CollectiveKind::AllGather, second, bytes),
    );
    m.b.op(Op::Collective { id: x, stream: a })
        .op(Op::Collective { id: y, stream: b });
    let mut profile = m.profile();
    profile.collective = shardlab_sim::hardware::load("h200-nvlink")
        .unwrap()
        .collective;
    let run = simulate(
        &m.program(),
        &profile,
        &Options {
            contention: true,
            ..quiet()
        },
    )
    .unwrap();
    let alone = run.spans[0].alone.us();
    assert!(
        (step_us(&run) / alone - 2.0).abs() < 0.05,
        "{} against {alone}",
        step_us(&run)
    );
}

#[test]
fn exposed_time_is_attributed() {
    // A gather that waits for the previous kernel (a gate) is fully exposed; without the gate, it
    // is hidden.
    let build = |gated: bool| {
        let mut m = Machine::new(4);
        let side = m.b.add_stream(StreamKind::AllGather, -1);
        let comm = m.b.communicator("shard", 4, 1);
        m.run(100, COMPUTE);
        if gated {
            m.b.join(COMPUTE, side);
        }
        m.collect(60, comm, side);
        m.b.join(side, COMPUTE);
        m.run(100, COMPUTE);
        m
    };
    let gated = build(true);
    let run = gated.isolated(&gated.profile());
    assert_eq!(step_us(&run), 260.0);
    assert_eq!(run.exposed[&Cause::Gate].us(), 60.0);
    let stats = &run.collectives[&shardlab_plan::ir::CollectiveKind::AllGather];
    assert_eq!(
        (
            stats.count,
            stats.busy.us(),
            stats.exposed.us(),
            stats.overlapped_with_gemm
        ),
        (1, 60.0, 60.0, 0)
    );
    let free = build(false);
    let run = free.isolated(&free.profile());
    assert_eq!(step_us(&run), 200.0);
    assert!(run.exposed.is_empty(), "{:?}", run.exposed);
    let stats = &run.collectives[&shardlab_plan::ir::CollectiveKind::AllGather];
    assert_eq!(
        (stats.exposed, stats.overlapped_with_gemm),
        (Picos::ZERO, 1)
    );
}

#[test]
fn waiting_for_its_own_input_is_no_gate() {
    // A(100), optionally B(20), a collective of 60 us that reads buffer 0, and C, which waits for
    // it. The host has issued everything at time 0.
    let input = BufferId(0);
    let exposed = |before: &dyn Fn(&mut Machine)| {
        let mut m = Machine::new(4);
        for _ in 0..3 {
            m.b.buffer(Role::FullGrad, 1 << 20, COMPUTE);
        }
        let side = m.b.add_stream(StreamKind::ReduceScatter, -1);
        let comm = m.b.communicator("shard", 4, 1);
        before(&mut m);
        m.b.join(COMPUTE, side);
        m.collect(60, comm, side);
        m.b.join(side, COMPUTE);
        m.run(100, COMPUTE);
        let run = m.isolated(&m.profile());
        [Cause::Gate, Cause::Wire].map(|c| run.exposed.get(&c).map_or(0.0, |t| t.us()))
    };
    let gemm = |m: &mut Machine, us, read: &[BufferId], written: &[BufferId]| {
        let k = m.kernel(us);
        m.b.launch_over(k, COMPUTE, read, written);
    };
    let pack = |m: &mut Machine, from| {
        let k = m.b.kernel("pack", KernelClass::Copy, 0, 1 << 20, 1 << 20);
        m.b.launch_over(k, COMPUTE, &[from], &[input]);
    };
    let computed = exposed(&|m| gemm(m, 100, &[], &[input]));
    assert_eq!(computed, [0.0, 60.0]);
    // The collective also waits for another kernel: the time of that kernel counts as the gate's.
    let held = exposed(&|m| {
        gemm(m, 100, &[], &[input]);
        gemm(m, 20, &[], &[BufferId(1)]);
    });
    assert_eq!(held, [20.0, 40.0]);
    // The input is packed from a result that was just computed, or from one that was always
    // available.
    let packed = exposed(&|m| {
        gemm(m, 100, &[], &[BufferId(1)]);
        pack(m, BufferId(1));
    });
    assert_eq!(packed, [0.0, 60.0]);
    let late = exposed(&|m| {
        gemm(m, 100, &[], &[BufferId(2)]);
        pack(m, BufferId(1));
    });
    assert_eq!(late, [60.0, 0.0]);
}

#[test]
fn a_long_gather_is_bound_by_the_wire() {
    let mut m = Machine::new(4);
    let side = m.b.add_stream(StreamKind::AllGather, -1);
    let comm = m.b.communicator("shard", 4, 1);
    for _ in 0..3 {
        m.collect(50, comm, side);
        m.b.join(side, COMPUTE);
        m.run(10, COMPUTE);
    }
    let run = m.isolated(&m.profile());
    // Three gathers back to back, and the last kernel. The first two kernels are hidden behind
    // gathers.
    assert_eq!(step_us(&run), 160.0);
    assert_eq!(run.exposed[&Cause::Wire].us(), 130.0);
}

/// A(20), a reduction of 100 that reads its result, and B(70). A gather of 30 for C follows the
/// reduction.
#[test]
fn a_gather_behind_a_reduction_is_in_a_queue() {
    let exposed = |us: u64, own: bool, shared: bool| {
        let mut m = Machine::new(4);
        let side = m.b.add_stream(StreamKind::ReduceScatter, -1);
        let gathers = match shared {
            true => side,
            false => m.b.add_stream(StreamKind::AllGather, -1),
        };
        let comm = m.b.communicator("shard", 4, 1);
        let other = m.b.communicator("gathers", 4, 1);
        m.run(20, COMPUTE);
        m.b.join(COMPUTE, side);
        m.reduce(100, comm, side);
        m.collect(30, if own { other } else { comm }, gathers);
        if us > 0 {
            m.run(us, COMPUTE);
        }
        m.b.join(gathers, COMPUTE);
        m.run(10, COMPUTE);
        let program = m.program();
        let run = m.isolated(&m.profile());
        let found = run.gaps.iter().find(|g| g.cause == Cause::Queue);
        let queued = found.and_then(|g| Queues::new(&program, &run.spans).of_gap(g));
        let queued = queued.map(|q| (q.waited, q.behind, q.shared, q.time().us()));
        let by = [Cause::Queue, Cause::Wire, Cause::Gate]
            .map(|c| run.exposed.get(&c).map_or(0.0, |t| t.us()));
        (by, queued)
    };
    // The gather could have run from 0 to 30, but runs from 120 to 150, and B ends at 90. All of
    // this is the queue's.
    let waited = Some((2, 1, Shared::Communicator, 120.0));
    assert_eq!(exposed(70, false, false), ([60.0, 0.0, 0.0], waited));
    // B ends during the gather.
    assert_eq!(exposed(120, false, false), ([10.0, 0.0, 0.0], waited));
    // Without B, nothing hides the gather, so the gap has its full length: 100 of 130 are the
    // queue's.
    let (by, _) = exposed(0, false, false);
    assert_eq!(by, [120.0, 10.0, 0.0]);
    // On a single stream, only the reduction determines when the gather was ready, and the
    // reduction's own wait does not count.
    let waited = Some((2, 1, Shared::Stream, 100.0));
    assert_eq!(exposed(70, true, true), ([60.0, 0.0, 0.0], waited));
    // A separate communicator and a separate stream.
    assert_eq!(exposed(70, true, false), ([0.0; 3], None));
}

/// A reduction of 100 is followed by gathers of 50 and 50, whose results are needed one after the
/// other.
#[test]
fn a_line_of_gathers_waits_as_its_first_one_does() {
    let mut m = Machine::new(4);
    let side = m.b.add_stream(StreamKind::ReduceScatter, -1);
    let gathers = m.b.add_stream(StreamKind::AllGather, -1);
    let comm = m.b.communicator("shard", 4, 1);
    m.reduce(100, comm, side);
    m.collect(50, comm, gathers);
    m.b.join(gathers, COMPUTE);
    m.collect(50, comm, gathers);
    m.run(10, COMPUTE);
    m.b.join(gathers, COMPUTE);
    m.run(10, COMPUTE);
    let run = m.isolated(&m.profile());
    assert_eq!(step_us(&run), 210.0);
    // 0 to 150 for the first gather: 100 behind the reduction, and 50 of its own. 160 to 200 for
    // the second: without the reduction, it would have ended 100 earlier, and so would the kernel
    // before it.
    let by = [Cause::Queue, Cause::Wire].map(|c| run.exposed[&c].us());
    assert_eq!(by, [140.0, 50.0]);
}

#[test]
fn the_end_of_a_step_is_its_tail() {
    let mut m = Machine::new(4);
    let side = m.b.add_stream(StreamKind::ReduceScatter, -1);
    let comm = m.b.communicator("shard", 4, 1);
    m.run(100, COMPUTE);
    m.b.join(COMPUTE, side);
    m.collect(40, comm, side);
    m.b.at(UnitId(0), Phase::Optimizer).join(side, COMPUTE);
    m.run(10, COMPUTE);
    let run = m.isolated(&m.profile());
    assert_eq!(step_us(&run), 150.0);
    assert_eq!(run.exposed[&Cause::Tail].us(), 40.0);
}

#[test]
fn a_pipelined_host_hides_its_own_step() {
    // With 30 us of host work and 40 us of kernels per step, successive ends are 40 us apart, not
    // 70.
    let mut m = Machine::new(1);
    m.b.op(Op::HostWork {
        kind: HostWorkKind::Step,
        count: 1,
    });
    m.run(40, COMPUTE);
    let mut profile = m.profile();
    profile.host.work.step_us = 30.0;
    let run = simulate(
        &m.program(),
        &profile,
        &Options {
            steps: 5,
            ..quiet()
        },
    )
    .unwrap();
    assert_eq!(step_us(&run), 40.0);
}

#[test]
fn impossible_options_are_refused() {
    let mut m = Machine::new(2);
    m.run(1, COMPUTE);
    for options in [
        Options {
            jitter: -0.1,
            ..quiet()
        },
        Options {
            stragglers: vec![(2, 1.5)],
            ..quiet()
        },
        Options {
            stragglers: vec![(0, 0.0)],
            ..quiet()
        },
        Options {
            slower: vec![(Part::Host, f64::NAN)],
            ..quiet()
        },
        Options {
            slower: vec![(Part::Host, 2.0), (Part::Host, 2.0)],
            ..quiet()
        },
    ] {
        assert!(
            matches!(
                simulate(&m.program(), &m.profile(), &options),
                Err(SimError::Options(_))
            ),
            "{options:?}"
        );
    }
}
