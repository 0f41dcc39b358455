//! Packed frozen weights (QLoRA, `LLM.int8`): bytes, gathers and kernels.

use super::{LLAMA, at_rest, program};
use crate::check::check;
use crate::ir::{DType, Holds, OpKind, Role};
use crate::program::{Op, Program};
use crate::units::Bytes;

/// Shapes of the linear layers of a block: queries, keys, values, output, and the feed-forward
/// network.
const LINEARS: [[u64; 2]; 7] = [
    [64, 64],
    [32, 64],
    [32, 64],
    [64, 64],
    [176, 64],
    [176, 64],
    [64, 176],
];

/// Returns the bytes of a weight. This is 4 bits per element, with 8-bit scales and a float32 mean
/// and factor per 256 of them, or with float32 scales; or 8 bits per element, with a float32 scale
/// per row.
fn stored(word: &str, numel: u64, rows: u64) -> u64 {
    let scales = numel / 64;
    match word {
        "nf4" => numel / 2 + scales + 4 + scales.div_ceil(256) * 4,
        "nf4_f32" => numel / 2 + 4 * scales,
        _ => numel + 4 * rows,
    }
}

/// Counts the dequantizing launches in a program's steady step.
fn dequantized(p: &Program) -> usize {
    let steady = super::steady(p).iter();
    let is = |k: &crate::ir::Kernel| matches!(k.body[..], [ref b] if matches!(b.op, OpKind::Dequantize(_)));
    steady
        .filter(|i| matches!(i.op, Op::Launch { kernel, .. } if is(&p.kernels[kernel.index()])))
        .count()
}

/// Every policy keeps and gathers the stored bytes, and dequantizes a weight for each matmul that
/// reads it. This is twice, or once if backward needs no gradient of the input (queries, keys and
/// values of the first block).
#[test]
fn packed_weights_are_gathered_as_they_are_stored() {
    for set in [
        &["fsdp.policy=native"][..],
        &["fsdp.policy=megatron"],
        &["fsdp.policy=fsdp2"],
        &["compile.mode=full"],
        &["fsdp.policy=fsdp2", "compile.mode=blocks"],
        &["fsdp.policy=fsdp2", "precision.param_dtype=f32"],
    ] {
        for word in ["nf4", "nf4_f32", "int8"] {
            let frozen = format!("precision.frozen_params={word}");
            let all = [set, &["lora.r=4", &frozen]].concat();
            let p = program(LLAMA, &all);
            let report = check(&p);
            assert!(report.is_ok(), "{all:?}: {report:?}");
            let size = p.meta.compute.size();
            let quantized: Vec<_> = p.params.iter().filter(|p| p.packed.is_some()).collect();
            assert_eq!(quantized.len(), 14);
            for (param, [rows, columns]) in quantized.iter().zip(LINEARS.repeat(2)) {
                let numel = rows * columns;
                let bytes = stored(word, numel, rows).next_multiple_of(size);
                assert_eq!(param.numel() * size, bytes, "{}", param.name);
                assert!(!param.requires_grad);
            }
            assert_eq!(dequantized(&p), 28 - 3, "{all:?}");
        }
    }
}

/// In the gather of a block under fully_shard, its shards are copied without a cast, and adapters
/// are cast.
#[test]
fn a_gather_has_a_quarter_of_the_bytes() {
    let gathered = |more: &[&str]| -> u64 {
        let set = [&["fsdp.policy=fsdp2", "lora.r=4"], more].concat();
        let p = program(LLAMA, &set);
        let of = |b: &&crate::ir::Buffer| b.role == Role::GatherBuffer && b.unit.0 == 1;
        p.buffers.iter().find(of).unwrap().bytes.0
    };
    let full: u64 = LINEARS.iter().map(|[r, c]| 2 * r * c).sum();
    let four: u64 = LINEARS.iter().map(|[r, c]| stored("nf4", r * c, *r)).sum();
    // Shards are whole elements of two bytes, so each weight has at most three elements of padding.
    let less = gathered(&[]) - gathered(&["precision.frozen_params=nf4"]);
    assert!((full - four - less) <= 7 * 6, "{full} {four} {less}");
}

/// transformers uses the scales of bitsandbytes, which are on every rank and are not gathered.
#[test]
fn scales_of_bitsandbytes_are_replicated() {
    let set = [
        "fsdp.policy=fsdp2",
        "lora.r=4",
        "precision.frozen_params=nf4",
        "model.implementation=transformers",
    ];
    let p = program(LLAMA, &set);
    assert!(check(&p).is_ok());
    let state = |b: &&crate::ir::Buffer| b.holds == Holds::Named("quantization state");
    let state = p.buffers.iter().find(state).unwrap();
    // Sizes are rounded up to 512 bytes: the scales, the factors, and 2,048 bytes for the tables
    // and the mean.
    let each = |[r, c]: &[u64; 2]| (r * c / 64).next_multiple_of(512) + 512 + 2048;
    let all: u64 = LINEARS.iter().map(each).sum();
    assert_eq!(state.bytes, Bytes(2 * all));
    assert!(at_rest(&p)[&Role::Input] >= Bytes(2 * all));
    let quantized = p.params.iter().filter(|p| p.packed.is_some());
    for (param, [r, c]) in quantized.zip(LINEARS.repeat(2)) {
        assert_eq!(param.numel() * DType::Bf16.size(), r * c / 2);
    }
}

/// Parameter counts and model FLOPs count the unpacked weights.
#[test]
fn figures_are_those_of_the_model() {
    let of = |more: &[&str]| {
        let p = program(LLAMA, &[&["lora.r=4"][..], more].concat());
        (p.meta.parameters, p.meta.model_flops)
    };
    for word in ["nf4", "int8"] {
        assert_eq!(of(&[&format!("precision.frozen_params={word}")]), of(&[]));
    }
}
