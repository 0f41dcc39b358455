//! Rules for `[mesh]`.

use super::{Checked, refuse};
use crate::config::{Dispatcher, Family, OuterStrategy, Reshard, Scenario};
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::moe;

/// Most ranks of a mesh.
pub(crate) const MAX_RANKS: u64 = 1 << 20;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let (world, node) = (s.mesh.world(), s.mesh.gpus_per_node);
    if world > node && world % node != 0 {
        let message = format!("{world} ranks do not fill nodes of {node} GPUs");
        return Err(d
            .conflict(
                &[Key::GpusPerNode, Key::DpOuter, Key::DpShard, Key::Tp],
                message,
            )
            .with_help(format!(
                "`gpus_per_node` must divide {}",
                rank_factors(s.mesh.tp)
            )));
    }
    tensor_parallel(s, d)?;
    expert_parallel(s, d)?;
    peers(s, d)?;
    capacity(s, d)
}

/// What the number of ranks is the product of.
pub(crate) const fn rank_factors(tp: u32) -> &'static str {
    if tp > 1 {
        "dp_shard * dp_replicate * tp"
    } else {
        "dp_shard * dp_replicate"
    }
}

/// Refuses to divide experts that there are none of, or not evenly.
fn expert_parallel(s: &Scenario, d: &Document) -> Checked {
    let ep = s.mesh.ep;
    if ep == 1 {
        return Ok(());
    }
    let Some(dimension) = s.model.family.spec().expert_parallel else {
        let family = s.model.family.name();
        let message = format!("`ep` = {ep} divides experts, which family {family} does not have");
        let able = Family::named_all().filter(|(_, f)| f.spec().expert_parallel.is_some());
        let able: Vec<&str> = able.map(|(name, _)| name).collect();
        return Err(d
            .conflict(&[Key::Ep, Key::Family], message)
            .with_help(format!("families with experts: {}", able.join(", "))));
    };
    let (name, experts) = dimension(&s.model);
    let ranks = s.mesh.dp_shard;
    let divides_both = |n: &u32| ranks.is_multiple_of(*n) && experts.is_multiple_of(u64::from(*n));
    let (keys, message) = if !ranks.is_multiple_of(ep) {
        let keys = [Key::Ep, Key::DpShard];
        (
            keys,
            format!("`ep` = {ep} does not divide `dp_shard` = {ranks}"),
        )
    } else if !experts.is_multiple_of(u64::from(ep)) {
        let keys = [Key::Ep, Key::Experts];
        (
            keys,
            format!("`ep` = {ep} does not divide `{name}` = {experts}"),
        )
    } else {
        refuse(s, d, "mesh.ep")?;
        if matches!(s.fsdp.reshard_after_forward, Reshard::Group(_)) {
            let keys = [Key::Reshard, Key::Ep];
            let message = format!(
                "`reshard_after_forward` keeps weights within a part of `dp_shard`, but with `ep` = {ep} \
                 experts are not sharded over `dp_shard`"
            );
            return Err(d.conflict(&keys, message).with_help("use true or false"));
        }
        return whole_experts(s, d);
    };
    let legal: Vec<u32> = (1..=ranks).filter(divides_both).collect();
    let nearest = legal
        .iter()
        .min_by_key(|n| (n.abs_diff(ep), u32::MAX - **n));
    let help = format!("the nearest legal value is ep = {}", nearest.unwrap_or(&1));
    Err(d.conflict(&keys, message).with_help(help))
}

/// Refuses to write to memory of GPUs of other nodes, and groups that have different numbers of
/// ranks on their nodes where ranks send to those with the same position on other nodes.
fn peers(s: &Scenario, d: &Document) -> Checked {
    let Some(dispatcher) = s.moe.as_ref().map(|moe| moe.dispatcher) else {
        return Ok(());
    };
    let (ep, node) = (s.mesh.ep, s.mesh.gpus_per_node);
    let nodes = |ep: u32| moe::nodes(&s.mesh, ep);
    let able = |ep: &u32| match dispatcher {
        Dispatcher::Peer => nodes(*ep) == Some(1),
        Dispatcher::Deepep => nodes(*ep).is_some(),
        Dispatcher::Gather | Dispatcher::AllToAll | Dispatcher::Padded => true,
    };
    if able(&ep) {
        return Ok(());
    }
    let experts = s.model.options.experts.experts;
    let divides =
        |n: &u32| s.mesh.dp_shard.is_multiple_of(*n) && experts.is_multiple_of((*n).into());
    let legal = (1..ep).rev().filter(divides).find(able).unwrap_or(1);
    let (message, others) = match dispatcher {
        Dispatcher::Deepep => (
            format!(
                "dispatcher \"deepep\" sends tokens to the rank with the same position on each node, but \
                 groups of `ep` = {ep} ranks do not fill nodes of {node} GPUs"
            ),
            "all_to_all does not need whole nodes",
        ),
        _ => (
            format!(
                "dispatcher \"peer\" writes to memory of other GPUs of a node, but groups of `ep` = {ep} \
                 ranks span nodes of {node} GPUs"
            ),
            "other dispatchers cross nodes",
        ),
    };
    let help = format!("the nearest legal value is ep = {legal}; {others}");
    Err(d
        .conflict(&[Key::Dispatcher, Key::Ep, Key::GpusPerNode], message)
        .with_help(help))
}

/// Refuses a capacity without a row.
fn capacity(s: &Scenario, d: &Document) -> Checked {
    let Some(moe) = &s.moe else { return Ok(()) };
    let of = &s.model.options.experts;
    let choices = s.train.micro_batch * s.train.seq_len * of.top_k;
    let balanced = match moe.dispatcher.shares_rows() {
        true => choices as f64,
        false => choices as f64 / f64::from(s.mesh.ep),
    };
    let Some(factor) = moe.capacity_factor.filter(|f| f * balanced < 1.0) else {
        return Ok(());
    };
    let message = format!(
        "`capacity_factor` = {factor} of {balanced} choices is less than one row: nothing reaches an expert"
    );
    let help = format!(
        "the nearest legal value is capacity_factor = {}",
        1.0 / balanced
    );
    Err(d.conflict(&[Key::CapacityFactor], message).with_help(help))
}

/// Refuses options that need shards of experts, where no two ranks of `dp_shard` have the same
/// experts.
fn whole_experts(s: &Scenario, d: &Document) -> Checked {
    let ep = s.mesh.ep;
    if ep < s.mesh.dp_shard {
        return Ok(());
    }
    let (key, option) = if s.fsdp.outer_strategy == OuterStrategy::Optim {
        (Key::OuterStrategy, "outer_strategy = \"optim\" splits")
    } else if s.fsdp.offload.any() {
        (Key::Offload, "host offload moves")
    } else {
        return Ok(());
    };
    let message = format!(
        "{option} shards of dp_shard, but with `ep` = dp_shard = {ep} experts are not sharded over it"
    );
    let keys = [key, Key::Ep, Key::DpShard];
    let help = format!("use `ep` below {ep}, or leave that option out");
    Err(d.conflict(&keys, message).with_help(help))
}

/// Refuses to divide layers that their family cannot divide, or not evenly.
fn tensor_parallel(s: &Scenario, d: &Document) -> Checked {
    let tp = s.mesh.tp;
    if tp == 1 {
        return Ok(());
    }
    let Some(dimension) = s.model.family.spec().tensor_parallel else {
        let message = format!(
            "`tp` = {tp} divides layers, but the layers of family {} cannot be divided",
            s.model.family.name()
        );
        let able = Family::named_all().filter(|(_, f)| f.spec().tensor_parallel.is_some());
        let able: Vec<&str> = able.map(|(name, _)| name).collect();
        return Err(d
            .conflict(&[Key::Tp, Key::Family], message)
            .with_help(format!(
                "families with tensor parallelism: {}",
                able.join(", ")
            )));
    };
    let (name, size) = dimension(&s.model);
    if size % u64::from(tp) != 0 {
        let message = format!("`tp` = {tp} does not divide {name} = {size}");
        return Err(d.conflict(&[Key::Tp], message));
    }
    Ok(())
}
