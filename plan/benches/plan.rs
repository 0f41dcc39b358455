//! From a scenario file to the program, and its proof: `cargo bench -p shardlab-plan --bench plan`.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use shardlab_plan::{check, lower, scenario};
use std::hint::black_box;
use std::path::PathBuf;

fn planner(c: &mut Criterion) {
    let mut group = c.benchmark_group("planner");
    group.sample_size(20);
    for name in ["llama3-8b-4xh200", "llama3-70b-64xh100"] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../scenarios")
            .join(format!("{name}.toml"));
        let scenario = scenario::load(&path, &[]).expect("shipped");
        let program = lower::plan(&scenario).expect("shipped");
        group.throughput(Throughput::Elements(program.instrs.len() as u64));
        group.bench_function(format!("load/{name}"), |b| {
            b.iter(|| scenario::load(black_box(&path), &[]));
        });
        group.bench_function(format!("plan/{name}"), |b| {
            b.iter(|| lower::plan(black_box(&scenario)));
        });
        group.bench_function(format!("check/{name}"), |b| {
            b.iter(|| check::check(black_box(&program)));
        });
    }
    group.finish();
}

criterion_group!(benches, planner);
criterion_main!(benches);
