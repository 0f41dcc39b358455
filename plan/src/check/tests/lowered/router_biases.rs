//! Biases of routers that steps move: programs with them pass, and faults planted in their counts
//! and updates are found.

use super::experts::experts;
use super::{drop, find, passes};
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::program::*;

const BIAS: &str = "model.router_bias=true";
const SPEED: &str = "model.router_bias_update_speed=0.001";

/// Two layers of experts.
const LAYERS: usize = 2;

fn program(set: &[&str]) -> Program {
    experts("native", &[&[BIAS, SPEED], set].concat())
}

/// Returns the steady launches with an operation of this name.
fn launches(p: &Program, name: &str) -> Vec<InstrId> {
    let named = |k: KernelId| {
        let mut body = p.kernels[k.index()].body.iter();
        body.any(|op| op.op.name() == name)
    };
    find(p, |i| match i.op {
        Op::Launch { kernel, .. } => named(kernel),
        _ => false,
    })
}

fn updates(p: &Program) -> Vec<InstrId> {
    let is_update = |i: &Instr| {
        let op = p.shard_op(&i.op);
        matches!(op, Some(ShardOp::RouterBias { .. }))
    };
    find(p, is_update)
}

/// Returns the counts that a step's first update reads.
fn counts(p: &Program) -> Access {
    let update = p.instrs[updates(p)[0].index()].op;
    p.reads(&update)[1]
}

/// Returns whether a launch writes into a buffer.
fn writes(p: &Program, i: &Instr, b: BufferId) -> bool {
    matches!(i.op, Op::Launch { .. }) && p.writes(&i.op).iter().any(|a| a.buffer == b)
}

/// Inserts a copy of an instruction into the steady section.
fn repeat(p: &mut Program, at: InstrId, before: InstrId) {
    let again = p.instrs[at.index()];
    p.instrs.insert(before.index(), again);
    for s in &mut p.sections {
        s.instrs.start += u32::from(s.instrs.start > before.0);
        s.instrs.end += u32::from(s.instrs.end > before.0);
    }
}

/// Checks that a message of the rule says this.
fn found(q: &Program, expected: &str) {
    let r = check(q);
    let mut messages = r.of(RuleId::RouterBias).map(|v| &v.message);
    assert!(
        messages.any(|m| m.contains(expected)),
        "{expected}: not found\n{r}"
    );
}

#[test]
fn steps_that_move_biases_pass() {
    for set in [
        &[][..],
        &["train.grad_accum=2"],
        &["train.recompute=full", "train.grad_accum=2"],
        &["train.recompute=selective"],
        &["mesh.dp_outer=2", "train.grad_accum=2"],
        &["mesh.dp_outer=2", "fsdp.outer_strategy=optim"],
        &["mesh.ep=1"],
        &["mesh.dp_shard=1", "mesh.ep=1"],
        &["fsdp.strategy=optim"],
        &["fsdp.strategy=optim_grads", "train.grad_accum=2"],
        &["fsdp.strategy=no_shard"],
        &["train.clip_norm=1"],
        &["train.grad_norm=true", "train.clip_norm=0"],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.grad_norm=false",
            "train.clip_norm=0",
        ],
        &["fsdp.copy_engine_reduce_scatter=true"],
        &["fsdp.gradient_scaling_factor=0.3"],
        &["fsdp.average_in_collective=true", "mesh.dp_outer=2"],
        &["fsdp.cast_before_all_gather=true"],
        &["fsdp.prefetch_next_step=1"],
        &[
            "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]",
            "train.grad_accum=2",
        ],
        &["fsdp.units=root"],
        &["fsdp.frozen=[\"layers.1.mlp\"]"],
        &["compile.mode=blocks"],
        &["compile.cuda_graph=[\"block\"]"],
        &[
            "compile.cuda_graph=full_iteration",
            "fsdp.allocator=caching",
        ],
        &["train.joint_backward=true", "train.grad_accum=2"],
        &["train.validate_every=2"],
        &["train.optimizer=muon"],
        &["precision.compute=f32"],
        &[
            "mesh.ep=1",
            "train.grad_accum=2",
            "train.skipped_blocks=[{ blocks = [\"layers.1\"], micro_batches = [1] }]",
        ],
        &["moe.dispatcher=all_to_all"],
        &["moe.dispatcher=peer"],
        &["moe.dispatcher=deepep"],
    ] {
        let p = program(set);
        let r = check(&p);
        passes(&r, &format!("{set:?}"));
        let row = r.rules.iter().find(|x| x.id == RuleId::RouterBias).unwrap();
        assert!(row.checked > 0, "{set:?}");
        assert!(p.groups.iter().any(|g| g.router_biases), "{set:?}");
        let routers = updates(&p)
            .iter()
            .map(|i| p.updates(&p.instrs[i.index()].op).len())
            .sum::<usize>();
        let frozen = set.iter().any(|s| s.contains("frozen"));
        assert_eq!(routers, LAYERS - usize::from(frozen), "{set:?}");
    }
}

/// Runs that every policy has.
const COMMON: [&[&str]; 8] = [
    &[],
    &["train.grad_accum=2"],
    &["train.recompute=full", "train.grad_accum=2"],
    &["mesh.dp_shard=1"],
    &["train.clip_norm=1"],
    &["fsdp.units=root"],
    &["fsdp.frozen=[\"layers.1.mlp\"]"],
    &["train.validate_every=2"],
];

/// Engines of frameworks leave biases to the model, as buffers: one all-reduce for all layers,
/// after all reductions of gradients.
#[test]
fn biases_that_no_engine_manages_are_moved_by_one_sum() {
    for policy in ["fsdp2", "megatron", "megatron_v2", "pr4435"] {
        for set in COMMON {
            by_one_sum(policy, &[&["mesh.ep=1"], set].concat());
        }
    }
    let replicas = &["mesh.dp_outer=2", "train.grad_accum=2"][..];
    for policy in ["fsdp2", "megatron", "megatron_v2"] {
        by_one_sum(policy, &[&["mesh.ep=1"], replicas].concat());
    }
    for policy in ["fsdp2", "megatron"] {
        for set in [
            &[][..],
            replicas,
            &["compile.mode=blocks"],
            &["train.joint_backward=true", "train.grad_accum=2"],
        ] {
            by_one_sum(policy, set);
        }
    }
    by_one_sum(
        "fsdp2",
        &["precision.compute=bf16", "precision.main_params=none"],
    );
    by_one_sum("fsdp2", &["mesh.ep=1", "fsdp.reshard_after_forward=2"]);
    for set in [
        &["fsdp.strategy=no_shard"][..],
        &["fsdp.strategy=optim", "train.grad_accum=2"],
        &["fsdp.strategy=optim_grads"],
        &["mesh.dp_outer=2", "fsdp.outer_strategy=optim"],
        &["precision.main_params=none"],
        &["precision.main_grads=f32"],
        &["fsdp.decoupled_gradients=true"],
        &["moe.dispatcher=deepep"],
    ] {
        by_one_sum("megatron", set);
    }
    for policy in ["native", "fsdp2"] {
        for set in [&[][..], &["train.grad_accum=2"], replicas, &["mesh.ep=1"]] {
            by_one_sum(policy, &[&["compile.mode=full"], set].concat());
        }
    }
}

/// Checks that a program passes, and adds up the counts of all layers once.
fn by_one_sum(policy: &str, set: &[&str]) {
    let p = experts(policy, &[&[BIAS, SPEED], set].concat());
    let what = format!("{policy} {set:?}");
    let r = check(&p);
    passes(&r, &what);
    let row = r.rules.iter().find(|x| x.id == RuleId::RouterBias).unwrap();
    assert!(row.checked > 0, "{what}");
    let moved = updates(&p);
    let moved = moved
        .iter()
        .map(|i| p.updates(&p.instrs[i.index()].op).len());
    let frozen = set.iter().any(|s| s.contains("frozen"));
    let layers = LAYERS - usize::from(frozen);
    assert_eq!(moved.sum::<usize>(), layers, "{what}");
    let of_bias = |part: &Part| match p.buffers[part.input.buffer.index()].holds {
        Holds::Param(x) => p.params[x.index()].router_bias,
        Holds::Group(g) => p.groups[g.index()].router_biases,
        _ => false,
    };
    let adds = |i: &Instr| match i.op {
        Op::Collective { id, .. } => p.collectives[id.index()].parts.iter().any(of_bias),
        _ => false,
    };
    let sums = find(&p, adds);
    let alone = set.contains(&"mesh.dp_shard=1");
    assert_eq!(sums.len(), usize::from(!alone), "{what}");
    for sum in sums {
        let Op::Collective { id, stream } = p.instrs[sum.index()].op else {
            unreachable!("a collective")
        };
        let c = &p.collectives[id.index()];
        let how = (c.kind, c.reduce, c.parts.len(), stream);
        let expected = (CollectiveKind::AllReduce, ReduceOp::Sum, layers, COMPUTE);
        assert_eq!(how, expected, "{what}");
        // All ranks in one group: of the engine's mesh, or of its own (`tp_dp_cp_group`).
        let comm = &p.communicators[c.comm.index()];
        let ranks = p.meta.mesh.group(AxisSet::DATA).expect("data").size;
        assert_eq!(comm.ranks.size, ranks, "{what}");
        let own = policy.starts_with("megatron") || policy == "pr4435";
        assert!(!own || comm.name == "data", "{what}: {}", comm.name);
        let later = find(&p, |i| matches!(i.op, Op::Collective { .. }));
        let later = later.into_iter().filter(|i| *i > sum);
        for i in later {
            let clips = p.instrs[i.index()].rule == Rule::Clip;
            assert!(clips, "{what}: {:?}", p.instrs[i.index()]);
        }
    }
}

/// In each of these engines, counts that ranks do not add up are found, and so is a sum that comes
/// before the last micro-batch has chosen.
#[test]
fn sums_of_an_engine_that_are_missing_or_early() {
    for (policy, mode) in [
        ("fsdp2", "off"),
        ("megatron", "off"),
        ("megatron_v2", "off"),
        ("pr4435", "off"),
        ("fsdp2", "full"),
    ] {
        let mode = format!("compile.mode={mode}");
        let set = [BIAS, SPEED, "mesh.ep=1", "train.grad_accum=2", &mode];
        let p = experts(policy, &set);
        let b = counts(&p).buffer;
        let adds = |i: &Instr| match i.op {
            Op::Collective { id, .. } => {
                let mut parts = p.collectives[id.index()].parts.iter();
                parts.any(|part| part.output.buffer == b)
            }
            _ => false,
        };
        let [sum] = find(&p, adds)[..] else {
            panic!("{policy}: one sum")
        };
        let mut q = p.clone();
        drop(&mut q, sum);
        found(&q, "added up over no axis; expected the shard axis");
        // The sum of the first micro-batch, to which each rank adds its own second one.
        let is_add = |i: &Instr| p.shard_op(&i.op) == Some(ShardOp::Accumulate) && writes(&p, i, b);
        let add = find(&p, is_add)[0];
        let mut q = p.clone();
        q.instrs[add.index()..=sum.index()].rotate_right(1);
        found(&q, "by a part of the counts that a rank has");
    }
}

/// Without a speed, the program is the one that it was.
#[test]
fn biases_that_stay_have_no_counts() {
    let p = experts("native", &[BIAS]);
    assert!(launches(&p, "count_experts").is_empty() && updates(&p).is_empty());
    let r = check(&p);
    let row = r.rules.iter().find(|x| x.id == RuleId::RouterBias).unwrap();
    assert_eq!(row.checked, 0);
}

/// All ranks keep biases in float32, add their counts, and gather nothing, whatever the types of
/// other weights and gradients are.
#[test]
fn biases_are_whole_and_in_float32() {
    for types in [
        &[][..],
        &["precision.main_grads=bf16"],
        &["precision.main_grads=bf16", "mesh.dp_outer=2"],
        &["precision.reduce_dtype=bf16", "fsdp.strategy=optim"],
        &["precision.reduce_dtype=bf16", "fsdp.strategy=no_shard"],
        &["precision.main_params=bf16", "fsdp.gradient_sync=last"],
    ] {
        whole_in_float32(&[&["train.grad_accum=2"], types].concat());
    }
}

fn whole_in_float32(set: &[&str]) {
    let p = program(set);
    passes(&check(&p), &format!("{set:?}"));
    let of_bias = |b: BufferId| match p.buffers[b.index()].holds {
        Holds::Group(g) => p.groups[g.index()].router_biases,
        _ => false,
    };
    let mut bytes = 0;
    for (n, b) in p
        .buffers
        .iter()
        .enumerate()
        .filter(|(n, _)| of_bias(BufferId(*n as u32)))
    {
        assert_eq!(b.dtype, DType::F32, "{n}");
        bytes += u64::from(b.role == Role::ModelWeight) * b.bytes.0;
    }
    // Eight experts; without shards, parameters have buffers of their own.
    let apart = set.contains(&"fsdp.strategy=no_shard");
    assert_eq!(bytes, if apart { 0 } else { LAYERS as u64 * 8 * 4 });
    let kinds: Vec<_> = p
        .collectives
        .iter()
        .filter(|c| of_bias(c.parts[0].input.buffer))
        .collect();
    assert!(!kinds.is_empty());
    for c in kinds {
        assert_eq!(
            (c.kind, c.reduce),
            (CollectiveKind::AllReduce, ReduceOp::Sum)
        );
    }
}

/// One count per layer and micro-batch, also where forward runs twice.
#[test]
fn choices_are_counted_once() {
    for recompute in ["none", "selective", "full"] {
        let set = format!("train.recompute={recompute}");
        let p = program(&["train.grad_accum=2", &set]);
        assert_eq!(
            launches(&p, "count_experts").len(),
            2 * LAYERS,
            "{recompute}"
        );
    }
}

/// Each rank follows its own tokens, so that biases drift apart.
#[test]
fn counts_that_ranks_do_not_add_up() {
    let p = program(&["mesh.dp_outer=2"]);
    let b = counts(&p).buffer;
    let sums = find(&p, |i| match i.op {
        Op::Collective { id, .. } => p.collectives[id.index()].parts[0].output.buffer == b,
        _ => false,
    });
    assert_eq!(sums.len(), 2);
    for (sum, known) in sums.into_iter().zip(["the outer axis", "the shard axis"]) {
        let mut q = p.clone();
        drop(&mut q, sum);
        found(&q, &format!("added up over {known}; expected both axes"));
    }
}

/// torchtitan #1593: recompute counts again. Here a launch adds the counts of the last micro-batch
/// once more.
#[test]
fn choices_that_count_twice() {
    let p = program(&["train.grad_accum=2", "train.recompute=full"]);
    let b = counts(&p).buffer;
    let is_add = |i: &Instr| p.shard_op(&i.op) == Some(ShardOp::Accumulate) && writes(&p, i, b);
    let [add] = find(&p, is_add)[..] else {
        panic!("one launch adds the second micro-batch")
    };
    let mut q = p.clone();
    repeat(&mut q, add, InstrId(add.0 + 1));
    found(
        &q,
        "by 2 counts of micro-batch 1, in which 1 routers choose by it",
    );
    let mut q = p.clone();
    drop(&mut q, add);
    found(&q, "by 0 counts of micro-batch 1");
    // The first micro-batch adds to the counts of the step before.
    let count = launches(&p, "count_experts").into_iter();
    let first = count
        .into_iter()
        .find(|i| writes(&p, &p.instrs[i.index()], b));
    let mut q = p.clone();
    drop(
        &mut q,
        first.expect("the first micro-batch counts into the sum"),
    );
    found(&q, "by choices of an earlier step");
}

/// torchtitan #1324: an update in every micro-batch, and one that comes before the last router has
/// chosen.
#[test]
fn updates_that_come_too_often_or_too_early() {
    let p = program(&["train.grad_accum=2"]);
    let [update, ..] = updates(&p)[..] else {
        panic!("updates")
    };
    let last = *launches(&p, "route").last().expect("routers");
    assert!(last < update);
    let mut q = p.clone();
    repeat(&mut q, update, InstrId(update.0 + 1));
    found(&q, "again after #");

    let mut q = p.clone();
    let first = launches(&p, "route")[0];
    repeat(&mut q, update, first);
    drop(&mut q, InstrId(update.0 + 1));
    found(&q, "still chooses in this step");

    let mut q = p.clone();
    drop(&mut q, update);
    found(&q, "no step moves `layers.");
}

/// Counts of thousands of tokens would make clipping shrink all gradients to nothing.
#[test]
fn counts_in_the_norm() {
    let p = program(&["train.clip_norm=1"]);
    let counts = counts(&p);
    let is_norm = |i: &Instr| p.shard_op(&i.op) == Some(ShardOp::SumSquares);
    let last = *find(&p, is_norm).last().expect("a norm");
    let mut q = p.clone();
    let Op::Launch { reads, .. } = q.instrs[last.index()].op else {
        unreachable!("a launch")
    };
    q.accesses[reads as usize] = counts;
    found(&q, "counts of choices are no gradients");
}

/// An optimizer that takes the counts for gradients.
#[test]
fn biases_that_an_optimizer_trains() {
    let mut q = program(&[]);
    for op in q.kernels.iter_mut().flat_map(|k| &mut k.body) {
        if let OpKind::Shard(op @ ShardOp::RouterBias { .. }) = &mut op.op {
            *op = ShardOp::Sgd(Fused {
                cast: false,
                pieces: None,
                maxima: false,
            });
        }
    }
    found(&q, "trains by gradients `layers.");
}

/// The norm as a third operand of an update, as that of other optimizers.
#[test]
fn counts_that_are_clipped() {
    let mut q = program(&["train.clip_norm=1"]);
    let is_norm = |i: &Instr| q.shard_op(&i.op) == Some(ShardOp::SumSquares);
    let norm = q.writes(&q.instrs[find(&q, is_norm)[0].index()].op)[0];
    let update = updates(&q)[0].index();
    let op = q.instrs[update].op;
    let (read, written) = (q.reads(&op).to_vec(), q.writes(&op).to_vec());
    let first = q.accesses.len() as u32;
    q.accesses.extend([&read[..], &[norm], &written].concat());
    let Op::Launch { kernel, stream, .. } = op else {
        unreachable!("a launch")
    };
    q.instrs[update].op = Op::Launch {
        kernel,
        stream,
        reads: first,
        writes: first + 3,
        end: first + 4,
    };
    found(&q, "clips the counts of `layers.");
}

/// Megatron-LM #4433: graph warm-up moved biases. Evaluation that counts would, too.
#[test]
fn choices_that_evaluation_counts() {
    let p = program(&["train.validate_every=2"]);
    in_validation(&p, launches(&p, "count_experts")[0], "counts choices");
    in_validation(&p, updates(&p)[0], "moves biases");
}

/// Checks that a launch is found in the place of one of evaluation.
fn in_validation(p: &Program, launch: InstrId, does: &str) {
    let moved = p.instrs[launch.index()];
    let mut q = p.clone();
    let validation = p
        .section(SectionKind::Validation)
        .expect("validation")
        .instrs
        .clone();
    let launch = validation
        .map(InstrId)
        .find(|i| matches!(p.instrs[i.index()].op, Op::Launch { .. }));
    q.instrs[launch.expect("a launch").index()] = moved;
    found(&q, &format!("{does} outside training"));
}

/// Where steps cannot move biases, with what would have to change.
#[test]
fn what_cannot_move_is_refused() {
    let refused = |set: &[&str], message: &str, help: &str| {
        let all = [&["mesh.ep=1", BIAS, SPEED], set].concat();
        let all: Vec<String> = all.iter().map(|s| (*s).to_owned()).collect();
        let error = crate::scenario::load(&super::file("small-moe"), &all).unwrap_err();
        assert!(error.to_string().contains(message), "{set:?}: {error}");
        let said = error.help().unwrap_or_default();
        assert!(said.contains(help), "{set:?}: {said}");
    };
    refused(
        &["model.router_bias=false"],
        "has no effect without `router_bias`",
        "set router_bias = true",
    );
    refused(
        &["fsdp.frozen=[\"layers.*.mlp\"]"],
        "all of them are frozen",
        "0.0",
    );
    refused(
        &["model.router_bias_update_speed=-1"],
        "router_bias_update_speed",
        "",
    );
}
