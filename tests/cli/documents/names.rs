//! The table with the names that PyTorch, Megatron and Hugging Face use.

use super::read;
use crate::shardlab;
use std::collections::BTreeSet;

const PAGE: &str = "docs/reference/pytorch-names.md";

/// Returns the cells of the page's tables, row by row.
fn rows() -> Vec<Vec<String>> {
    read(PAGE)
        .lines()
        .filter(|l| l.starts_with("| ") && !l.starts_with("| ---"))
        .map(|l| {
            let inner = l.trim_matches('|').replace("\\|", "\u{1}");
            let cells = inner.split('|');
            cells.map(|c| c.trim().replace('\u{1}', "|")).collect()
        })
        .collect()
}

/// Returns the texts between backticks.
fn code(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Returns the sections and keys of the schema.
fn keys() -> BTreeSet<String> {
    let page = read("docs/reference/scenario-keys.md");
    let mut keys = BTreeSet::new();
    let mut section = "";
    for line in page.lines() {
        if let Some(name) = line.strip_prefix("## `[") {
            section = name.strip_suffix("]`").unwrap();
        } else if let Some(rest) = line.strip_prefix("| `") {
            keys.insert(format!("{section}.{}", rest.split('`').next().unwrap()));
        }
    }
    keys
}

/// Returns `section.key` and the value in `section.key = value` or `section.key`.
fn setting(code: &str) -> Option<(&str, Option<&str>)> {
    const SECTIONS: [&str; 6] = ["model", "train", "mesh", "fsdp", "precision", "compile"];
    let (key, value) = match code.split_once(" = ") {
        Some((key, value)) => (key, Some(value)),
        None => (code, None),
    };
    let (section, name) = key.split_once('.')?;
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    (SECTIONS.contains(&section) && name.chars().all(is_name)).then_some((key, value))
}

#[test]
fn every_key_of_the_table_exists() {
    let keys = keys();
    let mut seen = BTreeSet::new();
    for row in rows() {
        for (key, _) in row[1..].iter().flat_map(|c| code(c)).filter_map(setting) {
            assert!(keys.contains(key), "{PAGE}: {key}");
            seen.insert(key.to_owned());
        }
    }
    assert!(seen.len() > 40, "{seen:?}");
}

/// Each setting in the table is accepted under one of the policies.
#[test]
fn every_setting_of_the_table_is_accepted() {
    let mut settings = BTreeSet::new();
    for row in rows() {
        for (key, value) in row[1..].iter().flat_map(|c| code(c)).filter_map(setting) {
            let Some(value) = value else { continue };
            settings.insert(format!("{key}={}", value.replace('N', "2")));
        }
    }
    assert!(settings.len() > 40, "{settings:?}");
    // Settings that some keys need: gradient accumulation, both axes of the mesh, and compiled
    // blocks.
    let base = [
        "train.grad_accum=2",
        "mesh.dp_shard=4",
        "mesh.dp_replicate=2",
        "compile.mode=blocks",
        "fsdp.separate_communicators=true",
        "train.recompute=full",
    ];
    let variants: [&[&str]; 7] = [
        &[],
        &["train.recompute=selective", "lora.r=4"],
        // If options are mutually exclusive, the last one wins.
        &["compile.mode=regions", "fsdp.allocator=double_buffer"],
        // Some formats are for a single GPU.
        &[
            "train.grad_accum=1",
            "mesh.dp_replicate=1",
            "mesh.hardware=b200",
        ],
        &["compile.mode=off", "fsdp.separate_communicators=false"],
        &["train.skipped_blocks=[{ blocks = [\"layers.1\"], micro_batches = [1] }]"],
        &[
            "fsdp.policy=megatron_v2",
            "fsdp.variant=pr4435",
            "mesh.dp_replicate=1",
            "compile.mode=off",
            "train.recompute=none",
            "fsdp.separate_communicators=false",
        ],
    ];
    for setting in settings.iter().map(String::as_str) {
        let accepted = ["fsdp2", "megatron", "native"].iter().any(|policy| {
            variants.iter().any(|variant| {
                let policy = format!("fsdp.policy={policy}");
                let mut args = vec!["plan", "llama3-8b-8xh100", "--groups", "--set", &policy];
                let all = base.iter().chain(*variant).chain([&setting]);
                args.extend(all.flat_map(|s| ["--set", *s]));
                shardlab(&args).output().unwrap().status.success()
            })
        });
        assert!(accepted, "{PAGE}: {setting} is refused under every policy");
    }
}

/// Setters of `FSDPModule` in torch 2.15.0, in the order of `_fully_shard.py`.
const SETTERS: [&str; 23] = [
    "set_keep_unsharded_storage",
    "set_is_last_backward",
    "set_manual_backward_finalization",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
    "_set_unshard_async_op",
];

#[test]
fn every_setter_of_fsdp2_is_in_the_table() {
    let rows = rows();
    for setter in SETTERS {
        let named = |c: &str| code(c).any(|t| t == setter || t.starts_with(&format!("{setter}(")));
        assert!(rows.iter().any(|r| named(&r[0])), "{PAGE}: {setter}");
    }
}
