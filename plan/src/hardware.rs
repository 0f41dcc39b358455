//! The format of hardware profiles: one table of their keys.
//!
//! `sim` checks and completes profiles by it, `exec` writes those that it measures by it, and it is
//! printed as the page `docs/reference/hardware-keys.md`.

mod check;
mod format;
mod page;
mod write;

pub use check::{FormatError, check, complete, position};
pub use format::{Field, IfAbsent, Kind, MEMORY_CLASSES, Range, SECTIONS, Section};
pub use page::reference;
pub use write::SectionText;
