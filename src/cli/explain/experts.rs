//! The effects of dividing experts differently, and of other routing.

use super::super::output::{Failure, Out};
use super::{Explanation, whatif};
use std::collections::BTreeMap;

/// Returns the changes with which choices find no row, by what happens to these.
fn short(e: &Explanation) -> BTreeMap<String, Vec<&str>> {
    let mut all: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (_, tried) in &e.tried.experts {
        let effect = tried.effect.as_ref().ok();
        if let Some(short) = effect.and_then(|effect| effect.shortage.as_ref()) {
            let label = tried.change.label.as_str();
            all.entry(short.words()).or_default().push(label);
        }
    }
    all
}

/// Prints a table of the changes to experts, if the model has any.
pub(super) fn print(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    if e.tried.experts.is_empty() {
        return Ok(());
    }
    out.blank()?;
    out.heading("Experts: ranks, dispatcher, imbalance, capacity")?;
    let mut table = whatif::changes(e);
    let mut impossible: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut last = None;
    for (about, tried) in &e.tried.experts {
        let label = tried.change.label.as_str();
        match &tried.effect {
            Ok(effect) => {
                if last.replace(*about) != Some(*about) {
                    let title = [about.title()].into_iter().chain([""; 5]);
                    table.row(title.map(str::to_owned));
                }
                table.row(whatif::change(label, e, effect));
            }
            Err(error) => impossible.entry(error.reason()).or_default().push(label),
        }
    }
    out.text(table)?;
    for (words, labels) in short(e) {
        let text = format!("Too few rows: {} ({words}).", labels.join(", "));
        out.paragraph(2, &text)?;
    }
    for (reason, labels) in impossible {
        let text = format!("Not possible: {} ({reason}).", labels.join(", "));
        out.paragraph(2, &text)?;
    }
    Ok(())
}
