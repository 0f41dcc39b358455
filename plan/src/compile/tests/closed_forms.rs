//! FLOPs, bytes and memory as functions of shapes.

use super::*;

/// Returns the FLOPs of launches whose class `f` accepts.
fn flops(t: &Tape, ops: &[TapeOp], f: impl Fn(KernelClass) -> bool) -> u64 {
    let of = |op: &TapeOp| match op {
        TapeOp::Launch { kernel, .. } => {
            let k = &t.kernels[kernel.index()];
            if f(k.class) { k.flops.0 } else { 0 }
        }
        _ => 0,
    };
    ops.iter().map(of).sum()
}

fn is_gemm(c: KernelClass) -> bool {
    matches!(c, KernelClass::Gemm { .. })
}

fn is_attention(c: KernelClass) -> bool {
    matches!(c, KernelClass::Attention { .. })
}

/// Returns the peak of the storages that `f` accepts.
fn peak(t: &Tape, f: impl Fn(&Storage) -> bool) -> u64 {
    let (mut now, mut most) = (0, 0);
    for op in t.forward.iter().chain(&t.backward) {
        match *op {
            TapeOp::Alloc(s) if f(&t.storages[s.index()]) => {
                now += t.storages[s.index()].bytes.0;
                most = most.max(now);
            }
            TapeOp::Free(s) if f(&t.storages[s.index()]) => now -= t.storages[s.index()].bytes.0,
            _ => {}
        }
    }
    most
}

#[test]
fn llama_flops() {
    let (s, t) = (measured_1b(), build(&measured_1b()));
    let (b, seq, d, v, l, h, hd) = (2, 4096, 2048u64, 128_256, 16, 32, 64);
    let weights = l * (d * (h + 2 * 8) * hd + h * hd * d + 3 * d * 8192) + d * v;
    assert_eq!(flops(&t, &t.forward, is_gemm), 2 * weights * b * seq);
    assert_eq!(flops(&t, &t.backward, is_gemm), 4 * weights * b * seq);
    assert_eq!(
        flops(&t, &t.forward, is_attention),
        l * 2 * b * h * seq * seq * hd
    );
    assert_eq!(
        flops(&t, &t.backward, is_attention),
        l * 5 * b * h * seq * seq * hd
    );
    assert_eq!(
        t.model_flops.0,
        6 * weights * b * seq + 6 * l * h * hd * seq * seq * b
    );
    assert_eq!(t.tokens, b * seq);
    let mut full = s;
    full.train.recompute = Recompute::Full;
    let r = build(&full);
    let without_w2 = weights - d * v - l * d * 8192;
    // The block's last GEMM is not needed again.
    assert_eq!(
        flops(&r, &r.backward, is_gemm),
        (4 * weights + 2 * without_w2) * b * seq
    );
    assert_eq!(r.model_flops, t.model_flops, "recompute does not count");
}

#[test]
fn toy_flops() {
    let mut s = tiny(Family::Linear);
    (
        s.model.layers,
        s.model.hidden,
        s.train.micro_batch,
        s.train.seq_len,
    ) = (10, 4096, 1024, 1);
    let t = build(&s);
    let layer = 2 * 1024 * 4096 * 4096u64;
    let bias = 1024 * 4096;
    assert_eq!(flops(&t, &t.forward, is_gemm), 10 * (layer + bias));
    assert_eq!(
        flops(&t, &t.backward, is_gemm),
        19 * layer,
        "the input needs no gradient"
    );
    assert_eq!(t.model_flops.0, 3 * 10 * layer);

    let mut s = tiny(Family::Cnn);
    let m = &mut s.model;
    (m.layers, m.channels, m.height, m.width) = (10, 64, 64, 64);
    s.train.micro_batch = 16;
    let t = build(&s);
    let conv = 2 * 16 * 64 * 64 * 64 * 64 * 9u64;
    let is_conv = |c| matches!(c, KernelClass::Conv { .. });
    assert_eq!(flops(&t, &t.forward, is_conv), 10 * conv);
    assert_eq!(flops(&t, &t.backward, is_conv), 19 * conv);
    assert_eq!(t.model_flops.0, 3 * (10 * conv + 2 * 16 * 64 * 64 * 64));
    assert_eq!(t.tokens, 16);
}

#[test]
fn bytes_of_single_kernels() {
    let t = build(&measured_1b());
    let of = |name: &str| -> Vec<(u64, u64)> {
        t.kernels
            .iter()
            .filter(|k| k.name == name)
            .map(|k| (k.read.0, k.written.0))
            .collect()
    };
    let (rows, d, ff, v) = (8192u64, 2048, 8192, 128_256);
    assert_eq!(of("silu"), [(rows * ff * 2, rows * ff * 2)]);
    assert_eq!(
        of("rms_norm"),
        [(rows * d * 2 + d * 2, rows * d * 2 + rows * 4)]
    );
    assert_eq!(
        of("log_softmax_backward"),
        [(2 * rows * v * 4, rows * v * 4)]
    );
    // One table row per id.
    assert_eq!(of("embedding"), [(rows * 8 + rows * d * 2, rows * d * 2)]);
    // Half of the query heads and a table of half heads.
    assert!(of("mul").contains(&(rows * d + 4096 * 32 * 2, rows * d)));
}

#[test]
fn the_loss_decides_how_many_logits_live() {
    let rows_v = 8192 * 128_256u64;
    let logits = |s: &Storage| s.role == StorageRole::Logits;
    let materialized = build(&measured_1b());
    assert_eq!(peak(&materialized, logits), 3 * rows_v * 4);
    let mut s = measured_1b();
    s.precision.loss_fp32_upcast = false;
    assert_eq!(peak(&build(&s), logits), 3 * rows_v * 2);
    s.precision.loss_fp32_upcast = true;
    s.train.loss = Loss::Chunked;
    let chunked = build(&s);
    assert_eq!(
        peak(&chunked, logits),
        rows_v / 2 * 2,
        "one chunk of 4,096 rows in the compute type"
    );
    let mut lean = s.clone();
    lean.train.loss_chunk_rows = 512;
    assert_eq!(peak(&build(&lean), logits), rows_v / 16 * 2);
    let saved = peak(&materialized, |_| true) - peak(&chunked, |_| true);
    assert!(saved > 8 << 30, "{saved}");
    // Compiled with the model, the loss keeps the logits and one float per row.
    s = measured_1b();
    s.compile.mode = CompileMode::Full;
    assert_eq!(peak(&build(&s), logits), rows_v * 2);
}

#[test]
fn full_recompute_keeps_block_inputs() {
    let mut s = measured_1b();
    s.train.recompute = Recompute::Full;
    let t = build(&s);
    let in_blocks = |x: &Storage| {
        x.role == StorageRole::Saved && t.modules[x.module.index()].path.starts_with("layers.")
    };
    let forward = Tape {
        backward: vec![],
        ..t.clone()
    };
    let (hidden, gemm) = (8192 * 2048 * 2u64, 8192 * 8192 * 2u64);
    // At the end of forward: outputs of the blocks.
    let mut alive = 0;
    for op in &forward.forward {
        match *op {
            TapeOp::Alloc(x) if in_blocks(&t.storages[x.index()]) => {
                alive += t.storages[x.index()].bytes.0
            }
            TapeOp::Free(x) if in_blocks(&t.storages[x.index()]) => {
                alive -= t.storages[x.index()].bytes.0
            }
            _ => {}
        }
    }
    assert_eq!(alive, 16 * hidden);
    // In backward, one block's tensors are added, far fewer than those of all blocks.
    assert!(peak(&t, in_blocks) < 16 * hidden + 5 * gemm + 8 * hidden);
    let recomputed = |op: &&TapeOp| matches!(op, TapeOp::EnterRecompute(m) if t.modules[m.index()].kind == ModuleKind::Block);
    assert_eq!(t.backward.iter().filter(recomputed).count(), 16);
}

/// Returns the bytes of blocks' tensors at the end of forward, for each block of the deep model.
fn kept(t: &Tape, layers: u32) -> Vec<u64> {
    let mut alive = vec![0; layers as usize];
    let block = |x: &Storage| {
        let path = &t.modules[x.module.index()].path;
        let number = path.strip_prefix("layers.")?.split('.').next()?;
        number.parse::<usize>().ok()
    };
    for op in &t.forward {
        match *op {
            TapeOp::Alloc(x) => {
                let x = &t.storages[x.index()];
                block(x).into_iter().for_each(|b| alive[b] += x.bytes.0);
            }
            TapeOp::Free(x) => {
                let x = &t.storages[x.index()];
                block(x).into_iter().for_each(|b| alive[b] -= x.bytes.0);
            }
            _ => {}
        }
    }
    alive
}

/// A block keeps what it keeps if all blocks are treated like it.
#[test]
fn recomputed_blocks_keep_what_full_recompute_keeps() {
    let of = |recompute, which: RecomputeLayers| {
        let mut s = measured_1b();
        s.train.recompute = recompute;
        s.train.recompute_layers = which;
        build(&s)
    };
    let globs = RecomputeLayers::Patterns(vec!["layers.1".into(), "layers.1*".into()]);
    for mode in [Recompute::Full, Recompute::Selective] {
        let all = kept(&of(mode, RecomputeLayers::All), 16);
        let none = kept(&of(Recompute::None, RecomputeLayers::All), 16);
        for (which, chosen) in [
            (RecomputeLayers::First(5), (0..5).collect::<Vec<usize>>()),
            (RecomputeLayers::First(16), (0..16).collect()),
            (globs.clone(), [1].into_iter().chain(10..16).collect()),
        ] {
            let t = of(mode, which);
            let expected: Vec<u64> = (0..16)
                .map(|b| if chosen.contains(&b) { all[b] } else { none[b] })
                .collect();
            assert_eq!(kept(&t, 16), expected, "{mode:?} {chosen:?}");
            let again = t.backward.iter().filter_map(|op| match op {
                TapeOp::EnterRecompute(m) if t.modules[m.index()].kind == ModuleKind::Block => {
                    Some(t.modules[m.index()].path.clone())
                }
                _ => None,
            });
            let mut again: Vec<String> = again.collect();
            again.reverse();
            let chosen: Vec<String> = chosen.iter().map(|b| format!("layers.{b}")).collect();
            assert_eq!(again, chosen, "{mode:?}");
        }
    }
}

#[test]
fn frozen_modules_get_no_gradient_and_stop_backward() {
    let mut s = tiny(Family::Llama);
    s.fsdp.frozen = vec!["tok_embeddings".into(), "layers.0".into()];
    let t = build(&s);
    super::liveness::check(&t);
    super::liveness::check_marks(&t);
    let entered = |path: &str| {
        t.backward
            .iter()
            .any(|op| matches!(op, TapeOp::Enter(m) if t.modules[m.index()].path == path))
    };
    assert!(entered("layers.1"));
    assert!(!entered("layers.0"), "nothing below needs a gradient");
    s.fsdp.frozen = vec!["layers.*.mlp".into()];
    let t = build(&s);
    super::liveness::check_marks(&t);
    let all = build(&tiny(Family::Llama));
    let mm = |t: &Tape| launches(t, &t.backward)["mm"];
    assert_eq!(
        mm(&all) - mm(&t),
        2 * 3,
        "no weight gradients in two feed-forward halves"
    );
}

/// The model's FLOPs are those of the tape's GEMMs: forward of all, no gradient of frozen weights,
/// nothing below the first trained one.
#[test]
fn frozen_weights_count_no_gradients() {
    let of = |frozen: &[&str]| {
        let mut s = tiny(Family::Llama);
        s.fsdp.frozen = frozen.iter().map(|&g| g.into()).collect();
        let t = build(&s);
        // Forward's share of causal attention in one layer; its backward, where there is one, is
        // counted as twice that.
        let attention =
            2 * s.model.heads * s.model.head_dim * s.train.seq_len.pow(2) * s.train.micro_batch;
        let gemms = flops(&t, &t.forward, is_gemm) + flops(&t, &t.backward, is_gemm);
        (t.model_flops.0 - gemms, attention, t)
    };
    for (frozen, layers) in [
        (&[][..], 6),
        // Gradients go through the blocks to the embedding.
        (&["layers.*"], 6),
        (&["layers.*.mlp"], 6),
        (&["layers.*.attention.q"], 6),
        // The norm before the second block's GEMMs is the first that is trained.
        (&["tok_embeddings", "layers.0"], 4),
        (&["tok_embeddings", "layers.*", "norm"], 2),
    ] {
        let (more, attention, _) = of(frozen);
        assert_eq!(more, layers * attention, "{frozen:?}");
    }
    let (_, attention, t) = of(&["layers.*"]);
    let size = |p: &&Param| p.shape.len() > 1 && p.name.starts_with("layers.");
    let blocks: u64 = t.params.iter().filter(size).map(Param::numel).sum();
    let head = 8 * 11;
    assert_eq!(
        t.model_flops.0,
        (4 * blocks + 6 * head) * t.tokens + 6 * attention
    );
}

#[test]
fn leaves_appear_when_they_are_units() {
    let s = tiny(Family::Llama);
    let modules = modules_and_params(&s).0;
    let unit = |m: ModuleId| modules[m.index()].path.ends_with("attention.q");
    let paths = |t: &Tape| -> Vec<String> {
        t.forward
            .iter()
            .filter_map(|op| match op {
                TapeOp::Enter(m) => Some(t.modules[m.index()].path.clone()),
                _ => None,
            })
            .collect()
    };
    let outer = [
        "",
        "tok_embeddings",
        "layers.0",
        "layers.0.attention",
        "layers.0.mlp",
    ];
    assert_eq!(paths(&build(&s))[..5], outer);
    let t = with_units(&s, &unit);
    assert_eq!(
        paths(&t)[3..6],
        ["layers.0.attention", "layers.0.attention.q", "layers.0.mlp"]
    );
    super::liveness::check_marks(&t);
}

/// A block of a llama has 7 GEMMs in forward and 14 in backward.
#[test]
fn merged_projections_are_one_gemm_each() {
    let gemms = |merge, neighbours: WeightAdjacency, recompute| {
        let mut s = tiny(Family::Llama);
        s.compile.mode = CompileMode::Blocks;
        s.compile.merge_projections = merge;
        s.train.recompute = recompute;
        let t = tape(
            &s,
            Sharding {
                is_unit: &|m| s_is_unit(&s, m),
                adjacency: &|_| neighbours,
            },
        );
        // Two blocks, and the head's one and two.
        let blocks = |ops: &[TapeOp], head| (launches(&t, ops)["mm"] - head) / 2;
        [
            blocks(&t.forward, 1),
            blocks(&t.eval, 1),
            blocks(&t.backward, 2),
        ]
    };
    use MergeProjections as M;
    let (near, weights) = (
        WeightAdjacency::WeightsAndGradients,
        WeightAdjacency::Weights,
    );
    let none = Recompute::None;
    assert_eq!(gemms(M::None, near, none), [7, 7, 14]);
    assert_eq!(gemms(M::Qkv, near, none), [5, 5, 10]);
    assert_eq!(gemms(M::All, near, none), [4, 4, 8]);
    assert_eq!(gemms(M::Gradients, near, none), [7, 7, 8]);
    // Weight gradients stay three GEMMs and two.
    assert_eq!(gemms(M::Qkv, weights, none), [5, 5, 12]);
    assert_eq!(gemms(M::All, weights, none), [4, 4, 11]);
    assert_eq!(gemms(M::All, WeightAdjacency::None, none), [7, 7, 14]);
    // All GEMMs of a block but the last are recomputed.
    assert_eq!(gemms(M::None, near, Recompute::Full), [7, 7, 20]);
    assert_eq!(gemms(M::All, near, Recompute::Full), [4, 4, 11]);
}

/// Queries, keys and values of 8, 4 and 4 columns are columns of rows of 16, in both directions,
/// and the weights are one operand.
#[test]
fn a_merged_gemm_is_read_and_written_where_it_lies() {
    let mut s = tiny(Family::Llama);
    s.compile.mode = CompileMode::Blocks;
    s.compile.merge_projections = MergeProjections::Qkv;
    let t = build(&s);
    let rows = s.train.micro_batch * s.train.seq_len;
    let q = t
        .params
        .iter()
        .position(|p| p.name == "layers.0.attention.q.weight");
    let q = ParamId(q.expect("the first block has queries") as u32);
    let touched = |ops: &[TapeOp], source: Source| -> Vec<(String, Operand)> {
        let of = |op: &TapeOp| match *op {
            TapeOp::Launch {
                kernel, reads, end, ..
            } => {
                let name = t.kernels[kernel.index()].name.clone();
                let operands = t.operands[reads as usize..end as usize].iter();
                operands.map(|o| (name.clone(), *o)).collect()
            }
            _ => vec![],
        };
        ops.iter()
            .flat_map(of)
            .filter(|(_, o)| o.source == source)
            .collect()
    };
    // [16, 8] of two bytes each: once in forward, and in backward for the input's gradient.
    for ops in [&t.forward, &t.backward] {
        let all = touched(ops, Source::Param(q));
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].1.offset, all[0].1.bytes), (0, 16 * 8 * 2));
        for next in [ParamId(q.0 + 1), ParamId(q.0 + 2)] {
            assert_eq!(touched(ops, Source::Param(next)), []);
        }
    }
    let gradient = touched(&t.backward, Source::Grad(q));
    assert_eq!(gradient.len(), 1);
    assert_eq!(gradient[0].1.bytes, 16 * 8 * 2);
    // Attention reads the values from the 12th column on, and its backward writes their gradient
    // there.
    let attention = |ops: &[TapeOp], name: &str, read: bool| -> Operand {
        let of = |op: &TapeOp| match *op {
            TapeOp::Launch {
                kernel,
                reads,
                writes,
                end,
            } if t.kernels[kernel.index()].name == name => {
                Some(t.operands[if read { reads + 2 } else { end - 1 } as usize])
                    .filter(|_| reads < writes)
            }
            _ => None,
        };
        ops.iter().find_map(of).expect("there is attention")
    };
    let bytes = ((rows - 1) * 16 + 4) * 2;
    for o in [
        attention(&t.forward, "attention", true),
        attention(&t.backward, "attention_backward", false),
    ] {
        assert_eq!((o.offset, o.bytes), (12 * 2, bytes));
        let Source::Storage(id) = o.source else {
            panic!("{o:?}")
        };
        assert_eq!(t.storages[id.index()].bytes.0, rows * 16 * 2);
    }
}

/// Rotated queries and keys overwrite the columns of the unrotated ones: a block saves no more than
/// with separate layers, however many heads share a key. One kernel rotates both, and one rotates
/// both gradients where attention has written them, next to that of the values.
#[test]
fn rotations_of_merged_projections_work_in_place() {
    for kv_heads in [1, 2, 4] {
        let build = |merge| {
            let mut s = tiny(Family::Llama);
            s.model.kv_heads = kv_heads;
            s.compile.mode = CompileMode::Blocks;
            s.compile.merge_projections = merge;
            build(&s)
        };
        let saved = |merge| -> u64 {
            let t = build(merge);
            let saved = t.storages.iter().filter(|s| s.role == StorageRole::Saved);
            saved.map(|s| s.bytes.0).sum()
        };
        let apart = saved(MergeProjections::None);
        assert_eq!(saved(MergeProjections::Qkv), apart, "{kv_heads}");
        assert_eq!(saved(MergeProjections::All), apart, "{kv_heads}");
        let t = build(MergeProjections::Qkv);
        for ops in [&t.forward, &t.eval, &t.backward] {
            let mut found = 0;
            let mut from_attention = None;
            for (kernel, read, written) in performed(&t, ops) {
                if let KernelClass::Attention { backward: true, .. } = kernel.class {
                    let [q, k, v] = [0, 1, 2].map(|i| written[i].source);
                    assert_eq!([q, k], [v, v], "{}", kernel.name);
                    from_attention = Some(v);
                }
                let mut ops = kernel.body.iter();
                if ops.any(|b| matches!(b.op, OpKind::Cat { .. })) {
                    found += 1;
                    assert_eq!(written.len(), 1, "{}", kernel.name);
                    let same = read.iter().filter(|o| **o == written[0]);
                    assert_eq!(same.count(), 1, "{}", kernel.name);
                    if from_attention.is_some() {
                        assert_eq!(Some(written[0].source), from_attention);
                    }
                    // Half of each row is read twice, and counted once: heads of 2 elements, 2
                    // sequences of 5.
                    let rotated = (4 + kv_heads) * 2 * 2 * 5;
                    let made = &kernel.body.last().expect("a body").outputs[0];
                    assert_eq!(made.shape.iter().product::<u64>(), rotated);
                    assert_eq!(kernel.written.0, rotated * 2);
                    assert_eq!(kernel.read.0, rotated * 2 + 2 * 5 * 2);
                }
            }
            assert_eq!(found, 2, "a rotation a block");
        }
    }
}
