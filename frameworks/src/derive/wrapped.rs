//! Refuses classes of blocks that the model does not have.
//!
//! Sources: `set_auto_wrap_policy` and `fsdp2_prepare_auto_wrap_policy` of Accelerate 1.15, and
//! `_no_split_modules` of the models of transformers 5.24.

use crate::draft::Draft;
use crate::model;
use crate::row::{Lack, Status};

/// Ends of the keys that name classes.
const KEYS: [&str; 2] = ["cls_to_wrap", "cls_names_to_wrap"];
/// End of the key for the policy, and the policy that reads the classes.
const POLICY: &str = "auto_wrap_policy";
const BY_CLASS: &str = "transformer_based_wrap";

/// Class of the blocks of a model, by its `model_type`.
const BLOCKS: [(&str, &str); 41] = [
    ("bloom", "BloomBlock"),
    ("codegen", "CodeGenBlock"),
    ("cohere", "CohereDecoderLayer"),
    ("cohere2", "Cohere2DecoderLayer"),
    ("deepseek_v2", "DeepseekV2DecoderLayer"),
    ("deepseek_v3", "DeepseekV3DecoderLayer"),
    ("falcon", "FalconDecoderLayer"),
    ("gemma", "GemmaDecoderLayer"),
    ("gemma2", "Gemma2DecoderLayer"),
    ("gemma3_text", "Gemma3DecoderLayer"),
    ("glm", "GlmDecoderLayer"),
    ("glm4", "Glm4DecoderLayer"),
    ("glm4_moe", "Glm4MoeDecoderLayer"),
    ("gpt2", "GPT2Block"),
    ("gpt_bigcode", "GPTBigCodeBlock"),
    ("gpt_neo", "GPTNeoBlock"),
    ("gpt_neox", "GPTNeoXLayer"),
    ("gpt_oss", "GptOssDecoderLayer"),
    ("gptj", "GPTJBlock"),
    ("granite", "GraniteDecoderLayer"),
    ("llama", "LlamaDecoderLayer"),
    ("llama4", "Llama4TextDecoderLayer"),
    ("llama4_text", "Llama4TextDecoderLayer"),
    ("ministral", "MinistralDecoderLayer"),
    ("mistral", "MistralDecoderLayer"),
    ("mixtral", "MixtralDecoderLayer"),
    ("mpt", "MptBlock"),
    ("olmo", "OlmoDecoderLayer"),
    ("olmo2", "Olmo2DecoderLayer"),
    ("olmoe", "OlmoeDecoderLayer"),
    ("opt", "OPTDecoderLayer"),
    ("phi", "PhiDecoderLayer"),
    ("phi3", "Phi3DecoderLayer"),
    ("qwen2", "Qwen2DecoderLayer"),
    ("qwen2_moe", "Qwen2MoeDecoderLayer"),
    ("qwen3", "Qwen3DecoderLayer"),
    ("qwen3_moe", "Qwen3MoeDecoderLayer"),
    ("qwen3_next", "Qwen3NextDecoderLayer"),
    ("smollm3", "SmolLM3DecoderLayer"),
    ("stablelm", "StableLmDecoderLayer"),
    ("starcoder2", "Starcoder2DecoderLayer"),
];

/// Refuses names of classes that belong to models of other types than the job's. Accelerate looks
/// for any module of the class, so other names may be right.
pub(super) fn refuse(draft: &mut Draft) {
    let Some(preset) = draft.value("model.preset") else {
        return;
    };
    let types = model::types(preset.trim_matches('"'));
    let own: Option<Vec<&str>> = types.iter().map(|kind| block(kind)).collect();
    let Some((kind, own)) = types.first().zip(own) else {
        return;
    };
    let ends = |key: &str, ends: &[&str]| {
        let key = key.to_ascii_lowercase().replace('-', "_");
        ends.iter().any(|end| key.ends_with(end))
    };
    let by_other_policy = draft
        .rows
        .iter()
        .any(|r| ends(&r.key, &[POLICY]) && !r.value.eq_ignore_ascii_case(BY_CLASS));
    if by_other_policy {
        return;
    }
    for row in 0..draft.rows.len() {
        let given = &draft.rows[row];
        if !ends(&given.key, &KEYS) || matches!(given.status, Status::NoCounterpart(_)) {
            continue;
        }
        let mut names = given.value.split(|c: char| !c.is_ascii_alphanumeric());
        let is_foreign =
            |name: &&str| !own.contains(name) && BLOCKS.iter().any(|(_, class)| class == name);
        if let Some(name) = names.find(is_foreign) {
            let class = own[0];
            let why = format!(
                "the model has no {name}, and Accelerate stops with \"Could not find the transformer layer class\": \
                 blocks of type `{kind}` are {class}"
            );
            draft.none(row, Lack::Everything, why);
        }
    }
}

/// Returns the class of the blocks of a model.
fn block(kind: &str) -> Option<&'static str> {
    let found = BLOCKS.iter().find(|(of, _)| *of == kind);
    found.map(|(_, class)| *class)
}
