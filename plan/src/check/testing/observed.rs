//! Records what an observer sees during a walk.

use crate::check::clock::{Clock, Waited};
use crate::check::report::Sink;
use crate::check::rules::RuleId;
use crate::check::{form, walk};
use crate::ir::InstrId;
use crate::program::Program;
use std::collections::BTreeMap;

/// Observations of a walk.
#[derive(Default)]
struct Observed {
    /// Clock at the start of each piece of work.
    clocks: Vec<Clock>,
    /// For each wait, whether it was implied in every pass.
    implied: BTreeMap<InstrId, bool>,
}

impl walk::Observe for Observed {
    fn issued(&mut self, over: &Clock) {
        self.clocks.push(*over);
    }

    fn waited(&mut self, id: InstrId, done: Waited) {
        *self.implied.entry(id).or_insert(true) &= done == Waited::Implied;
    }
}

fn observed(program: &Program, sink: &mut Sink) -> Observed {
    let mut observed = Observed::default();
    walk::walk(program, sink, &mut observed);
    observed
}

/// Returns the clock at the start of each piece of work.
pub(crate) fn clocks(program: &Program) -> Vec<Clock> {
    observed(program, &mut Sink::new()).clocks
}

/// Returns the waits that have no effect on the order, because other edges imply them in every
/// pass.
///
/// Empty if the form of the program is invalid.
pub(crate) fn implied_waits(program: &Program) -> Vec<InstrId> {
    let mut sink = Sink::new();
    form::check(program, &mut sink);
    if sink.any(RuleId::Form) {
        return Vec::new();
    }
    let implied = observed(program, &mut sink).implied;
    let always = implied.into_iter().filter(|(_, implied)| *implied);
    always.map(|(id, _)| id).collect()
}
