//! Checks that Muon orthogonalizes whole matrices.

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{InstrId, ShardOp};
use crate::program::Program;

/// Checks on every rank that launches of Muon contain all elements of each of their matrices.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    let muon = |op| matches!(p.shard_op(op), Some(ShardOp::Muon { .. }));
    if !p.instrs.iter().any(|i| muon(&i.op)) {
        return;
    }
    for rank in 0..p.meta.mesh.world() {
        // Another rule checks the sizes of buffers.
        let Ok(launches) = p.matrix_runs(rank) else {
            return;
        };
        for (id, runs) in launches {
            for run in runs {
                let Some(param) = run.param.map(|id| &p.params[id.index()]) else {
                    continue;
                };
                sink.fact(RuleId::MuonMatrix, 1);
                if param.shape.len() != 2 || run.numel != param.numel() {
                    violation(p, sink, id, |launch| {
                        format!(
                            "{launch} on rank {rank} has {} of the {} elements of `{}` {:?}; expected a whole matrix",
                            run.numel,
                            param.numel(),
                            param.name,
                            param.shape.as_slice()
                        )
                    });
                }
            }
        }
    }
}

fn violation(p: &Program, sink: &mut Sink, id: InstrId, message: impl Fn(&str) -> String) {
    sink.violation(RuleId::MuonMatrix, Some(id), None, || {
        message(&describe::instr(p, id, None))
    });
}
