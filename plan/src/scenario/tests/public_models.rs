//! Public `config.json` files: the right number of parameters, or a refusal with its reason.

use super::super::*;
use super::Folder;
use crate::check::Severity;
use crate::config::Scenario;
use crate::units::short_count;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/configs")
}

/// Files with the number of parameters, where it is known.
fn files() -> Vec<(String, Option<u64>)> {
    let text = std::fs::read_to_string(folder().join("parameters.csv")).unwrap();
    let row = |line: &str| {
        let (file, parameters) = line.split_once(',').unwrap();
        (file.to_owned(), parameters.parse().ok())
    };
    text.lines().skip(1).map(row).collect()
}

fn read(file: &str, sets: &[&str]) -> Result<Scenario, ScenarioError> {
    let text = format!(
        "[model]\npreset = {:?}\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n",
        folder().join(file)
    );
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    parse("public", &text, &sets)
}

fn parameters(scenario: &Scenario) -> u64 {
    let (_, params) = crate::models::testing::modules_and_params(scenario);
    params.iter().map(|p| p.numel()).sum()
}

/// The language model of a file that wraps several models, as the refusal of the file offers it.
fn language_model(file: &str, refusal: &ScenarioError) -> Option<String> {
    let offer = refusal.help()?.strip_prefix("--as ")?;
    let as_type = offer.strip_suffix(" plans its language model alone")?;
    let scenario = read(file, &[&format!("model.model_type={as_type}")]).unwrap();
    let count = short_count(parameters(&scenario));
    Some(format!("; as {as_type}: {count} parameters (not verified)"))
}

/// What becomes of a file.
fn outcome(file: &str, known: Option<u64>) -> String {
    let scenario = match read(file, &[]) {
        Ok(scenario) => scenario,
        Err(e) => {
            let message = e.to_string();
            let first = message.lines().next().unwrap();
            let at = first.find(".json:").unwrap_or_default();
            let alone = language_model(file, &e).unwrap_or_default();
            return format!("refused{}{alone}", &first[at + ".json".len()..]);
        }
    };
    let ours = parameters(&scenario);
    let family = scenario.model.family.name();
    let sure = match known {
        Some(known) if known == ours => "",
        Some(known) => return format!("WRONG: {ours} parameters, not {known}"),
        None => " (not verified)",
    };
    format!("{family}, {} parameters{sure}", short_count(ours))
}

#[test]
fn public_models_have_the_right_number_of_parameters() {
    let mut out = String::new();
    for (file, known) in files() {
        writeln!(out, "{file}: {}", outcome(&file, known)).unwrap();
    }
    let wrong: Vec<&str> = out.lines().filter(|l| l.contains(": WRONG")).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    insta::assert_snapshot!(out);
}

/// Every type that is accepted makes programs that `check` proves, with a few of its layers. FSDP2
/// gathers a module before it runs, so an op in the wrong module shows there.
#[test]
fn public_models_make_correct_programs() {
    let (mut types, mut wrong) = (std::collections::BTreeSet::new(), Vec::new());
    // Towers have no vocabulary, and types with other keys for their layers no number of them.
    let smaller: [&[&str]; 4] = [
        &["model.layers=5", "model.vocab=512", "train.seq_len=64"],
        &["model.layers=5", "model.vocab=512"],
        &["model.layers=5"],
        &[],
    ];
    for (file, _) in files() {
        let found = smaller.iter().find_map(|s| Some((s, read(&file, s).ok()?)));
        let Some((sets, scenario)) = found else {
            continue;
        };
        let m = &scenario.model;
        let tower = |v: &crate::config::Vision| {
            (
                v.projector.merge,
                v.projector.pool,
                v.input.class_token,
                v.rotary,
                v.input.tile_rows,
            )
        };
        let kind = (
            m.family.name(),
            m.options.model_type.clone(),
            m.options.context.vision.as_ref().map(tower),
            m.options.layers.layer_types.len(),
        );
        if !types.insert(kind.clone()) {
            continue;
        }
        for policy in ["native", "fsdp2"] {
            let of = format!("fsdp.policy={policy}");
            let mut more = vec![of.as_str()];
            // Rows of the tables of tiles have few factors in common with others.
            let tiles = kind.2.is_some_and(|(.., tile_rows)| tile_rows > 0);
            if tiles && policy == "native" {
                more.push(r#"fsdp.units=["layers.*", "vision.layers.*", "vision.tiles.table", "vision.tiles.before", "vision.tiles.after"]"#);
            }
            let scenario = read(&file, &[sets, &more[..]].concat())
                .unwrap_or_else(|e| panic!("{file}, {policy}: {e}"));
            let program = crate::plan(&scenario).unwrap_or_else(|e| panic!("{file}: {e}"));
            let report = crate::check::check(&program);
            let error = |v: &&crate::check::Violation| v.rule.info().severity == Severity::Error;
            let found = report.violations.iter().filter(error);
            wrong.extend(found.map(|v| format!("{file}, {policy}: {}", v.message)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(types.len() > 60, "{types:?}");
}

/// The type that is named for a file whose own type and classes are unknown.
fn named(text: &str, own: &Folder) -> Result<String, String> {
    let mut file: serde_json::Value = serde_json::from_str(text).unwrap();
    file["model_type"] = "foonew".into();
    if let Some(class) = file["architectures"].get(0).and_then(|c| c.as_str()) {
        let ends = ["For", "LMHeadModel", "Model"];
        let end = ends.iter().find_map(|end| Some(&class[class.find(end)?..]));
        file["architectures"] = vec![format!("FooNew{}", end.unwrap_or_default())].into();
    }
    let at = own.file("config.json");
    std::fs::write(&at, file.to_string()).unwrap();
    let text =
        format!("[model]\npreset = {at:?}\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n");
    let refusal = parse("unknown", &text, &[]).unwrap_err();
    let help = refusal.help().unwrap_or_default();
    let (_, rest) = help.split_once("--as ").ok_or_else(|| help.to_owned())?;
    let name = rest.split(' ').next().unwrap_or_default().to_owned();
    let taken = parse("unknown", &text, &[format!("model.model_type={name}")]);
    let taken = taken.map_err(|e| format!("{name} does not take it: {e}"))?;
    Ok(format!("{name} {}", parameters(&taken)))
}

/// Files that another type describes as well as their own, with the reason.
const MISTAKEN: &[(&str, &str)] = &[
    (
        "Cerebras-GPT-13B.json",
        "GPT-J reads `n_ctx` and has all other fields",
    ),
    (
        "GLM-4-9B-0414.json",
        "no field says that norms follow attention, too",
    ),
    ("ModernBERT-base.json", "BERT reads as many of its fields"),
    (
        "OLMo-3-1025-7B.json",
        "no field says that queries and keys are normalized",
    ),
    (
        "c4ai-command-r-v01.json",
        "no field says that there is one norm per layer",
    ),
    (
        "mlc--gemma_2b.json",
        "no field says that embedding and output are tied",
    ),
    (
        "mlc--olmo2_13b.json",
        "no field says that queries and keys are normalized",
    ),
    (
        "mlc--olmo2_32b.json",
        "no field says that queries and keys are normalized",
    ),
    (
        "mlc--olmo2_7b.json",
        "no field says that queries and keys are normalized",
    ),
    ("mlc--phi-1_5.json", "GPT-2 has all its fields but one"),
    (
        "mlc--snowflake-arctic-embed-m.json",
        "its class is the base of its type alone",
    ),
    ("phi-2.json", "Phi-3 reads more of its fields"),
    ("gemma-4-E2B-text.json", "two types have its name"),
    ("rwkv-6-world-1b6.json", "RWKV-5 reads the same fields"),
    (
        "bigbird-roberta-base.json",
        "its class for pretraining is known of its type alone",
    ),
];

#[test]
fn the_type_that_is_named_for_an_unknown_one_has_its_number_of_parameters() {
    let own = Folder::new("unknown-types", &[("config.json", "")]);
    let (mut right, mut wrong) = (0, Vec::new());
    for (file, known) in files() {
        let text = std::fs::read_to_string(folder().join(&file)).unwrap();
        let made = ["tiny--", "default--", "published--"];
        let made = made.iter().any(|start| file.starts_with(start));
        // Of files that wrap several models, the language model alone is named.
        let wraps = ["\"text_config\"", "\"vision_config\"", "\"img_processor\""];
        let wraps = wraps.iter().any(|field| text.contains(field));
        let (Some(known), false) = (known, made || wraps) else {
            continue;
        };
        let text = text.replace("Infinity", "1e9");
        match named(&text, &own) {
            Ok(name) if name.ends_with(&format!(" {known}")) => right += 1,
            Ok(name) => wrong.push(format!("{file}: {name}, not {known}")),
            Err(why) => wrong.push(format!("{file}: {why}")),
        }
    }
    let is_listed = |line: &&String| !MISTAKEN.iter().any(|(f, _)| line.starts_with(f));
    let unlisted: Vec<&String> = wrong.iter().filter(is_listed).collect();
    assert!(unlisted.is_empty(), "{unlisted:#?}");
    assert_eq!(wrong.len(), MISTAKEN.len(), "{wrong:#?}");
    assert!(right > 100, "{right}");
}
