//! Draws one lane: bars that end in eighths of a column, with names if there is room.

use super::GUTTER;
use crate::dash::app::App;
use crate::dash::draw::kit::{cut, put};
use crate::dash::lanes::Lanes;
use crate::dash::lanes::bins::Bin;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use shardlab_plan::program::Phase;
use shardlab_reports::view::Work;

/// Blocks that fill eighths of a cell from its left.
const LEFT: [char; 9] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
/// Minimum width of a bar that shows its name, in columns.
const MIN_NAMED_COLUMNS: usize = 4;

#[expect(
    clippy::too_many_arguments,
    reason = "a lane is drawn in one place only"
)]
pub(super) fn lane(
    app: &App,
    run: &Lanes,
    bins: &[Bin],
    buf: &mut Buffer,
    area: Rect,
    name: &str,
    selected: bool,
    run_index: usize,
) {
    let theme = app.theme;
    let style = if selected {
        theme.accent()
    } else {
        theme.text()
    };
    let mark = if selected { "▸" } else { " " };
    put(buf, area.x, area.y, 1, mark, style);
    put(
        buf,
        area.x + 1,
        area.y,
        GUTTER - 2,
        &cut(name, usize::from(GUTTER - 2)),
        style,
    );
    let critical_only = app.timeline.critical;
    for (i, bin) in bins.iter().enumerate() {
        let Some(work) = bin.work else { continue };
        let dimmed = critical_only && !bin.critical;
        let (mut glyph, style) = cell(app, bin, work, dimmed);
        // A hairline separates adjacent wide spans.
        let ends =
            |other: Option<&Bin>| other.is_some_and(|o| o.work.is_some() && o.span != bin.span);
        let wide = i > 0 && bins[i - 1].span == bin.span && bins[i - 1].work.is_some();
        if glyph == '█' && wide && ends(bins.get(i + 1)) && !app.theme.textures() {
            glyph = '▉';
        }
        for y in area.y..area.bottom() {
            put(
                buf,
                area.x + GUTTER + i as u16,
                y,
                1,
                &glyph.to_string(),
                style,
            );
        }
    }
    names(app, run, bins, buf, area, critical_only);
    highlight(app, bins, buf, area, run_index);
}

fn cell(app: &App, bin: &Bin, work: Work, dimmed: bool) -> (char, Style) {
    let theme = app.theme;
    let style = if dimmed {
        theme.dim()
    } else {
        theme.work(work)
    };
    if theme.textures() {
        let glyph = match bin.cover {
            c if c >= 0.35 && dimmed => '-',
            c if c >= 0.35 => theme.texture(work),
            _ => '\'',
        };
        return (glyph, style);
    }
    if dimmed {
        let glyph = if bin.cover >= 0.5 { '▒' } else { '░' };
        return (glyph, style);
    }
    let eighths = ((f64::from(bin.cover) * 8.0).round() as usize).clamp(1, 8);
    match (eighths, bin.left, bin.right) {
        (8, ..) => ('█', style),
        // The bar starts within the column, so the empty part is drawn over the colour.
        (e, false, true) => (LEFT[8 - e], style.add_modifier(Modifier::REVERSED)),
        (e, ..) => (LEFT[e], style),
    }
}

/// Draws the names of the spans that are wide enough.
fn names(app: &App, run: &Lanes, bins: &[Bin], buf: &mut Buffer, area: Rect, critical_only: bool) {
    // Between textures, a name needs a space on each side.
    let margin = if app.theme.textures() { 3 } else { 2 };
    let mut from = 0;
    while from < bins.len() {
        let bin = &bins[from];
        let same = |b: &&Bin| b.work.is_some() && b.span == bin.span && b.cover > 0.5;
        let len = bins[from..].iter().take_while(same).count();
        let label = label(run, bin.span, len.saturating_sub(margin));
        if len >= MIN_NAMED_COLUMNS && label.is_some() && (!critical_only || bin.critical) {
            let work = bin.work.unwrap_or(Work::Memory);
            let label = label.unwrap_or_default();
            let x = area.x + GUTTER + from as u16 + 1;
            let mut style = app.theme.on_work(work);
            if app.theme.textures() {
                style = app.theme.text().add_modifier(Modifier::BOLD);
            }
            let text = if app.theme.textures() {
                format!(" {label} ")
            } else {
                label
            };
            let room = (len as u16).saturating_sub(1);
            put(buf, x, area.y + (area.height - 1) / 2, room, &text, style);
        }
        from += len.max(1);
    }
}

/// Returns the name with the unit, or only the name, or its start if that is informative.
fn label(run: &Lanes, span: u32, width: usize) -> Option<String> {
    const MIN_COLUMNS: usize = 5;
    let full = run.label(span);
    if full.chars().count() <= width {
        return Some(full);
    }
    let name = run.name(span);
    if name.chars().count() <= width {
        return Some(name.to_owned());
    }
    (width >= MIN_COLUMNS).then(|| cut(name, width))
}

/// Highlights the columns of the selected span.
fn highlight(app: &App, bins: &[Bin], buf: &mut Buffer, area: Rect, run_index: usize) {
    let t = &app.timeline;
    let Some(selected) = t.selected.filter(|s| s.run == run_index) else {
        return;
    };
    let (Some(time), view) = (t.selected_time(), t.view()) else {
        return;
    };
    let on_this_lane = t
        .run(run_index)
        .and_then(|r| r.place(selected.span))
        .is_some_and(|(lane, _)| {
            t.rows()
                .get(t.selected_row().unwrap_or(usize::MAX))
                .map(|r| r.lane)
                == Some(lane)
        });
    let this = put_name_matches(app, buf, area);
    if !on_this_lane || !this || time.to <= view.from || time.from >= view.to {
        return;
    }
    let columns = bins.len() as u16;
    let from = view.column(time.from, columns).max(0.0) as u16;
    let to = (view.column(time.to, columns).ceil() as u16).clamp(from + 1, columns.max(from + 1));
    for x in from..to.min(columns) {
        for y in area.y..area.bottom() {
            if let Some(cell) = buf.cell_mut((area.x + GUTTER + x, y)) {
                // A full block has no background to reverse: it would vanish.
                if cell.symbol() == "█" {
                    cell.set_symbol("▓");
                } else {
                    cell.set_style(Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD));
                }
            }
        }
    }
    for (x, mark) in [(from, "▸"), (to.min(columns).saturating_sub(1), "◂")] {
        if to - from <= 2 {
            let text = "◆";
            put(
                buf,
                area.x + GUTTER + from,
                area.y,
                1,
                text,
                app.theme.accent(),
            );
            break;
        }
        put(
            buf,
            area.x + GUTTER + x,
            area.y,
            1,
            mark,
            app.theme.accent(),
        );
    }
}

/// Returns whether the lane drawn here is the selected one, which has a mark.
fn put_name_matches(_: &App, buf: &Buffer, area: Rect) -> bool {
    buf.cell((area.x, area.y))
        .is_some_and(|c| c.symbol() == "▸")
}

/// Returns the part of the step that a phase belongs to. It is shown if units are too narrow.
fn band(phase: Phase) -> &'static str {
    match phase {
        Phase::Recompute | Phase::Backward => "backward",
        other => other.name(),
    }
}

/// Draws the units along the compute stream.
pub(super) fn units(app: &App, run: &Lanes, buf: &mut Buffer, row: Rect, plot: Rect) {
    let theme = app.theme;
    put(buf, row.x + 1, row.y, GUTTER - 1, "unit", theme.dim());
    let view = app.timeline.view();
    let columns = plot.width;
    // If units are too narrow for names, segments show the phase.
    let shown: Vec<_> = run
        .segments
        .iter()
        .filter(|s| s.end > view.from && s.start < view.to)
        .collect();
    let mut x = 0u16;
    let mut i = 0;
    while i < shown.len() {
        let s = shown[i];
        let from = view.column(s.start.max(view.from), columns) as u16;
        let mut end = s.end;
        let mut last = i;
        let unit = run.view.unit(s.unit);
        let named = unit.chars().count() as u16 + 2;
        let width = |end: u64| view.column(end.min(view.to), columns) as u16 - from.min(columns);
        // Adjacent units within one phase are merged if they are too narrow for their names.
        let single = width(end) >= named;
        if !single {
            while let Some(next) = shown
                .get(last + 1)
                .filter(|n| band(n.phase) == band(s.phase))
            {
                let own =
                    view.column(next.end.min(view.to), columns) - view.column(next.start, columns);
                if own >= f64::from(run.view.unit(next.unit).chars().count() as u16 + 2) {
                    break;
                }
                last += 1;
                end = next.end;
            }
        }
        let room = width(end);
        let label = if single {
            let full = format!("{unit} {}", s.phase.name());
            if full.chars().count() as u16 + 2 <= room {
                full
            } else {
                unit.to_owned()
            }
        } else {
            band(s.phase).to_owned()
        };
        if room >= 3 && from >= x {
            let style = if i % 2 == 0 {
                theme.text()
            } else {
                theme.dim()
            };
            let text = format!("╎{}", cut(&label, usize::from(room) - 2));
            x = from + room;
            put(buf, plot.x + from, plot.y, room, &text, style);
        }
        i = last + 1;
    }
}
