//! Form: everything that an instruction refers to exists. The other rules rely on this.

use super::clock::MAX_STREAMS;
use super::report::Sink;
use super::rules::RuleId;
use crate::ir::{
    Access, Buffer, CollectiveKind, Holds, InstrId, Kernel, Place, Role, SelectedRows, Slot,
    strides,
};
use crate::program::{Op, Program, StreamKind};

/// Checks the form of a program. If the form is invalid, no other rule can be checked.
pub(super) fn check(p: &Program, sink: &mut Sink) {
    tables(p, sink);
    if sink.any(RuleId::Form) {
        return;
    }
    let operands: Vec<Operands> = p.kernels.iter().map(Operands::of).collect();
    for (i, instr) in p.instrs.iter().enumerate() {
        let id = InstrId(i as u32);
        let mut bad =
            |what: String| sink.violation(RuleId::Form, Some(id), None, || format!("#{i}: {what}"));
        let stream_ok = |s: crate::ir::StreamId| s.index() < p.streams.len();
        if instr.unit.index() >= p.units.len() {
            bad(format!("unit {} of {}", instr.unit.0, p.units.len()));
            continue;
        }
        match instr.op {
            Op::Alloc(b) | Op::Free(b) if b.index() >= p.buffers.len() => {
                bad(format!("no buffer b{}", b.0))
            }
            Op::Launch {
                kernel,
                stream,
                reads,
                writes,
                end,
            } => {
                if kernel.index() >= p.kernels.len() {
                    bad(format!("no kernel {}", kernel.0));
                } else if !stream_ok(stream) {
                    bad(format!("no stream {}", stream.0));
                } else if reads > writes || writes > end || end as usize > p.accesses.len() {
                    bad(format!(
                        "operands {reads}..{writes}..{end} outside of an arena of {}",
                        p.accesses.len()
                    ));
                } else {
                    let needed = &operands[kernel.index()];
                    let name = &p.kernels[kernel.index()].name;
                    let (r, w) = (needed.reads.len(), needed.writes.len());
                    let (have_r, have_w) = ((writes - reads) as usize, (end - writes) as usize);
                    if r > have_r || w > have_w {
                        bad(format!(
                            "`{name}` uses {r} reads and {w} writes, but the launch has {have_r} and {have_w}"
                        ));
                    }
                    let lists = [
                        ("read", &needed.reads, p.reads(&instr.op)),
                        ("write", &needed.writes, p.writes(&instr.op)),
                    ];
                    for (kind, needed, have) in lists {
                        for (n, (reach, a)) in needed.iter().zip(have).enumerate() {
                            let bytes = reach.bytes(&p.buffers[a.buffer.index()]);
                            if a.bytes < bytes {
                                bad(format!(
                                    "`{name}` goes {bytes} bytes into {kind} {n}, which has {}",
                                    a.bytes
                                ));
                            }
                        }
                    }
                }
            }
            Op::Collective { id: c, stream }
                if (c.index() >= p.collectives.len() || !stream_ok(stream)) =>
            {
                bad(format!("no collective {} or no stream {}", c.0, stream.0));
            }
            Op::Copy { id: c, stream } if (c.index() >= p.copies.len() || !stream_ok(stream)) => {
                bad(format!("no copy {} or no stream {}", c.0, stream.0));
            }
            Op::Record { event, stream } | Op::Wait { event, stream }
                if (event.0 >= p.events || !stream_ok(stream)) =>
            {
                bad(format!("no event e{} or no stream {}", event.0, stream.0));
            }
            Op::HostWait(event) if event.0 >= p.events => bad(format!("no event e{}", event.0)),
            Op::GraphBegin(s) | Op::GraphEnd(s) if s.index() >= p.scopes.len() => {
                bad(format!("no scope {}", s.0))
            }
            _ => {}
        }
    }
    sink.fact(RuleId::Form, p.instrs.len() as u64);
}

fn tables(p: &Program, sink: &mut Sink) {
    let mut bad = |what: String| sink.violation(RuleId::Form, None, None, || what);
    if p.streams
        .first()
        .is_none_or(|s| s.kind != StreamKind::Compute)
    {
        bad("the first stream must be the compute stream".into());
    }
    if p.streams.len() > MAX_STREAMS {
        bad(format!(
            "{} streams, at most {MAX_STREAMS} are supported",
            p.streams.len()
        ));
    }
    let mut at = 0;
    for s in &p.sections {
        if s.instrs.start < at
            || s.instrs.end < s.instrs.start
            || s.instrs.end as usize > p.instrs.len()
        {
            bad(format!(
                "section {:?} spans {:?} of {} instructions",
                s.kind,
                s.instrs,
                p.instrs.len()
            ));
        }
        if p.sections.iter().filter(|o| o.kind == s.kind).count() > 1 {
            bad(format!("section {:?} exists twice", s.kind));
        }
        at = s.instrs.end;
    }
    for (i, b) in p.buffers.iter().enumerate() {
        let holds = match b.holds {
            Holds::Param(x) => x.index() < p.params.len(),
            Holds::Group(x) => x.index() < p.groups.len(),
            Holds::Storage(_) | Holds::Const(_) | Holds::Named(_) => true,
        };
        if b.stream.index() >= p.streams.len() || b.unit.index() >= p.units.len() || !holds {
            bad(format!(
                "b{i}: stream {}, unit {} or contents {:?} do not exist",
                b.stream.0, b.unit.0, b.holds
            ));
        }
    }
    for (i, a) in p.accesses.iter().enumerate() {
        if let Some(what) = access(p, *a) {
            bad(format!("operand {i}: {what}"));
        }
    }
    for (i, c) in p.collectives.iter().enumerate() {
        let empty = c.parts.is_empty() != (c.kind == CollectiveKind::Barrier);
        if c.comm.index() >= p.communicators.len() || empty {
            bad(format!(
                "collective {i}: no communicator {} or no parts",
                c.comm.0
            ));
        }
        let selects = match c.sent.map(|s| s.of) {
            None => !c.kind.pushes(),
            Some(SelectedRows::Pushed(_)) => c.kind.pushes(),
            Some(SelectedRows::Counted(_)) => c.kind == CollectiveKind::AllToAll,
        };
        if !selects {
            bad(format!(
                "collective {i}: {} without choices of rows, or another kind with them",
                c.kind.name()
            ));
        }
        for part in c.operands() {
            if let Some(what) = access(p, part.input).or_else(|| access(p, part.output)) {
                bad(format!("collective {i}: {what}"));
            }
        }
    }
    for (i, c) in p.copies.iter().enumerate() {
        if let Some(what) = access(p, c.from).or_else(|| access(p, c.to)) {
            bad(format!("copy {i}: {what}"));
        } else if c.from.bytes != c.to.bytes {
            bad(format!(
                "copy {i}: {} bytes into {}",
                c.from.bytes, c.to.bytes
            ));
        }
    }
    for (i, g) in p.groups.iter().enumerate() {
        if g.unit.index() >= p.units.len() || g.params.iter().any(|x| x.index() >= p.params.len()) {
            bad(format!("group {i}: unit or parameters do not exist"));
        }
    }
    for u in &p.units {
        if u.groups.iter().any(|g| g.index() >= p.groups.len()) {
            bad(format!("unit {}: group does not exist", u.name));
        }
    }
    sink.fact(
        RuleId::Form,
        (p.buffers.len() + p.accesses.len() + p.collectives.len() + p.copies.len()) as u64,
    );
}

fn access(p: &Program, a: Access) -> Option<String> {
    let Some(b) = p.buffers.get(a.buffer.index()) else {
        return Some(format!("no buffer b{}", a.buffer.0));
    };
    // End of the last rank's range.
    let ranks = a.per_rank.map_or(1, |r| p.meta.mesh.size(r.axis()));
    let end = u64::from(ranks)
        .checked_mul(a.step().max(a.bytes))
        .and_then(|x| a.offset.checked_add(x));
    match end.map(|end| end - a.per_rank.map_or(0, |r| r.gap())) {
        Some(end) if end <= b.bytes.0 => None,
        _ => Some(format!(
            "{ranks} times {} bytes from {} leave b{} of {}",
            a.bytes, a.offset, a.buffer.0, b.bytes.0
        )),
    }
}

/// How far the body of a kernel extends into each operand of a launch.
#[derive(Default)]
struct Operands {
    reads: Vec<Reach>,
    writes: Vec<Reach>,
}

impl Operands {
    fn of(kernel: &Kernel) -> Self {
        let mut of = Self::default();
        let ops = kernel.body.iter();
        let slots = ops.flat_map(|op| op.inputs.iter().chain(&op.outputs));
        let offsets = kernel.used_rows.as_ref().map(|used| &used.offsets);
        for slot in slots.chain(offsets) {
            let (to, n) = match slot.place {
                Place::Read(n) => (&mut of.reads, usize::from(n)),
                Place::Write(n) => (&mut of.writes, usize::from(n)),
                Place::Register(_) => continue,
            };
            if to.len() <= n {
                to.resize(n + 1, Reach::default());
            }
            to[n].extend(slot);
        }
        of
    }
}

/// Extent from the start of an operand to the end of what a body uses of it.
#[derive(Clone, Copy, Default)]
struct Reach {
    elements: u64,
    bytes: u64,
}

impl Reach {
    fn extend(&mut self, slot: &Slot) {
        let extent = match &slot.strides[..] {
            [] => slot.shape.iter().product(),
            apart => strides::extent(&slot.shape, apart),
        };
        let elements = slot.offset + extent;
        self.elements = self.elements.max(elements);
        self.bytes = self.bytes.max(elements * slot.dtype.size());
    }

    /// Returns the size in bytes in a buffer. A gradient has the type of its buffer; see
    /// Note [Stored gradients].
    fn bytes(self, of: &Buffer) -> u64 {
        match of.role {
            Role::FullGrad | Role::MainGrad => self.elements * of.dtype.size(),
            _ => self.bytes,
        }
    }
}
