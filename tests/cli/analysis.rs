//! `shardlab explain`.

use crate::{assert_narrow, json, stdout};
use serde_json::Value;

fn explain(args: &[&str]) -> Value {
    let mut all = vec!["explain", "--json"];
    all.extend_from_slice(args);
    json(&all).remove(0)
}

#[test]
fn the_parts_of_an_explanation_add_up() {
    let e = explain(&["peers-tiny", "--no-what-if"]);
    let sum = |object: &Value| -> f64 {
        object
            .as_object()
            .unwrap()
            .values()
            .map(|v| v.as_f64().unwrap())
            .sum()
    };
    let path = &e["critical_path"];
    let length = path["length_ms"].as_f64().unwrap();
    let parts = sum(&path["by_work_ms"]) + path["between_ms"].as_f64().unwrap();
    assert!(
        (parts - length).abs() < 1e-6 * length,
        "{parts} of {length}"
    );
    assert!((sum(&path["by_unit_ms"]) - sum(&path["by_work_ms"])).abs() < 1e-6);
    assert!(length <= e["step_ms"].as_f64().unwrap() * 1.001);
    let exposed = &e["exposed_ms"];
    let groups: f64 = exposed["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| g["ms"].as_f64().unwrap())
        .sum();
    assert!((groups - exposed["total"].as_f64().unwrap()).abs() < 1e-6);
    let memory = &e["memory"];
    assert_eq!(
        sum(&memory["by_role"]),
        memory["peak_allocated_bytes"].as_f64().unwrap()
    );
    assert_eq!(
        sum(&memory["by_unit"]),
        memory["peak_allocated_bytes"].as_f64().unwrap()
    );
}

/// Public case B05 (`tests/data/public/README.md`): an embedding and an output layer that are not
/// tied are in one root unit. Units of their own save much memory, and a little time.
#[test]
fn b05_tables_of_a_root_unit_get_their_own_units() {
    let path = "tests/data/public/automodel-3708.toml";
    let root = 2 * 248_320 * 5120 + 5120_u64;
    let buffers = |set: &[&str]| {
        let all = [&["explain", path, "--no-what-if", "--json"], set].concat();
        let e = json(&all).remove(0);
        let largest = e["memory"]["largest"].as_array().unwrap().clone();
        let inputs = largest.into_iter().filter(|b| b["role"] == "reduce_input");
        let bytes = inputs.map(|b| b["bytes"].as_u64().unwrap());
        (bytes.max(), e["memory"]["peak_allocated_bytes"].as_u64())
    };
    // The issue reports 9.473 GiB.
    let (input, together) = buffers(&[]);
    assert_eq!(input, Some(4 * root));
    let (_, apart) = buffers(&["--set", "fsdp.units=block_and_ends"]);
    assert!(together.unwrap() - apart.unwrap() > 3 << 30);
    let text = stdout(&["explain", path]);
    let listed = text.split("less memory:").nth(1).unwrap();
    let first = listed.lines().nth(1).unwrap();
    assert!(first.starts_with("fsdp.units=block_and_ends "), "{text}");
}

/// Public case T11 (`tests/data/public/README.md`): with the optimizer in backward, the gradients
/// of the whole model are no longer in memory at once, and torchtune's peak moves from the end of
/// backward to its start, where the logits are. The table states 23.1 GiB; its steps with torch
/// 2.11 on an H200 allocate 23.19 GiB at most.
#[test]
fn t11_optimizer_in_backward_leaves_the_peak_to_the_logits() {
    let path = "tests/data/public/torchtune-3b-1xa100.toml";
    let peak = |set: &[&str]| {
        let set = set.iter().flat_map(|set| ["--set", set]);
        let all: Vec<&str> = ["explain", path, "--no-what-if", "--json"]
            .into_iter()
            .chain(set)
            .collect();
        let e = json(&all).remove(0);
        let bytes = e["memory"]["peak_allocated_bytes"].as_f64().unwrap();
        (bytes / f64::from(1 << 30), e["memory"]["largest"].clone())
    };
    let in_backward = "fsdp.optimizer_in_backward=true";
    let (with, largest) = peak(&[in_backward]);
    assert!((with / 23.1 - 1.0).abs() < 0.03, "{with}");
    let logits = |l: &Value| l["role"] == "logits" && l["dtype"] == "bf16";
    assert!(largest.as_array().unwrap().iter().any(logits), "{largest}");
    // Policy native keeps a buffer for all gradients, so at this place it frees all of them but
    // that of the table, to which the chunks add. In PyTorch, there are no others yet.
    let (without, _) = peak(&[]);
    let others = 3_212_749_824_u64 - 128_256 * 3072;
    let others = 2.0 * others as f64 / f64::from(1 << 30);
    assert!((without - with - others).abs() < 0.05, "{without} {with}");
    // A loss that never has all logits frees more than the published job.
    let (fused, _) = peak(&[in_backward, "train.loss=chunked"]);
    assert!(fused < with - 1.0, "{fused}");
}

#[test]
fn the_peak_of_a_materialized_loss_is_three_float32_logits_in_backward() {
    let e = explain(&["peers-1b", "--no-what-if"]);
    assert_eq!(e["memory"]["phase"], "backward");
    let logits = &e["memory"]["largest"][0];
    assert_eq!(logits["role"], "logits");
    assert_eq!(logits["dtype"], "f32");
    assert_eq!(logits["count"], 3);
    // Rows x vocabulary x 4 bytes.
    assert_eq!(logits["bytes"].as_u64(), Some(2 * 4096 * 128_256 * 4));
}

#[test]
fn what_ifs_say_what_sim_says() {
    let e = explain(&["peers-tiny"]);
    let changes = e["what_if"].as_array().unwrap();
    assert!(changes.len() > 30);
    for set in ["fsdp.reshard_after_forward=false", "train.loss=chunked"] {
        let change = changes.iter().find(|c| c["set"][0] == set).unwrap();
        let run = &json(&["sim", "peers-tiny", "--json", "--set", set])[0];
        assert_eq!(
            change["effect"]["step_ms"], run["step_ms"]["median"],
            "{set}"
        );
        assert_eq!(
            change["effect"]["peak_allocated_bytes"], run["memory"]["peak_allocated_bytes"],
            "{set}"
        );
    }
    let slower = e["slower"].as_array().unwrap();
    assert_eq!(slower.len(), 10);
    for part in ["host", "arithmetic", "memory", "collectives"] {
        let twice = slower
            .iter()
            .find(|s| s["part"] == part && s["factor"] == 2.0)
            .unwrap();
        let run = &json(&[
            "sim",
            "peers-tiny",
            "--json",
            "--scale",
            &format!("{part}=2"),
        ])[0];
        assert_eq!(twice["step_ms"], run["step_ms"]["median"], "{part}");
        // The host determines this step, and collectives take less time than it does.
        let same = part == "collectives" && twice["step_ms"] == e["step_ms"];
        assert!(
            same || twice["step_ms"].as_f64() > e["step_ms"].as_f64(),
            "{part}"
        );
        assert_eq!(run["environment"]["slower"], format!("{part}=2"));
    }
    // Copies to and from the host are separate from collectives; only offloading has any.
    let offload = explain(&["small-offload"]);
    let slower = offload["slower"].as_array().unwrap();
    let copies = slower
        .iter()
        .find(|s| s["part"] == "host_copies" && s["factor"] == 2.0)
        .unwrap();
    assert!(copies["step_ms"].as_f64() > offload["step_ms"].as_f64());
    // An option that the scenario already has is not a change, and an impossible one is listed with
    // the reason.
    assert!(
        !changes
            .iter()
            .any(|c| c["set"][0] == "fsdp.reshard_after_forward=true")
    );
    let refused = changes.iter().filter_map(|c| c["impossible"].as_str());
    assert!(refused.clone().count() > 2);
    assert!(refused.clone().all(|reason| reason.len() > 20));
}

#[test]
fn prefetch_matters_where_communication_does() {
    let step = |scenario: &str, depth: u32| {
        let run = json(&[
            "sim",
            scenario,
            "--json",
            "--set",
            &format!("fsdp.prefetch_forward={depth}"),
            "--set",
            &format!("fsdp.prefetch_backward={depth}"),
        ]);
        run[0]["step_ms"]["median"].as_f64().unwrap()
    };
    assert!(step("llama3.2-3b-zero3", 0) > 1.02 * step("llama3.2-3b-zero3", 1));
    // Nothing is gathered if nothing is sharded.
    assert_eq!(step("llama3.2-3b-ddp", 0), step("llama3.2-3b-ddp", 1));
}

/// The text starts with the answer, continues in order of usefulness, and is short unless
/// everything is requested.
#[test]
fn the_text_leads_with_the_answer() {
    let all = stdout(&["explain", "peers-tiny", "--all"]);
    let short = stdout(&["explain", "peers-tiny"]);
    let order = |text: &str, parts: &[&str]| {
        let at = parts.iter().map(|part| {
            text.find(part)
                .unwrap_or_else(|| panic!("{part} in {text}"))
        });
        assert!(at.is_sorted(), "{text}");
    };
    let reasons = ["Exposed time", "Memory at the peak", "Critical path"];
    order(
        &short,
        &[
            &["verdict ", "why ", "next ", "What to change"][..],
            &reasons,
        ]
        .concat(),
    );
    order(
        &all,
        &[
            &[
                "verdict ",
                "why ",
                "next ",
                "Effect of each option",
                "Not possible:",
            ][..],
            &reasons,
            &["Compile modes", "If one component were slower"],
        ]
        .concat(),
    );
    for text in [&all, &short] {
        assert_narrow(text);
        let mut first = text.lines().take(4);
        assert!(first.any(|l| l.starts_with("verdict   fits")), "{text}");
    }
    for hidden in ["Not possible:", "Compile modes", "fsdp.policy="] {
        assert!(!short.contains(hidden), "{hidden} in {short}");
    }
    assert!(short.contains("--all") && short.lines().count() < all.lines().count() / 2);
}

/// `regions` does not help the toy models, whose layers run in library kernels, but helps large
/// blocks. `explain` says why.
#[test]
fn compiled_regions_gain_on_large_blocks_and_not_on_toys() {
    let step = |name: &str, mode: &str| {
        let set = format!("compile.mode={mode}");
        json(&["sim", name, "--json", "--set", &set])[0]["step_ms"]["median"]
            .as_f64()
            .unwrap()
    };
    for toy in ["toy-linear", "toy-cnn", "toy-transformer"] {
        assert_eq!(step(toy, "regions"), step(toy, "off"), "{toy}");
        let text = stdout(&["explain", toy, "--all", "--set", "compile.mode=regions"]);
        assert!(
            text.contains("regions changes nothing: nothing is compiled"),
            "{text}"
        );
    }
    assert!(step("peers-3b", "regions") < 0.95 * step("peers-3b", "off"));
    let text = stdout(&["explain", "peers-3b", "--all"]);
    assert!(text.contains("regions gains"), "{text}");
}

/// State in host memory uses no device memory, and copies do not count as communication.
#[test]
fn offloaded_states_are_not_alive_on_the_device_and_copies_are_named() {
    let e = explain(&["offload", "--no-what-if"]);
    let memory = &e["memory"];
    let alive: u64 = memory["largest"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| {
            assert_ne!(a["role"], "optimizer_state");
            a["bytes"].as_u64().unwrap() * a["count"].as_u64().unwrap()
        })
        .sum();
    assert!(alive <= memory["peak_allocated_bytes"].as_u64().unwrap());
    let bound = |args: &[&str]| stdout(args).replace('\n', " ");
    assert!(bound(&["sim", "offload"]).contains("Bound by copies:"));
    let late = bound(&["sim", "llama3-8b-4xh200", "--straggler", "2=4"]);
    assert!(late.contains("Bound by a straggler:"), "{late}");
}

/// If the step is compiled as a whole, it waits for a reduction and for the kernel that stores its
/// result, and its collectives carry parameters of several units. The output names both.
#[test]
fn waits_of_whole_steps_name_all_that_was_waited_for() {
    let e = explain(&["small-full", "--no-what-if"]);
    let gaps = e["exposed_ms"]["longest"].as_array().unwrap();
    let last = gaps.iter().find(|g| g["cause"] == "tail").unwrap();
    assert_eq!(last["waited_for"], "reduce_scatter + multi_copy");
    // The first wait: buckets of 16 KiB have room for the embedding (97 x 32 in bf16, 6.1 KiB) and
    // for the first parameters that layers.0 reads.
    let first = gaps
        .iter()
        .filter(|g| g["waited_for"] == "all_gather")
        .min_by(|a, b| {
            a["at_ms"]
                .as_f64()
                .unwrap()
                .total_cmp(&b["at_ms"].as_f64().unwrap())
        });
    assert_eq!(first.unwrap()["unit"], "root, layers.0");
    let why = stdout(&["explain", "small-full", "--no-what-if"]);
    assert!(why.contains("Bound by communication:"), "{why}");
}

/// Across nodes, `explain` tries the mesh and the groups for `reshard_after_forward`, with the same
/// predictions as `sim`. Within a node, neither helps. It tries state in host memory if the policy
/// supports it.
#[test]
fn changes_across_nodes_are_tried() {
    let two = [
        "small-native",
        "--set",
        "mesh.dp_shard=8",
        "--set",
        "mesh.gpus_per_node=4",
    ];
    let tried = |args: &[&str]| -> Vec<(Vec<String>, Value)> {
        let e = explain(args);
        let all = e["what_if"].as_array().unwrap().iter();
        all.map(|w| {
            let set = w["set"].as_array().unwrap().iter();
            let set = set.map(|s| s.as_str().unwrap().to_owned()).collect();
            (set, w["effect"]["step_ms"].clone())
        })
        .collect()
    };
    let across = tried(&two);
    for sets in [
        &["fsdp.reshard_after_forward=4"][..],
        &["fsdp.reshard_after_forward=2"],
        &["mesh.dp_shard=4", "mesh.dp_replicate=2"],
        &["fsdp.offload=[\"optimizer\"]"],
    ] {
        let found = across.iter().find(|(set, _)| set == sets);
        let (_, step_ms) = found.unwrap_or_else(|| panic!("{sets:?} in {across:?}"));
        let mut args = [&["sim", "--json"], &two[..]].concat();
        args.extend(sets.iter().flat_map(|set| ["--set", set]));
        assert_eq!(json(&args)[0]["step_ms"]["median"], *step_ms, "{sets:?}");
    }
    let within = tried(&["small-fsdp2"]);
    let about = |key: &str| within.iter().any(|(sets, _)| sets[0].starts_with(key));
    assert!(!about("fsdp.reshard_after_forward=2") && !about("mesh."));
    assert!(about("fsdp.reshard_after_forward=false"));
    // `CPUOffloadPolicy` keeps all state in host memory, or none.
    let offload = |set: &str| {
        let found = within.iter().find(|(sets, _)| sets[0] == set);
        found.map(|(_, step_ms)| step_ms.is_number())
    };
    let all = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
    assert_eq!(offload(all), Some(true));
    assert_ne!(offload("fsdp.offload=[\"optimizer\"]"), Some(true));
}

/// If the scenario does not fit, the text starts with the smallest change that makes it fit, and
/// `sim` agrees.
#[test]
fn what_makes_it_fit_comes_first() {
    let base = [
        "llama3-8b-4xh200",
        "--set",
        "mesh.hardware=h100-80",
        "--set",
        "train.recompute=none",
    ];
    let explained = |more: &[&str]| stdout(&[&["explain"], &base[..], more].concat());
    let text = explained(&[]);
    assert_narrow(&text);
    assert!(text.contains("\nverdict   does not fit · needs "), "{text}");
    let next = text
        .split_once("\nnext      smallest change that fits: `")
        .unwrap()
        .1;
    let (change, effect) = next.split_once('`').unwrap();
    assert!(effect.contains("free)"), "{text}");
    assert!(
        !text.contains("What to change") && !text.contains("Not possible"),
        "{text}"
    );

    let e = explain(&base);
    assert_eq!(e["verdict"]["fits"], "no");
    let set = e["smallest_fit"]["set"].as_array().unwrap();
    let set: Vec<&str> = set.iter().map(|s| s.as_str().unwrap()).collect();
    let said = set.iter().map(|s| format!("--set {s}")).collect::<Vec<_>>();
    let joined: String = change.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(joined.replace('\'', ""), said.join(" "));
    let with = set.iter().flat_map(|s| ["--set", s]);
    let args: Vec<&str> = ["sim", "--json"]
        .into_iter()
        .chain(base)
        .chain(with)
        .collect();
    let run = &json(&args)[0];
    assert_eq!(run["fits"], "yes");
    let effect = &e["smallest_fit"]["effect"];
    assert_eq!(effect["step_ms"], run["step_ms"]["median"]);
    assert_eq!(effect["free_bytes"], run["verdict"]["free_bytes"]);
    let bytes = |key: &str| run["memory"][key].as_f64().unwrap();
    let free = 1.0 - bytes("peak_device_bytes") / bytes("capacity_bytes");
    assert!(free >= 0.05, "{free}");

    // The full table lists changes that fit before changes that do not.
    let all = explained(&["--all"]);
    let table = all.split_once("Effect of each option").unwrap().1;
    let (before, behind) = table.split_once("do not fit:").unwrap();
    let behind = behind.split_once("Less than").unwrap().0;
    assert!(
        before.contains(" yes") && !behind.contains(" yes\n"),
        "{all}"
    );
}

/// With headroom, one option is not enough, but two are. The text also mentions a change that only
/// just fits.
#[test]
fn two_options_are_proposed_where_one_is_not_enough() {
    let args = [
        "explain",
        "llama3-70b-64xh100",
        "--set",
        "train.recompute=selective",
        "--set",
        "train.micro_batch=2",
    ];
    let e = explain(&args[1..]);
    assert_eq!(e["smallest_fit"]["options"], 2);
    let text = stdout(&args);
    assert_narrow(&text);
    assert!(text.contains("Smallest changes that fit"), "{text}");
    assert!(text.contains("with 5 % free:"), "{text}");
}

/// Only changes of more than 0.5 % are listed, and only those that a user of the policy can make.
#[test]
fn changes_that_do_not_matter_are_hidden() {
    let text = stdout(&["explain", "llama3-70b-64xh100"]);
    for hidden in [
        "fsdp.policy=",
        "fsdp.prefetch_forward=4",
        "fsdp.strategy=",
        "fsdp.separate_communicators=",
        "Not possible",
    ] {
        assert!(!text.contains(hidden), "{hidden} in {text}");
    }
    let all = stdout(&["explain", "llama3-70b-64xh100", "--all"]);
    assert!(all.contains("fsdp.policy=native"), "{all}");
}

/// A vocabulary size that is not a multiple of 8 causes a warning and a suggestion to pad it.
#[test]
fn an_odd_vocabulary_is_a_warning() {
    let set = ["llama3-8b-4xh200", "--set", "model.vocab=128257"];
    let text = stdout(&[&["explain"], &set[..]].concat());
    assert_narrow(&text);
    assert!(
        text.contains("warning   vocab 128257 is not a multiple of 8"),
        "{text}"
    );
    assert!(text.contains("model.vocab=128264"), "{text}");
    let run = &json(&[&["sim", "--json"], &set[..]].concat())[0];
    assert_eq!(run["warnings"][0]["kind"], "unaligned_shape");
    assert_eq!(run["warnings"][0]["set"][0], "model.vocab=128264");
    let aligned = &json(&["sim", "--json", "llama3-8b-4xh200"])[0];
    assert_eq!(aligned["warnings"].as_array().unwrap().len(), 0);
}

/// If all blocks are recomputed, `explain` finds the smallest number of blocks that leaves 5 % of
/// the device free; one fewer leaves less.
#[test]
fn the_fewest_recomputed_blocks_are_found() {
    let on = ["llama3-70b-64xh100"];
    let e = explain(&on);
    let what_ifs = e["what_if"].as_array().unwrap();
    let set = |w: &Value| w["set"][0].as_str().unwrap().to_owned();
    let found = what_ifs.iter().find_map(|w| {
        let number = set(w).strip_prefix("train.recompute_layers=")?.parse().ok();
        number.map(|n: u32| (n, w["effect"].clone()))
    });
    let (layers, effect) = found.expect("all blocks are more than are needed");
    let free = |layers: u32| {
        let layers = format!("train.recompute_layers={layers}");
        let run = &json(&["sim", on[0], "--json", "--set", &layers])[0];
        let m = &run["memory"];
        let bytes = |key: &str| m[key].as_f64().unwrap();
        let free = 1.0 - bytes("peak_device_bytes") / bytes("capacity_bytes");
        (free, run["step_ms"]["median"].clone())
    };
    let (enough, step_ms) = free(layers);
    assert_eq!(effect["step_ms"], step_ms);
    assert!(enough >= 0.05 && free(layers - 1).0 < 0.05, "{layers}");
    // Fewer layers are recomputed.
    assert!(step_ms.as_f64() < e["step_ms"].as_f64());
    // If only some blocks are recomputed, `explain` only tries to recompute all blocks.
    let some = explain(&["llama3-70b-64xh100", "--set", "train.recompute_layers=70"]);
    let about = |w: &Value| set(w).starts_with("train.recompute_layers=");
    let tried = some["what_if"].as_array().unwrap().iter();
    let tried: Vec<String> = tried.filter(|w| about(w)).map(set).collect();
    assert_eq!(tried, ["train.recompute_layers=all"]);
}

/// A slower component may exceed the range of the simulator; the rest of the explanation is still
/// printed.
#[test]
fn tasks_of_many_minutes_are_explained() {
    let sets = [
        "mesh.hardware=cpu",
        "train.seq_len=16384",
        "model.max_seq_len=16384",
        "train.micro_batch=8",
    ];
    let mut args = vec!["peers-8b"];
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    let e = explain(&args);
    let slower = e["slower"].as_array().unwrap();
    let twice = |part: &str| {
        let found = slower
            .iter()
            .find(|s| s["part"] == part && s["factor"] == 2.0);
        found.unwrap()["step_ms"].as_f64()
    };
    assert_eq!(twice("arithmetic"), None);
    assert!(twice("host") >= e["step_ms"].as_f64());
}

/// With four network cards of 12.5 GB/s for 8 GPUs, a layer's reduction takes longer than the
/// computation of the previous layer, and gathers wait behind it.
#[test]
fn a_gather_behind_a_reduction_is_named_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("slow.toml");
    let text = include_str!("../../scenarios/hardware/h100-80.toml");
    let slow = text
        .replace("nics_per_node = 8", "nics_per_node = 4")
        .replace("nic_gbps = 50", "nic_gbps = 12.5");
    std::fs::write(&profile, slow).unwrap();
    let hardware = format!("mesh.hardware={}", profile.display());
    let e = explain(&[
        "llama3-70b-64xh100",
        "--set=model.layers=6",
        "--no-what-if",
        "--set",
        &hardware,
    ]);
    let exposed = &e["exposed_ms"];
    let groups = exposed["groups"].as_array().unwrap();
    let queued = groups
        .iter()
        .find(|g| g["cause"] == "queue" && g["waited_for"] == "all_gather")
        .unwrap();
    assert_eq!(queued["behind"], "reduce_scatter");
    let ms = |v: &Value| v.as_f64().unwrap();
    let all: f64 = exposed["by_cause"]
        .as_object()
        .unwrap()
        .values()
        .map(ms)
        .sum();
    assert!((all - ms(&exposed["total"])).abs() < 1e-6);
    let mut longest = exposed["longest"].as_array().unwrap().iter();
    let gap = longest.find(|g| g["cause"] == "queue").unwrap();
    let why = gap["why"].as_str().unwrap();
    assert!(
        why.starts_with("waited ")
            && why.ends_with(" ms for reduce_scatter layers.5 on the same communicator"),
        "{why}"
    );
}

/// Each expert-parallel size is compared with all others, with the time and memory of tokens and
/// rows.
#[test]
fn experts_are_compared_from_any_size() {
    for (set, others) in [("mesh.ep=1", ["2", "4"]), ("mesh.ep=2", ["1", "4"])] {
        let e = explain(&["small-moe", "--set", set]);
        let all = e["experts"].as_array().unwrap();
        let about = |what: &str| all.iter().filter(|x| x["about"] == what).count();
        assert_eq!(about("imbalance"), 2, "{set}");
        assert_eq!(about("capacity"), 5, "{set}");
        assert!(about("dispatcher") >= 3, "{set}");
        for ep in others {
            let own = [format!("mesh.ep={ep}")];
            let found = all.iter().find(|x| x["set"] == serde_json::json!(own));
            let step = &found.unwrap()["effect"]["step_ms"];
            assert!(step.as_f64().unwrap() > 0.0, "{set} {ep}");
        }
    }
    let text = stdout(&["explain", "small-moe-ep"]);
    for part in [
        "Experts: ranks, dispatcher, imbalance, capacity",
        "imbalance of routing:",
        "moe.capacity_factor=1.25",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let set = [
        "--set",
        "moe.capacity_factor=1",
        "--set",
        "moe.on_overflow=drop",
    ];
    let few = stdout(&[&["explain", "small-moe-ep"][..], &set].concat());
    let short = few
        .split("Too few rows: ")
        .nth(1)
        .unwrap_or_else(|| panic!("{few}"));
    assert!(
        short.contains("moe.imbalance=2") && short.contains("% of choices are"),
        "{few}"
    );
    let dense = stdout(&["explain", "small-native"]);
    assert!(!dense.contains("Experts:"), "{dense}");
}

/// Both steps are those of `sim`, with and without 8 bits. Times of layers are those of matmuls
/// with the sizes of their weights: queries, keys and values have 2048 + 2 * 512 outputs.
#[test]
fn layers_in_8_bits_are_compared_with_16_bits() {
    let native = [
        "--set",
        "fsdp.policy=native",
        "--set",
        "compile.mode=regions",
    ];
    let with = ["--set", "precision.float8_recipe=tensorwise"];
    let e = explain(&[&["peers-1b"], &native[..], &with].concat());
    let float8 = &e["float8"];
    let step = |set: &[&str]| {
        let run = json(&[&["sim", "peers-1b", "--json"], &native[..], set].concat());
        run[0]["step_ms"]["median"].as_f64().unwrap()
    };
    assert_eq!(float8["step_ms"], step(&with));
    assert_eq!(float8["without_ms"], step(&[]));
    let layers = float8["layers"].as_array().unwrap();
    let names: Vec<&str> = layers
        .iter()
        .flat_map(|l| l["names"].as_array().unwrap())
        .map(|name| name.as_str().unwrap())
        .collect();
    for name in [
        "attention.q+attention.k+attention.v",
        "attention.o",
        "mlp.w2",
    ] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let ms = |l: &Value, key: &str| l[key].as_f64().unwrap();
    for l in layers {
        let (matmuls, without) = (ms(l, "matmuls_ms"), ms(l, "without_ms"));
        assert!(0.0 < matmuls && matmuls < without, "{l}");
        let saved = without - matmuls - ms(l, "casts_ms");
        assert!((saved - ms(l, "saved_ms")).abs() < 1e-9, "{l}");
    }
    // Computation hides gathers, so those of codes save little else than casts.
    let said = float8["sentences"].to_string();
    assert!(
        said.contains("Computation hides the all-gathers of blocks"),
        "{said}"
    );
    assert!(explain(&[&["peers-1b"], &native[..]].concat())["float8"].is_null());
}

/// Casts of small operands take longer than their matmuls save. Under FSDP2, the step also waits
/// for Python, which launches a kernel per cast.
#[test]
fn eight_bit_matmuls_of_a_host_bound_step_do_not_pay() {
    let set = [
        "small-fp8",
        "--set",
        "mesh.hardware=h200-nvlink",
        "--set",
        "fsdp.policy=fsdp2",
    ];
    let e = explain(&set);
    let said = e["float8"]["sentences"].to_string();
    assert!(said.contains("because it is host-bound"), "{said}");
    assert!(
        said.contains("do not pay: their casts take longer"),
        "{said}"
    );
    let text = stdout(&[&["explain"], &set[..]].concat());
    assert!(text.contains("8-bit matmuls: a step of"), "{text}");
    assert_narrow(&text);
}

/// Fewer and larger collectives: `explain` tries units of several blocks, and one for the model.
#[test]
fn larger_units_are_tried() {
    let e = explain(&["llama3-8b-4xh200", "--set", "fsdp.policy=fsdp2"]);
    let what_ifs = e["what_if"].as_array().unwrap();
    let units = |w: &Value| {
        w["set"][0]
            .as_str()?
            .strip_prefix("fsdp.units=")
            .map(str::to_owned)
    };
    let all: Vec<String> = what_ifs.iter().filter_map(units).collect();
    assert!(all.contains(&"root".to_owned()), "{all:?}");
    // 32 blocks in groups of two and of four.
    let groups = |n: usize| all.iter().any(|v| v.matches(", ").count() + 1 == n);
    assert!(groups(16) && groups(8), "{all:?}");
}
