//! Provenance of the numbers: options, programs and environments.

use super::number;
use crate::report::{Block, Item, Section, Table};
use crate::shell;
use crate::view::{self, ScenarioView};
use std::collections::BTreeSet;

/// Maximum number of runs for which a command for writing a trace is shown.
const TRACES: usize = 12;

fn differences_of(items: &[Item]) -> Vec<Vec<String>> {
    let scenarios: Vec<&ScenarioView> = items.iter().map(|i| &i.view.scenario).collect();
    view::differences(&scenarios)
        .into_iter()
        .map(|d| {
            let name = d.name().into_owned();
            let values = d
                .values
                .into_iter()
                .map(|v| v.unwrap_or_else(|| "–".to_owned()));
            std::iter::once(name).chain(values).collect()
        })
        .collect()
}

pub(super) fn differences(items: &[Item]) -> Option<Section> {
    if items.len() < 2 {
        return None;
    }
    let rows = differences_of(items);
    let block = if rows.is_empty() {
        Block::Text("All runs have the same options.".to_owned())
    } else {
        let labels = items.iter().map(|i| i.label.clone());
        Block::Table(Table {
            caption: "Options that are not the same in all runs".to_owned(),
            head: std::iter::once("option".to_owned()).chain(labels).collect(),
            rows,
        })
    };
    Some(Section {
        id: "differences",
        title: "Differences of the scenarios".to_owned(),
        blocks: vec![block],
    })
}

pub(super) fn origin(items: &[Item]) -> Section {
    let mut blocks = vec![runs(items)];
    blocks.extend(environment(items));
    blocks.extend(scenario_texts(items));
    blocks.extend(commands(items));
    Section {
        id: "provenance",
        title: "Provenance".to_owned(),
        blocks,
    }
}

/// Returns a table of runs: what they are of, and which share of their costs was measured.
fn runs(items: &[Item]) -> Block {
    let rows = items
        .iter()
        .map(|i| {
            let v = &i.view;
            let costs = &v.run.costs;
            let all = costs.measured.0 + costs.modelled.0;
            let share = if all == 0 {
                "–".to_owned()
            } else {
                format!(
                    "{} %",
                    number(100.0 * costs.measured.0 as f64 / all as f64, 1)
                )
            };
            vec![
                i.label.clone(),
                v.scenario.name.clone(),
                v.kind().to_owned(),
                v.program.digest.clone(),
                v.scenario.digest.clone(),
                v.scenario.overrides.join(" "),
                share,
            ]
        })
        .collect();
    let head = [
        "run",
        "scenario",
        "kind",
        "program",
        "options",
        "overrides",
        ">measured costs",
    ];
    Block::Table(Table {
        caption: "Equal programs have equal digests; costs that no table of measurements covers are modeled".to_owned(),
        head: head.map(str::to_owned).into(),
        rows,
    })
}

/// Returns a table of the environments of the runs; `None` if they have none.
fn environment(items: &[Item]) -> Option<Block> {
    let keys: BTreeSet<&String> = items
        .iter()
        .flat_map(|i| i.view.run.environment.keys())
        .collect();
    if keys.is_empty() {
        return None;
    }
    // Runs in the same environment share a column. A column for each run would make the table too
    // wide.
    let first = &items[0].view.run.environment;
    let one = items.iter().all(|i| i.view.run.environment == *first);
    let shown = if one { &items[..1] } else { items };
    let labels: Vec<String> = match shown {
        [_] if items.len() > 1 => vec!["all runs".to_owned()],
        _ => shown.iter().map(|i| i.label.clone()).collect(),
    };
    let rows = keys
        .into_iter()
        .map(|k| {
            let cells = shown.iter().map(|i| {
                let value = i.view.run.environment.get(k);
                value.cloned().unwrap_or_else(|| "–".to_owned())
            });
            std::iter::once(k.clone()).chain(cells).collect()
        })
        .collect();
    Some(Block::Table(Table {
        caption: "Environment".to_owned(),
        head: std::iter::once("what".to_owned()).chain(labels).collect(),
        rows,
    }))
}

/// Returns the texts of the scenarios. The points of a sweep have the same text, which is shown
/// once.
fn scenario_texts(items: &[Item]) -> impl Iterator<Item = Block> {
    let mut seen = BTreeSet::new();
    items.iter().filter_map(move |i| {
        let text = &i.view.scenario.text;
        let new = !text.is_empty() && seen.insert(text);
        new.then(|| Block::Long(format!("Scenario of {}", i.label), text.clone()))
    })
}

/// Returns the commands that repeat the runs, and those that write their timelines.
fn commands(items: &[Item]) -> [Block; 2] {
    let command = |i: &Item| {
        let s = &i.view.scenario;
        let name = match s.source.as_str() {
            "" => &s.name,
            source => source,
        };
        shell::command(i.view.kind(), name, &s.overrides)
    };
    let commands: Vec<String> = items.iter().map(command).collect();
    let traces = (0..).zip(items.iter().take(TRACES));
    let traces: Vec<String> = traces
        .map(|(n, i)| format!("{} --trace trace-{n}.json", command(i)))
        .collect();
    [
        Block::Long(
            "Commands of these scenarios and overrides; a run's other arguments are not kept"
                .to_owned(),
            commands.join("\n"),
        ),
        Block::Long(
            "Commands that write full timelines as traces for Perfetto".to_owned(),
            traces.join("\n"),
        ),
    ]
}
