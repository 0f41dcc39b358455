//! The planned pool of a program, which is planned only once.

use super::pool::{PoolPlan, trace};
use crate::ir::Pool;
use crate::program::{Op, Program};
use std::sync::{Arc, OnceLock};

/// Placement of a program's planned buffers. It is computed on first use and kept with the program.
///
/// It follows from the program, so it is part of neither comparisons nor digests.
#[derive(Clone, Debug, Default)]
pub struct Placement(OnceLock<(u64, Arc<PoolPlan>)>);

impl PartialEq for Placement {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Placement {
    /// Returns the plan for `program`, or `None` if it has no planned buffers. If the program was
    /// edited after planning, it is planned again.
    pub(super) fn of(program: &Program) -> Option<Arc<PoolPlan>> {
        if program.buffers.iter().all(|b| b.pool != Pool::Planned) {
            return None;
        }
        let now = fingerprint(program);
        let make = || Arc::new(PoolPlan::by_stream(trace(program)));
        let (then, plan) = program.placement.0.get_or_init(|| (now, make()));
        Some(if *then == now { plan.clone() } else { make() })
    }
}

/// Returns a hash of everything that the lifetimes and sizes of planned buffers depend on.
fn fingerprint(program: &Program) -> u64 {
    let mut hash = 0u64;
    let mut add = |word: u64| {
        hash = (hash ^ word)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29);
    };
    for section in &program.sections {
        add(u64::from(section.instrs.start) << 32 | u64::from(section.instrs.end));
        for instr in program.section_instrs(section) {
            match instr.op {
                Op::Alloc(id) => add(u64::from(id.0) << 1),
                Op::Free(id) => add(u64::from(id.0) << 1 | 1),
                _ => {}
            }
        }
    }
    for b in &program.buffers {
        add(u64::from(b.key) << 32 | u64::from(b.align));
        add(b.bytes.0 ^ (b.stream.index() as u64) << 56 ^ (b.pool as u64) << 60);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario;

    /// An edited program does not get the plan of its previous version.
    #[test]
    fn edits_are_noticed() {
        let path = std::path::Path::new("small-native");
        let scenario = scenario::load(path, &[]).unwrap();
        let mut program = crate::plan(&scenario).unwrap();
        let before = Placement::of(&program).unwrap();
        assert!(Arc::ptr_eq(&before, &Placement::of(&program).unwrap()));
        let planned = |b: &&mut crate::ir::Buffer| b.pool == Pool::Planned;
        program.buffers.iter_mut().find(planned).unwrap().bytes.0 += 1 << 20;
        let after = Placement::of(&program).unwrap();
        assert!(after.total() > before.total());
    }
}
