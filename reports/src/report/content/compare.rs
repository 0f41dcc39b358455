//! Exposed time, peaks, predictions and curves of several runs.

use super::{bytes, number};
use crate::compare::{Pair, Side, pair};
use crate::plots::{self, Curve};
use crate::report::{Block, Item, Section, Table};
use crate::stats::Options;
use crate::view::Work;
use shardlab_plan::ir::{CollectiveKind, Role};
use shardlab_plan::record::{Cause, RunKind};
use shardlab_plan::units::signed;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of instructions with the largest errors that are listed.
const WORST: usize = 10;
/// Maximum number of curves that are compared with the first in a sentence.
const CURVES_COMPARED: usize = 6;

fn titles(first: &str, items: &[Item]) -> Vec<String> {
    std::iter::once(first.to_owned())
        .chain(items.iter().map(|i| format!(">{}", i.label)))
        .collect()
}

/// Explains in sentences why two runs differ. The verdict on their step times is in an earlier
/// section.
pub(super) fn why(items: &[Item]) -> Option<Section> {
    let [a, b] = items else { return None };
    let pair = judged([&a.label, &b.label], [a, b]);
    let blocks: Vec<Block> = pair.reasons().iter().cloned().map(Block::Text).collect();
    (!blocks.is_empty()).then(|| Section {
        id: "why",
        title: "Why they differ".to_owned(),
        blocks,
    })
}

/// Compares two runs.
pub(super) fn judged(labels: [&str; 2], [a, b]: [&Item; 2]) -> Pair {
    let sides = [Side::new(labels[0], &a.view), Side::new(labels[1], &b.view)];
    pair(sides[0], sides[1], &Options::default())
}

pub(super) fn exposed(items: &[Item]) -> Option<Section> {
    let causes: BTreeSet<Cause> = items
        .iter()
        .flat_map(|i| i.view.run.exposed.keys().copied())
        .collect();
    if causes.is_empty() {
        return None;
    }
    let of = |i: &Item, c: Cause| i.view.run.exposed.get(&c).map_or(0.0, |t| t.ms());
    let mut rows: Vec<Vec<String>> = causes
        .iter()
        .map(|&c| {
            let cells = items.iter().map(|i| number(of(i, c), 3));
            std::iter::once(c.name().to_owned()).chain(cells).collect()
        })
        .collect();
    let total = items.iter().map(|i| number(i.view.exposed_ms(), 3));
    rows.push(std::iter::once("all".to_owned()).chain(total).collect());
    let kinds: BTreeSet<CollectiveKind> = items
        .iter()
        .flat_map(|i| i.view.run.collectives.keys().copied())
        .collect();
    // One row per run: side-by-side columns would be wider than paper.
    let of_kind = |k: &CollectiveKind| {
        let k = *k;
        items.iter().flat_map(move |i| {
            let s = i.view.run.collectives.get(&k);
            let all = s.map(|s| {
                vec![
                    k.name().to_owned(),
                    i.label.clone(),
                    s.count.to_string(),
                    bytes(s.bytes.0 / u64::from(s.count.max(1))),
                    number(s.busy.ms(), 3),
                    number(s.exposed.ms(), 3),
                ]
            });
            all.into_iter().chain(s.and(tokens(i, k)))
        })
    };
    let collectives: Vec<Vec<String>> = kinds.iter().flat_map(of_kind).collect();
    let mut blocks = vec![Block::Table(Table {
        caption: "Time with the compute stream idle, milliseconds per step".to_owned(),
        head: titles("cause", items),
        rows,
    })];
    if !collectives.is_empty() {
        blocks.push(Block::Table(Table {
            caption: "Collectives per step; average bytes per call".to_owned(),
            head: [
                "kind",
                "run",
                ">times",
                ">bytes",
                ">busy ms",
                ">not overlapped ms",
            ]
            .map(str::to_owned)
            .into(),
            rows: collectives,
        }));
    }
    Some(Section {
        id: "exposed",
        title: "Exposed time".to_owned(),
        blocks,
    })
}

/// Returns the row for those of a run's collectives of a kind that carry tokens of experts, if
/// other collectives of this kind carry something else.
fn tokens(item: &Item, kind: CollectiveKind) -> Option<Vec<String>> {
    let found = item.view.experts.as_ref()?.exchanges.get(&kind)?;
    let all = item.view.run.collectives.get(&kind)?.count;
    (found.count < all).then(|| {
        vec![
            format!("{}: tokens of experts", kind.name()),
            item.label.clone(),
            found.count.to_string(),
            bytes(found.bytes / u64::from(found.count.max(1))),
            number(found.busy_ms, 3),
            number(found.exposed_ms, 3),
        ]
    })
}

/// Returns the composition of the peak of each run.
pub(super) fn composition(items: &[Item]) -> Option<Block> {
    let of = |i: &Item, role: Role| {
        let found = i.view.run.memory.by_role.iter().find(|(r, _)| *r == role);
        found.map_or(0, |(_, b)| b.0)
    };
    let rows: Vec<Vec<String>> = Role::ALL
        .into_iter()
        .filter(|r| items.iter().any(|i| of(i, *r) > 0))
        .map(|r| {
            let cells = items.iter().map(|i| bytes(of(i, r)));
            std::iter::once(r.name().to_owned()).chain(cells).collect()
        })
        .collect();
    if rows.is_empty() {
        return None;
    }
    // A trace shows only memory that was allocated while it was recorded.
    let rest = |i: &Item| {
        let memory = &i.view.run.memory;
        let known: u64 = memory.by_role.iter().map(|(_, b)| b.0).sum();
        memory.peak_allocated.0.saturating_sub(known)
    };
    let cell = |i: &Item, n: u64| match i.view.run.memory.is_recorded() {
        true => bytes(n),
        false => "not recorded".to_owned(),
    };
    let unknown = items.iter().any(|i| rest(i) > 0).then(|| {
        let cells = items.iter().map(|i| cell(i, rest(i)));
        std::iter::once("unknown".to_owned()).chain(cells).collect()
    });
    let place = |i: &Item| {
        if !i.view.run.memory.is_recorded() {
            return String::new();
        }
        let at = &i.view.run.memory.at;
        format!("{} {}", at.phase.name(), i.view.unit(at.unit))
    };
    let places = std::iter::once("where".to_owned()).chain(items.iter().map(place));
    let total = items
        .iter()
        .map(|i| cell(i, i.view.run.memory.peak_allocated.0));
    let total = std::iter::once("all".to_owned()).chain(total);
    let rows = rows
        .into_iter()
        .chain(unknown)
        .chain([total.collect(), places.collect()]);
    Some(Block::Table(Table {
        caption: "Allocated at the peak".to_owned(),
        head: titles("role", items),
        rows: rows.collect(),
    }))
}

/// Instructions with the same name, size and phase, and their times in both runs.
struct Group {
    name: String,
    work: Work,
    count: u32,
    predicted: f64,
    measured: f64,
}

pub(super) fn prediction(items: &[Item]) -> Option<Section> {
    let measured = items.iter().filter(|i| i.view.run.kind.is_measured());
    let mut blocks = Vec::new();
    for (i, exec) in measured.enumerate() {
        let digest = &exec.view.program.digest;
        let sim = items
            .iter()
            .find(|s| s.view.run.kind == RunKind::Sim && s.view.program.digest == *digest);
        let Some(sim) = sim else { continue };
        let groups = groups(sim, exec);
        if groups.is_empty() {
            continue;
        }
        let mut kinds: BTreeMap<Work, Vec<(f64, f64)>> = BTreeMap::new();
        for g in &groups {
            kinds
                .entry(g.work)
                .or_default()
                .push((g.predicted, g.measured));
        }
        let kinds: Vec<(String, Vec<(f64, f64)>)> = kinds
            .into_iter()
            .map(|(k, p)| (k.name().to_owned(), p))
            .collect();
        let title = format!("{} (predicted) vs. {} (measured)", sim.label, exec.label);
        blocks.push(Block::Plot(plots::scatter(
            &format!("prediction-{i}"),
            &title,
            &kinds,
        )));
        blocks.push(Block::Table(worst(&title, groups)));
    }
    (!blocks.is_empty()).then(|| Section {
        id: "prediction",
        title: "Prediction vs. measurement".to_owned(),
        blocks,
    })
}

/// Matches the spans of both runs by instruction, and groups them by name, kind and size.
fn groups(sim: &Item, exec: &Item) -> Vec<Group> {
    let times = |item: &Item| -> BTreeMap<u32, f64> {
        let spans = item.view.run.spans.iter();
        spans
            .map(|s| (s.instr.0, (s.end.0.saturating_sub(s.start.0)) as f64 / 1e6))
            .collect()
    };
    let (predicted, measured) = (times(sim), times(exec));
    let mut all: BTreeMap<(u32, Work, u64, u64), Group> = BTreeMap::new();
    for (id, us) in &measured {
        let instr = exec.view.instr(shardlab_plan::ir::InstrId(*id));
        let (Some(p), Some(instr)) = (predicted.get(id), instr) else {
            continue;
        };
        let Some(work) = instr.work else { continue };
        let g = all
            .entry((instr.name, work, instr.bytes, instr.flops))
            .or_insert_with(|| Group {
                name: format!("{} ({})", exec.view.name_of(instr), bytes(instr.bytes)),
                work,
                count: 0,
                predicted: 0.0,
                measured: 0.0,
            });
        g.count += 1;
        g.predicted += p;
        g.measured += us;
    }
    let mut out: Vec<Group> = all.into_values().collect();
    for g in &mut out {
        g.predicted /= f64::from(g.count);
        g.measured /= f64::from(g.count);
    }
    out
}

fn worst(title: &str, mut groups: Vec<Group>) -> Table {
    let off = |g: &Group| (g.measured - g.predicted) * f64::from(g.count);
    groups.sort_by(|a, b| off(b).abs().total_cmp(&off(a).abs()));
    let rows = groups
        .iter()
        .take(WORST)
        .map(|g| {
            vec![
                g.name.clone(),
                g.work.name().to_owned(),
                g.count.to_string(),
                number(g.predicted, 1),
                number(g.measured, 1),
                signed(off(g) / 1e3, 3),
            ]
        })
        .collect();
    let head = [
        "instruction",
        "kind",
        ">times",
        ">predicted us",
        ">measured us",
        ">off by ms per step",
    ];
    Table {
        caption: format!("{title}: largest differences"),
        head: head.map(str::to_owned).into(),
        rows,
    }
}

pub(super) fn losses(items: &[Item]) -> Option<Section> {
    let of = |values: fn(&Item) -> &[f64]| -> Vec<Curve> {
        let some = items.iter().filter(|i| !values(i).is_empty());
        some.map(|i| Curve {
            label: i.label.clone(),
            values: values(i).to_vec(),
        })
        .collect()
    };
    let losses = of(|i| &i.view.run.losses);
    let norms = of(|i| i.view.run.reported_grad_norms());
    let mut blocks = Vec::new();
    if !losses.is_empty() {
        blocks.push(Block::Plot(plots::curves(
            "losses", "Losses", "loss", &losses,
        )));
    }
    if let Some((first, rest)) = losses.split_first() {
        for other in rest.iter().take(CURVES_COMPARED) {
            blocks.push(Block::Text(apart(first, other)));
        }
    }
    if norms.iter().any(|c| c.values.iter().any(|x| x.is_finite())) {
        let title = "Gradient norms";
        blocks.push(Block::Plot(plots::curves(
            "grad-norms",
            title,
            "norm",
            &norms,
        )));
    }
    (!blocks.is_empty()).then(|| Section {
        id: "convergence",
        title: "Convergence".to_owned(),
        blocks,
    })
}

/// Describes where two curves diverge.
fn apart(a: &Curve, b: &Curve) -> String {
    let steps = a.values.len().min(b.values.len());
    let pairs = || a.values.iter().zip(&b.values).enumerate();
    let first = pairs().find(|(_, (x, y))| x.to_bits() != y.to_bits());
    let Some((first, _)) = first else {
        return format!(
            "The losses of {} and {} are bitwise identical over {steps} steps.",
            a.label, b.label
        );
    };
    let most = pairs()
        .map(|(i, (x, y))| (i, (y - x).abs()))
        .max_by(|p, q| p.1.total_cmp(&q.1));
    let (at, most) = most.unwrap_or((first, f64::NAN));
    format!(
        "The losses of {} and {} diverge at step {}; the largest difference is {most:.3e} at step {} of {steps}.",
        a.label,
        b.label,
        first + 1,
        at + 1
    )
}
