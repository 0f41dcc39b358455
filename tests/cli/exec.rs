//! `shardlab exec`.

use crate::{assert_narrow, json, shardlab, stdout};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

fn exec(args: &[&str]) -> Value {
    let mut all = vec!["exec", "--json"];
    all.extend_from_slice(args);
    json(&all).remove(0)
}

fn numbers(v: &Value) -> Vec<f64> {
    v.as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect()
}

/// Returns the exit status and the message of a failed call.
fn failure(args: &[&str]) -> (i32, String) {
    let output = shardlab(args).output().unwrap();
    let code = output.status.code().unwrap();
    (code, String::from_utf8(output.stderr).unwrap())
}

/// Predictions of `fsdp2` reserve rows for a balanced load. Runs reserve rows for every case,
/// because the load depends on the router. An explicit factor is kept.
#[test]
fn routers_find_rows_for_every_choice() {
    let train = |set: &[&str]| {
        let mut args = vec!["exec", "small-moe-ep", "--steps", "2"];
        ["fsdp.policy=fsdp2"]
            .iter()
            .chain(set)
            .for_each(|s| args.extend(["--set", *s]));
        let output = shardlab(&args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), said)
    };
    let (code, said) = train(&[]);
    assert_eq!(code, 0, "{said}");
    // Rows for the choices of both ranks; each rank expects those of one rank.
    assert!(
        said.contains("note: moe.capacity_factor = 2: rows for every choice"),
        "{said}"
    );
    let (code, said) = train(&["moe.force_routing=true"]);
    assert!(
        code == 0 && !said.contains("rows for every choice"),
        "{said}"
    );
    let (code, said) = train(&["moe.capacity_factor=0.5"]);
    assert_eq!(code, 3, "{said}");
    let words: Vec<&str> = said.split_whitespace().collect();
    let advice = "or more, or moe.on_overflow = \"drop\"";
    assert!(words.join(" ").contains(advice), "{said}");
    let (code, said) = train(&["moe.capacity_factor=0.5", "moe.on_overflow=drop"]);
    assert_eq!(code, 0, "{said}");
}

/// A run counts the tokens of each expert with every dispatcher, and predictions read the file.
#[test]
fn recorded_routing_is_that_of_predictions() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("routing.json");
    let file = path.to_str().unwrap();
    let record = |set: &[&str]| -> Value {
        let mut args = vec!["small-moe", "--steps", "3", "--record-routing", file];
        set.iter().for_each(|s| args.extend(["--set", *s]));
        exec(&args);
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
    };
    let whole = record(&[]);
    let layers = whole["layers"].as_object().unwrap();
    assert_eq!(layers.keys().collect::<Vec<_>>(), ["1", "2"]);
    let sums: Vec<f64> = layers.values().map(|l| numbers(l).iter().sum()).collect();
    assert!(sums[0] > 0.0 && sums[0] == sums[1], "{sums:?}");
    for set in [
        &["mesh.ep=2"][..],
        &["mesh.ep=4", "moe.dispatcher=padded"],
        &["mesh.ep=2", "moe.dispatcher=all_to_all"],
        &["mesh.ep=4", "moe.dispatcher=peer"],
        &["mesh.ep=2", "train.recompute=full"],
    ] {
        assert_eq!(record(set), whole, "{set:?}");
    }

    // Forced choices are those of the scenario: 8 experts, the most popular of which has twice the
    // mean.
    let forced = [
        "moe.force_routing=true",
        "moe.routing=seeded",
        "moe.imbalance=2",
    ];
    let seeded = record(&forced);
    for counts in seeded["layers"].as_object().unwrap().values() {
        let counts = numbers(counts);
        let most = counts.iter().copied().fold(0.0, f64::max);
        let mean = counts.iter().sum::<f64>() / 8.0;
        assert!((most / mean - 2.0).abs() < 0.2, "{counts:?}");
    }
    let divided = [&forced[..], &["mesh.ep=4", "moe.dispatcher=peer"]].concat();
    assert_eq!(record(&divided), seeded);
    record(&[]);

    let routing = format!("moe.routing={file}");
    let step = |scenario: &str, set: &[&str]| -> f64 {
        let mut args = vec!["sim", scenario, "--json"];
        set.iter().for_each(|s| args.extend(["--set", *s]));
        json(&args)[0]["step_ms"]["median"].as_f64().unwrap()
    };
    assert!(step("small-moe-ep", &[&routing]) > 0.0);
    let divided = ["fsdp.policy=native", "mesh.ep=2"];
    let seeded = [&divided[..], &["moe.routing=seeded", "moe.imbalance=3"]].concat();
    let [balanced, seeded] = [&divided[..], &seeded].map(|set| step("peers-mixtral-4l", set));
    assert!(seeded > 1.02 * balanced, "{seeded} {balanced}");
    let forced = [&divided[..], &["moe.force_routing=true"]].concat();
    assert_eq!(step("peers-mixtral-4l", &forced), balanced);

    let (code, text) = failure(&[
        "sim",
        "small-moe-ep",
        "--set",
        &routing,
        "--set",
        "model.experts=16",
    ]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("is the histogram of another model"), "{text}");
    for (set, why) in [
        (&["small-fsdp2"][..], "has no experts"),
        (
            &["small-moe", "--set", "compile.cuda_graph=full_iteration"],
            "counts cannot be read from captured scopes",
        ),
    ] {
        let (code, text) = failure(&[&["exec", "--record-routing", file], set].concat());
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_fresh_machine_trains_and_shows_it() {
    let text = stdout(&["exec", "llama-tiny"]);
    assert_narrow(&text);
    for part in [
        "218 k parameters",
        "tokens/s/GPU",
        "reduce_scatter",
        "gradient norm",
        "synthetic",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let run = exec(&["llama-tiny"]);
    let losses = numbers(&run["losses"]);
    assert_eq!(losses.len(), 40);
    // Uniform guesses over 256 tokens have a loss of 5.545.
    assert!((losses[0] - 256f64.ln()).abs() < 0.1, "{}", losses[0]);
    assert!(losses[39] < losses[0] - 1.0, "{}", losses[39]);
    assert!(numbers(&run["grad_norms"]).iter().all(|g| *g > 0.0));
    assert_eq!(run["kind"], "exec");
    assert_eq!(run["step_ms"]["samples"].as_array().unwrap().len(), 39);
}

/// Acceptance: a golden run through the command line. Its scenario does not require gradient norms,
/// but they are reported anyway.
#[test]
fn a_golden_run() {
    for (name, tied) in [("llama-tiny", false), ("gpt2-tiny", true)] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/goldens")
            .join(name);
        let reference: Value =
            serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
        let (dir, tokens) = (
            dir.display().to_string(),
            dir.join("tokens.bin").display().to_string(),
        );
        let run = exec(&[
            name,
            "--init",
            &dir,
            "--data",
            &tokens,
            "--set",
            "train.grad_norm=false",
        ]);
        for key in ["losses", "grad_norms"] {
            let (ours, theirs) = (numbers(&run[key]), numbers(&reference[key]));
            assert_eq!(ours.len(), theirs.len());
            for (a, b) in ours.iter().zip(theirs) {
                assert!((a - b).abs() < 1e-4 * b, "{name} {key}: {a} {b}");
            }
        }
        let norms = reference["final_norms"].as_object().unwrap();
        for (param, theirs) in norms {
            let (a, b) = (
                run["final_norms"][param].as_f64().unwrap(),
                theirs.as_f64().unwrap(),
            );
            assert!(
                (a - b).abs() < 1e-4 * b.max(1e-3),
                "{name} {param}: {a} {b}"
            );
        }
        assert_eq!(
            run["final_norms"].get("lm_head.weight").is_some(),
            tied || name == "llama-tiny"
        );
    }
}

/// Starting a finished job again does nothing and says so, without an error.
#[test]
fn nothing_is_left_to_train() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display().to_string();
    let base = [
        "exec",
        "small-native",
        "--no-store",
        "--checkpoint-dir",
        &at,
    ];
    let call = |rest: &[&str]| {
        let output = shardlab(&[&base[..], rest].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [_, trained] = call(&["--steps", "3"]);
    assert!(!trained.contains("nothing is trained"), "{trained}");
    for (steps, mode) in [("3", &[][..]), ("2", &["--processes"])] {
        let args = [&["--steps", steps][..], mode].concat();
        let note = format!(
            "nothing to train: the checkpoint is of step 3, and the run has {steps} steps in total"
        );
        let [text, words] = call(&args);
        assert_eq!(words.matches(&note).count(), 1, "{words}");
        assert!(
            text.contains("none: the checkpoint is already at the last step"),
            "{text}"
        );
        let [object, words] = call(&[&args[..], &["--json"]].concat());
        assert!(words.contains(&note), "{words}");
        assert!(!object.contains("-0.0"), "{object}");
        let run: Value = serde_json::from_str(&object).unwrap();
        assert_eq!(run["resumed_from"], 3);
        assert_eq!(run["losses"].as_array().unwrap().len(), 3);
        assert_eq!(run["step_ms"]["samples"].as_array().unwrap().len(), 0);
    }
}

/// Progress and summary count the tokens of one rank. Their clocks differ, but counting four ranks
/// would result in a factor of four.
#[test]
fn progress_and_summary_count_alike() {
    let output = shardlab(&[
        "exec",
        "small-native",
        "--no-store",
        "--steps",
        "20",
        "--json",
    ])
    .output()
    .unwrap();
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    let last = words.lines().last().unwrap();
    let (before, _) = last.split_once(" tokens/s/GPU").unwrap();
    let shown: f64 = before
        .rsplit(' ')
        .next()
        .unwrap()
        .replace(',', "")
        .parse()
        .unwrap();
    let summary = run["tokens_per_s_per_gpu"].as_f64().unwrap();
    assert!((0.5..2.0).contains(&(shown / summary)), "{shown} {summary}");
}

/// Progress leaves out values that a run does not compute.
#[test]
fn progress_without_gradient_norms() {
    for (without, shown) in [(&[][..], true), (&["--no-grad-norms"], false)] {
        let args = [
            &["exec", "llama-tiny", "--steps", "2", "--json", "--set"][..],
            &["train.grad_norm=false"],
            without,
        ];
        let output = shardlab(&args.concat()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("step 2/2  loss 5."), "{text}");
        assert_eq!(text.contains("gradient"), shown, "{text}");
        assert!(!text.contains("NaN"), "{text}");
    }
}

/// Prediction and measurement have the same program, and agree on memory to the byte.
#[test]
fn sim_and_exec_agree_on_program_and_memory() {
    let mut compared = 0;
    for (name, _) in shardlab_plan::scenario::shipped() {
        if !name.starts_with("small-") && !["llama-tiny", "gpt2-tiny"].contains(name) {
            continue;
        }
        let sim = json(&["sim", name, "--json"]).remove(0);
        let exec = exec(&[name, "--steps", "4"]);
        assert_eq!(sim["program_digest"], exec["program_digest"], "{name}");
        assert_eq!(sim["world_size"], exec["world_size"], "{name}");
        for key in [
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "peak_device_bytes",
            "persistent_bytes",
            "by_role",
        ] {
            assert_eq!(sim["memory"][key], exec["memory"][key], "{name}: {key}");
        }
        assert_eq!(sim["memory_by_unit"], exec["memory_by_unit"], "{name}");
        for (kind, stats) in sim["collectives"].as_object().unwrap() {
            for key in ["count", "bytes"] {
                assert_eq!(
                    stats[key], exec["collectives"][kind][key],
                    "{name}: {kind} {key}"
                );
            }
        }
        compared += 1;
    }
    assert!(compared >= 25, "{compared}");
}

/// Norms that are not computed are not NaN, and comparisons of two runs leave them out.
#[test]
fn norms_that_no_run_tells_are_left_out() {
    let text = stdout(&["exec", "small-summed", "--steps", "2", "--no-store"]);
    let row: Vec<&str> = text
        .lines()
        .filter_map(|l| l.trim_start().strip_prefix("2 "))
        .collect();
    assert_eq!(row.len(), 1, "{text}");
    let cells: Vec<&str> = row[0].split_whitespace().collect();
    assert_eq!(cells[1], "-", "{text}");
    let two = |name| {
        let args = ["compare", name, name, "--exec", "--steps", "2"];
        stdout(&args)
    };
    assert!(
        two("small-native")
            .contains("The gradient norm is bitwise identical in all 2 common steps.")
    );
    let summed = two("small-summed");
    assert!(
        summed.contains("The loss is bitwise identical in all 2 common steps."),
        "{summed}"
    );
    assert!(
        !summed.contains("gradient norm at step") && !summed.contains("The gradient norm"),
        "{summed}"
    );
}

/// Allocated and reserved bytes agree after every allocation and every free of a step, to the byte.
#[test]
fn sim_and_exec_agree_on_every_instant_of_memory() {
    use shardlab_exec::train::{NoObserver, RunOptions, train};
    use shardlab_plan::record::Run;
    let mut compared = 0;
    for (name, _) in shardlab_plan::scenario::shipped() {
        if !name.starts_with("small-") && !["llama-tiny", "gpt2-tiny"].contains(name) {
            continue;
        }
        // The pool of this variant allocates its memory in the second micro-batch. Here, this is in
        // the first step, so that all steady steps are alike, whichever is the most typical one.
        let sets: &[String] = match *name {
            "small-megatron-pr4435" => &["train.grad_accum=2".to_owned()],
            _ => &[],
        };
        let scenario = shardlab_plan::scenario::load(Path::new(name), sets).unwrap();
        let program = std::sync::Arc::new(shardlab_plan::plan(&scenario).unwrap());
        let profile = shardlab_sim::hardware::load(&scenario.mesh.hardware).unwrap();
        let predicted = shardlab_sim::simulate(&program, &profile, &Default::default()).unwrap();
        let mut options = RunOptions {
            steps: Some(4),
            ..RunOptions::default()
        };
        options.exec.record = true;
        let measured = train(&scenario, &program, options, &mut NoObserver)
            .unwrap()
            .run;
        let timeline = |run: &Run| -> Vec<_> {
            let samples = run.memory.timeline.iter();
            samples
                .map(|s| (s.instr, s.allocated, s.reserved))
                .collect()
        };
        assert!(timeline(&predicted).len() > 10, "{name}");
        assert_eq!(timeline(&predicted), timeline(&measured), "{name}");
        compared += 1;
    }
    assert!(compared >= 25, "{compared}");
}

/// The code of transformers sorts rows of experts, masks them and brings them back into order. It
/// computes the same as the native code, whose kernels index rows.
#[test]
fn experts_of_transformers_train_like_native_ones() {
    let base = ["small-moe", "--steps", "3", "--set", "mesh.dp_shard=1"];
    let train = |more: &[&str]| {
        let set = ["--set", "precision.param_dtype=f32"];
        let run = exec(&[&base[..], &set, more].concat());
        [&run["losses"], &run["grad_norms"]].map(numbers).concat()
    };
    let native = train(&[]);
    let transformers = ["--set", "model.implementation=transformers"];
    let masked = train(&transformers);
    for (a, b) in native.iter().zip(&masked) {
        assert!((a - b).abs() < 1e-4 * a, "{native:?} {masked:?}");
    }
    let no_mask = ["--set", "model.mask_expert_rows=false"];
    assert_eq!(train(&[&transformers[..], &no_mask].concat()), masked);
}

/// A run is killed without warning, at least once while the second checkpoint exists or is being
/// written. The resumed run has the losses and the final weights of an uninterrupted one.
#[test]
fn a_killed_run_goes_on_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = dir.path().join("c").display().to_string();
    let scenario = [
        "small-accumulation",
        "--set",
        "train.lr_schedule=cosine",
        "--set",
        "train.warmup_steps=10",
    ];
    let long = ["--steps", "160", "--set", "train.steps=160"];
    let whole = exec(&[&scenario[..], &long].concat());
    let saved = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "5"];
    let args = [&["exec", "--json"], &scenario[..], &long, &saved].concat();
    let mut kills = 0;
    for wanted in [2, 5] {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .args(&args)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        let newest = || {
            let list = std::fs::read_dir(&checkpoints)
                .into_iter()
                .flatten()
                .flatten();
            list.filter_map(|e| {
                e.file_name()
                    .to_str()?
                    .strip_prefix("step-")?
                    .parse::<u64>()
                    .ok()
            })
            .max()
        };
        while newest().unwrap_or(0) < 5 * wanted && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        // SIGKILL.
        kills += usize::from(child.kill().is_ok() && !child.wait().unwrap().success());
    }
    assert_eq!(kills, 2, "the run ended before it could be killed");
    let resumed = exec(&args[2..]);
    assert!(resumed["resumed_from"].as_u64().unwrap() >= 25);
    assert_eq!(resumed["losses"], whole["losses"]);
    assert_eq!(resumed["grad_norms"], whole["grad_norms"]);
    assert_eq!(resumed["final_norms"], whole["final_norms"]);
    // A run with another world size and policy can also resume from there.
    let other = exec(
        &[
            &[
                "small-fsdp2",
                "--set",
                "mesh.dp_shard=2",
                "--steps",
                "161",
                "--checkpoint-dir",
                &checkpoints,
            ][..],
            &["--resume", "160"],
        ]
        .concat(),
    );
    assert_eq!(other["resumed_from"], 160);
    let losses = numbers(&other["losses"]);
    assert_eq!(losses.len(), 161);
    assert!((losses[160] - losses[159]).abs() < 0.5, "{losses:?}");
}

#[test]
fn exported_weights_begin_another_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("hf").display().to_string();
    let first = exec(&["small-native", "--steps", "3", "--export", &out]);
    let second = exec(&[
        "small-zero1",
        "--steps",
        "1",
        "--init",
        &out,
        "--set",
        "train.lr=0",
        "--set",
        "train.weight_decay=0",
    ]);
    assert_eq!(first["final_norms"], second["final_norms"]);
    // The other seed starts with other weights.
    let other = exec(&["small-native", "--steps", "1", "--seed", "1"]);
    // The first step is not part of the statistics.
    assert!(other["step_ms"]["median"].is_null() && other["step_ms"]["mean"].is_null());
    assert_ne!(other["losses"][0], first["losses"][0]);
}

#[test]
fn text_and_wide_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("a.txt");
    std::fs::write(
        &text,
        "to be or not to be, that is the question: ".repeat(20),
    )
    .unwrap();
    let wide = dir.path().join("a.bin");
    let bytes: Vec<u8> = std::fs::read(&text)
        .unwrap()
        .iter()
        .flat_map(|b| u32::from(*b).to_le_bytes())
        .collect();
    std::fs::write(&wide, bytes).unwrap();
    let (text, wide) = (text.display().to_string(), wide.display().to_string());
    let base = ["small-gpt2", "--set", "model.vocab=128", "--data"];
    let a = exec(&[&base[..], &[&text]].concat());
    let b = exec(&[&base[..], &[&wide, "--data-dtype", "uint32"]].concat());
    assert_eq!(a["losses"], b["losses"]);
    let (code, words) = failure(&["exec", "small-gpt2", "--data", &text]);
    assert_eq!(code, 2, "{words}");
    assert!(
        words.contains("is outside the vocabulary of 101"),
        "{words}"
    );
}

/// A tokenizer is found next to the text or given by name. The same tokens from a file give the
/// same run. Reading bytes does not use a tokenizer.
#[cfg(feature = "tokenizers")]
#[test]
fn text_through_a_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let words = ["to", "be", "or", "not", "that", "is", "the", "question"];
    let spoken: Vec<usize> = (0..400).map(|i| (i * i + i / 7) % words.len()).collect();
    let text: Vec<&str> = spoken.iter().map(|i| words[*i]).collect();
    let ids: Vec<u8> = spoken
        .iter()
        .flat_map(|i| (*i as u16).to_le_bytes())
        .collect();
    std::fs::write(path("text.txt"), text.join(" ")).unwrap();
    std::fs::write(path("ids.bin"), ids).unwrap();
    let vocab: Vec<String> = (0..)
        .zip(words)
        .map(|(i, w)| format!("{w:?}: {i}"))
        .collect();
    let tokenizer = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {{"type": "WhitespaceSplit"}}, "post_processor": null, "decoder": null,
        "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "to"}}}}"#,
        vocab.join(", ")
    );
    let run = |args: &[&str]| exec(&[&["small-gpt2", "--data"], args].concat());
    let wanted = run(&[&path("ids.bin")]);
    let as_bytes = run(&[&path("text.txt"), "--set", "model.vocab=128"]);
    std::fs::write(path("other.json"), &tokenizer).unwrap();
    let named = run(&[&path("text.txt"), "--tokenizer", &path("other.json")]);
    assert_eq!(named["losses"], wanted["losses"]);
    std::fs::write(path("tokenizer.json"), &tokenizer).unwrap();
    let next_to_text = run(&[&path("text.txt")]);
    assert_eq!(next_to_text["losses"], wanted["losses"]);
    let data = next_to_text["environment"]["data"].as_str().unwrap();
    assert!(data.contains("tokenizer.json"), "{data}");
    let bytes = ["--data-dtype", "uint8", "--set", "model.vocab=128"];
    let bytes = run(&[&[&path("text.txt")[..]], &bytes[..]].concat());
    assert_eq!(bytes["losses"], as_bytes["losses"]);
    let (code, message) = failure(&[
        "exec",
        "small-gpt2",
        "--data",
        &path("text.txt"),
        "--tokenizer",
        "no.json",
    ]);
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("no.json: no tokenizer"), "{message}");
}

#[test]
fn bad_input_is_distinguished_from_failed_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    for (args, part) in [
        (
            &["exec", "small-native", "--init", &path][..],
            "config.json",
        ),
        (
            &["exec", "small-native", "--data", "/no/such/file"],
            "--data /no/such/file",
        ),
        (
            &["exec", "small-native", "--resume", "soon"],
            "auto, never or a step",
        ),
        (
            &[
                "exec",
                "small-native",
                "--checkpoint-dir",
                &path,
                "--resume",
                "7",
            ],
            "existing ones: none",
        ),
        (&["exec", "small-linear", "--export", &path], "Hugging Face"),
        (
            &["exec", "small-linear", "--data", "Cargo.toml"],
            "no tokens",
        ),
    ] {
        let (code, words) = failure(args);
        assert_eq!(code, 2, "{args:?}: {words}");
        assert!(words.contains(part), "{args:?}: {words}");
    }
}

/// The error names a damaged checkpoint. `auto` uses the previous one, and fails if none is
/// complete.
#[test]
fn damaged_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    let base = [
        "small-zero2",
        "--checkpoint-dir",
        &path,
        "--checkpoint-every",
        "2",
    ];
    let whole = exec(&base);
    let cut = |step: u32| {
        let file = dir
            .path()
            .join(format!("step-{step:08}/rank-00001-of-00004.safetensors"));
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 9]).unwrap();
    };
    cut(6);
    let (code, words) = failure(&[&["exec"], &base[..], &["--resume", "6"]].concat());
    assert_eq!(code, 3, "{words}");
    assert!(
        words.contains("rank-00001-of-00004.safetensors: corrupt"),
        "{words}"
    );
    let again = exec(&base);
    assert_eq!(
        (&again["resumed_from"], &again["losses"]),
        (&4.into(), &whole["losses"])
    );
    for step in [2, 4, 6] {
        cut(step);
    }
    let (code, words) = failure(&[&["exec"], &base[..]].concat());
    assert_eq!(code, 3, "{words}");
    assert!(words.contains("corrupt"), "{words}");
    let fresh = exec(&[&base[..], &["--resume", "never"]].concat());
    assert_eq!(
        (&fresh["resumed_from"], &fresh["losses"]),
        (&0.into(), &whole["losses"])
    );
}

/// A run that starts from an older checkpoint than the newest writes its own checkpoints, and a
/// later run resumes from those.
#[test]
fn a_new_beginning_among_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    let base = [
        "small-ddp",
        "--checkpoint-dir",
        &path,
        "--checkpoint-every",
        "2",
    ];
    exec(&[&base[..], &["--steps", "6"]].concat());
    let anew = ["--steps", "3", "--resume", "never", "--seed", "7"];
    let anew = shardlab(&[&["exec"], &base[..], &anew].concat()).assert();
    let words = String::from_utf8(anew.success().get_output().stderr.clone()).unwrap();
    assert!(
        words.contains("the first save moves the checkpoints of steps 2, 4, 6 aside"),
        "{words}"
    );
    let on = exec(&[&base[..], &["--steps", "4", "--resume", "auto"]].concat());
    let seven = exec(&["small-ddp", "--steps", "4", "--seed", "7"]);
    assert_eq!(
        (&on["resumed_from"], &on["losses"]),
        (&3.into(), &seven["losses"])
    );
    assert!(dir.path().join("step-00000006.aside-1").exists());
}

/// A full file system ends the run with the reason, and the previous checkpoint stays usable.
#[cfg(unix)]
#[test]
fn a_full_disk_while_saving() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    let base = [
        "exec",
        "small-ddp",
        "--checkpoint-dir",
        &path,
        "--checkpoint-every",
        "2",
    ];
    shardlab(&[&base[..], &["--steps", "2"]].concat())
        .assert()
        .success();
    // No file may grow beyond 32 blocks of 1024 bytes. The signal for this limit is ignored,
    // because a full disk sends none.
    let script = format!(
        "trap '' XFSZ; ulimit -f 32; exec {} {}",
        env!("CARGO_BIN_EXE_shardlab"),
        base.join(" ")
    );
    let output = std::process::Command::new("bash")
        .args(["-c", &script])
        .output()
        .unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{words}");
    assert!(
        words.contains("rank-00000-of-00004.safetensors: File too large"),
        "{words}"
    );
    let on = exec(&["small-ddp", "--checkpoint-dir", &path]);
    assert_eq!(on["resumed_from"], 2);
}

/// After Ctrl-C, or the first signal of a batch scheduler, the step is finished, and the results so
/// far are printed and saved.
#[test]
fn an_interruption() {
    for signal in ["INT", "TERM"] {
        interrupted_by(signal);
    }
}

fn interrupted_by(signal: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_shardlab"))
        .args([
            "exec",
            "small-native",
            "--json",
            "--no-store",
            "--steps",
            "1000000",
            "--checkpoint-dir",
            &path,
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut errors = std::io::BufReader::new(child.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut errors, &mut line).unwrap();
    assert!(line.starts_with("step 1/1000000"), "{line}");
    let sent = std::process::Command::new("bash")
        .args(["-c", &format!("kill -{signal} {}", child.id())])
        .status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{signal}");
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["interrupted"], true);
    let done = run["losses"].as_array().unwrap().len();
    let resumed = exec(&[
        "small-native",
        "--steps",
        &(done + 1).to_string(),
        "--checkpoint-dir",
        &path,
    ]);
    assert_eq!(resumed["resumed_from"], done);
}

#[test]
fn a_trace_of_a_measured_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json").display().to_string();
    let run = exec(&["small-hsdp", "--steps", "3", "--trace", &path]);
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events.iter().filter_map(|e| e["name"].as_str()).collect();
    assert!(names.iter().any(|n| n.contains("all_gather")), "{names:?}");
    assert!(
        run["collectives"]["all_gather"]["busy_ms"]
            .as_f64()
            .unwrap()
            > 0.0
    );
}

/// Acceptance: without a GPU, the same binary says what is missing and where it searched. Output
/// paths that cannot be written are detected before training if possible; otherwise, the result is
/// not lost.
#[test]
fn outputs_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (checkpoints, file) = (path("checkpoints"), path("file"));
    std::fs::write(&file, "").unwrap();
    for option in [["--trace", "/no/such/t.json"], ["--store", &file]] {
        let (code, text) = failure(
            &[
                &["exec", "small-linear", "--checkpoint-dir", &checkpoints],
                &option[..],
            ]
            .concat(),
        );
        assert_eq!(code, 2, "{text}");
        assert!(option.iter().all(|word| text.contains(word)), "{text}");
        assert!(!dir.path().join("checkpoints").exists(), "{option:?}");
    }
    if cfg!(target_os = "linux") {
        let store = path("store");
        let output = shardlab(&[
            "exec",
            "small-linear",
            "--json",
            "--trace",
            "/dev/full",
            "--store",
            &store,
        ])
        .output()
        .unwrap();
        assert_eq!(output.status.code(), Some(3));
        let run: Value = serde_json::from_slice(&output.stdout).unwrap();
        let kept = dir
            .path()
            .join("store")
            .join(run["run_id"].as_str().unwrap());
        assert!(kept.is_dir());
    }
}

#[test]
fn a_gpu_that_is_not_there_is_explained() {
    // On a machine with a GPU, the run succeeds, which another test covers.
    if Path::new("/dev/nvidia0").exists() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let (code, text) = failure(&[
        "exec",
        "llama-tiny",
        "--device",
        "cuda",
        "--library-path",
        folder,
    ]);
    assert_eq!(code, 3, "{text}");
    for part in [
        "no usable GPU",
        "libcuda.so.1 (GPU driver): not found",
        folder,
        "pip",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// The choice is validated before libraries are searched.
#[test]
fn a_mistyped_choice_of_products_is_refused() {
    let run = shardlab(&["exec", "llama-tiny", "--device", "cuda"])
        .env("SHARDLAB_GEMM_TUNING", "sustaned")
        .output()
        .unwrap();
    let text = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(2), "{text}");
    assert!(text.contains("did you mean `sustained`?"), "{text}");
}

/// The number of threads per kernel does not change any bit.
#[test]
fn threads_change_nothing() {
    let losses = |threads: &str| {
        let set = "model.hidden=128";
        let args = [
            "exec",
            "llama-tiny",
            "--no-store",
            "--json",
            "--steps",
            "3",
            "--set",
            "mesh.dp_shard=1",
            "--set",
            set,
            "--set",
            "model.ffn=256",
            "--threads",
            threads,
        ];
        json(&args)[0]["losses"].clone()
    };
    assert_eq!(losses("1"), losses("3"));
    assert_eq!(losses("1"), losses("0"));
}

/// Norms of single parameters are part of the text, the object and the events.
#[test]
fn norms_of_parameters_are_reported() {
    let args = [
        "exec",
        "small-native",
        "--no-store",
        "--steps",
        "5",
        "--set",
        "train.param_norms_every=2",
    ];
    let text = stdout(&args);
    assert!(text.contains("norms of parameters after step 4"), "{text}");
    let output = shardlab(&[&args[..], &["--json", "--progress", "json"]].concat())
        .output()
        .unwrap();
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = run["param_norms"].as_array().unwrap();
    let steps: Vec<_> = all.iter().map(|n| n["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4]);
    for at in all {
        let params = at["params"].as_array().unwrap();
        assert_eq!(params.len(), run["final_norms"].as_object().unwrap().len());
        let squares = params
            .iter()
            .map(|p| p["gradient"].as_f64().unwrap().powi(2));
        let global = run["grad_norms"][at["step"].as_u64().unwrap() as usize - 1]
            .as_f64()
            .unwrap();
        let sum = squares.sum::<f64>().sqrt();
        assert!((sum - global).abs() < 1e-4 * global, "{sum} {global}");
    }
    let events = String::from_utf8(output.stderr).unwrap();
    let events = events
        .lines()
        .filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let events: Vec<Value> = events.filter(|e| e["event"] == "param_norms").collect();
    assert_eq!(events.len(), 2);
    assert_eq!(events[1]["params"], all[1]["params"]);
}
