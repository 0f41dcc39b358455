//! The compiler accepts everything that shipped scenarios launch.

use super::shard::{CAPACITIES, Ranges};
use super::{generate, shard};
use crate::device::cuda::libraries::{Surroundings, folders};
use crate::kernels::cuda::cache::Cache;
use crate::kernels::cuda::code::{OPTIONS, key};
use crate::kernels::cuda::nvrtc::Compiler;
use crate::kernels::cuda::{prepare, ranges, variant};
use shardlab_plan::model::OpKind;
use shardlab_plan::program::{InstrId, Op, Program, workspace};
use shardlab_plan::{plan, scenario};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Programs of all shipped scenarios, as they are and with their blocks compiled.
fn programs() -> impl Iterator<Item = (String, Program)> {
    scenario::shipped().iter().flat_map(|(name, _)| {
        let sets = [vec![], vec!["compile.mode=\"blocks\"".to_owned()]];
        sets.into_iter().filter_map(move |set| {
            // Some cannot be compiled by blocks, and sweeps are no scenarios.
            let s = scenario::load(Path::new(name), &set).ok()?;
            Some((format!("{name} {set:?}"), plan(&s).ok()?))
        })
    })
}

/// Every source that a program needs, with who needs it.
fn sources(who: &str, program: &Program, out: &mut BTreeMap<String, String>) {
    for v in variant::of_program(program).keys() {
        let kernel = &program.kernels[v.kernel.index()];
        if let OpKind::Gemm { .. } = kernel.body[0].op {
            let product =
                crate::kernels::cuda::gemm::product(&v.request(&kernel.body), &kernel.body[0]);
            assert!(product.is_ok(), "{who}: {}: {product:?}", kernel.name);
            continue;
        }
        if let OpKind::Shard(_) = kernel.body[0].op {
            continue;
        }
        let made = generate(&v.request(&kernel.body));
        let module = made.unwrap_or_else(|e| panic!("{who}: {}: {e}", kernel.name));
        // The planned workspace says nothing of these: they find room in that of the matrix products, which every model
        // has. A copy of what a kernel would spoil is rare, and may be larger.
        let keeps = module.source.contains(" keep");
        let planned = workspace::kernel_bytes(kernel, true).max(workspace::PRODUCT);
        assert!(
            keeps || module.scratch <= planned,
            "{who}: {} takes {} bytes",
            kernel.name,
            module.scratch
        );
        out.entry(module.source)
            .or_insert_with(|| format!("{who}: {}", kernel.name));
    }
    let shapes = prepare::shapes(program);
    for (i, instr) in program.instrs.iter().enumerate() {
        let Op::Launch { kernel, .. } = instr.op else {
            continue;
        };
        let kernel = &program.kernels[kernel.index()];
        let OpKind::Shard(op) = kernel.body[0].op else {
            continue;
        };
        let reads = prepare::stand_ins(program, program.reads(&instr.op));
        let writes = prepare::stand_ins(program, program.writes(&instr.op));
        let shapes = shapes.get(&InstrId(i as u32)).map_or(&[][..], |s| s);
        let work = ranges::work(op, shapes, &reads, &writes);
        let work = work.unwrap_or_else(|e| panic!("{who}: {}: {e}", kernel.name));
        for batch in &work.batches {
            for capacity in CAPACITIES {
                let source = batch.kind.source(capacity);
                out.entry(source)
                    .or_insert_with(|| format!("{who}: {}", kernel.name));
            }
        }
    }
}

fn compiler() -> Option<Compiler> {
    let named = std::env::var_os("SHARDLAB_NVRTC").map(PathBuf::from);
    let found = folders(&Surroundings::of_process(), &[]);
    let all: Vec<PathBuf> = named
        .into_iter()
        .chain(found.into_iter().map(|f| f.path))
        .collect();
    match Compiler::open(&all) {
        Ok(c) => Some(c),
        Err(e) => {
            // Written past the harness, which would swallow it.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: no generated kernel was compiled: {e}; `pip install nvidia-cuda-nvrtc==13.0.88` and name its lib folder in SHARDLAB_NVRTC"
            );
            None
        }
    }
}

/// Sources that compiled once are not compiled again: their hashes lie beside the test's binary.
fn cache() -> Cache {
    let exe = std::env::current_exe().unwrap();
    Cache::new(Some(exe.parent().unwrap().join("compiled-kernels")))
}

#[test]
fn every_kernel_of_every_shipped_scenario_is_generated_and_compiles() {
    let mut all = BTreeMap::new();
    for (who, program) in programs() {
        sources(&who, &program, &mut all);
    }
    for kind in [true, false] {
        all.entry(shard::fold(kind))
            .or_insert_with(|| "fold".to_owned());
    }
    assert!(all.len() > 300, "{}", all.len());
    let Some(compiler) = compiler() else { return };
    let cache = cache();
    let work: Mutex<Vec<(String, String)>> = Mutex::new(all.into_iter().collect());
    let failed: Mutex<BTreeSet<String>> = Mutex::default();
    let next = || work.lock().unwrap().pop();
    let worker = || {
        while let Some((source, who)) = next() {
            if cache.get(&key(&source), "compiled").is_some() {
                continue;
            }
            match compiler.compile(&source, &OPTIONS) {
                Ok(_) => cache.put(&key(&source), "compiled", b""),
                Err(e) => drop(
                    failed
                        .lock()
                        .unwrap()
                        .insert(format!("{who}: {e}\n{source}")),
                ),
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            s.spawn(worker);
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(
        failed.is_empty(),
        "{} of them, the first: {}",
        failed.len(),
        failed.first().unwrap()
    );
}

#[test]
fn a_source_that_is_wrong_is_named_by_the_compiler() {
    let Some(compiler) = compiler() else { return };
    let log = compiler
        .compile("__global__ void k() { nonsense; }", &OPTIONS)
        .unwrap_err();
    assert!(log.contains("nonsense"), "{log}");
    let code = compiler
        .compile("extern \"C\" __global__ void k() {}", &OPTIONS)
        .unwrap();
    assert_eq!(code[..4], *b"\x7fELF");
}

#[test]
fn lists_of_ranges_fit_a_launch_s_arguments() {
    let widest = Ranges::AdamW {
        weight: shardlab_plan::units::DType::F32,
        grad: shardlab_plan::units::DType::F32,
        moments: shardlab_plan::units::DType::F32,
        copy: Some(shardlab_plan::units::DType::Bf16),
    };
    for capacity in CAPACITIES {
        let bytes = capacity * (widest.width() + 1) * 8 + (capacity + 2) * 4;
        // 32,764 bytes since CUDA 12.1; 64 for everything else.
        assert!(bytes + 64 <= 32_764, "{bytes}");
        assert_eq!(capacity % 2, 0);
    }
}
