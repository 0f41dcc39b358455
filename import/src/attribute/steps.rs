//! Finds steps and micro-batches from the order of forward, backward and optimizer on the host.
//!
//! A step ends with the last optimizer before the next forward. A micro-batch starts with a forward
//! that follows a backward. `ProfilerStep` marks are only used if the trace has no optimizer.

use super::classes::Class;
use super::tree::Tree;
use crate::kineto::Trace;
use shardlab_plan::program::Phase;

/// Events that show how far the host is in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    Forward,
    Backward,
    Optimizer,
    Mark,
}

/// A forward and its backward; host times in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// First sign of forward; `None` if the trace starts after it.
    pub forward: Option<i64>,
    /// First sign of backward; `None` if the trace ends before it.
    pub backward: Option<i64>,
    /// Last end of backward.
    pub end: i64,
}

/// A step; host times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Start: the end of the previous step.
    pub start: i64,
    /// Micro-batches.
    pub micro_batches: Vec<MicroBatch>,
    /// Start of the first optimizer and end of the last; `None` if the trace has none.
    pub optimizer: Option<(i64, i64)>,
    /// Whether the gradient norm is computed between backward and optimizer.
    pub norm: bool,
    /// Whether the file ends before the last work of the step.
    pub is_cut_off: bool,
}

impl Step {
    /// Returns whether the trace contains the whole step.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !self.is_cut_off
            && !self.micro_batches.is_empty()
            && self
                .micro_batches
                .iter()
                .all(|m| m.forward.is_some() && m.backward.is_some())
    }

    /// Returns the phase and micro-batch at a time, for a thread that does not run backward.
    pub(super) fn phase(&self, at: i64) -> (Phase, u16) {
        if let Some((from, to)) = self.optimizer
            && at >= from
        {
            let phase = if at < to {
                Phase::Optimizer
            } else {
                Phase::Refresh
            };
            return (phase, 0);
        }
        let begun = self
            .micro_batches
            .iter()
            .rposition(|m| m.forward.is_none_or(|f| f <= at));
        let Some(i) = begun else {
            return (Phase::Start, 0);
        };
        let batch = &self.micro_batches[i];
        let number = u16::try_from(i).unwrap_or(u16::MAX);
        match batch.backward {
            Some(b) if at >= b && at >= batch.end => {
                if i + 1 < self.micro_batches.len() {
                    (Phase::Start, number + 1)
                } else if self.norm {
                    (Phase::Clip, 0)
                } else {
                    (Phase::Final, 0)
                }
            }
            Some(b) if at >= b => (Phase::Backward, number),
            _ if batch.forward.is_none() => (Phase::Backward, number),
            _ => (Phase::Forward, number),
        }
    }
}

/// Steps of a trace, and how their boundaries were found.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// Steps in order. The first and the last may be partial.
    pub all: Vec<Step>,
    /// How the boundaries were found, as a phrase for the user.
    pub found_by: &'static str,
}

impl Steps {
    /// Returns the index of the step at a host time.
    pub(super) fn at(&self, time: i64) -> Option<usize> {
        self.all.partition_point(|s| s.start <= time).checked_sub(1)
    }
}

/// The section of a step that an event itself indicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    Forward,
    Backward,
    Recompute,
    Optimizer,
    /// The event does not indicate a section: its time decides.
    Open,
}

/// Returns the sections of all host events, by index.
pub(super) fn sections(trace: &Trace, tree: &Tree, classes: &[Class]) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::with_capacity(trace.host.len());
    for (i, event) in trace.host.iter().enumerate() {
        let around = tree.parent(i).map_or(Section::Open, |p| sections[p]);
        let own = match &classes[event.name.index()] {
            Class::OptimizerStep(_) | Class::ZeroGrad => Some(Section::Optimizer),
            Class::OptimizerOp if around == Section::Open => Some(Section::Optimizer),
            Class::BackwardNode
            | Class::PreBackward(_)
            | Class::PostBackward(_)
            | Class::BackwardPrefetch(_)
            | Class::RootBackward => Some(Section::Backward),
            Class::PreForward(_) | Class::PostForward(_) | Class::RootForward => {
                Some(match around {
                    Section::Backward | Section::Recompute => Section::Recompute,
                    _ => Section::Forward,
                })
            }
            // Operators within backward that have a sequence number of their own create new nodes
            // of its graph: forward runs again.
            _ if around == Section::Backward && is_differentiable(event) => {
                Some(Section::Recompute)
            }
            _ => None,
        };
        sections.push(own.unwrap_or(around));
    }
    sections
}

fn is_differentiable(event: &crate::kineto::HostEvent) -> bool {
    event.sequence.is_some() && event.forward_thread == 0 && !event.is_annotation
}

/// Finds the steps of a trace.
pub(super) fn find(trace: &Trace, tree: &Tree, classes: &[Class], sections: &[Section]) -> Steps {
    let (mut signs, marks) = signs(trace, tree, classes, sections);
    signs.sort_by_key(|s| (s.0, s.1));
    let has = |e: Evidence| signs.iter().any(|s| s.2 == e);
    let found_by = if has(Evidence::Optimizer) {
        "optimizer"
    } else if marks.len() > 1 || !marks.is_empty() && has(Evidence::Forward) {
        signs.extend(marks.iter().map(|&at| (at, at, Evidence::Mark)));
        signs.sort_by_key(|s| (s.0, s.1));
        "ProfilerStep marks"
    } else if has(Evidence::Backward) {
        "forward and backward (no optimizer is in the trace: a micro-batch counts as a step)"
    } else {
        "nothing: the trace shows neither backward nor optimizer"
    };
    let each_is_a_step = found_by.starts_with("forward");
    let mut steps = walk(&signs, each_is_a_step);
    set_starts(trace, tree, classes, &mut steps, &marks);
    let norms: Vec<i64> = (trace.host.iter().zip(sections))
        .filter(|(e, s)| classes[e.name.index()] == Class::Norm && **s == Section::Open)
        .map(|(e, _)| e.start)
        .collect();
    for step in &mut steps {
        let from = step.micro_batches.iter().map(|m| m.end).max();
        let to = step.optimizer.map_or(i64::MAX, |o| o.0);
        step.norm = from.is_some_and(|from| norms.iter().any(|at| (from..to).contains(at)));
    }
    Steps {
        all: steps,
        found_by,
    }
}

type Sign = (i64, i64, Evidence);

/// Returns the signs of forward, backward and optimizer with start and end, and the starts of
/// `ProfilerStep` ranges.
fn signs(
    trace: &Trace,
    tree: &Tree,
    classes: &[Class],
    sections: &[Section],
) -> (Vec<Sign>, Vec<i64>) {
    let mut signs: Vec<Sign> = Vec::new();
    let mut marks = Vec::new();
    let mut named_forward = false;
    for (i, event) in trace.host.iter().enumerate() {
        let span = (event.start, event.end);
        match &classes[event.name.index()] {
            Class::PreForward(_) | Class::RootForward if sections[i] == Section::Forward => {
                named_forward = true;
                signs.push((span.0, span.1, Evidence::Forward));
            }
            Class::OptimizerStep(_) | Class::OptimizerOp
                if sections[i] == Section::Optimizer
                    && tree
                        .parent(i)
                        .is_none_or(|p| sections[p] != Section::Optimizer) =>
            {
                let within_backward = tree
                    .around(i)
                    .any(|e| classes[trace.host[e].name.index()] == Class::BackwardNode);
                if !within_backward {
                    signs.push((span.0, span.1, Evidence::Optimizer));
                }
            }
            Class::BackwardNode
                if sections[i] == Section::Backward
                    && tree
                        .parent(i)
                        .is_none_or(|p| sections[p] != Section::Backward) =>
            {
                signs.push((span.0, span.1, Evidence::Backward));
            }
            Class::RootBackward if tree.parent(i).is_none() => {
                signs.push((span.0, span.1, Evidence::Backward));
            }
            Class::ProfilerStep => marks.push(event.start),
            _ => {}
        }
    }
    for flow in &trace.forward {
        let event = tree
            .starting(trace, flow.thread, flow.at)
            .or_else(|| tree.at(trace, flow.thread, flow.at));
        if event.is_none_or(|e| matches!(sections[e], Section::Open | Section::Forward)) {
            signs.push((flow.at, flow.at, Evidence::Forward));
        }
    }
    if trace.forward.is_empty() && !named_forward {
        let forward = trace.host.iter().zip(sections);
        let forward = forward.filter(|(e, s)| **s == Section::Open && is_differentiable(e));
        signs.extend(forward.map(|(e, _)| (e.start, e.start, Evidence::Forward)));
    }
    marks.sort_unstable();
    (signs, marks)
}

/// Assembles steps from signs in order of time.
fn walk(signs: &[Sign], each_is_a_step: bool) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let new = |start| Step {
        start,
        micro_batches: Vec::new(),
        optimizer: None,
        norm: false,
        is_cut_off: false,
    };
    let mut ended = true;
    for &(start, end, evidence) in signs {
        if evidence == Evidence::Mark {
            ended = true;
            continue;
        }
        // A backward at the very start belongs to the step whose optimizer follows.
        if ended && evidence == Evidence::Optimizer && !steps.is_empty() {
            if let Some(optimizer) = steps.last_mut().and_then(|s| s.optimizer.as_mut()) {
                optimizer.1 = optimizer.1.max(end);
            }
            continue;
        }
        if ended {
            steps.push(new(start));
            ended = false;
        }
        let Some(step) = steps.last_mut() else {
            continue;
        };
        match evidence {
            Evidence::Forward => match step.micro_batches.last() {
                Some(batch) if batch.backward.is_none() => {}
                Some(_) if each_is_a_step => {
                    steps.push(new(start));
                    if let Some(step) = steps.last_mut() {
                        step.micro_batches.push(MicroBatch {
                            forward: Some(start),
                            backward: None,
                            end: start,
                        });
                    }
                }
                _ => step.micro_batches.push(MicroBatch {
                    forward: Some(start),
                    backward: None,
                    end: start,
                }),
            },
            Evidence::Backward => {
                if step.micro_batches.is_empty() {
                    step.micro_batches.push(MicroBatch {
                        forward: None,
                        backward: None,
                        end,
                    });
                }
                if let Some(batch) = step.micro_batches.last_mut() {
                    batch.backward.get_or_insert(start);
                    batch.end = batch.end.max(end);
                }
            }
            Evidence::Optimizer => {
                let from = step.optimizer.map_or(start, |o| o.0);
                step.optimizer = Some((from, end));
                ended = true;
            }
            Evidence::Mark => {}
        }
    }
    steps
}

/// Sets the start of each step to the end of the previous one: after its optimizer, the zeroing of
/// gradients and the copies of updated weights. Everything after that belongs to the inputs of the
/// next step.
fn set_starts(trace: &Trace, tree: &Tree, classes: &[Class], steps: &mut [Step], marks: &[i64]) {
    let endings = endings(trace, tree, classes);
    let mut from = i64::MIN;
    for i in 0..steps.len() {
        steps[i].start = from;
        let ended = steps[i]
            .optimizer
            .map(|o| o.1)
            .or_else(|| steps[i].micro_batches.iter().map(|m| m.end).max());
        let next = steps
            .get(i + 1)
            .and_then(|s| s.micro_batches.first())
            .and_then(|m| m.forward.or(m.backward));
        let (Some(ended), Some(next)) = (ended, next) else {
            continue;
        };
        // A mark between the two steps is the best indication, unless it comes after the first
        // forward.
        if let Some(&mark) = marks.iter().rfind(|&&m| (ended..=next).contains(&m)) {
            from = mark;
            continue;
        }
        let belongs = endings.iter().filter(|e| {
            (ended..next).contains(&e.start) && e.around.is_none_or(|around| around < ended)
        });
        from = belongs.map(|e| e.end).max().unwrap_or(ended);
    }
}

/// An operator that ends a step if it comes after the optimizer.
struct Ending {
    start: i64,
    end: i64,
    /// Start of the enclosing event.
    around: Option<i64>,
}

/// Returns the operators that zero gradients or copy updated weights.
fn endings(trace: &Trace, tree: &Tree, classes: &[Class]) -> Vec<Ending> {
    let all = trace.host.iter().enumerate().filter(|(_, event)| {
        let clears = matches!(trace.name(event.name), "aten::zero_" | "aten::fill_");
        classes[event.name.index()] == Class::ZeroGrad || clears || is_cast(trace, event)
    });
    all.map(|(i, event)| Ending {
        start: event.start,
        end: event.end,
        around: tree.parent(i).map(|p| trace.host[p].start),
    })
    .collect()
}

/// Returns whether an operator copies float32 to a narrower type, which refreshes compute weights.
fn is_cast(trace: &Trace, event: &crate::kineto::HostEvent) -> bool {
    let name = trace.name(event.name);
    if !name.ends_with("copy_") {
        return false;
    }
    let Some(inputs) = event.inputs.map(|i| trace.inputs[i as usize]) else {
        return false;
    };
    let types = trace.name(inputs.types);
    types.contains("BFloat16") && types.contains("float")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_and_steps_follow_from_the_order() {
        use Evidence::{Backward as B, Forward as F, Optimizer as O};
        let signs = [
            (1, 1, F),
            (2, 3, B),
            (4, 4, F),
            (5, 6, B),
            (7, 8, O),
            (8, 9, O),
            (10, 10, F),
            (11, 12, B),
        ];
        let steps = walk(&signs, false);
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[0].micro_batches.len(), 2);
        assert_eq!(steps[0].optimizer, Some((7, 9)));
        assert!(steps[0].is_whole() && steps[1].is_whole());
        assert_eq!(steps[1].optimizer, None);
        let step = &steps[0];
        assert_eq!(step.phase(0), (Phase::Start, 0));
        assert_eq!(step.phase(1), (Phase::Forward, 0));
        assert_eq!(step.phase(3), (Phase::Start, 1));
        assert_eq!(step.phase(4), (Phase::Forward, 1));
        assert_eq!(step.phase(6), (Phase::Final, 0));
        assert_eq!(step.phase(7), (Phase::Optimizer, 0));
        assert_eq!(step.phase(9), (Phase::Refresh, 0));
    }

    #[test]
    fn a_trace_may_start_and_end_anywhere() {
        use Evidence::{Backward as B, Forward as F, Optimizer as O};
        let steps = walk(&[(1, 2, B), (3, 4, O), (5, 5, F)], false);
        assert_eq!(steps.len(), 2);
        assert!(!steps[0].is_whole() && !steps[1].is_whole());
        assert_eq!(steps[0].phase(0), (Phase::Backward, 0));
        let steps = walk(&[(1, 1, F), (2, 3, B), (4, 4, F), (5, 6, B)], true);
        assert_eq!(steps.len(), 2);
    }
}
