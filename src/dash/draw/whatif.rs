//! Draws the effects of changes, and the best settings.

use super::charts::{Curve, curves};
use super::kit::{
    MORE, abridge, bytes, estimated_ms, excerpt, over_all, pane, put, put_right, wrap,
};
use super::page::{self, Line, tone_style};
use crate::analysis::whatif::Effect;
use crate::dash::app::{App, Hit};
use crate::dash::keys;
use crate::dash::whatif::{Ask, Explained, Group, Proposal, WhatIfView};
use crate::dash::whole::Whole;
use crate::predict::Fit;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use shardlab_plan::units::{Bytes, signed};

/// Widths of the columns behind the names of changes: step time, throughput, reserved memory, free
/// memory, fits.
const COLUMNS: [(&str, u16); 5] = [
    ("step ms", 10),
    ("speed", 9),
    ("reserved", 12),
    ("free", 11),
    ("fits", 6),
];
/// Rows of the text on the selected change.
const ABOUT: u16 = 3;
/// Width and minimum height of the chart of the front.
const CHART: (u16, u16) = (46, 8);
/// Minimum height at which the reasons are shown below the changes.
const TALL: u16 = 34;

enum Row<'a> {
    Base,
    Heading(Group),
    /// Index among the shown changes, and the change.
    Change(usize, &'a Proposal),
}

pub(super) fn draw(app: &App, of: Ask, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let state = app.proposals(of);
    let inner = pane(buf, body, &title(app, of), true, theme);
    let width = usize::from(inner.width) - 2;
    let mut y = inner.y;
    let Some(found) = state.found.as_deref() else {
        let text = match (&state.error, app.job(of.purpose())) {
            (Some(error), _) => format!("✗ {error}"),
            (None, Some(_)) => waiting(state, of),
            (None, None) => otherwise(of).to_owned(),
        };
        for line in wrap(&text, width) {
            put(buf, inner.x + 1, y, inner.width - 1, &line, theme.dim());
            y += 1;
        }
        return;
    };
    for (text, style) in answer(app, of, found, width, inner.height) {
        put(buf, inner.x + 1, y, inner.width - 1, &text, style);
        y += 1;
    }
    let reasons = match body.height >= TALL {
        true => (inner.bottom() - y) * 2 / 5,
        false => 0,
    };
    let list = Rect {
        y,
        height: (inner.bottom() - y).saturating_sub(ABOUT + reasons),
        ..inner
    };
    changes(app, of, buf, list, found);
    let about = Rect {
        y: list.bottom(),
        height: ABOUT,
        ..inner
    };
    describe(app, of, buf, about);
    let mut below = Rect {
        y: about.bottom(),
        height: inner.bottom() - about.bottom(),
        ..inner
    };
    let points = front(found);
    if below.height >= CHART.1 && below.width >= 2 * CHART.0 && points.len() > 1 {
        below.width -= CHART.0;
        let chart = Rect {
            x: below.right(),
            width: CHART.0,
            ..below
        };
        draw_front(app, buf, chart, &points, found);
    }
    let lines = page::lines(&found.tables, theme, usize::from(below.width) - 2);
    for (y, line) in (below.y..below.bottom()).zip(&lines) {
        line.draw(buf, below, y);
    }
}

/// Describes what the view would show.
fn otherwise(of: Ask) -> &'static str {
    match of {
        Ask::Changes => {
            "Select a scenario in view 1: its verdict, the changes that would make it faster or smaller, \
             and where its time and memory go are shown here. Enter applies a change."
        }
        Ask::Best => {
            "o searches for the best settings of the selected scenario: the shortest step within the memory of \
             its GPUs, with the samples per optimizer step fixed. Enter applies them, Esc ends the search \
             with the best settings so far."
        }
    }
}

fn waiting(state: &WhatIfView, of: Ask) -> String {
    match (of, &state.progress) {
        (Ask::Changes, _) => "predicting changes …".to_owned(),
        (Ask::Best, Some(progress)) => format!("tuning: {progress} …"),
        (Ask::Best, None) => "tuning …".to_owned(),
    }
}

/// Returns reserved memory in GiB and throughput of the points of the front, smallest memory first.
fn front(found: &Explained) -> Vec<(f64, f64)> {
    let on = found
        .proposals
        .iter()
        .filter(|p| matches!(p.group, Group::Best | Group::Front));
    let effects = on.filter_map(|p| p.outcome.as_ref().ok());
    let mut points: Vec<(f64, f64)> = effects
        .filter(|e| !matches!(e.fit, Fit::Exceeds { .. }))
        .map(|e| (e.peak_reserved.gib(), e.tokens_per_s))
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Draws throughput against reserved memory.
fn draw_front(app: &App, buf: &mut Buffer, area: Rect, points: &[(f64, f64)], found: &Explained) {
    let theme = app.theme;
    let base = &found.base;
    let title = format!("{} over GiB", base.counted_in.rate());
    put(buf, area.x, area.y, area.width, &title, theme.accent());
    let today = [(base.peak_reserved.gib(), base.tokens_per_s)];
    let all = [
        Curve {
            name: "front",
            points,
            style: theme.series(0),
            scatter: false,
        },
        Curve {
            name: "as it is",
            points: &today,
            style: theme.series(1),
            scatter: true,
        },
    ];
    let below = Rect {
        y: area.y + 1,
        height: area.height - 1,
        ..area
    };
    curves(buf, below, &all, theme);
}

fn title(app: &App, of: Ask) -> String {
    let state = app.proposals(of);
    let found = state.found.as_deref();
    let name = of.view().name();
    let mut title = match found {
        Some(f) => format!("{name} {}", f.setup.name()),
        None => name.to_owned(),
    };
    match found.map_or(0, |f| f.setup.overrides.len()) {
        0 => {}
        n => title.push_str(&format!(" ●{n} changed")),
    }
    if app.running(of.purpose()).is_some() {
        if let Some(progress) = &state.progress {
            title.push_str(&format!(" · {progress}"));
        }
        title.push_str(" …");
    } else if found.is_some_and(|f| Some(&f.setup) != app.setup().as_ref()) {
        let key = keys::first(of.place(), of.command());
        let verb = match of {
            Ask::Changes => "predicts",
            Ask::Best => "searches",
        };
        title.push_str(&format!(" (of an earlier state; {key} {verb} again)"));
    }
    title
}

/// Returns the verdict, the reason, and warnings.
fn answer(
    app: &App,
    of: Ask,
    found: &Explained,
    width: usize,
    height: u16,
) -> Vec<(String, Style)> {
    let theme = app.theme;
    let most = match height {
        u16::MAX => usize::MAX,
        30.. => 4,
        _ => 2,
    };
    let (tone, verdict) = &found.verdict;
    let mut all: Vec<(String, Style)> = Vec::new();
    let mut add = |text: &str, style: Style| {
        let lines = excerpt(text, width, most, MORE).into_iter();
        all.extend(lines.map(|line| (line, style)));
    };
    add(verdict, tone_style(theme, *tone));
    add(&found.why, theme.text());
    for warning in &found.warnings {
        add(&format!("! {warning}"), theme.warn());
    }
    if let Some(error) = &app.proposals(of).error {
        add(&format!("✗ {error}"), theme.bad());
    }
    all.push((String::new(), theme.text()));
    all
}

/// Draws the table of changes.
fn changes(app: &App, of: Ask, buf: &mut Buffer, area: Rect, found: &Explained) {
    let theme = app.theme;
    let shown = app.proposals(of).rows();
    let mut rows = vec![Row::Base];
    let mut group = None;
    for (i, proposal) in shown.iter().enumerate() {
        if group != Some(proposal.group) {
            group = Some(proposal.group);
            rows.push(Row::Heading(proposal.group));
        }
        rows.push(Row::Change(i, proposal));
    }
    let head = Rect { height: 1, ..area };
    put(buf, head.x + 2, head.y, 8, "change", theme.dim());
    cells(buf, head, &COLUMNS.map(|c| c.0.to_owned()), theme.dim());
    let body = Rect {
        y: area.y + 1,
        height: area.height.saturating_sub(1),
        ..area
    };
    let selected =
        |r: &Row<'_>| matches!(r, Row::Change(i, _) if *i == app.proposals(of).cursor.at);
    let at = rows.iter().position(selected).unwrap_or(0);
    let cursor = &app.proposals(of).cursor;
    let window = cursor.window_at(at, rows.len(), usize::from(body.height));
    for (y, row) in (body.y..).zip(&rows[window]) {
        let place = Rect {
            y,
            height: 1,
            ..body
        };
        let room = place.width.saturating_sub(columns_width() + 3);
        match row {
            Row::Base => {
                put(buf, place.x + 2, y, room, "(as it is)", theme.text());
                cells(buf, place, &as_it_is(found), theme.text());
            }
            Row::Heading(group) => {
                put(
                    buf,
                    place.x + 1,
                    y,
                    place.width - 1,
                    group.title(),
                    theme.accent(),
                );
            }
            Row::Change(i, proposal) => {
                let is_selected = *i == cursor.at;
                let style = match is_selected {
                    true => theme.selected(),
                    false => theme.text(),
                };
                let blank = " ".repeat(usize::from(place.width));
                put(buf, place.x, y, place.width, &blank, style);
                let mark = if is_selected { "▸" } else { " " };
                put(buf, place.x, y, 1, mark, style);
                let label = abridge(&proposal.label, usize::from(room));
                put(buf, place.x + 2, y, room, &label, style);
                match &proposal.outcome {
                    Ok(effect) => {
                        let style = style.patch(fit_style(app, effect));
                        cells(buf, place, &differences(effect, found), style);
                    }
                    Err(_) => put_right(buf, place.x, y, place.width - 1, "impossible", style),
                }
                app.hits.borrow_mut().push((place, Hit::Change(of, *i)));
            }
        }
    }
    if shown.is_empty() {
        let text = match of {
            Ask::Changes => {
                "No single change gains more than 0.5 % of time or memory; a shows all that were tried."
            }
            Ask::Best => "No settings are better by more than 0.5 %.",
        };
        let y = body.y + 2;
        if y < body.bottom() {
            put(buf, body.x + 2, y, body.width - 2, text, theme.dim());
        }
    }
}

fn columns_width() -> u16 {
    COLUMNS.iter().map(|c| c.1 + 1).sum()
}

/// Writes the right-aligned cells after the name.
fn cells(buf: &mut Buffer, place: Rect, texts: &[String; 5], style: Style) {
    let mut x = place.right().saturating_sub(columns_width() + 1);
    for (text, (_, width)) in texts.iter().zip(COLUMNS) {
        put_right(buf, x, place.y, width, text, style);
        x += width + 1;
    }
}

fn as_it_is(found: &Explained) -> [String; 5] {
    let e = &found.base;
    [
        estimated_ms(e.step_ms, found.basis.as_ref()),
        String::new(),
        bytes(e.peak_reserved.0),
        room(e),
        e.fit.word().to_owned(),
    ]
}

fn differences(e: &Effect, found: &Explained) -> [String; 5] {
    let base = &found.base;
    let by = e.peak_reserved.0.abs_diff(base.peak_reserved.0);
    let sign = if e.peak_reserved < base.peak_reserved {
        '-'
    } else {
        '+'
    };
    [
        estimated_ms(e.step_ms, found.basis.as_ref()),
        format!("{} %", signed(100.0 * e.faster_than(base), 1)),
        match by {
            0 => "=".to_owned(),
            by => format!("{sign}{}", Bytes(by)),
        },
        room(e),
        e.fit.word().to_owned(),
    ]
}

fn room(e: &Effect) -> String {
    match e.free_bytes {
        Some(free) if free < 0 => format!("-{}", Bytes(free.unsigned_abs())),
        Some(free) => Bytes(free.unsigned_abs()).to_string(),
        None => "?".to_owned(),
    }
}

fn fit_style(app: &App, effect: &Effect) -> Style {
    match &effect.fit {
        Fit::Exceeds { .. } => app.theme.bad(),
        Fit::Tight { .. } => app.theme.warn(),
        _ => Style::new(),
    }
}

/// Shows the whole name of the selected change, or the reason why it is impossible.
fn describe(app: &App, of: Ask, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let Some(proposal) = app.proposals(of).selected() else {
        return;
    };
    let width = usize::from(area.width) - 2;
    let sets: Vec<String> = proposal
        .overrides
        .iter()
        .map(|o| format!("--set {o}"))
        .collect();
    let (text, style) = match &proposal.outcome {
        Ok(_) => (sets.join(" "), theme.text()),
        Err(reason) => (format!("✗ {reason}"), theme.bad()),
    };
    let rows = usize::from(area.height.saturating_sub(1));
    let lines = excerpt(&text, width, rows, "…");
    let rule = "─".repeat(width);
    put(buf, area.x + 1, area.y, area.width - 1, &rule, theme.dim());
    for (y, line) in (area.y + 1..area.bottom()).zip(&lines) {
        put(buf, area.x + 1, y, area.width - 1, line, style);
    }
}

/// Draws the verdict and all tables over the body.
pub(super) fn whole(app: &App, of: Ask, whole: &Whole, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let inner = over_all(buf, body, &title(app, of), theme);
    let width = usize::from(inner.width.saturating_sub(2));
    let mut lines: Vec<Line> = Vec::new();
    if let Some(found) = app.proposals(of).found.as_deref() {
        let all = answer(app, of, found, width, u16::MAX);
        lines.extend(all.into_iter().map(|(text, style)| Line::Text(text, style)));
        lines.extend(page::lines(&found.tables, theme, width));
    }
    let first = whole.first(lines.len(), usize::from(inner.height));
    for (y, line) in (inner.y..inner.bottom()).zip(&lines[first..]) {
        line.draw(buf, inner, y);
    }
}
