use shardlab_import::{attribute::attribute, kineto, source::Source};
use std::collections::BTreeMap;
fn main() {
    for path in std::env::args().skip(1) {
        let path = std::path::PathBuf::from(path);
        let source = Source::open(&path).unwrap();
        let t0 = std::time::Instant::now();
        let trace = kineto::read(source, &path).unwrap();
        let t1 = t0.elapsed();
        let a = attribute(&trace);
        println!("{} {:?} {:?} events {} bytes {}", path.display(), t1, t0.elapsed(), trace.events, trace.bytes);
        println!("{:?} {:?} {:?}", trace.context, trace.unknown, trace.notes);
        println!("units {:?}", a.units.names());
        println!("steps by {}: {:#?}", a.steps.found_by, a.steps.all);
        println!("time {:?} {} unmatched {:?}", a.time, a.time.0 as f64 / a.time.1 as f64, a.unmatched);
        println!("prefetch {:?} opt {:?}", a.prefetch, a.optimizers);
        let times = shardlab_import::measured::step_times(&trace, &a);
        let facts = shardlab_import::facts::find(&trace, &a, shardlab_import::measured::typical(&times).map(|t| t.step));
        println!("{times:?}\n{facts:#?}");
        let mut by: BTreeMap<String, (u64, i64)> = BTreeMap::new();
        for w in &a.work {
            let e = &trace.device[w.device as usize];
            let k = format!("s{} {:?} mb{} {} {:?}", w.place.step, w.place.phase, w.place.micro_batch, a.units.names()[w.place.unit as usize], w.work);
            let x = by.entry(k).or_default();
            x.0 += 1;
            x.1 += e.end - e.start;
        }
        for (k, v) in by { println!("{k:60} {:5} {:10.1}", v.0, v.1 as f64 / 1e3); }
    }
}
