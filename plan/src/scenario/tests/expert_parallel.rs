//! `mesh.ep`: what it has to divide, and what it excludes.

use super::super::*;

const MODEL: &str = "[model]\nfamily = \"moe\"\nlayers = 2\nhidden = 32\nheads = 4\nvocab = 97\nexperts = 12\ntop_k = 2\n\
                     [train]\nseq_len = 8\n[mesh]\nhardware = \"cpu\"\ndp_shard = 8\n";

fn parsed(text: &str) -> Result<crate::Scenario, ScenarioError> {
    parse("x.toml", text, &[])
}

#[test]
fn ranks_divide_experts_and_shards_evenly() {
    let s = parsed(&format!("{MODEL}ep = 4\n")).unwrap();
    assert_eq!((s.mesh.ep, s.mesh.world()), (4, 8));
    let named = parsed(&format!("{MODEL}expert_parallel_degree = 2\n")).unwrap();
    assert_eq!(named.mesh.ep, 2);
    let more = |rest: &str| format!("{MODEL}{rest}");
    let dense = MODEL
        .replace("\"moe\"", "\"llama\"")
        .replace("experts = 12\ntop_k = 2\n", "");
    for (text, expected) in [
        (
            more("ep = 3\n"),
            &[
                "x.toml:14:6: `ep` = 3 does not divide `dp_shard` = 8",
                "the nearest legal value is ep = 4",
            ][..],
        ),
        (
            more("ep = 8\n"),
            &[
                "`ep` = 8 does not divide `experts` = 12",
                "the nearest legal value is ep = 4",
            ],
        ),
        (
            more("ep = 16\n"),
            &[
                "`ep` = 16 does not divide `dp_shard` = 8",
                "the nearest legal value is ep = 4",
            ],
        ),
        (
            format!("{dense}ep = 2\n"),
            &[
                "`ep` = 2 divides experts, which family llama does not have",
                "families with experts: moe",
            ],
        ),
        (
            more("ep = 2\n[fsdp]\nreshard_after_forward = 2\n"),
            &[
                "experts are not sharded over `dp_shard`",
                "use true or false",
            ],
        ),
        (
            more("ep = 4\n[fsdp]\noffload = [\"optimizer\"]\n")
                .replace("dp_shard = 8", "dp_shard = 4"),
            &[
                "host offload moves shards of dp_shard, but with `ep` = dp_shard = 4",
                "use `ep` below 4",
            ],
        ),
    ] {
        let e = parsed(&text).unwrap_err().to_string();
        assert!(expected.iter().all(|part| e.contains(part)), "{e}");
    }
}

/// A router cannot choose more experts than it has; the nearest value is that of a named key.
#[test]
fn routers_choose_among_their_experts() {
    let model = MODEL.replace("experts = 12", "experts = 8");
    for (rest, expected) in [
        ("top_k = 9", "the nearest legal value is top_k = 8"),
        (
            "router_groups = 3",
            "the nearest legal value is router_groups = 4",
        ),
        (
            "router_groups = 4\nrouter_group_top_k = 5",
            "the nearest legal value is router_group_top_k = 4",
        ),
        // Two of four groups of two.
        (
            "router_groups = 4\nrouter_group_top_k = 2\ntop_k = 6",
            "the nearest legal value is top_k = 4",
        ),
    ] {
        let text = if rest.contains("top_k = ") && !rest.ends_with("= 5") {
            model.replace("top_k = 2\n", &format!("{rest}\n"))
        } else {
            model.replace("top_k = 2\n", &format!("top_k = 2\n{rest}\n"))
        };
        let e = parsed(&text).unwrap_err().to_string();
        assert!(e.contains(expected), "{rest}: {e}");
    }
    let e = parsed(&format!("{}ep = 4\n", MODEL.replace("12", "6")))
        .unwrap_err()
        .to_string();
    assert!(e.contains("the nearest legal value is ep = 2"), "{e}");
}
