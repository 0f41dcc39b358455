//! Rules for matmuls in 8 bits.

use super::{Checked, cannot};
use crate::config::{Float8Format, Float8Recipe, Scenario};
use crate::ir::DType;
use crate::models;
use crate::recipes::{self, FLOAT8_ALIGNMENT};
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;

/// GPUs whose tensor cores do not read 8-bit floats (compute capability below 8.9).
const WITHOUT_FLOAT8: [&str; 2] = ["a100-80", "a100-40"];

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let (p, key) = (&s.precision, Key::Float8Recipe);
    if !p.float8.is_on() {
        return Ok(());
    }
    let refuse = |others: &[Key], why: &str| Err(cannot(d, key, others, why, "\"none\""));
    if p.compute != DType::Bf16 {
        let why = format!("casts bf16 to 8 bits, but `param_dtype` is {}", p.compute);
        return refuse(&[Key::Compute], &why);
    }
    if s.mesh.tp > 1 {
        let why = "has no form for tensor parallelism: a scale would have to follow from the maximum over \
                   all ranks that divide the tensor";
        return refuse(&[Key::Tp], why);
    }
    if WITHOUT_FLOAT8.contains(&s.mesh.hardware.as_str()) {
        let why = format!(
            "needs tensor cores for 8-bit floats (compute capability 8.9 or later), which `{}` has not",
            s.mesh.hardware
        );
        return refuse(&[Key::Hardware], &why);
    }
    if p.float8.recipe == Float8Recipe::Rowwise && p.float8.grad == Float8Format::E5m2 {
        let message =
            "rowwise gradients in e5m2: runs with fine-grained scales and e5m2 gradients diverge";
        let error = d.conflict(&[Key::Float8Grad, key], message);
        return Err(error.with_help("set float8_grad = \"e4m3\""));
    }
    dimensions(s, d)
}

/// Refuses dimensions that 8-bit matmuls cannot have, and scenarios without such a matmul.
fn dimensions(s: &Scenario, d: &Document) -> Checked {
    let tokens = s.train.micro_batch * s.train.seq_len;
    if !tokens.is_multiple_of(FLOAT8_ALIGNMENT) {
        let message = format!(
            "a micro-batch has {tokens} tokens, but dimensions of 8-bit matmuls are multiples of {FLOAT8_ALIGNMENT}"
        );
        return Err(d.conflict(&[Key::SeqLen, Key::MicroBatch, Key::Float8Recipe], message));
    }
    let tree = models::declare(s, s.model.layers).tree;
    let recipe = recipes::of(&s.precision);
    let mut any = false;
    for p in &tree.params {
        if recipe.float8(p, tree.block_place(p)).is_none() {
            continue;
        }
        any = true;
        let odd = |n: &&u64| !n.is_multiple_of(FLOAT8_ALIGNMENT);
        if let Some(odd) = p.shape.iter().find(odd) {
            let module = p.name.strip_suffix(".weight").unwrap_or(&p.name);
            let message = format!(
                "the weight of `{module}` has a dimension of {odd}, but dimensions of 8-bit matmuls are \
                 multiples of {FLOAT8_ALIGNMENT}"
            );
            let error = d.conflict(&[Key::Float8Recipe], message);
            let help = format!("add \"{module}\" to float8_exclude to keep it in param_dtype");
            return Err(error.with_help(help));
        }
    }
    if any {
        return Ok(());
    }
    let message =
        "no matmul runs in 8 bits: the model has no linear layer in a block that is not excluded";
    let keys = [
        Key::Float8Exclude,
        Key::Float8FirstBf16,
        Key::Float8LastBf16,
        Key::Float8Recipe,
    ];
    Err(d.conflict(&keys, message))
}
