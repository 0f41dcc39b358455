//! Zeros that compiled forward saves for backward.

use super::*;

/// Counts the tensors as large as the rows of experts that hold zeros from forward to backward.
fn saved(set: &[&str]) -> usize {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let t = build(&crate::scenario::load("peers-a3b-12l-64e".as_ref(), &set).unwrap());
    let is_fill = |k: &Kernel| k.body.iter().all(|op| matches!(op.op, OpKind::Fill(_)));
    let made = performed(&t, &t.forward).filter(|(k, ..)| is_fill(k));
    let made = made.flat_map(|(.., writes)| writes.to_vec());
    let kept = made.filter(|w| match w.source {
        Source::Storage(s) => {
            let s = &t.storages[s.index()];
            // 4,096 tokens with 8 experts, and 8 more rows for each of 64 experts.
            let bytes = (4096 * 8 + 64 * 8) * 2048 * 2;
            s.role == StorageRole::Saved && s.bytes.0 == bytes
        }
        _ => false,
    });
    kept.count()
}

/// Not where backward runs the block again, nor where the host reads counts between the two.
#[test]
fn compiled_experts_save_the_zeros_of_their_rows() {
    let compiled = ["compile.mode=blocks", "model.layers=2"];
    let with = |more: &[&'static str]| saved(&[&compiled[..], more].concat());
    assert_eq!(with(&[]), 2);
    assert_eq!(saved(&["model.layers=2"]), 0);
    assert_eq!(with(&["train.recompute=full"]), 0);
    assert_eq!(with(&["mesh.dp_shard=2", "mesh.ep=2"]), 0);
    assert_eq!(with(&["fsdp.policy=native"]), 0);
}
