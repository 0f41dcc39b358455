//! Modules that stay eager while the rest is compiled (`compile.exclude`).

use super::schedule::Step;
use crate::config::Compile;
use crate::ir::Module;

/// Returns, for each module, whether it stays eager.
pub(super) fn modules(compile: &Compile, modules: &[Module]) -> Vec<bool> {
    let eager = |m: &Module| compile.excludes(&m.path);
    modules.iter().map(eager).collect()
}

/// Marks the first step of eager code that breaks the graph of a compiled frame.
///
/// Dynamo leaves compiled code for a call that it must not trace, and compiles the rest of the
/// frame as another graph. A frame that is excluded as a whole is never entered, so it breaks
/// nothing. `frames` has the frame of each module, `eager` whether it is excluded.
pub(super) fn mark_breaks(steps: &mut [Step], frames: &[Option<u32>], eager: &[bool]) {
    let frame = |s: &Step| (frames[s.module.index()], s.section);
    let is_eager = |s: &Step| eager[s.module.index()];
    let runs: Vec<&[Step]> = steps
        .chunk_by(|a, b| frame(a) == frame(b) && is_eager(a) == is_eager(b))
        .collect();
    let compiled = |run: Option<&&[Step]>, of: &Step| {
        run.is_some_and(|run| {
            frame(&run[0]) == frame(of) && run.iter().any(|step| step.region != 0)
        })
    };
    let mut first = 0;
    let mut breaks = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let before = i.checked_sub(1).and_then(|i| runs.get(i));
        let beside = compiled(before, &run[0]) || compiled(runs.get(i + 1), &run[0]);
        if is_eager(&run[0]) && frame(&run[0]).0.is_some() && beside {
            breaks.push(first);
        }
        first += run.len();
    }
    for step in breaks {
        steps[step].breaks = true;
    }
}
