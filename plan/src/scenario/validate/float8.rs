//! Rules for 8-bit matmuls.

use super::param_groups::hint;
use super::{Checked, cannot, fsdp};
use crate::config::pattern::glob;
use crate::config::{Atomic, Float8Format, Float8Recipe, PolicyKind, Reshard, Scenario};
use crate::ir::{DType, Param, ScaleBlock};
use crate::models;
use crate::policies::spec::fully_compiled;
use crate::recipes::{self, FLOAT8_ALIGNMENT, Float8Linear};
use crate::scenario::error::ScenarioError;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::Value;

/// GPUs whose tensor cores do not read 8-bit floats (compute capability below 8.9).
const WITHOUT_FLOAT8: [&str; 2] = ["a100-80", "a100-40"];

/// Beginnings of the names of profiles of GPUs with microscaling formats (compute capability 10.0).
const BLACKWELL: &[&str] = &["b200"];

/// Those of GPUs without.
const BEFORE_BLACKWELL: &[&str] = &["h100", "h200"];

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
        let why = "does not support tensor parallelism: a scale would need the maximum over all ranks that \
                   divide the tensor";
        return refuse(&[Key::Tp], why);
    }
    if WITHOUT_FLOAT8.contains(&s.mesh.hardware.as_str()) {
        let why = format!(
            "needs tensor cores for 8-bit floats (compute capability 8.9 or later), which `{}` does not have",
            s.mesh.hardware
        );
        return refuse(&[Key::Hardware], &why);
    }
    let gpu = s.mesh.hardware.as_str();
    let of = |architectures: &[&str]| architectures.iter().any(|a| gpu.starts_with(a));
    match p.float8.recipe {
        Float8Recipe::Blockwise if of(BLACKWELL) => {
            let why = "multiplies scales of 128 elements within matmuls, which `b200`'s tensor cores do not: they have \
                       mxfp8";
            return refuse(&[Key::Hardware], why);
        }
        Float8Recipe::Mxfp8 if of(BEFORE_BLACKWELL) => {
            let why = format!(
                "\"mxfp8\" needs tensor cores that multiply scales of 32 elements (compute capability 10.0), which \
                 `{gpu}` does not have"
            );
            return refuse(&[Key::Hardware], &why);
        }
        _ => {}
    }
    if p.float8.recipe != Float8Recipe::Tensorwise && p.float8.grad == Float8Format::E5m2 {
        let message = format!(
            "{} gradients in e5m2: runs with fine-grained scales and e5m2 gradients diverge",
            p.float8.recipe.name()
        );
        let error = d.conflict(&[Key::Float8Grad, key], &message);
        return Err(error.with_help("set float8_grad = \"e4m3\""));
    }
    all_gather(s, d)?;
    if s.fsdp.keep_fp8_transpose_cache && !p.float8.all_gather {
        let why =
            "keeps transposed codes of gathered weights, but weights are gathered in param_dtype";
        let keys = [Key::Float8AllGather];
        return Err(cannot(d, Key::KeepFp8TransposeCache, &keys, why, "false"));
    }
    if s.fsdp.keep_fp8_transpose_cache && p.float8.recipe == Float8Recipe::Mxfp8 {
        let why = "keeps transposed codes of gathered weights, but with recipe mxfp8 backward gathers codes by columns";
        let keys = [Key::Float8Recipe];
        return Err(cannot(d, Key::KeepFp8TransposeCache, &keys, why, "false"));
    }
    experts(s, d)?;
    dimensions(s, d)
}

/// Refuses 8-bit matmuls of experts with scales that grouped matmuls do not have.
fn experts(s: &Scenario, d: &Document) -> Checked {
    let of = &s.precision.float8;
    if !of.experts || of.recipe == Float8Recipe::Tensorwise {
        return Ok(());
    }
    let why = "needs recipe tensorwise: gradients of experts sum over their own rows, so rows and blocks of the \
               transpose would have scales of one expert";
    Err(cannot(
        d,
        Key::Float8Experts,
        &[Key::Float8Recipe],
        why,
        "false",
    ))
}

/// Refuses 8-bit gathers without sharded main weights, or whose scales belong to parts of a weight
/// that ranks do not hold as a whole.
fn all_gather(s: &Scenario, d: &Document) -> Checked {
    let (p, f) = (&s.precision, &s.fsdp);
    if !p.float8.all_gather {
        return Ok(());
    }
    let fsdp2 = f.policy == PolicyKind::Fsdp2;
    let built = matches!(f.policy, PolicyKind::Native | PolicyKind::Megatron) || fsdp2;
    let (keys, why): (&[Key], _) = if !built || fully_compiled(s) {
        (
            &[Key::Policy, Key::Mode],
            "is built for policies native, fsdp2 and megatron, and compile modes off, regions and blocks",
        )
    } else if fsdp2 && matches!(f.reshard_after_forward, Reshard::Group(_)) {
        (
            &[Key::Reshard],
            "gathers from shards only: torch `fully_shard` cannot reshard tensor subclasses to a smaller group",
        )
    } else if s.mesh.dp_shard == 1 {
        (
            &[Key::DpShard],
            "gathers shards of weights, but `mesh.dp_shard` is 1",
        )
    } else if p.float8.recipe == Float8Recipe::Rowwise {
        (
            &[Key::Float8Recipe],
            "gathers codes with one scale per tensor or per block; a column of a weight, which is a row of its \
             transpose, belongs to all ranks, so its scale would need their maxima",
        )
    } else if let Some(refused) = blocks(s) {
        refused
    } else if let Some(refused) = fsdp::no_shards_to_cast(s) {
        refused
    } else {
        return Ok(());
    };
    Err(cannot(d, Key::Float8AllGather, keys, why, "false"))
}

/// Returns why gathers cannot have a scale per block, with the keys that decide; `None` if they
/// can, or have one scale per tensor.
fn blocks(s: &Scenario) -> Option<(&'static [Key], &'static str)> {
    let f = &s.fsdp;
    let block = recipes::gathered_block(&s.precision.float8)?;
    let mx = block == ScaleBlock::MX;
    let split = match f.atomic {
        Atomic::Block(rows) => !u64::from(rows).is_multiple_of(block.rows_of_both()),
        _ => false,
    };
    let of_policy: &[Key] = &[Key::Float8Recipe, Key::Policy];
    let refused: (&[Key], _) = if f.policy == PolicyKind::Fsdp2 && mx {
        (
            of_policy,
            "gathers MXFP8 codes with policies native and megatron only: torchao's MX linear layers have no 8-bit \
             gather, and cast after a gather in bf16",
        )
    } else if f.policy != PolicyKind::Native && !mx {
        (
            of_policy,
            "gathers blocks with policy native only: shards of other engines split blocks, whose scales would need \
             the maxima of several ranks",
        )
    } else if matches!(f.reshard_after_forward, Reshard::Group(_)) {
        (
            &[Key::Float8Recipe, Key::Reshard],
            "gathers scales of blocks from shards only, but `reshard_after_forward` keeps slices",
        )
    } else if split {
        let why = match mx {
            true => "gathers blocks of 32 rows, but `fsdp.atomic` lets shards split them",
            false => "gathers blocks of 128 rows, but `fsdp.atomic` lets shards split them",
        };
        (&[Key::Float8Recipe, Key::Atomic], why)
    } else {
        return None;
    };
    Some(refused)
}

/// Refuses invalid globs of `float8_exclude`, and globs that match no linear layer: a stale name
/// would leave in 8 bits the layer that it should exclude.
fn excluded(d: &Document, params: &[Param]) -> Checked {
    let globs = d.value(Key::Float8Exclude).and_then(Value::array);
    for pattern in globs.unwrap_or_default() {
        let text = pattern.str().unwrap_or_default();
        glob(text).map_err(|message| d.error(pattern.origin, message))?;
        if !params.iter().any(|p| recipes::names_layer(text, p)) {
            let matrices = params.iter();
            let matrices = matrices.filter(|p| p.shape.len() == 2 || recipes::are_experts(p));
            let names = matrices.filter_map(|p| p.name.strip_suffix(".weight"));
            let names: Vec<String> = names.map(str::to_owned).collect();
            let message = format!("float8_exclude pattern `{text}` matches no linear layer");
            let error = d.error(pattern.origin, message);
            return Err(error.with_help(hint(text, &names, "linear layers")));
        }
    }
    Ok(())
}

/// Returns the error for a weight that is gathered with a scale per block and has blocks of
/// different sizes: in a flat buffer, smaller blocks would not have separate places, and the
/// transpose would have other blocks.
fn split_blocks(
    s: &Scenario,
    d: &Document,
    p: &Param,
    linear: &Float8Linear,
) -> Option<ScenarioError> {
    let block = recipes::gathered_block(&s.precision.float8).filter(|_| linear.gathered)?;
    let sides = [block.rows_of_both(); 2];
    let odd = p.shape.iter().zip(sides);
    let (odd, side) = odd.into_iter().find(|(n, side)| !n.is_multiple_of(*side))?;
    let module = p.name.strip_suffix(".weight").unwrap_or(&p.name);
    let message = format!(
        "gathers of blocks need dimensions that are multiples of {side}, but the weight of `{module}` has one of {odd}"
    );
    let error = d.conflict(&[Key::Float8AllGather, Key::Float8Recipe], message);
    Some(error.with_help(format!(
        "add \"{module}\" to float8_exclude, or set float8_all_gather = false"
    )))
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
    excluded(d, &tree.params)?;
    if s.precision.float8.experts && !tree.params.iter().any(recipes::are_experts) {
        let why = "needs a model with experts";
        return Err(cannot(d, Key::Float8Experts, &[Key::Family], why, "false"));
    }
    let recipe = recipes::of(&s.precision);
    let mut any = false;
    for p in &tree.params {
        let Some(linear) = recipe.float8(p, tree.block_place(p)) else {
            continue;
        };
        any = true;
        let (rows, ranks) = (p.shape[0], u64::from(s.mesh.dp_shard));
        if linear.gathered && s.fsdp.policy == PolicyKind::Fsdp2 && !rows.is_multiple_of(ranks) {
            let message = format!(
                "policy fsdp2 gathers even shards of tensor subclasses only, but `{}` has {rows} rows for {ranks} ranks",
                p.name
            );
            return Err(d.conflict(&[Key::Float8AllGather, Key::DpShard], message));
        }
        if let Some(error) = split_blocks(s, d, p, &linear) {
            return Err(error);
        }
        let odd = |n: &&u64| !n.is_multiple_of(FLOAT8_ALIGNMENT);
        // Of experts, those of a matrix.
        if let Some(odd) = p.shape.iter().rev().take(2).find(odd) {
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
