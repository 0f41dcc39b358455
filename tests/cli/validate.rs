//! `shardlab validate` on the measured tables in tests/data.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/h200x4.csv");
const HELD_OUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/h200x4_heldout.csv");

/// Steps of `exec` on 1, 2 and 4 H200. The profile was not calibrated on any of them.
const EXEC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/exec_h200.csv");

/// Steps of `exec` on two H200, with one option after another.
const EXEC_OPTIONS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/exec_h200_options.csv"
);

/// Steps of `exec` on one and two H100.
const EXEC_H100: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/exec_h100.csv");

/// Steps of the engine with 8-bit matmuls, and with bf16.
const EXEC_FLOAT8: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/exec_float8_h100.csv"
);

/// Memory of FSDP2 and Megatron-FSDP on one GPU, as one rank of up to 1,024.
const ENGINE_MEMORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/engine_memory.csv");

/// Published steps of torchtitan on H100 with 96 GB.
const PUBLISHED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/published_h100.csv");

/// Published steps of torchtitan on A100.
const PUBLISHED_A100: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/published_a100.csv");

/// Published steps of an MoE model with expert parallelism.
const PUBLISHED_EXPERTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/published_experts.csv"
);

/// Published steps of llm-foundry on H100 and A100, without those that profiles were fitted to.
const LLM_FOUNDRY: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/published_llm_foundry.csv"
);

/// Published steps and peaks of other projects, to which nothing was fitted.
const PUBLISHED_HELD_OUT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/published_heldout.csv"
);

/// Steps of transformers under accelerate's FSDP2 on two H100.
const TRANSFORMERS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_h100.csv"
);

/// Steps of transformers on two other H200.
const TRANSFORMERS_H200_LATER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_h200_later.csv"
);

/// Steps of transformers on one H200, for models of 16 types.
const TRANSFORMERS_H200_ONE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_h200_one.csv"
);

/// Steps of transformers on one H200, for mixtures of experts of nine types.
const TRANSFORMERS_EXPERTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_experts_h200.csv"
);

/// Steps of transformers on one H200, for models of types without earlier measurements.
const TRANSFORMERS_TYPES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_types_h200.csv"
);

/// Steps of FSDP2 on one H200 with and without a compiled loss.
const COMPILED_LOSS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/compiled_loss_h200.csv"
);

/// Steps of transformers on two H200, for models of 20 types.
const TRANSFORMERS_H200: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_h200.csv"
);

/// Memory of LoRA on one H200, also with modules that are trained in full.
const TRANSFORMERS_ADAPTERS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_adapters_h200.csv"
);

/// Steps on two other H200, with the profile that `calibrate --step-ms` created from the first row.
const TRANSFORMERS_HOST: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/data/transformers_host.csv"
);

/// Steps of dense models and of experts on two H200, with the profile that `calibrate --step-ms`
/// created from the first row. The last two rows repeat earlier ones.
const PEERS_HOST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/peers_host.csv");

/// Steps of Megatron-FSDP's experimental engine on four H200 and two H100.
const MEGATRON_V2: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/megatron_v2.csv");

/// Three small models on four H200, eager and compiled, under FSDP2 and Megatron-FSDP.
const TOYS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/toys_h200x4.csv");

/// Steps of the CPU device.
const CPU: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/cpu_small.csv");

/// The error bands of predictions come from a table in the binary, which the command in this test
/// creates. After a change of predictions or measurements, run it again and write
/// `src/predict/residuals.csv`.
#[test]
fn error_bands_rest_on_todays_predictions() {
    let tables = [
        TABLE,
        HELD_OUT,
        ENGINE_MEMORY,
        EXEC,
        EXEC_OPTIONS,
        EXEC_H100,
        EXEC_FLOAT8,
        CPU,
        PUBLISHED,
        PUBLISHED_A100,
        LLM_FOUNDRY,
        PUBLISHED_HELD_OUT,
        TRANSFORMERS,
        TRANSFORMERS_H200,
        TRANSFORMERS_H200_LATER,
        TRANSFORMERS_H200_ONE,
        TRANSFORMERS_EXPERTS,
        TRANSFORMERS_TYPES,
    ];
    let mut args = vec!["validate", "--residuals"];
    args.extend(tables);
    let now = stdout(&args);
    let embedded = include_str!("../../src/predict/residuals.csv");
    assert_eq!(now.lines().count(), embedded.lines().count());
    let fields = |line: &str| -> Vec<String> { line.split(',').map(str::to_owned).collect() };
    for (now, embedded) in now.lines().zip(embedded.lines()) {
        for (a, b) in fields(now).iter().zip(&fields(embedded)) {
            // Errors are given to 0.01 %; rounding may differ by half a digit between machines.
            let close = matches!((a.parse::<f64>(), b.parse::<f64>()), (Ok(a), Ok(b)) if (a - b).abs() < 0.02);
            assert!(a == b || close, "{now} instead of {embedded}");
        }
    }
}

fn error(totals: &Value, metric: &str, field: &str) -> f64 {
    let of = totals["errors"].as_array().unwrap().iter();
    let found = of.clone().find(|e| e["metric"] == metric);
    found.unwrap()[field].as_f64().unwrap()
}

/// One measured step determines how slow a host is. With the shipped profile, these steps are
/// predicted 35 to 51 % too fast.
#[test]
fn a_host_known_from_one_step_predicts_other_jobs() {
    let mut lines = json(&["validate", TRANSFORMERS_HOST, "--json"]);
    let totals = lines.pop().unwrap();
    assert_eq!(lines.len(), 8);
    assert!(
        error(&totals, "step_ms", "mean_abs_percent") < 10.0,
        "{totals}"
    );
    let worst = |row: &Value| row["step_ms"]["error_percent"].as_f64().unwrap().abs();
    assert!(lines.iter().map(worst).all(|e| e < 20.0), "{lines:?}");

    let mut lines = json(&["validate", PEERS_HOST, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 12);
    let first = |row: &&Value| !row["name"].as_str().unwrap().ends_with("again");
    let errors: Vec<f64> = lines.iter().filter(first).map(worst).collect();
    assert!(errors.iter().all(|e| *e < 17.0), "{errors:?}");
}

/// Steps of PyTorch FSDP2 and Megatron-FSDP are within 6 % each, 2.2 % on average. Those of the
/// smallest model, which is host-bound (28.5 to 32.9 ms in three runs of one setting), are within
/// 18 %. If two steps of one machine and model differ by more than 2 %, their order is right.
/// Exceptions are the smallest model, and Megatron-FSDP without sharded parameters, whose steps are
/// longer than those with sharded parameters.
#[test]
fn predictions_agree_with_what_was_measured() {
    for (table, misplaced) in [(TABLE, 9), (HELD_OUT, 0)] {
        let mut lines = json(&["validate", table, "--json"]);
        let totals = lines.pop().unwrap();
        assert!(lines.len() >= 20);
        for row in &lines {
            if let Some(e) = row["peak_allocated_mib"]["error_percent"].as_f64() {
                assert!(e.abs() < 0.1, "{row}");
            }
        }
        let mean = |metric| error(&totals, metric, "mean_abs_percent");
        assert!(mean("peak_reserved_mib") < 1.2, "{totals}");
        let (tiny, others): (Vec<_>, Vec<_>) = lines
            .iter()
            .map(|row| {
                (
                    row["scenario"] == "peers-tiny",
                    row["step_ms"]["error_percent"].as_f64().unwrap().abs(),
                )
            })
            .partition(|&(tiny, _)| tiny);
        assert!(tiny.iter().all(|&(_, e)| e < 18.0), "{tiny:?}");
        assert!(others.iter().all(|&(_, e)| e < 6.0), "{others:?}");
        let all: f64 = others.iter().map(|&(_, e)| e).sum();
        assert!(all / (others.len() as f64) < 2.2, "{others:?}");
        // Rows of the first table end with the name of their machine; the second table is from one
        // machine.
        let machine = |name: &str| {
            name.rsplit(' ')
                .next()
                .filter(|_| table == TABLE)
                .map(str::to_owned)
        };
        let (pairs, wrong) = out_of_order(&lines, |a, b| machine(a) == machine(b));
        assert!(pairs > 60, "{pairs}");
        let known = |name: &str| {
            ["tiny", "zero1", "zero2"]
                .iter()
                .any(|part| name.contains(part))
        };
        assert!(
            wrong.iter().all(|(a, b, _)| known(a) || known(b)),
            "{wrong:?}"
        );
        assert!(wrong.len() <= misplaced, "{wrong:?}");
    }
}

/// Memory of transformers' models agrees within 0.05 % (allocated) and 0.5 % (reserved). The
/// exception is the shortest sequence, whose peak is where PyTorch adds the gradients of a tied
/// embedding. Steps are within 20 %; most of them are host-bound, and the host varies by 10 %
/// between runs.
#[test]
fn jobs_of_transformers_are_predicted() {
    let mut lines = json(&["validate", TRANSFORMERS, "--json"]);
    let totals = lines.pop().unwrap();
    assert_eq!(lines.len(), 17);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        let tied = row["name"].as_str().unwrap().contains("seq 1024");
        let bound = if tied { 2.5 } else { 0.05 };
        assert!(error("peak_allocated_mib") < bound, "{row}");
        assert!(error("peak_reserved_mib") < 0.5, "{row}");
        assert!(error("step_ms") < 20.0, "{row}");
    }
    assert!(
        error(&totals, "step_ms", "mean_abs_percent") < 8.0,
        "{totals}"
    );
}

/// Adapters, and modules that are trained in full next to them with the copies that PEFT keeps:
/// nothing was fitted to them.
#[test]
fn memory_of_adapters_of_peft_is_predicted() {
    let mut lines = json(&["validate", TRANSFORMERS_ADAPTERS, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 9);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        assert!(error("peak_allocated_mib") < 0.02, "{row}");
        let dora = row["name"] == "1b dora bf16 weights seq 2048";
        let reserved = if dora { 1.5 } else { 0.25 };
        assert!(error("peak_reserved_mib") < reserved, "{row}");
    }
}

/// What autograd saves in host memory, under FSDP2 on two H200. Hosts of these machines are slower
/// than the profile's, which limits the steps of the smallest model and of recomputed blocks.
#[test]
fn activations_in_host_memory_are_predicted() {
    let table = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/peers_offload_h200x2.csv"
    );
    let mut lines = json(&["validate", table, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 8);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        assert!(error("peak_allocated_mib") < 0.06, "{row}");
        assert!(error("peak_reserved_mib") < 1.0, "{row}");
        if row["name"].as_str().unwrap().ends_with("offload") {
            assert!(error("step_ms") < 12.5, "{row}");
        }
    }
}

/// Models of 20 types that nothing was fitted to: allocated memory is within 0.5 %, reserved memory
/// within 3 %. Exceptions are Falcon 7B, whose attention has no fused kernel, and reserved memory
/// of a step without moments and of one with logits over a vocabulary of 256,000. Steps are within
/// 5 % if they are device-bound: hosts of these machines are two to three times slower than the
/// profile's.
#[test]
fn jobs_of_many_types_of_transformers_are_predicted() {
    let mut lines = json(&["validate", TRANSFORMERS_H200, "--json"]);
    let totals = lines.pop().unwrap();
    assert_eq!(lines.len(), 26);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        let is = |names: &[&str]| names.iter().any(|n| row["name"] == *n);
        let falcon = is(&["falcon 8 layers"]);
        assert!(
            error("peak_allocated_mib") < if falcon { 4.0 } else { 0.5 },
            "{row}"
        );
        let segments = is(&["qwen2.5-1.5b sgd", "gemma2 6 layers eager attention"]);
        let bound = if segments || falcon { 8.0 } else { 3.0 };
        assert!(error("peak_reserved_mib") < bound, "{row}");
        let device = is(&[
            "phi3.5 8 layers",
            "olmo2 6 layers",
            "granite 6 layers",
            "cohere 4 layers",
            "glm4 6 layers",
            "mistral window 6 layers",
            "llama 8b 8 layers raf false accum 2",
            "smollm2 1.7b ckpt clip",
            "smollm3 12 layers bf16 weights",
            "phi3.5 8 layers ckpt",
            "falcon 8 layers",
        ]);
        assert!(!device || error("step_ms") < 5.0, "{row}");
    }
    let mean = error(&totals, "peak_allocated_mib", "mean_abs_percent");
    assert!(mean < 0.25, "{totals}");
}

/// Fifteen jobs of three other machines. Steps that the GPU limits are within 6 %, allocated memory
/// within 0.3 %, and reserved memory within 4 %, or 9 % with checkpoints.
#[test]
fn later_jobs_of_transformers_are_predicted() {
    let mut lines = json(&["validate", TRANSFORMERS_H200_LATER, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 15);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        assert!(error("peak_allocated_mib") < 0.3, "{row}");
        let checkpoints = row["name"] == "qwen2.5-7b 6 layers mb2 ckpt";
        let bound = if checkpoints { 9.0 } else { 4.0 };
        assert!(error("peak_reserved_mib") < bound, "{row}");
        let host = row["name"] == "llama 3b lora bf16";
        assert!(host || error("step_ms") < 6.0, "{row}");
    }
}

/// Models of 16 types on one GPU, to which nothing was fitted but the time of logits of an odd
/// vocabulary. StableLM 2 12B calls a norm per head, which is planned as one kernel.
#[test]
fn jobs_of_transformers_on_one_gpu_are_predicted() {
    let mut lines = json(&["validate", TRANSFORMERS_H200_ONE, "--json"]);
    let totals = lines.pop().unwrap();
    assert_eq!(lines.len(), 16);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        assert!(error("peak_allocated_mib") < 0.2, "{row}");
        assert!(error("peak_reserved_mib") < 3.0, "{row}");
        let heads = row["name"] == "stablelm2 12b 5 layers";
        assert!(heads || error("step_ms") < 5.2, "{row}");
    }
    assert!(
        error(&totals, "step_ms", "mean_abs_percent") < 3.5,
        "{totals}"
    );
}

/// Mixtures of experts on one GPU. GPT-OSS lacks some kernels; the others are as much too fast as
/// dense models on one GPU.
#[test]
fn jobs_of_transformers_with_experts_are_predicted() {
    let mut lines = json(&["validate", TRANSFORMERS_EXPERTS, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 14);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        assert!(error("peak_allocated_mib") < 0.2, "{row}");
        assert!(error("peak_reserved_mib") < 4.5, "{row}");
        let name = row["name"].as_str().unwrap();
        let limit = if name.starts_with("gpt-oss") {
            10.5
        } else {
            6.5
        };
        assert!(error("step_ms") < limit, "{row}");
    }
}

/// Types that transformers 5.17 computes with eager attention are among these. The activation of
/// Apertus is not planned as it is computed.
#[test]
fn other_types_of_transformers_take_as_long_as_measured() {
    let mut lines = json(&["validate", TRANSFORMERS_TYPES, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 17);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64();
        if row["name"].as_str().unwrap().starts_with("apertus") {
            continue;
        }
        assert!(error("step_ms").unwrap().abs() < 6.5, "{row}");
        assert!(error("peak_allocated_mib").unwrap().abs() < 0.3, "{row}");
        let reserved = error("peak_reserved_mib").unwrap_or_default();
        assert!(reserved.abs() < 3.5, "{row}");
    }
}

/// A compiled loss needs as much memory as predicted. The smallest model is limited by its host. In
/// the row with full recompute, Inductor decides what a checkpoint inside its graph keeps.
#[test]
fn compiled_losses_are_predicted() {
    let mut lines = json(&["validate", COMPILED_LOSS, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 11);
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        let name = row["name"].as_str().unwrap();
        if name.starts_with("tiny") {
            continue;
        }
        assert!(error("step_ms") < 4.0, "{row}");
        let recomputed = name.contains("full recompute");
        let limit = if recomputed { 2.5 } else { 0.03 };
        assert!(error("peak_allocated_mib") < limit, "{row}");
    }
}

/// Allocated memory agrees within 0.02 %, the step within 3 % (6 % if it is host-bound), and
/// reserved memory within 0.02 % with expandable segments. Without these, segments depend on the
/// sizes of single parameters' moments; here, each group has one buffer.
#[test]
fn predictions_agree_with_the_experimental_engine() {
    let mut lines = json(&["validate", MEGATRON_V2, "--json"]);
    let totals = lines.pop().unwrap();
    for row in &lines {
        let error = |metric: &str| row[metric]["error_percent"].as_f64().unwrap().abs();
        let has = |part: &str| row["name"].as_str().unwrap().contains(part);
        assert!(error("peak_allocated_mib") < 0.02, "{row}");
        assert!(error("peak_reserved_mib") < 0.02, "{row}");
        assert!(
            error("step_ms") < if has("seq 2048") { 6.0 } else { 3.0 },
            "{row}"
        );
    }
    assert_eq!(lines.len(), 4, "{totals}");
}

/// Compiling changes the steps of toy models by less than the measurements vary, except for the CNN
/// under FSDP2, whose slowest half is slower. Predictions do not change.
#[test]
fn compiling_the_toys_changes_nothing() {
    let mut lines = json(&["validate", TOYS, "--json"]);
    let totals = lines.pop().unwrap();
    for pair in lines.chunks(2) {
        let of = |row: &Value, what: &str| row["step_ms"][what].as_f64().unwrap();
        for row in pair {
            assert!(of(row, "error_percent").abs() < 11.0, "{row}");
        }
        let effect = |what| of(&pair[1], what) / of(&pair[0], what);
        assert_eq!(effect("predicted"), 1.0, "{pair:?}");
        let noisy = pair[0]["name"] == "cnn fsdp2";
        assert!((effect("measured") - 1.0).abs() < if noisy { 0.1 } else { 0.02 });
    }
    assert_eq!(lines.len(), 12, "{totals}");
}

/// Peaks of FSDP2 agree to the printed precision, those of Megatron-FSDP within 0.01 %. The
/// segments of the caching allocator agree within 2 % in all but four rows of FSDP2, three of which
/// differ by as much between repeated runs.
#[test]
fn memory_is_that_of_the_engines_on_every_mesh() {
    let mut lines = json(&["validate", ENGINE_MEMORY, "--json"]);
    let totals = lines.pop().unwrap();
    let of = |row: &Value, metric: &str, what: &str| row[metric][what].as_f64().unwrap();
    let (mut torch, mut close) = (0, 0);
    for row in &lines {
        let allocated = "peak_allocated_mib";
        assert!(of(row, allocated, "error_percent").abs() < 0.01, "{row}");
        if !row["name"].as_str().unwrap().ends_with("megatron") {
            let off = of(row, allocated, "predicted") - of(row, allocated, "measured");
            assert!(off.abs() < 0.015, "{row}");
            torch += 1;
            close += usize::from(of(row, "peak_reserved_mib", "error_percent").abs() < 2.0);
        }
    }
    assert_eq!((lines.len(), torch), (115, 96), "{totals}");
    assert!(close >= 91, "{close}");
    assert!(error(&totals, "peak_reserved_mib", "mean_abs_percent") < 1.2);
}

/// With the measured profiles, the median error of a step is at most 2 % and the maximum 5 % (7 %
/// on H200 with options that nothing was calibrated on).
#[test]
fn predictions_agree_with_steps_of_exec() {
    agree(EXEC, 60, 2.0, 5.0, (11, 0.04), 0);
    agree(EXEC_OPTIONS, 50, 2.0, 7.0, (14, 0.08), 3);
    agree(EXEC_H100, 60, 2.0, 5.0, (8, 0.045), 3);
}

/// MoE models with and without expert parallelism, with every dispatcher, and with balanced and
/// skewed choices: 85 runs on fourteen machines, one of which also timed their kernels. Memory of
/// five of them was not recorded.
#[test]
fn predictions_agree_with_steps_of_experts() {
    let table = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/exec_experts_h200.csv"
    );
    let mut lines = json(&["validate", table, "--json"]);
    lines.pop();
    assert_eq!(lines.len(), 85);
    let memory = lines.iter().filter_map(|row| {
        let of = &row["peak_allocated_mib"];
        Some(of["predicted"].as_f64()? - of["measured"].as_f64()?)
    });
    let memory: Vec<f64> = memory.collect();
    assert_eq!(memory.len(), 80);
    assert!(memory.iter().all(|error| error.abs() < 0.01), "{memory:?}");
    let step = |row: &Value| row["step_ms"]["error_percent"].as_f64().unwrap().abs();
    let mut errors: Vec<f64> = lines.iter().map(step).collect();
    errors.sort_by(f64::total_cmp);
    assert!(
        errors[42] < 2.1 && errors[79] < 5.8 && errors[84] < 7.0,
        "{errors:?}"
    );
}

/// Steps with 8-bit matmuls are predicted equally well, with an estimated rate on H100 and with
/// tables of another GPU on H200. Allocated memory, if it was recorded, agrees to 0.1 MiB.
#[test]
fn predictions_agree_with_steps_in_8_bits() {
    let h200 = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/exec_float8_h200.csv"
    );
    let rows = [EXEC_FLOAT8, h200].into_iter().flat_map(|table| {
        let mut lines = json(&["validate", table, "--json"]);
        lines.pop();
        lines
    });
    let lines: Vec<Value> = rows.collect();
    assert_eq!(lines.len(), 44);
    let mut memory = 0;
    let errors = lines.iter().map(|row| {
        let of = &row["peak_allocated_mib"];
        if let (Some(predicted), Some(measured)) =
            (of["predicted"].as_f64(), of["measured"].as_f64())
        {
            assert!((predicted - measured).abs() < 0.051, "{row}");
            memory += 1;
        }
        row["step_ms"]["error_percent"].as_f64().unwrap().abs()
    });
    let mut errors: Vec<f64> = errors.collect();
    errors.sort_by(f64::total_cmp);
    assert_eq!(memory, 42);
    assert!(errors[22] < 2.0 && errors[43] < 5.0, "{errors:?}");
}

/// Checks errors of step times against `median` and `worst`, in percent. The engine's memory must
/// agree to the printed precision, the device's within 1 %. Variants of a scenario that differ by
/// more than 2 % must be in the right order, except for `misplaced` pairs with close measured
/// times: rows come from several machines, whose times differ by 3 % among themselves. At most
/// `near` of these pairs are from one machine, or from one number of GPUs.
#[track_caller]
fn agree(
    table: &str,
    least: usize,
    median: f64,
    worst: f64,
    (misplaced, apart): (usize, f64),
    near: usize,
) {
    let mut lines = json(&["validate", table, "--json"]);
    lines.pop();
    assert!(lines.len() >= least);
    let cell = |row: &Value, metric: &str, what: &str| row[metric][what].as_f64().unwrap();
    let mut steps: Vec<f64> = Vec::new();
    for row in &lines {
        let step = cell(row, "step_ms", "error_percent").abs();
        assert!(step < worst, "{row}");
        steps.push(step);
        for engine in ["peak_allocated_mib", "peak_reserved_mib"] {
            if row[engine].is_null() {
                continue;
            }
            let off = cell(row, engine, "predicted") - cell(row, engine, "measured");
            // Policy megatron was measured when it kept the moments of a group in one buffer, whose
            // bytes and segments differ slightly from those of several buffers.
            let most = match row["name"].as_str().unwrap().contains("megatron") {
                true if engine == "peak_reserved_mib" => 20.5,
                true => 0.1,
                false => 0.01,
            };
            assert!(off.abs() < most, "{row}");
        }
        let device = &row["device_mib"];
        assert!(
            device.is_null() || cell(row, "device_mib", "error_percent").abs() < 1.0,
            "{row}"
        );
    }
    steps.sort_by(f64::total_cmp);
    assert!(steps[steps.len() / 2] < median, "{steps:?}");
    let (pairs, wrong) = out_of_order(&lines, |_, _| true);
    for (a, b, measured) in &wrong {
        assert!((measured - 1.0).abs() < apart, "{a}\n{b}");
    }
    assert!(
        wrong.len() <= misplaced,
        "{} of {pairs}: {wrong:#?}",
        wrong.len()
    );
    // Suffixes of names: `x2 m2`, `x4`, or `m1`.
    let place = |name: &str| {
        let (_, place) = name.rsplit_once(" x").or(name.rsplit_once(' ')).unwrap();
        place.to_owned()
    };
    let (pairs, wrong) = out_of_order(&lines, |a, b| place(a) == place(b));
    assert!(pairs > 180 && wrong.len() <= near, "of {pairs}: {wrong:#?}");
}

/// Counts pairs of rows of one scenario that differ by more than 2 % and are comparable. Returns
/// the number, and the pairs that are predicted in the wrong order, with the ratio of their
/// measured times.
fn out_of_order(
    lines: &[Value],
    comparable: impl Fn(&str, &str) -> bool,
) -> (usize, Vec<(String, String, f64)>) {
    let cell = |row: &Value, what: &str| row["step_ms"][what].as_f64().unwrap();
    let name = |row: &Value| row["name"].as_str().unwrap().to_owned();
    let (mut pairs, mut wrong) = (0, Vec::new());
    for (i, a) in lines.iter().enumerate() {
        for b in &lines[..i] {
            let ratio = |what| cell(a, what) / cell(b, what);
            let measured = ratio("measured");
            if a["scenario"] == b["scenario"]
                && (measured - 1.0).abs() > 0.02
                && comparable(&name(a), &name(b))
            {
                pairs += 1;
                if (measured > 1.0) != (ratio("predicted") > 1.0) {
                    wrong.push((name(a), name(b), measured));
                }
            }
        }
    }
    (pairs, wrong)
}

#[test]
fn means_and_worst_are_those_of_the_rows() {
    let mut lines = json(&["validate", TABLE, "--json"]);
    let totals = lines.pop().unwrap();
    for metric in [
        "step_ms",
        "peak_allocated_mib",
        "peak_reserved_mib",
        "device_mib",
    ] {
        let errors: Vec<f64> = lines
            .iter()
            .filter_map(|l| {
                let cell = l.get(metric)?;
                let (p, m) = (cell["predicted"].as_f64()?, cell["measured"].as_f64()?);
                Some(100.0 * (p - m) / m)
            })
            .collect();
        let n = errors.len() as f64;
        let mean = errors.iter().map(|e| e.abs()).sum::<f64>() / n;
        let signed = errors.iter().sum::<f64>() / n;
        let worst = errors.iter().fold(0.0_f64, |w, e| w.max(e.abs()));
        assert!((error(&totals, metric, "mean_abs_percent") - mean).abs() < 1e-6);
        assert!((error(&totals, metric, "mean_signed_percent") - signed).abs() < 1e-6);
        assert!((error(&totals, metric, "worst_percent").abs() - worst).abs() < 1e-6);
    }
    let nulls = totals["null_models"].as_array().unwrap();
    assert!(nulls.len() >= 2);
    assert!(nulls.iter().all(|n| n["mean_abs_percent"].is_number()));
}

#[test]
fn tables_are_readable_and_markdown_is_markdown() {
    let text = stdout(&["validate", TABLE]);
    assert_narrow(&text);
    assert!(
        text.contains("Null model for the step time, constant MFU"),
        "{text}"
    );
    let markdown = stdout(&["validate", HELD_OUT, "--markdown", "--rows", "megatron"]);
    let rows: Vec<&str> = markdown.lines().filter(|l| l.starts_with("| ")).collect();
    let cells = rows[0].matches('|').count();
    let first: Vec<&&str> = rows.iter().take_while(|r| !r.contains("metric")).collect();
    assert!(first.len() > 5);
    assert!(
        first.iter().all(|r| r.matches('|').count() == cells),
        "{markdown}"
    );
    assert!(!markdown.contains("fsdp2"), "--rows lets others through");
}

/// Published runs that nothing was fitted to are predicted better than by methods without a
/// simulator.
#[test]
fn published_steps_are_predicted_better_than_by_null_models() {
    let tables = [LLM_FOUNDRY, PUBLISHED, PUBLISHED_A100];
    let lines = json(&[&["validate", "--json"][..], &tables].concat());
    let totals = lines.last().unwrap();
    let step = error(totals, "step_ms", "mean_abs_percent");
    assert!(step < 8.0, "{step}");
    let nulls = totals["null_models"].as_array().unwrap();
    assert_eq!(nulls.len(), 4);
    for null in nulls {
        let name = null["name"].as_str().unwrap();
        // A neighbor in the same table differs from the row by one setting.
        if name != "nearest neighbor" {
            assert!(step < null["mean_abs_percent"].as_f64().unwrap(), "{null}");
        }
    }
    let sources = totals["by_source"].as_object().unwrap();
    assert_eq!(
        sources.keys().collect::<Vec<_>>(),
        ["llm-foundry", "torchtitan"]
    );
}

/// Runs of other projects, which were collected after the profiles were finished.
#[test]
fn steps_of_other_projects_are_predicted_better_than_by_null_models() {
    let mut lines = json(&["validate", PUBLISHED_HELD_OUT, "--json"]);
    let totals = lines.pop().unwrap();
    assert_eq!(lines.len(), 39);
    let step = error(&totals, "step_ms", "mean_abs_percent");
    assert!(step < 6.5, "{step}");
    assert!(error(&totals, "step_ms", "worst_percent").abs() < 15.5);
    assert!(error(&totals, "peak_allocated_mib", "mean_abs_percent") < 3.5);
    for null in totals["null_models"].as_array().unwrap() {
        assert!(
            null["mean_abs_percent"].as_f64().unwrap() > 2.0 * step,
            "{null}"
        );
    }
    let markdown = stdout(&["validate", "--markdown", PUBLISHED_HELD_OUT]);
    let page = std::fs::read_to_string("benchmarks/public.md").unwrap();
    for row in markdown.lines().skip(2).take_while(|l| l.starts_with('|')) {
        let step: Vec<&str> = row.split(" | ").take(4).collect();
        assert!(page.contains(&step.join(" | ")), "{row}");
    }
}

/// Runs whose exchange overlaps with computation and those with fused kernels are not predicted
/// well; the page on published runs says so.
#[test]
fn published_steps_of_experts_are_extrapolated() {
    let mut lines = json(&["validate", PUBLISHED_EXPERTS, "--json"]);
    let totals = lines.pop().unwrap();
    assert_eq!(lines.len(), 17);
    let mean = error(&totals, "step_ms", "mean_abs_percent");
    assert!((13.0..17.0).contains(&mean), "{mean}");
    let markdown = stdout(&["validate", "--markdown", PUBLISHED_EXPERTS]);
    let page = std::fs::read_to_string("benchmarks/public.md").unwrap();
    let rows: Vec<&str> = markdown.lines().filter(|l| l.contains(" x")).collect();
    assert!(
        rows.len() >= 17 && rows[..17].iter().all(|row| page.contains(row)),
        "{markdown}"
    );
    let text = stdout(&["validate", PUBLISHED_EXPERTS, "--rows", "all-to-all"]);
    assert!(text.contains("-15.02"), "{text}");
    // Without overlap and with the same kernels, the dispatcher is what differs.
    let without = |rows: &str| {
        let mut lines = json(&["validate", PUBLISHED_EXPERTS, "--rows", rows, "--json"]);
        error(&lines.pop().unwrap(), "step_ms", "worst_percent").abs()
    };
    assert!(without("without overlap") < 5.0 && without("x16 FP8") < 20.0);
    // Routing in round-robin order, and losses of bf16 logits.
    assert!(
        without("DeepEP") < 15.0
            && without("gpt-oss-20b x8") < 5.0
            && without("a3b x8 DeepEP") < 5.0
    );
}

/// Two published runs ran out of memory. The prediction is that these do not fit, and that the
/// others do.
#[test]
fn runs_out_of_memory_are_predicted() {
    let mut lines = json(&["validate", PUBLISHED_A100, PUBLISHED, "--json"]);
    let totals = lines.pop().unwrap();
    let count = &totals["out_of_memory"];
    assert_eq!(
        (&count["measured"], &count["predicted"]),
        (&2.into(), &2.into())
    );
    assert_eq!(
        (&count["ran"], &count["predicted_to_fit"]),
        (&20.into(), &20.into())
    );
    let failed = lines.iter().filter(|row| row["out_of_memory"] == true);
    for row in failed {
        assert!(row["fits"] == "no" && row["step_ms"].is_null(), "{row}");
    }
    let text = stdout(&["validate", PUBLISHED_A100, "--rows", "mb2"]);
    assert_narrow(&text);
    assert!(text.contains("out of memory   does not fit"), "{text}");
    assert!(text.contains("Ran out of memory: 2, of which 2"), "{text}");
    // If such a run is predicted to fit, this is an error beyond any limit.
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("table.csv");
    let path = table.to_str().unwrap();
    std::fs::write(
        &table,
        "name,scenario,step_ms,out_of_memory\nsmall,small-fsdp2,,true\n",
    )
    .unwrap();
    let output = shardlab(&["validate", path, "--max-error", "1000"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(
        words.contains("small: ran out of memory, and is predicted to fit"),
        "{words}"
    );
    let bad = "name,scenario,step_ms,out_of_memory\nsmall,small-fsdp2,3,true\n";
    std::fs::write(&table, bad).unwrap();
    let output = shardlab(&["validate", path]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(
        words.contains("table.csv:2: out_of_memory = `true`"),
        "{words}"
    );
}

/// A limit on errors turns the command into a check, whether or not its output is read.
#[test]
fn errors_beyond_a_limit_fail() {
    let only = |limit| {
        let args = [
            "validate",
            EXEC,
            "--rows",
            "tiny native x1",
            "--max-error",
            limit,
        ];
        shardlab(&args).output().unwrap()
    };
    // The error is 3 % in time and zero in the engine's memory.
    assert_eq!(only("5").status.code(), Some(0));
    let strict = only("1");
    assert_eq!(strict.status.code(), Some(1));
    let words = String::from_utf8(strict.stderr).unwrap();
    assert!(
        words.starts_with("tiny native x1: step_ms is off by +"),
        "{words}"
    );
    assert_eq!(words.lines().count(), 1, "{words}");
    assert_eq!(only("-1").status.code(), Some(2));
    assert_eq!(only("much").status.code(), Some(2));
}

/// For a hardware profile, compares its measured collectives with the simulator's predictions
/// without them, and with NCCL's estimates.
#[test]
fn a_profile_s_collectives_are_compared_with_predictions() {
    let name = "h100-80-exec";
    let mut rows = json(&["validate", name, "--json"]);
    let totals = rows.pop().unwrap();
    let find = |kind: &str, ranks: u32| {
        let of = |r: &&serde_json::Value| {
            (
                r["kind"] == kind,
                r["ranks"] == ranks,
                r["bytes"] == 1 << 30,
            ) == (true, true, true)
        };
        rows.iter().find(of).unwrap()
    };
    let two = find("all_gather", 2);
    // The value of the shipped profile.
    assert_eq!(
        (two["measured_us"].as_f64(), two["nccl_us"].as_f64()),
        (Some(2013.0), Some(1503.0))
    );
    // Four ranks reach 450 GB/s times 0.7464. Copying a byte of the local chunk takes 0.4 of the
    // time of receiving one. Four ranks copy a third as much as they receive; two ranks copy as
    // much as they receive. They receive half of 1 GiB. Ramping up adds 2.5 times the square root
    // of the time in microseconds.
    let formula = two["formula_us"].as_f64().unwrap();
    let wire = f64::from(1 << 29) / (450e3 * 0.7464) * 1.4 / (1.0 + 0.4 / 3.0);
    let longer = wire + 2.5 * wire.sqrt();
    assert!(
        formula > longer && formula < longer + 20.0,
        "{formula} {longer}"
    );
    // The other table of gathers has four ranks: 1.4 halves for 3.4 quarters.
    let four = find("all_gather", 4);
    assert!(four["nccl_us"].is_null());
    let scaled = four["measured_us"].as_f64().unwrap() * (1.4 / 2.0) / (3.4 / 4.0);
    let others = two["others_us"].as_f64().unwrap();
    assert!((others / scaled - 1.0).abs() < 0.01, "{others} {scaled}");
    // The errors of each predictor are recomputed.
    let errors = totals["errors"].as_array().unwrap();
    assert_eq!(errors.len(), 6);
    let nccl = errors
        .iter()
        .find(|e| e["predictor"] == "nccl" && e["large"] == true)
        .unwrap();
    let mut off: Vec<f64> = rows
        .iter()
        .filter(|r| r["bytes"].as_u64().unwrap() >= 1 << 20)
        .filter_map(|r| {
            Some(100.0 * (r["nccl_us"].as_f64()? / r["measured_us"].as_f64()? - 1.0).abs())
        })
        .collect();
    off.sort_by(f64::total_cmp);
    assert_eq!(nccl["rows"], off.len());
    assert_eq!(
        nccl["median_abs_percent"].as_f64(),
        Some(off[off.len() / 2])
    );
    assert!((nccl["worst_percent"].as_f64().unwrap().abs() - off[off.len() - 1]).abs() < 1e-9);

    let text = stdout(&[
        "validate",
        name,
        "--rows",
        "all_gather",
        "--rows",
        "2 ranks",
    ]);
    assert_narrow(&text);
    insta::assert_snapshot!(text);
    let markdown = stdout(&["validate", name, "--markdown", "--rows", "all_to_all"]);
    assert!(
        markdown.lines().all(|l| l.is_empty() || l.starts_with('|')),
        "{markdown}"
    );
    assert!(
        !markdown.contains("NCCL"),
        "no column without a number: {markdown}"
    );
}

/// These arguments are not a profile, or select rows that a profile does not have.
#[test]
fn a_profile_that_cannot_be_checked_says_why() {
    let fails = |args: &[&str], words: &str| {
        let output = shardlab(&[&["validate"], args].concat()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(words), "{args:?}: {error}");
    };
    fails(&["h100-80"], "h100-80: no [[collective]] table");
    fails(
        &["h100-80-exec", "--rows", "broadcast"],
        "no [[collective]] row matches all of --rows",
    );
    fails(
        &["h100-80-exec", "--max-error", "5"],
        "--max-error works on tables of runs",
    );
    fails(&["nowhere.toml"], "no hardware profile `nowhere.toml`");
    // An argument that is neither the name of a profile nor a TOML file is read as a table.
    fails(&["h100-80-exek"], "h100-80-exek");
}
