//! Tests that read published configurations.

use crate::reader::Reader;
use crate::{Job, Lack, Options, Status, read};
use proptest::prelude::*;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const DATA: &str = "../tests/data/frameworks";

/// Returns the published configurations, in order.
pub(crate) fn fixtures() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in std::fs::read_dir(DATA).unwrap() {
        let folder = folder.unwrap().path();
        if folder.is_dir() {
            let files = std::fs::read_dir(folder)
                .unwrap()
                .map(|f| f.unwrap().path());
            found.extend(files.filter(|f| f.is_file()));
        }
    }
    found.sort();
    found
}

fn options() -> Options {
    Options {
        gpus: Some("h200".parse().unwrap()),
        ..Options::default()
    }
}

/// Reads a fixture, with 8 GPUs and Mistral 7B or a Llama for what it leaves open.
fn job(path: &Path) -> Job {
    job_with_options(path).0
}

/// Reads a fixture and returns the job with the options used to read it.
pub(crate) fn job_with_options(path: &Path) -> (Job, Options) {
    let mut options = options();
    loop {
        let error = match read(&[path.into()], &options) {
            Ok(job) => return (job, options),
            Err(error) => error.to_string(),
        };
        let counted = options.gpus.as_ref().is_some_and(|g| g.count.is_some());
        if error.contains("on how many GPUs") && !counted {
            options.gpus = Some("8xh200".parse().unwrap());
        } else if error.contains("model-parallel ranks") && !counted {
            // The script is one node's part of a job on many nodes.
            options.gpus = Some("128xh200".parse().unwrap());
        } else if error.contains("--model") && options.model.is_none() {
            // Accelerate refuses a class of blocks that the model does not have.
            let is_llama = std::fs::read_to_string(path)
                .unwrap()
                .contains("LlamaDecoderLayer");
            let model = if is_llama {
                "HuggingFaceTB/SmolLM2-360M"
            } else {
                "mistralai/Mistral-7B-v0.1"
            };
            options.model = Some(format!("{DATA}/trainer/{model}").into());
        } else {
            panic!("{error}");
        }
    }
}

fn table(job: &Job) -> String {
    let mut text = String::new();
    let root = std::fs::canonicalize(DATA).unwrap();
    for row in job.rows() {
        let place = row.place.as_ref().map_or("-".to_owned(), |p| {
            let file = Path::new(&p.file)
                .file_name()
                .unwrap()
                .to_string_lossy()
                .into_owned();
            format!("{file}:{}:{}", p.at.line, p.at.column)
        });
        let settings: Vec<String> = row
            .settings
            .iter()
            .map(|s| format!("{} = {}", s.key, s.value))
            .collect();
        let status = match row.status {
            Status::NoCounterpart(lack) => format!("no counterpart, lacks {}", lack.word()),
            status => status.word().to_owned(),
        };
        let why = row.why.as_deref().unwrap_or("");
        let line = format!(
            "{place} | {} = {} | {status} | {} | {why}",
            row.key,
            row.value,
            settings.join(", ")
        );
        writeln!(text, "{}", line.replace(&root.display().to_string(), "…")).unwrap();
    }
    text
}

#[test]
fn every_key_of_published_configurations_is_accounted_for() {
    let fixtures = fixtures();
    assert!(fixtures.len() >= 30, "{}", fixtures.len());
    let mut bad = Vec::new();
    for path in fixtures {
        let mut job = job(&path);
        let refused = job.decisive().count() > 0;
        if let Err(e) = job.scenario(&[])
            && !refused
        {
            bad.push(format!("{}: {e}", path.display()));
        }
        let folder = path
            .parent()
            .unwrap()
            .file_name()
            .unwrap()
            .to_string_lossy();
        let name = format!("{folder}-{}", path.file_name().unwrap().to_string_lossy());
        insta::assert_snapshot!(name, table(&job));
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Returns the number of leaves of a configuration: all values that are not maps with entries.
fn leaves(node: &crate::tree::Node) -> usize {
    if node.entries().is_empty() {
        return 1;
    }
    node.entries().iter().map(|(_, n)| leaves(n)).sum()
}

#[test]
fn no_key_is_dropped() {
    for path in fixtures() {
        let text = std::fs::read_to_string(&path).unwrap();
        let shown = path.display().to_string();
        let (_, root) = crate::detect::parse(&shown, &text).unwrap();
        let job = job(&path);
        let rows = job.rows().iter().filter_map(|r| r.place.as_ref());
        assert_eq!(
            rows.filter(|p| p.file == shown).count(),
            leaves(&root),
            "{shown}"
        );
    }
}

#[test]
fn what_is_written_is_read_again() {
    let path = Path::new(DATA).join("torchtitan/llama3-8b.toml");
    let mut job = job(&path);
    let scenario = job.scenario(&[]).unwrap();
    let again = shardlab_plan::scenario::parse(&job.name, &job.text(), &[]).unwrap();
    assert_eq!(format!("{scenario:?}"), format!("{again:?}"));
}

/// Reads a script, and its scenario unless it is refused.
fn try_script(script: &str, options: &Options) -> Job {
    let mut job = try_text("train.sh", script, options).unwrap_or_else(|e| panic!("{e}\n{script}"));
    if job.decisive().count() == 0 {
        job.scenario(&[])
            .unwrap_or_else(|e| panic!("{e}\n{script}"));
    }
    job
}

/// Reads a text as a file with a name.
fn try_text(name: &str, text: &str, options: &Options) -> Result<Job, String> {
    let mut reader = Reader::default();
    let read = reader.text(Path::new(name), text, None);
    let finished = read.and_then(|()| crate::derive::finish(&mut reader, options));
    finished.map_err(|e| e.to_string())?;
    let mut job = Job::new(&[name.into()], reader);
    let refused = job.decisive().count() > 0;
    match job.scenario(&[]) {
        Err(e) if !refused => Err(e.to_string()),
        _ => Ok(job),
    }
}

fn eight() -> Options {
    Options {
        gpus: Some("8xh100".parse().unwrap()),
        ..Options::default()
    }
}

fn setting(job: &Job, key: &str) -> Option<String> {
    let mut all = job.rows().iter().flat_map(|r| &r.settings);
    all.find(|s| s.key == key).map(|s| s.value.clone())
}

/// Asserts that a job sets these keys to these values.
fn has(job: &Job, wanted: &[(&str, &str)]) {
    for (key, value) in wanted {
        assert_eq!(setting(job, key).as_deref(), Some(*value), "{key}");
    }
}

/// Returns the status of a key of the files, and why it has it.
fn row(job: &Job, key: &str) -> (Status, String) {
    let row = job.rows().iter().find(|r| r.key == key).unwrap();
    (row.status, row.why.clone().unwrap_or_default())
}

#[test]
fn bad_input_says_where_and_what_to_write() {
    let base = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\n";
    let error = |text: &str| {
        let text = format!("{base}{text}");
        try_text("job.yaml", &text, &eight())
            .map(|j| table(&j))
            .unwrap_err()
    };
    assert_eq!(
        error("micro_batch_sizee: 2\n"),
        "job.yaml:3:1: `micro_batch_sizee` is not a key of Axolotl; did you mean `micro_batch_size`?"
    );
    assert_eq!(
        error("fsdp_config:\n  fsdp_ofload_params: true\n"),
        "job.yaml:4:3: `fsdp_ofload_params` is not a key of Axolotl; did you mean `offload_params`?"
    );
    assert_eq!(
        error("micro_batch_size: two\n"),
        "job.yaml:3:19: micro_batch_size: expected an integer, got `two`"
    );
    assert_eq!(
        error("dp_shard_size: 3\n"),
        "job.yaml:3:1: 3 shards, but the job has 8 data-parallel ranks"
    );
    assert_eq!(
        error("micro_batch_size: 3\nbatch_size: 2\n"),
        "job.yaml:4:1: a batch of 2 is smaller than a micro-batch of 3"
    );
    assert_eq!(
        error("fsdp_version: 3\nfsdp: [full_shard]\n"),
        "job.yaml:3:1: expected version 1 or 2, got 3"
    );
    assert!(error("deepspeed: no/such.json\n").contains("file `no/such.json` is not found"));
    // For values that scenarios reject, errors have the place in the configuration.
    let refused = error("micro_batch_size: 0\n");
    assert!(
        refused.starts_with("job.yaml:3:1: micro_batch_size = 0: "),
        "{refused}"
    );
}

/// Axolotl divides its `batch_size` by the micro-batch only, so it is a batch size per rank.
#[test]
fn the_batch_of_axolotl_is_that_of_a_rank() {
    let steps = |text: &str| {
        let text = format!("base_model: Qwen/Qwen3-8B\nmicro_batch_size: 3\n{text}");
        let job = try_text("job.yaml", &text, &eight()).unwrap();
        setting(&job, "train.grad_accum")
    };
    assert_eq!(steps("batch_size: 64\n").as_deref(), Some("21"));
    let both = "batch_size: 64\ngradient_accumulation_steps: 2\n";
    assert_eq!(steps(both).as_deref(), Some("2"));
}

#[test]
fn layers_with_adapters_are_those_of_all_keys() {
    let targets = |text: &str| {
        let text = format!("base_model: Qwen/Qwen3-8B\nmicro_batch_size: 1\nadapter: lora\n{text}");
        let job = try_text("job.yaml", &text, &eight()).unwrap();
        (setting(&job, "lora.target_modules").unwrap(), table(&job))
    };
    let linear = "lora_target_modules: [q_proj]\nlora_target_linear: true\n";
    assert_eq!(targets(linear).0, "\"all-linear\"");
    let expression = "lora_target_modules: 'model.layers.[\\d]+.self_attn.(q|v)_proj'\n";
    assert_eq!(
        targets(expression).0,
        "[\"self_attn.q_proj\", \"self_attn.v_proj\"]"
    );
    // PEFT requires at least one name that the model has.
    let (kept, rows) = targets("lora_target_modules: [q_proj, in_proj]\n");
    assert_eq!(kept, "[\"q_proj\"]");
    assert!(
        rows.contains("skipped, as PEFT does where the model has no such layer: in_proj"),
        "{rows}"
    );
    // The row shows the beginning of a long list; its note lists every name.
    let long =
        "lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, in_proj, out_proj]\n";
    assert!(
        targets(long).1.contains("no such layer: in_proj, out_proj"),
        "{}",
        targets(long).1
    );
    let none = "base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_target_modules: [in_proj]\n";
    let error = try_text("job.yaml", none, &eight())
        .map(|j| table(&j))
        .unwrap_err();
    assert!(error.contains("matches no linear layer"), "{error}");
}

/// Modules trained in full next to adapters, given as lists and as text.
#[test]
fn modules_that_adapters_save_are_read() {
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nadapter: lora\nlora_r: 16\nlora_target_linear: true\n\
                   lora_modules_to_save: [embed_tokens, lm_head]\n";
    let factory = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\nlora_target: all\n\
                   additional_target: embed_tokens,lm_head\ncutoff_len: 512\nper_device_train_batch_size: 1\n";
    for text in [axolotl, factory] {
        let job = try_text("job.yaml", text, &eight()).unwrap();
        let saved = setting(&job, "lora.modules_to_save");
        assert_eq!(
            saved.as_deref(),
            Some("[\"embed_tokens\", \"lm_head\"]"),
            "{text}"
        );
    }
}

/// Ranks of single layers, some blocks, and layers without adapters.
#[test]
fn patterns_of_adapters_are_read() {
    let axolotl = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nadapter: lora\nlora_r: 16\n\
                   lora_target_modules: [q_proj, v_proj]\npeft_layers_to_transform: [0, 35]\npeft_layers_pattern: [layers]\n\
                   lora_rank_pattern: {v_proj: 8}\nlora_alpha_pattern: {'layers\\.0\\..*': 32}\n";
    let job = try_text("job.yaml", axolotl, &eight()).unwrap();
    for (key, value) in [
        ("lora.layers_to_transform", "[0, 35]"),
        ("lora.layers_pattern", "[\"layers\"]"),
        ("lora.rank_pattern", "{ \"v_proj\" = 8 }"),
        ("lora.alpha_pattern", r#"{ "layers\\.0\\..*" = 32.0 }"#),
    ] {
        assert_eq!(setting(&job, key).as_deref(), Some(value), "{key}");
    }
    // Without adapters, they have no effect.
    let full = axolotl.replace("adapter: lora\n", "");
    let job = try_text("job.yaml", &full, &eight()).unwrap();
    assert_eq!(setting(&job, "lora.rank_pattern"), None);
    let wrong = axolotl.replace("{v_proj: 8}", "8");
    let error = try_text("job.yaml", &wrong, &eight()).map(|j| table(&j));
    let error = error.unwrap_err();
    assert!(
        error.contains("a table from patterns of layers to numbers"),
        "{error}"
    );
    let nemo = "step_scheduler: {local_batch_size: 1}\nmodel:\n  pretrained_model_name_or_path: Qwen/Qwen3-8B\n\
                peft:\n  _target_: nemo_automodel.components._peft.lora.PeftConfig\n  dim: 8\n  match_all_linear: true\n  \
                exclude_modules: [lm_head, down_proj]\n";
    let job = try_text("job.yaml", nemo, &eight()).unwrap();
    let excluded = setting(&job, "lora.exclude_modules");
    assert_eq!(excluded.as_deref(), Some("[\"lm_head\", \"down_proj\"]"));
}

/// PEFT's own file adds the adapter to a job.
#[test]
fn configurations_of_peft_are_read() {
    let config = include_str!("../../tests/goldens/lora-patterns-tiny/adapter_config.json");
    let named = config.replace(
        "\"base_model_name_or_path\": null",
        "\"base_model_name_or_path\": \"Qwen/Qwen3-8B\"",
    );
    let job = try_text("adapter_config.json", &named, &eight()).unwrap();
    assert_eq!(job.decisive().count(), 0);
    for (key, value) in [
        ("lora.r", "4"),
        ("lora.exclude_modules", "[\"layers.2.self_attn.v_proj\"]"),
        ("lora.layers_to_transform", "[1, 2]"),
        ("lora.layers_pattern", "[\"layers\"]"),
        (
            "lora.rank_pattern",
            r#"{ "down_proj" = 2, "layers.1.self_attn.q_proj" = 6, "layers\\.\\d+\\.mlp\\..*" = 8 }"#,
        ),
        (
            "lora.alpha_pattern",
            r#"{ "layers.2.*" = 2.0, "v_proj" = 16.0 }"#,
        ),
    ] {
        assert_eq!(setting(&job, key).as_deref(), Some(value), "{key}");
    }
    let unknown = job.rows().iter().filter(|r| {
        let why = r.why.as_deref().unwrap_or_default();
        why.contains("not a key of")
    });
    assert_eq!(unknown.count(), 0);
    let other = named.replace("\"LORA\"", "\"LOHA\"");
    let job = try_text("adapter_config.json", &other, &eight()).unwrap();
    assert_eq!(job.decisive().count(), 1);
}

#[test]
fn decomposed_adapters_are_read() {
    let text = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nadapter: lora\nlora_r: 16\nlora_target_linear: true\npeft_use_dora: true\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    assert_eq!(setting(&job, "lora.use_dora").as_deref(), Some("true"));
}

#[test]
fn torchtune_names_layers_with_adapters_by_its_own_names() {
    let text = "model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\n  lora_attn_modules: ['q_proj', 'output_proj']\n  \
                apply_lora_to_mlp: True\n  lora_rank: 8\nbatch_size: 2\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    assert_eq!(
        setting(&job, "lora.target_modules").as_deref(),
        Some("[\"q_proj\", \"o_proj\", \"gate_proj\", \"down_proj\", \"up_proj\"]")
    );
}

#[test]
fn what_is_missing_is_asked_for() {
    let error = |text: &str, options: &Options| {
        try_text("job.yaml", text, options)
            .map(|j| table(&j))
            .unwrap_err()
    };
    let unknown = error("base_model: some/model\n", &eight());
    assert!(
        unknown.starts_with(
            "job.yaml:1:1: model `some/model` is not on this machine: download https://"
        ),
        "{unknown}"
    );
    let nameless = error("sequence_len: 2048\n", &eight());
    assert!(nameless.contains("add --model FOLDER"), "{nameless}");
    let model = "base_model: Qwen/Qwen3-8B\n";
    assert!(error(model, &Options::default()).contains("add --gpus, such as --gpus 8xh100"));
    let uncounted = Options {
        gpus: Some("h100".parse().unwrap()),
        ..Options::default()
    };
    assert!(error(model, &uncounted).contains("on how many GPUs"));
}

#[test]
fn contradictions_between_files_name_both() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(
        at("ds.json"),
        "{\"train_micro_batch_size_per_gpu\": 4, \"zero_optimization\": {\"stage\": 3}}",
    )
    .unwrap();
    std::fs::write(
        at("a.yaml"),
        "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\ndeepspeed: ds.json\n",
    )
    .unwrap();
    let error = read(&[at("a.yaml")], &eight()).unwrap_err().to_string();
    assert!(
        error.contains("ds.json:1:2: train_micro_batch_size_per_gpu = 4 contradicts per_device_train_batch_size = 2 (")
            && error.ends_with("a.yaml:2:1)"),
        "{error}"
    );
    std::fs::write(
        at("b.yaml"),
        "model_name_or_path: Qwen/Qwen3-8B\ndeepspeed: b.yaml\n",
    )
    .unwrap();
    let error = read(&[at("b.yaml")], &eight()).unwrap_err().to_string();
    assert!(error.contains("refers back to itself"), "{error}");
}

#[test]
fn engines_set_policy_precision_and_accumulation() {
    let job = |text: &str| {
        let text = format!("model_name_or_path: Qwen/Qwen3-8B\nmax_length: 1024\n{text}");
        try_text("job.yaml", &text, &eight()).unwrap()
    };
    for (text, expected) in [
        (
            "fsdp: true\nbf16: true\ngradient_accumulation_steps: 4\n",
            vec![
                ("fsdp.policy", Some("\"fsdp2\"")),
                ("fsdp.gradient_sync", Some("\"last\"")),
                ("precision.param_dtype", Some("\"bf16\"")),
                ("precision.reduce_dtype", Some("\"bf16\"")),
                ("train.micro_batch", Some("8")),
            ],
        ),
        (
            "fsdp: shard_grad_op auto_wrap\nbf16: true\n",
            vec![
                ("fsdp.reshard_after_forward", Some("false")),
                ("fsdp.units", Some("\"block\"")),
                // Without accumulation, there is nothing to synchronize at its end.
                ("fsdp.gradient_sync", None),
            ],
        ),
        (
            "fsdp: full_shard offload\nbf16: true\n",
            vec![
                ("fsdp.policy", Some("\"fsdp2\"")),
                (
                    "fsdp.offload",
                    Some("[\"params\", \"grads\", \"optimizer\"]"),
                ),
            ],
        ),
        (
            "torch_dtype: bfloat16\n",
            vec![
                ("fsdp.strategy", Some("\"no_shard\"")),
                ("precision.main_params", Some("\"none\"")),
                ("precision.moments", Some("\"bf16\"")),
            ],
        ),
        (
            "seed: 1\n",
            vec![("precision.param_dtype", Some("\"f32\""))],
        ),
    ] {
        let job = job(text);
        for (key, value) in expected {
            assert_eq!(setting(&job, key).as_deref(), value, "{key} of {text}");
        }
    }
}

/// Reentrant recompute is only possible in the model's code, in eager jobs.
#[test]
fn only_recompute_of_the_models_code_is_reentrant() {
    const ON: &str = "gradient_checkpointing: true\n";
    const KWARGS: &str = "gradient_checkpointing_kwargs:\n  use_reentrant: true\n";
    let reentrant = |text: &str| {
        let text = format!(
            "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 1024\nbf16: true\n{text}{KWARGS}"
        );
        let job = try_text("job.yaml", &text, &eight()).unwrap();
        setting(&job, "train.use_reentrant")
    };
    assert_eq!(
        reentrant(&format!("fsdp: true\n{ON}")).as_deref(),
        Some("true")
    );
    let of_fsdp = "fsdp: true\nfsdp_config:\n  activation_checkpointing: true\n";
    assert_eq!(reentrant(of_fsdp), None);
    assert_eq!(reentrant(&format!("{ON}torch_compile: true\n")), None);
    assert_eq!(reentrant("fsdp: true\n"), None);
}

#[test]
fn activations_of_trl_go_to_the_host() {
    let text = "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 1024\nactivation_offloading: true\n";
    let job = try_text("job.yaml", text, &eight()).unwrap();
    assert_eq!(
        setting(&job, "train.activation_offload").as_deref(),
        Some("true")
    );
}

#[test]
fn hybrid_sharding_replicates_over_nodes() {
    let text = "model_name_or_path: Qwen/Qwen3-8B\nfsdp: hybrid_shard auto_wrap\nbf16: true\nmax_length: 512\n";
    let options = Options {
        gpus: Some("4x8xh100".parse().unwrap()),
        ..Options::default()
    };
    let job = try_text("job.yaml", text, &options).unwrap();
    assert_eq!(setting(&job, "mesh.dp_shard").as_deref(), Some("8"));
    assert_eq!(setting(&job, "mesh.dp_replicate").as_deref(), Some("4"));
}

/// Experts are divided among the ranks that shard parameters; dense models have no experts.
#[test]
fn expert_parallel_sizes_of_three_frameworks() {
    let sixteen = Options {
        gpus: Some("2x8xh100".parse().unwrap()),
        ..Options::default()
    };
    let nemo = |model: &str, ep: u64| {
        format!(
            "recipe: TrainFinetuneRecipeForNextTokenPrediction\nmodel:\n  pretrained_model_name_or_path: {model}\n\
             distributed:\n  strategy: fsdp2\n  ep_size: {ep}\nstep_scheduler:\n  local_batch_size: 1\n"
        )
    };
    let of = |text: &str| {
        let job = try_text("job.yaml", text, &sixteen).unwrap();
        (setting(&job, "mesh.ep"), job.decisive().count())
    };
    assert_eq!(
        of(&nemo("Qwen/Qwen3-30B-A3B", 8)),
        (Some("8".to_owned()), 0)
    );
    assert_eq!(of(&nemo("Qwen/Qwen3-30B-A3B", 1)), (None, 0));
    assert_eq!(of(&nemo("Qwen/Qwen3-8B", 8)), (None, 0));
    // There are more expert-parallel ranks than ranks that shard parameters.
    assert_eq!(of(&nemo("Qwen/Qwen3-30B-A3B", 32)), (None, 1));
}

#[test]
fn adapters_and_packed_weights_are_read() {
    let base =
        "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nlora_r: 16\nlora_target_linear: true\n";
    let read = |more: &str| try_text("job.yaml", &format!("{base}{more}"), &eight()).unwrap();
    let job = read("adapter: lora\nload_in_4bit: false\n");
    assert_eq!(job.decisive().count(), 0);
    assert_eq!(setting(&job, "lora.r").as_deref(), Some("16"));
    let off = job.rows().iter().find(|r| r.key == "load_in_4bit").unwrap();
    assert_eq!(off.status.lack(), Lack::Nothing);
    // Options of adapters do not turn adapters on.
    let job = read("");
    assert_eq!(setting(&job, "lora.r"), None);
    let frozen = |job: &Job| {
        let value = setting(job, "precision.frozen_params")?;
        Some(value.trim_matches('"').to_owned())
    };
    // Axolotl also quantizes the scales unless a key says otherwise.
    let job = read("adapter: qlora\nload_in_4bit: true\n");
    assert_eq!(frozen(&job).as_deref(), Some("nf4"));
    let job = read(
        "adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs:\n  bnb_4bit_use_double_quant: false\n",
    );
    assert_eq!(frozen(&job).as_deref(), Some("nf4_f32"));
    assert_eq!(frozen(&read("adapter: lora\nload_in_4bit: false\n")), None);
    let job = read("adapter: lora\nload_in_8bit: true\n");
    assert_eq!(frozen(&job).as_deref(), Some("int8"));
    // These jobs have packed weights without adapters.
    for key in ["load_in_4bit", "load_in_8bit"] {
        let job = read(&format!("{key}: true\n"));
        let keys: Vec<&str> = job.decisive().map(|r| r.key.as_str()).collect();
        assert_eq!(keys, [key]);
    }
    // The same keys in other frameworks.
    let of = |text: &str| try_text("job.yaml", text, &eight()).unwrap();
    let factory = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\nquantization_bit: ";
    assert_eq!(
        frozen(&of(&format!("{factory}4\n"))).as_deref(),
        Some("nf4")
    );
    assert_eq!(
        frozen(&of(&format!("{factory}8\n"))).as_deref(),
        Some("int8")
    );
    assert_eq!(of(&format!("{factory}3\n")).decisive().count(), 1);
    let tune = "model:\n  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b\n  lora_rank: 8\n\
                tokenizer:\n  max_seq_len: 512\nbatch_size: 2\n";
    let job = of(tune);
    assert_eq!(frozen(&job).as_deref(), Some("nf4"));
    assert_eq!(setting(&job, "lora.r").as_deref(), Some("8"));
}

/// Both answers of a sample are sequences of one micro-batch. The reference model of DPO is the
/// model without its adapters.
#[test]
fn training_on_pairs_of_answers_is_read() {
    let base = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 3\n\
                gradient_accumulation_steps: 4\nlora_r: 16\n";
    let read = |more: &str| try_text("job.yaml", &format!("{base}{more}"), &eight()).unwrap();
    let keys = |job: &Job| {
        let of = |key| setting(job, key).and_then(|v| v.parse::<u32>().ok());
        (
            of("train.micro_batch"),
            of("train.no_grad_forwards"),
            job.decisive().count(),
        )
    };
    let adapter = "adapter: lora\n";
    assert_eq!(keys(&read(adapter)), (Some(3), None, 0));
    assert_eq!(
        keys(&read(&format!("{adapter}rl: dpo\n"))),
        (Some(6), Some(1), 0)
    );
    assert_eq!(
        keys(&read(&format!("{adapter}rl: simpo\n"))),
        (Some(6), None, 0)
    );
    assert_eq!(keys(&read("rl: orpo\n")), (Some(6), None, 0));
    let in_advance = "rl: ipo\nprecompute_ref_log_probs: true\n";
    assert_eq!(
        keys(&read(&format!("{adapter}{in_advance}"))),
        (Some(6), None, 0)
    );
    // These jobs have a second model.
    for more in [
        "rl: dpo\n",
        "rl: simpo\n",
        "adapter: lora\nrl: dpo\nrl_adapter_ref_model: true\n",
    ] {
        assert_eq!(keys(&read(more)).2, 1, "{more}");
    }
    for other in ["kto", "grpo", "ebft"] {
        assert_eq!(
            keys(&read(&format!("{adapter}rl: {other}\n"))).2,
            1,
            "{other}"
        );
    }
}

#[test]
fn arguments_of_megatron_can_be_yaml() {
    let text = "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n\
                model_parallel:\n  tensor_model_parallel_size: 1\n\
                vocab_size: 256\nmicro_batch_size: 2\nseq_length: 64\nbf16: true\nlr: 1e-4\n";
    let job = try_text("gpt.yaml", text, &eight()).unwrap();
    assert_eq!(job.framework, "Megatron-LM");
    assert_eq!(setting(&job, "model.layers").as_deref(), Some("4"));
    let row = job
        .rows()
        .iter()
        .find(|r| r.settings.iter().any(|s| s.key == "model.layers"));
    assert_eq!(row.unwrap().key, "language_model.num_layers");
}

/// Only in Megatron-FSDP, the precision-aware optimizer reads decoupled gradients, and buffers
/// registered with NCCL are a double buffer.
#[test]
fn optimizers_and_buffers_of_megatron_are_read() {
    let script = |engine: &str| {
        format!(
            "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
             --vocab-size 256 --micro-batch-size 2 --global-batch-size 16 --bf16 \
             --use-precision-aware-optimizer --use-nccl-ub {engine}\n"
        )
    };
    let of = |engine: &str| {
        let job = try_text("train.sh", &script(engine), &eight()).unwrap();
        ["fsdp.decoupled_gradients", "fsdp.allocator"].map(|key| setting(&job, key))
    };
    let yes = Some("true".to_owned());
    let buffers = Some("\"double_buffer\"".to_owned());
    assert_eq!(of("--use-megatron-fsdp"), [yes.clone(), buffers]);
    assert_eq!(of("--use-distributed-optimizer"), [yes, None]);
    assert_eq!(of("--use-torch-fsdp2"), [None, None]);
}

/// Arguments of an MoE model similar to Qwen3-30B-A3B.
fn experts_of_megatron(more: &str) -> String {
    format!(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 \
         --num-attention-heads 4 --num-query-groups 2 --kv-channels 32 --qk-layernorm --swiglu --seq-length 64 \
         --untie-embeddings-and-output-weights --vocab-size 256 --micro-batch-size 2 --global-batch-size 32 \
         --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params {more}\n"
    )
}

#[test]
fn experts_of_megatron_are_read() {
    let all = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-3 \
               --moe-router-load-balancing-type aux_loss --moe-router-dtype fp32 --moe-grouped-gemm";
    let of = |more: &str| try_text("train.sh", &experts_of_megatron(more), &eight()).unwrap();
    let mut job = of(&format!("{all} --moe-layer-freq '([0]*1+[1]*3)'"));
    assert_eq!(job.decisive().count(), 0);
    for (key, value) in [
        ("model.family", "\"moe\""),
        ("model.experts", "16"),
        ("model.top_k", "4"),
        ("model.expert_ffn", "48"),
        ("model.aux_loss", "0.001"),
        ("model.router", "\"topk_softmax\""),
        ("model.dense_layers", "1"),
    ] {
        assert_eq!(setting(&job, key).as_deref(), Some(value), "{key}");
    }
    let s = job.scenario(&[]).unwrap();
    assert_eq!(s.model.options.experts.experts, 16);
    // Unsupported: another order of layers, and experts without gates.
    let keys = |job: &Job| -> Vec<String> { job.decisive().map(|r| r.key.clone()).collect() };
    let job = of(&format!("{all} --moe-layer-freq 2"));
    assert_eq!(keys(&job), ["--moe-layer-freq"]);
    let dense = experts_of_megatron(all).replace("--swiglu", "");
    let job = try_text("train.sh", &dense, &eight()).unwrap();
    assert_eq!(keys(&job), ["--num-experts"]);
    // A dense model ignores the arguments of experts.
    let job = of("--moe-router-topk 4 --moe-aux-loss-coeff 1e-3");
    assert_eq!(setting(&job, "model.top_k"), None);
    assert_eq!(setting(&job, "model.family").as_deref(), Some("\"llama\""));
    let job = of(
        &format!("{all} --moe-router-pre-softmax --moe-router-load-balancing-type none")
            .replace("--moe-router-load-balancing-type aux_loss", ""),
    );
    assert_eq!(
        setting(&job, "model.normalize_top_k").as_deref(),
        Some("false")
    );
    assert_eq!(setting(&job, "model.aux_loss"), None);
}

/// Megatron-LM updates biases after each step, by 0.001 unless `--moe-router-bias-update-rate` says
/// otherwise.
#[test]
fn updates_of_router_biases_are_read() {
    let (bias, rate) = (
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
    );
    let speed = "model.router_bias_update_speed";
    let experts = "--num-experts 16 --moe-router-topk 4 --moe-router-score-function sigmoid";
    let of = |more: &str| try_text("train.sh", &experts_of_megatron(more), &eight()).unwrap();
    let biased = |job: &Job| setting(job, "model.router_bias");
    // Where the speed comes from, and how.
    let sets = |job: &Job| -> Vec<(Option<String>, Status)> {
        let rows = job.rows().iter();
        let rows = rows.filter(|r| r.settings.iter().any(|s| s.key == speed));
        rows.map(|r| (r.place.as_ref().map(ToString::to_string), r.status))
            .collect()
    };
    let speed_of = |job: &mut Job| {
        let s = job.scenario(&[]).unwrap();
        assert!(s.model.options.experts.router_bias);
        s.model.options.experts.router_bias_update_speed
    };

    // The default has no place in the script.
    let mut job = of(&format!("{experts} {bias}"));
    assert_eq!(sets(&job), [(None, Status::Assumed)]);
    assert_eq!(speed_of(&mut job), 0.001);

    for (given, moves) in [("2e-3", 0.002), ("0", 0.0)] {
        let mut job = of(&format!("{experts} {bias} \\\n  {rate} {given}"));
        let [(Some(place), status)] = &sets(&job)[..] else {
            panic!("{given}: one row")
        };
        assert!(place.ends_with("train.sh:2:3"), "{place}");
        assert_eq!(*status, Status::Used);
        assert_eq!(speed_of(&mut job), moves);
    }

    // torchtitan's experts have biases that steps update, with any optimizer.
    let text = std::fs::read_to_string(format!("{DATA}/torchtitan/llama3-8b.toml")).unwrap();
    let named = "name = \"llama3\"\nflavor = \"8B\"";
    let line = 1 + text.lines().position(|l| l == "flavor = \"8B\"").unwrap();
    for (name, flavor, moves) in [
        ("qwen3", "30B-A3B", true),
        ("deepseek_v3", "671B", true),
        ("gpt_oss", "20b", true),
        ("llama4", "17bx16e", true),
        ("qwen3", "8B", false),
    ] {
        let other = format!("name = \"{name}\"\nflavor = \"{flavor}\"");
        let mut job = try_text("titan.toml", &text.replace(named, &other), &eight()).unwrap();
        if !moves {
            assert_eq!((sets(&job), biased(&job)), (Vec::new(), None));
            continue;
        }
        let [(Some(place), status)] = &sets(&job)[..] else {
            panic!("{flavor}: one row")
        };
        assert!(place.ends_with(&format!("titan.toml:{line}:1")), "{place}");
        assert_eq!(*status, Status::Used);
        assert_eq!(speed_of(&mut job), 0.001, "{flavor}");
    }

    // Without biases, or without experts, the rate has no effect.
    for job in [
        of(&format!("{experts} {rate} 1e-3")),
        of(&format!("{bias} {rate} 1e-3")),
    ] {
        assert_eq!((sets(&job), biased(&job)), (Vec::new(), None));
        let row = job.rows().iter().find(|r| r.key == rate).unwrap();
        assert_eq!(row.status.lack(), Lack::Nothing);
    }
}

/// For forced load balancing, torchtitan assigns tokens round-robin and Megatron-LM draws random
/// logits.
#[test]
fn forced_load_balance_is_read() {
    let key = "moe.force_routing";
    let (all, force) = (
        "--num-experts 16 --moe-router-topk 4",
        "--moe-router-force-load-balancing",
    );
    let of = |more: &str| try_text("train.sh", &experts_of_megatron(more), &eight()).unwrap();
    let mut job = of(&format!("{all} {force}"));
    assert_eq!(setting(&job, key).as_deref(), Some("true"));
    assert!(job.scenario(&[]).unwrap().forced_routing.is_some());
    assert_eq!(setting(&job, "moe.routing"), None);
    assert_eq!(setting(&of(all), key), None);
    // A dense model has no routing to force.
    assert_eq!(setting(&of(force), key), None);

    let text = std::fs::read_to_string(format!("{DATA}/torchtitan/llama3-8b.toml")).unwrap();
    let with = |section: &str, option: &str, flavor: &str| {
        let named = "name = \"llama3\"\nflavor = \"8B\"";
        assert!(text.contains(named));
        let text = text.replace(named, &format!("name = \"qwen3\"\nflavor = \"{flavor}\""));
        let line = format!("[{section}]\n");
        let text = match text.contains(&line) {
            true => text.replace(&line, &format!("{line}{option} = true\n")),
            false => format!("{text}\n{line}{option} = true\n"),
        };
        try_text("titan.toml", &text, &eight()).unwrap()
    };
    let both = [
        ("debug", "moe_force_load_balance"),
        ("training", "debug_moe_force_load_balance"),
    ];
    for (section, option) in both {
        let [mixture, dense] = ["30B-A3B", "8B"].map(|flavor| with(section, option, flavor));
        for (key, value) in [(key, "true"), ("moe.routing", "\"round_robin\"")] {
            assert_eq!(setting(&mixture, key).as_deref(), Some(value), "{option}");
            assert_eq!(setting(&dense, key), None, "{option}");
        }
    }
}

#[test]
fn dispatchers_of_megatron_are_read() {
    let of = |more: &str, options: &Options| {
        let all =
            format!("--num-experts 16 --moe-router-topk 4 --expert-model-parallel-size 8 {more}");
        let mut job = try_text("train.sh", &experts_of_megatron(&all), options).unwrap();
        assert_eq!(job.decisive().count(), 0, "{more}");
        let s = job.scenario(&[]).unwrap();
        let text = |key| setting(&job, key).map(|v| v.trim_matches('"').to_owned());
        let moe = s.moe.expect("divided experts");
        assert_eq!(
            moe.dispatcher.name(),
            text("moe.dispatcher").unwrap(),
            "{more}"
        );
        let capacity = text("moe.capacity_factor");
        if capacity.is_some() {
            // Megatron limits the rows of each expert.
            let (status, why) = row(&job, "--moe-expert-capacity-factor");
            assert!(
                status == Status::Assumed && why.contains("each expert"),
                "{why}"
            );
        }
        (text("moe.dispatcher").unwrap(), capacity)
    };
    let some = |v: &str| Some(v.to_owned());
    let sixteen = Options {
        gpus: Some("2x8xh100".parse().unwrap()),
        ..Options::default()
    };
    for (more, name, capacity) in [
        ("", "gather", None),
        ("--moe-token-dispatcher-type allgather", "gather", None),
        ("--moe-token-dispatcher-type alltoall", "all_to_all", None),
        (
            "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5",
            "all_to_all",
            None,
        ),
        (
            "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5 \
             --moe-pad-expert-input-to-capacity",
            "padded",
            some("1.5"),
        ),
        (
            "--moe-token-dispatcher-type alltoall_seq",
            "all_to_all",
            None,
        ),
        ("--moe-token-dispatcher-type flex", "deepep", None),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
            "deepep",
            None,
        ),
        (
            "--moe-token-dispatcher-type flex --moe-enable-deepep",
            "deepep",
            None,
        ),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepepv2",
            "deepep",
            None,
        ),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep",
            "deepep",
            None,
        ),
        // Without `flex`, the backend has no effect.
        (
            "--moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 16",
            "all_to_all",
            None,
        ),
    ] {
        assert_eq!(
            of(more, &eight()),
            (name.to_owned(), capacity.clone()),
            "{more}"
        );
        assert_eq!(of(more, &sixteen), (name.to_owned(), capacity), "{more}");
    }
    // The experts are divided among ranks on two nodes.
    let across = "--num-experts 16 --expert-model-parallel-size 16 --moe-token-dispatcher-type flex \
         --moe-flex-dispatcher-backend hybridep";
    let mut job = try_text("train.sh", &experts_of_megatron(across), &sixteen).unwrap();
    assert_eq!(
        setting(&job, "moe.dispatcher").as_deref(),
        Some("\"deepep\"")
    );
    let moe = job.scenario(&[]).unwrap().moe.unwrap();
    assert_eq!(moe.node_reach.unwrap().nodes, 2);
    // Groups of six ranks on nodes of four do not fill them.
    let uneven = "--num-experts 18 --expert-model-parallel-size 6 --moe-token-dispatcher-type flex";
    let twelve = Options {
        gpus: Some("3x4xh100".parse().unwrap()),
        ..Options::default()
    };
    let uneven = experts_of_megatron(uneven).replace("batch-size 32", "batch-size 48");
    let job = try_text("train.sh", &uneven, &twelve).unwrap();
    assert_eq!(
        setting(&job, "moe.dispatcher").as_deref(),
        Some("\"all_to_all\"")
    );
    // Ranks that hold all experts send no tokens.
    let whole =
        "--num-experts 16 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1";
    let mut job = try_text("train.sh", &experts_of_megatron(whole), &eight()).unwrap();
    assert_eq!(setting(&job, "moe.dispatcher"), None);
    assert!(job.scenario(&[]).unwrap().moe.is_none());
}

/// The words of torchtitan and Axolotl for DeepEP, HybridEP and all-to-all; torchtitan's `standard`
/// is the all-to-all of `fsdp2`.
#[test]
fn backends_of_expert_parallelism_are_read() {
    let titan = |backend: &str| {
        format!(
            "[model]\nname = \"qwen3\"\nflavor = \"30B-A3B\"\n[training]\nseq_len = 4096\n\
             [parallelism]\nexpert_parallel_degree = 8\nexpert_parallel_comm_backend = \"{backend}\"\n"
        )
    };
    let axolotl = |backend: &str| {
        format!(
            "base_model: Qwen/Qwen3-30B-A3B\nsequence_len: 2048\nfsdp_version: 2\n\
             expert_parallel_size: 8\nexpert_parallel_backend: {backend}\n"
        )
    };
    for (name, text, dispatcher) in [
        ("job.toml", titan("standard"), "all_to_all"),
        ("job.toml", titan("deepep"), "deepep"),
        ("job.toml", titan("hybridep"), "deepep"),
        ("job.toml", titan("minimal_async_ep"), "peer"),
        ("job.yaml", axolotl("torch"), "all_to_all"),
        ("job.yaml", axolotl("auto"), "all_to_all"),
        ("job.yaml", axolotl("deep_ep"), "deepep"),
        // Axolotl's default.
        ("job.yaml", axolotl("null"), "deepep"),
    ] {
        let mut job = try_text(name, &text, &eight()).unwrap();
        let set = setting(&job, "moe.dispatcher");
        assert_eq!(set.is_some(), !text.contains("standard"), "{text}");
        let moe = job.scenario(&[]).unwrap().moe.expect("divided experts");
        assert_eq!(moe.dispatcher.name(), dispatcher, "{text}");
    }
    let error = try_text("job.toml", &titan("deep_ep"), &eight()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("standard, deepep, hybridep or"), "{error}");
    // Ranks that hold all experts send no tokens.
    let text = titan("deepep").replace("degree = 8", "degree = 1");
    let job = try_text("job.toml", &text, &eight()).unwrap();
    assert_eq!(setting(&job, "moe.dispatcher"), None);
}

#[test]
fn an_overlap_of_shared_experts_is_read() {
    let overlap = "--moe-shared-expert-overlap";
    let of = |more: &str| {
        let all = format!("--num-experts 16 --moe-router-topk 4 {overlap} {more}");
        let mut job = try_text("train.sh", &experts_of_megatron(&all), &eight()).unwrap();
        let moe = job.scenario(&[]).unwrap().moe;
        let set = setting(&job, "moe.shared_expert_overlap");
        (set, moe.is_some_and(|moe| moe.shared_expert_overlap))
    };
    let shared = "--moe-shared-expert-intermediate-size 96";
    let divided = "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall";
    let read = (Some("true".to_owned()), true);
    assert_eq!(of(&format!("{shared} {divided}")), read);
    // There are no shared experts, or no token exchange to overlap.
    assert_eq!(of(divided), (None, false));
    assert_eq!(of(shared), (None, false));
}

/// Megatron-LM's CPU optimizer is not predicted. Under an FSDP, whose parameters are DTensors, such
/// a job does not start.
#[test]
fn an_optimizer_of_megatron_on_the_cpu_is_named() {
    let script = |engine: &str| {
        format!(
            "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
             --vocab-size 256 --micro-batch-size 2 --global-batch-size 16 --bf16 --optimizer-cpu-offload \
             --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d {engine}\n"
        )
    };
    let of = |engine: &str| {
        let job = try_text("train.sh", &script(engine), &eight()).unwrap();
        assert_eq!(setting(&job, "fsdp.offload"), None);
        let row = |key: &str| job.rows().iter().find(|r| r.key.ends_with(key)).unwrap();
        for aside in [
            "optimizer-offload-fraction",
            "overlap-cpu-optimizer-d2h-h2d",
        ] {
            assert_eq!(
                row(aside).status,
                Status::NoCounterpart(Lack::Nothing),
                "{aside}"
            );
        }
        row("optimizer-cpu-offload").status
    };
    for engine in [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
    ] {
        let refused = Status::NoCounterpart(Lack::Everything);
        assert_eq!(of(engine), refused, "{engine}");
    }
    let off = script("--use-megatron-fsdp").replace("--optimizer-cpu-offload", "");
    let job = try_text("train.sh", &off, &eight()).unwrap();
    assert!(
        job.rows()
            .iter()
            .all(|r| r.status != Status::NoCounterpart(Lack::Everything))
    );
}

/// Options that change memory or time are either read or reported as missing from the prediction.
#[test]
fn common_options_of_recipes_are_known() {
    let rows = |name: &str, text: &str| {
        let job = try_text(name, text, &eight()).unwrap();
        move |key: &str| {
            let row = job.rows().iter().find(|r| r.key.ends_with(key));
            row.unwrap_or_else(|| panic!("{key}")).status
        }
    };
    let (used, lost) = (Status::Used, Status::NoCounterpart(Lack::Accuracy));
    let off = Status::NoCounterpart(Lack::Nothing);
    let axolotl = rows(
        "axolotl.yaml",
        "base_model: Qwen/Qwen3-8B\nsequence_len: 512\ncut_cross_entropy: true\nloraplus_lr_ratio: 16\n",
    );
    assert_ne!(axolotl("cut_cross_entropy"), lost);
    assert_eq!(axolotl("loraplus_lr_ratio"), off);
    let script = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
         --vocab-size 256 --micro-batch-size 2 --global-batch-size 16 --bf16 --attention-dropout 0.1 \
         --hidden-dropout 0.0 --cpu-offloading --cpu-offloading-num-layers 2 --window-size 32,0\n";
    let megatron = rows("train.sh", script);
    assert_eq!(megatron("attention-dropout"), lost);
    assert_eq!(megatron("hidden-dropout"), off);
    assert_eq!(megatron("cpu-offloading"), lost);
    assert_eq!(megatron("cpu-offloading-num-layers"), off);
    assert_eq!(megatron("window-size"), lost);
    let recipe = "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], \
         lora_rank: 8, lora_alpha: 16, use_dora: true}\ntokenizer: {max_seq_len: 512}\nbatch_size: 1\n\
         ac_mode: selective\nac_option: 2\n";
    let torchtune = rows("recipe.yaml", recipe);
    assert_eq!(torchtune("use_dora"), used);
    assert_eq!(torchtune("ac_mode"), lost);
}

#[test]
fn a_log_of_torchtitan_is_a_configuration() {
    let log = "[titan] 2025-01-01 - root - INFO - Running with args: {'model': {'name': 'llama3', 'flavor': '8B'}, \
               'training': {'local_batch_size': 2, 'seq_len': 4096, 'global_batch_size': -1}, \
               'activation_checkpoint': {'mode': 'full', 'selective_ac_option': None}}\n[titan] next\n";
    let job = try_text("train.log", log, &eight()).unwrap();
    for (key, value) in [
        ("model.preset", "\"llama3-8b\""),
        ("train.micro_batch", "2"),
        ("train.recompute", "\"full\""),
        ("fsdp.policy", "\"fsdp2\""),
        ("precision.param_dtype", "\"bf16\""),
    ] {
        assert_eq!(setting(&job, key).as_deref(), Some(value), "{key}");
    }
}

/// Options of 8-bit matmuls set keys if they are predicted. Options that affect the values of
/// scales change nothing, and those of other libraries are approximated.
#[test]
fn options_of_8_bits_are_read() {
    let text = std::fs::read_to_string(format!("{DATA}/megatron/llama3-8b-fsdp-fp8.sh")).unwrap();
    let hybrid = "\"--fp8-format hybrid\"";
    let megatron = |more: &str| {
        let with = format!("{hybrid}\n        \"{more}\"");
        try_text("job.sh", &text.replace(hybrid, &with), &eight()).unwrap()
    };
    let kept = "fsdp.keep_fp8_transpose_cache";
    let recipe = "--fp8-recipe tensorwise";
    let job = megatron(&format!("{recipe} --keep-fp8-transpose-cache"));
    assert_eq!(setting(&job, kept).as_deref(), Some("true"));
    let blocks = megatron("--fp8-recipe blockwise --keep-fp8-transpose-cache");
    assert_eq!(setting(&blocks, kept), None);
    let values = "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-margin 0";
    let of = |job: &Job| {
        let mut all: Vec<_> = job.rows().iter().flat_map(|r| r.settings.clone()).collect();
        all.retain(|s| s.key.starts_with("precision."));
        all
    };
    assert_eq!(
        of(&megatron(&format!("{recipe} {values}"))),
        of(&megatron(recipe))
    );
    let blocks = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2";
    let job = megatron(&format!("{recipe} {blocks}"));
    let [first, last] = ["precision.float8_first_bf16", "precision.float8_last_bf16"];
    assert_eq!(setting(&job, first).as_deref(), Some("2"));
    assert_eq!(setting(&job, last).as_deref(), Some("1"));
    let job = megatron(&format!("{recipe} --num-layers-at-start-in-bf16 2"));
    assert_eq!(setting(&job, first), None);

    let accelerate = |config: &str| {
        let text = format!(
            "distributed_type: FSDP\nmixed_precision: fp8\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n\
             fp8_config:\n{config}"
        );
        let options = Options {
            model: Some(format!("{DATA}/trainer/mistralai/Mistral-7B-v0.1").into()),
            ..eight()
        };
        try_text("accelerate.yaml", &text, &options).unwrap()
    };
    let status = |job: &Job, name: &str| {
        let row = job.rows().iter().find(|r| r.key == name);
        row.unwrap_or_else(|| panic!("{name}")).status
    };
    let ao =
        accelerate("  backend: AO\n  enable_fsdp_float8_all_gather: true\n  pad_inner_dim: true\n");
    let [gather, grad] = ["precision.float8_all_gather", "precision.float8_grad"];
    assert_eq!(setting(&ao, gather).as_deref(), Some("true"));
    assert_eq!(
        status(&ao, "fp8_config.backend"),
        Status::NoCounterpart(Lack::Nothing)
    );
    let te = accelerate(
        "  backend: TE\n  fp8_format: E4M3\n  amax_history_len: 16\n  amax_compute_algo: max\n  \
         override_linear_precision: [false, false, true]\n",
    );
    assert_eq!(setting(&te, grad).as_deref(), Some("\"e4m3\""));
    for name in ["backend", "override_linear_precision"] {
        let found = status(&te, &format!("fp8_config.{name}"));
        assert_eq!(found, Status::NoCounterpart(Lack::Accuracy), "{name}");
    }
    let found = status(&te, "fp8_config.amax_history_len");
    assert_eq!(found, Status::NoCounterpart(Lack::Nothing));
    let msamp = accelerate("  backend: MSAMP\n  opt_level: O2\n");
    let found = status(&msamp, "fp8_config.opt_level");
    assert_eq!(found, Status::NoCounterpart(Lack::Accuracy));
}

/// torchtitan's filters are substrings of names. Filters set nothing if the layers are never in 8
/// bits, or if 8-bit matmuls are off.
#[test]
fn layers_that_torchtitan_keeps_in_16_bits_are_read() {
    let text = std::fs::read_to_string(format!("{DATA}/torchtitan/llama3-8b.toml")).unwrap();
    let exclude = "precision.float8_exclude";
    let of = |converters: &str, filters: &str| {
        let text = text.replace(
            "filter_fqns = [\"output\"]",
            &format!("filter_fqns = {filters}"),
        );
        let text = text.replace("[model]", &format!("[model]\nconverters = {converters}"));
        try_text("job.toml", &text, &eight()).unwrap()
    };
    let on = "[\"float8\"]";
    let job = of(on, "[\"output\", \"attention.wk\", \"w2\"]");
    let globs = setting(&job, exclude);
    assert_eq!(globs.as_deref(), Some("[\"*attention.wk*\", \"*w2*\"]"));
    assert_eq!(
        setting(&of(on, "[\"output\", \"router.gate\"]"), exclude),
        None
    );
    let sizes = of(on, "[\"auto_filter_small_kn\", \"wo\"]");
    assert_eq!(setting(&sizes, exclude).as_deref(), Some("[\"*wo*\"]"));
    let sizes = of(on, "[\"auto_filter_small_kn\"]");
    assert_eq!(setting(&sizes, exclude), None);
    assert_eq!(setting(&of("[]", "[\"w2\"]"), exclude), None);
}

/// `none` is a mode in torchtitan. In other keys, the word means that nothing is set.
#[test]
fn a_choice_may_be_none() {
    let text = |mode: &str| {
        format!(
            "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nseq_len = 4096\n\
             [parallelism]\nfsdp_reshard_after_forward = \"none\"\n\
             [activation_checkpoint]\nmode = {mode}\n"
        )
    };
    for (mode, recompute) in [
        ("\"none\"", "none"),
        ("\"full\"", "full"),
        ("\"\"", "selective"),
    ] {
        let job = try_text("job.toml", &text(mode), &eight()).unwrap();
        let expected = format!("{recompute:?}");
        let found = setting(&job, "train.recompute");
        // An empty mode counts as not set, so the framework's default is assumed.
        let found = found.unwrap_or_else(|| "\"selective\"".to_owned());
        assert_eq!(found, expected, "{mode}");
        assert_eq!(setting(&job, "fsdp.reshard_after_forward"), None);
    }
}

#[test]
fn arguments_saved_by_the_trainer_are_read() {
    let text = r#"{"model_name_or_path": "Qwen/Qwen3-8B", "output_dir": "x", "bf16": true, "fsdp": [],
      "fsdp_config": {"min_num_params": 0, "xla": false, "xla_fsdp_grad_ckpt": false},
      "deepspeed": null, "per_device_train_batch_size": 1, "optim": "adamw_torch_fused"}"#;
    let job = try_text("args.json", text, &eight()).unwrap();
    assert_eq!(
        setting(&job, "fsdp.strategy").as_deref(),
        Some("\"no_shard\"")
    );
    let text = text.replace("\"fsdp\": []", "\"fsdp\": [\"full_shard\", \"auto_wrap\"]");
    let job = try_text("args.json", &text, &eight()).unwrap();
    assert_eq!(setting(&job, "fsdp.policy").as_deref(), Some("\"fsdp2\""));
}

#[test]
fn tables_name_scenario_keys_that_exist_and_no_key_twice() {
    let known: Vec<String> = shardlab_plan::scenario::keys()
        .iter()
        .map(|k| k.path())
        .collect();
    for format in crate::formats::ALL {
        let defaults = format.defaults.iter().map(|d| d.key);
        let keys = format.tables.iter().flat_map(|t| t.keys);
        let keys = keys.filter_map(|key| match key.to {
            crate::table::To::Integer(name) | crate::table::To::Number(name) => Some(name),
            _ => None,
        });
        for name in keys.chain(defaults) {
            assert!(known.iter().any(|k| k == name), "{}: {name}", format.name);
        }
        for table in format.tables {
            let mut names: Vec<&str> = table.names().collect();
            names.sort_unstable();
            let twice: Vec<_> = names.windows(2).filter(|w| w[0] == w[1]).collect();
            assert!(twice.is_empty(), "{}: {twice:?}", format.name);
        }
    }
}

fn damaged() -> impl Strategy<Value = (String, String)> {
    let files: Vec<(String, String)> = fixtures()
        .into_iter()
        .map(|p| (p.display().to_string(), std::fs::read_to_string(p).unwrap()))
        .collect();
    let edit = (
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        "[ -~\\n\\t]{0,12}",
    );
    (
        prop::sample::select(files),
        prop::collection::vec(edit, 1..6),
    )
        .prop_map(|((name, text), edits)| {
            let mut chars: Vec<char> = text.chars().collect();
            for (at, length, new) in edits {
                let at = at.index(chars.len() + 1);
                let length = length.index(20).min(chars.len() - at);
                chars.splice(at..at + length, new.chars());
            }
            (name, chars.into_iter().collect())
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_configurations_do_not_panic((name, text) in damaged()) {
        let mut reader = Reader::default();
        if reader.text(Path::new(&name), &text, None).is_ok() {
            let _ = crate::derive::finish(&mut reader, &eight());
        }
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,200}", ending in prop::sample::select(vec!["yaml", "json", "toml", "sh", "log"])) {
        let mut reader = Reader::default();
        let _ = reader.text(Path::new(&format!("x.{ending}")), &text, None);
    }
}

/// Accelerate compiles a model including its hooks, or compiles each block before it shards the
/// model.
#[test]
fn regional_compilation_is_that_of_blocks() {
    let mode = |dynamo: &str| {
        let text = format!(
            "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n\
             dynamo_config:\n{dynamo}"
        );
        let options = Options {
            model: Some(format!("{DATA}/trainer/mistralai/Mistral-7B-v0.1").into()),
            ..eight()
        };
        setting(
            &try_text("accelerate.yaml", &text, &options).unwrap(),
            "compile.mode",
        )
    };
    let backend = "  dynamo_backend: INDUCTOR\n";
    let regional = "  dynamo_use_regional_compilation: true\n";
    assert_eq!(mode(backend).as_deref(), Some("\"regions\""));
    for both in [[backend, regional], [regional, backend]] {
        assert_eq!(mode(&both.concat()).as_deref(), Some("\"blocks\""));
    }
    assert_eq!(mode(&format!("  dynamo_backend: 'NO'\n{regional}")), None);
}

/// torchtitan's converters for torchao's MX formats, Megatron's recipes, and the fallback for GPUs
/// without hardware support.
#[test]
fn recipes_with_scales_of_blocks_are_read() {
    let recipe = |job: &Job| setting(job, "precision.float8_recipe");
    let on = |hardware: &str| Options {
        gpus: Some(format!("8x{hardware}").parse().unwrap()),
        ..eight()
    };
    let text = std::fs::read_to_string(format!("{DATA}/torchtitan/llama3-8b.toml")).unwrap();
    let mx = text.replace("[model]", "[model]\nconverters = [\"quantize.linear.mx\"]");
    let mx = format!("{mx}\n[quantize.linear.mx]\nrecipe_name = \"mxfp8_cublas\"\n");
    for (gpus, expected) in [("b200", "mxfp8"), ("h100", "tensorwise")] {
        let job = try_text("job.toml", &mx, &on(gpus)).unwrap();
        assert_eq!(recipe(&job), Some(format!("\"{expected}\"")), "{gpus}");
    }
    let text = std::fs::read_to_string(format!("{DATA}/megatron/llama3-8b-fsdp-fp8.sh")).unwrap();
    let hybrid = "\"--fp8-format hybrid\"";
    assert!(text.contains(hybrid), "{text}");
    let of = |name: &str, gpus: &str| {
        let with = format!("{hybrid}\n        \"--fp8-recipe {name}\"");
        try_text("job.sh", &text.replace(hybrid, &with), &on(gpus)).unwrap()
    };
    let gather = "precision.float8_all_gather";
    for (name, gpus, expected, gathers) in [
        ("tensorwise", "h100", "tensorwise", true),
        ("blockwise", "h100", "blockwise", false),
        ("blockwise", "b200", "mxfp8", true),
        ("mxfp8", "b200", "mxfp8", true),
        ("mxfp8", "h200", "tensorwise", true),
    ] {
        let job = of(name, gpus);
        assert_eq!(recipe(&job), Some(format!("\"{expected}\"")), "{name}");
        assert_eq!(setting(&job, gather).is_some(), gathers, "{name}");
    }
    let job = of("mxfp8 --keep-fp8-transpose-cache", "b200");
    assert_eq!(setting(&job, "fsdp.keep_fp8_transpose_cache"), None);
    assert_eq!(setting(&job, gather).as_deref(), Some("true"));
}

mod automodel;
mod bridge;
mod foundry;
mod litgpt;
mod megatron;
mod overrides;
mod published;
mod recipes;
mod scripts;
mod swift;
mod torchtitan;
mod trl;
mod veomni;
mod verl;
