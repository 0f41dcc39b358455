//! Kernels of the sharding engine, which are not part of a model's graph.

use super::pointwise::elementwise;
use super::signature::Signature;
use super::vjp::backward_only;
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{KernelClass, ShardOp};

impl OpDef for ShardOp {
    fn name(&self) -> &'static str {
        Self::name(*self)
    }

    fn signature(&self) -> Signature {
        Signature::new(&[], &[])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Extern
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        backward_only()
    }
}
