//! Decides what CUDA graphs capture from Megatron-LM's arguments.

use super::experts::has_experts;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::Lack;
use crate::table::{Fact, list, quoted, words_of};

/// Words of `--cuda-graph-modules` (formerly `--cuda-graph-scope`). The first five are scopes of
/// scenarios; models that arguments describe have no Mamba layers. The last three exist in older
/// versions: whole layers, iterations, and inference.
pub(crate) static CAPTURED: [&str; 9] = [
    "attn",
    "mlp",
    "moe_router",
    "moe_preprocess",
    "moe",
    "mamba",
    "full",
    "full_iteration",
    "full_iteration_inference",
];
const SCOPES: usize = 5;

const KEY: &str = "compile.cuda_graph";
const OFF: &str = "no CUDA graph is captured";
const COUNTS: &str = "the dispatcher's counts are read on the host, which a CUDA graph cannot contain: predicted without this graph";
const ADDRESSES: &str = "captured scopes need buffers at fixed addresses";

/// Sets the capture scopes.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn decide(draft: &mut Draft) -> Result<(), ConfigError> {
    let modules = draft.fact(Fact::CudaGraphModules);
    let kind = draft.fact(Fact::CudaGraph);
    let rows: Vec<usize> = kind.iter().chain(&modules).map(|g| g.row).collect();
    let given: Vec<&str> = words_of(modules.map_or(0, |m| m.value), &CAPTURED).collect();
    let inference = given == ["full_iteration_inference"];
    if kind.is_none_or(|kind| kind.value == 0) || inference {
        for row in rows {
            draft.none(row, Lack::Nothing, OFF);
        }
        return Ok(());
    }
    let iteration = kind.is_some_and(|kind| kind.value == 2) || given.contains(&"full_iteration");
    let waits = ["all_to_all", "deepep"]
        .iter()
        .any(|name| draft.value("moe.dispatcher") == Some(&quoted(name)));
    let scopes = match given.is_empty() || given.contains(&"full") {
        true => vec!["block"],
        false => scopes(draft, &given),
    };
    if waits && (iteration || scopes == ["block"] || scopes == ["moe"]) {
        for row in rows {
            draft.none(row, Lack::Accuracy, COUNTS);
        }
        return Ok(());
    }
    if iteration {
        return set(draft, &rows, &quoted("full_iteration"));
    }
    let kept: Vec<&str> = scopes
        .iter()
        .copied()
        .filter(|scope| !waits || *scope != "moe")
        .collect();
    if kept.is_empty() {
        for row in rows {
            draft.none(row, Lack::Nothing, "the model has none of these layers");
        }
        return Ok(());
    }
    if let Some(modules) = modules.filter(|_| kept.len() < scopes.len()) {
        draft.approximates(modules.row, COUNTS);
    }
    let kept: Vec<String> = kept.into_iter().map(str::to_owned).collect();
    set(draft, &rows, &list(&kept))?;
    fixed_addresses(draft);
    Ok(())
}

/// Returns the scopes that have work in the model.
fn scopes(draft: &Draft, given: &[&'static str]) -> Vec<&'static str> {
    let experts = has_experts(draft);
    let no_dense = draft.value("model.family") == Some(&quoted("moe"))
        && draft.value("model.dense_layers").is_none_or(|n| n == "0");
    let known = given
        .iter()
        .filter(|name| CAPTURED[..SCOPES].contains(name));
    known
        .copied()
        .filter(|scope| match *scope {
            "attn" => true,
            "mlp" => !no_dense,
            _ => experts,
        })
        .collect()
}

fn set(draft: &mut Draft, rows: &[usize], value: &str) -> Result<(), ConfigError> {
    for &row in rows {
        draft.set(row, KEY, value.to_owned())?;
    }
    persists(draft);
    Ok(())
}

/// Sets a double buffer, which is closest to the fixed slots that Megatron-FSDP gives to captured
/// buckets.
fn fixed_addresses(draft: &mut Draft) {
    if draft.value("fsdp.policy") == Some(&quoted("megatron")) {
        draft.assume("fsdp.allocator", quoted("double_buffer"), ADDRESSES);
        persists(draft);
    }
}

/// Lets units that do not fit a double buffer keep their own buffers.
fn persists(draft: &mut Draft) {
    if draft.value("fsdp.allocator") == Some(&quoted("double_buffer")) {
        draft.assume("fsdp.persist_on_alloc_fail", "true", ADDRESSES);
    }
}
