//! `shardlab plan`.

use crate::{json, stdout};

/// A program small enough to be read in whole.
const SMALL: [&str; 8] = [
    "plan",
    "toy-linear",
    "--set",
    "model.layers=2",
    "--set",
    "fsdp.policy=native",
    "--set",
    "train.optimizer=sgd",
];

#[test]
fn a_small_program_reads_well_and_does_not_change_unnoticed() {
    insta::assert_snapshot!(stdout(&SMALL));
}

#[test]
fn a_unit_and_a_section_are_parts_of_the_whole() {
    let whole = stdout(&["plan", "peers-tiny"]);
    let part = stdout(&[
        "plan",
        "peers-tiny",
        "--unit",
        "layers.3",
        "--section",
        "steady",
    ]);
    let lines: Vec<&str> = part.lines().filter(|l| !l.is_empty()).collect();
    assert!(lines.len() > 100);
    assert!(lines.iter().all(|l| whole.contains(l)));
    let titles: Vec<&&str> = lines.iter().filter(|l| l.starts_with('[')).collect();
    assert_eq!(titles.len(), 1, "{titles:?}");
    assert!(titles[0].starts_with("[steady step]"), "{titles:?}");
    let instructions = lines.iter().filter(|l| !l.starts_with(['#', '[']));
    assert!(instructions.clone().all(|l| l.contains(" layers.3 ")));
    // Both directions of the unit, its gathers and its reduction are among them.
    for word in [
        "all_gather bf16",
        "reduce_scatter f32",
        "forward",
        "backward",
    ] {
        assert!(instructions.clone().any(|l| l.contains(word)), "{word}");
    }
}

#[test]
fn json_lists_what_the_text_shows() {
    let text = stdout(&["plan", "toy-linear", "--section", "steady"]);
    let object = &json(&["plan", "toy-linear", "--section", "steady", "--json"])[0];
    let listed = object["instructions"].as_array().unwrap();
    let shown = text
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with(['#', '[']));
    assert_eq!(listed.len(), shown.count());
    for instr in listed {
        assert!(text.contains(instr["text"].as_str().unwrap()), "{instr}");
    }
}

#[test]
fn groups_hold_every_element_once() {
    let object = &json(&["plan", "toy-cnn", "--groups", "--json"])[0];
    for group in object["groups"].as_array().unwrap() {
        let mut payload = 0;
        for param in group["params"].as_array().unwrap() {
            let shape = param["shape"].as_array().unwrap();
            let numel: u64 = shape.iter().map(|d| d.as_u64().unwrap()).product();
            assert_eq!(param["numel"].as_u64(), Some(numel));
            let held: u64 = param["per_rank"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| p[0].as_u64().unwrap() * p[1].as_u64().unwrap())
                .sum();
            assert_eq!(held, numel, "{param}");
            payload += numel;
        }
        assert_eq!(group["payload_numel"].as_u64(), Some(payload));
        let shards = object["shards"].as_u64().unwrap();
        assert_eq!(
            group["shard_numel"].as_u64().unwrap() * shards,
            group["full_numel"].as_u64().unwrap()
        );
    }
    let text = stdout(&["plan", "toy-cnn", "--groups"]);
    crate::assert_narrow(&text);
    assert!(text.contains("laid out in the same way: 9 units"), "{text}");
}
