//! What the dashboard takes from stores, comparisons and gates, as pages of tables.

use super::app::Tone;
use super::event::{Setup, StoredRun};
use super::tables::{Page, Series, Table};
use super::worker::Stop;
use crate::predict::Profiles;
use shardlab_plan::units::Picos;
use shardlab_reports::RunView;
use shardlab_reports::store::{Entry, Store};
use shardlab_reports::view::{Work, differences};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Runs of a store, newest first; none where there is no store.
pub(crate) fn stored(store: Option<&Path>) -> Result<Vec<StoredRun>, String> {
    let Some(dir) = store else {
        return Ok(Vec::new());
    };
    let listing = Store::at(dir).list().map_err(|e| e.to_string())?;
    let of = |e: &Entry| StoredRun {
        id: e.id.as_str().to_owned(),
        scenario: e.scenario.clone(),
        kind: e.kind.clone(),
        made: e.created.clone(),
        step_ms: e.metrics.get("step_ms.median").copied().unwrap_or(f64::NAN),
        allocated: e
            .metrics
            .get("memory.peak_allocated_bytes")
            .copied()
            .unwrap_or(0.0) as u64,
        loss: e.metrics.get("loss.last").copied(),
        changes: e.overrides.join(" "),
    };
    Ok(listing.runs.iter().rev().map(of).collect())
}

/// A stored run.
pub(crate) fn open(store: Option<&Path>, id: &str) -> Result<RunView, String> {
    let dir = store.ok_or("there is no store")?;
    let store = Store::at(dir);
    let id = store.resolve(id).map_err(|e| e.to_string())?;
    store.open(&id).map_err(|e| e.to_string())
}

/// Keeps a run; its id.
pub(crate) fn keep(store: Option<&Path>, view: &RunView) -> Result<String, String> {
    let dir = store.ok_or("nothing is kept: --no-store, or SHARDLAB_STORE=off")?;
    let id = Store::at(dir).save(view).map_err(|e| e.to_string())?;
    Ok(id.as_str().to_owned())
}

/// A gate's verdict.
pub(crate) fn gate(setup: &Setup, _profiles: &Profiles, _stop: &Stop) -> Result<Page, String> {
    Ok(Page {
        title: setup.path.display().to_string(),
        ..Page::default()
    })
}

/// Runs side by side; the first is the base.
pub(crate) fn compare(runs: &[Arc<RunView>]) -> Page {
    let names: Vec<String> = runs
        .iter()
        .enumerate()
        .map(|(i, r)| {
            let letter = if i == 0 {
                "base".to_owned()
            } else {
                format!("{i}")
            };
            format!("{letter} {} {}", r.kind(), r.scenario.name)
        })
        .collect();
    let tables = vec![
        metrics(runs, &names),
        options(runs, &names),
        times("Compute stream by kind of work, ms", runs, &names, |run| {
            by_work(run)
        }),
        times("Compute stream by phase, ms", runs, &names, |run| {
            by_phase(run)
        }),
        times("Exposed time by cause, ms", runs, &names, |run| {
            let of =
                |(c, t): (&shardlab_plan::record::Cause, &Picos)| (c.name().to_owned(), t.ms());
            run.run.exposed.iter().map(of).collect()
        }),
    ];
    Page {
        title: names.join(" │ "),
        verdict: runs.first().zip(runs.get(1)).map(|(a, b)| verdict(a, b)),
        tables: tables.into_iter().filter(|t| !t.rows.is_empty()).collect(),
        losses: runs
            .iter()
            .zip(&names)
            .filter(|(r, _)| !r.run.losses.is_empty())
            .map(|(r, name)| Series {
                name: name.clone(),
                values: r.run.losses.clone(),
            })
            .collect(),
    }
}

fn verdict(a: &RunView, b: &RunView) -> (Tone, String) {
    let share = 100.0 * (b.step_ms() / a.step_ms() - 1.0);
    let (tone, word) = match share {
        s if !s.is_finite() => (Tone::Plain, "is not comparable in time"),
        s if s.abs() < 0.05 => (Tone::Plain, "takes as long"),
        s if s < 0.0 => (Tone::Good, "is faster"),
        _ => (Tone::Bad, "is slower"),
    };
    let memory = b.run.memory.peak_device.0 as f64 - a.run.memory.peak_device.0 as f64;
    let text = format!(
        "Run 1 {word}: {:.2} ms against {:.2} ms ({share:+.2} %), {:+.2} GiB at the peak.",
        b.step_ms(),
        a.step_ms(),
        memory / (1u64 << 30) as f64,
    );
    (tone, text)
}

fn header(names: &[String]) -> Vec<String> {
    let columns = names.iter().map(|n| format!(">{n}"));
    std::iter::once(String::new()).chain(columns).collect()
}

fn metrics(runs: &[Arc<RunView>], names: &[String]) -> Table {
    type Metric = (&'static str, fn(&RunView) -> f64, usize, Option<bool>);
    const GIB: f64 = (1u64 << 30) as f64;
    // Name, value, digits, whether less is better.
    let metrics: [Metric; 9] = [
        ("step ms", RunView::step_ms, 2, Some(true)),
        (
            "tokens/s/GPU",
            |r| r.run.tokens as f64 / (r.step_ms() / 1e3),
            0,
            Some(false),
        ),
        ("MFU %", |r| 100.0 * r.run.mfu, 1, None),
        ("exposed ms", RunView::exposed_ms, 2, Some(true)),
        ("host ms", |r| r.run.host.ms(), 2, Some(true)),
        (
            "allocated GiB",
            |r| r.run.memory.peak_allocated.0 as f64 / GIB,
            3,
            Some(true),
        ),
        (
            "reserved GiB",
            |r| r.run.memory.peak_reserved.0 as f64 / GIB,
            3,
            Some(true),
        ),
        (
            "device GiB",
            |r| r.run.memory.peak_device.0 as f64 / GIB,
            3,
            Some(true),
        ),
        (
            "last loss",
            |r| r.run.losses.last().copied().unwrap_or(f64::NAN),
            5,
            None,
        ),
    ];
    let mut table = Table {
        header: header(names),
        ..Table::new("Metrics (* best)", &[])
    };
    for (name, value, digits, less) in metrics {
        let values: Vec<f64> = runs.iter().map(|r| value(r)).collect();
        if values.iter().all(|v| !v.is_finite()) {
            continue;
        }
        let best = less.and_then(|less| {
            let finite = values.iter().copied().filter(|v| v.is_finite());
            finite.reduce(if less { f64::min } else { f64::max })
        });
        let worst_equal = values.iter().all(|v| Some(*v) == best);
        let cells = values.iter().map(|v| {
            if !v.is_finite() {
                return "-".to_owned();
            }
            let star = if Some(*v) == best && !worst_equal {
                " *"
            } else {
                ""
            };
            format!("{v:.digits$}{star}")
        });
        table.row(Tone::Plain, std::iter::once(name.to_owned()).chain(cells));
    }
    table
}

fn options(runs: &[Arc<RunView>], names: &[String]) -> Table {
    let mut table = Table {
        header: header(names),
        ..Table::new("Options that differ", &[])
    };
    let scenarios: Vec<_> = runs.iter().map(|r| &r.scenario).collect();
    for d in differences(&scenarios) {
        let values = d
            .values
            .into_iter()
            .map(|v| v.unwrap_or_else(|| "-".into()));
        table.row(Tone::Plain, std::iter::once(d.key).chain(values));
    }
    table
}

fn times(
    title: &str,
    runs: &[Arc<RunView>],
    names: &[String],
    of: impl Fn(&RunView) -> BTreeMap<String, f64>,
) -> Table {
    let all: Vec<BTreeMap<String, f64>> = runs.iter().map(|r| of(r)).collect();
    let mut keys: Vec<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    keys.sort_unstable();
    keys.dedup();
    let largest = |key: &String| {
        all.iter()
            .filter_map(|m| m.get(key))
            .copied()
            .fold(0.0, f64::max)
    };
    keys.sort_by(|a, b| largest(b).total_cmp(&largest(a)));
    let mut table = Table {
        header: header(names),
        ..Table::new(title, &[])
    };
    for key in keys {
        let base = all[0].get(key).copied().unwrap_or(0.0);
        let cells = all.iter().enumerate().map(|(i, m)| {
            let v = m.get(key).copied().unwrap_or(0.0);
            if i == 0 {
                format!("{v:.3}")
            } else {
                format!("{v:.3} ({:+.3})", v - base)
            }
        });
        table.row(Tone::Plain, std::iter::once(key.clone()).chain(cells));
    }
    table
}

fn by_work(view: &RunView) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for span in view.run.spans.iter().filter(|s| s.stream.0 == 0) {
        let work = view
            .instr(span.instr)
            .and_then(|i| i.work)
            .map_or("other", Work::name);
        *sums.entry(work.to_owned()).or_insert(0.0) += (span.end.saturating_sub(span.start)).ms();
    }
    sums
}

fn by_phase(view: &RunView) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for span in view.run.spans.iter().filter(|s| s.stream.0 == 0) {
        let phase = view.instr(span.instr).map_or("other", |i| i.phase.name());
        *sums.entry(phase.to_owned()).or_insert(0.0) += (span.end.saturating_sub(span.start)).ms();
    }
    sums
}
