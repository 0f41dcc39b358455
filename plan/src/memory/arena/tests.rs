use super::*;
use crate::ir::{Buffer, InstrId, Role, UnitId};
use crate::memory::fixture::{buffer, builder, section};
use crate::memory::{ReplayError, replay, replay_on};
use crate::program::{ProgramBuilder, SectionKind};

const MIB: u64 = 1 << 20;

/// Returns a step with a weight (persistent), a moment (allocated in the first step), two
/// activations that overlap, and one validation activation.
fn step(pool: Pool) -> ProgramBuilder {
    let mut f = builder();
    for mib in [30, 60, 12, 14, 40] {
        f.add_buffer(buffer(pool, mib * MIB));
    }
    section(&mut f, SectionKind::Init, &[1]);
    section(&mut f, SectionKind::First, &[3, 4, -3, -4, 2]);
    section(&mut f, SectionKind::Steady, &[3, 4, -3, -4]);
    section(&mut f, SectionKind::Validation, &[5, -5]);
    f
}

#[test]
fn passes_of_a_replay() {
    let f = step(Pool::Caching);
    let t = replay(&f.program, 4).unwrap();
    let seen: Vec<_> = t
        .passes
        .iter()
        .map(|p| (p.section, p.step, p.peak_allocated.0 / MIB))
        .collect();
    assert_eq!(
        seen,
        [
            (SectionKind::Init, 0, 30),
            (SectionKind::First, 0, 90),
            (SectionKind::Steady, 1, 116),
            (SectionKind::Steady, 2, 116),
            (SectionKind::Validation, 3, 130),
            (SectionKind::Steady, 3, 116),
        ]
    );
    // Segments: 30, 12, 14, 60, and 40 for the validation. Nothing is ever released.
    let reserved: Vec<_> = t.passes.iter().map(|p| p.peak_reserved.0 / MIB).collect();
    assert_eq!(reserved, [30, 116, 116, 116, 156, 156]);
    assert_eq!(
        t.last(SectionKind::Steady).unwrap().peak_at,
        Some(InstrId(7))
    );
    assert_eq!(
        t.last(SectionKind::Steady).unwrap().end.allocated,
        Bytes(90 * MIB)
    );
    assert_eq!(
        (t.peak_allocated(), t.peak_reserved()),
        (Bytes(130 * MIB), Bytes(156 * MIB))
    );
}

#[test]
fn validation_runs_every_so_many_steps() {
    let mut f = step(Pool::Caching);
    f.program.meta.validate_every = 2;
    let t = replay(&f.program, 6).unwrap();
    let at: Vec<_> = t
        .passes
        .iter()
        .filter(|p| p.section == SectionKind::Validation)
        .map(|p| p.step)
        .collect();
    assert_eq!(at, [2, 4, 5]);
}

/// The same step with a planned pool: 90 MiB persistent, and one region that the step (26) and the
/// validation (40) share.
#[test]
fn the_pool_survives_a_validation() {
    let f = step(Pool::Planned);
    let mut memory = Memory::new(&f.program, None);
    assert_eq!(memory.pool_plan().unwrap().total(), Bytes(130 * MIB));
    let mut addresses = std::collections::BTreeMap::new();
    let t = replay_on(&f.program, 5, &mut memory, |_, at, memory| {
        // Every instruction finds the same buffers in every pass.
        let live = memory.live_buffers();
        let before = addresses.entry(at).or_insert_with(|| live.clone());
        assert_eq!(*before, live);
    })
    .unwrap();
    assert!(t.passes.iter().all(|p| p.peak_reserved == Bytes(130 * MIB)));
    assert_eq!(
        t.last(SectionKind::Steady).unwrap().peak_allocated,
        Bytes(116 * MIB)
    );
}

/// Three buffers, one after another. The two on one stream share a slot, while the one on the other
/// stream and the one whose key is on both streams have separate slots.
#[test]
fn the_pool_keeps_streams_apart() {
    let mut f = builder();
    for (stream, mib) in [(0, 8), (0, 6), (1, 8), (0, 4), (1, 4)] {
        f.add_buffer(Buffer {
            stream: StreamId(stream),
            ..buffer(Pool::Planned, mib * MIB)
        });
    }
    f.program.buffers[4].key = f.program.buffers[3].key;
    section(
        &mut f,
        SectionKind::Steady,
        &[1, -1, 2, -2, 3, -3, 4, -4, 5, -5],
    );
    let mut memory = Memory::new(&f.program, None);
    let mut at = Vec::new();
    for id in (0..5).map(BufferId) {
        at.push(memory.alloc(&f.program, id).unwrap() - crate::memory::pool::POOL_BASE);
        memory.free(&f.program, id);
    }
    // Key 3 is below the changing buffers in the first stream's region (4 + 8 MiB). Then the second
    // region follows.
    assert_eq!(at, [4, 4, 12, 0, 0].map(|m| m * MIB));
}

#[test]
fn live_set_at_the_peak() {
    let f = step(Pool::Caching);
    let mut memory = Memory::new(&f.program, None);
    let mut at_peak = Vec::new();
    replay_on(&f.program, 2, &mut memory, |pass, at, memory| {
        if pass.section == SectionKind::Steady && pass.peak_at == Some(at) {
            at_peak = memory.live_buffers();
            let sum: Bytes = at_peak.iter().map(|&b| memory.block_bytes(b)).sum();
            assert_eq!(sum, memory.counters().allocated);
        }
    })
    .unwrap();
    assert_eq!(at_peak, [0, 1, 2, 3].map(BufferId));
}

#[test]
fn broken_programs_are_named() {
    let mut f = builder();
    f.add_buffer(buffer(Pool::Caching, 1));
    section(&mut f, SectionKind::Init, &[1, 1]);
    let e = replay(&f.program, 1).unwrap_err();
    assert_eq!(
        e,
        ReplayError::Alloc {
            instr: InstrId(1),
            source: AllocError::AlreadyLive { buffer: 0 }
        }
    );
    let mut f = builder();
    f.add_buffer(buffer(Pool::Caching, 1));
    section(&mut f, SectionKind::Init, &[1, -1, -1]);
    assert_eq!(
        replay(&f.program, 1).unwrap_err(),
        ReplayError::NotLive {
            instr: InstrId(2),
            buffer: 0
        }
    );
}

#[test]
fn empty_buffers_cost_nothing() {
    let mut f = builder();
    let id = f.add_buffer(buffer(Pool::Caching, 0));
    section(&mut f, SectionKind::Init, &[1]);
    let mut memory = Memory::new(&f.program, None);
    assert_eq!(memory.alloc(&f.program, id), Ok(0));
    assert!(memory.live(id));
    assert_eq!(memory.counters(), Counters::default());
    assert!(memory.free(&f.program, id) && !memory.free(&f.program, id));
}

#[test]
fn capacity_covers_pool_and_cache() {
    let mut f = step(Pool::Planned);
    let cached = f.add_buffer(buffer(Pool::Caching, 30 * MIB));
    let mut memory = Memory::new(&f.program, Some(Bytes(150 * MIB)));
    memory.alloc(&f.program, BufferId(0)).unwrap();
    assert!(
        matches!(memory.alloc(&f.program, cached), Err(AllocError::OutOfMemory { limit: Bytes(l), .. }) if l == 20 * MIB)
    );
    let mut memory = Memory::new(&f.program, Some(Bytes(100 * MIB)));
    assert!(matches!(
        memory.alloc(&f.program, BufferId(0)),
        Err(AllocError::OutOfMemory { requested: Bytes(r), .. }) if r == 130 * MIB
    ));
}

/// Two copies of a layer's weight serve three layers. They stay allocated, while the odd root is
/// allocated and freed each time.
#[test]
fn double_buffer_copies_stay() {
    let mut f = builder();
    f.program.double_buffer_copies = 2;
    for (unit, mib) in [(0, 30), (1, 20), (2, 20), (3, 20)] {
        f.add_buffer(Buffer {
            role: Role::FullWeight,
            unit: UnitId(unit),
            ..buffer(Pool::DoubleBuffer, mib * MIB)
        });
    }
    section(&mut f, SectionKind::First, &[1, 2, 3, -2, 4, -3, -4, -1]);
    let t = replay(&f.program, 1).unwrap();
    assert_eq!(t.passes[0].peak_allocated, Bytes(70 * MIB));
    assert_eq!(t.passes[0].end.allocated, Bytes(40 * MIB));
    let mut memory = Memory::new(&f.program, None);
    let [a, b, c] = [1, 2, 3].map(BufferId);
    let first = memory.alloc(&f.program, a).unwrap();
    memory.alloc(&f.program, b).unwrap();
    assert_eq!(
        memory.alloc(&f.program, c),
        Err(AllocError::DoubleBufferExhausted {
            key: f.program.buffers[3].key,
            live: 2
        })
    );
    memory.free(&f.program, a);
    assert_eq!(memory.idle_copies(), Bytes(20 * MIB));
    assert_eq!(memory.alloc(&f.program, c), Ok(first));
    assert_eq!(memory.idle_copies(), Bytes::ZERO);
}

/// A copy that the device could not allocate can be requested again.
#[test]
fn a_refused_copy_stays_fresh() {
    let mut f = builder();
    let big = f.add_buffer(buffer(Pool::Caching, 90 * MIB));
    let copy = f.add_buffer(buffer(Pool::DoubleBuffer, 20 * MIB));
    let mut memory = Memory::new(&f.program, Some(Bytes(100 * MIB)));
    memory.alloc(&f.program, big).unwrap();
    assert!(memory.alloc(&f.program, copy).is_err());
    memory.free(&f.program, big);
    memory.alloc(&f.program, copy).unwrap();
    assert_eq!(memory.block_bytes(copy), Bytes(20 * MIB));
}
