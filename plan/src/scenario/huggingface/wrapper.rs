//! Files that contain a vision tower and a language model.

use super::super::error::ScenarioError;
use super::super::keys::Key;
use super::super::merge::Document;
use super::super::value::{Datum, Entry, Value};
use super::json::datum;
use super::unknown::{closest_alone, takes};
use super::{Config, Kind};
use crate::models::{self, Fields, HfWrapper, Ties, WRAPPERS, text_defaults};

/// Fields of the whole that belong to its language model too.
const SHARED: [&str; 2] = [TIES, "quantization_config"];
const TIES: &str = "tie_word_embeddings";
/// Fields of the whole that say how many classes its output layer has.
const LABELS: [&str; 2] = ["num_labels", "id2label"];

/// Other places of the language model's fields, in files of classes that are not part of
/// transformers and of models that speak.
const TEXT_CONFIGS: [&str; 3] = [
    "llm_config",
    "language_config",
    "thinker_config.text_config",
];

/// Places of models that are parts of others, and wrap several models themselves.
const PARTS: [&str; 1] = ["thinker_config"];

/// Returns the wrapper that the scenario takes a file for. Names that are also those of single
/// models stand for these.
fn asked_wrapper(d: &Document) -> Option<&'static HfWrapper> {
    let asked = d.value(Key::ModelType).filter(|_| d.says(Key::ModelType))?;
    let name = asked.str()?;
    let single = models::hf_types().any(|(_, hf)| hf.model_type == name);
    WRAPPERS.iter().find(|w| w.model_type == name && !single)
}

impl<'t> Config<'t> {
    /// Gives the fields of the language model the name that they have in transformers.
    pub(super) fn name_text_config(&mut self) {
        if self.raw("text_config").is_some() {
            return;
        }
        let found = TEXT_CONFIGS.iter().find_map(|n| Some((*n, self.raw(n)?)));
        if let Some((name, raw)) = found {
            self.fields.remove(name);
            self.fields.insert("text_config".to_owned(), raw);
        }
    }

    /// Continues with the part of a file that the scenario takes it for, if that wraps several
    /// models itself: the model that listens and writes, of one that also speaks.
    pub(super) fn enter_part(&mut self, d: &Document) {
        let Some(asked) = asked_wrapper(d) else {
            return;
        };
        for part in PARTS {
            let named = self.get(&format!("{part}.model_type"));
            let is_asked = named.is_none_or(|name| name.str() == Some(asked.model_type));
            let fields = self.raw(part).filter(|_| is_asked);
            if let Some(fields) = fields.and_then(|raw| serde_json::from_str(raw.get()).ok()) {
                self.fields = fields;
                return;
            }
        }
    }

    /// Returns the wrapper that a file is of, or that the scenario takes it for, unless it takes it
    /// for another type.
    pub(super) fn wrapper(&self, d: &Document) -> Option<&'static HfWrapper> {
        if let Some(asked) = asked_wrapper(d) {
            return Some(asked);
        }
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

    /// Returns the keys `vision` and `audio`; `None` without such a tower.
    pub(super) fn towers(
        &self,
        d: &Document,
        wrapper: &HfWrapper,
    ) -> Result<[Option<Value>; 2], ScenarioError> {
        Ok([
            self.tower(d, wrapper, "vision_config", wrapper.vision)?,
            self.tower(d, wrapper, "audio_config", wrapper.audio)?,
        ])
    }

    /// Returns the key of a tower whose fields are in `config`; `None` without a tower.
    fn tower(
        &self,
        d: &Document,
        wrapper: &HfWrapper,
        config: &str,
        read: fn(Fields<'_>) -> Result<serde_json::Value, String>,
    ) -> Result<Option<Value>, ScenarioError> {
        let origin = self.get(config).map_or(self.whole(), |v| v.origin);
        let text = self.text_config(wrapper);
        let found = read(&|name| match name {
            "text_config" => text.clone(),
            _ => self.json(name),
        });
        let found = found.map_err(|what| {
            let error = d.error(self.place(&what, origin), what);
            let named = text.as_ref().and_then(|t| t.get("model_type")?.as_str());
            let alone = wrapper.text_type(named);
            match alone.filter(|name| takes(d, origin, name)) {
                Some(name) => {
                    error.with_help(format!("--as {name} plans its language model alone"))
                }
                None => error,
            }
        })?;
        let datum = (!found.is_null()).then(|| datum(found, origin));
        Ok(datum.map(|datum| Value { datum, origin }))
    }

    /// Returns the key `vision`, if the class of the file has a tower: that of the language model
    /// takes the file of the whole, too, and has none.
    ///
    /// # Errors
    /// If the class has no tower, but blocks that would attend to it: the class skips them.
    pub(super) fn of_class(
        &self,
        d: &Document,
        kind: Kind,
        wrapper: Option<&HfWrapper>,
        vision: Option<Value>,
    ) -> Result<Option<Value>, ScenarioError> {
        let (Some(wrapper), Some(classes)) = (wrapper, self.get("architectures")) else {
            return Ok(vision);
        };
        let first = classes.array().and_then(|list| list.first()?.str());
        let Some(class) = first.filter(|class| *class == kind.hf.architecture) else {
            return Ok(vision);
        };
        let memory = |entries: &[Entry]| entries.iter().any(|e| e.key == "memory");
        let attends = (vision.as_ref()).is_some_and(|v| v.table().is_some_and(memory));
        if !attends {
            return Ok(None);
        }
        let message = format!(
            "a {class} has no tower, and skips the layers that would attend to it: that is not planned"
        );
        let help = format!(
            "\"architectures\": [\"{}\"] takes the whole",
            wrapper.architecture
        );
        Err(d.error(classes.origin, message).with_help(help))
    }

    /// Returns the language model's fields, with those that its class has.
    fn text_config(&self, wrapper: &HfWrapper) -> Option<serde_json::Value> {
        let mut text = self.json("text_config")?;
        let all = text.as_object_mut()?;
        let named = all.get("model_type").and_then(|name| name.as_str());
        let own = text_defaults(wrapper, named.unwrap_or(wrapper.text_name()));
        for (name, raw) in own {
            let value = serde_json::from_str(raw.get()).unwrap_or_default();
            all.entry(name).or_insert(value);
        }
        Some(text)
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
            Ties::Never => true,
        };
        if wrapper.ties == Ties::Never {
            self.fields.remove(TIES);
        }
        let shared = SHARED.iter().filter(|name| !keeps || **name != TIES);
        let shared = shared.filter_map(|n| outer.get_key_value(*n));
        self.fields
            .extend(shared.map(|(name, raw)| (name.clone(), *raw)));
        for name in LABELS {
            self.fields.remove(name);
            if let Some(raw) = outer.get(name) {
                self.fields.insert(name.to_owned(), raw);
            }
        }
        // The class of the whole says what its output layer is.
        for read in [
            "architectures",
            "vision_config",
            "audio_config",
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
            let error = d.error(given.origin, what);
            match self.closest(d, &given) {
                Some(name) => error.with_help(closest_alone(name)),
                None => error,
            }
        })
    }
}
