//! Rows that experts reserve in a run whose routers choose.
//!
//! Policies that reserve rows by the numbers of tokens, like torchtitan and Megatron-LM, are
//! predicted with those of `moe.routing`. A program has fixed sizes, and a router need not keep to
//! a prediction: unless a size is given, a run reserves rows for every case.

use super::super::args::One;
use super::super::output::Failure;
use shardlab_plan::Scenario;
use shardlab_plan::config::{Moe, Overflow};
use shardlab_plan::scenario::places;

const KEY: &str = "moe.capacity_factor";

/// Returns the scenario of a run, and the factor that it reserves rows by, if that is not the
/// default of predictions. It joins the overrides.
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

/// Returns the factor of the rows that all tokens need if they choose the experts of one rank;
/// `None` if routers do not choose, if there are as many rows, or if more choices are no error.
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
