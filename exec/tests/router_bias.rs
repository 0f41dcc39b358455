//! Steps that update router biases: compared with a torch run, on every split of the batch, and
//! after resuming.

mod common;

use common::{DEEPSEEK_V3, load, poisoned};
use safetensors::SafeTensors;
use shardlab_exec::engine::ExecOptions;
use shardlab_exec::train::{CheckpointOptions, Outcome, Resume, RunOptions};
use shardlab_plan::Scenario;

/// The router of the golden model's only MoE layer.
const ROUTER: &str = "model.layers.1.mlp.gate";

/// Number of steps of a run that only tests a combination.
const FEW: u64 = 6;

/// Splits of the batch of four over ranks and micro-batches, with one rank and micro-batch first.
const WAYS: [&[&str]; 12] = [
    &[],
    &["train.micro_batch=2", "train.grad_accum=2"],
    &["mesh.dp_shard=2", "train.micro_batch=2"],
    &["mesh.dp_shard=2", "train.micro_batch=2", "mesh.ep=2"],
    &[
        "mesh.dp_shard=2",
        "train.micro_batch=1",
        "train.grad_accum=2",
        "mesh.ep=2",
        "train.recompute=full",
    ],
    &[
        "mesh.dp_shard=4",
        "train.micro_batch=1",
        "train.recompute=full",
    ],
    &[
        "mesh.dp_shard=2",
        "mesh.dp_outer=2",
        "train.micro_batch=1",
        "train.recompute=selective",
    ],
    &[
        "mesh.dp_shard=2",
        "mesh.dp_outer=2",
        "train.micro_batch=1",
        "fsdp.outer_strategy=optim",
    ],
    &[
        "mesh.dp_shard=2",
        "train.micro_batch=2",
        "fsdp.strategy=no_shard",
        "compile.mode=blocks",
    ],
    &[
        "mesh.dp_shard=4",
        "train.micro_batch=1",
        "mesh.ep=2",
        "moe.dispatcher=peer",
        "fsdp.strategy=optim",
    ],
    &[
        "mesh.dp_shard=2",
        "train.micro_batch=1",
        "train.grad_accum=2",
        "train.joint_backward=true",
    ],
    &[
        "mesh.dp_shard=2",
        "train.micro_batch=2",
        "compile.cuda_graph=full_iteration",
    ],
];

/// Returns the biases of a run as exported to files.
fn biases(scenario: &Scenario, mut options: RunOptions) -> (Outcome, Vec<f32>) {
    let saved = tempfile::tempdir().unwrap();
    options.export = Some(saved.path().to_owned());
    let outcome = common::run(scenario, options);
    let bytes = std::fs::read(saved.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let name = format!("{ROUTER}.e_score_correction_bias");
    let of_file = file.tensor(&name).unwrap();
    let numbers = of_file.data().chunks_exact(4);
    let biases = numbers.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (outcome, biases.collect())
}

fn scenario(set: &[&str]) -> Scenario {
    let speed = DEEPSEEK_V3.recorded("router_bias.json")["speed"].to_string();
    let speed = format!("model.router_bias_update_speed={speed}");
    DEEPSEEK_V3.scenario(&[&["model.router_bias=true", &speed], set].concat())
}

fn options(steps: u64) -> RunOptions {
    RunOptions {
        steps: Some(steps),
        init: Some(DEEPSEEK_V3.dir()),
        tokens: Some(DEEPSEEK_V3.tokens()),
        exec: ExecOptions {
            routing: true,
            ..poisoned()
        },
        ..RunOptions::default()
    }
}

/// Returns the numbers that torch recorded for the router in each step.
fn recorded(what: &str) -> Vec<Vec<f64>> {
    let run = DEEPSEEK_V3.recorded("router_bias.json");
    let steps = run["routers"][ROUTER][what].as_array().unwrap().iter();
    let numbers = |step: &serde_json::Value| {
        let of_step = step.as_array().unwrap().iter();
        of_step.map(|n| n.as_f64().unwrap()).collect()
    };
    steps.map(numbers).collect()
}

/// Compares losses, norms and the norm of the biases. Without updates, losses are off by up to
/// 4e-3.
#[test]
fn a_run_of_torch_that_balances_experts() {
    let run = DEEPSEEK_V3.recorded("router_bias.json");
    let speed = format!("model.router_bias_update_speed={}", run["speed"]);
    let set = ["model.router_bias=true", &speed];
    DEEPSEEK_V3.matches_run(&run, &set, None);
}

/// Choices and biases after each number of steps are those of torch, whose mean over the steps of
/// all experts rounds in another order.
#[test]
fn biases_follow_the_choices() {
    let (counts, wanted) = (recorded("counts"), recorded("biases"));
    let mut before = vec![0.0; 8];
    for steps in [1, 2, 3, FEW] {
        let (outcome, biases) = biases(&scenario(&[]), options(steps));
        let histogram = outcome.routing.expect("counted").layers;
        for (expert, counted) in histogram[&1].iter().enumerate() {
            let all = counts.iter().take(steps as usize).map(|c| c[expert]);
            assert_eq!(*counted as f64, all.sum::<f64>(), "{steps} steps, {expert}");
        }
        for (ours, theirs) in biases.iter().zip(&wanted[steps as usize - 1]) {
            let off = (f64::from(*ours) - theirs).abs();
            assert!(off < 1e-7, "{steps} steps: {biases:?}");
        }
        // Biases change, but their sum does not.
        assert!(biases.iter().zip(&before).any(|(new, old)| new != old));
        assert!(biases.iter().sum::<f32>().abs() < 1e-6);
        before = biases;
    }
}

#[test]
fn every_split_of_a_batch_moves_biases_alike() {
    let [whole, splits @ ..] = WAYS;
    let all = biases(&scenario(whole), options(FEW)).1;
    for set in splits {
        let (outcome, split) = biases(&scenario(set), options(FEW));
        assert_eq!(split, all, "{set:?}");
        assert!(outcome.run.grad_norms.iter().all(|n| *n < 10.0), "{set:?}");
    }
}

/// Engines of frameworks leave biases to the ranks, and add up choices after backward: the same
/// biases and losses.
#[test]
fn engines_of_frameworks_move_biases_alike() {
    const FSDP2: &[&str] = &["fsdp.policy=fsdp2"];
    const MEGATRON: &[&str] = &["fsdp.policy=megatron"];
    const V2: &[&str] = &["fsdp.policy=megatron_v2"];
    const PR4435: &[&str] = &["fsdp.policy=megatron_v2", "fsdp.variant=pr4435"];
    const FULL: &[&str] = &["compile.mode=full"];
    // All gradients in float32, as in the recorded run.
    let types = ["precision.main_grads=f32"];
    let run = DEEPSEEK_V3.recorded("router_bias.json");
    let speed = format!("model.router_bias_update_speed={}", run["speed"]);
    for engine in [FSDP2, MEGATRON, V2, PR4435, FULL] {
        let set = [&["model.router_bias=true", &speed], &types[..], engine].concat();
        DEEPSEEK_V3.matches_run(&run, &set, Some(FEW));
    }

    let all = biases(&scenario(&[]), options(FEW)).1;
    let two = &["mesh.dp_shard=2", "train.micro_batch=2"][..];
    let four = &["mesh.dp_shard=4", "train.micro_batch=1"][..];
    // Rows for every choice, however routers choose.
    let worst = "moe.capacity_factor=worst";
    let divided = &["mesh.dp_shard=2", "train.micro_batch=2", "mesh.ep=2", worst][..];
    let replicas = &[
        "mesh.dp_shard=2",
        "mesh.dp_outer=2",
        "train.micro_batch=1",
        "train.recompute=full",
    ][..];
    let accumulated = &["train.grad_accum=4", "train.micro_batch=1"][..];
    let both = &[
        "mesh.dp_shard=2",
        "mesh.ep=2",
        worst,
        "train.grad_accum=2",
        "train.micro_batch=1",
    ][..];
    for (engine, splits) in [
        (FSDP2, &[two, divided, replicas, accumulated][..]),
        (MEGATRON, &[two, four, divided, replicas, accumulated, both]),
        (V2, &[two, four, replicas, accumulated]),
        (PR4435, &[two, four, accumulated]),
        (FULL, &[two, divided, replicas, accumulated]),
    ] {
        for split in splits {
            let set = [split, &types[..], engine].concat();
            assert_eq!(biases(&scenario(&set), options(FEW)).1, all, "{set:?}");
        }
    }
}

/// Biases are part of checkpoints, which other meshes can load.
#[test]
fn resumed_runs_continue_with_their_biases() {
    let all = biases(&scenario(WAYS[0]), options(FEW)).1;
    let dir = tempfile::tempdir().unwrap();
    for (steps, set) in [(2, WAYS[2]), (4, WAYS[4]), (FEW, WAYS[0])] {
        let checkpoints = Some(CheckpointOptions {
            dir: dir.path().to_path_buf(),
            every: 0,
            keep: 3,
            resume: Resume::Auto,
        });
        let resumed = biases(
            &scenario(set),
            RunOptions {
                checkpoints,
                ..options(steps)
            },
        );
        assert_eq!(resumed.0.resumed_from, steps - 2);
        if steps == FEW {
            assert_eq!(resumed.1, all);
        }
    }
}

/// Gradient norms leave out the counts of choices, whether the program, the engine or a caller
/// requests the norms.
#[test]
fn counts_are_in_no_norm() {
    let split = ["mesh.dp_shard=2", "train.micro_batch=2"];
    let norms = |more: &[&str]| {
        let set = [&split[..], &["train.param_norms_every=1"], more].concat();
        let scenario = scenario(&set);
        let outcome = common::run(&scenario, options(2));
        let names = outcome.param_norms[0].1.iter();
        for norm in names.filter(|n| n.name.contains("correction_bias")) {
            assert_eq!(norm.gradient, None, "{more:?}");
        }
        outcome.run.grad_norms
    };
    let of_program = norms(&["train.clip_norm=1000"]);
    let of_engine = norms(&["train.clip_norm=0", "train.grad_norm=false"]);
    for (a, b) in of_program.iter().zip(&of_engine) {
        assert!((a - b).abs() < 1e-5 * a, "{of_program:?} {of_engine:?}");
    }
    // The norm over all parameters without the biases.
    let whole = [&split[..], &["fsdp.strategy=no_shard"]].concat();
    let whole = common::run(&scenario(&whole), options(1));
    let all = whole.grad_norms.expect("gradients that persist");
    let sum = all.iter().map(|n| n * n).sum::<f64>().sqrt();
    let norm = whole.run.grad_norms[0];
    assert!((sum - norm).abs() < 1e-4, "{sum} {norm}");
}

/// Biases keep small steps next to bfloat16 weights, with every optimizer. Evaluation does not
/// change them.
#[test]
fn biases_are_float32_whatever_the_rest_is() {
    for more in [
        &["train.optimizer=adamw"][..],
        &["train.optimizer=sgd"],
        &["train.optimizer=muon"],
        &["train.validate_every=1"],
        &["precision.main_grads=bf16", "train.grad_accum=2"],
        &["fsdp.offload=[\"params\", \"grads\", \"optimizer\"]"],
        &[
            "fsdp.optimizer_in_backward=true",
            "train.grad_norm=false",
            "train.clip_norm=0.0",
        ],
    ] {
        let set = [
            &[
                "model.router_bias=true",
                "model.router_bias_update_speed=0.0001",
            ],
            &["precision.compute=bf16", "mesh.ep=2"][..],
            more,
        ]
        .concat();
        let scenario = load("small-moe", &set);
        let options = RunOptions {
            steps: Some(3),
            exec: poisoned(),
            ..RunOptions::default()
        };
        let norms = common::run(&scenario, options).weight_norms;
        let program = common::plan(&scenario);
        let of_bias = program
            .params
            .iter()
            .zip(&norms)
            .filter(|(p, _)| p.router_bias);
        let moved: Vec<f64> = of_bias.map(|(_, norm)| *norm).collect();
        // Eight experts, after three steps of at most twice the speed.
        assert_eq!(moved.len(), 2, "{more:?}");
        assert!(
            moved.iter().all(|n| (1e-5..1.7e-3).contains(n)),
            "{more:?}: {moved:?}"
        );
    }
}
