//! Identifies units in traces that do not name them, by the order and the sizes of all-gathers.
//!
//! Forward uses units in the order in which they are gathered, and starts to use one after waiting
//! for its all-gather. Backward gathers and reduces units of equal size in the opposite order.

use super::classes::Class;
use super::kinds::collective;
use super::steps::Steps;
use super::units::Units;
use crate::kineto::Trace;
use shardlab_plan::record::Work;
use std::collections::{BTreeMap, HashMap};

/// Units in order of use.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Host times at which forward starts to use a unit.
    switches: Vec<(i64, u32)>,
    /// Units of collective calls, by index into [`Trace::calls`].
    calls: HashMap<usize, u32>,
}

impl Order {
    /// Returns the unit that forward uses at a time.
    pub(super) fn at(&self, time: i64) -> Option<u32> {
        let i = self
            .switches
            .partition_point(|s| s.0 <= time)
            .checked_sub(1)?;
        Some(self.switches[i].1)
    }

    /// Returns the unit of a collective call.
    pub(super) fn of_call(&self, call: usize) -> Option<u32> {
        self.calls.get(&call).copied()
    }
}

/// An all-gather or a reduction of a micro-batch.
struct Call {
    index: usize,
    at: i64,
    work: Work,
    /// Number of elements of the full tensor.
    size: u64,
}

/// A micro-batch: host times at which forward starts, backward starts and it ends.
type Window = (i64, i64, i64);

/// Finds units by order, if there are all-gathers in forward.
pub(super) fn find(
    trace: &Trace,
    steps: &mut Steps,
    classes: &[Class],
    units: &mut Units,
) -> Order {
    let calls = calls(trace);
    let waits = waits(trace, classes);
    let windows = windows(steps);
    let starts = starts(steps, &windows, &calls);
    // The sizes in the longest forward identify the units. Shorter forwards, in which some
    // parameters were not gathered again, are matched by size.
    let longest = windows
        .iter()
        .zip(&starts)
        .enumerate()
        .max_by_key(|(i, (w, s))| (gathers(&calls, **s, w.1).count(), usize::MAX - i));
    let Some((_, (window, &start))) = longest else {
        return Order::default();
    };
    let sizes: Vec<u64> = gathers(&calls, start, window.1).map(|c| c.size).collect();
    if sizes.is_empty() {
        return Order::default();
    }
    let used = gather_windows(&calls, &waits, start, window.1);
    let ids: Vec<u32> = names(trace, &sizes, &used)
        .iter()
        .map(|n| units.id(n))
        .collect();
    let mut order = Order::default();
    for (window, &start) in windows.iter().zip(&starts) {
        order.add_forward(&calls, &waits, (start, window.1), (&sizes, &ids));
        order.add_backward(&calls, (window.1, updated(steps, window.2)), (&sizes, &ids));
    }
    order.switches.sort_unstable();
    // Forward starts with its first all-gather.
    let batches = steps.all.iter_mut().flat_map(|s| &mut s.micro_batches);
    for (batch, start) in batches.filter(|b| b.forward.is_some()).zip(starts) {
        batch.forward = Some(start);
    }
    order
}

/// Returns the all-gathers and reductions of a trace.
fn calls(trace: &Trace) -> Vec<Call> {
    trace
        .calls
        .iter()
        .enumerate()
        .filter_map(|(index, call)| {
            let c = &trace.collectives[call.collective as usize];
            let work = collective(&c.name).filter(|w| w.is_collective())?;
            Some(Call {
                index,
                at: call.start,
                work,
                size: c.elements_in.max(c.elements_out),
            })
        })
        .collect()
}

/// Returns the host times at which streams wait for collectives, ascending.
fn waits(trace: &Trace, classes: &[Class]) -> Vec<i64> {
    let calls = trace
        .calls
        .iter()
        .filter(|c| trace.collectives[c.collective as usize].name == "wait")
        .map(|c| c.start);
    let events = trace
        .host
        .iter()
        .filter(|e| classes[e.name.index()] == Class::Wait)
        .map(|e| e.start);
    let mut waits: Vec<i64> = calls.chain(events).collect();
    waits.sort_unstable();
    waits
}

/// Returns all micro-batches that have a forward.
fn windows(steps: &Steps) -> Vec<Window> {
    let batches = steps.all.iter().flat_map(|s| &s.micro_batches);
    batches
        .filter_map(|b| Some((b.forward?, b.backward.unwrap_or(i64::MAX), b.end)))
        .collect()
}

/// Returns the all-gathers between two times.
fn gathers(calls: &[Call], from: i64, to: i64) -> impl Iterator<Item = &Call> {
    calls
        .iter()
        .filter(move |c| c.work == Work::AllGather && (from..to).contains(&c.at) && c.size > 0)
}

/// Returns the times between `from` and `to` from an ascending list.
fn within(times: &[i64], from: i64, to: i64) -> &[i64] {
    let first = times.partition_point(|&t| t < from);
    let end = times.partition_point(|&t| t < to);
    &times[first..end.max(first)]
}

/// Returns the starts of forward: the first all-gather may be issued before the first operator that
/// counts as forward.
fn starts(steps: &Steps, windows: &[Window], calls: &[Call]) -> Vec<i64> {
    windows
        .iter()
        .enumerate()
        .map(|(i, w)| {
            let floor = if i == 0 { i64::MIN } else { windows[i - 1].2 };
            let optimizer = steps
                .all
                .iter()
                .filter_map(|s| s.optimizer)
                .map(|o| o.1)
                .filter(|&o| o <= w.0)
                .max();
            let floor = optimizer.map_or(floor, |o| floor.max(o));
            gathers(calls, floor, w.0)
                .map(|c| c.at)
                .min()
                .unwrap_or(w.0)
        })
        .collect()
}

/// Returns when the optimizer starts after the end of a micro-batch, or this end if there is no
/// optimizer.
fn updated(steps: &Steps, end: i64) -> i64 {
    steps
        .all
        .iter()
        .filter_map(|s| s.optimizer)
        .map(|o| o.0)
        .filter(|&o| o >= end)
        .min()
        .unwrap_or(end)
}

impl Order {
    /// Assigns the all-gathers of a forward to units of these sizes and ids.
    fn add_forward(
        &mut self,
        calls: &[Call],
        waits: &[i64],
        (from, to): (i64, i64),
        (sizes, ids): (&[u64], &[u32]),
    ) {
        let forward: Vec<&Call> = gathers(calls, from, to).collect();
        let waited = within(waits, from, to);
        let used = match_sizes(sizes, &forward);
        for (k, (call, unit)) in forward.iter().zip(&used).enumerate() {
            let Some(unit) = unit else { continue };
            self.calls.insert(call.index, ids[*unit]);
            // Without a wait for each all-gather, a unit counts as in use from its all-gather.
            let at = if waited.len() >= forward.len() {
                waited[k]
            } else {
                call.at
            };
            self.switches.push((at, ids[*unit]));
        }
    }

    /// Assigns the collectives of a backward: units of equal size come in the opposite order.
    fn add_backward(
        &mut self,
        calls: &[Call],
        (from, to): (i64, i64),
        (sizes, ids): (&[u64], &[u32]),
    ) {
        for work in [Work::AllGather, Work::ReduceScatter, Work::AllReduce] {
            let mut left: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
            for (i, size) in sizes.iter().enumerate() {
                left.entry(*size).or_default().push(i);
            }
            for call in calls
                .iter()
                .filter(|c| c.work == work && (from..=to).contains(&c.at))
            {
                if let Some(unit) = left.get_mut(&call.size).and_then(Vec::pop) {
                    self.calls.insert(call.index, ids[unit]);
                }
            }
        }
    }
}

/// Returns the host times between which each gathered unit is used.
fn gather_windows(calls: &[Call], waits: &[i64], from: i64, to: i64) -> Vec<(i64, i64)> {
    let issued: Vec<i64> = gathers(calls, from, to).map(|c| c.at).collect();
    let waited = within(waits, from, to);
    let starts = if waited.len() >= issued.len() {
        &waited[..issued.len()]
    } else {
        &issued[..]
    };
    let ends = starts.iter().skip(1).copied().chain([to]);
    starts.iter().copied().zip(ends).collect()
}

/// Assigns each all-gather to the next known unit of the same size.
fn match_sizes(sizes: &[u64], calls: &[&Call]) -> Vec<Option<usize>> {
    let mut from = 0;
    calls
        .iter()
        .map(|call| {
            let found = sizes[from..].iter().position(|s| *s == call.size)? + from;
            from = found + 1;
            Some(found)
        })
        .collect()
}

/// Names the units: consecutive units of equal size are blocks, the first unit that contains an
/// embedding is the embedding, the next ones are those of positions, and the last of the others is
/// the root.
fn names(trace: &Trace, sizes: &[u64], windows: &[(i64, i64)]) -> Vec<String> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for size in sizes {
        *counts.entry(*size).or_default() += 1;
    }
    let block = counts
        .iter()
        .max_by_key(|(size, n)| (**n, **size))
        .filter(|(_, n)| **n > 1)
        .map(|(s, _)| *s);
    let embeds = |i: usize| {
        let (from, to) = windows[i];
        trace
            .host
            .iter()
            .any(|e| (from..to).contains(&e.start) && trace.name(e.name) == "aten::embedding")
    };
    let others: Vec<usize> = (0..sizes.len())
        .filter(|&i| Some(sizes[i]) != block)
        .collect();
    let mut embeddings = others.iter().copied().filter(|&i| embeds(i));
    let embedding = embeddings.next().filter(|_| others.len() > 1);
    let root = others.iter().copied().rfind(|i| Some(*i) != embedding);
    let positions: Vec<usize> = embeddings.filter(|i| Some(*i) != root).collect();
    let mut layer = 0;
    (0..sizes.len())
        .map(|i| {
            if Some(sizes[i]) == block {
                layer += 1;
                format!("layers.{}", layer - 1)
            } else if Some(i) == embedding {
                "tok_embeddings".to_owned()
            } else if Some(i) == root {
                String::new()
            } else {
                // A name with a number of its own would be one of a block.
                match positions.contains(&i) {
                    true => format!("pos_embeddings{i}"),
                    false => format!("unit{i}"),
                }
            }
        })
        .collect()
}
