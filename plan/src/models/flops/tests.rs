use super::*;
use crate::models::declare;
use crate::scenario;

/// Returns the scenario of a file of `tests/data/configs`; `None` if it is refused.
fn scenario_of(config: &str) -> Option<Scenario> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/configs");
    let text = format!(
        "[model]\npreset = \"{root}/{config}\"\n[mesh]\nhardware = \"h100-80\"\ndp_shard = 1\n"
    );
    scenario::parse("test", &text, &[]).ok()
}

/// The names miss tables of relative positions (DeBERTa) and of biases (T5), and have the linear
/// layer after a narrow table of tokens (OPT).
#[test]
fn lookups_are_the_parameters_whose_names_say_so() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/configs");
    let mut differ = Vec::new();
    let mut read = 0;
    for file in std::fs::read_dir(root).unwrap() {
        let name = file.unwrap().file_name();
        let Some(s) = scenario_of(name.to_str().unwrap()) else {
            continue;
        };
        read += 1;
        let tree = declare(&s, s.model.layers).tree;
        let matrices = tree.params.iter().filter(|p| weight(p).len() > 1);
        for p in matrices.filter(|p| is_table(&p.name) != tree.looks_up(p.modules[0])) {
            differ.push(p.name.clone());
        }
    }
    assert!(read > 300, "{read}");
    let known = [
        "tok_embeddings.project_in.weight",
        "relative.positions.weight",
        "relative_bias.weight",
        "summary_bias.weight",
    ];
    differ.retain(|name| !known.iter().any(|end| name.ends_with(end)));
    assert_eq!(differ, Vec::<String>::new());
}
