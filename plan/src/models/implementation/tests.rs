//! Against what autograd saves in, and which operators run in, layers of transformers models
//! (`tests/data/transformers/saved.py`).

use crate::compile::tape::{Tape, TapeOp};
use crate::ir::{DType, StorageRole};
use crate::policies::tape_of;
use crate::scenario;
use std::collections::BTreeMap;

const SAVED: &str = include_str!("../../../../tests/data/transformers/saved.csv");

/// Returns the tape of a model with the sizes of `saved.py`.
fn tape(model_type: &str, layers: u32, more: &str) -> Tape {
    let own = match model_type {
        "qwen3" => "family = \"llama\"\nqk_norm = true\n",
        "gemma" => {
            "family = \"decoder\"\nnorm = \"rms_norm_unit_offset\"\nactivation = \"gelu_tanh\"\nembedding_multiplier = 8.0\n"
        }
        _ => "family = \"llama\"\n",
    };
    let text = format!(
        "[model]\n{own}implementation = \"transformers\"\nlayers = {layers}\nhidden = 64\nheads = 4\nkv_heads = 2\n\
         head_dim = 16\nffn = 96\nvocab = 100\n[train]\nseq_len = 32\nmicro_batch = 2\n[mesh]\nhardware = \"h100-80\"\n\
         dp_shard = 2\n[fsdp]\npolicy = \"fsdp2\"\n{more}"
    );
    tape_of(&scenario::parse("test", &text, &[]).unwrap()).unwrap()
}

/// Sums the saved bytes of a type.
fn saved(t: &Tape, dtype: DType) -> u64 {
    let of = |s: &&crate::ir::Storage| s.role == StorageRole::Saved && s.dtype == dtype;
    t.storages.iter().filter(of).map(|s| s.bytes.0).sum()
}

/// Counts launches by the operator of PyTorch that they belong to.
fn launches(t: &Tape, ops: &[TapeOp]) -> BTreeMap<&'static str, i64> {
    let mut out = BTreeMap::new();
    for op in ops {
        if let TapeOp::Launch { kernel, .. } = op {
            let name = operator(&t.kernels[kernel.index()].name);
            *out.entry(name).or_insert(0) += 1;
        }
    }
    out
}

/// Names operators of both sides alike.
fn operator(name: &str) -> &'static str {
    match name {
        "add" | "shift" => "add",
        "mul" | "scale" | "div" => "mul",
        "row_sum" | "sum_leading" | "sum" | "mean" => "sum",
        "copy" | "cast" | "_to_copy" | "clone" => "copy",
        "silu" | "gelu" => "activation",
        "silu_backward" | "gelu_backward" => "activation_backward",
        "mm" => "mm",
        "cat" => "cat",
        "neg" => "neg",
        "pow" => "pow",
        "rsqrt" => "rsqrt",
        "fill" => "fill",
        n if n.contains("attention") && n.contains("backward") => "attention_backward",
        n if n.contains("attention") => "attention",
        // What the ends of a model have, which cancels.
        _ => "other",
    }
}

/// Reads `add:6 cat:2`; the backward of a slice fills and copies.
fn listed(words: &str) -> BTreeMap<&'static str, i64> {
    let mut out = BTreeMap::new();
    for word in words.split(' ') {
        let (name, n) = word.split_once(':').unwrap();
        let n: i64 = n.parse().unwrap();
        let names: &[&str] = match name {
            "slice_backward" => &["fill", "copy"],
            name => &[name],
        };
        for name in names {
            *out.entry(operator(name)).or_insert(0) += n;
        }
    }
    out
}

#[test]
fn layers_save_and_launch_what_those_of_transformers_do() {
    let rows: Vec<Vec<&str>> = SAVED
        .lines()
        .skip(1)
        .map(|l| l.split(',').collect())
        .collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let (a, b) = (tape(row[0], 2, ""), tape(row[0], 3, ""));
        for (dtype, bytes) in [(DType::Bf16, row[1]), (DType::F32, row[2])] {
            let found = saved(&b, dtype) - saved(&a, dtype);
            assert_eq!(found, bytes.parse::<u64>().unwrap(), "{} {dtype:?}", row[0]);
        }
        let layer = |of: fn(&Tape) -> &[TapeOp]| {
            let mut more = launches(&b, of(&b));
            for (name, n) in launches(&a, of(&a)) {
                *more.entry(name).or_insert(0) -= n;
            }
            more.retain(|_, n| *n != 0);
            more
        };
        assert_eq!(layer(|t| &t.forward), listed(row[5]), "{}", row[0]);
        assert_eq!(layer(|t| &t.backward), listed(row[6]), "{}", row[0]);
    }
}

#[test]
fn the_host_reads_the_mask_once_a_forward_pass_unless_it_is_compiled() {
    let reads = |t: &Tape| {
        let all = t.forward.iter().chain(&t.backward);
        all.filter(|op| **op == TapeOp::HostRead).count()
    };
    assert_eq!(reads(&tape("llama", 8, "")), 1);
    assert_eq!(
        reads(&tape("llama", 8, "[compile]\nmode = \"blocks\"\n")),
        1
    );
    assert_eq!(reads(&tape("llama", 8, "[compile]\nmode = \"full\"\n")), 0);
}
