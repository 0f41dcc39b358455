//! End-to-end tests through the binary.

mod adapters;
mod analysis;
mod bad_input;
mod calibrate;
mod checkpoint;
mod compare;
#[cfg(feature = "dash")]
mod dash;
mod disk;
mod documents;
mod emit;
mod exec;
mod faults;
mod fit;
mod gate;
mod import;
mod import_damage;
mod import_flight;
mod import_memory;
mod models;
mod output;
mod overview;
mod paths;
mod plan;
mod processes;
mod progress;
mod replay;
mod report;
mod runs;
mod sim;
mod sweep;
mod trace;
mod tune;
mod validate;

use assert_cmd::Command;
use serde_json::Value;

/// Returns a command that runs the binary, without the caller's color settings.
fn shardlab(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardlab"));
    // Only tests of the store save runs.
    command
        .args(args)
        .env_remove("NO_COLOR")
        .env("SHARDLAB_STORE", "off");
    command
}

/// Returns the standard output of a successful call.
fn stdout(args: &[&str]) -> String {
    let output = shardlab(args).assert().success();
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

/// Parses each line of a successful call as a JSON object.
fn json(args: &[&str]) -> Vec<Value> {
    let lines: Vec<Value> = stdout(args)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.iter().all(Value::is_object));
    lines
}

/// Checks the width of tables and sentences.
fn assert_narrow(text: &str) {
    for line in text.lines() {
        assert!(
            line.chars().count() <= 100,
            "{} columns: {line}",
            line.chars().count()
        );
    }
}
