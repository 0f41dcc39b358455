//! Other names of keys and values mean the same scenario.

use super::super::keys::{KEYS, Key, key_of};
use super::{MINIMAL, minimal};
use crate::scenario::{load, parse, sweep_of};
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn keys_and_values_have_the_names_of_pytorch_and_torchtitan() {
    for (own, other) in [
        ("mesh.dp_replicate=2", "mesh.dp_outer=2"),
        (
            "mesh.dp_replicate=2",
            "mesh.data_parallel_replicate_degree=2",
        ),
        ("precision.param_dtype=f32", "precision.param_dtype=fp32"),
        (
            "precision.param_dtype=f16",
            "precision.param_dtype=torch.float16",
        ),
        (
            "precision.reduce_dtype=bf16",
            "precision.reduce_dtype=bfloat16",
        ),
        ("fsdp.strategy=optim", "fsdp.strategy=zero1"),
        ("fsdp.strategy=optim_grads", "fsdp.strategy=zero2"),
        (
            "fsdp.strategy=optim_grads",
            "fsdp.sharding_strategy=SHARD_GRAD_OP",
        ),
        (
            "fsdp.strategy=optim_grads_params",
            "fsdp.strategy=FULL_SHARD",
        ),
        ("fsdp.policy=fsdp2", "fsdp.policy=fully_shard"),
        ("model.layers=2", "model.num_hidden_layers=2"),
        ("train.grad_accum=4", "train.gradient_accumulation_steps=4"),
    ] {
        assert_eq!(
            minimal(&[own]).unwrap(),
            minimal(&[other]).unwrap(),
            "{other}"
        );
        assert_eq!(
            minimal(&[own]).unwrap() == minimal(&[]).unwrap(),
            own.ends_with("optim_grads_params"),
            "{own} changes something"
        );
    }
}

/// Former names of keys stay, and so do the names of resolved options.
#[test]
fn former_names_of_keys_stay() {
    for (now, former) in [
        ("mesh.dp_replicate", "mesh.dp_outer"),
        ("precision.param_dtype", "precision.compute"),
        ("precision.reduce_dtype", "precision.comm_grads"),
        ("train.sync_each_step", "train.sync"),
        ("train.loss_chunk_tokens", "train.loss_chunk_rows"),
        ("fsdp.copy_engine_all_gather", "fsdp.copy_engine_gather"),
        ("fsdp.copy_engine_reduce_scatter", "fsdp.copy_engine_reduce"),
        ("fsdp.fuse_reduce_into_optimizer", "fsdp.sum_in_optimizer"),
        ("compile.fuse_projections", "compile.merge_projections"),
        ("compile.gemm_accumulate", "compile.epilogues"),
        ("compile.gemm_epilogue_fusion", "compile.fused_products"),
    ] {
        let key = Key::at(former).unwrap();
        assert_eq!(key.path(), now);
        assert_eq!(key.info().json_path(), former);
        assert_eq!(key_of(former), now);
    }
    assert_eq!(key_of("mesh.dp_shard"), "mesh.dp_shard");
    let json = serde_json::to_value(minimal(&["lora.r=8"]).unwrap()).unwrap();
    // Placements are another way to write strategies. Without a value, some are left out.
    let left_out = [
        "placements",
        "dispatcher",
        "capacity_factor",
        "on_overflow",
        "routing",
        "force_routing",
        "imbalance",
        "routing_seed",
        "no_sync_units",
        "ignored_params",
        "keep_unsharded_storage",
        "variant",
        "joint_backward",
        "skipped_blocks",
        "reduce_unused",
        "atomic",
        "prefetch_lists",
        "gradient_scaling_factor",
        "keep_fp8_transpose_cache",
        "float8_experts",
        "exclude",
        "shared_expert_overlap",
        "modules_to_save",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
    ];
    for info in KEYS.iter().filter(|info| !left_out.contains(&info.key)) {
        assert!(
            json[info.section].get(info.field).is_some(),
            "{}",
            info.path()
        );
    }
}

#[test]
fn placements_have_the_names_of_pytorch_too() {
    let of = |text: &str| minimal(&["mesh.dp_replicate=2", text]).unwrap();
    assert_eq!(
        of("fsdp.placements={ dp_replicate = [\"replicate\", \"replicate\", \"flat\"] }"),
        of("fsdp.placements={ dp_outer = [\"replicate\", \"replicate\", \"shard\"] }")
    );
}

#[test]
fn every_name_means_one_key() {
    let mut names = BTreeSet::new();
    for info in KEYS {
        for name in info.aliases.iter().chain([&info.key]) {
            assert!(
                names.insert((info.section, *name)),
                "{}.{name}",
                info.section
            );
        }
    }
}

#[test]
fn a_key_may_not_be_given_under_two_names() {
    let text = format!("{MINIMAL}dp_outer = 2\ndp_replicate = 4\n");
    let error = parse("two", &text, &[]).unwrap_err().to_string();
    assert!(
        error.contains("`dp_replicate` and `dp_outer` are the same key")
            && error.contains("two:7:1"),
        "{error}"
    );
    // An override may use another name than the file.
    let text = format!("{MINIMAL}dp_outer = 2\n");
    let set = ["mesh.dp_replicate=4".to_owned()];
    assert_eq!(parse("one", &text, &set).unwrap().mesh.dp_outer, 4);
}

#[test]
fn wrong_values_are_reported_under_the_own_name() {
    let error = minimal(&["precision.param_dtype=fp8"])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`precision.param_dtype` must be \"f32\" | \"bf16\" | \"f16\""),
        "{error}"
    );
    // A spelling counts only where its meaning is a value.
    assert!(minimal(&["train.optimizer=zero1"]).is_err());
}

#[test]
fn axes_take_the_same_names() {
    let axis = |text: &str| {
        let sweep = sweep_of(Path::new("llama3-8b-4xh200"), &[], &[text.to_owned()]).unwrap();
        let settings = sweep.points.iter().map(|p| p.settings.clone());
        settings.collect::<Vec<_>>()
    };
    assert_eq!(
        axis("fsdp.sharding_strategy=[\"zero1\", \"FULL_SHARD\"]"),
        axis("fsdp.strategy=[\"optim\", \"optim_grads_params\"]")
    );
    assert!(
        load(
            Path::new("llama3-8b-4xh200"),
            &["mesh.dp_replicate=2".to_owned()]
        )
        .is_ok()
    );
}
