//! What a span is: its kind, its name, its unit.

use shardlab_plan::Program;
use shardlab_plan::record::Span;
pub use shardlab_reports::view::{Work, bytes, name};

/// Name of the unit of a span.
#[must_use]
pub fn unit<'a>(program: &'a Program, span: &Span) -> &'a str {
    let unit = program.instrs[span.instr.index()].unit;
    &program.units[unit.index()].name
}
