//! Impossible combinations of options, each with its reason and its position.

mod compile;
mod float8;
mod fsdp;
mod ignored;
mod lora;
mod mesh;
mod model;
mod moments;
mod muon;
mod param_groups;
mod prefetch;
mod router_bias;
mod skipped;
mod train;
mod without_effect;

pub(crate) use mesh::{MAX_RANKS, rank_factors};

use super::error::ScenarioError;
use super::keys::Key;
use super::limits;
use super::merge::Document;
use super::modules;
use crate::config::Scenario;
use crate::policies::{self, spec::Refusal};

type Checked = Result<(), ScenarioError>;

/// Refuses the first impossible combination. `is_default` says of a key whether its value is the
/// one that it would have anyway.
pub(crate) fn check(s: &Scenario, d: &Document, is_default: &dyn Fn(Key) -> bool) -> Checked {
    model::unused_keys(s, d)?;
    model::check(s, d)?;
    lora::check(s, d)?;
    modules::check(s, d)?;
    train::check(s, d)?;
    param_groups::check(s, d)?;
    moments::check(s, d)?;
    muon::check(s, d)?;
    router_bias::check(s, d)?;
    float8::check(s, d)?;
    mesh::check(s, d)?;
    fsdp::check(s, d, is_default)?;
    ignored::check(s, d)?;
    prefetch::check(s, d)?;
    prefetch::no_sync(s, d)?;
    prefetch::reentrant(s, d)?;
    skipped::check(s, d)?;
    compile::check(s, d)?;
    refuse_if(s, d, |_| true)?;
    without_effect::check(s, d, is_default)?;
    limits::check(s, d)
}

/// Refuses a value of a key that the schedule cannot have.
fn refuse(s: &Scenario, d: &Document, path: &str) -> Checked {
    refuse_if(s, d, |r| r.keys[0] == path)
}

fn refuse_if(s: &Scenario, d: &Document, which: impl Fn(&Refusal) -> bool) -> Checked {
    let all = policies::rules(s).flat_map(|rules| rules.refuses);
    match all.filter(|r| which(r)).find(|r| (r.when)(s)) {
        Some(refusal) => {
            let keys: Vec<Key> = refusal.keys.iter().filter_map(|k| Key::at(k)).collect();
            Err(d.conflict(&keys, refusal.message).with_help(refusal.help))
        }
        None => Ok(()),
    }
}

/// Makes the error for an option that contradicts other keys; `off` is the value that turns it off.
fn cannot(d: &Document, key: Key, others: &[Key], why: &str, off: &str) -> ScenarioError {
    let (keys, name) = ([&[key], others].concat(), key.info().key);
    d.conflict(&keys, format!("`{name}` {why}"))
        .with_help(format!("set {name} = {off}"))
}
