//! The time of the recorded step by phase, unit, stream and kind of work.

use super::places::Sums;
use crate::view::{InstrView, RunView};
use serde::Serialize;
use shardlab_plan::ir::COMPUTE;
use shardlab_plan::record::Span;
use shardlab_plan::units::{Picos, signed};

/// A part of the step in both runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Name.
    pub name: String,
    /// Time in A and B.
    pub time: [Picos; 2],
}

impl Part {
    /// Returns the cells of a table: the name, and times and their change in milliseconds.
    #[must_use]
    pub fn cells(&self) -> [String; 4] {
        let [a, b] = self.time;
        [
            self.name.clone(),
            a.show_ms(3),
            b.show_ms(3),
            signed(b.ms() - a.ms(), 3),
        ]
    }
}

/// The time of a step, broken down in several ways. Each list is sorted by change, largest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Breakdown {
    /// Wall time by phase: kernels of the compute stream, including the waits before them. Adds up
    /// to the step time.
    pub by_phase: Vec<Part>,
    /// Wall time by unit.
    pub by_unit: Vec<Part>,
    /// Busy time by stream.
    pub by_stream: Vec<Part>,
    /// Busy time by kind of work, on all streams.
    pub by_kind: Vec<Part>,
    /// Busy time of the compute stream.
    pub compute: [Picos; 2],
    /// Busy time of the compute stream by kind of work. Its sum and the exposed time add up to the
    /// step time, which excludes hidden work on other streams.
    pub compute_by_kind: Vec<Part>,
}

/// Name of the time after the last kernel.
pub(super) const END: &str = "end of step";

impl Breakdown {
    /// Returns the breakdown. It is empty if one of the runs has no spans, because the parts of its
    /// step are then unknown.
    pub(super) fn new(sides: [&RunView; 2]) -> Self {
        if !sides.iter().all(|s| s.is_recorded()) {
            return Self {
                by_phase: Vec::new(),
                by_unit: Vec::new(),
                by_stream: Vec::new(),
                by_kind: Vec::new(),
                compute: [Picos::ZERO; 2],
                compute_by_kind: Vec::new(),
            };
        }
        let mut phase = Sums::new();
        let mut unit = Sums::new();
        let mut stream = Sums::new();
        let mut kind = Sums::new();
        let mut compute = [Picos::ZERO; 2];
        let mut compute_kind = Sums::new();
        for (side, view) in sides.into_iter().enumerate() {
            for span in &view.run.spans {
                let (from, to) = clipped(view, span);
                let time = to.saturating_sub(from).0;
                stream.add(view.stream(span), side, time);
                if let Some(work) = view.instr(span.instr).and_then(|i| i.work) {
                    kind.add(work.name(), side, time);
                }
            }
            for Wall {
                instr, wall, busy, ..
            } in walls(view)
            {
                compute[side] += busy;
                if let Some(work) = instr.and_then(|i| i.work) {
                    compute_kind.add(work.name(), side, busy.0);
                }
                let names = instr.map_or((END, END), |i| (i.phase.name(), view.unit(i.unit)));
                phase.add(names.0, side, wall.0);
                unit.add(names.1, side, wall.0);
            }
        }
        Self {
            by_phase: parts(phase),
            by_unit: parts(unit),
            by_stream: parts(stream),
            by_kind: parts(kind),
            compute,
            compute_by_kind: parts(compute_kind),
        }
    }
}

fn parts(sums: Sums<&str>) -> Vec<Part> {
    sums.by_change()
        .into_iter()
        .filter(|(_, time)| *time != [0, 0])
        .map(|(name, time)| Part {
            name: name.to_owned(),
            time: time.map(Picos),
        })
        .collect()
}

/// Returns the part of a span within the recorded step.
fn clipped(view: &RunView, span: &Span) -> (Picos, Picos) {
    let run = &view.run;
    (
        span.start.max(run.recorded_from),
        span.end.min(run.recorded_to).max(run.recorded_from),
    )
}

/// A kernel of the compute stream with the wait before it.
pub(super) struct Wall<'a> {
    /// Its instruction; `None` after the last kernel.
    pub(super) instr: Option<&'a InstrView>,
    /// End of the kernel before it.
    pub(super) reached: Picos,
    /// Start.
    pub(super) from: Picos,
    /// Time including the wait.
    pub(super) wall: Picos,
    /// Time without it.
    pub(super) busy: Picos,
}

/// Returns the kernels of the compute stream, then the time after the last one. Wall times add up
/// to the recorded step.
pub(super) fn walls(view: &RunView) -> Vec<Wall<'_>> {
    let mut reached = view.run.recorded_from;
    let mut all = Vec::new();
    for span in view.run.spans.iter().filter(|s| s.stream == COMPUTE) {
        let (from, to) = clipped(view, span);
        all.push(Wall {
            instr: view.instr(span.instr),
            reached,
            from: from.max(reached),
            wall: to.saturating_sub(reached),
            busy: to.saturating_sub(from.max(reached)),
        });
        reached = reached.max(to);
    }
    let end = view.run.recorded_to.max(reached);
    all.push(Wall {
        instr: None,
        reached,
        from: end,
        wall: end - reached,
        busy: Picos::ZERO,
    });
    all
}
