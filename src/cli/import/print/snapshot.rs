//! Prints memory snapshots.

use super::super::super::output::{Failure, Out};
use super::super::super::table::Table;
use super::{MAX_LISTED, plural, remarks, unmatched};
use shardlab_import::snapshot::{OfLine, OutOfMemory, Replay, Share, SnapshotReport};
use shardlab_plan::units::{Bytes, count};
use std::path::Path;

pub(super) fn print(path: &Path, device: &SnapshotReport, out: &mut Out) -> Result<(), Failure> {
    out.heading(format_args!("{}: device {}", path.display(), device.device))?;
    out.labelled(
        "peak",
        &format!(
            "allocated {}, reserved {}; {} were allocated before the history",
            Bytes(device.peak_allocated_bytes),
            Bytes(device.peak_reserved_bytes),
            Bytes(device.before_bytes)
        ),
    )?;
    out.labelled(
        "end",
        &format!(
            "allocated {}, reserved {} in {}, largest free block {}",
            Bytes(device.end_allocated_bytes),
            Bytes(device.end_reserved_bytes),
            plural(device.segments, "segment"),
            Bytes(device.largest_free_bytes)
        ),
    )?;
    for (label, all) in [("by role", &device.by_role), ("by unit", &device.by_unit)] {
        if !all.is_empty() {
            out.labelled(label, &shares(all))?;
        }
    }
    if !device.end_by_line.is_empty() {
        out.labelled("at end", &lines(&device.end_by_line))?;
    }
    if let Some(recorded) = device.replays.first() {
        out.labelled("replay", &agreement(recorded))?;
    }
    for oom in &device.out_of_memory {
        failure(oom, out)?;
    }
    if device.replays.len() > 1 {
        out.blank()?;
        settings(&device.replays, out)?;
    }
    if !device.unknown.is_empty() {
        let unknown = device
            .unknown
            .iter()
            .map(|(name, n)| (name.clone(), (*n, 0)))
            .collect();
        out.labelled("unmatched", &unmatched(&unknown))?;
    }
    remarks(&[], &device.notes, out)
}

/// Lists the lines that allocated what is live at the end.
fn lines(all: &[OfLine]) -> String {
    let shown = all.iter().take(MAX_LISTED).map(|l| {
        let allocations = plural(l.allocations, "allocation");
        format!("{} {} ({allocations})", l.line, Bytes(l.bytes))
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// Describes how well the model of the allocator reproduces the recorded run.
fn agreement(replay: &Replay) -> String {
    let Some(a) = replay.agreement else {
        return String::new();
    };
    let share = |part: u64| match part {
        n if n == a.allocations => "all".to_owned(),
        n => count(n),
    };
    if a.is_exact() {
        return format!(
            "the model of the allocator reserves the recorded bytes at all {} allocations, in the same segments",
            count(a.allocations)
        );
    }
    format!(
        "the model of the allocator reserves the recorded bytes at {} of {} allocations; segments at the end {}",
        share(a.equal_reserved),
        count(a.allocations),
        if a.equal_segments {
            "are the same"
        } else {
            "differ"
        }
    )
}

/// Prints an allocation that failed.
fn failure(oom: &OutOfMemory, out: &mut Out) -> Result<(), Failure> {
    out.blank()?;
    out.heading(format_args!(
        "Out of memory: {} were requested",
        Bytes(oom.requested_bytes)
    ))?;
    out.labelled(
        "limit",
        &format!("{} ({})", Bytes(oom.limit_bytes), oom.limit_by),
    )?;
    out.labelled(
        "missing",
        &format!(
            "{}; the device had {} free",
            Bytes(oom.missing_bytes),
            Bytes(oom.device_free_bytes)
        ),
    )?;
    out.labelled(
        "holes",
        &format!(
            "{} were reserved without use; the largest of {} that the request could have used has {}",
            Bytes(oom.reserved_unused_bytes),
            plural(oom.holes, "hole"),
            Bytes(oom.largest_hole_bytes)
        ),
    )?;
    out.labelled(
        "alive",
        &match oom.by_role.is_empty() {
            true => Bytes(oom.allocated_bytes).to_string(),
            false => format!("{}: {}", Bytes(oom.allocated_bytes), shares(&oom.by_role)),
        },
    )?;
    if !oom.by_unit.is_empty() {
        out.labelled("by unit", &shares(&oom.by_unit))?;
    }
    let mut table = Table::new(["PYTORCH_CUDA_ALLOC_CONF", "fits", ">reserved at most"]);
    for tried in &oom.tried {
        table.row([
            tried.settings.clone(),
            if tried.fits { "yes" } else { "no" }.to_owned(),
            Bytes(tried.peak_reserved_bytes).to_string(),
        ]);
    }
    out.text(table)?;
    Ok(())
}

/// Prints the replay of the history for each of the settings.
fn settings(replays: &[Replay], out: &mut Out) -> Result<(), Failure> {
    let mut table = Table::new([
        "PYTORCH_CUDA_ALLOC_CONF",
        ">reserved at most",
        ">allocated at most",
        ">at the end",
        ">segments",
        ">retries",
        "fits",
    ]);
    for r in replays {
        table.row([
            r.settings.clone(),
            Bytes(r.peak_reserved_bytes).to_string(),
            Bytes(r.peak_allocated_bytes).to_string(),
            Bytes(r.end_reserved_bytes).to_string(),
            r.segments.to_string(),
            r.retries.to_string(),
            r.failed_request_bytes
                .map_or_else(|| "yes".into(), |b| format!("no: {} failed", Bytes(b))),
        ]);
    }
    out.text(table)?;
    Ok(())
}

fn shares(all: &[Share]) -> String {
    let shown = all
        .iter()
        .take(MAX_LISTED)
        .map(|s| format!("{} {}", s.name, Bytes(s.bytes)));
    let mut shown: Vec<String> = shown.collect();
    let rest: u64 = all.iter().skip(MAX_LISTED).map(|s| s.bytes).sum();
    if rest > 0 {
        shown.push(format!("others {}", Bytes(rest)));
    }
    shown.join(", ")
}
