//! Public `config.json` files: the right number of parameters, or a refusal with its reason.

use super::super::*;
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
    for (file, _) in files() {
        let sets = ["model.layers=5", "model.vocab=512", "train.seq_len=64"];
        let longer = ["model.layers=5", "model.vocab=512"];
        let Ok(scenario) = read(&file, &sets).or_else(|_| read(&file, &longer)) else {
            continue;
        };
        let m = &scenario.model;
        let tower =
            |v: &crate::config::Vision| (v.merge, v.pool, v.class_token, v.rotary, v.tile_rows);
        let kind = (
            m.family.name(),
            m.options.model_type.clone(),
            m.options.vision.as_ref().map(tower),
            m.options.layer_types.len(),
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
            let scenario = read(&file, &[&sets[..], &more].concat())
                .or_else(|_| read(&file, &[&longer[..], &more].concat()))
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
