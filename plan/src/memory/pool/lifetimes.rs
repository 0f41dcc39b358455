//! Lifetimes of keys in host order.

use crate::ir::{BufferId, Pool, StreamId};
use crate::program::{Op, Program};
use crate::units::Bytes;
use std::collections::BTreeMap;

/// One lifetime of a key. Times are positions in host order. A slot that is freed at a time can be
/// taken again at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Key. A key may have several lifetimes.
    pub key: u32,
    /// Size.
    pub bytes: Bytes,
    /// Alignment of its address: a power of two, or 0 for any.
    pub align: u32,
    /// Time of the allocation.
    pub start: u32,
    /// Time of the free, or [`Lifetime::FOREVER`].
    pub end: u32,
}

impl Lifetime {
    /// End of a lifetime without a free. The key shares its slot with no other key.
    pub const FOREVER: u32 = u32::MAX;
}

/// Returns the lifetimes of all planned buffers over one pass of every section. Each section has a
/// separate time range. There is one list per stream, in order of their starts.
///
/// A buffer that is live at the end of a section lives forever, because the program does not fix
/// the order of sections. So does a key whose buffers belong to several streams; it shares its slot
/// with no other key.
pub(in crate::memory) fn trace(program: &Program) -> Vec<Vec<Lifetime>> {
    let streams = program
        .buffers
        .iter()
        .map(|b| b.stream.index() + 1)
        .max()
        .unwrap_or(0);
    let mut by_stream: Vec<Vec<Lifetime>> = vec![Vec::new(); streams];
    let shared = keys_of_several_streams(program);
    // Index of the current lifetime of each buffer.
    let mut open: Vec<Option<u32>> = vec![None; program.buffers.len()];
    let mut opened: Vec<BufferId> = Vec::new();
    let mut now = 0;
    for section in &program.sections {
        for instr in program.section_instrs(section) {
            let (Op::Alloc(id) | Op::Free(id)) = instr.op else {
                continue;
            };
            let buffer = &program.buffers[id.index()];
            if buffer.pool != Pool::Planned {
                continue;
            }
            let home = shared.get(&buffer.key);
            let lives = &mut by_stream[home.unwrap_or(&buffer.stream).index()];
            let life = &mut open[id.index()];
            match (instr.op, *life) {
                (Op::Alloc(_), None) => {
                    *life = Some(lives.len() as u32);
                    opened.push(id);
                    lives.push(Lifetime {
                        key: buffer.key,
                        bytes: buffer.bytes,
                        align: buffer.align,
                        start: now,
                        end: Lifetime::FOREVER,
                    });
                }
                (Op::Free(_), Some(index)) => {
                    if home.is_none() {
                        lives[index as usize].end = now;
                    }
                    *life = None;
                }
                // The buffer is allocated twice, or freed while it is not live. The replay will
                // report this.
                _ => {}
            }
            now += 1;
        }
        for id in opened.drain(..) {
            open[id.index()] = None;
        }
    }
    by_stream
}

/// Returns the first stream of every key that several streams use.
fn keys_of_several_streams(program: &Program) -> BTreeMap<u32, StreamId> {
    let planned = program.buffers.iter().filter(|b| b.pool == Pool::Planned);
    let mut pairs: Vec<(u32, StreamId)> = planned.map(|b| (b.key, b.stream)).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let mut first = BTreeMap::new();
    for pair in pairs.windows(2).filter(|w| w[0].0 == w[1].0) {
        first.entry(pair[0].0).or_insert(pair[0].1);
    }
    first
}
