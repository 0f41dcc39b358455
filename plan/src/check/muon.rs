//! Checks that Muon orthogonalizes whole matrices.

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{
    Access, AxisSet, BufferId, Collective, CollectiveKind, DType, Holds, InstrId, MatrixShape,
    ParamId, ShardOp,
};
use crate::program::{Instr, Op, Program};
use crate::shard::placements::shard_axis;
use crate::shard::{Layout, PerParamItem};
use std::collections::BTreeMap;

/// Checks launches that have whole matrices, and launches that have rows of matrices.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    whole(p, sink);
    rows(p, sink);
}

/// Checks on every rank that launches of Muon contain all elements of each of their matrices.
fn whole(p: &Program, sink: &mut Sink) {
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

/// What a buffer has of the update of a matrix.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// A rank's rows.
    Rows,
    /// All rows.
    Whole,
    /// All rows, orthogonalized.
    Orthogonal,
}

/// Updates of matrices on their way from momentum to weights.
#[derive(Default)]
struct Updates {
    held: BTreeMap<BufferId, (ParamId, Stage)>,
    /// Matrices whose momentum has been updated and whose weight has not, by the launch that
    /// updated the momentum.
    open: BTreeMap<ParamId, InstrId>,
}

/// Checks that the update of every matrix of which ranks have rows is gathered from the ranks that
/// share it, orthogonalized as a whole, and subtracted from the same rows on every rank.
fn rows(p: &Program, sink: &mut Sink) {
    let mut updates = Updates::default();
    for (id, instr) in (0..).map(InstrId).zip(&p.instrs) {
        let found = match (p.shard_op(&instr.op), instr.op) {
            (Some(ShardOp::MuonMomentum), _) => updates.momentum(p, id, instr),
            (Some(ShardOp::Orthogonalize { matrix }), _) => updates.orthogonalize(p, instr, matrix),
            (Some(ShardOp::MuonApply { matrix }), _) => updates.apply(p, instr, matrix),
            (None, Op::Collective { id, .. }) => {
                updates.collective(p, &p.collectives[id.index()]);
                continue;
            }
            _ => {
                for a in p.writes(&instr.op) {
                    updates.held.remove(&a.buffer);
                }
                continue;
            }
        };
        sink.fact(RuleId::MuonMatrix, 1);
        if let Err(what) = found {
            violation(p, sink, id, |launch| format!("{launch} {what}"));
        }
    }
    for (param, id) in updates.open {
        lost(p, sink, param, id);
    }
}

/// Reports an update that its matrix never gets.
fn lost(p: &Program, sink: &mut Sink, param: ParamId, id: InstrId) {
    let name = &p.params[param.index()].name;
    violation(p, sink, id, |launch| {
        format!("{launch} has the update of `{name}`, which nothing subtracts from the weight")
    });
}

impl Updates {
    fn momentum(&mut self, p: &Program, id: InstrId, instr: &Instr) -> Result<(), String> {
        let [update] = p.updates(&instr.op)[..] else {
            return Err("updates several tensors, or none; expected one matrix".to_owned());
        };
        let (param, _) = matrix_of(p, update.weight.buffer)?;
        let to = p.writes(&instr.op).last().copied();
        let whole = |a: &Access| a.bytes == p.buffers[a.buffer.index()].bytes.0;
        let to = to.filter(|a| whole(a) && elements(p, a) == elements(p, &update.weight));
        let Some(to) = to else {
            return Err("writes another number of elements than it updates".to_owned());
        };
        self.held.insert(to.buffer, (param, Stage::Rows));
        match self.open.insert(param, id) {
            Some(before) => Err(format!(
                "updates the momentum of `{}` again: nothing has subtracted the update of #{}",
                p.params[param.index()].name,
                before.0
            )),
            None => Ok(()),
        }
    }

    fn collective(&mut self, p: &Program, c: &Collective) {
        for part in &c.parts {
            let of = self.held.get(&part.input.buffer).copied();
            let gathered = of.filter(|(param, stage)| {
                let axis = shard_axis(p.params[param.index()].placements);
                *stage == Stage::Rows
                    && c.kind == CollectiveKind::AllGather
                    && p.communicators[c.comm.index()].axes == AxisSet::of(axis)
                    && part.output.offset == 0
                    && part.input.bytes == p.buffers[part.input.buffer.index()].bytes.0
            });
            match gathered {
                Some((param, _)) => {
                    let whole = (param, Stage::Whole);
                    self.held.insert(part.output.buffer, whole);
                }
                None => {
                    self.held.remove(&part.output.buffer);
                }
            }
        }
    }

    fn orthogonalize(
        &mut self,
        p: &Program,
        instr: &Instr,
        matrix: MatrixShape,
    ) -> Result<(), String> {
        let ([read], [written]) = (p.reads(&instr.op), p.writes(&instr.op)) else {
            return Err("has other operands than one matrix".to_owned());
        };
        let Some((param, stage)) = self.held.get(&read.buffer).copied() else {
            return Err(format!(
                "orthogonalizes {}, which has no update of a matrix",
                describe::range(p, *read)
            ));
        };
        let name = &p.params[param.index()].name;
        let (_, item) = item_of(p, param)?;
        let whole = match stage {
            Stage::Whole => true,
            Stage::Rows => item.shard_numel == item.numel,
            Stage::Orthogonal => return Err(format!("orthogonalizes `{name}` again")),
        };
        let is_it = shape(p, param)? == matrix && (read.offset, read) == (0, written);
        if !whole || !is_it || elements(p, read) != matrix.numel() {
            return Err(format!(
                "orthogonalizes {} of `{name}` as {} x {}; expected a whole matrix",
                describe::range(p, *read),
                matrix.rows,
                matrix.cols
            ));
        }
        self.held.insert(read.buffer, (param, Stage::Orthogonal));
        Ok(())
    }

    fn apply(&mut self, p: &Program, instr: &Instr, matrix: MatrixShape) -> Result<(), String> {
        let ([weight, update], [written]) = (p.reads(&instr.op), p.writes(&instr.op)) else {
            return Err("has other operands than rows of a weight and of an update".to_owned());
        };
        let (param, _) = matrix_of(p, weight.buffer)?;
        let name = &p.params[param.index()].name;
        if self.held.get(&update.buffer) != Some(&(param, Stage::Orthogonal)) {
            return Err(format!(
                "subtracts {} from `{name}`, which is not its orthogonalized update",
                describe::range(p, *update)
            ));
        }
        let (shards, item) = item_of(p, param)?;
        let mesh = &p.meta.mesh;
        let axis = shard_axis(p.params[param.index()].placements);
        let rows = |rank: u32| match shards {
            1 => item.local(0),
            _ => item.local(mesh.coordinate(axis, rank)),
        };
        let are_rows = |rank: u32| {
            let rows = rows(rank);
            rows.is_empty() || update.offset_on(mesh, rank) == rows.start * DType::Bf16.size()
        };
        let same = elements(p, update) == elements(p, weight) && weight == written;
        if shape(p, param)? != matrix || !same || !(0..mesh.world()).all(are_rows) {
            return Err(format!(
                "subtracts {} from `{name}`; expected the rows that each rank has of the weight",
                describe::range(p, *update)
            ));
        }
        self.open.remove(&param);
        Ok(())
    }
}

fn elements(p: &Program, a: &Access) -> u64 {
    a.bytes / p.buffers[a.buffer.index()].dtype.size()
}

/// Returns the matrix in a buffer, with its shape.
fn matrix_of(p: &Program, buffer: BufferId) -> Result<(ParamId, MatrixShape), String> {
    match p.buffers[buffer.index()].holds {
        Holds::Param(param) => Ok((param, shape(p, param)?)),
        _ => Err(format!(
            "updates {}, which is not one matrix",
            describe::buffer(p, buffer)
        )),
    }
}

fn shape(p: &Program, param: ParamId) -> Result<MatrixShape, String> {
    let param = &p.params[param.index()];
    match param.shape[..] {
        [rows, cols] => Ok(MatrixShape { rows, cols }),
        _ => Err(format!(
            "updates `{}` {:?}; expected a matrix",
            param.name,
            param.shape.as_slice()
        )),
    }
}

/// Returns the number of shards of a parameter, and its place in its layout.
fn item_of(p: &Program, param: ParamId) -> Result<(u32, PerParamItem), String> {
    let layouts = p.groups.iter().filter_map(|g| match &g.layout {
        Layout::PerParam(l) => Some(l),
        Layout::Flat(_) => None,
    });
    let mut items = layouts.flat_map(|l| l.items.iter().map(|item| (l.shards, *item)));
    let found = items.find(|(_, item)| item.param == param);
    found.ok_or_else(|| {
        let name = &p.params[param.index()].name;
        format!("updates rows of `{name}`, which is not sharded by rows")
    })
}
