//! The compiler accepts all kernels of shipped scenarios.

use super::shard::{RangeUpdate, Ranges};
use super::{Arg, Module, PREAMBLE, Param, Request, generate, shard, waiting, widen};
use crate::device::cuda::libraries::{Surroundings, folders};
use crate::kernels::cuda::cache::Cache;
use crate::kernels::cuda::code::{key, options};
use crate::kernels::cuda::nvrtc::Compiler;
use crate::kernels::cuda::target::Target;
use crate::kernels::cuda::{prepare, ranges, variant};
use crate::kernels::ops::{self, CudaCode, Library};
use shardlab_plan::ir::{
    BodyOp, COMPUTE, DType, InstrId, Kernel, OpKind, Place, RowLimit, Shape, Slot, UpdateRule, op,
};
use shardlab_plan::program::{Op, Program, workspace};
use shardlab_plan::{plan, scenario};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

#[path = "../../../../../plan/src/ops/tests/examples.rs"]
mod examples;

/// Names for `examples`.
mod terms {
    pub(super) use shardlab_plan::ir::OpKind;
    pub(super) use shardlab_plan::ops::{Extent, Operand};
}

/// Returns programs of all shipped scenarios, as they are, with their blocks compiled, and in bf16.
fn programs() -> impl Iterator<Item = (String, Program)> {
    scenario::shipped().iter().flat_map(|(name, _)| {
        let blocks = "compile.mode=\"blocks\"".to_owned();
        let merged = "compile.merge_projections=\"all\"".to_owned();
        let bf16 = "precision.compute=\"bf16\"".to_owned();
        let dora = "lora.use_dora=true".to_owned();
        let sets = [
            vec![],
            vec![blocks.clone()],
            vec![blocks.clone(), merged],
            vec![bf16],
            vec![dora.clone()],
            vec![dora, blocks],
        ];
        sets.into_iter().filter_map(move |set| {
            // Some cannot be compiled by blocks, and sweeps are not scenarios.
            let s = scenario::load(Path::new(name), &set).ok()?;
            Some((format!("{name} {set:?}"), plan(&s).ok()?))
        })
    })
}

/// Returns programs of a golden Llama 4, whose layers no shipped scenario has.
fn golden_programs() -> impl Iterator<Item = (String, Program)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/llama4-tiny");
    let text = format!(
        "[model]\npreset = {:?}\n[train]\nseq_len = 48\n[mesh]\nhardware = \"cpu\"\ndp_shard = 4\n",
        folder.join("config.json")
    );
    let sets: [&[&str]; 7] = [
        &[],
        &["compile.mode=blocks"],
        &["compile.mode=full"],
        &["precision.compute=f32", "fsdp.policy=fsdp2"],
        &["mesh.ep=2", "compile.mode=regions"],
        &["mesh.ep=2", "moe.dispatcher=padded"],
        &["mesh.ep=2", "moe.dispatcher=peer", "compile.mode=blocks"],
    ];
    sets.into_iter().map(move |set| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let s = scenario::parse("llama4-tiny", &text, &set).unwrap();
        (format!("llama4-tiny {set:?}"), plan(&s).unwrap())
    })
}

/// Returns whether GPUs have code for all of a body.
fn is_written(body: &[BodyOp]) -> bool {
    let absent = |op: &BodyOp| matches!(ops::cuda(&op.op), CudaCode::Absent(_));
    !body.iter().any(absent)
}

/// Returns whether cuBLASLt performs an operation.
fn is_gemm(op: &OpKind) -> bool {
    matches!(ops::cuda(op), CudaCode::Library(Library::CublasLt, _))
}

/// Returns every source that a program needs, with the kernel that needs it.
fn sources(who: &str, program: &Program, target: Target, out: &mut BTreeMap<String, String>) {
    let mut ticketed = BTreeSet::new();
    for v in variant::of_program(program).keys() {
        let kernel = &program.kernels[v.kernel.index()];
        if let [only] = &kernel.body[..]
            && is_gemm(&only.op)
        {
            let gemm =
                crate::kernels::cuda::gemm::problem(&v.request_of(kernel, target), &kernel.body[0]);
            assert!(gemm.is_ok(), "{who}: {}: {gemm:?}", kernel.name);
            continue;
        }
        if matches!(kernel.body[0].op, OpKind::Shard(_)) || !is_written(&kernel.body) {
            continue;
        }
        let made = generate(&v.request_of(kernel, target));
        let module = made.unwrap_or_else(|e| panic!("{who}: {}: {e}", kernel.name));
        let shared = module.entries.iter().map(|e| e.shared).max();
        assert!(
            shared <= Some(target.shared()),
            "{who}: {} takes {shared:?} bytes of shared memory on {target}",
            kernel.name
        );
        // The planned workspace does not include these: they fit into that of the GEMMs, which
        // every model has. A copy of a read that a kernel would overwrite is rare, and may be
        // larger.
        let keeps = module.source.contains(" keep");
        if let OpKind::ConvGradWeight { .. } = kernel.body[0].op {
            let then = widen(&v.request(&kernel.body, target), &kernel.body[0]).unwrap();
            let who = || format!("{who}: conversion after {}", kernel.name);
            out.entry(then.source).or_insert_with(who);
        }
        let planned = workspace::kernel_bytes(kernel, true).max(workspace::GEMM);
        assert!(
            keeps || module.scratch <= planned,
            "{who}: {} takes {} bytes",
            kernel.name,
            module.scratch
        );
        let mut params = module.entries.iter().flat_map(|e| &e.params);
        if params.any(|p| *p == Param::Tickets) {
            ticketed.insert(v.kernel);
        }
        out.entry(module.source)
            .or_insert_with(|| format!("{who}: {}", kernel.name));
    }
    let shapes = prepare::shapes(program, 0).unwrap();
    let groups = program.group_runs(0).unwrap();
    let scales = program.scale_runs(0).unwrap();
    for (i, instr) in program.instrs.iter().enumerate() {
        let Op::Launch { kernel, stream, .. } = instr.op else {
            continue;
        };
        let taken = ticketed.contains(&kernel) && stream != COMPUTE;
        let kernel = &program.kernels[kernel.index()];
        assert!(!taken, "{who}: {}: tickets of another stream", kernel.name);
        let CudaCode::Ranges(op) = ops::cuda(&kernel.body[0].op) else {
            continue;
        };
        let reads = prepare::stand_ins(program, program.reads(&instr.op));
        let writes = prepare::stand_ins(program, program.writes(&instr.op));
        let id = InstrId(i as u32);
        let parameters = ranges::Parameters {
            shapes: shapes.get(&id).map_or(&[], Vec::as_slice),
            groups: groups.get(&id).map_or(&[], Vec::as_slice),
            scales: scales.get(&id).map_or(&[], Vec::as_slice),
        };
        let work = ranges::work(op, parameters, &reads, &writes);
        let work = work.unwrap_or_else(|e| panic!("{who}: {}: {e}", kernel.name));
        for batch in &work.batches {
            for capacity in batch.kind.capacities() {
                let source = batch.kind.source(capacity);
                out.entry(source)
                    .or_insert_with(|| format!("{who}: {}", kernel.name));
            }
        }
    }
}

/// Opens NVRTC from `SHARDLAB_NVRTC` or where a device finds it.
pub(super) fn compiler() -> Compiler {
    let named = std::env::var_os("SHARDLAB_NVRTC").map(PathBuf::from);
    let found = folders(&Surroundings::of_process(), &[]);
    let all: Vec<PathBuf> = named
        .into_iter()
        .chain(found.into_iter().map(|f| f.path))
        .collect();
    Compiler::open(&all).unwrap_or_else(|e| {
        panic!(
            "{e}; `pip install nvidia-cuda-nvrtc==13.0.88` and name its lib folder in SHARDLAB_NVRTC"
        )
    })
}

/// Opens the cache of sources that compiled once, whose hashes are stored next to the test's
/// binary.
fn cache() -> Cache {
    let exe = std::env::current_exe().unwrap();
    Cache::new(Some(exe.parent().unwrap().join("compiled-kernels")))
}

/// Compiles all of them, if the test has a compiler. Each comes with the kernel that needs it.
pub(super) fn compile(all: BTreeMap<String, String>, target: Target, nvrtc: Option<&Compiler>) {
    let Some(compiler) = nvrtc else { return };
    let cache = cache();
    let work: Mutex<Vec<(String, String)>> = Mutex::new(all.into_iter().collect());
    let failed: Mutex<BTreeSet<String>> = Mutex::default();
    let next = || work.lock().unwrap().pop();
    let worker = || {
        while let Some((source, who)) = next() {
            // Helpers of the device are compiled as they are.
            let source = match source.contains(PREAMBLE) {
                true => waiting(&source),
                false => source,
            };
            if cache.get(&key(target, &source), "compiled").is_some() {
                continue;
            }
            match compiler.compile(&source, &options(target)) {
                Ok(_) => cache.put(&key(target, &source), "compiled", b""),
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
        "{} of them for {target}, the first: {}",
        failed.len(),
        failed.first().unwrap()
    );
}

#[test]
fn every_kernel_of_every_shipped_scenario_is_generated() {
    shipped_kernels(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn every_kernel_of_every_shipped_scenario_compiles() {
    shipped_kernels(Some(&compiler()));
}

fn shipped_kernels(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for (who, program) in programs().chain(golden_programs()) {
        sources(&who, &program, Target::HOPPER, &mut all);
    }
    for kind in [true, false] {
        all.entry(shard::fold(kind))
            .or_insert_with(|| "fold".to_owned());
    }
    let own = [
        include_str!("../../../device/cuda/support.cu"),
        include_str!("../../../device/cuda/pushes/push.cu"),
    ];
    all.extend(own.map(|source| (source.to_owned(), "the device itself".to_owned())));
    assert!(all.len() > 300, "{}", all.len());
    compile(all, Target::HOPPER, nvrtc);
}

#[test]
fn every_operation_is_generated() {
    operations(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn every_operation_compiles() {
    operations(Some(&compiler()));
}

/// Returns operations that give choices rows: enough for all of them, or not; then choices without
/// one are dropped, or an error.
fn rows_of_experts(drop: Option<bool>) -> [OpKind; 2] {
    let limit = |drop| RowLimit {
        rows: 7,
        balanced: 6,
        drop,
    };
    let sort = op::SortExperts {
        experts: 3,
        limit: drop.map(limit),
    };
    let dispatch = op::DispatchExperts {
        ranks: 2,
        experts: 3,
        slots: 4,
        drop: drop == Some(true),
    };
    [OpKind::SortExperts(sort), OpKind::DispatchExperts(dispatch)]
}

/// Every operation as a kernel of its own, over float32 and bfloat16.
fn operations(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    let absent = |k: &OpKind| matches!(ops::cuda(k), CudaCode::Absent(_));
    let limits = [None, Some(false), Some(true)].map(rows_of_experts);
    let runs = || {
        let all = OpKind::ALL.iter().chain(limits.iter().flatten());
        all.filter(|k| !absent(k))
    };
    for &kind in runs() {
        let (inputs, outputs) = examples::operands(&kind);
        for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
            let arg = |e: &examples::Example| Arg {
                dtype: e.ids.map_or(dtype, |_| DType::I64),
                align: 16,
            };
            // The statistics of attention are float32.
            let stats = |mut args: Vec<Arg>, lse: usize| {
                args[lse].dtype = DType::F32;
                args
            };
            let mut reads: Vec<Arg> = inputs.iter().map(arg).collect();
            let mut writes: Vec<Arg> = outputs.iter().map(arg).collect();
            match kind {
                OpKind::Attention(_)
                | OpKind::FlexAttention(_)
                | OpKind::SinkAttention(_)
                | OpKind::DocumentAttention(_) => {
                    writes = stats(writes, 1);
                }
                OpKind::SinkAttentionGrad(_) | OpKind::DocumentAttentionGrad(_) => {
                    reads = stats(reads, 6);
                }
                OpKind::AttentionGrad(_) | OpKind::FlexAttentionGrad(_) => reads = stats(reads, 5),
                OpKind::Float8CastBlocks(of) => writes[0].dtype = of.to,
                // Two factors, and the reciprocals of their scales.
                OpKind::ScaledGroupedGemm(_) | OpKind::ScaledGroupedGemmWeightGrad(_) => {
                    reads[..2].fill_with(|| Arg {
                        dtype: DType::F8E4m3,
                        align: 16,
                    });
                    reads[2..4].fill_with(|| Arg {
                        dtype: DType::F32,
                        align: 16,
                    });
                }
                _ => {}
            }
            let slots = |examples: &[examples::Example], args: &[Arg], place: fn(u8) -> Place| {
                let with = |(i, (e, a)): (usize, (&examples::Example, &Arg))| Slot {
                    dtype: a.dtype,
                    ..slot(place(i as u8), &e.shape, &[])
                };
                let slots = examples.iter().zip(args).enumerate().map(with);
                slots.collect::<Vec<_>>()
            };
            let body = [BodyOp {
                op: kind,
                inputs: slots(&inputs, &reads, Place::Read).into(),
                outputs: slots(&outputs, &writes, Place::Write).into(),
            }];
            let same = vec![None; reads.len()];
            let req = Request {
                target: Target::HOPPER,
                body: &body,
                used_rows: None,
                reads: &reads,
                writes: &writes,
                same: &same,
            };
            let who = format!("{} in {dtype}", kind.name());
            if is_gemm(&kind) {
                let gemm = crate::kernels::cuda::gemm::problem(&req, &body[0]);
                gemm.unwrap_or_else(|e| panic!("{who}: {e}"));
                continue;
            }
            let module = generate(&req).unwrap_or_else(|e| panic!("{who}: {e}"));
            assert!(!module.entries.is_empty(), "{who}");
            all.entry(module.source).or_insert(who);
        }
    }
    assert!(all.len() >= OpKind::ALL.len(), "{}", all.len());
    compile(all, Target::HOPPER, nvrtc);
}

#[test]
fn kernels_for_other_gpus_find_room() {
    other_gpus(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn kernels_for_other_gpus_compile() {
    other_gpus(Some(&compiler()));
}

/// A100, L40S, B200 and desktops: no clusters, less shared memory, other instructions.
fn other_gpus(nvrtc: Option<&Compiler>) {
    let scenarios = [
        ("small-native", vec![]),
        ("small-cnn", vec![]),
        (
            "peers-1b",
            vec![
                "model.layers=1",
                "fsdp.policy=native",
                "compile.mode=regions",
                "train.loss=chunked",
            ],
        ),
        ("peers-8b", vec!["model.layers=1", "precision.compute=f32"]),
        (
            "peers-8b",
            vec![
                "model.layers=1",
                "precision.compute=f32",
                "model.head_dim=256",
            ],
        ),
    ];
    let programs = scenarios.map(|(name, set)| {
        let set: Vec<String> = set.into_iter().map(str::to_owned).collect();
        plan(&scenario::load(Path::new(name), &set).unwrap()).unwrap()
    });
    for (capability, clusters) in [
        ((8, 0), false),
        ((8, 9), false),
        ((10, 0), true),
        ((12, 0), false),
    ] {
        let target = Target::of(capability).unwrap();
        let mut all = BTreeMap::new();
        for program in &programs {
            sources(&program.meta.scenario, program, target, &mut all);
        }
        let has = all.keys().any(|source| source.contains("__cluster_dims__"));
        assert_eq!(has, clusters, "{target}");
        compile(all, target, nvrtc);
    }
    assert_eq!(Target::of((7, 5)), None);
}

#[test]
fn casts_to_8_bits_are_generated() {
    float8(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn casts_to_8_bits_compile() {
    float8(Some(&compiler()));
}

/// Casts of every recipe, alone and joined with other operations. Those that write codes transposed
/// go through tiles.
fn float8(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for recipe in ["tensorwise", "rowwise", "blockwise"] {
        for mode in ["off", "blocks", "full"] {
            for saved in ["compute", "float8"] {
                let set = [
                    format!("precision.float8_recipe={recipe}"),
                    format!("precision.float8_saved={saved}"),
                    format!("compile.mode={mode}"),
                ];
                let Ok(s) = scenario::load(Path::new("small-fp8"), &set) else {
                    continue;
                };
                let program = plan(&s).unwrap();
                let mut here = BTreeMap::new();
                sources(&format!("{set:?}"), &program, Target::HOPPER, &mut here);
                let tiles = here
                    .keys()
                    .filter(|source| source.contains("tile["))
                    .count();
                let casts = here.keys().filter(|source| source.contains("SQUARE"));
                match recipe {
                    // Rows and squares, each as they are and transposed.
                    "blockwise" => assert!(casts.count() >= 4, "{set:?}"),
                    _ => assert!(tiles >= 3, "{set:?}: {tiles} kernels with tiles"),
                }
                all.extend(here);
            }
        }
    }
    gathers_in_8_bits(&mut all);
    assert!(all.len() > 60, "{}", all.len());
    for target in [Target::of((8, 9)).unwrap(), Target::HOPPER] {
        let mut all = all.clone();
        experts_in_8_bits(target, &mut all);
        compile(all, target, nvrtc);
    }
    let s = scenario::load(Path::new("small-fp8"), &[]).unwrap();
    let program = plan(&s).unwrap();
    let ampere = Target::of((8, 0)).unwrap();
    let refused = variant::of_program(&program).into_keys().any(|v| {
        let body = &program.kernels[v.kernel.index()].body;
        let made = generate(&v.request(body, ampere));
        made.is_err_and(|e| {
            e.to_string()
                .contains("8-bit floats need compute capability 8.9")
        })
    });
    assert!(refused);
}

#[test]
fn packed_weights_are_generated() {
    packed_weights(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn packed_weights_compile() {
    packed_weights(Some(&compiler()));
}

/// Weights in each format, whose rows are and are not whole blocks of NF4.
fn packed_weights(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for format in ["nf4", "nf4_f32", "int8"] {
        for compute in ["f32", "bf16"] {
            for ffn in [176, 67] {
                let set = [
                    format!("precision.frozen_params={format}"),
                    format!("precision.compute={compute}"),
                    format!("model.ffn={ffn}"),
                ];
                let s = scenario::load(Path::new("small-qlora"), &set).unwrap();
                let who = format!("{set:?}");
                sources(&who, &plan(&s).unwrap(), Target::HOPPER, &mut all);
            }
        }
    }
    let reads_codes = |source: &&String| source.contains("const u8* stored");
    assert!(all.keys().filter(reads_codes).count() >= 12);
    compile(all, Target::HOPPER, nvrtc);
}

#[test]
#[ignore = "needs NVRTC"]
fn kernels_of_muon_compile() {
    let mut all = BTreeMap::new();
    for dtype in [DType::F32, DType::Bf16] {
        for pieces in [1, 4] {
            let of = shard::muon::Types {
                weight: dtype,
                grad: dtype,
                momentum: dtype,
                pieces,
            };
            all.insert(shard::muon::source(of), format!("{of:?}"));
        }
        all.insert(shard::muon::rows_source(dtype), format!("rows, {dtype}"));
        let update = Ranges::Update(shard::RangeUpdate {
            rule: UpdateRule::MuonMomentum,
            weight: dtype,
            grad: dtype,
            states: dtype,
            copy: Some(DType::Bf16),
            pieces: 1,
            grouped: true,
            maxima: false,
        });
        for capacity in update.capacities() {
            all.insert(update.source(capacity), format!("momentum, {dtype}"));
        }
    }
    all.insert(shard::muon::norm_source(), "norm".to_owned());
    compile(all, Target::HOPPER, Some(&compiler()));
}

#[test]
fn updates_of_router_biases_are_generated() {
    router_biases(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn updates_of_router_biases_compile() {
    router_biases(Some(&compiler()));
}

/// Counts of choices, up to the most experts that fit into shared memory, and updates.
fn router_biases(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for experts in [8, 60, 1024] {
        let set = [
            "model.router_bias=true".to_owned(),
            "model.router_bias_update_speed=0.001".to_owned(),
            format!("model.experts={experts}"),
        ];
        let s = scenario::load(Path::new("small-moe"), &set).unwrap();
        sources(
            &format!("{set:?}"),
            &plan(&s).unwrap(),
            Target::HOPPER,
            &mut all,
        );
    }
    all.retain(|source, _| source.contains("atomicAdd(&counts"));
    assert_eq!(all.len(), 3);
    for capacity in Ranges::RouterBias.capacities() {
        all.insert(
            Ranges::RouterBias.source(capacity),
            format!("update of {capacity} routers"),
        );
    }
    compile(all, Target::HOPPER, nvrtc);
}

/// Microscaling formats have no kernels on GPUs, which is said by name.
#[test]
fn what_runs_on_cpus_only_is_refused_by_name() {
    let set = ["precision.float8_recipe=mxfp8", "mesh.hardware=b200"].map(str::to_owned);
    let s = scenario::load(Path::new("small-fp8"), &set).unwrap();
    let program = plan(&s).unwrap();
    let refused = variant::of_program(&program).into_keys().any(|v| {
        let body = &program.kernels[v.kernel.index()].body;
        let made = generate(&v.request(body, Target::HOPPER));
        made.is_err_and(|e| e.to_string().contains("\"mxfp8\" runs on CPUs only"))
    });
    assert!(refused);
}

/// Adds the kernels of experts in 8 bits. On Hopper, tensor cores multiply codes: forward with fast
/// sums, both gradients with sums that are added up in float32.
fn experts_in_8_bits(target: Target, all: &mut BTreeMap<String, String>) {
    for mode in ["off", "blocks", "full"] {
        for more in [
            "precision.float8_saved=compute",
            "precision.float8_saved=float8",
            "precision.float8_all_gather=true",
        ] {
            let mut set: Vec<String> = [
                "precision.float8_recipe=tensorwise",
                "precision.float8_experts=true",
                "model.hidden=32",
                "model.ffn=96",
                "model.expert_ffn=48",
                "model.shared_expert_ffn=48",
                "train.seq_len=24",
                more,
            ]
            .map(str::to_owned)
            .to_vec();
            set.push(format!("compile.mode={mode}"));
            let Ok(s) = scenario::load(Path::new("small-moe"), &set) else {
                assert_eq!(mode, "full");
                continue;
            };
            let program = plan(&s).unwrap();
            let mut here = BTreeMap::new();
            sources(&format!("{set:?}"), &program, target, &mut here);
            for (weight_grad, promote) in [(0, 0), (0, 1), (1, 1)] {
                let lines = [
                    "#define CODES 1u".to_owned(),
                    format!("#define WEIGHT_GRAD {weight_grad}u"),
                    format!("#define PROMOTE {promote}u"),
                ];
                let is = |source: &String| lines.iter().all(|line| source.contains(line));
                let found = here.keys().any(is);
                assert_eq!(found, target == Target::HOPPER, "{set:?}: {lines:?}");
            }
            // The transposes of experts' weights, a stack of matrices.
            let stacks = here.keys();
            let stacks = stacks.filter(|s| s.contains("tile[") && s.contains("blockIdx.z"));
            assert!(stacks.count() >= 2, "{set:?}");
            all.extend(here);
        }
    }
}

/// Adds the kernels of programs that gather codes. The kernels that copy weights transposed go
/// through tiles.
fn gathers_in_8_bits(all: &mut BTreeMap<String, String>) {
    // Of main weights that are not rounded first.
    let torchao = ["fsdp.policy=fsdp2".to_owned()];
    let s = scenario::load(Path::new("small-fp8-gather"), &torchao).unwrap();
    let mut here = BTreeMap::new();
    sources("torchao", &plan(&s).unwrap(), Target::HOPPER, &mut here);
    let unrounded = here
        .keys()
        .filter(|source| source.contains("Coded<float> f;"));
    assert_eq!(unrounded.count(), 2);
    all.extend(here);
    // With a scale per block, for short lists and for long ones.
    let s = scenario::load(Path::new("small-fp8-blocks"), &[]).unwrap();
    let mut here = BTreeMap::new();
    sources("blocks", &plan(&s).unwrap(), Target::HOPPER, &mut here);
    let casts = here
        .keys()
        .filter(|source| source.contains("across = cols / 128"));
    assert_eq!(casts.count(), 2);
    all.extend(here);
    for mode in ["off", "regions", "blocks"] {
        let set = [format!("compile.mode={mode}")];
        let s = scenario::load(Path::new("small-fp8-gather"), &set).unwrap();
        let program = plan(&s).unwrap();
        let mut here = BTreeMap::new();
        sources(&format!("{set:?}"), &program, Target::HOPPER, &mut here);
        let of = |what: &str| here.keys().filter(|source| source.contains(what)).count();
        // Each for short lists and for long ones. The optimizer finds maxima, too.
        for (what, sources) in [("atomicMax", 4), ("inverse[k * ", 2), ("Coded<bf16> f;", 2)] {
            assert_eq!(of(what), sources, "{set:?}: {what}");
        }
        let copies = |k: &Kernel| {
            let copied = |op: &BodyOp| op.op == OpKind::Copy && op.outputs[0].dtype.is_float8();
            k.body.iter().any(copied)
        };
        let variants = variant::of_program(&program);
        let copies = variants.keys().filter_map(|v| {
            let kernel = &program.kernels[v.kernel.index()];
            copies(kernel).then(|| generate(&v.request(&kernel.body, Target::HOPPER)).unwrap())
        });
        let copies: Vec<Module> = copies.collect();
        assert!(copies.len() > 1, "{set:?}: {} copies", copies.len());
        for module in copies {
            assert!(
                module.source.contains("tile["),
                "{set:?}: {}",
                module.source
            );
        }
        all.extend(here);
    }
}

#[test]
fn gemms_with_fused_epilogue_are_refused_except_on_hopper() {
    gemms_with_fused_epilogue(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn gemms_with_fused_epilogue_compile_for_hopper() {
    gemms_with_fused_epilogue(Some(&compiler()));
}

/// GEMMs with fused epilogue: forward and backward of the gate of a feed-forward network, with what
/// backward recomputes, in both 16-bit types; rows and columns that do not fill a tile; residuals,
/// which no epilogue adds. They fit into registers, or the compiler would have spilled them.
fn gemms_with_fused_epilogue(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for (set, expected) in [
        (&["train.recompute=none"][..], 2),
        (&["train.recompute=pointwise"], 2),
        (&["precision.compute=f16", "precision.comm_grads=f16"], 2),
        (&["compile.epilogues=false"], 3),
        (&["model.ffn=1000", "train.seq_len=72"], 2),
    ] {
        let base = ["model.layers=1", "fsdp.policy=native", "train.loss=chunked"];
        let more = ["compile.mode=regions", "compile.fused_products=true"];
        let set = base.iter().chain(&more).chain(set);
        let set: Vec<String> = set.map(|s| (*s).to_owned()).collect();
        let program = plan(&scenario::load(Path::new("peers-1b"), &set).unwrap()).unwrap();
        let mut own = BTreeMap::new();
        sources(&program.meta.scenario, &program, Target::HOPPER, &mut own);
        own.retain(|source, _| source.contains("wgmma.mma_async"));
        assert_eq!(own.len(), expected, "{set:?}");
        all.append(&mut own);
        for v in variant::of_program(&program).keys() {
            let body = &program.kernels[v.kernel.index()].body[..];
            if BodyOp::split_gemm_epilogue(body).is_some() {
                let refused = generate(&v.request(body, Target::of((8, 0)).unwrap()));
                let why = refused.unwrap_err().to_string();
                assert!(why.contains("compile.gemm_epilogue_fusion"), "{why}");
            }
        }
    }
    compile(all, Target::HOPPER, nvrtc);
}

#[test]
fn matmuls_of_experts_with_fused_epilogue_are_refused_except_on_hopper() {
    grouped_with_fused_epilogue(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn matmuls_of_experts_with_fused_epilogue_compile_for_hopper() {
    grouped_with_fused_epilogue(Some(&compiler()));
}

/// Matmuls of experts with fused epilogue: the gate, with weights of choices, where backward keeps
/// its factors and where it does not; halves that do not fill tiles.
fn grouped_with_fused_epilogue(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for (name, set, expected) in [
        ("qwen3-30b-a3b-8xh100", &["train.recompute=none"][..], 2),
        ("qwen3-30b-a3b-8xh100-ep8", &["train.recompute=full"], 3),
        (
            "qwen3-30b-a3b-8xh100-ep8",
            &["train.recompute=pointwise"],
            2,
        ),
        ("mixtral-8x7b-16xh100", &["train.recompute=none"], 2),
        (
            "qwen3-30b-a3b-8xh100",
            &[
                "model.expert_ffn=328",
                "precision.compute=f16",
                "precision.comm_grads=f16",
            ],
            3,
        ),
    ] {
        let base = ["model.layers=1", "model.hidden=4096", "fsdp.policy=native"];
        let more = ["compile.mode=blocks", "compile.gemm_epilogue_fusion=true"];
        let set = base.iter().chain(&more).chain(set);
        let set: Vec<String> = set.map(|s| (*s).to_owned()).collect();
        let program = plan(&scenario::load(Path::new(name), &set).unwrap()).unwrap();
        let mut own = BTreeMap::new();
        for v in variant::of_program(&program).keys() {
            let body = &program.kernels[v.kernel.index()].body[..];
            let gemms = BodyOp::split_gemm_epilogue(body).map(|(gemms, _)| gemms);
            if !gemms.is_some_and(|gemms| matches!(gemms[0].op, OpKind::GroupedGemm(_))) {
                continue;
            }
            let refused = generate(&v.request(body, Target::of((8, 0)).unwrap()));
            let why = refused.unwrap_err().to_string();
            assert!(why.contains("compile.gemm_epilogue_fusion"), "{why}");
            let module = generate(&v.request(body, Target::HOPPER)).unwrap();
            assert!(module.entries[0].shared <= Target::HOPPER.shared());
            let planned = workspace::kernel_bytes(&program.kernels[v.kernel.index()], true);
            assert_eq!(module.scratch, planned);
            own.insert(module.source, format!("{name} {set:?}"));
        }
        assert_eq!(own.len(), expected, "{name} {set:?}");
        all.append(&mut own);
    }
    compile(all, Target::HOPPER, nvrtc);
}

/// Rotated queries and keys of a merged GEMM overwrite the unrotated ones, without a copy of these;
/// one that shares memory in any other way is copied. With one sequence a dimension has one
/// element, and any stride.
#[test]
fn rotations_of_merged_projections_spoil_nothing() {
    for sequences in [1, 2] {
        let set = [
            "compile.merge_projections=\"qkv\"".to_owned(),
            format!("train.micro_batch={sequences}"),
        ];
        let scenario = scenario::load(Path::new("llama3.2-1b-4xh200"), &set).unwrap();
        assert_rotations_spoil_nothing(&plan(&scenario).unwrap());
    }
}

fn assert_rotations_spoil_nothing(program: &Program) {
    let mut rotations = 0;
    for v in variant::of_program(program).keys() {
        let body = &program.kernels[v.kernel.index()].body;
        let cat = body.iter().any(|b| matches!(b.op, OpKind::Cat { .. }));
        let Some(read) = v.same.iter().position(Option::is_some).filter(|_| cat) else {
            continue;
        };
        rotations += 1;
        assert_eq!(v.same[read], Some(0));
        let module = generate(&v.request(body, Target::HOPPER)).unwrap();
        assert_eq!(module.scratch, 0);
        // Each half is read once and written once, eight elements at a time, and written after all
        // is read.
        let at =
            |what: &str| -> Vec<usize> { module.source.match_indices(what).map(|m| m.0).collect() };
        let (loads, stores) = (
            at(&format!("const Pack<bf16, 8>*>((r{read} ")),
            at("store<bf16, 8>("),
        );
        let from_start = at(&format!("const Pack<bf16, 8>*>(r{read} "));
        let halves: Vec<usize> = loads.into_iter().chain(from_start).collect();
        assert_eq!((halves.len(), stores.len()), (2, 2), "{}", module.source);
        assert!(halves.iter().all(|l| stores.iter().all(|s| l < s)));
        let mut clash = v.clone();
        clash.same[read] = Some(super::CLASH);
        assert!(
            generate(&clash.request(body, Target::HOPPER))
                .unwrap()
                .scratch
                > 0
        );
    }
    assert_eq!(rotations, 2, "queries and keys, and their gradients");
}

#[test]
#[ignore = "needs NVRTC"]
fn a_source_that_is_wrong_is_named_by_the_compiler() {
    let compiler = compiler();
    let log = compiler
        .compile(
            "__global__ void k() { nonsense; }",
            &options(Target::HOPPER),
        )
        .unwrap_err();
    assert!(log.contains("nonsense"), "{log}");
    let code = compiler
        .compile(
            "extern \"C\" __global__ void k() {}",
            &options(Target::HOPPER),
        )
        .unwrap();
    assert_eq!(code[..4], *b"\x7fELF");
}

/// Updates of every rule, with states in 8 bits, second copies, pieces and groups.
fn updates(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    for rule in [UpdateRule::AdamW, UpdateRule::Lion, UpdateRule::Sgd] {
        for states in [DType::F32, DType::Bf16, DType::U8] {
            for (copy, pieces) in [
                (None, 1),
                (Some(DType::Bf16), 1),
                (None, 4),
                (Some(DType::Bf16), 4),
            ] {
                for (grouped, maxima) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let kind = Ranges::Update(RangeUpdate {
                        rule,
                        weight: DType::F32,
                        grad: DType::Bf16,
                        states,
                        copy,
                        pieces,
                        grouped,
                        maxima,
                    });
                    for capacity in kind.capacities() {
                        let who = || format!("{kind:?}");
                        all.entry(kind.source(capacity)).or_insert_with(who);
                    }
                }
            }
        }
    }
    assert!(all.len() > 80, "{}", all.len());
    compile(all, Target::HOPPER, nvrtc);
}

#[test]
fn every_update_is_generated() {
    updates(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn every_update_compiles() {
    updates(Some(&compiler()));
}

#[test]
fn lists_of_ranges_fit_a_launch_s_arguments() {
    let widest = RangeUpdate {
        rule: UpdateRule::AdamW,
        weight: DType::F32,
        grad: DType::F32,
        states: DType::F32,
        copy: Some(DType::Bf16),
        pieces: 8,
        grouped: true,
        maxima: true,
    };
    let narrower = RangeUpdate {
        grouped: false,
        maxima: false,
        ..widest
    };
    assert_eq!(Ranges::Update(narrower).capacities(), [24, 540]);
    for kind in [widest, narrower].map(Ranges::Update) {
        for capacity in kind.capacities() {
            let bytes = capacity * (kind.width() + 1) * 8 + (capacity + 2) * 4;
            // 32,764 bytes since CUDA 12.1; 64 for everything else.
            assert!(bytes + 64 <= 32_764, "{bytes}");
            assert_eq!(capacity % 2, 0);
        }
    }
}

#[test]
fn a_loss_reads_its_labels_entries_before_anything_is_written_in_place() {
    // In float32 nothing is cast, so log-probabilities overwrite the logits.
    let sets = ["precision.compute=\"f32\"".to_owned()];
    let s = scenario::load(Path::new("small-full"), &sets).unwrap();
    let mut all = BTreeMap::new();
    sources("small-full", &plan(&s).unwrap(), Target::HOPPER, &mut all);
    let mut found = 0;
    for source in all.keys() {
        let body = source.split("KERNEL(").find(|k| k.contains("part0[r]"));
        let Some(body) = body.filter(|b| b.contains("store<float")) else {
            continue;
        };
        let at = |what: &str| body.find(what).unwrap();
        assert!(at("part0[r]") < at("__syncwarp()") && at("__syncwarp()") < at("store<float"));
        found += 1;
    }
    assert_eq!(found, 1);
}

/// Returns the module of a scenario's chunked cross entropy over this many classes.
fn entropy(vocab: u64) -> Module {
    let sets = [
        "train.loss=chunked".to_owned(),
        "model.layers=1".to_owned(),
        format!("model.vocab={vocab}"),
    ];
    let program = plan(&scenario::load(Path::new("peers-1b"), &sets).unwrap()).unwrap();
    let found = variant::of_program(&program).into_keys().find_map(|v| {
        let body = &program.kernels[v.kernel.index()].body;
        let wanted = matches!(body[0].op, OpKind::CrossEntropy { .. });
        wanted.then(|| generate(&v.request(body, Target::HOPPER)).unwrap())
    });
    found.unwrap()
}

#[test]
fn a_row_of_logits_is_kept_by_as_few_blocks_as_hold_it() {
    rows_of_logits(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn rows_of_logits_compile() {
    rows_of_logits(Some(&compiler()));
}

fn rows_of_logits(nvrtc: Option<&Compiler>) {
    let compiles = |module: &Module| {
        if let Some(c) = nvrtc {
            c.compile(&module.source, &options(Target::HOPPER)).unwrap();
        }
    };
    // Logits of 2 bytes: in parts of up to 72 KiB if eight parts of that suffice, or else of up to
    // 224 KiB.
    for (vocab, blocks, bytes) in [
        (4_096, 1, 8_192),
        (32_768, 1, 65_536),
        (40_960, 2, 40_960),
        (128_256, 4, 64_128),
        (900_000, 8, 225_008),
    ] {
        let module = entropy(vocab);
        compiles(&module);
        let dims = format!("__cluster_dims__({blocks}, 1, 1)");
        assert!(module.source.contains(&dims), "{vocab}");
        let [only] = &module.entries[..] else {
            panic!("{vocab}: {:?}", module.entries)
        };
        assert_eq!(only.shared, bytes, "{vocab}");
        // A share of the loss for each row, 8 bytes.
        assert_eq!(u64::from(only.grid[0]), module.scratch / 8 * blocks);
    }
    // Too short for a block, of an odd length, or too long for eight blocks: read twice.
    for vocab in [3_064, 50_257, 1_000_000] {
        let module = entropy(vocab);
        compiles(&module);
        assert!(!module.source.contains("__cluster_dims__"), "{vocab}");
        assert_eq!(module.entries.len(), 2);
        assert!(module.entries.iter().all(|e| e.shared == 0));
    }
}

/// Operand of all slots.
const OPERAND: Arg = Arg {
    dtype: DType::Bf16,
    align: 16,
};

/// Returns a slot of this shape and these strides, none if it is dense.
pub(super) fn slot(place: Place, shape: &[u64], strides: &[u64]) -> Slot {
    Slot {
        place,
        offset: 0,
        shape: Shape::from_slice(shape),
        strides: strides.iter().copied().collect(),
        dtype: DType::Bf16,
    }
}

#[test]
fn indices_are_as_wide_as_operands_are_large() {
    indices(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn wide_indices_compile() {
    indices(Some(&compiler()));
}

/// The largest offset of any operand counts, not the number of results.
fn indices(nvrtc: Option<&Compiler>) {
    let wide = |op, inputs: &[Slot], output: Slot| {
        let body = [BodyOp {
            op,
            inputs: inputs.iter().cloned().collect(),
            outputs: [output].into_iter().collect(),
        }];
        let req = Request {
            target: Target::HOPPER,
            body: &body,
            used_rows: None,
            reads: &vec![OPERAND; inputs.len()],
            writes: &[OPERAND],
            same: &vec![None; inputs.len()],
        };
        let module = generate(&req).unwrap();
        if let Some(c) = nvrtc {
            c.compile(&module.source, &options(Target::HOPPER)).unwrap();
        }
        let own = module.source.strip_prefix(super::PREAMBLE).unwrap();
        let has = |ty: &str| match own.contains(" IDX;") {
            true => own.contains(&format!("typedef {ty} IDX;")),
            false => own.contains(&format!("const {ty} i = ")),
        };
        assert!(has("u64") != has("u32"), "{own}");
        has("u64")
    };
    let (read, write) = (Place::Read, Place::Write(0));
    // Columns of a merged GEMM: few elements, far apart.
    for (tokens, expected) in [(200_000, false), (500_000, true)] {
        let merged = slot(read(0), &[tokens, 2048], &[10_240, 1]);
        let dense = |place| slot(place, &[tokens, 2048], &[]);
        for (op, inputs, output) in [
            (OpKind::Silu, vec![merged.clone()], dense(write)),
            (OpKind::Copy, vec![merged.clone()], dense(write)),
            (OpKind::LogSoftmax, vec![merged.clone()], dense(write)),
            (OpKind::SumLeading, vec![merged], slot(write, &[2048], &[])),
        ] {
            assert_eq!(wide(op, &inputs, output), expected, "{op:?} {tokens}");
        }
    }
    for (images, expected) in [(1_000, false), (20_000, true)] {
        let image = |place, channels| slot(place, &[images, channels, 48, 48], &[]);
        let weight = |place| slot(place, &[64, 32, 3, 3], &[]);
        for (op, inputs, output) in [
            (
                OpKind::SumChannels,
                vec![image(read(0), 64)],
                slot(write, &[64], &[]),
            ),
            (
                OpKind::Conv(op::Conv { kernel: 3 }),
                vec![image(read(0), 32), weight(read(1))],
                image(write, 64),
            ),
            (
                OpKind::ConvGradInput(op::ConvGradInput { kernel: 3 }),
                vec![image(read(0), 64), weight(read(1))],
                image(write, 32),
            ),
            (
                OpKind::ConvGradWeight(op::ConvGradWeight { kernel: 3 }),
                vec![image(read(0), 64), image(read(1), 32)],
                weight(write),
            ),
        ] {
            assert_eq!(wide(op, &inputs, output), expected, "{op:?} {images}");
        }
    }
}

/// Returns a sum and a copy of it in rows or in columns, over the sum's first operand.
fn added_and_copied(columns: bool, nvrtc: Option<&Compiler>) -> Module {
    let shape = [24, 40];
    let strides: &[u64] = if columns { &[1, 40] } else { &[] };
    let turned = if columns { [40, 24] } else { shape };
    let op = |op, inputs: &[Slot], output| BodyOp {
        op,
        inputs: inputs.iter().cloned().collect(),
        outputs: [output].into_iter().collect(),
    };
    let reads = [0, 1].map(|n| slot(Place::Read(n), &shape, &[]));
    let sum = slot(Place::Register(0), &shape, &[]);
    let again = slot(Place::Register(0), &turned, strides);
    let body = [
        op(OpKind::Add, &reads, sum),
        op(OpKind::Copy, &[again], slot(Place::Write(0), &turned, &[])),
    ];
    let req = Request {
        target: Target::HOPPER,
        body: &body,
        used_rows: None,
        reads: &[OPERAND; 2],
        writes: &[OPERAND],
        same: &[Some(0), None],
    };
    let module = generate(&req).unwrap();
    if let Some(c) = nvrtc {
        c.compile(&module.source, &options(Target::HOPPER)).unwrap();
    }
    module
}

#[test]
fn reads_that_a_kernel_would_spoil_are_copied_first() {
    spoiled_reads(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn copies_of_spoiled_reads_compile() {
    spoiled_reads(Some(&compiler()));
}

fn spoiled_reads(nvrtc: Option<&Compiler>) {
    let module = added_and_copied(true, nvrtc);
    let [keep, own] = &module.entries[..] else {
        panic!("{} entries", module.entries.len());
    };
    // 1,920 bytes, 16 per thread: 120 threads.
    assert_eq!(
        (keep.name.as_str(), keep.grid, keep.block),
        ("keep0", [1, 1, 1], 256)
    );
    assert_eq!(keep.params, [Param::Read(0), Param::Scratch(0)]);
    assert_eq!(own.params[0], Param::Scratch(0));
    assert_eq!(module.scratch, 1920);
    let module = added_and_copied(false, nvrtc);
    assert_eq!((module.entries.len(), module.scratch), (1, 0));
}

/// A result that the plan writes over an operand needs no copy. Gradients of norms of heads
/// overwrite the norm's input, in its order, while the rotation back before them reorders the
/// result of attention; a result in another order gets memory of its own.
#[test]
fn no_kernel_of_a_shipped_scenario_copies_what_it_reads() {
    let mut in_place = 0;
    for (name, _) in scenario::shipped() {
        for mode in ["off", "regions", "blocks", "full"] {
            let set = [format!("compile.mode=\"{mode}\"")];
            let Ok(s) = scenario::load(Path::new(name), &set) else {
                continue;
            };
            let Ok(program) = plan(&s) else { continue };
            for v in variant::of_program(&program).keys() {
                let kernel = &program.kernels[v.kernel.index()];
                if is_gemm(&kernel.body[0].op) && kernel.body.len() == 1
                    || matches!(kernel.body[0].op, OpKind::Shard(_))
                    || !is_written(&kernel.body)
                {
                    continue;
                }
                let req = v.request(&kernel.body, Target::HOPPER);
                in_place += usize::from(req.same.iter().any(Option::is_some));
                let module = generate(&req).unwrap();
                let copies = module.entries.iter().any(|e| e.name.starts_with("keep"));
                assert!(!copies, "{name} {set:?}: {}", kernel.name);
            }
        }
    }
    assert!(in_place > 100, "{in_place}");
}

#[test]
fn forced_choices_are_generated() {
    forced_choices(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn forced_choices_compile() {
    forced_choices(Some(&compiler()));
}

/// Routers of softmax and sigmoids, without and with groups and a bias, up to the most experts that
/// fit into shared memory.
fn forced_choices(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    let sizes = [(8, 2), (60, 4), (128, 8), (1024, 16)];
    for (experts, k) in sizes {
        for more in [
            &["moe.routing=balanced"][..],
            &["moe.routing=round_robin"],
            &["moe.routing=seeded", "model.normalize_top_k=false"],
            &["model.router=sigmoid", "model.router_groups=4"],
            &["model.router_bias=true", "precision.compute=f32"],
        ] {
            let mut set = vec![
                "moe.force_routing=true".to_owned(),
                format!("model.experts={experts}"),
                format!("model.top_k={k}"),
            ];
            set.extend(more.iter().map(|s| (*s).to_owned()));
            let s = scenario::load(Path::new("small-moe"), &set).unwrap();
            let program = plan(&s).unwrap();
            sources(&format!("{set:?}"), &program, Target::HOPPER, &mut all);
        }
    }
    let chosen = ["place_columns", "chosen[n] = (r %"];
    all.retain(|source, _| chosen.iter().any(|c| source.contains(c)));
    // Two layers whose experts are not equally popular have a kernel each.
    assert_eq!(all.len(), 6 * sizes.len());
    compile(all, Target::HOPPER, nvrtc);
}

#[test]
fn kernels_of_experts_stop_at_used_rows() {
    used_rows(None);
}

#[test]
#[ignore = "needs NVRTC"]
fn kernels_that_stop_at_used_rows_compile() {
    used_rows(Some(&compiler()));
}

/// Kernels between the matmuls of divided experts: over elements, over rows, and with transposed
/// results.
fn used_rows(nvrtc: Option<&Compiler>) {
    let mut all = BTreeMap::new();
    let in_8_bits = [
        "precision.float8_recipe=tensorwise",
        "precision.float8_experts=true",
        "precision.float8_saved=float8",
    ];
    for more in [&[][..], &in_8_bits] {
        for mode in ["blocks", "full"] {
            let sizes = [
                "model.hidden=64",
                "model.ffn=192",
                "model.expert_ffn=96",
                "model.shared_expert_ffn=48",
            ];
            let mut set: Vec<String> = [&sizes[..], more, &["train.seq_len=24"]]
                .concat()
                .into_iter()
                .map(str::to_owned)
                .collect();
            set.push(format!("compile.mode={mode}"));
            let Ok(s) = scenario::load(Path::new("small-moe-ep"), &set) else {
                assert_eq!(mode, "full");
                continue;
            };
            let program = plan(&s).unwrap();
            sources(&format!("{set:?}"), &program, Target::HOPPER, &mut all);
        }
    }
    let stops = |test: &str| all.keys().filter(|s| s.contains(test)).count();
    for test in [
        "if (i >= min((u32)",
        "if (r >= min((u32)",
        "const IDX used = min((u32)",
    ] {
        assert!(stops(test) > 0, "{test}");
    }
    compile(all, Target::HOPPER, nvrtc);
}
