//! Tensor parallelism along a third axis of the mesh: with real collectives between rank threads,
//! losses and weights are those of one rank with whole layers.

mod common;

use common::{load, poisoned, run};
use shardlab_exec::train::{CheckpointOptions, Outcome, Resume, RunOptions};

const STEPS: u64 = 6;

fn options() -> RunOptions {
    RunOptions {
        steps: Some(STEPS),
        exec: poisoned(),
        ..RunOptions::default()
    }
}

/// Trains the shipped scenario, which has four layers, on a mesh.
fn train(tp: u32, dp_shard: u32, set: &[&str]) -> Outcome {
    let mesh = [format!("mesh.tp={tp}"), format!("mesh.dp_shard={dp_shard}")];
    let mesh = mesh.iter().map(String::as_str);
    let set: Vec<&str> = mesh.chain(set.iter().copied()).collect();
    run(&load("small-tensor-parallel", &set), options())
}

/// Asserts that results are close: float32 sums in another order differ in their last bits only.
fn assert_close(a: &Outcome, b: &Outcome, what: &str) {
    let close = |x: &f64, y: &f64| (x - y).abs() <= 2e-6 * y.abs();
    for (kind, x, y) in [
        ("loss", &a.run.losses, &b.run.losses),
        ("gradient norm", &a.run.grad_norms, &b.run.grad_norms),
        ("weight norm", &a.weight_norms, &b.weight_norms),
    ] {
        assert!(!x.is_empty() && x.len() == y.len(), "{what}: {kind}");
        for (x, y) in x.iter().zip(y) {
            assert!(close(x, y), "{what}: {kind} {x} instead of {y}");
        }
    }
}

#[test]
fn two_ranks_reach_the_losses_of_one() {
    let one = train(1, 1, &[]);
    assert!(one.run.losses[0] > one.run.losses[STEPS as usize - 1]);
    for set in [
        &[][..],
        &["compile.mode=blocks"],
        &["compile.mode=regions"],
        &["compile.mode=full"],
        &["train.recompute=full"],
        &["train.recompute=full", "compile.mode=regions"],
        &["compile.cuda_graph=full_iteration"],
        &["compile.cuda_graph=[\"block\"]"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=megatron"],
    ] {
        assert_close(&train(2, 1, set), &one, &format!("{set:?}"));
    }
}

/// Samples are divided among data-parallel ranks only, and losses are averaged over these.
#[test]
fn three_axes_reach_the_losses_of_the_data_parallel_ones() {
    let wanted = train(1, 4, &[]);
    for policy in ["native", "fsdp2", "megatron"] {
        let policy = format!("fsdp.policy={policy}");
        for (dp_shard, dp_outer) in [(4, 1), (2, 2)] {
            let outer = format!("mesh.dp_outer={dp_outer}");
            let o = train(2, dp_shard, &[&policy, &outer]);
            assert_close(&o, &wanted, &format!("{policy} {dp_shard} x {dp_outer}"));
        }
    }
    // With clipping, every gradient is scaled by the norm over all axes.
    let clip = ["train.clip_norm=0.01"];
    assert_close(&train(2, 2, &clip), &train(1, 2, &clip), "clipping");
}

/// Weights are initialized and saved by their position in the whole parameter, so a run can
/// continue with another number of ranks on any axis.
#[test]
fn a_checkpoint_is_that_of_whole_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let until = |steps, tp: u32, dp: u32| {
        let set = [format!("mesh.tp={tp}"), format!("mesh.dp_shard={dp}")];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let options = RunOptions {
            steps: Some(steps),
            checkpoints: Some(CheckpointOptions {
                dir: dir.path().to_path_buf(),
                every: 0,
                keep: 2,
                resume: Resume::Auto,
            }),
            ..options()
        };
        run(&load("small-tensor-parallel", &set), options)
    };
    let whole = train(1, 2, &[]);
    until(2, 2, 2);
    let o = until(4, 1, 2);
    assert_eq!(o.resumed_from, 2);
    let o = until(STEPS, 2, 2);
    assert_eq!(o.resumed_from, 4);
    for (x, y) in o.run.losses.iter().zip(&whole.run.losses) {
        assert!((x - y).abs() <= 2e-6 * y.abs(), "{x} {y}");
    }
}
