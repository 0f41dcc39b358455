//! Prints the results of a sweep as table, CSV and JSON.

use super::super::frames;
use super::super::output::{Failure, Out};
use super::super::table::{self, fits, key_title, room};
use super::points::{Numbers, Outcome, Point};
use super::select::Selection;
use crate::analysis::basis::number;
use crate::analysis::pareto::{self, Tolerance};
use crate::predict::TIGHT;
use serde_json::{Value, json};
use shardlab_plan::record::Basis;
use shardlab_plan::scenario::{BatchUnit, json_path_of};
use shardlab_plan::units::{ByteUnit, Bytes, short_count, signed};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

/// All points, and what they have in common.
pub(super) struct Table<'a> {
    /// Keys of the axes.
    keys: &'a [String],
    points: &'a [Point],
    selection: &'a Selection,
    /// Whether each point is on the Pareto front of step time and reserved memory, among the points
    /// that fit.
    pareto: Vec<bool>,
    /// Indices of all points, in order.
    sorted: Vec<usize>,
    /// Indices of the points that are shown.
    shown: Vec<usize>,
}

/// A column of numbers: its title, and one cell per point.
type Column = (String, Vec<String>);

/// Number of columns of [`Table::numbers`] that are always shown.
const ALWAYS: usize = 3;
/// Maximum number of impossible points that are listed per reason. `--csv` and `--json` list all.
const MAX_IMPOSSIBLE: usize = 8;
/// Maximum number of equal points that are listed below the best.
const MAX_EQUALS: usize = 4;
/// Order of the number columns on the screen.
const ORDER: [usize; 5] = [0, 1, 3, 4, 2];

impl<'a> Table<'a> {
    pub(super) fn new(keys: &'a [String], points: &'a [Point], selection: &'a Selection) -> Self {
        let contest = selection.contest(points, false);
        let sorted = selection.sorted(points);
        Self {
            keys,
            points,
            selection,
            pareto: pareto::front(&contest, selection.tolerance),
            shown: selection.shown(points, &sorted),
            sorted,
        }
    }

    /// Returns the indices and numbers of the shown points that have numbers.
    fn rows(&self) -> impl Iterator<Item = (usize, &Numbers)> {
        let all = self.shown.iter();
        all.filter_map(|&i| Some((i, self.points[i].done()?)))
    }

    /// Returns whether points run on different numbers of GPUs.
    fn worlds_differ(&self) -> bool {
        let mut worlds = self.points.iter().filter_map(|p| Some(p.done()?.world));
        let first = worlds.next();
        worlds.any(|w| Some(w) != first)
    }

    /// Returns whether points train models of different sizes.
    fn sizes_differ(&self) -> bool {
        let done = self.points.iter().filter_map(Point::done);
        let mut sizes = done.map(|n| n.parameters.total);
        let first = sizes.next();
        sizes.any(|size| Some(size) != first)
    }

    /// Returns the number columns. The first ones are kept if the axes do not leave room for all.
    fn numbers(&self) -> [Column; 5] {
        let column = |title: String, of: &dyn Fn(&Numbers) -> String| -> Column {
            (title, self.rows().map(|(_, n)| of(n)).collect())
        };
        let sizes = self.rows().flat_map(|(_, n)| [n.allocated, n.reserved]);
        let unit = ByteUnit::common(sizes.map(Bytes));
        let sized = |what| format!(">{what}\n{}", unit.name());
        let counted_in = self.counted_in();
        let throughput = format!(">{}", counted_in.column().replace("/GPU", "\n/GPU"));
        [
            column(">step\nms".to_owned(), &|n| {
                number(n.step_ms, 2, n.basis.as_ref())
            }),
            column(throughput, &|n| number(n.tokens_per_s, 0, n.basis.as_ref())),
            column(sized("resv"), &|n| unit.show(Bytes(n.reserved))),
            column(">exposed\nms".to_owned(), &|n| {
                number(n.exposed_ms, 2, n.basis.as_ref())
            }),
            column(sized("alloc"), &|n| unit.show(Bytes(n.allocated))),
        ]
    }

    fn counted_in(&self) -> BatchUnit {
        let done = self.points.iter().filter_map(Point::done);
        BatchUnit::common(done.map(|n| n.counted_in))
    }

    /// Returns the columns of the axes, and that of the number of GPUs if it varies.
    fn axes(&self) -> Vec<Column> {
        let mut columns: Vec<Column> = Vec::new();
        for (at, key) in self.keys.iter().enumerate() {
            let cells = self
                .rows()
                .map(|(i, _)| self.points[i].settings[at].clone());
            columns.push((key_title(key), cells.collect()));
        }
        if self.worlds_differ() {
            let cells = self.rows().map(|(_, n)| n.world.to_string());
            columns.push((">GPUs".to_owned(), cells.collect()));
        }
        if self.sizes_differ() {
            let cells = self.rows().map(|(_, n)| short_count(n.parameters.total));
            columns.push((">parameters".to_owned(), cells.collect()));
        }
        columns
    }

    /// Returns the number columns for which the axes leave room, in reading order.
    fn numbers_shown(&self, axes: &[Column], numbers: &[Column]) -> Vec<usize> {
        let room_of = |(title, cells): &Column| room(title, cells.iter().map(String::as_str));
        let used = room("fits", []) + room("front", []);
        let used = used + axes.iter().map(room_of).sum::<usize>();
        let all = fits(used + numbers.iter().map(room_of).sum::<usize>());
        let count = if all { numbers.len() } else { ALWAYS };
        ORDER.into_iter().filter(|n| *n < count).collect()
    }

    pub(super) fn print(&self, out: &mut Out) -> Result<(), Failure> {
        for basis in self.bases() {
            out.labelled("basis", &basis)?;
        }
        for warning in self.warnings() {
            out.labelled("warning", &warning)?;
        }
        let axes = self.axes();
        let numbers = self.numbers();
        let shown = self.numbers_shown(&axes, &numbers);
        let columns: Vec<&Column> = axes
            .iter()
            .chain(shown.iter().map(|&n| &numbers[n]))
            .collect();
        let titles = columns.iter().map(|(title, _)| title.as_str());
        let mut table = table::Table::new(titles.chain(["fits", "front"]));
        for (row, (i, n)) in self.rows().enumerate() {
            let mut cells: Vec<String> = columns.iter().map(|(_, c)| c[row].clone()).collect();
            cells.push(n.word().to_owned());
            cells.push(if self.pareto[i] { "*" } else { "" }.to_owned());
            table.row(cells);
        }
        if !table.is_empty() {
            out.text(&table)?;
        }
        if !table.is_empty() && shown.len() < numbers.len() {
            out.paragraph(
                0,
                "Exposed time and allocated memory do not fit this width; --csv and --json contain them.",
            )?;
        }
        if self.rows().any(|(_, n)| n.is_tight()) {
            out.paragraph(0, TIGHT)?;
        }
        let done = self.points.iter().filter(|p| p.done().is_some()).count();
        let rows = self.rows().count();
        if rows < done {
            let unfit = match self.selection.unfit_left_out(self.points) {
                0 => String::new(),
                n => format!(" {n} that do not fit are left out; --all includes them."),
            };
            out.paragraph(0, &format!("Showing {rows} of {done} points.{unfit}"))?;
        }
        let mut impossible: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for point in self.points {
            if let Outcome::Failed(e) = &point.outcome {
                impossible
                    .entry(e.reason())
                    .or_default()
                    .push(self.settings(point));
            }
        }
        if !impossible.is_empty() {
            out.blank()?;
        }
        for (reason, points) in impossible {
            let listed = points.iter().take(MAX_IMPOSSIBLE);
            let listed: Vec<&str> = listed.map(String::as_str).collect();
            let more = match points.len() - listed.len() {
                0 => String::new(),
                n => format!("; and {n} more"),
            };
            out.paragraph(
                0,
                &format!("Not possible: {}{more} ({reason}).", listed.join("; ")),
            )?;
        }
        self.conclusions(out)
    }

    /// Prints which points are best, after an empty line.
    fn conclusions(&self, out: &mut Out) -> Result<(), Failure> {
        let best = self.best();
        if !best.is_empty() {
            out.blank()?;
        }
        for sentence in best {
            out.paragraph(0, &sentence)?;
        }
        Ok(())
    }

    /// Returns a sentence on the fastest point that fits. If that point is tight, another sentence
    /// names the fastest point that is not. Models with different batch units have no fastest
    /// point.
    fn best(&self) -> Vec<String> {
        let none = self.points.iter().all(|p| p.done().is_none());
        if none || self.keys.is_empty() || self.counted_in() == BatchUnit::Items {
            return Vec::new();
        }
        let limits = [
            self.selection
                .max_memory
                .map(|most| format!("reserves {most} at most")),
            self.selection
                .headroom
                .filter(|share| *share > 0.0)
                .map(|share| {
                    // Fractions of a percent have no exact binary representation.
                    let percent = (1e4 * share).round() / 100.0;
                    format!("leaves {percent} % of the device free")
                }),
        ];
        let limits: Vec<String> = limits.into_iter().flatten().collect();
        let limit = match limits.as_slice() {
            [] => String::new(),
            limits => format!(" and {}", limits.join(" and ")),
        };
        let Some(best) = self.winner(false) else {
            return vec![format!("No point fits{limit}.")];
        };
        let n = best.1;
        let which = if n.is_unknown() {
            format!("Best, if it fits{limit} (the device's memory is not known)")
        } else if n.is_tight() {
            format!("Best that fits{limit} (tight)")
        } else {
            format!("Best that fits{limit}")
        };
        let mut sentences = vec![self.named(&which, best)];
        sentences.extend(self.equals(best));
        if n.is_tight() {
            sentences.push(match self.winner(true) {
                Some(easy) => self.named(&format!("Best that fits{limit} and is not tight"), easy),
                None => "All that fit are tight.".to_owned(),
            });
        }
        sentences
    }

    /// Returns the best of the points that fit, if there are any.
    fn winner(&self, easily: bool) -> Option<(&'a Point, &'a Numbers)> {
        let contest = self.selection.contest(self.points, easily);
        let point = &self.points[pareto::best(&contest, self.selection.tolerance)?];
        Some((point, point.done()?))
    }

    /// Returns the points that are as fast as the best one, and how much slower the fastest of the
    /// other points is.
    fn equals(&self, (best, numbers): (&Point, &Numbers)) -> Vec<String> {
        let tolerance = self.selection.tolerance;
        let time = |n: &Numbers| 1.0 / n.tokens_per_s;
        let others = self.points.iter().filter(|p| !std::ptr::eq(*p, best));
        let others = others.filter_map(|p| Some((p, p.done().filter(|n| n.fits())?)));
        let (mut tied, slower): (Vec<_>, Vec<_>) =
            others.partition(|(_, n)| tolerance.ties(time(n), time(numbers)));
        tied.sort_by(|a, b| time(a.1).total_cmp(&time(b.1)));
        let apart = |n: &Numbers| 100.0 * (time(n) / time(numbers) - 1.0);
        let mut sentences = Vec::new();
        if !tied.is_empty() {
            let listed = tied.iter().take(MAX_EQUALS);
            let listed: Vec<String> = listed
                .map(
                    |(p, n)| match Tolerance::DEFAULT.ties(time(n), time(numbers)) {
                        true => self.settings(p),
                        false => format!("{} ({} %)", self.settings(p), signed(apart(n), 1)),
                    },
                )
                .collect();
            let more = match tied.len() - listed.len() {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            let within = match tolerance > Tolerance::DEFAULT && self.rests_on_estimates() {
                true => format!(
                    "{tolerance}, the error of these estimates (--tolerance 0.5% ranks by predicted time)"
                ),
                false => tolerance.to_string(),
            };
            sentences.push(format!(
                "Equal within {within}: {}{more}.",
                listed.join(", ")
            ));
        }
        let next = slower
            .into_iter()
            .min_by(|a, b| time(a.1).total_cmp(&time(b.1)));
        if let Some((p, n)) = next.filter(|(_, n)| apart(n) > 0.0) {
            let (settings, percent) = (self.settings(p), apart(n));
            sentences.push(format!("Next: {settings}, {percent:.1} % slower."));
        }
        sentences
    }

    fn rests_on_estimates(&self) -> bool {
        let mut done = self.points.iter().filter_map(Point::done);
        done.any(|n| n.basis.as_ref().is_some_and(Basis::is_estimate))
    }

    /// Returns the bases of the predictions, without duplicates.
    fn bases(&self) -> BTreeSet<String> {
        let bases = self.points.iter().filter_map(|p| p.done()?.basis.as_ref());
        bases.map(Basis::sentence).collect()
    }

    /// Returns the warnings about all points, without duplicates.
    fn warnings(&self) -> BTreeSet<String> {
        let done = self.points.iter().filter_map(Point::done);
        done.flat_map(|n| n.warnings.iter().map(ToString::to_string))
            .collect()
    }

    /// Returns the options of a point: `key=value` for every axis.
    fn settings(&self, point: &Point) -> String {
        let pairs = self.keys.iter().zip(&point.settings);
        let pairs: Vec<String> = pairs.map(|(k, v)| format!("{k}={v}")).collect();
        pairs.join(" ")
    }

    /// Describes a point with its numbers.
    fn named(&self, which: &str, (point, n): (&Point, &Numbers)) -> String {
        let settings = self.settings(point);
        let gpus = if self.worlds_differ() {
            format!(" on {} GPUs", n.world)
        } else {
            String::new()
        };
        format!(
            "{which}: {settings}{gpus}: {} {}, {} ms per step, {} reserved, {} allocated.",
            number(n.tokens_per_s, 0, n.basis.as_ref()),
            self.counted_in().rate(),
            number(n.step_ms, 2, n.basis.as_ref()),
            Bytes(n.reserved),
            Bytes(n.allocated)
        )
    }

    pub(super) fn csv(&self, to: impl Write) -> Result<(), csv::Error> {
        let mut writer = csv::Writer::from_writer(to);
        let fixed = [
            "step_ms",
            "tokens_per_s_per_gpu",
            "mfu",
            "exposed_ms",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "peak_device_bytes",
            "fits",
            "pareto",
            "impossible",
            "world_size",
            "basis",
            "step_error_percent",
        ];
        writer.write_record(self.keys.iter().map(String::as_str).chain(fixed))?;
        for &i in &self.sorted {
            let settings = self.points[i].settings.iter().cloned();
            let cells = match &self.points[i].outcome {
                Outcome::Done(p) => [
                    p.step_ms.to_string(),
                    p.tokens_per_s.to_string(),
                    p.mfu.to_string(),
                    p.exposed_ms.to_string(),
                    p.allocated.to_string(),
                    p.reserved.to_string(),
                    p.device.to_string(),
                    p.word().to_owned(),
                    self.pareto[i].to_string(),
                    String::new(),
                    p.world.to_string(),
                    p.basis.as_ref().map_or("", |b| b.kind.word()).to_owned(),
                    p.basis
                        .as_ref()
                        .and_then(Basis::step_percent)
                        .map_or_else(String::new, |x| x.to_string()),
                ],
                Outcome::Failed(e) => {
                    let mut cells: [String; 13] = Default::default();
                    cells[9] = e.reason();
                    cells
                }
                Outcome::Missing => continue,
            };
            writer.write_record(settings.chain(cells))?;
        }
        writer.flush()?;
        Ok(())
    }

    /// Returns all points as a table for queries.
    pub(super) fn points(&self) -> Result<frames::Points, Failure> {
        let mut csv = Vec::new();
        self.csv(&mut csv).map_err(Failure::run)?;
        Ok(frames::Points(csv))
    }

    /// Prints the points that fit, grouped by the values of some axes: their number, step times,
    /// throughput and reserved memory.
    pub(super) fn summary(&self, by: &[String], out: &mut Out) -> Result<(), Failure> {
        for basis in self.bases() {
            out.labelled("basis", &basis)?;
        }
        let metrics = ["step ms", self.counted_in().column(), "resv GiB"];
        let titles = self.keys.iter().map(String::as_str).chain(metrics);
        let fitting = self.points.iter();
        let fitting = fitting.filter_map(|p| Some((p, p.done().filter(|n| n.fits())?)));
        let rows = fitting.map(|(point, n)| {
            let numbers = [n.step_ms, n.tokens_per_s, Bytes(n.reserved).gib()];
            let settings = point.settings.iter().cloned();
            settings.chain(numbers.map(|x| x.to_string())).collect()
        });
        let points = frames::Points::of(titles, rows)?;
        let summary = frames::Summary {
            by,
            metrics: &metrics,
            aggregates: &["min", "median"],
        };
        let summarized = points.summarized(&summary)?;
        if !summarized.rows.is_empty() {
            out.text(summarized.table())?;
        }
        self.conclusions(out)
    }

    pub(super) fn json(&self, out: &mut Out) -> Result<(), Failure> {
        let best = self.winner(false).map(|(best, _)| best);
        for &i in &self.shown {
            let point = &self.points[i];
            let pairs = self.keys.iter().zip(&point.settings);
            let settings: serde_json::Map<String, Value> = pairs
                .flat_map(|(k, v)| names(k).map(|k| (k, v.as_str().into())))
                .collect();
            let object = match &point.outcome {
                Outcome::Done(p) => json!({
                    "settings": settings,
                    "world_size": p.world,
                    "parameters": p.parameters,
                    "warnings": p.warnings,
                    "step_ms": p.step_ms,
                    "tokens_per_s_per_gpu": p.tokens_per_s,
                    "mfu": p.mfu,
                    "exposed_ms": p.exposed_ms,
                    "memory": {
                        "peak_allocated_bytes": p.allocated,
                        "peak_reserved_bytes": p.reserved,
                        "peak_device_bytes": p.device,
                        "free_bytes": p.free,
                    },
                    "fits": p.word(),
                    "pareto": self.pareto[i],
                    "best": best.is_some_and(|best| std::ptr::eq(best, point)),
                    "basis": p.basis.as_ref().map(|b| json!({ "kind": b.kind, "on": b.on })),
                    "error_band": p.basis.as_ref().and_then(|b| b.band.as_ref()),
                }),
                Outcome::Failed(e) => json!({ "settings": settings, "impossible": e.reason() }),
                Outcome::Missing => continue,
            };
            out.json(&object)?;
        }
        Ok(())
    }
}

/// Returns the names of an axis in JSON: the key, and its first name if that was different.
fn names(key: &str) -> impl Iterator<Item = String> {
    let first = json_path_of(key).filter(|first| first != key);
    std::iter::once(key.to_owned()).chain(first)
}
