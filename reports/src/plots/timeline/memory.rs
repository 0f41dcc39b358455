//! The memory panel below the lanes: a stack of families with persistent memory at the bottom, the
//! allocator's reserved memory, and the limit of the device.

use super::geometry::{GAP, GUTTER, scale};
use crate::plots::Key;
use crate::plots::draw::{WIDTH, short};
use crate::plots::svg::{TEXT, ticks, width_of};
use crate::view::{Family, MemoryCurve, RunView, Stack};
use serde::Serialize;
use shardlab_plan::units::Bytes;
use std::fmt::Write;

/// Height of the curve.
const HEIGHT: f64 = 260.0;
/// Space above the curve for a limit that is off the scale.
const HEADER: f64 = 40.0;
/// Distance from the lanes.
const SPACE: f64 = 24.0;
/// Maximum number of points of the curve. Each is the largest sample of its interval.
const POINTS: usize = 1000;
/// A limit farther away than this multiple of the largest sample is off the scale.
const FAR: f64 = 2.0;
const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

/// One point of the curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    /// Nanoseconds since the start of the step.
    time: u64,
    reserved: u64,
    stack: Stack,
}

impl Point {
    fn allocated(&self) -> u64 {
        self.stack.iter().sum()
    }
}

/// Memory for the script: its geometry and its points.
#[derive(Serialize)]
pub(super) struct Data {
    top: f64,
    height: f64,
    /// Names and colors of the layers, from the bottom to the top.
    layers: Vec<(&'static str, usize)>,
    /// Per point: nanoseconds since the previous one, then the changes in KiB of the reserved
    /// memory and of each layer.
    points: Vec<i64>,
    /// Nanoseconds from the start of the step to the peak.
    peak: u64,
}

/// The drawn panel.
pub(super) struct Panel {
    pub(super) svg: String,
    pub(super) description: String,
    pub(super) data: Data,
    top: f64,
}

impl Panel {
    /// Draws the memory of a run's recorded step below the lanes, over a time axis of `length`
    /// nanoseconds; `None` if none was recorded.
    pub(super) fn new(view: &RunView, length: u64, lanes: f64) -> Option<Self> {
        let curve = MemoryCurve::new(view);
        let all = points(&curve);
        let peak = all.iter().max_by_key(|p| p.allocated()).copied()?;
        let all = thinned(&all);
        let used: Vec<Family> = Family::ALL
            .into_iter()
            .filter(|f| all.iter().any(|p| p.stack[*f as usize] > 0))
            .collect();
        let largest = all.iter().map(|p| p.reserved.max(p.allocated())).max()?;
        let limit = view.run.memory.capacity.map(|c| c.0);
        let scaled = limit.filter(|l| *l as f64 <= FAR * largest as f64);
        let header = match (limit, scaled) {
            (Some(_), None) => HEADER,
            _ => 0.0,
        };
        let top = lanes + SPACE + header;
        let highest = 1.06 * scaled.unwrap_or(0).max(largest).max(1) as f64;
        let axes = Axes {
            top,
            highest,
            scale: scale(length),
            end: super::length(view),
        };
        let mut svg = axes.grid();
        // The curve has its own view box, which the script changes to zoom.
        let width = f64::from(WIDTH) - GUTTER;
        let _ = write!(
            svg,
            "<svg class=\"mem\" x=\"{GUTTER}\" y=\"{top:.0}\" width=\"{width}\" height=\"{HEIGHT}\" viewBox=\"0 0 {width} {HEIGHT}\" preserveAspectRatio=\"none\">"
        );
        svg.push_str(&axes.layers(&all, &used));
        svg.push_str(&axes.reserved(&all));
        svg.push_str("</svg>");
        svg.push_str(&axes.peak(&peak));
        if let Some(limit) = limit {
            svg.push_str(&axes.limit(limit, scaled.is_some()));
        }
        Some(Self {
            svg,
            description: describe(view, &all),
            data: data(&all, &used, top, peak.time),
            top,
        })
    }

    /// Returns the vertical position at which the panel ends.
    pub(super) fn bottom(&self) -> f64 {
        self.top + HEIGHT + GAP / 2.0
    }

    /// Returns the entries of the legend, from the bottom of the stack to the top.
    pub(super) fn legend(&self) -> Vec<(Key, String)> {
        let layers = self.data.layers.iter();
        let mut legend: Vec<(Key, String)> = layers
            .map(|(name, colour)| (Key::Memory(*colour), (*name).to_owned()))
            .collect();
        legend.push((Key::Line, "reserved".to_owned()));
        if self.svg.contains("class=\"limit\"") {
            legend.push((Key::Limit, "device memory".to_owned()));
        }
        legend
    }
}

/// Maps times and bytes to positions.
struct Axes {
    top: f64,
    /// Bytes at the top of the panel.
    highest: f64,
    /// Units of the drawing per nanosecond.
    scale: f64,
    /// End of the step, nanoseconds.
    end: u64,
}

impl Axes {
    /// Returns the distance of a number of bytes from the top of the panel.
    fn y(&self, bytes: u64) -> f64 {
        HEIGHT * (1.0 - bytes as f64 / self.highest)
    }

    /// Returns the distance of a time from the left of the panel.
    fn x(&self, time: u64) -> f64 {
        time as f64 * self.scale
    }

    fn grid(&self) -> String {
        let (unit, size) = match self.highest {
            h if h >= GIB => ("GiB", GIB),
            _ => ("MiB", MIB),
        };
        let mut out = format!(
            "<text x=\"0\" y=\"{:.0}\" fill=\"var(--ink)\">memory</text><text x=\"0\" y=\"{:.0}\" fill=\"var(--faint)\">{unit}</text>",
            self.top + 18.0,
            self.top + 48.0
        );
        for tick in ticks(self.highest / size, 4.0) {
            let y = self.top + self.y((tick * size) as u64);
            let _ = write!(
                out,
                "<path d=\"M{GUTTER} {y:.0}H{WIDTH}\" stroke=\"var(--grid)\"/><text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\" fill=\"var(--faint)\">{}</text>",
                GUTTER - 10.0,
                y + 8.0,
                short(tick)
            );
        }
        out
    }

    /// Draws one area per family. Lines of the page's color separate neighbors.
    fn layers(&self, points: &[Point], used: &[Family]) -> String {
        let mut out = String::new();
        let mut below = vec![0u64; points.len()];
        for family in used {
            let above: Vec<u64> = points
                .iter()
                .zip(&below)
                .map(|(p, b)| b + p.stack[*family as usize])
                .collect();
            let mut path = String::new();
            let mut start = true;
            for (x, y) in self.stairs(points, &above) {
                let _ = write!(path, "{}{x:.1} {y:.1}", if start { 'M' } else { 'L' });
                start = false;
            }
            for (x, y) in self.stairs(points, &below).into_iter().rev() {
                let _ = write!(path, "L{x:.1} {y:.1}");
            }
            let _ = write!(
                out,
                "<path d=\"{path}z\" fill=\"var(--m{})\" stroke=\"var(--ground)\" vector-effect=\"non-scaling-stroke\"/>",
                *family as usize
            );
            below = above;
        }
        out
    }

    fn reserved(&self, points: &[Point]) -> String {
        let values: Vec<u64> = points.iter().map(|p| p.reserved).collect();
        let mut path = String::new();
        for (i, (x, y)) in self.stairs(points, &values).into_iter().enumerate() {
            let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
        }
        format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"var(--ink)\" stroke-width=\"2\" vector-effect=\"non-scaling-stroke\"/>"
        )
    }

    /// Returns the corners of a curve that is constant from each point to the next one, and from
    /// the last point to the end of the step.
    fn stairs(&self, points: &[Point], values: &[u64]) -> Vec<(f64, f64)> {
        let mut out: Vec<(f64, f64)> = Vec::with_capacity(2 * points.len());
        for (point, value) in points.iter().zip(values) {
            let (x, y) = (self.x(point.time), self.y(*value));
            match out.last() {
                Some(&(_, before)) if (before - y).abs() < 0.05 => {}
                Some(&(_, before)) => out.extend([(x, before), (x, y)]),
                None => out.push((x, y)),
            }
        }
        if let Some(&(_, y)) = out.last() {
            out.push((self.x(self.end), y));
        }
        out
    }

    /// Marks the peak. The script moves the mark with the curve.
    fn peak(&self, peak: &Point) -> String {
        let x = GUTTER + self.x(peak.time);
        let y = self.top + self.y(peak.allocated());
        let (anchor, shift) = match x {
            x if x > f64::from(WIDTH) - 220.0 => ("end", -12.0),
            _ => ("start", 12.0),
        };
        format!(
            "<g class=\"peak\"><circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"6\" fill=\"var(--ground)\" stroke=\"var(--ink)\" stroke-width=\"3\"/>{}</g>",
            label(
                (x + shift, y + 30.0),
                anchor,
                "ink",
                &format!("peak {}", Bytes(peak.allocated()))
            )
        )
    }

    /// Draws the limit of the device at its place, or above a break of the axis.
    fn limit(&self, limit: u64, is_scaled: bool) -> String {
        let y = match is_scaled {
            true => self.top + self.y(limit),
            false => self.top - HEADER / 2.0,
        };
        let words = match is_scaled {
            true => format!("device memory {}", Bytes(limit)),
            false => format!("device memory {}, not to scale", Bytes(limit)),
        };
        let brk = match is_scaled {
            true => String::new(),
            false => format!(
                "<path d=\"M{0:.0} {1:.0}l10 -8l-20 -8l10 -8\" fill=\"none\" stroke=\"var(--faint)\" stroke-width=\"2\"/>",
                GUTTER,
                self.top + 6.0
            ),
        };
        // The line starts after its name.
        let from = GUTTER + 36.0 + width_of(&words, TEXT);
        format!(
            "<g class=\"limit\"><path d=\"M{from:.0} {y:.1}H{WIDTH}\" stroke=\"var(--bad)\" stroke-width=\"3\" stroke-dasharray=\"12 8\"/>{brk}{}</g>",
            label((GUTTER + 24.0, y + 8.0), "start", "bad", &words)
        )
    }
}

/// Writes a text with a halo, readable on lines and areas.
fn label((x, y): (f64, f64), anchor: &str, colour: &str, text: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"var(--{colour})\" stroke=\"var(--ground)\" stroke-width=\"6\" stroke-linejoin=\"round\" paint-order=\"stroke\">{text}</text>"
    )
}

/// Returns the points of a curve. Where the composition is unknown, all memory belongs to the
/// family `other`.
fn points(curve: &MemoryCurve) -> Vec<Point> {
    let samples = curve.samples.iter().enumerate();
    samples
        .map(|(i, s)| {
            let unknown = || {
                let mut stack = Stack::default();
                stack[Family::Other as usize] = s.allocated;
                stack
            };
            Point {
                time: s.time / 1000,
                reserved: s.reserved,
                stack: curve.stacks.get(i).copied().unwrap_or_else(unknown),
            }
        })
        .collect()
}

/// Returns the largest point of each interval of the step, from the start of the first to the end
/// of the last.
fn thinned(points: &[Point]) -> Vec<Point> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return Vec::new();
    };
    if points.len() <= POINTS {
        return points.to_vec();
    }
    let size = points.len().div_ceil(POINTS - 2);
    let largest = points.chunks(size).filter_map(|part| {
        let reserved = part.iter().map(|p| p.reserved).max()?;
        let point = part.iter().max_by_key(|p| p.allocated())?;
        Some(Point { reserved, ..*point })
    });
    let mut out = vec![*first];
    out.extend(largest.filter(|p| p.time > first.time && p.time < last.time));
    out.push(*last);
    out
}

fn data(points: &[Point], used: &[Family], top: f64, peak: u64) -> Data {
    const KIB: u64 = 1 << 10;
    let mut before = vec![0i64; used.len() + 2];
    let mut all = Vec::with_capacity(points.len() * before.len());
    for point in points {
        let layers = used.iter().map(|f| point.stack[*f as usize] / KIB);
        let now = [point.time, point.reserved / KIB].into_iter().chain(layers);
        for (before, now) in before.iter_mut().zip(now) {
            let now = i64::try_from(now).unwrap_or(i64::MAX);
            all.push(now - *before);
            *before = now;
        }
    }
    Data {
        top,
        height: HEIGHT,
        layers: used.iter().map(|f| (f.name(), *f as usize)).collect(),
        points: all,
        peak,
    }
}

fn describe(view: &RunView, points: &[Point]) -> String {
    let m = &view.run.memory;
    let mut largest: Vec<(Family, u64)> = Family::ALL
        .into_iter()
        .filter_map(|f| Some((f, points.iter().map(|p| p.stack[f as usize]).max()?)))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let largest: Vec<String> = largest
        .iter()
        .take(3)
        .map(|(f, b)| format!("{} {}", f.name(), Bytes(*b)))
        .collect();
    let limit = match m.capacity {
        Some(limit) => format!(" of {limit}"),
        None => String::new(),
    };
    let device = match m.device() {
        Some(device) => format!(", {device}{limit} used on the device"),
        None => String::new(),
    };
    format!(
        "{} allocated at the peak, {} reserved{device}; largest at any time: {}",
        m.peak_allocated,
        m.peak_reserved,
        largest.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::timeline::{self, timeline};
    use crate::testing;

    const MIB: u64 = 1 << 20;

    fn panel(view: &RunView) -> Panel {
        Panel::new(view, timeline::length(view), 100.0).unwrap()
    }

    #[test]
    fn a_run_without_samples_has_no_panel() {
        let mut view = testing::view(400);
        view.run.memory.timeline.clear();
        assert!(Panel::new(&view, 1000, 100.0).is_none());
        let t = timeline("t", "T", &view, 0, 100);
        assert!(t.data.contains("\"memory\":null"));
        assert!(!t.plot.svg.contains("class=\"mem\""));
    }

    /// The device's limit is always drawn: at its place if that leaves room for the curve, or else
    /// above a break of the axis.
    #[test]
    fn the_limit_is_always_visible() {
        let mut view = testing::view(400);
        // Reserved are 4 MiB.
        for (capacity, scaled) in [(5 * MIB, true), (8 * MIB, true), (1 << 40, false)] {
            view.run.memory.capacity = Some(Bytes(capacity));
            let p = panel(&view);
            assert!(p.svg.contains("class=\"limit\""));
            assert_eq!(p.svg.contains("not to scale"), !scaled, "{capacity}");
            assert!(p.legend().contains(&(Key::Limit, "device memory".into())));
        }
        view.run.memory.capacity = None;
        assert!(!panel(&view).svg.contains("class=\"limit\""));
    }

    #[test]
    fn bytes_are_heights_from_the_bottom() {
        let axes = Axes {
            top: 50.0,
            highest: 200.0,
            scale: 0.5,
            end: 20,
        };
        assert_eq!(
            (axes.y(0), axes.y(100), axes.y(200)),
            (HEIGHT, HEIGHT / 2.0, 0.0)
        );
        assert_eq!(axes.x(100), 50.0);
        let point = |time, weights, activations| {
            let mut stack = Stack::default();
            stack[Family::Weights as usize] = weights;
            stack[Family::Activations as usize] = activations;
            Point {
                time,
                reserved: 200,
                stack,
            }
        };
        let all = [point(0, 50, 0), point(10, 50, 100), point(20, 50, 0)];
        // Levels change at points and are constant between them.
        let totals: Vec<u64> = all.iter().map(Point::allocated).collect();
        let y = |bytes| axes.y(bytes);
        assert_eq!(
            axes.stairs(&all, &totals),
            [
                (0.0, y(50)),
                (5.0, y(50)),
                (5.0, y(150)),
                (10.0, y(150)),
                (10.0, y(50)),
                (10.0, y(50))
            ]
        );
        // Persistent memory is the lowest layer.
        let svg = axes.layers(&all, &[Family::Weights, Family::Activations]);
        let lowest = svg.split("<path ").nth(1).unwrap();
        assert!(lowest.contains("var(--m0)") && lowest.contains(&format!("{HEIGHT:.1}")));
    }

    /// The points for the script add up to the samples.
    #[test]
    fn data_has_every_level() {
        let view = testing::view(400);
        let p = panel(&view);
        let curve = MemoryCurve::new(&view);
        let width = p.data.layers.len() + 2;
        let mut now = vec![0i64; width];
        for (sample, deltas) in curve.samples.iter().zip(p.data.points.chunks(width)) {
            for (now, delta) in now.iter_mut().zip(deltas) {
                *now += delta;
            }
            assert_eq!(now[0], (sample.time / 1000) as i64);
            assert_eq!(now[1], (sample.reserved >> 10) as i64);
            let sum: i64 = now[2..].iter().sum();
            assert_eq!(sum, (sample.allocated >> 10) as i64);
        }
        assert_eq!(p.data.points.len(), width * curve.samples.len());
    }

    #[test]
    fn thinning_keeps_the_peak_and_the_ends() {
        let point = |i: u64| {
            let mut stack = Stack::default();
            stack[0] = (i * 7919) % 9973;
            Point {
                time: i,
                reserved: i,
                stack,
            }
        };
        let many: Vec<Point> = (0..10_000).map(point).collect();
        let few = thinned(&many);
        let peak = |all: &[Point]| all.iter().map(Point::allocated).max();
        assert!(few.len() <= POINTS);
        assert_eq!(peak(&few), peak(&many));
        assert_eq!((few[0], few[few.len() - 1]), (many[0], many[9999]));
        assert!(few.windows(2).all(|w| w[0].time < w[1].time));
    }
}
