//! The timeline: the visible part of a step, and the selected span.

mod commands;

pub(super) use commands::{command, jump};

use super::lanes::Lanes;
use super::lanes::bins::{Bin, Window};
use super::lanes::memory::{self, Column};
use shardlab_plan::record::Cause;
use std::cell::RefCell;
use std::sync::Arc;

/// Minimum window in picoseconds, which is far shorter than any kernel.
const MIN_WINDOW: u64 = 10_000;

/// A span of one of the two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selected {
    /// 0 for the run above, 1 for the one below.
    pub run: usize,
    /// Index into the run's spans.
    pub span: u32,
}

/// A lane on the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneRow {
    /// 0 for the run above, 1 for the one below.
    pub run: usize,
    /// Lane.
    pub lane: usize,
}

/// Content of a column of exposed time: the cause, and its share of the column.
pub type Exposed = Option<(Cause, f32)>;

/// Cached bins, and the inputs that they were computed from.
#[derive(Debug)]
pub(crate) struct Binned {
    key: (u64, u64, Window, u64, u16),
    pub(crate) lanes: Vec<Vec<Bin>>,
    pub(crate) gaps: [Vec<Exposed>; 2],
    pub(crate) memory: [Vec<Option<Column>>; 2],
    /// The compute stream of the upper run over the whole step.
    pub(crate) whole: Vec<Bin>,
}

/// State of the timeline.
#[derive(Debug, Default)]
pub struct Timeline {
    /// The upper run.
    pub main: Option<Arc<Lanes>>,
    /// The lower run.
    pub other: Option<Arc<Lanes>>,
    /// Whether both are drawn at the same length.
    pub stretch: bool,
    /// The visible window; `None` for everything.
    pub window: Option<Window>,
    /// Selected span.
    pub selected: Option<Selected>,
    /// Whether the critical path is shown.
    pub critical: bool,
    /// Start of a drag: its column, and the window at that time.
    pub(crate) drag: Option<(u16, Window)>,
    pub(crate) binned: RefCell<Option<Binned>>,
}

impl Timeline {
    /// Shows a run.
    pub fn open(&mut self, lanes: Arc<Lanes>) {
        let first = lanes.lanes.first().and_then(|l| l.items.first());
        self.selected = first.map(|i| Selected {
            run: 0,
            span: i.span,
        });
        self.main = Some(lanes);
        self.other = None;
        self.window = None;
    }

    /// Returns the upper (0) or lower (1) run.
    #[must_use]
    pub fn run(&self, run: usize) -> Option<&Arc<Lanes>> {
        match run {
            0 => self.main.as_ref(),
            _ => self.other.as_ref(),
        }
    }

    /// Returns the length of the longest shown run, in picoseconds of the screen's clock.
    #[must_use]
    pub fn length(&self) -> u64 {
        let main = self.main.as_ref().map_or(1, |l| l.length);
        match &self.other {
            Some(other) if !self.stretch => main.max(other.length),
            _ => main,
        }
    }

    /// Returns the visible window.
    #[must_use]
    pub fn view(&self) -> Window {
        let length = self.length();
        match self.window {
            Some(w) if w.from < w.to && w.from < length => w,
            _ => Window {
                from: 0,
                to: length,
            },
        }
    }

    /// Returns the visible window of a run, in its own time.
    #[must_use]
    pub(crate) fn view_of(&self, run: usize) -> Window {
        let view = self.view();
        let scale = self.scale(run);
        Window {
            from: (view.from as f64 * scale) as u64,
            to: ((view.to as f64 * scale) as u64).max((view.from as f64 * scale) as u64 + 1),
        }
    }

    /// Returns the picoseconds of a run per picosecond of the screen's clock.
    fn scale(&self, run: usize) -> f64 {
        match (&self.main, &self.other) {
            (Some(main), Some(other)) if run == 1 && self.stretch => {
                other.length as f64 / main.length as f64
            }
            _ => 1.0,
        }
    }

    /// Converts a time of a run to the screen's clock.
    fn on_screen(&self, run: usize, time: u64) -> u64 {
        (time as f64 / self.scale(run)) as u64
    }

    /// Returns the lanes in the order of the screen: streams of the upper run, each followed by its
    /// counterpart of the lower run.
    #[must_use]
    pub fn rows(&self) -> Vec<LaneRow> {
        let Some(main) = &self.main else {
            return Vec::new();
        };
        let below = self.other.as_ref().map_or(&[][..], |o| &o.lanes);
        let mut rows = Vec::new();
        for (lane, l) in main.lanes.iter().enumerate() {
            rows.push(LaneRow { run: 0, lane });
            let fellow = below.iter().position(|b| b.name == l.name);
            rows.extend(fellow.map(|lane| LaneRow { run: 1, lane }));
        }
        for (lane, l) in below.iter().enumerate() {
            if !main.lanes.iter().any(|m| m.name == l.name) {
                rows.push(LaneRow { run: 1, lane });
            }
        }
        rows
    }

    /// Computes the bins for `columns` columns, unless the cached ones are still valid.
    pub(crate) fn bin(&self, columns: u16) {
        let id = |l: &Option<Arc<Lanes>>| l.as_ref().map_or(0, |l| l.id);
        let view = self.view();
        let key = (
            id(&self.main),
            id(&self.other),
            view,
            self.view_of(1).to,
            columns,
        );
        if self.binned.borrow().as_ref().is_some_and(|b| b.key == key) {
            return;
        }
        let lanes = self
            .rows()
            .iter()
            .filter_map(|row| {
                let run = self.run(row.run)?;
                let window = self.view_of(row.run);
                Some(super::lanes::bins::bins(
                    &run.lanes[row.lane],
                    &run.critical,
                    window,
                    columns,
                ))
            })
            .collect();
        let gaps = [0, 1].map(|r| {
            self.run(r).map_or_else(Vec::new, |run| {
                super::lanes::bins::gap_bins(&run.gaps, self.view_of(r), columns)
            })
        });
        let memory = [0, 1].map(|r| {
            self.run(r).map_or_else(Vec::new, |run| {
                memory::columns(&run.memory, self.view_of(r), columns)
            })
        });
        let all = Window {
            from: 0,
            to: self.length(),
        };
        let first = self.main.as_ref().and_then(|m| m.lanes.first());
        let whole = first.map_or_else(Vec::new, |lane| {
            super::lanes::bins::bins(lane, &[], all, columns)
        });
        *self.binned.borrow_mut() = Some(Binned {
            whole,
            key,
            lanes,
            gaps,
            memory,
        });
    }

    /// Returns the row of the selected span.
    #[must_use]
    pub(crate) fn selected_row(&self) -> Option<usize> {
        let s = self.selected?;
        let (lane, _) = self.run(s.run)?.place(s.span)?;
        self.rows()
            .iter()
            .position(|r| *r == LaneRow { run: s.run, lane })
    }

    /// Returns the start and end of the selected span on the screen's clock.
    #[must_use]
    pub(crate) fn selected_time(&self) -> Option<Window> {
        let s = self.selected?;
        let item = self.run(s.run)?.item(s.span)?;
        Some(Window {
            from: self.on_screen(s.run, item.start),
            to: self.on_screen(s.run, item.end),
        })
    }

    fn centre(&self) -> u64 {
        self.selected_time().map_or_else(
            || self.view().from + self.view().length() / 2,
            |t| t.from + t.length() / 2,
        )
    }

    /// Selects a span and makes it visible.
    pub fn select(&mut self, run: usize, span: u32) {
        if self.run(run).and_then(|r| r.item(span)).is_none() {
            return;
        }
        self.selected = Some(Selected { run, span });
        let (Some(time), view) = (self.selected_time(), self.view()) else {
            return;
        };
        if self.window.is_some() && (time.to <= view.from || time.from >= view.to) {
            let length = view.length();
            let middle = time.from + time.length() / 2;
            // A span that is longer than the window is shown from its start.
            let from = if time.length() > length {
                time.from
            } else {
                middle.saturating_sub(length / 2)
            };
            self.look(from, length);
        }
    }

    /// Shows a window, limited to the step.
    fn look(&mut self, from: u64, length: u64) {
        let all = self.length();
        let length = length.clamp(MIN_WINDOW.min(all), all);
        if length >= all {
            self.window = None;
            return;
        }
        let from = from.min(all - length);
        self.window = Some(Window {
            from,
            to: from + length,
        });
    }

    /// Zooms around a time by a factor, in (above 1) or out (below 1).
    pub fn zoom(&mut self, about: u64, factor: f64) {
        let view = self.view();
        let about = about.clamp(view.from, view.to);
        let length = (view.length() as f64 / factor).max(1.0);
        let before = (about - view.from) as f64 / factor;
        self.look(about.saturating_sub(before as u64), length as u64);
    }

    /// Handles a drag of the mouse to a column out of `columns`.
    pub(crate) fn dragged(&mut self, column: u16, columns: u16) {
        let Some((from, view)) = self.drag else {
            return;
        };
        let by = (f64::from(from) - f64::from(column)) / f64::from(columns.max(1));
        let start = view.from as f64 + by * view.length() as f64;
        if self.window.is_some() {
            self.look(start.max(0.0) as u64, view.length());
        }
    }

    /// Shows an interval of the screen's clock with a small margin.
    fn show(&mut self, window: Window) {
        let margin = window.length() / 20 + 1;
        self.look(
            window.from.saturating_sub(margin),
            window.length() + 2 * margin,
        );
    }

    fn pan(&mut self, share: f64) {
        let view = self.view();
        let by = (view.length() as f64 * share.abs()) as u64;
        let from = if share < 0.0 {
            view.from.saturating_sub(by)
        } else {
            view.from + by
        };
        self.look(from, view.length());
    }

    /// Selects the next or the previous span of the lane.
    fn along(&mut self, forward: bool) {
        let Some(s) = self.selected else { return };
        let Some(run) = self.run(s.run) else { return };
        let Some((lane, place)) = run.place(s.span) else {
            return;
        };
        let next = if forward {
            Some(place + 1)
        } else {
            place.checked_sub(1)
        };
        let item = next.and_then(|n| run.lanes[lane].items.get(n));
        if let Some(span) = item.map(|i| i.span) {
            self.select(s.run, span);
        }
    }

    /// Selects a span of the lane above or below, at about the same time.
    fn across(&mut self, down: bool) {
        let (Some(row), Some(time)) = (self.selected_row(), self.selected_time()) else {
            return;
        };
        let rows = self.rows();
        let next = if down {
            Some(row + 1)
        } else {
            row.checked_sub(1)
        };
        if let Some(row) = next.and_then(|n| rows.get(n)) {
            self.select_at(*row, time.from + time.length() / 2);
        }
    }

    /// Selects the span of a lane that is closest to a time of the screen's clock.
    pub(crate) fn select_at(&mut self, row: LaneRow, time: u64) {
        let scaled = (time as f64 * self.scale(row.run)) as u64;
        let Some(run) = self.run(row.run) else { return };
        let lane = &run.lanes[row.lane];
        if let Some(i) = lane.nearest(scaled) {
            let span = lane.items[i].span;
            self.select(row.run, span);
        }
    }

    /// Selects the next or the previous notable gap: one of at least a thousandth of the step, or
    /// any gap if there is none.
    fn go_to_gap(&mut self, forward: bool) -> Option<String> {
        let run_index = self.selected.map_or(0, |s| s.run);
        let run = Arc::clone(self.run(run_index)?);
        let at = self
            .selected
            .and_then(|s| run.item(s.span))
            .map_or(0, |i| i.start);
        let gap = run
            .gap(at, forward, run.length / 1000)
            .or_else(|| run.gap(at, forward, 0))?;
        // The span right after the gap on the compute stream is the one that waited.
        let lane = run.lanes.first()?;
        let behind = lane.items.partition_point(|i| i.start < gap.end);
        let item = lane.items.get(behind).or_else(|| lane.items.last())?;
        self.select(run_index, item.span);
        let length = shardlab_plan::units::Picos(gap.end - gap.start);
        let what = run.view.awaited_label(&gap.awaited);
        Some(format!(
            "{length} exposed ({}), waiting for {what}",
            gap.cause.name()
        ))
    }
}
