//! `[precision]`.

use crate::ir::DType;
use serde::Serialize;

/// `[precision]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Dtype of gathered parameters, activations and GEMMs.
    pub compute: DType,
    /// Dtype of the main (optimizer) weights; `None` (scenario: `"none"`): the optimizer updates
    /// the compute weights.
    pub main_params: Option<DType>,
    /// Dtype in which policy fsdp2 and compile mode full keep the shards of parameters that are not
    /// trained; `None` for that of trained ones. (Other policies keep them as they compute.)
    pub frozen_params: Option<DType>,
    /// Dtype in which gradients are kept between micro-batches.
    pub main_grads: DType,
    /// Dtype in which gradients are reduced over the inner axis (policies fsdp2 and megatron: over
    /// both).
    pub comm_grads: DType,
    /// Dtype of the optimizer moments.
    pub moments: DType,
    /// Every sum has a fixed order on every device.
    pub deterministic: bool,
}
