//! Order of the updates, and transfers of offloaded state to the device and back.

use super::reduction::Reductions;
use super::unshard::Unshard;
use crate::ir::{COMPUTE, EventId, GroupId};
use crate::lower::emitter::Emitter;
use crate::lower::flat::Flat;
use crate::lower::inputs::LoweringInputs;
use crate::lower::optimizer::Moments;
use crate::program::Rule;
use std::collections::VecDeque;

/// Transfers of offloaded state to the device for its update.
#[derive(Default)]
pub(super) struct OffloadedState {
    /// Events of the transfers in flight, in order of use.
    h2d_in_flight: VecDeque<EventId>,
}

impl OffloadedState {
    /// Waits for the transfer of state `index` and starts that of the next state, which overlaps
    /// with the update of this one. `norm` means that the launch only sums the squares of
    /// gradients.
    pub(super) fn before(
        &mut self,
        out: &mut Emitter<'_>,
        flat: &Flat,
        reductions: &Reductions,
        index: usize,
        norm: bool,
    ) {
        if !flat.offloads() {
            return;
        }
        let fetched = if index == 0 {
            0..2
        } else {
            index + 1..index + 2
        };
        for group in fetched.filter_map(|i| reductions.group(i)) {
            let event = fetch(out, flat, group, norm);
            self.h2d_in_flight.extend(event);
        }
        if let Some(event) = self.h2d_in_flight.pop_front() {
            out.b.wait(Rule::Offload, event, COMPUTE);
        }
    }
}

/// Fetches a group's offloaded state to the device. For the norm, fetches only its gradient.
fn fetch(out: &mut Emitter<'_>, flat: &Flat, g: GroupId, norm: bool) -> Option<EventId> {
    let state = flat.state(g).clone();
    if let Some(grad) = state.grad {
        flat.start_fetch(out, grad.buffer, true);
    }
    if !norm {
        let moments = state.moments().flat_map(Moments::buffers);
        // Without main weights, the optimizer updates the compute weights.
        let weights = state.main.or(state.weight);
        for id in weights.into_iter().chain(moments) {
            flat.start_fetch(out, id, true);
        }
        if let (Some(_), Some(written)) = (state.main, state.weight) {
            flat.start_fetch(out, written, false);
        }
    }
    flat.fetch_issued(out)
}

/// Evicts a group's offloaded state to the host, after its update or, for `norm`, after its norm.
pub(super) fn evict(out: &mut Emitter<'_>, flat: &Flat, g: GroupId, norm: bool) {
    if !flat.offloads() {
        return;
    }
    let state = flat.state(g).clone();
    if let Some(grad) = state.grad {
        flat.evict_to_host(out, grad.buffer, false, COMPUTE);
    }
    if norm {
        return;
    }
    if let Some(weight) = state.weight {
        flat.evict_to_host(out, weight, true, COMPUTE);
    }
    let moments = state.moments().flat_map(Moments::buffers);
    for id in state.main.into_iter().chain(moments) {
        flat.evict_to_host(out, id, true, COMPUTE);
    }
}

/// Returns the order in which `states` optimizer states are updated. States that determine scales
/// of 8-bit weights come first, so that the all-reduce of maxima overlaps with the other updates.
/// Units gathered for the next step are updated after these, or halfway through: their reductions
/// are among the last and overlap with the updates before them; their gathers overlap with the
/// updates after them.
pub(super) fn update_order(
    inputs: &LoweringInputs<'_>,
    unshard: &Unshard,
    reductions: &Reductions,
    determines_scales: impl Fn(usize) -> bool,
    states: usize,
) -> Vec<usize> {
    let next = |&i: &usize| {
        let group = reductions.group(i);
        group.is_some_and(|g| unshard.prefetches_for_next_step(inputs, g))
    };
    let (mut order, others): (Vec<usize>, Vec<usize>) =
        (0..states).partition(|&i| determines_scales(i));
    let first = order.len();
    let (next, others): (Vec<usize>, Vec<usize>) = others.into_iter().partition(next);
    order.extend(others);
    let at = match first {
        0 => order.len().div_ceil(2),
        _ => first,
    };
    order.splice(at..at, next);
    order
}
