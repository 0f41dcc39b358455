//! Kind, name and unit of a span.

use shardlab_plan::Program;
use shardlab_plan::record::Span;
pub use shardlab_reports::view::{Work, bytes, name};

/// Returns the name of a span's unit.
#[must_use]
pub fn unit<'a>(program: &'a Program, span: &Span) -> &'a str {
    let unit = program.instrs[span.instr.index()].unit;
    &program.units[unit.index()].name
}
