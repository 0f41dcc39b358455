//! Models by their Hugging Face `config.json`: its fields as values of `[model]`, each at its place
//! in that file.
//!
//! Each family lists its fields ([`crate::models::HfType`]). A file must give the shapes; the rest
//! has the defaults of transformers' configuration classes. Dropout and the scaling of rotary
//! frequencies (`rope_scaling`) change numbers, not the time or memory of a step, and are not read.

use super::error::ScenarioError;
use super::keys::Key;
use super::load;
use super::merge::{Document, Layer, Shape};
use super::source::Source;
use super::value::{Datum, Origin, Value};
use crate::models::{self, FamilySpec, Given, HfType, Meaning};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;

/// How file names of such models end.
pub(crate) const ENDING: &str = ".json";

/// A file's fields.
struct Config<'t> {
    source: u32,
    text: &'t str,
    fields: BTreeMap<String, &'t RawValue>,
}

/// Takes from a file, named at a place, the keys that no other text gives. Returns those that other
/// keys depend on.
pub(crate) fn fill(
    document: &mut Document,
    path: &Path,
    named: Origin,
) -> Result<Shape, ScenarioError> {
    let shown = path.display().to_string();
    let text = load::read(path).map_err(|why| {
        let error = document.error(named, format!("model file {shown} {why}"));
        error.with_help("paths in a file are relative to that file, paths on the command line to the working directory")
    })?;
    let source = Source {
        name: shown.into(),
        text: text.as_str().into(),
        folder: None,
    };
    let fields = serde_json::from_str(&text).map_err(|e| {
        let at = byte(&text, e.line(), e.column());
        let what = e.to_string();
        // The position is shown once.
        let what = what.split(" at line ").next().unwrap_or_default();
        ScenarioError::at(&source, at..at, format!("no `config.json`: {what}"))
    })?;
    let config = Config {
        source: document.add_source(source),
        text: &text,
        fields,
    };
    let kind = config.kind(document)?;
    config.check(document, kind)?;
    let mut shape = Shape {
        family: Some(kind.family.name.to_owned()),
        ..Shape::default()
    };
    for (key, value) in config.values(document, kind)? {
        match key {
            Key::Hidden => shape.hidden = value.integer(),
            Key::Ffn => shape.ffn = value.integer(),
            _ => {}
        }
        document.set(key, value, Layer::Preset)?;
    }
    Ok(shape)
}

impl<'t> Config<'t> {
    /// The place of the whole.
    fn whole(&self) -> Origin {
        Origin::new(self.source, 0..0)
    }

    fn value(&self, raw: &'t RawValue) -> Value {
        // A raw value is a part of the text that it was read from.
        let start = (raw.get().as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        let read = serde_json::from_str(raw.get()).unwrap_or(serde_json::Value::Null);
        Value {
            origin: Origin::new(self.source, start..start + raw.get().len()),
            datum: datum(read),
        }
    }

    /// Returns the first of these fields that is there and not null. A dot leads into an object.
    fn first(&self, names: &[&str]) -> Option<Value> {
        names.iter().find_map(|name| self.get(name))
    }

    fn get(&self, name: &str) -> Option<Value> {
        let raw = match name.split_once('.') {
            None => *self.fields.get(name)?,
            Some((object, name)) => {
                let text = self.fields.get(object)?.get();
                let inner: BTreeMap<String, &'t RawValue> = serde_json::from_str(text).ok()?;
                *inner.get(name)?
            }
        };
        (raw.get() != "null").then(|| self.value(raw))
    }

    fn kind(&self, d: &Document) -> Result<Kind, ScenarioError> {
        let all = || models::hf_types().map(|(family, hf)| Kind { family, hf });
        let expected = || {
            let names: Vec<&str> = all().map(|k| k.hf.model_type).collect();
            names.join(" | ")
        };
        let Some(given) = self.get("model_type") else {
            let error = d.error(self.whole(), "no `config.json`: `model_type` is missing");
            return Err(error.with_expected(expected()));
        };
        let found = all().find(|k| given.str() == Some(k.hf.model_type));
        found.ok_or_else(|| {
            let expected = expected();
            let what = format!("`model_type` must be {expected}, not {}", given.describe());
            d.error(given.origin, what).with_expected(expected)
        })
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
        let what = format!(
            "`{name}` must be {want}, not {}: family {} supports nothing else",
            value.describe(),
            kind.family.name
        );
        Err(d.error(value.origin, what).with_expected(want))
    }

    /// Checks words and flags, which have no key.
    fn check(&self, d: &Document, kind: Kind) -> Result<(), ScenarioError> {
        for field in kind.hf.fields {
            let name = field.names[0];
            match field.meaning {
                Meaning::Word(words) => self.must(d, kind, name, &words.join(" or "), |v| {
                    v.str().is_some_and(|w| words.contains(&w))
                })?,
                Meaning::On => self.must(d, kind, name, "true", |v| {
                    matches!(v.datum, Datum::Bool(true))
                })?,
                Meaning::Off => self.must(d, kind, name, "false", |v| {
                    matches!(v.datum, Datum::Bool(false))
                })?,
                Meaning::NoneOf => self.must(d, kind, name, "empty", |v| {
                    let text = self.text.get(v.origin.span()).unwrap_or_default();
                    text.split_whitespace().collect::<String>() == "[]"
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
        for &(name, given) in kind.hf.fixed {
            out.push((key(name), own(given.into())));
        }
        let mut has_bias = Vec::new();
        for field in kind.hf.fields {
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
                Meaning::Default(name, given) => (name, found.or_else(|| Some(own(given.into())))),
                Meaning::Positions { slides } => ("max_seq_len", self.longest(found, slides)),
                Meaning::HasBias => {
                    has_bias.push((field.names[0], found));
                    continue;
                }
                Meaning::When(name, flag, given) => {
                    let on = self
                        .get(flag)
                        .is_some_and(|v| matches!(v.datum, Datum::Bool(true)));
                    if !on {
                        continue;
                    }
                    (name, found.or_else(|| Some(own(given.into()))))
                }
                Meaning::Positive(_)
                | Meaning::NoneOf
                | Meaning::Slides
                | Meaning::Word(_)
                | Meaning::On
                | Meaning::Off
                | Meaning::Dropout => continue,
            };
            out.extend(value.map(|v| (key(name), v)));
        }
        if !has_bias.is_empty() {
            out.push((Key::Bias, self.bias(d, has_bias)?));
        }
        Ok(out)
    }

    /// Returns how many positions attention sees at once: with a sliding window no more than that.
    fn longest(&self, positions: Option<Value>, slides: bool) -> Option<Value> {
        let slides = match self.get("use_sliding_window").map(|v| v.datum) {
            Some(Datum::Bool(on)) => on,
            _ => slides,
        };
        let window = self.get("sliding_window").filter(|_| slides);
        match (positions, window) {
            (Some(all), Some(window)) if window.integer() < all.integer() => Some(window),
            (None, window) => window,
            (all, _) => all,
        }
    }

    /// Returns whether all linear layers have a bias, from what fields say about some of them.
    fn bias(
        &self,
        d: &Document,
        fields: Vec<(&str, Option<Value>)>,
    ) -> Result<Value, ScenarioError> {
        let is_on = |v: &Option<Value>| {
            v.as_ref()
                .is_some_and(|v| !matches!(v.datum, Datum::Bool(false)))
        };
        let off = fields.iter().find(|(_, v)| !is_on(v));
        let on = fields.iter().find(|(_, v)| is_on(v));
        if let (Some((_, Some(on))), Some((off, _))) = (on, off) {
            let what = format!(
                "all linear layers of a block must have a bias, or none: `{off}` is not true"
            );
            return Err(d
                .error(on.origin, what)
                .with_help("model.bias = \"qkv\" gives a bias to queries, keys and values only"));
        }
        let datum = Datum::Bool(off.is_none());
        let given = fields.into_iter().find_map(|(_, value)| value);
        let origin = given.map_or(self.whole(), |v| v.origin);
        Ok(Value { origin, datum })
    }
}

/// A `model_type`, and the family that covers it.
#[derive(Clone, Copy)]
struct Kind {
    family: &'static FamilySpec,
    hf: &'static HfType,
}

impl From<Given> for Datum {
    fn from(given: Given) -> Self {
        match given {
            Given::Bool(b) => Self::Bool(b),
            Given::Int(n) => Self::Int(n.into()),
            Given::Float(x) => Self::Float(x),
            Given::Str(s) => Self::Str(s.to_owned()),
        }
    }
}

/// A JSON value as TOML would have it. Objects and lists are no value of `[model]`: as empty ones
/// they are refused by name.
fn datum(value: serde_json::Value) -> Datum {
    match value {
        serde_json::Value::Bool(b) => Datum::Bool(b),
        serde_json::Value::String(s) => Datum::Str(s),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Datum::Int(n.into()),
            (None, Some(n)) => Datum::Int(n.into()),
            (None, None) => Datum::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::Null | serde_json::Value::Array(_) => Datum::Array(Vec::new()),
        serde_json::Value::Object(_) => Datum::Table(Vec::new()),
    }
}

/// The byte at a line and column, both from 1, of a text.
fn byte(text: &str, line: usize, column: usize) -> usize {
    let before = text.split_inclusive('\n').take(line.saturating_sub(1));
    before.map(str::len).sum::<usize>() + column.saturating_sub(1)
}
