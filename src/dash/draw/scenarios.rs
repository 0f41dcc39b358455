//! Draws the scenario list and the prediction.

use super::charts::{Part, stacked};
use super::kit::{
    MORE, bytes, change, estimated_ms, excerpt, lines as kept, over_all, pane, pieces, put,
    put_right, shorten, step_ms, wrap,
};
use crate::dash::app::{App, Hit};
use crate::dash::glance::{Brief, Glance};
use crate::dash::lanes::memory::Family;
use crate::dash::scenarios::Pane;
use crate::dash::theme::{Theme, letter};
use crate::dash::whole::Whole;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use shardlab_plan::record::Basis;
use shardlab_plan::record::basis::{bounded, number};
use shardlab_plan::units::thousands;

pub(super) fn draw(app: &App, buf: &mut Buffer, body: Rect) {
    let left = (body.width * 36 / 100).clamp(30, 58);
    let list_area = Rect {
        width: left,
        ..body
    };
    let right = Rect {
        x: body.x + left,
        width: body.width - left,
        ..body
    };
    list(app, buf, list_area);
    let height = if body.height >= 36 { 16 } else { 8 };
    prediction(app, buf, Rect { height, ..right });
    super::options::draw(
        app,
        buf,
        Rect {
            y: right.y + height,
            height: right.height - height,
            ..right
        },
    );
}

fn list(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let s = &app.scenarios;
    let rows = s.rows();
    let focused = s.pane == Pane::List;
    let title = match (s.filter.as_str(), s.hidden()) {
        ("", 0) => format!("Scenarios {}", s.sources.len()),
        ("", tests) if area.width < 36 => format!("Scenarios {}, T: +{tests}", rows.len()),
        ("", tests) => format!("Scenarios {}, T: +{tests} tests", rows.len()),
        (filter, _) => format!("Scenarios {} of {}: {filter}", rows.len(), s.sources.len()),
    };
    let inner = pane(buf, area, &title, focused, theme);
    let wide = inner.width >= 44;
    let numbers: u16 = if wide { 28 } else { 9 };
    let head = Rect { height: 1, ..inner };
    let text = if wide {
        "step ms   GiB  fits"
    } else {
        // Placed above the numbers. The mark for a scenario that does not fit comes after them.
        "step ms  "
    };
    put(buf, head.x + 2, head.y, 10, "name", theme.dim());
    put_right(buf, head.x, head.y, head.width - 1, text, theme.dim());
    let about = if inner.height >= 30 { 6 } else { 0 };
    let body = Rect {
        y: inner.y + 1,
        height: inner.height - 1 - about,
        ..inner
    };
    if about > 0
        && let Some(source) = s.current()
    {
        let width = usize::from(inner.width) - 2;
        let lines = excerpt(&source.about, width, usize::from(about) - 1, "…");
        for (i, line) in lines.iter().enumerate() {
            let y = body.bottom() + 1 + i as u16;
            put(buf, inner.x + 1, y, inner.width - 1, line, theme.dim());
        }
    }
    if rows.is_empty() {
        put(
            buf,
            body.x + 1,
            body.y,
            body.width - 1,
            "no match; Esc shows all",
            theme.dim(),
        );
    }
    // A heading separates the scenarios for tests from the examples.
    let first_test = rows.iter().position(|&i| s.sources[i].is_test);
    let heading = first_test.filter(|&first| first > 0 && s.filter.is_empty());
    let line_of = |row: usize| row + usize::from(heading.is_some_and(|h| row >= h));
    let lines = rows.len() + usize::from(heading.is_some());
    let window = s
        .cursor
        .window_at(line_of(s.cursor.at), lines, usize::from(body.height));
    if let Some(line) = heading.filter(|h| window.contains(h)) {
        let y = body.y + (line - window.start) as u16;
        let text = "── tests and benchmarks ──";
        put(buf, body.x + 1, y, body.width - 1, text, theme.dim());
    }
    for row in (0..rows.len()).filter(|&row| window.contains(&line_of(row))) {
        let source = &s.sources[rows[row]];
        let y = body.y + (line_of(row) - window.start) as u16;
        let changed = s.overrides.contains_key(&source.key);
        let selected = row == s.cursor.at;
        let style = match (selected, focused) {
            (true, true) => theme.selected(),
            (true, false) => theme.selected_elsewhere(),
            _ => theme.text(),
        };
        let mark = if selected { "▸" } else { " " };
        let blank = " ".repeat(usize::from(body.width));
        put(buf, body.x, y, body.width, &blank, style);
        let star = if changed { "●" } else { " " };
        put(buf, body.x, y, 1, mark, style);
        put(buf, body.x + 1, y, 1, star, style.patch(theme.warn()));
        let room = body.width.saturating_sub(numbers + 3);
        put(
            buf,
            body.x + 2,
            y,
            room,
            &shorten(&source.name, usize::from(room)),
            style,
        );
        let (text, tone) = match s.brief(source) {
            None => ("…".to_owned(), theme.dim()),
            Some(Err(_)) => ("cannot be".to_owned(), theme.bad()),
            Some(Ok(b)) if wide => (wide_numbers(b), fit_style(app, b)),
            Some(Ok(b)) => (
                format!("{} {}", narrow_ms(b), fit_mark(b)),
                fit_style(app, b),
            ),
        };
        put_right(buf, body.x, y, body.width - 1, &text, style.patch(tone));
        let place = Rect {
            y,
            height: 1,
            ..body
        };
        app.hits.borrow_mut().push((place, Hit::Scenario(row)));
    }
}

fn wide_numbers(b: &Brief) -> String {
    format!("{:>9} {:>6.1}  {:>4}", step_ms(b), b.device.gib(), b.fits)
}

/// Formats a step time in seven characters.
fn narrow_ms(b: &Brief) -> String {
    match &b.basis {
        Some(basis) if basis.is_estimate() => step_ms(b),
        _ if b.step_ms >= 1000.0 => thousands(b.step_ms, 0),
        _ => step_ms(b),
    }
}

/// Returns the mark of a scenario that does not fit, which is needed if there are no colours.
fn fit_mark(b: &Brief) -> &'static str {
    match b.fits {
        "no" => "✗",
        "tight" => "!",
        _ => " ",
    }
}

fn fit_style(app: &App, b: &Brief) -> Style {
    match b.fits {
        "no" => app.theme.bad(),
        "tight" => app.theme.warn(),
        _ => Style::new(),
    }
}

fn prediction(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let s = &app.scenarios;
    let inner = pane(buf, area, &title(app), false, theme);
    let width = usize::from(inner.width.saturating_sub(2));
    if s.glance.is_none() && s.error.is_none() {
        let text = if s.current().is_some() {
            "predicting …"
        } else {
            "no scenario is selected"
        };
        put(buf, inner.x + 1, inner.y, width as u16, text, theme.dim());
        return;
    }
    // The last prediction, if there is one, follows the message.
    let most = match &s.glance {
        None => inner.height,
        Some(_) if inner.height > 8 => 4,
        Some(_) => 2,
    };
    let error = s.error.as_ref().map(|e| format!("✗ {e}"));
    let error = error.map_or_else(Vec::new, |e| excerpt(&e, width, usize::from(most), MORE));
    let rows = error.into_iter().map(|l| Row::Text(vec![(l, theme.bad())]));
    let mut rows: Vec<Row> = rows.chain(prediction_rows(app, width)).collect();
    let shown = usize::from(inner.height);
    if rows.len() > shown
        && let Some(Row::Text(parts)) = shown.checked_sub(1).and_then(|last| rows.get_mut(last))
        && let [(text, _)] = parts.as_mut_slice()
    {
        let room = width.saturating_sub(MORE.chars().count());
        *text = text.chars().take(room).collect::<String>() + MORE;
    }
    write(app, buf, inner, &rows);
}

/// Draws the whole message and the prediction over the body.
pub(super) fn whole(app: &App, whole: &Whole, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let s = &app.scenarios;
    let inner = over_all(buf, body, &title(app), theme);
    let room = usize::from(inner.width.saturating_sub(2));
    let refused = s.refused.as_ref().map(|r| &r.reason);
    let mut rows = Vec::new();
    if let Some(option) = s.option().filter(|_| s.pane == Pane::Options) {
        let mut text = vec![(super::options::heading(app, option), theme.accent())];
        let about = super::options::about(option);
        text.extend(about.into_iter().map(|line| (line, theme.text())));
        for (line, style) in text {
            let lines = wrap(&line, room).into_iter();
            rows.extend(lines.map(|l| Row::Text(vec![(l, style)])));
        }
        rows.push(Row::Text(Vec::new()));
    }
    for message in [refused, s.error.as_ref()].into_iter().flatten() {
        let message = format!("✗ {message}");
        rows.extend(
            kept(&message, room)
                .into_iter()
                .map(|l| Row::Text(vec![(l, theme.bad())])),
        );
        rows.push(Row::Text(Vec::new()));
    }
    rows.extend(prediction_rows(app, room));
    if rows.is_empty() {
        let text = "not predicted yet".to_owned();
        rows.push(Row::Text(vec![(text, theme.dim())]));
    }
    let first = whole.first(rows.len(), usize::from(inner.height));
    write(app, buf, inner, &rows[first..]);
}

fn title(app: &App) -> String {
    let s = &app.scenarios;
    let name = s.current().map_or("", |c| c.name.as_str());
    let changes = s.changes().map_or(0, std::collections::BTreeMap::len);
    let mut title = format!("Prediction {name}");
    if changes > 0 {
        title = format!("{title} ●{changes} changed");
    }
    if s.pending {
        title.push_str(" …");
    }
    title.trim_end().to_owned()
}

/// Returns the lines of the prediction, if there is one.
fn prediction_rows(app: &App, width: usize) -> Vec<Row> {
    let s = &app.scenarios;
    let glance = s.glance.as_deref();
    glance.map_or_else(Vec::new, |g| lines(app, g, s.base.as_deref(), width))
}

/// Writes as many rows as fit.
fn write(app: &App, buf: &mut Buffer, inner: Rect, rows: &[Row]) {
    let (x, width) = (inner.x + 1, inner.width.saturating_sub(2));
    for (y, row) in (inner.y..inner.bottom()).zip(rows) {
        match (row, &app.scenarios.glance) {
            (Row::Text(parts), _) => _ = pieces(buf, x, y, width, parts),
            (Row::Memory, Some(glance)) => {
                let height = 1;
                memory_bar(
                    app,
                    buf,
                    Rect {
                        x,
                        y,
                        width,
                        height,
                    },
                    glance,
                );
            }
            (Row::Memory, None) => {}
        }
    }
}

enum Row {
    Text(Vec<(String, Style)>),
    Memory,
}

/// Returns all lines on a prediction, at most `width` columns wide.
fn lines(app: &App, g: &Glance, base: Option<&Glance>, width: usize) -> Vec<Row> {
    let theme = app.theme;
    let old = base.map(|x| &x.brief);
    let mut rows = vec![
        step_row(theme, &g.brief, old),
        throughput_row(theme, &g.brief, old),
    ];
    rows.extend(g.brief.basis.as_deref().map(|b| basis_row(theme, b)));
    rows.push(exposed_row(theme, g, old));
    rows.push(memory_row(theme, &g.brief, old, width >= 60));
    rows.push(Row::Memory);
    rows.extend(memory_legend(app, g, width));
    let largest: Vec<String> = g
        .roles
        .iter()
        .take(3)
        .map(|(role, n)| format!("{} {}", role.name(), bytes(n.0)))
        .collect();
    rows.push(Row::Text(vec![
        label(theme, "peak"),
        (format!("{}: ", g.peak), theme.text()),
        (largest.join(", "), theme.dim()),
    ]));
    rows.extend(experts_rows(theme, g, width));
    rows.push(Row::Text(Vec::new()));
    for sentence in &g.why {
        for line in wrap(sentence, width) {
            rows.push(Row::Text(vec![(line, theme.text())]));
        }
    }
    rows
}

/// Returns the lines on experts; the first one has a label.
fn experts_rows(theme: Theme, g: &Glance, width: usize) -> Vec<Row> {
    let room = width.saturating_sub(LABEL);
    let all = g.experts.iter().flat_map(|line| wrap(line, room));
    let named = all.enumerate().map(|(i, line)| {
        let name = if i == 0 { "experts" } else { "" };
        Row::Text(vec![label(theme, name), (line, theme.text())])
    });
    named.collect()
}

/// Columns of a label.
const LABEL: usize = 9;

fn label(theme: Theme, text: &str) -> (String, Style) {
    (format!("{text:<LABEL$}"), theme.dim())
}

/// Returns the change from the old value, if there is one, in the color of an improvement or a
/// regression.
fn against(theme: Theme, now: f64, old: Option<f64>, less_is_better: bool) -> (String, Style) {
    let (text, less) = old.and_then(|o| change(now, o)).unwrap_or_default();
    let style = if less == less_is_better {
        theme.good()
    } else {
        theme.bad()
    };
    let text = if text.is_empty() {
        text
    } else {
        format!("  {text}")
    };
    (text, style)
}

fn step_row(theme: Theme, b: &Brief, old: Option<&Brief>) -> Row {
    let mfu = number(100.0 * b.mfu, 1, b.basis.as_deref());
    Row::Text(vec![
        label(theme, "step"),
        (format!("{} ms", step_ms(b)), theme.strong()),
        against(theme, b.step_ms, old.map(|o| o.step_ms), true),
        (format!("   MFU {mfu} %"), theme.text()),
    ])
}

fn throughput_row(theme: Theme, b: &Brief, old: Option<&Brief>) -> Row {
    let rate = number(b.tokens_per_s, 0, b.basis.as_deref());
    Row::Text(vec![
        label(theme, b.counted_in.name()),
        (format!("{rate}/s/GPU"), theme.text()),
        against(theme, b.tokens_per_s, old.map(|o| o.tokens_per_s), false),
        (
            format!("   {} x {} {}", b.world, b.hardware, b.policy),
            theme.dim(),
        ),
    ])
}

fn basis_row(theme: Theme, basis: &Basis) -> Row {
    let style = match basis.is_estimate() {
        true => theme.warn(),
        false => theme.good(),
    };
    let band = basis
        .step_percent()
        .map_or_else(|| " error unknown".into(), |p| format!(" ± {}", bounded(p)));
    Row::Text(vec![
        label(theme, "basis"),
        (basis.kind.word().to_owned(), style),
        (band, theme.text()),
        (format!("   {}", basis.on), theme.dim()),
    ])
}

/// Returns the exposed time and its parts by cause.
fn exposed_row(theme: Theme, g: &Glance, old: Option<&Brief>) -> Row {
    let b = &g.brief;
    let part = |time: f64| estimated_ms(time, b.basis.as_deref());
    let mut exposed = vec![
        label(theme, "exposed"),
        (format!("{} ms", part(b.exposed_ms)), theme.text()),
        against(theme, b.exposed_ms, old.map(|o| o.exposed_ms), true),
        ("  ".into(), theme.text()),
    ];
    for (cause, time) in g.exposed.iter().filter(|(_, t)| *t >= 0.01) {
        exposed.push((format!("{}", letter(*cause)), theme.cause(*cause)));
        exposed.push((format!(" {} {}  ", cause.name(), part(*time)), theme.dim()));
    }
    Row::Text(exposed)
}

/// Returns the memory of the device, and whether it is enough.
fn memory_row(theme: Theme, b: &Brief, old: Option<&Brief>, wide: bool) -> Row {
    let (fits, style) = match (b.fits, wide) {
        ("yes", _) => ("✓ fits", theme.good()),
        ("tight", true) => (
            "! tight: the allocator must free cached blocks",
            theme.warn(),
        ),
        ("tight", false) => ("! tight", theme.warn()),
        ("no", true) => ("✗ does not fit", theme.bad()),
        ("no", false) => ("✗ no fit", theme.bad()),
        _ => ("? capacity unknown", theme.dim()),
    };
    let capacity = b
        .capacity
        .map_or_else(String::new, |c| format!(" of {}", bytes(c.0)));
    let device = b.device.0 as f64;
    Row::Text(vec![
        label(theme, "memory"),
        (format!("{}{capacity}", bytes(b.device.0)), theme.strong()),
        ("  ".into(), theme.text()),
        // Placed before the text that is truncated if there is no room.
        (fits.to_owned(), style),
        against(theme, device, old.map(|o| o.device.0 as f64), true),
    ])
}

/// Returns the bytes of each family at the peak.
fn families(app: &App, g: &Glance) -> Vec<Part> {
    let mut sums = [0u64; Family::COUNT];
    for (role, n) in &g.roles {
        sums[Family::of(*role) as usize] += n.0;
    }
    let used = Family::ALL.iter().zip(sums).filter(|(_, n)| *n > 0);
    used.map(|(family, n)| Part::of(app.theme, *family, n))
        .collect()
}

/// Explains the colours of the memory bar, on as many lines as they need.
fn memory_legend(app: &App, g: &Glance, width: usize) -> Vec<Row> {
    let indent = (" ".repeat(9), app.theme.dim());
    let mut lines = vec![vec![indent.clone()]];
    let mut used = 9;
    for part in families(app, g) {
        let text = format!(" {} {}  ", part.name, bytes(part.size));
        let length = 1 + text.chars().count();
        if used + length > width && used > 9 {
            lines.push(vec![indent.clone()]);
            used = 9;
        }
        used += length;
        if let Some(line) = lines.last_mut() {
            line.push((part.fill.to_string(), part.style));
            line.push((text, app.theme.dim()));
        }
    }
    lines.into_iter().map(Row::Text).collect()
}

fn memory_bar(app: &App, buf: &mut Buffer, area: Rect, g: &Glance) {
    let parts = families(app, g);
    let allocated: u64 = parts.iter().map(|p| p.size).sum();
    let whole = g.brief.capacity.map_or(allocated, |c| c.0).max(allocated);
    put(buf, area.x, area.y, 9, "", app.theme.dim());
    stacked(
        buf,
        Rect {
            x: area.x + 9,
            width: area.width.saturating_sub(9),
            ..area
        },
        &parts,
        whole,
        app.theme,
    );
}
