//! End to end, through the binary.

mod analysis;
mod bad_input;
mod calibrate;
mod compare;
#[cfg(feature = "dash")]
mod dash;
mod disk;
mod documents;
mod exec;
mod faults;
mod gate;
mod import;
mod output;
mod paths;
mod plan;
mod processes;
mod progress;
mod report;
mod runs;
mod sim;
mod sweep;
mod trace;
mod validate;

use assert_cmd::Command;
use serde_json::Value;

/// The binary, without the caller's colour settings.
fn shardlab(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardlab"));
    // Runs are kept only by the tests about that.
    command
        .args(args)
        .env_remove("NO_COLOR")
        .env("SHARDLAB_STORE", "off");
    command
}

/// Standard output of a successful call.
fn stdout(args: &[&str]) -> String {
    let output = shardlab(args).assert().success();
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

/// The lines of a successful call as JSON; each has to be an object.
fn json(args: &[&str]) -> Vec<Value> {
    let lines: Vec<Value> = stdout(args)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.iter().all(Value::is_object));
    lines
}

/// Columns that tables and sentences may take.
fn assert_narrow(text: &str) {
    for line in text.lines() {
        assert!(
            line.chars().count() <= 100,
            "{} columns: {line}",
            line.chars().count()
        );
    }
}
