//! The table of single changes.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use crate::analysis::whatif::{Effect, WhatIf};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Changes sorted by throughput, best first; those without effect and the impossible ones compactly below.
pub(super) fn print(base: &Effect, all: &[WhatIf], out: &mut Out) -> Result<(), Failure> {
    let mut effects: Vec<(&str, &Effect)> = Vec::new();
    let mut same: Vec<&str> = Vec::new();
    let mut impossible: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for w in all {
        let label = w.change.label.as_str();
        match &w.effect {
            Ok(e) if e.differs(base) => effects.push((label, e)),
            Ok(_) => same.push(label),
            Err(e) => impossible.entry(e.reason()).or_default().push(label),
        }
    }
    effects.sort_by(|a, b| b.1.tokens_per_s.total_cmp(&a.1.tokens_per_s));
    out.blank()?;
    out.heading("What one change would do")?;
    let mut table = Table::new([
        "change",
        ">step ms",
        ">tokens/s",
        ">allocated",
        ">reserved",
        "fits",
    ]);
    let gib = |a: Bytes, b: Bytes| format!("{:+.2} GiB", a.gib() - b.gib());
    table.row([
        "(as it is)".into(),
        format!("{:.2}", base.step_ms),
        format!("{:.0}", base.tokens_per_s),
        format!("{:.2} GiB", base.peak_allocated.gib()),
        format!("{:.2} GiB", base.peak_reserved.gib()),
        base.fit.word().to_owned(),
    ]);
    for (label, e) in effects {
        table.row([
            label.to_owned(),
            format!("{:+.2}", e.step_ms - base.step_ms),
            format!(
                "{:+.1} %",
                100.0 * (e.tokens_per_s / base.tokens_per_s - 1.0)
            ),
            gib(e.peak_allocated, base.peak_allocated),
            gib(e.peak_reserved, base.peak_reserved),
            e.fit.word().to_owned(),
        ]);
    }
    out.text(table)?;
    if !same.is_empty() {
        out.paragraph(2, &format!("No effect: {}.", same.join(", ")))?;
    }
    for (reason, labels) in impossible {
        out.paragraph(
            2,
            &format!("Not possible: {} ({reason}).", labels.join(", ")),
        )?;
    }
    Ok(())
}
