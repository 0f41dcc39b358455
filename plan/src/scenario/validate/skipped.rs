//! Rules for blocks that some micro-batches skip.

use super::{Checked, cannot, refuse};
use crate::config::pattern::{glob, matches};
use crate::config::{CudaGraph, Scenario};
use crate::ir::{Module, ModuleKind};
use crate::models;
use crate::policies::spec::{fully_compiled, skips_blocks};
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::Value;
use crate::scenario::{ScenarioError, ScenarioErrorKind};

/// Refuses schedules without conditional blocks, patterns that match no block, and micro-batches
/// that a step does not have.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    if !skips_blocks(s) {
        return Ok(());
    }
    schedule(s, d)?;
    let given = d.value(Key::SkippedBlocks).and_then(Value::array);
    let modules = models::declare(s, s.model.layers).tree.modules;
    for table in given.unwrap_or_default() {
        let fields = table.table().unwrap_or_default();
        let field = |name: &str| fields.iter().find(|e| e.key == name).map(|e| &e.value);
        let Some(blocks) = field("blocks").and_then(|v| v.array()) else {
            let error = d.error(table.origin, "this table names no `blocks`");
            return Err(error.with_help("for example blocks = [\"layers.1\"]"));
        };
        for pattern in blocks {
            of_pattern(d, pattern, &modules)?;
        }
        let micro_batches = field("micro_batches").and_then(|v| v.array());
        for number in micro_batches.unwrap_or_default() {
            let accum = s.train.grad_accum;
            if number.integer().is_some_and(|n| n >= u64::from(accum)) {
                let message = format!(
                    "a step has no such micro-batch: it has {accum} (train.grad_accum), counted from 0"
                );
                return Err(d
                    .error(number.origin, message)
                    .of(ScenarioErrorKind::NoEffect));
            }
        }
    }
    Ok(())
}

/// Refuses schedules that always run every block.
fn schedule(s: &Scenario, d: &Document) -> Checked {
    let (t, f) = (&s.train, &s.fsdp);
    let refused = |key, why| Err(cannot(d, Key::SkippedBlocks, &[key], why, "[]"));
    if fully_compiled(s) {
        let why = "is impossible with compile mode full: its graph has every block";
        return refused(Key::Mode, why);
    }
    if s.compile.cuda_graph != CudaGraph::Off {
        let why =
            "is impossible with `cuda_graph`, whose replays launch the same kernels every time";
        return refused(Key::CudaGraph, why);
    }
    refuse(s, d, "train.skipped_blocks")?;
    let (key, why) = if t.joint_backward {
        (
            Key::JointBackward,
            "is not modeled with `joint_backward`, whose parts run the same blocks",
        )
    } else if t.no_grad_forwards > 0 {
        (
            Key::NoGradForwards,
            "is not modeled with `no_grad_forwards`, which run every block",
        )
    } else if t.activation_offload {
        (
            Key::ActivationOffload,
            "is not modeled with `activation_offload`, which moves what every micro-batch saves",
        )
    } else if f.prefetch_next_step > 0 {
        (
            Key::PrefetchNextStep,
            "is not modeled with `prefetch_next_step`, whose units are those of every forward",
        )
    } else if s.mesh.tp > 1 {
        (
            Key::Tp,
            "is not modeled with `tp`, which divides pairs of layers",
        )
    } else {
        return Ok(());
    };
    refused(key, why)
}

/// Refuses a pattern that matches no block.
fn of_pattern(d: &Document, pattern: &Value, modules: &[Module]) -> Result<(), ScenarioError> {
    let text = pattern.str().unwrap_or_default();
    glob(text).map_err(|message| d.error(pattern.origin, message))?;
    let is_block = |m: &&Module| m.kind == ModuleKind::Block && m.path.starts_with("layers.");
    let blocks = || modules.iter().filter(is_block);
    if blocks().any(|m| matches(text, &m.path)) {
        return Ok(());
    }
    let help = match (blocks().next(), blocks().next_back()) {
        (Some(first), Some(last)) => format!("blocks: {} to {}", first.path, last.path),
        _ => "the model has no blocks".to_owned(),
    };
    let error = d.error(pattern.origin, format!("`{text}` matches no block"));
    Err(error.with_help(help))
}
