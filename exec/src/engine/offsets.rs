//! Offsets of ranges on a given rank.

use super::ExecError;
use shardlab_plan::ir::Access;
use shardlab_plan::program::Program;

/// Offsets of the input and the output of a collective or copy.
pub(crate) type PartOffsets = (u64, u64);

/// Offsets of all of a program's ranges on a rank.
#[derive(Clone, Debug)]
pub(crate) struct Offsets {
    /// By access.
    pub(crate) accesses: Vec<u64>,
    /// By collective: of its parts, then of the choices of rows that it pushes.
    pub(crate) parts: Vec<Vec<PartOffsets>>,
    /// By copy.
    pub(crate) copies: Vec<PartOffsets>,
}

impl Offsets {
    /// Computes every offset, and checks that each range is within its buffer.
    pub(crate) fn new(program: &Program, rank: u32) -> Result<Self, ExecError> {
        let shift = |a: &Access| -> Result<u64, ExecError> {
            let offset = a.offset_on(&program.meta.mesh, rank);
            let buffer = program.buffers.get(a.buffer.index());
            let size = buffer.map_or(0, |b| b.bytes.0);
            if buffer.is_none() || offset.checked_add(a.bytes).is_none_or(|end| end > size) {
                return Err(ExecError::Program(format!(
                    "on rank {rank}, bytes {offset}+{} are outside buffer {} of {size} bytes",
                    a.bytes, a.buffer.0
                )));
            }
            Ok(offset)
        };
        Ok(Self {
            accesses: program
                .accesses
                .iter()
                .map(shift)
                .collect::<Result<_, _>>()?,
            parts: program
                .collectives
                .iter()
                .map(|c| {
                    let part =
                        |p: &shardlab_plan::ir::Part| Ok((shift(&p.input)?, shift(&p.output)?));
                    c.operands().map(part).collect()
                })
                .collect::<Result<_, _>>()?,
            copies: program
                .copies
                .iter()
                .map(|c| Ok((shift(&c.from)?, shift(&c.to)?)))
                .collect::<Result<_, ExecError>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::{Build, WORLD};
    use shardlab_plan::ir::{AxisId, BufferId, Role};

    #[test]
    fn ranges_move_with_the_coordinate_of_their_axis() {
        let mut b = Build::new(WORLD, 2, 2);
        let buffer = b.buffer(Role::MainGrad, 64);
        b.sub_communicator(2);
        let p = b.finish();
        let at = |rank, axis: Option<AxisId>| {
            let access = Access {
                buffer,
                offset: 8,
                bytes: 16,
                per_rank: axis.map(Into::into),
            };
            access.offset_on(&p.meta.mesh, rank)
        };
        // Rank 3 of 2 x 2: outer 1, inner 1; rank 2: outer 1, inner 0.
        assert_eq!(at(3, None), 8);
        assert_eq!(at(3, Some(AxisId::DP_SHARD)), 24);
        assert_eq!(at(2, Some(AxisId::DP_SHARD)), 8);
        assert_eq!(at(2, Some(AxisId::DP_OUTER)), 24);
        assert_eq!(at(3, Some(AxisId::SUB_SHARD)), 24);
    }

    #[test]
    fn a_range_outside_its_buffer_is_rejected_on_the_affected_rank() {
        let mut b = Build::new(WORLD, 4, 1);
        let buffer = b.buffer(Role::MainGrad, 64);
        let mut p = b.finish();
        let inner = |bytes| Access {
            buffer,
            offset: 0,
            bytes,
            per_rank: Some(AxisId::DP_SHARD.into()),
        };
        p.accesses = vec![inner(16)];
        assert_eq!(Offsets::new(&p, 3).unwrap().accesses, [48]);
        p.accesses = vec![inner(24)];
        assert!(Offsets::new(&p, 1).is_ok());
        assert!(Offsets::new(&p, 2).is_err());
        p.accesses = vec![Access {
            buffer: BufferId(9),
            ..inner(1)
        }];
        assert!(Offsets::new(&p, 0).is_err());
    }
}
