//! Helpers that all views draw with.

use crate::dash::glance::Brief;
use crate::dash::theme::Theme;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::widgets::{Block, BorderType, Clear, Widget};
use shardlab_plan::record::Basis;
use shardlab_plan::record::basis::{bounded, number};
use shardlab_plan::units::{Bytes, thousands};
use std::time::Duration;

/// Writes a text, visibly shortened to a width. Returns the column after it.
pub(super) fn put(buf: &mut Buffer, x: u16, y: u16, width: u16, text: &str, style: Style) -> u16 {
    if width == 0 || !buf.area.contains((x, y).into()) {
        return x;
    }
    let room = usize::from(width);
    if text.chars().count() > room {
        return buf.set_stringn(x, y, cut(text, room), room, style).0;
    }
    buf.set_stringn(x, y, text, room, style).0
}

/// Writes a right-aligned text within a width.
pub(super) fn put_right(buf: &mut Buffer, x: u16, y: u16, width: u16, text: &str, style: Style) {
    let len = text.chars().count().min(usize::from(width)) as u16;
    put(buf, x + width - len, y, len, text, style);
}

/// Writes pieces of text one after another. Returns the column after them.
pub(super) fn pieces(buf: &mut Buffer, x: u16, y: u16, width: u16, all: &[(String, Style)]) -> u16 {
    let end = x + width;
    let mut at = x;
    for (text, style) in all {
        at = put(buf, at, y, end.saturating_sub(at), text, *style);
    }
    at
}

/// Draws a framed pane and returns its inner area. The focused pane differs by more than its
/// colour.
pub(super) fn pane(buf: &mut Buffer, area: Rect, title: &str, focused: bool, theme: Theme) -> Rect {
    let mark = if focused { "▸ " } else { "" };
    let style = if focused {
        theme.accent()
    } else {
        theme.strong()
    };
    let width = usize::from(area.width.saturating_sub(4));
    let title = cut(&format!("{mark}{title}"), width.saturating_sub(1));
    let block = Block::bordered()
        .border_type(BorderType::Rounded)
        .border_style(theme.border(focused))
        .title(ratatui::text::Span::styled(format!(" {title} "), style));
    let inner = block.inner(area);
    block.render(area, buf);
    inner
}

/// Draws a pane on top of the view.
pub(super) fn popup(buf: &mut Buffer, area: Rect, title: &str, theme: Theme) -> Rect {
    Clear.render(area, buf);
    pane(buf, area, title, true, theme)
}

/// Draws a pane over the whole body, limited to a readable width.
pub(super) fn over_all(buf: &mut Buffer, body: Rect, title: &str, theme: Theme) -> Rect {
    let width = body.width.min(100);
    let area = Rect {
        x: body.x + (body.width - width) / 2,
        width,
        ..body
    };
    popup(buf, area, title, theme)
}

/// Returns a text of at most `width` characters, with a mark if it was shortened.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.push('…');
    short
}

/// Returns a name of at most `width` characters. A longer name keeps both ends, because names often
/// differ only in the last word.
pub(super) fn shorten(name: &str, width: usize) -> String {
    let all: Vec<char> = name.chars().collect();
    if all.len() <= width {
        return name.to_owned();
    }
    let shown = width.saturating_sub(1);
    let tail = shown / 2;
    let head = all[..shown - tail].iter();
    head.chain(['…'].iter())
        .chain(&all[all.len() - tail..])
        .collect()
}

/// Shortens a name in its centre, and other texts, which are read from the start, at the end.
pub(super) fn abridge(text: &str, width: usize) -> String {
    let is_name = text.starts_with(char::is_alphabetic) && !text.contains(' ');
    match is_name {
        true => shorten(text, width),
        false => cut(text, width),
    }
}

/// Breaks a text into lines of at most `width` characters, between words if possible.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let mut rest: Vec<char> = word.chars().collect();
        loop {
            let space = usize::from(used > 0);
            if used + space + rest.len() <= width {
                let last = lines.len() - 1;
                if space == 1 {
                    lines[last].push(' ');
                }
                lines[last].extend(&rest);
                used += space + rest.len();
                break;
            }
            if used > 0 {
                lines.push(String::new());
                used = 0;
                continue;
            }
            let last = lines.len() - 1;
            lines[last].extend(rest.drain(..width));
            lines.push(String::new());
        }
    }
    lines
}

/// End of a shortened message, with the key that shows all of it.
pub(super) const MORE: &str = "… (e)";

/// Returns at most `most` lines of a text. A shortened text ends with `mark`.
pub(super) fn excerpt(text: &str, width: usize, most: usize, mark: &str) -> Vec<String> {
    let mut all = wrap(text, width);
    if all.len() > most {
        all.truncate(most);
        if let Some(last) = all.last_mut() {
            let room = width.saturating_sub(mark.chars().count());
            *last = last.chars().take(room).collect::<String>() + mark;
        }
    }
    all
}

/// Returns the lines of a text. Lines that fit stay as they are, so that excerpts of files keep
/// their columns.
pub(super) fn lines(text: &str, width: usize) -> Vec<String> {
    let fits = |l: &str| l.chars().count() <= width;
    text.lines()
        .flat_map(|l| {
            if fits(l) {
                vec![l.to_owned()]
            } else {
                wrap(l, width)
            }
        })
        .collect()
}

/// Formats bytes in few characters.
pub(super) fn bytes(n: u64) -> String {
    Bytes(n).to_string()
}

/// Formats a duration in few characters.
pub(super) fn duration(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0 => format!("{} ms", d.as_millis()),
        1..10 => format!("{:.1} s", d.as_secs_f64()),
        10..60 => format!("{s} s"),
        60..3600 => format!("{} min {:02} s", s / 60, s % 60),
        _ => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
    }
}

/// Formats a step time with enough digits for short steps.
pub(super) fn step_time(d: Duration) -> String {
    if d < Duration::from_millis(100) {
        return format!("{:.2} ms", d.as_secs_f64() * 1e3);
    }
    duration(d)
}

/// Formats milliseconds in 9 characters, with a comma between thousands.
pub(super) fn ms(x: f64) -> String {
    match x.abs() {
        _ if !x.is_finite() => "-".into(),
        a if a >= 10_000.0 => thousands(x, 0),
        a if a >= 100.0 => thousands(x, 1),
        a if a >= 1.0 => thousands(x, 2),
        _ => thousands(x, 3),
    }
}

/// Formats a predicted step time as [`estimated_ms`] does.
pub(super) fn step_ms(brief: &Brief) -> String {
    estimated_ms(brief.step_ms, brief.basis.as_deref())
}

/// Formats predicted milliseconds: an estimate has a `~` and three digits.
pub(super) fn estimated_ms(time: f64, basis: Option<&Basis>) -> String {
    match basis {
        Some(basis) if basis.is_estimate() => number(time, 2, Some(basis)),
        _ => ms(time),
    }
}

/// Describes the basis of a prediction in a few words: `estimated ± 14 %`.
pub(super) fn badge(basis: &Basis) -> String {
    let word = basis.kind.word();
    match basis.step_percent() {
        Some(percent) => format!("{word} ± {}", bounded(percent)),
        None => format!("{word}, error unknown"),
    }
}

/// Formats a change relative to a base, for example `-3.1 % ▼`. Also returns whether it is a
/// decrease; `None` if there is no change.
pub(super) fn change(now: f64, base: f64) -> Option<(String, bool)> {
    let share = 100.0 * (now / base - 1.0);
    if !share.is_finite() || share.abs() < 0.005 {
        return None;
    }
    let arrow = if share < 0.0 { '▼' } else { '▲' };
    Some((format!("{share:+.2} % {arrow}"), share < 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_and_wrapped_to_their_width() {
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("abcd", 4), "abcd");
        assert_eq!(shorten("model-a-fast", 7), "mod…ast");
        assert_eq!(shorten("model-a-fast", 8), "mode…ast");
        assert_eq!(shorten("model", 5), "model");
        assert_eq!(abridge("model-a-fast", 7), "mod…ast");
        assert_eq!(abridge("a=1 b=2 c=3", 7), "a=1 b=…");
        assert_eq!(abridge("█████", 3), "██…");
        assert_eq!(shorten("model", 1), "…");
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefgh ij", 3), ["abc", "def", "gh", "ij"]);
        assert_eq!(wrap("", 3), [""]);
        assert_eq!(excerpt("one two three", 7, 2, "…"), ["one two", "three"]);
        assert_eq!(
            excerpt("one two three four", 7, 2, "…"),
            ["one two", "three…"]
        );
        assert_eq!(excerpt("one two three", 7, 1, " (e)"), ["one (e)"]);
        for width in 1..12 {
            for line in wrap("a lengthy sentence of words", width) {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.00 GiB");
        assert_eq!(duration(Duration::from_secs(125)), "2 min 05 s");
        assert_eq!(step_time(Duration::from_micros(3_796)), "3.80 ms");
        assert_eq!(step_time(Duration::from_millis(121)), "121 ms");
        let all = [0.5, 1.5, 123.45, 1034.56, 46_824.2, f64::NAN].map(ms);
        assert_eq!(all, ["0.500", "1.50", "123.5", "1,034.6", "46,824", "-"]);
        assert_eq!(change(97.0, 100.0), Some(("-3.00 % ▼".into(), true)));
        assert_eq!(change(1.0, 1.0), None);
        assert_eq!(change(1.0, 0.0), None);
    }
}
