//! Throughput against reserved memory: the points of a sweep and their Pareto front.

use super::draw::{self, short};
use super::svg::{Anchor, Canvas, TEXT, ticks_within, width_of};
use super::{Key, Plot};

/// Size of the drawing.
const WIDTH: f64 = 1160.0;
const HEIGHT: f64 = 600.0;
/// Margins around the plotting area.
const LEFT: f64 = 130.0;
const RIGHT: f64 = 40.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 90.0;
/// A limit farther away than this multiple of the largest point is mentioned only in the
/// description.
const FAR: f64 = 1.5;
/// Radius of a point.
const RADIUS: f64 = 9.0;
/// Maximum number of points that the description lists.
const MAX_LISTED: usize = 8;

/// A point of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct Spot {
    /// Its values on the axes of the sweep.
    pub label: String,
    /// Reserved memory, GiB.
    pub reserved: f64,
    /// Throughput.
    pub throughput: f64,
    /// Whether it fits the device.
    pub fits: bool,
    /// Whether no other point is faster with at most the same memory.
    pub on_front: bool,
}

/// Draws points, the steps of the front, and the memory of the device in GiB.
///
/// Points that do not fit are hollow. Labels are drawn for the front and for as many other points
/// as there is room for. Every point shows its numbers when the pointer hovers over it.
#[must_use]
pub fn pareto(title: &str, unit: &str, spots: &[Spot], capacity: Option<f64>) -> Plot {
    let largest = spots.iter().map(|s| s.reserved).fold(0.0, f64::max);
    let limit = capacity.filter(|c| *c <= FAR * largest);
    let x = draw::range(spots.iter().map(|s| s.reserved).chain(limit));
    let y = draw::range(spots.iter().map(|s| s.throughput));
    let px = |v: f64| LEFT + (v - x.start) / (x.end - x.start) * (WIDTH - LEFT - RIGHT);
    let py = |v: f64| TOP + (y.end - v) / (y.end - y.start) * (HEIGHT - TOP - BOTTOM);
    let mut front: Vec<&Spot> = spots.iter().filter(|s| s.on_front).collect();
    front.sort_by(|a, b| a.reserved.total_cmp(&b.reserved));

    let mut canvas = Canvas::new(WIDTH, HEIGHT);
    let floor = HEIGHT - BOTTOM;
    for v in ticks_within(&y, 5.0) {
        canvas.line(&[(LEFT, py(v)), (WIDTH - RIGHT, py(v))], "grid", 1.0, "");
        let at = (LEFT - 12.0, py(v) + 8.0);
        canvas.text(at, Anchor::End, "faint", &short(v));
    }
    for v in ticks_within(&x, 7.0) {
        canvas.line(&[(px(v), TOP), (px(v), floor)], "grid", 1.0, "");
        canvas.text((px(v), floor + 32.0), Anchor::Middle, "faint", &short(v));
    }
    let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
    let below = (middle, HEIGHT - 16.0);
    canvas.text(below, Anchor::Middle, "faint", "reserved memory, GiB");
    canvas.raw(&format!(
        "<g transform=\"rotate(-90 24 {0:.0})\">",
        f64::midpoint(TOP, floor)
    ));
    let beginning = (24.0, f64::midpoint(TOP, floor) + 8.0);
    canvas.text(beginning, Anchor::Middle, "faint", unit);
    canvas.close();
    let mut taken = Vec::new();
    if let Some(limit) = limit {
        canvas.line(&[(px(limit), TOP), (px(limit), floor)], "bad", 3.0, "10 8");
        let words = "device memory";
        let (end, base) = (px(limit) - 10.0, floor - 10.0);
        canvas.label((end, base), Anchor::End, "bad", words);
        let width = width_of(words, TEXT);
        taken.push([end - width, base - 20.0, width, TEXT]);
    }
    // Between two points of the front, the smaller one is the fastest that fits.
    let mut steps = Vec::new();
    for (i, spot) in front.iter().enumerate() {
        if let Some(before) = i.checked_sub(1).map(|b| front[b]) {
            steps.push((px(spot.reserved), py(before.throughput)));
        }
        steps.push((px(spot.reserved), py(spot.throughput)));
    }
    canvas.line(&steps, "c0", 3.0, "");
    taken.extend(steps.windows(2).map(|ends| around(ends[0], ends[1])));
    for spot in spots {
        point(
            &mut canvas,
            spot,
            unit,
            (px(spot.reserved), py(spot.throughput)),
        );
    }
    labels(&mut canvas, spots, taken, &|s: &Spot| {
        (px(s.reserved), py(s.throughput))
    });
    let legend = legend(spots, limit.is_some());
    canvas.finish(
        "pareto",
        title,
        describe(unit, &front, spots, capacity),
        legend,
    )
}

fn point(canvas: &mut Canvas, spot: &Spot, unit: &str, (x, y): (f64, f64)) {
    let fits = if spot.fits { "" } else { "; does not fit" };
    canvas.open_titled(&format!(
        "{}: {} {unit}, {} GiB reserved{fits}",
        spot.label,
        short(spot.throughput),
        short(spot.reserved)
    ));
    let style = match (spot.fits, spot.on_front) {
        (false, _) => {
            "fill=\"var(--ground)\" stroke=\"var(--faint)\" stroke-width=\"3\" stroke-dasharray=\"4 4\""
        }
        (true, true) => "fill=\"var(--c0)\" stroke=\"var(--c0)\" stroke-width=\"3\"",
        (true, false) => "fill=\"var(--ground)\" stroke=\"var(--c0)\" stroke-width=\"3\"",
    };
    canvas.raw(&format!(
        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS:.0}\" {style}/>"
    ));
    canvas.close();
}

/// Returns the place `[x, y, width, height]` of a line along an axis, with a margin.
fn around(a: (f64, f64), b: (f64, f64)) -> [f64; 4] {
    let margin = 2.0;
    let (left, top) = (a.0.min(b.0) - margin, a.1.min(b.1) - margin);
    let (width, height) = ((a.0 - b.0).abs(), (a.1 - b.1).abs());
    [left, top, width + 2.0 * margin, height + 2.0 * margin]
}

/// Labels points without overlaps with each other, other points and the places that are taken,
/// starting with those on the front.
fn labels(
    canvas: &mut Canvas,
    spots: &[Spot],
    mut taken: Vec<[f64; 4]>,
    place: &impl Fn(&Spot) -> (f64, f64),
) {
    let (first, rest): (Vec<&Spot>, Vec<&Spot>) = spots.iter().partition(|s| s.on_front);
    let marks = spots.iter().map(|s| {
        let (x, y) = place(s);
        [x - RADIUS, y - RADIUS, 2.0 * RADIUS, 2.0 * RADIUS]
    });
    taken.extend(marks);
    for spot in first.into_iter().chain(rest) {
        let (x, y) = place(spot);
        let text = draw::cut(&spot.label, 30);
        let width = width_of(&text, TEXT);
        let choices = [
            ([x + RADIUS + 6.0, y - 12.0, width, TEXT], Anchor::Start),
            (
                [x - RADIUS - 6.0 - width, y - 12.0, width, TEXT],
                Anchor::End,
            ),
            ([x - width / 2.0, y - 44.0, width, TEXT], Anchor::Middle),
            ([x - width / 2.0, y + 18.0, width, TEXT], Anchor::Middle),
        ];
        let free = choices.into_iter().find(|(b, _)| {
            let inside = b[0] >= LEFT && b[0] + b[2] <= WIDTH && b[1] >= 0.0;
            inside && b[1] + b[3] <= HEIGHT - BOTTOM && !taken.iter().any(|t| overlap(*b, *t))
        });
        if let Some((place, anchor)) = free {
            let at = match anchor {
                Anchor::Start => place[0],
                Anchor::Middle => place[0] + width / 2.0,
                Anchor::End => place[0] + width,
            };
            let colour = if spot.fits { "ink" } else { "faint" };
            canvas.label((at, place[1] + 20.0), anchor, colour, &text);
            taken.push(place);
        }
    }
}

fn overlap(a: [f64; 4], b: [f64; 4]) -> bool {
    a[0] < b[0] + b[2] && b[0] < a[0] + a[2] && a[1] < b[1] + b[3] && b[1] < a[1] + a[3]
}

fn legend(spots: &[Spot], limit: bool) -> Vec<(Key, String)> {
    let mut legend = Vec::new();
    if spots.iter().any(|s| s.on_front) {
        let words = "on the Pareto front: no other point is faster with as little memory";
        legend.push((Key::Series(0), words.to_owned()));
    }
    if spots.iter().any(|s| !s.on_front) {
        legend.push((Key::Hollow, "other points; dotted: does not fit".to_owned()));
    }
    if limit {
        legend.push((Key::Limit, "device memory".to_owned()));
    }
    legend
}

fn describe(unit: &str, front: &[&Spot], spots: &[Spot], capacity: Option<f64>) -> String {
    let on = |s: &&Spot| {
        format!(
            "{} ({} {unit}, {} GiB)",
            s.label,
            short(s.throughput),
            short(s.reserved)
        )
    };
    let mut words = match front.len() {
        0 => format!("{} points that are not ranked", spots.len()),
        n if n <= MAX_LISTED => {
            let all: Vec<String> = front.iter().map(on).collect();
            format!(
                "{n} of {} points on the front: {}",
                spots.len(),
                all.join("; ")
            )
        }
        n => format!("{n} of {} points on the front", spots.len()),
    };
    let out = spots.iter().filter(|s| !s.fits).count();
    if out > 0 {
        words.push_str(&format!("; {out} do not fit"));
    }
    if let Some(capacity) = capacity {
        words.push_str(&format!("; the device has {} GiB", short(capacity)));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spot(label: &str, reserved: f64, throughput: f64, on_front: bool) -> Spot {
        Spot {
            label: label.to_owned(),
            reserved,
            throughput,
            fits: true,
            on_front,
        }
    }

    /// Returns the centres of the circles, in order.
    fn centres(svg: &str) -> Vec<(f64, f64)> {
        let number = |text: &str, key: &str| -> f64 {
            let from = text.find(key).unwrap() + key.len();
            text[from..].split('"').next().unwrap().parse().unwrap()
        };
        svg.split("<circle ")
            .skip(1)
            .map(|t| (number(t, "cx=\""), number(t, "cy=\"")))
            .collect()
    }

    #[test]
    fn more_memory_is_to_the_right_and_faster_is_above() {
        let spots = [
            spot("0", 40.0, 800.0, true),
            spot("1", 50.0, 900.0, true),
            spot("2", 52.0, 850.0, false),
        ];
        let plot = pareto("P", "tokens/s/GPU", &spots, Some(60.0));
        let at = centres(&plot.svg);
        assert!(at[0].0 < at[1].0 && at[1].0 < at[2].0);
        assert!(at[1].1 < at[2].1 && at[2].1 < at[0].1);
        // Equal differences correspond to equal distances.
        let (dx, dy) = (at[1].0 - at[0].0, at[0].1 - at[1].1);
        assert!(((at[2].0 - at[1].0) / dx - 0.2).abs() < 0.01);
        assert!(((at[2].1 - at[1].1) / dy - 0.5).abs() < 0.01);
        assert!(plot.svg.contains("device memory"));
        assert!(
            plot.description
                .starts_with("2 of 3 points on the front: 0 (800 tokens/s/GPU, 40 GiB); 1 ("),
            "{}",
            plot.description
        );
    }

    /// A far limit does not squeeze the points, but is mentioned.
    #[test]
    fn a_far_limit_is_in_words_only() {
        let spots = [spot("0", 4.0, 8.0, true), spot("1", 5.0, 9.0, true)];
        let plot = pareto("P", "rows/s/GPU", &spots, Some(80.0));
        assert!(!plot.svg.contains("device memory"));
        assert!(plot.description.ends_with("the device has 80 GiB"));
        let at = centres(&plot.svg);
        assert!(at[1].0 - at[0].0 > WIDTH / 2.0, "{at:?}");
    }

    #[test]
    fn labels_do_not_overlap() {
        let spots: Vec<Spot> = (0..40)
            .map(|i| {
                let at = f64::from(i);
                spot(
                    &format!("point {i}"),
                    40.0 + at / 10.0,
                    800.0 + at % 7.0,
                    i % 3 == 0,
                )
            })
            .collect();
        let svg = pareto("P", "tokens/s/GPU", &spots, None).svg;
        let boxes: Vec<[f64; 4]> = svg
            .split("<text ")
            .filter(|t| t.contains("paint-order"))
            .map(|t| {
                let value = |key: &str| {
                    let from = t.find(key).unwrap() + key.len();
                    t[from..].split('"').next().unwrap()
                };
                let text = t.split(['>', '<']).nth(1).unwrap();
                let width = width_of(text, TEXT);
                let x: f64 = value("x=\"").parse().unwrap();
                let x = match value("text-anchor=\"") {
                    "start" => x,
                    "end" => x - width,
                    _ => x - width / 2.0,
                };
                [
                    x,
                    value(" y=\"").parse::<f64>().unwrap() - 20.0,
                    width,
                    TEXT,
                ]
            })
            .collect();
        assert!(boxes.len() > 5, "{}", boxes.len());
        for (i, a) in boxes.iter().enumerate() {
            assert!(
                !boxes[i + 1..]
                    .iter()
                    .any(|b| overlap(shrunk(*a), shrunk(*b)))
            );
        }
    }

    /// Positions in the SVG are rounded to a tenth.
    fn shrunk([x, y, w, h]: [f64; 4]) -> [f64; 4] {
        [x + 0.1, y + 0.1, w - 0.2, h - 0.2]
    }
}
