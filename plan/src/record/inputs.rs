//! Computes when the input of a span was ready.

use super::Span;
use crate::ir::{BufferId, InstrId, KernelClass};
use crate::program::{Op, Program};
use crate::units::Picos;
use std::cell::OnceCell;

/// The inputs of a step's spans.
pub struct Inputs<'a> {
    program: &'a Program,
    spans: &'a [Span],
    begin: Picos,
    /// Spans that write a buffer, by buffer, in issue order. Computed on first use.
    writers: OnceCell<Vec<Vec<u32>>>,
}

impl<'a> Inputs<'a> {
    /// Creates the inputs for these spans, in issue order, of a step that starts at `begin`.
    #[must_use]
    pub const fn new(program: &'a Program, spans: &'a [Span], begin: Picos) -> Self {
        Self {
            program,
            spans,
            begin,
            writers: OnceCell::new(),
        }
    }

    /// Returns the earliest time at which the input of span `x` could be ready. Data that this step
    /// computes are ready when the kernel that computed them has ended, and all other data are
    /// ready from the start of the step. Copies into a bucket count as part of the transfer,
    /// because they could have run as soon as their source was ready.
    ///
    /// # Panics
    /// Panics if there is no such span.
    #[must_use]
    pub fn ready(&self, x: u32) -> Picos {
        let Some(fed) = self.fed_by(x) else {
            return self.begin;
        };
        let span = &self.spans[fed as usize];
        if moves(self.program, span.instr) {
            // Feeders precede what they feed, so the recursion ends.
            self.ready(fed) + (span.end - span.start)
        } else {
            span.end
        }
    }

    /// Returns the last span before this one that wrote a buffer that it reads.
    fn fed_by(&self, x: u32) -> Option<u32> {
        let writers = self.writers.get_or_init(|| self.writers());
        let read = buffers(self.program, self.spans[x as usize].instr, Side::Read);
        read.filter_map(|b| {
            let all = writers.get(b.index())?;
            let before = all.partition_point(|&w| w < x);
            Some(all[before.checked_sub(1)?])
        })
        .max()
    }

    fn writers(&self) -> Vec<Vec<u32>> {
        let mut all: Vec<Vec<u32>> = vec![Vec::new(); self.program.buffers.len()];
        for (i, span) in self.spans.iter().enumerate() {
            for buffer in buffers(self.program, span.instr, Side::Written) {
                if let Some(of) = all.get_mut(buffer.index()) {
                    of.push(i as u32);
                }
            }
        }
        all
    }
}

/// Returns whether an instruction only moves data that others have computed.
fn moves(program: &Program, instr: InstrId) -> bool {
    match program.instrs[instr.index()].op {
        Op::Launch { kernel, .. } => matches!(
            program.kernels[kernel.index()].class,
            KernelClass::Copy | KernelClass::MultiCopy
        ),
        // An allocation with a span copies data from the host, see [`Program::upload`].
        Op::Copy { .. } | Op::Alloc(_) => true,
        _ => false,
    }
}

#[derive(Clone, Copy)]
enum Side {
    Read,
    Written,
}

impl Side {
    fn of<T>(self, read: T, written: T) -> T {
        match self {
            Self::Read => read,
            Self::Written => written,
        }
    }
}

fn buffers(program: &Program, instr: InstrId, side: Side) -> impl Iterator<Item = BufferId> {
    let op = &program.instrs[instr.index()].op;
    let accesses = side.of(program.reads(op), program.writes(op));
    let (parts, copy) = match *op {
        Op::Collective { id, .. } => (program.collectives[id.index()].parts.as_slice(), None),
        Op::Copy { id, .. } => (Default::default(), Some(&program.copies[id.index()])),
        _ => (Default::default(), None),
    };
    let parts = parts.iter().map(move |p| side.of(p.input, p.output));
    // What selects the rows that move.
    let by = match *op {
        Op::Collective { id, .. } => program.collectives[id.index()].sent.map(|s| s.by),
        _ => None,
    };
    let by = by.map(|by| [by.input, by.output]).into_iter().flatten();
    let by = by.filter(move |_| matches!(side, Side::Read));
    let copy = copy.into_iter().map(move |c| side.of(c.from, c.to));
    let all = accesses.iter().copied().chain(parts).chain(by).chain(copy);
    let upload = side.of(None, program.upload(instr));
    all.map(|a| a.buffer).chain(upload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::COMPUTE;
    use crate::program::SectionKind;
    use crate::record::Blocker;

    #[test]
    fn an_input_of_the_step_could_have_been_sent_when_the_step_began() {
        let text = "[model]\nfamily = \"linear\"\nlayers = 2\nhidden = 64\n\
            [train]\nmicro_batch = 16\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";
        let scenario = crate::scenario::parse("t", text, &[]).unwrap();
        let program = crate::plan(&scenario).unwrap();
        let steady = program.section(SectionKind::Steady).unwrap();
        let mut ids = steady.instrs.clone().map(InstrId);
        let sent = ids.find(|&i| program.upload(i).is_some()).unwrap();
        let buffer = program.upload(sent);
        let reader = ids.find(|i| {
            let reads = program.reads(&program.instrs[i.index()].op);
            reads.iter().any(|a| Some(a.buffer) == buffer)
        });
        let span = |instr, start, end| Span {
            instr,
            stream: COMPUTE,
            issued: Picos(start),
            ready: Picos(start),
            start: Picos(start),
            end: Picos(end),
            alone: Picos(end - start),
            blocker: Blocker::None,
        };
        // It takes 15 at any position.
        let spans = [span(sent, 30, 45), span(reader.unwrap(), 60, 70)];
        assert_eq!(Inputs::new(&program, &spans, Picos(10)).ready(1), Picos(25));
    }
}
