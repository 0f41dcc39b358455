//! Measures how fast a trace is read and attributed: `cargo run --release -p shardlab-import
//! --example throughput -- FILE`.

use shardlab_import::attribute::attribute;
use shardlab_import::{kineto, source::Source};
use std::path::PathBuf;
use std::time::Instant;

fn main() {
    for path in std::env::args().skip(1).map(PathBuf::from) {
        let begin = Instant::now();
        let source = match Source::open(&path) {
            Ok(source) => source,
            Err(e) => return eprintln!("{e}"),
        };
        let trace = match kineto::read(source, &path) {
            Ok(trace) => trace,
            Err(e) => return eprintln!("{e}"),
        };
        let read = begin.elapsed();
        let a = attribute(&trace);
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let peak = status
            .lines()
            .find(|l| l.starts_with("VmHWM"))
            .unwrap_or_default();
        println!(
            "{}: {} events, {:.0} MB of text, read in {:.2} s, placed in {:.2} s, {:.2} % of device time; {peak}",
            path.display(),
            trace.events,
            trace.bytes as f64 / 1e6,
            read.as_secs_f64(),
            (begin.elapsed() - read).as_secs_f64(),
            100.0 * a.time.0 as f64 / a.time.1.max(1) as f64
        );
    }
}
