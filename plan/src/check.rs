//! Proofs about a program.
//!
//! [`check`] walks `Init`, `First`, `Steady`, `Steady`, `Validation`, `Steady` as one trace.
//! Happens-before comes from stream order, events and host waits (vector clocks, `clock`).
//! Addresses come from a replay of the program's own allocators, so that the next user of a
//! recycled block is known. The state that a step carries is followed through every instruction
//! (`state`, `norm`): the optimizer step that weights belong to, and the axes over which a gradient
//! and the norm have been reduced. [`RULES`] lists the rules and the bug behind each of them. A
//! [`Violation`] names the instruction, the buffer and what was expected.
//!
//! Properties that a program does not contain are not checked: numbers (scaling, accumulation
//! order), attributes of parameters, and the state of an engine between programs.

mod access;
mod capture;
mod clock;
mod collectives;
mod describe;
mod expert_rows;
mod experts;
mod factor;
mod float8;
mod form;
mod layout;
mod muon;
mod nan;
mod norm;
mod operands;
mod page;
mod report;
mod reserved_rows;
mod router_biases;
mod router_losses;
mod rules;
mod shadow;
mod skipped;
mod state;
mod step;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod walk;

pub use collectives::check_symmetry;
pub use page::reference;
pub use report::{Report, RuleResult, Violation, WaitCount};
pub use rules::{Kind, RULES, RuleId, RuleInfo, Severity};

use crate::program::Program;
use report::Sink;

/// Checks every rule of [`RULES`] for a program.
///
/// If a program's form is invalid ([`RuleId::Form`]), the other rules are skipped.
#[must_use]
pub fn check(program: &Program) -> Report {
    let mut sink = Sink::new();
    form::check(program, &mut sink);
    if sink.any(RuleId::Form) {
        return sink.finish(Vec::new(), 0);
    }
    layout::check(program, &mut sink);
    collectives::check(program, &mut sink);
    experts::check(program, &mut sink);
    expert_rows::check(program, &mut sink);
    reserved_rows::check(program, &mut sink);
    router_losses::check(program, &mut sink);
    router_biases::check(program, &mut sink);
    float8::check(program, &mut sink);
    muon::check(program, &mut sink);
    nan::check(program, &mut sink);
    skipped::check(program, &mut sink);
    let walked = walk::walk(program, &mut sink, &mut ());
    sink.finish(walked.waits, walked.instructions)
}
