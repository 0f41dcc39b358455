//! Small programs of buffers, allocations and frees, for tests.

use crate::ir::{Buffer, BufferId, COMPUTE, DType, DeviceMesh, Holds, Pool, Role, UnitId};
use crate::program::{ProgramBuilder, ProgramMeta, SectionKind};
use crate::units::Bytes;

/// Returns a builder of a program on one rank.
pub(crate) fn builder() -> ProgramBuilder {
    let mesh = DeviceMesh::data_parallel(1, 1);
    ProgramBuilder::new(ProgramMeta::synthetic("memory", mesh))
}

/// Returns a buffer of the compute stream.
pub(crate) fn buffer(pool: Pool, bytes: u64) -> Buffer {
    Buffer {
        role: Role::Temporary,
        bytes: Bytes(bytes),
        dtype: DType::Bf16,
        align: 512,
        pool,
        stream: COMPUTE,
        unit: UnitId(0),
        holds: Holds::Named("test"),
        key: 0,
    }
}

/// Adds a section: `+id` allocates, `-id` frees (ids count from 1 here).
pub(crate) fn section(b: &mut ProgramBuilder, kind: SectionKind, ops: &[i64]) {
    for &op in ops {
        let id = BufferId(op.unsigned_abs() as u32 - 1);
        if op > 0 {
            b.alloc(id)
        } else {
            b.free(id)
        };
    }
    b.end_section(kind);
}
