//! Cards: the main numbers of a run, and how the numbers of the second of two runs differ.

use super::{bytes, kind, priced, sweep};
use crate::compare::{Matrix, Metric, Unit};
use crate::report::{Card, Change, Fact, Item};
use crate::view::RunView;
use shardlab_plan::units::{Bytes, signed};

/// Maximum number of runs with a card.
const CARDS: usize = 6;

/// Returns one card per run. For a sweep, which has a table and plots, returns only the card of its
/// best point.
pub(super) fn cards(items: &[Item]) -> Vec<Card> {
    match items {
        [a, b] => pair([a, b]),
        items if sweep::names(items).is_some() => sweep::best_of(items)
            .map(|item| Card {
                title: format!("Best that fits: {}", item.label),
                ..card(item, |_| None)
            })
            .into_iter()
            .collect(),
        items => items
            .iter()
            .take(CARDS)
            .map(|item| card(item, |_| None))
            .collect(),
    }
}

fn pair([a, b]: [&Item; 2]) -> Vec<Card> {
    let runs = [(a.label.as_str(), &a.view), (b.label.as_str(), &b.view)];
    let matrix = Matrix::new(&runs, None);
    let change = |name: &str| {
        let metric = matrix.metrics.iter().find(|m| m.name == name)?;
        change(&matrix, metric)
    };
    vec![card(a, |_| None), card(b, change)]
}

/// Returns the difference of a metric between the second run and the first.
fn change(matrix: &Matrix, metric: &Metric) -> Option<Change> {
    let &[a, b] = metric.values.as_slice() else {
        return None;
    };
    if !(a.is_finite() && b.is_finite()) {
        return None;
    }
    let is_time = matches!(
        metric.unit,
        Unit::StepTime | Unit::Throughput | Unit::Percent
    );
    if is_time && !matrix.comparable.times() {
        return None;
    }
    let by = match metric.name {
        _ if a == b => "no change".to_owned(),
        // A change relative to nearly zero would be meaningless.
        "exposed_ms" => format!("{} ms", signed(b - a, 2)),
        "mfu_percent" => format!("{} points", signed(b - a, 1)),
        _ => format!("{} %", signed(100.0 * (b / a - 1.0), 1)),
    };
    let tolerance = match metric.unit {
        Unit::Memory => matrix.tolerance.of_memory(),
        _ => matrix.tolerance,
    };
    let ranks = matrix.comparable.ranks()
        && matrix
            .rows
            .iter()
            .all(|row| metric.unit.counts(row.fits, matrix.same_tokens));
    let is_better = metric.improves(tolerance).filter(|_| ranks);
    Some(Change { by, is_better })
}

fn card(item: &Item, change: impl Fn(&str) -> Option<Change>) -> Card {
    let run = &item.view.run;
    let memory = &run.memory;
    let fact = |name: &str, value: String, metric: &str| Fact {
        name: name.to_owned(),
        value,
        change: change(metric),
    };
    Card {
        title: item.label.clone(),
        about: format!(
            "{}, {} on {} x {}",
            kind(item),
            run.policy,
            run.world_size,
            run.hardware
        ),
        head: format!("{} ms per step", priced(item, item.view.step_ms(), 2)),
        change: change("step_ms"),
        facts: vec![
            fact("basis", basis(item), ""),
            fact(
                RunView::counted_in([&item.view]).rate(),
                priced(item, item.view.tokens_per_s(), 0),
                "tokens_per_s_per_gpu",
            ),
            fact(
                "MFU",
                format!("{} %", priced(item, mfu(item), 1)),
                "mfu_percent",
            ),
            fact(
                "exposed",
                format!("{} ms", priced(item, item.view.exposed_ms(), 2)),
                "exposed_ms",
            ),
            fact("allocated", recorded(memory.allocated()), "allocated_gib"),
            fact("reserved", recorded(memory.reserved()), "reserved_gib"),
            fact(
                "on the device",
                memory
                    .device()
                    .map_or_else(|| "not measured".to_owned(), |b| bytes(b.0)),
                "device_gib",
            ),
            fact("fits", fits(item), ""),
        ],
    }
}

/// Formats bytes that a trace may not contain.
fn recorded(b: Option<Bytes>) -> String {
    b.map_or_else(|| "not recorded".to_owned(), |b| bytes(b.0))
}

/// Returns model FLOPs utilization in percent; NaN if the device's peak is not known.
fn mfu(item: &Item) -> f64 {
    match item.view.run.mfu {
        0.0 => f64::NAN,
        mfu => 100.0 * mfu,
    }
}

/// Describes whether a run fits the device, and by how much.
fn fits(item: &Item) -> String {
    let memory = &item.view.run.memory;
    match (memory.device(), memory.capacity) {
        (_, None) => "unknown".to_owned(),
        (None, Some(c)) => format!("yes: it ran, on {c}"),
        (Some(used), Some(c)) if used <= c => format!("yes, {} of {c} free", Bytes(c.0 - used.0)),
        (Some(used), Some(c)) => format!("no, {} more than {c}", Bytes(used.0 - c.0)),
    }
}

/// Returns the basis of a run's times.
fn basis(item: &Item) -> String {
    match (&item.view.run.basis, item.view.run.kind) {
        (_, kind) if kind.is_measured() => "measured run".to_owned(),
        (Some(basis), _) => basis.sentence(),
        (None, _) => "unknown".to_owned(),
    }
}
