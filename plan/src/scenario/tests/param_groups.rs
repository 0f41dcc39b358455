//! Parameter groups of the optimizer: who is in which, and messages for bad input.

use super::minimal;
use crate::models::testing::modules_and_params;
use std::collections::BTreeMap;

fn fault(groups: &str) -> String {
    let set = format!("train.param_groups={groups}");
    minimal(&[&set]).unwrap_err().to_string()
}

/// Counts parameters by their weight decay and the scale of their learning rate.
fn counts(set: &[&str]) -> BTreeMap<String, usize> {
    let s = minimal(set).unwrap();
    let settings = s.train.group_settings();
    let mut counts = BTreeMap::new();
    for p in modules_and_params(&s).1 {
        let g = settings[usize::from(p.group)];
        let key = format!("{} {}", g.weight_decay, g.lr_scale);
        *counts.entry(key).or_insert(0) += 1;
    }
    counts
}

fn map(of: &[(&str, usize)]) -> BTreeMap<String, usize> {
    of.iter().map(|(k, n)| ((*k).to_owned(), *n)).collect()
}

/// Llama 3 8B has 65 norms among 291 tensors. Hugging Face's Trainer puts the norms into a group
/// without decay (`get_decay_parameter_names`), as does Megatron-LM (one dimension).
#[test]
fn norms_and_biases_need_not_decay() {
    assert_eq!(counts(&[]), map(&[("0.1 1", 291)]));
    let without = "train.decay_norms_and_biases=false";
    assert_eq!(counts(&[without]), map(&[("0.1 1", 226), ("0 1", 65)]));
    let decay = "train.weight_decay=0.0";
    assert_eq!(counts(&[without, decay]), map(&[("0 1", 291)]));
}

#[test]
fn the_first_group_that_matches_counts() {
    let groups = "train.param_groups=[{ params = [\"*norm*\"], weight_decay = 0.0 }, \
                  { params = [\"embed_tokens\", \"input_layernorm\"], lr_scale = 0.5 }]";
    let want = map(&[("0.1 1", 225), ("0 1", 65), ("0.1 0.5", 1)]);
    assert_eq!(counts(&[groups]), want);
    // Names of either code.
    let ours = groups.replace("embed_tokens", "tok_embeddings");
    assert_eq!(counts(&[&ours]), want);
    // Norms of the second group take the default decay, which is none for them.
    let second = "train.param_groups=[{ params = [\"*norm*\", \"lm_head\"], lr_scale = 0.5 }]";
    let without = "train.decay_norms_and_biases=false";
    let want = map(&[("0.1 1", 225), ("0 0.5", 65), ("0.1 0.5", 1)]);
    assert_eq!(counts(&[second, without]), want);
}

/// TOML's arrays of tables and inline tables are the same.
#[test]
fn arrays_of_tables_are_read() {
    let text = "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"cpu\"\ndp_shard = 4\n\
                [[train.param_groups]]\nparams = [\"*norm*\"]\nweight_decay = 0.0\n\
                [[train.param_groups]]\nparams = [\"lm_head\"]\nlr_scale = 0.1\n";
    let s = crate::scenario::parse("groups", text, &[]).unwrap();
    assert_eq!(s.train.param_groups.len(), 2);
    assert_eq!(s.train.param_groups[1].lr_scale, 0.1);
}

#[test]
fn bad_groups_are_refused_with_their_reason() {
    let none = fault("[{ params = [\"*nrm*\"], weight_decay = 0.0 }]");
    assert!(none.contains("`*nrm*` matches no parameter"), "{none}");
    assert!(none.contains("did you mean `norm`?"), "{none}");
    let nobody = fault("[{ weight_decay = 0.0 }]");
    assert!(nobody.contains("has no `params`"), "{nobody}");
    let same = fault("[{ params = [\"*norm*\"] }]");
    assert!(same.contains("the settings of all others"), "{same}");
    let key = fault("[{ params = [\"*norm*\"], weight_dcay = 0.0 }]");
    assert!(key.contains("did you mean `weight_decay`?"), "{key}");
    let negative = fault("[{ params = [\"*norm*\"], lr_scale = -1.0 }]");
    assert!(negative.contains("lr_scale"), "{negative}");
    let form = fault("[{ params = [\"a b\"], lr_scale = 2.0 }]");
    assert!(form.contains("` ` in a module pattern"), "{form}");
    let many: Vec<String> = (0..8)
        .map(|n| format!("{{ params = [\"layers.{n}\"], lr_scale = 0.{} }}", n + 1))
        .collect();
    let many = fault(&format!("[{}]", many.join(", ")));
    assert!(many.contains("9 different settings"), "{many}");
    // A frozen parameter is not trained, so no group matters to it.
    let frozen = minimal(&[
        "fsdp.frozen=[\"output\"]",
        "train.param_groups=[{ params = [\"lm_head\"], lr_scale = 2.0 }]",
    ]);
    assert!(
        frozen
            .unwrap_err()
            .to_string()
            .contains("matches no parameter")
    );
}

#[test]
fn sgd_has_no_states_in_8_bits() {
    let set = ["precision.moments=8bit", "train.optimizer=sgd"];
    let fault = minimal(&set).unwrap_err().to_string();
    assert!(fault.contains("sgd has none"), "{fault}");
}
