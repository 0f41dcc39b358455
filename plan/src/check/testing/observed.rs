//! Records what a walk shows to an observer.

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
    /// Clock of every piece of work when it starts.
    clocks: Vec<Clock>,
    /// Whether a wait was implied in every pass, by wait.
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

/// Returns the clock of every piece of work when it starts.
pub(crate) fn clocks(program: &Program) -> Vec<Clock> {
    observed(program, &mut Sink::new()).clocks
}

/// Returns the waits that order nothing: in every pass, other edges imply what they would add.
///
/// Empty for a program whose form is broken.
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
