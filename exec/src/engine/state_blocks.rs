//! Determines whether kernels can update the 8-bit optimizer states of a program.

use shardlab_plan::ir::{DType, Holds};
use shardlab_plan::program::Program;

/// Checks that every 8-bit state belongs to one tensor in one parameter group: a block has one
/// scale, and a kernel updates whole blocks.
///
/// # Errors
/// What is not so, and a way out.
pub(super) fn check(program: &Program) -> Result<(), String> {
    let numel =
        |a: &shardlab_plan::ir::Access| a.bytes / program.buffers[a.buffer.index()].dtype.size();
    let several_groups = program.params.iter().any(|p| p.group > 0);
    for instr in &program.instrs {
        for tensor in program.updates(&instr.op) {
            let Some(state) = tensor.state.first() else {
                continue;
            };
            let buffer = &program.buffers[state.buffer.index()];
            if buffer.dtype != DType::U8 {
                continue;
            }
            if numel(state) != numel(&tensor.weight) {
                return Err(
                    "8-bit states belong to several tensors: set precision.main_params to another \
                     type than precision.param_dtype, or fsdp.policy = \"fsdp2\""
                        .to_owned(),
                );
            }
            if several_groups && matches!(buffer.holds, Holds::Group(_)) {
                return Err(
                    "8-bit states belong to several parameter groups: set fsdp.policy = \"fsdp2\", \
                     whose states are those of one parameter each, or have one parameter group"
                        .to_owned(),
                );
            }
        }
    }
    Ok(())
}
