//! `[lora]`: what it resolves to, and messages for bad input.

use super::minimal;
use crate::config::{FrozenType, LoraTargets};

fn fault(overrides: &[&str]) -> String {
    let all = [&["lora.r=8"], overrides].concat();
    minimal(&all).unwrap_err().to_string()
}

/// The defaults are those of PEFT's `LoraConfig`, except that all linear layers are targets.
#[test]
fn defaults_are_those_of_peft() {
    let s = minimal(&["lora.r=16"]).unwrap();
    let lora = s.lora.unwrap();
    assert_eq!((lora.r, lora.alpha, lora.use_rslora), (16, 8.0, false));
    assert_eq!(lora.targets, LoraTargets::AllLinear);
    // The model is kept in the type that it computes in.
    assert_eq!(s.precision.frozen_params, Some(FrozenType::Bf16));
    let s = minimal(&["lora.rank=16", "lora.alpha=32"]).unwrap();
    let lora = s.lora.unwrap();
    assert_eq!((lora.r, lora.alpha), (16, 32.0));
    assert_eq!(minimal(&[]).unwrap().lora, None);
}

/// The resolved section is written in PEFT's words.
#[test]
fn the_resolved_section_has_pefts_words() {
    let s = minimal(&["lora.r=4", "lora.target_modules=[\"q_proj\"]"]).unwrap();
    let json = serde_json::to_value(s.lora).unwrap();
    let want = serde_json::json!({
        "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"], "lora_dropout": 0.0, "use_rslora": false, "use_dora": false
    });
    assert_eq!(json, want);
}

#[test]
fn targets_that_match_nothing_list_the_linear_layers() {
    let near = fault(&["lora.target_modules=[\"q_proj\", \"vproj\"]"]);
    assert!(
        near.contains("target_modules pattern `vproj` matches no linear layer"),
        "{near}"
    );
    assert!(near.contains("did you mean `v_proj`?"), "{near}");
    // A module that is no linear layer.
    let none = fault(&["lora.target_modules=[\"tok_embeddings\"]"]);
    let all = "linear layers: q (q_proj), k (k_proj), v (v_proj), o (o_proj), w1 (gate_proj), w3 (up_proj), w2 (down_proj)";
    assert!(none.contains(all), "{none}");
    let form = fault(&["lora.target_modules=[\"q proj\"]"]);
    assert!(form.contains("` ` in a module pattern"), "{form}");
}

/// An expression is written as it was given, and matches whole paths (`re.fullmatch` in PEFT).
#[test]
fn targets_may_be_an_expression() {
    let s = minimal(&["lora.r=8", r"lora.target_modules=.*\.q_proj"]).unwrap();
    let json = serde_json::to_value(s.lora).unwrap();
    assert_eq!(json["target_modules"], r".*\.q_proj");

    // Names of layers alone match no whole path, and neither does a mistyped word.
    for text in ["q_proj", "all-liner"] {
        let none = fault(&[&format!("lora.target_modules={text}")]);
        let what = format!("target_modules expression `{text}` matches no linear layer");
        assert!(
            none.contains(&what) && none.contains("all-linear"),
            "{none}"
        );
    }
    let open = fault(&["lora.target_modules=(q_proj"]);
    assert!(open.contains("(q_proj"), "{open}");
    let blocks = fault(&[
        r"lora.target_modules=.*\.q_proj",
        "lora.layers_to_transform=[0]",
    ]);
    assert!(
        blocks.contains("for an expression in target_modules"),
        "{blocks}"
    );
}

/// The counts are those of PEFT (`tests/goldens/lora-saved-tiny`), whose code keeps the original
/// parameters of what is trained in full.
#[test]
fn modules_that_are_trained_in_full() {
    let sizes = [
        "model.layers=3",
        "model.hidden=64",
        "model.heads=4",
        "model.kv_heads=2",
        "model.ffn=112",
        "model.vocab=256",
        "lora.r=4",
        "lora.target_modules=[\"q_proj\", \"v_proj\"]",
        "lora.modules_to_save=[\"embed_tokens\", \"output\", \"norm\"]",
    ];
    let count = |more: &[&str]| {
        let tree = crate::models::declare(&minimal(&[&sizes[..], more].concat()).unwrap(), 3).tree;
        let of = |trained: bool| {
            let some = tree.params.iter().filter(|p| p.requires_grad || !trained);
            some.map(crate::ir::Param::numel).sum::<u64>()
        };
        (of(false), of(true))
    };
    assert_eq!(
        count(&["model.implementation=transformers"]),
        (170_496, 35_904)
    );
    assert_eq!(
        count(&["model.implementation=torchtitan"]),
        (137_280, 35_904)
    );
    // Nothing is computed with the original parameters.
    let flops = |code: &str| {
        let code = format!("model.implementation={code}");
        let all = [&sizes[..], &[code.as_str()]].concat();
        crate::plan(&minimal(&all).unwrap())
            .unwrap()
            .meta
            .model_flops
    };
    assert_eq!(flops("transformers"), flops("torchtitan"));
}

/// A table that is also the output projection is trained for both, by either name.
#[test]
fn a_shared_table_is_trained_by_the_name_of_either_module() {
    for name in ["embed_tokens", "lm_head", "output"] {
        let save = format!("lora.modules_to_save=[\"{name}\"]");
        let s = minimal(&["lora.r=8", "model.tie_embeddings=true", &save]).unwrap();
        let tree = crate::models::declare(&s, 1).tree;
        let table = tree
            .params
            .iter()
            .find(|p| p.name == "tok_embeddings.weight");
        assert!(table.unwrap().requires_grad, "{name}");
    }
}

#[test]
fn modules_to_save_are_refused_where_they_cannot_be() {
    let saved = |names: &str, more: &[&str]| {
        fault(&[&[&*format!("lora.modules_to_save=[{names}]")], more].concat())
    };
    let near = saved("\"lm_heat\"", &[]);
    assert!(near.contains("matches no module with parameters"), "{near}");
    assert!(near.contains("did you mean `lm_head`?"), "{near}");
    let adapted = saved("\"q_proj\"", &[]);
    assert!(
        adapted.contains("`layers.0.attention.q` has an adapter"),
        "{adapted}"
    );
    let preset = "model.preset=\"qwen3-30b-a3b\"";
    let stack = fault(&[preset, "lora.modules_to_save=[\"experts.down\"]"]);
    assert!(stack.contains("stored in another form"), "{stack}");
}

/// Patterns that match nothing are errors at their place.
#[test]
fn patterns_that_match_nothing_name_the_nearest_module() {
    let qv = "lora.target_modules=[\"q_proj\", \"v_proj\"]";
    for (set, message, help) in [
        (
            &["lora.rank_pattern={ q_porj = 4 }"][..],
            "rank_pattern pattern `q_porj` matches no layer with an adapter",
            "did you mean `q_proj`?",
        ),
        // The layer exists, but has no adapter.
        (
            &[qv, "lora.alpha_pattern={ '.*down_proj' = 4 }"],
            "alpha_pattern pattern `.*down_proj` matches no layer with an adapter",
            "layers with an adapter: q (q_proj), v (v_proj)",
        ),
        (
            &["lora.rank_pattern={ '(?=q)' = 4 }"],
            "`(?=q)` is not a regular expression (without references and look-around)",
            "",
        ),
        (
            &["lora.exclude_modules=[\"up_prjo\"]"],
            "exclude_modules pattern `up_prjo` matches no module",
            "did you mean `up_proj`?",
        ),
        (
            &["lora.exclude_modules=\"up_proj\""],
            "exclude_modules expression `up_proj` matches no module",
            "an expression matches whole paths",
        ),
        (
            &["lora.exclude_modules=[\"q*(\"]"],
            "`(` in a module pattern",
            "",
        ),
        (
            &["lora.layers_to_transform=[0, 40]"],
            "layers_to_transform has block 40, which has no linear layer",
            "blocks of linear layers: 0 to 31",
        ),
        (
            &[
                "lora.layers_to_transform=0",
                "lora.layers_pattern=\"layer\"",
            ],
            "layers_pattern `layer` is followed by a number in no layer's path",
            "did you mean `layers`?",
        ),
        (
            &["lora.layers_pattern=[\"layers\"]"],
            "`layers_pattern` has no effect here: all blocks have adapters",
            "",
        ),
        (
            &[qv, "lora.exclude_modules=[\"self_attn.*\"]"],
            "no layer is left that has an adapter",
            "",
        ),
        (
            &["lora.rank_pattern={ q_proj = 0 }"],
            "`lora.rank_pattern.\"q_proj\"` must be an integer from 1 to 65536, not 0",
            "",
        ),
        (
            &["lora.alpha_pattern={ q_proj = 0.0 }"],
            "`lora.alpha_pattern.\"q_proj\"` must be a number above 0",
            "",
        ),
        (&["lora.rank_pattern=[4]"], "a table from patterns to", ""),
    ] {
        let e = fault(set);
        assert!(e.contains(message) && e.contains(help), "{set:?}: {e}");
    }
}

/// Errors are at the pattern, not at the key.
#[test]
fn patterns_have_positions() {
    let text = "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n\
        [lora]\nr = 8\n[lora.rank_pattern]\nq_proj = 4\nk_porj = 2\n";
    let e = crate::scenario::parse("job.toml", text, &[]).unwrap_err();
    assert!(e.to_string().contains("job.toml:10:1"), "{e}");
}

/// The resolved section has the patterns in their order.
#[test]
fn patterns_are_resolved_as_written() {
    let s = minimal(&[
        "lora.r=4",
        "lora.rank_pattern={ v_proj = 2, k_proj = 8 }",
        "lora.layers_to_transform=3",
        "lora.layers_pattern=\"layers\"",
        "lora.exclude_modules=\".*up_proj\"",
    ])
    .unwrap();
    let json = serde_json::to_string(&s.lora).unwrap();
    let want = r#""exclude_modules":".*up_proj","layers_to_transform":[3],"layers_pattern":["layers"],"rank_pattern":{"v_proj":2,"k_proj":8}"#;
    assert!(json.contains(want), "{json}");
}

#[test]
fn impossible_adapters_are_refused() {
    let zero = minimal(&["lora.r=0"]).unwrap_err().to_string();
    assert!(zero.contains("an integer from 1 to 65536"), "{zero}");
    for (set, what) in [
        (
            &["lora.lora_dropout=0.05"][..],
            "only the code of transformers has dropout",
        ),
        (&["model.preset=toy-cnn"], "family cnn has no adapters"),
        (&["precision.frozen_params=f16"], "`frozen_params` is f16"),
        (
            &["lora.use_dora=true", "precision.frozen_params=nf4"],
            "`use_dora` needs the norms of the rows of frozen weights",
        ),
        (
            &["precision.frozen_params=f32"],
            "`frozen_params` has no effect here: policy native keeps",
        ),
        (&["lora.target_modules=[]"], "a list of strings"),
        (&["precision.frozen_params=int4"], "nf4"),
    ] {
        let e = fault(set);
        assert!(e.contains(what), "{set:?}: {e}");
    }
    let families = fault(&["model.preset=toy-cnn"]);
    assert!(
        families.contains("families with adapters: llama, decoder, moe, bert, vit, gpt2, gpt_neox"),
        "{families}"
    );
    let alone = minimal(&["lora.lora_alpha=16"]).unwrap_err().to_string();
    assert!(
        alone.contains("`lora_alpha` has no effect here: without a rank"),
        "{alone}"
    );
    let all = minimal(&["precision.frozen_params=bf16", "fsdp.policy=fsdp2"])
        .unwrap_err()
        .to_string();
    assert!(all.contains("every parameter is trained"), "{all}");
    let frozen = minimal(&["precision.frozen_params=nf4", "fsdp.frozen=[\"norm\"]"]);
    let frozen = frozen.unwrap_err().to_string();
    assert!(frozen.contains("but there are no adapters"), "{frozen}");
}
