//! Models by their Hugging Face `config.json`: its fields as values of `[model]`, each at its place
//! in that file.
//!
//! Names and defaults are those of the configuration classes of transformers (4.57): `LlamaConfig`,
//! `MistralConfig`, `Qwen2Config`, `Qwen3Config` and `GPT2Config`. What a file must not leave to
//! them are the shapes. Dropout and the stretching of rotary frequencies (`rope_scaling`) change
//! numbers, not the time or memory of a step, and are passed over.

use super::error::ScenarioError;
use super::keys::Key;
use super::load;
use super::merge::{Document, Layer, Shape};
use super::source::Source;
use super::value::{Datum, Origin, Value};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;

/// How file names of such models end.
pub(crate) const ENDING: &str = ".json";

/// What a field has to be.
enum Must {
    /// This word, or the same under another name; absent, it is the first one.
    Be(&'static str, &'static [&'static str]),
    /// Off, or absent.
    BeOff(&'static str),
}

/// What one `model_type` says, and how.
struct Kind {
    name: &'static str,
    family: &'static str,
    /// Fields without which there is no shape.
    required: &'static [(&'static str, Key)],
    /// Fields that may be absent or null. What holds then is what the scenario's keys default to,
    /// or stands in `defaults`.
    optional: &'static [(&'static str, Key)],
    /// Where the class's defaults are others than the scenario's keys'.
    defaults: &'static [(Key, Datum)],
    musts: &'static [Must],
}

const SHAPES: &[(&str, Key)] = &[
    ("num_hidden_layers", Key::Layers),
    ("hidden_size", Key::Hidden),
    ("num_attention_heads", Key::Heads),
    ("intermediate_size", Key::Ffn),
    ("vocab_size", Key::Vocab),
];

const OPTIONS: &[(&str, Key)] = &[
    ("num_key_value_heads", Key::KvHeads),
    ("head_dim", Key::HeadDim),
    ("tie_word_embeddings", Key::TieEmbeddings),
    ("rms_norm_eps", Key::NormEps),
    ("rope_theta", Key::RopeTheta),
    ("max_position_embeddings", Key::MaxSeqLen),
];

const SILU: Must = Must::Be("hidden_act", &["silu", "swish"]);

const KINDS: &[Kind] = &[
    Kind {
        name: "llama",
        family: "llama",
        required: SHAPES,
        optional: OPTIONS,
        defaults: &[(Key::NormEps, Datum::Float(1e-6))],
        musts: &[SILU],
    },
    Kind {
        name: "mistral",
        family: "llama",
        required: SHAPES,
        optional: OPTIONS,
        defaults: &[
            (Key::NormEps, Datum::Float(1e-6)),
            (Key::KvHeads, Datum::Int(8)),
        ],
        musts: &[SILU],
    },
    Kind {
        name: "qwen2",
        family: "llama",
        required: SHAPES,
        optional: OPTIONS,
        defaults: &[(Key::NormEps, Datum::Float(1e-6))],
        musts: &[SILU],
    },
    Kind {
        name: "qwen3",
        family: "llama",
        required: SHAPES,
        optional: OPTIONS,
        defaults: &[
            (Key::NormEps, Datum::Float(1e-6)),
            (Key::HeadDim, Datum::Int(128)),
        ],
        musts: &[SILU, Must::BeOff("attention_bias")],
    },
    Kind {
        name: "gpt2",
        family: "gpt2",
        required: &[
            ("n_layer", Key::Layers),
            ("n_embd", Key::Hidden),
            ("n_head", Key::Heads),
            ("vocab_size", Key::Vocab),
        ],
        optional: &[
            ("n_inner", Key::Ffn),
            ("n_positions", Key::MaxSeqLen),
            ("layer_norm_epsilon", Key::NormEps),
            ("tie_word_embeddings", Key::TieEmbeddings),
        ],
        defaults: &[],
        musts: &[
            Must::Be("activation_function", &["gelu_new", "gelu_pytorch_tanh"]),
            Must::BeOff("scale_attn_by_inverse_layer_idx"),
            Must::BeOff("add_cross_attention"),
        ],
    },
];

/// A file's fields.
struct Config<'t> {
    source: u32,
    text: &'t str,
    fields: BTreeMap<String, &'t RawValue>,
}

/// Takes in what a file, named at a place, says about keys that nobody gives. Returns what others
/// depend on.
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
        // The position is told once.
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
        family: Some(kind.family.to_owned()),
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

    /// A field that is there and not null.
    fn get(&self, name: &str) -> Option<Value> {
        let raw = self.fields.get(name).filter(|raw| raw.get() != "null")?;
        Some(self.value(raw))
    }

    /// A field of an object.
    fn within(&self, object: &str, name: &str) -> Option<Value> {
        let inner: BTreeMap<String, &'t RawValue> =
            serde_json::from_str(self.fields.get(object)?.get()).ok()?;
        let raw = inner.get(name).filter(|raw| raw.get() != "null")?;
        Some(self.value(raw))
    }

    fn kind(&self, d: &Document) -> Result<&'static Kind, ScenarioError> {
        let known: Vec<&str> = KINDS.iter().map(|k| k.name).collect();
        let expected = known.join(" | ");
        let Some(given) = self.get("model_type") else {
            let error = d.error(self.whole(), "no `config.json`: `model_type` is missing");
            return Err(error.with_expected(expected));
        };
        let found = KINDS.iter().find(|k| given.str() == Some(k.name));
        found.ok_or_else(|| {
            let what = format!("`model_type` must be {expected}, not {}", given.describe());
            d.error(given.origin, what).with_expected(expected)
        })
    }

    /// What the families here do not have must be off.
    fn check(&self, d: &Document, kind: &Kind) -> Result<(), ScenarioError> {
        for must in kind.musts {
            let (name, want) = match must {
                Must::Be(name, words) => (*name, words.join(" or ")),
                Must::BeOff(name) => (*name, "false".to_owned()),
            };
            let Some(value) = self.get(name) else {
                continue;
            };
            let fits = match must {
                Must::Be(_, words) => value.str().is_some_and(|w| words.contains(&w)),
                Must::BeOff(_) => matches!(value.datum, Datum::Bool(false)),
            };
            if !fits {
                let what = format!(
                    "`{name}` must be {want}, not {}: family {} supports nothing else",
                    value.describe(),
                    kind.family
                );
                return Err(d.error(value.origin, what).with_expected(want));
            }
        }
        Ok(())
    }

    /// Keys of `[model]` with their values.
    fn values(&self, d: &Document, kind: &Kind) -> Result<Vec<(Key, Value)>, ScenarioError> {
        let own = |datum| Value {
            origin: self.whole(),
            datum,
        };
        let mut out = vec![(Key::Family, own(Datum::Str(kind.family.to_owned())))];
        for &(name, key) in kind.required {
            let Some(value) = self.get(name) else {
                let what = format!("`{name}` is missing: a {} needs it", kind.name);
                return Err(d
                    .error(self.whole(), what)
                    .with_expected(key.info().expected()));
            };
            out.push((key, value));
        }
        for &(name, key) in kind.optional {
            let given = match key {
                Key::MaxSeqLen => self.longest(name, kind),
                // Transformers 5 writes it beside the kind of the embedding.
                Key::RopeTheta => self
                    .get(name)
                    .or_else(|| self.within("rope_parameters", name)),
                _ => self.get(name),
            };
            let default = kind.defaults.iter().find(|(k, _)| *k == key);
            let value = given.or_else(|| default.map(|(_, datum)| own(datum.clone())));
            out.extend(value.map(|v| (key, v)));
        }
        if kind.family == "llama" {
            out.push((Key::Bias, self.bias(d, kind)?));
            out.push((Key::QkNorm, own(Datum::Bool(kind.name == "qwen3"))));
        }
        Ok(out)
    }

    /// Positions that attention sees all at once: with a sliding window no more than that.
    fn longest(&self, name: &str, kind: &Kind) -> Option<Value> {
        let longest = self.get(name);
        let slides = match self.get("use_sliding_window").map(|v| v.datum) {
            Some(Datum::Bool(on)) => on,
            // Mistral's slides wherever it has one, Qwen2's where it is told to.
            _ => kind.name == "mistral",
        };
        let window = self.get("sliding_window").filter(|_| slides);
        match (longest, window) {
            (Some(all), Some(window)) if window.integer() < all.integer() => Some(window),
            (None, window) => window,
            (all, _) => all,
        }
    }

    fn bias(&self, d: &Document, kind: &Kind) -> Result<Value, ScenarioError> {
        let [attention, mlp] = ["attention_bias", "mlp_bias"].map(|name| self.get(name));
        let on = |v: &Option<Value>| {
            v.as_ref()
                .is_some_and(|v| !matches!(v.datum, Datum::Bool(false)))
        };
        let datum = match (kind.name, on(&attention), on(&mlp)) {
            // Its attention has them whatever the file says.
            ("qwen2", ..) => Datum::Str("qkv".to_owned()),
            (_, false, false) => Datum::Bool(false),
            (_, true, true) => Datum::Bool(true),
            (_, one, _) => {
                let (has, other) = match one {
                    true => (attention, "mlp_bias"),
                    false => (mlp, "attention_bias"),
                };
                let at = has.map_or(self.whole(), |v| v.origin);
                let what = format!(
                    "all linear layers of a block must have a bias, or none: `{other}` is not true"
                );
                return Err(d.error(at, what).with_help(
                    "model.bias = \"qkv\" gives a bias to queries, keys and values only",
                ));
            }
        };
        let origin = attention.or(mlp).map_or(self.whole(), |v| v.origin);
        Ok(Value { origin, datum })
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
