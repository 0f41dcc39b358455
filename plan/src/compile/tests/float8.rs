//! 8-bit matmuls. The interpreter of these tests computes in float64 and rounds nothing, so
//! that casts must change no gradient.

use super::*;

/// Returns the scenario with these scales.
fn cast(base: &Scenario, recipe: Float8Recipe, saved: Float8Saved) -> Scenario {
    let mut s = base.clone();
    s.precision.float8 = Float8 {
        recipe,
        saved,
        ..Float8::off()
    };
    s
}

const RECIPES: [Float8Recipe; 2] = [Float8Recipe::Tensorwise, Float8Recipe::Rowwise];
const SAVED: [Float8Saved; 2] = [Float8Saved::Compute, Float8Saved::Float8];

/// The matmuls of experts change no gradient either.
#[test]
fn casts_of_experts_change_no_gradient() {
    let base = tiny(Family::Moe);
    for saved in SAVED {
        for mode in [
            CompileMode::Off,
            CompileMode::Blocks,
            CompileMode::Regions,
            CompileMode::Full,
        ] {
            let mut s = cast(&base, Float8Recipe::Tensorwise, saved);
            s.precision.float8.experts = true;
            s.compile.mode = mode;
            gradients::assert_same(&base, &s);
        }
    }
}

/// Biases are those of GPT-2, and experts have a shared one with plain linear layers.
#[test]
fn casts_change_no_gradient() {
    for family in [Family::Llama, Family::Moe, Family::Gpt2, Family::Linear] {
        let base = tiny(family);
        for recipe in RECIPES {
            for saved in SAVED {
                gradients::assert_same(&base, &cast(&base, recipe, saved));
                for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
                    for merge in [MergeProjections::None, MergeProjections::All] {
                        let mut s = cast(&base, recipe, saved);
                        s.compile.mode = mode;
                        s.compile.merge_projections = merge;
                        s.compile.epilogues = merge != MergeProjections::None;
                        s.compile.mix_order_reductions = s.compile.epilogues;
                        gradients::assert_same(&base, &s);
                    }
                }
            }
        }
    }
}

/// With a scale per row, compiled code of PyTorch makes both norms of a block again in backward,
/// where it copies their results into transposed order; code of our own saves the results. With one
/// scale, and in 16 bits, both save them.
#[test]
fn norms_that_backward_only_copies_are_made_again() {
    let norms = |policy: PolicyKind, recipe: Option<Float8Recipe>| {
        let mut s = tiny(Family::Llama);
        if let Some(recipe) = recipe {
            s = cast(&s, recipe, Float8Saved::Compute);
        }
        s.fsdp.policy = policy;
        s.compile.mode = CompileMode::Blocks;
        let t = build(&s);
        let is_norm = |op: &BodyOp| matches!(op.op, OpKind::RmsNorm(_));
        let again = performed(&t, &t.backward).filter(|(k, ..)| k.body.iter().any(is_norm));
        again.count()
    };
    let rowwise = Some(Float8Recipe::Rowwise);
    let layers = tiny(Family::Llama).model.layers as usize;
    assert_eq!(norms(PolicyKind::Fsdp2, rowwise), 2 * layers);
    assert_eq!(norms(PolicyKind::Native, rowwise), 0);
    for recipe in [None, Some(Float8Recipe::Tensorwise)] {
        assert_eq!(norms(PolicyKind::Fsdp2, recipe), 0);
    }
    let mut s = cast(
        &tiny(Family::Llama),
        Float8Recipe::Rowwise,
        Float8Saved::Compute,
    );
    s.fsdp.policy = PolicyKind::Fsdp2;
    let eager = s.clone();
    s.compile.mode = CompileMode::Blocks;
    gradients::assert_same(&eager, &s);
}

#[test]
fn casts_of_recomputed_tensors_change_no_gradient() {
    let base = tiny(Family::Llama);
    for recompute in [Recompute::Full, Recompute::Selective, Recompute::Pointwise] {
        for mode in [CompileMode::Off, CompileMode::Blocks] {
            if recompute == Recompute::Pointwise && mode == CompileMode::Off {
                continue;
            }
            for recipe in RECIPES {
                for saved in SAVED {
                    let mut s = cast(&base, recipe, saved);
                    s.train.recompute = recompute;
                    s.compile.mode = mode;
                    gradients::assert_same(&base, &s);
                }
            }
        }
    }
}

/// Counts operations of a name in all kernels.
fn count_ops(t: &Tape, ops: &[TapeOp], name: &str) -> usize {
    let bodies = performed(t, ops).flat_map(|(k, ..)| &k.body);
    bodies.filter(|op| op.op.name() == name).count()
}

/// Per block, seven linear layers read four tensors: the two norms' results, attention's and the
/// gate's. Forward casts each of them and each weight once. Backward casts the weights' transposes,
/// the four tensors' transposes, and the gradients of seven results, each in both orders.
#[test]
fn compiled_code_casts_every_tensor_once() {
    let mut s = cast(
        &tiny(Family::Llama),
        Float8Recipe::Tensorwise,
        Float8Saved::Compute,
    );
    s.compile.mode = CompileMode::Blocks;
    let t = build(&s);
    let layers = s.model.layers as usize;
    let forward = |name| count_ops(&t, &t.forward, name);
    let backward = |name| count_ops(&t, &t.backward, name);
    assert_eq!(forward("scaled_mm"), 7 * layers);
    assert_eq!(forward("mm"), 1, "the head");
    assert_eq!(forward("row_amax"), 11 * layers);
    assert_eq!(forward("float8_scale"), 11 * layers);
    assert_eq!(forward("float8_cast"), 11 * layers);
    assert_eq!(backward("scaled_mm"), 14 * layers);
    assert_eq!(backward("row_amax"), 7 * layers);
    assert_eq!(backward("float8_cast"), (7 + 4 + 2 * 7) * layers);
    // Codes and transposes of a tensor come from one kernel.
    let both = performed(&t, &t.backward).filter(|(k, ..)| {
        let casts = k.body.iter().filter(|op| op.op == OpKind::Float8Cast);
        casts.count() >= 2
    });
    assert!(both.count() >= 4 * layers);
    s.precision.float8.saved = Float8Saved::Float8;
    let t = build(&s);
    assert_eq!(count_ops(&t, &t.forward, "float8_cast"), (11 + 4) * layers);
    assert_eq!(
        count_ops(&t, &t.backward, "float8_cast"),
        (7 + 2 * 7) * layers
    );
}

/// Forward matmuls may add up with the precision of tensor cores, others never do (F37 of the
/// historical bugs: gradients of weights lose up to a fifth).
#[test]
fn only_forward_adds_up_fast() {
    let mut s = cast(
        &tiny(Family::Llama),
        Float8Recipe::Tensorwise,
        Float8Saved::Compute,
    );
    for fast in [true, false] {
        s.precision.float8.fast_accum = fast;
        let t = build(&s);
        let of = |ops| {
            let bodies = performed(&t, ops).flat_map(|(k, ..)| &k.body);
            let flags = bodies.filter_map(|op| match op.op {
                OpKind::ScaledGemm(gemm) => Some(gemm.fast),
                _ => None,
            });
            flags.collect::<std::collections::BTreeSet<bool>>()
        };
        assert_eq!(of(&t.forward), [fast].into());
        assert_eq!(of(&t.backward), [false].into());
    }
}

/// Factors of e4m3 and gradients of e5m2 are bytes; both are read with the inner dimension
/// contiguous.
#[test]
fn factors_are_bytes_along_the_inner_dimension() {
    for recipe in RECIPES {
        let t = build(&cast(&tiny(Family::Llama), recipe, Float8Saved::Compute));
        let bodies = performed(&t, &t.backward).flat_map(|(k, ..)| &k.body);
        let gemms: Vec<&BodyOp> = bodies
            .filter(|op| matches!(op.op, OpKind::ScaledGemm(_)))
            .collect();
        assert!(!gemms.is_empty());
        for op in gemms {
            let [a, b] = [&op.inputs[0], &op.inputs[1]];
            assert!(a.strides.is_empty() && b.strides.is_empty());
            assert_eq!([a.dtype, b.dtype], [DType::F8E5m2, DType::F8E4m3]);
        }
    }
}

#[test]
fn blocks_and_modules_can_stay_as_they_are() {
    let mut s = tiny(Family::Llama);
    s.model.layers = 7;
    let scaled = |s: &Scenario| {
        let t = build(s);
        count_ops(&t, &t.forward, "scaled_mm")
    };
    assert_eq!(scaled(&s), 0);
    let mut s = cast(&s, Float8Recipe::Tensorwise, Float8Saved::Compute);
    assert_eq!(scaled(&s), 7 * 7);
    s.precision.float8.first_bf16 = 1;
    s.precision.float8.last_bf16 = 2;
    assert_eq!(scaled(&s), 7 * 4);
    s.precision.float8.exclude = vec!["layers.*.attention".into(), "layers.3".into()];
    assert_eq!(scaled(&s), 3 * 3);
}

/// By the name here, in torchtitan and in Hugging Face's code. A projection in bf16 is not merged
/// with those in 8 bits.
#[test]
fn single_layers_can_stay_as_they_are() {
    let base = tiny(Family::Llama);
    let layers = base.model.layers as usize;
    for (exclude, kept) in [
        ("attention.o", 1),
        ("attention.wo", 1),
        ("o_proj", 1),
        ("*.w2", 1),
        ("feed_forward.w*", 3),
        ("self_attn.*_proj", 4),
        ("k", 1),
    ] {
        let mut s = cast(&base, Float8Recipe::Tensorwise, Float8Saved::Compute);
        s.precision.float8.exclude = vec![exclude.into()];
        let t = build(&s);
        let scaled = count_ops(&t, &t.forward, "scaled_mm");
        assert_eq!(scaled, layers * (7 - kept), "{exclude}");
        s.compile.mode = CompileMode::Blocks;
        s.compile.merge_projections = MergeProjections::All;
        gradients::assert_same(&base, &s);
        // The layers that stay, and the output head.
        let merged = build(&s);
        let plain = count_ops(&merged, &merged.forward, "mm");
        assert!(
            plain > layers,
            "{exclude}: {plain} matmuls in {layers} blocks"
        );
    }
}

/// Half of the bytes of the inputs that forward saves.
#[test]
fn saved_codes_take_half_the_memory() {
    let saved = |s: &Scenario| {
        let t = build(s);
        let mut kept = std::collections::BTreeSet::new();
        for op in &t.forward {
            match op {
                TapeOp::Alloc(id) => _ = kept.insert(*id),
                TapeOp::Free(id) => _ = kept.remove(id),
                _ => {}
            }
        }
        let bytes = |d: DType| {
            let of = kept.iter().map(|id| &t.storages[id.index()]);
            of.filter(|s| s.dtype == d).map(|s| s.bytes.0).sum::<u64>()
        };
        (bytes(DType::Bf16), bytes(DType::F8E4m3))
    };
    let base = tiny(Family::Llama);
    let (tokens, layers) = (
        base.train.micro_batch * base.train.seq_len,
        u64::from(base.model.layers),
    );
    let compute = saved(&cast(&base, Float8Recipe::Tensorwise, Float8Saved::Compute));
    let codes = saved(&cast(&base, Float8Recipe::Tensorwise, Float8Saved::Float8));
    assert_eq!(compute.1, 0);
    // Results of both norms and the gate; attention's is saved for its own backward too.
    let inputs = layers * tokens * (3 * base.model.hidden + base.model.ffn);
    assert_eq!(codes.1, inputs);
    assert!(codes.0 < compute.0);
}

/// Both matmuls of experts, in all three directions, read 8-bit factors with the inner dimension
/// contiguous: the transpose of a stack of matrices has each of them transposed. The router stays.
#[test]
fn experts_run_in_8_bits_if_asked_for() {
    let sets = |experts: bool| {
        [
            "model.hidden=32".to_owned(),
            "model.ffn=96".to_owned(),
            "model.expert_ffn=48".to_owned(),
            "model.shared_expert_ffn=48".to_owned(),
            "train.seq_len=24".to_owned(),
            "precision.float8_recipe=tensorwise".to_owned(),
            format!("precision.float8_experts={experts}"),
        ]
    };
    let load = |experts| crate::scenario::load("small-moe".as_ref(), &sets(experts)).unwrap();
    let plain = build(&load(false));
    assert_eq!(count_ops(&plain, &plain.forward, "scaled_grouped_mm"), 0);
    let grouped = count_ops(&plain, &plain.forward, "grouped_mm");
    assert!(grouped > 0);
    let s = load(true);
    let t = build(&s);
    assert_eq!(count_ops(&t, &t.forward, "grouped_mm"), 0);
    assert_eq!(count_ops(&t, &t.forward, "scaled_grouped_mm"), grouped);
    assert_eq!(count_ops(&t, &t.backward, "scaled_grouped_mm"), grouped);
    let gradients = "scaled_grouped_mm_weight_backward";
    assert_eq!(count_ops(&t, &t.backward, gradients), grouped);
    let of = &s.model.options.experts;
    let rows = s.train.micro_batch * s.train.seq_len * of.top_k;
    let (experts, hidden, ffn) = (of.experts, s.model.hidden, 48);
    let mut seen = std::collections::BTreeSet::new();
    for op in performed(&t, &t.backward).flat_map(|(k, ..)| &k.body) {
        if let OpKind::ScaledGroupedGemm(_) | OpKind::ScaledGroupedGemmWeightGrad(_) = op.op {
            let [a, b] = [&op.inputs[0], &op.inputs[1]];
            assert!(a.strides.is_empty() && b.strides.is_empty());
            assert_eq!([a.dtype, b.dtype], [DType::F8E5m2, DType::F8E4m3]);
            seen.insert([a.shape.to_vec(), b.shape.to_vec()]);
        }
    }
    let wanted = [
        [vec![rows, 2 * ffn], vec![experts, hidden, 2 * ffn]],
        [vec![rows, hidden], vec![experts, ffn, hidden]],
        [vec![2 * ffn, rows], vec![hidden, rows]],
        [vec![hidden, rows], vec![ffn, rows]],
    ];
    assert_eq!(seen, wanted.into());
}
