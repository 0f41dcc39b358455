use crate::config::{Implementation, PolicyKind};
use crate::graph::{Act, Root};
use crate::ir::{ConstId, OpKind};
use crate::models::{declare, flops, graph, parameter_count};
use crate::scenario;

fn scenario_of(model: &str) -> crate::config::Scenario {
    let text = format!(
        "[model]\n{model}\n[train]\nseq_len = 4096\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n"
    );
    scenario::parse("test", &text, &[]).unwrap()
}

/// Returns all parameters and those that one token uses.
fn counts(model: &str) -> [u64; 2] {
    let s = scenario_of(model);
    let tree = declare(&s, s.model.layers).tree;
    let count = parameter_count(&s.model, &tree.params, &s.device_mesh());
    [count.total, count.active]
}

/// Totals are those of the published files, as are the 12.9 B, 3.3 B and 22 B active ones. Those of
/// Qwen1.5, OLMoE, DeepSeek and Llama 4 are counted in the models that transformers builds.
#[test]
fn parameter_counts_are_the_published_ones() {
    let mixtral = counts("preset = \"mixtral-8x7b\"");
    assert_eq!(mixtral, [46_702_792_704, 12_879_925_248]);
    let qwen3 = counts("preset = \"qwen3-30b-a3b\"");
    assert_eq!(qwen3, [30_532_122_624, 3_353_032_704]);
    let qwen3 = counts("preset = \"qwen3-235b-a22b\"");
    assert_eq!(qwen3, [235_093_634_560, 22_190_763_520]);
    // Active ones with embeddings and output layer. Without the embeddings they are the published
    // 3.61 B and 5.13 B.
    let gpt_oss = counts("preset = \"gpt-oss-20b\"");
    assert_eq!(gpt_oss, [20_914_757_184, 4_187_440_704]);
    let gpt_oss = counts("preset = \"gpt-oss-120b\"");
    assert_eq!(gpt_oss, [116_829_156_672, 5_711_982_912]);
    let qwen2 = counts("preset = \"qwen1.5-moe-a2.7b\"");
    assert_eq!(qwen2, [14_315_784_192, 2_689_173_504]);
    let olmoe = counts("preset = \"olmoe-1b-7b\"");
    assert_eq!(olmoe, [6_919_161_856, 1_282_017_280]);
    // Without the layer that predicts a further token.
    let deepseek = counts("preset = \"deepseek-v3\"");
    assert_eq!(deepseek, [671_026_404_352, 37_552_282_624]);
    // Without vision towers.
    let scout = counts("preset = \"llama4-scout\"");
    assert_eq!(scout, [107_769_861_120, 17_172_894_720]);
    let maverick = counts("preset = \"llama4-maverick\"");
    assert_eq!(maverick, [400_711_848_960, 17_184_691_200]);
}

/// Three published rates in TFLOP/s and tokens per second count 22.96 to 23.02 GFLOP per token.
#[test]
fn model_flops_count_the_experts_that_take_a_token() {
    let s = scenario_of("preset = \"qwen3-30b-a3b\"");
    let tree = declare(&s, s.model.layers).tree;
    let (flops, tokens) = flops::model_flops(&s, &tree, &flops::Backward::whole(&tree));
    let per_token = flops.0 as f64 / tokens as f64 / 1e9;
    assert!((per_token - 23.08).abs() < 0.01, "{per_token}");
}

#[test]
fn dense_and_expert_layers_mix() {
    let s = scenario_of(
        "family = \"moe\"\nlayers = 5\nhidden = 32\nheads = 4\nvocab = 64\ndense_layers = 1\nmoe_every = 2",
    );
    let m = graph(&s);
    let has_experts = |layer: usize| {
        let path = format!("layers.{layer}.mlp.experts");
        m.modules().iter().any(|module| module.path == path)
    };
    let layers: Vec<bool> = (0..5).map(has_experts).collect();
    // Every second layer, counted from 1 as transformers does.
    assert_eq!(layers, [false, true, false, true, false]);
}

/// Stacks are divided between rows of their matrices.
#[test]
fn more_ranks_than_experts_share_a_stack() {
    let s = scenario_of("preset = \"mixtral-8x7b\"\nlayers = 2");
    let mut s = s.clone();
    s.mesh.dp_shard = 64;
    let program = crate::plan(&s).unwrap();
    let report = crate::check::check(&program);
    assert!(report.is_ok(), "{report}");
    for group in &program.groups {
        let layout = &group.layout;
        assert!(layout.full_numel() < layout.payload_numel() * 101 / 100);
    }
}

/// Impossible values are named at their place, with what they exclude.
#[test]
fn impossible_routers_are_refused() {
    let shape = "family = \"moe\"\nlayers = 2\nhidden = 32\nheads = 4\nvocab = 64\n";
    let fault = |keys: &str| {
        let text = format!("[model]\n{shape}{keys}\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n");
        scenario::parse("x.toml", &text, &[])
            .unwrap_err()
            .to_string()
    };
    for (keys, expected) in [
        (
            "experts = 4\ntop_k = 5",
            "x.toml:8:9: `top_k` (5) is larger than `experts` (4)",
        ),
        (
            "experts = 6\nrouter_groups = 4",
            "x.toml:8:17: `experts` (6) is not divisible by `router_groups` (4)",
        ),
        (
            "router_groups = 2\nrouter_group_top_k = 3",
            "x.toml:8:22: `router_group_top_k` (3) is larger than `router_groups` (2)",
        ),
        (
            "experts = 8\nrouter_groups = 8\nrouter_group_top_k = 1",
            "`top_k` (2) is larger than the 1 experts of 1 of 8 groups",
        ),
        (
            "shared_expert_gate = true",
            "x.toml:7:22: `shared_expert_gate` needs a shared expert",
        ),
        (
            "dense_layers = 2",
            "x.toml:7:16: none of the 2 layers has experts",
        ),
        (
            "bias = true",
            "x.toml:7:8: experts and routers have no bias",
        ),
        ("experts = 1", "x.toml:7:11: `model.experts` must be"),
    ] {
        let found = fault(keys);
        assert!(found.contains(expected), "{found}");
    }
    // They belong to this family only.
    let text =
        "[model]\npreset = \"llama3-8b\"\nexperts = 8\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n";
    let found = scenario::parse("x.toml", text, &[])
        .unwrap_err()
        .to_string();
    assert!(
        found.contains("`model.experts` does not apply to family llama"),
        "{found}"
    );
}

/// Routers of transformers have a loss only if their logits are part of the output.
#[test]
fn the_file_of_transformers_decides_about_the_loss_of_routers() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
    let coefficient = |golden: &str| {
        let config = folder.join(golden).join("config.json");
        let s = scenario_of(&format!("preset = {config:?}\nmax_seq_len = 4096"));
        s.model.options.experts.aux_loss
    };
    assert_eq!(coefficient("mixtral-tiny"), 0.0);
    assert_eq!(coefficient("mixtral-tiny-aux"), 0.01);
}

/// The losses of all routers are added up after the last block, whose code is therefore not that of
/// the others.
#[test]
fn losses_of_many_equal_layers_are_planned_whole() {
    for kind in ["layer", "sequence", "hf"] {
        let s = scenario_of(&format!(
            "family = \"moe\"\nlayers = 7\nhidden = 32\nheads = 4\nvocab = 64\naux_loss = 0.1\nz_loss = 0.1\n\
             aux_loss_kind = \"{kind}\""
        ));
        for policy in [PolicyKind::Fsdp2, PolicyKind::Megatron] {
            let mut s = s.clone();
            s.fsdp.policy = policy;
            let report = crate::check::check(&crate::plan(&s).unwrap());
            assert!(report.is_ok(), "{kind}, {policy:?}: {report}");
        }
        let program = crate::plan(&s).unwrap();
        let report = crate::check::check(&program);
        assert!(report.is_ok(), "{kind}: {report}");
        let launches = |name: &str| {
            let of = |i: &&crate::program::Instr| match i.op {
                crate::program::Op::Launch { kernel, .. } => {
                    program.kernels[kernel.index()].name == name
                }
                _ => false,
            };
            let section = program
                .section(crate::program::SectionKind::Steady)
                .unwrap();
            let instrs =
                &program.instrs[section.instrs.start as usize..section.instrs.end as usize];
            instrs.iter().filter(of).count()
        };
        assert_eq!(launches("z_loss"), 7, "{kind}");
        assert_eq!(launches("load_balance"), if kind == "hf" { 1 } else { 7 });
        assert_eq!(launches("load_balance_backward"), launches("load_balance"));
    }
}

const GPT_OSS: &str = "preset = \"gpt-oss-20b\"\nlayers = 2";

/// Returns the faults of a model, or panics if it has none.
fn fault(model: &str) -> String {
    let text = format!("[model]\n{model}\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n");
    let e = scenario::parse("test", &text, &[]).map(|_| ()).unwrap_err();
    e.to_string()
}

/// Gates of gpt-oss have no use for another activation, and nothing to do without gates.
#[test]
fn gates_of_gpt_oss_are_gated_and_silu() {
    let e = fault(&format!("{GPT_OSS}\nactivation = \"gelu\""));
    assert!(e.contains("it has no use for `activation` \"gelu\""), "{e}");
    assert!(e.contains("use activation = \"silu\""), "{e}");
    let e = fault(&format!("{GPT_OSS}\ngated_mlp = false"));
    assert!(e.contains("needs experts with gates"), "{e}");
    let e = fault("preset = \"mixtral-8x7b\"\nglu_limit = 5.0");
    assert!(e.contains("experts clamp nothing"), "{e}");
}

/// The code of gpt-oss calls seven elementwise operations between the matmuls of experts, on
/// tensors of `rows x width`: two clamps, one of them with both bounds, `* 1.702`, a sigmoid, a
/// multiplication, `+ 1` and another multiplication.
#[test]
fn gates_of_gpt_oss_are_seven_calls() {
    let mut s = scenario_of(GPT_OSS);
    s.train.micro_batch = 1;
    let m = graph(&s);
    let modules = m.modules();
    let inside = |op: &&crate::graph::Op| modules[op.module.index()].path == "layers.0.mlp.experts";
    let (rows, width) = (4096 * 4, 2880);
    let made = |op: &crate::graph::Op| {
        let Act::Compute(kind) = op.act else {
            return None;
        };
        let of = &m.graph.value(*op.outputs.first()?).shape;
        (of[..] == [rows, width]).then(|| kind.name())
    };
    let all = m.graph.ops.iter().filter(inside).filter_map(made);
    let names: Vec<&str> = all.skip_while(|name| *name != "clamp").collect();
    let calls = ["clamp", "clamp", "scale", "sigmoid", "mul", "shift", "mul"];
    assert_eq!(names[..7], calls, "{names:?}");
    let limits = m.graph.ops.iter().filter_map(|op| match op.act {
        Act::Compute(OpKind::Clamp(clamp)) => Some((clamp.min.map(|m| m.0), clamp.max.0)),
        _ => None,
    });
    let limits: Vec<_> = limits.take(2).collect();
    assert_eq!(limits, [(None, 7.0), (Some(-7.0), 7.0)]);
}

/// Ranks have the biases of their experts, as they have the matrices.
#[test]
fn expert_parallel_ranks_divide_biases() {
    let mut s = scenario_of(GPT_OSS);
    s.mesh.ep = 4;
    let tree = declare(&s, 2).tree;
    let shape = |name: &str| {
        let p = tree.params.iter().find(|p| p.name == name).unwrap();
        p.shape.to_vec()
    };
    assert_eq!(shape("layers.1.mlp.experts.gate_up_bias.weight"), [8, 5760]);
    assert_eq!(shape("layers.1.mlp.experts.down_bias.weight"), [8, 2880]);
    assert_eq!(shape("layers.1.attention.sinks.weight"), [64]);
    let count = parameter_count(&s.model, &tree.params, &s.device_mesh());
    s.mesh.ep = 1;
    let whole = declare(&s, 2).tree;
    assert_eq!(
        count,
        parameter_count(&s.model, &whole.params, &s.device_mesh())
    );
}

/// Every dispatcher sends rows whose experts have biases of their own rank.
#[test]
fn programs_with_divided_biases_are_sound() {
    for dispatcher in ["gather", "padded", "peer", "deepep", "all_to_all"] {
        let text = format!(
            "[model]\n{GPT_OSS}\n[train]\nseq_len = 256\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\nep = 4\n\
             [moe]\ndispatcher = {dispatcher:?}\n"
        );
        let program = crate::plan(&scenario::parse("test", &text, &[]).unwrap()).unwrap();
        let report = crate::check::check(&program);
        assert!(report.is_ok(), "{dispatcher}: {report}");
    }
}

const SCOUT: &str = "preset = \"llama4-scout\"\nlayers = 4";

/// Returns a Llama 4 of four layers, with more lines of other sections.
fn scout(more: &str) -> crate::config::Scenario {
    let text = format!("[model]\n{SCOUT}\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n{more}");
    scenario::parse("test", &text, &[]).unwrap()
}

/// Weights multiply rows before the matmuls of Llama 4's experts; in other models between them, or
/// after them in the code of torchtitan and transformers.
#[test]
fn scores_of_llama4_multiply_what_experts_read() {
    let (scale, matmul) = ("scale_rows", "grouped_mm");
    for (implementation, after) in [
        (Implementation::Native, [matmul, scale, matmul]),
        (Implementation::Torchtitan, [matmul, matmul, scale]),
        (Implementation::Transformers, [matmul, matmul, scale]),
    ] {
        let mut s = scout("[train]\nseq_len = 64\n");
        s.model.options.implementation = Some(implementation);
        for (before, expected) in [(true, [scale, matmul, matmul]), (false, after)] {
            s.model.options.experts.score_before_experts = before;
            let m = graph(&s);
            let modules = m.modules();
            let of_layer = |op: &&crate::graph::Op| {
                let path = &modules[op.module.index()].path;
                path.starts_with("layers.0.mlp.experts")
            };
            let name = |op: &crate::graph::Op| match op.act {
                Act::Compute(kind) => Some(kind.name()),
                _ => None,
            };
            let names = m.graph.ops.iter().filter(of_layer).filter_map(name);
            let names: Vec<&str> = names.filter(|n| [scale, matmul].contains(n)).collect();
            assert_eq!(names, expected, "{implementation:?} {before}");
        }
    }
}

/// Two chunks have half of the pairs of a sequence, in three of four layers. Forward and backward
/// have three times the FLOPs of forward: two matmuls of which the mask leaves half.
#[test]
fn chunks_save_the_attention_between_them() {
    let train = "[train]\nseq_len = 16384\nmicro_batch = 1\n";
    let flops = |s: &crate::config::Scenario| {
        let tree = declare(s, 4).tree;
        flops::model_flops(s, &tree, &flops::Backward::whole(&tree))
            .0
            .0
    };
    let chunked = scout(train);
    let mut whole = chunked.clone();
    whole.model.options.layers.attention_chunk = None;
    let layer = 2 * 40 * 128 * 16384_u64.pow(2);
    assert_eq!(flops(&whole) - flops(&chunked), 3 * 3 * layer / 2);
    // The kernels, too: three of four see documents of 8192 positions.
    let m = graph(&chunked);
    let seen = m.graph.ops.iter().filter_map(|op| match op.act {
        Act::Compute(OpKind::FlexAttention(of)) => Some(of.score_mod.documents),
        _ => None,
    });
    let chunk = crate::ir::Documents::new(&[8192]).unwrap();
    assert_eq!(seen.collect::<Vec<_>>(), [chunk; 3]);
}

/// Layers without a rotary embedding scale queries by their positions, and have no norms of them.
#[test]
fn layers_without_rope_have_no_norms_of_queries() {
    let m = graph(&scout("[train]\nseq_len = 64\n"));
    for layer in 0..4 {
        let path = format!("layers.{layer}.attention.q_norm");
        let normalizes = m.modules().iter().any(|module| module.path == path);
        assert_eq!(normalizes, layer != 3, "{path}");
    }
    let factors = m
        .graph
        .consts
        .iter()
        .position(|c| c.name == "attention_temperature");
    let factors = factors.unwrap() as u32;
    let reads = |op: &&crate::graph::Op| {
        let root = |v| m.graph.value(v).root;
        let is_factors = |v: &crate::graph::ValueId| root(*v) == Root::Const(ConstId(factors));
        op.inputs.iter().any(is_factors)
    };
    let scaled: Vec<&str> = (m.graph.ops.iter().filter(reads))
        .map(|op| m.modules()[op.module.index()].path.as_str())
        .collect();
    assert_eq!(scaled, ["layers.3.attention"]);
}

/// Chunks cut documents where a pattern describes it.
#[test]
fn chunks_cut_packed_sequences() {
    let with = |lengths: &str| {
        let train = format!("[train]\nseq_len = 32768\ndocument_lengths = {lengths}\n");
        let text =
            format!("[model]\n{SCOUT}\n{train}[mesh]\nhardware = \"h100-80\"\ndp_shard = 8\n");
        scenario::parse("test", &text, &[])
    };
    let s = with("[12288, 4096]").unwrap();
    let lengths = |layer| s.documents(layer).lengths().collect::<Vec<_>>();
    assert_eq!(lengths(0), [8192, 4096, 4096]);
    assert_eq!(lengths(3), [12288, 4096]);
    let e = with("[12288, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]");
    let e = e.map(|_| ()).unwrap_err().to_string();
    let why =
        "chunks of 8192 positions (`attention_chunk`) cut documents into more than 16 lengths";
    assert!(e.contains(why), "{e}");
}

#[test]
fn keys_of_llama4_need_its_layers() {
    for (key, why) in [
        ("attention_chunk = 64", "no layer has chunks"),
        (
            "attention_temperature = 0.1",
            "all layers have a rotary embedding",
        ),
    ] {
        let e = fault(&format!("preset = \"mixtral-8x7b\"\n{key}"));
        assert!(e.contains(why), "{e}");
    }
    let e = fault(&format!(
        "{SCOUT}\nattention_temperature = 0.0\nattention_temperature_floor = 64"
    ));
    assert!(e.contains("no layer scales queries"), "{e}");
    let e = fault(&format!(
        "{SCOUT}\nrelative_buckets = 32\nposition_embedding = \"none\"\nqk_norm = false"
    ));
    assert!(e.contains("have no biases of scores"), "{e}");
}

/// Every dispatcher sends rows that are scaled before the matmuls of experts.
#[test]
fn programs_that_scale_what_experts_read_are_sound() {
    for dispatcher in ["gather", "padded", "peer", "deepep", "all_to_all"] {
        let more = format!("ep = 4\n[train]\nseq_len = 256\n[moe]\ndispatcher = {dispatcher:?}\n");
        let program = crate::plan(&scout(&more)).unwrap();
        let report = crate::check::check(&program);
        assert!(report.is_ok(), "{dispatcher}: {report}");
    }
}
