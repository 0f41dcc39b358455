//! Describes instructions and ranges in messages.

use crate::ir::{Access, BufferId, InstrId};
use crate::program::{Op, Phase, Program};
use std::fmt::Write;

/// The place where the walk encountered an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Name of the section.
    pub(super) section: &'static str,
    /// Number of the pass over that section, starting at 1.
    pub(super) pass: u32,
}

/// Describes an instruction with its stream, unit, phase, micro-batch and rule.
pub(super) fn instr(p: &Program, id: InstrId, place: Option<Place>) -> String {
    let i = &p.instrs[id.index()];
    let mut out = format!("#{} ", id.0);
    let stream = match i.op {
        Op::Alloc(b) => {
            let _ = write!(out, "alloc {}", buffer(p, b));
            None
        }
        Op::Free(b) => {
            let _ = write!(out, "free {}", buffer(p, b));
            None
        }
        Op::Launch { kernel, stream, .. } => {
            let _ = write!(out, "launch {}", p.kernels[kernel.index()].name);
            Some(stream)
        }
        Op::Collective { id, stream } => {
            let c = &p.collectives[id.index()];
            let _ = write!(
                out,
                "{} over {}",
                c.kind.name(),
                p.communicators[c.comm.index()].name
            );
            Some(stream)
        }
        Op::Copy { stream, .. } => {
            out.push_str("copy");
            Some(stream)
        }
        Op::Record { event, stream } => {
            let _ = write!(out, "record e{}", event.0);
            Some(stream)
        }
        Op::Wait { event, stream } => {
            let _ = write!(out, "wait e{}", event.0);
            Some(stream)
        }
        Op::HostWait(event) => {
            let _ = write!(out, "host wait e{}", event.0);
            None
        }
        Op::HostWork { .. } => {
            out.push_str("host work");
            None
        }
        Op::GraphBegin(s) => {
            let _ = write!(out, "begin scope {}", p.scopes[s.index()].name);
            None
        }
        Op::GraphEnd(s) => {
            let _ = write!(out, "end scope {}", p.scopes[s.index()].name);
            None
        }
    };
    if let Some(s) = stream {
        let _ = write!(out, " on {}", p.streams[s.index()].kind.name());
    }
    let unit = p.units.get(i.unit.index()).map_or("-", |u| u.name.as_str());
    let _ = write!(out, " ({unit}, {}", i.phase.name());
    if !matches!(i.phase, Phase::Init) {
        let _ = write!(out, ", micro-batch {}", i.micro_batch);
    }
    let _ = write!(out, ", {}", i.rule.name());
    if let Some(Place { section, pass }) = place {
        let _ = write!(out, "; {section} pass {pass}");
    }
    out.push(')');
    out
}

/// Describes a buffer by name and number.
pub(super) fn buffer(p: &Program, id: BufferId) -> String {
    let name = p.buffer_name(id);
    let number = format!("b{}", id.0);
    if name == number {
        format!("{} {number}", p.buffers[id.index()].role.name())
    } else {
        format!("`{name}` ({number})")
    }
}

/// Describes a range of a buffer.
pub(super) fn range(p: &Program, a: Access) -> String {
    let all = a.offset == 0 && a.bytes == p.buffers[a.buffer.index()].bytes.0;
    let name = buffer(p, a.buffer);
    if all {
        name
    } else {
        format!("{name} bytes [{}, {})", a.offset, a.offset + a.bytes)
    }
}
