//! Descriptors of collectives, and agreement of ranks.

use super::describe;
use super::report::{Report, Sink};
use super::rules::RuleId;
use crate::ir::{
    Access, AxisId, Collective, CollectiveId, CollectiveKind, InstrId, ReduceOp, SelectedRows,
    SentRows,
};
use crate::program::{Op, Program, Section};

/// Checks every collective's sizes, members and aliasing.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    let launched = first_launches(p);
    for (i, c) in p.collectives.iter().enumerate() {
        let Some(instr) = launched[i] else { continue };
        sizes(p, c, instr, sink);
        members(p, c, instr, sink);
        aliasing(p, c, instr, sink);
    }
}

/// Returns the first instruction that launches each descriptor.
fn first_launches(p: &Program) -> Vec<Option<InstrId>> {
    let mut out = vec![None; p.collectives.len()];
    for (i, instr) in p.instrs.iter().enumerate() {
        if let Op::Collective { id, .. } = instr.op {
            out[id.index()].get_or_insert(InstrId(i as u32));
        }
    }
    out
}

fn bad(p: &Program, sink: &mut Sink, rule: RuleId, instr: InstrId, what: impl FnOnce() -> String) {
    sink.violation(rule, Some(instr), None, || {
        format!("{}: {}", describe::instr(p, instr, None), what())
    });
}

fn sizes(p: &Program, c: &Collective, instr: InstrId, sink: &mut Sink) {
    sink.fact(RuleId::Collective, 2 * c.parts.len() as u64 + 2);
    let size = u64::from(p.communicators[c.comm.index()].ranks.size);
    let mut payload = 0;
    for part in &c.parts {
        let (i, o) = (part.input.bytes, part.output.bytes);
        let full = i.max(o);
        payload += full;
        if !c.kind.sizes_fit(i, o, size) {
            bad(p, sink, RuleId::Collective, instr, || {
                format!(
                    "{i} bytes of {} against {o} bytes of {} over {size} ranks",
                    describe::range(p, part.input),
                    describe::range(p, part.output)
                )
            });
        }
        let row = |s: &SentRows| {
            let rows = s.of.rows();
            let by = s.by.input.bytes;
            full.is_multiple_of(rows)
                && match s.of {
                    SelectedRows::Pushed(_) => by.is_multiple_of(rows),
                    SelectedRows::Counted(_) => {
                        rows.is_multiple_of(size)
                            && by.is_multiple_of(8 * size)
                            && by == s.by.output.bytes
                    }
                }
        };
        if !c.sent.as_ref().is_none_or(row) {
            bad(p, sink, RuleId::Collective, instr, || {
                format!(
                    "{full} bytes are not the rows that {} selects",
                    c.sent
                        .map_or_else(String::new, |s| describe::range(p, s.by.input))
                )
            });
        }
        if i % c.dtype.size() != 0 || o % c.dtype.size() != 0 {
            bad(p, sink, RuleId::Collective, instr, || {
                format!(
                    "{} is not a whole number of {} elements",
                    describe::range(p, part.input),
                    c.dtype
                )
            });
        }
    }
    if payload != c.bytes.0 {
        bad(p, sink, RuleId::Collective, instr, || {
            format!(
                "payload of {} bytes, but its parts have {payload}",
                c.bytes.0
            )
        });
    }
    if c.kind.reduces() == (c.reduce == ReduceOp::None) {
        bad(p, sink, RuleId::Collective, instr, || {
            format!("reduction {:?}", c.reduce)
        });
    }
    // A sum of elements of another type would be meaningless.
    for a in c.parts.iter().flat_map(|part| [part.input, part.output]) {
        let of = p.buffers[a.buffer.index()].dtype;
        if c.kind.reduces() && of != c.dtype {
            bad(p, sink, RuleId::Collective, instr, || {
                format!(
                    "reduces {}, {of} elements, as {}",
                    describe::range(p, a),
                    c.dtype
                )
            });
        }
    }
    // Parts of a launch write disjoint ranges, in one deterministic order.
    for w in c.parts.windows(2) {
        let (a, b) = (w[0], w[1]);
        sink.fact(RuleId::Collective, 1);
        if (a.input.buffer, a.input.offset) >= (b.input.buffer, b.input.offset)
            && (a.output.buffer, a.output.offset) >= (b.output.buffer, b.output.offset)
        {
            bad(p, sink, RuleId::Collective, instr, || {
                format!(
                    "parts {} and {} are out of order",
                    describe::range(p, a.input),
                    describe::range(p, b.input)
                )
            });
        }
    }
}

fn members(p: &Program, c: &Collective, instr: InstrId, sink: &mut Sink) {
    sink.fact(RuleId::Collective, 1);
    let comm = &p.communicators[c.comm.index()];
    let mesh = &p.meta.mesh;
    if comm.ranks.size < 2 || mesh.group(comm.axes) != Some(comm.ranks) {
        bad(p, sink, RuleId::Collective, instr, || {
            format!(
                "communicator {} has {} ranks with stride {} on axis {} of a mesh of {} x {}",
                comm.name,
                comm.ranks.size,
                comm.ranks.stride,
                comm.axes.label(),
                mesh.size(AxisId::DP_OUTER),
                mesh.size(AxisId::DP_SHARD)
            )
        });
    }
}

fn apart(a: Access, b: Access) -> bool {
    a.buffer != b.buffer || a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset
}

/// Checks aliasing. A shard may overlap the full range of its own launch only at its rank's slice,
/// which is at the start for rank 0.
fn aliasing(p: &Program, c: &Collective, instr: InstrId, sink: &mut Sink) {
    let (rule, reduces) = match c.kind {
        CollectiveKind::ReduceScatter => (RuleId::ReduceAlias, true),
        CollectiveKind::AllGather => (RuleId::Collective, false),
        _ => return,
    };
    let axes = p.communicators[c.comm.index()].axes;
    for (n, a) in c.parts.iter().enumerate() {
        for (m, b) in c.parts.iter().enumerate() {
            sink.fact(rule, 1);
            let (shard, full) = if reduces {
                (a.output, b.input)
            } else {
                (a.input, b.output)
            };
            let own = n == m
                && shard.offset == full.offset
                && axes
                    .single()
                    .is_none_or(|x| shard.per_rank == Some(x.into()));
            if !own && !apart(shard, full) {
                bad(p, sink, rule, instr, || {
                    format!(
                        "shard {} ({}) overlaps {}; expected it apart, or each rank's own part ({} from byte {})",
                        describe::range(p, shard),
                        shard
                            .per_rank
                            .map_or("the same on all ranks", |p| p.axis().label()),
                        describe::range(p, full),
                        axes.label(),
                        full.offset
                    )
                });
            }
        }
    }
}

/// Checks that all ranks launch the same collectives in the same order on every communicator.
///
/// Takes one program per rank, in rank order. A program that was made for all ranks at once (with
/// one list for all) is symmetric by construction. This check is for ranks that were planned
/// separately.
#[must_use]
pub fn check_symmetry(programs: &[Program]) -> Report {
    let mut sink = Sink::new();
    let Some((first, rest)) = programs.split_first() else {
        return sink.finish(Vec::new(), 0);
    };
    let mut instructions = first.instrs.len() as u64;
    for (r, other) in rest.iter().enumerate() {
        instructions += other.instrs.len() as u64;
        ranks(first, other, r + 1, &mut sink);
    }
    sink.finish(Vec::new(), instructions)
}

/// Returns the collectives of a section, by communicator.
fn sequences<'a>(p: &'a Program, s: &Section) -> Vec<Vec<(InstrId, &'a Collective)>> {
    let mut out = vec![Vec::new(); p.communicators.len()];
    for i in s.instrs.clone() {
        if let Op::Collective { id, .. } = p.instrs[i as usize].op {
            let c = &p.collectives[CollectiveId::index(id)];
            out[c.comm.index()].push((InstrId(i), c));
        }
    }
    out
}

fn ranks(a: &Program, b: &Program, rank: usize, sink: &mut Sink) {
    let sections = |p: &Program| p.sections.iter().map(|s| s.kind).collect::<Vec<_>>();
    sink.fact(RuleId::Symmetry, 1);
    if a.communicators != b.communicators || sections(a) != sections(b) {
        sink.violation(RuleId::Symmetry, None, None, || {
            format!("rank {rank} has other communicators or sections than rank 0")
        });
        return;
    }
    for (sa, sb) in a.sections.iter().zip(&b.sections) {
        for (comm, (qa, qb)) in sequences(a, sa)
            .into_iter()
            .zip(sequences(b, sb))
            .enumerate()
        {
            let comm = &a.communicators[comm].name;
            sink.fact(RuleId::Symmetry, qa.len() as u64);
            let same = |x: &Collective, y: &Collective| {
                (x.kind, x.reduce, x.dtype, x.bytes, x.parts.len())
                    == (y.kind, y.reduce, y.dtype, y.bytes, y.parts.len())
            };
            let first = qa.iter().zip(&qb).position(|((_, x), (_, y))| !same(x, y));
            if let Some(n) = first {
                let ((ia, x), (ib, y)) = (qa[n], qb[n]);
                sink.violation(RuleId::Symmetry, Some(ib), Some(ia), || {
                    format!(
                        "rank {rank}, collective {n} of communicator {comm}: {} of {} bytes {} where rank 0 has {} of {} bytes {}",
                        describe::instr(b, ib, None),
                        y.bytes.0,
                        y.dtype,
                        describe::instr(a, ia, None),
                        x.bytes.0,
                        x.dtype
                    )
                });
            } else if qa.len() != qb.len() {
                let extra = qa.len().min(qb.len());
                let (p, i) = if qa.len() > extra {
                    (a, qa[extra].0)
                } else {
                    (b, qb[extra].0)
                };
                sink.violation(RuleId::Symmetry, Some(i), None, || {
                    format!(
                        "rank {rank} launches {} collectives on communicator {comm}, rank 0 {}; the first without a partner is {}",
                        qb.len(),
                        qa.len(),
                        describe::instr(p, i, None)
                    )
                });
            }
        }
    }
}
