//! Matmuls in 8 bits within programs, and scenarios that ask for what there is not.

use super::{LLAMA, program};
use crate::check::check;
use crate::ir::{OpKind, Role};
use crate::scenario::parse;

const TENSORWISE: &str = "precision.float8_recipe=tensorwise";

#[test]
fn every_policy_and_mode_has_them() {
    for policy in ["native", "fsdp2", "megatron"] {
        for mode in ["off", "regions", "blocks", "full"] {
            if (policy, mode) == ("megatron", "full") {
                continue;
            }
            for recipe in ["tensorwise", "rowwise"] {
                for saved in ["compute", "float8"] {
                    let set = [
                        format!("fsdp.policy={policy}"),
                        format!("compile.mode={mode}"),
                        format!("precision.float8_recipe={recipe}"),
                        format!("precision.float8_saved={saved}"),
                    ];
                    let p = program(LLAMA, &set.each_ref().map(String::as_str));
                    let mut bodies = p.kernels.iter().flat_map(|k| &k.body);
                    assert!(bodies.any(|op| matches!(op.op, OpKind::ScaledGemm(_))));
                    let verdict = check(&p);
                    assert!(verdict.is_ok(), "{set:?}: {verdict:?}");
                }
            }
        }
    }
}

/// Weights, gradients and optimizer state are those without 8-bit matmuls.
#[test]
fn state_between_steps_stays_the_same() {
    let of = |set: &[&str]| super::at_rest(&program(LLAMA, set));
    let (base, cast) = (of(&[]), of(&[TENSORWISE]));
    for role in Role::ALL {
        assert_eq!(base.get(&role), cast.get(&role), "{role:?}");
    }
}

#[test]
fn what_they_cannot_be_is_refused_with_its_reason() {
    let fault = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        parse("test", LLAMA, &set).unwrap_err().to_string()
    };
    for (set, words) in [
        (
            &[TENSORWISE, "precision.param_dtype=f32"][..],
            "`float8_recipe` casts bf16 to 8 bits, but `param_dtype` is f32",
        ),
        (
            &[TENSORWISE, "mesh.hardware=a100-80"],
            "needs tensor cores for 8-bit floats (compute capability 8.9 or later), which `a100-80` has not",
        ),
        (
            &[TENSORWISE, "mesh.tp=2"],
            "`float8_recipe` has no form for tensor parallelism",
        ),
        (
            &[TENSORWISE, "model.ffn=168"],
            "the weight of `layers.0.mlp.w1` has a dimension of 168",
        ),
        (
            &[TENSORWISE, "train.seq_len=28", "train.micro_batch=1"],
            "a micro-batch has 28 tokens",
        ),
        (
            &[
                "precision.float8_recipe=rowwise",
                "precision.float8_grad=e5m2",
            ],
            "rowwise gradients in e5m2",
        ),
        (
            &[TENSORWISE, "precision.float8_exclude=[\"layer.*\"]"],
            "float8_exclude pattern `layer.*` matches no module",
        ),
        (
            &[TENSORWISE, "precision.float8_exclude=[\"layers.*\"]"],
            "no matmul runs in 8 bits",
        ),
        (
            &[TENSORWISE, "precision.float8_first_bf16=2"],
            "no matmul runs in 8 bits",
        ),
        (
            &["precision.float8_saved=float8"],
            "`float8_saved` has no effect here: no matmul runs in 8 bits",
        ),
        (
            &["precision.float8_recipe=tensor"],
            "`precision.float8_recipe` must be",
        ),
    ] {
        let found = fault(set);
        assert!(found.contains(words), "{set:?}: {found}");
    }
}
