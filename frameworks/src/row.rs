//! The outcome for each key of a configuration.

use crate::error::Place;
use serde::Serialize;

/// Why a variable that a file does not set has no counterpart.
pub(crate) const UNSET_VARIABLE: &str = "a variable that the file does not set";
/// Why keys that describe data are not used.
pub(crate) const DATA: &str = "data, not part of a step";
/// Beginning of the note on a key that no table has.
pub(crate) const UNKNOWN: &str = "not a key of";

/// A key of a configuration and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where the key is written; `None` for a value that the framework or this reader supplies.
    pub place: Option<Place>,
    /// Path of the key.
    pub key: String,
    /// Value on one line, shortened.
    pub value: String,
    /// Status of the key.
    pub status: Status,
    /// Scenario keys that it sets.
    pub settings: Vec<Setting>,
    /// Why it is assumed or has no counterpart.
    pub why: Option<String>,
    /// Why the prediction may be of another job because of this key.
    pub doubt: Option<Doubt>,
}

/// A warning that a key may change the answer although the prediction does not follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// Scenario key that settles the doubt if the user gives it; empty if it depends on the value.
    pub key: &'static str,
    /// The warning, with the key of the configuration and what to do.
    pub message: String,
}

/// Status of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// The scenario has the same value.
    Used,
    /// The scenario has a similar value, or one that the configuration leaves open.
    Assumed,
    /// Scenarios have no counterpart. The value says what the prediction lacks because of this.
    NoCounterpart(Lack),
}

/// What a prediction lacks because a key has no counterpart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lack {
    /// Time or memory that depends on the key.
    Accuracy,
    /// Everything: the prediction would be of a different job.
    Everything,
    /// Nothing: the key does not affect a training step.
    Nothing,
}

impl Status {
    /// Returns `used`, `assumed` or `no counterpart`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Assumed => "assumed",
            Self::NoCounterpart(_) => "no counterpart",
        }
    }

    /// Returns what the prediction lacks.
    #[must_use]
    pub fn lack(self) -> Lack {
        match self {
            Self::NoCounterpart(lack) => lack,
            _ => Lack::Nothing,
        }
    }
}

impl Lack {
    /// Returns `accuracy`, `everything` or `nothing`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::Everything => "everything",
            Self::Nothing => "nothing",
        }
    }
}

/// A scenario key and its value as TOML.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// Key, with its section: `train.micro_batch`.
    pub key: &'static str,
    /// Value as TOML.
    pub value: String,
}
