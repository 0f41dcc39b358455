//! `fsdp.ignored_params`: what it resolves to, and messages for bad input.

use crate::config::{IgnoredParams, Scenario};
use crate::scenario::{ScenarioError, load};
use std::path::Path;

/// Loads the shipped mixture with bf16 weights, whose four ranks divide its eight experts.
fn experts(set: &[&str]) -> Result<Scenario, ScenarioError> {
    let all: Vec<String> = [
        "mesh.ep=4",
        "fsdp.policy=fsdp2",
        "precision.main_params=none",
    ]
    .iter()
    .chain(set)
    .map(|s| (*s).to_owned())
    .collect();
    load(Path::new("small-moe"), &all)
}

fn fault(set: &[&str]) -> String {
    experts(set).unwrap_err().to_string()
}

const EXPERTS: &str = "fsdp.ignored_params=experts";

#[test]
fn experts_or_globs_of_modules() {
    let of = |set: &[&str]| experts(set).unwrap().fsdp.ignored_params;
    assert_eq!(of(&[]), IgnoredParams::NONE);
    assert_eq!(of(&["fsdp.ignored_params=[]"]), IgnoredParams::NONE);
    assert_eq!(of(&[EXPERTS]), IgnoredParams::Experts);
    let globs = "fsdp.ignored_params=[\"layers.*.mlp.experts\"]";
    let listed = IgnoredParams::Patterns(vec!["layers.*.mlp.experts".into()]);
    assert_eq!(of(&[globs]), listed);
    let serialized = |set: &[&str]| {
        let s = experts(set).unwrap();
        serde_json::to_value(s.fsdp).unwrap()["ignored_params"].clone()
    };
    assert_eq!(serialized(&[EXPERTS]), serde_json::json!("experts"));
    assert!(serialized(&[]).is_null());
}

#[test]
fn globs_match_modules() {
    let message = fault(&["fsdp.ignored_params=[\"layers.*.mlp.expert\"]"]);
    assert!(
        message.contains("ignored_params pattern `layers.*.mlp.expert` matches no module")
            && message.contains("did you mean `layers.*.mlp.experts`?"),
        "{message}"
    );
    let message = fault(&["fsdp.ignored_params=[\"layers 1\"]"]);
    assert!(message.contains("only letters, digits"), "{message}");
    let message = fault(&["fsdp.ignored_params=expert"]);
    let both = "did you mean \"experts\", or a list: [\"expert\"]?";
    assert!(message.contains(both), "{message}");
}

/// Only `fully_shard` has this argument.
#[test]
fn other_policies_have_no_ignored_parameters() {
    for set in [
        &["fsdp.policy=native"][..],
        &["fsdp.policy=megatron"],
        &["compile.mode=full"],
    ] {
        let message = fault(&[&[EXPERTS], set].concat());
        assert!(
            message.contains(
                "`ignored_params` is an option of policy fsdp2 outside compile mode full"
            ) && message.contains("set ignored_params = []"),
            "{message}"
        );
    }
}

/// Nothing would reduce the gradients of copies.
#[test]
fn trained_parameters_have_no_copies_on_other_ranks() {
    for (set, ranks, name) in [
        (&["mesh.ep=2", EXPERTS][..], 2, "layers.1.mlp.experts"),
        (&["mesh.dp_replicate=2", EXPERTS], 2, "layers.1.mlp.experts"),
        (&["fsdp.ignored_params=[\"norm\"]"], 4, "norm"),
        (
            &["fsdp.ignored_params=[\"layers.*.mlp\"]"],
            4,
            "layers.0.mlp",
        ),
    ] {
        let message = fault(set);
        assert!(
            message.contains(&format!("`ignored_params` leaves `{name}"))
                && message.contains(&format!("{ranks} data-parallel ranks train copies")),
            "{set:?} {message}"
        );
    }
    let help = |set: &[&str]| fault(set);
    assert!(help(&["mesh.ep=2", EXPERTS]).contains("set mesh.ep to the size of dp_shard"));
    assert!(help(&["fsdp.ignored_params=[\"norm\"]"]).contains("ignore frozen modules only"));
    // Copies of frozen parameters stay alike.
    let frozen = [
        "fsdp.frozen=[\"norm\"]",
        "fsdp.ignored_params=[\"norm\", \"layers.*.mlp.experts\"]",
    ];
    experts(&frozen).unwrap();
    // A single rank has no other.
    experts(&[
        "mesh.ep=1",
        "mesh.dp_shard=1",
        "fsdp.ignored_params=[\"norm\"]",
    ])
    .unwrap();
}

#[test]
fn experts_are_divided() {
    let message = fault(&["mesh.ep=1", EXPERTS]);
    assert!(
        message.contains("with mesh.ep = 1 none are divided") && message.contains("set mesh.ep"),
        "{message}"
    );
}

/// `MixedPrecisionPolicy` applies to managed parameters only.
#[test]
fn ignored_parameters_are_kept_as_the_model_reads_them() {
    let message = fault(&[EXPERTS, "precision.main_params=f32"]);
    assert!(
        message.contains("in f32, but the model computes in bf16")
            && message.contains("fully_shard casts only the parameters that it manages")
            && message.contains("set precision.main_params = \"none\""),
        "{message}"
    );
    experts(&[
        EXPERTS,
        "precision.main_params=f32",
        "precision.param_dtype=f32",
    ])
    .unwrap();
    let frozen = [
        "fsdp.frozen=[\"norm\"]",
        "fsdp.ignored_params=[\"norm\"]",
        "precision.main_params=f32",
    ];
    let message = fault(&frozen);
    assert!(message.contains("set precision.frozen_params"), "{message}");
    experts(&[&frozen[..], &["precision.frozen_params=bf16"]].concat()).unwrap();
}

#[test]
fn the_cpu_optimizer_has_no_parameters_on_the_device() {
    let message = fault(&[
        "mesh.ep=1",
        "fsdp.frozen=[\"norm\"]",
        "fsdp.ignored_params=[\"norm\"]",
        "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]",
    ]);
    assert!(
        message.contains("`ignored_params` leaves parameters on the device"),
        "{message}"
    );
}
