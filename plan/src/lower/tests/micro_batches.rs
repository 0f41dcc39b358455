//! Work that is only done in the last micro-batch of a step: reductions (`gradient_sync`) and
//! resharding (`reshard_after_backward`).

use super::find::{checked, collectives, frees, kernels};
use super::{collective, steady};
use crate::ir::{Buffer, BufferId, CollectiveKind, DType, Role, ShardOp};
use crate::program::{Op, Program};

/// Returns a program of three micro-batches.
fn three(sets: &[&str]) -> Program {
    checked(&[&["train.grad_accum=3"], sets].concat())
}

/// Returns the micro-batches of reductions of a kind, in order.
fn of(p: &Program, kind: CollectiveKind) -> Vec<u16> {
    let at = collectives(p, kind);
    at.into_iter().map(|at| steady(p)[at].micro_batch).collect()
}

/// Returns the buffers of full gradients of a dtype.
fn full_gradients(p: &Program, dtype: DType) -> Vec<(BufferId, &Buffer)> {
    let all = (0..).map(BufferId).zip(&p.buffers);
    all.filter(|(_, b)| b.role == Role::FullGrad && b.dtype == dtype)
        .collect()
}

fn allocations(p: &Program, buffer: BufferId) -> Vec<u16> {
    let list = steady(p).iter();
    list.filter(|i| i.op == Op::Alloc(buffer))
        .map(|i| i.micro_batch)
        .collect()
}

#[test]
fn the_last_micro_batch_reduces_for_all() {
    for sets in [
        &[][..],
        &["precision.comm_grads=bf16"],
        &["fsdp.strategy=optim_grads"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=fsdp2", "precision.comm_grads=bf16"],
        &["mesh.dp_outer=2"],
        &["mesh.dp_outer=2", "fsdp.policy=fsdp2"],
    ] {
        let groups = three(sets).groups.len();
        let each = of(&three(sets), CollectiveKind::ReduceScatter);
        assert_eq!(
            each,
            [vec![0; groups], vec![1; groups], vec![2; groups]].concat()
        );
        let last = three(&[sets, &["fsdp.gradient_sync=last"]].concat());
        assert_eq!(
            of(&last, CollectiveKind::ReduceScatter),
            vec![2; groups],
            "{sets:?}"
        );
        let replicas = if sets.contains(&"mesh.dp_outer=2") {
            groups
        } else {
            0
        };
        assert_eq!(
            of(&last, CollectiveKind::AllReduce),
            vec![2; replicas],
            "{sets:?}"
        );
    }
}

/// torch all-reduces in every micro-batch, unless `set_requires_all_reduce(False)` defers it to the
/// last one.
#[test]
fn replicas_reduce_every_micro_batch_or_the_last() {
    for mode in ["off", "full"] {
        let mode = format!("compile.mode={mode}");
        let base = ["mesh.dp_outer=2", "fsdp.policy=fsdp2", &mode];
        let every = three(&base);
        let scatters = of(&every, CollectiveKind::ReduceScatter);
        assert_eq!(of(&every, CollectiveKind::AllReduce), scatters, "{mode}");
        let once = three(&[&base[..], &["fsdp.gradient_sync=outer_last"]].concat());
        assert_eq!(of(&once, CollectiveKind::ReduceScatter), scatters, "{mode}");
        let n = scatters.len() / 3;
        assert_eq!(of(&once, CollectiveKind::AllReduce), vec![2; n], "{mode}");
    }
}

/// `unsharded_accumulated_grad`: one sum per parameter in the dtype that is reduced. It is cast
/// from the gradient of the first micro-batch, and the others are added to it. If the dtypes agree,
/// the first gradient itself is kept.
#[test]
fn torch_keeps_full_gradients_in_the_dtype_of_the_reduction() {
    for (dtype, bytes, casts) in [(DType::F32, 4, true), (DType::Bf16, 2, false)] {
        let comm = format!("precision.comm_grads={}", dtype.name());
        let p = three(&["fsdp.policy=fsdp2", "fsdp.gradient_sync=last", &comm]);
        let params = p.params.len();
        let numel: u64 = p.params.iter().map(|p| p.numel()).sum();
        let kept: Vec<_> = full_gradients(&p, dtype)
            .into_iter()
            .filter(|(id, _)| allocations(&p, *id) == [0])
            .collect();
        assert_eq!(kept.len(), params);
        assert_eq!(
            kept.iter().map(|(_, b)| b.bytes.0).sum::<u64>(),
            numel * bytes
        );
        for (id, _) in kept {
            let &[freed] = &frees(&p, id)[..] else {
                panic!("freed once")
            };
            assert_eq!(steady(&p)[freed].micro_batch, 2);
        }
        let sums = kernels(&p, |op| op == ShardOp::Accumulate);
        let of_batches: Vec<u16> = sums.iter().map(|s| steady(&p)[s.0].micro_batch).collect();
        assert_eq!(of_batches, [vec![1; params], vec![2; params]].concat());
        let copies = kernels(&p, |op| op == ShardOp::Copy);
        let first = copies.iter().filter(|c| steady(&p)[c.0].micro_batch == 0);
        assert_eq!(first.count(), if casts { params } else { 0 });
    }
}

/// The native engine writes the gradients of the first micro-batch to the accumulation buffer, in
/// the dtype of gradients between micro-batches.
#[test]
fn native_keeps_full_gradients_in_their_own_dtype() {
    let p = three(&["fsdp.gradient_sync=last", "precision.comm_grads=bf16"]);
    let groups = p.groups.len();
    let kept: Vec<_> = full_gradients(&p, DType::F32)
        .into_iter()
        .filter(|(id, _)| allocations(&p, *id) == [0])
        .collect();
    assert_eq!(kept.len(), groups);
    let padded: u64 = p.groups.iter().map(|g| g.layout.full_numel()).sum();
    assert_eq!(kept.iter().map(|(_, b)| b.bytes.0).sum::<u64>(), padded * 4);
    let sums = kernels(&p, |op| op == ShardOp::Accumulate);
    let of_batches: Vec<u16> = sums.iter().map(|s| steady(&p)[s.0].micro_batch).collect();
    assert_eq!(of_batches, [vec![1; groups], vec![2; groups]].concat());
    // With a single micro-batch, the program does not change.
    let one = checked(&["precision.comm_grads=bf16"]);
    assert!(full_gradients(&one, DType::F32).is_empty());
}

/// Each micro-batch reuses the parameters that the previous one has left gathered; the last one
/// frees them.
#[test]
fn the_next_micro_batch_finds_the_parameters() {
    let gathers = |sets: &[&str]| {
        let p = three(&[&["fsdp.policy=fsdp2"], sets].concat());
        let list = steady(&p).iter();
        let gathers = list.filter(|i| collective(&p, i) == Some(CollectiveKind::AllGather));
        let mut of = [0; 3];
        gathers.for_each(|i| of[usize::from(i.micro_batch)] += 1);
        (of, p.groups.len())
    };
    let keep = "fsdp.reshard_after_backward=false";
    let (each, n) = gathers(&[]);
    // The root does not reshard after forward by default.
    assert_eq!(each, [2 * n - 1; 3]);
    let root = "fsdp.reshard_root=true";
    assert_eq!(gathers(&[root]).0, [2 * n; 3]);
    assert_eq!(gathers(&[root, keep]).0, [2 * n, n, n]);
    assert_eq!(gathers(&[keep]).0, [2 * n - 1, n - 1, n - 1]);
    let whole = "fsdp.reshard_after_forward=false";
    assert_eq!(gathers(&[whole]).0, [n; 3]);
    assert_eq!(gathers(&[whole, keep]).0, [n, 0, 0]);
    // Forward keeps slices of two ranks, after any gather.
    let slices = "fsdp.reshard_after_forward=2";
    assert_eq!(gathers(&[slices, keep]).0, [2 * n - 1, n - 1, n - 1]);
}

/// A unit that opts out of reductions reduces once, while the others reduce in every micro-batch.
/// Its full gradient lives until then.
#[test]
fn single_units_leave_their_reduction_to_the_last_micro_batch() {
    for policy in ["native", "fsdp2"] {
        for outer in ["mesh.dp_outer=1", "mesh.dp_outer=2"] {
            let policy = format!("fsdp.policy={policy}");
            let set = [&policy, outer, "fsdp.no_sync_units=[\"layers.1\"]"];
            let p = three(&set);
            let scattered = |unit: &str| -> Vec<u16> {
                let all = collectives(&p, CollectiveKind::ReduceScatter).into_iter();
                let instrs = all.map(|at| &steady(&p)[at]);
                let of_unit = instrs.filter(|i| p.units[i.unit.index()].name == unit);
                of_unit.map(|i| i.micro_batch).collect()
            };
            assert_eq!(scattered("layers.1"), [2], "{set:?}");
            assert_eq!(scattered("layers.0"), [0, 1, 2], "{set:?}");
            let sums = full_gradients(&p, DType::F32);
            let unit = |b: &Buffer| p.units[b.unit.index()].name.clone();
            let kept: Vec<BufferId> = sums
                .iter()
                .filter(|(id, b)| unit(b) == "layers.1" && allocations(&p, *id) == [0])
                .map(|(id, _)| *id)
                .collect();
            assert!(!kept.is_empty(), "{set:?}");
            for id in kept {
                let freed = frees(&p, id);
                let at = freed.iter().map(|at| steady(&p)[*at].micro_batch);
                assert_eq!(at.collect::<Vec<_>>(), [2], "{set:?}");
            }
        }
    }
}
