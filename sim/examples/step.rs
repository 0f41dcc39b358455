//! Prints the prediction of a scenario:
//! `cargo run -p shardlab-sim --example step -- SCENARIO [section.key=VALUE]...`.

use shardlab_plan::program::Op;
use shardlab_sim::{Options, hardware, simulate_counted};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let name = args
        .next()
        .ok_or("usage: step SCENARIO [section.key=VALUE]...")?;
    let overrides: Vec<String> = args.collect();
    let scenario = shardlab_plan::scenario::load(Path::new(&name), &overrides)?;
    let t = Instant::now();
    let program = shardlab_plan::plan(&scenario)?;
    let planned = t.elapsed();
    let profile = hardware::load(&scenario.mesh.hardware)?;
    let light = Options {
        record: false,
        ..Options::default()
    };
    let t = Instant::now();
    let (_, instrs) = simulate_counted(&program, &profile, &light)?;
    let simulated = t.elapsed();
    let (run, _) = simulate_counted(&program, &profile, &Options::default())?;
    println!(
        "{} instrs; plan {planned:?}, sim {simulated:?}, {instrs} interpreted",
        program.instrs.len()
    );
    println!(
        "step {} host {} mfu {:.3}; allocated {:.2} reserved {:.2} device {:.2} MiB",
        run.step_samples[0],
        run.host,
        run.mfu,
        run.memory.peak_allocated.mib(),
        run.memory.peak_reserved.mib(),
        run.memory.peak_device.mib()
    );
    println!("exposed {:?}", run.exposed);
    for (kind, s) in &run.collectives {
        println!(
            "{}: {} launches {} busy {} exposed {} overlapped {}",
            kind.name(),
            s.count,
            s.bytes,
            s.busy,
            s.exposed,
            s.overlapped_with_gemm
        );
    }
    println!(
        "measured {} modelled {}",
        run.costs.measured, run.costs.modelled
    );
    let mut by_name: BTreeMap<&str, (u32, u64, u64)> = BTreeMap::new();
    for s in &run.spans {
        let name = match program.instrs[s.instr.index()].op {
            Op::Launch { kernel, .. } => program.kernels[kernel.index()].name.as_str(),
            Op::Collective { id, .. } => program.collectives[id.index()].kind.name(),
            _ => "copy",
        };
        let e = by_name.entry(name).or_default();
        e.0 += 1;
        e.1 += s.alone.0;
        e.2 += s.end.0 - s.start.0;
    }
    let mut rows: Vec<_> = by_name.into_iter().collect();
    rows.sort_by_key(|r| std::cmp::Reverse(r.1.2));
    for (name, (n, alone, took)) in rows {
        println!(
            "{name:>40} {n:>5} alone {:>9.2} ms took {:>9.2} ms",
            alone as f64 / 1e9,
            took as f64 / 1e9
        );
    }
    Ok(())
}
