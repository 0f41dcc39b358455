//! Files that wrap a vision tower and a language model.

use super::super::error::ScenarioError;
use super::super::keys::Key;
use super::super::merge::Document;
use super::super::value::{Datum, Value};
use super::json::datum;
use super::{Config, Kind};
use crate::models::{self, HfWrapper, Ties, WRAPPERS};
use serde_json::value::RawValue;

/// Fields of the whole that belong to its language model too.
const SHARED: [&str; 2] = [TIES, "quantization_config"];
const TIES: &str = "tie_word_embeddings";

impl<'t> Config<'t> {
    /// Returns the wrapper that a file is of, unless the scenario takes it for another type.
    pub(super) fn wrapper(&self, d: &Document) -> Option<&'static HfWrapper> {
        let given = self.get("model_type").filter(|_| !d.says(Key::ModelType))?;
        let name = given.str()?;
        let named = WRAPPERS.iter().find(|w| w.model_type == name);
        // A whole may be named after its language model.
        named.or_else(|| {
            let classes = self.get("text_config").and(self.get("architectures"))?;
            let class = classes.array()?.first()?.str()?;
            WRAPPERS.iter().find(|w| w.architecture == class)
        })
    }

    /// Returns the key `vision`.
    pub(super) fn vision(&self, d: &Document, wrapper: &HfWrapper) -> Result<Value, ScenarioError> {
        let origin = self.get("vision_config").map_or(self.whole(), |v| v.origin);
        let found = (wrapper.vision)(&|name| self.json(name));
        let found = found.map_err(|what| d.error(origin, what))?;
        let datum = datum(found);
        Ok(Value { datum, origin })
    }

    /// Continues with the language model of a file that wraps several models, if it is of a known
    /// wrapper, or if the scenario says which type the language model is.
    pub(super) fn enter_text_config(&mut self, d: &Document, wrapper: Option<&HfWrapper>) {
        if wrapper.is_none() && !d.says(Key::ModelType) {
            return;
        }
        let outer = self.fields.clone();
        let inner = self.raw("text_config");
        if let Some(fields) = inner.and_then(|raw| serde_json::from_str(raw.get()).ok()) {
            self.fields = fields;
        }
        let Some(wrapper) = wrapper else {
            return;
        };
        let inner = self.fields.get(TIES).map(|raw| raw.get() == "true");
        let keeps = match wrapper.ties {
            Ties::Whole => false,
            Ties::Either => inner == Some(true),
            Ties::Text => inner.is_some(),
        };
        let shared = SHARED.iter().filter(|name| !keeps || **name != TIES);
        let shared = shared.filter_map(|n| outer.get_key_value(*n));
        self.fields
            .extend(shared.map(|(name, raw)| (name.clone(), *raw)));
        for (name, json) in wrapper.defaults {
            let raw: Option<&'static RawValue> = serde_json::from_str(json).ok();
            if let Some(raw) = raw.filter(|_| self.raw(name).is_none()) {
                self.fields.insert((*name).to_owned(), raw);
            }
        }
        // The class of the whole says what its output layer is.
        for read in [
            "architectures",
            "vision_config",
            "img_processor",
            "embd_layer",
        ] {
            self.fields.remove(read);
        }
        if let Some(raw) = outer.get("architectures") {
            let classes: Vec<String> = serde_json::from_str(raw.get()).unwrap_or_default();
            // Files of one type name it in different ways: `KimiK25...`, `Kimi_K25...`.
            let whole =
                |c: &String| *c == wrapper.architecture || c.ends_with("ForConditionalGeneration");
            if classes.first().is_some_and(|c| !whole(c)) {
                self.fields.insert("architectures".to_owned(), raw);
            }
        }
    }

    /// Returns the type of a wrapper's language model.
    pub(super) fn wrapped(&self, d: &Document, wrapper: &HfWrapper) -> Result<Kind, ScenarioError> {
        let given = self.get("model_type");
        let name = given.as_ref().and_then(Value::str);
        let has = |field: &str| self.json(field).is_some_and(|value| value != false);
        let text = wrapper.text_type(name);
        let found = text
            .map(|name| models::variant(name, has))
            .and_then(|name| {
                let mut all = models::hf_types().map(|(family, hf)| Kind { family, hf });
                all.find(|k| k.hf.model_type == name && k.family.has("vision"))
            });
        found.ok_or_else(|| {
            let given = given.unwrap_or(Value {
                datum: Datum::Str(String::new()),
                origin: self.whole(),
            });
            let what = format!(
                "a {} with a language model of type {} is not supported",
                wrapper.model_type,
                given.describe()
            );
            d.error(given.origin, what)
        })
    }
}
