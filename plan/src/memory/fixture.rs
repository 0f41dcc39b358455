//! Small programs for tests.

use crate::ir::{Buffer, BufferId, COMPUTE, DType, DeviceMesh, Holds, Pool, Role, UnitId};
use crate::program::{Instr, Op, Phase, Program, ProgramMeta, Rule, Section, SectionKind};
use crate::units::{Bytes, Flops};

/// A program of buffers, allocations and frees.
pub(crate) struct Fixture {
    pub(crate) program: Program,
}

pub(crate) fn buffer(pool: Pool, bytes: u64) -> Buffer {
    Buffer {
        role: Role::Temporary,
        bytes: Bytes(bytes),
        dtype: DType::Bf16,
        align: 512,
        pool,
        stream: COMPUTE,
        unit: UnitId(0),
        holds: Holds::Named("test"),
        key: 0,
    }
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let meta = ProgramMeta {
            scenario: String::new(),
            policy: "native",
            hardware: String::new(),
            mesh: DeviceMesh::data_parallel(1, 1),
            gpus_per_node: 1,
            micro_batches: 1,
            tokens: 1,
            model_flops: Flops(0),
            deterministic: false,
            expandable_segments: false,
            reduce_in_flight: 1,
            validate_every: 0,
            steps: 1,
            compute: DType::Bf16,
        };
        let program = Program {
            meta,
            modules: vec![],
            params: vec![],
            units: vec![],
            groups: vec![],
            streams: vec![],
            communicators: vec![],
            kernels: vec![],
            buffers: vec![],
            accesses: vec![],
            collectives: vec![],
            copies: vec![],
            scopes: vec![],
            loss: None,
            eval_loss: None,
            events: 0,
            sections: vec![],
            instrs: vec![],
            double_buffer_copies: 0,
            persist_on_alloc_fail: false,
            placement: Default::default(),
        };
        Self { program }
    }

    /// Adds a buffer with a key of its own.
    pub(crate) fn buffer(&mut self, b: Buffer) -> BufferId {
        let id = BufferId(self.program.buffers.len() as u32);
        self.program.buffers.push(Buffer { key: id.0, ..b });
        id
    }

    /// Adds a section: `+id` allocates, `-id` frees (ids count from 1 here).
    pub(crate) fn section(&mut self, kind: SectionKind, ops: &[i64]) {
        let start = self.program.instrs.len() as u32;
        for &op in ops {
            let id = BufferId(op.unsigned_abs() as u32 - 1);
            let op = if op > 0 { Op::Alloc(id) } else { Op::Free(id) };
            self.program.instrs.push(Instr {
                op,
                unit: UnitId(0),
                micro_batch: 0,
                phase: Phase::Forward,
                rule: Rule::Model,
            });
        }
        let end = self.program.instrs.len() as u32;
        self.program.sections.push(Section {
            kind,
            instrs: start..end,
        });
    }
}
