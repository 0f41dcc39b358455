//! `[moe]`: what it resolves to, and messages for bad input.

use crate::config::{Dispatcher, Histogram, Moe, Overflow, Routing, Scenario};
use crate::ir::ForcedChoice;
use crate::scenario::{ScenarioError, load};
use std::path::Path;

/// Loads the shipped mixture on four ranks that divide its eight experts.
fn experts(set: &[&str]) -> Result<Scenario, ScenarioError> {
    let all: Vec<String> = ["mesh.ep=4"]
        .iter()
        .chain(set)
        .map(|s| (*s).to_owned())
        .collect();
    load(Path::new("small-moe"), &all)
}

/// Policy `megatron` with buffers that captured scopes can use.
const DOUBLE_BUFFER: [&str; 3] = [
    "fsdp.policy=megatron",
    "fsdp.allocator=double_buffer",
    "fsdp.persist_on_alloc_fail=true",
];

fn moe(set: &[&str]) -> Moe {
    experts(set).unwrap().moe.unwrap()
}

fn fault(set: &[&str]) -> String {
    experts(set).unwrap_err().to_string()
}

#[test]
fn defaults_are_those_of_the_jobs_of_a_policy() {
    let of = |set: &[&str]| {
        let moe = moe(set);
        (moe.dispatcher, moe.capacity_factor, moe.on_overflow)
    };
    let (error, drop) = (Overflow::Error, Overflow::Drop);
    assert_eq!(of(&[]), (Dispatcher::Gather, None, error));
    for policy in ["fsdp.policy=fsdp2", "fsdp.policy=megatron"] {
        assert_eq!(of(&[policy]), (Dispatcher::AllToAll, Some(1.0), error));
        let gathered = of(&[policy, "moe.dispatcher=gather"]);
        assert_eq!(gathered, (Dispatcher::Gather, None, error));
        let worst = of(&[policy, "moe.capacity_factor=worst"]);
        assert_eq!(worst, (Dispatcher::AllToAll, None, error));
    }
    let compiled = of(&["fsdp.policy=fsdp2", "compile.mode=full"]);
    assert_eq!(compiled.0, Dispatcher::Gather);
    // Scopes that end before the exchange leave it to the host.
    for (scopes, dispatcher) in [
        ("[\"attn\", \"moe_router\"]", Dispatcher::AllToAll),
        ("[\"moe_preprocess\"]", Dispatcher::AllToAll),
        ("[\"attn\", \"moe\"]", Dispatcher::Gather),
        ("[\"block\"]", Dispatcher::Gather),
    ] {
        let scopes = format!("compile.cuda_graph={scopes}");
        let captured = of(&[&[scopes.as_str()], &DOUBLE_BUFFER[..]].concat());
        assert_eq!(captured.0, dispatcher, "{scopes}");
    }
    assert_eq!(
        of(&["moe.dispatcher=padded"]),
        (Dispatcher::Padded, None, drop)
    );
    let set = ["moe.dispatcher=padded", "moe.capacity_factor=1.5"];
    assert_eq!(of(&set), (Dispatcher::Padded, Some(1.5), drop));
    assert_eq!(
        of(&["moe.dispatcher=peer"]),
        (Dispatcher::Peer, None, error)
    );
    for dispatcher in ["gather", "peer", "deepep", "all_to_all"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let set = [&dispatcher, "moe.capacity_factor=0.75"];
        let (_, factor, overflow) = of(&set);
        assert_eq!((factor, overflow), (Some(0.75), error));
        let set = [&set[..], &["moe.on_overflow=drop"]].concat();
        assert_eq!(of(&set).2, drop);
    }
    let set = ["moe.dispatcher=peer", "fsdp.policy=fsdp2"];
    assert_eq!(of(&set), (Dispatcher::Peer, Some(1.0), error));
    let set = ["moe.dispatcher=deepep", "fsdp.policy=megatron"];
    assert_eq!(of(&set), (Dispatcher::Deepep, Some(1.0), error));
    assert_eq!(experts(&["mesh.ep=1"]).unwrap().moe, None);
}

#[test]
fn impossible_dispatchers_are_refused() {
    for (set, what) in [
        (
            &["moe.on_overflow=drop"][..],
            "`on_overflow` has no effect here: rows are reserved for every case",
        ),
        (
            &["moe.capacity_factor=worst", "moe.on_overflow=drop"],
            "leave it out, or change moe.capacity_factor",
        ),
        (&["moe.capacity_factor=worse"], "worst"),
        (
            &["moe.capacity_factor=0.001"],
            "the nearest legal value is capacity_factor = 0.010416666666666666",
        ),
        (
            &["mesh.ep=1", "moe.dispatcher=padded"],
            "each rank has all experts",
        ),
        (
            &["moe.dispatcher=padded", "moe.capacity_factor=0.001"],
            "nothing reaches an expert",
        ),
        (
            &["moe.dispatcher=all_to_all", "compile.mode=full"],
            "which a step compiled as one graph cannot contain",
        ),
        (
            &[
                "moe.dispatcher=all_to_all",
                "compile.cuda_graph=full_iteration",
            ],
            "which a CUDA graph cannot contain",
        ),
        (
            &["moe.dispatcher=all_to_all", "compile.cuda_graph=[\"moe\"]"],
            "or capture [\"attn\", \"moe_router\", \"moe_preprocess\"]",
        ),
        (
            &[
                "moe.dispatcher=all_to_all",
                "compile.cuda_graph=[\"block\"]",
            ],
            "which a CUDA graph cannot contain",
        ),
        (
            &["compile.cuda_graph=[\"moe_preprocess\", \"moe\"]"],
            "scope moe contains moe_preprocess",
        ),
        (
            &["compile.cuda_graph=[\"moe\", \"block\"]"],
            "scope block contains all others",
        ),
        (
            &["compile.cuda_graph=[\"moe_routers\"]"],
            "did you mean `moe_router`",
        ),
        (
            &["model.dense_layers=0", "compile.cuda_graph=[\"mlp\"]"],
            "scope mlp has no effect here: every layer of the model has experts",
        ),
        (
            &["moe.dispatcher=deepep", "compile.mode=full"],
            "dispatcher \"deepep\" reads the numbers of rows on the host, which a step compiled as one graph cannot",
        ),
        (
            &["moe.dispatcher=deepep", "compile.cuda_graph=[\"moe\"]"],
            "use dispatcher \"gather\", \"padded\" or \"peer\", or capture",
        ),
        (
            &[
                "moe.dispatcher=deepep",
                "mesh.dp_shard=12",
                "mesh.gpus_per_node=6",
            ],
            "groups of `ep` = 4 ranks do not fill nodes of 6 GPUs",
        ),
        (
            &[
                "moe.dispatcher=deepep",
                "mesh.dp_shard=12",
                "mesh.gpus_per_node=6",
            ],
            "the nearest legal value is ep = 2; all_to_all does not need whole nodes",
        ),
        (&["moe.dispatcher=alltoall"], "all_to_all"),
        (&["moe.dispatcher=deep_ep"], "did you mean `deepep`"),
        (
            &["moe.dispatcher=peer", "mesh.gpus_per_node=2"],
            "the nearest legal value is ep = 2",
        ),
        (
            &["moe.imbalance=2"],
            "only routing seeded draws orders of experts",
        ),
        (
            &["moe.routing=seeded", "moe.imbalance=5"],
            "the nearest legal value is 4",
        ),
        (
            &["mesh.ep=1", "moe.capacity_factor=2"],
            "with mesh.ep = 1, each rank has all experts",
        ),
        (
            &["mesh.ep=1", "moe.capacity_factor=2"],
            "leave it out, or change mesh.ep",
        ),
    ] {
        let text = fault(set);
        assert!(text.contains(what), "{set:?}: {text}");
    }
}

/// Two of eight experts on four ranks: a token is on 1 - C(6, 2) / C(8, 2) of them.
#[test]
fn tokens_are_sent_once_per_rank() {
    let reach = |set: &[&str]| {
        moe(&[&["moe.dispatcher=peer"], set].concat())
            .reach
            .unwrap()
    };
    let balanced = reach(&[]);
    assert!((balanced.of(Some(1)) - 13.0 / 28.0).abs() < 1e-12);
    let seeded = reach(&["moe.routing=seeded", "moe.imbalance=3"]);
    assert_eq!(seeded.balanced, balanced.balanced);
    assert!(seeded.of(Some(1)) > balanced.balanced && seeded.of(Some(1)) < 1.0);
    assert_eq!(moe(&[]).reach, None);
}

/// The same choices on two nodes with two ranks each: a token is on 1 - C(4, 2) / C(8, 2) of the
/// nodes. A rank gets the tokens of one rank of the other node over the network.
#[test]
fn tokens_cross_the_network_once_per_node() {
    let of = |set: &[&str]| moe(&[&["moe.dispatcher=deepep"], set].concat());
    let nodes = ["mesh.gpus_per_node=2"];
    let two = of(&nodes);
    assert!((two.reach.unwrap().balanced - 13.0 / 28.0).abs() < 1e-12);
    let node = two.node_reach.unwrap();
    assert_eq!(node.nodes, 2);
    assert!((node.reach.balanced - 11.0 / 14.0).abs() < 1e-12);
    assert_eq!(node.rows(Some(1), 1400), 1100);
    // Four nodes with one rank each: three other ranks, and every row crosses the network.
    let four = of(&["mesh.gpus_per_node=1"]).node_reach.unwrap();
    assert_eq!(four.nodes, 4);
    assert_eq!(four.rows(None, 2800), 3 * 1300);
    let seeded = of(&[&nodes[..], &["moe.routing=seeded", "moe.imbalance=3"]].concat());
    let seeded = seeded.node_reach.unwrap();
    let [rows, balanced] = [Some(1), None].map(|layer| seeded.rows(layer, 1400));
    assert!(rows > balanced && balanced == 1100, "{rows}");
    assert_eq!(of(&[]).node_reach, None);
    assert_eq!(
        moe(&["moe.dispatcher=all_to_all", nodes[0]]).node_reach,
        None
    );
}

#[test]
fn rows_follow_the_busiest_rank() {
    let seeded = moe(&["moe.routing=seeded", "moe.imbalance=3"]);
    assert_eq!(seeded.routing, Routing::Seeded);
    // The first layer is dense.
    let layers: Vec<u32> = seeded.busiest.keys().copied().collect();
    assert_eq!(layers, [1, 2]);
    assert!(seeded.busiest.values().all(|f| (1.0..3.0).contains(f)));
    // Jobs reserve what the busiest rank needs.
    let sent = moe(&["fsdp.policy=fsdp2", "moe.routing=seeded", "moe.imbalance=3"]);
    let most = sent.busiest.values().copied().fold(1.0, f64::max);
    assert_eq!(sent.capacity_factor, Some(most));
    assert_eq!(sent.busiest, seeded.busiest);
}

/// Equally popular experts need a factor of 1.
#[test]
fn balanced_choices_find_rows_from_a_factor_of_one_on() {
    let short = |factor: &str| {
        let factor = format!("moe.capacity_factor={factor}");
        experts(&[&factor]).unwrap().row_shortage()
    };
    assert_eq!(short("1"), None);
    let half = short("0.5").unwrap();
    assert_eq!((half.layer, half.layers, half.factor), (1, 2, 1.0));
    assert!((half.share - 0.5).abs() < 1e-12 && !half.drop);
    assert_eq!(half.wanted, 2 * half.reserved);
    assert_eq!(experts(&[]).unwrap().row_shortage(), None);
    assert_eq!(experts(&["mesh.ep=1"]).unwrap().row_shortage(), None);
}

#[test]
fn a_histogram_belongs_to_its_model() {
    let name = format!("shardlab-{}-routing.json", std::process::id());
    let path = std::env::temp_dir().join(name);
    let set = format!("moe.routing={}", path.display());
    assert!(fault(&[&set]).contains("cannot read"), "{}", fault(&[&set]));
    let recorded = |experts: u64, layers: &[u32]| {
        let counts: Vec<u64> = (0..experts).collect();
        let layers = layers.iter().map(|l| (*l, counts.clone())).collect();
        let (format, top_k) = (Histogram::FORMAT, 2);
        let histogram = Histogram {
            format,
            experts,
            top_k,
            layers,
        };
        std::fs::write(&path, serde_json::to_string(&histogram).unwrap()).unwrap();
    };
    recorded(8, &[1, 2]);
    let moe = moe(&[&set]);
    // Experts 6 and 7 of 28 choices, on one of four ranks.
    let busiest = 13.0 / 28.0 * 4.0;
    assert_eq!(moe.busiest, [(1, busiest), (2, busiest)].into());
    // The last rank alone has more than 3/2 of an equal share: 13/7 instead of 21/14.
    for dispatcher in ["gather", "peer", "deepep", "padded", "all_to_all"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let short = |factor: &str| {
            let factor = format!("moe.capacity_factor={factor}");
            let s = experts(&[&set, &dispatcher, &factor]).unwrap();
            (s.row_shortage(), s.train.micro_batch * s.train.seq_len * 2)
        };
        let (found, choices) = short("1.5");
        let found = found.unwrap();
        let balanced = match dispatcher.as_str() {
            "moe.dispatcher=gather" | "moe.dispatcher=peer" | "moe.dispatcher=deepep" => choices,
            _ => choices / 4,
        };
        assert_eq!((found.layers, found.reserved), (2, balanced * 3 / 2));
        assert_eq!(found.wanted, (balanced * 13).div_ceil(7), "{dispatcher}");
        assert!((found.share - (13.0 / 7.0 - 1.5) / 4.0).abs() < 1e-9);
        assert!((1.857..1.89).contains(&found.factor), "{}", found.factor);
        assert_eq!(found.drop, dispatcher == "moe.dispatcher=padded");
        let enough = found.factor.to_string();
        assert_eq!(short(&enough).0, None);
        assert_eq!(short("worst").0, None);
    }
    for (experts, layers) in [(8, &[0, 1, 2][..]), (16, &[1, 2])] {
        recorded(experts, layers);
        let text = fault(&[&set]);
        assert!(text.contains("is the histogram of another model"), "{text}");
        assert!(
            text.contains("this one has 8 experts, top 2, in layers 1, 2"),
            "{text}"
        );
    }
    for (counts, what) in [
        ([0; 8], "no expert of layer 2 has a token"),
        // Four choices of two tokens.
        (
            [3, 1, 0, 0, 0, 0, 0, 0],
            "expert 0 of layer 2 has 3 tokens, but 4 choices, 2 of each token, are those of 2 tokens",
        ),
    ] {
        recorded(8, &[1, 2]);
        let mut histogram: Histogram =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        histogram.layers.insert(2, counts.to_vec());
        std::fs::write(&path, serde_json::to_string(&histogram).unwrap()).unwrap();
        let text = fault(&[&set]);
        assert!(text.contains(what), "{text}");
    }
    std::fs::write(&path, "{\n  \"format\": 1,\n  \"experts\": true\n}").unwrap();
    let text = fault(&[&set]);
    assert!(text.contains("routing.json:3:17"), "{text}");
    std::fs::write(
        &path,
        "{\"format\": 7, \"experts\": 8, \"top_k\": 2, \"layers\": {}}",
    )
    .unwrap();
    let text = fault(&[&set]);
    assert!(text.contains("this program reads format 1"), "{text}");
    // Without data on disk.
    let large = std::fs::File::create(&path).unwrap();
    large.set_len((64 << 20) + 1).unwrap();
    let text = fault(&[&set]);
    assert!(text.contains("it is larger than 64.0 MiB"), "{text}");
    std::fs::remove_file(&path).unwrap();
}

/// Forced routing needs experts, not ranks that divide them.
#[test]
fn forced_routing_takes_the_popularity_of_predictions() {
    let forced = |set: &[&str]| {
        let s = experts(&[&["moe.force_routing=true"], set].concat()).unwrap();
        (s.forced_routing.unwrap(), s.moe)
    };
    for ep in ["mesh.ep=1", "mesh.ep=4"] {
        let (balanced, moe) = forced(&[ep]);
        assert_eq!(balanced.routing, Routing::Balanced);
        assert!(balanced.popularity.is_empty());
        assert_eq!(moe.is_some(), ep == "mesh.ep=4");
        let (seeded, _) = forced(&[ep, "moe.routing=seeded", "moe.imbalance=3"]);
        let layers: Vec<u32> = seeded.popularity.keys().copied().collect();
        assert_eq!(layers, [1, 2]);
        for each in seeded.popularity.values() {
            let most = each.iter().copied().fold(0.0, f64::max);
            assert!((most * 8.0 / each.iter().sum::<f64>() - 3.0).abs() < 1e-6);
        }
        // Choices are drawn in any routing.
        assert_eq!(forced(&[ep, "moe.routing_seed=5"]).0.seed, 5);
    }
    assert_eq!(experts(&[]).unwrap().forced_routing, None);
    assert_eq!(
        experts(&["moe.force_routing=false"])
            .unwrap()
            .forced_routing,
        None
    );
    let (in_order, _) = forced(&["moe.routing=round_robin"]);
    let of = experts(&[]).unwrap().model.options.experts;
    assert_eq!(in_order.choice(&of, Some(1)), ForcedChoice::RoundRobin);
    let text = fault(&["moe.routing=round_robin"]);
    assert!(text.contains("set moe.force_routing = true"), "{text}");
    let set = ["moe.force_routing=true", "moe.routing=round_robin"];
    let text = fault(&[&set[..], &["moe.routing_seed=1"]].concat());
    assert!(text.contains("`routing_seed` has no effect"), "{text}");
    let set = ["mesh.ep=1", "moe.force_routing=true"];
    let fails = |set: &str, what: &str| {
        let text = fault(&["mesh.ep=1", set]);
        assert!(text.contains(what), "{set}: {text}");
    };
    fails("moe.routing=seeded", "each rank has all experts");
    fails("moe.routing_seed=1", "`routing_seed` has no effect here");
    let text = fault(&[&set[..], &["moe.imbalance=2"]].concat());
    assert!(text.contains("only routing seeded"), "{text}");
    let text = fault(&[&set[..], &["moe.dispatcher=peer"]].concat());
    assert!(text.contains("each rank has all experts"), "{text}");
    let set = ["moe.force_routing=true".to_owned()];
    let text = load(Path::new("small-native"), &set)
        .unwrap_err()
        .to_string();
    let what = "`force_routing` has no effect here: the model has no experts";
    assert!(text.contains(what), "{text}");
}

/// Forced choices know no groups of experts, so that a token of `peer` reaches more ranks.
#[test]
fn forced_choices_are_among_all_experts() {
    let groups = [
        "moe.dispatcher=peer",
        "model.router_groups=4",
        "model.router_group_top_k=1",
    ];
    let reach = |set: &[&str]| moe(&[&groups[..], set].concat()).reach.unwrap().balanced;
    let all = 13.0 / 28.0;
    assert!((reach(&["moe.force_routing=true"]) - all).abs() < 1e-12);
    // A token's two experts are on one of four ranks.
    assert_eq!(
        reach(&["moe.force_routing=true", "moe.routing=round_robin"]),
        0.25
    );
    assert!(reach(&[]) < all);
}
