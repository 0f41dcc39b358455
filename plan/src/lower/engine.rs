//! Differences between engines, for code that several engines share.

use crate::ir::DType;

/// Properties of a policy's engine that do not depend on its schedule.
pub(crate) struct Engine {
    /// Whether a framework runs on the host. Its dispatch, hooks and optimizer then take host time,
    /// and the optimizer keeps state per parameter, with a step counter on the device.
    pub(crate) framework: bool,
    /// Whether the optimizer's kernel scales gradients by their norm and writes compute weights
    /// together with main weights. In other engines, these are separate kernels.
    pub(crate) fused_optimizer: bool,
    /// Whether a gradient norm that is only reported is computed after the updates, so that it does
    /// not delay them.
    pub(crate) late_norm: bool,
    /// Whether sharded gradients only live from the first reduction of a step to its optimizer.
    pub(crate) frees_gradients: bool,
    /// Why library workspaces (cuBLAS, attention backward) do not come from PyTorch's allocator, if
    /// the engine plans them itself.
    pub(crate) own_workspaces: Option<&'static str>,
    /// Whether persistent memory is planned if transient memory is.
    pub(crate) plans_persistent: bool,
    /// Whether parameters stay sharded with every strategy, as in torch, whose ZeRO-2 is ZeRO-3
    /// without resharding.
    pub(crate) shards_params: bool,
    /// Whether main weights have a separate buffer even if compute weights have the same dtype.
    pub(crate) separate_main_params: bool,
    /// Whether the outer axis reduces a copy of the gradient in the communication dtype
    /// (`hsdp_comm_gbuf`), which a queue frees. Other engines reduce the gradient itself.
    pub(crate) copies_for_comm: bool,
    /// Whether a collective multiplies gradients of a dtype before it sums them (`PremulSum`).
    pub(crate) premultiplies: fn(DType) -> bool,
    /// Whether a collective over the inner axis averages gradients that it cannot multiply, given
    /// the number of ranks on the outer axis. Otherwise, a kernel scales them.
    pub(crate) averages: fn(u32) -> bool,
    /// Whether the root reshards after forward like other units.
    pub(crate) reshards_root: bool,
    /// Whether frozen parameters also have main weights.
    pub(crate) separate_frozen_main: bool,
    /// Whether hooks on saved tensors decide which activations are offloaded, instead of the plan.
    pub(crate) saved_tensor_hooks: bool,
}

impl Engine {
    /// Returns whether library workspaces come from PyTorch's allocator on this hardware.
    pub(crate) fn allocates_workspaces(&self, hardware: &str) -> bool {
        self.own_workspaces.is_none() && hardware != "cpu"
    }
}
