//! Names recordings that are given where a scenario or a job is expected.

use shardlab_import::source::{Format, Source};
use std::path::Path;

/// Returns the error for a trace or snapshot that is given instead of a scenario or job: what the
/// file is, and which command reads it. Returns `None` for any other file.
pub(super) fn misplaced(path: &Path) -> Option<String> {
    let format = Source::open(path).ok()?.format()?;
    let file = path.display();
    let run = format!(
        "`shardlab import {file} --name NAME` makes a run of it, which `explain`, `report` and `compare` take by its name"
    );
    let what = match format {
        Format::Kineto => format!(
            "a trace of the PyTorch profiler; {run}, and `shardlab infer {file}` writes its scenario"
        ),
        Format::Sqlite => format!(
            "an SQLite database; if Nsight Systems exported it, {run}, and `shardlab infer {file}` writes its scenario"
        ),
        Format::ExecutionTrace => {
            format!("an execution trace; `shardlab infer {file}` writes its scenario")
        }
        Format::Snapshot => {
            format!("a memory snapshot; `shardlab import {file}` shows what its memory is for")
        }
        Format::Flight => {
            "a flight record of NCCL; `shardlab import` compares those of all ranks".to_owned()
        }
    };
    Some(format!("{file}: the file is {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_are_told_from_scenarios() {
        let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces");
        for (name, expected) in [
            (
                "base.json.gz",
                "a trace of the PyTorch profiler; `shardlab import",
            ),
            (
                "oom.snapshot.pickle.gz",
                "a memory snapshot; `shardlab import",
            ),
            (
                "fsdp2-compiled.et.json.gz",
                "an execution trace; `shardlab infer",
            ),
            ("fsdp2-compiled-rank0.flight.pickle.gz", "a flight record"),
        ] {
            let error = misplaced(&traces.join(name)).unwrap();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(misplaced(&traces.join("README.md")), None);
        assert_eq!(misplaced(Path::new("no-such-file")), None);
    }
}
