//! Content digest of a program.

mod bytes;

use super::Program;
use serde::Serialize;

pub(super) fn digest(program: &Program) -> String {
    // Labels that do not affect execution are excluded: the scenario's name and the hardware
    // profile.
    let mut meta = program.meta.clone();
    meta.scenario.clear();
    meta.hardware.clear();
    let content = (
        (
            &meta,
            &program.modules,
            &program.params,
            &program.units,
            &program.groups,
            &program.streams,
        ),
        (
            &program.communicators,
            &program.kernels,
            &program.buffers,
            &program.accesses,
            &program.collectives,
        ),
        (
            &program.copies,
            &program.scopes,
            program.events,
            &program.sections,
            &program.instrs,
        ),
        (program.double_buffer_copies, program.persist_on_alloc_fail),
    );
    let mut hash = bytes::Hash::default();
    content
        .serialize(&mut hash)
        .expect("the program's types serialise without custom code, and know their lengths");
    hash.finish().to_hex()[..16].to_owned()
}
