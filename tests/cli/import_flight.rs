//! `import` of flight records that are made here.

use crate::{json, stdout};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Returns an entry in the format of PyTorch 2.10.
fn entry(number: u64, name: &str, inputs: &Value, outputs: &Value, state: &str) -> Value {
    let types = |sizes: &Value| vec!["Float"; sizes.as_array().unwrap().len()];
    let is_p2p = name.contains("send") || name.contains("recv");
    json!({
        "record_id": number, "process_group": ["0", "default_pg"], "profiling_name": name,
        "collective_seq_id": if is_p2p { 0 } else { number + 1 },
        "p2p_seq_id": if is_p2p { number + 1 } else { 0 }, "is_p2p": is_p2p,
        "time_created_ns": 1_000 * number, "state": state, "retired": state == "completed",
        "input_sizes": inputs, "input_dtypes": types(inputs),
        "output_sizes": outputs, "output_dtypes": types(outputs),
    })
}

fn reduce(number: u64, state: &str) -> Value {
    entry(
        number,
        "nccl:all_reduce",
        &json!([[4]]),
        &json!([[4]]),
        state,
    )
}

/// Writes records by rank, of a job with `world` ranks.
fn records(dir: &Path, world: u32, ranks: &[(u32, Vec<Value>)]) -> Vec<PathBuf> {
    let all: Vec<u32> = (0..world).collect();
    let write = |(rank, entries): &(u32, Vec<Value>)| {
        let path = dir.join(format!("rank_{rank}.json"));
        let record = json!({
            "version": "2.10", "entries": entries,
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": format!("{all:?}")}},
        });
        std::fs::write(&path, record.to_string()).unwrap();
        path
    };
    ranks.iter().map(write).collect()
}

fn with<'a>(args: &[&'a str], files: &'a [PathBuf]) -> Vec<&'a str> {
    let files = files.iter().map(|f| f.to_str().unwrap());
    args.iter().copied().chain(files).collect()
}

#[test]
fn a_gather_is_no_divergence() {
    let dir = tempfile::tempdir().unwrap();
    let of = |root: bool| {
        let outputs = if root { json!([[2, 8]]) } else { json!([]) };
        let gather = entry(1, "gloo:gather", &json!([[8]]), &outputs, "completed");
        vec![reduce(0, "completed"), gather, reduce(2, "completed")]
    };
    let files = records(dir.path(), 2, &[(0, of(true)), (1, of(false))]);
    let found = json(&with(&["import", "--json"], &files)).remove(0);
    assert_eq!(found["flight"]["divergence"], Value::Null);
    assert_eq!(found["flight"]["matched"], 3);
}

#[test]
fn a_rank_without_a_record_is_named_where_others_wait() {
    let dir = tempfile::tempdir().unwrap();
    let of = || vec![reduce(0, "completed"), reduce(1, "started")];
    let files = records(dir.path(), 4, &[(0, of()), (1, of()), (3, of())]);
    let said = stdout(&with(&["import"], &files));
    assert!(said.contains("a collective does not complete"), "{said}");
    assert!(
        said.contains("no record of rank 2; the others may wait for it"),
        "{said}"
    );
}

#[test]
fn a_send_that_waits_is_a_divergence() {
    let dir = tempfile::tempdir().unwrap();
    let send = entry(0, "nccl:send 0->1", &json!([[8]]), &json!([[8]]), "started");
    let files = records(
        dir.path(),
        2,
        &[
            (0, vec![reduce(0, "completed"), send]),
            (1, vec![reduce(0, "completed")]),
        ],
    );
    let said = stdout(&with(&["import"], &files));
    assert!(
        said.contains("a point-to-point message has no recv: number 1"),
        "{said}"
    );
    assert!(said.contains("started send 0->1 [[8]]"), "{said}");
}
