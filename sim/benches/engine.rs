//! Speed of the simulator over synthetic steps: program instructions a second, one core.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use shardlab_sim::synthetic::{Shape, fsdp};
use shardlab_sim::{Options, hardware, simulate_counted};
use std::hint::black_box;
use std::path::Path;

fn engine(c: &mut Criterion) {
    let profile = hardware::load("h200-nvlink").expect("shipped");
    let mut group = c.benchmark_group("engine");
    group.sample_size(20);
    let light = Options {
        record: false,
        ..Options::default()
    };
    let cases = [
        ("32_layers_8_ranks_light", Shape::large(), light.clone()),
        (
            "32_layers_8_ranks_recorded",
            Shape::large(),
            Options::default(),
        ),
        (
            "32_layers_long_run",
            Shape::large(),
            Options {
                steps: 50,
                ..light.clone()
            },
        ),
        (
            "126_layers_1024_ranks_symmetric",
            Shape {
                layers: 126,
                ranks: 1024,
                ..Shape::large()
            },
            light.clone(),
        ),
        (
            "32_layers_8_ranks_all",
            Shape::large(),
            Options {
                full_ranks: true,
                ..light
            },
        ),
    ];
    for (name, shape, options) in cases {
        let program = fsdp(&shape);
        let (_, instrs) = simulate_counted(&program, &profile, &options).expect("runs");
        group.throughput(Throughput::Elements(instrs));
        group.bench_function(name, |b| {
            b.iter(|| simulate_counted(black_box(&program), &profile, &options))
        });
    }
    group.finish();
}

/// Shipped scenarios, planned outside the measurement.
fn scenarios(c: &mut Criterion) {
    let mut group = c.benchmark_group("scenario");
    group.sample_size(20);
    for name in [
        "llama3-8b-4xh200",
        "llama3-8b-8xh100",
        "llama3-405b-1024xh100",
    ] {
        let scenario = shardlab_plan::scenario::load(Path::new(name), &[]).expect("shipped");
        let program = shardlab_plan::plan(&scenario).expect("plans");
        let profile = hardware::load(&scenario.mesh.hardware).expect("shipped");
        for (mode, record, steps) in [
            ("light", false, 0),
            ("ten_steps", false, 10),
            ("recorded", true, 0),
        ] {
            let options = Options {
                record,
                steps,
                ..Options::default()
            };
            let (_, instrs) = simulate_counted(&program, &profile, &options).expect("runs");
            group.throughput(Throughput::Elements(instrs));
            let id = format!("{name}_{mode}");
            group.bench_function(id, |b| {
                b.iter(|| simulate_counted(black_box(&program), &profile, &options))
            });
        }
    }
    group.finish();
}

criterion_group!(benches, engine, scenarios);
criterion_main!(benches);
