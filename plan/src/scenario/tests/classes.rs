//! Output layers by the class that `architectures` names.

use super::super::*;
use super::Folder;
use std::path::Path;

/// Files of `tests/data/configs`, classes, and the numbers of parameters of these classes on
/// torch's meta device (transformers 5.24); those that classify sequences or tokens have three
/// classes.
const COUNTED: &[(&str, &str, u64)] = &[
    (
        "distilgpt2.json",
        "GPT2ForSequenceClassification",
        81_914_880,
    ),
    ("distilgpt2.json", "GPT2ForTokenClassification", 81_914_883),
    ("distilgpt2.json", "GPT2ForQuestionAnswering", 81_914_114),
    ("distilgpt2.json", "GPT2Model", 81_912_576),
    (
        "pythia-6.9b.json",
        "GPTNeoXForSequenceClassification",
        6_650_744_832,
    ),
    (
        "pythia-6.9b.json",
        "GPTNeoXForTokenClassification",
        6_650_744_835,
    ),
    (
        "pythia-6.9b.json",
        "GPTNeoXForQuestionAnswering",
        6_650_740_738,
    ),
    ("pythia-6.9b.json", "GPTNeoXModel", 6_650_732_544),
    ("t5-base.json", "T5ForSequenceClassification", 223_496_451),
    ("t5-base.json", "T5ForQuestionAnswering", 222_905_090),
    ("t5-base.json", "T5Model", 222_903_552),
    ("tiny--mt5.json", "MT5ForSequenceClassification", 200_067),
    ("tiny--mt5.json", "MT5ForQuestionAnswering", 195_842),
    ("tiny--mt5.json", "MT5Model", 195_712),
    ("tiny--bart.json", "BartForSequenceClassification", 213_795),
    ("tiny--bart.json", "BartForQuestionAnswering", 209_570),
    ("tiny--bart.json", "BartModel", 209_440),
    ("tiny--esm.json", "EsmForSequenceClassification", 108_912),
    ("tiny--esm.json", "EsmForTokenClassification", 104_752),
    ("tiny--esm.json", "EsmModel", 108_717),
    (
        "tiny--xlm-roberta-xl.json",
        "XLMRobertaXLForSequenceClassification",
        113_187,
    ),
    (
        "tiny--xlm-roberta-xl.json",
        "XLMRobertaXLForTokenClassification",
        109_027,
    ),
    (
        "tiny--xlm-roberta-xl.json",
        "XLMRobertaXLForQuestionAnswering",
        108_962,
    ),
    ("tiny--xlm-roberta-xl.json", "XLMRobertaXLModel", 112_992),
    (
        "tiny--xlm-roberta-xl.json",
        "XLMRobertaXLForMultipleChoice",
        113_057,
    ),
    (
        "tiny--roberta-prelayernorm.json",
        "RobertaPreLayerNormForSequenceClassification",
        113_379,
    ),
    (
        "tiny--roberta-prelayernorm.json",
        "RobertaPreLayerNormForTokenClassification",
        109_219,
    ),
    (
        "tiny--roberta-prelayernorm.json",
        "RobertaPreLayerNormForQuestionAnswering",
        109_154,
    ),
    (
        "tiny--roberta-prelayernorm.json",
        "RobertaPreLayerNormModel",
        113_184,
    ),
    (
        "tiny--roberta-prelayernorm.json",
        "RobertaPreLayerNormForMultipleChoice",
        113_249,
    ),
    (
        "bert-base-uncased.json",
        "BertForMultipleChoice",
        109_483_009,
    ),
    (
        "roberta-large.json",
        "RobertaForMultipleChoice",
        355_360_769,
    ),
    (
        "ModernBERT-base.json",
        "ModernBertForMultipleChoice",
        149_605_633,
    ),
    (
        "tiny--distilbert.json",
        "DistilBertForMultipleChoice",
        112_993,
    ),
    ("tiny--electra.json", "ElectraForMultipleChoice", 101_681),
    ("tiny--albert.json", "AlbertForMultipleChoice", 42_993),
    (
        "tiny--deberta-v2.json",
        "DebertaV2ForMultipleChoice",
        110_945,
    ),
    (
        "tiny--camembert.json",
        "CamembertForMultipleChoice",
        113_121,
    ),
    (
        "tiny--megatron-bert.json",
        "MegatronBertForMultipleChoice",
        113_121,
    ),
    ("tiny--mpnet.json", "MPNetForMultipleChoice", 113_121),
    ("tiny--umt5.json", "UMT5ForSequenceClassification", 200_451),
    ("tiny--umt5.json", "UMT5ForQuestionAnswering", 196_226),
    ("tiny--umt5.json", "UMT5Model", 196_096),
    ("tiny--mvp.json", "MvpForSequenceClassification", 213_795),
    ("tiny--mvp.json", "MvpForQuestionAnswering", 209_570),
    ("tiny--mvp.json", "MvpModel", 209_440),
    (
        "tiny--plbart.json",
        "PLBartForSequenceClassification",
        213_795,
    ),
    ("tiny--plbart.json", "PLBartModel", 209_440),
    (
        "tiny--data2vec-text.json",
        "Data2VecTextForMultipleChoice",
        113_121,
    ),
    (
        "longformer-base-4096.json",
        "LongformerForMultipleChoice",
        148_660_225,
    ),
];

/// Returns the scenario of a file with another class.
fn with_class(file: &str, class: &str, own: &Folder) -> Result<u64, ScenarioError> {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/configs");
    let text = std::fs::read_to_string(configs.join(file)).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["architectures"] = vec![class].into();
    if class.ends_with("ForSequenceClassification") || class.ends_with("ForTokenClassification") {
        config["id2label"] = serde_json::json!({"0": "a", "1": "b", "2": "c"});
    }
    let at = own.file("config.json");
    std::fs::write(&at, config.to_string()).unwrap();
    let text =
        format!("[model]\npreset = {at:?}\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n");
    let scenario = parse("classes", &text, &[])?;
    let (_, params) = crate::models::testing::modules_and_params(&scenario);
    Ok(params.iter().map(|p| p.numel()).sum())
}

#[test]
fn classes_have_the_number_of_parameters_of_transformers() {
    let own = Folder::new("classes", &[("config.json", "")]);
    let mut wrong = Vec::new();
    for (file, class, known) in COUNTED {
        match with_class(file, class, &own) {
            Ok(ours) if ours == *known => {}
            Ok(ours) => wrong.push(format!("{file}, {class}: {ours}, not {known}")),
            Err(e) => wrong.push(format!("{file}, {class}: {e}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn classes_that_are_not_known_name_one_that_is() {
    let own = Folder::new("other-classes", &[("config.json", "")]);
    let help = |file, class| {
        let error = with_class(file, class, &own).unwrap_err();
        error.help().unwrap_or_default().to_owned()
    };
    // Its scores come from two layers, in code that is not part of transformers.
    assert_eq!(
        help("gte-Qwen2-7B-instruct.json", "Qwen2ForRewardModel"),
        "\"architectures\": [\"Qwen2ForSequenceClassification\"] with \"num_labels\": 1 is a reward model with one \
         layer of scores"
    );
    // The encoder alone.
    assert_eq!(
        help("t5-base.json", "T5ForTokenClassification"),
        "\"architectures\": [\"T5ForConditionalGeneration\"] takes the language model"
    );
}

#[test]
fn falcon_with_slopes_is_planned() {
    let own = Folder::new("falcon-rw", &[("config.json", "")]);
    let at = own.file("config.json");
    // Falcon-RW-1B, counted on torch's meta device.
    let config = r#"{"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": true, "bias": true,
        "hidden_size": 2048, "layer_norm_epsilon": 1e-05, "multi_query": false,
        "new_decoder_architecture": false, "num_attention_heads": 32, "num_hidden_layers": 24,
        "parallel_attn": false, "vocab_size": 50304}"#;
    std::fs::write(&at, config).unwrap();
    // A folder stands for its `config.json`.
    let text = format!(
        "[model]\npreset = {:?}\n[train]\nseq_len = 1024\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n",
        own.0
    );
    let scenario = parse("falcon", &text, &[]).unwrap();
    let (_, params) = crate::models::testing::modules_and_params(&scenario);
    assert_eq!(params.iter().map(|p| p.numel()).sum::<u64>(), 1_311_625_216);
}

#[test]
fn words_that_are_no_flags_are_refused_at_their_place() {
    let own = Folder::new("no-flag", &[("config.json", "")]);
    let at = own.file("config.json");
    let base = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
"attention_bias": "yes"}"#;
    let text =
        format!("[model]\npreset = {at:?}\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n");
    let of = |config: &str| {
        std::fs::write(&at, config).unwrap();
        parse("flags", &text, &[]).map_err(|e| e.to_string())
    };
    let error = of(base).unwrap_err();
    assert!(
        error.contains("config.json:3:19: `attention_bias` must be true or false, not"),
        "{error}"
    );
    of(&base.replace("\"yes\"", "true")).unwrap();
    // An activation that its family does not have is one of another type.
    let gelu = base.replace("\"attention_bias\": \"yes\"", "\"hidden_act\": \"gelu\"");
    let error = of(&gelu).unwrap_err();
    let (_, help) = error
        .split_once("--as ")
        .unwrap_or_else(|| panic!("{error}"));
    let near = help.split(' ').next().unwrap();
    parse("flags", &text, &[format!("model.model_type={near}")]).unwrap();
    // A clamp that no type has is left out on request.
    let clamped = base.replace("\"attention_bias\": \"yes\"", "\"clip_qkv\": 8.0");
    let error = of(&clamped.replace("llama", "olmo")).unwrap_err();
    assert!(
        error.contains("a copy of the file with \"clip_qkv\": false is planned"),
        "{error}"
    );
}
