//! `shardlab` without a command: lists the GPUs of this machine, and models that fit on some.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;

/// With or without GPUs, it prints what it finds and suggests the next command.
#[test]
fn without_arguments_it_says_what_it_sees() {
    let text = stdout(&[]);
    assert_narrow(&text);
    assert!(text.starts_with("GPUs      "), "{text}");
    for part in [
        "next      `shardlab ",
        "shardlab fit JOB",
        "shardlab --help",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let answer = &json(&["--json"])[0];
    let gpus = answer["gpus"].as_array().unwrap();
    assert_eq!(gpus.is_empty(), answer["why_none"].is_string(), "{answer}");
}

#[test]
fn what_fits_on_named_gpus_is_what_sim_predicts() {
    let answer = &json(&["--gpus", "2xa100-40", "--json"])[0];
    assert_eq!(
        (&answer["hardware"], &answer["count"]),
        (&"a100-40".into(), &2.into())
    );
    let all = answer["trainings"].as_array().unwrap();
    assert_eq!(all.len(), 8);
    let of = |model: &str, training: &str| -> &Value {
        let is = |t: &&Value| t["model"] == model && t["training"] == training;
        all.iter().find(is).unwrap()
    };
    let fits = of("llama3.2-1b", "full");
    assert_eq!(fits["fits"], true);
    let set = fits["set"].as_array().unwrap();
    let set = set.iter().flat_map(|s| ["--set", s.as_str().unwrap()]);
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.toml");
    let text = "[model]\npreset = \"llama3.2-1b\"\n[train]\nseq_len = 4096\n\
                [mesh]\nhardware = \"a100-40\"\ndp_shard = 2\n[fsdp]\npolicy = \"fsdp2\"\n";
    std::fs::write(&job, text).unwrap();
    let args = ["sim", job.to_str().unwrap(), "--json"];
    let set: Vec<&str> = set.collect();
    let run = &json(&[&args[..], &set].concat())[0];
    assert_eq!(run["step_ms"]["median"], fits["step_ms"]);
    assert_eq!(
        run["memory"]["peak_reserved_bytes"],
        fits["peak_reserved_bytes"]
    );
    // The state of 8.03 billion parameters at 16 bytes does not fit in 80 GB.
    let large = of("llama3-8b", "full");
    assert_eq!(large["fits"], false);
    assert!(large["fits_on_gpus"].as_u64().unwrap() > 2, "{large}");
}

#[test]
fn the_table_is_narrow_and_names_the_next_commands() {
    let text = stdout(&["--gpus", "8xh100"]);
    assert_narrow(&text);
    for part in [
        "What fits on 8 x h100-80",
        "llama3-70b",
        "LoRA",
        "shardlab tune JOB --gpus 8xh100-80",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn its_options_do_not_go_with_commands() {
    for args in [
        &["--gpus", "8xh10"][..],
        &["--gpus", "8xh100", "sim", "llama-tiny"],
    ] {
        shardlab(args).assert().code(2);
    }
}
