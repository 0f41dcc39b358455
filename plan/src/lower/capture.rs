//! Memory of a captured iteration.
//!
//! A replay finds every buffer where it was at capture. torch gives a graph a private pool for that; here what an iteration
//! allocates and frees is planned, so that it lies where it lay, whatever an allocator without a plan would do.

use crate::program::{Op, Pool, Program};

/// Moves what steps free again from the caching allocator to planned slots.
pub(super) fn fix_addresses(program: &mut Program) {
    for instr in &program.instrs {
        if let Op::Free(id) = instr.op {
            let buffer = &mut program.buffers[id.index()];
            if buffer.pool == Pool::Caching {
                buffer.pool = Pool::Planned;
            }
        }
    }
}
