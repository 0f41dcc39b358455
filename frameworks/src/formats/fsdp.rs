//! FSDP options as Accelerate, the Trainer and Axolotl write them.

use crate::convert::{SAVING, full_recompute, if_true, set};
use crate::table::{Effect, Fact, Fallback, Format, Key, Table, To, key, lost, quoted, with};
use crate::tree::{Node, Value};

pub(super) const KEYS: &[Key] = &[
    key("version", To::Fact(Fact::FsdpVersion)),
    with("sharding_strategy", strategy),
    with("reshard_after_forward", reshard),
    with("auto_wrap_policy", policy),
    with("transformer_layer_cls_to_wrap", blocks),
    with("transformer_cls_names_to_wrap", blocks),
    lost(
        "min_num_params",
        "units by size are predicted as one unit per block",
    ),
    lost("ignored_modules", "all parameters are predicted as sharded"),
    with("offload_params", offload),
    with("cpu_offload", offload),
    with("activation_checkpointing", full_recompute),
    lost(
        "activation_checkpointing_offload",
        "activations are predicted on the device",
    ),
    with("forward_prefetch", forward_prefetch),
    with("limit_all_gathers", limited_gathers),
    with("backward_prefetch", backward_prefetch),
];

pub(super) const ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "state_dict_type",
            "final_state_dict_type",
            "state_dict_config",
            "optim_state_dict_config",
            "cpu_ram_efficient_loading",
            "sync_module_states",
            "param_init_fn",
        ],
    ),
    (
        "FSDP1 only, without effect on a prediction",
        &["use_orig_params"],
    ),
    (
        "part of the precision that is given elsewhere",
        &["mixed_precision_policy"],
    ),
    (
        "copies to the host are predicted from pinned memory",
        &["cpu_offload_pin_memory"],
    ),
    (
        "XLA only",
        &[
            "xla",
            "xla_fsdp_settings",
            "xla_fsdp_v2",
            "xla_fsdp_grad_ckpt",
        ],
    ),
];

/// Returns the table of FSDP keys, with their optional prefix.
pub(super) const fn table(under: &'static str) -> Table {
    Table {
        under,
        prefix: "fsdp_",
        keys: KEYS,
        asides: ASIDES,
    }
}

/// A file that contains only FSDP options; `fsdp_config` of the Trainer can name one.
pub(crate) static FSDP: Format = Format {
    name: "the Trainer's fsdp_config",
    tables: &[table("")],
    engine: None,
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: &[TORCH_SEGMENTS],
};

/// PyTorch's default for `expandable_segments`.
pub(super) const TORCH_SEGMENTS: Fallback = Fallback {
    key: "fsdp.expandable_segments",
    value: "false",
    why: "PyTorch's default",
};

/// Reads PyTorch's `ShardingStrategy`.
pub(super) fn strategy(node: &Node) -> Result<Effect, String> {
    let name = node.full();
    let number = match name.rsplit('.').next().unwrap_or(&name) {
        "FULL_SHARD" | "full_shard" | "1" => 1,
        "SHARD_GRAD_OP" | "shard_grad_op" | "2" => 2,
        "NO_SHARD" | "no_shard" | "3" => 3,
        "HYBRID_SHARD" | "hybrid_shard" | "4" => 4,
        "HYBRID_SHARD_ZERO2" | "_HYBRID_SHARD_ZERO2" | "hybrid_shard_zero2" | "5" => 5,
        _ => {
            let names = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2";
            return Err(node.expected(names));
        }
    };
    Ok(Effect::Fact(Fact::Strategy, number))
}

/// Reads whether full parameters are freed after forward.
pub(super) fn reshard(node: &Node) -> Result<Effect, String> {
    match &node.value {
        // FSDP1 in Accelerate 1.15 uses this key for the strategy.
        Value::Text(text) if text.contains("SHARD") => strategy(node),
        _ => Ok(Effect::Fact(Fact::Reshard, node.truth()?.into())),
    }
}

/// Reads which modules are units.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
pub(super) fn policy(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().to_ascii_lowercase().as_str() {
        "transformer_based_wrap" => set("fsdp.units", "block"),
        "no_wrap" => set("fsdp.units", "root"),
        _ => Effect::Assume(
            "fsdp.units",
            quoted("block"),
            "units by size are predicted as one unit per block",
        ),
    })
}

/// Reads whether FSDP1 prefetches in forward.
pub(super) fn forward_prefetch(node: &Node) -> Result<Effect, String> {
    let one = Effect::Set("fsdp.prefetch_forward", "1".to_owned());
    if_true(node, one)
}

/// Reads whether the host of FSDP1 waits before it issues more than two gathers ahead.
pub(super) fn limited_gathers(node: &Node) -> Result<Effect, String> {
    Ok(if node.truth()? {
        Effect::Aside("the default")
    } else {
        Effect::Lost(
            "gathers are predicted as limited: without the limit, more of them are in memory",
        )
    })
}

/// Reads PyTorch's `BackwardPrefetch`.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
pub(super) fn backward_prefetch(node: &Node) -> Result<Effect, String> {
    let name = node.full().to_ascii_lowercase();
    Ok(match name.rsplit('.').next().unwrap_or(&name) {
        "backward_pre" => Effect::Aside("the default"),
        "no_prefetch" | "none" => Effect::Set("fsdp.prefetch_backward", "0".to_owned()),
        _ => Effect::Lost(BACKWARD_POST),
    })
}

/// Why `BACKWARD_POST` is an approximation.
pub(crate) const BACKWARD_POST: &str =
    "gathers after the current unit's gradients are predicted as before";

/// Reads the classes of blocks that are units.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
pub(super) fn blocks(node: &Node) -> Result<Effect, String> {
    let several = node.words().is_some_and(|w| w.contains([',', ' ']));
    Ok(if several {
        Effect::Assume(
            "fsdp.units",
            quoted("block"),
            "each block is predicted as a unit",
        )
    } else {
        set("fsdp.units", "block")
    })
}

/// Reads whether parameters, gradients and optimizer state are in host memory.
pub(super) fn offload(node: &Node) -> Result<Effect, String> {
    Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
}

/// Reads the Trainer's `fsdp`: true, or words such as `full_shard auto_wrap offload`.
pub(super) fn words(node: &Node) -> Result<Effect, String> {
    if let Value::Bool(on) = node.value {
        let two = Effect::All(vec![
            Effect::Engine(crate::table::Engine::Fsdp),
            Effect::Fact(Fact::FsdpVersion, 2),
        ]);
        return Ok(if on { two } else { Effect::Aside("off") });
    }
    let words = node
        .words()
        .ok_or_else(|| node.expected("true or a list of options"))?;
    let mut effects = vec![Effect::Engine(crate::table::Engine::Fsdp)];
    for word in words.split_whitespace() {
        effects.push(match word {
            "full_shard" => Effect::Fact(Fact::Strategy, 1),
            "shard_grad_op" => Effect::Fact(Fact::Strategy, 2),
            "no_shard" => Effect::Fact(Fact::Strategy, 3),
            "hybrid_shard" => Effect::Fact(Fact::Strategy, 4),
            "hybrid_shard_zero2" => Effect::Fact(Fact::Strategy, 5),
            "auto_wrap" => set("fsdp.units", "block"),
            "offload" => Effect::Fact(Fact::OffloadAll, 1),
            _ => {
                let names = "full_shard, shard_grad_op, hybrid_shard, auto_wrap or offload";
                return Err(format!("expected {names}, got `{word}`"));
            }
        });
    }
    Ok(Effect::All(effects))
}
