//! Muon on matrices whose rows are sharded.
//!
//! Ranks have some rows of each matrix, of its gradient and of its momentum, but Newton-Schulz
//! iterations need the whole matrix. Matrix by matrix:
//! - each rank decays its rows, updates their momentum, and casts their update to bfloat16;
//! - an all-gather over the ranks that share the matrix makes the update whole
//!   (`DTensor.full_tensor()`);
//! - each of these ranks orthogonalizes all of it, and subtracts its own rows from the weight.
//!
//! Everything runs on the compute stream: `full_tensor()` waits for its collective.

use super::builder::CollectiveLaunch;
use super::emitter::Emitter;
use super::kernels::KernelLaunch;
use crate::ir::{
    Access, AxisId, BufferId, COMPUTE, CollectiveKind, CommId, DType, MatrixShape, NewtonSchulz,
    ParamId, Part, ReduceOp, Role, ShardOp,
};
use crate::program::Rule;
use smallvec::smallvec;

/// Type of what is gathered and orthogonalized.
const TYPE: DType = DType::Bf16;

/// How ranks get the whole matrices of which a state has rows.
#[derive(Clone, Debug)]
pub(crate) struct RowGather {
    /// Matrix of each item.
    pub(crate) params: Vec<ParamId>,
    /// Axis over which their rows are sharded.
    pub(crate) axis: AxisId,
    /// Communicator along the axis; `None` if it has one rank.
    pub(crate) comm: Option<CommId>,
}

/// Rows of a matrix on a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// Matrix.
    pub(super) param: ParamId,
    /// Weights.
    pub(super) weight: Access,
    /// Elements, with padding.
    pub(super) numel: u64,
}

/// Allocates the buffer that receives the update of rows.
pub(super) fn alloc_update(out: &mut Emitter<'_>, rows: Rows) -> BufferId {
    let update = buffer(out, rows.param, rows.numel);
    out.b.alloc(Rule::Optimizer, update);
    update
}

/// Emits what follows the momentum: makes the update of rows whole, orthogonalizes it, and
/// subtracts it from the weights. Frees the update.
pub(super) fn apply_update(
    out: &mut Emitter<'_>,
    rows: Rows,
    update: BufferId,
    gather: &RowGather,
) {
    let shape = &out.inputs.tape.params[rows.param.index()].shape;
    let matrix = MatrixShape {
        rows: shape[0],
        cols: shape[1],
    };
    let whole = match gather.comm {
        Some(comm) => {
            let ranks = u64::from(out.inputs.mesh.size(gather.axis));
            let whole = buffer(out, rows.param, rows.numel * ranks);
            out.b.alloc(Rule::MuonGather, whole);
            all_gather(out, comm, update, whole);
            out.b.free(Rule::MuonGather, update);
            whole
        }
        None => update,
    };
    orthogonalize(out, matrix, whole);
    apply(out, matrix, rows, whole, gather);
    out.b.free(Rule::Optimizer, whole);
}

/// Creates a buffer for the update of a matrix, or of its rows.
fn buffer(out: &mut Emitter<'_>, param: ParamId, numel: u64) -> BufferId {
    out.of_param(Role::Temporary, numel * TYPE.size(), TYPE, COMPUTE, param)
}

fn all_gather(out: &mut Emitter<'_>, comm: CommId, rows: BufferId, whole: BufferId) {
    let (input, output) = (out.b.whole(rows), out.b.whole(whole));
    out.collective(CollectiveLaunch {
        rule: Rule::MuonGather,
        stream: COMPUTE,
        kind: CollectiveKind::AllGather,
        comm,
        reduce: ReduceOp::None,
        dtype: TYPE,
        parts: smallvec![Part { input, output }],
        sent: None,
    });
}

/// Emits the iterations over a matrix. torch allocates the other matrices of an iteration.
fn orthogonalize(out: &mut Emitter<'_>, matrix: MatrixShape, whole: BufferId) {
    let [_, further @ ..] = NewtonSchulz::matrices(matrix.short_and_long());
    let hardware = &out.inputs.scenario.mesh.hardware;
    let torch = out.inputs.engine.allocates_workspaces(hardware);
    let others = torch.then(|| out.scratch("Newton-Schulz matrices", further.iter().sum()));
    if let Some(id) = others {
        out.b.alloc(Rule::Optimizer, id);
    }
    // Padding follows the last row.
    let update = Access {
        bytes: matrix.numel() * TYPE.size(),
        ..out.b.whole(whole)
    };
    out.run(KernelLaunch {
        rule: Rule::Optimizer,
        op: ShardOp::Orthogonalize { matrix },
        elements: matrix.numel(),
        dtype: DType::F32,
        stream: COMPUTE,
        reads: &[update],
        writes: &[update],
    });
    if let Some(id) = others {
        out.b.free(Rule::Optimizer, id);
    }
}

/// Emits the update of a rank's rows.
fn apply(
    out: &mut Emitter<'_>,
    matrix: MatrixShape,
    rows: Rows,
    whole: BufferId,
    gather: &RowGather,
) {
    let update = Access {
        bytes: rows.numel * TYPE.size(),
        per_rank: gather.comm.map(|_| gather.axis.into()),
        ..out.b.whole(whole)
    };
    out.run(KernelLaunch {
        rule: Rule::Optimizer,
        op: ShardOp::MuonApply { matrix },
        elements: rows.numel,
        dtype: DType::F32,
        stream: COMPUTE,
        reads: &[rows.weight, update],
        writes: &[rows.weight],
    });
}
