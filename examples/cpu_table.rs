//! Compares predicted and measured steps of small scenarios on the CPU of this machine:
//!
//! ```text
//! cargo build --release
//! target/release/shardlab calibrate --device cpu --seconds 80 --out scenarios/hardware/cpu.toml
//! cargo run --release --example cpu_table
//! ```
//!
//! It writes the measured times to `tests/data/cpu_small.csv` (for `shardlab validate`) and prints
//! the comparison. Other work on the machine disturbs the measurement, so the run with the least of
//! it counts.

use shardlab_exec::train::{NoObserver, RunOptions, train};
use shardlab_plan::{Program, scenario};
use shardlab_sim::{Options, hardware, simulate};
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Number of steps per run; the first few are warm-up.
const STEPS: u64 = 25;
const WARM: usize = 3;
/// Maximum number of runs per scenario.
const RUNS: usize = 8;
/// Share of the machine that others may use.
const QUIET: f64 = 0.03;

/// A model large enough for GEMMs to dominate.
const MEDIUM: &str = "model.hidden=256;model.heads=8;model.kv_heads=4;model.ffn=704;model.vocab=1000;model.max_seq_len=128;train.seq_len=128";

/// Name, scenario, overrides (`+` stands for [`MEDIUM`]).
const SETTINGS: [(&str, &str, &str); 18] = [
    ("llama 1 rank", "llama-tiny", "mesh.dp_shard=1"),
    ("llama 2 ranks", "llama-tiny", ""),
    (
        "llama 4 ranks",
        "llama-tiny",
        "mesh.dp_shard=4;train.micro_batch=2",
    ),
    ("llama fsdp2", "llama-tiny", "fsdp.policy=fsdp2"),
    ("llama megatron", "llama-tiny", "fsdp.policy=megatron"),
    ("llama bf16", "llama-tiny", "precision.compute=bf16"),
    (
        "llama accumulation",
        "llama-tiny",
        "train.grad_accum=2;mesh.dp_shard=1",
    ),
    ("gpt2 1 rank", "gpt2-tiny", "mesh.dp_shard=1"),
    ("gpt2 fsdp2", "gpt2-tiny", "fsdp.policy=fsdp2"),
    ("medium 1 rank", "llama-tiny", "mesh.dp_shard=1;+"),
    ("medium 2 ranks", "llama-tiny", "+"),
    (
        "medium 4 ranks",
        "llama-tiny",
        "mesh.dp_shard=4;train.micro_batch=2;+",
    ),
    ("medium fsdp2", "llama-tiny", "fsdp.policy=fsdp2;+"),
    ("medium megatron", "llama-tiny", "fsdp.policy=megatron;+"),
    ("medium ddp", "llama-tiny", "fsdp.strategy=no_shard;+"),
    (
        "medium recompute",
        "llama-tiny",
        "mesh.dp_shard=1;train.recompute=full;+",
    ),
    (
        "medium bf16",
        "llama-tiny",
        "mesh.dp_shard=1;precision.compute=bf16;+",
    ),
    (
        "medium regions",
        "llama-tiny",
        "mesh.dp_shard=1;compile.mode=regions;+",
    ),
];

/// Returns processor time in ticks: of all processes, of this process, and the total ticks of all
/// processors so far.
fn ticks() -> (f64, f64, f64) {
    let numbers = |text: &str, skip: usize| -> Vec<f64> {
        let words = text.split_whitespace().skip(skip);
        words.map_while(|w| w.parse().ok()).collect()
    };
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let all = numbers(stat.lines().next().unwrap_or_default(), 1);
    let own = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let own = numbers(own.rsplit(')').next().unwrap_or_default(), 1);
    let sum: f64 = all.iter().sum();
    let idle: f64 = all.iter().skip(3).take(2).sum();
    (sum - idle, own.iter().skip(10).take(2).sum(), sum)
}

/// Returns the median step time of the quietest run, and the share of the machine that others used
/// meanwhile.
fn measure(scenario: &shardlab_plan::Scenario, program: &Arc<Program>) -> (f64, f64) {
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..RUNS {
        let before = ticks();
        let options = RunOptions {
            steps: Some(STEPS),
            ..RunOptions::default()
        };
        let outcome = train(scenario, program, options, &mut NoObserver).expect("a run");
        let after = ticks();
        let others = (after.0 - before.0) - (after.1 - before.1);
        let share = (others / (after.2 - before.2).max(1.0)).max(0.0);
        let samples = &outcome.run.step_samples;
        let mut ms: Vec<f64> = samples.iter().skip(WARM).map(|t| t.ms()).collect();
        ms.sort_by(f64::total_cmp);
        if share < best.1 {
            best = (ms[ms.len() / 2], share);
        }
        if share < QUIET {
            break;
        }
    }
    best
}

fn main() {
    let root = Path::new(".");
    // Read at run time, not when this was built.
    let path = root.join("scenarios/hardware/cpu.toml");
    let profile = hardware::load(path.to_str().expect("a path in UTF-8")).expect("a profile");
    let mut csv = "name,source,scenario,overrides,step_ms\n".to_owned();
    println!(
        "| setting | predicted ms | measured ms | error | others' share |\n|---|---|---|---|---|"
    );
    let mut errors = Vec::new();
    let begin = Instant::now();
    for (name, of, overrides) in SETTINGS {
        let overrides = overrides.replace('+', MEDIUM);
        let set: Vec<String> = overrides
            .split(';')
            .filter(|s| !s.is_empty())
            .map(str::to_owned)
            .collect();
        let scenario = scenario::load(Path::new(of), &set).expect("a scenario");
        let program = Arc::new(shardlab_plan::plan(&scenario).expect("a program"));
        let run = simulate(&program, &profile, &Options::default()).expect("a prediction");
        let predicted = run.step_samples.last().expect("a step").ms();
        let (measured, others) = measure(&scenario, &program);
        let error = 100.0 * (predicted / measured - 1.0);
        errors.push(error.abs());
        println!(
            "| {name} | {predicted:.2} | {measured:.2} | {error:+.1} % | {:.0} % |",
            100.0 * others
        );
        let _ = writeln!(csv, "{name},shardlab exec,{of},{overrides},{measured:.3}");
    }
    errors.sort_by(f64::total_cmp);
    println!(
        "\nmedian error {:.1} %, {:.0?}",
        errors[errors.len() / 2],
        begin.elapsed()
    );
    std::fs::write(root.join("tests/data/cpu_small.csv"), csv).expect("a writable table");
}
