//! Cards, the table of all runs, step times.

use super::{bytes, number, sweep};
use crate::compare::{self, Side, Unit};
use crate::plots::{self, StepBar};
use crate::report::{Block, Card, Item, Section, Table};
use crate::stats::{Options, ratio_of_medians};
use crate::view::RunView;
use shardlab_plan::record::RunKind;
use shardlab_plan::record::basis::milliseconds;

/// Runs that are compared with the first in a sentence each.
const SENTENCES: usize = 4;
/// Runs that get a card each.
const CARDS: usize = 6;

fn kind(item: &Item) -> &'static str {
    match item.view.run.kind {
        RunKind::Sim => "predicted",
        RunKind::Exec => "measured",
    }
}

/// Percent; NaN where the device's peak is not known.
fn mfu(item: &Item) -> f64 {
    match item.view.run.mfu {
        0.0 => f64::NAN,
        mfu => 100.0 * mfu,
    }
}

fn fits(item: &Item) -> &'static str {
    match item.view.fits() {
        Some(true) => "yes",
        Some(false) => "no",
        None => "unknown",
    }
}

/// Returns the step time with the digits that its basis deserves.
fn step(item: &Item) -> String {
    let run = &item.view.run;
    match &run.basis {
        Some(basis) if basis.is_estimate() => milliseconds(item.view.step_ms(), Some(basis)),
        _ => format!("{} ms", number(item.view.step_ms(), 2)),
    }
}

/// Returns what a run's times rest on.
fn basis(item: &Item) -> String {
    match (&item.view.run.basis, item.view.run.kind) {
        (_, RunKind::Exec) => "measured run".to_owned(),
        (Some(basis), _) => basis.sentence(),
        (None, _) => "unknown".to_owned(),
    }
}

/// Cards of those that are told in full, with which these are, and the table of all.
pub(super) fn summary(items: &[Item], told: &[Item], which: Option<String>) -> Section {
    let cards = told.iter().take(CARDS).map(|item| {
        let run = &item.view.run;
        Card {
            title: item.label.clone(),
            about: format!(
                "{}, {} on {} × {}",
                kind(item),
                run.policy,
                run.world_size,
                run.hardware
            ),
            head: format!("{} per step", step(item)),
            facts: vec![
                ("basis".to_owned(), basis(item)),
                (
                    RunView::counted_in([&item.view]).rate().to_owned(),
                    number(item.view.tokens_per_s(), 0),
                ),
                ("MFU".to_owned(), format!("{} %", number(mfu(item), 1))),
                (
                    "exposed".to_owned(),
                    format!("{} ms", number(item.view.exposed_ms(), 2)),
                ),
                (
                    "peak allocated".to_owned(),
                    bytes(run.memory.peak_allocated.0),
                ),
                ("fits".to_owned(), fits(item).to_owned()),
            ],
        }
    });
    let mut blocks: Vec<Block> = which.map(Block::Text).into_iter().collect();
    blocks.push(Block::Cards(cards.collect()));
    if items.len() > 1 {
        blocks.push(Block::Table(table(items)));
    }
    Section {
        id: "summary",
        title: "Summary".to_owned(),
        blocks,
    }
}

fn table(items: &[Item]) -> Table {
    // The best of each column is marked: the lowest, or the highest of those where more is better.
    struct Column {
        title: String,
        unit: Unit,
        of: fn(&Item) -> f64,
        more: bool,
    }
    let column = |title: &str, unit, of, more| Column {
        title: format!(">{title}"),
        unit,
        of,
        more,
    };
    let memory = |title, of| column(title, Unit::Memory, of, false);
    let counted_in = RunView::counted_in(items.iter().map(|i| &i.view));
    let columns = [
        column("step ms", Unit::StepTime, |i| i.view.step_ms(), false),
        column(
            counted_in.rate(),
            Unit::Throughput,
            |i| i.view.tokens_per_s(),
            true,
        ),
        column("MFU %", Unit::Percent, mfu, true),
        column("exposed ms", Unit::StepTime, |i| i.view.exposed_ms(), false),
        memory("allocated", |i| i.view.run.memory.peak_allocated.0 as f64),
        memory("reserved", |i| i.view.run.memory.peak_reserved.0 as f64),
        memory("device", |i| i.view.run.memory.peak_device.0 as f64),
    ];
    let text = |c: &Column, x: f64| match c.unit {
        Unit::Memory => bytes(x as u64),
        unit => number(x, unit.decimals()),
    };
    let same_tokens = RunView::have_same_tokens(items.iter().map(|i| &i.view));
    let counts = |c: &Column, i: &Item| c.unit.counts(i.view.fits(), same_tokens);
    let best = |c: &Column| {
        let items = items.iter().filter(|i| counts(c, i));
        let values = items.map(c.of).filter(|x| x.is_finite());
        let pick = if c.more { f64::max } else { f64::min };
        values.reduce(pick).map(|x| text(c, x))
    };
    let best: Vec<Option<String>> = columns.iter().map(best).collect();
    let axes = sweep::names(items);
    let rows = items
        .iter()
        .map(|item| {
            // A point of a sweep is its values: a column each.
            let mut row = match &axes {
                Some(_) => item.axes.iter().map(|(_, v)| v.clone()).collect(),
                None => vec![item.label.clone()],
            };
            row.push(kind(item).to_owned());
            for (c, best) in columns.iter().zip(&best) {
                let text = text(c, (c.of)(item));
                let mark = if best.as_ref() == Some(&text) && counts(c, item) {
                    " ★"
                } else {
                    ""
                };
                row.push(format!("{text}{mark}"));
            }
            row.push(fits(item).to_owned());
            row
        })
        .collect();
    let runs = axes.unwrap_or_else(|| vec!["run".to_owned()]);
    let numbers = columns.iter().map(|c| c.title.as_str());
    let others = std::iter::once("kind").chain(numbers).chain(["fits"]);
    let head = runs.into_iter().chain(others.map(str::to_owned));
    Table {
        caption: if same_tokens {
            "All runs; ★ marks the best of a column among those that fit".to_owned()
        } else {
            format!(
                "All runs; ★ marks the best of a column among those that fit, but not of times: the steps differ in their {}",
                counted_in.name()
            )
        },
        head: head.collect(),
        rows,
    }
}

fn samples(item: &Item) -> Vec<f64> {
    let all = item.view.samples_ms();
    all.into_iter()
        .filter(|x| x.is_finite() && *x > 0.0)
        .collect()
}

/// The step times of all, and sentences on those that are told in full.
pub(super) fn step_times(items: &[Item], told: &[Item]) -> Option<Section> {
    let axes = sweep::names(items);
    let bars: Vec<StepBar> = items
        .iter()
        .filter(|i| i.view.step_ms().is_finite())
        .map(|item| {
            let samples = samples(item);
            let measured = item.view.run.kind == RunKind::Exec && samples.len() >= 2;
            let options = options(samples.len());
            // A median's interval is that of its ratio to 1.
            let interval = measured.then(|| ratio_of_medians(&[1.0], &samples, &options));
            StepBar {
                label: match &axes {
                    Some(_) => sweep::values(item),
                    None => item.label.clone(),
                },
                median: item.view.step_ms(),
                interval: interval.map(|i| (i.low, i.high)),
                samples: if measured { samples } else { vec![] },
            }
        })
        .collect();
    if bars.is_empty() {
        return None;
    }
    let title = match axes {
        Some(axes) => format!("Step time by {}", axes.join(", ")),
        None => "Step time".to_owned(),
    };
    let mut blocks = vec![Block::Plot(plots::steps(&title, &bars))];
    let (first, rest) = told.split_first()?;
    // Beyond, the drawing and the table tell more than a page of sentences.
    for other in rest.iter().take(SENTENCES) {
        if let Some(text) = verdict(first, other) {
            blocks.push(Block::Text(text));
        }
    }
    Some(Section {
        id: "step-time",
        title: "Step time".to_owned(),
        blocks,
    })
}

fn options(samples: usize) -> Options {
    Options {
        block: Options::block_of(samples),
        ..Options::default()
    }
}

/// Whether two runs differ, in a sentence.
fn verdict(a: &Item, b: &Item) -> Option<String> {
    let [a, b] = [a, b].map(|item| Side::new(&item.label, &item.view));
    let c = compare::step(a, b, &Options::default())?;
    let step = c.sentence("step time", a.label, b.label);
    Some(match compare::tokens([a.run, b.run], [a.label, b.label]) {
        Some(tokens) => format!("{step} {tokens}"),
        None => step,
    })
}
