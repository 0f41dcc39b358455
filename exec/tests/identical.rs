//! Final weights are bitwise equal over policies, strategies and schedules, and after an
//! interruption with a checkpoint.

mod common;

use common::{load, run};
use safetensors::SafeTensors;
use shardlab_exec::train::{CheckpointOptions, Outcome, Resume, RunOptions};
use shardlab_plan::scenario::shipped;

/// Returns the losses as bits, and the exported weights as bytes.
fn results(name: &str, set: &[&str]) -> (Vec<u64>, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let options = RunOptions {
        steps: Some(4),
        export: Some(dir.path().to_owned()),
        ..RunOptions::default()
    };
    let o = run(&load(name, set), options);
    let losses = o.run.losses.iter().map(|l| l.to_bits()).collect();
    (
        losses,
        std::fs::read(dir.path().join("model.safetensors")).unwrap(),
    )
}

/// Returns the losses of a model that has no Hugging Face form, as bits.
fn losses(name: &str, set: &[&str]) -> Vec<u64> {
    let options = RunOptions {
        steps: Some(4),
        ..RunOptions::default()
    };
    let o = run(&load(name, set), options);
    o.run.losses.iter().map(|l| l.to_bits()).collect()
}

fn same(name: &str, base: &[&str], sets: &[&[&str]]) {
    let wanted = results(name, base);
    for set in sets {
        assert!(
            results(name, &[base, set].concat()) == wanted,
            "{name} {set:?}"
        );
    }
}

/// Reduce in every micro-batch.
const EACH: [&[&str]; 7] = [
    &[],
    &["fsdp.strategy=optim_grads"],
    &["fsdp.policy=fsdp2"],
    &["fsdp.policy=megatron"],
    &["fsdp.policy=megatron_v2"],
    &["fsdp.policy=megatron_v2", "fsdp.variant=pr4435"],
    &["compile.mode=full", "compile.epilogues=false"],
];
/// Accumulate micro-batches and reduce once per step.
const ONCE: [&[&str]; 4] = [
    &["fsdp.strategy=no_shard"],
    &["fsdp.strategy=optim"],
    &["fsdp.policy=megatron", "fsdp.strategy=optim"],
    &["fsdp.policy=megatron", "fsdp.strategy=no_shard"],
];

/// The same with gradients that are sharded between steps. This option is only for steps with
/// several micro-batches.
const ONCE_SHARDED: [&[&str]; 4] = [
    &["fsdp.gradient_sync=last"],
    &["fsdp.gradient_sync=last", "fsdp.strategy=optim_grads"],
    &["fsdp.gradient_sync=last", "fsdp.policy=fsdp2"],
    &[
        "fsdp.gradient_sync=last",
        "fsdp.policy=fsdp2",
        "fsdp.reshard_after_backward=false",
    ],
];

/// Sharding does not change results in float32, because all reductions sum ranks in the same order.
/// With several micro-batches, the two ways to accumulate add the same numbers in a different
/// order; the golden runs bound this difference.
#[test]
fn policies_and_strategies_end_with_the_same_weights() {
    let four = &["mesh.dp_shard=4", "train.micro_batch=1"];
    same("llama-tiny", four, &[&EACH[..], &ONCE].concat());
    // Units with frozen and trained parameters: in separate groups, or together (fsdp2).
    let frozen = &["fsdp.frozen=[\"layers.*.attention\"]"][..];
    same("llama-tiny", &[four, frozen].concat(), &EACH);
    let two = &["train.grad_accum=2", "train.micro_batch=2"][..];
    same("gpt2-tiny", two, &EACH);
    let others: [&[&str]; 4] = [
        &["fsdp.reshard_after_backward=false"],
        &["fsdp.policy=fsdp2", "fsdp.reshard_root=true"],
        &["fsdp.policy=fsdp2", "fsdp.keep_unsharded_storage=true"],
        &[
            "fsdp.policy=fsdp2",
            "fsdp.keep_unsharded_storage=true",
            "train.recompute=full",
            "train.no_grad_forwards=1",
        ],
    ];
    same("gpt2-tiny", two, &others);
    let once = [two, &["fsdp.strategy=no_shard"]].concat();
    same("gpt2-tiny", &once, &ONCE);
    let wanted = results("gpt2-tiny", &once);
    same(
        "llama-tiny",
        four,
        &[
            &["fsdp.atomic=tensor"],
            &["fsdp.atomic=8"],
            &["fsdp.atomic=tensor", "fsdp.strategy=optim"],
        ],
    );
    // Forwards without gradients have no side effects: no unit stays full, and none is stale.
    let zero2 = |set: &&&[&str]| set.contains(&"fsdp.strategy=optim_grads");
    for base in EACH.iter().filter(|set| !zero2(set)) {
        let first = [two, base].concat();
        let more = [&first[..], &["train.no_grad_forwards=2"]].concat();
        assert!(
            results("gpt2-tiny", &more) == results("gpt2-tiny", &first),
            "{base:?}"
        );
    }
    let all = "fsdp.no_sync_units=[\"*\", \"*.*\"]";
    let units: [&[&str]; 2] = [&[all], &[all, "fsdp.policy=fsdp2"]];
    for set in ONCE_SHARDED.iter().chain(&units) {
        assert!(
            results("gpt2-tiny", &[two, set].concat()) == wanted,
            "{set:?}"
        );
    }
    // One backward over both forwards adds the same two gradients in reverse order.
    let joint = [two, &["train.joint_backward=true"]].concat();
    for set in EACH.iter().chain(&ONCE) {
        if released(set) {
            assert!(
                results("gpt2-tiny", &[&joint, *set].concat()) == wanted,
                "{set:?}"
            );
        }
    }
    let more = ["train.no_grad_forwards=1", "train.recompute=full"];
    assert!(results("gpt2-tiny", &[&joint[..], &more].concat()) == wanted);
    // Some units reduce in every micro-batch, others in the last one.
    let some = [two, &["fsdp.no_sync_units=[\"*.1\"]"]].concat();
    same("gpt2-tiny", &some, &[&["fsdp.policy=fsdp2"]]);
    assert!(results("gpt2-tiny", &some) != wanted);
}

/// Micro-batches that skip blocks. Zero gradients, which some engines reduce, do not change any
/// sum.
#[test]
fn skipped_blocks_end_with_the_same_weights() {
    let some = [
        "train.grad_accum=2",
        "train.micro_batch=2",
        "train.skipped_blocks=[{ blocks = [\"layers.0\"], micro_batches = [0] }, { blocks = [\"layers.1\"], \
         micro_batches = [1] }]",
    ];
    let engines: Vec<&[&str]> = EACH.iter().copied().filter(|set| released(set)).collect();
    same("gpt2-tiny", &some, &engines);
    same(
        "gpt2-tiny",
        &some,
        &[
            &["fsdp.policy=fsdp2", "fsdp.prefetch_forward=2"],
            &["fsdp.policy=fsdp2", "fsdp.reduce_unused=true"],
            &["train.recompute=full"],
        ],
    );
    let once: Vec<&[&str]> = ONCE.iter().chain(&ONCE_SHARDED).copied().collect();
    let wanted = results("gpt2-tiny", &[&some[..], once[0]].concat());
    for set in once {
        assert!(
            results("gpt2-tiny", &[&some[..], set].concat()) == wanted,
            "{set:?}"
        );
    }
    // A block that never runs keeps its weights, unless it is updated with zero gradients and
    // weight decay.
    let never = ["train.skipped_blocks=[{ blocks = [\"layers.1\"] }]"];
    let fsdp2 = [&never[..], &["fsdp.policy=fsdp2"]].concat();
    assert!(results("gpt2-tiny", &fsdp2) == results("gpt2-tiny", &never));
    for decay in ["0", "0.1"] {
        let decay = format!("train.weight_decay={decay}");
        let native = [&never[..], &[decay.as_str()]].concat();
        let zeros = [&native[..], &["fsdp.policy=megatron"]].concat();
        let same = results("gpt2-tiny", &zeros) == results("gpt2-tiny", &native);
        assert_eq!(same, decay.ends_with("=0"), "{decay}");
    }
}

/// Returns whether a schedule is that of a released engine, which works layer by layer.
fn released(set: &[&str]) -> bool {
    let refused = |s: &&str| s.ends_with("megatron_v2") || *s == "compile.mode=full";
    !set.iter().any(refused)
}

/// The optimizer works on host memory, where gradients of later micro-batches are added.
#[test]
fn offloaded_state_ends_with_the_same_weights() {
    const OFFLOAD: &str = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
    let policy = "fsdp.policy=fsdp2";
    for base in [
        &["mesh.dp_shard=4", "train.micro_batch=1"][..],
        &[
            "mesh.dp_shard=2",
            "train.micro_batch=2",
            "train.grad_accum=2",
        ],
        &[
            "mesh.dp_shard=2",
            "mesh.dp_replicate=2",
            "train.micro_batch=1",
            "train.grad_accum=2",
            "fsdp.gradient_sync=last",
        ],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "train.clip_norm=0.5",
            "train.optimizer=lion",
        ],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "fsdp.frozen=[\"layers.*.attention\"]",
            "train.recompute=full",
        ],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "precision.compute=bf16",
        ],
    ] {
        let base = [base, &[policy]].concat();
        same("llama-tiny", &base, &[&[OFFLOAD]]);
        // Groups of two ranks keep separate slices on the device.
        if base.contains(&"mesh.dp_shard=4") {
            let groups = "fsdp.reshard_after_forward=2";
            same("llama-tiny", &base, &[&[OFFLOAD, groups]]);
        }
    }
}

/// Activations return from host memory unchanged.
#[test]
fn activations_from_host_memory_are_the_same() {
    const OFFLOAD: &str = "train.activation_offload=true";
    for base in [
        &[
            "mesh.dp_shard=2",
            "train.micro_batch=2",
            "train.grad_accum=2",
        ][..],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "fsdp.policy=fsdp2",
        ],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "fsdp.policy=fsdp2",
            "train.recompute=full",
        ],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "fsdp.policy=megatron",
            "train.recompute=selective",
        ],
        &[
            "mesh.dp_shard=4",
            "train.micro_batch=1",
            "compile.mode=blocks",
        ],
    ] {
        same("llama-tiny", base, &[&[OFFLOAD]]);
    }
}

/// If only queries, keys and values have biases, these are sharded, reduced and updated like other
/// parameters.
#[test]
fn biases_of_some_layers_end_with_the_same_values() {
    let base = &["model.bias=qkv", "mesh.dp_shard=4", "train.micro_batch=1"];
    same("llama-tiny", base, &EACH);
}

/// A shard of a flat buffer has parameters of several parameter groups, and parameters end within
/// it. Each tensor of fsdp2 is in one group.
#[test]
fn parameter_groups_end_with_the_same_weights() {
    let four = &["mesh.dp_shard=4", "train.micro_batch=1"];
    let plain = results("llama-tiny", four);
    let groups = [
        "train.decay_norms_and_biases=false",
        "train.param_groups=[{ params = [\"*norm*\", \"output\"], lr_scale = 0.0, weight_decay = 0.5 }, \
         { params = [\"layers.0\"], lr_scale = 0.1 }]",
    ];
    let base = [&four[..], &groups].concat();
    same("llama-tiny", &base, &[&EACH[..], &ONCE].concat());
    let grouped = results("llama-tiny", &base);
    assert_ne!(grouped.0, plain.0);
    // Parameters of a group with learning rate 0 do not change.
    let start = results("llama-tiny", &[&four[..], &["train.lr=0.0"]].concat());
    let [grouped, start] = [&grouped.1, &start.1].map(|b| SafeTensors::deserialize(b).unwrap());
    let mut still = 0;
    for (name, tensor) in grouped.tensors() {
        let stays = name.contains("norm") || name == "lm_head.weight";
        let same = tensor.data() == start.tensor(&name).unwrap().data();
        assert_eq!(same, stays, "{name}");
        still += usize::from(stays);
    }
    assert_eq!(still, 10);
}

/// Lion's momentum is sharded like AdamW's moments.
#[test]
fn lion_ends_with_the_same_weights() {
    let base = &[
        "mesh.dp_shard=4",
        "train.micro_batch=1",
        "train.optimizer=lion",
        "train.betas=[0.9, 0.99]",
        "train.lr=1e-4",
    ];
    same("llama-tiny", base, &[&EACH[..], &ONCE].concat());
}

/// Muon's matrices are whole, regardless of the number of ranks that share the model.
#[test]
fn muon_ends_with_the_same_weights() {
    let muon = "train.optimizer=muon";
    let base = &["mesh.dp_shard=4", "train.micro_batch=1", muon];
    same(
        "llama-tiny",
        base,
        &[
            &["fsdp.strategy=no_shard"],
            &["fsdp.strategy=optim_grads"],
            &["fsdp.strategy=optim"],
            &["fsdp.units=root"],
            &["fsdp.reshard_after_forward=false"],
            &[
                "fsdp.copy_engine_reduce_scatter=true",
                "fsdp.fuse_reduce_into_optimizer=true",
                "train.grad_norm=false",
            ],
            &["fsdp.offload=[\"params\", \"grads\", \"optimizer\"]"],
            &["fsdp.policy=fsdp2"],
            &["fsdp.policy=fsdp2", "fsdp.strategy=optim_grads"],
        ],
    );
}

/// Under fsdp2, ranks orthogonalize what they have gathered, and update their rows. With three
/// ranks, matrices of 64 and 176 rows end with padding, which is in another parameter group.
#[test]
fn muon_gathers_matrices_whose_rows_are_sharded() {
    let muon = "train.optimizer=muon";
    let groups = "train.param_groups=[{params=[\"mlp.*\"], weight_decay=0.3, lr_scale=0.5}]";
    let gathers: &[&str] = &["fsdp.policy=fsdp2"];
    for ranks in ["mesh.dp_shard=1", "mesh.dp_shard=2", "mesh.dp_shard=3"] {
        let base = &[muon, ranks, "train.micro_batch=1", groups];
        same("llama-tiny", base, &[gathers]);
    }
    let hybrid = [
        muon,
        "mesh.dp_shard=2",
        "mesh.dp_replicate=2",
        "train.micro_batch=1",
    ];
    same("llama-tiny", &hybrid, &[gathers]);
}

/// Returns the losses, as bits, of two steps of the second scenario, which continue two steps of
/// the first one from a checkpoint.
fn resumed(first: &[&str], second: &[&str]) -> Vec<u64> {
    let dir = tempfile::tempdir().unwrap();
    let train = |set: &[&str], steps: u64| {
        let options = RunOptions {
            steps: Some(steps),
            checkpoints: Some(CheckpointOptions {
                dir: dir.path().to_owned(),
                every: 0,
                keep: 1,
                resume: Resume::Auto,
            }),
            ..RunOptions::default()
        };
        run(&load("llama-tiny", set), options).run.losses
    };
    train(first, 2);
    let rest = train(second, 4);
    let last = rest.iter().skip(rest.len() - 2);
    last.map(|l| l.to_bits()).collect()
}

/// Parameters that Muon updates have one state, the others have two; another strategy places them
/// differently.
#[test]
fn muon_continues_from_a_checkpoint() {
    let set = [
        "train.optimizer=muon",
        "mesh.dp_shard=4",
        "train.micro_batch=1",
    ];
    let whole = results("llama-tiny", &set);
    let elsewhere = [&set[..], &["fsdp.strategy=no_shard", "fsdp.units=root"]].concat();
    assert_eq!(resumed(&set, &set), whole.0[2..]);
    assert_eq!(resumed(&set, &elsewhere), whole.0[2..]);
    let rows = [&set[..], &["fsdp.policy=fsdp2"]].concat();
    assert_eq!(resumed(&set, &rows), whole.0[2..]);
    assert_eq!(resumed(&rows, &set), whole.0[2..]);
}

/// 8-bit states are those of shards, so results depend on where shards end. With one rank, they are
/// the same under every policy that places them in the same way, and after a checkpoint.
#[test]
fn states_in_8_bits_continue_from_a_checkpoint() {
    for policy in ["native", "fsdp2", "megatron", "megatron_v2"] {
        let policy = format!("fsdp.policy={policy}");
        let set = [
            &*policy,
            "precision.moments=8bit",
            "precision.compute=bf16",
            "mesh.dp_shard=2",
        ];
        let whole = results("llama-tiny", &set);
        let rest = resumed(&set, &set);
        assert_eq!(rest, whole.0[2..], "{policy}");
        // The run learns about as well as with float32 states, but results are not equal.
        let plain = results("llama-tiny", &[&policy, set[2], set[3]]);
        assert_ne!(plain.1, whole.1);
        for (a, b) in plain.0.iter().zip(&whole.0) {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            assert!((a / b - 1.0).abs() < 0.02, "{policy}: {a} {b}");
        }
    }
}

/// The choice of operations that selective recompute saves does not change results.
#[test]
fn recompute_of_some_operations_ends_with_the_same_weights() {
    let selective = "train.recompute=selective";
    for base in [&["fsdp.policy=native"][..], &["fsdp.policy=fsdp2"]] {
        let sets: [&[&str]; 3] = [
            &[selective],
            &[selective, "train.recompute_nth_matmul=2"],
            &[
                selective,
                "train.recompute_save=[\"attention\", \"rms_norm\"]",
            ],
        ];
        same("llama-tiny", base, &sets);
    }
}

/// The choice of modules that selective recompute runs again does not change results.
#[test]
fn recompute_of_some_modules_ends_with_the_same_weights() {
    let selective = "train.recompute=selective";
    let dense = [
        "train.recompute_modules=[\"layernorm\"]",
        "train.recompute_modules=[\"core_attn\", \"mlp\"]",
    ];
    let experts = [
        "train.recompute_modules=[\"moe_act\", \"layernorm\"]",
        "train.recompute_modules=[\"moe\", \"mlp\"]",
    ];
    for policy in ["native", "fsdp2", "megatron"] {
        let policy = format!("fsdp.policy={policy}");
        let sets = dense.map(|modules| [selective, modules]);
        let sets = sets.each_ref().map(<[_; 2]>::as_slice);
        same("llama-tiny", &[&policy], &sets);
        for (scenario, base) in [
            ("small-moe", vec![&*policy]),
            ("small-moe-ep", vec![&*policy, "moe.capacity_factor=2"]),
        ] {
            let wanted = losses(scenario, &base);
            for modules in experts {
                let found = losses(scenario, &[&base[..], &[selective, modules]].concat());
                assert_eq!(found, wanted, "{scenario} {policy} {modules}");
            }
        }
    }
}

/// Recomputing some blocks does not change results, under every policy and mode.
#[test]
fn recompute_of_some_blocks_ends_with_the_same_weights() {
    let first = ["train.recompute=full", "train.recompute_layers=1"];
    let last = [
        "train.recompute=full",
        "train.recompute_layers=[\"layers.1\"]",
    ];
    for base in [
        &["fsdp.policy=native"][..],
        &["fsdp.policy=native", "compile.mode=blocks"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=fsdp2", "compile.mode=regions"],
        &["fsdp.policy=megatron"],
        &["fsdp.policy=megatron", "compile.mode=blocks"],
        &["compile.mode=full"],
    ] {
        same("small-native", base, &[&first, &last]);
    }
}

/// Unreduced shards that the optimizer sums give the same result as a separate kernel after the
/// exchange, which sums them in the same order.
#[test]
fn sums_in_the_optimizer_end_with_the_same_weights() {
    for base in [
        &["train.clip_norm=0"][..],
        &["train.clip_norm=0", "train.optimizer=sgd"],
        // Without main weights, the optimizer updates the compute weights.
        &[
            "train.clip_norm=0",
            "precision.main_params=none",
            "mesh.dp_shard=4",
        ],
        &[
            "train.clip_norm=0",
            "precision.compute=bf16",
            "precision.comm_grads=bf16",
            "compile.mode=regions",
        ],
    ] {
        let with = |more: &[&'static str]| [&["fsdp.sum_in_optimizer=true"], more].concat();
        same(
            "small-native",
            &[base, &["fsdp.copy_engine_reduce=true"]].concat(),
            &[
                &with(&[]),
                &with(&["fsdp.optimizer_in_backward=true"]),
                &with(&["fsdp.strategy=optim_grads", "fsdp.async_reduce=false"]),
                &with(&["fsdp.offload=[\"params\", \"optimizer\"]"]),
                &with(&["fsdp.prefetch_next_step=2", "fsdp.copy_engine_gather=true"]),
                &with(&["compile.cuda_graph=full_iteration"]),
            ],
        );
    }
    // One rank has nothing to exchange.
    let one = ["mesh.dp_shard=1", "train.clip_norm=0"];
    assert!(results("small-summed", &one[..1]) == results("small-native", &one));
}

/// A shard that is cast before each gather has the same bits as one that the optimizer keeps.
#[test]
fn casts_before_gathers_end_with_the_same_weights() {
    let cast = "fsdp.cast_before_all_gather=true";
    let apart = "fsdp.copy_in_stream=true";
    for base in [
        &["precision.compute=bf16"][..],
        &["precision.compute=bf16", "compile.mode=regions"],
        &[
            "precision.compute=bf16",
            "mesh.dp_outer=2",
            "mesh.dp_shard=2",
        ],
    ] {
        same(
            "small-native",
            base,
            &[
                &[cast],
                &[cast, "fsdp.prefetch_forward=0", "fsdp.prefetch_backward=2"],
                &[cast, "fsdp.copy_engine_gather=true"],
                &[cast, "compile.cuda_graph=full_iteration"],
                &[cast, apart],
                &[cast, apart, "fsdp.prefetch_forward=3"],
                &[cast, apart, "compile.cuda_graph=full_iteration"],
            ],
        );
    }
    same(
        "small-native",
        &["precision.compute=bf16", "train.clip_norm=0"],
        &[
            &[cast, "fsdp.optimizer_in_backward=true"],
            &[cast, apart, "fsdp.optimizer_in_backward=true"],
        ],
    );
}

/// Elementwise code can be the epilogue of preceding GEMMs, regardless of what else is compiled,
/// recomputed or captured.
#[test]
fn fused_products_end_with_the_same_weights() {
    for mode in ["compile.mode=regions", "compile.mode=full"] {
        let with = |more: &[&'static str]| [&["compile.fused_products=true"], more].concat();
        same(
            "small-native",
            &["precision.compute=bf16", mode],
            &[
                &with(&[]),
                &with(&["train.recompute=pointwise"]),
                &with(&["train.recompute=full", "fsdp.allocator=caching"]),
                &with(&["compile.cuda_graph=full_iteration"]),
            ],
        );
    }
}

/// The gate of experts can be one, too, over all rows or over those that some expert has. No file
/// format supports these experts, so losses and gradient norms are compared.
#[test]
fn fused_gates_of_experts_have_the_same_losses() {
    let numbers = |set: &[&str]| {
        let steps = Some(4);
        let o = run(
            &load("small-moe", set),
            RunOptions {
                steps,
                ..RunOptions::default()
            },
        );
        let bits = |of: &[f64]| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        [bits(&o.run.losses), bits(&o.run.grad_norms)]
    };
    for ep in ["mesh.ep=1", "mesh.ep=2"] {
        let base = [
            "precision.compute=bf16",
            "model.expert_ffn=48",
            "compile.mode=blocks",
            ep,
        ];
        let wanted = numbers(&base);
        let fused = "compile.gemm_epilogue_fusion=true";
        for more in ["train.recompute=none", "train.recompute=full"] {
            let found = numbers(&[&base[..], &[fused, more]].concat());
            assert!(found == wanted, "{ep} {more}");
        }
    }
}

/// Streams, communicators, units and other options that the other tests of schedules do not cover.
#[test]
fn schedules_end_with_the_same_weights() {
    same(
        "small-native",
        &[],
        &[
            &["fsdp.async_reduce=false"],
            &["fsdp.separate_communicators=false"],
            &["fsdp.unify_comm_stream=true"],
            &["fsdp.copy_engine_reduce=true"],
            &[
                "fsdp.copy_engine_reduce=true",
                "fsdp.copy_engine_gather=true",
                "fsdp.separate_communicators=false",
            ],
            &["fsdp.reshard_after_forward=auto"],
            &["fsdp.reshard_after_forward=2"],
            &[
                "fsdp.prefetch_forward={ elements = 20000 }",
                "fsdp.prefetch_backward={ elements = 1 }",
            ],
            &["fsdp.allocator=temporary"],
            &["fsdp.nan_check=true"],
            &["train.validate_every=1"],
        ],
    );
    same(
        "small-fsdp2",
        &[],
        &[
            &["fsdp.prefetch_forward=2", "fsdp.prefetch_backward=2"],
            &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
            &["fsdp.prefetch_lists=[{ unit = \"layers.0\", forward = [\"layers.2\"] }]"],
            &["fsdp.reduce_in_flight=2"],
            &["fsdp.async_reduce=false"],
            &["fsdp.expandable_segments=false"],
            &["fsdp.reshard_after_forward=false"],
            &["fsdp.reshard_after_forward=2"],
            &["fsdp.separate_communicators=true"],
            &["compile.mode=blocks"],
        ],
    );
    same(
        "small-megatron",
        &[],
        &[
            &["fsdp.async_reduce=false"],
            &["fsdp.unify_comm_stream=true"],
            &["fsdp.allocator=double_buffer"],
            &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
            &["compile.mode=regions"],
        ],
    );
    // 16-bit gradients have the same values after a cast. (Clipping would round them again.)
    for name in [
        "small-megatron",
        "small-megatron-v2",
        "small-megatron-pr4435",
    ] {
        let base = [
            "precision.compute=bf16",
            "precision.main_grads=bf16",
            "train.clip_norm=0",
        ];
        same(name, &base, &[&["fsdp.decoupled_gradients=true"]]);
    }
    same(
        "small-megatron-v2",
        &[],
        &[
            &["fsdp.prefetch_forward=1", "fsdp.prefetch_backward=1"],
            &["fsdp.allocator=temporary"],
            &["fsdp.expandable_segments=false"],
            &["train.recompute=full"],
            &["train.validate_every=1"],
        ],
    );
    let caching = "fsdp.allocator=caching";
    same(
        "small-megatron-pr4435",
        &["train.grad_accum=2", "train.micro_batch=2"],
        &[
            &["fsdp.prefetch_forward=0", "fsdp.prefetch_backward=0"],
            &["fsdp.async_reduce=false"],
            &["train.recompute=full"],
            &[caching, "train.validate_every=1"],
            &[caching, "train.no_grad_forwards=1"],
            &[caching, "fsdp.variant=released"],
        ],
    );
    // Without clipping, no norm is computed. Its summation order would depend on the units.
    same(
        "small-native",
        &["train.clip_norm=0"],
        &[
            &["fsdp.units=root"],
            &["fsdp.units=[\"layers.*.attention\", \"layers.*.mlp\"]"],
            &["train.grad_norm=true"],
        ],
    );
}

/// Two in-place rotations in one kernel that read and write neighboring columns. Results are equal
/// except for the order of additions.
#[test]
fn merged_projections_of_a_whole_model_in_one_unit_have_the_same_losses() {
    let base = [
        "model.kv_heads=4",
        "fsdp.units=root",
        "precision.compute=f32",
    ];
    let merged = ["compile.mode=regions", "compile.merge_projections=qkv"];
    let losses = |set: &[&str]| results("small-native", set).0;
    let wanted = losses(&base);
    for (found, wanted) in losses(&[&base[..], &merged].concat()).iter().zip(&wanted) {
        let [found, wanted] = [*found, *wanted].map(f64::from_bits);
        assert!((found - wanted).abs() < 1e-6 * wanted, "{found} {wanted}");
    }
}

fn steps(name: &str, steps: u64, checkpoints: Option<CheckpointOptions>) -> Outcome {
    let options = RunOptions {
        steps: Some(steps),
        checkpoints,
        ..RunOptions::default()
    };
    run(&load(name, &[]), options)
}

/// Each small scenario, stopped after its third step and resumed, gives the same result as without
/// the interruption.
#[test]
fn a_resumed_run_ends_with_the_same_bits() {
    let bits = |o: &Outcome| -> Vec<u64> {
        let all = o.run.losses.iter().chain(&o.run.grad_norms);
        all.chain(&o.weight_norms).map(|x| x.to_bits()).collect()
    };
    for (name, _) in shipped().iter().filter(|s| s.0.starts_with("small-")) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = || {
            Some(CheckpointOptions {
                dir: dir.path().to_owned(),
                every: 0,
                keep: 1,
                resume: Resume::Auto,
            })
        };
        let whole = steps(name, 5, None);
        steps(name, 3, checkpoints());
        let resumed = steps(name, 5, checkpoints());
        assert_eq!(resumed.resumed_from, 3);
        assert_eq!(bits(&resumed), bits(&whole), "{name}");
    }
}

/// With gradients scaled to twice their mean and half of the learning rate, SGD makes the same
/// updates.
#[test]
fn a_gradient_factor_scales_updates() {
    let mean = [
        "train.optimizer=sgd",
        "train.weight_decay=0",
        "train.clip_norm=0",
        "train.lr=2e-3",
    ];
    let twice = ["train.lr=1e-3", "fsdp.gradient_scaling_factor=0.5"];
    for name in ["small-native", "small-fsdp2", "small-megatron"] {
        for more in [
            &[][..],
            &["train.grad_accum=2"],
            &["mesh.dp_shard=2", "mesh.dp_replicate=2"],
            &["mesh.dp_shard=1", "mesh.dp_replicate=4"],
            &["compile.mode=full"],
            &["fsdp.strategy=optim"],
        ] {
            if name == "small-megatron" && more == ["compile.mode=full"]
                || name == "small-fsdp2" && more == ["fsdp.strategy=optim"]
            {
                continue;
            }
            let base = [&mean[..], more].concat();
            same(name, &base, &[&twice]);
        }
    }
}

/// DoRA's magnitudes start as the norms of the model's rows, so its first loss is that of LoRA.
#[test]
fn decomposed_adapters_start_as_plain_ones() {
    let losses = |set: &[&str]| -> Vec<f64> {
        let options = RunOptions {
            steps: Some(4),
            ..RunOptions::default()
        };
        let set = [&["precision.param_dtype=f32"], set].concat();
        run(&load("small-lora", &set), options).run.losses
    };
    let dora = "lora.use_dora=true";
    let (plain, sharded) = (losses(&[]), losses(&[dora]));
    let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * b;
    assert!(near(plain[0], sharded[0]), "{plain:?} {sharded:?}");
    assert!(plain[3] != sharded[3], "{plain:?}");
    for set in [
        &["mesh.dp_shard=1", "train.micro_batch=8"][..],
        &["fsdp.policy=fsdp2"],
        &["train.recompute=full"],
        &["compile.mode=blocks"],
        &["compile.mode=regions"],
        &["compile.mode=regions", "fsdp.policy=fsdp2"],
        &["compile.mode=full"],
    ] {
        let other = losses(&[&[dora], set].concat());
        let mut pairs = other.iter().zip(&sharded);
        assert!(
            pairs.all(|(a, b)| near(*a, *b)),
            "{set:?}: {other:?} {sharded:?}"
        );
    }
}

/// Packed frozen weights: the same bits for every sharding, and losses close to those of the
/// original weights.
#[test]
fn packed_weights_train_alike_everywhere() {
    let losses = |name: &str, set: &[&str]| -> Vec<f64> {
        let steps = Some(6);
        let options = RunOptions {
            steps,
            ..RunOptions::default()
        };
        // Policies sum 16-bit gradients in different dtypes.
        let set = [&["precision.param_dtype=f32"], set].concat();
        run(&load(name, &set), options).run.losses
    };
    let whole = losses("small-qlora", &["mesh.dp_shard=1", "train.micro_batch=8"]);
    let sharded = losses("small-qlora", &[]);
    let more: [&[&str]; 4] = [
        &["fsdp.strategy=optim_grads"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=megatron"],
        &["train.recompute=full"],
    ];
    for set in more {
        assert_eq!(losses("small-qlora", set), sharded, "{set:?}");
    }
    let near = |a: &[f64], b: &[f64], by: f64| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).all(|(a, b)| (a - b).abs() < by * b)
    };
    // Ranks add gradients in another order.
    assert!(near(&whole, &sharded, 1e-5), "{whole:?} {sharded:?}");
    let float = losses("small-qlora", &["precision.frozen_params=nf4_f32"]);
    assert!(
        near(&sharded, &float, 2e-3) && sharded != float,
        "{sharded:?} {float:?}"
    );
    let plain = losses("small-lora", &[]);
    // 8-bit codes are closer to the weights, with the same bits for every sharding.
    let int8 = ["precision.frozen_params=int8"];
    let eight = losses("small-qlora", &int8);
    assert!(
        near(&eight, &plain, 2e-3) && eight != plain,
        "{eight:?} {plain:?}"
    );
    for set in more {
        let all = [set, &int8].concat();
        assert_eq!(losses("small-qlora", &all), eight, "{set:?}");
    }
    assert!(
        near(&sharded, &plain, 1e-2) && sharded != plain,
        "{sharded:?} {plain:?}"
    );
    // The loss decreases.
    assert!(sharded[5] < sharded[0], "{sharded:?}");
}
