//! Where the matmuls of shared experts are, relative to the exchanges of their layer.

use crate::compile::tape::{Tape, TapeOp};
use crate::ir::{KernelClass, Operand, Source, StorageId};
use crate::scenario::parse;
use crate::tape_of;
use std::collections::BTreeSet;

const EXPERTS: &str = "[model]\nfamily = \"moe\"\nlayers = 2\nhidden = 64\nheads = 4\n\
    kv_heads = 2\nexperts = 8\ntop_k = 2\nexpert_ffn = 48\nshared_expert_ffn = 32\nvocab = 256\n\
    max_seq_len = 32\n[train]\nmicro_batch = 2\nseq_len = 32\n[mesh]\n\
    hardware = \"h200-nvlink\"\ndp_shard = 4\nep = 2\n";

fn tape(set: &[&str]) -> Tape {
    let sets: Vec<String> = set.iter().map(|&s| s.to_owned()).collect();
    let s = parse("test", EXPERTS, &sets).unwrap_or_else(|e| panic!("{set:?}: {e}"));
    tape_of(&s).expect("a tape")
}

/// Returns, for each exchange of the second layer, how many matmuls of its shared expert run before
/// a kernel touches what has been received. An exchange that ends before one starts counts as none.
fn hidden(tape: &Tape, ops: &[TapeOp]) -> Vec<usize> {
    let of = |range: std::ops::Range<u32>| &tape.operands[range.start as usize..range.end as usize];
    let shared = |o: &Operand| match o.source {
        Source::Param(p) | Source::Grad(p) => tape.params[p.index()]
            .name
            .contains("layers.1.mlp.shared_expert"),
        _ => false,
    };
    let layer = |s: StorageId| {
        let module = tape.storages[s.index()].module;
        tape.modules[module.index()]
            .path
            .starts_with("layers.1.mlp")
    };
    let mut out = Vec::new();
    let mut received: BTreeSet<u32> = BTreeSet::new();
    for op in ops {
        match *op {
            TapeOp::Collective { operands, .. } => {
                let [from, to] = [operands, operands + 1].map(|o| tape.operands[o as usize].source);
                let (Source::Storage(_), Source::Storage(to)) = (from, to) else {
                    panic!("tokens are activations");
                };
                if layer(to) {
                    if received.is_empty() {
                        out.push(0);
                    }
                    received.insert(to.0);
                }
            }
            TapeOp::Launch {
                kernel, reads, end, ..
            } => {
                let gemm = matches!(tape.kernels[kernel.index()].class, KernelClass::Gemm { .. });
                let touches =
                    |o: &Operand| matches!(o.source, Source::Storage(s) if received.contains(&s.0));
                if of(reads..end).iter().any(touches) {
                    received.clear();
                } else if gemm && !received.is_empty() && of(reads..end).iter().any(shared) {
                    *out.last_mut().expect("an exchange") += 1;
                }
            }
            _ => {}
        }
    }
    out
}

/// The first layers of the shared expert run next to the dispatch, the last one next to the
/// combination; in backward, two matmuls of the last layer come first, then the other four.
#[test]
fn shared_experts_compute_while_tokens_travel() {
    for dispatcher in ["gather", "padded", "all_to_all", "peer", "deepep"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        for mode in ["off", "regions", "blocks"] {
            let mode = format!("compile.mode={mode}");
            let tape = tape(&[&dispatcher, &mode]);
            let what = format!("{dispatcher} {mode}");
            assert_eq!(hidden(&tape, &tape.forward), [2, 1], "{what}");
            assert_eq!(hidden(&tape, &tape.backward)[..2], [2, 4], "{what}");
        }
    }
}
