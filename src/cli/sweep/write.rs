//! Results of a sweep as table, CSV and JSON.

use super::super::output::{Failure, Out};
use super::super::table::{self, fits, key_title, room};
use super::points::{Numbers, Outcome, Point};
use super::select::Selection;
use crate::analysis::pareto;
use crate::predict::TIGHT;
use serde_json::{Value, json};
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::{ByteUnit, Bytes};
use shardlab_reports::compare::Tolerance;
use std::collections::BTreeMap;
use std::path::Path;

/// All points with what is known about them together.
pub(super) struct Table<'a> {
    /// Keys of the axes.
    keys: &'a [String],
    points: &'a [Point],
    selection: &'a Selection,
    /// On the front of step time and reserved memory, among those that fit.
    pareto: Vec<bool>,
    /// Indices of all points, in order.
    sorted: Vec<usize>,
    /// Of these, those that are shown.
    shown: Vec<usize>,
}

/// A column of numbers: its title, and a cell a point.
type Column = (String, Vec<String>);

/// So many of [`Table::numbers`] always have columns.
const ALWAYS: usize = 3;
/// The order in which they are read.
const ORDER: [usize; 5] = [0, 1, 3, 4, 2];

impl<'a> Table<'a> {
    pub(super) fn new(keys: &'a [String], points: &'a [Point], selection: &'a Selection) -> Self {
        let front: Vec<pareto::Point> = points
            .iter()
            .map(|p| match p.done() {
                Some(n) if n.fits() => pareto::Point {
                    // Per token, so that points of different batches compare.
                    time: 1.0 / n.tokens_per_s,
                    memory: n.reserved as f64,
                    changes: 0,
                },
                _ => pareto::Point::OUT,
            })
            .collect();
        let sorted = selection.sorted(points);
        Self {
            keys,
            points,
            selection,
            pareto: pareto::front(&front, Tolerance::DEFAULT),
            shown: selection.shown(points, &sorted),
            sorted,
        }
    }

    /// Indices and numbers of the points that are shown and have some.
    fn rows(&self) -> impl Iterator<Item = (usize, &Numbers)> {
        let all = self.shown.iter();
        all.filter_map(|&i| Some((i, self.points[i].done()?)))
    }

    /// Whether points run on different numbers of GPUs.
    fn worlds_differ(&self) -> bool {
        let mut worlds = self.points.iter().filter_map(|p| Some(p.done()?.world));
        let first = worlds.next();
        worlds.any(|w| Some(w) != first)
    }

    /// Numbers of the points, those first that stay where axes leave no room for all.
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
            column(">step\nms".to_owned(), &|n| format!("{:.2}", n.step_ms)),
            column(throughput, &|n| format!("{:.0}", n.tokens_per_s)),
            column(sized("resv"), &|n| unit.show(Bytes(n.reserved))),
            column(">exposed\nms".to_owned(), &|n| {
                format!("{:.2}", n.exposed_ms)
            }),
            column(sized("alloc"), &|n| unit.show(Bytes(n.allocated))),
        ]
    }

    fn counted_in(&self) -> BatchUnit {
        let done = self.points.iter().filter_map(Point::done);
        BatchUnit::common(done.map(|n| n.counted_in))
    }

    /// Columns of the axes, then that of the GPUs where their number is not always the same.
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
        columns
    }

    /// Of these numbers those for which there is room beside the axes, in the order in which they are read.
    fn numbers_shown(&self, axes: &[Column], numbers: &[Column]) -> Vec<usize> {
        let room_of = |(title, cells): &Column| room(title, cells.iter().map(String::as_str));
        let used = room("fits", []) + room("front", []);
        let used = used + axes.iter().map(room_of).sum::<usize>();
        let all = fits(used + numbers.iter().map(room_of).sum::<usize>());
        let count = if all { numbers.len() } else { ALWAYS };
        ORDER.into_iter().filter(|n| *n < count).collect()
    }

    pub(super) fn print(&self, out: &mut Out) -> Result<(), Failure> {
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
                "Exposed time and allocated memory find no room at this width; --csv and --json have them.",
            )?;
        }
        if self.rows().any(|(_, n)| n.is_tight()) {
            out.paragraph(0, TIGHT)?;
        }
        let done = self.points.iter().filter(|p| p.done().is_some()).count();
        let rows = self.rows().count();
        if rows < done {
            out.paragraph(0, &format!("{rows} of {done} points are shown."))?;
        }
        let mut impossible: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for point in self.points {
            if let Outcome::Failed(e) = &point.outcome {
                let values = point.settings.join(" ");
                impossible.entry(e.reason()).or_default().push(values);
            }
        }
        if !impossible.is_empty() {
            out.blank()?;
        }
        for (reason, points) in impossible {
            out.paragraph(
                0,
                &format!("Not possible: {} ({reason}).", points.join("; ")),
            )?;
        }
        let best = self.best();
        if !best.is_empty() {
            out.blank()?;
        }
        for sentence in best {
            out.paragraph(0, &sentence)?;
        }
        Ok(())
    }

    /// The fastest point that fits, in a sentence, and where it is tight the fastest that is not, in another. Models that count in
    /// different units have none.
    fn best(&self) -> Vec<String> {
        let none = self.points.iter().all(|p| p.done().is_none());
        if none || self.keys.is_empty() || self.counted_in() == BatchUnit::Items {
            return Vec::new();
        }
        let limits = [
            self.selection
                .max_memory
                .map(|most| format!("reserves {most} at most")),
            self.selection.headroom.map(|share| {
                // Fractions of a percent have no exact form in binary.
                let percent = (1e4 * share).round() / 100.0;
                format!("leaves {percent} % of the device free")
            }),
        ];
        let limits: Vec<String> = limits.into_iter().flatten().collect();
        let limit = match limits.as_slice() {
            [] => String::new(),
            limits => format!(" and {}", limits.join(" and ")),
        };
        let Some((point, n)) = self.selection.best(self.points, false) else {
            return vec![format!("No point fits{limit}.")];
        };
        if n.is_unknown() {
            let which = format!("Best, if it fits{limit} (the device's memory is not known)");
            return vec![self.named(&which, point, n)];
        }
        if !n.is_tight() {
            return vec![self.named(&format!("Best that fits{limit}"), point, n)];
        }
        let tight = self.named(&format!("Best that fits{limit} (tight)"), point, n);
        let easy = match self.selection.best(self.points, true) {
            Some((point, n)) => {
                self.named(&format!("Best that fits{limit} and is not tight"), point, n)
            }
            None => "All that fit are tight.".to_owned(),
        };
        vec![tight, easy]
    }

    /// A point with its numbers.
    fn named(&self, which: &str, point: &Point, n: &Numbers) -> String {
        let settings = self.keys.iter().zip(&point.settings);
        let settings: Vec<String> = settings.map(|(k, v)| format!("{k}={v}")).collect();
        let gpus = if self.worlds_differ() {
            format!(" on {} GPUs", n.world)
        } else {
            String::new()
        };
        format!(
            "{which}: {}{gpus}: {:.0} {}, {:.2} ms a step, {} reserved, {} allocated.",
            settings.join(" "),
            n.tokens_per_s,
            self.counted_in().rate(),
            n.step_ms,
            Bytes(n.reserved),
            Bytes(n.allocated)
        )
    }

    pub(super) fn csv(&self, path: &Path) -> Result<(), csv::Error> {
        let mut writer = csv::Writer::from_path(path)?;
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
                ],
                Outcome::Failed(e) => {
                    let mut cells: [String; 11] = Default::default();
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

    pub(super) fn json(&self, out: &mut Out) -> Result<(), Failure> {
        for &i in &self.shown {
            let point = &self.points[i];
            let pairs = self.keys.iter().zip(&point.settings);
            let settings: serde_json::Map<String, Value> =
                pairs.map(|(k, v)| (k.clone(), v.as_str().into())).collect();
            let object = match &point.outcome {
                Outcome::Done(p) => json!({
                    "settings": settings,
                    "world_size": p.world,
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
                }),
                Outcome::Failed(e) => json!({ "settings": settings, "impossible": e.reason() }),
                Outcome::Missing => continue,
            };
            out.json(&object)?;
        }
        Ok(())
    }
}
