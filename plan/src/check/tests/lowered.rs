//! Programs as the policies lower them: they pass, and planted faults are found.

mod expert_rows;
mod expert_scopes;
mod experts;
mod float8;
mod ignored;
mod model_collectives;
mod muon;
mod mutations;
mod router_biases;
mod router_losses;
mod waits;

use crate::check::{Report, check};
use crate::ir::*;
use crate::program::*;
use crate::{plan, scenario};
use std::path::{Path, PathBuf};

const POLICIES: [&str; 5] = ["native", "fsdp2", "megatron", "megatron_v2", "pr4435"];

/// Policies that replicate over an outer axis.
const RELEASED: [&str; 4] = ["native", "fsdp2", "megatron", "megatron_v2"];

/// Returns the file of a shipped scenario.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../scenarios")
        .join(format!("{name}.toml"))
}

/// Lowers a shipped scenario with overrides; `None` if the policy rejects them.
fn try_lower(name: &str, set: &[&str]) -> Option<Program> {
    let mut set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    // A variant that is given as a policy.
    if let Some(policy) = set.iter_mut().find(|s| *s == "fsdp.policy=pr4435") {
        "fsdp.policy=megatron_v2".clone_into(policy);
        set.push("fsdp.variant=pr4435".to_owned());
    }
    let s = scenario::load(&file(name), &set).ok()?;
    Some(plan(&s).unwrap_or_else(|e| panic!("{set:?}: {e}")))
}

/// Lowers a small transformer under a policy.
fn small(policy: &str, set: &[&str]) -> Option<Program> {
    let policy = format!("fsdp.policy={policy}");
    // Without the wait at the end of the step, which would hide missing waits at its start.
    let mut all = vec![
        "model.layers=4",
        "train.clip_norm=1.0",
        "train.sync=false",
        policy.as_str(),
    ];
    all.extend(set);
    try_lower("toy-transformer", &all)
}

fn drop(p: &mut Program, i: InstrId) {
    p.instrs[i.index()].op = Op::HostWork {
        kind: HostWorkKind::Hook,
        count: 0,
    };
}

/// Returns steady instructions that match.
fn find(p: &Program, f: impl Fn(&Instr) -> bool) -> Vec<InstrId> {
    let r = p
        .section(SectionKind::Steady)
        .expect("steady")
        .instrs
        .clone();
    r.filter(|&i| f(&p.instrs[i as usize]))
        .map(InstrId)
        .collect()
}

fn passes(r: &Report, what: &str) {
    assert!(r.is_ok(), "{what}\n{r}");
    // The only acceptable warnings are about gathers that nothing reads, small payloads, and waits
    // that the options ask for.
    for v in &r.violations {
        assert!(
            ["CHK-UNUSED-GATHER", "CHK-ALIGN", "INV-06"].contains(&v.rule.id()),
            "{what}\n{r}"
        );
    }
}

/// Gradients have exactly the factor that the scenario sets.
#[test]
fn gradients_have_the_factor_of_the_scenario() {
    for policy in ["native", "fsdp2", "megatron"] {
        for outer in ["mesh.dp_replicate=1", "mesh.dp_replicate=2"] {
            let given = "fsdp.gradient_scaling_factor=0.3";
            let mut p = small(policy, &[given, outer]).expect("every policy has it");
            passes(&check(&p), policy);
            p.meta.gradient_factor = Some(0.25);
            let r = check(&p);
            assert!(
                r.of(crate::check::RuleId::Scale).next().is_some(),
                "{policy}"
            );
        }
    }
}

#[test]
fn every_shipped_scenario_passes() {
    for (name, _) in scenario::shipped() {
        let p = try_lower(name, &[]).unwrap_or_else(|| panic!("{name} is refused"));
        passes(&check(&p), name);
    }
}

/// Found by fuzzing: an exchange is the first instruction of a scope, and nothing has run on the
/// compute stream since a reduction waited for it.
#[test]
fn scopes_that_begin_with_an_exchange_pass() {
    for (scope, strategy) in [("moe", "no_shard"), ("block", "optim")] {
        for dispatcher in ["gather", "peer"] {
            let scope = format!("compile.cuda_graph=[\"{scope}\"]");
            let strategy = format!("fsdp.strategy={strategy}");
            let dispatcher = format!("moe.dispatcher={dispatcher}");
            let set = [
                "compile.mode=blocks",
                "train.grad_accum=2",
                &scope,
                &strategy,
                &dispatcher,
            ];
            let p = try_lower("small-moe-ep", &set).unwrap_or_else(|| panic!("{set:?}"));
            passes(&check(&p), &scope);
        }
    }
}

/// Found by fuzzing: a list of saved operations without those of routing, and gradients that are
/// cast before they are copied to the host.
#[test]
fn saved_counts_and_cast_gradients_pass() {
    for policy in ["native", "fsdp2", "megatron"] {
        for nth in ["0", "2"] {
            let policy = format!("fsdp.policy={policy}");
            let nth = format!("train.recompute_nth_matmul={nth}");
            let set = [
                &policy,
                &nth,
                "moe.dispatcher=all_to_all",
                "train.recompute=selective",
                "train.recompute_save=[\"mm\", \"attention\"]",
            ];
            let p = try_lower("small-moe-ep", &set).unwrap_or_else(|| panic!("{set:?}"));
            passes(&check(&p), &policy);
        }
    }
    for types in [
        ["precision.param_dtype=bf16", "precision.reduce_dtype=bf16"],
        ["precision.main_params=bf16", "precision.reduce_dtype=f32"],
    ] {
        let offload = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
        let set = ["fsdp.policy=fsdp2", offload, types[0], types[1]];
        let p = try_lower("llama-tiny", &set).unwrap_or_else(|| panic!("{set:?}"));
        passes(&check(&p), types[1]);
    }
}

/// A captured iteration allocates at fixed addresses, even with allocators that have no plan.
#[test]
fn captured_iterations_pass_with_any_allocator() {
    let full = "compile.cuda_graph=full_iteration";
    for policy in POLICIES {
        for segments in [
            "fsdp.expandable_segments=false",
            "fsdp.expandable_segments=true",
        ] {
            let set = [full, "fsdp.allocator=caching", segments];
            let p = small(policy, &set).unwrap_or_else(|| panic!("{policy} {segments}"));
            passes(&check(&p), policy);
        }
    }
    // Found by fuzzing: two blocks with unequal neighbors, whose activations exchanged places
    // every other step.
    let set = [
        full,
        "fsdp.allocator=caching",
        "fsdp.expandable_segments=false",
        "model.layers=2",
    ];
    let p = try_lower("cuda-graph-full", &set).expect("accepted");
    passes(&check(&p), "cuda-graph-full");
}

/// Found by random scenarios. With equally many keys and queries, in one unit for the whole model,
/// two in-place rotations remain separate. The second one was assumed to read the result of the
/// first.
#[test]
fn rotations_of_two_parts_of_a_buffer_in_one_kernel() {
    let set = [
        "model.kv_heads=4",
        "fsdp.units=root",
        "compile.mode=regions",
        "compile.merge_projections=qkv",
    ];
    let p = try_lower("small-native", &set).expect("accepted");
    let rotation = |i: &Instr| match i.op {
        Op::Launch { kernel, .. } => p.kernels[kernel.index()].name.ends_with("_cat"),
        _ => false,
    };
    let all = find(&p, rotation);
    let two = all.iter().map(|i| &p.instrs[i.index()].op);
    let two: Vec<_> = two.filter(|op| p.writes(op).len() == 2).collect();
    assert!(!two.is_empty(), "they have become one");
    for op in two {
        for made in p.writes(op) {
            assert!(p.reads(op).contains(made), "{made:?} is not read in place");
        }
    }
    passes(&check(&p), "kv_heads=4");
}

/// If the operand that dies in a kernel has another order than the result, the result gets its own
/// memory; otherwise it takes over the operand's.
#[test]
fn results_in_another_order_take_over_nothing() {
    let p = try_lower("toy-transformer", &["compile.mode=blocks"]).expect("accepted");
    let named = |name: &str| {
        let of = |i: &Instr| match i.op {
            Op::Launch { kernel, .. } => p.kernels[kernel.index()].name == name,
            _ => false,
        };
        find(&p, of).into_iter().map(|i| p.instrs[i.index()].op)
    };
    let in_place = |op: &Op| p.writes(op).iter().any(|w| p.reads(op).contains(w));
    let mut turned = named("fused_add_copy").peekable();
    assert!(turned.peek().is_some());
    assert!(!turned.any(|op| in_place(&op)));
    assert!(named("fused_add_layer_norm").any(|op| in_place(&op)));
}

/// Found by fuzzing: units below the first trained one stay full until backward ends, but not
/// longer.
#[test]
fn frozen_units_without_a_backward_are_released() {
    for policy in POLICIES {
        for more in [
            &["mesh.dp_shard=1"][..],
            &["fsdp.reshard_after_forward=false"],
            &["fsdp.reshard_after_forward=2"],
            &["fsdp.prefetch_backward=2"],
        ] {
            let mut set = vec![
                "model.preset=llama3.2-1b",
                "train.grad_accum=2",
                "fsdp.frozen=[\"layers.*\", \"layers.**\", \"tok_embeddings\"]",
            ];
            set.extend(more);
            let policy = format!("fsdp.policy={policy}");
            set.push(&policy);
            if let Some(p) = try_lower("peers-1b", &set) {
                passes(&check(&p), &format!("{set:?}"));
            }
        }
    }
}

/// Gaps between the parameters of a buffer that all groups share are reduced with them, but nothing
/// reads them.
#[test]
fn padding_of_shared_gradients_needs_no_reader() {
    let set = [
        "model.preset=llama3-8b",
        "model.layers=1",
        "fsdp.strategy=no_shard",
        "precision.main_params=none",
        "precision.main_grads=bf16",
        "precision.comm_grads=bf16",
        "train.recompute=none",
        "train.loss=materialized",
    ];
    let p = try_lower("compile-regions", &set).expect("accepted");
    passes(&check(&p), "megatron no_shard");
}

/// Found by fuzzing: kernels are described before the storage of gradients is decided, so they
/// count gradients in the compute type. The second gradient of a tied weight is added to the first
/// one, which is therefore also read.
#[test]
fn gradients_of_any_type_are_as_long_as_kernels_take_them_to_be() {
    for policy in POLICIES {
        for compute in ["f32", "bf16"] {
            for grads in ["f32", "bf16", "f16"] {
                let set = [
                    "model.tie_embeddings=true",
                    "train.loss=materialized",
                    "train.grad_accum=2",
                    &format!("fsdp.policy={policy}"),
                    &format!("precision.compute={compute}"),
                    &format!("precision.main_grads={grads}"),
                ];
                let p = try_lower("small-native", &set).expect("accepted");
                passes(&check(&p), &format!("{set:?}"));
            }
        }
    }
}

/// One backward over the forwards of all micro-batches.
const JOINT: &str = "train.joint_backward=true";
/// The second micro-batch skips a block that the first one uses, and the reverse.
const SKIP_SOME: &str = "train.skipped_blocks=[{ blocks = [\"layers.1\"], micro_batches = [1] }, \
                         { blocks = [\"layers.0\"], micro_batches = [0] }]";
/// No micro-batch uses a block.
const SKIP_ALL: &str = "train.skipped_blocks=[{ blocks = [\"layers.1\"] }]";

#[test]
fn every_option_passes() {
    const OPTIONS: [&[&str]; 110] = [
        &[],
        &[
            "fsdp.copy_engine_reduce=true",
            "fsdp.sum_in_optimizer=true",
            "train.clip_norm=0",
            "fsdp.offload=[\"optimizer\"]",
        ],
        &[
            "fsdp.copy_engine_reduce=true",
            "fsdp.sum_in_optimizer=true",
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "compile.cuda_graph=full_iteration",
            "fsdp.strategy=optim_grads",
        ],
        &["fsdp.cast_before_all_gather=true"],
        &[
            "fsdp.cast_before_all_gather=true",
            "train.clip_norm=0",
            "fsdp.optimizer_in_backward=true",
            "fsdp.copy_engine_all_gather=true",
            "fsdp.prefetch_next_step=2",
            "fsdp.frozen=[\"layers.0\"]",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "mesh.dp_outer=2",
            "train.grad_accum=2",
            "compile.cuda_graph=full_iteration",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "fsdp.copy_in_stream=true",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "fsdp.copy_in_stream=true",
            "train.clip_norm=0",
            "fsdp.optimizer_in_backward=true",
            "fsdp.copy_engine_all_gather=true",
            "fsdp.prefetch_next_step=2",
            "fsdp.frozen=[\"layers.0\"]",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "fsdp.copy_in_stream=true",
            "fsdp.prefetch_forward=0",
            "fsdp.reshard_after_forward=2",
            "train.validate_every=2",
        ],
        &[
            "fsdp.cast_before_all_gather=true",
            "fsdp.copy_in_stream=true",
            "mesh.dp_outer=2",
            "train.grad_accum=2",
            "compile.cuda_graph=full_iteration",
        ],
        &["fsdp.optimizer_in_backward=true", "train.clip_norm=0"],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "fsdp.strategy=no_shard",
        ],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "fsdp.strategy=optim",
            "model.tie_embeddings=true",
        ],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "fsdp.async_reduce=false",
            "mesh.dp_outer=2",
            "train.grad_accum=2",
        ],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "fsdp.copy_engine_reduce=true",
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
            "fsdp.prefetch_next_step=2",
        ],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
            "compile.cuda_graph=full_iteration",
            "fsdp.reduce_in_flight=1",
            "fsdp.frozen=[\"layers.0\"]",
        ],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.reshard_after_forward=true"],
        &["fsdp.reshard_after_forward=2"],
        &["train.grad_accum=3"],
        &["train.recompute=full", "train.grad_accum=2"],
        &["train.recompute=selective"],
        &[
            "train.recompute=full",
            "train.recompute_layers=1",
            "train.grad_accum=2",
        ],
        &[
            "train.recompute=full",
            "train.recompute_layers=[\"layers.1\"]",
        ],
        &[
            "train.recompute=full",
            "train.recompute_layers=[\"layers.1\"]",
            "compile.mode=full",
        ],
        &[
            "train.recompute=selective",
            "train.recompute_layers=1",
            "fsdp.prefetch_backward=0",
        ],
        &["train.recompute=pointwise", "compile.mode=regions"],
        &["fsdp.prefetch_next_step=1"],
        &["fsdp.prefetch_next_step=3", "fsdp.frozen=[\"layers.0\"]"],
        &[
            "fsdp.prefetch_next_step=2",
            "train.grad_accum=2",
            "train.validate_every=2",
        ],
        &[
            "fsdp.prefetch_next_step=3",
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
        ],
        &[
            "fsdp.prefetch_next_step=64",
            "fsdp.copy_engine_gather=true",
            "fsdp.copy_engine_reduce=true",
        ],
        &["train.validate_every=2", "train.grad_accum=2"],
        &["train.validate_every=1", "fsdp.reshard_after_forward=false"],
        &["fsdp.allocator=caching"],
        &["fsdp.allocator=caching", "fsdp.expandable_segments=true"],
        &[
            "fsdp.allocator=double_buffer",
            "fsdp.persist_on_alloc_fail=true",
        ],
        &["fsdp.separate_communicators=false"],
        &["fsdp.separate_communicators=true"],
        &["fsdp.unify_comm_stream=true", "train.grad_accum=2"],
        &["fsdp.async_reduce=false"],
        &["fsdp.async_reduce=false", "mesh.dp_outer=2"],
        &[
            "fsdp.async_reduce=false",
            "mesh.dp_outer=2",
            "train.grad_norm=false",
            "train.grad_accum=2",
        ],
        &["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=3"],
        &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
        &["fsdp.reduce_in_flight=1"],
        &["fsdp.reduce_in_flight=4", "train.grad_accum=2"],
        &["fsdp.strategy=no_shard", "train.grad_accum=2"],
        &["fsdp.strategy=optim", "train.grad_accum=2"],
        &["fsdp.strategy=optim_grads", "train.grad_accum=2"],
        &["mesh.dp_outer=2", "train.grad_accum=2"],
        &[
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
            "train.grad_accum=2",
        ],
        &["mesh.dp_shard=1"],
        &["mesh.dp_shard=1", "mesh.dp_outer=4"],
        &["train.no_grad_forwards=2", "train.grad_accum=2"],
        &["train.no_grad_forwards=1", "fsdp.strategy=optim"],
        &["train.no_grad_forwards=1", "fsdp.strategy=no_shard"],
        &["train.no_grad_forwards=1", "fsdp.strategy=optim_grads"],
        &[
            "train.no_grad_forwards=1",
            "fsdp.reshard_after_forward=false",
            "train.validate_every=1",
        ],
        &["train.no_grad_forwards=1", "fsdp.reshard_after_forward=2"],
        &["train.no_grad_forwards=1", "compile.mode=full"],
        &[
            "train.no_grad_forwards=1",
            "fsdp.reshard_after_backward=false",
            "train.grad_accum=2",
        ],
        &[
            "train.no_grad_forwards=1",
            "fsdp.offload=[\"params\", \"optimizer\"]",
        ],
        &[
            "train.no_grad_forwards=1",
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
        ],
        &[
            "train.no_grad_forwards=1",
            "compile.cuda_graph=full_iteration",
            "fsdp.allocator=pool",
        ],
        &["train.no_grad_forwards=1", "fsdp.allocator=double_buffer"],
        &["train.no_grad_forwards=1", "train.recompute=full"],
        &[SKIP_SOME, "train.grad_accum=2"],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "mesh.dp_outer=2",
            "fsdp.gradient_sync=every",
        ],
        &[SKIP_SOME, "train.grad_accum=2", "fsdp.gradient_sync=last"],
        &[SKIP_SOME, "train.grad_accum=2", "fsdp.strategy=optim"],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.strategy=optim_grads",
            "train.validate_every=2",
        ],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.strategy=no_shard",
            "train.clip_norm=1",
        ],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.prefetch_forward=2",
            "fsdp.prefetch_backward=2",
        ],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.reshard_after_backward=false",
        ],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.reshard_after_forward=2",
            "precision.compute=bf16",
        ],
        &[SKIP_SOME, "train.grad_accum=2", "train.recompute=full"],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "train.recompute=selective",
            "compile.mode=blocks",
        ],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.optimizer_in_backward=true",
            "train.clip_norm=0",
        ],
        &[
            SKIP_SOME,
            "train.grad_accum=2",
            "fsdp.reduce_unused=true",
            "mesh.dp_outer=2",
        ],
        &[SKIP_ALL],
        &[SKIP_ALL, "train.clip_norm=1", "train.validate_every=2"],
        &[
            SKIP_ALL,
            "fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"layers.1\"] }]",
        ],
        &[
            SKIP_ALL,
            "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]",
        ],
        &[SKIP_ALL, "fsdp.strategy=no_shard"],
        &[JOINT, "train.grad_accum=2"],
        &[JOINT, "train.grad_accum=3", "mesh.dp_outer=2"],
        &[
            JOINT,
            "train.grad_accum=2",
            "train.recompute=full",
            "fsdp.strategy=optim",
        ],
        &[
            JOINT,
            "train.grad_accum=2",
            "train.no_grad_forwards=1",
            "fsdp.units=[\"tok_embeddings\", \"layers.*\"]",
        ],
        &[
            JOINT,
            "train.grad_accum=3",
            "fsdp.reshard_after_forward=2",
            "precision.compute=bf16",
        ],
        &["fsdp.keep_unsharded_storage=true"],
        &[
            "fsdp.keep_unsharded_storage=true",
            "fsdp.reshard_after_forward=2",
            "train.grad_accum=2",
            "train.recompute=full",
            "train.validate_every=2",
        ],
        &[
            "fsdp.keep_unsharded_storage=true",
            "train.no_grad_forwards=1",
            "mesh.dp_shard=1",
        ],
        &["fsdp.atomic=tensor", "train.grad_accum=2"],
        &["fsdp.atomic=4"],
        &["fsdp.nan_check=true"],
        &[
            "fsdp.nan_check=true",
            "mesh.dp_outer=2",
            "train.grad_accum=2",
        ],
        &["fsdp.nan_check=true", "compile.mode=full"],
        &["fsdp.no_sync_units=[\"layers.1\"]", "train.grad_accum=3"],
        &[
            "fsdp.no_sync_units=[\"layers.*\"]",
            "train.grad_accum=2",
            "mesh.dp_outer=2",
        ],
        &["fsdp.decoupled_gradients=true", "train.clip_norm=1"],
        &[
            "precision.main_params=f32",
            "precision.main_grads=f32",
            "precision.comm_grads=bf16",
            "train.grad_accum=2",
        ],
        &["compile.mode=regions"],
        &["compile.mode=blocks"],
        &["compile.mode=regions", "compile.exclude=[\"layers.*\"]"],
        &[
            "compile.mode=blocks",
            "compile.exclude=[\"layers.1\", \"layers.*.attention\"]",
        ],
        &["compile.mode=full", "compile.exclude=[\"layers.*.mlp\"]"],
        &[
            "compile.mode=full",
            "train.grad_accum=2",
            "train.recompute=full",
        ],
        &[
            "compile.cuda_graph=full_iteration",
            "fsdp.allocator=pool",
            "train.grad_accum=2",
        ],
        &["fsdp.units=root", "train.optimizer=sgd"],
    ];
    let mut lowered = 0;
    for policy in POLICIES {
        for set in OPTIONS {
            let Some(p) = small(policy, set) else {
                continue;
            };
            lowered += 1;
            passes(&check(&p), &format!("{policy} {set:?}"));
        }
    }
    assert!(
        lowered > 80,
        "{lowered} of {} are lowered",
        3 * OPTIONS.len()
    );
}
