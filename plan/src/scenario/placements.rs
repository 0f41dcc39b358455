//! Strategies, by name or as placements for each axis.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::Document;
use super::value::Value;
use crate::config::{Mesh, OuterStrategy, Strategy};

/// Strategy of both axes, from their names or from placements; of the two the one set later counts,
/// and both at once are an error.
pub(crate) fn strategies(
    d: &Document,
    mesh: &Mesh,
) -> Result<(Strategy, OuterStrategy), ScenarioError> {
    let inner = d.given(Key::Strategy);
    let outer = d.given(Key::OuterStrategy);
    let placements = d
        .value(Key::Placements)
        .and_then(Value::table)
        .unwrap_or_default();
    let placed = |axis: &str| placements.iter().find(|e| e.key == axis).map(|e| &e.value);

    let mut strategy = inner.unwrap_or(Strategy::OptimGradsParams);
    if let Some(value) = placed("dp_shard").filter(|_| placements_count(d, Key::Strategy)) {
        if inner.is_some() && d.layer(Key::Strategy) == d.layer(Key::Placements) {
            return Err(both(d, Key::Strategy, value));
        }
        strategy = match flat(value)[..] {
            [false, false, false] => Strategy::NoShard,
            [false, false, true] => Strategy::Optim,
            [false, true, true] => Strategy::OptimGrads,
            [true, true, true] => Strategy::OptimGradsParams,
            _ => {
                let help = "legal for dp_shard, as [parameters, gradients, optimizer]: all replicate (no_shard), \
                            optimizer flat (optim), gradients and optimizer flat (optim_grads), all flat (optim_grads_params)";
                return Err(d
                    .error(
                        value.origin,
                        "no strategy has these placements over dp_shard",
                    )
                    .with_help(help));
            }
        };
    }
    let mut outer_strategy = outer.unwrap_or(OuterStrategy::NoShard);
    if let Some(value) = placed("dp_replicate").filter(|_| placements_count(d, Key::OuterStrategy))
    {
        if outer.is_some() && d.layer(Key::OuterStrategy) == d.layer(Key::Placements) {
            return Err(both(d, Key::OuterStrategy, value));
        }
        outer_strategy = match flat(value)[..] {
            [false, false, false] => OuterStrategy::NoShard,
            [false, false, true] => OuterStrategy::Optim,
            _ => {
                let help = "legal for dp_replicate, as [parameters, gradients, optimizer]: all replicate (no_shard), \
                            optimizer flat (optim)";
                return Err(d
                    .error(
                        value.origin,
                        "no strategy has these placements over dp_replicate",
                    )
                    .with_help(help));
            }
        };
        if mesh.dp_outer == 1 && outer_strategy == OuterStrategy::Optim {
            return Err(d.error(
                value.origin,
                "nothing can be sharded over `dp_replicate` = 1",
            ));
        }
    }
    Ok((strategy, outer_strategy))
}

/// Whether the placements are at least as late as the strategy.
fn placements_count(d: &Document, strategy: Key) -> bool {
    d.layer(strategy)
        .is_none_or(|l| d.layer(Key::Placements) >= Some(l))
}

fn both(d: &Document, key: Key, placement: &Value) -> ScenarioError {
    d.error(
        placement.origin,
        format!("`placements` and `{}` say the same thing", key.info().key),
    )
    .with_help("keep one of the two")
}

fn flat(value: &Value) -> Vec<bool> {
    value
        .array()
        .unwrap_or_default()
        .iter()
        .map(|v| v.str() == Some("flat"))
        .collect()
}
