//! Facts about a policy that do not need lowering.

use crate::config::{
    AllocatorKind, CompileMode, Dispatcher, FrozenType, GradientSync, PolicyKind, Prefetch,
    Reshard, Scenario, Strategy, UnitPattern, Units, Variant,
};
use crate::ir::DType;
use crate::lower::Lowering;
use crate::lower::engine::Engine;

/// A policy.
pub(crate) struct PolicySpec {
    /// The policy.
    pub(crate) kind: PolicyKind,
    /// Variant: which of the policy's engines this is.
    pub(crate) variant: Variant,
    /// Defaults of keys.
    pub(crate) defaults: Defaults,
    /// Rules for the other keys of a scenario.
    pub(crate) rules: Rules,
    /// Returns whether the engine's code fixes an option: a scenario can have this value of the key
    /// (a path), but a user of the engine cannot set it.
    pub(crate) fixes: fn(key: &str, value: &str) -> bool,
    /// Help text: what to change so that buffers keep their addresses, which captured scopes
    /// require.
    pub(crate) fixed_addresses: &'static str,
    /// Properties of the engine that also hold in compile mode full.
    pub(crate) engine: Engine,
    /// The schedule outside compile mode full.
    pub(crate) lowering: Lowering,
}

/// Defaults that depend on the policy.
pub(crate) struct Defaults {
    /// `prefetch_forward` and `prefetch_backward`.
    pub(crate) prefetch: Prefetch,
    /// `reduce_in_flight`.
    pub(crate) reduce_in_flight: u32,
    /// `gradient_sync`.
    pub(crate) gradient_sync: GradientSync,
    /// `reshard_after_forward`, based on the strategy.
    pub(crate) reshard: fn(Strategy) -> Reshard,
    /// `separate_communicators`.
    pub(crate) separate_communicators: bool,
    /// `allocator`.
    pub(crate) allocator: AllocatorKind,
    /// `main_grads`, based on the compute dtype.
    pub(crate) main_grads: fn(DType) -> DType,
    /// `comm_grads`, based on the compute dtype and `main_grads`.
    pub(crate) comm_grads: fn(DType, DType) -> DType,
    /// `moe.dispatcher`.
    pub(crate) dispatcher: Dispatcher,
    /// `moe.capacity_factor`, unless tokens are gathered.
    pub(crate) capacity_factor: Option<f64>,
    /// `moe.shared_expert_overlap`.
    pub(crate) shared_expert_overlap: bool,
    /// Whether compiled code merges and fuses everything that this project's compiler can. Other
    /// engines keep the code that their own compiler generates.
    pub(crate) optimizes_code: bool,
}

/// Rules of a schedule for the keys of a scenario.
pub(crate) struct Rules {
    /// Options of `[fsdp]` that this schedule supports, among those that some schedules lack.
    pub(crate) options: &'static [&'static str],
    /// Values that the schedule rejects.
    pub(crate) refuses: &'static [Refusal],
    /// Keys that have no effect.
    pub(crate) without_effect: &'static [WithoutEffect],
}

impl Rules {
    /// Returns whether the schedule supports an option of `[fsdp]`.
    pub(crate) fn has(&self, option: &str) -> bool {
        self.options.contains(&option)
    }
}

/// Returns whether a key is an option of the native engine that PyTorch and Megatron-FSDP lack.
pub(crate) fn is_native_option(key: &str) -> bool {
    matches!(
        key,
        // torchao saves inputs in the compute type, and Transformer Engine in 8 bits.
        "precision.float8_saved"
            | "fsdp.async_reduce"
            | "fsdp.copy_engine_all_gather"
            | "fsdp.copy_engine_reduce_scatter"
            | "fsdp.cast_before_all_gather"
            | "fsdp.copy_in_stream"
            | "fsdp.optimizer_in_backward"
            | "fsdp.prefetch_next_step"
            | "fsdp.reduce_in_flight"
            | "fsdp.fuse_reduce_into_optimizer"
            | "compile.gemm_accumulate"
            | "compile.gemm_epilogue_fusion"
            | "compile.fuse_projections"
            | "compile.mix_order_reductions"
    )
}

/// Returns whether a key is an option that both experimental engines of Megatron-FSDP fix.
pub(crate) fn is_fixed_by_megatron_v2(key: &str) -> bool {
    let fixed = matches!(
        key,
        "compile.mode"
            | "fsdp.allocator"
            | "fsdp.reshard_after_forward"
            | "fsdp.separate_communicators"
            | "fsdp.strategy"
            | "fsdp.unify_comm_stream"
            | "precision.reduce_dtype"
    );
    fixed || is_native_option(key)
}

/// Returns whether a pattern of `fsdp.units` satisfies a predicate.
pub(crate) fn some_unit(s: &Scenario, of: fn(&UnitPattern) -> bool) -> bool {
    matches!(&s.fsdp.units, Units::Patterns(all) if all.iter().any(of))
}

/// Returns whether micro-batches share a backward.
pub(crate) fn joins_backwards(s: &Scenario) -> bool {
    s.train.joint_backward && s.train.grad_accum > 1
}

/// Returns whether micro-batches skip blocks.
pub(crate) fn skips_blocks(s: &Scenario) -> bool {
    !s.train.skipped_blocks.is_empty()
}

/// A value that a schedule rejects.
pub(crate) struct Refusal {
    /// Paths of the keys, starting with the rejected one.
    pub(crate) keys: &'static [&'static str],
    /// Whether the scenario has the value.
    pub(crate) when: fn(&Scenario) -> bool,
    /// What is wrong.
    pub(crate) message: &'static str,
    /// What to write instead.
    pub(crate) help: &'static str,
}

/// A key that has no effect, for any value other than its default.
pub(crate) struct WithoutEffect {
    /// Path of the key.
    pub(crate) key: &'static str,
    /// Path of the key that is the reason.
    pub(crate) because_of: &'static str,
    /// Predicate for the values that have no effect; `None` for all values.
    pub(crate) only: Option<fn(&Scenario) -> bool>,
    /// Why it has no effect.
    pub(crate) why: &'static str,
}

/// Returns whether frozen parameters are kept in the compute dtype, regardless of
/// `precision.frozen_params`.
pub(crate) fn keeps_frozen_as_gathered(s: &Scenario) -> bool {
    let packed = s.precision.frozen_params.and_then(FrozenType::packed);
    !fully_compiled(s) && packed.is_none()
}

/// Returns whether the schedule of compile mode full replaces the policy's own.
pub(crate) fn fully_compiled(s: &Scenario) -> bool {
    s.compile.mode == CompileMode::Full
}
