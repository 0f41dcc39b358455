//! Cards, the table of all runs, and step times.

use super::compare::judged;
use super::{bytes, number, sweep};
use crate::compare::{self, Matrix, Metric, Pair, Unit};
use crate::plots::{self, StepBar};
use crate::report::{Block, Card, Item, Section, Table};
use crate::stats::{Options, ratio_of_medians};
use crate::view::RunView;
use shardlab_plan::record::RunKind;
use shardlab_plan::record::basis::milliseconds;

/// Maximum number of runs that are compared with the first in a sentence.
const SENTENCES: usize = 4;
/// Maximum number of runs with a card.
const CARDS: usize = 6;

fn kind(item: &Item) -> &'static str {
    match item.view.run.kind {
        RunKind::Sim => "predicted",
        RunKind::Exec => "measured",
    }
}

/// Returns model FLOPs utilisation in percent; NaN if the device's peak is not known.
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

/// Returns the step time with the digits that its basis justifies.
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

/// Returns the cards of the detailed runs, a sentence on which ones these are, and the table of all
/// runs.
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

/// Metrics in the table of all runs.
const COLUMNS: [&str; 7] = [
    "step_ms",
    "tokens_per_s_per_gpu",
    "mfu_percent",
    "exposed_ms",
    "allocated_gib",
    "reserved_gib",
    "device_gib",
];

fn table(items: &[Item]) -> Table {
    let runs: Vec<(&str, &RunView)> = items.iter().map(|i| (i.label.as_str(), &i.view)).collect();
    let matrix = Matrix::new(&runs, None);
    let columns: Vec<(&Metric, Vec<bool>)> = COLUMNS
        .iter()
        .filter_map(|name| matrix.metrics.iter().find(|m| m.name == *name))
        .map(|m| (m, matrix.best(m)))
        .collect();
    let axes = sweep::names(items);
    let rows = items.iter().enumerate().map(|(i, item)| {
        // A point of a sweep consists of its values: one column each.
        let mut row = match &axes {
            Some(_) => item.axes.iter().map(|(_, v)| v.clone()).collect(),
            None => vec![item.label.clone()],
        };
        row.push(kind(item).to_owned());
        for (metric, best) in &columns {
            let mark = if best[i] { " ★" } else { "" };
            row.push(format!("{}{mark}", cell(metric, i)));
        }
        row.push(fits(item).to_owned());
        row
    });
    let rows = rows.collect();
    let runs = axes.unwrap_or_else(|| vec!["run".to_owned()]);
    let titles = columns.iter().map(|(metric, _)| match metric.unit {
        // Sizes are written with their unit.
        Unit::Memory => format!(">{}", metric.title.replace(" GiB", "")),
        _ => format!(">{}", metric.title),
    });
    let head = runs
        .into_iter()
        .chain(["kind".to_owned()])
        .chain(titles)
        .chain(["fits".to_owned()]);
    Table {
        caption: caption(
            &matrix,
            columns.iter().any(|(_, best)| best.contains(&true)),
        ),
        head: head.collect(),
        rows,
    }
}

/// Formats a value of a metric; memory in a suitable unit.
fn cell(metric: &Metric, run: usize) -> String {
    const GIB: f64 = (1u64 << 30) as f64;
    match metric.unit {
        Unit::Memory if metric.values[run].is_finite() => bytes((metric.values[run] * GIB) as u64),
        unit => number(metric.values[run], unit.decimals()),
    }
}

/// Explains the stars, if there are any.
fn caption(matrix: &Matrix, starred: bool) -> String {
    if !starred {
        return match matrix.comparable.ranks() {
            true => format!("All runs; they are equal within {}", matrix.tolerance),
            false => "All runs".to_owned(),
        };
    }
    let but = match matrix.same_tokens {
        true => String::new(),
        false => format!(
            ", except for times: the steps differ in their {}",
            matrix.counted_in.name()
        ),
    };
    format!(
        "All runs; ★ marks the best of a column among those that fit{but}. Values within {} are equal: of these the run with the least \
         reserved memory is marked",
        matrix.tolerance
    )
}

fn samples(item: &Item) -> Vec<f64> {
    let all = item.view.samples_ms();
    all.into_iter()
        .filter(|x| x.is_finite() && *x > 0.0)
        .collect()
}

/// Returns the step times of all runs, and sentences on the detailed ones.
pub(super) fn step_times(items: &[Item], told: &[Item]) -> Option<Section> {
    let axes = sweep::names(items);
    let bars: Vec<StepBar> = items
        .iter()
        .filter(|i| i.view.step_ms().is_finite())
        .map(|item| {
            let samples = samples(item);
            let measured = item.view.run.kind == RunKind::Exec && samples.len() >= 2;
            let options = options(samples.len());
            // The interval of a median is that of its ratio to 1.
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
    blocks.extend(verdicts(told).into_iter().map(Block::Text));
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

/// Compares the step times with the first, in sentences.
fn verdicts(items: &[Item]) -> Vec<String> {
    let sentences = |pair: &Pair| {
        let all = pair.verdict().into_iter().map(str::to_owned);
        all.collect::<Vec<String>>()
    };
    match items {
        [a, b] => {
            let pair = judged(["A", "B"], [a, b]);
            let mut all = vec![
                format!("A is {}, B is {}.", a.label, b.label),
                pair.comparable.sentence(),
            ];
            all.extend(pair.warnings.iter().map(|w| format!("Warning: {w}")));
            all.extend(sentences(&pair));
            all
        }
        // With more runs, the drawing and the table are clearer than a page of sentences.
        [first, rest @ ..] => {
            let rest = rest.iter().take(SENTENCES);
            rest.flat_map(|other| {
                let labels = [first, other].map(|i| i.label.as_str());
                let pair = judged(labels, [first, other]);
                let tokens = compare::tokens([&first.view, &other.view], labels);
                let told = sentences(&pair).into_iter().chain(tokens);
                let told: Vec<String> = told.collect();
                (pair.comparable.times() && !told.is_empty()).then(|| told.join(" "))
            })
            .collect()
        }
        [] => Vec::new(),
    }
}
