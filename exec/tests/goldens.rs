//! Compares with training runs of torch (see `tests/goldens/README.md`), over ranks, strategies and
//! policies.
//!
//! Tests use forty steps if the whole run matters, and six if only the combination does: a wrong
//! reduction, scale or layout shows in the first two steps.

mod common;

use common::{
    BIOGPT, BITNET, DEEPSEEK_V3, DORA, FLINT, GEMMA2, GEMMA3, GPT_NEOX, GPT_OSS, GPT2, GRANITE,
    GRANITE_SWA, Golden, LLAMA, LLAMA3_ROPE, LLAMA4, LONGROPE, LORA, LORA_PATTERNS, LORA_QV,
    LORA_SAVED, MISTRAL, MIXTRAL, MIXTRAL_AUX, OLMO2, OLMO3, PHI3, QWEN2_MOE, QWEN3, QWEN3_MOE,
    XGLM, run,
};

use safetensors::SafeTensors;
use shardlab_exec::train::{self, NoObserver, RunOptions, TokenWidth, Tokens};
use std::path::Path;

/// Number of steps of a run that only tests a combination.
const FEW: Option<u64> = Some(6);

/// Splits of the batch of 8 over ranks and micro-batches.
const SPLITS: [&[&str]; 7] = [
    &["mesh.dp_shard=1", "train.micro_batch=8"],
    &[
        "mesh.dp_shard=1",
        "train.micro_batch=2",
        "train.grad_accum=4",
    ],
    &["mesh.dp_shard=2", "train.micro_batch=4"],
    &[
        "mesh.dp_shard=2",
        "train.micro_batch=1",
        "train.grad_accum=4",
    ],
    &["mesh.dp_shard=4", "train.micro_batch=2"],
    &[
        "mesh.dp_shard=4",
        "train.micro_batch=1",
        "train.grad_accum=2",
    ],
    &["mesh.dp_shard=8", "train.micro_batch=1"],
];

/// Policies and strategies.
const SHARDING: [&[&str]; 11] = [
    &["fsdp.strategy=no_shard"],
    &["fsdp.strategy=optim"],
    &["fsdp.strategy=optim_grads"],
    &["fsdp.strategy=optim_grads_params"],
    &["fsdp.policy=fsdp2"],
    &[
        "fsdp.policy=fsdp2",
        "fsdp.strategy=optim_grads",
        "fsdp.reshard_after_forward=false",
    ],
    &["fsdp.policy=megatron", "fsdp.strategy=no_shard"],
    &["fsdp.policy=megatron", "fsdp.strategy=optim"],
    &["fsdp.policy=megatron", "fsdp.strategy=optim_grads"],
    &["fsdp.policy=megatron", "fsdp.strategy=optim_grads_params"],
    &["compile.mode=full", "compile.bucket_bytes=64KiB"],
];

/// Blocks are captured and replayed, which needs the fixed addresses of policy native. Other
/// policies capture whole steps.
const CAPTURED: &[&str] = &["compile.cuda_graph=[\"block\"]"];
const CAPTURED_WHOLE: &[&str] = &["compile.cuda_graph=full_iteration"];

/// Other options that do not change the result.
const EXTRAS: [&[&str]; 9] = [
    &[],
    CAPTURED,
    &["train.recompute=full"],
    &["train.recompute=selective"],
    &["train.loss=chunked"],
    &[
        "train.loss=checkpointed_chunks",
        "train.loss_chunk_tokens=7",
    ],
    &["train.loss=saved_chunks", "train.loss_chunk_tokens=7"],
    &["train.clip_norm=1e9"],
    &["fsdp.units=root", "train.grad_norm=false"],
];

fn joined<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

fn both(set: &[&str], steps: Option<u64>) {
    for golden in [&LLAMA, &GPT2] {
        golden.matches(set, steps);
    }
}

#[test]
fn whole_runs() {
    let run = |golden: &Golden, parts: &[&[&str]]| golden.matches(&joined(parts), None);
    run(&LLAMA, &[SPLITS[0], SHARDING[0]]);
    run(&GPT2, &[SPLITS[2], SHARDING[3]]);
    run(&LLAMA, &[SPLITS[4], SHARDING[4]]);
    run(&GPT2, &[SPLITS[6], SHARDING[9]]);
}

/// Norms of queries and keys: eager, fused and recomputed. The run is from `transformers`.
#[test]
fn norms_of_queries_and_keys() {
    QWEN3.matches(&[], None);
    for set in [
        &["compile.mode=regions"][..],
        &["compile.mode=blocks", "compile.merge_projections=all"],
        &["compile.mode=full"],
        &["compile.mode=blocks", "fsdp.policy=megatron"],
        &["fsdp.policy=fsdp2", "train.recompute=full"],
        &["train.recompute=selective", "compile.mode=regions"],
        &["train.recompute=pointwise", "compile.mode=regions"],
    ] {
        QWEN3.matches(set, FEW);
    }
}

/// Packed sequences, compared with documents that go through the model one by one: learned
/// positions, which restart with each document, and windows. Chunks of Llama 4 restart, too, but
/// the positions that scale its queries do not: its sequences went through the model as a whole.
#[test]
fn packed_sequences() {
    const LENGTHS: &str = "train.document_lengths=[10, 23, 5]";
    for golden in [&GPT2, &GEMMA3, &LLAMA4] {
        let packed = golden.recorded("packed.json");
        assert_eq!(packed["lengths"].to_string(), "[10,23,5]");
        let alone = ["mesh.dp_shard=1", "train.micro_batch="];
        let batch = format!("{}{}", alone[1], packed["B"]);
        golden.matches_run(&packed, &[LENGTHS, alone[0], &batch], None);
        for set in [
            &["fsdp.policy=fsdp2", "train.recompute=full"][..],
            &["compile.mode=full"],
            &["compile.mode=blocks", "train.recompute=selective"],
        ] {
            let split = [
                "mesh.dp_shard=2",
                "train.micro_batch=2",
                "train.grad_accum=",
            ];
            let accum = format!("{}{}", split[2], packed["B"].as_u64().unwrap() / 4);
            let set = [&[LENGTHS, split[0], split[1], &accum][..], set].concat();
            golden.matches_run(&packed, &set, FEW);
        }
    }
}

/// Sequences whose documents end with a token of the data, so that each has documents of its own:
/// rotary and learned positions. Torch ran them with the block-causal mask of torchtitan.
#[test]
fn documents_of_the_data() {
    for golden in [&LLAMA, &GPT2] {
        let recorded = golden.recorded("documents.json");
        let tokens = golden.dir().join("tokens.bin");
        let lengths = format!(
            "train.document_lengths={{ data = {tokens:?}, eos_token_id = {} }}",
            recorded["eos"]
        );
        let alone = ["mesh.dp_shard=1", "train.micro_batch=8"];
        golden.matches_run(&recorded, &[&lengths, alone[0], alone[1]], None);
        for set in [
            &["fsdp.policy=fsdp2", "train.recompute=full"][..],
            &["compile.mode=full"],
            &["fsdp.policy=megatron", "fsdp.strategy=optim_grads"],
            &["compile.mode=blocks", "train.recompute=selective"],
            &["compile.mode=regions", "train.loss=chunked"],
        ] {
            let split = [
                "mesh.dp_shard=2",
                "train.micro_batch=2",
                "train.grad_accum=2",
            ];
            let set = [&[&lengths[..], split[0], split[1], split[2]][..], set].concat();
            golden.matches_run(&recorded, &set, FEW);
        }
    }
}

/// Attention with sinks reads the same documents in every sequence.
#[test]
fn documents_of_the_data_need_attention_that_reads_them() {
    let tokens = GPT_OSS.dir().join("tokens.bin");
    let lengths = format!("train.document_lengths={{ data = {tokens:?}, eos_token_id = 110 }}");
    let scenario = GPT_OSS.scenario(&[&lengths]);
    let program = std::sync::Arc::new(shardlab_plan::plan(&scenario).unwrap());
    let refused = train::train(&scenario, &program, RunOptions::default(), &mut NoObserver);
    let message = refused.map(|_| ()).unwrap_err().to_string();
    let what = "`exec` cannot run `sink_attention` with the documents of a file";
    assert!(message.contains(what), "{message}");
}

/// If every sequence has the same documents, losses are those of lengths in a list.
#[test]
fn documents_of_the_data_that_are_all_equal() {
    let (seq, eos) = (64, 0u16);
    let lengths = [10, 23, 5];
    let mut tokens = Vec::new();
    // A stream whose samples repeat after whole sequences.
    while tokens.len() < 20 * seq + seq + 1 {
        let at = tokens.len() % seq;
        let mut document = 0;
        let ends = (lengths.iter().cycle()).map(|length| {
            document += length;
            document - 1
        });
        let ends: Vec<usize> = ends.take_while(|end| *end < seq - 1).collect();
        let word = 1 + (tokens.len() * tokens.len() / 7 % 250) as u16;
        tokens.push(if ends.contains(&at) { eos } else { word });
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.bin");
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    std::fs::write(&path, bytes).unwrap();
    let losses = |lengths: &str| {
        let set = [lengths, "mesh.dp_shard=2", "train.micro_batch=2"];
        let options = RunOptions {
            steps: FEW,
            init: Some(LLAMA.dir()),
            tokens: Some(Tokens::read(&path, TokenWidth::U16).unwrap()),
            ..RunOptions::default()
        };
        run(&LLAMA.scenario(&set), options).run.losses
    };
    let listed = losses("train.document_lengths=[10, 23, 5]");
    let found = losses(&format!(
        "train.document_lengths={{ data = {path:?}, eos_token_id = {eos} }}"
    ));
    assert_eq!(found, listed);
}

/// Matrices of blocks are updated by `torch.optim.Muon`, all other parameters by AdamW: on one
/// rank, as torch ran them, and with whole matrices on several ranks. Newton-Schulz computes in
/// bfloat16, which amplifies differences in the last bit of gradients with every step.
#[test]
fn muon() {
    let run = LLAMA.recorded("muon.json");
    let base = [
        "train.optimizer=muon",
        &format!("train.muon_momentum={}", run["momentum"]),
        &format!(
            "train.muon_adjust_lr={}",
            run["adjust_lr_fn"].as_str().unwrap()
        ),
        &format!("train.clip_norm={:?}", run["clip"].as_f64().unwrap()),
    ];
    let matches = |set: &[&str], steps| {
        LLAMA.matches_run(&run, &[&base[..], set].concat(), steps);
    };
    matches(&["mesh.dp_shard=1", "train.micro_batch=8"], None);
    let ranks = ["mesh.dp_shard=4"];
    matches(&[&ranks[..], &["train.micro_batch=2"]].concat(), FEW);
    let accumulated = ["train.micro_batch=1", "train.grad_accum=2"];
    let strategy = ["fsdp.strategy=optim", "train.recompute=full"];
    matches(&[&ranks[..], &accumulated, &strategy].concat(), FEW);
}

/// Tests families of transformers: on one rank, as torch ran them, then sharded, compiled and
/// recomputed.
fn family(golden: &Golden) {
    golden.matches(&[], None);
    for set in [
        &[
            "compile.mode=regions",
            "mesh.dp_shard=2",
            "train.micro_batch=2",
        ][..],
        &["compile.mode=full", "train.recompute=full"],
        &[
            "fsdp.policy=fsdp2",
            "mesh.dp_shard=4",
            "train.micro_batch=1",
        ],
        &[
            "fsdp.policy=megatron",
            "compile.mode=blocks",
            "train.recompute=selective",
        ],
        &["compile.mode=regions", "train.recompute=pointwise"],
    ] {
        golden.matches(set, FEW);
    }
}

/// Like [`family`], and with a chunked loss, which does not support a soft cap on logits.
fn family_with_chunks(golden: &Golden) {
    family(golden);
    golden.matches(&["train.loss=chunked", "compile.mode=regions"], FEW);
}

/// Token embeddings are scaled before positions, which are rows of a table, are added.
#[test]
fn biogpt_of_transformers() {
    family_with_chunks(&BIOGPT);
}

/// Norms on the inputs of the last layers of attention and of the feed-forward layer.
#[test]
fn bitnet_of_transformers() {
    family_with_chunks(&BITNET);
}

/// Like BioGPT, with sines and cosines.
#[test]
fn xglm_of_transformers() {
    family_with_chunks(&XGLM);
}

#[test]
fn gpt_neox_of_transformers() {
    family_with_chunks(&GPT_NEOX);
}

#[test]
fn granite_of_transformers() {
    family_with_chunks(&GRANITE);
}

/// Soft caps, a window in every second layer, norms before and after, and norm weights stored minus
/// 1.
#[test]
fn gemma2_of_transformers() {
    family(&GEMMA2);
}

/// Windows with a separate rotary base, and norms of queries and keys.
#[test]
fn gemma3_of_transformers() {
    family_with_chunks(&GEMMA3);
}

/// Norms on the layer outputs, and over all queries or keys together.
#[test]
fn olmo2_of_transformers() {
    family_with_chunks(&OLMO2);
}

/// Frequencies scaled by wavelength, as in Llama 3.1.
#[test]
fn llama3_scaling_of_transformers() {
    family_with_chunks(&LLAMA3_ROPE);
}

/// A divisor per frequency (Phi-3), on sequences longer than the original length.
#[test]
fn longrope_of_transformers() {
    family_with_chunks(&LONGROPE);
}

/// YaRN in layers that see all positions. Layers with a window have another base and no scaling.
#[test]
fn olmo3_of_transformers() {
    family_with_chunks(&OLMO3);
}

/// Packed projections.
#[test]
fn phi3_of_transformers() {
    family_with_chunks(&PHI3);
}

/// A window in every layer.
#[test]
fn mistral_of_transformers() {
    family_with_chunks(&MISTRAL);
}

/// A PEFT run with learned magnitudes of rows (DoRA).
#[test]
fn decomposed_adapters_of_peft() {
    DORA.matches(&[], None);
    for set in [
        &["mesh.dp_shard=2", "train.micro_batch=2"][..],
        &["compile.mode=full", "train.recompute=full"],
        &[
            "compile.mode=full",
            "mesh.dp_shard=2",
            "train.micro_batch=2",
        ],
        &[
            "fsdp.policy=fsdp2",
            "mesh.dp_shard=4",
            "train.micro_batch=1",
        ],
        &["fsdp.policy=megatron", "train.recompute=selective"],
        &[
            "fsdp.strategy=no_shard",
            "train.grad_accum=2",
            "train.micro_batch=2",
        ],
    ] {
        DORA.matches(set, FEW);
    }
}

/// PEFT runs: adapters have gradients, and all other parameters stay the same.
#[test]
fn adapters_of_peft() {
    family(&LORA);
    family(&LORA_QV);
    family(&LORA_SAVED);
    family(&LORA_PATTERNS);
    for set in [
        &[
            "fsdp.strategy=no_shard",
            "train.grad_accum=2",
            "train.micro_batch=2",
        ][..],
        &[
            "fsdp.policy=megatron",
            "fsdp.strategy=optim_grads",
            "mesh.dp_shard=2",
            "train.micro_batch=2",
        ],
        &[
            "compile.mode=full",
            "mesh.dp_shard=2",
            "train.micro_batch=2",
        ],
        &[
            "mesh.dp_shard=2",
            "mesh.dp_outer=2",
            "train.micro_batch=1",
            "fsdp.policy=fsdp2",
        ],
        &["compile.cuda_graph=[\"block\"]", "compile.mode=blocks"],
    ] {
        LORA.matches(set, FEW);
    }
}

#[test]
fn mixtral_of_transformers() {
    family(&MIXTRAL);
    for set in [
        &[
            "mesh.dp_shard=2",
            "train.micro_batch=1",
            "train.grad_accum=2",
        ][..],
        &["mesh.dp_shard=2", "mesh.dp_outer=2", "train.micro_batch=1"],
        &["compile.cuda_graph=[\"block\"]"],
        &["compile.cuda_graph=full_iteration"],
        &[
            "fsdp.units=[\"layers.*.mlp.experts\", \"layers.*\"]",
            "mesh.dp_shard=4",
            "train.micro_batch=1",
        ],
    ] {
        MIXTRAL.matches(set, FEW);
    }
}

#[test]
fn qwen3_moe_of_transformers() {
    family(&QWEN3_MOE);
}

/// Shared experts with a gate.
#[test]
fn qwen2_moe_of_transformers() {
    family(&QWEN2_MOE);
}

/// Attention sinks, windows in every second layer, clamped gates, and biases of experts.
#[test]
fn gpt_oss_of_transformers() {
    family(&GPT_OSS);
    for set in [
        &[
            "mesh.dp_shard=2",
            "train.micro_batch=1",
            "train.grad_accum=2",
        ][..],
        &["mesh.dp_shard=2", "mesh.dp_outer=2", "train.micro_batch=1"],
        &["compile.cuda_graph=full_iteration"],
        &["compile.cuda_graph=[\"attn\", \"moe_router\", \"moe_preprocess\"]"],
    ] {
        GPT_OSS.matches(set, FEW);
    }
}

/// Attention sinks in model types whose code multiplies results by a sigmoid or includes sinks in
/// the softmax, with dense layers and with experts.
#[test]
fn granite_swa_of_transformers() {
    family_with_chunks(&GRANITE_SWA);
}

#[test]
fn flint_of_transformers() {
    family(&FLINT);
}

/// Chunked attention, layers without rotary embeddings whose queries are scaled by position, norms
/// of rotated queries and keys without weights, scores that multiply the inputs of experts, and a
/// shared expert in every second layer.
#[test]
fn llama4_of_transformers() {
    family_with_chunks(&LLAMA4);
    for set in [
        &[
            "mesh.dp_shard=2",
            "train.micro_batch=1",
            "train.grad_accum=2",
        ][..],
        &["mesh.dp_shard=2", "mesh.dp_outer=2", "train.micro_batch=1"],
        &["compile.cuda_graph=full_iteration"],
        &["compile.mode=blocks", "compile.merge_projections=all"],
    ] {
        LLAMA4.matches(set, FEW);
    }
}

/// Latent attention, and sigmoid scores in groups.
#[test]
fn deepseek_v3_of_transformers() {
    family(&DEEPSEEK_V3);
}

/// Score biases, which files of DeepSeek-V3 store as a buffer.
const BIASES: [f32; 8] = [0.25, -0.5, 0.125, 0.0, -0.25, 0.375, 0.0625, -0.125];

/// Only this MoE layer of the golden model has them.
const BIASED: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

/// Writes the golden model with [`BIASES`] to a folder.
fn write_biased(dir: &Path) {
    let golden = DEEPSEEK_V3.dir();
    std::fs::copy(golden.join("config.json"), dir.join("config.json")).unwrap();
    let mut bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let (header, tensors) = SafeTensors::read_metadata(&bytes).unwrap();
    let info = tensors.info(BIASED).expect("the golden has the tensor");
    let start = 8 + header + info.data_offsets.0;
    let biases: Vec<u8> = BIASES.iter().flat_map(|b| b.to_le_bytes()).collect();
    bytes[start..start + biases.len()].copy_from_slice(&biases);
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

/// Biases change the choice of experts, but not the weights of the chosen ones. They are read from
/// files and written to files unchanged. Losses and norms are those of transformers, with the
/// golden weights, these biases and the golden run's settings (`tests/goldens/record.py`). Without
/// biases, losses are off by up to 4e-4.
#[test]
fn biases_of_scores_choose_experts() {
    const LOSSES: [f64; 6] = [
        5.562723159790039,
        5.4657111167907715,
        5.322854518890381,
        5.154392719268799,
        4.958925724029541,
        4.864073276519775,
    ];
    const NORMS: [f64; 6] = [
        1.2229421138763428,
        1.7344344854354858,
        1.5975157022476196,
        1.381389856338501,
        1.4390374422073364,
        1.3410422801971436,
    ];
    let model = tempfile::tempdir().unwrap();
    write_biased(model.path());
    let two = ["mesh.dp_shard=2", "train.micro_batch=2"];
    for set in [
        &[][..],
        &[two[0], two[1], "mesh.ep=2"],
        &[two[0], two[1], "fsdp.policy=fsdp2"],
        &[two[0], two[1], "fsdp.policy=megatron"],
        &["compile.mode=blocks", "train.recompute=full"],
        &["compile.mode=full", "compile.exclude=[\"*.*.mlp.router\"]"],
    ] {
        let set = [&["model.router_bias=true"], set].concat();
        let saved = tempfile::tempdir().unwrap();
        let options = RunOptions {
            steps: FEW,
            init: Some(model.path().to_owned()),
            tokens: Some(DEEPSEEK_V3.tokens()),
            export: Some(saved.path().to_owned()),
            ..RunOptions::default()
        };
        let run = common::run(&DEEPSEEK_V3.scenario(&set), options).run;
        let pairs = run.losses.iter().zip(LOSSES);
        for (ours, theirs) in pairs.chain(run.grad_norms.iter().zip(NORMS)) {
            let off = (ours - theirs).abs() / theirs;
            assert!(off < 1e-4, "{set:?}: {ours}, not {theirs}");
        }
        let bytes = std::fs::read(saved.path().join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let biases: Vec<u8> = BIASES.iter().flat_map(|b| b.to_le_bytes()).collect();
        assert_eq!(file.tensor(BIASED).unwrap().data(), biases, "{set:?}");
    }
}

/// Without the key, a model has no parameter for the biases.
#[test]
fn biases_of_scores_without_a_place_are_refused() {
    let model = tempfile::tempdir().unwrap();
    write_biased(model.path());
    let scenario = DEEPSEEK_V3.scenario(&[]);
    let options = RunOptions {
        steps: Some(1),
        init: Some(model.path().to_owned()),
        tokens: Some(DEEPSEEK_V3.tokens()),
        ..RunOptions::default()
    };
    let plan = common::plan(&scenario);
    let Err(e) = train::train(&scenario, &plan, options, &mut NoObserver) else {
        panic!("biases without a place were read");
    };
    let message = e.to_string();
    assert!(message.contains(BIASED), "{message}");
    assert!(
        message.contains("set model.router_bias = true"),
        "{message}"
    );
}

/// Experts are divided among ranks and sharded over the others, on parts of the batch.
#[test]
fn expert_parallel_runs_of_transformers() {
    for golden in [&MIXTRAL, &QWEN3_MOE, &QWEN2_MOE, &DEEPSEEK_V3, &LLAMA4] {
        expert_parallel(golden, &[2, 4]);
    }
}

/// The same with biases of experts, which are also divided. There are six experts.
#[test]
fn expert_parallel_runs_of_gpt_oss() {
    expert_parallel(&GPT_OSS, &[2]);
}

/// Repeats a run with these expert-parallel sizes and all dispatchers.
fn expert_parallel(golden: &Golden, sizes: &[u64]) {
    let mesh = |dp, ep| {
        let [batch, dp, ep] = [
            ("train.micro_batch", 4 / dp),
            ("mesh.dp_shard", dp),
            ("mesh.ep", ep),
        ]
        .map(|(key, n)| format!("{key}={n}"));
        [dp, ep, batch]
    };
    for (dp, ep, set) in [
        (2, 2, &[][..]),
        (4, 2, &["compile.mode=regions"]),
        (4, 4, &["fsdp.policy=fsdp2", "moe.dispatcher=gather"]),
        (4, 4, &["fsdp.policy=fsdp2", "moe.capacity_factor=4"]),
        (4, 2, &["moe.dispatcher=padded"]),
        (4, 4, &["moe.dispatcher=padded", "compile.mode=regions"]),
        (4, 2, &["moe.dispatcher=all_to_all"]),
        (4, 2, &["moe.dispatcher=peer"]),
        (4, 4, &["moe.dispatcher=peer", "train.recompute=full"]),
        (
            4,
            2,
            &[
                "fsdp.policy=megatron",
                "train.recompute=full",
                "moe.capacity_factor=4",
            ],
        ),
        (4, 4, &["compile.mode=full", "train.recompute=selective"]),
    ] {
        // Take the nearest size that divides the number of experts.
        let ep = if sizes.contains(&ep) { ep } else { sizes[0] };
        let mesh = mesh(dp, ep);
        let mesh: Vec<&str> = mesh.iter().map(String::as_str).collect();
        golden.matches(&[&mesh[..], set].concat(), FEW);
    }
}

/// The load-balancing loss depends on the tokens of a micro-batch, so only one rank without
/// accumulation reproduces the run.
#[test]
fn load_balancing_of_transformers() {
    MIXTRAL_AUX.matches(&[], None);
    for set in [
        &["compile.mode=regions"][..],
        &["compile.mode=full", "train.recompute=full"],
        &["fsdp.policy=fsdp2", "train.loss=chunked"],
        &["fsdp.policy=megatron", "train.recompute=selective"],
    ] {
        MIXTRAL_AUX.matches(set, FEW);
    }
}

/// The head of GPT-2 is its embedding, whose gradient is the sum over all chunks.
#[test]
fn losses_over_split_logits() {
    let loss = ["train.loss=split_logits", "train.loss_chunk_tokens=7"];
    both(&loss, FEW);
    for set in [
        &["compile.mode=regions"][..],
        &["fsdp.policy=fsdp2", "train.recompute=full"],
    ] {
        both(&[&loss[..], set].concat(), FEW);
    }
}

/// Tests every split with every sharding. Models and extras alternate, so that over all splits,
/// each extra is combined with each sharding.
#[test]
fn every_split_of_every_sharding() {
    let mut failed = Vec::new();
    for (s, split) in SPLITS.into_iter().enumerate() {
        for (i, sharding) in SHARDING.into_iter().enumerate() {
            let golden = [&LLAMA, &GPT2][(s + i) % 2];
            let extra = match EXTRAS[(5 * s + i) % EXTRAS.len()] {
                CAPTURED if sharding.iter().any(|s| !s.starts_with("fsdp.strategy=")) => {
                    CAPTURED_WHOLE
                }
                extra => extra,
            };
            let set = joined(&[split, sharding, extra]);
            if std::panic::catch_unwind(|| golden.matches(&set, FEW)).is_err() {
                failed.push(format!("{} {set:?}", golden.name));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn replicas_and_outer_shards() {
    let mesh = &["mesh.dp_shard=2", "mesh.dp_outer=2", "train.micro_batch=2"][..];
    both(mesh, FEW);
    for set in [
        &["fsdp.outer_strategy=optim"][..],
        &["fsdp.outer_strategy=optim", "fsdp.policy=megatron"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.strategy=no_shard"],
        &["fsdp.strategy=optim", "fsdp.policy=megatron"],
        &[
            "fsdp.outer_strategy=optim",
            "train.micro_batch=1",
            "train.grad_accum=2",
        ],
        &[
            "fsdp.policy=fsdp2",
            "train.micro_batch=1",
            "train.grad_accum=2",
        ],
        &[
            "train.micro_batch=1",
            "train.grad_accum=2",
            "fsdp.gradient_sync=last",
            "fsdp.reshard_after_backward=false",
        ],
        &[
            "fsdp.policy=fsdp2",
            "train.micro_batch=1",
            "train.grad_accum=2",
            "fsdp.gradient_sync=last",
        ],
    ] {
        LLAMA.matches(&joined(&[mesh, set]), FEW);
    }
    GPT2.matches(
        &["mesh.dp_shard=1", "mesh.dp_outer=4", "train.micro_batch=2"],
        FEW,
    );
    LLAMA.matches(
        &[
            "mesh.dp_shard=4",
            "mesh.dp_outer=2",
            "train.micro_batch=1",
            "fsdp.reshard_after_forward=2",
        ],
        FEW,
    );
}

#[test]
fn compiled_and_captured() {
    for set in [
        &["compile.mode=blocks"][..],
        &["compile.mode=regions", "fsdp.policy=megatron"],
        &["compile.mode=blocks", "fsdp.policy=fsdp2"],
        &["compile.mode=blocks", "compile.merge_projections=none"],
        &["compile.mode=blocks", "compile.merge_projections=all"],
        &["compile.mode=blocks", "compile.epilogues=false"],
        &["compile.mode=regions", "train.recompute=pointwise"],
        &[
            "compile.mode=regions",
            "compile.merge_projections=gradients",
            "fsdp.units=[\"layers.*.attention\", \"layers.*.mlp\"]",
        ],
        &["compile.cuda_graph=[\"attn\", \"mlp\"]"],
        &["compile.cuda_graph=[\"block\"]", "compile.mode=blocks"],
        &["compile.cuda_graph=full_iteration"],
    ] {
        both(set, FEW);
    }
}

/// Three ranks share a batch of six that one rank can also run. The runs agree within float32
/// rounding.
#[test]
fn three_ranks() {
    for golden in [&LLAMA, &GPT2] {
        let run = |set: &[&str]| golden.train(set, FEW, Default::default()).run;
        let alone = run(&["mesh.dp_shard=1", "train.micro_batch=6"]);
        for set in [
            &["mesh.dp_shard=3", "train.micro_batch=2"][..],
            &[
                "mesh.dp_shard=3",
                "train.micro_batch=1",
                "train.grad_accum=2",
                "fsdp.policy=fsdp2",
            ],
            &[
                "mesh.dp_shard=3",
                "train.micro_batch=2",
                "fsdp.policy=megatron",
                "fsdp.strategy=optim",
            ],
        ] {
            let three = run(set);
            let pairs = alone.losses.iter().zip(&three.losses);
            for (a, b) in pairs.chain(alone.grad_norms.iter().zip(&three.grad_norms)) {
                assert!((a - b).abs() < common::TOLERANCE * a, "{set:?}: {a} {b}");
            }
        }
    }
}
