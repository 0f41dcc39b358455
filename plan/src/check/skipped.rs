//! Units that some micro-batches skip. All ranks have the same program, so they agree about these
//! units. This check proves that the program runs what its units describe.

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{Holds, InstrId, ParamId, Role};
use crate::program::{Phase, Program, Rule};

/// Checks that, in forward, kernels of a micro-batch read weights of all units that it uses, and of
/// no others.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    if p.units.iter().all(|u| u.skipped_in.is_empty()) {
        return;
    }
    let unit_of = units(p);
    for section in p.sections.iter().filter(|s| s.kind.is_training()) {
        let micro_batches = usize::from(p.meta.micro_batches);
        let mut run = vec![vec![false; micro_batches]; p.units.len()];
        let mut last = None;
        for id in section.instrs.clone().map(InstrId) {
            let instr = &p.instrs[id.index()];
            let in_step = !matches!(instr.phase, Phase::Validation);
            if instr.rule != Rule::Model || !in_step {
                continue;
            }
            let forward = instr.phase == Phase::Forward;
            for a in p.reads(&instr.op) {
                let Some(u) = unit_of[a.buffer.index()] else {
                    continue;
                };
                sink.fact(RuleId::Skipped, 1);
                last = Some(id);
                if let Some(run) = run[u].get_mut(usize::from(instr.micro_batch)) {
                    *run |= forward;
                }
                if p.units[u].skipped_in.contains(&instr.micro_batch) {
                    sink.violation(RuleId::Skipped, Some(id), None, || {
                        format!(
                            "{} reads {} in micro-batch {}, which skips its unit",
                            describe::instr(p, id, None),
                            describe::buffer(p, a.buffer),
                            instr.micro_batch
                        )
                    });
                }
            }
        }
        // If no micro-batch skips a unit, kernels may read nothing of it, for example if it is only
        // a bias.
        let units = p.units.iter().zip(run);
        for (unit, run) in units.filter(|(unit, _)| !unit.skipped_in.is_empty()) {
            let used = |m: &usize| !unit.skipped_in.contains(&(*m as u16));
            for m in (0..micro_batches).filter(used).filter(|m| !run[*m]) {
                sink.violation(RuleId::Skipped, last, None, || {
                    format!(
                        "no kernel reads weights of unit {} in micro-batch {m}, which uses it; ranks that do \
                         would wait for this one",
                        unit.name
                    )
                });
            }
        }
    }
}

/// Returns for each buffer the unit whose weights it contains.
fn units(p: &Program) -> Vec<Option<usize>> {
    let mut owner = vec![None; p.params.len()];
    for group in &p.groups {
        for x in &group.params {
            owner[x.index()] = Some(group.unit.index());
        }
    }
    let of_param = |x: ParamId| owner[x.index()];
    let of = p.buffers.iter().map(|b| match (b.role, b.holds) {
        (Role::FullWeight | Role::ModelWeight, Holds::Group(g)) => {
            Some(p.groups[g.index()].unit.index())
        }
        (Role::FullWeight | Role::ModelWeight, Holds::Param(x)) => of_param(x),
        _ => None,
    });
    of.collect()
}
