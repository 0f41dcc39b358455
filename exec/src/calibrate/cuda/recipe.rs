//! The program of a bench: single kernels and collectives.

use crate::calibrate::single;
use shardlab_plan::ir::{
    Access, AxisSet, Buffer, BufferId, COMPUTE, Collective, CollectiveId, CollectiveKind, CommId,
    DType, DeviceMesh, Holds, InstrId, KernelClass, KernelId, OpKind, Pool, RankGroup, ReduceOp,
    Role, StreamId, UnitId,
};
use shardlab_plan::program::{Communicator, Instr, Op, Phase, Program, Rule, Section, SectionKind};
use shardlab_plan::units::Bytes;
use smallvec::SmallVec;

/// Allocator address of the bench's memory.
pub(super) const BASE: u64 = 1 << 21;
/// Bytes of the memory: both sides of the largest collective, and the operands of a large GEMM.
pub(super) const MEMORY: u64 = 12 << 30;
/// The stream of collectives; [`COMPUTE`] is the first.
pub(super) const SIDE: StreamId = StreamId(1);
/// A second stream of collectives, with its own communicator.
pub(super) const OTHER: StreamId = StreamId(2);
/// A second stream of kernels.
pub(super) const COMPUTE_STREAM: StreamId = COMPUTE;
/// Number of events of a program.
pub(super) const EVENTS: u32 = 1024;
/// Alignment of operands, in bytes.
const ALIGN: u64 = 512;

/// A single kernel of the program, and the location of its operands.
#[derive(Clone, Debug)]
pub(super) struct Single {
    pub(super) instr: InstrId,
    pub(super) kernel: KernelId,
    pub(super) reads: u32,
    /// Offset, bytes and type of each operand.
    pub(super) operands: Vec<(u64, usize, DType)>,
}

/// A program under construction.
pub(super) struct Recipe {
    program: Program,
}

/// Shape and element type of an operand.
pub(super) type Operand = (Vec<u64>, DType);

impl Recipe {
    pub(super) fn new(ranks: u32) -> Result<Self, String> {
        let text = format!(
            "[model]\nfamily = \"llama\"\nlayers = 1\nhidden = 64\nheads = 4\nffn = 128\nvocab = 128\n\
             [train]\nseq_len = 16\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = {}\n",
            ranks.max(2)
        );
        let scenario =
            shardlab_plan::scenario::parse("bench", &text, &[]).map_err(|e| e.to_string())?;
        let mut program = shardlab_plan::plan(&scenario).map_err(|e| e.to_string())?;
        program.meta.mesh = DeviceMesh::data_parallel(ranks, 1);
        program.streams.truncate(3);
        // NCCL creates only the communicators that a collective uses.
        program.communicators = ["bench", "other"]
            .map(|name| Communicator {
                name: name.to_owned(),
                axes: AxisSet::DATA,
                ranks: RankGroup {
                    size: ranks,
                    stride: 1,
                },
                ..program.communicators[0].clone()
            })
            .to_vec();
        program.kernels.clear();
        program.buffers.clear();
        program.accesses.clear();
        program.collectives.clear();
        program.copies.clear();
        program.scopes.clear();
        program.instrs.clear();
        program.groups.clear();
        program.params.clear();
        (program.loss, program.eval_loss) = (None, None);
        program.events = EVENTS;
        program.double_buffer_copies = 0;
        Ok(Self { program })
    }

    /// Requests kernels with a fixed order of sums.
    pub(super) fn sum_in_fixed_order(&mut self) {
        self.program.meta.deterministic = true;
    }

    /// Adds a kernel of one operation.
    pub(super) fn kernel(
        &mut self,
        op: OpKind,
        class: KernelClass,
        dtype: DType,
        ins: &[Operand],
        outs: &[Operand],
    ) -> Single {
        let p = &mut self.program;
        let kernel = KernelId(p.kernels.len() as u32);
        p.kernels.push(single::kernel(op, class, dtype, ins, outs));
        let instr = InstrId(p.instrs.len() as u32);
        let reads = p.accesses.len() as u32;
        let mut at = 0;
        let mut operands = Vec::new();
        for (shape, dtype) in ins.iter().chain(outs) {
            let bytes = shape.iter().product::<u64>() * dtype.size();
            let buffer = BufferId(p.buffers.len() as u32);
            p.buffers.push(Buffer {
                role: Role::Temporary,
                bytes: Bytes(bytes),
                dtype: *dtype,
                align: ALIGN as u32,
                pool: Pool::Caching,
                stream: COMPUTE,
                unit: UnitId(0),
                holds: Holds::Named("operand"),
                key: buffer.0,
            });
            p.accesses.push(Access {
                buffer,
                offset: 0,
                bytes,
                per_rank: None,
            });
            operands.push((at, bytes as usize, *dtype));
            at += bytes.next_multiple_of(ALIGN);
        }
        p.instrs.push(Instr {
            op: Op::Launch {
                kernel,
                stream: COMPUTE,
                reads,
                writes: reads + ins.len() as u32,
                end: p.accesses.len() as u32,
            },
            unit: UnitId(0),
            micro_batch: 0,
            phase: Phase::Forward,
            rule: Rule::Model,
        });
        Single {
            instr,
            kernel,
            reads: ins.len() as u32,
            operands,
        }
    }

    /// Stores matrices that a kernel reads column by column.
    pub(super) fn by_column(&mut self, single: &Single, inputs: &[usize]) {
        let body = &mut self.program.kernels[single.kernel.index()].body[0];
        for &n in inputs {
            let slot = &mut body.inputs[n];
            slot.strides = SmallVec::from_slice(&[1, slot.shape[0]]);
        }
    }

    /// Adds a collective whose full side has `bytes` bytes.
    pub(super) fn collective(
        &mut self,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> CollectiveId {
        self.collective_on(CommId(0), kind, dtype, bytes)
    }

    /// Adds a collective on stream [`OTHER`].
    pub(super) fn other_collective(
        &mut self,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> CollectiveId {
        self.collective_on(CommId(1), kind, dtype, bytes)
    }

    fn collective_on(
        &mut self,
        comm: CommId,
        kind: CollectiveKind,
        dtype: DType,
        bytes: u64,
    ) -> CollectiveId {
        let id = CollectiveId(self.program.collectives.len() as u32);
        self.program.collectives.push(Collective {
            kind,
            comm,
            reduce: if kind.reduces() {
                ReduceOp::Avg
            } else {
                ReduceOp::None
            },
            dtype,
            bytes: Bytes(bytes),
            parts: SmallVec::new(),
            sent: None,
        });
        id
    }

    pub(super) fn finish(mut self) -> Program {
        let end = self.program.instrs.len() as u32;
        self.program.sections = vec![
            Section {
                kind: SectionKind::Init,
                instrs: 0..0,
            },
            Section {
                kind: SectionKind::Steady,
                instrs: 0..end,
            },
        ];
        self.program
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bench_has_a_stream_and_a_communicator_for_each_of_two_collectives() {
        for ranks in [1, 2, 4] {
            let mut recipe = Recipe::new(ranks).unwrap();
            let one = recipe.collective(CollectiveKind::AllGather, DType::Bf16, 1 << 20);
            let other =
                recipe.other_collective(CollectiveKind::ReduceScatter, DType::Bf16, 1 << 20);
            let program = recipe.finish();
            assert_eq!(program.streams.len(), OTHER.index() + 1);
            let comm = |c: CollectiveId| program.collectives[c.index()].comm;
            assert_ne!(comm(one), comm(other));
            assert!(
                [one, other]
                    .iter()
                    .all(|c| program.communicators[comm(*c).index()].ranks.size == ranks)
            );
        }
    }
}
