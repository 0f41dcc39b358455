//! Makes runs with another shardlab binary, to compare revisions.

use super::super::exec::device::DeviceArgs;
use super::super::output::Failure;
use super::ask::{Ask, Maker};
use crate::gate::against::Scratch;
use shardlab_reports::RunView;
use shardlab_reports::store::Store;
use std::process::Command;

/// Makes a run with another binary, which saves it in a temporary folder.
pub(super) fn run(
    maker: &Maker,
    ask: &Ask,
    steps: Option<u64>,
    device: &DeviceArgs,
) -> Result<RunView, Failure> {
    let shown = &maker.name;
    let scratch = Scratch::new("compare")?;
    let store = Store::at(scratch.path());
    let mut command = Command::new(&maker.program);
    command
        .arg(if ask.exec { "exec" } else { "sim" })
        .arg(&ask.path)
        .arg("--store")
        .arg(scratch.path())
        .arg("--json");
    for set in &ask.set {
        command.args(["--set", set]);
    }
    if ask.exec {
        command.args(device.words());
        if let Some(steps) = steps {
            command.args(["--steps", &steps.to_string()]);
        }
    }
    let output = command
        .output()
        .map_err(|e| Failure::bad_input(format_args!("{shown}: {e}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let reason = stderr
            .lines()
            .last()
            .unwrap_or("without a message")
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
        .map_err(|e| Failure::run(format_args!("{shown} saved no run that can be read: {e}")))
}
