//! What the device asks of whoever has the kernels.

use super::context::Context;
use super::driver::RawStream;
use crate::operand::RawRange;
use shardlab_plan::program::{InstrId, KernelId, Program};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Kernels of one rank's program.
pub(crate) trait Bodies: Send {
    /// Enqueues a kernel; capturable. `hyper` is the device address of the step's [`crate::Hyper`].
    ///
    /// # Safety
    /// The promise of [`RawRange`], for device memory.
    unsafe fn launch(
        &mut self,
        instr: InstrId,
        kernel: KernelId,
        operands: (&[RawRange], &[RawRange]),
        hyper: u64,
        stream: RawStream,
    ) -> Result<(), String>;

    /// What kernels found wrong with their inputs (ids out of range); the device is idle.
    fn fault(&mut self) -> Option<String>;

    /// Facts for the run's environment.
    fn facts(&self) -> BTreeMap<String, String>;
}

/// Kernels of a program.
pub(super) fn of(
    _context: &Arc<Context>,
    _program: &Arc<Program>,
) -> Result<Box<dyn Bodies>, String> {
    Err("this build has no kernels for GPUs".to_owned())
}
