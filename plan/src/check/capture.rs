//! Captured scopes: forks, joins and stable addresses.

use super::describe;
use super::rules::RuleId;
use super::walk::{Walk, Work};
use crate::ir::{Access, InstrId};
use crate::program::{Op, Program, SectionKind};
use std::collections::HashMap;

/// Addresses that a captured scope has seen.
pub(super) struct Captured {
    /// Addresses by operand of a launch. 0 means not seen. Other addresses are stored plus 1,
    /// because allocators do not give address 0 to two buffers.
    operands: Vec<u64>,
    /// Addresses of all other accesses, by instruction and operand.
    others: HashMap<(InstrId, u32), u64>,
    pub(super) open: Option<InstrId>,
    /// Whether the scope is a real capture (not the first, eager pass).
    replayed: bool,
}

impl Captured {
    pub(super) fn new(p: &Program) -> Self {
        let operands = if p.scopes.is_empty() {
            Vec::new()
        } else {
            vec![0; p.accesses.len()]
        };
        Self {
            operands,
            others: HashMap::new(),
            open: None,
            replayed: false,
        }
    }
}

impl Walk<'_> {
    pub(super) fn begin_scope(&mut self, id: InstrId) {
        if let Some(first) = self.captured.open {
            self.violate(RuleId::CaptureJoin, id, Some(first), || {
                "captured scopes do not nest".into()
            });
            return;
        }
        self.captured.open = Some(id);
        self.sink.fact(RuleId::CaptureHost, 1);
        // The first step runs eagerly. From the second step on, a scope is one graph launch.
        self.captured.replayed = self.pass_now().kind != SectionKind::First;
        if self.captured.replayed {
            self.order.begin_scope();
        }
    }

    pub(super) fn end_scope(&mut self, id: InstrId) {
        self.sink.fact(RuleId::CaptureJoin, 1);
        if self.captured.open.take().is_none() {
            self.violate(RuleId::CaptureJoin, id, None, || {
                "ends a scope that has not started".into()
            });
            return;
        }
        if !std::mem::take(&mut self.captured.replayed) {
            return;
        }
        for u in self.order.end_scope() {
            let (other, them) = (self.id_at(u.at), self.describe_at(u.at));
            let stream = self.p.streams[self.order.stream_of(u.lane as usize).index()]
                .kind
                .name();
            self.violate(RuleId::CaptureJoin, id, Some(other), || {
                format!("{stream} was forked into the scope and is not joined to compute: {them} is left open")
            });
        }
    }

    /// Ends a pass. No scope may still be open.
    pub(super) fn close_scope(&mut self) {
        if let Some(id) = self.captured.open.take() {
            self.violate(RuleId::CaptureJoin, id, None, || {
                "the scope does not end in its section".into()
            });
            if std::mem::take(&mut self.captured.replayed) {
                self.order.end_scope();
            }
        }
    }

    /// Checks that a wait of the host is outside of captured scopes.
    pub(super) fn no_host_wait_in_scope(&mut self, id: InstrId) {
        if let Some(scope) = self.captured.open {
            self.violate(RuleId::CaptureHost, id, Some(scope), || {
                "the host waits inside a captured scope, where a replay does not".into()
            });
        }
    }

    /// Checks an access within a captured scope: its address must be that of the previous pass; see
    /// Note [Captured addresses].
    pub(super) fn scope_address(&mut self, work: &mut Work, a: Access) {
        if !self.captured.replayed {
            return;
        }
        let n = work.operand;
        work.operand += 1;
        self.sink.fact(RuleId::CaptureAddress, 1);
        let address = self.cells[a.buffer.index()].address + a.offset + 1;
        let before = match work.instr.op {
            Op::Launch { reads, .. } => {
                std::mem::replace(&mut self.captured.operands[(reads + n) as usize], address)
            }
            _ => self
                .captured
                .others
                .insert((work.id, n), address)
                .unwrap_or(0),
        };
        if before != 0 && before != address {
            let (p, alloc) = (self.p, self.cells[a.buffer.index()].allocated);
            self.violate(RuleId::CaptureAddress, work.id, alloc, || {
                format!(
                    "{} is at {}, but was at {} when the scope ran before; a replay would use the old address",
                    describe::range(p, a),
                    address - 1,
                    before - 1
                )
            });
        }
    }
}
