//! Inputs of launches on the CPU in addition to their operands.

use super::shapes::Shapes;
use crate::base::operand::{Hyper, LaunchContext};
use shardlab_plan::ir::{InstrId, KernelId, Shape};
use shardlab_plan::program::{GroupRun, Program, ScaleRun};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Inputs for the launches of a program on a rank.
pub(crate) struct LaunchContexts {
    program: Arc<Program>,
    data_rank: u32,
    shapes: Arc<Shapes>,
    /// By optimizer launch: parameter groups of its weights on this rank.
    groups: BTreeMap<InstrId, Vec<GroupRun>>,
    /// By launch of Muon: shapes of the matrices on this rank.
    matrices: BTreeMap<InstrId, Vec<Shape>>,
    /// By launch on shards of 8-bit weights: scales of the weights on this rank.
    scales: BTreeMap<InstrId, Vec<ScaleRun>>,
}

impl LaunchContexts {
    /// Returns the contexts for a device with one rank, in addition to a GPU.
    ///
    /// # Errors
    /// Returns a message if a launch's operands are not those of parameters.
    #[cfg(feature = "cuda")]
    pub(crate) fn new(program: &Arc<Program>, rank: u32) -> Result<Self, String> {
        Self::with(program, &Arc::new(Shapes::new(program)), rank)
    }

    /// Shares the shapes with other ranks.
    ///
    /// # Errors
    /// Returns a message if a launch's operands are not those of parameters.
    pub(super) fn with(
        program: &Arc<Program>,
        shapes: &Arc<Shapes>,
        rank: u32,
    ) -> Result<Self, String> {
        Ok(Self {
            program: Arc::clone(program),
            data_rank: program.meta.mesh.data_rank(rank),
            shapes: Arc::clone(shapes),
            groups: program.group_runs(rank).map_err(|e| e.to_string())?,
            matrices: program.matrix_shapes(rank).map_err(|e| e.to_string())?,
            scales: program.scale_runs(rank).map_err(|e| e.to_string())?,
        })
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the context of a launch.
    pub(crate) fn of(&self, instr: InstrId, kernel: KernelId, hyper: Hyper) -> LaunchContext<'_> {
        LaunchContext {
            kernel: &self.program.kernels[kernel.index()],
            data_rank: self.data_rank,
            hyper,
            shapes: match self.matrices.get(&instr) {
                Some(matrices) => matrices,
                None => self.shapes.of(instr),
            },
            groups: self.groups.get(&instr).map_or(&[], Vec::as_slice),
            scales: self.scales.get(&instr).map_or(&[], Vec::as_slice),
        }
    }
}
