//! The content of a report.

mod cards;
mod compare;
mod experts;
mod overview;
mod provenance;
mod sweep;

use super::{Block, Item, Report, Section};
use crate::plots;
use shardlab_plan::record::basis;
use shardlab_plan::units::{Bytes, thousands};
use std::borrow::Cow;

/// Maximum number of runs whose streams and memory are drawn; the tables contain all runs.
const DRAWN: usize = 12;
/// Ratio of step lengths beyond which timelines do not share a scale.
const ALIKE: u64 = 4;
/// Names of two runs in sentences and columns.
const LETTERS: [&str; 2] = ["A", "B"];

pub(super) fn report(title: Option<&str>, items: &[Item]) -> Report {
    let items = &numbered(items);
    let title = title.map_or_else(|| default_title(items), str::to_owned);
    let (detailed, which) = sweep::detailed(items);
    // Two runs are called A and B wherever their names would be repeated.
    let named = prefixed(items);
    let (all, detailed) = match items.as_slice() {
        [_, _] => (lettered(items), lettered(items)),
        _ => (Cow::Borrowed(items.as_slice()), detailed),
    };
    let detailed = detailed.as_ref();
    let mut sections = vec![overview::summary(&named, which)];
    sections.extend(overview::step_times(&all, detailed));
    sections.extend(compare::why(&all));
    sections.extend(sweep::plots(items));
    sections.push(streams(detailed));
    sections.extend(compare::exposed(detailed));
    sections.extend(experts::section(detailed));
    sections.extend(memory(detailed));
    sections.extend(compare::prediction(&all));
    sections.extend(compare::losses(&all));
    sections.extend(provenance::differences(detailed));
    sections.push(provenance::origin(&named));
    sections.retain(|s| !s.blocks.is_empty());
    Report {
        title,
        about: overview::bases(&all),
        sections,
    }
}

/// Names two runs A and B, if there are only two.
fn lettered(items: &[Item]) -> Cow<'static, [Item]> {
    let named = items.iter().zip(LETTERS).map(|(item, letter)| Item {
        label: letter.to_owned(),
        ..item.clone()
    });
    Cow::Owned(named.collect())
}

/// Prefixes the names of two runs with their letters, if there are only two.
fn prefixed(items: &[Item]) -> Cow<'_, [Item]> {
    if items.len() != LETTERS.len() {
        return Cow::Borrowed(items);
    }
    let named = items.iter().zip(LETTERS).map(|(item, letter)| Item {
        label: format!("{letter}: {}", item.label),
        ..item.clone()
    });
    Cow::Owned(named.collect())
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
    let length = common_length(&drawn);
    let mut blocks = Vec::new();
    for (i, item) in drawn.iter().enumerate() {
        let title = format!("Streams and memory of one step: {}", item.label);
        let name = format!("streams-{i}");
        let t = plots::timeline(&name, &title, &item.view, length, most);
        blocks.push(Block::Timeline(t));
    }
    let remembers = |i: &&Item| !i.view.run.memory.timeline.is_empty();
    if drawn.iter().any(remembers) {
        blocks.push(Block::Text(
            "Memory is what the allocator holds when the device reaches the work that the host \
             issued next. The host itself runs ahead of the device."
                .to_owned(),
        ));
    }
    Section {
        id: "streams",
        title: "Streams and memory".to_owned(),
        blocks,
    }
}

/// Returns the length of the longest step as the scale of all timelines; 0 for separate scales, if
/// the shortest step would be too small to read.
fn common_length(items: &[&Item]) -> u64 {
    let lengths = || items.iter().map(|i| plots::timeline::length(&i.view));
    match (lengths().min(), lengths().max()) {
        (Some(shortest), Some(longest)) if longest <= ALIKE * shortest => longest,
        _ => 0,
    }
}

fn memory(items: &[Item]) -> Option<Section> {
    let table = compare::composition(items)?;
    Some(Section {
        id: "memory",
        title: "Memory at the peak".to_owned(),
        blocks: vec![table],
    })
}

/// Returns a word for whether a run was predicted or measured.
fn kind(item: &Item) -> &'static str {
    item.view.run.kind.word()
}

/// Formats a number with this many decimals and commas between thousands; `–` for NaN.
fn number(x: f64, digits: usize) -> String {
    if x.is_finite() {
        thousands(x, digits)
    } else {
        "–".to_owned()
    }
}

/// Formats a number of a run with the digits that its basis justifies.
fn priced(item: &Item, x: f64, digits: usize) -> String {
    match &item.view.run.basis {
        Some(basis) if basis.is_estimate() && x.is_finite() => {
            basis::number(x, digits, Some(basis))
        }
        _ => number(x, digits),
    }
}

/// Formats bytes in a suitable unit.
fn bytes(n: u64) -> String {
    Bytes(n).to_string()
}
