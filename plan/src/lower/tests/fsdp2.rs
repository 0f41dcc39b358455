//! Order, events and lifetimes of policy `fsdp2`, as in `torch.distributed.fsdp` 2.11.

use super::find::{checked, collectives, frees, kernels, output, recorded, stream, waits};
use super::{LLAMA, collective, program, steady};
use crate::ir::{
    AxisId, AxisSet, COMPUTE, CollectiveKind, CopyKind, DType, EventId, Holds, KernelClass, Pool,
    Real, ReduceOp, Role, ShardOp, StreamId,
};
use crate::program::{Instr, Op, Phase, Program, Rule, SectionKind, StreamKind};

/// Returns a program of this policy that passes the checker.
fn fsdp2(sets: &[&str]) -> Program {
    checked(&[&["fsdp.policy=fsdp2"], sets].concat())
}

/// Only `finalize_backward` waits for events of the all-reduce stream.
#[test]
fn only_the_end_of_backward_waits_for_all_reduces() {
    for sets in [
        &["mesh.dp_outer=2"][..],
        &["mesh.dp_outer=2", "precision.comm_grads=bf16"],
        &[
            "mesh.dp_outer=2",
            "train.grad_accum=2",
            "fsdp.gradient_sync=outer_last",
        ],
    ] {
        let p = fsdp2(sets);
        let rs = stream(&p, StreamKind::ReduceScatter);
        let outer = stream(&p, StreamKind::Outer);
        let all_reduces = collectives(&p, CollectiveKind::AllReduce);
        assert_eq!(all_reduces.len(), p.groups.len(), "{sets:?}");
        assert!(
            waits(&p, rs).iter().all(|w| w.2 == COMPUTE),
            "{sets:?}: {:?}",
            waits(&p, rs)
        );
        let of_outer: Vec<_> = waits(&p, COMPUTE)
            .into_iter()
            .filter(|w| w.2 == outer)
            .collect();
        assert_eq!(of_outer.len(), p.groups.len(), "{sets:?}");
        for (at, ..) in of_outer {
            assert_eq!(steady(&p)[at].phase, Phase::Final, "{sets:?}");
        }
    }
}

/// NeMo Automodel #3373: backward of four blocks has seven gathers instead of four, in torch 2.11,
/// if blocks prefetch the next ones in forward and their checkpoints are reentrant. What it gathers
/// again is held until the end of backward.
#[test]
fn reentrant_recompute_gathers_prefetched_units_again() {
    let blocks = ["train.recompute=full", "model.layers=4", "fsdp.units=block"];
    let backward = |more: &[&str]| -> (usize, usize) {
        let p = fsdp2(&[&blocks[..], more].concat());
        let in_backward = [Phase::Recompute, Phase::Backward];
        let list = steady(&p).iter().enumerate();
        let gathers = list.filter(|(_, i)| {
            in_backward.contains(&i.phase) && collective(&p, i) == Some(CollectiveKind::AllGather)
        });
        let gathers: Vec<usize> = gathers.map(|(at, _)| at).collect();
        let unused = gathers.iter().filter(|at| {
            let (buffer, ..) = output(&p, **at);
            let freed = frees(&p, buffer).into_iter().find(|free| free > *at);
            freed.is_some_and(|free| steady(&p)[free].phase == Phase::Final)
        });
        (gathers.len(), unused.count())
    };
    let (ahead, reentrant) = ("fsdp.prefetch_forward=2", "train.use_reentrant=true");
    assert_eq!(backward(&[ahead]), (4, 0));
    assert_eq!(backward(&[reentrant]), (4, 0));
    assert_eq!(backward(&[reentrant, "fsdp.prefetch_backward=2"]), (4, 0));
    assert_eq!(backward(&[reentrant, ahead]), (7, 3));
    assert_eq!(backward(&[reentrant, "fsdp.prefetch_forward=1"]), (7, 3));
}

/// Work after a reduce-scatter, on its own stream or another one, does not delay the next copy-in:
/// `reduce_scatter_event` is recorded directly after the reduce-scatter.
#[test]
fn the_gate_waits_for_reduce_scatters_alone() {
    for sets in [
        &[][..],
        &["precision.comm_grads=bf16"],
        &["precision.comm_grads=bf16", "train.grad_accum=2"],
        &["mesh.dp_outer=2"],
        &[
            "mesh.dp_outer=2",
            "train.grad_accum=3",
            "precision.comm_grads=bf16",
        ],
    ] {
        let p = fsdp2(sets);
        let gates: Vec<EventId> = waits(&p, COMPUTE)
            .into_iter()
            .filter(|w| steady(&p)[w.0].rule == Rule::ReduceGate)
            .map(|w| w.1)
            .collect();
        let scatters = collectives(&p, CollectiveKind::ReduceScatter);
        // The end of a micro-batch waits for its last one.
        let micro_batches = usize::from(p.meta.micro_batches);
        assert_eq!(gates.len(), scatters.len() - micro_batches, "{sets:?}");
        for event in gates {
            assert!(scatters.contains(&(recorded(&p, event) - 1)), "{sets:?}");
        }
    }
}

/// `AllReduceState` holds the buffer that the replicas reduce until `finalize_backward`, unless it
/// is the gradient itself.
#[test]
fn inputs_of_all_reduces_live_until_the_end_of_backward() {
    for (dtype, role, phase, rule) in [
        (
            "bf16",
            Role::ReduceOutput,
            Phase::Final,
            Rule::ReduceRelease,
        ),
        ("f32", Role::MainGrad, Phase::Optimizer, Rule::ZeroGrad),
    ] {
        let dtype = format!("precision.comm_grads={dtype}");
        let p = fsdp2(&["mesh.dp_outer=2", &dtype]);
        let outer = stream(&p, StreamKind::Outer);
        for at in collectives(&p, CollectiveKind::AllReduce) {
            let (buffer, ..) = output(&p, at);
            assert_eq!(p.buffers[buffer.index()].role, role);
            let &[freed] = &frees(&p, buffer)[..] else {
                panic!("freed once")
            };
            let free = steady(&p)[freed];
            assert_eq!((free.phase, free.rule), (phase, rule));
            // It is freed after a wait for its own stream.
            let waited = |w: &(usize, EventId, StreamId)| {
                w.2 == outer && recorded(&p, w.1) > at && w.0 < freed
            };
            assert!(waits(&p, COMPUTE).iter().any(waited));
        }
    }
}

/// `partial_reduce_output` has the dtype of the reduction and lives on its stream. The last
/// micro-batch adds it to its own sum, which is all-reduced and then cast once.
#[test]
fn partial_sums_have_the_dtype_of_the_reduction() {
    let p = fsdp2(&[
        "mesh.dp_outer=2",
        "train.grad_accum=3",
        "precision.comm_grads=bf16",
        "fsdp.gradient_sync=outer_last",
    ]);
    let groups = p.groups.len();
    let rs = stream(&p, StreamKind::ReduceScatter);
    let outer = stream(&p, StreamKind::Outer);
    assert_eq!(
        collectives(&p, CollectiveKind::ReduceScatter).len(),
        3 * groups
    );
    let all_reduces = collectives(&p, CollectiveKind::AllReduce);
    assert_eq!(all_reduces.len(), groups);
    for at in all_reduces {
        assert_eq!(steady(&p)[at].micro_batch, 2);
        assert_eq!(output(&p, at).1, DType::Bf16);
    }
    let sums = kernels(&p, |op| op == ShardOp::Accumulate);
    assert_eq!(sums.len(), 2 * groups);
    for (at, _, on, sum) in sums {
        assert_eq!((on, p.buffers[sum.index()].dtype), (rs, DType::Bf16));
        assert!(steady(&p)[at].micro_batch > 0);
    }
    let casts = kernels(&p, |op| op == ShardOp::Copy);
    assert_eq!(casts.len(), groups);
    for (at, _, on, grad) in casts {
        assert_eq!((on, p.buffers[grad.index()].dtype), (outer, DType::F32));
        assert_eq!(steady(&p)[at].micro_batch, 2);
    }
}

/// `_get_gradient_divide_factors`: for N ranks, sums in f16 are divided by a power of two near √N
/// before the reduce-scatter, and by the rest after the last reduction. Other dtypes are averaged.
#[test]
fn f16_divides_on_both_sides_of_the_reductions() {
    for (shard, outer, before, after) in [
        (4, 1, 2.0, 2.0),
        (4, 2, 4.0, 2.0),
        (6, 1, 4.0, 1.5),
        (3, 1, 2.0, 1.5),
    ] {
        // 3 % 1 = 0 and 3 > 1: 2; 3 % 2 = 1. 6: 2, then 6 % 2 = 0 and 3 > 2: 4; 6 % 4 = 2.
        let (shard, replicas) = (
            format!("mesh.dp_shard={shard}"),
            format!("mesh.dp_outer={outer}"),
        );
        let f16 = fsdp2(&[&shard, &replicas, "precision.comm_grads=f16"]);
        let rs = stream(&f16, StreamKind::ReduceScatter);
        let scales = kernels(&f16, |op| matches!(op, ShardOp::Scale { .. }));
        let scatters = collectives(&f16, CollectiveKind::ReduceScatter);
        assert_eq!(scales.len(), 2 * f16.groups.len());
        for (pair, scatter) in scales.chunks(2).zip(scatters) {
            let factor = |by: f64| ShardOp::Scale {
                factor: Real(1.0 / by),
            };
            let [pre, post] = pair else {
                panic!("two of each group")
            };
            assert_eq!((pre.1, pre.2), (factor(before), rs));
            assert_eq!(f16.buffers[pre.3.index()].role, Role::ReduceInput);
            assert!(pre.0 < scatter && scatter < post.0);
            assert_eq!(post.1, factor(after));
            assert_eq!(output(&f16, scatter).0, post.3);
            let tail = if outer > 1 {
                stream(&f16, StreamKind::Outer)
            } else {
                rs
            };
            assert_eq!(post.2, tail);
        }
        let ops = |p: &Program| -> Vec<ReduceOp> {
            [CollectiveKind::ReduceScatter, CollectiveKind::AllReduce]
                .iter()
                .flat_map(|k| collectives(p, *k))
                .map(|at| output(p, at).2)
                .collect()
        };
        assert!(ops(&f16).iter().all(|op| *op == ReduceOp::Sum));
        let bf16 = fsdp2(&[&shard, &replicas, "precision.comm_grads=bf16"]);
        assert!(ops(&bf16).iter().all(|op| *op == ReduceOp::Avg));
        assert!(kernels(&bf16, |op| matches!(op, ShardOp::Scale { .. })).is_empty());
    }
    // Without an average, the divisor is 1.
    let p = fsdp2(&["precision.comm_grads=f16", "fsdp.per_token_loss=true"]);
    assert!(kernels(&p, |op| matches!(op, ShardOp::Scale { .. })).is_empty());
}

/// `reshard` records an event after the slices that it keeps. Only the group's next `unshard` waits
/// for it, on both gather streams. `to_unsharded` frees the slices directly after the copy-out,
/// before the backward that uses it.
#[test]
fn slices_of_an_integer_reshard_hold_up_their_own_gather_alone() {
    let p = fsdp2(&["fsdp.reshard_after_forward=2", "model.layers=3"]);
    let [copy_in, gather] = [StreamKind::CopyIn, StreamKind::AllGather].map(|k| stream(&p, k));
    let list = steady(&p);
    let of_rule = |rule, pick: &dyn Fn(&Op) -> bool| -> Vec<usize> {
        let all = list.iter().enumerate();
        all.filter(|(_, i)| i.rule == rule && pick(&i.op))
            .map(|(at, _)| at)
            .collect()
    };
    let slices = of_rule(Rule::ReshardGroup, &|op| matches!(op, Op::Alloc(_)));
    let frees = of_rule(Rule::ReshardGroup, &|op| matches!(op, Op::Free(_)));
    assert_eq!(slices.len(), frees.len());
    let blocks = p.units.iter().filter(|u| u.reshards).count();
    assert_eq!(blocks, 3);
    for on in [copy_in, gather] {
        let waits: Vec<_> = waits(&p, on)
            .into_iter()
            .filter(|w| list[w.0].rule == Rule::ReshardGroup)
            .collect();
        assert_eq!(waits.len(), blocks);
        for (at, event, _) in waits {
            // In backward, the wait is for the event recorded in the same unit's forward.
            let made = list[recorded(&p, event)];
            assert_eq!(
                (list[at].phase, made.phase),
                (Phase::Backward, Phase::Forward)
            );
            assert_eq!(list[at].unit, made.unit);
        }
    }
    // In forward, gathers wait for computation only through a copy-out or at the start.
    for on in [copy_in, gather] {
        for (at, ..) in waits(&p, on) {
            let i = list[at];
            let gate = [Rule::StepStart, Rule::GatherGate, Rule::CopyIn];
            assert!(i.phase != Phase::Forward || gate.contains(&i.rule), "{i:?}");
        }
    }
    for at in frees {
        assert_eq!(list[at].phase, Phase::Backward);
        // Only other slices come between it and its unit's copy-out.
        let before = list[..at]
            .iter()
            .rposition(|i| !matches!(i.op, Op::Free(_)))
            .expect("a copy-out");
        assert_eq!(list[before].rule, Rule::CopyOut);
        assert_eq!(list[before].unit, list[at].unit);
    }
    // For each parameter, the clone is freed before the next slice is copied.
    for pair in slices.windows(2) {
        if list[pair[0]].unit == list[pair[1]].unit {
            let between = &list[pair[0]..pair[1]];
            let whole = |i: &&Instr| i.rule == Rule::Reshard && matches!(i.op, Op::Free(_));
            assert_eq!(between.iter().filter(whole).count(), 1);
        }
    }
}

/// If a group does not reshard, `reshard` returns at once in a forward, with or without autograd:
/// its parameters stay full until the whole validation ends.
#[test]
fn validation_keeps_what_forward_keeps() {
    let units = "fsdp.units=[\"tok_embeddings=keep\", \"layers.*\"]";
    let p = fsdp2(&[units, "train.validate_every=2"]);
    let section = p.section(SectionKind::Validation).expect("asked for");
    let list = p.section_instrs(section);
    let last_kernel = list
        .iter()
        .rposition(|i| i.rule == Rule::Model && matches!(i.op, Op::Launch { .. }))
        .expect("a forward");
    let mut kept = 0;
    for (at, i) in list.iter().enumerate() {
        let Op::Free(b) = i.op else { continue };
        let b = &p.buffers[b.index()];
        if b.role == Role::FullWeight {
            let resharded = p.units[b.unit.index()].reshards;
            assert_eq!(
                at < last_kernel,
                resharded,
                "{}",
                p.units[b.unit.index()].name
            );
            kept += usize::from(!resharded);
        }
    }
    // The embedding, and the norm and head of the root.
    assert_eq!(kept, 3);
}

/// `fully_shard` creates one `FSDPParamGroup` per unit, even with frozen parameters: one all-gather
/// of all of its parameters, and one reduce-scatter of those with gradients.
#[test]
fn frozen_parameters_are_gathered_with_the_others() {
    let p = fsdp2(&[
        "fsdp.frozen=[\"layers.*.attention\"]",
        "train.grad_norm=true",
    ]);
    let blocks: Vec<_> = p.units.iter().filter(|u| u.reshards).collect();
    assert_eq!(blocks.len(), 2);
    for unit in &p.units {
        assert_eq!(unit.groups.len(), 1, "{}", unit.name);
    }
    let list = steady(&p);
    let gathers = |phase| {
        let all = list.iter().filter(move |i| i.phase == phase);
        all.filter(|i| super::collective(&p, i) == Some(CollectiveKind::AllGather))
            .count()
    };
    assert_eq!(
        (gathers(Phase::Forward), gathers(Phase::Backward)),
        (p.groups.len(), blocks.len())
    );
    // Hidden 64, feed-forward 176, over four ranks without padding: the norm, gate, up and down of
    // a layer in float32.
    let trained = 64 + 3 * 64 * 176;
    for at in collectives(&p, CollectiveKind::ReduceScatter) {
        if p.units[list[at].unit.index()].reshards {
            let (shard, ..) = output(&p, at);
            assert_eq!(p.buffers[shard.index()].bytes.0, trained);
        }
    }
    let updated = list.iter().filter(|i| i.rule == Rule::Optimizer);
    for access in updated.flat_map(|i| p.writes(&i.op)) {
        if let Holds::Param(x) = p.buffers[access.buffer.index()].holds {
            assert!(p.params[x.index()].requires_grad);
        }
    }
    // The native policy has separate groups for them.
    let native = checked(&["fsdp.frozen=[\"layers.*.attention\"]"]);
    assert_eq!(native.groups.len(), p.groups.len() + blocks.len());
}

/// The workspace of attention's backward kernel comes from the caching allocator while the kernel
/// runs. In this project's engine, the workspace is not part of the program.
#[test]
fn attention_has_its_workspace_while_it_runs() {
    let named = |p: &Program| {
        let all = p.buffers.iter();
        let found: Vec<_> = all
            .enumerate()
            .filter(|(_, b)| b.holds == Holds::Named("attention workspace"))
            .map(|(i, b)| (i, b.bytes.0))
            .collect();
        found
    };
    let p = fsdp2(&[]);
    let &[(id, bytes)] = &named(&p)[..] else {
        panic!("one size, one buffer")
    };
    // Two sequences of 32; four heads of 16 over two ranks. Dot products and gradients of queries
    // are in float32, gradients of keys and values by query head in bf16, each rounded up to 256
    // bytes.
    let rows = 2 * 4 * 32;
    assert_eq!(bytes, rows * 4 + rows * 16 * 4 + 2 * rows * 16 * 2);
    let allocated = steady(&p)
        .iter()
        .filter(|i| matches!(i.op, Op::Alloc(b) if b.index() == id));
    let phases: Vec<Phase> = allocated.map(|i| i.phase).collect();
    assert_eq!(phases, [Phase::Backward; 2], "once a block");
    assert!(named(&checked(&[])).is_empty());
    assert!(named(&fsdp2(&["mesh.hardware=cpu"])).is_empty());
}

/// A call of `fully_shard` with an integer builds a mesh with process groups of its own, as in the
/// trace `tests/data/traces/group2.json.gz`. A single engine gathers all units in one group.
#[test]
fn integer_reshard_has_a_process_group_per_unit() {
    let subs = |set: &[&str]| {
        let all = [&["fsdp.reshard_after_forward=2"], set].concat();
        let p = program(LLAMA, &all);
        let is_sub =
            |c: &&crate::program::Communicator| c.axes.contains(AxisSet::of(AxisId::SUB_SHARD));
        let all = p.communicators.iter().filter(is_sub);
        let named = all.map(|c| (c.name.clone(), c.ranks.size));
        named.collect::<Vec<_>>()
    };
    let of = |name: &str| (name.to_owned(), 2);
    let blocks = ["sub_shard layers.0", "sub_shard layers.1"].map(of);
    assert_eq!(subs(&["fsdp.policy=fsdp2"])[..], blocks);
    // The root has one only if it reshards, too.
    let root = subs(&["fsdp.policy=fsdp2", "fsdp.reshard_root=true"]);
    assert_eq!(root.len(), 3);
    assert!(root.contains(&of("sub_shard root")), "{root:?}");
    assert_eq!(subs(&["fsdp.policy=native"])[..], [of("sub_shard")]);
    assert_eq!(subs(&["fsdp.policy=fsdp2", "mesh.dp_outer=2"])[..], blocks);
}

/// `FSDPState._post_forward` reshards the root before the loss sees its output. The root's
/// pre-backward hook is on that output, so its gather follows the backward of the loss and is the
/// first gather.
#[test]
fn a_root_that_reshards_is_gathered_again_behind_the_loss() {
    let of = |sets: &[&str]| {
        let p = fsdp2(sets);
        let root = |id: &crate::ir::BufferId| {
            let b = &p.buffers[id.index()];
            b.role == Role::FullWeight && p.units[b.unit.index()].is_root
        };
        let freed: Vec<Phase> = steady(&p)
            .iter()
            .filter_map(|i| match i.op {
                Op::Free(id) if root(&id) => Some(i.phase),
                _ => None,
            })
            .collect();
        let softmax = |i: &Instr| matches!(i.op, Op::Launch { kernel, .. } if p.kernels[kernel.index()].name == "log_softmax_backward");
        let loss = steady(&p).iter().position(softmax).unwrap();
        let first = collectives(&p, CollectiveKind::AllGather)[0];
        let unit = &p.units[steady(&p)[first].unit.index()];
        (freed, first > loss, unit.is_root)
    };
    let (freed, behind, root) = of(&[]);
    assert!(freed.iter().all(|&phase| phase == Phase::Backward));
    assert!(behind && !root);
    let n = freed.len();
    let (freed, behind, root) = of(&["fsdp.reshard_root=true"]);
    assert_eq!(
        freed,
        [vec![Phase::Forward; n], vec![Phase::Backward; n]].concat()
    );
    assert!(behind && root);
}

/// `set_keep_unsharded_storage`: the storage of parameters is allocated once; all gathers and
/// copy-outs stay.
#[test]
fn kept_storage_saves_no_gather() {
    let keep = "fsdp.keep_unsharded_storage=true";
    for sets in [
        &[][..],
        &["fsdp.reshard_after_forward=2"],
        &["train.grad_accum=2", "train.validate_every=1"],
    ] {
        let (p, plain) = (fsdp2(&[sets, &[keep]].concat()), fsdp2(sets));
        let full = |id: &crate::ir::BufferId| p.buffers[id.index()].role == Role::FullWeight;
        let (mut made, mut freed) = (0, 0);
        for i in &p.instrs {
            match i.op {
                Op::Alloc(id) if full(&id) => made += 1,
                Op::Free(id) if full(&id) => freed += 1,
                _ => {}
            }
        }
        // The steady step allocates none.
        assert_eq!((made, freed), (p.params.len(), 0), "{sets:?}");
        let work = |p: &Program| -> Vec<(Rule, Phase)> {
            let launched = |i: &&Instr| matches!(i.op, Op::Launch { .. } | Op::Collective { .. });
            let all = p.instrs.iter().filter(launched);
            all.map(|i| (i.rule, i.phase)).collect()
        };
        assert_eq!(work(&p), work(&plain), "{sets:?}");
    }
}

/// `CPUOffloadPolicy`: shards, gradients and optimizer state always stay in host memory. The device
/// keeps nothing between steps.
#[test]
fn offloaded_state_is_in_host_memory() {
    let offload = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
    let p = fsdp2(&[offload]);
    let plain = fsdp2(&[]);
    for role in [Role::MainWeight, Role::OptimizerState] {
        assert_eq!(
            super::at_rest(&p).get(&role),
            super::at_rest(&plain).get(&role),
            "{role:?}"
        );
        let of = p.buffers.iter().filter(|b| b.role == role);
        assert!(of.clone().count() > 0);
        assert!(of.into_iter().all(|b| b.pool == Pool::Host), "{role:?}");
    }
    let cpu = stream(&p, StreamKind::Cpu);
    let (mut h2d, mut d2h, mut updates) = (0, 0, 0);
    for instr in steady(&p).iter() {
        match instr.op {
            Op::Copy { id, .. } => match p.copies[id.index()].kind {
                CopyKind::H2d => h2d += 1,
                CopyKind::D2h => d2h += 1,
                CopyKind::D2d => panic!("a copy within the device"),
            },
            Op::Launch { kernel, stream, .. }
                if p.kernels[kernel.index()].class == KernelClass::Optimizer =>
            {
                assert_eq!(stream, cpu);
                updates += 1;
            }
            _ => {}
        }
    }
    let params = p.params.len();
    // Each parameter is copied once in forward, and again in backward if it is in a block.
    let blocks = p
        .params
        .iter()
        .filter(|x| x.name.starts_with("layers."))
        .count();
    assert_eq!((h2d, d2h), (params + blocks, params));
    assert_eq!(updates, p.groups.len());
}

#[test]
fn some_state_in_host_memory_is_refused() {
    let set = [
        "fsdp.policy=fsdp2".to_owned(),
        "fsdp.offload=[\"optimizer\"]".to_owned(),
    ];
    let message = crate::scenario::parse("test", super::LLAMA, &set)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("all state is in host memory or none"),
        "{message}"
    );
}

/// Also one rank copies its gradients on the stream of reductions, whose memory the compute stream
/// does not reuse.
#[test]
fn one_rank_reduces_on_a_stream_of_its_own() {
    let p = fsdp2(&["mesh.dp_shard=1"]);
    let reduce = stream(&p, StreamKind::ReduceScatter);
    assert_ne!(reduce, COMPUTE);
    let gradients = p.buffers.iter().filter(|b| b.role == Role::MainGrad);
    let streams: Vec<StreamId> = gradients.map(|b| b.stream).collect();
    assert!(!streams.is_empty());
    assert!(streams.iter().all(|s| *s == reduce), "{streams:?}");
    // Weights are gathered by computation.
    assert!(p.streams.iter().all(|s| s.kind != StreamKind::AllGather));
}
