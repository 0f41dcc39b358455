//! The limits in effect, and where each of them was defined.

use serde::Serialize;
use shardlab_plan::config::{Gate, GatePreset, GateProgram};
use shardlab_plan::scenario::Position;
use std::collections::BTreeMap;
use std::fmt;

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// File name as given by the user.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
}

impl Place {
    /// Returns the first line of a file.
    #[must_use]
    pub fn start(file: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            line: 1,
            column: 1,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// One limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    /// Value; relative limits are fractions.
    pub value: f64,
    /// Where the user set the limit; `None` for the default.
    pub place: Option<Place>,
}

impl Limit {
    /// Formats the limit: `exact`, `±1 %`, or `+1 %` if only growth counts.
    #[must_use]
    pub fn relative(&self, preset: GatePreset) -> String {
        match preset {
            GatePreset::Strict if self.value == 0.0 => "exact".to_owned(),
            GatePreset::Strict => format!("±{}", percent(self.value)),
            GatePreset::Budget => format!("+{}", percent(self.value)),
        }
    }
}

/// Formats a fraction as a percentage without trailing zeros.
#[must_use]
pub fn percent(fraction: f64) -> String {
    let p = 100.0 * fraction;
    let digits = if p.abs() >= 10.0 { 1 } else { 3 };
    let text = format!("{p:.digits$}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text} %")
}

/// The limits of one scenario.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limits {
    /// Preset.
    pub preset: GatePreset,
    /// Predicted step time.
    pub step_time: Limit,
    /// Ratio of measured step times.
    pub measured_step_time: Limit,
    /// Allocated bytes.
    pub allocated: Limit,
    /// Reserved bytes.
    pub reserved: Limit,
    /// Device bytes.
    pub device: Limit,
    /// Budget: reserved bytes.
    pub max_memory: Option<Limit>,
    /// Budget: milliseconds of the predicted step.
    pub max_step_ms: Option<Limit>,
    /// Each loss, relative.
    pub loss: Limit,
    /// Each loss, absolute.
    pub loss_absolute: Limit,
    /// Area between loss curves.
    pub loss_area: Limit,
    /// Final loss.
    pub final_loss: Limit,
    /// Gradient norms.
    pub grad_norm: Limit,
    /// Changes of the program that fail.
    #[serde(skip)]
    pub program: GateProgram,
    /// Where `gate.program` was set.
    pub program_place: Option<Place>,
    /// File of the scenario, for annotations without a more precise line.
    pub scenario: Option<Place>,
    /// Where the scenario sets each of its keys.
    #[serde(skip)]
    pub keys: BTreeMap<String, Place>,
}

impl Limits {
    /// Returns the limits of a scenario. `places` are the lines of its keys, and `file` is its own
    /// file.
    #[must_use]
    pub fn new(
        gate: &Gate,
        places: &BTreeMap<String, (String, Position)>,
        file: Option<&str>,
    ) -> Self {
        // An override is not on a line that an annotation could point at.
        let given = places
            .iter()
            .filter(|(_, (file, _))| !file.starts_with("--"));
        let given = given.map(|(key, (file, at))| {
            let place = Place {
                file: file.clone(),
                line: at.line,
                column: at.column,
            };
            (key.clone(), place)
        });
        let keys: BTreeMap<String, Place> = given.collect();
        let place = |key: &str| keys.get(&format!("gate.{key}")).cloned();
        let limit = |key: &str, value: f64| Limit {
            value,
            place: place(key),
        };
        Self {
            preset: gate.preset,
            step_time: limit("step_time", gate.step_time),
            measured_step_time: limit("measured_step_time", gate.measured_step_time),
            allocated: limit("allocated", gate.allocated),
            reserved: limit("reserved", gate.reserved),
            device: limit("device", gate.device),
            max_memory: gate.max_memory.map(|b| limit("max_memory", b.0 as f64)),
            max_step_ms: gate.max_step_ms.map(|ms| limit("max_step_ms", ms)),
            loss: limit("loss", gate.loss),
            loss_absolute: limit("loss_absolute", gate.loss_absolute),
            loss_area: limit("loss_area", gate.loss_area),
            final_loss: limit("final_loss", gate.final_loss),
            grad_norm: limit("grad_norm", gate.grad_norm),
            program: gate.program,
            program_place: place("program"),
            scenario: file.map(Place::start),
            keys,
        }
    }

    /// Returns whether the budgets alone are enough for a verdict, so that no baseline is needed.
    #[must_use]
    pub fn stand_alone(&self) -> bool {
        let given = self.max_memory.is_some() || self.max_step_ms.is_some();
        self.preset == GatePreset::Budget && given
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_read_well() {
        assert_eq!(percent(0.005), "0.5 %");
        assert_eq!(percent(0.0), "0 %");
        assert_eq!(percent(0.1), "10 %");
        assert_eq!(percent(3.0), "300 %");
        assert_eq!(percent(-0.01234), "-1.234 %");
    }

    #[test]
    fn limits_know_their_line_and_overrides_have_none() {
        let at = |line| Position { line, column: 8 };
        let places = BTreeMap::from([
            ("gate.loss".to_owned(), ("a.toml".to_owned(), at(7))),
            (
                "gate.device".to_owned(),
                ("--set gate.device=1".to_owned(), at(1)),
            ),
        ]);
        let limits = Limits::new(&Gate::default(), &places, Some("a.toml"));
        assert_eq!(limits.loss.place.unwrap().to_string(), "a.toml:7:8");
        assert_eq!(limits.device.place, None);
        assert_eq!(limits.device.relative(GatePreset::Budget), "+2 %");
        let strict = Gate::of(GatePreset::Strict);
        let limits = Limits::new(&strict, &places, Some("a.toml"));
        assert_eq!(limits.allocated.relative(limits.preset), "exact");
        assert_eq!(limits.device.relative(limits.preset), "±1 %");
    }
}
