//! Draws the timeline.

mod details;
mod lane;
mod memory;

use super::kit::{badge, cut, pieces, put, put_right};
use crate::dash::app::{App, Hit};
use crate::dash::lanes::Lanes;
use crate::dash::lanes::bins::Window;
use crate::dash::names::{apart, changes};
use crate::dash::runs::Kept;
use crate::dash::theme::{Theme, letter};
use crate::dash::timeline::{Exposed, Timeline};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use shardlab_plan::record::{Cause, RunKind};
use shardlab_plan::units::{Picos, thousands};
use std::sync::Arc;

/// Width of the names on the left, in columns.
const GUTTER: u16 = 16;

/// Rows of the lanes. The height of a stream depends on the available room; a lane may have a row
/// of exposed time above or below it.
struct Plan {
    details: u16,
    memory: u16,
    /// Number of rows per lane.
    lane: u16,
}

pub(super) fn draw(app: &App, buf: &mut Buffer, body: Rect) {
    let t = &app.timeline;
    let theme = app.theme;
    let Some(main) = &t.main else {
        empty(app, buf, body);
        return;
    };
    let row = |y: u16| Rect {
        y,
        height: 1,
        ..body
    };
    let mut y = body.y;
    y += heading(app, buf, row(y));
    let plan = plan(t, body.bottom() - y);
    let plot = |y: u16, height: u16| Rect {
        x: body.x + GUTTER,
        y,
        width: body.width.saturating_sub(GUTTER + 1),
        height,
    };
    t.bin(plot(y, 1).width);
    minimap(app, buf, row(y), plot(y, 1));
    y += 1;
    let base = axis(t, buf, plot(y, 1), theme);
    match base {
        None => _ = put(buf, body.x + 1, y, GUTTER - 1, "time", theme.dim()),
        Some(base) => put_right(buf, body.x, y, GUTTER - 1, &base, theme.text()),
    }
    y += 1;
    lane::units(app, main, buf, row(y), plot(y, 1));
    y += 1;
    let bottom = body.bottom() - plan.details - plan.memory;
    y = lanes(app, buf, body, &plan, y, bottom);
    let memory_height = (body.bottom() - plan.details).saturating_sub(y);
    if memory_height > 1 {
        let area = Rect {
            y,
            height: memory_height,
            ..body
        };
        memory::draw(app, buf, area, plot(y, memory_height));
    }
    details::draw(
        app,
        buf,
        Rect {
            y: body.bottom() - plan.details,
            height: plan.details,
            ..body
        },
    );
}

/// Divides the rows below the heading: up to three per lane and a dozen for the memory. The
/// remaining rows are for lists below the details.
fn plan(t: &Timeline, height: u16) -> Plan {
    const DETAILS: u16 = 6;
    let lanes = (t.rows().len() as u16).max(1);
    let exposed = 1 + u16::from(t.other.is_some());
    let room = height.saturating_sub(3 + DETAILS + exposed);
    let tall = height >= 35;
    let least_memory = if tall { 8 } else { 4.min(room / 3) };
    let lane = (room.saturating_sub(least_memory) / lanes).clamp(1, if tall { 3 } else { 2 });
    let rest = room.saturating_sub(lane * lanes);
    let memory = rest.min(if tall { 12 } else { 7 });
    Plan {
        details: DETAILS + rest.saturating_sub(memory),
        memory,
        lane,
    }
}

fn empty(app: &App, buf: &mut Buffer, body: Rect) {
    let lines = [
        "No run is open.",
        "",
        "1, r   simulate the selected scenario and open its timeline",
        "3, x   train it on this machine, and see the timeline of its last step",
        "5      open a run of this session or of the store",
    ];
    for (i, line) in lines.iter().enumerate() {
        let style = if i == 0 {
            app.theme.strong()
        } else {
            app.theme.dim()
        };
        put(
            buf,
            body.x + 4,
            body.y + 3 + i as u16,
            body.width - 4,
            line,
            style,
        );
    }
}

/// Describes the shown runs in one line. Two runs get two lines if one line is too narrow to
/// identify both.
fn titles(app: &App, room: usize) -> Vec<String> {
    let t = &app.timeline;
    let runs: Vec<&Arc<Lanes>> = t.main.iter().chain(&t.other).collect();
    let name = |l: &Lanes| l.view.scenario.name.clone();
    let says = |l: &Arc<Lanes>| {
        // There is no room for the basis if two runs are shown.
        let basis = l.view.run.basis.as_ref().filter(|_| runs.len() == 1);
        let kind = match (l.view.run.kind, basis) {
            (RunKind::Sim, Some(basis)) => format!("predicted (basis: {})", badge(basis)),
            (RunKind::Sim, None) => "predicted".to_owned(),
            (kind @ (RunKind::Exec | RunKind::Import), _) => kind.word().to_owned(),
        };
        let mut kept = app.runs.kept.iter();
        // An open run has a number, which the other views use as its name.
        let called = kept.find(|k| Arc::ptr_eq(&k.lanes, l)).map(Kept::called);
        let called = called.map_or_else(String::new, |c| format!("{c} "));
        format!("{called}{kind} {}", Picos(l.length))
    };
    let behind = |options: &str| match options {
        "" => String::new(),
        some => format!(" [{some}]"),
    };
    let [main, other] = match runs[..] {
        [main] => {
            let options = behind(&changes(&main.view.scenario.overrides));
            return vec![format!("{}: {}{options}", name(main), says(main))];
        }
        [main, other] => [main, other],
        _ => return Vec::new(),
    };
    let mut apart = apart(&[&main.view, &other.view]);
    if apart.iter().all(String::is_empty) {
        // The common part is shown only once.
        apart[1] = changes(&other.view.scenario.overrides);
    }
    let one = name(main) == name(other);
    let first = format!("{}: {}{}", name(main), says(main), behind(&apart[0]));
    let second = format!("{}{}", says(other), behind(&apart[1]));
    let second_named = format!("{}: {second}", name(other));
    let together = format!("{first} │ {}", if one { &second } else { &second_named });
    if together.chars().count() <= room {
        return vec![together];
    }
    vec![first, second_named]
}

/// Returns the text to the right of the first line of the heading.
fn state(t: &Timeline) -> String {
    let view = t.view();
    let zoom = t.length() as f64 / view.length() as f64;
    let mut right = format!("{} in view, {zoom:.0} x ", Picos(view.length()));
    if t.critical {
        right = format!("critical path  {right}");
    }
    if t.stretch && t.other.is_some() {
        right = format!("stretched  {right}");
    }
    right
}

/// Draws the heading and returns its height in rows.
fn heading(app: &App, buf: &mut Buffer, area: Rect) -> u16 {
    let theme = app.theme;
    let right = state(&app.timeline);
    let room = usize::from(area.width).saturating_sub(right.chars().count() + 2);
    let titles = titles(app, room);
    for (i, text) in (0..).zip(&titles) {
        let room = if i == 0 {
            room
        } else {
            usize::from(area.width) - 2
        };
        let text = cut(text, room);
        put(
            buf,
            area.x + 1,
            area.y + i,
            area.width,
            &text,
            theme.strong(),
        );
    }
    put_right(buf, area.x, area.y, area.width, &right, theme.accent());
    titles.len() as u16
}

/// Draws the whole step in one row, with the visible part marked.
fn minimap(app: &App, buf: &mut Buffer, row: Rect, plot: Rect) {
    let t = &app.timeline;
    let theme = app.theme;
    put(buf, row.x + 1, row.y, GUTTER - 1, "whole step", theme.dim());
    let whole = Window {
        from: 0,
        to: t.length(),
    };
    let binned = t.binned.borrow();
    let bins = binned.as_ref().map_or(&[][..], |b| &b.whole);
    for (i, bin) in bins.iter().enumerate() {
        let (glyph, style) = match bin.work {
            Some(work) if bin.cover >= 0.25 => ("▄".to_owned(), theme.work(work)),
            Some(work) => ("▁".to_owned(), theme.work(work)),
            None => (" ".to_owned(), theme.dim()),
        };
        put(buf, plot.x + i as u16, plot.y, 1, &glyph, style);
    }
    if t.window.is_some() {
        let view = t.view();
        let from = whole.column(view.from, plot.width) as u16;
        let to = (whole.column(view.to, plot.width).ceil() as u16).min(plot.width - 1);
        put(
            buf,
            plot.x + from.min(plot.width - 1),
            plot.y,
            1,
            "[",
            theme.accent(),
        );
        put(
            buf,
            plot.x + to.max(from + 1).min(plot.width - 1),
            plot.y,
            1,
            "]",
            theme.accent(),
        );
    }
}

/// Draws ticks at round times. If their numbers would be long, as they are deep in a zoom, ticks
/// are relative to a round time, which is returned as text.
fn axis(t: &Timeline, buf: &mut Buffer, plot: Rect, theme: Theme) -> Option<String> {
    const APART: u64 = 11;
    let view = t.view();
    let wanted = view.length() * APART / u64::from(plot.width.max(1));
    let mut step = 1u64;
    while step < wanted {
        let lead = step.checked_ilog10().map_or(1, |p| step / 10u64.pow(p));
        step = if lead == 2 { step / 2 * 5 } else { step * 2 };
    }
    let mut tick = view.from.div_ceil(step) * step;
    let base = offset(tick, step);
    while tick < view.to {
        let x = view.column(tick, plot.width) as u16;
        let mut label = match base {
            None => format!("╷{}", tick_label(tick, step)),
            Some(base) => format!("╷+{}", tick_label(tick - base, step)),
        };
        if x + label.chars().count() as u16 > plot.width {
            "╷".clone_into(&mut label);
        }
        put(
            buf,
            plot.x + x,
            plot.y,
            plot.width.saturating_sub(x),
            &label,
            theme.dim(),
        );
        tick += step;
    }
    base.map(|base| {
        let decimals = if base.is_multiple_of(MS) { 0 } else { 3 };
        format!("{} ms", thousands(base as f64 / MS as f64, decimals))
    })
}

const MS: u64 = 1_000_000_000;
const US: u64 = 1_000_000;

/// Returns the round time that ticks are relative to: a millisecond for ticks in microseconds, a
/// microsecond for ticks in nanoseconds. `None` if the times themselves are short.
fn offset(first: u64, step: u64) -> Option<u64> {
    let round = match step {
        s if s >= MS / 10 => return None,
        s if s >= US / 10 => MS,
        _ => US,
    };
    let base = first / round * round;
    (base > 0).then_some(base)
}

fn tick_label(time: u64, step: u64) -> String {
    let (unit, size) = match step {
        s if s >= MS / 10 => ("ms", 1e9),
        s if s >= US / 10 => ("us", 1e6),
        _ => ("ns", 1e3),
    };
    let digits = if (step as f64) < size { 1 } else { 0 };
    format!("{} {unit}", thousands(time as f64 / size, digits))
}

/// Draws all lanes with the exposed time of each run, and returns the next free row.
fn lanes(app: &App, buf: &mut Buffer, body: Rect, plan: &Plan, from: u16, bottom: u16) -> u16 {
    let t = &app.timeline;
    let binned = t.binned.borrow();
    let Some(binned) = binned.as_ref() else {
        return from;
    };
    let selected = t.selected_row();
    let mut y = from;
    for (i, (row, bins)) in t.rows().iter().zip(&binned.lanes).enumerate() {
        if y >= bottom {
            break;
        }
        let Some(run) = t.run(row.run) else { continue };
        let height = plan.lane.min(bottom - y);
        let area = Rect { y, height, ..body };
        let name = lane_name(t, row.run, &run.lanes[row.lane].name);
        lane::lane(
            app,
            run,
            bins,
            buf,
            area,
            &name,
            selected == Some(i),
            row.run,
        );
        let plot = Rect {
            x: body.x + GUTTER,
            width: body.width.saturating_sub(GUTTER + 1),
            ..area
        };
        app.hits.borrow_mut().push((plot, Hit::Lane(i)));
        y += height;
        if row.lane == 0 && y < bottom {
            exposed(
                app,
                &binned.gaps[row.run],
                buf,
                Rect {
                    y,
                    height: 1,
                    ..body
                },
            );
            y += 1;
        }
    }
    y
}

/// Returns the name of the stream, or for a lane of the other run, the kind of that run.
fn lane_name(t: &Timeline, run: usize, name: &str) -> String {
    match (run, t.run(run).map(|r| r.view.run.kind)) {
        (0, _) => name.to_owned(),
        (_, Some(kind)) if kind.is_measured() => " measured".to_owned(),
        _ => " other run".to_owned(),
    }
}

/// Draws where the compute stream had nothing to run, by cause.
fn exposed(app: &App, gaps: &[Exposed], buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    put(
        buf,
        area.x + 2,
        area.y,
        GUTTER - 2,
        "└ exposed",
        theme.dim(),
    );
    for (i, gap) in gaps.iter().enumerate() {
        let Some((cause, share)) = gap else { continue };
        let style = theme.cause(*cause);
        let x = area.x + GUTTER + i as u16;
        let text = if *share >= 0.3 {
            letter(*cause).to_string()
        } else {
            "·".to_owned()
        };
        put(buf, x, area.y, 1, &text, style);
    }
}

/// Returns the letters of the causes that occur.
pub(super) fn legend(app: &App, run: &Lanes) -> Vec<(String, ratatui::style::Style)> {
    let mut parts = Vec::new();
    for cause in Cause::ALL {
        let Some(time) = run.view.run.exposed.get(&cause).filter(|t| t.0 > 0) else {
            continue;
        };
        parts.push((letter(cause).to_string(), app.theme.cause(cause)));
        parts.push((format!(" {} {time}  ", cause.name()), app.theme.dim()));
    }
    parts
}

/// Writes the legend of the exposed time.
pub(super) fn put_legend(app: &App, run: &Lanes, buf: &mut Buffer, area: Rect) {
    let parts = legend(app, run);
    let total = run.view.run.exposed_total();
    let mut all = vec![(format!("exposed {total}: "), app.theme.text())];
    all.extend(parts);
    pieces(buf, area.x, area.y, area.width, &all);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks deep in a zoom are short, differ, and add up to their times.
    #[test]
    fn deep_ticks_are_offsets() {
        let first = 14_075_550 * US;
        for (step, base, labels) in [
            (20 * MS, None, ["14,060 ms", "14,080 ms"]),
            (10 * US, Some(14_075 * MS), ["550 us", "560 us"]),
            (US / 2, Some(14_075 * MS), ["550.0 us", "550.5 us"]),
            (20_000, Some(first), ["0 ns", "20 ns"]),
        ] {
            assert_eq!(offset(first, step), base, "{step}");
            let from = base.unwrap_or(0);
            // As on an axis, ticks are multiples of their distance.
            let tick = first / step * step;
            let found = [tick, tick + step].map(|t| tick_label(t - from, step));
            assert_eq!(found, labels);
        }
        assert_eq!(offset(550 * US, 10 * US), None);
    }
}
