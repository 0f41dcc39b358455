//! The tasks that a gap waited for, and the units they belong to.

use super::spans::{self, Work};
use shardlab_plan::Program;
use shardlab_plan::ir::{Access, COMPUTE, Holds, InstrId, UnitId};
use shardlab_plan::program::Op;
use shardlab_plan::record::{ExposedGap, Run, awaited_names, awaited_units};
use std::collections::BTreeSet;

/// Number of instructions before a collective that are searched for the copy into its bucket.
const LOOK_BACK: usize = 64;

/// Returns the spans that had to end before a gap could end, see [`Run::awaited`].
pub(super) fn spans_of(program: &Program, run: &Run, gap: &ExposedGap) -> Vec<u32> {
    run.awaited(gap, |i| {
        let at = program.instrs.get(i.index())?;
        Some((at.unit, at.phase, at.micro_batch))
    })
}

/// Returns the distinct names of these spans, for example `reduce_scatter + multi_copy`.
pub(super) fn names(program: &Program, run: &Run, awaited: &[u32]) -> String {
    let name = |i: &u32| spans::name(program, run.spans[*i as usize].instr);
    awaited_names(awaited.iter().map(name))
}

/// Returns whether one of the spans is a collective.
pub(super) fn communicates(program: &Program, run: &Run, awaited: &[u32]) -> bool {
    awaited
        .iter()
        .any(|i| Work::of(program, run.spans[*i as usize].instr).is_some_and(Work::is_collective))
}

/// Returns the units of the spans. If the step is compiled as a whole, a collective carries the
/// parameters of several units.
pub(super) fn units(program: &Program, run: &Run, awaited: &[u32]) -> String {
    let mut all = BTreeSet::new();
    for i in awaited {
        units_of(program, run.spans[*i as usize].instr, &mut all);
    }
    let names: Vec<&str> = all
        .into_iter()
        .map(|u| program.units[u.index()].name.as_str())
        .collect();
    awaited_units(&names)
}

fn units_of(program: &Program, instr: InstrId, all: &mut BTreeSet<UnitId>) {
    let at = &program.instrs[instr.index()];
    all.insert(at.unit);
    let owner = |a: &Access| program.buffers[a.buffer.index()].unit;
    match at.op {
        Op::Launch { stream, .. } if stream != COMPUTE => {
            all.extend(program.reads(&at.op).iter().map(owner));
            all.extend(program.writes(&at.op).iter().map(owner));
        }
        Op::Collective { id, .. } => {
            for part in &program.collectives[id.index()].parts {
                all.insert(owner(&part.input));
                let bucket = program.buffers[part.input.buffer.index()].holds;
                if !matches!(bucket, Holds::Named(_)) {
                    continue;
                }
                // The copy that filled the bucket.
                let before =
                    &program.instrs[instr.index().saturating_sub(LOOK_BACK)..instr.index()];
                let filled = before.iter().rev().find(|i| {
                    let writes = program.writes(&i.op);
                    writes.iter().any(|w| w.buffer == part.input.buffer)
                });
                if let Some(copy) = filled {
                    all.extend(program.reads(&copy.op).iter().map(owner));
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::exposed;
    use crate::dash::lanes::Lanes;
    use crate::predict::{Profiles, predict};
    use shardlab_plan::scenario;
    use shardlab_reports::RunView;
    use shardlab_reports::compare::{Side, pair};
    use std::path::Path;
    use std::sync::Arc;

    /// `explain`, `compare` and the dashboard name all instructions of a multi-instruction
    /// reduction.
    #[test]
    fn all_views_name_all_that_was_waited_for() {
        let scenario = scenario::load(Path::new("small-zero2"), &[]).unwrap();
        let options = shardlab_sim::Options::default();
        let p = predict(&scenario, &Profiles::default(), &options).unwrap();
        let gaps = exposed::gaps(&p.program, &p.run);
        let explained: BTreeSet<&str> = gaps.iter().map(|g| g.awaited.name.as_str()).collect();
        assert!(
            explained.contains("reduce_scatter + accumulate"),
            "{explained:?}"
        );

        let view = RunView::new(&p.run, &p.program, &scenario);
        let side = |label| Side::new(label, &view);
        let compared = pair(side("A"), side("B"), &Default::default());
        let compared: BTreeSet<&str> = compared.waits.iter().map(|w| w.of.name.as_str()).collect();
        assert_eq!(compared, explained);

        let lanes = Lanes::new(Arc::new(view.clone()));
        for gap in &lanes.gaps {
            let label = view.awaited_label(&gap.awaited);
            let known = explained
                .iter()
                .any(|name| label.starts_with(&format!("{name} ")));
            assert!(known || gap.awaited.is_empty(), "{label}");
        }
        let mut labels = lanes.gaps.iter().map(|g| view.awaited_label(&g.awaited));
        assert!(labels.any(|l| l == "reduce_scatter + accumulate layers.0"));
    }
}
