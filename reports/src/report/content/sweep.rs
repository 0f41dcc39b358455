//! Runs that differ in options: selects the points of a sweep to show in detail, and draws a heat
//! map.

use crate::compare::{Matrix, Row};
use crate::plots::{self, Cell, Measure, Plot, Spot};
use crate::report::{Block, Item, Section};
use crate::view::{Difference, RunView, ScenarioView, differences};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::Bytes;
use std::borrow::Cow;
use std::cmp::Ordering;

/// Minimum number of runs for a map. Fewer runs are easier to read in a table.
const MIN_RUNS: usize = 3;
/// Maximum number of values per axis.
const MAX_VALUES: usize = 24;

/// Maximum number of points of a sweep that are shown in detail. The best points are shown.
const DETAILED: usize = 6;

/// Returns whether an option can be an axis. Some options are only names that vary with the file.
fn is_axis(key: &str) -> bool {
    !key.starts_with("gate.")
}

fn keys_of(item: &Item) -> Vec<&str> {
    item.axes.iter().map(|(k, _)| k.as_str()).collect()
}

/// Returns the keys of the axes if all runs are points of one sweep.
fn keys(items: &[Item]) -> Option<Vec<&str>> {
    let first = items.first()?;
    let name = &first.view.scenario.name;
    let same = |i: &Item| keys_of(i) == keys_of(first) && i.view.scenario.name == *name;
    (!first.axes.is_empty() && items.iter().all(same)).then(|| keys_of(first))
}

/// Returns the names of the axes for columns, without their sections where they remain unambiguous;
/// `None` if the runs are not points of a sweep.
pub(super) fn names(items: &[Item]) -> Option<Vec<String>> {
    let keys = keys(items)?;
    let short = |k: &str| k.split_once('.').map_or(k, |(_, o)| o).to_owned();
    let clear = |k: &str| keys.iter().filter(|o| short(o) == short(k)).count() == 1;
    let name = |k: &&str| if clear(k) { short(k) } else { (*k).to_owned() };
    Some(keys.iter().map(name).collect())
}

/// Describes a point by its values in the order of the axes.
pub(super) fn values(item: &Item) -> String {
    let values: Vec<&str> = item.axes.iter().map(|(_, v)| v.as_str()).collect();
    values.join(", ")
}

/// Compares two runs: those that fit come first, then better ones. Runs without a number come last.
fn better(measure: Measure, a: &RunView, b: &RunView) -> Ordering {
    let out = |v: &RunView| (v.fits() == Some(false), !value(measure, v).is_finite());
    let [x, y] = [a, b].map(|v| value(measure, v));
    let numbers = if measure.more_is_better {
        y.total_cmp(&x)
    } else {
        x.total_cmp(&y)
    };
    out(a).cmp(&out(b)).then(numbers)
}

/// Returns the runs to show in detail, and a sentence that describes the selection. These are all
/// runs, or the best points of a large sweep.
pub(super) fn detailed(items: &[Item]) -> (Cow<'_, [Item]>, Option<String>) {
    if items.len() <= DETAILED || keys(items).is_none() {
        return (Cow::Borrowed(items), None);
    }
    let (name, measure) = measure(items);
    let mut order: Vec<&Item> = items.iter().collect();
    order.sort_by(|a, b| better(measure, &a.view, &b.view));
    let best: Vec<Item> = order.into_iter().take(DETAILED).cloned().collect();
    let fit = if best.iter().any(|i| i.view.fits() == Some(false)) {
        "with those that do not fit last"
    } else {
        "among those that fit"
    };
    let text = format!(
        "Details for the {DETAILED} best of {} points by {}, {fit}. The table and the plots show all points.",
        items.len(),
        name.to_lowercase()
    );
    (Cow::Owned(best), Some(text))
}

/// Returns the axes of the sweep, or else the options in which the runs differ.
fn axes(items: &[Item]) -> Vec<Difference> {
    if let Some(keys) = keys(items) {
        let values = |at: usize| items.iter().map(|i| Some(i.axes[at].1.clone())).collect();
        let axis = |(at, key): (usize, &str)| Difference {
            key: key.to_owned(),
            values: values(at),
        };
        return keys.into_iter().enumerate().map(axis).collect();
    }
    let scenarios: Vec<&ScenarioView> = items.iter().map(|i| &i.view.scenario).collect();
    let mut axes = differences(&scenarios);
    axes.retain(|d| is_axis(&d.key));
    for axis in &mut axes {
        axis.key = axis.name().into_owned();
    }
    axes
}

/// Returns the title of a report whose runs are all points of one sweep.
pub(super) fn title(items: &[Item]) -> Option<String> {
    let keys = keys(items)?.join(", ");
    let name = &items.first()?.view.scenario.name;
    Some(format!("{name}: {} points of {keys}", items.len()))
}

/// Draws throughput against memory, and the heat map.
pub(super) fn plots(items: &[Item]) -> Option<Section> {
    if items.len() < MIN_RUNS {
        return None;
    }
    let kind = items[0].view.run.kind;
    if items.iter().any(|i| i.view.run.kind != kind) {
        return None;
    }
    let mut blocks: Vec<Block> = pareto(items).map(Block::Plot).into_iter().collect();
    blocks.extend(heat(items).unwrap_or_default());
    (!blocks.is_empty()).then(|| Section {
        id: "sweep",
        title: "Sweep".to_owned(),
        blocks,
    })
}

/// Draws throughput against reserved memory if the runs are points of one sweep.
fn pareto(items: &[Item]) -> Option<Plot> {
    let names = names(items)?;
    let runs: Vec<(&str, &RunView)> = items.iter().map(|i| (i.label.as_str(), &i.view)).collect();
    let matrix = Matrix::new(&runs, None);
    let spot = |(item, row): (&Item, &Row)| Spot {
        label: values(item),
        reserved: item.view.run.memory.reserved().map_or(f64::NAN, Bytes::gib),
        throughput: item.view.tokens_per_s(),
        fits: item.view.fits() != Some(false),
        on_front: row.on_front,
    };
    let spots = items.iter().zip(&matrix.rows).map(spot);
    let spots: Vec<Spot> = spots
        .filter(|s| s.throughput.is_finite() && s.reserved.is_finite())
        .collect();
    if spots.len() < MIN_RUNS {
        return None;
    }
    let capacity = items[0].view.run.memory.capacity;
    // Points on different devices do not have a common limit.
    let capacity = capacity.filter(|c| {
        let same = |i: &Item| i.view.run.memory.capacity == Some(*c);
        items.iter().all(same)
    });
    let title = format!("Throughput vs. memory by {}", names.join(", "));
    let unit = counted_in(items).rate();
    Some(plots::pareto(
        &title,
        unit,
        &spots,
        capacity.map(Bytes::gib),
    ))
}

fn heat(items: &[Item]) -> Option<Vec<Block>> {
    let axes = axes(items);
    let (x, y, others) = match axes.as_slice() {
        [x] => (x, None, &[][..]),
        [x, y] => (x, Some(y), &[][..]),
        // Runs that merely differ in many options have no map.
        [x, y, others @ ..] if keys(items).is_some() => (x, Some(y), others),
        _ => return None,
    };
    let values_of = |d: &Difference| -> Vec<String> {
        let mut all: Vec<String> = d
            .values
            .iter()
            .map(|v| v.clone().unwrap_or_default())
            .collect();
        // Numbers are sorted by size, other values by name.
        all.sort_by(|a, b| match (a.parse::<f64>(), b.parse::<f64>()) {
            (Ok(x), Ok(y)) => x.total_cmp(&y),
            _ => a.cmp(b),
        });
        all.dedup();
        all
    };
    let columns = values_of(x);
    let rows = y.map_or_else(|| vec![String::new()], values_of);
    if columns.len() > MAX_VALUES || rows.len() > MAX_VALUES {
        return None;
    }
    let (name, measure) = measure(items);
    let best = best(items, measure);
    let cell = |row: &String, column: &String| {
        let same =
            |d: &Difference, i: usize, v: &String| d.values[i].clone().unwrap_or_default() == *v;
        (0..items.len())
            .filter(|&i| same(x, i, column) && y.is_none_or(|y| same(y, i, row)))
            .min_by(|&a, &b| {
                let marked = best[b].cmp(&best[a]);
                marked.then_with(|| better(measure, &items[a].view, &items[b].view))
            })
            .map(|i| Cell {
                value: value(measure, &items[i].view),
                fits: items[i].view.fits() != Some(false),
                best: best[i],
            })
            .filter(|c| c.value.is_finite())
    };
    let cells: Vec<plots::Row> = rows
        .iter()
        .map(|r| columns.iter().map(|c| cell(r, c)).collect())
        .collect();
    let title = match y {
        Some(y) => format!("{name} by {} and {}", x.key, y.key),
        None => format!("{name} by {}", x.key),
    };
    let plot = plots::heat(
        &title,
        measure,
        (&x.key, &columns),
        (y.map_or("", |y| &y.key), &rows),
        &cells,
    );
    let mut blocks = vec![Block::Plot(plot)];
    if !others.is_empty() {
        let names: Vec<&str> = others.iter().map(|d| d.key.as_str()).collect();
        let best = best.iter().position(|best| *best);
        let at = best.map_or_else(String::new, |i| {
            format!("; the best of all is {}", items[i].label)
        });
        blocks.push(Block::Text(format!(
            "Each cell is the best over {}, among the points that fit where any does{at}.",
            names.join(" and ")
        )));
    }
    if measure.more_is_better {
        let unit = counted_in(items).name();
        blocks.push(Block::Text(format!(
            "Batch sizes differ, so cells show {unit} per second and GPU: more is better."
        )));
    }
    Some(blocks)
}

/// Returns the best of all points that fit; `None` if they tie.
pub(super) fn best_of(items: &[Item]) -> Option<&Item> {
    let (_, measure) = measure(items);
    let marked = best(items, measure);
    items
        .iter()
        .zip(marked)
        .find(|(_, best)| *best)
        .map(|(i, _)| i)
}

fn counted_in(items: &[Item]) -> BatchUnit {
    RunView::counted_in(items.iter().map(|i| &i.view))
}

/// Marks the best run by the measure; none if all tie.
fn best(items: &[Item], measure: Measure) -> Vec<bool> {
    let runs: Vec<(&str, &RunView)> = items.iter().map(|i| (i.label.as_str(), &i.view)).collect();
    let matrix = Matrix::new(&runs, None);
    let name = match measure.more_is_better {
        true => "tokens_per_s_per_gpu",
        false => "step_ms",
    };
    let metric = matrix.metrics.iter().find(|m| m.name == name);
    metric.map_or_else(|| vec![false; items.len()], |m| matrix.best(m))
}

/// Returns the value of the measure for a run.
fn value(measure: Measure, view: &RunView) -> f64 {
    if measure.more_is_better {
        view.tokens_per_s()
    } else {
        view.step_ms()
    }
}

/// Returns the measure that the map shows, and its name. Step times are comparable only for points
/// whose steps do the same work.
fn measure(items: &[Item]) -> (&'static str, Measure) {
    let tokens = |i: &Item| i.view.run.tokens;
    let same_tokens = RunView::have_same_tokens(items.iter().map(|i| &i.view));
    if !same_tokens && items.iter().all(|i| tokens(i) > 0) {
        let measure = Measure {
            unit: counted_in(items).rate(),
            more_is_better: true,
        };
        return ("Throughput", measure);
    }
    let measure = Measure {
        unit: "ms per step",
        more_is_better: false,
    };
    ("Step time", measure)
}
