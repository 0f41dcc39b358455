//! Measures the cost of saving, opening and comparing runs of 100,000 spans.

use criterion::{Criterion, criterion_group, criterion_main};
use shardlab_plan::units::Picos;
use shardlab_reports::compare::{Side, pair};
use shardlab_reports::stats::Options;
use shardlab_reports::{Store, testing};
use std::hint::black_box;

const SPANS: u32 = 100_000;

fn runs(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let store = Store::at(dir.path());
    let view = testing::view(SPANS);
    let id = store.save(&view).expect("the store can be written");
    c.bench_function("open a run of 100,000 spans", |b| {
        b.iter(|| black_box(store.open(&id).expect("the run is whole")));
    });
    c.bench_function("keep a run of 100,000 spans", |b| {
        b.iter(|| black_box(store.save(&view).expect("the store can be written")));
    });

    let mut other = view.clone();
    for span in other.run.spans.iter_mut().step_by(3) {
        span.end += Picos(1_000_000);
    }
    let options = Options::default();
    let compare = |a: &_, b: &_| pair(Side::new("A", a), Side::new("B", b), &options);
    c.bench_function("compare two such runs of one program", |b| {
        b.iter(|| black_box(compare(&view, &other)));
    });
    other.program.digest = "another".into();
    c.bench_function("compare two such runs of different programs", |b| {
        b.iter(|| black_box(compare(&view, &other)));
    });

    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let store = Store::at(dir.path());
    let small = testing::view(10);
    for _ in 0..1000 {
        store.save(&small).expect("the store can be written");
    }
    c.bench_function("list 1,000 runs", |b| {
        b.iter(|| black_box(store.list().expect("the store can be read")));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = runs
}
criterion_main!(benches);
