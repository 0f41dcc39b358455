//! Decides what backward recomputes and what is compiled.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::{Lack, Row, Setting};
use crate::table::{Fact, list, quoted, words_of};
use shardlab_plan::config::RecomputeModule;

/// Recomputes whole blocks unless a key selects the operations to save.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn whole_blocks(draft: &mut Draft) -> Result<(), ConfigError> {
    if let Some(given) = draft.fact(Fact::Recompute).filter(|r| r.value == 1)
        && draft.value("train.recompute").is_none()
    {
        draft.set(given.row, "train.recompute", quoted("full"))?;
        draft.approximates(given.row, "no key says which operations are kept");
    }
    Ok(())
}

/// Recomputes only the first layers, as Megatron-LM's method `block` does.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn layers(draft: &mut Draft) -> Result<(), ConfigError> {
    let block = draft.fact(Fact::RecomputeBlock);
    let layers = draft.fact(Fact::RecomputeLayers);
    let whole = draft.is("train.recompute", "full");
    let Some(layers) = layers else {
        if let Some(block) = block.filter(|_| whole) {
            draft.none(block.row, Lack::Nothing, "as predicted");
        }
        return Ok(());
    };
    let rows = block.map(|b| b.row).into_iter().chain([layers.row]);
    let on_block = block.is_some_and(|b| b.value == 1);
    for row in rows {
        match (whole, on_block, layers.value) {
            (true, true, n) => draft.set(row, "train.recompute_layers", n.to_string())?,
            (true, false, 1) => draft.none(row, Lack::Nothing, "as predicted"),
            (true, false, _) => {
                let why = "each block is predicted as recomputed on its own";
                draft.none(row, Lack::Accuracy, why);
            }
            _ => draft.none(row, Lack::Nothing, "no block is recomputed as a whole"),
        }
    }
    Ok(())
}

/// Recomputes parts of blocks, as Megatron-LM does.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn modules(draft: &mut Draft) -> Result<(), ConfigError> {
    let selective = draft.fact(Fact::RecomputeSelective);
    let named = draft.fact(Fact::RecomputeModules);
    let moe = draft.fact(Fact::RecomputeMoe);
    if draft.value("train.recompute").is_some() || selective.or(moe).is_none() {
        let why = "no part of a block is recomputed on its own";
        for given in [selective, named, moe].into_iter().flatten() {
            draft.none(given.row, Lack::Nothing, why);
        }
        return Ok(());
    }
    let known = RecomputeModule::WORDS;
    let at = |part: RecomputeModule| known.iter().position(|name| *name == part.name());
    let bit = |part| at(part).map_or(0, |at| 1_u64 << at);
    // `--recompute-modules` defaults to the core of attention.
    let core = bit(RecomputeModule::CoreAttn);
    let mut bits = match (named, selective) {
        (Some(named), _) => named.value,
        (None, Some(_)) => core,
        (None, None) => 0,
    };
    bits |= moe.map_or(0, |_| bit(RecomputeModule::Moe));
    let parts: Vec<String> = words_of(bits, known).map(str::to_owned).collect();
    for given in [selective, named, moe].into_iter().flatten() {
        draft.set(given.row, "train.recompute", quoted("selective"))?;
        draft.set(given.row, "train.recompute_modules", list(&parts))?;
    }
    Ok(())
}

/// Decides whether activation checkpointing is reentrant. The wrappers that FSDP's options request
/// never are (`CheckpointImpl.NO_REENTRANT`), unless `wrappers` says so.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn reentrant(draft: &mut Draft, wrappers: bool) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::Reentrant).filter(|f| f.value == 1) else {
        return Ok(());
    };
    let full = quoted("full");
    let recomputes = |row: &&Row| {
        let is = |s: &Setting| s.key == "train.recompute" && s.value == full;
        row.settings.iter().any(is)
    };
    match draft.rows.iter().find(recomputes) {
        None => Ok(()),
        Some(by) if by.key.contains("fsdp") && !wrappers => {
            draft.none(
                given.row,
                Lack::Nothing,
                "FSDP's wrappers are not reentrant",
            );
            Ok(())
        }
        Some(_)
            if draft
                .value("compile.mode")
                .is_some_and(|m| m != quoted("off")) =>
        {
            let why = "recompute of compiled code is predicted as not reentrant";
            draft.none(given.row, Lack::Accuracy, why);
            Ok(())
        }
        Some(_) => draft.set(given.row, "train.use_reentrant", "true".to_owned()),
    }
}

/// Decides what is compiled: the model including FSDP's hooks, or each block.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn compilation(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::Compiled) else {
        return Ok(());
    };
    let regional = draft.fact(Fact::RegionalCompilation);
    let regional = regional.filter(|r| r.value == 1);
    let mode = quoted(regional.map_or("regions", |_| "blocks"));
    for row in regional.iter().map(|r| r.row).chain([given.row]) {
        draft.set(row, "compile.mode", mode.clone())?;
    }
    Ok(())
}
