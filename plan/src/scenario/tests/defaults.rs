//! Defaults and derived values.

use super::super::*;
use super::minimal;
use crate::config::*;
use crate::ir::DType;
use crate::units::Bytes;

#[test]
fn defaults_of_the_native_policy() {
    let s = minimal(&[]).unwrap();
    assert_eq!(s.name, "minimal");
    let t = &s.train;
    assert_eq!(
        (
            t.seq_len,
            t.micro_batch,
            t.grad_accum,
            t.steps,
            t.validate_every
        ),
        (8192, 1, 1, 20, 0)
    );
    assert_eq!(
        (t.recompute, t.loss, t.optimizer),
        (Recompute::None, Loss::Materialized, Optimizer::Adamw)
    );
    assert_eq!(t.recompute_layers, RecomputeLayers::All);
    assert_eq!(
        (t.lr, t.betas, t.eps, t.weight_decay, t.clip_norm),
        (3e-4, [0.9, 0.95], 1e-8, 0.1, 0.0)
    );
    assert_eq!(
        (t.warmup_steps, t.lr_schedule, t.min_lr, t.grad_norm),
        (0, LrSchedule::Constant, 0.0, false)
    );
    assert_eq!(
        s.mesh,
        Mesh {
            hardware: "h200-nvlink".into(),
            dp_shard: 4,
            dp_outer: 1,
            tp: 1,
            ep: 1,
            gpus_per_node: 4
        }
    );
    assert_eq!(
        s.fsdp,
        Fsdp {
            policy: PolicyKind::Native,
            variant: Variant::Released,
            strategy: Strategy::OptimGradsParams,
            outer_strategy: OuterStrategy::NoShard,
            units: Units::Block,
            reshard_after_forward: Reshard::Always,
            reshard_root: false,
            reshard_after_backward: true,
            keep_unsharded_storage: false,
            gradient_sync: GradientSync::OuterLast,
            atomic: Atomic::Row,
            ignored_params: IgnoredParams::NONE,
            no_sync_units: vec![],
            reduce_unused: false,
            prefetch_forward: Prefetch::Depth(1),
            prefetch_backward: Prefetch::Depth(1),
            prefetch_lists: vec![],
            prefetch_next_step: 0,
            optimizer_in_backward: false,
            reduce_in_flight: 2,
            async_reduce: true,
            separate_communicators: true,
            copy_engine_gather: false,
            copy_engine_reduce: false,
            sum_in_optimizer: false,
            cast_before_all_gather: false,
            copy_in_stream: false,
            unify_comm_stream: false,
            allocator: AllocatorKind::Pool,
            expandable_segments: true,
            cublas_workspace_bytes: 0,
            persist_on_alloc_fail: false,
            average_in_collective: false,
            per_token_loss: false,
            gradient_scaling_factor: None,
            decoupled_gradients: false,
            keep_fp8_transpose_cache: false,
            nan_check: false,
            offload: Default::default(),
            frozen: vec![],
        }
    );
    assert_eq!(
        s.compile,
        Compile {
            mode: CompileMode::Off,
            loss: false,
            exclude: Vec::new(),
            bucket_bytes: 104_857_600,
            max_inflight_bytes: 5_000_000_000,
            memory_budget: 0.05,
            merge_projections: MergeProjections::None,
            epilogues: false,
            mix_order_reductions: false,
            fused_products: false,
            cuda_graph: CudaGraph::Off,
        }
    );
    assert_eq!(s.gate, Gate::default());
}

#[test]
fn defaults_that_a_policy_changes() {
    let of = |policy: &str| minimal(&[&format!("fsdp.policy={policy}")]).unwrap();
    for policy in ["fsdp2", "megatron", "megatron_v2"] {
        let f = of(policy).fsdp;
        assert_eq!(
            (f.prefetch_forward, f.prefetch_backward),
            (Prefetch::Implicit, Prefetch::Implicit)
        );
        assert_eq!(
            (f.allocator, f.separate_communicators),
            (AllocatorKind::Caching, false)
        );
    }
    assert_eq!(
        (
            of("fsdp2").fsdp.reduce_in_flight,
            of("megatron").fsdp.reduce_in_flight
        ),
        (1, 2)
    );
    assert_eq!(of("fsdp2").fsdp.gradient_sync, GradientSync::Every);
    assert_eq!(of("megatron").fsdp.gradient_sync, GradientSync::OuterLast);
    let zero2 = minimal(&["fsdp.policy=fsdp2", "fsdp.strategy=optim_grads"]).unwrap();
    assert_eq!(zero2.fsdp.reshard_after_forward, Reshard::Never);
}

#[test]
fn merged_projections_by_mode_and_policy() {
    use crate::config::MergeProjections as M;
    let of = |set: &[&str]| minimal(set).unwrap().compile.merge_projections;
    assert_eq!(of(&["compile.mode=regions"]), M::Qkv);
    assert_eq!(of(&["compile.mode=blocks"]), M::Qkv);
    assert_eq!(of(&["compile.mode=full"]), M::None);
    // What else the compiler does by default goes by the same rule.
    let epilogues = |set: &[&str]| {
        let c = minimal(set).unwrap().compile;
        assert!(set.len() > 1 || c.epilogues == c.mix_order_reductions);
        c.epilogues
    };
    let mixed = |set: &[&str]| minimal(set).unwrap().compile.mix_order_reductions;
    assert!(mixed(&["compile.mode=full"]));
    assert!(!mixed(&["compile.mode=full", "fsdp.policy=fsdp2"]));
    assert!(!mixed(&[
        "compile.mode=full",
        "compile.mix_order_reductions=false"
    ]));
    assert!(
        ["regions", "blocks", "full"]
            .iter()
            .all(|m| epilogues(&[&format!("compile.mode={m}")]))
    );
    assert!(!epilogues(&[]) && !epilogues(&["compile.mode=blocks", "fsdp.policy=fsdp2"]));
    assert!(!epilogues(&[
        "compile.mode=blocks",
        "compile.gemm_accumulate=false"
    ]));
    let none = "compile.fuse_projections=none";
    assert_eq!(of(&["compile.mode=blocks", none]), M::None);
    assert_eq!(of(&[none]), M::None);
    let megatron = ["compile.mode=blocks", "fsdp.policy=megatron"];
    assert_eq!(of(&megatron), M::None);
    for (name, merge) in [
        ("gradients", M::Gradients),
        ("qkv", M::Qkv),
        ("all", M::All),
    ] {
        let asked = format!("compile.fuse_projections={name}");
        assert_eq!(of(&[&megatron[..], &[&asked]].concat()), merge);
    }
}

#[test]
fn precision_by_policy_and_compute() {
    use DType::{Bf16, F16, F32};
    let of = |set: &[&str]| {
        let p = minimal(set).unwrap().precision;
        (
            p.compute,
            p.main_params,
            p.main_grads,
            p.comm_grads,
            p.moments.dtype(),
        )
    };
    assert_eq!(of(&[]), (Bf16, Some(F32), F32, F32, F32));
    assert_eq!(of(&["fsdp.policy=fsdp2"]), (Bf16, Some(F32), F32, F32, F32));
    assert_eq!(
        of(&["fsdp.policy=megatron"]),
        (Bf16, Some(F32), Bf16, Bf16, F32)
    );
    assert_eq!(
        of(&["fsdp.policy=megatron", "precision.param_dtype=float32"]),
        (F32, Some(F32), F32, F32, F32)
    );
    assert_eq!(
        of(&["precision.main_grads=bfloat16"]),
        (Bf16, Some(F32), Bf16, Bf16, F32)
    );
    assert_eq!(
        of(&["fsdp.policy=fsdp2", "precision.main_grads=bf16"]),
        (Bf16, Some(F32), Bf16, F32, F32)
    );
    assert_eq!(
        of(&["precision.main_params=none", "precision.param_dtype=f16"]),
        (F16, None, F32, F32, F32)
    );
}

fn family(name: &str, keys: &str) -> Scenario {
    let text =
        format!("[model]\nfamily = \"{name}\"\n{keys}\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n");
    parse("t", &text, &[]).unwrap()
}

#[test]
fn shapes_derived_by_family() {
    let s = family(
        "llama",
        "layers = 2\nhidden = 4096\nheads = 32\nvocab = 1000",
    );
    let m = &s.model;
    // 8/3 * 4096 = 10922.7, rounded up to 256: 11008, the width of Llama 2 7B.
    assert_eq!(
        (
            m.kv_heads,
            m.head_dim,
            m.ffn,
            m.max_seq_len,
            s.train.seq_len
        ),
        (32, 128, 11008, 8192, 8192)
    );
    assert_eq!(
        (m.tie_embeddings, m.bias, m.rope_theta, m.preset.as_deref()),
        (false, Bias::None, 10_000.0, None)
    );

    let s = family("gpt2", "layers = 2\nhidden = 64\nheads = 4\nvocab = 1000");
    let m = &s.model;
    assert_eq!(
        (
            m.ffn,
            m.max_seq_len,
            s.train.seq_len,
            m.tie_embeddings,
            m.bias
        ),
        (256, 1024, 1024, true, Bias::All)
    );

    let s = family("encoder", "layers = 2\nhidden = 64\nheads = 4");
    assert_eq!(
        (s.model.ffn, s.train.seq_len, s.model.vocab, s.model.bias),
        (256, 512, 0, Bias::All)
    );

    let s = family("linear", "layers = 2\nhidden = 64");
    assert_eq!(
        (s.train.seq_len, s.model.ffn, s.model.bias),
        (1, 0, Bias::All)
    );

    let s = family("cnn", "layers = 2\nchannels = 16\nheight = 32");
    let m = &s.model;
    assert_eq!(
        (m.height, m.width, m.kernel, m.bias, s.train.seq_len),
        (32, 64, 3, Bias::All, 1)
    );
    assert_eq!(s.mesh.gpus_per_node, 2);
}

#[test]
fn presets_give_published_shapes() {
    let of = |p: &str| minimal(&[&format!("model.preset={p}")]).unwrap();
    let shape = |s: &Scenario| {
        (
            s.model.layers,
            s.model.hidden,
            s.model.heads,
            s.model.kv_heads,
            s.model.head_dim,
            s.model.ffn,
            s.model.vocab,
        )
    };
    assert_eq!(
        shape(&of("llama3-8b")),
        (32, 4096, 32, 8, 128, 14336, 128_256)
    );
    assert_eq!(
        shape(&of("llama3-70b")),
        (80, 8192, 64, 8, 128, 28672, 128_256)
    );
    assert_eq!(
        shape(&of("llama3-405b")),
        (126, 16384, 128, 8, 128, 53248, 128_256)
    );
    assert_eq!(
        shape(&of("llama3.2-1b")),
        (16, 2048, 32, 8, 64, 8192, 128_256)
    );
    assert_eq!(
        shape(&of("llama3.2-3b")),
        (28, 3072, 24, 8, 128, 8192, 128_256)
    );
    assert_eq!(
        shape(&of("llama2-7b")),
        (32, 4096, 32, 32, 128, 11008, 32_000)
    );
    assert_eq!(shape(&of("gpt2")), (12, 768, 12, 12, 64, 3072, 50_257));
    let seq = |p: &str| (of(p).train.micro_batch, of(p).train.seq_len);
    assert_eq!(
        (seq("llama3.2-1b"), seq("llama2-7b"), seq("gpt2")),
        ((1, 8192), (1, 4096), (1, 1024))
    );
    assert_eq!(
        (seq("toy-linear"), seq("toy-cnn"), seq("toy-transformer")),
        ((1024, 1), (16, 1), (8, 512))
    );
    assert!(of("llama3.2-1b").model.tie_embeddings && !of("llama3-8b").model.tie_embeddings);
    assert_eq!(of("llama3-8b").model.preset.as_deref(), Some("llama3-8b"));
}

/// Parameters of the published checkpoints, which tell every size and which layers have a bias.
#[test]
fn qwen_presets_have_the_published_number_of_parameters() {
    for (name, published) in [
        ("0.5b", 494_032_768),
        ("1.5b", 1_543_714_304),
        ("3b", 3_085_938_688),
        ("7b", 7_615_616_512),
        ("14b", 14_770_033_664),
        ("32b", 32_763_876_352),
        ("72b", 72_706_203_648),
    ] {
        let s = minimal(&[&format!("model.preset=qwen2.5-{name}")]).unwrap();
        let (_, params) = crate::models::testing::modules_and_params(&s);
        let count: u64 = params.iter().map(|p| p.numel()).sum();
        assert_eq!(count, published, "{name}");
        let biased = params.iter().filter(|p| p.name.ends_with(".bias"));
        assert_eq!(biased.count(), 3 * s.model.layers as usize, "{name}");
    }
}

/// Parameters as the model cards round them, with and without those of the embedding and the head.
#[test]
fn qwen3_presets_have_the_published_number_of_parameters() {
    for (name, total, without) in [
        ("0.6b", 0.6, 0.44),
        ("1.7b", 1.7, 1.4),
        ("4b", 4.0, 3.6),
        ("8b", 8.2, 6.95),
        ("14b", 14.8, 13.2),
        ("32b", 32.8, 31.2),
    ] {
        let s = minimal(&[&format!("model.preset=qwen3-{name}")]).unwrap();
        let (_, params) = crate::models::testing::modules_and_params(&s);
        let count = |table: bool| {
            let all = params
                .iter()
                .filter(|p| table || !p.shape.contains(&151_936));
            all.map(|p| p.numel()).sum::<u64>() as f64 / 1e9
        };
        assert!(
            (count(true) - total).abs() <= 0.05,
            "{name}: {}",
            count(true)
        );
        assert!(
            (count(false) - without).abs() <= 0.05,
            "{name}: {}",
            count(false)
        );
        let norms = params.iter().filter(|p| p.shape.as_slice() == [128]);
        assert_eq!(norms.count(), 2 * s.model.layers as usize, "{name}");
    }
}

/// Another width keeps a preset's proportion, and what is said of the feed-forward layer is kept
/// whatever the width.
#[test]
fn the_feed_forward_layer_of_a_preset_follows_its_width() {
    let ffn = |sets: &[&str]| minimal(sets).unwrap().model.ffn;
    let gpt2 = "model.preset=gpt2";
    assert_eq!(ffn(&[gpt2, "model.hidden=1536", "model.heads=24"]), 6144);
    assert_eq!(ffn(&[gpt2, "model.hidden=768"]), 3072);
    assert_eq!(
        ffn(&[
            gpt2,
            "model.hidden=1536",
            "model.heads=24",
            "model.ffn=3072"
        ]),
        3072
    );
    // Llama 2 13B: up to a multiple of 256, as its authors do.
    let wide = ["model.preset=llama2-7b", "model.hidden=5120"];
    assert_eq!(
        ffn(&[&wide[..], &["model.heads=40", "model.kv_heads=40"]].concat()),
        13_824
    );
}

/// The key table's literal defaults (schema, completion) are what parsing yields.
#[test]
fn the_table_tells_the_true_defaults() {
    let s = serde_json::to_value(minimal(&["lora.r=8"]).unwrap()).unwrap();
    let mut compared = 0;
    for info in keys() {
        let Ok(default) = serde_json::from_str::<serde_json::Value>(info.default) else {
            continue;
        };
        let got = match &s[info.section][info.field] {
            // The one value whose written form is a flag and whose name is a word.
            v if v == "always" => &serde_json::Value::Bool(true),
            // A list in the file, a flag each in the scenario.
            serde_json::Value::Object(flags) if info.key == "offload" => {
                assert!(flags.values().all(|v| v == false));
                &default
            }
            // Left out if there are none.
            serde_json::Value::Null
                if [
                    "prefetch_lists",
                    "no_sync_units",
                    "ignored_params",
                    "atomic",
                    "keep_unsharded_storage",
                    "variant",
                    "joint_backward",
                    "skipped_blocks",
                    "reduce_unused",
                    "keep_fp8_transpose_cache",
                    "float8_experts",
                    "force_routing",
                    "exclude",
                    "modules_to_save",
                    "exclude_modules",
                    "layers_to_transform",
                    "layers_pattern",
                    "rank_pattern",
                    "alpha_pattern",
                ]
                .contains(&info.key) =>
            {
                &default
            }
            v => v,
        };
        match (default.as_f64(), got.as_f64()) {
            (Some(a), Some(b)) => assert_eq!(a, b, "{}.{}", info.section, info.key),
            _ => assert_eq!(&default, got, "{}.{}", info.section, info.key),
        }
        compared += 1;
    }
    assert!(compared >= 25, "only {compared} literal defaults");
}

#[test]
fn forms_of_values() {
    let f = |set: &[&str]| minimal(set).unwrap().fsdp;
    assert_eq!(
        f(&["fsdp.prefetch_forward=0"]).prefetch_forward,
        Prefetch::Depth(0)
    );
    assert_eq!(
        f(&["fsdp.prefetch_backward={ elements = 1_000 }"]).prefetch_backward,
        Prefetch::Elements(1000)
    );
    assert_eq!(
        f(&["fsdp.prefetch_backward.elements=7"]).prefetch_backward,
        Prefetch::Elements(7)
    );
    assert_eq!(
        f(&["fsdp.prefetch_forward=implicit"]).prefetch_forward,
        Prefetch::Implicit
    );
    assert_eq!(
        f(&["fsdp.reshard_after_forward=true"]).reshard_after_forward,
        Reshard::Always
    );
    assert_eq!(
        f(&["fsdp.reshard_after_forward=false"]).reshard_after_forward,
        Reshard::Never
    );
    assert_eq!(
        f(&["fsdp.reshard_after_forward=2"]).reshard_after_forward,
        Reshard::Group(2)
    );
    assert_eq!(f(&["fsdp.units=root"]).units, Units::Root);
    let layers = |set: &str| {
        let set = ["train.recompute=full", set];
        minimal(&set).unwrap().train.recompute_layers
    };
    assert_eq!(layers("train.recompute_layers=all"), RecomputeLayers::All);
    assert_eq!(
        layers("train.recompute_layers=3"),
        RecomputeLayers::First(3)
    );
    assert_eq!(
        layers("train.recompute_layers=[\"layers.1*\", \"layers.0\"]"),
        RecomputeLayers::Patterns(vec!["layers.1*".into(), "layers.0".into()])
    );
    let bias = |set: &str| minimal(&[set]).unwrap().model.bias;
    assert_eq!(bias("model.bias=qkv"), Bias::Qkv);
    assert_eq!(bias("model.bias=true"), Bias::All);
    assert_eq!(bias("model.bias=false"), Bias::None);
    assert_eq!(f(&["fsdp.frozen=[]"]).frozen, Vec::<String>::new());
    assert_eq!(f(&["fsdp.frozen=[\"layers.*\"]"]).frozen, ["layers.*"]);
    let cublas = |sets: &[&str]| minimal(sets).unwrap().fsdp.cublas_workspace_bytes;
    let said = "fsdp.cublas_workspace_bytes=8MiB";
    for (sets, bytes) in [
        (&["fsdp.policy=fsdp2"][..], 33_554_432),
        (
            &["fsdp.policy=megatron", "mesh.hardware=a100-40"],
            8_519_680,
        ),
        (
            &["fsdp.policy=fsdp2", "mesh.hardware=a100-40.toml"],
            33_554_432,
        ),
        (&["fsdp.policy=fsdp2", "mesh.hardware=cpu"], 0),
        (&["fsdp.policy=fsdp2", said], 8 << 20),
        // A later policy that has none leaves it idle.
        (&["fsdp.policy=fsdp2", said, "fsdp.policy=native"], 0),
    ] {
        assert_eq!(cublas(sets), bytes, "{sets:?}");
    }
    let bucket = |set| minimal(&["compile.mode=full", set]).unwrap().compile;
    assert_eq!(
        bucket("compile.bucket_bytes=25MiB").bucket_bytes,
        26_214_400
    );
    assert_eq!(bucket("compile.bucket_bytes=0").bucket_bytes, 0);
    let c = |set: &str| minimal(&[set]).unwrap().compile;
    assert_eq!(
        c("compile.cuda_graph=[\"mlp\", \"attn\"]").cuda_graph,
        CudaGraph::Scopes(vec![Scope::Mlp, Scope::Attn])
    );
    assert_eq!(
        c("compile.cuda_graph=full_iteration").cuda_graph,
        CudaGraph::FullIteration
    );
    let g = minimal(&["gate.step_time=0.2"]).unwrap().gate;
    assert_eq!((g.step_time, g.loss, g.seeds), (0.2, 1e-3, 1));
    assert_eq!((g.max_memory, g.max_step_ms), (None, None));
    let g = minimal(&["gate.max_memory=60GiB", "gate.max_step_ms=900"])
        .unwrap()
        .gate;
    assert_eq!(
        (g.max_memory, g.max_step_ms),
        (Some(Bytes(60 << 30)), Some(900.0))
    );
    assert_eq!(
        minimal(&["mesh.hardware=my/profile.toml"])
            .unwrap()
            .mesh
            .hardware,
        "my/profile.toml"
    );
}

#[test]
fn placements_name_strategies() {
    let of = |inner: [&str; 3]| {
        let set = format!("fsdp.placements.dp_shard={inner:?}");
        minimal(&[&set]).unwrap().fsdp.strategy
    };
    let (r, f) = ("replicate", "flat");
    assert_eq!(of([r, r, r]), Strategy::NoShard);
    assert_eq!(of([r, r, f]), Strategy::Optim);
    assert_eq!(of([r, f, f]), Strategy::OptimGrads);
    assert_eq!(of([f, f, f]), Strategy::OptimGradsParams);
    let outer = minimal(&[
        "mesh.dp_replicate=2",
        "fsdp.placements.dp_replicate=[\"replicate\", \"replicate\", \"flat\"]",
    ]);
    assert_eq!(outer.unwrap().fsdp.outer_strategy, OuterStrategy::Optim);

    let text = format!(
        "{}[fsdp]\nstrategy = \"optim\"\nplacements = {{ dp_shard = [\"flat\", \"flat\", \"flat\"] }}\n",
        super::MINIMAL
    );
    assert!(
        parse("t", &text, &[])
            .unwrap_err()
            .message()
            .contains("same thing")
    );
    // Said in different layers, the later counts.
    let later = minimal(&[
        "fsdp.strategy=optim",
        "fsdp.placements.dp_shard=[\"flat\", \"flat\", \"flat\"]",
    ]);
    assert_eq!(later.unwrap().fsdp.strategy, Strategy::OptimGradsParams);
    let later = minimal(&[
        "fsdp.placements.dp_shard=[\"flat\", \"flat\", \"flat\"]",
        "fsdp.strategy=optim",
    ]);
    assert_eq!(later.unwrap().fsdp.strategy, Strategy::Optim);
}

#[test]
fn learning_rate_schedule_and_gradient_norm() {
    let s = minimal(&[
        "train.warmup_steps=5",
        "train.lr_schedule=cosine",
        "train.min_lr=1e-5",
        "train.grad_norm=true",
    ])
    .unwrap();
    let t = &s.train;
    assert_eq!(
        (t.warmup_steps, t.lr_schedule, t.min_lr, t.grad_norm),
        (5, LrSchedule::Cosine, 1e-5, true)
    );
}

/// Chunks of about equal numbers of tokens, in multiples of 256, whose logits take up to 512 MiB:
/// 8,192 tokens of a vocabulary of 128,256 have 2,004 MiB of logits in bfloat16.
#[test]
fn loss_chunks_are_chosen_by_size() {
    let chunk = |set: &[&str]| {
        let all = [
            "train.micro_batch=2",
            "train.seq_len=4096",
            "model.max_seq_len=4096",
            "train.loss=chunked",
            "train.loss_chunk_tokens=auto",
        ];
        let set: Vec<String> = all.iter().chain(set).map(|s| (*s).to_owned()).collect();
        let text =
            "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";
        let s = parse("test", text, &set).unwrap_or_else(|e| panic!("{e}"));
        s.train.loss_chunk_rows
    };
    assert_eq!(chunk(&[]), 2048);
    // Eight chunks of 501 MiB.
    assert_eq!(chunk(&["precision.param_dtype=f32"]), 1024);
    // Five chunks of 475 MiB, in multiples of 256 tokens.
    assert_eq!(chunk(&["model.vocab=151936"]), 1792);
    // 500 MiB: all tokens at once.
    assert_eq!(chunk(&["model.vocab=32000"]), 8192);
    // 128 chunks of 512 MiB would be too small for matmuls.
    assert_eq!(chunk(&["model.vocab=4194304"]), 1024);
    assert_eq!(chunk(&["train.seq_len=32", "train.micro_batch=1"]), 32);
    assert_eq!(chunk(&["train.loss=checkpointed_chunks"]), 2048);
}
