//! Work of the host thread outside kernel launches.

use serde::Serialize;

/// Why the host spends time outside a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostWorkKind {
    /// Framework dispatch of one forward op run eagerly.
    Dispatch,
    /// Framework dispatch of one op by the autograd engine.
    AutogradDispatch,
    /// Guards and entry of a compiled region.
    Guard,
    /// A graph break: leaving compiled code for an opaque hook and coming back.
    GraphBreak,
    /// Body of a sharding hook.
    Hook,
    /// Per-parameter bookkeeping inside a hook.
    HookParam,
    /// Optimizer call.
    OptimizerStep,
    /// Fixed work of a training step (data loader, zero_grad, scalar reads).
    Step,
    /// Python of a module: its call and its own code, without the operators in it.
    Module,
    /// Per-parameter work of an optimizer call, or of clipping.
    OptimizerParam,
    /// Python of a tensor subclass around one weight and gather (torchao).
    Subclass,
}
