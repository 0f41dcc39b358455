//! Plots as SVG, in colors that the page defines.
//!
//! Colors in an SVG are variables (`var(--c1)`), so that one drawing serves light and dark pages
//! and paper. [`Plot::standalone`] fills them in for a separate file.

mod draw;
mod heat;
mod losses;
pub mod palette;
mod pareto;
mod scatter;
mod steps;
mod svg;
pub mod timeline;

pub(crate) use draw::escape;
pub use heat::{Cell, Measure, Row, heat};
pub use losses::{Curve, curves};
pub use palette::Palette;
pub(crate) use palette::SERIES;
pub use pareto::{Spot, pareto};
pub use scatter::scatter;
pub use steps::{StepBar, steps};
pub use timeline::{Timeline, timeline};

/// A drawing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plot {
    /// Name for files and anchors: lower case, without blanks.
    pub name: String,
    /// Short title.
    pub title: String,
    /// Description, for readers who cannot see the drawing.
    pub description: String,
    /// An `<svg>` element with color variables.
    pub svg: String,
    /// Legend: what an entry looks like, and its meaning.
    pub legend: Vec<(Key, String)>,
}

/// What an entry of a legend looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// A filled mark in the color of a series, or of a kind of work.
    Series(usize),
    /// A filled mark in the color of a family of memory.
    Memory(usize),
    /// Exposed time.
    Exposed,
    /// A hollow mark, for points that are not recommended.
    Hollow,
    /// A solid line in the color of text.
    Line,
    /// A dashed line in the color of a limit.
    Limit,
}

impl Key {
    /// Returns the class of the mark in the page's style.
    #[must_use]
    pub fn class(self) -> String {
        match self {
            Self::Series(i) => format!("k{}", i % SERIES),
            Self::Memory(i) => format!("m{}", i % SERIES),
            Self::Exposed => "k8".to_owned(),
            Self::Hollow => "hollow".to_owned(),
            Self::Line => "solid".to_owned(),
            Self::Limit => "dashed".to_owned(),
        }
    }
}

impl Plot {
    /// Returns the drawing as a separate file, in the colors for paper.
    #[must_use]
    pub fn standalone(&self) -> String {
        Palette::LIGHT.fill_in(&self.svg)
    }
}
