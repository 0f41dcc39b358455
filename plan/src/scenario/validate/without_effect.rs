//! Keys without effect.

use super::Checked;
use crate::config::{CompileMode, Loss, Recompute, RecomputeLayers, Scenario};
use crate::policies::{self, spec::WithoutEffect};
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::read;
use crate::scenario::value::Value;

const ONE_RANK: &str = "with dp_shard = 1, nothing is gathered or reduced";
const ONE_BATCH: &str = "with train.grad_accum = 1, the only micro-batch is also the last";
const BUCKETS: &str = "only compile mode full buckets collectives";

/// Keys that have no effect whatever the policy.
const ROWS: &[WithoutEffect] = &[
    WithoutEffect {
        key: "fsdp.reshard_after_backward",
        because_of: "train.grad_accum",
        when: |s| s.train.grad_accum == 1 && !s.fsdp.reshard_after_backward,
        why: ONE_BATCH,
    },
    WithoutEffect {
        key: "fsdp.gradient_sync",
        because_of: "train.grad_accum",
        when: |s| {
            let default = s.fsdp.policy.spec().defaults.gradient_sync;
            s.train.grad_accum == 1 && s.fsdp.gradient_sync != default
        },
        why: ONE_BATCH,
    },
    WithoutEffect {
        key: "fsdp.prefetch_next_step",
        because_of: "mesh.dp_shard",
        when: |s| s.mesh.dp_shard == 1 && s.fsdp.prefetch_next_step > 0,
        why: ONE_RANK,
    },
    WithoutEffect {
        key: "fsdp.copy_engine_gather",
        because_of: "mesh.dp_shard",
        when: |s| s.mesh.dp_shard == 1 && s.fsdp.copy_engine_gather,
        why: ONE_RANK,
    },
    WithoutEffect {
        key: "fsdp.copy_engine_reduce",
        because_of: "mesh.dp_shard",
        when: |s| s.mesh.dp_shard == 1 && s.fsdp.copy_engine_reduce,
        why: ONE_RANK,
    },
    WithoutEffect {
        key: "fsdp.sum_in_optimizer",
        because_of: "mesh.dp_shard",
        when: |s| s.mesh.dp_shard == 1 && s.fsdp.sum_in_optimizer,
        why: ONE_RANK,
    },
    WithoutEffect {
        key: "train.recompute_layers",
        because_of: "train.recompute",
        when: |s| {
            let all = s.train.recompute_layers == RecomputeLayers::All;
            s.train.recompute == Recompute::None && !all
        },
        why: "nothing is recomputed",
    },
    WithoutEffect {
        key: "train.loss_chunk_rows",
        because_of: "train.loss",
        when: |s| {
            let rows = s.train.loss_chunk_rows;
            s.train.loss == Loss::Materialized && rows != read::LOSS_CHUNK_ROWS
        },
        why: "only the chunked loss has chunks",
    },
    WithoutEffect {
        key: "compile.bucket_bytes",
        because_of: "compile.mode",
        when: |s| {
            let bytes = s.compile.bucket_bytes;
            s.compile.mode != CompileMode::Full && bytes != read::BUCKET_BYTES
        },
        why: BUCKETS,
    },
    WithoutEffect {
        key: "compile.max_inflight_bytes",
        because_of: "compile.mode",
        when: |s| {
            let bytes = s.compile.max_inflight_bytes;
            s.compile.mode != CompileMode::Full && bytes != read::MAX_INFLIGHT_BYTES
        },
        why: BUCKETS,
    },
    WithoutEffect {
        key: "compile.memory_budget",
        because_of: "compile.mode",
        when: |s| {
            let budget = s.compile.memory_budget;
            s.compile.mode != CompileMode::Full && budget != read::MEMORY_BUDGET
        },
        why: BUCKETS,
    },
];

/// Rejects keys that have no effect. Exempt: keys inherited via `extends` from a base shared
/// between policies, modes or meshes, that is, where a later text than the key's own made the
/// choice.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let schedule = policies::rules(s).rev().flat_map(|r| r.without_effect);
    for row in schedule.chain(ROWS).filter(|row| (row.when)(s)) {
        if let (Some(key), Some(by)) = (Key::at(row.key), Key::at(row.because_of)) {
            reject(d, key, by, row.why)?;
        }
    }
    cublas_workspace(s, d)
}

/// The resolved size is 0 where there is no workspace, so that the text has to be asked.
fn cublas_workspace(s: &Scenario, d: &Document) -> Checked {
    let key = Key::CublasWorkspaceBytes;
    let bytes = d.value(key).and_then(Value::bytes);
    if bytes.is_none_or(|bytes| bytes == 0) {
        return Ok(());
    }
    if let Some(why) = s.fsdp.policy.spec().engine.own_workspaces {
        reject(d, key, Key::Policy, why)?;
    }
    if s.mesh.hardware == "cpu" {
        reject(d, key, Key::Hardware, "hardware `cpu` has no cuBLAS")?;
    }
    Ok(())
}

fn reject(d: &Document, key: Key, by: Key, why: &str) -> Checked {
    if !d.says(key) || d.layer(by) > d.layer(key) {
        return Ok(());
    }
    let message = format!("`{}` has no effect here: {why}", key.info().key);
    Err(d
        .conflict(&[key, by], message)
        .with_help(format!("leave it out, or change {}", by.path())))
}
