use super::*;
use crate::train::init;
use crate::train::testing::{BASE, Memory, scenario_of};
use serde_json::json;
use shardlab_plan::Scenario;
use shardlab_plan::config::QkNorm;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens")
        .join(name)
}

const GPT2: &str = "[model]\nfamily = \"gpt2\"\nlayers = 3\nhidden = 64\nheads = 4\nvocab = 256\nmax_seq_len = 64\n\
    [train]\nseq_len = 64\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n[precision]\ncompute = \"f32\"\n";
const LLAMA: &str = "[model]\nfamily = \"llama\"\nlayers = 4\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 176\nvocab = 256\n\
    [train]\nseq_len = 64\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n[precision]\ncompute = \"f32\"\n";

struct Loaded {
    scenario: Scenario,
    program: Program,
    layout: StateLayout,
    memory: Memory,
}

impl Loaded {
    fn new(text: &str, set: &[&str]) -> Self {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = scenario_of(text, &set);
        let program = shardlab_plan::plan(&scenario).unwrap();
        let layout = StateLayout::new(&program).unwrap();
        let memory = Memory::new(&program);
        Self {
            scenario,
            program,
            layout,
            memory,
        }
    }

    fn load(&mut self, dir: &Path) -> Result<(), TrainError> {
        let (model, seq_len) = (&self.scenario.model, self.scenario.train.seq_len);
        load(
            dir,
            &self.program,
            model,
            seq_len,
            &self.layout,
            &mut self.memory,
        )
    }
}

/// Exports a model that came from no file.
fn export(
    dir: &Path,
    program: &Program,
    model: &Model,
    layout: &StateLayout,
    io: &mut Memory,
) -> Result<(), TrainError> {
    super::export(dir, program, (model, None), layout, io)
}

/// Returns the files as read by the safetensors crate.
fn tensors(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(n, t)| (n.to_owned(), (t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

#[test]
fn goldens_survive_loading_and_export_on_any_mesh() {
    for (text, name) in [(LLAMA, "llama-tiny"), (GPT2, "gpt2-tiny")] {
        let original = tensors(&golden(name));
        for set in [
            &["mesh.dp_shard=1"][..],
            &["mesh.dp_shard=3", "mesh.gpus_per_node=3"],
            &["fsdp.policy=fsdp2"],
            &["fsdp.policy=megatron", "fsdp.strategy=optim"],
        ] {
            let mut l = Loaded::new(text, set);
            l.load(&golden(name)).unwrap();
            let dir = tempfile::tempdir().unwrap();
            export(
                dir.path(),
                &l.program,
                &l.scenario.model,
                &l.layout,
                &mut l.memory,
            )
            .unwrap();
            assert_eq!(tensors(dir.path()), original, "{name} {set:?}");
            // An export can be loaded.
            l.load(dir.path()).unwrap();
        }
    }
}

/// gpt2's `c_fc` is stored as `[64, 256]`: element (out 3, in 5) of the parameter is element (5, 3)
/// of the file.
#[test]
fn conv1d_weights_are_transposed() {
    let mut l = Loaded::new(GPT2, &[]);
    l.load(&golden("gpt2-tiny")).unwrap();
    let p = l
        .program
        .params
        .iter()
        .position(|p| p.name == "layers.1.mlp.c_fc.weight")
        .unwrap();
    assert_eq!(l.program.params[p].shape.as_slice(), [256, 64]);
    let ours = l.layout.weights(&mut l.memory, ParamId(p as u32)).unwrap();
    let (shape, bytes) = &tensors(&golden("gpt2-tiny"))["transformer.h.1.mlp.c_fc.weight"];
    assert_eq!(shape, &[64, 256]);
    let theirs = crate::train::data::floats(bytes, DType::F32);
    assert_eq!(ours[3 * 64 + 5], theirs[5 * 256 + 3]);
}

/// Without a number of ranks.
const SCENARIO: &str =
    "[train]\nseq_len = 48\n[mesh]\nhardware = \"cpu\"\n[precision]\ncompute = \"f32\"\n";
const ALONE: &str = "mesh.dp_shard=1";

/// Returns the weights of a parameter.
fn weights(l: &mut Loaded, name: &str) -> Vec<f32> {
    let at = l.program.params.iter().position(|p| p.name == name);
    let id = ParamId(at.unwrap() as u32);
    l.layout.weights(&mut l.memory, id).unwrap()
}

/// Loads a golden mixture on several meshes, and checks that an export of each has the same tensors
/// and can be loaded.
fn exported(name: &str) -> Vec<Loaded> {
    let dir = golden(name);
    let preset = format!("model.preset={}", dir.join("config.json").display());
    let original = tensors(&dir);
    let meshes = [
        &["mesh.dp_shard=1"][..],
        &["mesh.dp_shard=3", "mesh.gpus_per_node=3"],
        &["mesh.dp_shard=4", "mesh.ep=2"],
    ];
    let on = |set: &[&str]| {
        let mut l = Loaded::new(SCENARIO, &[&[preset.as_str()], set].concat());
        l.load(&dir).unwrap();
        let to = tempfile::tempdir().unwrap();
        let model = l.scenario.model.clone();
        export(to.path(), &l.program, &model, &l.layout, &mut l.memory).unwrap();
        assert_eq!(tensors(to.path()), original, "{set:?}");
        // The export says which model it is.
        l.load(to.path()).unwrap();
        l
    };
    meshes.map(on).into()
}

/// Stacks of gpt-oss are `[experts, in, out]`, with a column of the other factor behind each of the
/// gate; ours are `[experts, out, in]`, with all gates before all other factors.
#[test]
fn stacks_of_gpt_oss_survive_loading_and_export() {
    let original = tensors(&golden("gpt-oss-tiny"));
    let file = |name: &str| crate::train::data::floats(&original[name].1, DType::F32);
    for mut l in exported("gpt-oss-tiny") {
        // Six experts of width 32, of inputs of 48.
        let (expert, column, input) = (4, 7, 11);
        let ours = weights(&mut l, "layers.1.mlp.experts.gate_up.weight");
        let theirs = file("model.layers.1.mlp.experts.gate_up_proj");
        for half in 0..2 {
            let row = expert * 64 + half * 32 + column;
            let at = (expert * 48 + input) * 64 + 2 * column + half;
            assert_eq!(ours[row * 48 + input], theirs[at], "half {half}");
        }
        let ours = weights(&mut l, "layers.1.mlp.experts.gate_up_bias.weight");
        let theirs = file("model.layers.1.mlp.experts.gate_up_proj_bias");
        assert_eq!(
            ours[expert * 64 + 32 + column],
            theirs[expert * 64 + 2 * column + 1]
        );
        let ours = weights(&mut l, "layers.1.mlp.experts.down.weight");
        let theirs = file("model.layers.1.mlp.experts.down_proj");
        assert_eq!(
            ours[(expert * 48 + input) * 32 + column],
            theirs[(expert * 32 + column) * 48 + input]
        );
    }
}

/// Stacks of Llama 4 are `[experts, in, out]`, with the columns of all gates before those of all
/// other factors.
#[test]
fn stacks_of_llama4_survive_loading_and_export() {
    let original = tensors(&golden("llama4-tiny"));
    let file = |name: &str| crate::train::data::floats(&original[name].1, DType::F32);
    for mut l in exported("llama4-tiny") {
        // Four experts of width 32, of inputs of 48.
        let (expert, column, input) = (2, 7, 11);
        let ours = weights(&mut l, "layers.3.mlp.experts.gate_up.weight");
        let theirs = file("model.layers.3.feed_forward.experts.gate_up_proj");
        for half in 0..2 {
            let row = half * 32 + column;
            let at = (expert * 48 + input) * 64 + row;
            assert_eq!(ours[(expert * 64 + row) * 48 + input], theirs[at]);
        }
        let ours = weights(&mut l, "layers.3.mlp.experts.down.weight");
        let theirs = file("model.layers.3.feed_forward.experts.down_proj");
        assert_eq!(
            ours[(expert * 48 + input) * 32 + column],
            theirs[(expert * 32 + column) * 48 + input]
        );
    }
}

/// The exported `config.json` of a Llama 4 says what the golden's does: masks, marks of layers with
/// a rotary embedding, layers with experts, norms and the factors of queries.
#[test]
fn exports_of_llama4_say_what_its_layers_do() {
    let dir = golden("llama4-tiny");
    let preset = format!("model.preset={}", dir.join("config.json").display());
    let theirs = read_json(&dir.join("config.json")).unwrap();
    for (set, changed) in [
        (&[][..], &[][..]),
        (
            &[
                "model.attention_temperature=0.0",
                "model.qk_norm=false",
                "model.layer_types=[\"full_attention\", \"full_attention_no_rope\"]",
                "model.mlp_layer_types=[]",
            ],
            &[
                ("attn_temperature_tuning", Value::from(false)),
                ("attn_scale", Value::Null),
                ("use_qk_norm", false.into()),
                ("layer_types", vec!["full_attention"; 4].into()),
                ("no_rope_layers", vec![1, 0, 1, 0].into()),
                ("moe_layers", vec![0, 1, 2, 3].into()),
            ],
        ),
    ] {
        let l = Loaded::new(SCENARIO, &[&[preset.as_str(), ALONE], set].concat());
        let ours = written::of(&l.scenario.model, None).unwrap();
        for name in [
            "architectures",
            "model_type",
            "layer_types",
            "no_rope_layers",
            "attention_chunk_size",
            "use_qk_norm",
            "attn_temperature_tuning",
            "attn_scale",
            "floor_scale",
            "moe_layers",
            "intermediate_size",
            "intermediate_size_mlp",
            "num_local_experts",
            "num_experts_per_tok",
            "head_dim",
        ] {
            let other = changed.iter().find(|(of, _)| *of == name);
            let expected = other.map_or(&theirs[name], |(_, value)| value);
            assert_eq!(&ours[name], expected, "{name} {set:?}");
        }
    }
}

/// Fields of a language model may be missing from the file of the whole, if they are as in its
/// class. Other files are those of a model.
#[test]
fn a_whole_has_the_fields_of_its_language_model() {
    let text = json!({"model_type": "llama4_text", "num_hidden_layers": 2});
    let whole = json!({"model_type": "llama4", "text_config": text, "vocab_size": 3});
    let (found, prefix) = config::of_language_model(whole);
    assert_eq!(prefix, "language_model.");
    assert_eq!(found["model_type"], "llama4_text");
    assert_eq!(
        (&found["num_hidden_layers"], &found["vocab_size"]),
        (&json!(2), &json!(202_048))
    );
    let same = json!({"model_type": "llama4_text", "text_config": text});
    assert_eq!(config::of_language_model(same.clone()), (same, ""));
}

/// Found by fuzzing: transformers saves no `n_shared_experts` of DeepSeek-V2 if it has the default
/// of its class, which is 2.
#[test]
fn missing_fields_have_the_defaults_of_their_class() {
    let config = json!({
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 256,
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "q_lora_rank": null, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "max_position_embeddings": 64,
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let preset = format!("model.preset={}", path.display());
    let model = Loaded::new(SCENARIO, &[&preset, ALONE]).scenario.model;
    assert_eq!(model.options.experts.shared_expert_ffn, 32);
    config::check(&path, &config, &model, 16).unwrap();
    let mut other = config.clone();
    other["n_shared_experts"] = json!(1);
    let error = config::check(&path, &other, &model, 16).unwrap_err();
    assert!(error.to_string().contains("n_shared_experts"), "{error}");
}

/// A folder with a Llama 4 and its vision tower has the language model under a prefix, and its
/// fields in `text_config`.
#[test]
fn llama4_is_loaded_from_the_folder_of_the_whole() {
    let alone = golden("llama4-tiny");
    let preset = format!("model.preset={}", alone.join("config.json").display());
    let mut l = Loaded::new(SCENARIO, &[&preset, ALONE]);
    l.load(&alone).unwrap();
    let name = "layers.3.mlp.experts.gate_up.weight";
    let expected = weights(&mut l, name);
    let whole = tempfile::tempdir().unwrap();
    let text = read_json(&alone.join("config.json")).unwrap();
    let config = json!({"model_type": "llama4", "text_config": text});
    std::fs::write(whole.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(alone.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let own = file.tensor("model.norm.weight").unwrap();
    let mut all: Vec<_> = (file.iter())
        .map(|(name, tensor)| (format!("language_model.{name}"), tensor))
        .collect();
    all.push(("vision_model.layernorm_pre.weight".to_owned(), own));
    let path = whole.path().join("model.safetensors");
    safetensors::serialize_to_file(all, None, &path).unwrap();
    let mut l = Loaded::new(SCENARIO, &[&preset, ALONE]);
    l.load(whole.path()).unwrap();
    assert_eq!(weights(&mut l, name), expected);
    let error = {
        let mut l = Loaded::new(SCENARIO, &[&preset, ALONE, "model.attention_chunk=21"]);
        l.load(whole.path()).unwrap_err().to_string()
    };
    assert!(error.contains("`attention_chunk_size` is 20"), "{error}");
}

/// Biases of queries, keys and values change the name of the model, and can be read back.
#[test]
fn biases_of_queries_keys_and_values_are_qwen2s() {
    let mut l = Loaded::new(LLAMA, &["model.bias=qkv"]);
    let dir = tempfile::tempdir().unwrap();
    init::from_seed(&l.program, &l.layout, 0, &mut l.memory).unwrap();
    let model = l.scenario.model.clone();
    export(dir.path(), &l.program, &model, &l.layout, &mut l.memory).unwrap();
    let written = tensors(dir.path());
    for layer in ["q_proj", "k_proj", "v_proj"] {
        let name = format!("model.layers.3.self_attn.{layer}.bias");
        assert!(written.contains_key(&name), "{name}");
    }
    assert_eq!(written.keys().filter(|n| n.ends_with(".bias")).count(), 12);
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    assert!(config.contains("Qwen2ForCausalLM"), "{config}");
    l.load(dir.path()).unwrap();
    // A llama without them does not accept it.
    let e = Loaded::new(LLAMA, &[]).load(dir.path()).unwrap_err();
    assert!(e.to_string().contains("`model_type` is \"qwen2\""), "{e}");
    let windowed = config
        .replace("\"sliding_window\": null", "\"sliding_window\": 16")
        .replace(
            "\"use_sliding_window\": false",
            "\"use_sliding_window\": true, \"max_window_layers\": 0",
        );
    std::fs::write(dir.path().join("config.json"), windowed).unwrap();
    let e = l.load(dir.path()).unwrap_err().to_string();
    assert!(
        e.contains("`sliding_window` is 16, model.sliding_window null"),
        "{e}"
    );
}

/// Norms of queries and keys change the name of the model as well.
#[test]
fn norms_of_queries_and_keys_are_qwen3s() {
    let sets = &["model.qk_norm=true", "model.head_dim=32"];
    let mut l = Loaded::new(LLAMA, sets);
    let dir = tempfile::tempdir().unwrap();
    init::from_seed(&l.program, &l.layout, 0, &mut l.memory).unwrap();
    let model = l.scenario.model.clone();
    export(dir.path(), &l.program, &model, &l.layout, &mut l.memory).unwrap();
    let written = tensors(dir.path());
    let (shape, bytes) = &written["model.layers.3.self_attn.k_norm.weight"];
    assert_eq!(shape, &[32]);
    // Norms are initialized to ones.
    assert_eq!(crate::train::data::floats(bytes, DType::F32), [1.0; 32]);
    assert!(written.contains_key("model.layers.0.self_attn.q_norm.weight"));
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    assert!(config.contains("Qwen3ForCausalLM"), "{config}");
    l.load(dir.path()).unwrap();
    // The file describes the model that it was written from.
    let preset = format!("model.preset={}", dir.path().join("config.json").display());
    let text = "[train]\nseq_len = 64\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n";
    let read = Loaded::new(text, &[&preset]).scenario.model;
    assert_eq!(
        (read.options.attention.qk_norm, read.head_dim),
        (QkNorm::Head, 32)
    );
    // A llama without them does not accept it, and no published variant has norms and biases.
    let e = Loaded::new(LLAMA, &sets[1..]).load(dir.path()).unwrap_err();
    assert!(e.to_string().contains("`model_type` is \"qwen3\""), "{e}");
    let all = &["model.qk_norm=true", "model.head_dim=32", "model.bias=true"];
    let e = Loaded::new(LLAMA, all).load(dir.path()).unwrap_err();
    assert!(matches!(e, TrainError::NoNames { .. }), "{e}");
}

#[test]
fn faults_are_named_in_full() {
    let mut l = Loaded::new(LLAMA, &["model.hidden=128", "model.tie_embeddings=true"]);
    let e = l.load(&golden("llama-tiny")).unwrap_err().to_string();
    for part in [
        "`hidden_size` is 64, model.hidden 128",
        "`head_dim` is 16, model.head_dim 32",
        "`tie_word_embeddings` is not",
    ] {
        assert!(e.contains(part), "{e}");
    }
    let e = Loaded::new(GPT2, &[])
        .load(&golden("llama-tiny"))
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("`model_type` is \"llama\"; known is gpt2"),
        "{e}"
    );

    // A file without two of the tensors.
    let dir = tempfile::tempdir().unwrap();
    let mut l = Loaded::new(BASE[0], &[]);
    init::from_seed(&l.program, &l.layout, 0, &mut l.memory).unwrap();
    export(
        dir.path(),
        &l.program,
        &l.scenario.model,
        &l.layout,
        &mut l.memory,
    )
    .unwrap();
    let all = tensors(dir.path());
    let write = |tensors: &BTreeMap<String, (Vec<usize>, Vec<u8>)>| {
        let list: Vec<_> = tensors
            .iter()
            .map(|(n, (s, _))| (n.clone(), DType::F32, s.iter().map(|d| *d as u64).collect()))
            .collect();
        let mut bytes = tensor_file::header(&list);
        tensors.values().for_each(|(_, d)| bytes.extend(d));
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    };
    let mut some = all.clone();
    some.remove("model.norm.weight");
    some.remove("model.layers.1.mlp.up_proj.weight");
    write(&some);
    let e = l.load(dir.path()).unwrap_err();
    let TrainError::Missing { names, .. } = &e else {
        panic!("{e}")
    };
    assert_eq!(
        names,
        &["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    );

    let mut more = all.clone();
    more.insert(
        "model.layers.0.self_attn.q_proj.bias".into(),
        (vec![24], vec![0; 96]),
    );
    more.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        (vec![1], vec![0; 4]),
    );
    write(&more);
    let e = l.load(dir.path()).unwrap_err().to_string();
    assert!(
        e.ends_with("that the model does not have: model.layers.0.self_attn.q_proj.bias"),
        "{e}"
    );

    let mut other = all;
    other.get_mut("model.norm.weight").unwrap().0 = vec![4, 6];
    write(&other);
    let e = l.load(dir.path()).unwrap_err().to_string();
    assert!(
        e.contains("`model.norm.weight` has shape [4, 6], the model's is [24]"),
        "{e}"
    );
}

/// A scenario of a file of transformers, and the settings of small runs.
fn preset(config: &Path) -> String {
    format!(
        "[model]\npreset = {config:?}\n[train]\nseq_len = 48\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n\
         [precision]\ncompute = \"f32\"\n"
    )
}

/// What scales rotary frequencies is written where the type's class expects it, and read back.
#[test]
fn scalings_of_rotary_frequencies_survive_export() {
    for (name, place) in [
        ("llama3-rope-tiny", "/rope_scaling"),
        ("longrope-tiny", "/rope_scaling"),
        ("olmo3-tiny", "/rope_parameters/full_attention"),
    ] {
        let mut l = Loaded::new(&preset(&golden(name).join("config.json")), &[]);
        l.load(&golden(name)).unwrap();
        let model = l.scenario.model.clone();
        let dir = tempfile::tempdir().unwrap();
        export(dir.path(), &l.program, &model, &l.layout, &mut l.memory).unwrap();
        assert_eq!(tensors(dir.path()), tensors(&golden(name)), "{name}");
        let path = dir.path().join("config.json");
        let scaling = read_json(&path).unwrap().pointer(place).cloned().unwrap();
        let ours = model.options.positions.rope_scaling.clone().unwrap();
        assert_eq!(scaling["rope_type"], ours.rope_type.name(), "{name}");
        // Classes of transformers expect an integer.
        assert_eq!(scaling["original_max_position_embeddings"], 32u64, "{name}");
        let mut again = Loaded::new(&preset(&path), &[]).scenario.model;
        again.preset.clone_from(&model.preset);
        assert_eq!(again, model, "{name}");
        l.load(dir.path()).unwrap();
    }
    // Another scaling is another model.
    let config = golden("llama3-rope-tiny").join("config.json");
    let other = &["model.rope_scaling={ rope_type = \"linear\", factor = 2.0 }"];
    let e = Loaded::new(&preset(&config), other).load(&golden("llama3-rope-tiny"));
    let e = e.unwrap_err().to_string();
    assert!(e.contains("model.rope_scaling is of type linear"), "{e}");
}

/// Names and shapes are those of `save_pretrained` of transformers 5.24.
#[test]
fn names_are_those_of_transformers() {
    let norm_of_head = [
        "model.layers.1.self_attn.q_layernorm.norms.3.weight",
        "[16]",
    ];
    let cases = [
        ("stablelm", norm_of_head),
        (
            "stablelm",
            [
                "model.layers.0.self_attn.k_layernorm.norms.1.weight",
                "[16]",
            ],
        ),
        ("falcon-groups", ["transformer.h.0.ln_attn.weight", "[64]"]),
        ("falcon-groups", ["transformer.h.1.ln_mlp.bias", "[64]"]),
        (
            "granitemoe",
            [
                "model.layers.0.block_sparse_moe.input_linear.weight",
                "[4, 192, 64]",
            ],
        ),
        (
            "granitemoe",
            [
                "model.layers.0.block_sparse_moe.output_linear.weight",
                "[4, 64, 96]",
            ],
        ),
        (
            "hy_v3",
            ["model.layers.1.mlp.router.gate.weight", "[6, 64]"],
        ),
        (
            "hy_v3",
            ["model.layers.1.mlp.shared_mlp.up_proj.weight", "[24, 64]"],
        ),
        ("kolibri1", ["model.layers.0.post_attn_norm.weight", "[64]"]),
        ("kolibri1", ["model.layers.0.post_ffn_norm.weight", "[64]"]),
    ];
    for (kind, [name, shape]) in cases {
        let file = format!("../tests/data/configs/tiny--{kind}.json");
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let scenario = scenario_of(&preset(&config), &[]);
        let program = shardlab_plan::plan(&scenario).unwrap();
        let all = super::tensors(&program).concat();
        let found = all.iter().find(|t| t.name == name);
        let found = found.unwrap_or_else(|| panic!("{kind}: no {name}"));
        assert_eq!(format!("{:?}", found.shape), shape, "{kind}: {name}");
    }
}

/// A model without a type is refused before it is trained, with the nearest type and what differs.
#[test]
fn models_without_a_type_say_why() {
    let why = |set: &[&str]| {
        let l = Loaded::new(LLAMA, set);
        has_form(&l.program, &l.scenario.model, None).map_err(|e| e.to_string())
    };
    assert_eq!(why(&["model.qk_norm=true"]), Ok(()));
    assert_eq!(
        why(&["model.qk_norm=true", "model.bias=true"]).unwrap_err(),
        "this model has no Hugging Face form: no `model_type` of family llama has exactly these options; the nearest, \
         llama, cannot have model.qk_norm = true"
    );
}

/// Shipped presets that have a type can be exported without a file, and read as themselves.
#[test]
fn shipped_presets_have_a_file() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/models");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let set = [format!("model.preset={name}"), ALONE.to_owned()];
        let Ok(scenario) = shardlab_plan::scenario::parse("test", SCENARIO, &set) else {
            continue;
        };
        if config::type_of(&scenario.model).is_some() {
            let written = written::of(&scenario.model, None);
            assert!(written.is_ok(), "{name}: {}", written.unwrap_err());
            count += 1;
        }
    }
    assert!(count > 10, "{count} presets");
}

/// A file keeps fields that shardlab does not know, and has what the scenario changes in its place:
/// lists of layers have an entry for each, and what belongs to the weights of the file is gone.
#[test]
fn exports_keep_the_fields_of_their_origin() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let mut theirs = read_json(&golden("gemma3-tiny").join("config.json")).unwrap();
    theirs["bos_token_id"] = 3.into();
    theirs["eos_token_id"] = json!([4, 5]);
    theirs["pad_token_id"] = 6.into();
    theirs["use_cache"] = false.into();
    theirs["quantization_config"] = json!({"bits": 4});
    theirs["dtype"] = "bfloat16".into();
    std::fs::write(&path, theirs.to_string()).unwrap();
    let of = |set: &[String]| {
        let scenario = scenario_in(&path, set).unwrap();
        let origin = Origin::of(None, scenario.model_file.as_deref()).unwrap();
        written::of(&scenario.model, origin.as_ref()).unwrap()
    };
    let same = of(&[]);
    for (name, value) in theirs.as_object().unwrap() {
        match name.as_str() {
            "quantization_config" => assert_eq!(same.get(name), None),
            "dtype" => assert_eq!(same[name], "float32"),
            _ => assert_eq!(&same[name], value, "{name}"),
        }
    }
    let deeper = of(&["model.layers=12".to_owned(), "model.ffn=96".to_owned()]);
    let types = deeper["layer_types"].as_array().unwrap();
    assert_eq!(
        (types.len(), &deeper["intermediate_size"]),
        (12, &json!(96))
    );
    assert_eq!(deeper["eos_token_id"], json!([4, 5]));
    // Transformers refuses a padding token that the vocabulary lacks.
    assert_eq!(
        of(&["model.vocab=6".to_owned()])["pad_token_id"],
        Value::Null
    );
}

/// Files next to `config.json` that do not depend on weights are copied, others are not.
#[test]
fn tokenizers_are_copied() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let write = |name: &str| std::fs::write(from.path().join(name), name).unwrap();
    let kept = [
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ];
    kept.iter().for_each(|name| write(name));
    let others = ["model.safetensors", "README.md", "modeling_own.py"];
    others.iter().for_each(|name| write(name));
    let copied = |config: &Value| {
        std::fs::write(from.path().join("config.json"), config.to_string()).unwrap();
        let origin = Origin::of(Some(from.path()), None).unwrap().unwrap();
        origin.copy_files(to.path()).unwrap();
        // A copy onto itself must not empty the files.
        origin.copy_files(from.path()).unwrap();
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        assert_eq!(read(&from.path().join("tokenizer.json")), "tokenizer.json");
        let mut names: Vec<String> = std::fs::read_dir(to.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(copied(&json!({})), kept);
    let coded = json!({"auto_map": {"AutoConfig": "modeling_own.Own"}});
    assert!(copied(&coded).contains(&"modeling_own.py".to_owned()));
}

/// Returns every `config.json` of the tests that `exec` could export: public samples, and goldens.
fn samples() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests");
    let list = |folder: &str| {
        let all = std::fs::read_dir(root.join(folder)).unwrap();
        all.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let goldens = list("goldens").into_iter().map(|p| p.join("config.json"));
    let mut all = list("data/configs");
    all.extend(goldens.filter(|p| p.exists()));
    all.retain(|p| p.extension().is_some_and(|e| e == "json"));
    all.sort();
    all
}

/// Returns the scenario of a file, if it can be planned.
fn scenario_in(config: &Path, set: &[String]) -> Option<Scenario> {
    let preset = format!("model.preset={}", config.display());
    let set = [&[preset, ALONE.to_owned()], set].concat();
    shardlab_plan::scenario::parse("test", SCENARIO, &set).ok()
}

/// Returns whether a model is one that `exec` can train: a language model without other inputs,
/// whose plan is exact.
fn is_exported(s: &Scenario) -> bool {
    let m = &s.model;
    let approximates = m.options.model_type.as_deref();
    let approximates = approximates.and_then(shardlab_plan::models::approximation);
    let is_language = m.options.output.head == shardlab_plan::config::Head::LanguageModel;
    is_language && m.options.context.vision.is_none() && approximates.is_none()
}

/// Types that `exec` does not train. Their options have defaults that files do not say, so that the
/// comparison with a file, which `--init` has in common with exports, takes them for others.
const WITHOUT_KERNELS: [&str; 24] = [
    "bailing_hybrid",
    "bamba",
    "bart",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "led",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "t5gemma",
    "zamba2",
];

/// Every model reads as itself from the file that its export has: from that of its origin, in which
/// only what the scenario changed is other, and from one without an origin. `SHARDLAB_CONFIGS`
/// names a folder that gets these files.
#[test]
fn every_model_reads_as_itself_from_its_export() {
    let keep = std::env::var_os("SHARDLAB_CONFIGS").map(PathBuf::from);
    let dir = tempfile::tempdir().unwrap();
    let (mut failures, mut types) = (Vec::new(), BTreeSet::new());
    for sample in samples() {
        let name = sample.display().to_string();
        let Some(before) = scenario_in(&sample, &[]) else {
            continue;
        };
        if !is_exported(&before) || config::type_of(&before.model).is_none() {
            continue;
        }
        let origin = Origin::of(None, Some(&sample)).unwrap();
        let layers = format!("model.layers={}", before.model.layers * 2);
        let other = scenario_in(&sample, &[layers]);
        let cases = [
            ("same", Some(&before), origin.as_ref()),
            ("layers", other.as_ref(), origin.as_ref()),
            ("fresh", Some(&before), None),
        ];
        for (case, scenario, origin) in cases {
            let Some(scenario) = scenario else { continue };
            let model = &scenario.model;
            let written = match written::of(model, origin) {
                Ok(written) => written,
                Err(e) => {
                    let kind = model.options.model_type.as_deref().unwrap_or_default();
                    if case == "same" && !WITHOUT_KERNELS.contains(&kind) {
                        failures.push(format!("{name}: {e}"));
                    }
                    continue;
                }
            };
            let stem = sample.file_stem().unwrap().to_string_lossy().into_owned();
            let stem = match stem == "config" {
                true => sample
                    .parent()
                    .unwrap()
                    .file_name()
                    .unwrap()
                    .to_string_lossy()
                    .into_owned(),
                false => stem,
            };
            let path = dir.path().join(format!("{stem}.{case}.json"));
            std::fs::write(&path, written.to_string()).unwrap();
            if let Some(keep) = &keep {
                std::fs::write(keep.join(path.file_name().unwrap()), written.to_string()).unwrap();
            }
            let preset = format!("model.preset={}", path.display());
            let again =
                shardlab_plan::scenario::parse("test", SCENARIO, &[preset, ALONE.to_owned()]);
            let mut again = match again {
                Ok(again) => again,
                Err(e) => {
                    failures.push(format!("{name} {case}: {e}"));
                    continue;
                }
            };
            again.model.preset.clone_from(&model.preset);
            // Training, not the model: exports have none.
            let options = &mut again.model.options;
            options.dropout = model.options.dropout;
            options.attention.attention_dropout = model.options.attention.attention_dropout;
            options.embedding.embedding_dropout = model.options.embedding.embedding_dropout;
            let values = |m: &Model| serde_json::to_value(m).unwrap();
            let (ours, theirs) = (values(model), values(&again.model));
            for (key, value) in ours.as_object().unwrap() {
                let close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-12 * b.abs();
                let same = value.as_f64().zip(theirs[key].as_f64()).is_some_and(close);
                let trains = shardlab_plan::models::changes_training(key);
                if !same && !trains && *value != theirs[key] {
                    failures.push(format!(
                        "{name} {case}: {key} is {}, was {value}",
                        theirs[key]
                    ));
                }
            }
            types.insert(
                written["model_type"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
            );
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(types.len() > 50, "{types:?}");
}
