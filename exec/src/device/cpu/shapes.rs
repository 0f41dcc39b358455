//! Shapes of the parameters behind operands, for kernels that split by parameter.

use shardlab_plan::ir::{Access, Holds, InstrId, OpKind, Shape, ShardOp};
use shardlab_plan::program::{Op, Program};

/// By launch: shapes of the parameters that a `CopyOut` writes or a `ChunkCat` reads.
pub(super) struct Shapes {
    shapes: Vec<Shape>,
    /// By instruction, ascending: its range of `shapes`.
    of: Vec<(InstrId, u32, u32)>,
}

impl Shapes {
    pub(super) fn new(program: &Program) -> Self {
        let mut all = Self {
            shapes: Vec::new(),
            of: Vec::new(),
        };
        for (i, instr) in program.instrs.iter().enumerate() {
            let Op::Launch { kernel, .. } = instr.op else {
                continue;
            };
            let body = &program.kernels[kernel.index()].body;
            let operands = match body.first().map(|b| b.op) {
                Some(OpKind::Shard(ShardOp::CopyOut { .. })) => program.writes(&instr.op),
                Some(OpKind::Shard(ShardOp::ChunkCat { .. })) => program.reads(&instr.op),
                _ => continue,
            };
            let from = all.shapes.len() as u32;
            all.shapes
                .extend(operands.iter().map(|a| shape(program, a)));
            all.of
                .push((InstrId(i as u32), from, all.shapes.len() as u32));
        }
        all
    }

    /// Returns the shapes of a launch's operands, in order.
    pub(super) fn of(&self, instr: InstrId) -> &[Shape] {
        match self.of.binary_search_by_key(&instr, |o| o.0) {
            Ok(i) => &self.shapes[self.of[i].1 as usize..self.of[i].2 as usize],
            Err(_) => &[],
        }
    }
}

/// Returns the shape of an operand's parameter. Other buffers count as vectors.
fn shape(program: &Program, access: &Access) -> Shape {
    let buffer = &program.buffers[access.buffer.index()];
    match buffer.holds {
        Holds::Param(p) => program.params[p.index()].shape.clone(),
        _ => Shape::from_slice(&[access.bytes / buffer.dtype.size()]),
    }
}
