//! Helpers around plotters: axes with labels, colors as variables, and titles for screen readers.

use super::{Key, Plot, SERIES};
use plotters::coord::Shift;
use plotters::prelude::*;
use shardlab_plan::units::thousands;

/// Width of every plot in its own units; the page scales it.
pub(super) const WIDTH: u32 = 1520;

/// Area of a plot.
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Result of drawing. Writing to a string does not fail.
pub(super) type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Placeholders for variables: colors that are not used otherwise.
pub(super) const INK: RGBColor = RGBColor(1, 1, 1);
/// Axes and less important text.
pub(super) const FAINT: RGBColor = RGBColor(2, 2, 2);
/// Grid lines.
pub(super) const GRID: RGBColor = RGBColor(3, 3, 3);

/// Returns the color of a series. Colors repeat after the last.
pub(super) fn series(i: usize) -> RGBColor {
    RGBColor(9, 9, (i % SERIES) as u8)
}

/// Returns the style of text.
pub(super) fn text(size: u32, colour: &RGBColor) -> TextStyle<'_> {
    ("sans-serif", size).into_font().color(colour)
}

/// Draws a plot of this height.
pub(super) fn plot(
    name: &str,
    title: &str,
    description: String,
    height: u32,
    legend: Vec<(Key, String)>,
    body: impl FnOnce(&Area<'_>) -> Drawn,
) -> Plot {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let drawn = body(&area);
        drawn.and_then(|()| area.present().map_err(Into::into))
    };
    if let Err(e) = drawn {
        // An error is shown in the plot instead of being hidden.
        svg = format!(
            "<svg width=\"{WIDTH}\" height=\"60\" viewBox=\"0 0 {WIDTH} 60\" xmlns=\"http://www.w3.org/2000/svg\">\n\
             <text x=\"20\" y=\"36\" font-size=\"24\" fill=\"var(--ink)\">{}</text></svg>",
            escape(&format!("{title} cannot be drawn: {e}"))
        );
    }
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        svg: titled(&variables(&svg), name, title, &description),
        description,
        legend,
    }
}

fn variables(svg: &str) -> String {
    let named = [
        ("#010101", "ink"),
        ("#020202", "faint"),
        ("#030303", "grid"),
    ];
    let mut out = svg.to_owned();
    for (colour, name) in named {
        out = out.replace(&format!("\"{colour}\""), &format!("\"var(--{name})\""));
    }
    for i in 0..SERIES {
        out = out.replace(&format!("\"#09090{i}\""), &format!("\"var(--c{i})\""));
    }
    // Attributes without effect that occur thousands of times are removed.
    out.replace(" opacity=\"1\"", "")
}

/// Adds a title and a description for assistive technology to the root element.
pub(super) fn titled(svg: &str, name: &str, title: &str, description: &str) -> String {
    let body = svg
        .find("<svg")
        .and_then(|at| svg[at..].find('>').map(|end| &svg[at + end + 1..]))
        .unwrap_or_default();
    let size = |what: &str| {
        let from = svg.find(&format!(" {what}=\""))? + what.len() + 3;
        svg[from..].split('"').next()?.parse::<u32>().ok()
    };
    let (w, h) = (
        size("width").unwrap_or(WIDTH),
        size("height").unwrap_or(100),
    );
    format!(
        "<svg viewBox=\"0 0 {w} {h}\" style=\"--w:{w}\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-labelledby=\"{name}-t {name}-d\">\
         <title id=\"{name}-t\">{}</title><desc id=\"{name}-d\">{}</desc>{}",
        escape(title),
        escape(description),
        body.trim_start()
    )
}

/// Escapes text for HTML and SVG.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Formats a number with a suitable number of digits.
pub(super) fn short(x: f64) -> String {
    let a = x.abs();
    let text = match a {
        0.0 => return "0".to_owned(),
        a if a >= 1000.0 => return thousands(x, 0),
        a if a >= 100.0 => format!("{x:.1}"),
        a if a >= 1.0 => format!("{x:.2}"),
        a if a >= 0.001 => format!("{x:.4}"),
        _ => return format!("{x:.1e}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Returns text, shortened to at most `most` characters.
pub(super) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

/// Returns a range with a margin that contains these values. It is never empty.
pub(super) fn range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for x in values.filter(|x| x.is_finite()) {
        low = low.min(x);
        high = high.max(x);
    }
    if low > high {
        return 0.0..1.0;
    }
    let room = if high > low {
        0.05 * (high - low)
    } else {
        0.05 * high.abs().max(1e-12)
    };
    low - room..high + room
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_end_its_element() {
        assert_eq!(
            escape("<a b='c'>&\"\u{1}"),
            "&lt;a b=&#39;c&#39;&gt;&amp;&quot;\u{fffd}"
        );
    }

    #[test]
    fn numbers_are_short() {
        for (x, s) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (2.0, "2"),
            (1234.5, "1,234"),
            (123_456.0, "123,456"),
            (0.01, "0.01"),
            (1e-7, "1.0e-7"),
            (100.0, "100"),
        ] {
            assert_eq!(short(x), s);
        }
    }

    #[test]
    fn ranges_are_never_empty() {
        assert_eq!(range(std::iter::empty()), 0.0..1.0);
        let r = range([3.0, f64::NAN, 3.0].into_iter());
        assert!(r.start < 3.0 && r.end > 3.0);
    }
}
