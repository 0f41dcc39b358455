//! Notes on fields of a file that no key expresses.

use super::{Config, Kind};
use crate::models::{Meaning, ROPE_PLAIN, ROPE_SCALING_FIELDS, ROPE_SCALING_PLACES};
use serde_json::{Map, Value};

/// Where transformers 5 has the bases and scalings of rotary embeddings.
const ROPE_PARAMETERS: &str = "rope_parameters";

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
    "problem_type",
    "quantization_config",
    "rescale_prenorm_residual",
    "return_dict",
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
        let attention = self.json("_attn_implementation");
        if let Some(word) = attention.as_ref().and_then(|word| word.as_str()) {
            notes.push(format!(
                "`_attn_implementation` ({word}) is not used: model.attn_implementation says whose attention is predicted"
            ));
        }
        let dropped = self.dropped(kind);
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

    /// Returns the fields that have values which nothing reads, in quotes.
    pub(super) fn dropped(&self, kind: Kind) -> Vec<String> {
        let names = self
            .fields
            .keys()
            .filter(|name| self.is_dropped(name, kind));
        let names = names.cloned().chain(self.dropped_rope(kind));
        names.map(|name| format!("`{name}`")).collect()
    }

    /// Returns whether a field has a value that nothing reads.
    pub(super) fn is_dropped(&self, name: &str, kind: Kind) -> bool {
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
            || name == ROPE_PARAMETERS
            || name.starts_with('_')
            || WITHOUT_EFFECT_IF_NAMED
                .iter()
                .any(|part| name.contains(part));
        // Parts of linear layers that were divided in pretraining: 1 is not divided.
        let whole = name == "pretraining_tp" && self.json(name).is_some_and(|n| n == 1);
        let silent = name.contains("noise") && self.json(name).is_some_and(|n| n == 0.0);
        let empty = whole
            || silent
            || match self.json(name) {
                None => true,
                Some(value) => value == false || value.as_array().is_some_and(Vec::is_empty),
            };
        !read && !also && !harmless && !empty
    }

    /// Returns the entries of `rope_parameters` that change rotations and that nothing reads.
    fn dropped_rope(&self, kind: Kind) -> Vec<String> {
        let whole = |field: crate::models::Field| match field.meaning {
            Meaning::Computed(_, computed) => {
                field.names.contains(&ROPE_PARAMETERS) || computed.also.contains(&ROPE_PARAMETERS)
            }
            _ => false,
        };
        let Some(Value::Object(given)) = self.json(ROPE_PARAMETERS) else {
            return Vec::new();
        };
        if kind.hf.all_fields().any(|field| whole(*field)) {
            return Vec::new();
        }
        let nested = given.iter().filter_map(|(of, inner)| {
            let path = format!("{ROPE_PARAMETERS}.{of}");
            Some((path, inner.as_object()?))
        });
        let all = nested.chain([(ROPE_PARAMETERS.to_owned(), &given)]);
        all.flat_map(|(path, inner)| self.unread_rope(kind, &path, inner))
            .collect()
    }

    /// Returns the entries of one object of `rope_parameters` that nothing reads.
    fn unread_rope(&self, kind: Kind, path: &str, inner: &Map<String, Value>) -> Vec<String> {
        let scaling = ROPE_SCALING_PLACES.iter().find(|place| {
            let found = self.json(place);
            found.is_some_and(|v| v.is_object())
        });
        let word = ["rope_type", "type"]
            .iter()
            .find_map(|name| inner.get(*name)?.as_str());
        let is_scaled = word.is_some_and(|word| !ROPE_PLAIN.contains(&word));
        let is_read = |name: &str| {
            let full = format!("{path}.{name}");
            let by_field = kind
                .hf
                .all_fields()
                .any(|f| f.names.contains(&full.as_str()));
            by_field || scaling.is_some_and(|place| *place == path) && is_scaling(name)
        };
        let matters = |name: &str, value: &Value| match name {
            "rope_theta" => !value.is_null(),
            "partial_rotary_factor" => value.as_f64().is_some_and(|share| share != 1.0),
            name => is_scaled && is_scaling(name) && !value.is_null(),
        };
        let names = inner
            .iter()
            .filter(|(name, value)| matters(name, value) && !is_read(name));
        names.map(|(name, _)| format!("{path}.{name}")).collect()
    }
}

/// Returns whether an entry of `rope_parameters` belongs to a scaling of frequencies.
fn is_scaling(name: &str) -> bool {
    matches!(name, "rope_type" | "type") || ROPE_SCALING_FIELDS.contains(&name)
}
