//! Collectives between ranks of different processes, over the process group's store.
//!
//! Every member publishes its call and its inputs, and runs its share as if all memory were its
//! own, with the same code as rank threads, so results have the same bits. This is meant for
//! functional tests of several processes without GPUs: every byte passes through the store once per
//! member.

use super::{Call, moves};
use crate::base::operand::RawRange;
use crate::process::{PeerError, ProcessGroup, Reader, Writer};
use shardlab_plan::ir::{CollectiveKind, DType, ReduceOp};
use smallvec::SmallVec;

const KINDS: [CollectiveKind; 7] = [
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllReduce,
    CollectiveKind::AllToAll,
    CollectiveKind::PeerPush,
    CollectiveKind::PeerReturn,
    CollectiveKind::Barrier,
];

/// Memory of calls of other processes. 64-bit words keep elements aligned.
#[derive(Debug, Default)]
pub(super) struct Copies(Vec<Vec<u64>>);

impl Copies {
    fn room(&mut self, bytes: usize, dtype: DType) -> RawRange {
        let mut words = vec![0u64; bytes.div_ceil(8).max(1)];
        let ptr = words.as_mut_ptr().cast();
        // The heap allocation of the words does not move when the list grows.
        self.0.push(words);
        RawRange { ptr, bytes, dtype }
    }
}

/// Publishes this member's call and fetches those of the others. Returns all calls by position, and
/// the memory of the fetched ones.
///
/// # Safety
/// The inputs of `call` are valid for reads.
pub(super) unsafe fn exchange(
    peers: &ProcessGroup,
    name: &str,
    ranks: &[u32],
    position: usize,
    ticket: u64,
    call: &Call,
) -> Result<(Vec<Call>, Copies), PeerError> {
    let key = |p: usize| {
        format!(
            "{} number {ticket} of {name} by rank {}",
            call.kind.name(),
            ranks[p]
        )
    };
    let others = ranks.len() as u32 - 1;
    if others > 0 {
        // SAFETY: the caller's contract.
        let data = unsafe { encode(call) };
        peers.put_for(&key(position), others, data)?;
    }
    let mut copies = Copies::default();
    let mut calls = Vec::new();
    for (p, rank) in ranks.iter().enumerate() {
        if p == position {
            calls.push(call.clone());
            continue;
        }
        let data = peers.get(&key(p))?;
        let decoded = decode(&data, &mut copies);
        calls
            .push(decoded.ok_or_else(|| {
                PeerError::Failed(format!("rank {rank} sent an unreadable call"))
            })?);
    }
    Ok((calls, copies))
}

/// Runs this member's share of calls that match.
///
/// # Safety
/// The ranges of this member's call are valid and used by nothing else.
pub(super) unsafe fn perform(position: usize, calls: &[Call]) {
    // In an all-reduce, each member writes one chunk of every output. Here this member writes all
    // chunks, including those of the copies.
    let shares = match calls[position].kind {
        CollectiveKind::AllReduce => 0..calls.len(),
        _ => position..position + 1,
    };
    for share in shares {
        // SAFETY: all ranges are this member's or copies.
        unsafe {
            if let Some(staged) = moves::perform(share, calls) {
                moves::unstage(&calls[share], &staged);
            }
        }
    }
}

/// # Safety
/// The inputs are valid for reads.
unsafe fn encode(call: &Call) -> Vec<u8> {
    let mut w = Writer::default();
    let place = |found: Option<usize>| found.map_or(u8::MAX, |i| i as u8);
    w.u8(place(KINDS.iter().position(|k| *k == call.kind)));
    w.u8(place(DType::ALL.iter().position(|d| *d == call.dtype)));
    let (tag, factor) = match call.reduce {
        ReduceOp::None => (0, 0.0),
        ReduceOp::Sum => (1, 0.0),
        ReduceOp::Avg => (2, 0.0),
        ReduceOp::PremulSum(f) => (3, f),
        ReduceOp::Max => (4, 0.0),
    };
    w.u8(tag);
    w.f64(factor);
    w.u32(call.parts.len() as u32);
    for (input, output) in &call.parts {
        w.u64(output.bytes as u64);
        // SAFETY: the caller's contract.
        w.bytes(unsafe { std::slice::from_raw_parts(input.ptr.cast_const(), input.bytes) });
    }
    w.0
}

fn decode(data: &[u8], copies: &mut Copies) -> Option<Call> {
    let mut r = Reader(data);
    let kind = *KINDS.get(usize::from(r.u8()?))?;
    let dtype = *DType::ALL.get(usize::from(r.u8()?))?;
    let tag = r.u8()?;
    let factor = r.f64()?;
    let reduce = match tag {
        0 => ReduceOp::None,
        1 => ReduceOp::Sum,
        2 => ReduceOp::Avg,
        3 => ReduceOp::PremulSum(factor),
        4 => ReduceOp::Max,
        _ => return None,
    };
    let mut parts = SmallVec::new();
    for _ in 0..r.u32()? {
        let output = usize::try_from(r.u64()?).ok()?;
        let bytes = r.bytes()?;
        let input = copies.room(bytes.len(), dtype);
        // SAFETY: the memory was allocated with this size.
        unsafe {
            input
                .ptr
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
        parts.push((input, copies.room(output.min(1 << 36), dtype)));
    }
    r.done().then_some(Call {
        kind,
        reduce,
        dtype,
        parts,
        // Each member knows which rows it needs.
        rows: None,
        crash: false,
    })
}
