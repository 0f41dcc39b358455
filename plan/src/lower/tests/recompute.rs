//! Operations that selective recompute runs again.

use super::{LLAMA, matmuls, scenario};
use crate::scenario::parse;

const SELECTIVE: &str = "train.recompute=selective";

/// Two blocks of seven matmuls (queries, keys, values, output, gate, up, down) and the head; each
/// has two in backward.
const BACKWARD: usize = 30;

#[test]
fn matmuls_are_kept_by_default() {
    assert_eq!(matmuls(&[SELECTIVE]), [15, BACKWARD]);
}

/// torchtitan's per-op policy: the second, fourth and sixth matmul of a block run again, which are
/// keys, output and up projection.
#[test]
fn every_second_matmul_runs_again() {
    let nth = |n: u32| matmuls(&[SELECTIVE, &format!("train.recompute_nth_matmul={n}")])[1];
    assert_eq!(nth(2), BACKWARD + 2 * 3);
    assert_eq!(nth(3), BACKWARD + 2 * 2);
    // The seventh is the down projection, whose result no gradient needs.
    assert_eq!(nth(7), BACKWARD);
    // All others do.
    assert_eq!(nth(1), BACKWARD + 2 * 6);
    let layers = "train.recompute_layers=1";
    let first = matmuls(&[SELECTIVE, "train.recompute_nth_matmul=2", layers])[1];
    assert_eq!(first, BACKWARD + 3);
}

#[test]
fn listed_operations_are_kept() {
    let save = |list: &str| {
        let key = format!("train.recompute_save={list}");
        let set = [SELECTIVE, &key];
        let tape = crate::tape_of(&scenario(LLAMA, &set)).unwrap();
        let kernels = &tape.kernels;
        let attention = tape.backward.iter().filter(|op| {
            matches!(op, super::TapeOp::Launch { kernel, .. }
                if kernels[kernel.index()].name == "attention")
        });
        (matmuls(&set)[1], attention.count())
    };
    assert_eq!(save("[\"mm\", \"attention\"]"), (BACKWARD, 0));
    assert_eq!(save("[\"mm\"]"), (BACKWARD, 2));
    // Without matmuls only the six that gradients need run again.
    assert_eq!(save("[\"attention\"]"), (BACKWARD + 2 * 6, 0));
}

#[test]
fn names_and_keys_that_choose_nothing_are_refused() {
    let fault = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        parse("test", LLAMA, &set).unwrap_err().to_string()
    };
    let near = fault(&[SELECTIVE, "train.recompute_save=[\"mm\", \"atention\"]"]);
    assert!(
        near.contains("`atention` is no operation of a forward pass"),
        "{near}"
    );
    assert!(near.contains("did you mean `attention`?"), "{near}");
    let backward = fault(&[SELECTIVE, "train.recompute_save=[\"rms_norm_backward\"]"]);
    assert!(
        backward.contains("is no operation of a forward pass"),
        "{backward}"
    );
    let full = fault(&["train.recompute=full", "train.recompute_nth_matmul=2"]);
    assert!(
        full.contains("only selective recompute chooses among operations"),
        "{full}"
    );
}
