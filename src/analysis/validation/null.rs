//! Null models: step-time predictions without a simulator. A real prediction has to be better than
//! these.

use super::Compared;
use serde::Serialize;
use std::collections::BTreeSet;

/// Errors of a null model over the step times of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Null {
    /// Name.
    pub name: &'static str,
    /// Description of the model.
    pub about: &'static str,
    /// Mean absolute error, percent; `None` if the table is too small.
    pub mean_abs_percent: Option<f64>,
}

/// Returns the errors of the null models.
///
/// *Constant MFU*: the step time is proportional to model FLOPs divided by the GPU's peak. The
/// factor minimizes the mean absolute error. *Nearest neighbor*: the step time of the most similar
/// row with another setting, scaled by FLOPs over peak. Both models use the table itself. If the
/// table has several sources, both are repeated with only the rows of other sources, which a
/// prediction for a new source has to beat.
#[must_use]
pub fn null_models(rows: &[Compared]) -> Vec<Null> {
    let measured: Vec<(&Compared, f64)> = rows
        .iter()
        .filter_map(|r| Some((r, r.cells[0]?.measured)))
        .collect();
    let mut nulls = vec![
        Null {
            name: "constant MFU",
            about: "step time proportional to model FLOPs, fitted on this table",
            mean_abs_percent: constant_mfu(&measured),
        },
        Null {
            name: "nearest neighbor",
            about: "the most similar other row, scaled by model FLOPs",
            mean_abs_percent: nearest(&measured, |row, other| {
                other.row.setting() != row.row.setting()
            }),
        },
    ];
    let first = measured.first().map(|(r, _)| r.row.project());
    if measured.iter().any(|(r, _)| Some(r.row.project()) != first) {
        nulls.push(Null {
            name: "constant MFU of other sources",
            about: "fitted on the rows of all sources but the row's own",
            mean_abs_percent: constant_mfu_of_others(&measured),
        });
        nulls.push(Null {
            name: "nearest neighbor of other sources",
            about: "the most similar row of another source, scaled by model FLOPs",
            mean_abs_percent: nearest(&measured, |row, other| {
                other.row.project() != row.row.project()
            }),
        });
    }
    nulls
}

/// Returns the seconds that a row's model FLOPs take at the peak rate.
fn ideal(row: &Compared) -> f64 {
    row.model_flops / row.peak_flops
}

/// Returns the factor of the constant MFU that fits the rows best.
fn factor(rows: &[(&Compared, f64)]) -> Option<f64> {
    // The error of a row is |factor * ideal / measured - 1|, so the best factor equals measured /
    // ideal of some row.
    let error = |factor: &f64| {
        let errors = rows
            .iter()
            .map(|(r, ms)| (factor * ideal(r) / ms - 1.0).abs());
        errors.sum::<f64>()
    };
    let factors = rows.iter().map(|(r, ms)| ms / ideal(r));
    factors.min_by(|a, b| error(a).total_cmp(&error(b)))
}

fn constant_mfu(rows: &[(&Compared, f64)]) -> Option<f64> {
    let factor = factor(rows)?;
    mean(rows.iter().map(|(r, ms)| factor * ideal(r) / ms - 1.0))
}

fn constant_mfu_of_others(rows: &[(&Compared, f64)]) -> Option<f64> {
    let mut errors = Vec::with_capacity(rows.len());
    let projects: BTreeSet<&str> = rows.iter().map(|(r, _)| r.row.project()).collect();
    for project in projects {
        let (own, others): (Vec<_>, Vec<_>) =
            rows.iter().partition(|(r, _)| r.row.project() == project);
        let factor = factor(&others)?;
        errors.extend(own.iter().map(|(r, ms)| factor * ideal(r) / ms - 1.0));
    }
    mean(errors.into_iter())
}

fn nearest(
    rows: &[(&Compared, f64)],
    may_know: impl Fn(&Compared, &Compared) -> bool,
) -> Option<f64> {
    let mut errors = Vec::with_capacity(rows.len());
    for (row, ms) in rows {
        let (other, known) = rows
            .iter()
            .filter(|(other, _)| may_know(row, other))
            .min_by(|(a, _), (b, _)| distance(row, a).total_cmp(&distance(row, b)))?;
        errors.push(known * ideal(row) / ideal(other) / ms - 1.0);
    }
    mean(errors.into_iter())
}

/// Returns the mean absolute value in percent; `None` if there are no values.
fn mean(errors: impl ExactSizeIterator<Item = f64>) -> Option<f64> {
    let n = errors.len();
    (n > 0).then(|| 100.0 * errors.map(f64::abs).sum::<f64>() / n as f64)
}

/// Returns the distance between two rows: the difference in size, plus a small amount for each
/// differing setting.
fn distance(a: &Compared, b: &Compared) -> f64 {
    let ratio = |x: f64, y: f64| (x / y).ln().abs();
    let only = |x: &Compared, y: &Compared| {
        x.row
            .overrides
            .iter()
            .filter(|o| !y.row.overrides.contains(o))
            .count() as f64
    };
    ratio(a.model_flops, b.model_flops)
        + ratio(a.tokens, b.tokens)
        + 0.1 * (only(a, b) + only(b, a))
}

#[cfg(test)]
mod tests {
    use super::super::{Cell, Compared, Row};
    use super::*;

    fn row(scenario: &str, flops: f64, ms: f64) -> Compared {
        Compared {
            row: Row {
                line: 2,
                name: String::new(),
                source: String::new(),
                scenario: scenario.into(),
                overrides: Vec::new(),
                measured: [Some(ms), None, None, None],
                out_of_memory: false,
            },
            fit: crate::predict::Fit::Fits,
            cells: [Some(Cell::new(ms, ms)), None, None, None],
            model_flops: flops,
            peak_flops: 1e12,
            tokens: 1.0,
            residual: crate::predict::Residual {
                project: "p".into(),
                hardware: "h200-nvlink".into(),
                basis: shardlab_plan::record::BasisKind::Measured,
                policy: "fsdp2".into(),
                implementation: shardlab_plan::config::Implementation::Torchtitan,
                host_limited: false,
                world_size: 4,
                nodes: 1,
                parameters: 1,
                step_percent: Some(0.0),
                reserved_percent: None,
            },
        }
    }

    #[test]
    fn a_table_of_one_mfu_is_predicted_exactly_and_an_odd_row_shows() {
        let even = [
            row("a", 1e12, 2.0),
            row("b", 2e12, 4.0),
            row("c", 4e12, 8.0),
        ];
        for null in null_models(&even) {
            assert!(null.mean_abs_percent.unwrap() < 1e-9, "{null:?}");
        }
        // The third row takes twice as long. Half of its time is predicted: 50 % off in one of
        // three rows.
        let odd = [
            row("a", 1e12, 2.0),
            row("b", 2e12, 4.0),
            row("c", 4e12, 16.0),
        ];
        let constant = null_models(&odd)[0].mean_abs_percent.unwrap();
        assert!((constant - 50.0 / 3.0).abs() < 1e-9, "{constant}");
    }

    #[test]
    fn repeats_of_a_setting_are_no_neighbours() {
        let rows = [row("a", 1e12, 2.0), row("a", 1e12, 2.0)];
        assert_eq!(null_models(&rows)[1].mean_abs_percent, None);
    }

    /// Two sources with different MFU. Each is predicted with the factor or row of the other, and a
    /// GPU with twice the peak takes half the time.
    #[test]
    fn other_sources_predict_a_row_without_its_own() {
        let of = |source: &str, setting: &str, flops: f64, ms: f64, peak: f64| {
            let mut row = row(setting, flops, ms);
            row.row.source = source.to_owned();
            row.peak_flops = peak;
            row
        };
        let rows = [
            of("left@1 README", "a", 1e12, 2.0, 1e12),
            of("left@2 README", "b", 4e12, 4.0, 2e12),
            of("right commit 3", "c", 1e12, 4.0, 1e12),
        ];
        let nulls = null_models(&rows);
        assert_eq!(nulls.len(), 4);
        // The predictions for the rows of `left` are twice as long, and those of `right` half as
        // long: 100, 100 and 50 %.
        for null in &nulls[2..] {
            let error = null.mean_abs_percent.unwrap();
            assert!((error - 250.0 / 3.0).abs() < 1e-9, "{null:?}");
        }
    }
}
