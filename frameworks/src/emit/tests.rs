//! Reads, emits and reads again, for the published configurations and for cases written by hand.

use super::edit::literal;
use super::{Form, edit, edit_scenario, fresh, python};
use crate::reader::Reader;
use crate::tests::{fixtures, job_with_options};
use crate::{Job, Options, derive, read};
use proptest::prelude::*;
use shardlab_plan::config::Recompute;
use shardlab_plan::scenario;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Reads a file, with other texts for some files.
fn read_again(path: &Path, options: &Options, texts: BTreeMap<PathBuf, String>) -> Job {
    let mut reader = Reader {
        texts,
        ..Reader::default()
    };
    reader.file(path, None).unwrap();
    derive::finish(&mut reader, options).unwrap();
    Job::new(&[path.into()], reader)
}

/// Changes that tuning a job can make, for a batch of `all` sequences per rank.
fn changes(all: u64) -> Vec<Vec<String>> {
    let one = |set: &str| vec![set.to_owned()];
    vec![
        vec![
            "train.micro_batch=1".to_owned(),
            format!("train.grad_accum={all}"),
        ],
        one("train.recompute=full"),
        one("train.recompute=none"),
        one("train.loss=chunked"),
        one("fsdp.reshard_after_forward=false"),
        one("compile.mode=blocks"),
        one("compile.mode=regions"),
        one("precision.reduce_dtype=bf16"),
        one("fsdp.prefetch_forward=4"),
        one("fsdp.units=root"),
    ]
}

/// What is written reads back as the same scenario, except for changes that are reported as not
/// expressed. All other lines stay the same.
#[test]
fn what_is_emitted_is_read_again() {
    let (mut expressed, mut lost) = (0, 0);
    for path in fixtures() {
        let (mut job, options) = job_with_options(&path);
        if job.decisive().count() > 0 {
            continue;
        }
        let shown = path.display();
        let Ok(base) = job.scenario(&[]) else {
            continue;
        };
        let all = base.train.micro_batch * u64::from(base.train.grad_accum);
        for sets in changes(all) {
            let Ok(to) = job.scenario(&sets) else {
                continue;
            };
            let edits = edit(std::slice::from_ref(&path), &options, &sets, &to)
                .unwrap_or_else(|e| panic!("{shown} {sets:?}: {e}"));
            let kept: Vec<String> = sets
                .iter()
                .filter(|set| edits.lost.iter().all(|l| l.set != **set))
                .cloned()
                .collect();
            expressed += kept.len();
            lost += edits.lost.len();
            for file in &edits.files {
                let (before, after) = (file.before.lines(), file.after.lines().collect::<Vec<_>>());
                let gone = before.filter(|line| !after.contains(line)).count();
                assert!(gone <= 3, "{shown} {sets:?}: {gone} lines changed");
            }
            let texts = edits.files.into_iter().map(|f| (f.path, f.after)).collect();
            let mut again = read_again(&path, &options, texts);
            let written = again.scenario(&[]).unwrap();
            assert_eq!(again.scenario(&kept).unwrap(), written, "{shown} {sets:?}");
            if kept.len() == sets.len() {
                let mut expected = to.train.clone();
                // Files do not keep what has no effect in another mode.
                if expected.recompute == Recompute::None {
                    expected.recompute_layers = written.train.recompute_layers.clone();
                }
                if expected.recompute != Recompute::Selective {
                    expected.recompute_nth_matmul = written.train.recompute_nth_matmul;
                    expected.recompute_save = written.train.recompute_save.clone();
                }
                // Another loss has chunks of its own.
                if sets == ["train.loss=chunked"] {
                    expected.loss_chunk_rows = written.train.loss_chunk_rows;
                }
                assert_eq!(written.train, expected, "{shown} {sets:?}");
                assert_eq!(
                    written.fsdp.reshard_after_forward,
                    to.fsdp.reshard_after_forward
                );
            }
        }
        // Without changes, the files stay the same.
        let edits = edit(std::slice::from_ref(&path), &options, &[], &base).unwrap();
        assert!(edits.files.is_empty() && edits.lost.is_empty(), "{shown}");
    }
    assert!(
        expressed > 100,
        "{expressed} changes are expressed, {lost} are not"
    );
}

fn edited(name: &str, text: &str, sets: &[&str]) -> (String, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    let options = Options {
        gpus: Some("8xh100".parse().unwrap()),
        ..Options::default()
    };
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    let to = read(std::slice::from_ref(&path), &options)
        .unwrap()
        .scenario(&sets)
        .unwrap();
    let edits = edit(&[path], &options, &sets, &to).unwrap();
    let text = edits
        .files
        .first()
        .map_or(text.to_owned(), |f| f.after.clone());
    (text, edits.lost.into_iter().map(|l| l.set).collect())
}

#[test]
fn yaml_keeps_comments_and_order() {
    let text = "# mine\nbase_model: Qwen/Qwen3-8B\nmicro_batch_size: 2 # per GPU\nsequence_len: 2048\n\
                gradient_accumulation_steps: 1\nfsdp_version: 2\nfsdp_config:\n  # all of it\n  offload_params: false\n\
                gradient_checkpointing: \"true\"\n";
    let sets = [
        "train.micro_batch=1",
        "train.grad_accum=2",
        "train.recompute=none",
        "fsdp.reshard_after_forward=false",
        "fsdp.prefetch_backward=2",
    ];
    let (after, lost) = edited("job.yaml", text, &sets);
    assert_eq!(
        after,
        "# mine\nbase_model: Qwen/Qwen3-8B\nmicro_batch_size: 1 # per GPU\nsequence_len: 2048\n\
         gradient_accumulation_steps: 2\nfsdp_version: 2\nfsdp_config:\n  # all of it\n  \
         reshard_after_forward: false\n  offload_params: false\ngradient_checkpointing: false\n"
    );
    assert_eq!(lost, ["fsdp.prefetch_backward=2"]);
}

/// A sample consists of two sequences.
#[test]
fn samples_that_are_pairs_are_counted_once() {
    let text = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 3\n\
                gradient_accumulation_steps: 4\nadapter: lora\nrl: dpo\n";
    let (after, lost) = edited("job.yaml", text, &["train.micro_batch=4"]);
    assert!(after.contains("micro_batch_size: 2\n"), "{after}");
    assert!(lost.is_empty(), "{lost:?}");
    let (after, lost) = edited("job.yaml", text, &["train.micro_batch=5"]);
    assert_eq!(after, text);
    assert_eq!(lost, ["train.micro_batch=5"]);
}

#[test]
fn toml_gets_keys_and_sections() {
    let text = "[model]\nname = \"llama3\"\nflavor = \"8B\" # the small one\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n\
                [activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"\n";
    let sets = [
        "train.recompute=full",
        "compile.mode=blocks",
        "precision.reduce_dtype=bf16",
    ];
    let (after, lost) = edited("job.toml", text, &sets);
    assert!(after.contains("mode = \"full\"\n"), "{after}");
    assert!(after.contains("[compile]\nenable = true\n"), "{after}");
    assert!(
        after.contains("[training]\nmixed_precision_reduce = \"bfloat16\"\nlocal_batch_size = 1\n"),
        "{after}"
    );
    assert!(after.contains("# the small one"), "{after}");
    assert!(lost.is_empty(), "{lost:?}");
}

#[test]
fn json_and_scripts_are_edited_in_place() {
    let trainer = "{\n  \"model_name_or_path\": \"Qwen/Qwen3-8B\",\n  \"fsdp\": true,\n  \"max_length\": 1024,\n  \"bf16\": true\n}\n";
    let (after, lost) = edited(
        "args.json",
        trainer,
        &["train.micro_batch=4", "train.recompute=full"],
    );
    assert!(
        after.contains("\"per_device_train_batch_size\": 4,\n"),
        "{after}"
    );
    assert!(
        after.contains("\"gradient_checkpointing\": true,\n"),
        "{after}"
    );
    assert!(lost.is_empty(), "{lost:?}");

    let script = "#!/bin/bash\nARGS=(\n  --num-layers 4 --hidden-size 256 --num-attention-heads 4\n  --seq-length 512 --max-position-embeddings 512\n  \
                  --micro-batch-size 4 --global-batch-size 32 # per step\n  --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params\n  \
                  --bf16 --vocab-size 1024\n)\ntorchrun --nproc_per_node 8 pretrain_gpt.py \"${ARGS[@]}\"\n";
    let sets = [
        "train.micro_batch=2",
        "train.grad_accum=2",
        "train.recompute=full",
    ];
    let (after, lost) = edited("train.sh", script, &sets);
    assert!(
        after.contains("--micro-batch-size 2 --global-batch-size 32 # per step"),
        "{after}"
    );
    assert!(after.contains("--recompute-granularity full"), "{after}");
    assert!(lost.is_empty(), "{lost:?}");

    let script = "#!/bin/bash\ntorchrun --nproc_per_node 8 train.py \\\n  --model_name_or_path Qwen/Qwen3-0.6B \\\n  \
                  --per_device_train_batch_size 4 --bf16 True --max_length 1024\n";
    let sets = ["train.micro_batch=2", "train.recompute=full"];
    let (after, lost) = edited("train.sh", script, &sets);
    assert!(
        after.contains("--per_device_train_batch_size 2 --bf16 True"),
        "{after}"
    );
    assert!(after.contains("--gradient_checkpointing "), "{after}");
    assert!(lost.is_empty(), "{lost:?}");
}

/// Options with a path are replaced, and added next to others in their form.
#[test]
fn options_with_a_path_are_added_to_commands() {
    let sets = ["train.micro_batch=2", "train.grad_accum=8"];
    let hydra = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \\\n  \
                 model.partial_pretrain=Qwen/Qwen3-8B \\\n  data.micro_batch_size_per_gpu=4 $@\n";
    let more = [&sets[..], &["train.recompute=none"]].concat();
    let (after, lost) = edited("run.sh", hydra, &more);
    assert_eq!(
        after,
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \\\n  \
         model.enable_gradient_checkpointing=false data.train_batch_size=128 model.partial_pretrain=Qwen/Qwen3-8B \\\n  \
         data.micro_batch_size_per_gpu=2 $@\n"
    );
    assert!(lost.is_empty(), "{lost:?}");
    let litgpt =
        "litgpt finetune_full meta-llama/Llama-3.2-1B --devices 8 --train.max_seq_length 512\n";
    let (after, lost) = edited("run.sh", litgpt, &sets);
    assert_eq!(
        after,
        "litgpt finetune_full meta-llama/Llama-3.2-1B --devices 8 --train.global_batch_size 128 \
         --train.micro_batch_size 2 --train.max_seq_length 512\n"
    );
    assert!(lost.is_empty(), "{lost:?}");
}

#[test]
fn scenarios_keep_their_comments() {
    let text = "# About.\nmodel = { preset = \"llama3-8b\" }\n\n[train] # batch\nmicro_batch = 1 # small\nunits = 1\n";
    let after = edit_scenario(
        "a.toml".as_ref(),
        text,
        &[
            "train.micro_batch=2".to_owned(),
            "train.recompute=full".to_owned(),
            "fsdp.offload=[\"optimizer\"]".to_owned(),
        ],
    );
    assert_eq!(
        after.unwrap(),
        "# About.\nmodel = { preset = \"llama3-8b\" }\n\n[train] # batch\nrecompute = \"full\"\nmicro_batch = 2 # small\nunits = 1\n\
         \n[fsdp]\noffload = [\"optimizer\"]\n"
    );
}

#[test]
fn new_files_of_frameworks_are_read_as_the_scenario() {
    let sets = [
        "fsdp.policy=fsdp2",
        "train.micro_batch=2",
        "train.recompute=full",
        "fsdp.reshard_after_forward=false",
    ];
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    let to = scenario::load("llama3-8b-8xh100".as_ref(), &sets).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("config.json");
    std::fs::write(
        &model,
        include_str!("../../../tests/data/configs/DeepSeek-R1-Distill-Qwen-14B.json"),
    )
    .unwrap();
    for (form, name) in [
        (Form::Accelerate, "a.yaml"),
        (Form::Trainer, "t.yaml"),
        (Form::Torchtitan, "t.toml"),
        (Form::DeepSpeed, "d.json"),
    ] {
        let (text, lost) = fresh(form, &to, &["fsdp.prefetch_backward=2".to_owned()]).unwrap();
        assert!(
            lost.iter().any(|l| l.set == "fsdp.prefetch_backward=2"),
            "{lost:?}"
        );
        let path = folder.path().join(name);
        std::fs::write(&path, &text).unwrap();
        let options = Options {
            gpus: Some("8xh100".parse().unwrap()),
            model: Some(model.clone()),
            ..Options::default()
        };
        let again = read(&[path], &options)
            .unwrap_or_else(|e| panic!("{e}\n{text}"))
            .scenario(&[]);
        let again = again.unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(again.mesh.dp_shard, 8, "{text}");
        if form != Form::DeepSpeed {
            assert_eq!(
                again.fsdp.reshard_after_forward, to.fsdp.reshard_after_forward,
                "{text}"
            );
            assert_eq!(again.train.recompute, to.train.recompute, "{text}");
        }
        if form != Form::Accelerate {
            assert_eq!(again.train.micro_batch, 2, "{text}");
        }
    }
    let (text, _) = fresh(Form::Megatron, &to, &[]).unwrap();
    assert!(
        text.contains("--micro-batch-size 2") && text.contains("--recompute-granularity full"),
        "{text}"
    );
}

#[test]
fn python_says_what_it_does_not_express() {
    let sets = [
        "train.recompute=selective",
        "train.recompute_nth_matmul=2",
        "compile.mode=blocks",
        "compile.exclude=[\"layers.*.mlp\"]",
        "fsdp.prefetch_forward=2",
        "train.grad_accum=4",
        "fsdp.gradient_sync=last",
        "fsdp.keep_unsharded_storage=true",
        "train.loss=chunked",
    ];
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    let to = scenario::load("llama3-8b-8xh100".as_ref(), &sets).unwrap();
    let (text, lost) = python(&to);
    for part in [
        "init_device_mesh(\"cuda\", (8,), mesh_dim_names=(\"dp_shard\",))",
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32",
        "if count[phase] % 2 == 0:",
        "block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])",
        "block.compile()",
        "model.set_requires_gradient_sync(last)",
        "model.set_keep_unsharded_storage(True)",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let lost: Vec<&str> = lost.iter().map(|l| l.set.as_str()).collect();
    assert_eq!(
        lost,
        ["train.loss=chunked", "compile.exclude=[\"layers.*.mlp\"]"]
    );
}

proptest! {
    /// A number written into a scenario reads back as the same number.
    #[test]
    fn any_number_is_written_in_place(n in 1..100_000_u64, comment in "[ a-z#=\\[\\]\"]{0,20}") {
        let text = format!("[train]\nmicro_batch = 7 # {comment}\n");
        let after = edit_scenario("a.toml".as_ref(), &text, &[format!("train.micro_batch={n}")]);
        prop_assert_eq!(after.unwrap(), format!("[train]\nmicro_batch = {n} # {comment}\n"));
    }

    /// A word is a string in TOML, even if YAML reads it as a boolean.
    #[test]
    fn words_are_strings(word in "[a-z_]{1,12}") {
        let expected = match word.as_str() {
            "true" | "false" => word.clone(),
            _ => format!("\"{word}\""),
        };
        prop_assert_eq!(literal(&word), expected);
    }
}

/// Megatron-LM shards its own optimizer as ZeRO-1 at most. It has no option for ZeRO-2 and ZeRO-3.
#[test]
fn policies_without_an_option_of_megatron_are_refused() {
    for (policy, strategy, flag) in [
        ("fsdp2", "optim_grads_params", Some("--use-torch-fsdp2")),
        ("native", "optim", Some("--use-distributed-optimizer")),
        ("native", "optim_grads_params", None),
        ("native", "optim_grads", None),
    ] {
        let sets = [
            format!("fsdp.policy={policy}"),
            format!("fsdp.strategy={strategy}"),
        ];
        let to = scenario::load("llama3-8b-8xh100".as_ref(), &sets).unwrap();
        match (fresh(Form::Megatron, &to, &[]), flag) {
            (Ok((text, _)), Some(flag)) => assert!(text.contains(flag), "{text}"),
            (Err(error), None) => assert!(error.to_string().contains(strategy), "{error}"),
            (result, _) => panic!("{policy} {strategy}: {result:?}"),
        }
    }
}
