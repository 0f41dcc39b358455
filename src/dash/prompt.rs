//! A line that is being typed, and what it is for.

use super::line::Line;

/// What the line is for.
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
    /// A name for the stored run that [`super::runs::RunsView::subject`] names.
    RunName,
}

impl Asks {
    /// What stands before the line.
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

    /// Whether what is typed takes effect at once.
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
    /// What for.
    pub asks: Asks,
    /// The line.
    pub line: Line,
    /// What it was at the begin.
    pub before: String,
    /// What could be meant.
    pub completions: Vec<String>,
    /// The completion that was taken last.
    pub chosen: Option<usize>,
    /// The line has been changed.
    pub touched: bool,
    /// Why the line was not taken, until it is changed.
    pub refused: Option<String>,
}

impl Prompt {
    /// A line with this text in it.
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

    /// An empty line in place of this text.
    #[must_use]
    pub fn anew(asks: Asks, before: impl Into<String>) -> Self {
        Self {
            before: before.into(),
            ..Self::new(asks, "")
        }
    }

    /// The option being edited and its text, when it is another one than at the begin.
    #[must_use]
    pub fn edited(&self) -> Option<(usize, &str)> {
        match self.asks {
            Asks::Option(at) if self.line.text().trim() != self.before => {
                Some((at, self.line.text()))
            }
            _ => None,
        }
    }

    /// The line has been changed.
    pub fn change(&mut self) {
        self.touched = true;
        self.refused = None;
    }

    /// Takes the next completion, or the one before.
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
