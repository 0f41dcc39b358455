//! What a file says that no key expresses.

use super::{Config, Kind};
use crate::models::Meaning;

/// Fields that change neither the time nor the memory of a step.
const WITHOUT_EFFECT: &[&str] = &[
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "initializer_factor",
    "initializer_cutoff_factor",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "language",
    "max_length",
    "max_window_layers",
    "min_length",
    "model_max_length",
    "model_type",
    "n_ctx",
    "name_or_path",
    "num_labels",
    "num_logits_to_keep",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "rescale_prenorm_residual",
    "return_dict",
    "rope_parameters",
    "rope_scaling",
    "slow_but_exact",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_sliding_window",
];

/// Parts of the names of more of them.
const WITHOUT_EFFECT_IF_NAMED: &[&str] = &[
    "dropout",
    "pdrop",
    "token_id",
    "token_index",
    "_attn_impl",
    "use_flash",
    "use_sdpa",
];

impl Config<'_> {
    /// Returns a sentence for each kind of thing that is not read.
    pub(super) fn notes(&self, kind: Kind) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(quantization) = self.json("quantization_config") {
            let method = quantization.get("quant_method").and_then(|m| m.as_str());
            notes.push(format!(
                "`quantization_config` ({}) is not used: weights have the types of [precision]",
                method.unwrap_or("no quant_method")
            ));
        }
        let dropped: Vec<&str> = self.fields.keys().map(String::as_str).collect();
        let dropped = dropped
            .into_iter()
            .filter(|name| self.is_dropped(name, kind));
        let dropped: Vec<String> = dropped.map(|name| format!("`{name}`")).collect();
        if !dropped.is_empty() {
            notes.push(format!(
                "a {} does not use {}",
                kind.hf.model_type,
                dropped.join(", ")
            ));
        }
        let at = |name: &&String| {
            let Some(raw) = self.raw(name) else {
                return false;
            };
            let start = (raw.get().as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
            let span = start..start + raw.get().len();
            self.specials.iter().any(|s| span.contains(&s.at))
        };
        let special: Vec<String> = self
            .fields
            .keys()
            .filter(at)
            .map(|n| format!("`{n}`"))
            .collect();
        if !special.is_empty() {
            notes.push(format!(
                "{} holds Infinity or NaN, which are not JSON",
                special.join(", ")
            ));
        }
        notes
    }

    /// Returns whether a field has a value that nothing reads.
    fn is_dropped(&self, name: &str, kind: Kind) -> bool {
        let known = |field: &&crate::models::Field| {
            let names = field.names.iter().map(|n| n.split('.').next());
            names.flatten().any(|n| n == name)
        };
        let read = kind.hf.all_fields().any(|f| known(&f));
        let also = kind.hf.all_fields().any(|f| match f.meaning {
            Meaning::Computed(_, computed) => computed.also.contains(&name),
            _ => false,
        });
        let harmless = WITHOUT_EFFECT.contains(&name)
            || name.starts_with('_')
            || WITHOUT_EFFECT_IF_NAMED
                .iter()
                .any(|part| name.contains(part));
        let empty = match self.json(name) {
            None => true,
            Some(value) => value == false || value.as_array().is_some_and(Vec::is_empty),
        };
        !read && !also && !harmless && !empty
    }
}
