//! The history of a metric from run to run.

use super::FrameError;
use super::frame::{Frame, floats};

impl Frame {
    /// Returns the runs in order of time with a metric and its `change %` relative to the previous
    /// run in the same group of `by`.
    ///
    /// # Errors
    /// Fails if a column does not exist or the metric does not hold numbers.
    pub fn history(&self, metric: &str, by: &[String]) -> Result<Self, FrameError> {
        let metric = self.name(metric)?;
        let by = self.names(by)?;
        let ordered = self.sorted("id", false)?;
        let mut wanted = vec!["created".to_owned(), "id".to_owned()];
        let revision = "git_revision".to_owned();
        if self.columns().contains(&revision) && !by.contains(&revision) {
            wanted.push(revision);
        }
        wanted.extend(by.iter().filter(|b| *b != "id" && *b != "created").cloned());
        wanted.push(metric.clone());
        let values = ordered.numbers(&metric)?;
        let mut changes: Vec<Option<f64>> = Vec::with_capacity(values.len());
        // The last value of every group so far.
        let mut before: std::collections::BTreeMap<String, f64> = Default::default();
        let keys = ordered.0.select(by)?;
        for (row, value) in values.iter().enumerate() {
            let cells: Result<Vec<String>, FrameError> = keys
                .columns()
                .iter()
                .map(|c| Ok(c.get(row)?.to_string()))
                .collect();
            let group = cells?.join("\u{1f}");
            let last = before.get(&group).copied();
            changes.push(match (last, value) {
                (Some(last), Some(value)) if last != 0.0 => Some(100.0 * (value / last - 1.0)),
                _ => None,
            });
            if let Some(value) = value {
                before.insert(group, *value);
            }
        }
        let mut table = ordered.select(&wanted)?.0;
        table.with_column(floats("change %", changes))?;
        Ok(Self(table))
    }
}
