//! Models by their Hugging Face `config.json`: its fields as values of `[model]`, each with its
//! position in that file.
//!
//! Each family lists its fields ([`crate::models::HfType`]). A file must have the shapes; other
//! fields have the defaults of transformers' configuration classes. `architectures` names the
//! class, which determines the output layer. [`Document::notes`] has the fields that no key
//! expresses.

mod dropout;
mod head;
mod json;
mod notes;
mod scaling;
mod unknown;
mod wrapper;

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::{Document, Layer, Shape};
use super::source::Source;
use super::value::{Datum, Origin, Value};
use crate::models::{self, BiasPart, FamilySpec, HfType, HfWrapper, Meaning};
use json::datum;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// How file names of such models end.
pub(crate) const ENDING: &str = ".json";

/// A file's fields.
struct Config<'t> {
    source: u32,
    text: &'t str,
    fields: BTreeMap<String, &'t RawValue>,
    /// Numbers that JSON does not have, in order.
    specials: Vec<json::Special>,
    /// The class of the whole without an output layer, of a file that wraps several models.
    whole_base: Option<String>,
}

/// Takes from a file, named at a place, the keys that no other text gives. Returns those that other
/// keys depend on.
pub(crate) fn fill(
    document: &mut Document,
    path: &Path,
    named: Origin,
) -> Result<Shape, ScenarioError> {
    let shown = path.display().to_string();
    let text = document.model_files.text(path).map_err(|why| {
        let error = document.error(named, format!("model file {shown} {why}"));
        error.with_help("paths in a file are relative to that file, paths on the command line to the working directory")
    })?;
    let source = Source {
        name: shown.into(),
        text: Arc::clone(&text),
        folder: None,
    };
    let (plain, specials) = json::without_specials(&text);
    let fields = serde_json::from_str(&plain).map_err(|e| {
        let at = json::byte(&text, e.line(), e.column());
        let what = e.to_string();
        // The position is shown once.
        let what = what.split(" at line ").next().unwrap_or_default();
        ScenarioError::at(&source, at..at, format!("no `config.json`: {what}"))
    })?;
    let mut config = Config {
        source: document.add_source(source),
        text: &plain,
        fields,
        specials,
        whole_base: None,
    };
    config.enter_part(document);
    config.name_text_config();
    let wrapper = config.wrapper(document);
    config.whole_base = wrapper.and_then(HfWrapper::base_class);
    let towers = wrapper.map(|w| config.towers(document, w)).transpose()?;
    let [vision, audio] = towers.unwrap_or_default();
    config.enter_text_config(document, wrapper);
    let kind = match wrapper {
        Some(wrapper) => config.wrapped(document, wrapper)?,
        None => config.kind(document)?,
    };
    if kind.family.keeps_type || wrapper.is_some() {
        // A type that is asked for may stand for another one.
        document.resolve(Key::ModelType, Datum::Str(kind.hf.model_type.to_owned()));
    }
    config.add_class_defaults(kind, wrapper);
    config.check(document, kind)?;
    let mut shape = Shape {
        family: Some(kind.family.name.to_owned()),
        ..Shape::default()
    };
    let vision = config.of_class(document, kind, wrapper, vision)?;
    // A class without the first tower has no second one.
    let audio = audio.filter(|_| vision.is_some());
    let vision = vision.map(|value| (Key::Vision, value));
    let audio = audio.map(|value| (Key::Audio, value));
    let towers = vision.into_iter().chain(audio);
    for (key, value) in config.values(document, kind)?.into_iter().chain(towers) {
        match key {
            Key::Hidden => shape.hidden = value.integer(),
            Key::Ffn => shape.ffn = value.integer(),
            _ => {}
        }
        document.set(key, value, Layer::Preset)?;
    }
    document.notes.extend(config.notes(kind));
    Ok(shape)
}

/// Returns whether a text is the `config.json` of a model: an object with the name of its
/// `model_type`. Numbers that JSON does not have may be in it.
#[must_use]
pub fn is_config(text: &str) -> bool {
    let (plain, _) = json::without_specials(text);
    let value = serde_json::from_str::<serde_json::Value>(&plain);
    value.is_ok_and(|v| {
        v.get("model_type")
            .is_some_and(serde_json::Value::is_string)
    })
}

impl<'t> Config<'t> {
    /// The place of the whole.
    fn whole(&self) -> Origin {
        Origin::new(self.source, 0..0)
    }

    fn value(&self, raw: &'t RawValue) -> Value {
        // A raw value is a part of the text that it was read from.
        let start = (raw.get().as_ptr() as usize).checked_sub(self.text.as_ptr() as usize);
        let span = start.map(|start| start..start + raw.get().len());
        // Defaults are no part of it.
        let span = span.filter(|s| s.end <= self.text.len()).unwrap_or(0..0);
        let read = serde_json::from_str(raw.get()).unwrap_or(serde_json::Value::Null);
        let special = self.specials.iter().find(|s| span.contains(&s.at));
        let origin = Origin::new(self.source, span.clone());
        Value {
            origin,
            datum: special.map_or_else(|| datum(read, origin), |s| Datum::Float(s.value)),
        }
    }

    /// Returns the first of these fields that is there and not null. A dot leads into an object.
    fn first(&self, names: &[&str]) -> Option<Value> {
        names.iter().find_map(|name| self.get(name))
    }

    fn get(&self, name: &str) -> Option<Value> {
        Some(self.value(self.raw(name)?))
    }

    /// Returns a field as it stands in the file.
    fn json(&self, name: &str) -> Option<serde_json::Value> {
        serde_json::from_str(self.raw(name)?.get()).ok()
    }

    /// Returns the place of the first field that a message names, if the file has it.
    fn place(&self, message: &str, otherwise: Origin) -> Origin {
        let named = message.split('`').nth(1).and_then(|name| self.get(name));
        named.map_or(otherwise, |value| value.origin)
    }

    fn raw(&self, name: &str) -> Option<&'t RawValue> {
        let mut path = name.split('.');
        let mut raw = *self.fields.get(path.next()?)?;
        for name in path {
            let inner: BTreeMap<String, &'t RawValue> = serde_json::from_str(raw.get()).ok()?;
            raw = *inner.get(name)?;
        }
        (raw.get() != "null").then_some(raw)
    }

    fn kind(&self, d: &Document) -> Result<Kind, ScenarioError> {
        let mut all = models::hf_types().map(|(family, hf)| Kind { family, hf });
        let expected = || {
            let names: Vec<&str> = models::hf_types().map(|(_, t)| t.model_type).collect();
            names.join(" | ")
        };
        // The scenario may say which type to take the file for.
        let asked = d.value(Key::ModelType).filter(|_| d.says(Key::ModelType));
        let is_asked = asked.is_some();
        let Some(given) = asked.cloned().or_else(|| self.get("model_type")) else {
            let error = d.error(self.whole(), "no `config.json`: `model_type` is missing");
            return Err(error.with_expected(expected()));
        };
        let has = |field: &str| self.json(field).is_some_and(|value| value != false);
        let named = |name| match is_asked {
            true => name,
            false => models::type_of_part(name),
        };
        let name = given.str().map(|name| models::variant(named(name), has));
        let found = all.find(|k| name == Some(k.hf.model_type));
        found.ok_or_else(|| self.unknown(d, &given).with_expected(expected()))
    }

    /// Adds the defaults of the file's class in transformers for fields that the file does not
    /// have. Shapes that the type requires are added to language models of wrappers only.
    fn add_class_defaults(&mut self, kind: Kind, wrapper: Option<&models::HfWrapper>) {
        let named = self.get("model_type");
        let named = named.as_ref().and_then(Value::str);
        let own = match wrapper {
            Some(wrapper) => models::text_defaults(wrapper, named.unwrap_or(wrapper.text_name())),
            None => models::class_defaults(
                named
                    .filter(|name| models::type_of_part(name) == kind.hf.model_type)
                    .unwrap_or(kind.hf.model_type),
            ),
        };
        for (name, raw) in own {
            let needed = wrapper.is_none() && kind.hf.requires(name);
            if !needed && !kind.hf.gives(name, |n| self.raw(n).is_some()) {
                self.fields.entry(name.to_owned()).or_insert(raw);
            }
        }
    }

    /// Refuses a value that the family does not support.
    fn must(
        &self,
        d: &Document,
        kind: Kind,
        name: &str,
        want: &str,
        fits: impl Fn(&Value) -> bool,
    ) -> Result<(), ScenarioError> {
        let Some(value) = self.get(name).filter(|v| !fits(v)) else {
            return Ok(());
        };
        Err(self.unsupported(d, kind, name, &value, want))
    }

    /// Returns the refusal of a value that the family does not support, with a way forward.
    fn unsupported(
        &self,
        d: &Document,
        kind: Kind,
        name: &str,
        value: &Value,
        want: &str,
    ) -> ScenarioError {
        let what = format!(
            "`{name}` must be {want}, not {}: family {} supports nothing else",
            value.describe(),
            kind.family.name
        );
        let first = want.split(" or ").next().unwrap_or(want);
        let quoted = match first {
            "true" | "false" => first.to_owned(),
            word => format!("{word:?}"),
        };
        let error = d.error(value.origin, what).with_expected(want);
        error.with_help(match self.closest_with(d, value, name) {
            Some(near) => format!("--as {near} plans it as one, with this `{name}`"),
            None => {
                let planned = format!("a copy of the file with \"{name}\": {quoted} is planned");
                match self.dropped(kind).join(", ") {
                    unread if unread.is_empty() => planned,
                    unread => format!(
                        "{planned}, but it is another model: a {} does not use {unread}",
                        kind.hf.model_type
                    ),
                }
            }
        })
    }

    /// Checks words and flags, which have no key.
    fn check(&self, d: &Document, kind: Kind) -> Result<(), ScenarioError> {
        for field in kind.hf.all_fields() {
            let name = field.names[0];
            match field.meaning {
                Meaning::Word(words) => self.must(d, kind, name, &words.join(" or "), |v| {
                    v.str().is_some_and(|w| words.contains(&w))
                })?,
                Meaning::On => self.must(d, kind, name, "true", |v| {
                    matches!(v.datum, Datum::Bool(true))
                })?,
                Meaning::Off | Meaning::Unset => self.must(d, kind, name, "false", |v| {
                    matches!(v.datum, Datum::Bool(false) | Datum::Int(0))
                })?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Keys of `[model]` with their values.
    fn values(&self, d: &Document, kind: Kind) -> Result<Vec<(Key, Value)>, ScenarioError> {
        let own = |datum| Value {
            origin: self.whole(),
            datum,
        };
        let key = |name: &str| Key::find("model", name).expect("a family's keys exist");
        let mut out = vec![(Key::Family, own(Datum::Str(kind.family.name.to_owned())))];
        if kind.family.keeps_type {
            let name = kind.hf.model_type.to_owned();
            out.push((Key::ModelType, own(Datum::Str(name))));
        }
        let of_class = |given: models::Given| own(datum(given.into(), self.whole()));
        for &(name, given) in kind.hf.fixed {
            out.push((key(name), of_class(given)));
        }
        let mut has_bias = Vec::new();
        for field in kind.hf.all_fields() {
            let found = self.first(field.names);
            let (name, value) = match field.meaning {
                Meaning::Required(name) => {
                    let Some(value) = found else {
                        let field = field.names[0];
                        let what =
                            format!("`{field}` is missing: a {} needs it", kind.hf.model_type);
                        let expected = key(name).info().expected();
                        return Err(d.error(self.whole(), what).with_expected(expected));
                    };
                    (name, Some(value))
                }
                Meaning::Optional(name) => (name, found),
                Meaning::Default(name, given) => (name, found.or_else(|| Some(of_class(given)))),
                Meaning::Nullable(name, given) => {
                    let absent = !self.fields.contains_key(field.names[0]);
                    let default = || absent.then(|| of_class(given));
                    (name, found.or_else(default))
                }
                Meaning::Choice(name, words) => {
                    let found = found.unwrap_or_else(|| own(Datum::Str(words[0].0.to_owned())));
                    (
                        name,
                        Some(self.choose(d, kind, field.names[0], found, words)?),
                    )
                }
                Meaning::Computed(name, computed) => {
                    let origin = found.map_or(self.whole(), |v| v.origin);
                    let read = (computed.read)(&|name| self.json(name));
                    let read = read.map_err(|what| d.error(self.place(&what, origin), what))?;
                    let datum = read.map(|value| datum(value, origin));
                    (name, datum.map(|datum| Value { origin, datum }))
                }
                Meaning::Positions => ("max_seq_len", found),
                Meaning::HasBias(part, default) => {
                    has_bias.push((field.names[0], part, default, found));
                    continue;
                }
                Meaning::Word(_)
                | Meaning::On
                | Meaning::Off
                | Meaning::Unset
                | Meaning::Padding(_)
                | Meaning::Dropout => continue,
            };
            out.extend(value.map(|v| (key(name), v)));
        }
        if !has_bias.is_empty() {
            out.push((Key::Bias, self.bias(d, &has_bias)?));
        }
        out.extend(self.scaling(d, kind)?);
        out.extend(self.dropout(kind));
        // Before what the type has otherwise.
        out.splice(1..1, self.head(d, kind)?);
        Ok(out)
    }

    /// Returns our word for one of theirs.
    fn choose(
        &self,
        d: &Document,
        kind: Kind,
        name: &str,
        found: Value,
        words: &[(&str, &str)],
    ) -> Result<Value, ScenarioError> {
        let pair = words.iter().find(|(theirs, _)| found.str() == Some(theirs));
        let Some((_, ours)) = pair else {
            let known: Vec<&str> = words.iter().map(|(theirs, _)| *theirs).collect();
            return Err(self.unsupported(d, kind, name, &found, &known.join(" or ")));
        };
        let datum = Datum::Str((*ours).to_owned());
        Ok(Value { datum, ..found })
    }

    /// Returns which linear layers have a bias, from what fields say about some of them.
    fn bias(&self, d: &Document, fields: &[BiasField<'_>]) -> Result<Value, ScenarioError> {
        let is_flag = |v: &Value| matches!(v.datum, Datum::Bool(_) | Datum::Int(0 | 1));
        for (name, _, _, value) in fields {
            if let Some(value) = value.as_ref().filter(|v| !is_flag(v)) {
                let what = format!("`{name}` must be true or false, not {}", value.describe());
                return Err(d.error(value.origin, what).with_expected("true or false"));
            }
        }
        let on = |(_, part, default, value): &BiasField<'_>| {
            let on = value
                .as_ref()
                .map(|v| matches!(v.datum, Datum::Bool(true) | Datum::Int(1)));
            on.unwrap_or(*default).then_some(*part)
        };
        let parts: Vec<BiasPart> = fields.iter().filter_map(on).collect();
        let given = fields.iter().find_map(|(_, _, _, value)| value.as_ref());
        let origin = given.map_or(self.whole(), |v| v.origin);
        let Some(bias) = BiasPart::together(&parts) else {
            let names: Vec<&str> = fields.iter().map(|(name, ..)| *name).collect();
            let what = format!(
                "{} give a bias to a combination of layers that no value of model.bias expresses",
                names.join(", ")
            );
            return Err(d.error(origin, what));
        };
        let json = serde_json::to_value(bias).unwrap_or_default();
        Ok(Value {
            origin,
            datum: datum(json, origin),
        })
    }
}

/// A field about biases: its name, the layers, the default, and the file's value.
type BiasField<'f> = (&'f str, BiasPart, bool, Option<Value>);

/// A `model_type`, and the family that covers it.
#[derive(Clone, Copy)]
struct Kind {
    family: &'static FamilySpec,
    hf: &'static HfType,
}
