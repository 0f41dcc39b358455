//! Weight gradients that GEMMs accumulate into the sums of earlier micro-batches equal those that a
//! separate kernel adds.

mod common;

use common::{load, run};
use shardlab_exec::train::RunOptions;

fn losses(set: &[&str]) -> Vec<f64> {
    let base = [
        "compile.mode=blocks",
        "compile.gemm_epilogue_fusion=false",
        "train.grad_accum=3",
        "train.micro_batch=1",
    ];
    let options = RunOptions {
        steps: Some(6),
        ..RunOptions::default()
    };
    let outcome = run(&load("llama-tiny", &[&base, set].concat()), options);
    outcome.run.losses.clone()
}

#[test]
fn sums_are_the_same_within_a_gemm() {
    let sums: [&[&str]; 4] = [
        &["fsdp.gradient_sync=last"],
        &["fsdp.strategy=no_shard"],
        &["fsdp.strategy=optim"],
        &["train.joint_backward=true"],
    ];
    let types: [(&[&str], f64); 2] = [
        (&[], 1e-5),
        (
            &[
                "precision.compute=bf16",
                "precision.main_params=f32",
                "precision.main_grads=f32",
            ],
            2e-2,
        ),
    ];
    for set in sums {
        for (dtype, tolerance) in types {
            let within = losses(&[set, dtype].concat());
            let apart = losses(&[set, dtype, &["compile.gemm_accumulate=false"]].concat());
            assert!(within[5] < within[0], "{set:?}: {within:?}");
            for (a, b) in within.iter().zip(&apart) {
                assert!(
                    (a - b).abs() <= tolerance * b,
                    "{set:?} {dtype:?}: {within:?} {apart:?}"
                );
            }
        }
    }
}
