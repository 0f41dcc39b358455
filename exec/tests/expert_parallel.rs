//! Expert parallelism: tokens are sent to the ranks of their experts and back. Losses, gradients
//! and weights are those of ranks that have all experts.

mod common;

use common::{load, poisoned, run};
use shardlab_exec::engine::ExecOptions;
use shardlab_exec::train::{self, CheckpointOptions, NoObserver, Outcome, Resume, RunOptions};
use shardlab_plan::config::Histogram;

const STEPS: u64 = 4;

fn options() -> RunOptions {
    RunOptions {
        steps: Some(STEPS),
        // Rows without a token are never read: they stay poisoned and do not count as NaN.
        exec: ExecOptions {
            nan_check: true,
            ..poisoned()
        },
        ..RunOptions::default()
    }
}

/// Capacity for every case: by default, these policies reserve rows for a balanced load.
const ROOM: &str = "moe.capacity_factor=4";

/// Returns the settings of a mesh, with capacity for every case.
fn settings<'a>(mesh: &'a [String; 2], set: &[&'a str]) -> Vec<&'a str> {
    let sends = ["fsdp.policy=fsdp2", "fsdp.policy=megatron"];
    let sends = mesh[1] != "mesh.ep=1" && set.iter().any(|s| sends.contains(s));
    let own = set.iter().any(|s| s.starts_with("moe."));
    mesh.iter()
        .map(String::as_str)
        .chain(["precision.compute=f32", "train.clip_norm=0.5"])
        .chain((sends && !own).then_some(ROOM))
        .chain(set.iter().copied())
        .collect()
}

fn mesh(dp_shard: u32, ep: u32) -> [String; 2] {
    [format!("mesh.dp_shard={dp_shard}"), format!("mesh.ep={ep}")]
}

/// Trains the shipped MoE model in float32 on a mesh.
fn trained(dp_shard: u32, ep: u32, set: &[&str]) -> Outcome {
    let mesh = mesh(dp_shard, ep);
    run(&load("small-moe", &settings(&mesh, set)), options())
}

/// Asserts that results are close: float32 sums in another order differ in their last bits only.
fn assert_close(a: &Outcome, b: &Outcome, what: &str) {
    assert!(!a.run.losses.is_empty() && !a.weight_norms.is_empty());
    for (kind, x, y, tolerance) in [
        ("loss", &a.run.losses, &b.run.losses, 1e-6),
        ("gradient norm", &a.run.grad_norms, &b.run.grad_norms, 1e-5),
        ("weight norm", &a.weight_norms, &b.weight_norms, 1e-5),
    ] {
        assert_eq!(x.len(), y.len(), "{what}: {kind}");
        for (x, y) in x.iter().zip(y) {
            // A run whose optimizer sums gradients has no norms.
            let close = (x - y).abs() <= tolerance * y.abs() || x.is_nan() && y.is_nan();
            assert!(close, "{what}: {kind} {x} instead of {y}");
        }
    }
}

#[test]
fn ranks_with_some_experts_reach_the_losses_of_ranks_with_all() {
    let all = trained(4, 1, &[]);
    assert!(all.run.grad_norms.iter().all(|n| n.is_finite()));
    assert!(all.run.losses[0] > all.run.losses[STEPS as usize - 1]);
    for policy in ["native", "fsdp2", "megatron"] {
        let policy = format!("fsdp.policy={policy}");
        for ep in [2, 4] {
            let o = trained(4, ep, &[&policy]);
            assert_close(&o, &all, &format!("{policy} ep = {ep}"));
        }
    }
    for set in [
        &["compile.mode=blocks"][..],
        &["compile.mode=regions"],
        &["compile.mode=full"],
        &["train.recompute=full"],
        &["train.recompute=selective", "compile.mode=regions"],
        &["compile.cuda_graph=full_iteration"],
        &["compile.cuda_graph=[\"block\"]"],
        &["fsdp.strategy=optim"],
        &["fsdp.strategy=optim_grads"],
        &["fsdp.strategy=no_shard"],
        &["fsdp.policy=megatron", "fsdp.strategy=optim_grads"],
        &["fsdp.policy=megatron", "fsdp.strategy=no_shard"],
        &["fsdp.optimizer_in_backward=true", "train.clip_norm=0.0"],
    ] {
        for ep in [2, 4] {
            let wanted = match set {
                [_, "train.clip_norm=0.0"] => &trained(4, 1, set),
                _ => &all,
            };
            assert_close(&trained(4, ep, set), wanted, &format!("{set:?} ep = {ep}"));
        }
    }
}

/// Gate and down projections of experts are gathered and reduced separately, one after the other.
#[test]
fn projections_of_experts_may_be_units() {
    let units = "fsdp.units=[\"layers.*\", \"layers.*.mlp.experts.gate_up\", \"layers.*.mlp.experts.down\", \
                 \"tok_embeddings\", \"norm+output=keep\"]";
    let all = trained(4, 1, &[]);
    for set in [
        &[][..],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=megatron"],
        &["compile.mode=regions", "train.recompute=selective"],
        &["train.recompute=full"],
    ] {
        for ep in [1, 2] {
            let set = [set, &[units]].concat();
            assert_close(&trained(4, ep, &set), &all, &format!("{set:?} ep = {ep}"));
        }
    }
}

/// AdamW hides a wrong factor of gradients; SGD does not.
#[test]
fn gradients_of_experts_are_means_over_all_ranks() {
    let sgd = ["train.optimizer=sgd", "train.lr=0.5", "train.clip_norm=0.0"];
    let sgd = [&sgd[..], &["train.grad_norm=true"]].concat();
    let all = trained(4, 1, &sgd);
    for set in [
        &[][..],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=megatron"],
        &["compile.mode=full"],
        &["fsdp.average_in_collective=true", "fsdp.policy=megatron"],
        &["fsdp.copy_engine_reduce=true"],
        &["fsdp.strategy=optim"],
    ] {
        for ep in [2, 4] {
            let o = trained(4, ep, &[&sgd, set].concat());
            assert_close(&o, &all, &format!("{set:?} ep = {ep}"));
        }
    }
    // There is no norm if the optimizer sums the pieces.
    let pieces = ["fsdp.copy_engine_reduce=true", "fsdp.sum_in_optimizer=true"];
    let pieces = [&sgd[..], &pieces, &["train.grad_norm=false"]].concat();
    let without = trained(4, 1, &pieces);
    for ep in [2, 4] {
        assert_close(
            &trained(4, ep, &pieces),
            &without,
            &format!("pieces, ep = {ep}"),
        );
    }
    let accumulated = ["train.micro_batch=1", "train.grad_accum=2"];
    let all = trained(4, 1, &[&sgd[..], &accumulated].concat());
    for set in [
        &[][..],
        &["fsdp.gradient_sync=last"],
        &["fsdp.policy=fsdp2"],
        &["fsdp.policy=megatron"],
        &["compile.mode=full"],
    ] {
        for ep in [2, 4] {
            let o = trained(4, ep, &[&sgd[..], &accumulated, set].concat());
            assert_close(&o, &all, &format!("{set:?} ep = {ep}, accumulated"));
        }
    }
}

#[test]
fn replicas_and_outer_shards_of_experts() {
    for (dp_shard, ep) in [(2, 2), (4, 2)] {
        let outer = ["mesh.dp_outer=2", "train.optimizer=sgd", "train.lr=0.5"];
        let all = trained(dp_shard, 1, &outer);
        for set in [
            &[][..],
            &["fsdp.policy=fsdp2"],
            &["fsdp.policy=megatron"],
            &["compile.mode=full"],
            &["fsdp.strategy=no_shard"],
        ] {
            let o = trained(dp_shard, ep, &[&outer[..], set].concat());
            assert_close(&o, &all, &format!("{set:?} {dp_shard} x 2, ep = {ep}"));
        }
    }
    let outer = ["mesh.dp_outer=2", "fsdp.outer_strategy=optim"];
    assert_close(
        &trained(4, 2, &outer),
        &trained(4, 1, &outer),
        "outer shards",
    );
}

#[test]
fn every_dispatcher_reaches_the_losses_of_ranks_with_all_experts() {
    let all = trained(4, 1, &[]);
    for dispatcher in ["gather", "all_to_all", "padded", "peer", "deepep"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        for ep in [2, 4] {
            for set in [
                &[][..],
                &["fsdp.policy=fsdp2"],
                &["fsdp.policy=megatron", "compile.mode=regions"],
                &["train.recompute=full"],
                &["train.recompute=selective", "compile.mode=regions"],
            ] {
                let set = [&[dispatcher.as_str(), ROOM], set].concat();
                let what = format!("{set:?} ep = {ep}");
                assert_close(&trained(4, ep, &set), &all, &what);
            }
        }
    }
    for set in [
        &["compile.mode=full"][..],
        &["compile.cuda_graph=full_iteration"],
        &["compile.cuda_graph=[\"block\"]"],
    ] {
        for dispatcher in ["moe.dispatcher=padded", "moe.dispatcher=peer"] {
            let set = [&[dispatcher], set].concat();
            assert_close(&trained(4, 4, &set), &all, &format!("{set:?}"));
        }
    }
}

/// Forced choices, with longer sequences than those of the shipped MoE model.
const FORCED: [&str; 3] = [
    "moe.force_routing=true",
    "train.seq_len=64",
    "model.max_seq_len=64",
];

/// Returns the counts of a run with forced routing, by layer.
fn forced_counts(dp_shard: u32, ep: u32, set: &[&str]) -> (Outcome, Vec<Vec<u64>>) {
    let mesh = mesh(dp_shard, ep);
    let forced = [&FORCED[..], set].concat();
    let mut options = options();
    options.exec.routing = true;
    let outcome = run(&load("small-moe", &settings(&mesh, &forced)), options);
    let histogram = outcome.routing.as_ref().unwrap();
    let counts = histogram.layers.values().cloned().collect();
    (outcome, counts)
}

#[test]
fn forced_routing_chooses_as_the_scenario_says() {
    let seeded = ["moe.routing=seeded", "moe.imbalance=2"];
    let round_robin = ["moe.routing=round_robin"];
    let (free, balanced) = (trained(4, 1, &FORCED[1..]), &[][..]);
    for set in [balanced, &round_robin, &seeded] {
        let (all, counts) = forced_counts(4, 1, set);
        assert_ne!(all.run.losses, free.run.losses);
        assert!(all.run.losses[0] > all.run.losses[STEPS as usize - 1]);
        for layer in &counts {
            let mean = layer.iter().sum::<u64>() as f64 / 8.0;
            let most = layer.iter().copied().max().unwrap() as f64 / mean;
            // All steps have the same choices. Rounding moves at most one of them per group of four
            // tokens and rank.
            if set != seeded {
                assert!(layer.iter().all(|n| *n as f64 == mean), "{layer:?}");
            } else {
                assert!((most - 2.0).abs() < 0.1, "{most}: {layer:?}");
            }
        }
        assert_eq!(counts[0] == counts[1], set != seeded);
        for ep in [2, 4] {
            for more in [
                &[][..],
                &["moe.dispatcher=padded"],
                &["moe.dispatcher=all_to_all"],
                &["moe.dispatcher=peer"],
                &["moe.dispatcher=deepep"],
                &["fsdp.policy=fsdp2", ROOM],
                &["fsdp.policy=megatron", ROOM, "compile.mode=regions"],
                &["train.recompute=full"],
                &["train.recompute=selective", "compile.mode=blocks"],
            ] {
                let set = [set, more].concat();
                let (divided, same) = forced_counts(4, ep, &set);
                assert_close(&divided, &all, &format!("{set:?} ep = {ep}"));
                assert_eq!(same, counts, "{set:?} ep = {ep}");
            }
        }
    }
    let all = forced_counts(4, 1, &[]).0;
    // Ranks send each other equal numbers of rows.
    let exact = ["fsdp.policy=fsdp2", "moe.capacity_factor=1"];
    assert_close(&forced_counts(4, 4, &exact).0, &all, "no spare row");
    // Each token goes to the one rank that has both of its experts.
    let once = [&round_robin[..], &exact, &["moe.dispatcher=peer"]].concat();
    let in_order = forced_counts(4, 1, &round_robin).0;
    assert_close(
        &forced_counts(4, 4, &once).0,
        &in_order,
        "one rank per token",
    );
    for set in [
        &["compile.mode=full"][..],
        &["compile.cuda_graph=full_iteration"],
        &["compile.cuda_graph=[\"block\"]", "moe.dispatcher=peer"],
    ] {
        let set = [&FORCED[..], set].concat();
        for ep in [1, 2] {
            // Ranks with all experts have no dispatcher.
            let own = set.len() - usize::from(ep == 1 && set.len() == FORCED.len() + 2);
            let what = format!("{set:?} ep = {ep}");
            assert_close(&trained(4, ep, &set[..own]), &all, &what);
        }
    }
}

/// The fraction of tokens that choose each expert is that of the recorded choices.
#[test]
fn forced_routing_follows_a_histogram() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("routing.json");
    let wanted = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 5, 0, 5, 1, 2, 3]];
    let recorded = Histogram {
        format: Histogram::FORMAT,
        experts: 8,
        top_k: 2,
        layers: (1..).zip(wanted.map(|w| w.to_vec())).collect(),
    };
    std::fs::write(&path, serde_json::to_string(&recorded).unwrap()).unwrap();
    let routing = format!("moe.routing={}", path.display());
    let (_, counts) = forced_counts(4, 1, &[&routing]);
    for (counts, wanted) in counts.iter().zip(&wanted) {
        let all = [counts.iter().sum::<u64>(), wanted.iter().sum()].map(|n| n as f64);
        for (n, w) in counts.iter().zip(wanted) {
            let shares = [*n as f64 / all[0], *w as f64 / all[1]];
            assert!((shares[0] - shares[1]).abs() < 0.02, "{counts:?}");
            assert_eq!(*n == 0, *w == 0);
        }
    }
    let divided = forced_counts(4, 2, &[&routing, "moe.dispatcher=peer"]).1;
    assert_eq!(divided, counts);
}

#[test]
fn choices_without_a_row_are_left_out_or_an_error() {
    let bits = |o: &Outcome| -> Vec<u64> { o.run.losses.iter().map(|l| l.to_bits()).collect() };
    let padded = |factor| trained(4, 4, &["moe.dispatcher=padded", factor]);
    let whole = padded("moe.capacity_factor=4");
    let [a, b] = [0, 1].map(|_| padded("moe.capacity_factor=0.5"));
    assert_eq!(bits(&a), bits(&b));
    assert!(a.run.losses.iter().all(|l| l.is_finite()));
    assert_ne!(bits(&a), bits(&whole));
    // An additional row beyond the number of choices has no effect.
    assert_eq!(bits(&padded("moe.capacity_factor=100")), bits(&whole));

    for set in [
        &["fsdp.policy=fsdp2", "moe.capacity_factor=1"][..],
        &[
            "moe.dispatcher=padded",
            "moe.on_overflow=error",
            "moe.capacity_factor=0.9",
        ],
    ] {
        let mesh = mesh(4, 4);
        let scenario = load("small-moe", &settings(&mesh, set));
        let program = common::plan(&scenario);
        let failed = train::train(&scenario, &program, options(), &mut NoObserver);
        let text = failed.err().unwrap().to_string();
        let found = text.contains("layers.1: kernel `dispatch_experts`")
            && text.contains("moe.capacity_factor =");
        assert!(found, "{text}");
    }
    // Four ranks with 48 tokens and two choices each share the 48 rows of a rank.
    for dispatcher in ["moe.dispatcher=peer", "moe.dispatcher=gather"] {
        let mesh = mesh(4, 4);
        let set = [dispatcher, "moe.capacity_factor=0.5"];
        let scenario = load("small-moe", &settings(&mesh, &set));
        let program = common::plan(&scenario);
        let failed = train::train(&scenario, &program, options(), &mut NoObserver);
        let text = failed.err().unwrap().to_string();
        for part in [
            "rank ",
            "layers.1: ",
            "op `sort_experts`",
            "reserves 48 rows",
            "moe.capacity_factor = ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

/// Returns all losses and norms as bits.
fn all_bits(o: &Outcome) -> Vec<u64> {
    assert!(!o.run.losses.is_empty());
    let all = o.run.losses.iter().chain(&o.run.grad_norms);
    all.chain(&o.weight_norms).map(|v| v.to_bits()).collect()
}

/// If all choices find rows, the number of rows only affects memory.
#[test]
fn rows_that_suffice_give_the_bits_of_the_worst_case() {
    for (dispatcher, set) in [
        ("gather", &[][..]),
        ("gather", &["compile.mode=regions", "train.recompute=full"]),
        (
            "gather",
            &["fsdp.policy=fsdp2", "train.recompute=selective"],
        ),
        ("gather", &["compile.cuda_graph=full_iteration"]),
        ("peer", &["compile.mode=full"]),
        ("peer", &["fsdp.policy=megatron"]),
    ] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        // Forced choices are balanced, so a factor of 1 has no spare row.
        for (ep, factor, forced) in [(4, "1", &FORCED[..]), (2, "1.95", &[])] {
            let run = |factor: &str| {
                let factor = format!("moe.capacity_factor={factor}");
                let own = [dispatcher.as_str(), factor.as_str()];
                trained(4, ep, &[forced, set, &own].concat())
            };
            let [some, worst] = [factor, "worst"].map(run);
            assert_eq!(all_bits(&some), all_bits(&worst), "{dispatcher} {set:?}");
            let peak = |o: &Outcome| o.run.memory.peak_allocated;
            assert!(peak(&some) < peak(&worst), "{dispatcher} {set:?}");
        }
    }
}

/// Gathered and pushed tokens find rows in the same order, regardless of the kernels. If each rank
/// has separate rows, only the choices of one rank compete for them.
#[test]
fn dropped_choices_are_those_of_later_tokens() {
    let run = |dispatcher: &str, more: &[&str]| {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let own = [dispatcher.as_str(), "moe.on_overflow=drop"];
        trained(4, 4, &[&own, more].concat())
    };
    let few = ["moe.capacity_factor=0.5"];
    let gathered = run("gather", &few);
    assert_eq!(all_bits(&gathered), all_bits(&run("gather", &few)));
    assert!(gathered.run.losses.iter().all(|l| l.is_finite()));
    let all = trained(4, 4, &[]);
    assert_ne!(all_bits(&gathered), all_bits(&all));
    for more in [
        &[][..],
        &["compile.mode=regions"],
        &["train.recompute=full"],
        &["compile.cuda_graph=full_iteration"],
    ] {
        let set = [&few[..], more].concat();
        for dispatcher in ["gather", "peer"] {
            let what = format!("{dispatcher} {more:?}");
            assert_close(&run(dispatcher, &set), &gathered, &what);
        }
    }
    let padded = run("padded", &few);
    assert_close(&run("all_to_all", &few), &padded, "all_to_all");
    assert_ne!(all_bits(&padded), all_bits(&gathered));
    // With rows for every choice, nothing is dropped.
    let enough = ["moe.capacity_factor=4"];
    for dispatcher in ["gather", "peer"] {
        assert_close(&run(dispatcher, &enough), &all, dispatcher);
    }
}

/// Rows that cross the network once per node reach the same ranks as those of `peer`, and results
/// are added up in the same order.
#[test]
fn rows_across_nodes_have_the_bits_of_one_node() {
    for set in [
        &[ROOM][..],
        &["fsdp.policy=fsdp2", "moe.capacity_factor=worst"],
        &[ROOM, "train.recompute=full"],
    ] {
        let run = |own: &[&str]| all_bits(&trained(4, 4, &[set, own].concat()));
        let one = run(&["moe.dispatcher=peer"]);
        for nodes in ["mesh.gpus_per_node=2", "mesh.gpus_per_node=1"] {
            assert_eq!(
                run(&["moe.dispatcher=deepep", nodes]),
                one,
                "{set:?} {nodes}"
            );
        }
    }
}

/// Experts that `fully_shard` does not manage are updated like those in groups of one rank, also if
/// gradients are summed and scaled in bf16.
#[test]
fn ignored_experts_have_the_bits_of_managed_ones() {
    let fsdp2 = ["fsdp.policy=fsdp2", ROOM, "train.grad_norm=true"];
    let half = [
        "precision.compute=bf16",
        "precision.main_params=none",
        "precision.main_grads=bf16",
        "precision.reduce_dtype=bf16",
    ];
    let twice = ["train.micro_batch=1", "train.grad_accum=2"];
    let last = "fsdp.gradient_sync=last";
    for set in [
        &[][..],
        &["train.recompute=full"],
        &["fsdp.reshard_after_forward=false"],
        &twice,
        &[twice[0], twice[1], last],
        &[twice[0], twice[1], "train.joint_backward=true"],
        &["fsdp.gradient_scaling_factor=0.5", "train.optimizer=sgd"],
        &half,
        &[half[0], half[1], half[2], half[3], twice[0], twice[1], last],
    ] {
        let run = |own: &[&str]| all_bits(&trained(4, 4, &[&fsdp2[..], set, own].concat()));
        let managed = run(&[]);
        for ignored in ["experts", "[\"layers.*.mlp.experts\"]"] {
            let ignored = format!("fsdp.ignored_params={ignored}");
            assert_eq!(run(&[&ignored]), managed, "{set:?} {ignored}");
        }
    }
    // Frozen parameters may be on all ranks. Norms of weights sum shards in another order.
    let frozen = "fsdp.frozen=[\"tok_embeddings\"]";
    let bits = |own: &[&str]| -> Vec<u64> {
        let o = trained(4, 4, &[&fsdp2[..], &[frozen], own].concat());
        let all = o.run.losses.iter().chain(&o.run.grad_norms);
        all.map(|v| v.to_bits()).collect()
    };
    let all = "fsdp.ignored_params=[\"tok_embeddings\", \"layers.*.mlp.experts\"]";
    assert_eq!(bits(&[all]), bits(&[]));
}

#[test]
fn equal_runs_are_equal_to_the_last_bit() {
    let [a, b] = [0, 1].map(|_| trained(4, 2, &["compile.mode=regions"]));
    let bits = |o: &Outcome| -> Vec<u64> {
        let all = o.run.losses.iter().chain(&o.weight_norms);
        all.map(|v| v.to_bits()).collect()
    };
    assert_eq!(bits(&a), bits(&b));
}

/// The shared expert computes the same numbers wherever it runs.
#[test]
fn shared_experts_that_overlap_have_the_bits_of_others() {
    let bits = |o: &Outcome| -> Vec<u64> {
        let all = o.run.losses.iter().chain(&o.run.grad_norms);
        all.chain(&o.weight_norms).map(|v| v.to_bits()).collect()
    };
    for dispatcher in ["all_to_all", "gather", "padded", "peer", "deepep"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        for set in [
            &[][..],
            &["compile.mode=regions", "train.recompute=full"],
            &["fsdp.policy=megatron"],
        ] {
            let set = [&[dispatcher.as_str()], set].concat();
            let [with, without] = [true, false].map(|overlap| {
                let overlap = format!("moe.shared_expert_overlap={overlap}");
                let all = set.iter().copied().chain([ROOM, overlap.as_str()]);
                trained(4, 2, &all.collect::<Vec<&str>>())
            });
            assert!(!with.run.losses.is_empty());
            assert_eq!(bits(&with), bits(&without), "{set:?}");
        }
    }
}

/// Scopes that end before the token exchange, which every dispatcher allows.
const BEFORE_EXCHANGE: [&str; 5] = [
    "[\"attn\"]",
    "[\"moe_router\"]",
    "[\"moe_preprocess\"]",
    "[\"attn\", \"moe_router\"]",
    "[\"attn\", \"moe_router\", \"moe_preprocess\"]",
];
/// Scopes that contain the token exchange.
const WITH_EXCHANGE: [&str; 2] = ["[\"moe\"]", "[\"attn\", \"moe\"]"];

/// Returns losses, gradient norms and weight norms of 20 steps, and the counts of the eager run.
fn captured_or_not(ep: u32, set: &[&str], scopes: Option<&str>) -> (Vec<u64>, Option<Vec<u64>>) {
    let scopes = scopes.map(|s| format!("compile.cuda_graph={s}"));
    let mesh = mesh(2, ep);
    let all: Vec<&str> = (mesh.iter().map(String::as_str))
        .chain(set.iter().copied())
        .chain(scopes.as_deref())
        .collect();
    let mut options = options();
    options.steps = Some(20);
    options.exec.routing = scopes.is_none();
    let o = run(&load("small-moe", &all), options);
    assert_eq!(o.run.losses.len(), 20);
    let numbers = (o.run.losses.iter())
        .chain(&o.run.grad_norms)
        .chain(&o.weight_norms);
    let counts = o.routing.as_ref().map(|h| h.layers[&1].clone());
    (numbers.map(|v| v.to_bits()).collect(), counts)
}

/// A captured graph replays what it recorded, so choices of experts, which change from step to
/// step, must not be part of it.
#[test]
fn captured_parts_of_experts_have_the_bits_of_eager_ones() {
    let double_buffer = [
        "fsdp.policy=megatron",
        "fsdp.allocator=double_buffer",
        "fsdp.persist_on_alloc_fail=true",
    ];
    let before = &BEFORE_EXCHANGE[..];
    let all = [before, &WITH_EXCHANGE].concat();
    let few = [before[4], WITH_EXCHANGE[0], WITH_EXCHANGE[1]];
    for policy in [&["fsdp.policy=native"][..], &double_buffer] {
        for (ep, dispatcher, scopes) in [
            (1, None, &all[..]),
            (2, Some("moe.dispatcher=all_to_all"), before),
            (2, Some("moe.dispatcher=gather"), &all),
            (2, Some("moe.dispatcher=padded"), &few),
            (2, Some("moe.dispatcher=peer"), &few),
        ] {
            let room = dispatcher.filter(|d| *d != "moe.dispatcher=gather");
            let set: Vec<&str> = (policy.iter().copied())
                .chain(dispatcher)
                .chain(room.map(|_| ROOM))
                .collect();
            let (eager, counts) = captured_or_not(ep, &set, None);
            let counts = counts.expect("recorded");
            // If all steps had the same choices, this would be a multiple of 20.
            assert!(counts.iter().any(|n| n % 20 != 0), "{counts:?}");
            for scopes in scopes {
                let (captured, _) = captured_or_not(ep, &set, Some(scopes));
                assert!(captured == eager, "ep = {ep}, {set:?}, {scopes}");
            }
        }
    }
}

/// Experts are initialized and saved by their index among all experts, so a run can continue with
/// another expert-parallel size.
#[test]
fn a_checkpoint_is_that_of_all_experts() {
    let dir = tempfile::tempdir().unwrap();
    let until = |steps, dp: u32, ep: u32, set: &[&str]| {
        let mesh = mesh(dp, ep);
        let set = settings(&mesh, set);
        let options = RunOptions {
            steps: Some(steps),
            checkpoints: Some(CheckpointOptions {
                dir: dir.path().to_path_buf(),
                every: 0,
                keep: 3,
                resume: Resume::Auto,
            }),
            ..options()
        };
        run(&load("small-moe", &set), options)
    };
    let whole = trained(4, 1, &[]);
    until(1, 4, 2, &["fsdp.policy=native"]);
    let ignored = ["fsdp.policy=fsdp2", "fsdp.ignored_params=experts"];
    assert_eq!(until(2, 4, 4, &ignored).resumed_from, 1);
    assert_eq!(until(3, 4, 1, &["fsdp.policy=native"]).resumed_from, 2);
    let o = until(STEPS, 4, 2, &["fsdp.policy=megatron"]);
    assert_eq!(o.resumed_from, 3);
    assert_close(&o, &whole, "resumed");
}
