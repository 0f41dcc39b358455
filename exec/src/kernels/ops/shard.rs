//! Kernels of the sharding engine, on byte ranges.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::kernels::error::OperandError;
use crate::kernels::shard;
use shardlab_plan::ir::ShardOp;

impl CpuKernel for ShardOp {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let o = call.whole()?;
        shard::run(*self, o.ctx, o.reads, o.writes)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for ShardOp {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Ranges(*self)
    }
}
