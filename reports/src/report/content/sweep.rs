//! Runs that differ in two options: a heat map.

use crate::plots::{self, Cell, Measure};
use crate::report::{Block, Item, Section};
use crate::view::{Difference, RunView, ScenarioView, differences};
use shardlab_plan::scenario::BatchUnit;

/// Runs from which on a map says more than a table.
const FEWEST: usize = 3;
/// Values of an option that fit.
const MOST: usize = 24;

/// Options that merely name things: they vary with the file, not with the question.
fn is_axis(key: &str) -> bool {
    !key.starts_with("gate.")
}

/// The axes that the runs name, or else the options in which they differ.
fn axes(items: &[Item]) -> Vec<Difference> {
    let names = |i: &Item| i.axes.iter().map(|(k, _)| k.clone()).collect::<Vec<_>>();
    let first = names(&items[0]);
    if !first.is_empty() && items.iter().all(|i| names(i) == first) {
        let values = |at: usize| items.iter().map(|i| Some(i.axes[at].1.clone())).collect();
        return first
            .into_iter()
            .enumerate()
            .map(|(at, key)| Difference {
                key,
                values: values(at),
            })
            .collect();
    }
    let scenarios: Vec<&ScenarioView> = items.iter().map(|i| &i.view.scenario).collect();
    let mut axes = differences(&scenarios);
    axes.retain(|d| is_axis(&d.key));
    axes
}

/// The title of a report whose runs are all points of one sweep.
pub(super) fn title(items: &[Item]) -> Option<String> {
    let (first, rest) = items.split_first()?;
    let keys = |i: &Item| i.axes.iter().map(|(k, _)| k.clone()).collect::<Vec<_>>();
    let name = &first.view.scenario.name;
    let one = !first.axes.is_empty()
        && rest
            .iter()
            .all(|i| keys(i) == keys(first) && i.view.scenario.name == *name);
    one.then(|| {
        format!(
            "{name}: {} points of {}",
            items.len(),
            keys(first).join(", ")
        )
    })
}

pub(super) fn heat(items: &[Item]) -> Option<Section> {
    if items.len() < FEWEST {
        return None;
    }
    let kind = items[0].view.run.kind;
    if items.iter().any(|i| i.view.run.kind != kind) {
        return None;
    }
    let axes = axes(items);
    let (x, y) = match axes.as_slice() {
        [x] => (x, None),
        [x, y] => (x, Some(y)),
        _ => return None,
    };
    let values = |d: &Difference| -> Vec<String> {
        let mut all: Vec<String> = d
            .values
            .iter()
            .map(|v| v.clone().unwrap_or_default())
            .collect();
        // Numbers by size, the rest by name.
        all.sort_by(|a, b| match (a.parse::<f64>(), b.parse::<f64>()) {
            (Ok(x), Ok(y)) => x.total_cmp(&y),
            _ => a.cmp(b),
        });
        all.dedup();
        all
    };
    let columns = values(x);
    let rows = y.map_or_else(|| vec![String::new()], values);
    if columns.len() > MOST || rows.len() > MOST {
        return None;
    }
    let (name, measure) = measure(items);
    let cell = |row: &String, column: &String| {
        let same =
            |d: &Difference, i: usize, v: &String| d.values[i].clone().unwrap_or_default() == *v;
        (0..items.len())
            .find(|&i| same(x, i, column) && y.is_none_or(|y| same(y, i, row)))
            .map(|i| &items[i].view)
            .map(|view| Cell {
                value: if measure.more_is_better {
                    view.tokens_per_s()
                } else {
                    view.step_ms()
                },
                fits: view.fits() != Some(false),
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
    if measure.more_is_better {
        let unit = counted_in(items).name();
        blocks.push(Block::Text(format!(
            "The steps differ in their {unit}, so the map shows {unit} a second and rank: more is better."
        )));
    }
    Some(Section {
        id: "sweep",
        title: "Sweep".to_owned(),
        blocks,
    })
}

fn counted_in(items: &[Item]) -> BatchUnit {
    RunView::counted_in(items.iter().map(|i| &i.view))
}

/// What the map shows, with its name: step times tell which point is better only where all steps do the same work.
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
        unit: "ms a step",
        more_is_better: false,
    };
    ("Step time", measure)
}
