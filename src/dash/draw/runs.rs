//! Runs of this session and of the store.

use super::kit::{bytes, cut, ms, pane, put, put_right};
use crate::dash::app::{App, Hit};
use crate::dash::names::letter;
use crate::dash::runs::Row;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

pub(super) fn draw(app: &App, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let r = &app.runs;
    let rows = r.rows();
    let mut title = format!(
        "Runs {} here, {} in the store",
        r.kept.len(),
        r.stored.len()
    );
    if !r.filter.is_empty() {
        title = format!("{title}: {}", r.filter);
    }
    let inner = pane(buf, body, &title, true, theme);
    put(buf, inner.x + 3, inner.y, inner.width, "run", theme.dim());
    let head = "step ms      alloc      loss";
    put_right(buf, inner.x, inner.y, inner.width - 1, head, theme.dim());
    let area = Rect {
        y: inner.y + 1,
        height: inner.height - 2,
        ..inner
    };
    for (line, i) in r
        .cursor
        .window(rows.len(), usize::from(area.height))
        .enumerate()
    {
        let place = Rect {
            y: area.y + line as u16,
            height: 1,
            ..area
        };
        row(app, buf, place, rows[i], i == r.cursor.at);
        app.hits.borrow_mut().push((place, Hit::Run(i)));
    }
    if rows.is_empty() {
        let text = "no run yet: r simulates and x trains the scenario selected in view 1";
        put(buf, area.x + 1, area.y, area.width - 1, text, theme.dim());
    }
    if let Some(error) = &r.store_error {
        let text = cut(
            &format!("the store cannot be read: {error}"),
            usize::from(inner.width) - 2,
        );
        put(
            buf,
            inner.x + 1,
            inner.bottom() - 1,
            inner.width - 1,
            &text,
            theme.warn(),
        );
    }
}

fn row(app: &App, buf: &mut Buffer, place: Rect, row: Row, selected: bool) {
    let theme = app.theme;
    let r = &app.runs;
    let style = if selected {
        theme.selected()
    } else {
        theme.text()
    };
    put(
        buf,
        place.x,
        place.y,
        place.width,
        &" ".repeat(usize::from(place.width)),
        style,
    );
    put(
        buf,
        place.x,
        place.y,
        1,
        if selected { "▸" } else { " " },
        style,
    );
    const NUMBERS: u16 = 32;
    let room = place.width.saturating_sub(NUMBERS + 4);
    let numbers = |step: f64, allocated: u64, loss: Option<f64>| {
        let loss = loss.map_or_else(|| "-".to_owned(), |l| format!("{l:.4}"));
        format!("{:>9} {:>10} {:>9}", ms(step), bytes(allocated), loss)
    };
    let (text, tail, tone) = match row {
        Row::Kept(i) => {
            let kept = &r.kept[i];
            let view = &kept.lanes.view;
            let mark = r.marked.iter().position(|n| *n == kept.number);
            if let Some(order) = mark {
                let label = letter(order);
                put(
                    buf,
                    place.x + 1,
                    place.y,
                    1,
                    &label,
                    style.patch(theme.warn()),
                );
            }
            let changes = view.scenario.overrides.join(" ");
            let tail = numbers(
                view.step_ms(),
                view.run.memory.peak_allocated.0,
                view.run.losses.last().copied(),
            );
            let stored = kept
                .stored
                .as_deref()
                .map_or("", |id| &id[id.len().saturating_sub(6)..]);
            (
                format!("{} {changes} {stored}", kept.label()),
                tail,
                Style::new(),
            )
        }
        Row::Stored(i) => {
            let s = &r.stored[i];
            let tail = &s.id[s.id.len().saturating_sub(6)..];
            let text = format!("{tail} {} {} {} {}", s.kind, s.scenario, s.made, s.changes);
            (text, numbers(s.step_ms, s.allocated, s.loss), theme.dim())
        }
    };
    put(
        buf,
        place.x + 3,
        place.y,
        room,
        &cut(&text, usize::from(room)),
        style.patch(tone),
    );
    put_right(
        buf,
        place.x,
        place.y,
        place.width - 1,
        &tail,
        style.patch(tone),
    );
}
