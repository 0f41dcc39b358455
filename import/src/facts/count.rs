//! Counts the collectives of the typical step by unit, phase and micro-batch.

use crate::attribute::{Attributed, Work};
use crate::kineto::{Collective, Trace};
use shardlab_plan::program::Phase;
use std::collections::BTreeMap;

/// A collective of the step.
#[derive(Clone, Copy)]
pub(super) struct One<'a> {
    pub(super) work: Work,
    pub(super) unit: u32,
    pub(super) phase: Phase,
    pub(super) micro_batch: u16,
    pub(super) described: Option<&'a Collective>,
}

/// The collectives of the step.
pub(super) struct Counts<'a> {
    pub(super) all: Vec<One<'a>>,
}

impl<'a> Counts<'a> {
    pub(super) fn new(trace: &'a Trace, a: &Attributed, step: Option<u32>) -> Self {
        let work = a.work.iter().filter(|w| w.work.is_collective());
        let work = work.filter(|w| step.is_none_or(|s| w.place.step == s));
        let all = work.map(|w| One {
            work: w.work,
            unit: w.place.unit,
            phase: w.place.phase,
            micro_batch: w.place.micro_batch,
            described: w.collective.map(|c| &trace.collectives[c as usize]),
        });
        Self { all: all.collect() }
    }

    /// Returns the all-gathers of a unit in forward (`true`) or backward.
    pub(super) fn gathers(&self, unit: u32, forward: bool) -> impl Iterator<Item = &One<'a>> {
        self.all.iter().filter(move |c| {
            c.work == Work::AllGather
                && c.unit == unit
                && is_forward(c.phase) == forward
                && in_model(c.phase)
        })
    }

    /// Returns the collectives of a kind within forward and backward.
    pub(super) fn of(&self, work: Work) -> impl Iterator<Item = &One<'a>> {
        self.all
            .iter()
            .filter(move |c| c.work == work && in_model(c.phase))
    }

    /// Returns the most frequent item.
    pub(super) fn most<T: Ord + Clone>(list: impl Iterator<Item = T>) -> Option<T> {
        let mut counts: BTreeMap<T, usize> = BTreeMap::new();
        for value in list {
            *counts.entry(value).or_default() += 1;
        }
        counts.into_iter().max_by_key(|(_, n)| *n).map(|(v, _)| v)
    }
}

fn is_forward(phase: Phase) -> bool {
    matches!(phase, Phase::Forward | Phase::Start)
}

fn in_model(phase: Phase) -> bool {
    matches!(
        phase,
        Phase::Forward | Phase::Backward | Phase::Recompute | Phase::Start
    )
}
