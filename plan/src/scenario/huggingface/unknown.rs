//! Types that no family covers.

use super::super::error::ScenarioError;
use super::super::keys::Key;
use super::super::merge::Document;
use super::super::value::Value;
use super::Config;
use crate::models::{self, Meaning};
use crate::names::nearest;

/// Fields that say that a type has parts of which no family with a feed-forward layer and softmax
/// attention has any, with the parts.
const PARTS: [(&str, &str); 12] = [
    ("num_experts", "experts"),
    ("num_local_experts", "experts"),
    ("n_routed_experts", "experts"),
    ("moe_intermediate_size", "experts"),
    ("ffn_config.moe_num_experts", "experts"),
    ("kv_lora_rank", "latent attention"),
    ("ssm_state_size", "state-space layers"),
    ("state_size", "state-space layers"),
    ("linear_num_value_heads", "linear attention"),
    ("d_kv", "an encoder and a decoder"),
    ("img_processor", "a vision tower"),
    ("image_size", "images as inputs"),
];

impl Config<'_> {
    /// Describes a type that no family covers, and the closest one that is covered.
    pub(super) fn unknown(&self, d: &Document, given: &Value) -> ScenarioError {
        let name = given
            .str()
            .map_or_else(|| given.describe(), |name| format!("{name:?}"));
        let what = format!("`model_type` {name} is not supported");
        if d.says(Key::ModelType) {
            let types = models::hf_types().map(|(_, hf)| hf.model_type);
            let near = given.str().and_then(|name| nearest(name, types));
            return d.error(given.origin, what).with_near(near);
        }
        if let Some((part, closest)) = given.str().and_then(models::not_planned) {
            let error = d.error(given.origin, format!("{what}: it has {part}"));
            return error.with_help(match closest {
                Some(near) => format!("--as {near} plans it as one, without them"),
                None => "a model with similar sizes can replace it: set model.family and its keys instead of model.preset".to_owned(),
            });
        }
        if let Some((field, part)) = PARTS.iter().find(|(name, _)| self.get(name).is_some()) {
            let what = format!("{what}: it has {part} (`{field}`)");
            return d.error(given.origin, what);
        }
        if self.get("vision_config").is_some() || self.get("text_config").is_some() {
            let error = d.error(given.origin, format!("{what}: it wraps several models"));
            return match self.language_model() {
                Some(name) => {
                    error.with_help(format!("--as {name} plans its language model alone"))
                }
                None => error,
            };
        }
        let error = d.error(given.origin, what);
        match self.closest() {
            Some(near) => error.with_help(format!(
                "its fields are closest to those of type {near}: --as {near} plans it as one"
            )),
            None => error,
        }
    }

    /// Returns the known type of the language model that a file wraps, if the file has all that it
    /// needs.
    fn language_model(&self) -> Option<&'static str> {
        let place = match self.get("text_config") {
            Some(_) => "text_config.",
            None => "",
        };
        let has = |name: &str| self.get(&format!("{place}{name}")).is_some();
        if PARTS.iter().any(|(name, _)| has(name)) {
            return None;
        }
        let inner = self.get(&format!("{place}model_type"))?;
        let mut name = inner.str()?;
        loop {
            let known = models::hf_types().find(|(_, hf)| hf.model_type == name);
            if let Some((_, hf)) = known {
                let needed = hf.all_fields().filter(|f| is_required(f));
                let complete = needed.clone().all(|f| f.names.iter().any(|n| has(n)));
                return complete.then_some(hf.model_type);
            }
            // `qwen3_vl_text` is a `qwen3`, `qwen2_5_vl` a `qwen2`.
            name = name.rsplit_once('_')?.0;
        }
    }

    /// Returns the type with whose fields the file agrees most: all that it needs, and the fewest
    /// that are not its own.
    fn closest(&self) -> Option<&'static str> {
        let score = |hf: &models::HfType| {
            let has = |f: &models::Field| self.first(f.names).is_some();
            let complete = hf.all_fields().filter(|f| is_required(f)).all(has);
            let read = hf.all_fields().filter(|f| has(f)).count();
            complete.then_some(read)
        };
        let scored = models::hf_types().filter_map(|(_, hf)| Some((score(hf)?, hf.model_type)));
        // Of equals, the first one.
        let best = scored.reduce(|a, b| if b.0 > a.0 { b } else { a });
        best.map(|(_, name)| name)
    }
}

fn is_required(field: &models::Field) -> bool {
    matches!(field.meaning, Meaning::Required(_))
}
