//! Results of a sweep as table, CSV and JSON.

use super::super::output::{Failure, Out};
use super::super::table::{self, fits, key_title, room};
use super::Sort;
use super::points::{Outcome, Point};
use crate::analysis::pareto;
use serde_json::{Value, json};
use shardlab_plan::scenario::{Axis, BatchUnit};
use shardlab_plan::units::{ByteUnit, Bytes};
use std::collections::BTreeMap;
use std::path::Path;

/// All points with what is known about them together.
pub(super) struct Table<'a> {
    axes: &'a [Axis],
    outcomes: &'a [Outcome],
    /// On the front of step time and reserved memory, among those that fit.
    pareto: Vec<bool>,
    /// Indices in the order of the table.
    order: Vec<usize>,
}

/// A column of numbers: its title, and a cell a point.
type Column = (String, Vec<String>);

/// So many of [`Table::numbers`] always have columns.
const ALWAYS: usize = 3;
/// The order in which they are read.
const ORDER: [usize; 5] = [0, 1, 3, 4, 2];

impl<'a> Table<'a> {
    pub(super) fn new(axes: &'a [Axis], outcomes: &'a [Outcome], sort: Sort) -> Self {
        let front: Vec<(f64, f64)> = outcomes
            .iter()
            .map(|o| match o {
                // Time for one token, so that points of different batches compare.
                Outcome::Done(p) if p.fit.is_ok() => (1.0 / p.tokens_per_s, p.reserved as f64),
                _ => (f64::NAN, f64::NAN),
            })
            .collect();
        let key = |i: &usize| match &outcomes[*i] {
            Outcome::Done(p) => match sort {
                Sort::Axes => 0.0,
                Sort::Step => p.step_ms,
                Sort::Tokens => -p.tokens_per_s,
                Sort::Exposed => p.exposed_ms,
                Sort::Allocated => p.allocated as f64,
                Sort::Reserved => p.reserved as f64,
            },
            _ => f64::INFINITY,
        };
        let mut order: Vec<usize> = (0..outcomes.len()).collect();
        if sort != Sort::Axes {
            order.sort_by(|a, b| key(a).total_cmp(&key(b)));
        }
        Self {
            axes,
            outcomes,
            pareto: pareto::front(&front),
            order,
        }
    }

    fn points(&self) -> impl Iterator<Item = (&Point, bool)> {
        self.order.iter().filter_map(|&i| match &self.outcomes[i] {
            Outcome::Done(p) => Some((&**p, self.pareto[i])),
            _ => None,
        })
    }

    /// Axis values of a point by its number; the last axis runs fastest.
    fn settings(&self, mut index: usize) -> Vec<&str> {
        let mut values = vec![""; self.axes.len()];
        for (value, axis) in values.iter_mut().zip(self.axes).rev() {
            *value = &axis.values[index % axis.values.len()];
            index /= axis.values.len();
        }
        values
    }

    /// Numbers of the points, those first that stay where axes leave no room for all.
    fn numbers(&self) -> [Column; 5] {
        let column = |title: String, of: &dyn Fn(&Point) -> String| -> Column {
            (title, self.points().map(|(p, _)| of(p)).collect())
        };
        let sizes = self.points().flat_map(|(p, _)| [p.allocated, p.reserved]);
        let unit = ByteUnit::common(sizes.map(Bytes));
        let sized = |what| format!(">{what}\n{}", unit.name());
        let counted_in = BatchUnit::common(self.points().map(|(p, _)| p.counted_in));
        let throughput = format!(">{}", counted_in.column().replace("/GPU", "\n/GPU"));
        [
            column(">step\nms".to_owned(), &|p| format!("{:.2}", p.step_ms)),
            column(throughput, &|p| format!("{:.0}", p.tokens_per_s)),
            column(sized("resv"), &|p| unit.show(Bytes(p.reserved))),
            column(">exposed\nms".to_owned(), &|p| {
                format!("{:.2}", p.exposed_ms)
            }),
            column(sized("alloc"), &|p| unit.show(Bytes(p.allocated))),
        ]
    }

    /// Of these numbers those for which there is room beside the axes, in the order in which they are read.
    fn shown(&self, axes: &[String], numbers: &[Column]) -> Vec<usize> {
        let mut used = room("fits", []) + room("front", []);
        for (at, title) in axes.iter().enumerate() {
            used += room(title, self.points().map(|(p, _)| p.settings[at].as_str()));
        }
        let widths = numbers
            .iter()
            .map(|(title, cells)| room(title, cells.iter().map(String::as_str)));
        let all = fits(used + widths.sum::<usize>());
        let count = if all { numbers.len() } else { ALWAYS };
        ORDER.into_iter().filter(|n| *n < count).collect()
    }

    pub(super) fn print(&self, out: &mut Out) -> Result<(), Failure> {
        let axes: Vec<String> = self.axes.iter().map(|a| key_title(&a.key)).collect();
        let numbers = self.numbers();
        let shown = self.shown(&axes, &numbers);
        let mut titles: Vec<&str> = axes.iter().map(String::as_str).collect();
        titles.extend(shown.iter().map(|&n| numbers[n].0.as_str()));
        titles.extend(["fits", "front"]);
        let mut table = table::Table::new(titles);
        for (at, (p, on_front)) in self.points().enumerate() {
            let mut cells = p.settings.clone();
            cells.extend(shown.iter().map(|&n| numbers[n].1[at].clone()));
            cells.push(p.fit.word().to_owned());
            cells.push(if on_front { "*" } else { "" }.to_owned());
            table.row(cells);
        }
        out.text(table)?;
        if shown.len() < numbers.len() {
            out.paragraph(
                0,
                "Exposed time and allocated memory find no room beside so many axes; --csv and --json have them.",
            )?;
        }
        let mut impossible: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (i, outcome) in self.outcomes.iter().enumerate() {
            if let Outcome::Failed(e) = outcome {
                let values = self.settings(i).join(" ");
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
        Ok(())
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
        ];
        writer.write_record(self.axes.iter().map(|a| a.key.as_str()).chain(fixed))?;
        for &i in &self.order {
            let settings = self.settings(i).into_iter().map(str::to_owned);
            let cells = match &self.outcomes[i] {
                Outcome::Done(p) => [
                    p.step_ms.to_string(),
                    p.tokens_per_s.to_string(),
                    p.mfu.to_string(),
                    p.exposed_ms.to_string(),
                    p.allocated.to_string(),
                    p.reserved.to_string(),
                    p.device.to_string(),
                    p.fit.word().to_owned(),
                    self.pareto[i].to_string(),
                    String::new(),
                ],
                Outcome::Failed(e) => {
                    let mut cells: [String; 10] = Default::default();
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
        for &i in &self.order {
            let settings: serde_json::Map<String, Value> = self
                .axes
                .iter()
                .zip(self.settings(i))
                .map(|(a, v)| (a.key.clone(), v.into()))
                .collect();
            let object = match &self.outcomes[i] {
                Outcome::Done(p) => json!({
                    "settings": settings,
                    "step_ms": p.step_ms,
                    "tokens_per_s_per_gpu": p.tokens_per_s,
                    "mfu": p.mfu,
                    "exposed_ms": p.exposed_ms,
                    "memory": {
                        "peak_allocated_bytes": p.allocated,
                        "peak_reserved_bytes": p.reserved,
                        "peak_device_bytes": p.device,
                    },
                    "fits": p.fit.word(),
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
