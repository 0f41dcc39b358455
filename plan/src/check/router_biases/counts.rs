//! Contents of the buffers with counts of choices.

use crate::ir::{Access, AxisSet, BufferId, Collective, CollectiveKind, Holds, ParamId};
use crate::program::Program;
use crate::shard::Layout;
use std::collections::BTreeMap;

/// Counts of the choices of one router.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// The counted choices, as pass and micro-batch; one that was added twice is there twice.
    of: Vec<(u32, u16)>,
    /// Axes that they are added up over.
    over: AxisSet,
    /// Whether the rank has the counts of some experts only.
    partial: bool,
}

impl Counts {
    /// Returns the choices of this rank in a micro-batch.
    pub(super) fn new(pass: u32, micro_batch: u16) -> Self {
        Self {
            of: vec![(pass, micro_batch)],
            ..Self::default()
        }
    }

    /// Returns how often the choices of a micro-batch are counted.
    pub(super) fn of(&self, pass: u32, micro_batch: u16) -> usize {
        let counted = self.of.iter();
        counted.filter(|of| **of == (pass, micro_batch)).count()
    }

    /// Returns whether choices of other passes are counted.
    pub(super) fn has_other_than(&self, pass: u32) -> bool {
        self.of.iter().any(|(of, _)| *of != pass)
    }

    pub(super) const fn over(&self) -> AxisSet {
        self.over
    }

    pub(super) const fn is_partial(&self) -> bool {
        self.partial
    }

    fn plus(mut self, other: &Self) -> Self {
        self.of.extend(&other.of);
        // A sum of what ranks have added up and what they have not is in neither state.
        self.partial |= other.partial || self.over != other.over;
        self
    }
}

/// Returns the biases of routers that a range of weights or counts belongs to.
pub(super) fn biases(p: &Program, a: Access) -> impl Iterator<Item = ParamId> {
    let buffer = &p.buffers[a.buffer.index()];
    let size = buffer.dtype.size();
    let (start, end) = (a.offset / size, (a.offset + a.bytes) / size);
    let found: Vec<ParamId> = match buffer.holds {
        Holds::Param(x) if p.params[x.index()].router_bias => vec![x],
        Holds::Group(g) if p.groups[g.index()].router_biases => match &p.groups[g.index()].layout {
            Layout::Flat(l) => {
                let items = l.items.iter();
                let inside = items.filter(|i| i.offset < end && start < i.offset + i.numel);
                inside.map(|i| i.param).collect()
            }
            Layout::PerParam(l) => l.items.iter().map(|i| i.param).collect(),
        },
        _ => Vec::new(),
    };
    found.into_iter()
}

/// Counts by buffer and bias.
#[derive(Debug, Default)]
pub(super) struct Contents(BTreeMap<(BufferId, ParamId), Counts>);

impl Contents {
    pub(super) fn get(&self, b: BufferId, x: ParamId) -> Option<&Counts> {
        self.0.get(&(b, x))
    }

    pub(super) fn set(&mut self, b: BufferId, x: ParamId, counts: Option<Counts>) {
        match counts {
            Some(counts) => self.0.insert((b, x), counts),
            None => self.0.remove(&(b, x)),
        };
    }

    /// Forgets a buffer.
    pub(super) fn forget(&mut self, b: BufferId) {
        self.0.retain(|(of, _), _| *of != b);
    }

    /// Returns whether a range has counts.
    pub(super) fn any(&self, p: &Program, a: Access) -> bool {
        biases(p, a).any(|x| self.get(a.buffer, x).is_some())
    }

    /// Copies counts.
    pub(super) fn copy(&mut self, p: &Program, from: Access, to: Access) {
        for x in biases(p, to) {
            let counts = self.get(from.buffer, x).cloned();
            self.set(to.buffer, x, counts);
        }
    }

    /// Adds counts to others.
    pub(super) fn add(&mut self, p: &Program, from: Access, to: Access) {
        for x in biases(p, to) {
            let [counts, sum] = [from, to].map(|a| self.get(a.buffer, x).cloned());
            if let Some(counts) = counts {
                let sum = sum.map_or(counts.clone(), |sum| sum.plus(&counts));
                self.set(to.buffer, x, Some(sum));
            }
        }
    }

    /// Notes what ranks add up. Other collectives than an all-reduce leave ranks with different
    /// counts.
    pub(super) fn reduce(&mut self, p: &Program, c: &Collective) {
        let axes = p.communicators[c.comm.index()].axes;
        for part in &c.parts {
            for x in biases(p, part.output) {
                let counts = self.get(part.input.buffer, x).cloned();
                let reduced = counts.map(|counts| Counts {
                    over: counts.over.union(axes),
                    partial: counts.partial || c.kind != CollectiveKind::AllReduce,
                    ..counts
                });
                self.set(part.output.buffer, x, reduced);
            }
        }
    }
}
