//! Draws details on the selected span: what it is, why it started when it did, and what it delayed.

use super::put_legend;
use crate::dash::app::App;
use crate::dash::draw::charts::family_style;
use crate::dash::draw::kit::{bytes, pieces, put};
use crate::dash::lanes::Lanes;
use crate::dash::lanes::memory::Family;
use crate::dash::theme::letter;
use crate::dash::timeline::Selected;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use shardlab_plan::record::Blocker;
use shardlab_plan::units::Picos;

pub(super) fn draw(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let rule = "─".repeat(usize::from(area.width));
    put(buf, area.x, area.y, area.width, &rule, theme.dim());
    let t = &app.timeline;
    let Some(main) = &t.main else { return };
    let inner = Rect {
        x: area.x + 1,
        y: area.y + 1,
        width: area.width.saturating_sub(2),
        height: area.height - 1,
    };
    let mut lines = Vec::new();
    if let Some(s) = t.selected
        && let Some(run) = t.run(s.run)
    {
        lines = describe(app, run, s);
    }
    // If there is enough room, the details take five rows and the lists the rest.
    const DETAIL_ROWS: u16 = 5;
    let lists = inner.height >= DETAIL_ROWS + 5;
    let legend_row = if lists {
        inner.y + DETAIL_ROWS - 1
    } else {
        inner.bottom() - 1
    };
    for (i, line) in lines.iter().enumerate() {
        let y = inner.y + i as u16;
        if y >= legend_row {
            break;
        }
        pieces(buf, inner.x, y, inner.width, line);
    }
    let place = Rect {
        y: legend_row,
        height: 1,
        ..inner
    };
    let shown = t.selected.and_then(|s| t.run(s.run)).unwrap_or(main);
    put_legend(app, shown, buf, place);
    if lists {
        let below = Rect {
            y: inner.y + DETAIL_ROWS,
            height: inner.height - DETAIL_ROWS,
            ..inner
        };
        let half = below.width / 2;
        longest(
            app,
            shown,
            buf,
            Rect {
                width: half - 2,
                ..below
            },
        );
        let right = Rect {
            x: below.x + half,
            width: below.width - half,
            ..below
        };
        alive(app, shown, buf, right);
    }
}

/// Draws the longest exposed intervals: where they are, and what the compute stream waited for.
fn longest(app: &App, run: &Lanes, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    put(
        buf,
        area.x,
        area.y,
        area.width,
        "Longest exposed (n, N go through them)",
        theme.strong(),
    );
    for (i, gap) in run
        .longest
        .iter()
        .take(usize::from(area.height - 1))
        .enumerate()
    {
        let length = Picos(gap.end - gap.start).to_string();
        let start = Picos(gap.start).to_string();
        let waits = run.view.awaited_label(&gap.awaited);
        let line = [
            (format!("{} ", letter(gap.cause)), theme.cause(gap.cause)),
            (format!("{length:>10}"), theme.text()),
            (format!(" at {start:<10} "), theme.dim()),
            (format!("{} for {waits}", gap.cause.name()), theme.text()),
        ];
        pieces(buf, area.x, area.y + 1 + i as u16, area.width, &line);
    }
}

/// Draws the largest buffers at the memory peak.
fn alive(app: &App, run: &Lanes, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let view = &run.view;
    let at = &view.run.memory.at;
    let title = format!(
        "Alive at the peak, in {} of {}",
        at.phase.name(),
        view.unit(at.unit)
    );
    put(buf, area.x, area.y, area.width, &title, theme.strong());
    for (i, a) in view
        .alive
        .iter()
        .take(usize::from(area.height - 1))
        .enumerate()
    {
        let line = [
            (format!("{:>11} ", bytes(a.total().0)), theme.text()),
            (
                format!("{:<16} ", a.role.name()),
                family_style(theme, Family::of(a.role)),
            ),
            (
                format!("{} x {} {} {}", a.count, bytes(a.bytes.0), a.dtype, a.name),
                theme.dim(),
            ),
        ];
        pieces(buf, area.x, area.y + 1 + i as u16, area.width, &line);
    }
}

type Line = Vec<(String, Style)>;

fn describe(app: &App, run: &Lanes, s: Selected) -> Vec<Line> {
    let theme = app.theme;
    let (Some(span), Some(instr)) = (run.view.run.spans.get(s.span as usize), run.instr(s.span))
    else {
        return Vec::new();
    };
    let from = run.view.run.recorded_from;
    let at = |t: Picos| t.saturating_sub(from);
    let dim = |text: &str| (text.to_owned(), theme.dim());
    let text = |text: String| (text, theme.text());
    let length = span.end.saturating_sub(span.start);
    let critical = run.critical.get(s.span as usize).copied().unwrap_or(false);
    // The number is omitted if there is only one micro-batch.
    let part = match run.view.program.micro_batches {
        0 | 1 => String::new(),
        _ => format!(", micro-batch {}", instr.micro_batch),
    };
    let mut first = vec![
        (format!("▸ {}", run.view.name_of(instr)), theme.accent()),
        text(format!(" {} ", run.view.unit(instr.unit))),
        dim(&format!(
            "{}{part}, {} stream, #{}",
            instr.phase.name(),
            run.view.stream(span),
            instr.id.0
        )),
    ];
    if critical {
        first.push(("  ◆ critical path".into(), theme.warn()));
    }
    let mut second = vec![
        text(format!("{length}")),
        dim("  from "),
        text(instant(at(span.start), length)),
        dim(" to "),
        text(instant(at(span.end), length)),
    ];
    if span.alone.0 + span.alone.0 / 1000 < length.0 {
        second.push(dim("  alone: "));
        second.push(text(format!("{}", span.alone)));
    }
    second.extend(
        rates(instr.bytes, instr.flops, length)
            .into_iter()
            .map(|r| dim(&r)),
    );
    let (why, target) = run.why(s.span);
    let mut third = match span.blocker {
        Blocker::None => vec![text(why)],
        _ => vec![dim("blocked by: "), text(why)],
    };
    if target.is_some() {
        third.push(dim("  (b jumps there)"));
    }
    let mut fourth = vec![
        dim("launched "),
        text(instant(at(span.issued), length)),
        dim(", ready "),
        text(instant(at(span.ready), length)),
    ];
    let late = span.start.saturating_sub(span.ready);
    if late.0 > length.0 / 100 {
        fourth.push(dim(", started "));
        fourth.push(text(format!("{late}")));
        fourth.push(dim(" later"));
    }
    fourth.push(dim(&format!("; rule {}", run.view.rule_of(instr))));
    if let Some(gap) = run.exposes(s.span) {
        let time = Picos(gap.end - gap.start);
        fourth.push((
            format!("; exposed {time} ({})", gap.cause.name()),
            theme.cause(gap.cause),
        ));
    }
    vec![first, second, third, fourth]
}

/// Formats the time of a span with enough digits to show a tenth of the span's length.
fn instant(time: Picos, length: Picos) -> String {
    let step = (length.0 / 10).max(1);
    let decimals = 9_u32.saturating_sub(step.ilog10());
    let plain_is_enough = match time.ms() {
        ms if ms < 1.0 => true,
        ms if ms < 1000.0 => decimals <= 2,
        _ => decimals == 0,
    };
    match plain_is_enough {
        true => time.to_string(),
        false => format!("{} ms", time.show_ms(decimals as usize)),
    }
}

fn rates(moved: u64, flops: u64, length: Picos) -> Vec<String> {
    let seconds = length.secs();
    let mut all = Vec::new();
    if moved > 0 && seconds > 0.0 {
        all.push(format!(
            "  {} at {:.1} GB/s",
            bytes(moved),
            moved as f64 / seconds / 1e9
        ));
    }
    if flops > 0 && seconds > 0.0 {
        let rate = flops as f64 / seconds;
        all.push(if rate >= 1e12 {
            format!("  {:.1} TFLOP/s", rate / 1e12)
        } else {
            format!("  {:.2} GFLOP/s", rate / 1e9)
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_short_spans_differ() {
        let start = Picos::from_us(971_216.6);
        let length = Picos::from_us(2.0);
        assert_eq!(instant(start, length), "971.2166 ms");
        assert_eq!(instant(start + length, length), "971.2186 ms");
        assert_eq!(instant(start, Picos::from_us(400.0)), "971.22 ms");
        assert_eq!(instant(Picos::from_us(7.7), length), "7.7 us");
        let late = Picos::from_secs(1.5);
        assert_eq!(instant(late, Picos::from_secs(0.1)), "1.500 s");
        assert_eq!(instant(late, length), "1,500.0000 ms");
    }
}
