//! Live storages and launches of torch 2.11 in measured steps of the 1b model (4 H200, FSDP2,
//! micro-batch 2).

use super::*;

/// Returns the storages alive after `at` launches of the kernel `name` in backward have started
/// (sizes with multiplicity).
fn alive_at(t: &Tape, name: &str) -> BTreeMap<u64, usize> {
    let mut alive: BTreeMap<StorageId, u64> = BTreeMap::new();
    for op in t.forward.iter().chain(&t.backward) {
        match *op {
            TapeOp::Alloc(s) => {
                alive.insert(s, t.storages[s.index()].bytes.0);
            }
            TapeOp::Free(s) => {
                alive.remove(&s);
            }
            TapeOp::Launch { kernel, .. } if t.kernels[kernel.index()].name == name => break,
            _ => {}
        }
    }
    let mut sizes = BTreeMap::new();
    for bytes in alive.into_values() {
        *sizes.entry(bytes).or_insert(0) += 1;
    }
    sizes
}

/// Blocks of the model that the allocator's trace shows alive at the peak, the backward of the
/// cross entropy: size and number. Left out: parameters, optimizer state, library workspaces, data,
/// and scalars of other steps.
const EAGER: &[(u64, usize)] = &[
    (4_202_692_608, 3),
    (134_217_728, 48 + 16),
    (33_554_432, 32 + 16 + 16 + 16 + 16 + 16 + 1 + 1),
    (8_388_608, 16 + 16),
    (1_048_576, 16),
    (262_144, 2),
    (32_768, 16 + 16 + 1),
    (8, 32),
    // The loss and its initial gradient.
    (4, 2),
];

#[test]
fn eager_peak_holds_what_was_measured() {
    let t = build(&measured_1b());
    let expected: BTreeMap<u64, usize> = EAGER.iter().copied().collect();
    assert_eq!(alive_at(&t, "log_softmax_backward"), expected);
}

#[test]
fn eager_step_launches_the_measured_kernels() {
    let t = build(&measured_1b());
    let mut all = launches(&t, &t.forward);
    for (name, n) in launches(&t, &t.backward) {
        *all.entry(name).or_insert(0) += n;
    }
    // Calls of two profiled steps, halved.
    assert_eq!(all["mm"], 678 / 2);
    assert_eq!(all["mul"], 608 / 2);
    assert_eq!(all["cat"], 128 / 2);
    assert_eq!(all["add"], (192 + 224) / 2);
    assert_eq!(all["silu"], 32 / 2);
    assert_eq!(all["silu_backward"], 32 / 2);
    assert_eq!(all["rms_norm"], 66 / 2);
    assert_eq!(all["rms_norm_backward"], 66 / 2);
    assert_eq!(all["rms_norm_weight_backward"], 66 / 2);
    assert_eq!(all["attention"], 32 / 2);
    assert_eq!(all["attention_backward"], 32 / 2);
    let class = |name: &str, class: KernelClass| {
        let of = |ops: &[TapeOp]| {
            ops.iter()
                .filter(|op| match op {
                    TapeOp::Launch { kernel, .. } => {
                        let k = &t.kernels[kernel.index()];
                        k.name == name && k.class == class
                    }
                    _ => false,
                })
                .count()
        };
        of(&t.forward) + of(&t.backward)
    };
    // Strided kernels of the rotary embedding, flat kernels elsewhere.
    assert_eq!(class("mul", KernelClass::Strided), 512 / 2);
    assert_eq!(class("mul", KernelClass::Pointwise), 96 / 2);
    assert_eq!(
        class("add", KernelClass::Pointwise) + class("sub", KernelClass::Pointwise),
        480 / 2
    );
    // Strided bf16 copies of a layer: attention output, and the gradients of query and key.
    let transposed = t
        .kernels
        .iter()
        .filter(|k| k.name == "copy" && k.class == KernelClass::Strided && k.dtype.size() == 2);
    assert_eq!(transposed.count(), 2, "query-sized and key-sized");
    assert_eq!(
        class("copy", KernelClass::Strided),
        96 / 2 + 3,
        "and three copies of ids and labels"
    );
}

#[test]
fn compiled_blocks_save_what_was_measured() {
    let mut s = measured_1b();
    s.compile.mode = CompileMode::Blocks;
    let t = build(&s);
    let mut expected: BTreeMap<u64, usize> = EAGER.iter().copied().collect();
    // The trace of the compiled run differs in one entry: silu's result is recomputed in backward.
    expected.insert(134_217_728, 16 + 16 + 16);
    assert_eq!(alive_at(&t, "log_softmax_backward"), expected);
}

/// `pointwise` drops the results of activations, and backward launches as many kernels as before:
/// no kernel makes them alone.
#[test]
fn pointwise_recompute_saves_activations_for_no_kernel() {
    let mut s = measured_1b();
    s.compile.mode = CompileMode::Blocks;
    let all = launches(&build(&s), &build(&s).backward);
    s.train.recompute = Recompute::Pointwise;
    let t = build(&s);
    let mut expected: BTreeMap<u64, usize> = EAGER.iter().copied().collect();
    // Of three times 16, the results of the two GEMMs before an activation remain.
    expected.insert(134_217_728, 16 + 16);
    assert_eq!(alive_at(&t, "log_softmax_backward"), expected);
    assert_eq!(launches(&t, &t.backward), all);
    // The backward kernel of the activation writes its result too: 3 reads, 3 writes.
    let back = t.kernels.iter().find(|k| k.name.contains("silu_backward"));
    let back = back.expect("activations are fused");
    assert_eq!(
        (back.read.0, back.written.0),
        (3 * 134_217_728, 3 * 134_217_728)
    );
}

/// The gradients of a tied embedding and head are storages of their own in eager PyTorch, whose
/// engine adds them into a third tensor (memory snapshot of Llama 3.2 1B, torch 2.11). This
/// project's engine adds the second into the first.
#[test]
fn gradients_of_tied_weights_are_added_as_measured() {
    let storages = |implementation, mode| {
        let mut s = tiny(Family::Llama);
        s.model.tie_embeddings = true;
        s.model.options.implementation = Some(implementation);
        s.compile.mode = mode;
        // No other tensor has as many elements.
        s.model.vocab = 101;
        let t = build(&s);
        let embedding = t.params.iter().find(|p| p.modules.len() > 1);
        let elements = embedding.expect("a tied parameter").numel();
        let mut sizes = t.backward.iter().filter_map(|op| match op {
            TapeOp::Alloc(s) => Some(t.storages[s.index()].bytes.0),
            _ => None,
        });
        let bytes = elements * s.precision.compute.size();
        sizes.by_ref().filter(|&b| b == bytes).count()
    };
    for implementation in [Implementation::Torchtitan, Implementation::Transformers] {
        for mode in [CompileMode::Off, CompileMode::Blocks] {
            assert_eq!(storages(implementation, mode), 2);
        }
        assert_eq!(storages(implementation, CompileMode::Regions), 1);
    }
    assert_eq!(storages(Implementation::Native, CompileMode::Off), 1);
}

/// A loss that is compiled on its own reads logits as they are: torch 2.11's Inductor allocates one
/// buffer in their type, that of the gradient, where eager code has three in float32 (FSDP2 on one
/// H200, `tests/data/compiled_loss_h200.csv`).
#[test]
fn a_compiled_loss_has_no_float32_logits() {
    let buffers = |mode, loss| {
        let mut s = tiny(Family::Llama);
        s.model.options.implementation = Some(Implementation::Torchtitan);
        s.compile.mode = mode;
        s.compile.loss = loss;
        // No other tensor has as many elements.
        s.model.vocab = 101;
        let t = build(&s);
        let rows = s.train.seq_len * s.train.micro_batch;
        let made = t.forward.iter().chain(&t.backward);
        let sizes: Vec<u64> = made
            .filter_map(|op| match op {
                TapeOp::Alloc(s) => Some(t.storages[s.index()].bytes.0),
                _ => None,
            })
            .collect();
        let of = |dtype: DType| {
            let bytes = rows * s.model.vocab * dtype.size();
            sizes.iter().filter(|&&b| b == bytes).count()
        };
        (of(DType::F32), of(DType::Bf16))
    };
    // The logits and their gradient; in eager code also the logits in float32, their logarithms
    // of probabilities and the gradients of both.
    for mode in [CompileMode::Off, CompileMode::Blocks] {
        assert_eq!(buffers(mode, true), (0, 2));
        assert!(buffers(mode, false).0 >= 3);
    }
    assert_eq!(buffers(CompileMode::Regions, true), (0, 2));
}
