//! `[moe]`, with the popularity of experts that a prediction assumes.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::Document;
use crate::config::*;
use crate::recipes::FLOAT8_ALIGNMENT;
use crate::units::Bytes;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// Returns what chooses experts in place of routers, if something does.
pub(super) fn forced(d: &Document, model: &Model) -> Result<Option<ForcedRouting>, ScenarioError> {
    if !d.setting::<bool>(Key::ForceRouting) || !model.has_experts() {
        return Ok(None);
    }
    let (routing, popularity) = routing(d, model)?;
    Ok(Some(ForcedRouting {
        routing,
        seed: seed(d),
        popularity,
    }))
}

/// Returns the seed of routing.
fn seed(d: &Document) -> u64 {
    d.given(Key::RoutingSeed).unwrap_or(0)
}

/// Returns how tokens travel, if ranks divide experts.
pub(super) fn moe(
    d: &Document,
    (model, forced): (&Model, Option<&ForcedRouting>),
    fsdp: &Fsdp,
    mesh: &Mesh,
    compile: &Compile,
    precision: &Precision,
) -> Result<Option<Moe>, ScenarioError> {
    // The rules of the mesh refuse experts that cannot be divided.
    let experts = model.options.experts.experts;
    if mesh.ep == 1 || !experts.is_multiple_of(u64::from(mesh.ep)) {
        return Ok(None);
    }
    let host_waits = compile.mode != CompileMode::Full && !compile.cuda_graph.exchanges_tokens();
    let defaults = &fsdp.spec().defaults;
    let dispatcher = d.given(Key::Dispatcher).unwrap_or(if host_waits {
        defaults.dispatcher
    } else {
        Dispatcher::Gather
    });
    let overflow = match dispatcher {
        Dispatcher::Padded => Overflow::Drop,
        Dispatcher::Gather | Dispatcher::AllToAll | Dispatcher::Peer | Dispatcher::Deepep => {
            Overflow::Error
        }
    };
    let (routing, popularity) = routing(d, model)?;
    let loads = loads(&popularity, mesh.ep);
    let busiest = busiest_ranks(&loads);
    // As many rows as the busiest rank of any layer needs.
    let most = busiest.values().copied().fold(1.0, f64::max);
    let needed = defaults.capacity_factor.map(|f| f * most);
    let among = chosen_among(model, forced);
    let balanced = match routing {
        Routing::RoundRobin => reach::round_robin,
        Routing::Balanced | Routing::Seeded | Routing::Recorded(_) => reach::balanced,
    };
    let reach = |parts: u32| Reach {
        balanced: balanced(&among, u64::from(parts)),
        layers: reach::busiest(&popularity, model.options.experts.top_k, parts),
    };
    let nodes = match dispatcher {
        Dispatcher::Deepep => nodes(mesh, mesh.ep).unwrap_or(1),
        _ => 1,
    };
    Ok(Some(Moe {
        dispatcher,
        capacity_factor: match d.value(Key::CapacityFactor) {
            // A number, or the word for as many rows as there can be.
            Some(given) => given.number(),
            None if dispatcher == Dispatcher::Gather => None,
            None => needed,
        },
        row_multiple: match precision.float8.experts {
            true => FLOAT8_ALIGNMENT,
            false => 1,
        },
        stops_at_used_rows: defaults.optimizes_code,
        on_overflow: d.given(Key::OnOverflow).unwrap_or(overflow),
        shared_expert_overlap: model.options.experts.shared_expert_ffn > 0
            && d.given(Key::SharedExpertOverlap)
                .unwrap_or(defaults.shared_expert_overlap),
        routing,
        reach: dispatcher.pushes_rows().then(|| reach(mesh.ep)),
        node_reach: (nodes > 1).then(|| NodeReach {
            nodes: nodes.into(),
            reach: reach(nodes),
        }),
        busiest,
        loads,
    }))
}

/// Returns the number of nodes that groups of `ep` ranks span; `None` if a group is neither on one
/// node nor on all ranks of several.
pub(super) fn nodes(mesh: &Mesh, ep: u32) -> Option<u32> {
    let node = mesh.gpus_per_node.max(1);
    if mesh.world() <= node || node.is_multiple_of(ep) {
        return Some(1);
    }
    ep.is_multiple_of(node).then(|| ep / node)
}

/// Returns the experts that a token chooses among. Forced choices know no groups.
fn chosen_among(model: &Model, forced: Option<&ForcedRouting>) -> Experts {
    let of = model.options.experts.clone();
    match forced {
        None => of,
        Some(_) => Experts {
            router_groups: 1,
            ..of
        },
    }
}

/// Returns the routing, and by layer how popular experts are if not equally.
fn routing(
    d: &Document,
    model: &Model,
) -> Result<(Routing, BTreeMap<u32, Vec<f64>>), ScenarioError> {
    let of = &model.options.experts;
    let layers = || (0..model.layers).filter(|l| of.has(u64::from(*l)));
    match d.value(Key::Routing).and_then(|v| v.str()) {
        None | Some("balanced") => Ok((Routing::Balanced, BTreeMap::new())),
        Some("seeded") => {
            let imbalance: f64 = d.given(Key::Imbalance).unwrap_or(2.0);
            let most = of.experts as f64 / of.top_k as f64;
            if imbalance > most {
                let message = format!(
                    "`imbalance` = {imbalance}: no expert gets more than each token once, which is {most} times the \
                     mean of {} experts with top_k = {}",
                    of.experts, of.top_k
                );
                return Err(d
                    .conflict(&[Key::Imbalance, Key::TopK], message)
                    .with_help(format!("the nearest legal value is {most}")));
            }
            let popularity = seeded(layers(), of.experts, imbalance, seed(d));
            Ok((Routing::Seeded, popularity))
        }
        Some("round_robin") => {
            if !d.setting::<bool>(Key::ForceRouting) {
                let message =
                    "`routing` = \"round_robin\": no router chooses experts in round-robin order";
                return Err(d
                    .conflict(&[Key::Routing], message)
                    .with_help("set moe.force_routing = true, or routing to balanced or seeded"));
            }
            Ok((Routing::RoundRobin, BTreeMap::new()))
        }
        Some(path) => {
            let histogram = recorded(d)?;
            let known: Vec<u32> = histogram.layers.keys().copied().collect();
            let wanted: Vec<u32> = layers().collect();
            let lengths = histogram
                .layers
                .values()
                .all(|c| c.len() as u64 == of.experts);
            let same = histogram.experts == of.experts && histogram.top_k == of.top_k;
            if !same || !lengths || known != wanted {
                let wanted = Histogram {
                    format: Histogram::FORMAT,
                    experts: of.experts,
                    top_k: of.top_k,
                    layers: wanted.into_iter().map(|l| (l, Vec::new())).collect(),
                };
                let message = format!(
                    "{path} is the histogram of another model: it has {}; this one has {}",
                    histogram.words(),
                    wanted.words()
                );
                return Err(d
                    .conflict(&[Key::Routing], message)
                    .with_help("record one with `shardlab exec SCENARIO --record-routing FILE`"));
            }
            // Choices of experts that do nothing are not counted.
            let what = histogram.impossible().filter(|_| of.zero_experts == 0);
            if let Some(what) = what {
                let message = format!("{path} is not a histogram of a router: {what}");
                return Err(d
                    .conflict(&[Key::Routing], message)
                    .with_help("record one with `shardlab exec SCENARIO --record-routing FILE`"));
            }
            Ok((Routing::Recorded(path.to_owned()), histogram.popularity()))
        }
    }
}

/// Bytes that a histogram may have. Those of the largest models have less than a megabyte.
const HISTOGRAM_LIMIT: u64 = 64 << 20;

/// Reads a file of at most [`HISTOGRAM_LIMIT`] bytes. It may be a pipe, which has no size of its
/// own.
fn text(path: &Path) -> std::io::Result<String> {
    let (mut text, mut file) = (String::new(), File::open(path)?.take(HISTOGRAM_LIMIT + 1));
    file.read_to_string(&mut text)?;
    if text.len() as u64 > HISTOGRAM_LIMIT {
        let limit = Bytes(HISTOGRAM_LIMIT);
        return Err(std::io::Error::other(format!(
            "it is larger than {limit}, more than a histogram of routed tokens has"
        )));
    }
    Ok(text)
}

/// Reads the histogram that the scenario names.
fn recorded(d: &Document) -> Result<Histogram, ScenarioError> {
    let path = d
        .value(Key::Routing)
        .map(|v| d.found(v))
        .unwrap_or_default();
    let bad = |what: String| d.conflict(&[Key::Routing], what);
    let text = text(&path).map_err(|e| bad(format!("cannot read {}: {e}", path.display())))?;
    let read: Histogram = serde_json::from_str(&text).map_err(|e| {
        let (line, column) = (e.line(), e.column());
        bad(format!("{}:{line}:{column}: {e}", path.display()))
    })?;
    if read.format == Histogram::FORMAT {
        return Ok(read);
    }
    Err(bad(format!(
        "{} has format {}; this program reads format {}",
        path.display(),
        read.format,
        Histogram::FORMAT
    )))
}
