//! Name and size of an instruction.

use shardlab_plan::Program;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::Op;

/// Returns the name of an instruction's kernel, collective or copy; `input` if it sends an input to
/// the device; empty if it does not run on a device stream.
#[must_use]
pub fn name(program: &Program, instr: InstrId) -> &str {
    match program.instrs[instr.index()].op {
        Op::Launch { kernel, .. } => &program.kernels[kernel.index()].name,
        Op::Collective { id, .. } => program.collectives[id.index()].kind.name(),
        Op::Copy { .. } => "copy",
        _ => program.upload(instr).map_or("", |_| "input"),
    }
}

/// Returns the bytes that an instruction moves: payload of a collective, which counts only those
/// pushed rows that are expected to travel, or traffic of a kernel.
#[must_use]
pub fn bytes(program: &Program, instr: InstrId) -> u64 {
    match program.instrs[instr.index()].op {
        op @ Op::Launch { .. } => program.traffic(&op).moved().0,
        Op::Collective { id, .. } => program.collectives[id.index()].expected_bytes(),
        Op::Copy { id, .. } => program.copies[id.index()].from.bytes,
        _ => {
            let upload = program.upload(instr);
            upload.map_or(0, |b| program.buffers[b.index()].bytes.0)
        }
    }
}

/// Returns the number of floating-point operations of an instruction.
#[must_use]
pub fn flops(program: &Program, instr: InstrId) -> u64 {
    match program.instrs[instr.index()].op {
        Op::Launch { kernel, .. } => program.kernels[kernel.index()].flops.0,
        _ => 0,
    }
}
