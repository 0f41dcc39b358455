//! Turns comparisons into pages.

use crate::dash::app::Tone;
use crate::dash::names::{apart, letter};
use crate::dash::tables::{Page, Series, Table};
use shardlab_plan::record::Cause;
use shardlab_plan::units::{Picos, signed};
use shardlab_reports::RunView;
use shardlab_reports::compare::{Change, KindError, Matrix, Pair, Part, Side, Tolerance, pair};
use shardlab_reports::stats::{Comparison, Options, Verdict};
use std::sync::Arc;

/// Maximum number of rows of a table whose last rows are less important.
const MAX_ROWS: usize = 10;

/// Compares two runs in full, or several as a matrix. The first is the base. Each comes with its
/// name in this session.
pub(crate) fn compare(runs: &[(String, Arc<RunView>)]) -> Page {
    let views: Vec<&RunView> = runs.iter().map(|(_, r)| r.as_ref()).collect();
    let apart = apart(&views);
    let mut page = match views[..] {
        [a, b] => Page {
            title: title(runs, &apart),
            ..of_pair(&pair(
                Side::new("A", a),
                Side::new("B", b),
                &Options::default(),
            ))
        },
        _ => of_many(runs, &apart),
    };
    page.losses = runs
        .iter()
        .enumerate()
        .filter(|(_, (_, r))| !r.run.losses.is_empty())
        .map(|(i, (called, r))| Series {
            name: format!("{} {called} {}", letter(i), r.scenario.name),
            values: r.run.losses.clone(),
        })
        .collect();
    page
}

/// Returns the title: `llama-tiny: A #1 sim, prefetch_forward=1 │ B #2 sim, prefetch_forward=2`. A
/// common scenario is named only once.
fn title(runs: &[(String, Arc<RunView>)], apart: &[String]) -> String {
    let name = |i: usize| runs[i].1.scenario.name.as_str();
    let one = (1..runs.len()).all(|i| name(i) == name(0));
    let parts: Vec<String> = (0..runs.len())
        .map(|i| {
            let (called, view) = &runs[i];
            let mut text = format!("{} {called} {}", letter(i), view.kind());
            if !one {
                text = format!("{text} {}", name(i));
            }
            match apart[i].as_str() {
                "" => text,
                options => format!("{text}, {options}"),
            }
        })
        .collect();
    let parts = parts.join(" │ ");
    if one {
        format!("{}: {parts}", name(0))
    } else {
        parts
    }
}

fn of_pair(p: &Pair) -> Page {
    // A prediction is never an improvement over a measurement.
    let ranked = p.step.as_ref().filter(|_| p.comparable.ranks());
    let tone = match ranked.map(|s| s.verdict) {
        Some(Verdict::Improved) => Tone::Good,
        Some(Verdict::Regressed) => Tone::Bad,
        _ => Tone::Plain,
    };
    // Changed options come before their effects.
    let mut tables = vec![why(p), options(p), metrics(p)];
    if p.comparable.times() {
        tables.extend(details(p));
    }
    tables.retain(|t| !t.rows.is_empty() || !t.notes.is_empty());
    let verdict = p
        .verdict()
        .map_or_else(|| p.comparable.sentence(), str::to_owned);
    Page {
        verdict: Some((tone, verdict)),
        tables,
        ..Page::default()
    }
}

/// Returns tables of where time and memory go.
fn details(p: &Pair) -> Vec<Table> {
    let mut tables = vec![exposed(p), waits(p)];
    for (title, parts) in [
        ("Wall time by phase, ms", &p.breakdown.by_phase),
        ("Busy time by kind, ms", &p.breakdown.by_kind),
        ("Busy time by stream, ms", &p.breakdown.by_stream),
        ("Wall time by unit, ms", &p.breakdown.by_unit),
    ] {
        tables.push(breakdown(title, parts));
    }
    match &p.prediction {
        Some(prediction) => {
            let mut table = Table::new("Predicted against measured", &KindError::HEADS);
            for k in &prediction.by_kind {
                table.row(Tone::Plain, k.cells());
            }
            tables.push(table);
            tables.push(changes("Worst predictions", &prediction.worst));
        }
        None => tables.push(changes("Single instructions", &p.changes)),
    }
    tables.push(memory(p));
    tables
}

/// Returns the conclusions and the tests behind them.
fn why(p: &Pair) -> Table {
    let mut table = Table::new("Why", &[]);
    let warnings = p.warnings.iter().map(|w| format!("⚠ {w}"));
    table.notes.extend(warnings);
    let comparable = p.verdict().map(|_| p.comparable.sentence());
    table.notes.extend(comparable);
    table.notes.extend(p.reasons().iter().cloned());
    table.notes.extend(
        p.step
            .as_ref()
            .and_then(|s| tests(s, p.prediction.is_some())),
    );
    let alignment = p.alignment.sentence("A", "B");
    table
        .notes
        .extend(alignment.filter(|_| p.comparable.times()));
    table
}

fn tests(c: &Comparison, is_prediction: bool) -> Option<String> {
    (c.n != [1, 1]).then(|| {
        format!(
            "Step time {}: ratio {:.4}, {:.0} % interval {:.4} to {:.4}, {} and {} samples, Cliff's delta {:+.2} ({}).",
            c.word(is_prediction),
            c.ratio.estimate,
            100.0 * c.ratio.level,
            c.ratio.low,
            c.ratio.high,
            c.n[0],
            c.n[1],
            c.cliffs_delta,
            c.magnitude.name()
        )
    })
}

fn ms(t: Picos) -> String {
    t.show_ms(3)
}

fn change_ms(pair: [Picos; 2]) -> String {
    signed(pair[1].ms() - pair[0].ms(), 3)
}

fn metrics(p: &Pair) -> Table {
    let mut table = Table::new("Metrics", &["metric", ">A", ">B", ">change", ">%"]);
    for m in &p.metrics {
        let (a, b) = (m.values[0], m.values[1]);
        let (compared, ranked) = (p.comparable.times(), p.comparable.ranks());
        let known = a.is_finite() && b.is_finite() && compared;
        let tone = match m.improves(Tolerance::DEFAULT).filter(|_| ranked) {
            Some(true) => Tone::Good,
            Some(false) => Tone::Bad,
            None => Tone::Plain,
        };
        let when = |yes: bool, text: String| if yes { text } else { "-".to_owned() };
        let cells = [
            m.heading(),
            m.show(0),
            m.show(1),
            m.change()
                .filter(|_| compared)
                .unwrap_or_else(|| "-".into()),
            when(known && a != 0.0, signed(100.0 * (b / a - 1.0), 1)),
        ];
        table.row(tone, cells);
    }
    table
}

fn options(p: &Pair) -> Table {
    let mut table = Table::new("Options that differ", &["option", "A", "B"]);
    for d in &p.options {
        let value = |i: usize| d.values[i].clone().unwrap_or_else(|| "-".into());
        table.row(Tone::Plain, [d.name().into_owned(), value(0), value(1)]);
    }
    table
}

fn exposed(p: &Pair) -> Table {
    let mut table = Table::new(
        "Exposed time by cause, ms",
        &["cause", ">A", ">B", ">change"],
    );
    for c in &p.exposed {
        let cells = [
            c.cause.name().to_owned(),
            ms(c.time[0]),
            ms(c.time[1]),
            change_ms(c.time),
        ];
        table.row(Tone::Plain, cells);
    }
    table
}

fn waits(p: &Pair) -> Table {
    let header = ["for", "phase", ">A", "cause", ">B", "cause", ">change"];
    let mut table = Table::new("Waited, ms", &header);
    let cause = |c: Option<Cause>| c.map_or("", Cause::name).to_owned();
    for w in p.waits.iter().take(MAX_ROWS) {
        let cells = [
            w.of.name.clone(),
            w.of.phase.clone(),
            ms(w.time[0]),
            cause(w.cause[0]),
            ms(w.time[1]),
            cause(w.cause[1]),
            change_ms(w.time),
        ];
        table.row(Tone::Plain, cells);
    }
    table
}

fn breakdown(title: &str, parts: &[Part]) -> Table {
    let mut table = Table::new(title, &["of", ">A", ">B", ">change"]);
    for p in parts.iter().take(MAX_ROWS) {
        table.row(Tone::Plain, p.cells());
    }
    table
}

fn changes(title: &str, all: &[Change]) -> Table {
    let header = [
        "name",
        "unit",
        "phase",
        ">instr",
        ">A us",
        ">B us",
        ">change us",
    ];
    let mut table = Table::new(title, &header);
    for c in all.iter().take(MAX_ROWS) {
        table.row(Tone::Plain, c.cells());
    }
    table
}

fn memory(p: &Pair) -> Table {
    let m = &p.memory;
    let mut table = Table::new("At the memory peak", &["role", ">A", ">B", ">change MiB"]);
    for part in &m.by_role {
        table.row(Tone::Plain, part.cells());
    }
    let at = m.at.each_ref().map(Option::as_deref);
    table.notes.push(match at {
        [Some(a), Some(b)] => format!("A peaks in {a}, B in {b}."),
        [None, None] => "Memory was not recorded.".to_owned(),
        [a, _] => {
            let lacks = if a.is_none() { "A" } else { "B" };
            format!("Memory of {lacks} was not recorded.")
        }
    });
    table
}

/// Returns a matrix of the options and metrics of many runs, with the best value of each metric
/// marked.
fn of_many(runs: &[(String, Arc<RunView>)], apart: &[String]) -> Page {
    let labels: Vec<String> = (0..runs.len()).map(letter).collect();
    let sides: Vec<(&str, &RunView)> = labels
        .iter()
        .zip(runs)
        .map(|(l, (_, r))| (l.as_str(), r.as_ref()))
        .collect();
    let matrix = Matrix::new(&sides, None);
    let runs_across = |title: &str| {
        let mut table = Table::new(title, &[""]);
        table.header.extend(labels.iter().map(|l| format!(">{l}")));
        table
    };
    let title = match matrix.comparable.ranks() {
        true => format!(
            "Metrics (* best of those that fit; within {} equal)",
            matrix.tolerance
        ),
        false => "Metrics".to_owned(),
    };
    let mut metrics = runs_across(&title);
    for m in &matrix.metrics {
        let best = matrix.best(m);
        let cells = (0..runs.len()).map(|i| {
            let mark = if best[i] { "*" } else { "" };
            format!("{mark}{}", m.show(i))
        });
        metrics.row(Tone::Plain, std::iter::once(m.heading()).chain(cells));
    }
    if matrix.comparable.ranks() {
        let mark = |on: bool| if on { "◆" } else { "" }.to_owned();
        let front = matrix.rows.iter().map(|r| mark(r.on_front));
        let title = "Pareto front".to_owned();
        metrics.row(Tone::Good, std::iter::once(title).chain(front));
    }
    let mut options = runs_across("Options that differ");
    for d in &matrix.options {
        let values = d
            .values
            .iter()
            .map(|v| v.clone().unwrap_or_else(|| "-".into()));
        options.row(
            Tone::Plain,
            std::iter::once(d.name().into_owned()).chain(values),
        );
    }
    let mut names = Table::new("Runs", &["", "run", "kind", "scenario", "options"]);
    for ((row, (called, _)), apart) in matrix.rows.iter().zip(runs).zip(apart) {
        let cells = [
            row.label.clone(),
            called.clone(),
            row.kind.to_owned(),
            row.scenario.clone(),
            apart.clone(),
        ];
        names.row(Tone::Plain, cells);
    }
    // Changed options come before their effects.
    let mut tables = vec![names, options, metrics];
    tables.retain(|t| !t.rows.is_empty());
    Page {
        title: format!("{} runs", runs.len()),
        verdict: Some((Tone::Plain, matrix.comparable.sentence())),
        tables,
        ..Page::default()
    }
}
