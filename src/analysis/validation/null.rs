//! Null models: step-time predictions without a simulator, which a real prediction has to beat.

use super::Compared;
use serde::Serialize;

/// Errors of a null model over the step times of a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Null {
    /// Name.
    pub name: &'static str,
    /// Description of the model.
    pub about: &'static str,
    /// Mean absolute error, percent; `None` if the table is too small for it.
    pub mean_abs_percent: Option<f64>,
}

/// Returns the errors of both null models.
///
/// *Constant MFU*: the step time is proportional to model FLOPs. The factor is fitted to the table
/// itself and minimises the mean absolute error. *Nearest neighbour*: the step time of the most
/// similar row with another setting, scaled by FLOPs.
#[must_use]
pub fn null_models(rows: &[Compared]) -> Vec<Null> {
    let measured: Vec<(&Compared, f64)> = rows
        .iter()
        .filter_map(|r| Some((r, r.cells[0]?.measured)))
        .collect();
    vec![
        Null {
            name: "constant MFU",
            about: "step time proportional to model FLOPs, fitted on this table",
            mean_abs_percent: constant_mfu(&measured),
        },
        Null {
            name: "nearest neighbour",
            about: "the most similar other row, scaled by model FLOPs",
            mean_abs_percent: nearest(&measured),
        },
    ]
}

fn constant_mfu(rows: &[(&Compared, f64)]) -> Option<f64> {
    // The error of a row is |factor * flops / measured - 1|, so the best factor equals measured /
    // flops of some row.
    let error = |factor: f64| {
        let sum: f64 = rows
            .iter()
            .map(|(r, ms)| (factor * r.model_flops / ms - 1.0).abs())
            .sum();
        100.0 * sum / rows.len() as f64
    };
    rows.iter()
        .map(|(r, ms)| error(ms / r.model_flops))
        .min_by(f64::total_cmp)
}

fn nearest(rows: &[(&Compared, f64)]) -> Option<f64> {
    let mut errors = Vec::with_capacity(rows.len());
    for (row, ms) in rows {
        let other = rows
            .iter()
            .filter(|(o, _)| o.row.setting() != row.row.setting())
            .min_by(|(a, _), (b, _)| distance(row, a).total_cmp(&distance(row, b)))?;
        let guess = other.1 * row.model_flops / other.0.model_flops;
        errors.push((guess / ms - 1.0).abs());
    }
    (!errors.is_empty()).then(|| 100.0 * errors.iter().sum::<f64>() / errors.len() as f64)
}

/// Returns the distance between two rows: the difference in size, plus a little for each differing
/// setting.
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
            },
            cells: [Some(Cell::new(ms, ms)), None, None, None],
            model_flops: flops,
            tokens: 1.0,
            residual: crate::predict::Residual {
                hardware: "h200-nvlink".into(),
                basis: shardlab_plan::record::BasisKind::Measured,
                policy: "fsdp2".into(),
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
}
