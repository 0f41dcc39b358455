//! Tests of every rule: a correct program passes, and the report names a planted bug.

mod capture;
mod collectives;
mod gathers;
mod good;
mod lowered;
mod memory;
mod order;
mod reductions;
mod report;
mod tables;

use super::testing::Toy;
use super::{Report, RuleId, Violation, check};
use crate::ir::{BufferId, InstrId};

/// Returns the violation of a rule at an instruction, which must exist.
fn caught(r: &Report, rule: RuleId, at: InstrId) -> &Violation {
    r.of(rule)
        .find(|v| v.instr == Some(at))
        .unwrap_or_else(|| panic!("{rule} at #{} is not reported\n{r}", at.0))
}

/// Checks an incorrect program: the rule must name the instruction, and its message the buffer.
fn expect(t: &Toy, rule: RuleId, at: InstrId, buffer: BufferId) -> Violation {
    let r = check(&t.b.program);
    caught(&r, rule, at);
    let name = t.b.program.buffer_name(buffer);
    let named = |v: &&Violation| v.instr == Some(at) && v.message.contains(&name);
    let v = r
        .of(rule)
        .find(named)
        .unwrap_or_else(|| panic!("`{name}` is not named\n{r}"))
        .clone();
    assert!(v.message.contains(&format!("#{}", at.0)), "{}", v.message);
    v
}
