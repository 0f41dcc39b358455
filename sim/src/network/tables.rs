//! Collective times from a profile's measured tables.

use super::formula::{self, Group};
use super::place;
use crate::cost::log_interpolate;
use crate::hardware::{CollectiveTable, Profile};
use crate::price::Price;
use shardlab_plan::ir::{CollectiveKind, DType};

/// A collective to price.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// Kind.
    pub(super) kind: CollectiveKind,
    /// Bytes of the full side.
    pub(super) bytes: u64,
    /// Element type; `None` if the price must hold for all types.
    pub(super) dtype: Option<DType>,
}

/// Prices a collective from tables: those for the group's own size, or else those for another size,
/// scaled by the ratio of the formula's predictions for both sizes. Groups within a node use tables
/// of one node, and groups across nodes use those of several nodes: the rates of NVLink and of the
/// cards do not determine each other.
pub(super) fn price(profile: &Profile, asked: Asked, group: &Group) -> Option<Price> {
    let Asked { kind, bytes, dtype } = asked;
    let fits = |t: &&CollectiveTable| {
        CollectiveKind::from(t.kind) == kind && (t.nodes > 1) == (group.nodes > 1)
    };
    let alone = |t: &CollectiveTable| place::alone(t.ranks, t.nodes, profile);
    let typed = profile
        .collective
        .iter()
        .any(|t| fits(&t) && t.dtype == dtype);
    let wanted = if typed { dtype } else { None };
    let of_kind = || {
        let tables = profile.collective.iter().filter(fits);
        tables.filter(|t| t.dtype == wanted)
    };
    let equal =
        |t: &&CollectiveTable| t.ranks == group.size && (t.nodes == 1 || alone(t).like(group));
    if let Some(table) = of_kind().find(equal) {
        let (us, measured) = log_interpolate(&table.rows, bytes)?;
        return Some(Price { us, measured });
    }
    let ratio = |a: u32, b: u32| (f64::from(a) / f64::from(b)).log2().abs();
    // The same number of ranks per node takes precedence over the same number of nodes, because it
    // determines how ranks share the cards.
    let distance = |t: &&CollectiveTable| match t.nodes {
        1 => ratio(t.ranks, group.size),
        nodes => ratio(t.ranks / nodes, group.per_node) + ratio(nodes, group.nodes),
    };
    let table = of_kind().min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
    let (us, _) = log_interpolate(&table.rows, bytes)?;
    let other = if table.nodes == 1 {
        Group {
            size: table.ranks,
            per_node: table.ranks,
            ..*group
        }
    } else {
        alone(table)
    };
    let scale =
        formula::time_us(kind, bytes as f64, group) / formula::time_us(kind, bytes as f64, &other);
    Some(Price {
        us: us * scale,
        measured: false,
    })
}
