//! Results of a pass: values that the host reads back while it issues instructions, and the report.

use super::Rank;
use crate::base::operand::RawRange;
use crate::device::{Command, Device, Stop};
use crate::engine::pass::{PassInputs, PassReport};
use crate::engine::readback::{Counts, Readbacks};
use crate::engine::squares::{self, GradientPart};
use shardlab_plan::ir::{InstrId, StreamId};
use shardlab_plan::program::{Program, Section, SectionKind};
use std::collections::BTreeMap;

/// What a pass still has to read back, and the slots of what it has read.
pub(super) struct Results<'a> {
    readbacks: &'a Readbacks,
    /// Index of the next scalar.
    next_scalar: usize,
    /// Index of the next launch whose gradients are squared.
    next_square: usize,
    /// Requested parts of gradients by the instruction after which they can be read, with its
    /// stream.
    parts: BTreeMap<InstrId, Vec<(usize, StreamId)>>,
    /// Slots of the squares of the requested parts.
    part_slots: Vec<Option<u32>>,
}

impl Results<'_> {
    /// Skips what is read before instruction `to`, because a replayed graph reads it.
    pub(super) fn skip_to(&mut self, to: InstrId) {
        let Readbacks {
            scalars, squares, ..
        } = self.readbacks;
        while scalars.get(self.next_scalar).is_some_and(|s| s.after < to) {
            self.next_scalar += 1;
        }
        while squares.get(self.next_square).is_some_and(|s| s.0 < to) {
            self.next_square += 1;
        }
    }
}

impl<D: Device> Rank<D> {
    /// Returns what a section has to read back.
    pub(super) fn results<'a>(
        &self,
        program: &Program,
        section: &Section,
        readbacks: &'a Readbacks,
        with: &PassInputs<'_>,
    ) -> Results<'a> {
        let requested = &with.inputs.gradient_parts;
        let mut parts: BTreeMap<InstrId, Vec<(usize, StreamId)>> = BTreeMap::new();
        if !requested.is_empty() {
            let places = squares::places(program, section);
            for (n, part) in requested.iter().enumerate() {
                if let Some(&(id, stream)) = places.get(&part.grad) {
                    parts.entry(id).or_default().push((n, stream));
                }
            }
        }
        Results {
            readbacks,
            next_scalar: 0,
            next_square: 0,
            parts,
            part_slots: vec![None; requested.len()],
        }
    }

    /// Reads back what is complete after an instruction.
    pub(super) fn read_back(
        &mut self,
        program: &Program,
        id: InstrId,
        results: &mut Results<'_>,
        with: &PassInputs<'_>,
    ) -> Result<(), Stop> {
        self.read_scalars(id, results)?;
        self.square_gradients(program, id, results)?;
        self.square_parts(program, id, results, with)
    }

    fn read_scalars(&mut self, id: InstrId, results: &mut Results<'_>) -> Result<(), Stop> {
        while let Some(readback) = results.readbacks.scalars.get(results.next_scalar)
            && readback.after == id
        {
            results.next_scalar += 1;
            let command = Command::Read {
                instr: id,
                from: self.range(id, readback.buffer, readback.offset, 4)?,
                slot: readback.slot,
            };
            self.submit(readback.stream, command)?;
        }
        Ok(())
    }

    /// Squares the gradients that an optimizer launch has read.
    fn square_gradients(
        &mut self,
        program: &Program,
        id: InstrId,
        results: &mut Results<'_>,
    ) -> Result<(), Stop> {
        let Some((after, stream, slot, grads)) = results.readbacks.squares.get(results.next_square)
        else {
            return Ok(());
        };
        if *after != id {
            return Ok(());
        }
        results.next_square += 1;
        let range = |a: &u32| {
            let access = &program.accesses[*a as usize];
            let offset = self.offsets.accesses[*a as usize];
            self.range(id, access.buffer, offset, access.bytes)
        };
        let command = Command::Squares {
            instr: id,
            from: grads.iter().map(range).collect::<Result<_, _>>()?,
            slot: *slot,
        };
        self.submit(*stream, command)
    }

    /// Squares the requested parts of gradients that can be read after an instruction.
    fn square_parts(
        &mut self,
        program: &Program,
        id: InstrId,
        results: &mut Results<'_>,
        with: &PassInputs<'_>,
    ) -> Result<(), Stop> {
        for &(part, stream) in results.parts.get(&id).into_iter().flatten() {
            let from = self.part(program, id, &with.inputs.gradient_parts[part])?;
            let slot = results.readbacks.slots + part as u32;
            let command = Command::Squares {
                instr: id,
                from: std::iter::once(from).collect(),
                slot,
            };
            self.submit(stream, command)?;
            results.part_slots[part] = Some(slot);
        }
        Ok(())
    }

    fn part(&self, program: &Program, id: InstrId, part: &GradientPart) -> Result<RawRange, Stop> {
        let start = part.grad.offset_on(&program.meta.mesh, self.id) + part.bytes.start;
        let bytes = part.bytes.end - part.bytes.start;
        self.range(id, part.grad.buffer, start, bytes)
    }

    /// Returns the report of a pass that started, was issued and ended at these times of the
    /// device's clock. The device is idle.
    pub(super) fn report(
        &mut self,
        section: SectionKind,
        [start, issued_at, end]: [u64; 3],
        results: &Results<'_>,
    ) -> PassReport {
        let readbacks = results.readbacks;
        let value = |slot: u32| self.device.slot(slot);
        PassReport {
            section,
            start,
            issued_at,
            end,
            waited: self.pass.waited,
            losses: readbacks.losses.iter().map(|&s| value(s)).collect(),
            square: readbacks.norm.map(value),
            squares: readbacks
                .squares
                .iter()
                .map(|s| f64::from(value(s.2)))
                .sum(),
            part_squares: results
                .part_slots
                .iter()
                .map(|slot| slot.map_or(f32::NAN, value))
                .collect(),
            counts: readbacks
                .counts
                .iter()
                .map(|c: &Counts| c.of(value))
                .collect(),
            memory: self.memory.end(),
            tasks: std::mem::take(&mut self.pass.issued),
            times: if self.pass.record {
                self.device.times()
            } else {
                Vec::new()
            },
            behind: std::mem::take(&mut self.pass.behind),
            samples: std::mem::take(&mut self.pass.samples),
        }
    }
}
