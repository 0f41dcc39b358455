//! Attributes each piece of device work to its place in a step: step, unit, phase, micro-batch and
//! kind.
//!
//! ```text
//! device work ─correlation─▶ call ─thread, time─▶ operator ─nesting─▶ annotation
//!                                                     └─fwdbwd─▶ forward operator ─▶ unit
//! ```

mod classes;
mod device;
mod kinds;
mod order;
mod places;
mod steps;
mod tree;
mod units;

pub use places::Place;
pub use shardlab_plan::record::Work;
pub use steps::{MicroBatch, Step, Steps};
pub use units::{ROOT, Units, normalize};
pub(crate) use units::{common_prefix, without};

pub(crate) use kinds::is_nccl;
pub(crate) use tree::Tree;

use crate::kineto::{DeviceEvent, DeviceKind, Launch, Trace};
use classes::Class;
use shardlab_plan::program::Phase;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Number of operators around a launch that determine its kind.
const AROUND: usize = 6;

/// A piece of device work with its attribution.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Index into [`Trace::device`].
    pub device: u32,
    /// Place in the step.
    pub place: Place,
    /// Kind.
    pub work: Work,
    /// Operator that launched it, an index into [`Trace::host`].
    pub operator: Option<u32>,
    /// Call that launched it, an index into [`Trace::launches`].
    pub launch: Option<u32>,
    /// Description of a collective, an index into [`Trace::collectives`].
    pub collective: Option<u32>,
}

/// A trace with attributed device work.
pub struct Attributed {
    /// Units.
    pub units: Units,
    /// Steps.
    pub steps: Steps,
    /// Device work in the order of its starts.
    pub work: Vec<Placed>,
    /// Device work without a place, by name: count and total nanoseconds.
    pub unmatched: BTreeMap<String, (u64, u64)>,
    /// Nanoseconds of device work that has a place, and of all device work.
    pub time: (u64, u64),
    /// Prefetches that the user requested.
    pub prefetch: Prefetch,
    /// Optimizers, by the names that PyTorch gives them, such as `AdamW`.
    pub optimizers: Vec<String>,
    pub(crate) tree: Tree,
    pub(crate) host: Vec<Option<Place>>,
    /// Modules of the unit that takes the root's role, if the root itself contains nothing.
    pub root_modules: Option<String>,
}

/// Prefetches requested by the user, found by their annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefetch {
    /// Maximum number of units that one unit prefetches in forward; `None` if none are requested.
    pub forward: Option<u32>,
    /// The same for backward.
    pub backward: Option<u32>,
    /// Units that each unit prefetches, in forward and in backward; indices into
    /// [`Attributed::units`].
    pub lists: BTreeMap<u32, [Vec<u32>; 2]>,
}

/// Returns the steps of a file that was cut off whose device work is incomplete. It follows the
/// operators that launch it. The last step that has some lacks the rest, and later steps lack all
/// of it. The profiler writes buffers of device work out of order, so earlier steps may lack some,
/// too: one of their matmuls has no kernel then.
fn incomplete(trace: &Trace, work: &[Placed], host: &[Option<Place>], steps: usize) -> Vec<usize> {
    let last = work.iter().map(|w| w.place.step as usize).max();
    let mut found: BTreeSet<usize> = (last.unwrap_or(0)..steps).collect();
    let launched: BTreeSet<u32> = work.iter().filter_map(|w| w.operator).collect();
    for (i, (event, place)) in trace.host.iter().zip(host).enumerate() {
        let is_matmul = matches!(
            trace.name(event.name),
            "aten::mm" | "aten::addmm" | "aten::bmm"
        );
        if let Some(place) = place
            && is_matmul
            && !launched.contains(&(i as u32))
        {
            found.insert(place.step as usize);
        }
    }
    found.retain(|&step| step < steps);
    found.into_iter().collect()
}

/// Finds the place of every piece of device work.
#[must_use]
pub fn attribute(trace: &Trace) -> Attributed {
    let classes = trace.names.map(Class::of);
    let tree = Tree::new(trace);
    let sections = steps::sections(trace, &tree, &classes);
    let mut steps = steps::find(trace, &tree, &classes, &sections);
    let mut units = Units::default();
    let has_names = classes.iter().any(|c| matches!(c, Class::PreForward(_)));
    let order = if has_names {
        order::Order::default()
    } else {
        order::find(trace, &mut steps, &classes, &mut units)
    };
    let context = places::Context {
        trace,
        tree: &tree,
        classes: &classes,
        sections: &sections,
        steps: &steps,
        order: &order,
    };
    let places = places::find(&context, &mut units);
    let mut join = Join::new(trace, &order, &tree);
    // If the host does not show steps, kernels do.
    let by_kernels = is_without_host(trace, &steps).then(|| {
        steps = device::steps(trace);
        device::places(trace, &steps, &mut units)
    });
    let mut work = Vec::with_capacity(trace.device.len());
    let mut unmatched: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut time = (0, 0);
    for (i, event) in trace.device.iter().enumerate() {
        let length = (event.end - event.start).max(0).cast_unsigned();
        time.1 += length;
        let found = match &by_kernels {
            None => join.place(event, &places, &steps),
            Some(places) => places[i].map(|place| Found {
                place,
                operator: None,
                launch: event.correlation.and_then(|c| join.launch(c)),
                collective: event.collective,
            }),
        };
        let Some(found) = found else {
            let of = unmatched
                .entry(short(trace.name(event.name)).to_owned())
                .or_default();
            of.0 += 1;
            of.1 += length;
            continue;
        };
        if event.kind == DeviceKind::Graph {
            // The graph has a place in time, but the trace does not show what it computes.
            let of = unmatched
                .entry(trace.name(event.name).to_owned())
                .or_default();
            of.0 += 1;
            of.1 += length;
        } else {
            time.0 += length;
        }
        let operators = found.operator.into_iter().flat_map(|o| tree.around(o));
        let operators: Vec<&str> = operators
            .take(AROUND)
            .map(|o| trace.name(trace.host[o].name))
            .collect();
        let recorded = event.collective.map(|c| &trace.collectives[c as usize]);
        let recorded = recorded.map(|c| c.name.as_str());
        let kind = kinds::of(
            event.kind,
            trace.name(event.name),
            found.place.phase,
            recorded,
            &operators,
        );
        work.push(Placed {
            device: i as u32,
            place: found.place,
            work: kind,
            operator: found.operator.map(|o| o as u32),
            launch: found.launch.map(|l| l as u32),
            collective: found.collective.filter(|_| kind.is_collective()),
        });
    }
    if trace.is_cut_off {
        for step in incomplete(trace, &work, &places.host, steps.all.len()) {
            steps.all[step].is_cut_off = true;
        }
    }
    let prefetch = prefetch(trace, &tree, &classes, &mut units);
    units::strip_common(&mut units);
    Attributed {
        prefetch,
        optimizers: optimizers(&classes),
        steps,
        work,
        unmatched,
        time,
        tree,
        host: places.host,
        root_modules: places.root.map(|_| units::root_modules(&units)),
        units,
    }
}

/// Returns whether no host operator locates the device work, because there are none or because CUDA
/// graphs run it.
fn is_without_host(trace: &Trace, steps: &Steps) -> bool {
    if trace.host.iter().all(|e| e.is_annotation) {
        return true;
    }
    let trains = steps
        .all
        .iter()
        .any(|s| s.micro_batches.iter().any(|m| m.backward.is_some()));
    let graphs = trace
        .launches
        .iter()
        .any(|l| trace.name(l.name).contains("GraphLaunch"));
    graphs && !trains
}

/// Joins device events with the calls that launched them.
struct Join<'a> {
    trace: &'a Trace,
    order: &'a order::Order,
    tree: &'a Tree,
    externals: HashMap<u32, u32>,
    calls: HashMap<u32, usize>,
}

struct Found {
    place: Place,
    operator: Option<usize>,
    launch: Option<usize>,
    collective: Option<u32>,
}

impl<'a> Join<'a> {
    fn new(trace: &'a Trace, order: &'a order::Order, tree: &'a Tree) -> Self {
        let externals = trace.host.iter().enumerate();
        let externals = externals.filter_map(|(i, e)| Some((e.external?, i as u32)));
        let calls = trace.calls.iter().enumerate();
        let calls = calls.filter_map(|(i, c)| Some((c.external?, i)));
        Self {
            trace,
            order,
            tree,
            externals: externals.collect(),
            calls: calls.collect(),
        }
    }

    fn place(
        &mut self,
        event: &DeviceEvent,
        places: &places::Places,
        steps: &Steps,
    ) -> Option<Found> {
        let launch = event.correlation.and_then(|c| self.launch(c));
        // Nesting in time works in every version. The external id is used if the call is not in the
        // trace.
        let nested = launch.and_then(|l| {
            let call = &self.trace.launches[l];
            self.tree.at(self.trace, call.thread, call.start)
        });
        let external = || {
            event
                .external
                .and_then(|e| self.externals.get(&e))
                .map(|&o| o as usize)
        };
        let operator = nested.or_else(external);
        let call = self.call(event, operator);
        let mut place = match (operator, launch) {
            (Some(o), _) => places.host[o],
            // Time decides for a call outside of all operators.
            (None, Some(l)) => {
                let at = self.trace.launches[l].start;
                steps.at(at).map(|step| {
                    let (phase, micro_batch) = steps.all[step].phase(at);
                    let in_model = matches!(phase, Phase::Forward | Phase::Backward);
                    Place {
                        step: step as u32,
                        unit: self
                            .order
                            .at(at)
                            .filter(|_| in_model)
                            .unwrap_or(Units::ROOT),
                        phase,
                        micro_batch,
                    }
                })
            }
            (None, None) => None,
        }?;
        if let Some(unit) = call.and_then(|c| self.order.of_call(c)) {
            place.unit = unit;
        }
        let described = event
            .collective
            .or_else(|| call.map(|c| self.trace.calls[c].collective));
        Some(Found {
            place,
            operator,
            launch,
            collective: described,
        })
    }

    fn launch(&self, correlation: u32) -> Option<usize> {
        let all = &self.trace.launches;
        let first = all.partition_point(|l| l.correlation < correlation);
        all.get(first)
            .filter(|l| l.correlation == correlation)
            .map(|_| first)
    }

    /// Returns the collective call around an event's launch.
    fn call(&self, event: &DeviceEvent, operator: Option<usize>) -> Option<usize> {
        let own = event.external.and_then(|e| self.calls.get(&e));
        let around = || {
            self.tree.around(operator?).take(3).find_map(|o| {
                let external = self.trace.host[o].external?;
                self.calls.get(&external)
            })
        };
        own.or_else(around).copied()
    }
}

/// Returns the name of a kernel without its parameters.
pub(crate) fn short(name: &str) -> &str {
    let name = name.strip_prefix("void ").unwrap_or(name);
    let end = name
        .find(['<', '('])
        .filter(|&e| e > 0)
        .unwrap_or(name.len());
    &name[..end]
}

fn optimizers(classes: &[Class]) -> Vec<String> {
    let named = classes.iter().filter_map(|c| match c {
        Class::OptimizerStep(name) => Some(name.clone()),
        _ => None,
    });
    named.collect()
}

/// Returns the prefetches that the user requested: those outside of the range of a unit's own hook.
/// FSDP2 nests its own prefetch of one unit within `pre_backward`.
fn prefetch(trace: &Trace, tree: &Tree, classes: &[Class], units: &mut Units) -> Prefetch {
    let mut found = Prefetch::default();
    let mut run = (0, 0);
    let mut current = Units::ROOT;
    let mut add = |from: u32, to: u32, backward: bool| {
        let list = &mut found.lists.entry(from).or_default()[usize::from(backward)];
        // Each step and micro-batch prefetches the same.
        if !list.contains(&to) {
            list.push(to);
        }
    };
    for (i, event) in trace.host.iter().enumerate() {
        match &classes[event.name.index()] {
            Class::PreForward(unit) | Class::PreBackward(unit) => {
                run = (0, 0);
                current = units.id(unit);
            }
            Class::PostForward(_) => run = (0, 0),
            Class::ForwardPrefetch(unit) => {
                add(current, units.id(unit), false);
                run.0 += 1;
                found.forward = found.forward.max(Some(run.0));
            }
            Class::BackwardPrefetch(unit) => {
                let own = tree.parent(i).is_some_and(|p| {
                    matches!(classes[trace.host[p].name.index()], Class::PreBackward(_))
                });
                if !own {
                    add(current, units.id(unit), true);
                    run.1 += 1;
                    found.backward = found.backward.max(Some(run.1));
                }
            }
            _ => {}
        }
    }
    found
}

/// Returns how much of the device work CUDA graphs launch.
pub(crate) fn in_graphs(trace: &Trace, a: &Attributed) -> usize {
    let launched = a.work.iter().filter_map(|w| launch_of(trace, w));
    launched
        .filter(|l| trace.name(l.name).contains("GraphLaunch"))
        .count()
}

/// Returns the call that launched a piece of work.
pub(crate) fn launch_of<'a>(trace: &'a Trace, work: &Placed) -> Option<&'a Launch> {
    work.launch.map(|l| &trace.launches[l as usize])
}
