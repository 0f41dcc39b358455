use super::*;
use crate::train::testing::{Memory, scenario_of};
use crate::train::{hf, init};
use serde_json::json;
use shardlab_plan::Scenario;
use std::collections::BTreeMap;
use std::path::PathBuf;

const LLAMA: &str = "[model]\nfamily = \"llama\"\nlayers = 3\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 112\nvocab = 256\nmax_seq_len = 64\n\
    [train]\nseq_len = 48\n[lora]\nr = 4\nlora_alpha = 8\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n[precision]\ncompute = \"f32\"\n";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens")
        .join(name)
}

struct Loaded {
    scenario: Scenario,
    program: Program,
    layout: StateLayout,
    memory: Memory,
}

impl Loaded {
    fn new(set: &[&str]) -> Self {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = scenario_of(LLAMA, &set);
        let program = shardlab_plan::plan(&scenario).unwrap();
        let layout = StateLayout::new(&program).unwrap();
        let mut memory = Memory::new(&program);
        init::from_seed(&program, &layout, 0, &mut memory).unwrap();
        Self {
            scenario,
            program,
            layout,
            memory,
        }
    }

    fn lora(&self) -> Lora {
        self.scenario.lora.clone().unwrap()
    }

    fn load(&mut self, dir: &Path) -> Result<(), TrainError> {
        let lora = self.lora();
        load(dir, &self.program, &lora, &self.layout, &mut self.memory)
    }

    fn export(&mut self, dir: &Path) {
        let lora = self.lora();
        export(dir, &self.program, &lora, &self.layout, &mut self.memory).unwrap();
    }

    fn fault(&mut self, dir: &Path) -> String {
        self.load(dir).unwrap_err().to_string()
    }
}

/// Returns the files as read by the safetensors crate.
fn tensors(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(dir.join(TENSORS)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(n, t)| (n.to_owned(), (t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

/// What PEFT has written is written again, with the same names and values.
#[test]
fn adapters_of_peft_survive_loading_and_export_on_any_mesh() {
    let original = tensors(&golden("lora-tiny"));
    assert_eq!(original.len(), 3 * 7 * 2);
    for set in [
        &["mesh.dp_shard=1"][..],
        &["mesh.dp_shard=3", "mesh.gpus_per_node=3"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=megatron", "fsdp.strategy=optim"],
    ] {
        let mut l = Loaded::new(set);
        l.load(&golden("lora-tiny")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        l.export(dir.path());
        assert_eq!(tensors(dir.path()), original, "{set:?}");
        l.load(dir.path()).unwrap();
    }
}

/// Modules that are trained in full are in the same file. `norm` is the end of the names of all
/// norms.
#[test]
fn saved_modules_of_peft_survive_loading_and_export() {
    let original = tensors(&golden("lora-saved-tiny"));
    assert_eq!(original.len(), 3 * 2 * 2 + 3 * 2 + 3);
    let targets = "lora.target_modules=[\"q_proj\", \"v_proj\"]";
    let saved = "lora.modules_to_save=[\"embed_tokens\", \"lm_head\", \"norm\"]";
    let mut l = Loaded::new(&[targets, saved]);
    l.load(&golden("lora-saved-tiny")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    l.export(dir.path());
    assert_eq!(tensors(dir.path()), original);
    let config = read_json(&dir.path().join(CONFIG)).unwrap();
    let names = config["modules_to_save"].as_array().unwrap();
    assert_eq!(names.len(), 3 + 3 * 2);
    assert!(names.contains(&"model.layers.2.input_layernorm".into()));
    let fault = Loaded::new(&[targets]).fault(&golden("lora-saved-tiny"));
    assert!(
        fault.contains("lora.modules_to_save have no module"),
        "{fault}"
    );
    assert!(fault.contains("base_model.model.lm_head.weight"), "{fault}");
}

/// The configuration names layers as `LoraConfig.target_modules` does: by their last component if
/// all such layers have adapters, else in full.
#[test]
fn the_configuration_names_the_targets() {
    let names = |set: &[&str]| {
        let l = Loaded::new(set);
        let config = config::of(&l.program, &l.lora());
        let names = config["target_modules"].as_array().unwrap();
        let names = names.iter().map(|n| n.as_str().unwrap().to_owned());
        (names.collect::<Vec<_>>(), config)
    };
    let (all, config) = names(&[]);
    assert_eq!(
        all,
        [
            "down_proj",
            "gate_proj",
            "k_proj",
            "o_proj",
            "q_proj",
            "up_proj",
            "v_proj"
        ]
    );
    // PEFT's own file, for what both say.
    let theirs = read_json(&golden("lora-tiny").join(CONFIG)).unwrap();
    for (key, value) in config.as_object().unwrap() {
        if key == "target_modules" || key == "base_model_name_or_path" || key == "init_lora_weights"
        {
            continue;
        }
        let equal = match (value.as_f64(), theirs[key].as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => *value == theirs[key],
        };
        assert!(equal, "{key}: {value}, not {}", theirs[key]);
    }
    let one = "lora.target_modules=[\"layers.1.attention.v\", \"q_proj\"]";
    assert_eq!(
        names(&[one]).0,
        ["model.layers.1.self_attn.v_proj", "q_proj"]
    );
}

#[test]
fn folders_that_do_not_fit_are_refused() {
    let dir = golden("lora-tiny");
    let other = Loaded::new(&["lora.r=8", "lora.lora_alpha=4", "lora.use_rslora=true"]).fault(&dir);
    assert!(
        other.ends_with(
            "`r` is 4, not 8; `lora_alpha` is 8, not 4; `use_rslora` is false, not true"
        ),
        "{other}"
    );
    let fewer = Loaded::new(&["lora.target_modules=[\"q\", \"k\", \"v\", \"o\", \"w1\", \"w3\"]"])
        .fault(&dir);
    assert!(
        fewer.contains("no module: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight, "),
        "{fewer}"
    );
    let more = Loaded::new(&["model.layers=4"]).fault(&dir);
    assert!(
        more.contains("missing base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight, "),
        "{more}"
    );
    let wider = Loaded::new(&["model.ffn=176"]).fault(&dir);
    assert!(
        wider.contains("has shape [4, 112], the adapter's is [4, 176]")
            || wider.contains("has shape [112, 4], the adapter's is [176, 4]"),
        "{wider}"
    );
}

const PATTERNS: [&str; 5] = [
    "lora.target_modules=[\"q_proj\", \"v_proj\", \"w1\", \"w2\", \"model.layers.0.self_attn.o_proj\"]",
    "lora.layers_to_transform=[1, 2]",
    "lora.exclude_modules=[\"layers.2.self_attn.v_proj\"]",
    "lora.rank_pattern={ 'layers.1.attention.q' = 6, down_proj = 2, 'layers\\.\\d+\\.mlp\\..*' = 8 }",
    "lora.alpha_pattern={ v_proj = 16, 'layers.2.*' = 2 }",
];

/// Ranks and scalings of single layers, some blocks, and layers that are left out.
#[test]
fn patterns_of_peft_survive_loading_and_export() {
    let original = tensors(&golden("lora-patterns-tiny"));
    assert_eq!(original.len(), 2 * 8);
    let mut l = Loaded::new(&PATTERNS);
    l.load(&golden("lora-patterns-tiny")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    l.export(dir.path());
    assert_eq!(tensors(dir.path()), original);
    l.load(dir.path()).unwrap();
    let config = read_json(&dir.path().join(CONFIG)).unwrap();
    let layer = |n: u32, name: &str| format!("model.layers.{n}.{name}");
    for (key, want) in [
        (
            "target_modules",
            json!([
                "down_proj",
                "gate_proj",
                layer(0, "self_attn.o_proj"),
                "q_proj",
                "v_proj"
            ]),
        ),
        ("exclude_modules", json!([layer(2, "self_attn.v_proj")])),
        ("layers_to_transform", json!([1, 2])),
        ("layers_pattern", json!(null)),
        (
            "rank_pattern",
            json!({ "down_proj": 2, "gate_proj": 8, (layer(1, "self_attn.q_proj")): 6 }),
        ),
        (
            "alpha_pattern",
            json!({
                (layer(2, "mlp.down_proj")): 2.0,
                (layer(2, "mlp.gate_proj")): 2.0,
                (layer(2, "self_attn.q_proj")): 2.0,
                "v_proj": 16.0,
            }),
        ),
    ] {
        assert_eq!(config[key], want, "{key}");
    }
}

#[test]
fn patterns_that_differ_are_refused() {
    let dir = golden("lora-patterns-tiny");
    let mut set = PATTERNS;
    set[4] = "lora.alpha_pattern={ v_proj = 16 }";
    let fault = Loaded::new(&set).fault(&dir);
    let what = "`lora_alpha` of `model.layers.2.self_attn.q_proj` is 2, not 8";
    assert!(fault.ends_with(what), "{fault}");
    let fault = Loaded::new(&[]).fault(&dir);
    let what = "`r` of `model.layers.0.mlp.gate_proj` is 8, not 4";
    assert!(fault.contains(what), "{fault}");
}

/// A folder with the model and its adapters holds both; each loader takes its own.
#[test]
fn the_model_is_loaded_without_its_adapters() {
    let mut l = Loaded::new(&[]);
    let named = |l: &Loaded, name: &str| {
        let at = l.program.params.iter().position(|p| p.name == name);
        ParamId(at.unwrap() as u32)
    };
    let q = named(&l, "layers.0.attention.q.weight");
    let a = named(&l, "layers.0.attention.q.lora_A.weight");
    let before = l.layout.weights(&mut l.memory, q).unwrap();
    let start = l.layout.weights(&mut l.memory, a).unwrap();
    let (model, seq) = (l.scenario.model.clone(), l.scenario.train.seq_len);
    hf::load(
        &golden("lora-tiny"),
        &l.program,
        &model,
        seq,
        &l.layout,
        &mut l.memory,
    )
    .unwrap();
    assert_ne!(l.layout.weights(&mut l.memory, q).unwrap(), before);
    assert_eq!(l.layout.weights(&mut l.memory, a).unwrap(), start);
    l.load(&golden("lora-tiny")).unwrap();
    assert_ne!(l.layout.weights(&mut l.memory, a).unwrap(), start);
}

/// `A` starts as PEFT's (Kaiming uniform: within 1 / sqrt(in)), `B` as zeros.
#[test]
fn adapters_start_as_pefts_do() {
    let mut l = Loaded::new(&[]);
    for id in (0..l.program.params.len() as u32).map(ParamId) {
        let p = l.program.params[id.index()].clone();
        let values = l.layout.weights(&mut l.memory, id).unwrap();
        let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        if p.name.ends_with("lora_B.weight") {
            assert_eq!(largest, 0.0, "{}", p.name);
        } else if p.name.ends_with("lora_A.weight") {
            let bound = 1.0 / (p.shape[1] as f32).sqrt();
            assert!(
                largest <= bound && largest > 0.9 * bound,
                "{}: {largest}",
                p.name
            );
        }
    }
}
