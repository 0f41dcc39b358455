//! Bad input ends with status 2. The message says what is wrong, where, and what was expected.

use crate::shardlab;
use std::fmt::Write;
use std::path::Path;

const MESH: &str = "[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

/// Returns the names and texts of invalid scenario files.
fn files() -> Vec<(&'static str, String)> {
    let with = |model: &str, rest: &str| format!("[model]\n{model}\n{MESH}{rest}");
    let llama = "preset = \"llama3-8b\"";
    vec![
        ("unknown_key", with(llama, "[fsdp]\nprefetch_foward = 1\n")),
        (
            "unknown_section",
            with(llama, "[fsdpp]\npolicy = \"native\"\n"),
        ),
        (
            "wrong_type",
            with(llama, "[train]\nmicro_batch = \"two\"\n"),
        ),
        (
            "unknown_value",
            with(llama, "[fsdp]\npolicy = \"megatorn\"\n"),
        ),
        ("syntax", with(llama, "[train\nmicro_batch = 2\n")),
        ("nothing", String::new()),
        ("model_file", "{\n  \"model_type\": \"llama\"\n}\n".into()),
        (
            "unknown_hardware",
            format!("[model]\n{llama}\n[mesh]\nhardware = \"h200\"\ndp_shard = 4\n"),
        ),
        (
            "captured_scopes_without_pool",
            with(
                llama,
                "[fsdp]\nallocator = \"caching\"\n[compile]\ncuda_graph = [\"mlp\"]\n",
            ),
        ),
        (
            "outer_optim_without_zero3",
            format!(
                "[model]\n{llama}\n{MESH}dp_replicate = 2\n[fsdp]\nstrategy = \"optim_grads\"\nouter_strategy = \"optim\"\n"
            ),
        ),
        (
            "heads_not_divisible",
            with(
                "family = \"llama\"\nlayers = 2\nhidden = 100\nheads = 3\nvocab = 64",
                "",
            ),
        ),
        (
            "reshard_group_does_not_divide",
            with(llama, "[fsdp]\nreshard_after_forward = 3\n"),
        ),
        (
            "extends_nothing",
            "extends = \"no-such-file.toml\"\n".into(),
        ),
        (
            "extends_itself",
            "extends = \"extends_itself.toml\"\n".into(),
        ),
        (
            "no_such_unit",
            with(llama, "[fsdp]\nunits = [\"layer.*\"]\n"),
        ),
    ]
}

/// Returns the standard error of a call that ends with status 2, without the folder name.
fn fault(args: &[&str], folder: &Path) -> String {
    let assert = shardlab(args).assert().code(2);
    let output = assert.get_output();
    assert!(output.stdout.is_empty(), "{args:?} prints a result");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn faulty_scenarios_are_refused_with_position_and_advice() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = String::new();
    for (name, text) in files() {
        let path = folder.path().join(format!("{name}.toml"));
        std::fs::write(&path, text).unwrap();
        let message = fault(&["sim", path.to_str().unwrap()], folder.path());
        assert!(message.starts_with("error: "), "{message}");
        writeln!(all, "{message}").unwrap();
    }
    insta::assert_snapshot!(all);
}

#[test]
fn faulty_options_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("table.csv");
    std::fs::write(&table, "scenario,step_ms\npeers-tiny,fast\n").unwrap();
    let no_columns = folder.path().join("columns.csv");
    std::fs::write(&no_columns, "scenario,speed\npeers-tiny,1\n").unwrap();
    let bad_row = folder.path().join("row.csv");
    std::fs::write(
        &bad_row,
        "scenario,overrides,step_ms\npeers-tiny,,1\npeers-tinny,,1\n",
    )
    .unwrap();
    let calls: [&[&str]; 18] = [
        &["sim", "peers-tinny"],
        &["sim", "peers-tiny", "--set", "fsdp.prefetch=0"],
        &["sim", "peers-tiny", "--set", "fsdp.policy"],
        &["sim", "peers-tiny", "--jitter", "0.9"],
        &["sim", "peers-tiny", "--straggler", "9=2"],
        &[
            "sim",
            "peers-tiny",
            "--straggler",
            "1=2",
            "--straggler",
            "1=1.5",
        ],
        &["sim", "peers-tiny", "--scale", "host=0"],
        &[
            "sim",
            "peers-tiny",
            "--scale",
            "host=2",
            "--scale",
            "host=2",
        ],
        &["sim", "peers-tiny", "toy-cnn", "--trace", "x.json"],
        &["plan", "peers-tiny", "--unit", "layers.99"],
        &["plan", "peers-tiny", "--section", "validation"],
        &["sweep", "peers-tiny", "--axis", "fsdp.prefetch_forward=2x"],
        &["sweep", "peers-tiny", "--axis", "fsdp.no_such_key=[1]"],
        &["validate", table.to_str().unwrap()],
        &["validate", no_columns.to_str().unwrap()],
        &["validate", bad_row.to_str().unwrap()],
        &["scenarios", "no-such-name"],
        &["scenarios", "--hardware", "h300"],
    ];
    let mut all = String::new();
    for args in calls {
        let shown: Vec<&str> = args
            .iter()
            .map(|a| a.rsplit('/').next().unwrap_or(a))
            .collect();
        writeln!(all, "$ shardlab {}", shown.join(" ")).unwrap();
        writeln!(all, "{}", fault(args, folder.path())).unwrap();
    }
    insta::assert_snapshot!(all);
}

/// Commands read a scenario from standard input like a file. Its relative paths are relative to the
/// working directory.
#[test]
fn standard_input_is_a_scenario() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("base.toml"),
        "extends = \"small-native\"\n",
    )
    .unwrap();
    let call = |args: &[&str], text: &str| {
        let mut command = shardlab(args);
        command.current_dir(folder.path()).write_stdin(text);
        let output = command.output().unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), out, err)
    };
    let text = "extends = \"base.toml\"\n[train]\nmicro_batch = 2\n";
    let axis = "fsdp.prefetch_forward=[0, 1]";
    for args in [
        &["sim", "-"][..],
        &["check", "-"],
        &["plan", "-", "--groups"],
        &["explain", "-"],
        &["sweep", "-", "--axis", axis],
        &["compare", "-", "small-native"],
        &["compare", "-", "--set-b", "train.micro_batch=1"],
        &["exec", "-", "--steps", "1"],
    ] {
        let (code, out, err) = call(args, text);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        assert!(!out.is_empty(), "{args:?}");
    }
    let (_, out, _) = call(&["sim", "-", "--json"], text);
    assert!(out.contains("\"scenario\":\"stdin\""), "{out}");
    let (code, out, err) = call(&["sim", "-"], "[model]\nprest = \"llama3-8b\"\n");
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.starts_with("error: <stdin>:2:1: unknown key `prest`"),
        "{err}"
    );
}

#[test]
fn usage_errors_end_with_2_and_help_with_0() {
    shardlab(&["sim"]).assert().code(2);
    shardlab(&["no-such-verb"]).assert().code(2);
    for option in ["--straggler=one", "--scale=host", "--scale=gpu=2"] {
        shardlab(&["sim", "peers-tiny", option]).assert().code(2);
    }
    shardlab(&["--help"]).assert().success();
    shardlab(&["sim", "--help"]).assert().success();
    shardlab(&["--version"]).assert().success();
}
