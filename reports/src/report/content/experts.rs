//! Experts: how they are divided among ranks, and how long the exchange of tokens takes.

use super::number;
use crate::report::{Block, Item, Section, Table};
use crate::view::ExpertsView;

/// Returns the tables for runs with experts.
pub(super) fn section(items: &[Item]) -> Option<Section> {
    let runs: Vec<(&str, &ExpertsView)> = items
        .iter()
        .filter_map(|i| Some((i.label.as_str(), i.view.experts.as_ref()?)))
        .collect();
    if runs.is_empty() {
        return None;
    }
    Some(Section {
        id: "experts",
        title: "Experts".to_owned(),
        blocks: vec![Block::Table(division(&runs)), Block::Table(times(&runs))],
    })
}

/// Returns a table of how experts are divided among ranks, and how many rows the ranks reserve.
fn division(runs: &[(&str, &ExpertsView)]) -> Table {
    let row = |(label, e): &(&str, &ExpertsView)| {
        vec![
            (*label).to_owned(),
            e.ep.to_string(),
            format!("{} of {}", e.experts_per_rank, e.experts),
            e.top_k.to_string(),
            e.dispatcher.clone().unwrap_or_else(|| "none".to_owned()),
            e.routing.clone(),
            number(e.imbalance, 2),
            e.rows_reserved.to_string(),
            e.rows_expected.to_string(),
            format!("{} %", number(100.0 * without_row(e), 1)),
        ]
    };
    let head = [
        "run",
        ">ep",
        ">experts per rank",
        ">top k",
        "dispatcher",
        "routing",
        ">imbalance",
        ">rows reserved",
        ">rows expected",
        ">choices without a row",
    ];
    Table {
        caption: "Experts of a layer; imbalance is the busiest rank's share relative to the mean, rows are those of \
                  one rank and layer"
            .to_owned(),
        head: head.map(str::to_owned).into(),
        rows: runs.iter().map(row).collect(),
    }
}

/// Returns the share of choices that find no row.
fn without_row(e: &ExpertsView) -> f64 {
    e.row_shortage.as_ref().map_or(0.0, |short| short.share)
}

/// Returns a table of the time for exchanging tokens, next to the time for computing experts.
fn times(runs: &[(&str, &ExpertsView)]) -> Table {
    let row = |(label, e): &(&str, &ExpertsView)| {
        let exposed: f64 = e.exchanges.values().map(|x| x.exposed_ms).sum();
        let times = [e.dispatch_ms, e.combine_ms, exposed, e.matmul_ms];
        let cells = times.map(|ms| number(ms, 3));
        std::iter::once((*label).to_owned()).chain(cells).collect()
    };
    let head = [
        "run",
        ">dispatch ms",
        ">combine ms",
        ">of these not overlapped ms",
        ">expert matmuls ms",
    ];
    Table {
        caption: "Collectives that bring tokens to experts and results back, and matmuls of experts, per step"
            .to_owned(),
        head: head.map(str::to_owned).into(),
        rows: runs.iter().map(row).collect(),
    }
}
