//! Finds unit, phase and micro-batch of every host event in one pass over time.

use super::classes::Class;
use super::order::Order;
use super::steps::{Section, Steps};
use super::tree::Tree;
use super::units::Units;
use crate::kineto::{HostEvent, Trace};
use shardlab_plan::program::Phase;
use std::collections::HashMap;

/// A place in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Step, an index into [`Steps::all`].
    pub step: u32,
    /// Unit, an index into [`Units`].
    pub unit: u32,
    /// Phase.
    pub phase: Phase,
    /// Micro-batch.
    pub micro_batch: u16,
}

/// Places of host events, by index; `None` before the first step.
pub(super) struct Places {
    pub(super) host: Vec<Option<Place>>,
    /// The modules of the root, if another unit takes its role.
    pub(super) root: Option<u32>,
}

/// The scopes that a thread is in at a point in time.
#[derive(Clone, Default)]
struct Now {
    /// Units in forward, outermost first.
    forward: Vec<u32>,
    /// Unit of backward.
    backward: Option<u32>,
    /// Unit of the last top-level event that had one.
    last: Option<u32>,
}

pub(super) struct Context<'a> {
    pub(super) trace: &'a Trace,
    pub(super) tree: &'a Tree,
    pub(super) classes: &'a [Class],
    pub(super) sections: &'a [Section],
    pub(super) steps: &'a Steps,
    pub(super) order: &'a Order,
}

/// Finds the places of all host events.
pub(super) fn find(c: &Context<'_>, units: &mut Units) -> Places {
    let host = &c.trace.host;
    let mut by_time: Vec<u32> = (0..host.len() as u32).collect();
    by_time.sort_by_key(|&i| (host[i as usize].start, -host[i as usize].end, i));
    let flows = Flows::new(c);
    let mut now: Vec<Now> = vec![Now::default(); c.trace.threads.len()];
    let mut unit: Vec<Option<u32>> = vec![None; host.len()];
    let mut known = vec![false; host.len()];
    let ids = ids(c, &by_time, units);
    let mut nested = Nested::default();
    for i in by_time.iter().map(|&i| i as usize) {
        let event = &host[i];
        let class = &c.classes[event.name.index()];
        let id = ids[event.name.index()];
        let thread = &mut now[event.thread as usize];
        let parent = c.tree.parent(i);
        // Nested events do not inherit what this event itself inherited, unless the trace says so.
        let steady =
            |p: &usize| known[*p] || !matches!(c.sections[*p], Section::Open | Section::Forward);
        let inherited = parent.filter(steady).and_then(|p| unit[p]);
        let own = own_unit(c, i, id, thread, &mut nested);
        // Autograd's links take precedence over the surrounding range: a prefetch runs within
        // another unit's backward.
        let linked = || flows.forward_of(i, event).and_then(|f| unit[f]);
        let found = own.or_else(|| if id.is_none() { linked() } else { None });
        known[i] = found.is_some() || parent.is_some_and(|p| known[p]);
        let section = c.sections[i];
        unit[i] = found.or(inherited).or_else(|| match section {
            Section::Open | Section::Forward => thread
                .forward
                .last()
                .copied()
                .or_else(|| c.order.at(event.start)),
            Section::Recompute => thread.forward.last().copied().or(thread.backward),
            Section::Backward => {
                // A node takes the unit of the first operator in it that autograd links.
                let first = flows.first_within(c, i).and_then(|f| unit[f]);
                known[i] = first.is_some();
                first.or(thread.backward).or(thread.last)
            }
            Section::Optimizer => Some(Units::ROOT),
        });
        if parent.is_none()
            && matches!(section, Section::Backward)
            && matches!(class, Class::BackwardNode)
        {
            thread.last = unit[i].or(thread.last);
            if known[i] {
                thread.backward = unit[i];
            }
        }
    }
    // Accelerate wraps the embedding, the last norm and the head together, and leaves nothing for
    // the root.
    let alias = nested.root(&ids, c);
    if let Some(alias) = alias {
        units.rename_to_root(alias);
        for unit in unit.iter_mut().flatten().filter(|u| **u == alias) {
            *unit = Units::ROOT;
        }
    }
    Places {
        host: host_places(c, &unit, &known),
        root: alias,
    }
}

/// Follows the scopes of a thread through an event, and returns the event's own unit. `id` is the
/// unit of its name.
fn own_unit(
    c: &Context<'_>,
    i: usize,
    id: Option<u32>,
    thread: &mut Now,
    nested: &mut Nested,
) -> Option<u32> {
    match &c.classes[c.trace.host[i].name.index()] {
        Class::PreForward(_) => {
            if let (Some(id), Section::Forward) = (id, c.sections[i]) {
                nested.enter(id, &thread.forward);
            }
            thread.forward.extend(id);
            id
        }
        Class::PostForward(_) => {
            if let Some(at) = thread.forward.iter().rposition(|u| Some(*u) == id) {
                thread.forward.truncate(at);
            }
            id
        }
        Class::PreBackward(_) | Class::PostBackward(_) => {
            thread.backward = id;
            id
        }
        Class::RootBackward => {
            thread.backward = Some(Units::ROOT);
            id
        }
        _ => id,
    }
}

/// Returns the places of all host events, whether their units are known or inherited.
fn host_places(c: &Context<'_>, unit: &[Option<u32>], known: &[bool]) -> Vec<Option<Place>> {
    let place = |(i, event): (usize, &HostEvent)| {
        let step = c.steps.at(event.start)?;
        let (timed, micro_batch) = c.steps.all[step].phase(event.start);
        let phase = match c.sections[i] {
            Section::Backward => Phase::Backward,
            Section::Recompute => Phase::Recompute,
            Section::Optimizer => Phase::Optimizer,
            Section::Forward => Phase::Forward,
            Section::Open => timed,
        };
        let in_model = matches!(phase, Phase::Forward | Phase::Backward | Phase::Recompute);
        Some(Place {
            step: step as u32,
            // The step as a whole belongs to the root.
            unit: unit[i]
                .filter(|_| in_model || known[i])
                .unwrap_or(Units::ROOT),
            phase,
            micro_batch,
        })
    };
    c.trace.host.iter().enumerate().map(place).collect()
}

/// Returns the unit of each name, numbered in the order in which forward enters them.
fn ids(c: &Context<'_>, by_time: &[u32], units: &mut Units) -> Vec<Option<u32>> {
    for &i in by_time {
        if let Class::PreForward(name) = &c.classes[c.trace.host[i as usize].name.index()] {
            units.id(name);
        }
    }
    c.classes
        .iter()
        .map(|class| named(class).map(|n| units.id(n)))
        .collect()
}

/// Units that run within other units.
#[derive(Default)]
struct Nested {
    /// For each unit, the units that always enclose it.
    around: HashMap<u32, Vec<u32>>,
}

impl Nested {
    fn enter(&mut self, unit: u32, around: &[u32]) {
        let of = self.around.entry(unit).or_insert_with(|| around.to_vec());
        of.retain(|u| around.contains(u));
    }

    /// Returns the unit that encloses all others, if nothing is gathered for the root itself.
    fn root(&self, ids: &[Option<u32>], c: &Context<'_>) -> Option<u32> {
        let own = c.classes.iter().zip(ids).any(|(class, id)| {
            *id == Some(Units::ROOT) && matches!(class, Class::OfUnit(_) | Class::PreForward(_))
        });
        if own || self.around.len() < 2 {
            return None;
        }
        let outer = self
            .around
            .iter()
            .find(|(_, around)| around.is_empty())
            .map(|(u, _)| *u)?;
        let within = |u: &u32, around: &Vec<u32>| *u == outer || around.contains(&outer);
        self.around
            .iter()
            .all(|(u, around)| within(u, around))
            .then_some(outer)
    }
}

/// Returns the unit that a class names.
fn named(class: &Class) -> Option<&str> {
    match class {
        Class::PreForward(u)
        | Class::PostForward(u)
        | Class::OfUnit(u)
        | Class::PreBackward(u)
        | Class::PostBackward(u) => Some(u),
        Class::RootForward | Class::RootBackward => Some(""),
        _ => None,
    }
}

/// Links from backward operators to forward operators.
struct Flows {
    /// Forward event of each backward event.
    links: HashMap<u32, u32>,
    /// Last forward event with each of autograd's sequence numbers.
    numbers: HashMap<u32, u32>,
}

impl Flows {
    fn new(c: &Context<'_>) -> Self {
        let trace = c.trace;
        let exact = |thread, at| {
            c.tree
                .starting(trace, thread, at)
                .or_else(|| c.tree.at(trace, thread, at))
        };
        let forward: HashMap<u64, u32> = trace
            .forward
            .iter()
            .filter_map(|f| Some((f.id, exact(f.thread, f.at)? as u32)))
            .collect();
        let links = trace
            .backward
            .iter()
            .filter_map(|b| Some((exact(b.thread, b.at)? as u32, *forward.get(&b.id)?)));
        let links = links.collect();
        let mut numbers: HashMap<u32, u32> = HashMap::new();
        for (i, event) in trace.host.iter().enumerate() {
            if let Some(number) = event.sequence
                && event.forward_thread == 0
                && !event.is_annotation
            {
                let of = numbers.entry(number).or_insert(i as u32);
                if trace.host[*of as usize].start < event.start {
                    *of = i as u32;
                }
            }
        }
        Self { links, numbers }
    }

    fn forward_of(&self, i: usize, event: &crate::kineto::HostEvent) -> Option<usize> {
        if let Some(&f) = self.links.get(&(i as u32)) {
            return Some(f as usize);
        }
        let number = event.sequence.filter(|_| event.forward_thread != 0)?;
        self.numbers.get(&number).map(|&f| f as usize)
    }

    /// Returns the forward event of the first linked operator within a node.
    fn first_within(&self, c: &Context<'_>, i: usize) -> Option<usize> {
        let host = &c.trace.host;
        let inside = host.get(i + 1..)?.iter().enumerate();
        let inside =
            inside.take_while(|(_, e)| e.thread == host[i].thread && e.start < host[i].end);
        // Nodes are short, so operators deep inside belong to other nodes.
        inside
            .take(4)
            .find_map(|(k, e)| self.forward_of(i + 1 + k, e))
    }
}
