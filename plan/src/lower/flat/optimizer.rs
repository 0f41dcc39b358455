//! The tensors that the optimizer of the flat policies updates, and the refresh of compute weights
//! afterwards.

use super::{Flat, GroupState, Sharded, Tensor};
use crate::config::Strategy;
use crate::ir::{Access, AxisId, COMPUTE, GroupId, PerRank, ShardOp, StreamId};
use crate::lower::emitter::Emitter;
use crate::lower::inputs::LoweringInputs;
use crate::lower::kernels::KernelLaunch;
use crate::lower::optimizer::{OptimizerItem, ShardState, rule};
use crate::program::Rule;
use crate::shard::{Layout, placements};
use std::ops::Range;

/// Returns the tensors of a group whose weights are one range of `numel` elements.
fn items(state: &GroupState, weight: Access, grad: Access, numel: u64) -> Vec<OptimizerItem> {
    let part = |of: Access, elements: &Range<u64>| {
        // (A gradient in unreduced pieces has several values per element.)
        let size = of.bytes / numel.max(1);
        of.part(elements.start * size..elements.end * size)
    };
    let item = |t: &Tensor| OptimizerItem {
        weight: part(weight, &t.elements),
        grad: part(grad, &t.elements),
        numel: t.elements.end - t.elements.start,
        state: t.moments,
    };
    state.tensors.iter().map(item).collect()
}

impl Flat {
    /// Returns how the optimizer's part of a buffer differs between ranks. `sharded` returns
    /// whether the buffer already holds only the inner shard.
    fn optimizer_slice(&self, of: Sharded, sharded: fn(Strategy) -> bool) -> Option<PerRank> {
        if of.outer_optim {
            Some(AxisId::DP_OUTER.into())
        } else if placements::optim_sharded(of.strategy) && !sharded(of.strategy) {
            Some(of.over.into())
        } else {
            None
        }
    }

    /// Returns the part of G that this rank's optimizer reads.
    fn optimizer_grad(&self, inputs: &LoweringInputs<'_>, g: GroupId) -> Option<Access> {
        let state = self.state(g);
        let grad = state.grad?;
        if inputs.sums_in_optimizer(g) {
            return Some(grad);
        }
        let numel = self.optimizer_numel(state);
        Some(Access {
            bytes: numel * state.g.size(),
            per_rank: self.optimizer_slice(state.sharded, placements::grad_sharded),
            ..grad
        })
    }

    /// Returns the part of W that this rank's optimizer owns, as ranges. There are several if
    /// parameters have separate buffers.
    fn own_weights(&self, out: &Emitter<'_>, state: &GroupState) -> Vec<Access> {
        match state.weight {
            Some(rest) => {
                let bytes = self.optimizer_numel(state) * state.w.size();
                vec![Access {
                    buffer: rest,
                    offset: 0,
                    bytes,
                    per_rank: self.optimizer_slice(state.sharded, placements::weight_sharded),
                }]
            }
            None => state.params.iter().map(|p| out.b.whole(*p)).collect(),
        }
    }

    /// Returns one optimizer launch per trained group, in the given order.
    pub(crate) fn optimizer_state(
        &self,
        out: &Emitter<'_>,
        order: impl Iterator<Item = GroupId>,
    ) -> Vec<ShardState> {
        order
            .filter_map(|g| {
                let state = self.state(g);
                let grad = self.optimizer_grad(out.inputs, g)?;
                let numel = self.optimizer_numel(state);
                let items = match state.main {
                    Some(main) => items(state, out.b.whole(main), grad, numel),
                    None => self.items_of_weights(out, g, grad, numel),
                };
                Some(ShardState {
                    unit: out.inputs.group(g).unit,
                    rule: rule(out.inputs, g),
                    divided: out.inputs.divided(g),
                    items,
                    compute: self.written_with_main(out, g),
                    pieces: self.pieces(out.inputs, g),
                    maxima: self.maxima_with_main(out, g),
                    rows: None,
                })
            })
            .collect()
    }

    /// Returns W if the optimizer's launch writes it together with M. This is the case in the
    /// native engine, unless the layout of M has gaps that separate parameter buffers do not have.
    /// Empty if there is no M, or if [`Flat::refresh`] casts it.
    fn written_with_main(&self, out: &Emitter<'_>, g: GroupId) -> Vec<Access> {
        let state = self.state(g);
        if state.main.is_none() || state.w.is_float8() || !out.inputs.engine.fused_optimizer {
            return Vec::new();
        }
        let weights = self.own_weights(out, state);
        let Layout::Flat(layout) = &out.inputs.group(g).layout else {
            return Vec::new();
        };
        if state.weight.is_some() {
            return weights;
        }
        // Parameters end inside blocks of quantized states.
        if state.moments().any(|m| m.scales[0].is_some()) {
            return Vec::new();
        }
        let mut placed: Vec<(u64, u64, Access)> = layout
            .items
            .iter()
            .zip(weights)
            .map(|(item, weight)| (item.offset, item.numel, weight))
            .collect();
        placed.sort_unstable_by_key(|p| p.0);
        let mut end = 0;
        let dense = placed.iter().all(|&(offset, numel, _)| {
            let follows = offset == end;
            end = offset + numel;
            follows
        });
        if !dense || end != state.numel {
            return Vec::new();
        }
        placed.into_iter().map(|p| p.2).collect()
    }

    /// Returns the items of an optimizer that updates W itself because there is no M. If parameters
    /// are separate, they are buffers over one flat gradient.
    fn items_of_weights(
        &self,
        out: &Emitter<'_>,
        g: GroupId,
        grad: Access,
        numel: u64,
    ) -> Vec<OptimizerItem> {
        let state = self.state(g);
        let weights = self.own_weights(out, state);
        if weights.len() == 1 && state.weight.is_some() {
            return items(state, weights[0], grad, numel);
        }
        let group = out.inputs.group(g);
        let Layout::Flat(layout) = &group.layout else {
            return Vec::new();
        };
        let moments = |at: u64| {
            let tensors = state.tensors.iter();
            let mut of_it = tensors.filter(|t| t.elements.start == at);
            of_it.next().and_then(|t| t.moments)
        };
        let single = state.tensors.len() == 1;
        layout
            .items
            .iter()
            .zip(weights)
            .enumerate()
            .map(|(i, (item, weight))| OptimizerItem {
                weight,
                grad: Access {
                    offset: grad.offset + item.offset * state.g.size(),
                    bytes: item.numel * state.g.size(),
                    ..grad
                },
                numel: item.numel,
                // A launch lists the moments of a whole group once.
                state: moments(if single { 0 } else { item.offset }).filter(|_| !single || i == 0),
            })
            .collect()
    }

    /// Casts compute weights from main weights, group by group, unless the optimizer has written
    /// both.
    pub(crate) fn refresh(&self, out: &mut Emitter<'_>, stream: StreamId) {
        out.b.join(Rule::Refresh, COMPUTE, stream);
        for g in out.inputs.group_ids() {
            self.refresh_group(out, g, stream);
        }
    }

    /// Casts one group's compute weights from its main weights.
    pub(crate) fn refresh_group(&self, out: &mut Emitter<'_>, g: GroupId, stream: StreamId) {
        {
            let state = self.state(g).clone();
            let Some(main) = state.main else { return };
            if state.weight.is_none() && state.params.is_empty() {
                // Gathers cast M instead.
                return;
            }
            if state.w.is_float8() {
                // These casts need scales.
                return;
            }
            if !self.written_with_main(out, g).is_empty() {
                return;
            }
            out.b
                .at(out.inputs.group(g).unit, crate::program::Phase::Refresh);
            let whole = out.b.whole(main);
            let to = self.own_weights(out, &state);
            let n = self.optimizer_numel(&state);
            let Layout::Flat(layout) = &out.inputs.group(g).layout else {
                return;
            };
            if state.weight.is_some() {
                out.run(KernelLaunch {
                    rule: Rule::Refresh,
                    op: ShardOp::Copy,
                    elements: n,
                    dtype: state.w,
                    stream,
                    reads: &[whole],
                    writes: &to,
                });
                return;
            }
            // Parameters have separate buffers. The order of the layout may differ from theirs, and
            // it may have gaps.
            let element = whole.bytes / state.numel.max(1);
            let from: Vec<Access> = layout
                .items
                .iter()
                .map(|i| Access {
                    offset: i.offset * element,
                    bytes: i.numel * element,
                    ..whole
                })
                .collect();
            let n = layout.payload_numel();
            out.run(KernelLaunch {
                rule: Rule::Refresh,
                op: ShardOp::MultiCopy,
                elements: n,
                dtype: state.w,
                stream,
                reads: &from,
                writes: &to,
            });
        }
    }
}
