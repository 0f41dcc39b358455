//! Tests of the engine on hand-built programs with known results.

mod cost;
mod faults;
mod graphs;
mod memory;
mod steps;
mod stress;

use super::{ExecError, ExecOptions, Progress, RankInputs, Session, StepInputs, StepResult};
use crate::base::testing::*;
use crate::device::NO_HYPER;
use shardlab_plan::ir::*;
use shardlab_plan::program::*;
use std::sync::Arc;
use std::time::Duration;

/// A small sharded step: `w += sum over ranks of 0.5 * gathered w's slice`, so that with `n` ranks
/// every step multiplies the weights by `1 + n / 2`.
pub(super) struct Toy {
    pub(super) p: Program,
    pub(super) weight: BufferId,
    pub(super) moment: BufferId,
    /// Interesting instructions of the steady step.
    pub(super) gather: InstrId,
    pub(super) gathered: InstrId,
    pub(super) kernel: InstrId,
    pub(super) reduce: InstrId,
}

pub(super) const NUMEL: u64 = 96;

/// Builds the program; with `scope`, its kernels are captured.
pub(super) fn toy(ranks: u32, pool: Pool, scope: bool) -> Toy {
    let mut b = Build::new(ranks, ranks, 1);
    let n = u64::from(ranks);
    let bytes = NUMEL * 4;
    let weight = b.buffer(Role::ModelWeight, bytes);
    let moment = b.buffer(Role::OptimizerState, bytes);
    let full = b.buffer_on(Role::FullWeight, bytes * n, AG, pool);
    let grad = b.buffer_on(Role::FullGrad, bytes * n, RS, pool);
    let sum = b.buffer_on(Role::ReduceOutput, bytes, RS, pool);
    let loss = b.buffer(Role::Temporary, 4);
    b.program.loss = Some(loss);
    b.tag.phase = Phase::Init;
    b.alloc(weight);
    b.end_section(SectionKind::Init);

    let scope = scope.then(|| b.add_scope("scope".to_owned()));
    let mut marks = Vec::new();
    for kind in [SectionKind::First, SectionKind::Steady] {
        b.tag.phase = Phase::Forward;
        b.alloc(full);
        b.join(COMPUTE, AG);
        let (w, f) = (b.whole(weight), b.whole(full));
        let gather = b.collective(CollectiveKind::AllGather, SHARD, AG, w, f);
        let gathered = b.join(AG, COMPUTE);
        b.alloc(loss);
        let l = b.whole(loss);
        b.shard_op(ShardOp::SumSquares, COMPUTE, &[f], &[l]);
        b.tag.phase = Phase::Backward;
        b.alloc(grad);
        b.join(RS, COMPUTE);
        let g = b.whole(grad);
        if let Some(s) = scope {
            b.emit(Op::GraphBegin(s));
        }
        let kernel = b.shard_op(ShardOp::Copy, COMPUTE, &[f], &[g]);
        let half = ShardOp::Scale {
            factor: shardlab_plan::ir::Real(0.5),
        };
        b.shard_op(half, COMPUTE, &[g], &[g]);
        if let Some(s) = scope {
            b.emit(Op::GraphEnd(s));
        }
        b.free(loss);
        b.join(COMPUTE, AG);
        b.free(full);
        b.join(COMPUTE, RS);
        b.alloc(sum);
        let s = b.whole(sum);
        let reduce = b.collective(CollectiveKind::ReduceScatter, SHARD, RS, g, s);
        let reduced = b.record(RS);
        b.wait(reduced, COMPUTE);
        b.tag.phase = Phase::Optimizer;
        if kind == SectionKind::First {
            b.alloc(moment);
        }
        let m = b.whole(moment);
        b.shard_op(ShardOp::Accumulate, COMPUTE, &[s, m], &[m]);
        b.shard_op(ShardOp::Accumulate, COMPUTE, &[s, w], &[w]);
        b.join(COMPUTE, RS);
        b.free(sum);
        b.free(grad);
        b.emit(Op::HostWait(reduced));
        b.end_section(kind);
        marks.push((gather, gathered, kernel, reduce));
    }
    let (gather, gathered, kernel, reduce) = marks[1];
    Toy {
        p: b.finish(),
        weight,
        moment,
        gather,
        gathered,
        kernel,
        reduce,
    }
}

pub(super) fn quick() -> ExecOptions {
    ExecOptions {
        timeout: Duration::from_secs(20),
        poison: true,
        ..ExecOptions::default()
    }
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

pub(super) fn start_value(rank: u32, i: u64) -> f32 {
    (rank * 1000) as f32 + i as f32 / 7.0
}

/// Creates a session whose weights have known values.
pub(super) fn session(p: &Program, weight: BufferId, options: ExecOptions) -> Session {
    let mut s = Session::with_launcher(Arc::new(p.clone()), options, shard_ops).unwrap();
    for rank in 0..p.meta.mesh.world() {
        let data: Vec<u8> = (0..NUMEL)
            .flat_map(|i| start_value(rank, i).to_le_bytes())
            .collect();
        s.write_buffer(rank, weight, 0, &data).unwrap();
    }
    s
}

pub(super) fn steps(s: &mut Session, n: u32) -> Result<Vec<StepResult>, ExecError> {
    (0..n)
        .map(|_| s.step(&StepInputs::default(), NO_HYPER))
        .collect()
}

/// Returns the weights of all ranks.
pub(super) fn weights(s: &mut Session, weight: BufferId) -> Vec<Vec<f32>> {
    (0..s.program().meta.mesh.world())
        .map(|r| floats(&s.read_buffer(r, weight, 0, NUMEL * 4).unwrap()))
        .collect()
}
