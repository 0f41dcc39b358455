//! Joins runs of one kind with runs of another: predicted with measured, before with after.

use super::FrameError;
use super::frame::{Frame, floats};
use polars::prelude::{
    BooleanChunked, DataFrame, DataFrameJoinOps, JoinArgs, JoinType, NewChunkedArray, PlSmallStr,
};

impl Frame {
    /// Joins runs whose `field` is `a` with runs whose `field` is `b` and all of `on` are equal.
    /// Returns the median of a metric on either side and the ratio of `b` to `a`.
    ///
    /// # Errors
    /// Fails if a column does not exist, the metric does not hold numbers, or a side has no runs.
    pub fn versus(
        &self,
        field: &str,
        [a, b]: [&str; 2],
        on: &[String],
        metric: &str,
    ) -> Result<Self, FrameError> {
        let field = self.name(field)?;
        let metric = self.name(metric)?;
        let on = self.names(on)?;
        let median = [super::Aggregate::Quantile(0.5)];
        let side = |value: &str| -> Result<DataFrame, FrameError> {
            let rows = self.matching(&field, value)?;
            let mut grouped = rows.group(&on, std::slice::from_ref(&metric), &median)?.0;
            let of = format!("{metric} median");
            grouped.rename(&of, PlSmallStr::from_str(&format!("{metric} {value}")))?;
            grouped.rename("rows", PlSmallStr::from_str(&format!("runs {value}")))?;
            Ok(grouped)
        };
        let args = JoinArgs::new(JoinType::Inner);
        let joined = side(a)?.join(&side(b)?, on.clone(), on, args, None)?;
        let joined = Self(joined);
        let [x, y] = [a, b].map(|v| joined.numbers(&format!("{metric} {v}")));
        let ratios = x?.into_iter().zip(y?).map(|(x, y)| Some(y? / x?)).collect();
        let mut table = joined.0;
        table.with_column(floats(&format!("{b} / {a}"), ratios))?;
        Ok(Self(table))
    }

    /// Returns the rows with this value of a field.
    fn matching(&self, field: &str, value: &str) -> Result<Self, FrameError> {
        let column = self.0.column(field)?;
        let mut mask = Vec::with_capacity(column.len());
        for row in 0..column.len() {
            let found = column.get(row)?;
            let same = found.get_str().map_or_else(
                || {
                    found
                        .extract::<f64>()
                        .is_some_and(|x| value.parse() == Ok(x))
                },
                |text| text == value,
            );
            mask.push(same);
        }
        let mask = BooleanChunked::from_slice(PlSmallStr::EMPTY, &mask);
        let rows = self.0.filter(&mask)?;
        if rows.height() == 0 {
            return Err(FrameError::Empty(format!("no run has {field}={value}")));
        }
        Ok(Self(rows))
    }
}
