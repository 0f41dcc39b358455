//! Faults end every rank quickly, with the cause.

use super::*;
use crate::base::operand::RawRange;
use crate::device::cpu::{CpuOptions, CpuWorld};
use crate::device::null::NullDevice;
use crate::device::{Abort, Command, Device, FailureKind, Pass};
use crate::engine::{Fault, FaultKind};
use smallvec::smallvec;
use std::sync::atomic::Ordering;

fn failing(toy: &Toy, kind: FaultKind, instr: InstrId, timeout: u64) -> ExecError {
    let options = ExecOptions {
        timeout: Duration::from_millis(timeout),
        fault: Some(Fault {
            rank: 2,
            instr,
            kind,
        }),
        ..quick()
    };
    let mut s = session(&toy.p, toy.weight, options);
    let e = steps(&mut s, 3).unwrap_err();
    // The session has failed, and returns the same error again.
    assert_eq!(steps(&mut s, 1).unwrap_err().first(), e.first());
    drop(s);
    let ExecError::Failed { ranks, .. } = &e else {
        panic!("{e}");
    };
    assert_eq!(ranks.len(), 4);
    assert!(ranks.iter().all(|r| !r.is_empty()));
    e
}

#[test]
fn a_rank_that_fails_anywhere_stops_all_with_the_first_cause() {
    let toy = toy(4, Pool::Caching, false);
    let all = toy.p.section(SectionKind::Steady).unwrap().instrs.clone();
    for i in all.clone().step_by(3) {
        for (kind, found) in [
            (FaultKind::Panic, FailureKind::Panic),
            (FaultKind::Error, FailureKind::Injected),
        ] {
            let e = failing(&toy, kind, InstrId(i), 20_000);
            let first = e.first().unwrap();
            assert_eq!((first.rank, &first.kind), (2, &found), "{e}");
        }
    }
}

#[test]
fn a_worker_that_dies_in_a_kernel_or_in_the_middle_of_a_collective() {
    let toy = toy(4, Pool::Caching, false);
    for (instr, stream) in [
        (toy.gather, "all_gather"),
        (toy.kernel, "compute"),
        (toy.reduce, "reduce_scatter"),
    ] {
        let e = failing(&toy, FaultKind::DevicePanic, instr, 20_000);
        let first = e.first().unwrap();
        assert_eq!((first.rank, first.stream), (2, Some(stream)), "{e}");
        assert_eq!(
            (first.kind.clone(), first.instr),
            (FailureKind::Panic, Some(instr))
        );
        let ExecError::Failed { ranks, .. } = &e else {
            panic!();
        };
        assert_eq!(ranks[1], "stopped because rank 2 failed");
    }
}

#[test]
fn a_rank_that_goes_missing_is_named_with_the_collective() {
    let toy = toy(4, Pool::Caching, false);
    let e = failing(&toy, FaultKind::Stall, toy.gather, 300);
    let first = e.first().unwrap();
    assert_eq!(first.kind, FailureKind::Timeout);
    let text = e.to_string();
    assert!(
        text.contains(
            "communicator shard (ranks [0, 1, 2, 3]): all_gather number 2: rank 2 missing"
        ) && text.contains("all_gather f32"),
        "{text}"
    );
}

#[test]
fn a_wait_for_an_event_that_never_comes_is_named() {
    let mut b = Build::new(1, 1, 1);
    let x = b.buffer(Role::ModelWeight, 16);
    b.alloc(x);
    b.end_section(SectionKind::Init);
    // Each stream waits for the other.
    let (e, f) = (EventId(0), EventId(1));
    b.program.events = 2;
    let a = b.whole(x);
    b.emit(Op::Record {
        event: e,
        stream: AG,
    });
    b.wait(e, COMPUTE);
    b.shard_op(ShardOp::Zero, COMPUTE, &[], &[a]);
    b.end_section(SectionKind::First);
    let mut p = b.finish();
    // A stream waits for an event that is only recorded later on the same stream.
    let wait = Instr {
        op: Op::Wait {
            event: f,
            stream: AG,
        },
        ..p.instrs[1]
    };
    p.instrs.insert(1, wait);
    p.sections[1].instrs.end += 1;
    let mut s = Session::with_launcher(Arc::new(p), quick(), shard_ops).unwrap();
    let error = steps(&mut s, 1).unwrap_err();
    assert!(
        error.to_string().contains("event e1 has not been recorded"),
        "{error}"
    );
}

#[test]
fn nan_checks_name_the_buffer() {
    let toy = toy(2, Pool::Caching, false);
    let options = ExecOptions {
        nan_check: true,
        ..quick()
    };
    let mut s = session(&toy.p, toy.weight, options);
    steps(&mut s, 2).unwrap();
    s.write_buffer(1, toy.weight, 8, &f32::NAN.to_le_bytes())
        .unwrap();
    let e = steps(&mut s, 1).unwrap_err();
    let first = e.first().unwrap();
    assert_eq!(
        (first.kind.clone(), first.instr),
        (FailureKind::Nan, Some(toy.gather))
    );
    // Rank 1's third element, after rank 0's slice.
    assert!(
        first
            .message
            .contains(&format!("element {} of {}", NUMEL + 2, 2 * NUMEL)),
        "{}",
        first.message
    );
    assert!(first.message.contains("full_weight"), "{}", first.message);
}

#[test]
fn the_programs_own_nan_flag_stops_the_run() {
    let mut b = Build::new(1, 1, 1);
    let [x, flag] = [16, 4].map(|n| b.buffer(Role::MainGrad, n));
    b.alloc(x);
    b.alloc(flag);
    b.end_section(SectionKind::Init);
    let (a, f) = (b.whole(x), b.whole(flag));
    let check = b.shard_op(ShardOp::NanCheck, COMPUTE, &[a], &[f]);
    let e = b.record(COMPUTE);
    b.emit(Op::HostWait(e));
    b.end_section(SectionKind::First);
    b.repeat();
    let mut s = Session::with_launcher(Arc::new(b.finish()), quick(), shard_ops).unwrap();
    steps(&mut s, 2).unwrap();
    s.write_buffer(0, x, 12, &f32::NAN.to_le_bytes()).unwrap();
    let e = steps(&mut s, 1).unwrap_err();
    let first = e.first().unwrap();
    assert_eq!(first.kind, FailureKind::Nan);
    assert_eq!(
        first.instr.unwrap().0,
        check.0 + 3,
        "the steady step's check"
    );
}

/// Two devices that launch different collectives: both ranks report it.
#[test]
fn ranks_that_disagree_all_report_it() {
    let mut b = Build::new(2, 2, 1);
    let x = b.buffer(Role::MainGrad, 32);
    let (a, s) = (b.whole(x), b.slice(x));
    b.collective(CollectiveKind::AllGather, SHARD, AG, s, a);
    b.collective(CollectiveKind::AllReduce, SHARD, AG, a, a);
    b.end_section(SectionKind::First);
    let program = Arc::new(b.finish());
    let abort = Arc::new(Abort::new(Duration::from_secs(20)));
    let world = CpuWorld::new(Arc::clone(&program), Arc::clone(&abort));
    let mut memory = vec![vec![0f32; 8]; 2];
    let mut devices: Vec<_> = (0..2)
        .map(|r| world.device(r, &CpuOptions::default(), shard_ops).unwrap())
        .collect();
    for (r, device) in devices.iter_mut().enumerate() {
        device
            .begin(Pass {
                hyper: NO_HYPER,
                slots: 0,
                record: false,
                replay_as_instructions: false,
                inputs: Vec::new(),
            })
            .unwrap();
        let base = memory[r].as_mut_ptr();
        let range = |at: usize, bytes| RawRange {
            ptr: base.wrapping_add(at).cast(),
            bytes,
            dtype: shardlab_plan::ir::DType::F32,
        };
        let parts = [
            smallvec![(range(4 * r, 16), range(0, 32))],
            smallvec![(range(0, 32), range(0, 32))],
        ];
        device
            .submit(
                AG,
                Command::Collective {
                    instr: InstrId(r as u32),
                    id: CollectiveId(r as u32),
                    parts: parts[r].clone(),
                },
                0,
            )
            .unwrap();
    }
    for device in &mut devices {
        assert!(device.idle().is_err());
    }
    drop(devices);
    let failures = abort.failures();
    let mut ranks: Vec<u32> = failures.iter().map(|f| f.rank).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1]);
    for f in failures {
        assert_eq!(f.kind, FailureKind::Mismatch);
        assert!(
            f.message.contains("rank 1 launches all_reduce"),
            "{}",
            f.message
        );
    }
}

/// If one rank records times of a pass, none replays graphs: a collective inside a graph may not
/// match one outside.
#[test]
fn all_ranks_issue_alike_if_one_records_times() {
    let mut b = Build::new(2, 2, 1);
    b.end_section(SectionKind::Init);
    let scope = b.add_scope("scope".to_owned());
    b.emit(Op::GraphBegin(scope));
    b.emit(Op::GraphEnd(scope));
    b.end_section(SectionKind::First);
    b.repeat();
    let program = Arc::new(b.finish());
    let devices: Vec<NullDevice> = (0..2).map(|_| NullDevice::default()).collect();
    let replay_as_instructions: Vec<_> = devices
        .iter()
        .map(|d| Arc::clone(&d.replay_as_instructions))
        .collect();
    let options = ExecOptions {
        record: true,
        ..quick()
    };
    let abort = Arc::new(Abort::new(options.timeout));
    let mut s = Session::with_devices(program, options, abort, devices).unwrap();
    let counts = || {
        let counts = replay_as_instructions
            .iter()
            .map(|s| s.load(Ordering::Relaxed));
        counts.collect::<Vec<_>>()
    };
    s.set_recording(false);
    for _ in 0..3 {
        s.step(&StepInputs::default(), NO_HYPER).unwrap();
    }
    assert_eq!(counts(), [0, 0]);
    s.set_recording(true);
    s.step(&StepInputs::default(), NO_HYPER).unwrap();
    assert_eq!(counts(), [1, 1]);
}

/// A device whose work does not end is not dropped, because its driver would never return.
#[test]
fn a_device_that_does_not_cease_is_kept() {
    let mut b = Build::new(2, 2, 1);
    b.end_section(SectionKind::Init);
    b.end_section(SectionKind::First);
    let program = Arc::new(b.finish());
    for fails in [false, true] {
        let devices: Vec<NullDevice> = [true, false]
            .map(|shuts_down| {
                let mut device = NullDevice::default();
                device.shuts_down = shuts_down;
                device
            })
            .into();
        let kept: Vec<_> = devices
            .iter()
            .map(|d| Arc::downgrade(&d.replay_as_instructions))
            .collect();
        let abort = Arc::new(Abort::new(Duration::from_secs(20)));
        let session =
            Session::with_devices(Arc::clone(&program), quick(), Arc::clone(&abort), devices);
        let session = session.unwrap();
        if fails {
            abort.stop();
        }
        drop(session);
        let kept = kept.iter().map(|d| d.strong_count() > 0);
        assert_eq!(kept.collect::<Vec<_>>(), [false, fails]);
    }
}

/// A rank that cannot start reports its error before its device is dropped: other ranks may be
/// waiting for it without a timeout.
#[test]
fn a_rank_without_memory_ends_all() {
    let mut b = Build::new(2, 2, 1);
    b.end_section(SectionKind::Init);
    let devices = [None, Some("no room".to_owned())].map(|refuses| {
        let mut device = NullDevice::default();
        device.refuses = refuses;
        device
    });
    let abort = Arc::new(Abort::new(Duration::from_secs(20)));
    let program = Arc::new(b.finish());
    let session = Session::with_devices(program, quick(), Arc::clone(&abort), devices.into());
    let error = session.map(drop).unwrap_err();
    assert!(error.to_string().contains("no room"), "{error}");
    assert!(abort.aborted());
}
