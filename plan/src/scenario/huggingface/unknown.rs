//! Types that no family covers.

use super::super::error::ScenarioError;
use super::super::keys::Key;
use super::super::merge::{Document, Layer};
use super::super::value::{Datum, Origin, Value};
use super::super::{presets, read};
use super::{Config, Kind};
use crate::models::{self, Meaning};
use crate::names::nearest;
use std::collections::BTreeSet;

/// Fields that say that a type has parts which dense decoders lack, with the parts.
const PARTS: [(&str, &str); 14] = [
    ("num_experts", "experts"),
    ("num_local_experts", "experts"),
    ("n_routed_experts", "experts"),
    ("moe_intermediate_size", "experts"),
    ("moe_num_experts", "experts"),
    ("moe_num_primary_experts", "experts"),
    ("ffn_config.moe_num_experts", "experts"),
    ("kv_lora_rank", "latent attention"),
    ("ssm_state_size", "state-space layers"),
    ("state_size", "state-space layers"),
    ("linear_num_value_heads", "linear attention"),
    ("d_kv", "an encoder and a decoder"),
    ("img_processor", "a vision tower"),
    ("image_size", "images as inputs"),
];

/// Keys of parts that only types with sizes of their own for them have.
const OWN_PARTS: [&str; 2] = ["linear_attention", "ssm"];

/// The field of the number of tokens that language models know.
const VOCABULARY: &str = "vocab_size";

/// Types that are named first if others agree as well with a file.
const USUAL: [&str; 2] = ["llama", "gpt2"];

/// What to do with a file that no type accepts.
const NO_TYPE: &str = "no type has the fields of the file: a model with similar sizes can replace it, by model.family and its keys instead of model.preset";

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
        let part = PARTS.iter().find(|(name, _)| self.get(name).is_some());
        let wraps = ["vision_config", "text_config", "audio_config"];
        let wraps = wraps.iter().any(|name| self.get(name).is_some());
        let what = match part {
            Some((field, part)) => format!("{what}: it has {part} (`{field}`)"),
            None if wraps => format!("{what}: it wraps several models"),
            None => what,
        };
        let error = d.error(given.origin, what);
        if wraps {
            if let Some(name) = self.language_model(d, given) {
                return error.with_help(format!("--as {name} plans its language model alone"));
            }
            let inner = self.inner();
            let near = inner.as_ref().unwrap_or(self).closest(d, given);
            return error.with_help(near.map_or_else(|| NO_TYPE.to_owned(), closest_alone));
        }
        if self.lacks_vocabulary() {
            let help = match self.closest_with_vocabulary() {
                Some(near) => format!(
                    "`vocab_size` is missing: with it, its fields are closest to those of type {near}"
                ),
                None => "`vocab_size` is missing".to_owned(),
            };
            return error.with_help(help);
        }
        error.with_help(match self.closest(d, given) {
            Some(near) => format!(
                "its fields are closest to those of type {near}: --as {near} plans it as one"
            ),
            None => NO_TYPE.to_owned(),
        })
    }

    /// Returns the known type of the language model that a file wraps, if the file has all that it
    /// needs, and the type all parts that the file has.
    fn language_model(&self, d: &Document, given: &Value) -> Option<&'static str> {
        let inner = self.inner();
        let inner = inner.as_ref().unwrap_or(self);
        let named = inner.get("model_type")?;
        let mut name = named.str()?;
        loop {
            let known = models::hf_types().find(|(_, hf)| hf.model_type == name);
            if let Some((family, hf)) = known {
                let kind = Kind { family, hf };
                let needed = hf.all_fields().filter(|f| is_required(f));
                let complete = needed.clone().all(|f| inner.first(f.names).is_some());
                let fits = complete && inner.reads_parts(kind);
                return (fits && accepts(d, given, hf.model_type, fill)).then_some(hf.model_type);
            }
            // `qwen3_vl_text` is a `qwen3`, `qwen2_5_vl` a `qwen2`.
            name = name.rsplit_once('_')?.0;
        }
    }

    /// Returns the file of the language model within a file that wraps several models.
    fn inner(&self) -> Option<Self> {
        Some(Config {
            source: self.source,
            text: self.text,
            fields: serde_json::from_str(self.raw("text_config")?.get()).ok()?,
            specials: self.specials.clone(),
            whole_base: None,
        })
    }

    /// Returns the type that reads the most fields of the file, among those that accept the file.
    pub(super) fn closest(&self, d: &Document, given: &Value) -> Option<&'static str> {
        self.closest_of(d, given, |_| true)
    }

    /// Returns the one of them that reads a field, unless the scenario asks for a type.
    pub(super) fn closest_with(
        &self,
        d: &Document,
        given: &Value,
        field: &str,
    ) -> Option<&'static str> {
        // Each type that is tried is asked for, so this ends.
        let asked = d.says(Key::ModelType);
        let reads = |kind: Kind| {
            let meanings = kind.hf.all_fields().filter(|f| f.names.contains(&field));
            let mut meanings = meanings.map(|f| f.meaning);
            meanings.any(|m| {
                !matches!(
                    m,
                    Meaning::Off | Meaning::Unset | Meaning::Padding(_) | Meaning::On
                )
            })
        };
        (!asked).then(|| self.closest_of(d, given, reads)).flatten()
    }

    fn closest_of(
        &self,
        d: &Document,
        given: &Value,
        fits: impl Fn(Kind) -> bool,
    ) -> Option<&'static str> {
        let scored = self.scored(|kind| fits(*kind));
        let mut names = scored.iter().map(|(_, name)| *name);
        let accepted = names.clone().find(|name| accepts(d, given, name, read));
        // The rest of the scenario may be at fault.
        accepted.or_else(|| names.find(|name| accepts(d, given, name, fill)))
    }

    /// Returns the types that a file may be of, with their agreement, the best first.
    fn scored(&self, fits: impl Fn(&Kind) -> bool) -> Vec<(i64, &'static str)> {
        let kinds = models::hf_types().map(|(family, hf)| Kind { family, hf });
        let mut scored: Vec<(i64, &'static str)> = kinds
            .filter(|kind| fits(kind) && self.has_parts_of(*kind))
            .map(|kind| (self.agreement(kind), kind.hf.model_type))
            .collect();
        // Stable, so that the better known of equals comes first.
        scored.sort_by_key(|(score, name)| (-score, !USUAL.contains(name)));
        scored
    }

    /// Returns whether a file may be of a type: it has the fields that the type needs, the type has
    /// the parts that the file is known to have, and their classes are of one kind.
    fn has_parts_of(&self, kind: Kind) -> bool {
        let has = |f: &models::Field| self.first(f.names).is_some();
        let needed = |f: &models::Field| {
            is_required(f) || (f.says("experts") && !matches!(f.meaning, Meaning::Optional(_)))
        };
        let classes = self.get("architectures");
        let class = classes.as_ref().and_then(|all| all.array()?.first()?.str());
        let own = class.and_then(task);
        let other_class = own.is_some() && own != task(kind.hf.architecture);
        !other_class
            && kind.hf.all_fields().filter(|f| needed(f)).all(has)
            && self.reads_parts(kind)
            && !kind.hf.all_fields().any(|f| self.lacks_part(f))
    }

    /// Returns whether a field is a part of a type all of whose sizes would be defaults, because
    /// the file has none of them.
    fn lacks_part(&self, field: &models::Field) -> bool {
        match field.meaning {
            Meaning::Computed(key, computed) if OWN_PARTS.contains(&key) => {
                let mut sizes = field.names.iter().chain(computed.also);
                !sizes.any(|name| self.get(name).is_some())
            }
            _ => false,
        }
    }

    /// Returns whether a type has the parts that the file is known to have.
    fn reads_parts(&self, kind: Kind) -> bool {
        let own = PARTS.iter().filter(|(name, _)| self.get(name).is_some());
        let mut own = own.filter_map(|(name, _)| name.split('.').next());
        own.all(|name| !self.is_dropped(name, kind))
    }

    /// Returns whether a file has the blocks of a language model and no vocabulary, although
    /// nothing says that its inputs are images or sounds.
    fn lacks_vocabulary(&self) -> bool {
        const OTHER_INPUTS: [&str; 8] = [
            "image", "patch", "channels", "mel", "conv", "feature", "audio", "vocab",
        ];
        let other = |name: &String| OTHER_INPUTS.iter().any(|part| name.contains(part));
        let sizes = [
            ["hidden_size", "n_embd", "d_model"],
            ["num_hidden_layers", "n_layer", "n_layers"],
        ];
        sizes.iter().all(|names| self.first(names).is_some()) && !self.fields.keys().any(other)
    }

    /// Returns the type that reads the most fields of the file, if it had a vocabulary.
    fn closest_with_vocabulary(&self) -> Option<&'static str> {
        let mut with = Config {
            source: self.source,
            text: self.text,
            fields: self.fields.clone(),
            specials: self.specials.clone(),
            whole_base: None,
        };
        let size = serde_json::from_str("1").expect("a number is JSON");
        with.fields.insert(VOCABULARY.to_owned(), size);
        let reads = |kind: &Kind| {
            let mut fields = kind.hf.all_fields();
            fields.any(|f| f.names.contains(&VOCABULARY))
        };
        with.scored(reads).first().map(|(_, name)| *name)
    }

    /// Returns how well a type agrees with the file, in halves of a field. Fields of the type that
    /// the file has count for it. Fields that it does not read count against it, as do values that
    /// it would compute from missing fields.
    fn agreement(&self, kind: Kind) -> i64 {
        let found = |f: &models::Field| f.names.iter().find(|name| self.get(name).is_some());
        let is_read = |f: &&models::Field| {
            !matches!(
                f.meaning,
                Meaning::Dropout | Meaning::Padding(_) | Meaning::Unset
            )
        };
        let read = || kind.hf.all_fields().filter(is_read);
        // Several keys may be read from one field, and one key from several fields.
        let there: BTreeSet<_> = read().filter_map(found).collect();
        let key = |f: &models::Field| match f.meaning {
            Meaning::Computed(key, _) => Some(key),
            _ => None,
        };
        let (known, absent): (Vec<_>, Vec<_>) = read().partition(|f| found(f).is_some());
        let known: BTreeSet<_> = known.into_iter().filter_map(key).collect();
        let absent: BTreeSet<_> = absent.into_iter().filter_map(key).collect();
        let computed = absent.difference(&known);
        let unread = self
            .fields
            .keys()
            .filter(|name| self.is_dropped(name, kind));
        2 * (there.len() as i64 - unread.count() as i64) - computed.count() as i64
    }
}

/// Returns the advice about a language model of which only the closest type is known.
pub(super) fn closest_alone(name: &str) -> String {
    format!("its language model is closest to type {name}: --as {name} plans it alone, as one")
}

/// Reads a scenario to its end.
fn read(d: Document) -> Result<(), ScenarioError> {
    read::scenario(d).map(|_| ())
}

/// Reads the model's file of a scenario.
fn fill(mut d: Document) -> Result<(), ScenarioError> {
    presets::fill(&mut d).map(|_| ())
}

/// Returns whether `--as` of a type takes the file: the scenario is read like that.
fn accepts(
    d: &Document,
    given: &Value,
    name: &str,
    read: fn(Document) -> Result<(), ScenarioError>,
) -> bool {
    let mut with = d.clone();
    let value = Value {
        datum: Datum::Str(name.to_owned()),
        origin: given.origin,
    };
    let set = with.set(Key::ModelType, value, Layer::Axis);
    set.is_ok() && read(with).is_ok()
}

/// Returns whether `--as` of a type takes the file of a scenario; something of it is at `origin`.
pub(super) fn takes(d: &Document, origin: Origin, name: &str) -> bool {
    let datum = Datum::Str(name.to_owned());
    accepts(d, &Value { origin, datum }, name, read)
}

/// Returns how a class ends, if that says what its model is made for.
fn task(class: &str) -> Option<&'static str> {
    const TASKS: [(&str, &str); 7] = [
        ("ForMaskedLM", "encoder"),
        ("ForCausalLM", "decoder"),
        ("LMHeadModel", "decoder"),
        ("ForConditionalGeneration", "pair"),
        ("MTModel", "pair"),
        ("ForImageClassification", "images"),
        ("ForCTC", "sounds"),
    ];
    let found = TASKS.iter().find(|(end, _)| class.ends_with(end));
    found.map(|(_, task)| *task)
}

fn is_required(field: &models::Field) -> bool {
    matches!(field.meaning, Meaning::Required(_))
}
