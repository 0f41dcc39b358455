//! The program as stable text: a header with units and groups, then one instruction per line.
//!
//! ```text
//! id     mb phase     unit         rule          instruction
//! ```

use super::{Instr, Op, Program, Section};
use crate::config::Atomic;
use crate::ir::{
    Access, AxisId, BufferId, GroupId, Holds, ParamId, Pool, ReduceOp, StreamId, UnitId,
};
use crate::shard::{Group, Layout};
use crate::units::count;
use std::fmt::Write;

pub(super) fn buffer_name(program: &Program, id: BufferId) -> String {
    let b = &program.buffers[id.index()];
    let of = match b.holds {
        Holds::Param(p) => program.params[p.index()].name.clone(),
        Holds::Group(g) => group_name(program, g),
        Holds::Storage(s) => format!("{}#{}", program.units[b.unit.index()].name, s.0),
        Holds::Const(c) => format!("input#{}", c.0),
        Holds::Named(n) => n.to_owned(),
    };
    format!("{} {of}", b.role.name())
}

fn group_name(program: &Program, g: GroupId) -> String {
    let group = &program.groups[g.index()];
    let unit = &program.units[group.unit.index()];
    match unit.groups.iter().position(|x| *x == g) {
        Some(0) | None => unit.name.clone(),
        Some(i) => format!("{}/{i}", unit.name),
    }
}

fn stream(program: &Program, s: StreamId) -> &'static str {
    program.streams[s.index()].kind.name()
}

fn access(program: &Program, a: &Access) -> String {
    let whole = program.buffers[a.buffer.index()].bytes.0;
    if a.offset == 0 && a.bytes == whole {
        format!("b{}", a.buffer.0)
    } else {
        format!("b{}[{}+{}]", a.buffer.0, a.offset, a.bytes)
    }
}

fn list(program: &Program, accesses: &[Access]) -> String {
    const SHOWN: usize = 6;
    let mut out: Vec<String> = accesses
        .iter()
        .take(SHOWN)
        .map(|a| access(program, a))
        .collect();
    if accesses.len() > SHOWN {
        out.push(format!("… {} more", accesses.len() - SHOWN));
    }
    out.join(" ")
}

/// Describes an instruction, without its tag.
pub(super) fn op(program: &Program, instr: &Instr) -> String {
    match instr.op {
        Op::Alloc(id) => {
            let b = &program.buffers[id.index()];
            let pool = match b.pool {
                Pool::Caching => "caching",
                Pool::Planned => "planned",
                Pool::DoubleBuffer => "double_buffer",
                Pool::Traced => "trace_pool",
                Pool::Host => "host",
            };
            let at = stream(program, b.stream);
            format!(
                "alloc b{} {} = {} {pool} on {at}",
                id.0,
                buffer_name(program, id),
                b.bytes
            )
        }
        Op::Free(id) => format!("free b{} {}", id.0, buffer_name(program, id)),
        Op::Launch {
            kernel, stream: s, ..
        } => {
            let k = &program.kernels[kernel.index()];
            let shape = k.class.sizes();
            let (reads, writes) = (
                list(program, program.reads(&instr.op)),
                list(program, program.writes(&instr.op)),
            );
            format!(
                "launch {}{shape} on {}: {reads} -> {writes}",
                k.name,
                stream(program, s)
            )
        }
        Op::Collective { id, stream: s } => {
            let c = &program.collectives[id.index()];
            let comm = &program.communicators[c.comm.index()];
            let reduce = match c.reduce {
                ReduceOp::None => String::new(),
                ReduceOp::Sum => " sum".to_owned(),
                ReduceOp::Avg => " avg".to_owned(),
                ReduceOp::Max => " max".to_owned(),
                ReduceOp::PremulSum(f) => format!(" premul_sum({f})"),
            };
            let parts: Vec<String> = c
                .parts
                .iter()
                .map(|p| {
                    format!(
                        "{} -> {}",
                        access(program, &p.input),
                        access(program, &p.output)
                    )
                })
                .collect();
            let sent = c.sent.map_or_else(String::new, |s| {
                let by = match (access(program, &s.by.input), access(program, &s.by.output)) {
                    (sent, received) if sent == received => sent,
                    (sent, received) => format!("{sent} -> {received}"),
                };
                let network = match s.of.over_network() {
                    0 => String::new(),
                    rows => format!(", {rows} over the network"),
                };
                format!(
                    ", rows by {by}, {} of {}{network}",
                    s.of.expected(),
                    s.of.rows()
                )
            });
            format!(
                "{} {}{reduce} {} {} on {}: {}{sent}",
                c.kind.name(),
                c.dtype,
                c.bytes,
                comm.name,
                stream(program, s),
                parts.join(", ")
            )
        }
        Op::Copy { id, stream: s } => {
            let c = &program.copies[id.index()];
            let (from, to) = (access(program, &c.from), access(program, &c.to));
            format!(
                "copy {:?} on {}: {from} -> {to}",
                c.kind,
                stream(program, s)
            )
            .to_lowercase()
        }
        Op::Record { event, stream: s } => format!("record e{} on {}", event.0, stream(program, s)),
        Op::Wait { event, stream: s } => format!("wait e{} on {}", event.0, stream(program, s)),
        Op::HostWait(event) => format!("host waits e{}", event.0),
        Op::HostWork { kind, count } => format!("host {kind:?} x{count}").to_lowercase(),
        Op::GraphBegin(s) => format!("graph begin {}", program.scopes[s.index()].name),
        Op::GraphEnd(s) => {
            let scope = &program.scopes[s.index()];
            format!("graph end {} ({} launches)", scope.name, scope.launches)
        }
    }
}

/// Returns the comment lines at the start, with the groups of these units (`None`: of all). Equal
/// adjacent units share a line.
pub(super) fn header(program: &Program, units: Option<&[UnitId]>) -> String {
    let mut out = String::new();
    write_header(program, units, &mut out);
    out
}

fn write_header(program: &Program, units: Option<&[UnitId]>, out: &mut String) {
    let m = &program.meta;
    let size = |axis| m.mesh.size(axis);
    let _ = writeln!(
        out,
        "# program {} policy {} ranks {} = {} outer x {} shard{}, {}, {} tokens/rank/step{}",
        program.digest(),
        m.policy,
        m.mesh.world(),
        size(AxisId::DP_OUTER),
        size(AxisId::DP_SHARD),
        m.mesh.model_axes_text(),
        match m.micro_batches {
            1 => "1 micro-batch".to_owned(),
            n => format!("{n} micro-batches"),
        },
        count(m.tokens),
        if m.deterministic {
            ", sums in a fixed order"
        } else {
            ""
        }
    );
    for (i, s) in program.streams.iter().enumerate() {
        let _ = writeln!(
            out,
            "# stream {i} {} priority {}",
            s.kind.name(),
            s.priority
        );
    }
    for (i, c) in program.communicators.iter().enumerate() {
        let _ = writeln!(
            out,
            "# communicator {i} {}: {} ranks, stride {}, axis {}{}",
            c.name,
            c.ranks.size,
            c.ranks.stride,
            c.axes.label(),
            if c.copy_engine { ", copy engines" } else { "" }
        );
    }
    let mut groups: Vec<(usize, usize, String)> = Vec::new();
    for (g, group) in program.groups.iter().enumerate() {
        if units.is_some_and(|u| !u.contains(&group.unit)) {
            continue;
        }
        let text = group_text(program, group);
        match groups.last_mut() {
            Some((_, last, same)) if *last + 1 == g && *same == text => *last = g,
            _ => groups.push((g, g, text)),
        }
    }
    let unit = |g: usize| &program.units[program.groups[g].unit.index()].name;
    for (first, last, text) in groups {
        let _ = match last - first {
            0 => writeln!(out, "# group {first} {}: {text}", unit(first)),
            more => writeln!(
                out,
                "# groups {first} to {last}, {} to {}: {} groups alike, each {text}",
                unit(first),
                unit(last),
                more + 1
            ),
        };
    }
}

/// Describes the contents of a parameter group, without its number and name.
fn group_text(program: &Program, group: &Group) -> String {
    let kind = match &group.layout {
        _ if group.ignored => "not managed".to_owned(),
        Layout::Flat(l) if l.atomic == Atomic::Tensor => "flat, whole parameters".to_owned(),
        Layout::Flat(l) => format!("flat, rows of {}", count(l.chunk_factor)),
        Layout::PerParam(_) => "per parameter".to_owned(),
    };
    let payload: u64 = group
        .params
        .iter()
        .map(|p| program.params[p.index()].numel())
        .sum();
    let is_frozen = |p: &&ParamId| !program.params[p.index()].requires_grad;
    format!(
        "{} parameters, {} elements padded to {} ({kind}), shard {}{}{}",
        group.params.len(),
        count(payload),
        count(group.layout.full_numel()),
        count(group.layout.shard_numel()),
        match group.params.iter().filter(is_frozen).count() {
            0 => String::new(),
            n if n == group.params.len() => ", frozen".to_owned(),
            n => format!(", {n} of the parameters frozen"),
        },
        if program.units[group.unit.index()].reshards && !group.ignored {
            ", reshards after forward"
        } else {
            ""
        },
    )
}

pub(super) fn section_title(s: &Section) -> String {
    format!(
        "[{}] {} instructions",
        s.kind.title(),
        count(s.instrs.len() as u64)
    )
}

fn section(program: &Program, s: &Section, out: &mut String) {
    let _ = writeln!(out, "\n{}", section_title(s));
    for i in s.instrs.clone() {
        let instr = &program.instrs[i as usize];
        let unit = &program.units[instr.unit.index()].name;
        let _ = writeln!(
            out,
            "{i:>6} {:>2} {:<10} {unit:<12} {:<17} {}",
            instr.micro_batch,
            instr.phase.name(),
            instr.rule.name(),
            op(program, instr)
        );
    }
}

pub(super) fn render(program: &Program) -> String {
    let mut out = header(program, None);
    for s in &program.sections {
        section(program, s, &mut out);
    }
    out
}
