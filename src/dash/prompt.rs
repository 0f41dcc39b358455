//! A line of input and its purpose.

use super::line::Line;

/// Purpose of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// The value of the n-th option.
    Option(usize),
    /// Filter of the scenario list.
    FilterScenarios,
    /// Filter of the options.
    FilterOptions,
    /// Filter of the sweep.
    FilterSweep,
    /// Filter of the runs.
    FilterRuns,
    /// Search in the help.
    FilterHelp,
    /// A unit to jump to.
    Unit,
    /// An instruction to jump to.
    Instr,
    /// An axis of the sweep.
    Axis,
    /// A folder of baselines.
    Baselines,
    /// A file for the scenario with its changes.
    Export,
    /// A name for the saved run in [`super::runs::RunsView::subject`].
    RunName,
}

impl Asks {
    /// Returns the label before the line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Option(_) => "value",
            Self::FilterScenarios | Self::FilterOptions | Self::FilterHelp => "search",
            Self::FilterSweep | Self::FilterRuns => "filter",
            Self::Unit => "unit",
            Self::Instr => "instruction",
            Self::Axis => "axis",
            Self::Baselines => "folder of baselines",
            Self::Export => "scenario file to write",
            Self::RunName => "name of the run, or empty to remove it",
        }
    }

    /// Returns whether typed text takes effect immediately.
    #[must_use]
    pub const fn is_filter(self) -> bool {
        matches!(
            self,
            Self::FilterScenarios
                | Self::FilterOptions
                | Self::FilterSweep
                | Self::FilterRuns
                | Self::FilterHelp
        )
    }
}

/// A line being typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Purpose.
    pub asks: Asks,
    /// The line.
    pub line: Line,
    /// Text at the start.
    pub before: String,
    /// Possible completions.
    pub completions: Vec<String>,
    /// Index of the last used completion.
    pub chosen: Option<usize>,
    /// Whether the line has been changed.
    pub touched: bool,
    /// Reason why the line was rejected; cleared when it changes.
    pub refused: Option<String>,
}

impl Prompt {
    /// Creates a line that contains a text.
    #[must_use]
    pub fn new(asks: Asks, text: impl Into<String>) -> Self {
        let before = text.into();
        Self {
            asks,
            line: Line::new(before.clone()),
            before,
            completions: Vec::new(),
            chosen: None,
            touched: false,
            refused: None,
        }
    }

    /// Creates an empty line that replaces a text.
    #[must_use]
    pub(crate) fn replacing(asks: Asks, before: impl Into<String>) -> Self {
        Self {
            before: before.into(),
            ..Self::new(asks, "")
        }
    }

    /// Returns the edited option and its text, if the text has changed.
    #[must_use]
    pub fn edited(&self) -> Option<(usize, &str)> {
        match self.asks {
            Asks::Option(at) if self.line.text().trim() != self.before => {
                Some((at, self.line.text()))
            }
            _ => None,
        }
    }

    /// Records a change of the line.
    pub fn change(&mut self) {
        self.touched = true;
        self.refused = None;
    }

    /// Inserts the next or the previous completion.
    pub fn complete(&mut self, forward: bool) -> bool {
        let len = self.completions.len();
        if len == 0 {
            return false;
        }
        let next = match (self.chosen, forward) {
            (None, true) => 0,
            (None, false) => len - 1,
            (Some(i), true) => (i + 1) % len,
            (Some(i), false) => (i + len - 1) % len,
        };
        self.chosen = Some(next);
        self.line = Line::completed(self.completions[next].clone());
        self.change();
        true
    }
}
