//! Elementwise code fused into GEMMs.

use super::*;

/// Returns a llama whose rows have the alignment that tensor copies need, in 16 bits.
fn aligned() -> Scenario {
    let mut s = llama(16, 4, 2, 32, 3, 13);
    s.compile.mode = CompileMode::Regions;
    s.compile.epilogues = true;
    s
}

/// Returns experts whose rows have that alignment.
fn aligned_experts() -> Scenario {
    let mut s = tiny(Family::Moe);
    (s.model.hidden, s.model.head_dim) = (16, 4);
    s.model.options.experts.expert_ffn = Some(24);
    s.fsdp.policy = PolicyKind::Native;
    s.compile.mode = CompileMode::Regions;
    s.compile.epilogues = true;
    s
}

/// Returns experts with an inner dimension that pays for the gate's gradients in a matmul.
fn deep_experts() -> Scenario {
    let mut s = aligned_experts();
    s.model.hidden = 4096;
    s
}

fn fused(base: &Scenario) -> Scenario {
    let mut s = base.clone();
    s.compile.fused_products = true;
    s
}

/// Returns counts GEMMs and other operations of the kernels that have both.
fn counts(t: &Tape, ops: &[TapeOp]) -> Vec<(usize, usize)> {
    let parts = performed(t, ops).filter_map(|(k, ..)| BodyOp::split_gemm_epilogue(&k.body));
    parts
        .map(|(gemms, rest)| (gemms.len(), rest.len()))
        .collect()
}

#[test]
fn they_change_no_gradient() {
    let recomputes = [
        Recompute::None,
        Recompute::Full,
        Recompute::Selective,
        Recompute::Pointwise,
    ];
    for family in FAMILIES {
        for mode in [CompileMode::Blocks, CompileMode::Regions, CompileMode::Full] {
            for recompute in recomputes {
                for epilogues in [false, true] {
                    let mut base = match family {
                        Family::Llama => aligned(),
                        Family::Moe if recompute == Recompute::None => deep_experts(),
                        Family::Moe => aligned_experts(),
                        _ => tiny(family),
                    };
                    base.train.recompute = recompute;
                    let apart = base.clone();
                    base.compile.mode = mode;
                    base.compile.epilogues = epilogues;
                    gradients::assert_same(&apart, &fused(&base));
                }
            }
        }
    }
}

/// Both GEMMs of a gate and the gate are one kernel. So are the backward GEMM of the last layer and
/// the gate's gradient, and the result of that GEMM needs no memory.
#[test]
fn a_gate_and_its_gradient_are_fused_into_gemms() {
    let base = aligned();
    let (apart, t) = (build(&base), build(&fused(&base)));
    assert_eq!(counts(&apart, &apart.forward), []);
    assert_eq!(counts(&t, &t.forward), [(2, 2); 3]);
    assert_eq!(counts(&t, &t.eval), [(2, 2); 3]);
    assert_eq!(counts(&t, &t.backward), [(1, 4); 3]);
    let launches = |t: &Tape, ops: &[TapeOp]| performed(t, ops).count();
    let fewer =
        |before: &[TapeOp], after: &[TapeOp]| launches(&apart, before) - launches(&t, after);
    assert_eq!(fewer(&apart.forward, &t.forward), 3 * 2);
    assert_eq!(fewer(&apart.backward, &t.backward), 3);
    // The bytes of a gate, rows of 32 in 16 bits, three times fewer.
    let rows = base.train.micro_batch * base.train.seq_len;
    let made = |t: &Tape, ops: &[TapeOp]| {
        let bytes = rows * 32 * 2;
        let is_gate = |op: &&TapeOp| matches!(**op, TapeOp::Alloc(s) if t.storages[s.index()].bytes.0 == bytes);
        ops.iter().filter(is_gate).count()
    };
    assert_eq!(
        made(&apart, &apart.backward) - made(&t, &t.backward),
        3,
        "gradients of gates"
    );
    // In validation the factors of the gate do not reach memory either.
    assert_eq!(made(&t, &t.eval), 3);
    // Arithmetic does not change, nor does the shape of a GEMM next to another one.
    let flops =
        |t: &Tape, ops: &[TapeOp]| -> u64 { performed(t, ops).map(|(k, ..)| k.flops.0).sum() };
    assert_eq!(flops(&t, &t.forward), flops(&apart, &apart.forward));
    assert_eq!(flops(&t, &t.backward), flops(&apart, &apart.backward));
    let wide = KernelClass::Gemm {
        m: rows,
        n: 64,
        k: 16,
        batch: 1,
    };
    let mut both =
        performed(&t, &t.forward).filter(|(k, ..)| BodyOp::split_gemm_epilogue(&k.body).is_some());
    assert!(both.all(|(k, ..)| k.class == wide));
}

/// The kernel reads its factors until its last tile: no result may take their memory, while the
/// gate's gradients overwrite the gate's factors.
#[test]
fn results_take_over_what_code_reads_and_never_a_factor() {
    for recompute in [Recompute::None, Recompute::Pointwise, Recompute::Full] {
        // A gate as wide as its inputs could overwrite them.
        for (epilogues, ffn) in [(false, 32), (true, 32), (false, 16), (true, 16)] {
            let mut s = fused(&aligned());
            s.model.ffn = ffn;
            s.train.recompute = recompute;
            s.compile.epilogues = epilogues;
            let t = build(&s);
            let mut taken = 0;
            for ops in [&t.forward, &t.backward, &t.eval] {
                for (kernel, reads, writes) in performed(&t, ops) {
                    let Some((gemms, _)) = BodyOp::split_gemm_epilogue(&kernel.body) else {
                        continue;
                    };
                    let over = |r: &Operand| writes.iter().any(|w| w.source == r.source);
                    taken += reads.iter().filter(|r| over(r)).count();
                    for op in gemms {
                        for slot in &op.inputs {
                            let Place::Read(r) = slot.place else {
                                panic!("a factor comes from {:?}", slot.place)
                            };
                            assert!(!over(&reads[usize::from(r)]), "{recompute:?}");
                        }
                    }
                }
            }
            // Both of each block's gate.
            assert!(taken >= 6, "{recompute:?}: {taken}");
        }
    }
}

/// What the kernel cannot do stays separate: float32, columns of a merged GEMM, rows that are not a
/// multiple of 16 bytes, a bias, and layers whose parameters are gathered one after another.
#[test]
fn what_does_not_fit_stays_apart() {
    let none = |s: &Scenario| {
        let t = build(s);
        [&t.forward, &t.backward]
            .iter()
            .all(|ops| counts(&t, ops).is_empty())
    };
    let base = fused(&aligned());
    assert!(!none(&base));
    let mut wide = base.clone();
    wide.precision.compute = crate::ir::DType::F32;
    assert!(none(&wide));
    let mut merged = base.clone();
    merged.compile.merge_projections = MergeProjections::All;
    assert_eq!(counts(&build(&merged), &build(&merged).forward), []);
    let mut odd = base.clone();
    odd.model.ffn = 36;
    assert!(none(&odd));
    let mut biased = fused(&tiny(Family::Gpt2));
    biased.compile.mode = CompileMode::Regions;
    biased.compile.epilogues = true;
    assert_eq!(counts(&build(&biased), &build(&biased).forward), []);
    // Every layer is a unit: its parameters are freed between its GEMM and the next one.
    let leaves = with_units(&base, &|m| {
        let kind = modules_and_params(&base).0[m.index()].kind;
        kind != ModuleKind::Loss
    });
    assert_eq!(counts(&leaves, &leaves.forward), []);
}

/// Returns the kernels that are a matmul of experts and more, with their reads and writes.
fn of_experts<'t>(t: &'t Tape, ops: &'t [TapeOp]) -> Vec<(&'t Kernel, &'t [Operand], usize)> {
    performed(t, ops)
        .filter(|(k, ..)| k.body.len() > 1)
        .filter(|(k, ..)| matches!(k.body[0].op, OpKind::GroupedGemm(_)))
        .map(|(k, reads, writes)| (k, reads, writes.len()))
        .collect()
}

/// The gate of experts and the weights of choices are part of the matmul that makes both factors of
/// the gate. Validation has no use for these factors in memory.
#[test]
fn the_gate_of_experts_is_fused_into_their_matmul() {
    let base = deep_experts();
    let (apart, t) = (build(&base), build(&fused(&base)));
    assert!(of_experts(&apart, &apart.forward).is_empty());
    let layers = base.model.layers as usize;
    for (ops, writes) in [(&t.forward, 2), (&t.eval, 1)] {
        let found = of_experts(&t, ops);
        assert_eq!(found.len(), layers);
        for (kernel, reads, written) in found {
            let names: Vec<&str> = kernel.body.iter().map(|op| op.op.name()).collect();
            assert_eq!(names, ["grouped_mm", "silu", "mul", "scale_rows"]);
            // Rows, matrices, offsets, weights of choices; the factors and their product.
            assert_eq!((reads.len(), written), (4, writes));
            let class = |k: &Kernel| k.class;
            let mut alone = performed(&apart, &apart.forward).map(|(k, ..)| k);
            assert!(alone.any(|k| class(k) == class(kernel)));
        }
    }
    // In backward, gradients of the gate, of its factors and of the weights of choices follow from
    // that of the second matmul's rows, which no memory holds.
    let found = of_experts(&t, &t.backward);
    assert_eq!(found.len(), layers);
    for (kernel, ..) in found {
        let has = |kind: OpKind| kernel.body.iter().any(|op| op.op == kind);
        assert!(has(OpKind::RowDot) && has(OpKind::SiluGrad));
        let made = kernel.body[0].outputs[0].place;
        assert!(matches!(made, Place::Register(_)), "{made:?}");
    }
    let launches = |t: &Tape, ops: &[TapeOp]| performed(t, ops).count();
    let flops =
        |t: &Tape, ops: &[TapeOp]| -> u64 { performed(t, ops).map(|(k, ..)| k.flops.0).sum() };
    for (before, after) in [(&apart.forward, &t.forward), (&apart.backward, &t.backward)] {
        assert_eq!(launches(&apart, before) - launches(&t, after), layers);
        assert_eq!(flops(&t, after), flops(&apart, before));
    }
}

/// With a short inner dimension, the gate's gradients are a kernel of their own.
#[test]
fn gradients_of_a_gate_stay_apart_from_shallow_matmuls() {
    let t = build(&fused(&aligned_experts()));
    assert!(!of_experts(&t, &t.forward).is_empty());
    assert!(of_experts(&t, &t.backward).is_empty());
}

/// What is fused into the matmul computes the rows that some expert has, as many as on ranks that
/// have all experts. Under other policies it does so, too, where separate kernels compute all rows.
#[test]
fn epilogues_of_experts_compute_used_rows() {
    let sizes = [
        "model.hidden=32",
        "model.expert_ffn=48",
        "compile.mode=blocks",
        "compile.gemm_epilogue_fusion=true",
    ];
    let of = |set: &[&str]| {
        let set = sizes.iter().chain(set).map(|s| (*s).to_owned());
        let set: Vec<String> = set.collect();
        let t = build(&crate::scenario::load("small-moe-ep".as_ref(), &set).unwrap());
        let found = of_experts(&t, &t.forward);
        let numbers = |k: &Kernel| (k.used_rows.is_some(), k.flops, k.written);
        found.iter().map(|(k, ..)| numbers(k)).collect::<Vec<_>>()
    };
    let padded = ["moe.dispatcher=padded", "moe.capacity_factor=2"];
    let (divided, all) = (of(&padded), of(&["mesh.ep=1"]));
    assert_eq!(divided.len(), 2);
    let expected = all
        .iter()
        .map(|&(_, flops, written)| (true, flops, written));
    assert_eq!(divided, expected.collect::<Vec<_>>());
    let fsdp2 = of(&[&padded[..], &["fsdp.policy=fsdp2"]].concat());
    assert!(fsdp2.len() == 2 && fsdp2.iter().all(|k| k.0));
}

/// Eight bits, float32, halves that are not vectors, and a projection that is a unit of its own.
#[test]
fn matmuls_of_experts_that_do_not_fit_stay_apart() {
    let count = |s: &Scenario| {
        let t = build(s);
        of_experts(&t, &t.forward).len()
    };
    let base = fused(&aligned_experts());
    assert_eq!(count(&base), 2);
    let mut wide = base.clone();
    wide.precision.compute = crate::ir::DType::F32;
    assert_eq!(count(&wide), 0);
    let mut odd = base.clone();
    odd.model.options.experts.expert_ffn = Some(28);
    assert_eq!(count(&odd), 0);
    let mut many = base.clone();
    many.model.options.experts.experts = 520;
    assert_eq!(count(&many), 0);
    let modules = modules_and_params(&base).0;
    let apart = with_units(&base, &|m| {
        s_is_unit(&base, m) || modules[m.index()].path.ends_with("gate_up")
    });
    assert!(of_experts(&apart, &apart.forward).is_empty());
}
