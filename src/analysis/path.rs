//! Summary of the critical path.

use super::spans::{self, Work};
use serde::Serialize;
use shardlab_plan::Program;
use shardlab_plan::record::{Run, Span};
use shardlab_plan::units::Picos;
use shardlab_reports::RunView;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The chain of spans that determines when the step ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CriticalPath {
    /// Number of spans on the path.
    pub spans: u32,
    /// Time from the start of the first span to the end of the last, within the recorded step.
    pub length: Picos,
    /// Time of the spans by kind of work, largest first.
    pub by_work: Vec<(Work, Picos)>,
    /// Idle time between spans of the path: launch gaps and waits.
    pub between: Picos,
    /// Time before the first span, spent on the host.
    pub host_first: Picos,
    /// Time of the spans by unit, largest first.
    pub by_unit: Vec<(String, Picos)>,
    /// The longest runs of consecutive spans with the same kind, unit and phase.
    pub pieces: Vec<Piece>,
}

/// Consecutive spans of the path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Piece {
    /// Start, relative to the start of the step.
    pub start: Picos,
    /// Duration.
    pub length: Picos,
    /// Number of spans.
    pub spans: u32,
    /// Kind of work.
    pub work: Work,
    /// Unit.
    pub unit: String,
    /// Phase.
    pub phase: &'static str,
}

impl Piece {
    /// Heads of the columns of [`Self::cells`].
    pub const HEADS: [&str; 6] = [
        "longest pieces",
        "unit",
        "phase",
        ">kernels",
        ">at ms",
        ">ms",
    ];

    /// Returns the cells of a table.
    #[must_use]
    pub fn cells(&self) -> [String; 6] {
        [
            self.work.name().to_owned(),
            self.unit.clone(),
            self.phase.to_owned(),
            self.spans.to_string(),
            self.start.show_ms(2),
            self.length.show_ms(3),
        ]
    }
}

/// Returns the summary of the critical path of a program's run. It is empty without spans.
#[must_use]
pub fn critical_path(program: &Program, run: &Run) -> CriticalPath {
    summary(run, |span| {
        Some(About {
            work: Work::of(program, span.instr)?,
            unit: spans::unit(program, span),
            phase: program.instrs[span.instr.index()].phase.name(),
        })
    })
}

/// Returns the summary of a saved or imported run's critical path. It is empty without spans.
#[must_use]
pub(crate) fn of_view(view: &RunView) -> CriticalPath {
    summary(&view.run, |span| {
        let instr = view.instr(span.instr)?;
        Some(About {
            work: instr.work?,
            unit: view.unit(instr.unit),
            phase: instr.phase.name(),
        })
    })
}

/// What a span does.
struct About<'a> {
    work: Work,
    unit: &'a str,
    phase: &'static str,
}

fn summary<'a>(run: &Run, about: impl Fn(&Span) -> Option<About<'a>>) -> CriticalPath {
    let chain = run.critical_path();
    let mut path = CriticalPath {
        spans: chain.len() as u32,
        ..CriticalPath::default()
    };
    let (Some(&first), Some(&last)) = (chain.first(), chain.last()) else {
        return path;
    };
    let (from, to) = (run.spans[first].start, run.spans[last].end);
    path.length = to.saturating_sub(from);
    path.host_first = from.saturating_sub(run.recorded_from);
    let mut by_work: BTreeMap<Work, Picos> = BTreeMap::new();
    let mut by_unit: BTreeMap<&'a str, Picos> = BTreeMap::new();
    let mut reached = from;
    let mut pieces: Vec<Piece> = Vec::new();
    for &i in &chain {
        let span = &run.spans[i];
        let Some(About { work, unit, phase }) = about(span) else {
            continue;
        };
        let time = span.end.saturating_sub(span.start.max(reached));
        path.between += span.start.saturating_sub(reached);
        reached = reached.max(span.end);
        *by_work.entry(work).or_default() += time;
        *by_unit.entry(unit).or_default() += time;
        let start = span.start.saturating_sub(run.recorded_from);
        match pieces.last_mut() {
            Some(p) if p.work == work && p.unit == unit && p.phase == phase => {
                p.spans += 1;
                p.length = span
                    .end
                    .saturating_sub(run.recorded_from)
                    .saturating_sub(p.start);
            }
            _ => pieces.push(Piece {
                start,
                length: span.end - span.start,
                spans: 1,
                work,
                unit: unit.to_owned(),
                phase,
            }),
        }
    }
    pieces.sort_by(|a, b| b.length.cmp(&a.length).then(a.start.cmp(&b.start)));
    pieces.truncate(10);
    path.pieces = pieces;
    path.by_work = by_work.into_iter().collect();
    path.by_work.sort_by_key(|&(_, time)| Reverse(time));
    path.by_unit = by_unit
        .into_iter()
        .map(|(u, t)| (u.to_owned(), t))
        .collect();
    path.by_unit
        .sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    path
}
