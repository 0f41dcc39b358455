//! Kernels of the sharding engine, which are not part of a model's graph.

use super::pointwise::elementwise;
use super::signature::Signature;
use super::{OpDef, Operands};
use crate::ir::{KernelClass, ShardOp};

impl OpDef for ShardOp {
    fn name(&self) -> &'static str {
        Self::name(*self)
    }

    fn signature(&self) -> Signature {
        Signature::new(&[], &[])
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }
}
