//! Plots as SVG, in colours that the page chooses.
//!
//! Colours in an SVG are variables (`var(--c1)`), so that one drawing serves light and dark pages
//! and paper. [`Plot::standalone`] fills them in for a separate file.

mod draw;
mod heat;
mod losses;
mod memory;
pub mod palette;
mod scatter;
mod steps;
pub mod timeline;

pub(crate) use draw::escape;
pub use heat::{Cell, Measure, Row, heat};
pub use losses::{Curve, curves};
pub use memory::memory;
pub use palette::{Palette, SERIES};
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
    /// An `<svg>` element with colour variables.
    pub svg: String,
    /// Legend: index of the colour, and its meaning.
    pub legend: Vec<(usize, String)>,
}

impl Plot {
    /// Returns the drawing as a separate file, in the colours for paper.
    #[must_use]
    pub fn standalone(&self) -> String {
        Palette::LIGHT.fill_in(&self.svg)
    }
}
