//! Scratch.
use shardlab_plan::{plan, scenario};
use shardlab_sim::{Options, hardware, simulate};
fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let s = scenario::load(
        std::path::Path::new(&args[0]),
        &args[1..]
            .iter()
            .filter(|a| a.contains('='))
            .cloned()
            .collect::<Vec<_>>(),
    )
    .unwrap_or_else(|e| panic!("{e}"));
    let t = std::time::Instant::now();
    let p = plan(&s).unwrap_or_else(|e| panic!("{e}"));
    let tp = t.elapsed();
    let prof = hardware::load(&p.meta.hardware).unwrap_or_else(|e| panic!("{e}"));
    let t = std::time::Instant::now();
    let r = simulate(&p, &prof, &Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let ts = t.elapsed();
    let su = r.summary();
    println!(
        "step {:.3} alloc {:.2} res {:.1} dev {:.1} host {:.2} mfu {:.3} measured {:.2} plan {:?} sim {:?}",
        su.step_ms.median,
        r.memory.peak_allocated.mib(),
        r.memory.peak_reserved.mib(),
        r.memory.peak_device.mib(),
        su.host_ms,
        su.mfu.unwrap_or_default(),
        su.measured_cost_share,
        tp,
        ts
    );
    if args.iter().any(|a| a == "v") {
        println!("exposed {:?}", su.exposed_ms);
        println!("{:?}", su.collectives);
        let mut by: std::collections::BTreeMap<String, (u32, f64, f64)> = Default::default();
        for sp in &r.spans {
            let n = match p.instrs[sp.instr.index()].op {
                shardlab_plan::program::Op::Launch { kernel, .. } => {
                    p.kernels[kernel.index()].name.clone()
                }
                shardlab_plan::program::Op::Collective { id, .. } => {
                    p.collectives[id.index()].kind.name().to_string()
                }
                _ => "copy".into(),
            };
            let e = by.entry(n).or_default();
            e.0 += 1;
            e.1 += (sp.end - sp.start).ms();
            e.2 += sp.alone.ms();
        }
        let mut v: Vec<_> = by.into_iter().collect();
        v.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        for (n, (c, t, a)) in v.iter().take(30) {
            println!("{n:30} x{c:4} {t:9.3} ms alone {a:9.3}");
        }
    }
}
