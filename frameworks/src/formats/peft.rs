//! PEFT's `adapter_config.json`, next to the configuration of the job that trains the adapter.

use crate::convert::{
    ADAPTER, LAYER_COPIES, SAVING, VALUES, adapter_alphas, adapter_ranks, decomposed,
    excluded_modules, layers_pattern, rank_stabilized, saved_modules, targets, transformed_layers,
};
use crate::table::{Effect, Fact, Format, Key, Table, To, integer, key, lost, number, with};

pub(crate) static PEFT: Format = Format {
    name: "PEFT",
    tables: &[Table {
        under: "",
        prefix: "",
        keys: KEYS,
        asides: ASIDES,
    }],
    engine: None,
    accelerated: false,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: &[],
};

const OTHER: &str = "the adapter is predicted as plain LoRA";

const KEYS: &[Key] = &[
    with("peft_type", |node| {
        Ok(match node.text() {
            Some("LORA") => Effect::Fact(Fact::Adapter, 1),
            _ => Effect::Decisive(ADAPTER),
        })
    }),
    key("base_model_name_or_path", To::Model),
    integer("r", "lora.r"),
    number("lora_alpha", "lora.lora_alpha"),
    with("target_modules", targets),
    with("exclude_modules", excluded_modules),
    with("layers_to_transform", transformed_layers),
    with("layers_pattern", layers_pattern),
    with("rank_pattern", adapter_ranks),
    with("alpha_pattern", adapter_alphas),
    number("lora_dropout", "lora.lora_dropout"),
    with("use_rslora", rank_stabilized),
    with("use_dora", decomposed),
    with("modules_to_save", saved_modules),
    with("bias", |node| {
        Ok(match node.text() {
            Some("none") => Effect::Aside("as predicted"),
            _ => Effect::Lost("biases are predicted as frozen"),
        })
    }),
    lost("lora_bias", "adapters are predicted without biases"),
    lost("layer_replication", LAYER_COPIES),
    lost(
        "target_parameters",
        "adapters of the experts' parameters are not predicted",
    ),
    lost(
        "trainable_token_indices",
        "tables are predicted as frozen, or as trained in full (modules_to_save)",
    ),
    lost("alora_invocation_tokens", OTHER),
    lost("arrow_config", OTHER),
    lost("kasa_config", OTHER),
    lost("monteclora_config", OTHER),
    lost("use_bdlora", OTHER),
    lost("use_qalora", OTHER),
    lost("velora_config", OTHER),
];

const ASIDES: &[(&str, &[&str])] = &[
    (
        "initial values",
        &[
            "init_lora_weights",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
        ],
    ),
    (
        SAVING,
        &[
            "auto_mapping",
            "fan_in_fan_out",
            "inference_mode",
            "peft_version",
            "revision",
            "task_type",
        ],
    ),
    (
        "as predicted",
        &["ensure_weight_tying", "megatron_config", "megatron_core"],
    ),
    (VALUES, &["qalora_group_size"]),
];
