//! Decides the dtypes.

use super::engine::Kind;
use crate::draft::{Draft, Given};
use crate::error::ConfigError;
use crate::row::Lack;
use crate::table::{Dtype, Fact, Float8Scaling, Format, quoted};

/// Sets the keys of `[precision]`.
pub(super) fn decide(
    draft: &mut Draft,
    kind: Kind,
    formats: &[&'static Format],
) -> Result<(), ConfigError> {
    let accelerated = formats.iter().any(|f| f.accelerated);
    let mixed = draft.mixed.filter(|m| m.value != Dtype::F32);
    let weights = draft.weights;
    let low_weights = weights.filter(|w| w.value != Dtype::F32);
    let keeps_weights = super::frameworks::keeps_weights(draft, formats);
    let (row, dtype) = match (mixed, low_weights) {
        (Some(mixed), _) => (mixed.row, mixed.value),
        (None, Some(weights)) => (weights.row, weights.value),
        (None, None) => {
            let given = draft.mixed.or(weights);
            match given {
                Some(given) => draft.set(given.row, "precision.param_dtype", quoted("f32"))?,
                None if accelerated => {
                    draft.assume(
                        "precision.param_dtype",
                        quoted("f32"),
                        "no mixed precision is given",
                    );
                }
                None => {
                    draft.assume(
                        "precision.param_dtype",
                        quoted("bf16"),
                        "the framework's default",
                    );
                }
            }
            return Ok(());
        }
    };
    draft.set(row, "precision.param_dtype", quoted(dtype.name()))?;
    match kind {
        // Weights are float32 copies of their shards; gradients have the compute dtype.
        Kind::DeepSpeed => {
            let why = "DeepSpeed's default";
            draft.assume("precision.main_grads", quoted(dtype.name()), why);
            draft.assume("precision.reduce_dtype", quoted(dtype.name()), why);
        }
        // Accelerate converts parameters to float32 under mixed precision, unless the framework
        // replaces that function.
        Kind::Fsdp
            if mixed.is_some() && (accelerated && !keeps_weights || low_weights.is_none()) =>
        {
            if accelerated {
                draft.assume(
                    "precision.reduce_dtype",
                    quoted(dtype.name()),
                    "Accelerate reduces in the type of computation",
                );
            }
        }
        // Without FSDP, or without mixed precision, parameters keep the dtype in which they are
        // loaded.
        Kind::Fsdp | Kind::Ddp => {
            // PEFT keeps adapters in float32 (`autocast_adapter_dtype`).
            let adapters = accelerated && draft.value("lora.r").is_some();
            if let Some(weights) = low_weights.filter(|_| !adapters) {
                let f32 = kind == Kind::Fsdp && formats.iter().any(|f| f.reduces_in_f32);
                in_low_precision(draft, weights, f32)?;
            }
        }
        // `validate_args` turns on `accumulate_allreduce_grads_in_fp32` for bfloat16.
        Kind::MegatronOptimizer => {
            let in_f32 = draft.fact(Fact::Float32Gradients);
            let (dtype, why) = match (dtype, in_f32) {
                (Dtype::Bf16, _) => (Dtype::F32, "Megatron-LM's default with --bf16"),
                (_, Some(_)) => (Dtype::F32, "--accumulate-allreduce-grads-in-fp32"),
                (dtype, None) => (dtype, "Megatron-LM's default"),
            };
            draft.assume("precision.main_grads", quoted(dtype.name()), why);
        }
        // Megatron-FSDP has its own options.
        Kind::Megatron => {}
    }
    Ok(())
}

/// Keeps parameters, gradients and moments in the dtype of the weights, unless the optimizer has
/// float32 copies of the weights. Gradients are reduced in that dtype, or in float32.
fn in_low_precision(
    draft: &mut Draft,
    weights: Given<Dtype>,
    reduces_in_f32: bool,
) -> Result<(), ConfigError> {
    const WHY: &str = "gradients and moments have the type of the weights";
    let name = quoted(weights.value.name());
    if reduces_in_f32 {
        let why = "the framework's default";
        draft.assume("precision.reduce_dtype", quoted("f32"), why);
    }
    for key in ["precision.main_grads", "precision.reduce_dtype"] {
        draft.assume(key, name.clone(), WHY);
    }
    if draft.value(MAIN_PARAMS).is_some() {
        return Ok(());
    }
    draft.set(weights.row, MAIN_PARAMS, quoted("none"))?;
    draft.assume("precision.moments", name, WHY);
    Ok(())
}

const MAIN_PARAMS: &str = "precision.main_params";

/// Sets whether ranks gather weights in 8 bits, if this is modeled.
fn float8_gather(draft: &mut Draft, recipe: &str) -> Result<(), ConfigError> {
    let kept = draft.fact(Fact::Float8Transposes);
    let kept = kept.filter(|k| k.value == 1);
    let Some(given) = draft.fact(Fact::Float8Gather).filter(|g| g.value == 1) else {
        if let Some(kept) = kept {
            let why = "weights are gathered in 16 bits";
            draft.none(kept.row, Lack::Nothing, why);
        }
        return Ok(());
    };
    let is = |key: &str, values: &[&str]| {
        let found = draft.value(key);
        found.is_some_and(|found| values.iter().any(|v| quoted(v) == found))
    };
    let whole = |key: &str, value: &str| draft.value(key).is_none() || is(key, &[value]);
    let policies: &[&str] = match recipe {
        "tensorwise" => &["fsdp2", "megatron"],
        // torchao's MX layers have no 8-bit gather.
        "mxfp8" => &["megatron"],
        _ => &[],
    };
    let modeled = is("fsdp.policy", policies)
        && whole("fsdp.strategy", "optim_grads_params")
        && draft.value("mesh.dp_shard") != Some("1")
        && draft.value("fsdp.offload").is_none()
        && !is("precision.main_params", &["none"]);
    if !modeled {
        let why = "gathers are predicted in 16 bits";
        draft.none(given.row, Lack::Accuracy, why);
        if let Some(kept) = kept {
            let why = "transposed codes of weights are predicted as made in each backward";
            draft.none(kept.row, Lack::Accuracy, why);
        }
        return Ok(());
    }
    let torchao = is("fsdp.policy", &["fsdp2"]);
    draft.set(given.row, "precision.float8_all_gather", "true".to_owned())?;
    let ahead = draft.fact(Fact::Float8Ahead).is_some_and(|a| a.value == 1);
    if torchao && !ahead {
        draft.approximates(
            given.row,
            "scales are predicted as computed after the optimizer, all at once",
        );
    }
    if recipe == "mxfp8" {
        let why =
            "shards are predicted to hold whole groups of 32 rows; Megatron-FSDP splits these";
        draft.approximates(given.row, why);
        if let Some(kept) = kept {
            let why = "backward gathers MXFP8 codes by columns, so no transposed codes are made";
            draft.none(kept.row, Lack::Nothing, why);
        }
    } else if let Some(kept) = kept {
        let key = "fsdp.keep_fp8_transpose_cache";
        draft.set(kept.row, key, "true".to_owned())?;
    }
    Ok(())
}

/// Sets the keys of 8-bit matmuls. Scenarios support these for bf16 and without tensor parallelism.
pub(super) fn float8(draft: &mut Draft) -> Result<(), ConfigError> {
    const KEYS: [&str; 3] = [
        "precision.float8_grad",
        "precision.float8_first_bf16",
        "precision.float8_last_bf16",
    ];
    let given = draft.fact(Fact::Float8).filter(|on| on.value == 1);
    let divided = draft.fact(Fact::Tensor).is_some_and(|t| t.value > 1);
    let bf16 = draft.is("precision.param_dtype", "bf16");
    let Some(on) = given.filter(|_| bf16 && !divided) else {
        for key in KEYS.into_iter().chain(["precision.float8_exclude"]) {
            draft.unset(key, Lack::Nothing, "no matmul is predicted in 8 bits");
        }
        if let Some(on) = given {
            let why = if divided {
                "FP8 is not modeled with tensor parallelism: matmuls are predicted in 16 bits"
            } else {
                "FP8 is modeled for bf16 only"
            };
            draft.none(on.row, Lack::Accuracy, why);
        }
        for fact in [Fact::Float8Gather, Fact::Float8Transposes] {
            if let Some(given) = draft.fact(fact) {
                let why = "no matmul is predicted in 8 bits";
                draft.none(given.row, Lack::Nothing, why);
            }
        }
        return Ok(());
    };
    let given = draft.fact(Fact::Float8Scaling);
    let scaling = Float8Scaling::of(given.map(|g| g.value));
    let rows = [Some(on.row), given.map(|g| g.row)];
    let hardware = draft.value("mesh.hardware").unwrap_or_default();
    let is = |architectures: &[&str]| {
        let name = hardware.trim_matches('"');
        architectures.iter().any(|a| name.starts_with(a))
    };
    let (predicted, why) = match scaling {
        Float8Scaling::Mx if is(&["h100", "h200"]) => (
            Float8Scaling::Tensor,
            Some("this GPU has no MXFP8: predicted with one scale per tensor"),
        ),
        // Transformer Engine emulates block scaling on these GPUs.
        Float8Scaling::Block if is(&["b200"]) => (
            Float8Scaling::Mx,
            Some("this GPU's tensor cores have MXFP8 instead of blocks of 128, which is predicted"),
        ),
        scaling => (scaling, None),
    };
    let recipe = predicted.recipe();
    for row in rows.into_iter().flatten() {
        draft.set(row, "precision.float8_recipe", quoted(recipe))?;
        if let Some(why) = why {
            draft.approximates(row, why);
        }
    }
    float8_gather(draft, recipe)?;
    for key in KEYS.into_iter().skip(1) {
        if draft.fact(Fact::Float8InnerBlocks).is_some() {
            draft.assume(key, "1", "Megatron-LM's default");
        } else {
            draft.unset(key, Lack::Nothing, "without --first-last-layers-bf16");
        }
    }
    Ok(())
}
