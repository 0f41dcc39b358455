//! Work of the host thread outside kernel launches.

use serde::Serialize;

/// Defines [`HostWorkKind`], with every kind and its name.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Reason why the host spends time outside of a launch.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum HostWorkKind {
            $($(#[$doc])* $kind,)*
        }

        impl HostWorkKind {
            /// Every kind, in the order of their numbers.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$kind),*];

            /// Returns the name in JSON.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    /// Framework dispatch of one forward op that runs eagerly.
    Dispatch = "dispatch",
    /// Framework dispatch of one op by the autograd engine.
    AutogradDispatch = "autograd_dispatch",
    /// Guards and entry of a compiled region.
    Guard = "guard",
    /// A graph break: leaving compiled code for an opaque hook, and returning.
    GraphBreak = "graph_break",
    /// Body of a sharding hook.
    Hook = "hook",
    /// Per-parameter bookkeeping inside a hook.
    HookParam = "hook_param",
    /// Optimizer call.
    OptimizerStep = "optimizer_step",
    /// Fixed work of a training step (data loader, zero_grad, scalar reads).
    Step = "step",
    /// Python code of a module: its call and its own code, without the operators in it.
    Module = "module",
    /// Per-parameter work of an optimizer call or of clipping.
    OptimizerParam = "optimizer_param",
    /// Python code of a tensor subclass around one weight and gather (torchao).
    Subclass = "subclass",
    /// Filling one KiB of the table for a copy between many tensors and a collective's buffer.
    CopyTable = "copy_table",
    /// Inductor's Python code around one kernel of a compiled region: its output and its arguments.
    CompiledKernel = "compiled_kernel",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_numbers_of_their_places_and_the_names_of_json() {
        for (i, kind) in HostWorkKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{}\"", kind.name()));
        }
    }
}
