//! The values of options that every search tries.

use shardlab_plan::scenario::keys as key_table;

/// Values of a key that are worth trying.
enum Values {
    /// All that the key table lists.
    All,
    /// Those of a key with numbers or many spellings.
    These(&'static [&'static str]),
}

use Values::{All, These};

/// Key that gathers the same codes in another way. The results of layers do not change.
pub(crate) const GATHERS_OF_CODES: &str = "precision.float8_all_gather";
/// Key that saves the same codes for backward. The results of layers do not change.
pub(crate) const SAVED_CODES: &str = "precision.float8_saved";
/// Key of the parts of blocks that selective recompute runs again.
pub(crate) const MODULES: &str = "train.recompute_modules";
/// Key of the state that is kept in host memory.
pub(crate) const OFFLOAD: &str = "fsdp.offload";

const DEPTHS: &[&str] = &["implicit", "0", "1", "2", "4"];

const OPTIONS: [(&str, Values); 38] = [
    ("fsdp.policy", All),
    ("fsdp.strategy", All),
    ("fsdp.units", These(&["block", "block_and_ends", "root"])),
    (
        "fsdp.reshard_after_forward",
        These(&["true", "false", "auto"]),
    ),
    ("fsdp.reshard_root", All),
    ("fsdp.reshard_after_backward", All),
    ("fsdp.prefetch_forward", These(DEPTHS)),
    ("fsdp.prefetch_backward", These(DEPTHS)),
    ("fsdp.prefetch_next_step", These(&["0", "1", "2"])),
    ("fsdp.gradient_sync", All),
    ("fsdp.async_reduce", All),
    ("fsdp.reduce_in_flight", These(&["1", "2", "4"])),
    ("fsdp.separate_communicators", All),
    ("fsdp.copy_engine_all_gather", All),
    ("fsdp.copy_engine_reduce_scatter", All),
    ("fsdp.fuse_reduce_into_optimizer", All),
    ("fsdp.cast_before_all_gather", All),
    ("fsdp.copy_in_stream", All),
    ("fsdp.unify_comm_stream", All),
    ("fsdp.optimizer_in_backward", All),
    ("fsdp.allocator", All),
    ("fsdp.expandable_segments", All),
    // Least state first.
    (
        OFFLOAD,
        These(&[
            "[]",
            "[\"optimizer\"]",
            "[\"params\", \"grads\", \"optimizer\"]",
        ]),
    ),
    ("precision.reduce_dtype", These(&["f32", "bf16"])),
    // The keys of codes have no effect without a recipe.
    (
        "precision.float8_recipe",
        These(&["none", "tensorwise", "rowwise", "blockwise", "mxfp8"]),
    ),
    (GATHERS_OF_CODES, All),
    ("compile.mode", All),
    ("compile.fuse_projections", All),
    ("compile.gemm_accumulate", All),
    ("compile.mix_order_reductions", All),
    ("compile.gemm_epilogue_fusion", All),
    (
        "compile.cuda_graph",
        These(&[
            "off",
            "full_iteration",
            "[\"block\"]",
            "[\"attn\", \"mlp\"]",
        ]),
    ),
    ("train.recompute", All),
    ("train.recompute_layers", All),
    // Megatron-LM's default first, then parts that are cheap to run again, then whole layers.
    (
        MODULES,
        These(&[
            "[\"core_attn\"]",
            "[\"layernorm\"]",
            "[\"core_attn\", \"layernorm\"]",
            "[\"mla_up_proj\"]",
            "[\"moe_act\"]",
            "[\"layernorm\", \"moe_act\"]",
            "[\"layernorm\", \"mla_up_proj\", \"moe_act\"]",
            "[\"shared_experts\"]",
            "[\"mlp\"]",
            "[\"moe\"]",
        ]),
    ),
    ("train.activation_offload", All),
    ("train.loss", All),
    (
        "train.loss_chunk_tokens",
        These(&["auto", "1024", "4096", "16384"]),
    ),
];

/// Returns the paths of all options.
pub(crate) fn keys() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|(key, _)| *key)
}

/// Returns the values of an option, in the syntax of `--set`.
///
/// # Panics
///
/// If no option has this path.
pub(crate) fn values(path: &str) -> impl Iterator<Item = &'static str> {
    let option = OPTIONS.iter().find(|(key, _)| *key == path);
    let (_, values) = option.unwrap_or_else(|| panic!("{path} is not an option"));
    let (listed, these) = match values {
        All => (key_table().iter().find(|k| k.path() == path), &[][..]),
        These(these) => (None, *these),
    };
    let listed = listed.into_iter().flat_map(|key| key.values());
    listed.chain(these.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_a_key_with_values() {
        for path in keys() {
            assert!(key_table().iter().any(|k| k.path() == path), "{path}");
            assert!(values(path).next().is_some(), "{path}");
        }
    }
}
