//! Cards, the table of all runs, and step times.

use super::compare::judged;
use super::{bytes, cards, kind, number, priced, sweep};
use crate::compare::{self, Matrix, Metric, Pair, Unit};
use crate::plots::{self, StepBar};
use crate::report::{Block, Item, Section, Table};
use crate::stats::{Options, ratio_of_medians};
use crate::view::RunView;

/// Maximum number of runs that are compared with the first in a sentence.
const SENTENCES: usize = 4;
/// Maximum number of bases that the header lists, if the runs have different ones.
const BASES: usize = 4;

fn fits(item: &Item) -> &'static str {
    match item.view.fits() {
        Some(true) => "yes",
        Some(false) => "no",
        None => "unknown",
    }
}

/// Returns the basis of the runs' times: one line if it is the same for all of them.
pub(super) fn bases(items: &[Item]) -> Vec<String> {
    let basis = |item: &Item| {
        let run = &item.view.run;
        let machine = format!("{} x {}", run.world_size, run.hardware);
        match (&run.basis, run.kind) {
            (_, kind) if kind.is_measured() => format!("Measured run on {machine}."),
            (Some(basis), _) => format!("Predicted for {machine}; {}.", basis.sentence()),
            (None, _) => format!("Predicted for {machine}; basis and error unknown."),
        }
    };
    let lines: Vec<String> = items.iter().map(basis).collect();
    match lines.split_first() {
        None => Vec::new(),
        Some((first, rest)) if rest.iter().all(|l| l == first) => vec![first.clone()],
        Some(_) => {
            let named = items.iter().zip(lines).take(BASES);
            let mut all: Vec<String> = named.map(|(i, l)| format!("{}: {l}", i.label)).collect();
            if let more @ 1.. = items.len().saturating_sub(BASES) {
                all.push(format!("{more} more runs: see their provenance."));
            }
            all
        }
    }
}

/// Returns the cards, a sentence on which runs are shown in detail, and the table of all runs.
pub(super) fn summary(items: &[Item], which: Option<String>) -> Section {
    let mut blocks: Vec<Block> = which.map(Block::Text).into_iter().collect();
    let cards = cards::cards(items);
    if !cards.is_empty() {
        blocks.push(Block::Cards(cards));
    }
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
        // The row of a point of a sweep has one column per value.
        let mut row = match &axes {
            Some(_) => item.axes.iter().map(|(_, v)| v.clone()).collect(),
            None => vec![item.label.clone()],
        };
        row.push(kind(item).to_owned());
        for (metric, best) in &columns {
            let mark = if best[i] { " ★" } else { "" };
            row.push(format!("{}{mark}", cell(item, metric, i)));
        }
        row.push(fits(item).to_owned());
        row
    });
    let rows = rows.collect();
    let runs = axes.unwrap_or_else(|| vec!["run".to_owned()]);
    let titles = columns.iter().map(|(metric, _)| match metric.unit {
        // Sizes include their unit.
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
fn cell(item: &Item, metric: &Metric, run: usize) -> String {
    const GIB: f64 = (1u64 << 30) as f64;
    match metric.unit {
        Unit::Memory if metric.values[run].is_finite() => bytes((metric.values[run] * GIB) as u64),
        Unit::Memory => number(metric.values[run], Unit::Memory.decimals()),
        unit => priced(item, metric.values[run], unit.decimals()),
    }
}

/// Explains the stars in the table, if there are any.
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
            let measured = item.view.run.kind.is_measured() && samples.len() >= 2;
            let options = options(samples.len());
            // The interval of a median is the interval of its ratio to 1.
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
    let title = match axes {
        Some(axes) => format!("Step time by {}", axes.join(", ")),
        None => "Step time".to_owned(),
    };
    let mut blocks = Vec::new();
    // Predictions are single numbers, which are in the cards and the table.
    if bars.iter().any(|b| b.interval.is_some()) {
        blocks.push(Block::Plot(plots::steps(&title, &bars)));
    }
    blocks.extend(verdicts(told).into_iter().map(Block::Text));
    (!blocks.is_empty()).then(|| Section {
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

/// Compares the step times with those of the first run, in sentences.
fn verdicts(items: &[Item]) -> Vec<String> {
    let sentences = |pair: &Pair| {
        let all = pair.verdict().into_iter().map(str::to_owned);
        all.collect::<Vec<String>>()
    };
    match items {
        [a, b] => {
            let pair = judged([&a.label, &b.label], [a, b]);
            let mut all = vec![pair.comparable.sentence()];
            all.extend(pair.warnings.iter().map(|w| format!("Warning: {w}")));
            all.extend(sentences(&pair));
            all
        }
        // Steps with different work are compared by throughput, in the plots.
        items if items.len() > 2 && !RunView::have_same_tokens(items.iter().map(|i| &i.view)) => {
            Vec::new()
        }
        // With more runs, the drawing and the table are easier to read than a page of sentences.
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
