//! The table of single changes.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use crate::analysis::whatif::{Effect, WhatIf};
use crate::predict::{Fit, TIGHT};
use shardlab_plan::units::{ByteUnit, Bytes, signed};
use std::collections::BTreeMap;

/// Changes sorted by throughput, best first, those that fit before those that do not; those without effect and the impossible ones
/// compactly below.
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
    let fits = base.fit.is_ok();
    effects.sort_by(|(_, a), (_, b)| {
        let no = |e: &Effect| !e.fit.is_ok();
        no(a)
            .cmp(&no(b))
            .then(b.tokens_per_s.total_cmp(&a.tokens_per_s))
    });
    out.blank()?;
    out.heading("What one change would do")?;
    if !fits {
        let saving = effects.iter().filter(|(_, e)| e.fit.is_ok()).count();
        out.paragraph(
            0,
            &match saving {
                0 => "It does not fit as it is, and no single one of these changes makes it fit.".to_owned(),
                1 => "It does not fit as it is. One change makes it fit, the first below it.".to_owned(),
                n => format!("It does not fit as it is. {n} changes make it fit, the first below it, fastest first."),
            },
        )?;
    }
    let throughput = format!(">{}", base.counted_in.column());
    let mut table = Table::new([
        "change",
        ">step ms",
        &throughput,
        ">allocated",
        ">reserved",
        "fits",
    ]);
    let change = |a: Bytes, b: Bytes| {
        let unit = ByteUnit::of(a.max(b));
        let by = signed(unit.count(a) - unit.count(b), unit.decimals());
        format!("{by} {}", unit.name())
    };
    table.row([
        "(as it is)".into(),
        format!("{:.2}", base.step_ms),
        format!("{:.0}", base.tokens_per_s),
        base.peak_allocated.to_string(),
        base.peak_reserved.to_string(),
        base.fit.word().to_owned(),
    ]);
    let mut beyond = false;
    for (label, e) in effects {
        if !e.fit.is_ok() && !std::mem::replace(&mut beyond, true) {
            let mut cells: [String; 6] = Default::default();
            cells[0] = "what does not fit:".to_owned();
            table.row(cells);
        }
        table.row([
            label.to_owned(),
            signed(e.step_ms - base.step_ms, 2),
            format!(
                "{} %",
                signed(100.0 * (e.tokens_per_s / base.tokens_per_s - 1.0), 1)
            ),
            change(e.peak_allocated, base.peak_allocated),
            change(e.peak_reserved, base.peak_reserved),
            e.fit.word().to_owned(),
        ]);
    }
    out.text(table)?;
    let tight = |e: &Effect| matches!(e.fit, Fit::Tight { .. });
    let effects = all.iter().filter_map(|w| w.effect.as_ref().ok());
    if effects.chain([base]).any(tight) {
        out.paragraph(2, TIGHT)?;
    }
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
