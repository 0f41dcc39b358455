//! Runs made by another shardlab: one revision against another.

use super::super::output::Failure;
use super::input::Ask;
use shardlab_reports::RunView;
use shardlab_reports::store::Store;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that is removed in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, Failure> {
        let name = format!("shardlab-compare-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir)
            .map_err(|e| Failure::run(format_args!("{}: {e}", dir.display())))?;
        Ok(Self(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Left behind in the worst case, in a folder that the system empties.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Lets a program make the run and keep it in a folder of ours.
pub(super) fn run(program: &Path, ask: &Ask, steps: Option<u64>) -> Result<RunView, Failure> {
    let shown = program.display();
    let scratch = Scratch::new()?;
    let store = Store::at(&scratch.0);
    let mut command = Command::new(program);
    command
        .arg(if ask.exec { "exec" } else { "sim" })
        .arg(&ask.path)
        .arg("--store")
        .arg(&scratch.0)
        .arg("--json");
    for set in &ask.set {
        command.args(["--set", set]);
    }
    if let (true, Some(steps)) = (ask.exec, steps) {
        command.args(["--steps", &steps.to_string()]);
    }
    let output = command
        .output()
        .map_err(|e| Failure::bad_input(format_args!("{shown}: {e}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let reason = stderr
            .lines()
            .last()
            .unwrap_or("it says nothing")
            .to_owned();
        let message = format!("{shown} failed: {reason}");
        return Err(match output.status.code() {
            Some(2) => Failure::bad_input(message),
            _ => Failure::run(message),
        });
    }
    store
        .resolve("last")
        .and_then(|id| store.open(&id))
        .map_err(|e| Failure::run(format_args!("{shown} kept no run that can be read: {e}")))
}
