//! Lifetimes of keys in host order.

use crate::program::{BufferId, Op, Pool, Program};
use crate::units::Bytes;

/// One life of a key. Times are positions in host order; a slot that is given back at a time can be taken again at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Key; a key may live several times.
    pub key: u32,
    /// Size.
    pub bytes: Bytes,
    /// Alignment of its address: a power of two, or 0 for any.
    pub align: u32,
    /// When it is allocated.
    pub start: u32,
    /// When it is freed, or [`Lifetime::FOREVER`].
    pub end: u32,
}

impl Lifetime {
    /// End of a life without a free: the key keeps its slot to itself.
    pub const FOREVER: u32 = u32::MAX;
}

/// The lives of all planned buffers over one pass of every section, each in a time range of its own, in order of their
/// starts, one list a stream. Whatever is alive at the end of a section lives for ever: sections follow one another in an order that the
/// program does not fix.
pub(in crate::memory) fn trace(program: &Program) -> Vec<Vec<Lifetime>> {
    let mut by_stream: Vec<Vec<Lifetime>> = Vec::new();
    // Index of the life that each buffer is in.
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
            if by_stream.len() <= buffer.stream.index() {
                by_stream.resize(buffer.stream.index() + 1, Vec::new());
            }
            let lives = &mut by_stream[buffer.stream.index()];
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
                    lives[index as usize].end = now;
                    *life = None;
                }
                // Allocated twice or freed while not live: the replay will say so.
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
