//! Rows that experts reserve in a run whose routers choose the experts.
//!
//! Policies that reserve rows according to the numbers of tokens, like torchtitan and Megatron-LM,
//! are predicted with the numbers of `moe.routing`. But a program has fixed sizes, and a router may
//! choose differently. So unless a size is given, a run reserves rows for the worst case.

use super::super::args::One;
use super::super::output::Failure;
use shardlab_plan::Scenario;
use shardlab_plan::config::{Moe, Overflow};
use shardlab_plan::scenario::places;

const KEY: &str = "moe.capacity_factor";

/// Returns the scenario of a run, and the factor for its reserved rows if that is not the default
/// of predictions. The factor is added to the overrides.
pub(super) fn load(one: &mut One) -> Result<(Scenario, Option<f64>), Failure> {
    let scenario = one.load()?;
    let Some(factor) = every_case(&scenario) else {
        return Ok((scenario, None));
    };
    let given = places(&one.scenario, &one.overrides.set).map_err(Failure::bad_input)?;
    if given.contains_key(KEY) {
        return Ok((scenario, None));
    }
    one.overrides.set.push(format!("{KEY}={factor}"));
    Ok((one.load()?, Some(factor)))
}

/// Returns the factor for the rows that are needed if all tokens choose the experts of one rank.
/// Returns `None` if routers do not choose, if this many rows are already reserved, or if more
/// choices are not an error.
fn every_case(s: &Scenario) -> Option<f64> {
    let moe = s.moe.as_ref()?;
    let now = moe.capacity_factor?;
    if s.forced_routing.is_some() || moe.on_overflow == Overflow::Drop {
        return None;
    }
    let (of, ep) = (&s.model.options.experts, u64::from(s.mesh.ep));
    let most = Moe::most_slots([ep, of.top_k], of.experts / ep);
    let factor = most as f64 / of.top_k as f64;
    (factor > now).then_some(factor)
}
