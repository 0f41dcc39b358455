//! Predicted and measured time of each unit, and what explains the difference.

use super::breakdown::walls;
use super::places::Sums;
use crate::view::RunView;
use serde::Serialize;
use shardlab_plan::record::Cause;
use shardlab_plan::units::Picos;
use std::collections::BTreeMap;

/// Wall time of a unit: its kernels on the compute stream and the waits before them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitTime {
    /// Unit.
    pub unit: String,
    /// Predicted time.
    pub predicted: Picos,
    /// Measured time.
    pub measured: Picos,
    /// The part that explains most of the difference; `None` if the times are equal.
    pub cause: Option<UnitCause>,
}

/// A part of a unit's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnitCause {
    /// Kind of kernels, or the cause of a wait.
    pub part: String,
    /// Its predicted time.
    pub predicted: Picos,
    /// Its measured time.
    pub measured: Picos,
}

/// Returns the units of a prediction and a measurement, largest difference first. It is empty if
/// one of the runs has no spans.
pub(super) fn units(predicted: &RunView, measured: &RunView) -> Vec<UnitTime> {
    let sides = [predicted, measured];
    if !sides.iter().all(|s| s.is_recorded()) {
        return Vec::new();
    }
    let mut sums: Sums<&str> = Sums::new();
    let mut parts: BTreeMap<&str, Sums<String>> = BTreeMap::new();
    for (side, view) in sides.into_iter().enumerate() {
        let mut waits = Waits::new(view);
        for wall in walls(view) {
            let unit = wall
                .instr
                .map_or(super::breakdown::END, |i| view.unit(i.unit));
            sums.add(unit, side, wall.wall.0);
            let of = parts.entry(unit).or_default();
            if let Some(work) = wall.instr.and_then(|i| i.work) {
                of.add(work.name().to_owned(), side, wall.busy.0);
            }
            for (part, time) in waits.until(wall.reached, wall.from) {
                of.add(part, side, time);
            }
        }
    }
    let cause = |unit: &str, [before, after]: [u64; 2]| {
        let largest = parts.get(unit)?.0.iter();
        // A part explains the total only if it changes in the same direction.
        let moved = |[x, y]: [u64; 2]| match after > before {
            true => y.saturating_sub(x),
            false => x.saturating_sub(y),
        };
        let (part, time) = largest.max_by_key(|(_, time)| moved(**time))?;
        (moved(*time) > 0).then(|| UnitCause {
            part: part.clone(),
            predicted: Picos(time[0]),
            measured: Picos(time[1]),
        })
    };
    let all: Vec<(String, [u64; 2], Option<UnitCause>)> = sums
        .by_change()
        .into_iter()
        .filter(|(_, time)| *time != [0, 0])
        .map(|(unit, time)| (unit.to_owned(), time, cause(unit, time)))
        .collect();
    all.into_iter()
        .map(|(unit, [predicted, measured], cause)| UnitTime {
            unit,
            predicted: Picos(predicted),
            measured: Picos(measured),
            cause,
        })
        .collect()
}

/// Gaps of the compute stream in order.
struct Waits<'a> {
    view: &'a RunView,
    next: usize,
}

impl<'a> Waits<'a> {
    fn new(view: &'a RunView) -> Self {
        Self { view, next: 0 }
    }

    /// Returns the waits between two kernels by cause. Gaps that are too short to have a cause
    /// count as launch gaps of the queue.
    fn until(&mut self, from: Picos, to: Picos) -> Vec<(String, u64)> {
        let idle = to.saturating_sub(from).0;
        if idle == 0 {
            return Vec::new();
        }
        let gaps = &self.view.run.gaps;
        while gaps.get(self.next).is_some_and(|g| g.end <= from) {
            self.next += 1;
        }
        // A wait may have several causes, one after the other.
        let parts = gaps[self.next..].iter().take_while(|g| g.start < to);
        let mut waits: Vec<(String, u64)> = parts
            .map(|g| (wait(g.cause), (g.end.min(to) - g.start.max(from)).0))
            .collect();
        let rest = idle.saturating_sub(waits.iter().map(|w| w.1).sum());
        if rest > 0 {
            waits.push(("launch gaps".to_owned(), rest));
        }
        waits
    }
}

fn wait(cause: Cause) -> String {
    format!("wait: {}", cause.name())
}
