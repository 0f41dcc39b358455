//! The content of a report.

mod compare;
mod overview;
mod provenance;
mod sweep;

use super::{Block, Item, Report, Section};
use crate::plots;
use shardlab_plan::units::{Bytes, thousands};

/// Maximum number of runs whose streams and memory are drawn; the tables contain all runs.
const DRAWN: usize = 12;

pub(super) fn report(title: Option<&str>, items: &[Item]) -> Report {
    let items = &numbered(items);
    let title = title.map_or_else(|| default_title(items), str::to_owned);
    let (detailed, which) = sweep::detailed(items);
    let detailed = detailed.as_ref();
    let mut sections = vec![overview::summary(items, detailed, which)];
    sections.extend(overview::step_times(items, detailed));
    sections.extend(compare::why(items));
    sections.extend(sweep::heat(items));
    sections.push(streams(detailed));
    sections.extend(compare::exposed(detailed));
    sections.extend(memory(detailed));
    sections.extend(compare::prediction(items));
    sections.extend(compare::losses(items));
    sections.extend(provenance::differences(detailed));
    sections.push(provenance::origin(items));
    sections.retain(|s| !s.blocks.is_empty());
    Report { title, sections }
}

fn default_title(items: &[Item]) -> String {
    if let Some(title) = sweep::title(items) {
        return title;
    }
    match items {
        [one] => one.label.clone(),
        [a, b] => format!("{} and {}", a.label, b.label),
        [a, rest @ ..] => format!("{} and {} others", a.label, rest.len()),
        [] => "No runs".to_owned(),
    }
}

/// Numbers equal labels to distinguish them.
fn numbered(items: &[Item]) -> Vec<Item> {
    let mut out: Vec<Item> = items.to_vec();
    for i in 0..out.len() {
        let same = items[..i]
            .iter()
            .filter(|x| x.label == items[i].label)
            .count();
        if same > 0 {
            out[i].label = format!("{} ({})", items[i].label, same + 1);
        }
    }
    out
}

fn streams(items: &[Item]) -> Section {
    let drawn = items.iter().filter(|i| !i.view.run.spans.is_empty());
    let drawn: Vec<&Item> = drawn.take(DRAWN).collect();
    let most = plots::timeline::share(drawn.len());
    let mut blocks = Vec::new();
    for (i, item) in drawn.into_iter().enumerate() {
        let title = format!("Streams of one step: {}", item.label);
        let t = plots::timeline(&format!("streams-{i}"), &title, &item.view, most);
        blocks.push(Block::Timeline(t));
    }
    Section {
        id: "streams",
        title: "Streams".to_owned(),
        blocks,
    }
}

fn memory(items: &[Item]) -> Option<Section> {
    let mut blocks: Vec<Block> = items
        .iter()
        .take(DRAWN)
        .enumerate()
        .filter_map(|(i, item)| {
            let title = format!("Memory over one step: {}", item.label);
            plots::memory(&format!("memory-{i}"), &title, &item.view).map(Block::Plot)
        })
        .collect();
    blocks.extend(compare::composition(items));
    (!blocks.is_empty()).then(|| Section {
        id: "memory",
        title: "Memory".to_owned(),
        blocks,
    })
}

/// Formats a number with this many decimals and commas between thousands; `–` for NaN.
fn number(x: f64, digits: usize) -> String {
    if x.is_finite() {
        thousands(x, digits)
    } else {
        "–".to_owned()
    }
}

/// Formats bytes in a suitable unit.
fn bytes(n: u64) -> String {
    Bytes(n).to_string()
}
