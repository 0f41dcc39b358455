//! Matches the spans of two runs and compares their times.

use super::places::{Common, Sums, change};
use crate::view::{RunView, Work};
use serde::Serialize;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::Phase;
use shardlab_plan::record::Span;
use shardlab_plan::units::{Picos, signed};

/// Maximum number of changes that are listed.
const MAX_LISTED: usize = 10;

/// How two runs were aligned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alignment {
    /// `instruction` if the programs are the same, otherwise `unit and phase`.
    pub by: &'static str,
    /// Number of spans with a counterpart.
    pub matched: usize,
    /// Number of spans of A and of B without a counterpart.
    pub unmatched: [usize; 2],
}

impl Alignment {
    /// Describes how many spans have no counterpart; `None` if all have one. `a` and `b` are the
    /// names of the runs.
    #[must_use]
    pub fn sentence(&self, a: &str, b: &str) -> Option<String> {
        let lack = |n: usize| self.matched + n == 0;
        let [of_a, of_b] = self.unmatched;
        Some(match (lack(of_a), lack(of_b)) {
            (false, false) if of_a + of_b == 0 => return None,
            (false, false) => format!(
                "Aligned by {}: {} spans match, {of_a} of {a} and {of_b} of {b} have no counterpart.",
                self.by, self.matched
            ),
            (true, true) => "Neither run has recorded instructions.".to_owned(),
            (true, false) => format!("{a} has no recorded instructions."),
            (false, true) => format!("{b} has no recorded instructions."),
        })
    }
}

/// Matched spans of two runs.
pub struct Aligned<'a> {
    sides: [&'a RunView; 2],
    by: &'static str,
    pairs: Vec<[&'a Span; 2]>,
    unmatched: [Vec<&'a Span>; 2],
}

/// A span whose time changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Kernel, collective or copy.
    pub name: String,
    /// Unit.
    pub unit: String,
    /// Phase.
    pub phase: &'static str,
    /// Micro-batch.
    pub micro_batch: u16,
    /// Instruction in A and B.
    pub instr: [InstrId; 2],
    /// Duration in A and B.
    pub time: [Picos; 2],
}

impl Change {
    /// Returns the cells of a table: name, unit, phase, instruction in A, and durations and their
    /// change in microseconds.
    #[must_use]
    pub fn cells(&self) -> [String; 7] {
        let [a, b] = self.time.map(Picos::us);
        [
            self.name.clone(),
            self.unit.clone(),
            self.phase.to_owned(),
            self.instr[0].0.to_string(),
            format!("{a:.1}"),
            format!("{b:.1}"),
            signed(b - a, 1),
        ]
    }
}

/// Errors of a prediction, relative to a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Which side is the measurement: 0 for A, 1 for B.
    pub measured: usize,
    /// Errors by kind of work, most measured time first.
    pub by_kind: Vec<KindError>,
    /// Instructions with the largest errors.
    pub worst: Vec<Change>,
    /// Relative error of the step time: predicted / measured - 1.
    pub step_error: f64,
}

/// Error of the prediction of one kind of work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindError {
    /// Kind.
    pub work: Work,
    /// Number of instructions.
    pub count: u32,
    /// Sum of the predicted times.
    pub predicted: Picos,
    /// Sum of the measured times.
    pub measured: Picos,
    /// Predicted / measured - 1.
    pub error: f64,
    /// Mean of the absolute relative errors, weighted by measured time.
    pub mean_error: f64,
}

impl KindError {
    /// Heads of the columns of [`Self::cells`].
    pub const HEADS: [&str; 6] = [
        "kind",
        ">count",
        ">predicted ms",
        ">measured ms",
        ">error %",
        ">mean |error| %",
    ];

    /// Returns the cells of a table.
    #[must_use]
    pub fn cells(&self) -> [String; 6] {
        [
            self.work.name().to_owned(),
            self.count.to_string(),
            self.predicted.show_ms(3),
            self.measured.show_ms(3),
            signed(100.0 * self.error, 1),
            format!("{:.1}", 100.0 * self.mean_error),
        ]
    }
}

/// Identifies a span across different programs: name, unit, stream, phase and micro-batch. Spans
/// with the same place are numbered.
type Place = (u32, u32, u32, Phase, u16);

impl<'a> Aligned<'a> {
    pub(super) fn new(a: &'a RunView, b: &'a RunView) -> Self {
        let same = a.program.digest == b.program.digest && !a.program.digest.is_empty();
        let mut common = Common::new();
        let [keyed_a, keyed_b] = if same {
            [by_instr(a), by_instr(b)]
        } else {
            [by_place(a, &mut common), by_place(b, &mut common)]
        };
        let (mut pairs, mut unmatched) = (Vec::new(), [Vec::new(), Vec::new()]);
        let (mut i, mut j) = (0, 0);
        while let (Some(x), Some(y)) = (keyed_a.get(i), keyed_b.get(j)) {
            match x.0.cmp(&y.0) {
                std::cmp::Ordering::Equal => {
                    pairs.push([x.1, y.1]);
                    i += 1;
                    j += 1;
                }
                std::cmp::Ordering::Less => {
                    unmatched[0].push(x.1);
                    i += 1;
                }
                std::cmp::Ordering::Greater => {
                    unmatched[1].push(y.1);
                    j += 1;
                }
            }
        }
        unmatched[0].extend(keyed_a[i..].iter().map(|k| k.1));
        unmatched[1].extend(keyed_b[j..].iter().map(|k| k.1));
        Self {
            sides: [a, b],
            by: if same {
                "instruction"
            } else {
                "unit and phase"
            },
            pairs,
            unmatched,
        }
    }

    pub(super) fn into_alignment(self) -> Alignment {
        Alignment {
            by: self.by,
            matched: self.pairs.len(),
            unmatched: self.unmatched.map(|u| u.len()),
        }
    }

    /// Returns the matched spans whose durations changed, largest change first.
    pub(super) fn changes(&self) -> Vec<Change> {
        let mut order: Vec<(u64, usize)> = self
            .pairs
            .iter()
            .enumerate()
            .map(|(i, pair)| (change(durations(pair)), i))
            .filter(|(change, _)| *change > 0)
            .collect();
        order.sort_by(|x, y| y.0.cmp(&x.0).then(x.1.cmp(&y.1)));
        let largest = order.into_iter().take(MAX_LISTED);
        largest
            .filter_map(|(_, i)| self.change(&self.pairs[i]))
            .collect()
    }

    fn change(&self, pair: &[&Span; 2]) -> Option<Change> {
        let a = self.sides[0];
        let instr = a.instr(pair[0].instr)?;
        Some(Change {
            name: a.name_of(instr).to_owned(),
            unit: a.unit(instr.unit).to_owned(),
            phase: instr.phase.name(),
            micro_batch: instr.micro_batch,
            instr: [pair[0].instr, pair[1].instr],
            time: durations(pair).map(Picos),
        })
    }

    pub(super) fn prediction(&self) -> Option<Prediction> {
        let measured = match self.sides.map(|s| s.run.kind.is_measured()) {
            [true, false] => 0,
            [false, true] => 1,
            _ => return None,
        };
        // The prediction may be of another program than the measurement. The program of an imported
        // run is unknown, so the user chooses the prediction.
        let [x, y] = self.sides;
        let imported = self.sides[measured].program.digest.is_empty();
        if !imported && x.program.digest != y.program.digest && x.run.scenario != y.run.scenario {
            return None;
        }
        let mut sums: Sums<Work> = Sums::new();
        let mut absolute: Sums<Work> = Sums::new();
        for pair in &self.pairs {
            let Some(work) = self.sides[0].instr(pair[0].instr).and_then(|i| i.work) else {
                continue;
            };
            let times = durations(pair);
            let (got, predicted) = (times[measured], times[1 - measured]);
            sums.add(work, 0, predicted);
            sums.add(work, 1, got);
            absolute.add(work, 0, predicted.abs_diff(got));
            absolute.add(work, 1, 1);
        }
        let ratio = |x: f64, y: f64| if y > 0.0 { x / y } else { f64::NAN };
        let mut by_kind: Vec<KindError> = sums
            .0
            .into_iter()
            .map(|(work, [predicted, got])| {
                let [off, count] = absolute.0.get(&work).copied().unwrap_or_default();
                KindError {
                    work,
                    count: count as u32,
                    predicted: Picos(predicted),
                    measured: Picos(got),
                    error: ratio(predicted as f64, got as f64) - 1.0,
                    mean_error: ratio(off as f64, got as f64),
                }
            })
            .collect();
        by_kind.sort_by(|x, y| y.measured.cmp(&x.measured).then(x.work.cmp(&y.work)));
        let step = self.sides.map(RunView::step_ms);
        Some(Prediction {
            measured,
            by_kind,
            worst: self.changes(),
            step_error: ratio(step[1 - measured], step[measured]) - 1.0,
        })
    }
}

fn durations(pair: &[&Span; 2]) -> [u64; 2] {
    pair.map(|s| s.end.saturating_sub(s.start).0)
}

/// Returns spans by instruction. A repeated instruction has several numbered places.
fn by_instr(view: &RunView) -> Vec<((Place, u32), &Span)> {
    let none = (0, 0, 0, Phase::Init, 0);
    let mut all: Vec<((Place, u32), &Span)> = view
        .run
        .spans
        .iter()
        .map(|s| (((s.instr.0, none.1, none.2, none.3, none.4), 0), s))
        .collect();
    number(&mut all);
    all
}

/// Returns spans by place, in order of launch if several share a place.
fn by_place<'a>(view: &'a RunView, common: &mut Common<'a>) -> Vec<((Place, u32), &'a Span)> {
    let names = common.of(&view.names);
    let units = common.of(&view.program.units);
    let streams = common.of(&view.program.streams);
    let at = |all: &[u32], i: usize| all.get(i).copied().unwrap_or(u32::MAX);
    let mut all: Vec<((Place, u32), &Span)> = view
        .run
        .spans
        .iter()
        .filter_map(|span| {
            let i = view.instr(span.instr)?;
            let place = (
                at(&names, i.name as usize),
                at(&units, i.unit.index()),
                at(&streams, span.stream.index()),
                i.phase,
                i.micro_batch,
            );
            Some(((place, 0), span))
        })
        .collect();
    number(&mut all);
    all
}

/// Sorts spans by place and numbers those that share one.
fn number(all: &mut [((Place, u32), &Span)]) {
    // The sort is stable and keeps the order of launch within a place.
    all.sort_by_key(|x| x.0.0);
    for i in 1..all.len() {
        if all[i].0.0 == all[i - 1].0.0 {
            all[i].0.1 = all[i - 1].0.1 + 1;
        }
    }
}
