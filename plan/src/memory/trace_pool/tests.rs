use super::*;
use crate::ir::{Buffer, StreamId};
use crate::memory::fixture::{buffer, builder, section};
use crate::memory::{AllocError, Memory};

const MIB: u64 = 1 << 20;

/// Returns a program whose first step has one micro-batch with these operations (`+id` allocates,
/// `-id` frees), and whose steady step has others.
fn program(buffers: &[Buffer], first: &[i64], steady: &[i64]) -> Program {
    let mut b = builder();
    for x in buffers {
        b.add_buffer(*x);
    }
    section(&mut b, SectionKind::First, first);
    section(&mut b, SectionKind::Steady, steady);
    b.program
}

/// Returns a buffer on a different stream from the pool's tensors.
fn traced(mib: u64) -> Buffer {
    Buffer {
        stream: StreamId(1),
        ..buffer(Pool::Traced, mib * MIB)
    }
}

/// Runs operations and returns the addresses of the allocated buffers.
fn perform(memory: &mut Memory, p: &Program, ops: &[i64]) -> Result<Vec<u64>, AllocError> {
    let mut addresses = Vec::new();
    for &op in ops {
        let id = BufferId(op.unsigned_abs() as u32 - 1);
        if op > 0 {
            addresses.push(memory.alloc(p, id)?);
        } else {
            assert!(memory.free(p, id));
        }
    }
    Ok(addresses)
}

/// The example of a unit's weights in forward and in backward. The second lifetime gets another
/// slot. Slots grow to the largest interval that they are used for.
#[test]
fn lifetimes_are_colored_from_the_left() {
    let buffers = [traced(2), traced(3), traced(1)];
    // 1: [1, 3], 2: [2, 4], 3: [5, 7], 1 again: [6, 8].
    let ops = [1, 2, -1, -2, 3, 1, -3, -1];
    let p = program(&buffers, &ops, &ops);
    let mut memory = Memory::new(&p, None);
    let trace = perform(&mut memory, &p, &ops).unwrap();
    assert_eq!(memory.idle_slots(), Bytes::ZERO);
    let one = perform(&mut memory, &p, &ops).unwrap();
    // Intervals 1 and 3 share the first slot, 2 and 1 again the second.
    assert_eq!(one[0], one[2]);
    assert_eq!(one[1], one[3]);
    assert_eq!(one[1] - one[0], 2 * MIB);
    assert_eq!(memory.idle_slots(), Bytes(5 * MIB));
    assert_eq!(memory.counters().allocated, Bytes(5 * MIB));
    // The memory of the trace stays with the caching allocator.
    assert!(memory.counters().reserved > Bytes(5 * MIB));
    assert!(trace.iter().all(|a| !one.contains(a)));
    // Every later micro-batch gets the same addresses.
    for _ in 0..3 {
        assert_eq!(perform(&mut memory, &p, &ops).unwrap(), one);
    }
}

/// Intervals that touch do not share a slot, other element types have another tensor, and streams
/// do not matter.
#[test]
fn slots_belong_to_element_types() {
    let other = Buffer {
        dtype: DType::F32,
        ..traced(1)
    };
    let stream = Buffer {
        stream: StreamId(2),
        ..traced(1)
    };
    let ops = [1, -1, 2, -2, 3, -3];
    let p = program(&[traced(1), other, stream], &ops, &ops);
    let mut memory = Memory::new(&p, None);
    perform(&mut memory, &p, &ops).unwrap();
    let a = perform(&mut memory, &p, &ops).unwrap();
    assert_eq!(a[0], a[2]);
    assert_ne!(a[0], a[1]);
    assert_eq!(memory.idle_slots(), Bytes(2 * MIB));
}

/// How the pool fails: with an order that differs from the trace, with buffers that were not
/// traced, and with buffers that were not freed in the trace.
#[test]
fn what_was_not_traced_is_refused() {
    let buffers = [traced(1), traced(1)];
    let ops = [1, -1, 2, -2];
    let p = program(&buffers, &ops, &ops);
    let mut memory = Memory::new(&p, None);
    perform(&mut memory, &p, &ops).unwrap();
    // Both were planned into the same slot.
    let error = perform(&mut memory, &p, &[1, 2]).unwrap_err();
    assert_eq!(error, AllocError::SlotInUse { key: 1, holder: 0 });
    for first in [&[1, -1][..], &[1, -1, 2]] {
        let p = program(&buffers, first, &[2]);
        let mut memory = Memory::new(&p, None);
        perform(&mut memory, &p, first).unwrap();
        if first.len() == 3 {
            assert!(memory.free(&p, BufferId(1)));
        }
        let error = perform(&mut memory, &p, &[2]).unwrap_err();
        assert_eq!(error, AllocError::UnknownKey { key: 1 });
    }
}

/// A forward without a backward leaves the cursor advanced, so the next step takes the slot of the
/// second lifetime for the first.
#[test]
fn forwards_alone_leave_cursors_behind() {
    // Buffer 1 in forward and in backward, where 2 is still live. Buffer 3 keeps their slots
    // separate.
    let ops = [1, 3, -1, -3, 2, 1, -2, -1];
    let p = program(&[traced(1), traced(1), traced(1)], &ops, &ops);
    let mut memory = Memory::new(&p, None);
    perform(&mut memory, &p, &ops).unwrap();
    let trained = perform(&mut memory, &p, &ops).unwrap();
    perform(&mut memory, &p, &ops[..4]).unwrap();
    let next = perform(&mut memory, &p, &ops[..2]);
    // The slot of its backward is the slot of buffer 3.
    assert_eq!(trained[1], trained[3]);
    assert_eq!(
        next.unwrap_err(),
        AllocError::SlotInUse { key: 2, holder: 0 }
    );
}

/// The pool's tensors have to fit.
#[test]
fn a_pool_that_does_not_fit() {
    let ops = [1, 2, -1, -2];
    let p = program(&[traced(40), traced(40)], &ops, &ops);
    let mut memory = Memory::new(&p, Some(Bytes(79 * MIB)));
    assert!(matches!(
        perform(&mut memory, &p, &ops),
        Err(AllocError::OutOfMemory { .. })
    ));
    // The cached blocks of the trace are released to make room for it.
    let mut memory = Memory::new(&p, Some(Bytes(90 * MIB)));
    perform(&mut memory, &p, &ops).unwrap();
    perform(&mut memory, &p, &ops).unwrap();
}
