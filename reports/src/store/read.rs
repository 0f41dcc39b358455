//! Reads runs.

use super::error::StoreError;
use super::files::{GAPS, MEMORY, RUN, SPANS};
use super::tables;
use super::write::Head;
use crate::view::{Names, RunView, VIEW_FORMAT, what_if};
use std::fs;
use std::path::Path;

pub(super) fn view(dir: &Path) -> Result<RunView, StoreError> {
    let path = dir.join(RUN);
    let text = fs::read(&path).map_err(|e| StoreError::io(&path, e))?;
    let head: Head<RunView> =
        serde_json::from_slice(&text).map_err(|e| StoreError::invalid(&path, e))?;
    let mut view = head.view;
    if view.format > VIEW_FORMAT {
        return Err(StoreError::invalid(
            &path,
            format!(
                "its format is {}, this program supports at most {VIEW_FORMAT}",
                view.format
            ),
        ));
    }
    view.scenario
        .settings
        .extend(what_if(&view.run.environment));
    let mut names = Names::of(std::mem::take(&mut view.names));
    let mut instrs = std::mem::take(&mut view.instrs);
    view.run.spans = table(dir, SPANS, head.spans_bytes, |text| {
        tables::read_spans(text, &mut names, &mut instrs)
    })?;
    view.run.memory.timeline = table(dir, MEMORY, head.memory_bytes, |text| {
        tables::read_memory(text, &mut names, &mut instrs)
    })?;
    let spans = view.run.spans.len();
    view.run.gaps = table(dir, GAPS, head.gaps_bytes, |text| {
        let gaps = tables::read_gaps(text)?;
        match gaps.iter().filter_map(|g| g.waited_for).max() {
            Some(most) if most as usize >= spans => {
                Err(format!("span {most} is waited for, but there are {spans}"))
            }
            _ => Ok(gaps),
        }
    })?;
    // With a repeated step, an instruction occurs more than once.
    instrs.sort_by_key(|i| i.id);
    instrs.dedup_by_key(|i| i.id);
    view.instrs = instrs;
    view.names = names.into_vec();
    Ok(view)
}

fn table<T>(
    dir: &Path,
    name: &str,
    bytes: u64,
    read: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<T, StoreError> {
    let path = dir.join(name);
    let text = fs::read(&path).map_err(|e| StoreError::io(&path, e))?;
    if text.len() as u64 != bytes {
        return Err(StoreError::invalid(
            &path,
            format!("it has {} bytes instead of {bytes}", text.len()),
        ));
    }
    read(&text).map_err(|reason| StoreError::invalid(&path, reason))
}
