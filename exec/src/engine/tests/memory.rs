//! Memory matches the allocators to the byte.

use super::*;
use crate::device::null::NullDevice;
use crate::device::{Abort, FailureKind};
use shardlab_plan::memory::{Memory, replay, replay_on};
use shardlab_plan::units::Bytes;

#[test]
fn peaks_and_timeline_equal_the_replay() {
    for pool in [Pool::Caching, Pool::Planned] {
        let toy = toy(2, pool, false);
        let options = ExecOptions {
            record: true,
            ..quick()
        };
        let mut s = session(&toy.p, toy.weight, options);
        let results = steps(&mut s, 3).unwrap();
        let trace = replay(&toy.p, 3).unwrap();
        for (step, pass) in results.iter().zip(&trace.passes[1..]) {
            assert_eq!(step.record.peak_allocated, pass.peak_allocated);
            assert_eq!(step.record.peak_reserved, pass.peak_reserved);
        }
        let mut wanted = Vec::new();
        let mut memory = Memory::new(&toy.p, None);
        replay_on(&toy.p, 3, &mut memory, |pass, instr, m| {
            if pass.step == 2 {
                wanted.push((instr, m.counters().allocated, m.counters().reserved));
            }
        })
        .unwrap();
        let got: Vec<_> = results[2]
            .samples
            .iter()
            .map(|s| (s.instr, s.allocated, s.reserved))
            .collect();
        assert_eq!(got, wanted);
        assert_eq!(s.rank_memory(1).unwrap(), memory.counters());
        let run = s.into_run();
        assert_eq!(run.memory.peak_allocated, trace.peak_allocated());
        assert_eq!(run.memory.peak_reserved, trace.peak_reserved());
        let by_role: Bytes = run.memory.by_role.iter().map(|r| r.1).sum();
        assert_eq!(by_role, run.memory.peak_allocated);
        assert_eq!(run.memory.at.step, 2, "what repeats matters more");
    }
}

#[test]
fn out_of_memory_says_what_was_alive_and_stops_every_rank() {
    let toy = toy(4, Pool::Caching, false);
    // A small-pool segment has 2 MiB; weights and gathered weights are in segments of different
    // streams.
    let options = ExecOptions {
        capacity: Some(Bytes(3 << 20)),
        ..quick()
    };
    let mut s = session(&toy.p, toy.weight, options);
    let e = steps(&mut s, 1).unwrap_err();
    let first = e.first().unwrap();
    assert_eq!(first.kind, FailureKind::OutOfMemory);
    assert!(first.message.contains("full_weight"), "{}", first.message);
    assert!(
        first.message.contains("in use: model_weight 512 B"),
        "{}",
        first.message
    );
    let ExecError::Failed { ranks, .. } = e else {
        panic!();
    };
    assert_eq!(ranks.len(), 4);
}

/// The plan fits, but not the machine's memory.
#[test]
fn memory_that_the_device_refuses_is_out_of_memory_too() {
    let toy = toy(1, Pool::Caching, false);
    let abort = Arc::new(Abort::new(Duration::from_secs(20)));
    let mut device = NullDevice::default();
    device.memory_end = 0;
    let options = ExecOptions::default();
    let made = Session::with_devices(Arc::new(toy.p), options, abort, vec![device]);
    let e = made.err().unwrap();
    let first = e.first().unwrap();
    assert_eq!(first.kind, FailureKind::OutOfMemory);
    let words = &first.message;
    assert!(words.contains("no memory at 0x"), "{words}");
    assert!(words.contains("in use: model_weight 512 B"), "{words}");
}

#[test]
fn a_buffer_that_is_not_allocated_cannot_be_used() {
    let mut toy = toy(2, Pool::Caching, false);
    let alloc = toy.p.section(SectionKind::First).unwrap().instrs.start;
    toy.p.instrs[alloc as usize].op = Op::HostWork {
        kind: HostWorkKind::Hook,
        count: 2,
    };
    let mut s = session(&toy.p, toy.weight, quick());
    let e = steps(&mut s, 1).unwrap_err();
    assert!(e.to_string().contains("is not live"), "{e}");
}
