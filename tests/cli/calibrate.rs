//! `shardlab calibrate`.

use super::{json, shardlab, stdout};

/// A short measurement yields a profile that predicts: the scenario of the CPU device is priced from measured tables.
#[test]
fn a_measured_profile_predicts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    let path = path.to_str().unwrap();
    let text = stdout(&["calibrate", "--seconds", "5", "--ranks", "2", "--out", path]);
    assert_eq!(text, "", "with --out nothing is printed");
    let profile = std::fs::read_to_string(path).unwrap();
    let command = "shardlab calibrate --seconds 5 --ranks 2 --out";
    let first = profile.lines().next().unwrap();
    assert!(
        first.starts_with("# Measured 20") && first.contains(command),
        "{first}"
    );
    let hardware = format!("mesh.hardware={path}");
    let run = &json(&["sim", "llama-tiny", "--json", "--set", &hardware])[0];
    assert!(run["step_ms"]["median"].as_f64().unwrap() > 0.0);
    assert!(run["measured_cost_share"].as_f64().unwrap() > 0.5);
}

#[test]
fn bad_arguments_are_refused() {
    for args in [
        &["calibrate", "--ranks", "0"][..],
        &["calibrate", "--seconds", "0"],
        &["calibrate", "--device", "gpu"],
    ] {
        shardlab(args).assert().code(2);
    }
    // Before anything is measured.
    let text = shardlab(&["calibrate", "--out", "/nowhere/cpu.toml"])
        .assert()
        .code(2);
    let stderr = String::from_utf8(text.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("/nowhere/cpu.toml"), "{stderr}");
    assert!(!stderr.contains("calibrate: "), "{stderr}");
}
