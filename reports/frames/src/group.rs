//! Groups rows and aggregates their numbers.

use super::FrameError;
use super::frame::{Frame, floats};
use polars::prelude::{Column, DataFrame, QuantileMethod};
use std::fmt;
use std::str::FromStr;

/// Combines many numbers into one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aggregate {
    /// Number of rows with a value.
    Count,
    /// Mean.
    Mean,
    /// Standard deviation (divided by n - 1).
    Std,
    /// Smallest.
    Min,
    /// Largest.
    Max,
    /// Sum.
    Sum,
    /// Quantile, interpolated linearly; the median is 0.5.
    Quantile(f64),
}

impl FromStr for Aggregate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "count" => Self::Count,
            "mean" => Self::Mean,
            "std" => Self::Std,
            "min" => Self::Min,
            "max" => Self::Max,
            "sum" => Self::Sum,
            "median" => Self::Quantile(0.5),
            _ => {
                let percent: Option<f64> = text.strip_prefix('p').and_then(|p| p.parse().ok());
                match percent {
                    Some(p) if (0.0..=100.0).contains(&p) => Self::Quantile(p / 100.0),
                    _ => {
                        return Err(
                            "count, mean, std, min, max, sum, median or a quantile such as p95 is expected"
                                .into(),
                        );
                    }
                }
            }
        })
    }
}

impl fmt::Display for Aggregate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count => f.write_str("count"),
            Self::Mean => f.write_str("mean"),
            Self::Std => f.write_str("std"),
            Self::Min => f.write_str("min"),
            Self::Max => f.write_str("max"),
            Self::Sum => f.write_str("sum"),
            Self::Quantile(0.5) => f.write_str("median"),
            Self::Quantile(q) => write!(f, "p{}", 100.0 * q),
        }
    }
}

impl Aggregate {
    /// Aggregates a column of numbers; `None` if it has no values.
    fn of(self, column: &Column) -> Result<Option<f64>, FrameError> {
        let floats = column.cast(&polars::prelude::DataType::Float64)?;
        let all = floats.f64()?;
        let some = all.len() - all.null_count();
        use polars::prelude::{ChunkAgg, ChunkQuantile, ChunkVar};
        Ok(match self {
            Self::Count => Some(some as f64),
            _ if some == 0 => None,
            Self::Mean => all.mean(),
            Self::Std => all.std(1),
            Self::Min => all.min(),
            Self::Max => all.max(),
            Self::Sum => all.sum(),
            Self::Quantile(q) => all.quantile(q, QuantileMethod::Linear)?,
        })
    }
}

impl Frame {
    /// Returns one row per combination of the values of `by`, in order of first occurrence, with
    /// every aggregate of every metric as `METRIC AGGREGATE`. Without `by`, all rows form one
    /// group.
    ///
    /// # Errors
    /// Fails if a column does not exist or a metric does not hold numbers.
    pub fn group(
        &self,
        by: &[String],
        metrics: &[String],
        aggregates: &[Aggregate],
    ) -> Result<Self, FrameError> {
        let by = self.names(by)?;
        let metrics = self.names(metrics)?;
        for metric in &metrics {
            self.numbers(metric)?;
        }
        let parts: Vec<DataFrame> = if by.is_empty() {
            vec![self.0.clone()]
        } else {
            self.0.partition_by_stable(by.clone(), true)?
        };
        let mut columns = Vec::new();
        // The first row of every part holds the values of the group.
        let mut keys: Option<DataFrame> = None;
        for part in &parts {
            let key = part.select(by.clone())?.head(Some(1));
            match &mut keys {
                None => keys = Some(key),
                Some(keys) => _ = keys.vstack_mut(&key)?,
            }
        }
        if let Some(keys) = keys {
            columns.extend(keys.columns().iter().cloned());
        }
        let rows = parts.iter().map(|p| Some(p.height() as f64)).collect();
        columns.push(floats("rows", rows));
        for metric in &metrics {
            for aggregate in aggregates {
                let values: Result<Vec<Option<f64>>, FrameError> = parts
                    .iter()
                    .map(|part| aggregate.of(part.column(metric)?))
                    .collect();
                columns.push(floats(&format!("{metric} {aggregate}"), values?));
            }
        }
        Self::of(columns)
    }
}
