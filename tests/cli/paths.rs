//! A scenario file and its profile are found from any working directory.

use crate::shardlab;
use std::fs;
use std::path::Path;

const SCENARIO: &str = "extends = \"small-fsdp2\"\n[mesh]\nhardware = \"hw/mine.toml\"\n";

/// Creates a folder with a scenario `there/mine.toml` and the profile that it refers to.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let there = dir.path().join("there");
    fs::create_dir_all(there.join("hw")).unwrap();
    fs::write(there.join("mine.toml"), SCENARIO).unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/hardware/h200-nvlink.toml");
    let profile = fs::read_to_string(shipped).unwrap();
    let named = profile.replacen("name = \"h200-nvlink\"", "name = \"of-the-file\"", 1);
    assert_ne!(named, profile);
    fs::write(there.join("hw/mine.toml"), named).unwrap();
    let table = "scenario,overrides,step_ms\nmine.toml,,1\n";
    fs::write(there.join("table.csv"), table).unwrap();
    dir
}

/// Returns the exit status, standard output and standard error of a call in a folder.
fn call(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = shardlab(args).current_dir(folder).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

#[test]
fn a_profile_is_found_from_the_scenario_that_names_it() {
    let dir = folder();
    let (above, there) = (dir.path(), dir.path().join("there"));
    for (args, says) in [
        (&["sim", "mine.toml"][..], "of-the-file"),
        (&["plan", "mine.toml"], "adamw"),
        (&["check", "mine.toml"], "proven"),
        (&["explain", "mine.toml", "--json"], "of-the-file"),
        (
            &["sweep", "mine.toml", "--axis", "train.micro_batch=[1, 2]"],
            "yes",
        ),
        (&["compare", "mine.toml", "small-fsdp2"], "of-the-file"),
        (&["report", "mine.toml", "--out", "r.md"], ""),
        (&["validate", "table.csv"], "mine"),
        (
            &[
                "exec",
                "mine.toml",
                "--device",
                "cpu",
                "--steps",
                "2",
                "--json",
            ],
            "losses",
        ),
        (
            &[
                "gate",
                "mine.toml",
                "--bless",
                "--no-exec",
                "--baseline",
                "b",
            ],
            "created",
        ),
        (
            &["gate", "mine.toml", "--no-exec", "--baseline", "b"],
            "pass",
        ),
    ] {
        for (at, prefix) in [(there.as_path(), ""), (above, "there/")] {
            let args: Vec<String> = args
                .iter()
                .map(|a| match *a {
                    "mine.toml" | "table.csv" => format!("{prefix}{a}"),
                    a => a.to_owned(),
                })
                .collect();
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let (code, out, err) = call(at, &args);
            assert_eq!(code, 0, "{args:?}: {out}{err}");
            assert!(out.contains(says), "{args:?}: {out}");
        }
    }
    // The baselines of a gate do not depend on the working directory.
    let baseline = |at: &Path| fs::read_to_string(at.join("b/mine.toml")).unwrap();
    assert_eq!(baseline(above), baseline(&there));
}

#[test]
fn a_profile_from_outside_is_found_from_the_working_directory() {
    let dir = folder();
    let set = [
        "sim",
        "there/mine.toml",
        "--set",
        "mesh.hardware=there/hw/mine.toml",
    ];
    assert_eq!(call(dir.path(), &set).0, 0);
    let set = [
        "sim",
        "there/mine.toml",
        "--set",
        "mesh.hardware=hw/mine.toml",
    ];
    let (code, _, err) = call(dir.path(), &set);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("no hardware profile `hw/mine.toml`"), "{err}");
}

#[test]
fn a_profile_that_is_not_beside_its_scenario_is_refused_where_it_is_written() {
    let dir = folder();
    let hw = |of: &str| dir.path().join(of);
    fs::rename(hw("there/hw"), hw("hw")).unwrap();
    let sim = ["sim", "there/mine.toml"];
    let (code, _, err) = call(dir.path(), &sim);
    assert_eq!(code, 2, "{err}");
    for part in [
        "there/mine.toml:3:12: there is no hardware profile there/hw/mine.toml",
        "the working directory has a hw/mine.toml",
        "--set mesh.hardware=hw/mine.toml",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }
    fs::remove_dir_all(hw("hw")).unwrap();
    let (code, _, err) = call(dir.path(), &sim);
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("help: shipped profiles: ") && !err.contains("working"),
        "{err}"
    );
}
