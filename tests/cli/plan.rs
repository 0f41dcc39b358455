//! `shardlab plan`.

use crate::{json, shardlab, stdout};

/// A program that is small enough to read completely.
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
    let unit = &["plan", "peers-tiny", "--unit", "layers.3"];
    let part = stdout(&[&unit[..], &["--section", "steady"]].concat());
    let lines: Vec<&str> = part.lines().filter(|l| !l.is_empty()).collect();
    assert!(lines.len() > 100);
    // Groups are listed alone or with their neighbors.
    let own = |l: &&&str| !l.starts_with("# group");
    assert!(lines.iter().filter(own).all(|l| whole.contains(l)));
    let titles: Vec<&&str> = lines.iter().filter(|l| l.starts_with('[')).collect();
    assert_eq!(titles.len(), 1, "{titles:?}");
    assert!(titles[0].starts_with("[steady step]"), "{titles:?}");
    let instructions = lines.iter().filter(|l| !l.starts_with(['#', '[']));
    assert!(instructions.clone().all(|l| l.contains(" layers.3 ")));
    // The list contains the unit in both directions, its gathers and its reduction.
    for word in [
        "all_gather bf16",
        "reduce_scatter f32",
        "forward",
        "backward",
    ] {
        assert!(instructions.clone().any(|l| l.contains(word)), "{word}");
    }
    // A single unit is shown in the steady step, with only its own group.
    let alone = stdout(unit);
    assert!(alone.starts_with(part.trim_end()), "{alone}");
    assert!(alone.contains("--first shows the first step"), "{alone}");
    let groups: Vec<&str> = alone.lines().filter(|l| l.starts_with("# group")).collect();
    assert_eq!(groups.len(), 1, "{groups:?}");
    assert!(groups[0].contains(" layers.3: "), "{groups:?}");
    let first = stdout(&[&unit[..], &["--first"]].concat());
    assert_eq!(
        first,
        stdout(&[&unit[..], &["--section", "first"]].concat())
    );
    assert!(first.contains("[first step]") && !first.contains("[steady step]"));
    let error = shardlab(&["plan", "peers-tiny", "--unit", "layer.3"])
        .assert()
        .code(2);
    let error = String::from_utf8_lossy(&error.get_output().stderr).into_owned();
    assert!(error.contains("did you mean `layers.3`?"), "{error}");
}

#[test]
fn groups_that_are_alike_share_a_line() {
    let text = stdout(&["plan", "llama3-8b-4xh200", "--section", "init"]);
    let groups: Vec<&str> = text.lines().filter(|l| l.starts_with("# group")).collect();
    assert_eq!(groups.len(), 2, "{groups:?}");
    assert!(
        groups[1].starts_with("# groups 1 to 32, layers.0 to layers.31: 32 groups alike, each 9 parameters, 218,112,000 elements"),
        "{groups:?}"
    );
}

/// On a terminal, an instruction longer than a line continues below its text, and words are not
/// broken.
#[test]
fn instructions_fit_the_terminal() {
    let args = &["plan", "llama3-8b-4xh200", "--unit", "layers.3"];
    let output = shardlab(args).env("COLUMNS", "80").assert().success();
    let narrow = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(narrow.lines().all(|l| l.chars().count() <= 80), "{narrow}");
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    // With a single micro-batch, its column is left out.
    assert!(words(&narrow).len() < words(&stdout(args)).len());
    let last = |text: &str| {
        text.lines()
            .find(|l| l.contains("reduce_scatter"))
            .map(words)
    };
    assert!(last(&narrow).is_some());
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
    assert!(text.contains("(10 alike)"), "{text}");
}

/// Groups that FSDP does not manage are whole on each rank, and nothing gathers them.
#[test]
fn groups_that_are_not_managed_are_marked() {
    let sets = [
        "mesh.ep=4",
        "fsdp.policy=fsdp2",
        "precision.main_params=none",
        "fsdp.ignored_params=experts",
    ];
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let args: Vec<&str> = ["plan", "small-moe"].into_iter().chain(sets).collect();
    let object = &json(&[&args[..], &["--groups", "--json"]].concat())[0];
    let groups = object["groups"].as_array().unwrap();
    let (ignored, managed): (Vec<_>, Vec<_>) = groups
        .iter()
        .partition(|group| group["layout"] == "not managed");
    assert_eq!(ignored.len(), 2);
    assert!(managed.iter().all(|g| g["full_bytes"].as_u64() > Some(0)));
    for group in ignored {
        assert_eq!(group["full_bytes"], 0);
        for param in group["params"].as_array().unwrap() {
            assert!(param["name"].as_str().unwrap().contains(".experts."));
            assert_eq!(param["per_rank"], serde_json::json!([[1, param["numel"]]]));
        }
    }
    let text = stdout(&[&args[..], &["--groups"]].concat());
    crate::assert_narrow(&text);
    assert!(text.contains("not managed"), "{text}");
    let program = stdout(&args);
    assert!(program.contains("(not managed)"), "{program}");
}
