//! Kernels between the matmuls of experts that compute used rows only.

use super::*;

fn load(set: &[&str]) -> Scenario {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    crate::scenario::load("small-moe-ep".as_ref(), &set).unwrap()
}

/// Returns what kernels between the matmuls of experts read and write in forward and backward, with
/// their FLOPs: those with an operation that only they have. (The shared expert has no rows that
/// are scaled, nor has it their number.)
fn between(t: &Tape) -> Vec<(bool, [u64; 3])> {
    let kernels = performed(t, &t.forward).chain(performed(t, &t.backward));
    let scales = |k: &Kernel| {
        let scaled = |op: &BodyOp| matches!(op.op, OpKind::ScaleRows | OpKind::RowDot);
        k.body.iter().any(scaled)
    };
    kernels
        .filter(|(k, ..)| scales(k))
        .map(|(k, ..)| {
            // Two pairs of ranks have four experts each: five offsets.
            let offsets = if k.used_rows.is_some() { 5 * 8 } else { 0 };
            let numbers = [k.read.0 - offsets, k.written.0, k.flops.0];
            (k.used_rows.is_some(), numbers)
        })
        .collect()
}

/// On average, ranks that divide experts compute as many rows as ranks that have all, of twice as
/// many: so do the kernels between matmuls, in code of our own.
#[test]
fn kernels_between_matmuls_of_experts_compute_used_rows() {
    for mode in ["off", "blocks", "regions", "full"] {
        let mode = format!("compile.mode={mode}");
        for more in [
            &[][..],
            &["train.recompute=full"],
            &["train.recompute=selective"],
        ] {
            let of = |set: &[&str]| between(&build(&load(&[&[&mode[..]], more, set].concat())));
            let divided = of(&[]);
            let all = of(&["mesh.ep=1"]);
            assert!(!divided.is_empty());
            assert!(
                divided.iter().all(|k| k.0) && all.iter().all(|k| !k.0),
                "{mode} {more:?}"
            );
            let numbers = |of: &[(bool, [u64; 3])]| of.iter().map(|k| k.1).collect::<Vec<_>>();
            assert_eq!(numbers(&divided), numbers(&all), "{mode} {more:?}");
        }
    }
    let t = build(&load(&["fsdp.policy=fsdp2", "compile.mode=blocks"]));
    assert!(t.kernels.iter().all(|k| k.used_rows.is_none()));
}

/// Casts, their transposes and the maxima that they need are between matmuls, too.
#[test]
fn casts_of_experts_compute_used_rows() {
    let sizes = [
        "model.hidden=32",
        "model.ffn=96",
        "model.expert_ffn=48",
        "model.shared_expert_ffn=48",
        "train.seq_len=24",
        "precision.float8_recipe=tensorwise",
        "precision.float8_experts=true",
        "compile.mode=blocks",
    ];
    let s = load(&sizes);
    let t = build(&s);
    let rows = s.train.micro_batch * s.train.seq_len * s.model.options.experts.top_k * 2;
    let mut found = [0; 2];
    for (kernel, ..) in performed(&t, &t.forward).chain(performed(&t, &t.backward)) {
        let of_experts = |slot: &Slot| {
            let cols = slot.shape.last().copied().unwrap_or(1);
            slot.shape.len() == 2 && slot.shape.iter().product::<u64>() == rows * cols
        };
        for op in &kernel.body {
            let n = match op.op {
                OpKind::RowAmax => 0,
                OpKind::Float8Cast => 1,
                _ => continue,
            };
            if of_experts(&op.inputs[0]) {
                found[n] += 1;
                assert!(kernel.used_rows.is_some(), "{}", kernel.name);
            }
        }
    }
    // Two layers, two matmuls each: of inputs and gradients; codes, and transposed ones.
    assert_eq!(found, [8, 16]);
}

/// Two ranks with 96 choices each share the rows of a rank: 192 of them in the worst case, and a
/// factor of 96 otherwise. Two matmuls of a layer have them, and both kinds of gradients.
#[test]
fn experts_have_the_rows_of_the_factor() {
    let rows = |set: &[&str]| {
        let s = load(set);
        assert_eq!(s.train.micro_batch * s.train.seq_len, 48);
        let t = build(&s);
        let matmuls = |op: &BodyOp| match op.op {
            OpKind::GroupedGemm(_) | OpKind::GroupedGemmWeightGrad(_) => {
                Some(op.inputs[0].shape[0])
            }
            _ => None,
        };
        let mut all: Vec<u64> = (t.kernels.iter().flat_map(|k| &k.body))
            .filter_map(matmuls)
            .collect();
        all.dedup();
        all
    };
    for dispatcher in ["moe.dispatcher=gather", "moe.dispatcher=peer"] {
        let of = |factor: &str| rows(&[dispatcher, &format!("moe.capacity_factor={factor}")]);
        assert_eq!(rows(&[dispatcher]), [192]);
        assert_eq!(of("worst"), [192]);
        assert_eq!(of("2"), [192]);
        assert_eq!(of("1.25"), [120]);
        assert_eq!(of("1.001"), [97]);
        assert_eq!(of("0.5"), [48]);
    }
}

/// Copies of tokens to rows of experts write as many on average, and sums of rows read as many, as
/// those of ranks with all experts, however many rows are reserved.
#[test]
fn tokens_are_moved_to_used_rows() {
    let moved = |set: &[&str]| -> Vec<u64> {
        let t = build(&load(set));
        let all = performed(&t, &t.forward).chain(performed(&t, &t.backward));
        let bytes = all.filter_map(|(k, ..)| match k.body.first()?.op {
            OpKind::Permute(_) => Some(k.written.0),
            OpKind::Unpermute(_) => {
                let positions = k.body[0].inputs[1].shape.iter().product::<u64>();
                Some(k.read.0 - 8 * positions)
            }
            _ => None,
        });
        bytes.collect()
    };
    let all = moved(&["mesh.ep=1"]);
    assert!(all.len() >= 8, "{all:?}");
    for factor in ["worst", "1.25", "1"] {
        let factor = format!("moe.capacity_factor={factor}");
        assert_eq!(moved(&[&factor]), all, "{factor}");
    }
}
