//! Parameter groups, their layouts and their owners.

use super::describe;
use super::report::Sink;
use super::rules::RuleId;
use crate::config::Atomic;
use crate::ir::{
    Access, BufferId, DType, GroupId, Holds, InstrId, Param, ParamId, Role, STATE_BLOCK,
};
use crate::program::{Op, Program, SectionKind};
use crate::shard::{FlatLayout, Group, Layout, PerParamLayout};
use std::collections::HashMap;
use std::ops::Range;

/// Checks groups, layouts, ownership and the shape of optimizer state.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    for (i, g) in p.groups.iter().enumerate() {
        let id = GroupId(i as u16);
        group(p, id, g, sink);
        match &g.layout {
            Layout::Flat(l) => flat(p, id, g, l, sink),
            Layout::PerParam(l) => per_param(p, id, g, l, sink),
        }
    }
    owners(p, sink);
    state(p, sink);
    scales(p, sink);
}

/// Returns whether a byte range of a group's full flat buffer contains no parameter, so that
/// nothing has to read it.
pub(super) fn is_padding(p: &Program, buffer: BufferId, range: Range<u64>) -> bool {
    let b = &p.buffers[buffer.index()];
    let Holds::Group(g) = b.holds else {
        return false;
    };
    let Layout::Flat(layout) = &p.groups[g.index()].layout else {
        return false;
    };
    let size = b.dtype.size();
    b.bytes.0 == layout.numel * size
        && layout
            .items
            .iter()
            .all(|i| range.end <= i.offset * size || (i.offset + i.numel) * size <= range.start)
}

fn name(p: &Program, id: GroupId) -> String {
    format!(
        "group {} of unit {}",
        id.0,
        p.units[p.groups[id.index()].unit.index()].name
    )
}

fn group(p: &Program, id: GroupId, g: &Group, sink: &mut Sink) {
    sink.fact(RuleId::Group, 1 + g.params.len() as u64);
    let mut bad = |what: String| {
        sink.violation(RuleId::Group, None, None, || {
            format!("{}: {what}", name(p, id))
        })
    };
    if !p.units[g.unit.index()].groups.contains(&id) {
        bad("its unit does not list it".into());
    }
    let apart = p.contract.frozen_apart;
    let trained = |x: &ParamId| p.params[x.index()].requires_grad;
    if !apart && g.requires_grad != g.params.iter().any(trained) {
        let any = if g.requires_grad { "none" } else { "some" };
        bad(format!(
            "has requires_grad = {}, but {any} of its parameters have it",
            g.requires_grad
        ));
    }
    for x in g.params.iter().filter(|_| apart) {
        let param = &p.params[x.index()];
        if param.requires_grad != g.requires_grad {
            bad(format!(
                "`{}` has requires_grad = {}, the group {}",
                param.name, param.requires_grad, g.requires_grad
            ));
        }
    }
    let shards = match &g.layout {
        Layout::Flat(l) => l.shards,
        Layout::PerParam(l) => l.shards,
    };
    if g.ignored && shards != 1 {
        bad(format!(
            "has {shards} shards, but the policy does not manage it"
        ));
    }
    let items: Vec<ParamId> = match &g.layout {
        Layout::Flat(l) => l.items.iter().map(|i| i.param).collect(),
        Layout::PerParam(l) => l.items.iter().map(|i| i.param).collect(),
    };
    let sorted = |mut v: Vec<ParamId>| {
        v.sort();
        v
    };
    if sorted(items) != sorted(g.params.clone()) {
        bad("its layout places other parameters than it owns".into());
    }
}

fn flat(p: &Program, id: GroupId, g: &Group, l: &FlatLayout, sink: &mut Sink) {
    sink.fact(RuleId::Layout, 2 + 4 * l.items.len() as u64);
    let mut bad = |what: String| {
        sink.violation(RuleId::Layout, None, None, || {
            format!("{}: {what}", name(p, id))
        })
    };
    let shards = u64::from(l.shards);
    if shards == 0 || !l.numel.is_multiple_of(shards) {
        bad(format!(
            "{} elements do not make {shards} equal shards",
            l.numel
        ));
        return;
    }
    let shard = l.numel / shards;
    let mut order: Vec<_> = l.items.iter().collect();
    order.sort_by_key(|i| (i.offset, i.numel));
    for w in order.windows(2) {
        if w[0].offset + w[0].numel > w[1].offset {
            bad(format!(
                "`{}` [{}, {}) overlaps `{}` at {}",
                p.params[w[0].param.index()].name,
                w[0].offset,
                w[0].offset + w[0].numel,
                p.params[w[1].param.index()].name,
                w[1].offset
            ));
        }
    }
    for i in &l.items {
        let param = &p.params[i.param.index()];
        let end = i.offset + i.numel;
        if i.numel != param.numel() {
            bad(format!(
                "`{}` gets {} elements, it has {}",
                param.name,
                i.numel,
                param.numel()
            ));
        }
        if end > l.numel {
            bad(format!(
                "`{}` ends at {end}, the buffer at {}",
                param.name, l.numel
            ));
        }
        let (whole, what) = indivisible(param, l.atomic);
        if shard == 0 || shards == 1 {
            continue;
        }
        // Every boundary within the parameter must be at a multiple of this number from its start.
        let mut boundary = (i.offset / shard + 1) * shard;
        while boundary < end {
            if !(boundary - i.offset).is_multiple_of(whole) {
                bad(format!(
                    "shard boundary {boundary} cuts {what} {} of `{}` ({what}s of {whole} from {})",
                    (boundary - i.offset) / whole,
                    param.name,
                    i.offset
                ));
                break;
            }
            boundary += shard;
        }
    }
    let packed = l.atomic == Atomic::Tensor && shards > 1;
    if !packed
        && g.params.iter().any(|x| {
            !l.chunk_factor
                .is_multiple_of(p.params[x.index()].flat_row().max(1))
        })
    {
        bad(format!(
            "chunk factor {} is not a multiple of every row",
            l.chunk_factor
        ));
    }
}

/// Returns the number of elements of a parameter that shards must not divide, and what they are.
fn indivisible(param: &Param, atomic: Atomic) -> (u64, &'static str) {
    let row = param.flat_row().max(1);
    match atomic {
        Atomic::Row => (row, "row"),
        Atomic::Block(_) if row == 1 => (row, "row"),
        Atomic::Block(rows) => (row * u64::from(rows), "block"),
        Atomic::Tensor => (param.numel().max(1), "tensor"),
    }
}

fn per_param(p: &Program, id: GroupId, _g: &Group, l: &PerParamLayout, sink: &mut Sink) {
    sink.fact(RuleId::Layout, 1 + 3 * l.items.len() as u64);
    let mut bad = |what: String| {
        sink.violation(RuleId::Layout, None, None, || {
            format!("{}: {what}", name(p, id))
        })
    };
    if l.shards == 0 {
        bad("no shards".into());
        return;
    }
    let mut at = 0;
    for i in &l.items {
        let param = &p.params[i.param.index()];
        let dim0 = param.shape.first().copied().unwrap_or(1);
        let want = dim0.div_ceil(u64::from(l.shards)) * param.row();
        if i.numel != param.numel() {
            bad(format!(
                "`{}` gets {} elements, it has {}",
                param.name,
                i.numel,
                param.numel()
            ));
        }
        if i.shard_numel != want {
            bad(format!(
                "`{}` gets shards of {}, {dim0} rows of {} over {} ranks need {want}",
                param.name,
                i.shard_numel,
                param.row(),
                l.shards
            ));
        }
        if i.shard_offset != at {
            bad(format!(
                "`{}` starts at {} of the shard, {at} is the next free",
                param.name, i.shard_offset
            ));
        }
        at = i.shard_offset + i.shard_numel;
    }
}

/// Checks that every parameter has one owner and one name, even if several modules share it.
fn owners(p: &Program, sink: &mut Sink) {
    sink.fact(RuleId::Tied, p.params.len() as u64);
    let mut owner: Vec<Option<GroupId>> = vec![None; p.params.len()];
    for (i, g) in p.groups.iter().enumerate() {
        let id = GroupId(i as u16);
        for x in &g.params {
            if let Some(first) = owner[x.index()].replace(id) {
                let (param, a, b) = (&p.params[x.index()].name, name(p, first), name(p, id));
                sink.violation(RuleId::Tied, None, None, || {
                    format!("`{param}` belongs to {a} and to {b}")
                });
            }
        }
    }
    for (x, o) in p.params.iter().zip(&owner) {
        if o.is_none() && !p.groups.is_empty() {
            sink.violation(RuleId::Tied, None, None, || {
                format!("`{}` belongs to no group", x.name)
            });
        }
    }
    // One set of optimizer weights per parameter or group.
    let mut main: HashMap<Holds, BufferId> = HashMap::new();
    for b in persistent(p) {
        let d = &p.buffers[b.index()];
        if d.role != Role::MainWeight || !matches!(d.holds, Holds::Param(_) | Holds::Group(_)) {
            continue;
        }
        sink.fact(RuleId::Tied, 1);
        let first = *main.entry(d.holds).or_insert(b);
        if first != b {
            sink.violation(RuleId::Tied, None, None, || {
                format!(
                    "{} and {} store the same weights",
                    describe::buffer(p, first),
                    describe::buffer(p, b)
                )
            });
        }
    }
}

/// Checks that a buffer of optimizer state has no more elements than the weights it belongs to, or
/// fewer if those are padded.
fn state(p: &Program, sink: &mut Sink) {
    let numel = |b: BufferId| {
        let d = &p.buffers[b.index()];
        d.bytes.0 / d.dtype.size()
    };
    let at_rest = persistent(p);
    let mut weights: HashMap<(Role, Holds), BufferId> = HashMap::new();
    for &b in &at_rest {
        let d = &p.buffers[b.index()];
        weights.entry((d.role, d.holds)).or_insert(b);
    }
    let of_role = |role: Role, holds: Holds| weights.get(&(role, holds)).copied();
    for &b in &at_rest {
        let d = &p.buffers[b.index()];
        if d.role != Role::OptimizerState || !matches!(d.holds, Holds::Param(_) | Holds::Group(_)) {
            continue;
        }
        let Some(w) =
            of_role(Role::MainWeight, d.holds).or_else(|| of_role(Role::ModelWeight, d.holds))
        else {
            continue;
        };
        sink.fact(RuleId::StateSharded, 1);
        let (have, want) = (numel(b), numel(w));
        if have > want.max(1) {
            sink.violation(RuleId::StateSharded, None, None, || {
                format!(
                    "{} has {have} elements, its weights {} have {want}",
                    describe::buffer(p, b),
                    describe::buffer(p, w)
                )
            });
        }
    }
}

/// Checks that 8-bit states have a scale for each of their blocks.
fn scales(p: &Program, sink: &mut Sink) {
    let numel = |a: &Access| a.bytes / p.buffers[a.buffer.index()].dtype.size();
    let dtype = |a: &Access| p.buffers[a.buffer.index()].dtype;
    for (i, instr) in p.instrs.iter().enumerate() {
        for tensor in p.updates(&instr.op) {
            let codes = tensor.state.iter().filter(|a| dtype(a) == DType::U8);
            let scales = tensor.state.iter().filter(|a| dtype(a) != DType::U8);
            if codes.clone().next().is_none() {
                continue;
            }
            sink.fact(RuleId::StateSharded, 1);
            let wanted = codes.map(|a| numel(a).div_ceil(STATE_BLOCK));
            if !wanted.eq(scales.map(numel)) {
                let id = InstrId(i as u32);
                sink.violation(RuleId::StateSharded, Some(id), None, || {
                    let buffers = tensor.state.iter().map(|a| describe::buffer(p, a.buffer));
                    let names: Vec<String> = buffers.collect();
                    format!(
                        "#{i}: the states {} are not codes and a scale per {STATE_BLOCK} of them",
                        names.join(", ")
                    )
                });
            }
        }
    }
}

/// Returns the buffers that `Init` and `First` allocate and do not free.
fn persistent(p: &Program) -> Vec<BufferId> {
    let mut live = vec![false; p.buffers.len()];
    for s in p
        .sections
        .iter()
        .filter(|s| matches!(s.kind, SectionKind::Init | SectionKind::First))
    {
        for i in p.section_instrs(s) {
            match i.op {
                Op::Alloc(b) => live[b.index()] = true,
                Op::Free(b) => live[b.index()] = false,
                _ => {}
            }
        }
    }
    (0..p.buffers.len())
        .filter(|&i| live[i])
        .map(|i| BufferId(i as u32))
        .collect()
}
