//! Captured parts of expert layers: tests which kernels the graphs contain, that programs with them
//! pass, and that a host wait within one is found.

use super::{file, find, passes, try_lower};
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::lower::PlanError;
use crate::program::*;
use crate::{plan, scenario};

const NATIVE: &[&str] = &["fsdp.policy=native"];
/// Policy `megatron` with buffers whose addresses repeat.
const MEGATRON: &[&str] = &[
    "fsdp.policy=megatron",
    "fsdp.allocator=double_buffer",
    "fsdp.persist_on_alloc_fail=true",
];

const PARTS: &str = "[\"attn\", \"moe_router\", \"moe_preprocess\"]";

/// Lowers the shipped mixture of experts with captured scopes; `None` if the policy rejects an
/// option.
fn try_scopes(scopes: &str, policy: &[&str], set: &[&str]) -> Option<Program> {
    let scopes = format!("compile.cuda_graph={scopes}");
    let all = [&["train.sync=false", &scopes], policy, set].concat();
    try_lower("small-moe", &all)
}

fn scopes(scopes: &str, policy: &[&str], set: &[&str]) -> Program {
    try_scopes(scopes, policy, set).unwrap_or_else(|| panic!("{scopes} {policy:?} {set:?}"))
}

/// Returns the graphs of the steady step, each with its phase and its launches.
fn graphs(p: &Program) -> Vec<(&str, Phase, Vec<KernelId>)> {
    let mut out: Vec<(&str, Phase, Vec<KernelId>)> = Vec::new();
    let mut open = false;
    let steady = p.section(SectionKind::Steady).expect("steady");
    for i in &p.instrs[steady.instrs.start as usize..steady.instrs.end as usize] {
        match i.op {
            Op::GraphBegin(s) => {
                open = true;
                out.push((&p.scopes[s.index()].name, i.phase, Vec::new()));
            }
            Op::GraphEnd(_) => open = false,
            Op::Launch { kernel, .. } if open => out.last_mut().expect("open").2.push(kernel),
            _ => {}
        }
    }
    out
}

/// Returns the names of the kernels in the graphs of a part of the second layer, graph by graph.
fn kernels(p: &Program, graph: &str) -> Vec<String> {
    let graph = format!("layers.1.mlp {graph}");
    let of = graphs(p).into_iter().filter(|(name, ..)| *name == graph);
    of.map(|(_, _, launches)| {
        let names = launches.iter().map(|k| &*p.kernels[k.index()].name);
        names.collect::<Vec<&str>>().join(" ")
    })
    .collect()
}

/// The graph contains a norm, the router's matmul, its result in float32, and the choice; then what
/// each dispatcher prepares. The last addition in backward is that of the residual stream.
#[test]
fn graphs_contain_the_parts_that_scopes_name() {
    for policy in [NATIVE, MEGATRON] {
        for (set, preprocess, backward) in [
            (
                &["mesh.ep=1"][..],
                &["sort_experts permute"][..],
                &["unpermute add"][..],
            ),
            (
                &["mesh.ep=2", "moe.dispatcher=all_to_all"],
                &["dispatch_experts permute permute"],
                &["unpermute unpermute add"],
            ),
            (
                &["mesh.ep=2", "moe.dispatcher=padded"],
                &["dispatch_experts permute permute"],
                &["unpermute unpermute add"],
            ),
            (
                &["mesh.ep=2", "moe.dispatcher=gather"],
                &["local_experts"],
                &[],
            ),
            (
                &["mesh.ep=2", "moe.dispatcher=peer"],
                &["local_experts", "pushed_rows"],
                &[],
            ),
            (
                &["mesh.ep=2", "moe.dispatcher=deepep"],
                &["local_experts", "pushed_rows"],
                &[],
            ),
        ] {
            let what = format!("{policy:?} {set:?}");
            let p = scopes(PARTS, policy, set);
            assert_eq!(
                kernels(&p, "router forward"),
                ["rms_norm mm copy route"],
                "{what}"
            );
            let router =
                "route_backward add copy mm mm add rms_norm_backward rms_norm_weight_backward add";
            assert_eq!(kernels(&p, "router backward"), [router], "{what}");
            assert_eq!(kernels(&p, "preprocess forward"), preprocess, "{what}");
            assert_eq!(kernels(&p, "preprocess backward"), backward, "{what}");
            // If it overlaps with the exchange of tokens, it is not captured.
            let shared = kernels(&p, "shared expert forward");
            match (policy, set) {
                (NATIVE, [_, _]) => assert_eq!(shared, [""; 0], "{what}"),
                _ => assert_eq!(shared, ["mm silu mm mul mm"], "{what}"),
            }
            // The first layer is dense, and none of its scopes is captured.
            let dense = |(name, ..): &(&str, Phase, Vec<KernelId>)| name.contains("layers.0.mlp");
            assert!(!graphs(&p).iter().any(dense), "{what}");
        }
    }
}

#[test]
fn dense_layers_and_layers_of_experts_are_scopes_of_their_own() {
    let layers = |scope: &str| -> Vec<String> {
        let p = scopes(scope, NATIVE, &["mesh.ep=2"]);
        let forward = graphs(&p).into_iter().filter(|g| g.1 == Phase::Forward);
        forward.map(|g| g.0.to_owned()).collect()
    };
    let [dense, first, second] = [0, 1, 2].map(|n| format!("layers.{n}.mlp forward"));
    assert_eq!(layers("[\"mlp\"]"), std::slice::from_ref(&dense));
    assert_eq!(layers("[\"moe\"]"), [first.clone(), second.clone()]);
    assert_eq!(layers("[\"mlp\", \"moe\"]"), [dense, first, second]);
}

/// Options that change which kernels are launched in an expert layer.
const OTHERS: [&[&str]; 6] = [
    &[],
    &["train.recompute=full"],
    &["train.recompute=selective", "compile.mode=regions"],
    &["compile.mode=blocks"],
    &["train.grad_accum=2"],
    &["mesh.ep=4", "mesh.dp_outer=2"],
];

/// Whatever else is fused or recomputed, routers are captured, and matmuls of experts are not.
#[test]
fn programs_with_captured_parts_of_experts_pass() {
    let dispatchers = ["gather", "all_to_all", "padded", "peer", "deepep"];
    for policy in [NATIVE, MEGATRON] {
        let mut accepted = 0;
        for (set, dispatcher) in (OTHERS.iter()).flat_map(|set| dispatchers.map(|d| (set, d))) {
            let dispatcher = format!("moe.dispatcher={dispatcher}");
            let set = [&["mesh.ep=2", dispatcher.as_str()], *set].concat();
            let what = format!("{policy:?} {set:?}");
            let Some(p) = try_scopes(PARTS, policy, &set) else {
                continue;
            };
            accepted += 1;
            let r = check(&p);
            passes(&r, &what);
            let host = r.rules.iter().find(|x| x.id == RuleId::CaptureHost);
            assert!(host.expect("listed").checked > 0, "{what}");
            let inside = |part: &str, of: fn(&OpKind) -> bool| {
                let all = graphs(&p).into_iter().filter(|g| g.0.contains(part));
                let ops = all.flat_map(|g| g.2).map(|k| &p.kernels[k.index()].body);
                ops.flatten().filter(|b| of(&b.op)).count()
            };
            let micro_batches = 1 + usize::from(set.contains(&"train.grad_accum=2"));
            let routes = inside("router forward", |op| matches!(op, OpKind::Route(_)));
            assert_eq!(routes, 2 * micro_batches, "{what}");
            let experts = |op: &OpKind| matches!(op, OpKind::GroupedGemm(_));
            assert_eq!(inside("layers.", experts), 0, "{what}");
        }
        assert!(accepted >= 20, "{policy:?}: {accepted}");
    }
}

/// The graph of a dispatcher's preparation, which ends after the wait for its counts.
#[test]
fn a_graph_that_contains_the_wait_for_counts() {
    let both = [NATIVE, MEGATRON].map(|policy| ["all_to_all", "deepep"].map(|d| (policy, d)));
    for (policy, dispatcher) in both.into_iter().flatten() {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let p = scopes(PARTS, policy, &["mesh.ep=2", &dispatcher]);
        passes(&check(&p), "unchanged");
        let waits = find(&p, |i| {
            i.rule == Rule::Model && matches!(i.op, Op::HostWait(_))
        });
        assert_eq!(waits.len(), 2);
        for wait in waits {
            let mut q = p.clone();
            let ends = |i: &u32| matches!(q.instrs[*i as usize].op, Op::GraphEnd(_));
            let end = (0..wait.0).rev().find(ends).expect("a graph before it");
            q.instrs[end as usize..=wait.index()].rotate_left(1);
            let r = check(&q);
            let v = r.of(RuleId::CaptureHost).next();
            let v = v.unwrap_or_else(|| panic!("not found\n{r}"));
            assert_eq!(v.instr, Some(InstrId(wait.0 - 1)));
        }
    }
}

/// A graph that begins before an exchange of counted rows, instead of after it.
#[test]
fn graphs_that_contain_an_exchange_of_counted_rows() {
    for policy in [NATIVE, MEGATRON] {
        let p = scopes(PARTS, policy, &["mesh.ep=2", "moe.dispatcher=all_to_all"]);
        passes(&check(&p), "unchanged");
        let exchanges = find(&p, |i| match i.op {
            Op::Collective { id, .. } => {
                let sent = p.collectives[id.index()].sent;
                sent.is_some_and(|sent| matches!(sent.of, SelectedRows::Counted(_)))
            }
            _ => false,
        });
        // Tokens and results of two layers, and their gradients.
        assert!(exchanges.len() >= 2 * 2 * 2, "{policy:?}");
        for exchange in exchanges {
            let mut q = p.clone();
            let begins = |i: &u32| matches!(q.instrs[*i as usize].op, Op::GraphBegin(_));
            let begin = (exchange.0..).find(begins).expect("a graph after it");
            q.instrs[exchange.index()..=begin as usize].rotate_right(1);
            let r = check(&q);
            let inside = InstrId(exchange.0 + 1);
            let found = r.of(RuleId::HostCounts).find(|v| v.instr == Some(inside));
            let v = found.unwrap_or_else(|| panic!("{policy:?}: not found\n{r}"));
            assert_eq!(v.other, Some(exchange), "{v:?}");
            assert!(
                v.message.contains("as many rows as the first pass"),
                "{v:?}"
            );
        }
    }
}

/// Counts of choices that move biases of routers are in no graph that a replay would repeat with
/// other addresses.
#[test]
fn captured_routers_with_biases_that_steps_move_pass() {
    let moved = [
        "model.router_bias=true",
        "model.router_bias_update_speed=0.001",
    ];
    for policy in [NATIVE, MEGATRON] {
        for set in [
            &["mesh.ep=1"][..],
            &["mesh.ep=2", "moe.dispatcher=all_to_all"],
            &["mesh.ep=2", "moe.dispatcher=deepep", "train.grad_accum=2"],
        ] {
            let p = scopes(PARTS, policy, &[&moved, set].concat());
            passes(&check(&p), &format!("{policy:?} {set:?}"));
        }
    }
}

/// Counts the steady host waits of a rule, outside of graphs and inside.
fn host_waits(p: &Program, rule: Rule) -> [usize; 2] {
    let (mut open, mut counts) = (false, [0; 2]);
    let steady = p.section(SectionKind::Steady).expect("steady");
    for i in &p.instrs[steady.instrs.start as usize..steady.instrs.end as usize] {
        match i.op {
            Op::GraphBegin(_) => open = true,
            Op::GraphEnd(_) => open = false,
            Op::HostWait(_) if i.rule == rule => counts[usize::from(open)] += 1,
            _ => {}
        }
    }
    counts
}

/// The host waits for the results of NaN checks around each collective, except for those that a
/// graph contains. If layers are captured, these are the checks of the tokens that expert layers
/// exchange.
#[test]
fn the_host_waits_for_what_is_not_captured() {
    let set = ["mesh.ep=2", "moe.dispatcher=gather", "fsdp.nan_check=true"];
    let eager = ["train.sync=false", "fsdp.policy=native"];
    let eager = try_lower("small-moe", &[&eager[..], &set].concat()).expect("no scope");
    let [all, none] = host_waits(&eager, Rule::NanCheck);
    assert_eq!(none, 0);
    for captured in ["[\"attn\"]", PARTS] {
        let p = scopes(captured, NATIVE, &set);
        assert_eq!(host_waits(&p, Rule::NanCheck), [all, 0], "{captured}");
        passes(&check(&p), captured);
    }
    let p = scopes("[\"moe\"]", NATIVE, &set);
    // Two layers. Forward gathers tokens and weights and sums results, which are three collectives
    // of floats with one operand and one result each. Backward does the reverse.
    assert_eq!(host_waits(&p, Rule::NanCheck), [all - 2 * 2 * 3 * 2, 0]);
    passes(&check(&p), "layers");
}

/// The code of Transformers reads a mask on the host once per forward pass, unless the iteration is
/// captured.
#[test]
fn the_host_waits_for_nothing_in_a_captured_iteration() {
    let waits = |graph: &str| {
        let set = [
            "fsdp.policy=fsdp2",
            "model.implementation=transformers",
            graph,
        ];
        let p = try_lower("small-native", &set).expect("a policy of torch");
        passes(&check(&p), graph);
        host_waits(&p, Rule::Model)
    };
    assert_eq!(waits("compile.cuda_graph=off"), [1, 0]);
    assert_eq!(waits("compile.cuda_graph=full_iteration"), [0, 0]);
}

/// Units within a captured part have hooks in it. A unit of experts starts between the parts.
#[test]
fn units_inside_of_captured_parts_are_refused() {
    let lower = |scopes: &str, unit: &str| {
        let units = format!("fsdp.units=[\"layers.*\", \"layers.*.mlp.{unit}\"]");
        let scopes = format!("compile.cuda_graph={scopes}");
        let s = scenario::load(&file("small-moe"), &["mesh.ep=2".to_owned(), units, scopes]);
        plan(&s.expect("a scenario"))
    };
    let refused = |scopes: &str, unit: &str| match lower(scopes, unit) {
        Err(PlanError::CapturedUnit { scope, .. }) => scope,
        other => panic!("{scopes} {unit}: {:?}", other.map(|p| p.digest())),
    };
    assert_eq!(refused("[\"moe_router\"]", "router"), "layers.1.mlp router");
    assert_eq!(refused("[\"moe\"]", "experts"), "layers.1.mlp");
    let p = lower(PARTS, "experts").expect("hooks are between the graphs");
    passes(&check(&p), "experts as a unit");
}
