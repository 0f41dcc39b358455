//! From a scenario file to the program, and its proof: `cargo bench -p shardlab-plan --bench plan`.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use shardlab_plan::memory::Memory;
use shardlab_plan::{Program, check, plan, scenario};
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
        let program = plan(&scenario).expect("shipped");
        group.throughput(Throughput::Elements(program.instrs.len() as u64));
        group.bench_function(format!("load/{name}"), |b| {
            b.iter(|| scenario::load(black_box(&path), &[]));
        });
        group.bench_function(format!("plan/{name}"), |b| {
            b.iter(|| plan(black_box(&scenario)));
        });
        group.bench_function(format!("check/{name}"), |b| {
            b.iter(|| check::check(black_box(&program)));
        });
    }
    group.finish();
}

/// What has to stay linear in the number of layers.
fn depth(c: &mut Criterion) {
    let mut group = c.benchmark_group("depth");
    group.sample_size(10);
    for layers in [256u32, 512, 1024] {
        let set = [format!("model.layers={layers}")];
        let path = std::path::Path::new("llama3-8b-4xh200");
        let scenario = scenario::load(path, &set).expect("shipped");
        let program = plan(&scenario).expect("shipped");
        group.throughput(Throughput::Elements(u64::from(layers)));
        group.bench_function(format!("plan/{layers}"), |b| {
            b.iter(|| plan(black_box(&scenario)));
        });
        // A program keeps where its planned buffers lie: forgotten, so that each time plans the
        // pool too.
        let unplaced = || Program {
            placement: Default::default(),
            ..program.clone()
        };
        group.bench_function(format!("placement/{layers}"), |b| {
            b.iter_batched(
                unplaced,
                |program| Memory::new(&program, None),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("check/{layers}"), |b| {
            b.iter_batched(unplaced, |p| check::check(&p), BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, planner, depth);
criterion_main!(benches);
