//! Experts that are divided among ranks. They are sharded over the ranks that have the same
//! experts; everything else is sharded over all ranks.

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{AxisId, AxisSet, BufferId, GroupId, Holds, InstrId, ParamId};
use crate::program::{Op, Program};
use crate::shard::placements::shard_axis;
use crate::shard::{Group, Layout};

/// Returns the inner axis over which a group has to be sharded.
pub(super) fn shard_axis_of(p: &Program, g: &Group) -> AxisId {
    let first = g.params.first();
    first.map_or(AxisId::DP_SHARD, |x| of_param(p, *x))
}

fn of_param(p: &Program, x: ParamId) -> AxisId {
    shard_axis(p.params[x.index()].placements)
}

/// Checks the shards of all groups, and the ranks that gather and reduce them.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    shards(p, sink);
    for (i, instr) in p.instrs.iter().enumerate() {
        if let Op::Collective { id, .. } = instr.op {
            let c = &p.collectives[id.index()];
            let axes = p.communicators[c.comm.index()].axes;
            let buffers = c.parts.iter().map(|part| part.output.buffer);
            for b in buffers {
                members(p, InstrId(i as u32), b, axes, sink);
            }
        }
    }
}

/// Checks that a rank has the same share of the experts as of everything else.
fn shards(p: &Program, sink: &mut Sink) {
    let mesh = &p.meta.mesh;
    let shards = |g: &Group| match &g.layout {
        Layout::Flat(l) => l.shards,
        Layout::PerParam(l) => l.shards,
    };
    let axis = |g: &Group| shard_axis_of(p, g);
    let dense = p
        .groups
        .iter()
        .filter(|g| axis(g) == AxisId::DP_SHARD && !g.ignored);
    let Some(of_dense) = dense.map(shards).max() else {
        return;
    };
    for (i, g) in p.groups.iter().enumerate() {
        if axis(g) == AxisId::DP_SHARD {
            continue;
        }
        sink.fact(RuleId::ExpertShard, 1);
        // If the rest is not sharded, experts are not sharded either.
        let expected = (of_dense / mesh.size(AxisId::EP)).max(1);
        if shards(g) != expected {
            let unit = &p.units[g.unit.index()].name;
            sink.violation(RuleId::ExpertShard, None, None, || {
                format!(
                    "group {} of unit {unit}: experts of {} ranks each have {} shards; expected {expected}, \
                     as many ranks have the same experts",
                    GroupId(i as u16).0,
                    mesh.size(AxisId::EP),
                    shards(g)
                )
            });
        }
    }
}

/// Checks that ranks gather and reduce a group only with ranks that have the same parameters of the
/// group, and with all of them.
fn members(p: &Program, instr: InstrId, b: BufferId, axes: AxisSet, sink: &mut Sink) {
    let axis = match p.buffers[b.index()].holds {
        Holds::Group(g) => shard_axis_of(p, &p.groups[g.index()]),
        Holds::Param(x) => of_param(p, x),
        _ => return,
    };
    // Parts of the inner axis other than the one that shards the group.
    let parts = [AxisId::DP_SHARD, AxisId::EP, AxisId::EDP];
    let mut others = parts.into_iter().filter(|other| *other != axis);
    sink.fact(RuleId::ExpertShard, 1);
    if let Some(other) = others.find(|other| axes.intersects(AxisSet::of(*other))) {
        sink.violation(RuleId::ExpertShard, Some(instr), None, || {
            format!(
                "communicates {} along axis {}; expected {}, along which ranks have the same parameters",
                describe::buffer(p, b),
                other.label(),
                axis.label()
            )
        });
    }
}
