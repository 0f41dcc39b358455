//! Rules for blocks and lists of layers.

use crate::config::{Model, NormPosition, Residual};
use crate::models::spec::Conflict;

/// Refuses layers with a shared block that lack its sizes, or are not those of Zamba 2.
pub(super) fn check_shared_block(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if !o
        .layers
        .layer_types
        .iter()
        .any(|kind| kind.has_shared_block())
    {
        return Ok(());
    }
    if o.shared_block.is_none() || o.ssm.is_none() {
        let message = "layers of type shared_attention need the sizes of `shared_block` and `ssm`";
        let keys = &["layer_types", "shared_block", "ssm"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    let plain = o.residual == Residual::Sequential
        && o.norm_position == NormPosition::Before
        && o.streams == 0
        && o.layers.layer_groups == 0
        && o.positions.rope_local_theta.is_none();
    if !plain {
        let message = "layers of type shared_attention need `residual` = \"sequential\" and `norm_position` = \"before\", without residual streams";
        let keys = &["layer_types", "residual", "norm_position", "streams"];
        return Err(Conflict::new(keys, message.to_owned()));
    }
    Ok(())
}

/// Refuses heads that do not divide the widths of RWKV.
pub(super) fn check_rwkv(m: &Model) -> Result<(), Conflict> {
    let Some(of) = &m.options.rwkv else {
        return Ok(());
    };
    for (name, width) in [("keys", of.keys), ("values", of.values)] {
        if !width.is_multiple_of(of.heads) {
            let message = format!("`heads` ({}) must divide `{name}` ({width})", of.heads);
            return Err(Conflict::new(&["rwkv"], message));
        }
    }
    if of.version == 7 && of.keys != of.values {
        let message = "RWKV-7 has values as wide as keys".to_owned();
        return Err(Conflict::new(&["rwkv"], message));
    }
    Ok(())
}

/// Refuses lists of sizes that are too short or do not fit the heads.
pub(super) fn check_lists(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    let lists = [
        ("layer_kv_heads", &o.layers.layer_kv_heads),
        ("layer_ffn", &o.layers.layer_ffn),
    ];
    for (name, list) in lists {
        if !list.is_empty() && list.len() < m.layers as usize {
            let message = format!(
                "`{name}` has {} numbers for {} layers",
                list.len(),
                m.layers
            );
            return Err(Conflict::new(
                &["layer_kv_heads", "layer_ffn", "layers"],
                message,
            ));
        }
    }
    let misfit = |kv: &&u64| **kv > 0 && !m.heads.is_multiple_of(**kv);
    if let Some(kv) = o.layers.layer_kv_heads.iter().find(misfit) {
        let message = format!(
            "`heads` ({}) is not divisible by {kv} of `layer_kv_heads`",
            m.heads
        );
        return Err(Conflict::new(&["layer_kv_heads", "heads"], message));
    }
    if !lists.iter().all(|(_, list)| list.is_empty()) && o.residual != Residual::Sequential {
        let message = "layers that differ need `residual` = \"sequential\"".to_owned();
        return Err(Conflict::new(
            &["residual", "layer_kv_heads", "layer_ffn"],
            message,
        ));
    }
    Ok(())
}

/// Refuses norms of sums where blocks add nothing up.
pub(super) fn check_sum(m: &Model) -> Result<(), Conflict> {
    let o = &m.options;
    if o.residual != Residual::Sequential && o.norm_position == NormPosition::Sum {
        let message = "`norm_position` = \"sum\" needs `residual` = \"sequential\"".to_owned();
        return Err(Conflict::new(&["norm_position", "residual"], message));
    }
    Ok(())
}
