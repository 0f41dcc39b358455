//! Determines units, ranks, types and the order of communication.

use super::count::Counts;
use super::{Ahead, Facts, Found, Prefetches, Reshard, UnitFacts, dtype};
use crate::attribute::{Attributed, Units, Work};
use crate::kineto::Trace;
use crate::measured::shapes;
use shardlab_plan::program::Phase;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the units that gather or reduce something, or that FSDP2's annotations name, in forward
/// order.
pub(super) fn units(
    trace: &Trace,
    a: &Attributed,
    step: Option<u32>,
    counts: &Counts<'_>,
) -> Vec<UnitFacts> {
    let parameters = parameters(trace, a, step);
    let names = a.units.names();
    let mut units: Vec<UnitFacts> = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let id = i as u32;
        let size = |c: &super::count::One<'_>| {
            c.described.map_or(0, |d| d.elements_out.max(d.elements_in))
        };
        let gathered = counts.gathers(id, true).map(size).sum::<u64>();
        let regathered = counts.gathers(id, false).next().is_some();
        let parameters = parameters.get(&id).cloned().unwrap_or_default();
        let empty = gathered == 0 && !regathered && parameters.is_empty();
        if name.is_empty() || empty && id == Units::ROOT {
            continue;
        }
        let first = counts.gathers(id, true).next().and_then(|c| c.described);
        units.push(UnitFacts {
            name: name.clone(),
            parameters,
            gathered: first.map_or(gathered, |d| d.elements_out.max(d.elements_in)),
            regathered,
        });
    }
    units
}

/// Returns the shapes of parameters by unit: those of gradients packed for a reduction, or else
/// those that autograd accumulates.
fn parameters(trace: &Trace, a: &Attributed, step: Option<u32>) -> BTreeMap<u32, Vec<Vec<u64>>> {
    let mut packed: BTreeMap<u32, Vec<Vec<u64>>> = BTreeMap::new();
    let mut accumulated: BTreeMap<u32, Vec<Vec<u64>>> = BTreeMap::new();
    for (i, event) in trace.host.iter().enumerate() {
        let Some(place) = a.host[i].filter(|p| step.is_none_or(|s| p.step == s)) else {
            continue;
        };
        let name = trace.name(event.name);
        let Some(inputs) = event.inputs.map(|i| &trace.inputs[i as usize]) else {
            continue;
        };
        if place.micro_batch != 0 && !name.ends_with("chunk_cat") {
            continue;
        }
        if name == "fsdp::chunk_cat" {
            let list = first_list(trace.name(inputs.dims));
            packed.entry(place.unit).or_insert(list);
        } else if name == "torch::autograd::AccumulateGrad" {
            accumulated
                .entry(place.unit)
                .or_default()
                .extend(shapes(trace.name(inputs.dims)).into_iter().take(1));
        }
    }
    accumulated.extend(packed);
    accumulated
}

/// Returns the shapes in the first argument if it is a list of tensors.
fn first_list(dims: &str) -> Vec<Vec<u64>> {
    let Ok(all) = serde_json::from_str::<Vec<serde_json::Value>>(dims) else {
        return Vec::new();
    };
    let list = all.first().and_then(|v| v.as_array());
    let shape = |v: &serde_json::Value| {
        v.as_array()
            .map(|d| d.iter().filter_map(serde_json::Value::as_u64).collect())
    };
    list.into_iter().flatten().filter_map(shape).collect()
}

pub(super) fn ranks(trace: &Trace, counts: &Counts<'_>, facts: &mut Facts) {
    let size = |work: Work| {
        let sizes = counts
            .of(work)
            .filter_map(|c| c.described)
            .map(|d| d.group_size);
        Counts::most(sizes.filter(|s| *s > 0))
    };
    let shard = size(Work::AllGather).or_else(|| size(Work::ReduceScatter));
    let replicas = size(Work::AllReduce);
    facts.world_size = trace
        .head
        .world_size
        .map(|w| Found::new(w, "world_size of the trace's distributedInfo"))
        .or_else(|| {
            let largest = trace.head.groups.iter().map(|g| g.size).max();
            let largest = largest.or_else(|| shard.into_iter().chain(replicas).max());
            largest.map(|w| Found::new(w, "size of the largest process group"))
        });
    facts.dp_shard = shard.map(|s| Found::new(s, "group size of the all-gathers"));
    facts.dp_outer = match (shard, replicas) {
        (Some(_), Some(outer)) => Some(Found::new(
            outer,
            "group size of the all-reduces in backward",
        )),
        (Some(shard), None) => facts
            .world_size
            .as_ref()
            .filter(|w| w.value == shard)
            .map(|_| {
                Found::new(
                    1,
                    "no all-reduce follows the reduce-scatters, and the all-gathers span all ranks",
                )
            }),
        (None, Some(outer)) if facts.policy.as_ref().is_some_and(|p| p.value == "fsdp2") => {
            // FSDP2 only all-reduces over replicas. With one rank per shard it gathers nothing.
            facts.dp_shard = Some(Found::new(1, "no parameters are gathered"));
            facts.strategy = Some(Found::new(
                "optim_grads_params",
                "a mesh of replicas, each of which is one rank: nothing is gathered",
            ));
            Some(Found::new(
                outer,
                "group size of the all-reduces in backward",
            ))
        }
        (None, Some(outer)) => {
            facts.dp_shard = Some(Found::new(
                outer,
                "group size of the all-reduces in backward",
            ));
            Some(Found::new(1, "gradients are all-reduced over one group"))
        }
        (None, None) => None,
    };
    if shard.is_none() && replicas.is_none() {
        let nccl = |c: &&super::count::One<'_>| c.work != Work::OtherCollective;
        facts.unsized_collectives = counts.all.iter().filter(nccl).count();
    }
}

pub(super) fn engine(trace: &Trace, a: &Attributed, counts: &Counts<'_>, facts: &mut Facts) {
    let any = |test: &dyn Fn(&str) -> bool| trace.host.iter().any(|e| test(trace.name(e.name)));
    let named = |part: &'static [&'static str]| any(&|n| part.iter().any(|p| n.contains(p)));
    facts.is_fsdp1 = any(&|n| n.starts_with("FullyShardedDataParallel."));
    facts.policy = if any(&|n| n.starts_with("FSDP::")) {
        Some(Found::new("fsdp2", "ranges named FSDP::…"))
    } else if facts.is_fsdp1 {
        Some(Found::new(
            "fsdp2",
            "ranges of FullyShardedDataParallel: FSDP1's schedule is predicted as that of FSDP2",
        ))
    } else if named(&["MFSDP", "CustomFSDP", "MegatronFSDP"]) {
        Some(Found::new("megatron", "ranges of Megatron-FSDP"))
    } else if named(&[
        "allgather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    ]) {
        Some(Found::new(
            "megatron",
            "coalesced gathers and reductions, as Megatron-FSDP issues them",
        ))
    } else {
        None
    };
    let has = |work| counts.of(work).next().is_some();
    let late = counts.all.iter().any(|c| {
        c.work == Work::AllGather
            && matches!(c.phase, Phase::Optimizer | Phase::Refresh | Phase::Final)
    });
    facts.strategy = match (
        has(Work::AllGather),
        has(Work::ReduceScatter),
        has(Work::AllReduce),
    ) {
        (true, true, _) => Some(Found::new(
            "optim_grads_params",
            "parameters are gathered in forward and gradients reduce-scattered in backward",
        )),
        (true, false, true) => Some(Found::new(
            "optim_grads_params",
            "parameters are gathered in forward",
        )),
        (false, true, _) if late => Some(Found::new(
            "optim_grads",
            "gradients are reduce-scattered, and parameters gathered after the optimizer",
        )),
        (false, false, true) => Some(Found::new(
            "no_shard",
            "gradients are all-reduced, and nothing is gathered",
        )),
        _ => None,
    };
    if facts.policy.is_none() && a.units.names().len() > 1 {
        // Engines without annotations gather units as FSDP2 does.
        facts.policy = Some(Found::new(
            "fsdp2",
            "units are gathered, by an engine that the trace does not name",
        ));
    }
}

pub(super) fn types(
    trace: &Trace,
    a: &Attributed,
    counts: &Counts<'_>,
    step: Option<u32>,
    facts: &mut Facts,
) {
    let of = |work| {
        let types = counts.of(work).filter_map(|c| dtype(&c.described?.dtype));
        Counts::most(types)
    };
    facts.compute = of(Work::AllGather)
        .map(|t| Found::new(t, "type of the all-gathers"))
        .or_else(|| {
            let products = a.work.iter().filter(|w| w.work == Work::Gemm);
            let types = products.filter_map(|w| {
                let inputs = trace.host[w.operator? as usize].inputs?;
                let types = trace.name(trace.inputs[inputs as usize].types);
                types.split('"').nth(1).and_then(dtype)
            });
            Counts::most(types).map(|t| Found::new(t, "type of the matmuls' inputs"))
        });
    facts.reduce = of(Work::ReduceScatter)
        .map(|t| Found::new(t, "type of the reduce-scatters"))
        .or_else(|| of(Work::AllReduce).map(|t| Found::new(t, "type of the all-reduces")));
    main_types(trace, a, step, facts);
}

/// Determines the types that the optimizer reads and writes.
fn main_types(trace: &Trace, a: &Attributed, step: Option<u32>, facts: &mut Facts) {
    let mut time: BTreeMap<&'static str, i64> = BTreeMap::new();
    for w in a
        .work
        .iter()
        .filter(|w| w.place.phase == Phase::Optimizer && step.is_none_or(|s| w.place.step == s))
    {
        let event = &trace.device[w.device as usize];
        let name = trace.name(event.name);
        let found = if name.contains("BFloat16") {
            "bf16"
        } else if name.contains("Half") {
            "f16"
        } else if name.contains("float") {
            "f32"
        } else {
            continue;
        };
        *time.entry(found).or_default() += event.end - event.start;
    }
    let main = time.into_iter().max_by_key(|(_, t)| *t).map(|(t, _)| t);
    facts.main_params = main.map(|t| Found::new(t, "type of the optimizer's kernels"));
    // Gradients that are cast before the optimizer reads them are stored in the narrower type.
    let cast = a.work.iter().any(|w| {
        let between = matches!(w.place.phase, Phase::Final | Phase::Clip);
        between
            && step.is_none_or(|s| w.place.step == s)
            && w.operator.is_some_and(|o| widens(trace, o as usize))
    });
    facts.main_grads = match (&facts.reduce, main) {
        (Some(reduce), Some("f32")) if reduce.value != "f32" && cast => Some(Found::new(
            reduce.value,
            "gradients are cast to float32 between backward and optimizer",
        )),
        (Some(_), Some(main)) => Some(Found::new(
            main,
            "the optimizer reads gradients in the type of its weights, without a cast",
        )),
        _ => None,
    };
}

/// Returns whether a copy reads a 16-bit type and writes float32.
fn widens(trace: &Trace, operator: usize) -> bool {
    let event = &trace.host[operator];
    let Some(inputs) = event.inputs.map(|i| &trace.inputs[i as usize]) else {
        return false;
    };
    let name = trace.name(event.name);
    name.ends_with("copy_") && {
        let types: Vec<&str> = trace
            .name(inputs.types)
            .split('"')
            .skip(1)
            .step_by(2)
            .collect();
        types.first() == Some(&"float")
            && matches!(types.get(1), Some(&"c10::BFloat16" | &"c10::Half"))
    }
}

pub(super) fn gathers(a: &Attributed, counts: &Counts<'_>, facts: &mut Facts) {
    let gathered: Vec<&UnitFacts> = facts.units.iter().filter(|u| u.gathered > 0).collect();
    let others: Vec<&&UnitFacts> = gathered
        .iter()
        .filter(|u| u.name != crate::attribute::ROOT)
        .collect();
    let root = gathered.iter().find(|u| u.name == crate::attribute::ROOT);
    if !others.is_empty() {
        let again = others.iter().filter(|u| u.regathered).count();
        let size = |forward: bool| {
            let ids = 0..a.units.names().len() as u32;
            let all = ids.flat_map(|u| {
                counts
                    .gathers(u, forward)
                    .filter_map(|c| c.described)
                    .map(|d| d.group_size)
                    .collect::<Vec<_>>()
            });
            Counts::most(all.filter(|s| *s > 0))
        };
        let is_block = |u: &UnitFacts| {
            u.name
                .rsplit('.')
                .next()
                .is_some_and(|n| n.parse::<u32>().is_ok())
        };
        let last_block = others.iter().rfind(|u| is_block(u)).map(|u| u.name.clone());
        let kept: Vec<&str> = others
            .iter()
            .filter(|u| !u.regathered)
            .map(|u| u.name.as_str())
            .collect();
        facts.reshard = Some(if again == 0 {
            Found::new(Reshard::Never, "no unit is gathered again in backward")
        } else if let (Some(full), Some(part)) = (size(true), size(false))
            && part < full
        {
            Found::new(
                Reshard::Group(part),
                format!("backward gathers over {part} ranks, forward over {full}"),
            )
        } else if kept.len() == 1 && kept.first().copied() == last_block.as_deref() {
            Found::new(
                Reshard::ButLast,
                "all units but the last block are gathered again in backward",
            )
        } else if kept.is_empty() {
            Found::new(
                Reshard::Always,
                format!("all {again} units are gathered again in backward"),
            )
        } else {
            Found::new(
                Reshard::Always,
                format!(
                    "{again} units are gathered again in backward; {} not",
                    kept.join(", ")
                ),
            )
        });
    }
    facts.reshard_root = root.map(|u| {
        if u.regathered {
            Found::new(true, "the root is gathered again in backward")
        } else {
            Found::new(false, "the root is gathered once")
        }
    });
    if facts
        .strategy
        .as_ref()
        .is_some_and(|s| s.value == "optim_grads_params")
    {
        facts.prefetch_lists = prefetch_lists(a, &facts.units);
        let of = |depth: Option<u32>, none: &str| match depth {
            Some(depth) => Found::new(Ahead::Depth(depth), "annotations of explicit prefetches"),
            None => Found::new(Ahead::Implicit, none),
        };
        facts.prefetch_forward = Some(of(
            a.prefetch.forward,
            "no explicit prefetch is annotated in forward",
        ));
        facts.prefetch_backward = Some(of(
            a.prefetch.backward,
            "backward has only the engine's own prefetches",
        ));
    }
}

/// Returns the explicit prefetches of each unit, unless each unit prefetches the same number of its
/// successors, or as many as there are.
fn prefetch_lists(a: &Attributed, units: &[UnitFacts]) -> Vec<Prefetches> {
    let order: Vec<&str> = units
        .iter()
        .map(|u| u.name.as_str())
        .filter(|n| *n != crate::attribute::ROOT)
        .collect();
    let reversed: Vec<&str> = order.iter().rev().copied().collect();
    let names = a.units.names();
    let lists: Vec<Prefetches> = (a.prefetch.lists.iter())
        .map(|(unit, lists)| {
            let named = |ids: &Vec<u32>| ids.iter().map(|u| names[*u as usize].clone()).collect();
            Prefetches {
                unit: names[*unit as usize].clone(),
                forward: named(&lists[0]),
                backward: named(&lists[1]),
            }
        })
        .collect();
    let of = |unit: &str, backward: bool| -> &[String] {
        let found = lists.iter().find(|l| l.unit == unit);
        found.map_or(&[], |l| if backward { &l.backward } else { &l.forward })
    };
    let is_depth = |order: &[&str], backward: bool, depth: Option<u32>| {
        let Some(depth) = depth else { return true };
        order.iter().enumerate().all(|(i, unit)| {
            let next = order[i + 1..].iter().take(depth as usize);
            next.copied()
                .eq(of(unit, backward).iter().map(String::as_str))
        })
    };
    let is_plain = is_depth(&order, false, a.prefetch.forward)
        && is_depth(&reversed, true, a.prefetch.backward);
    if is_plain { Vec::new() } else { lists }
}

pub(super) fn micro_batches(
    a: &Attributed,
    step: Option<u32>,
    counts: &Counts<'_>,
    facts: &mut Facts,
) {
    let Some(step) = step.map(|s| &a.steps.all[s as usize]) else {
        return;
    };
    let n = step.micro_batches.len() as u32;
    facts.accumulation = step.optimizer.map(|_| {
        Found::new(
            n,
            format!(
                "{n} forward and backward {} before the optimizer",
                if n == 1 { "pass" } else { "passes" }
            ),
        )
    });
    if n > 1 {
        let reduced: BTreeSet<u16> = counts
            .all
            .iter()
            .filter(|c| {
                matches!(c.work, Work::ReduceScatter | Work::AllReduce)
                    && c.phase == Phase::Backward
            })
            .map(|c| c.micro_batch)
            .collect();
        facts.sync_last = (!reduced.is_empty()).then(|| {
            if reduced.len() == 1 {
                Found::new(true, "gradients are reduced in one micro-batch only")
            } else {
                Found::new(
                    false,
                    format!("gradients are reduced in {} micro-batches", reduced.len()),
                )
            }
        });
    }
    if step.optimizer.is_some() {
        facts.grad_norm = step.norm;
    }
}
