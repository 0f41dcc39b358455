//! Order, streams and dtypes of the fully compiled step.

use super::find::{checked, collectives, kernels, output, stream, waits};
use super::steady;
use crate::ir::{COMPUTE, CollectiveKind, DType, ShardOp, StreamId};
use crate::program::{Op, Phase, Program, StreamKind};

fn full(sets: &[&str]) -> Program {
    let small = [
        "compile.mode=full",
        "compile.bucket_bytes=16KiB",
        "mesh.dp_outer=2",
    ];
    checked(&[&small, sets].concat())
}

/// HSDP as in SimpleFSDP: each communicator has a separate stream, and both reductions have the
/// dtype `backward_dtype`. The next reduce-scatter does not wait for an all-reduce.
#[test]
fn all_reduces_run_beside_reduce_scatters_in_their_dtype() {
    for accum in [1u16, 3] {
        let accumulation = format!("train.grad_accum={accum}");
        let p = full(&[&accumulation, "precision.comm_grads=bf16"]);
        let outer = stream(&p, StreamKind::Outer);
        let rs = stream(&p, StreamKind::ReduceScatter);
        let scatters = collectives(&p, CollectiveKind::ReduceScatter);
        let all_reduces = collectives(&p, CollectiveKind::AllReduce);
        assert_eq!(scatters.len(), usize::from(accum) * all_reduces.len());
        assert!(all_reduces.len() > 2, "several buckets");
        for at in all_reduces {
            let Op::Collective { stream, .. } = steady(&p)[at].op else {
                unreachable!("found as a collective")
            };
            let (_, dtype, _) = output(&p, at);
            assert_eq!((stream, dtype), (outer, DType::Bf16));
            assert_eq!(steady(&p)[at].micro_batch, accum - 1);
        }
        let from = |on: StreamId| waits(&p, on).into_iter().map(|w| w.2);
        assert!(from(rs).all(|s| s == COMPUTE));
        // Micro-batches are summed in the dtype of the result, and the resident gradients are
        // written once.
        let sums = kernels(&p, |op| op == ShardOp::Accumulate);
        assert_eq!(
            sums.len(),
            scatters.len() - scatters.len() / usize::from(accum)
        );
        for (_, _, on, sum) in sums {
            assert_eq!((on, p.buffers[sum.index()].dtype), (rs, DType::Bf16));
        }
        let copies = kernels(&p, |op| op == ShardOp::MultiCopy);
        let to_rest: Vec<_> = copies
            .into_iter()
            .filter(|c| steady(&p)[c.0].phase == Phase::Backward && c.2 != COMPUTE)
            .collect();
        assert_eq!(to_rest.len(), scatters.len() / usize::from(accum));
        for (_, _, on, grad) in to_rest {
            assert_eq!((on, p.buffers[grad.index()].dtype), (outer, DType::F32));
        }
    }
}
