//! Failures of a rank and their messages.

use super::Rank;
use crate::base::fault::FaultKind;
use crate::base::operand::RawRange;
use crate::device::cpu::first_nan;
use crate::device::{Device, Failure, FailureKind, Stop};
use crate::engine::readback::Readbacks;
use shardlab_plan::ir::{BufferId, Holds, InstrId};
use shardlab_plan::program::Program;
use shardlab_plan::shard::placements::shard_axis;
use std::sync::Arc;

impl<D: Device> Rank<D> {
    /// Checks the program's NaN flags.
    pub(super) fn check_flags(&mut self, readbacks: &Readbacks, now: InstrId) -> Result<(), Stop> {
        let found = readbacks
            .flags
            .iter()
            .find(|(i, slot)| *i < now && self.device.slot(*slot) != 0.0);
        let Some(&(instr, _)) = found else {
            return Ok(());
        };
        let program = Arc::clone(&self.program);
        let reads = program.reads(&program.instrs[instr.index()].op);
        let what = reads
            .first()
            .map_or_else(String::new, |a| self.describe_nan(&program, a.buffer));
        Err(self.fail(FailureKind::Nan, instr, format!("found in {what}")))
    }

    /// Returns the name of a buffer and, if possible, the parameter of its first NaN.
    pub(super) fn describe_nan(&self, program: &Program, buffer: BufferId) -> String {
        let b = &program.buffers[buffer.index()];
        let name = program.buffer_name(buffer);
        let Holds::Group(g) = b.holds else {
            return name;
        };
        let group = &program.groups[g.index()];
        let base = self.buffers.base[buffer.index()];
        let at = (base != 0).then(|| {
            let range = RawRange {
                ptr: std::ptr::with_exposed_provenance_mut(base),
                bytes: b.bytes.0 as usize,
                dtype: b.dtype,
            };
            first_nan(&self.device.read(range), b.dtype)
        });
        let full = group.layout.full_numel() * b.dtype.size() == b.bytes.0;
        let shard = if full {
            0
        } else {
            self.shard_start(program, group)
        };
        if let (Some(Some(at)), shardlab_plan::shard::Layout::Flat(layout)) = (at, &group.layout) {
            let at = at as u64 + shard;
            let item = layout
                .items
                .iter()
                .zip(&group.params)
                .find(|(i, _)| (i.offset..i.offset + i.numel).contains(&at));
            if let Some((_, p)) = item {
                return format!("{name}: parameter {}", program.params[p.index()].name);
            }
        }
        let names: Vec<&str> = group
            .params
            .iter()
            .map(|p| program.params[p.index()].name.as_str())
            .collect();
        format!("{name}: one of {}", names.join(", "))
    }

    pub(super) fn shard_start(
        &self,
        program: &Program,
        group: &shardlab_plan::shard::Group,
    ) -> u64 {
        let first = &program.params[group.params[0].index()];
        let axis = shard_axis(first.placements);
        let coordinate = program.meta.mesh.coordinate(axis, self.id);
        u64::from(coordinate) * group.layout.shard_numel()
    }

    pub(super) fn inject_faults(&mut self, id: InstrId) -> Result<(), Stop> {
        if let Some(delays) = &mut self.delays {
            delays.maybe_sleep();
        }
        let Some(fault) = self.options.fault else {
            return Ok(());
        };
        if fault.rank != self.id || fault.instr != id {
            return Ok(());
        }
        match fault.kind {
            FaultKind::Panic => panic!("injected panic on the host"),
            FaultKind::Error => {
                Err(self.fail(FailureKind::Injected, id, "an injected error".to_owned()))
            }
            FaultKind::Stall | FaultKind::Absent => {
                self.abort.idle_until_aborted();
                Err(Stop::Aborted)
            }
            FaultKind::DevicePanic => Ok(()),
        }
    }

    pub(super) fn refused(
        &self,
        program: &Program,
        id: InstrId,
        buffer: BufferId,
        kind: FailureKind,
        e: &str,
    ) -> Stop {
        let mut what = format!("{}: {e}", program.buffer_name(buffer));
        if kind == FailureKind::OutOfMemory {
            let alive: Vec<String> = self
                .memory
                .ledger
                .live_by_role()
                .iter()
                .map(|(role, bytes)| format!("{} {bytes}", role.name()))
                .collect();
            if !alive.is_empty() {
                what = format!("{what}; in use: {}", alive.join(", "));
            }
            what = format!("{what}; {}", crate::engine::memory::needs(program));
        }
        self.fail(kind, id, what)
    }

    pub(super) fn fail(&self, kind: FailureKind, id: InstrId, message: String) -> Stop {
        let known = id.index() < self.program.instrs.len();
        self.abort.fail(Failure {
            kind,
            rank: self.id,
            stream: None,
            instr: known.then_some(id),
            text: self.program.op_text(id),
            message,
        });
        Stop::Aborted
    }
}
