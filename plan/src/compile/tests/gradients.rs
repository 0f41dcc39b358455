//! Gradients: against finite differences, and equal in every way to build the tape.

use super::interp::{Inputs, Rng, loss, train};
use super::*;
use crate::config::QkNorm;
use crate::ir::op;

/// What compiled code may recompute.
const RECOMPUTES: [Recompute; 4] = [
    Recompute::None,
    Recompute::Full,
    Recompute::Selective,
    Recompute::Pointwise,
];

#[test]
fn backward_equals_finite_differences() {
    for family in FAMILIES {
        let s = tiny(family);
        let t = build(&s);
        let inputs = Inputs::new(&t, s.model.vocab);
        let out = train(&t, &inputs);
        assert!(out.loss.is_finite());
        assert_eq!(
            out.loss,
            loss(&t, &inputs, true),
            "{family:?}: validation computes the same loss"
        );
        let mut rng = Rng(3);
        for (p, param) in t.params.iter().enumerate() {
            assert!(
                out.grads[p].iter().all(|g| g.is_finite()),
                "{family:?} {}",
                param.name
            );
            for _ in 0..4 {
                let i = ((rng.next() + 1.0) / 2.0 * param.numel() as f64) as usize;
                let at = |h: f64| {
                    let mut moved = inputs.clone();
                    moved.params[p][i] += h;
                    loss(&t, &moved, false)
                };
                let h = 1e-5;
                let numeric = (at(h) - at(-h)) / (2.0 * h);
                let exact = out.grads[p][i];
                let scale = numeric.abs().max(exact.abs()).max(1e-3);
                assert!(
                    (numeric - exact).abs() < 1e-5 * scale,
                    "{family:?} {}[{i}]: {numeric} {exact}",
                    param.name
                );
            }
        }
    }
}

/// Checks that the gradients of two scenarios that differ in how, not what, they compute are equal.
pub(super) fn assert_same(a: &Scenario, b: &Scenario) {
    assert_same_tapes(a, &build(a), &build(b));
}

fn assert_same_tapes(a: &Scenario, ta: &Tape, tb: &Tape) {
    super::liveness::check(tb);
    super::liveness::check_marks(tb);
    let [ia, ib] = [ta, tb].map(|t| Inputs::new(t, a.model.vocab));
    let (ra, rb) = (train(ta, &ia), train(tb, &ib));
    let close = |x: f64, y: f64| (x - y).abs() <= 1e-9 * x.abs().max(y.abs()).max(1e-6);
    assert!(close(ra.loss, rb.loss), "{} {}", ra.loss, rb.loss);
    assert!(close(ra.loss, loss(tb, &ib, true)), "validation");
    for (p, param) in ta.params.iter().enumerate() {
        for (x, y) in ra.grads[p].iter().zip(&rb.grads[p]) {
            assert!(close(*x, *y), "{}: {x} {y}", param.name);
        }
    }
}

#[test]
fn recompute_changes_no_gradient() {
    for family in FAMILIES {
        let base = tiny(family);
        for recompute in [Recompute::Full, Recompute::Selective] {
            let mut s = base.clone();
            s.train.recompute = recompute;
            assert_same(&base, &s);
        }
    }
}

/// Some layers of a block may have a bias and others none.
#[test]
fn biases_of_queries_keys_and_values_have_gradients() {
    let mut base = tiny(Family::Llama);
    base.model.bias = Bias::Qkv;
    assert_eq!(numeric_gradients(&base, ".bias"), 3 * base.model.layers);
    in_every_mode(&base);
}

/// Norms of heads, which have many rows per token.
#[test]
fn norms_of_queries_and_keys_have_gradients() {
    let mut base = tiny(Family::Llama);
    base.model.options.attention.qk_norm = QkNorm::Head;
    assert_eq!(
        numeric_gradients(&base, "_norm.weight"),
        2 * base.model.layers
    );
    // Layers after them.
    assert_eq!(numeric_gradients(&base, ".q.weight"), base.model.layers);
    in_every_mode(&base);
}

/// The code of transformers computes what fused norms and other rotations do, in every mode.
#[test]
fn implementations_compute_the_same() {
    let plain = tiny(Family::Llama);
    let mut heads = plain.clone();
    heads.model.options.attention.qk_norm = QkNorm::Head;
    let mut gemma = tiny(Family::Decoder);
    gemma.model.options.norm = Norm::RmsUnitOffset;
    gemma.model.options.norm_position = NormPosition::Both;
    gemma.model.options.output.logits_softcap = Some(3.0);
    for base in [plain, heads, gemma, tiny(Family::Moe)] {
        let mut s = base.clone();
        s.model.options.implementation = Some(Implementation::Transformers);
        assert_same(&base, &s);
        in_every_mode(&s);
    }
}

/// Compares gradients of the parameters whose names end in one of these with finite differences;
/// returns their number.
fn numeric_gradients(base: &Scenario, ending: &str) -> u32 {
    let t = build(base);
    let inputs = Inputs::new(&t, base.model.vocab);
    let out = train(&t, &inputs);
    let mut found = 0;
    for (p, param) in t.params.iter().enumerate() {
        if !param.name.ends_with(ending) {
            continue;
        }
        found += 1;
        let at = |h: f64| {
            let mut moved = inputs.clone();
            moved.params[p][1] += h;
            loss(&t, &moved, false)
        };
        let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
        let exact = out.grads[p][1];
        let scale = numeric.abs().max(exact.abs()).max(1e-3);
        assert!(
            (numeric - exact).abs() < 1e-5 * scale,
            "{}: {numeric} {exact}",
            param.name
        );
    }
    found
}

/// Checks that compilation and recompute change no gradient.
fn in_every_mode(base: &Scenario) {
    for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
        for recompute in RECOMPUTES {
            let mut s = base.clone();
            s.compile.mode = mode;
            s.compile.epilogues = true;
            s.train.recompute = recompute;
            assert_same(base, &s);
        }
    }
}

/// Any blocks may be recomputed next to blocks that are not, in every compile mode.
#[test]
fn recompute_of_some_blocks_changes_no_gradient() {
    let globs =
        |globs: &[&str]| RecomputeLayers::Patterns(globs.iter().map(|g| (*g).to_owned()).collect());
    for family in FAMILIES {
        let mut base = tiny(family);
        base.model.layers = 4;
        let path = modules_and_params(&base)
            .0
            .into_iter()
            .find(|m| m.kind == ModuleKind::Block)
            .map(|m| m.path.trim_end_matches('0').to_owned())
            .expect("every family has blocks");
        for mode in [
            CompileMode::Off,
            CompileMode::Blocks,
            CompileMode::Regions,
            CompileMode::Full,
        ] {
            for recompute in RECOMPUTES {
                for which in [
                    RecomputeLayers::First(1),
                    RecomputeLayers::First(3),
                    globs(&[&format!("{path}1"), &format!("{path}3")]),
                ] {
                    let mut s = base.clone();
                    s.compile.mode = mode;
                    s.compile.epilogues = mode != CompileMode::Off;
                    s.train.recompute = recompute;
                    s.train.recompute_layers = which;
                    assert_same(&base, &s);
                }
            }
        }
    }
}

#[test]
fn chunked_loss_changes_no_gradient() {
    for tie in [false, true] {
        // Three chunks, the last one short.
        let mut base = tiny(Family::Llama);
        base.train.loss_chunk_rows = 500;
        base.model.layers = 1;
        base.model.tie_embeddings = tie;
        (base.train.micro_batch, base.train.seq_len) = (3, 400);
        for loss in [
            Loss::Chunked,
            Loss::CheckpointedChunks,
            Loss::SavedChunks,
            Loss::SplitLogits,
        ] {
            let mut s = base.clone();
            s.train.loss = loss;
            assert_same(&base, &s);
            s.compile.mode = CompileMode::Full;
            assert_same(&base, &s);
        }
        // The gradients that forward computes include the factor that backward starts from.
        for per_token in [false, true] {
            base.train.grad_accum = 3;
            base.fsdp.per_token_loss = per_token;
            let mut s = base.clone();
            s.train.loss = Loss::Chunked;
            assert_same(&base, &s);
        }
    }
}

/// Rotated queries are laid out by heads, but the GEMM after attention reads rows: torch's compiled
/// code copies, while the native engine's attention writes rows.
#[test]
fn native_compiled_attention_needs_no_copy() {
    let mut base = tiny(Family::Llama);
    for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
        base.compile.mode = mode;
        let mut s = base.clone();
        s.fsdp.policy = PolicyKind::Native;
        assert_same(&base, &s);
        let copies = |s: &Scenario| {
            let t = build(s);
            let kernels = t.forward.iter().filter_map(|op| match op {
                TapeOp::Launch { kernel, .. } => Some(&t.kernels[kernel.index()].name),
                _ => None,
            });
            kernels.filter(|name| *name == "copy").count()
        };
        assert_eq!(copies(&base) - copies(&s), base.model.layers as usize);
    }
}

#[test]
fn chunked_loss_leaves_nothing_to_multiply() {
    let mut s = tiny(Family::Llama);
    (s.train.micro_batch, s.train.seq_len) = (3, 400);
    (s.train.loss, s.train.loss_chunk_rows) = (Loss::Chunked, 1024);
    let t = build(&s);
    let head = |p: ParamId| t.params[p.index()].name.starts_with("output");
    let writers = |ops: &[TapeOp]| {
        let head = performed(&t, ops).filter(|(_, _, w)| {
            let mut sources = w.iter().map(|o| o.source);
            sources.any(|s| matches!(s, Source::Grad(p) if head(p)))
        });
        head.map(|(k, ..)| k.name.clone()).collect::<Vec<_>>()
    };
    // Two chunks: 1024 rows and 176.
    assert_eq!(writers(&t.forward), ["mm", "mm"]);
    assert!(writers(&t.backward).is_empty());
    let ready = |op: &&TapeOp| matches!(op, TapeOp::GradReady(p) if head(*p));
    assert_eq!(t.backward.iter().filter(ready).count(), 1);
    assert!(writers(&t.eval).is_empty(), "validation has no gradients");
}

#[test]
fn compiling_changes_no_gradient() {
    for family in FAMILIES {
        let base = tiny(family);
        for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
            for recompute in RECOMPUTES {
                for loss in [Loss::Materialized, Loss::Chunked] {
                    let mut s = base.clone();
                    s.compile.mode = mode;
                    (s.train.recompute, s.train.loss) = (recompute, loss);
                    assert_same(&base, &s);
                }
            }
        }
    }
}

/// Merged layers compute the same gradients, for every choice of layers, with and without
/// contiguous gradients.
#[test]
fn merging_projections_changes_no_gradient() {
    for family in FAMILIES {
        let base = tiny(family);
        for mode in [CompileMode::Blocks, CompileMode::Regions] {
            for recompute in RECOMPUTES {
                for merge in [
                    MergeProjections::Gradients,
                    MergeProjections::Qkv,
                    MergeProjections::All,
                ] {
                    let mut s = base.clone();
                    s.compile.mode = mode;
                    s.compile.merge_projections = merge;
                    s.train.recompute = recompute;
                    assert_same(&base, &s);
                    let weights = tape(
                        &s,
                        Sharding {
                            is_unit: &|m| s_is_unit(&s, m),
                            adjacency: &|_| WeightAdjacency::Weights,
                        },
                    );
                    assert_same_tapes(&s, &build(&base), &weights);
                }
            }
        }
    }
}

/// One kernel may also rotate queries and keys, for any number of heads per key and any dimensions
/// of one element.
#[test]
fn rotating_queries_and_keys_together_changes_no_gradient() {
    for (heads, kv_heads) in [(1, 1), (2, 1), (2, 2), (4, 2)] {
        for (batch, seq) in [(1, 5), (3, 4), (2, 1)] {
            let mut base = tiny(Family::Llama);
            base.model.heads = heads;
            base.model.kv_heads = kv_heads;
            base.train.micro_batch = batch;
            base.train.seq_len = seq;
            for recompute in RECOMPUTES {
                for merge in [MergeProjections::Gradients, MergeProjections::Qkv] {
                    let mut s = base.clone();
                    s.compile.mode = CompileMode::Blocks;
                    s.compile.merge_projections = merge;
                    s.train.recompute = recompute;
                    assert_same(&base, &s);
                }
            }
        }
    }
}

/// A GEMM may accumulate, with every option that decides what else is read and kept.
#[test]
fn epilogues_change_no_gradient() {
    for family in FAMILIES {
        let base = tiny(family);
        for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
            for recompute in RECOMPUTES {
                for merge in [MergeProjections::None, MergeProjections::All] {
                    let mut s = base.clone();
                    s.compile.mode = mode;
                    s.compile.epilogues = true;
                    s.compile.merge_projections = merge;
                    s.train.recompute = recompute;
                    assert_same(&base, &s);
                }
            }
        }
    }
}

/// Column sums may join row kernels, with every other option of fusion and recompute.
#[test]
fn mixed_orders_of_reduction_change_no_gradient() {
    for family in FAMILIES {
        let base = tiny(family);
        for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
            for recompute in RECOMPUTES {
                for epilogues in [false, true] {
                    let mut s = base.clone();
                    s.compile.mode = mode;
                    s.compile.epilogues = epilogues;
                    s.compile.mix_order_reductions = true;
                    s.train.recompute = recompute;
                    assert_same(&base, &s);
                }
            }
        }
    }
}

/// The backward of a norm makes the gradient of its weight too: one kernel less for every norm, and
/// its operands are read one time less. Results still take over operands that they are the last to
/// read.
#[test]
fn norms_go_back_in_one_kernel() {
    for (family, sum) in [
        (Family::Llama, OpKind::RmsNormWeightGrad),
        (Family::Gpt2, OpKind::LayerNormParamGrad),
    ] {
        let mut s = tiny(family);
        s.compile.mode = CompileMode::Regions;
        let apart = build(&s);
        s.compile.mix_order_reductions = true;
        let mixed = build(&s);
        let sums = |t: &Tape| -> Vec<(usize, u64)> {
            let kernel = |op: &TapeOp| match op {
                TapeOp::Launch { kernel, .. } => Some(t.kernels[kernel.index()].clone()),
                _ => None,
            };
            let all = t.backward.iter().filter_map(kernel);
            all.filter(|k| k.body.iter().any(|op| op.op == sum))
                .map(|k| (k.body.len(), k.read.0))
                .collect()
        };
        let launches = |t: &Tape| {
            let all = t.forward.iter().chain(&t.backward);
            all.filter(|op| matches!(op, TapeOp::Launch { .. })).count()
        };
        let norms = 2 * s.model.layers as usize + 1;
        assert_eq!((sums(&apart).len(), sums(&mixed).len()), (norms, norms));
        assert!(sums(&apart).iter().all(|k| k.0 == 1));
        assert!(sums(&mixed).iter().all(|k| k.0 > 1), "{:?}", sums(&mixed));
        assert_eq!(launches(&apart) - launches(&mixed), norms);
        let allocations = |t: &Tape| {
            let alloc = |op: &&TapeOp| matches!(op, TapeOp::Alloc { .. });
            t.backward.iter().filter(alloc).count()
        };
        assert!(allocations(&mixed) <= allocations(&apart));
    }
}

/// An embedding's gradient in compiled code writes its whole table: no zeros before it, and as many
/// bytes as the table has.
#[test]
fn gradients_of_embeddings_fill_their_tables() {
    for (family, embeddings) in [(Family::Llama, 1), (Family::Gpt2, 2)] {
        let mut s = tiny(family);
        s.compile.mode = CompileMode::Regions;
        let apart = build(&s);
        s.compile.epilogues = true;
        let whole = build(&s);
        let count = |t: &Tape, name| launches(t, &t.backward).get(name).copied().unwrap_or(0);
        assert_eq!(count(&apart, "fill") - count(&whole, "fill"), embeddings);
        let gradients = |t: &Tape| -> Vec<Kernel> {
            let of = |k: &&Kernel| k.name == "embedding_backward";
            t.kernels.iter().filter(of).cloned().collect()
        };
        let pairs: Vec<_> = gradients(&whole)
            .into_iter()
            .zip(gradients(&apart))
            .collect();
        assert_eq!(pairs.len(), embeddings);
        for (k, before) in pairs {
            let (op, table) = (&k.body[0], &k.body[0].outputs[0]);
            assert_eq!((op.inputs.len(), k.class), (2, KernelClass::EmbeddingGrad));
            let elements: u64 = table.shape.iter().product();
            assert_eq!(k.written.0, elements * table.dtype.size());
            assert!(before.body[0].inputs.len() == 3 && k.read < before.read);
        }
    }
}

/// Both residual connections of a block and the sum of two gradients are part of GEMMs: nothing
/// adds them again, there are no more GEMMs, and the sum of gradients overwrites the first one.
#[test]
fn epilogues_leave_no_additions() {
    let mut s = tiny(Family::Llama);
    s.compile.mode = CompileMode::Blocks;
    let (layers, apart) = (s.model.layers as usize, build(&s));
    s.compile.epilogues = true;
    let t = build(&s);
    let count = |t: &Tape, f: &dyn Fn(&Kernel) -> bool| {
        let launches = t.forward.iter().chain(&t.backward);
        let kernel = |op: &TapeOp| match op {
            TapeOp::Launch { kernel, .. } => f(&t.kernels[kernel.index()]),
            _ => false,
        };
        launches.filter(|op| kernel(op)).count()
    };
    let adds = |k: &Kernel| k.body.iter().any(|op| op.op == OpKind::Add);
    let sums = |k: &Kernel| {
        matches!(
            k.body[..],
            [BodyOp {
                op: OpKind::Gemm(op::Gemm {
                    accumulate: true,
                    ..
                }),
                ..
            }]
        )
    };
    let gemms = |k: &Kernel| matches!(k.class, KernelClass::Gemm { .. });
    assert_eq!(count(&t, &gemms), count(&apart, &gemms));
    // Two in forward; queries, keys and values meet in two, gate and up in one.
    assert_eq!((count(&apart, &sums), count(&t, &sums)), (0, 5 * layers));
    let (before, after) = (count(&apart, &adds), count(&t, &adds));
    // A kernel of a norm's backward added gate's and up's gradients too, and still adds the
    // residual's.
    assert!(after + 2 * layers <= before, "{before} {after}");
    let written = |ops: &[TapeOp]| {
        let over = ops.iter().filter(|op| match **op {
            TapeOp::Launch {
                kernel,
                reads,
                writes,
                end,
            } if sums(&t.kernels[kernel.index()]) => t.operands[reads as usize..writes as usize]
                .iter()
                .any(|r| r.source == t.operands[end as usize - 1].source),
            _ => false,
        });
        over.count()
    };
    assert_eq!((written(&t.forward), written(&t.backward)), (0, 3 * layers));
}
