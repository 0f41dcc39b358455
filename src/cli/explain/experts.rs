//! The effects of dividing experts differently, and of other routing.

use super::super::output::{Failure, Out};
use super::{Explanation, whatif};
use std::collections::BTreeMap;

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
    for (reason, labels) in impossible {
        let text = format!("Not possible: {} ({reason}).", labels.join(", "));
        out.paragraph(2, &text)?;
    }
    Ok(())
}
