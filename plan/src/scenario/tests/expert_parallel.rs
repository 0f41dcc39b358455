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
                "the nearest legal value is 4",
            ][..],
        ),
        (
            more("ep = 8\n"),
            &[
                "`ep` = 8 does not divide `experts` = 12",
                "the nearest legal value is 4",
            ],
        ),
        (
            more("ep = 16\n"),
            &[
                "`ep` = 16 does not divide `dp_shard` = 8",
                "the nearest legal value is 4",
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
