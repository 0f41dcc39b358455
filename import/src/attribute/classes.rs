//! Classifies the names of operators and annotations.
//!
//! Sources: `torch/distributed/fsdp/_fully_shard` (FSDP2's `FSDP::…` ranges),
//! `torch/optim/optimizer.py` (`Optimizer.step#…`), `torch/csrc/autograd/engine.cpp`
//! (`autograd::engine::evaluate_function: …`).

/// Meaning of a name. Units are spelled as by FSDP2; the root's name is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// `FSDP::pre_forward (UNIT)`.
    PreForward(String),
    /// `FSDP::post_forward (UNIT)`.
    PostForward(String),
    /// Another forward range of FSDP2 that names a unit: its all-gather, or the copy-out.
    OfUnit(String),
    /// `FSDP::forward_prefetch for UNIT`.
    ForwardPrefetch(String),
    /// `FSDP::pre_backward (UNIT)`.
    PreBackward(String),
    /// `FSDP::post_backward_… (UNIT)`.
    PostBackward(String),
    /// `FSDP::backward_prefetch for UNIT`.
    BackwardPrefetch(String),
    /// `FSDP::root_pre_forward` and similar ranges of the root.
    RootForward,
    /// `FSDP::root_post_backward_callback`.
    RootBackward,
    /// `Optimizer.step#NAME.step`.
    OptimizerStep(String),
    /// `Optimizer.zero_grad#…`.
    ZeroGrad,
    /// `ProfilerStep#N`.
    ProfilerStep,
    /// A node of the backward graph.
    BackwardNode,
    /// An operator of the optimizer.
    OptimizerOp,
    /// The gradient norm.
    Norm,
    /// A wait for a collective.
    Wait,
    /// Anything else.
    Other,
}

impl Class {
    pub(super) fn of(name: &str) -> Self {
        if let Some(rest) = name.strip_prefix("FSDP::") {
            return fsdp2(rest);
        }
        if let Some(rest) = name.strip_prefix("Optimizer.step#") {
            return Self::OptimizerStep(rest.trim_end_matches(".step").to_owned());
        }
        if name.starts_with("Optimizer.zero_grad") {
            return Self::ZeroGrad;
        }
        if name.starts_with("ProfilerStep") {
            return Self::ProfilerStep;
        }
        if name.starts_with("autograd::engine::evaluate_function") {
            return Self::BackwardNode;
        }
        if name.contains("wait_tensor") {
            return Self::Wait;
        }
        let op = name.rsplit("::").next().unwrap_or(name);
        let fused = |of: &str| op.starts_with("_fused_") && op.contains(of);
        if fused("adam") || fused("sgd") || fused("adagrad") || op.contains("multi_tensor_adam") {
            return Self::OptimizerOp;
        }
        if op.starts_with("_foreach_addcdiv")
            || op.starts_with("_foreach_addcmul")
            || op.starts_with("_foreach_lerp")
        {
            return Self::OptimizerOp;
        }
        if op == "linalg_vector_norm"
            || op.starts_with("_foreach_norm")
            || op.contains("multi_tensor_l2norm")
        {
            return Self::Norm;
        }
        Self::Other
    }
}

fn fsdp2(rest: &str) -> Class {
    if let Some((what, unit)) = rest.split_once(" for ") {
        return match what {
            "forward_prefetch" => Class::ForwardPrefetch(unit.to_owned()),
            "backward_prefetch" => Class::BackwardPrefetch(unit.to_owned()),
            _ => Class::OfUnit(unit.to_owned()),
        };
    }
    let (what, unit) = match rest.split_once(" (") {
        // Units with several parameter groups append ` [pg=N]`.
        Some((what, unit)) => (what, unit.rsplit_once(')').map_or(unit, |(u, _)| u)),
        None => (rest, ""),
    };
    let unit = unit.to_owned();
    match what {
        "pre_forward" => Class::PreForward(unit),
        "post_forward" => Class::PostForward(unit),
        "pre_backward" => Class::PreBackward(unit),
        "root_pre_forward" => Class::RootForward,
        "root_post_backward_callback" | "finalize_backward" => Class::RootBackward,
        // Without the name of a unit, these belong to the range around them.
        "cast_forward_inputs" | "cast_forward_outputs" | "inputs_to_device" => Class::Other,
        what if what.starts_with("post_backward") => Class::PostBackward(unit),
        _ => Class::OfUnit(unit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood() {
        let unit = |s: &str| s.to_owned();
        for (name, expected) in [
            (
                "FSDP::pre_forward (layers.0)",
                Class::PreForward(unit("layers.0")),
            ),
            ("FSDP::pre_forward", Class::PreForward(unit(""))),
            (
                "FSDP::post_forward (norm, out)",
                Class::PostForward(unit("norm, out")),
            ),
            (
                "FSDP::all_gather (layers.3) [pg=1]",
                Class::OfUnit(unit("layers.3")),
            ),
            (
                "FSDP::backward_prefetch for layers.2",
                Class::BackwardPrefetch(unit("layers.2")),
            ),
            (
                "FSDP::forward_prefetch for a.b",
                Class::ForwardPrefetch(unit("a.b")),
            ),
            (
                "FSDP::post_backward_rs_wait (x)",
                Class::PostBackward(unit("x")),
            ),
            ("FSDP::root_post_backward_callback", Class::RootBackward),
            ("FSDP::finalize_backward", Class::RootBackward),
            ("FSDP::root_pre_forward", Class::RootForward),
            (
                "Optimizer.step#AdamW.step",
                Class::OptimizerStep(unit("AdamW")),
            ),
            ("Optimizer.zero_grad#AdamW.zero_grad", Class::ZeroGrad),
            ("ProfilerStep#3", Class::ProfilerStep),
            (
                "autograd::engine::evaluate_function: MmBackward0",
                Class::BackwardNode,
            ),
            ("aten::_fused_adamw_", Class::OptimizerOp),
            ("aten::_foreach_norm", Class::Norm),
            ("_c10d_functional::wait_tensor", Class::Wait),
            ("aten::mm", Class::Other),
        ] {
            assert_eq!(Class::of(name), expected, "{name}");
        }
    }
}
