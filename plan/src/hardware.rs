//! The format of hardware profiles: one table of their keys.
//!
//! `sim` uses the table to check and complete profiles, `exec` uses it to write measured profiles,
//! and it is printed as the page `docs/reference/hardware-keys.md`.

mod check;
mod format;
mod page;
mod write;

pub use check::{FormatError, check, complete, position};
pub use format::{Field, IfAbsent, Kind, MEMORY_CLASSES, Range, SECTIONS, Section};
pub use page::reference;
pub use write::SectionText;
