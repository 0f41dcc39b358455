//! From a value of the text, or a default of the key table, to the type of the option.

use super::keys::{KEYS, Key};
use super::merge::Document;
use super::value::{Datum, Value, convert};
use crate::config::{
    Atomic, Bias, CudaGraph, DocumentLengths, Expression, Family, IgnoredParams,
    LengthDistribution, LoraTargets, ModuleSelector, Offload, ParamGroup, Patterns, Prefetch,
    PrefetchList, RecomputeLayers, Reshard, Scope, SkippedBlocks, Words,
};
use crate::ir::Documents;
use crate::units::Bytes;
use serde::de::value::{Error as InvalidValue, MapDeserializer, SeqDeserializer};
use serde::de::{
    Deserialize as _, DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor,
};
use serde::forward_to_deserialize_any;
use std::sync::LazyLock;
use toml::de::DeValue;

/// A type of options.
pub(crate) trait Setting: Sized {
    /// Reads a value; `None` if it has another form.
    fn of(value: &Value) -> Option<Self>;
}

/// Literal defaults of the key table, by key; `None` for those that are derived.
static DEFAULTS: LazyLock<Vec<Option<Value>>> =
    LazyLock::new(|| KEYS.iter().map(|info| literal(info.default)).collect());

fn literal(default: &str) -> Option<Value> {
    let value = DeValue::parse(default).ok()?;
    Some(convert(value.get_ref(), value.span(), u32::MAX, 0))
}

impl Document {
    /// Returns the value of a key, if it has one.
    pub(crate) fn given<T: Setting>(&self, key: Key) -> Option<T> {
        self.value(key).and_then(T::of)
    }

    /// Returns the items of a key's list, or its value as the only one; none if it has no value.
    pub(crate) fn items<T: Setting>(&self, key: Key) -> Vec<T> {
        let Some(value) = self.value(key) else {
            return Vec::new();
        };
        let items = value.array().unwrap_or(std::slice::from_ref(value));
        items.iter().filter_map(T::of).collect()
    }

    /// Returns the value of a key with a literal default.
    ///
    /// # Panics
    /// If the key table gives no default of this type, which every test that loads a scenario
    /// would find.
    pub(crate) fn setting<T: Setting>(&self, key: Key) -> T {
        let default = || DEFAULTS[key as usize].as_ref().and_then(T::of);
        let value = self.given(key).or_else(default);
        value.unwrap_or_else(|| panic!("{} has no default of its type", key.path()))
    }
}

impl Document {
    /// Returns the keys of a section that `T` has fields for, by their names: given values, and
    /// `T`'s own defaults of the others.
    ///
    /// # Panics
    /// If a key is not of its field's type, which every test that gives the key would find.
    pub(crate) fn options<T: DeserializeOwned>(&self, section: &str) -> T {
        let given = Key::of_section(section)
            .filter_map(|key| Some((key.info().key, Plain(self.value(key)?))));
        T::deserialize(MapDeserializer::new(given)).unwrap_or_else(|e| panic!("[{section}]: {e}"))
    }
}

/// Deserializes any value but a date.
struct Plain<'v>(&'v Value);

impl<'de> Deserializer<'de> for Plain<'de> {
    type Error = InvalidValue;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match &self.0.datum {
            Datum::Str(s) => visitor.visit_borrowed_str(s),
            Datum::Float(x) => visitor.visit_f64(*x),
            Datum::Bool(b) => visitor.visit_bool(*b),
            Datum::Int(_) => match self.0.integer() {
                Some(n) => visitor.visit_u64(n),
                None => Err(InvalidValue::custom("not a 64-bit integer")),
            },
            Datum::Array(values) => {
                visitor.visit_seq(SeqDeserializer::new(values.iter().map(Plain)))
            }
            Datum::Table(entries) => {
                let fields = entries.iter().map(|e| (e.key.as_str(), Plain(&e.value)));
                visitor.visit_map(MapDeserializer::new(fields))
            }
            Datum::Date => Err(InvalidValue::custom("a date")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, InvalidValue> for Plain<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<T: Words> Setting for T {
    fn of(value: &Value) -> Option<Self> {
        T::of_word(value.str()?)
    }
}

impl Setting for bool {
    fn of(value: &Value) -> Option<Self> {
        match value.datum {
            Datum::Bool(b) => Some(b),
            _ => None,
        }
    }
}

impl Setting for u64 {
    fn of(value: &Value) -> Option<Self> {
        value.integer()
    }
}

/// For keys whose row limits them to 32 bits.
impl Setting for u32 {
    fn of(value: &Value) -> Option<Self> {
        u32::try_from(value.integer()?).ok()
    }
}

impl Setting for f64 {
    fn of(value: &Value) -> Option<Self> {
        value.number()
    }
}

impl Setting for Bytes {
    fn of(value: &Value) -> Option<Self> {
        value.bytes().map(Bytes)
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn of(value: &Value) -> Option<Self> {
        value.array()?.iter().map(T::of).collect()
    }
}

impl<const N: usize> Setting for [f64; N] {
    fn of(value: &Value) -> Option<Self> {
        Vec::of(value)?.try_into().ok()
    }
}

impl Setting for String {
    fn of(value: &Value) -> Option<Self> {
        value.str().map(str::to_owned)
    }
}

impl Setting for Family {
    fn of(value: &Value) -> Option<Self> {
        Self::named(value.str()?)
    }
}

impl Setting for Bias {
    fn of(value: &Value) -> Option<Self> {
        match value.str() {
            Some("qkv") => Some(Self::Qkv),
            Some("attention") => Some(Self::Attention),
            Some("mlp") => Some(Self::Mlp),
            Some("all_but_qkv") => Some(Self::AllButQkv),
            Some(_) => None,
            None => bool::of(value).map(Self::from),
        }
    }
}

impl Setting for RecomputeLayers {
    fn of(value: &Value) -> Option<Self> {
        let first = u32::of(value).map(Self::First);
        let some = || Vec::of(value).map(Self::Patterns);
        first
            .or_else(some)
            .or_else(|| value.str().map(|_| Self::All))
    }
}

impl Setting for DocumentLengths {
    fn of(value: &Value) -> Option<Self> {
        if let Datum::Table(_) = value.datum {
            return LengthDistribution::deserialize(Plain(value))
                .ok()
                .map(Self::Distributed);
        }
        let listed = match u64::of(value) {
            Some(length) => Documents::new(&[length]),
            None => Documents::new(&Vec::of(value)?),
        };
        listed.map(Self::Listed)
    }
}

impl Setting for ParamGroup {
    fn of(value: &Value) -> Option<Self> {
        Self::deserialize(Plain(value)).ok()
    }
}

impl Setting for PrefetchList {
    fn of(value: &Value) -> Option<Self> {
        Self::deserialize(Plain(value)).ok()
    }
}

impl Setting for SkippedBlocks {
    fn of(value: &Value) -> Option<Self> {
        Self::deserialize(Plain(value)).ok()
    }
}

impl Setting for LoraTargets {
    fn of(value: &Value) -> Option<Self> {
        match value.str() {
            Some("all-linear") => Some(Self::AllLinear),
            _ => ModuleSelector::of(value).map(Self::Selected),
        }
    }
}

/// Texts that are no expressions do not count: validation refuses them.
impl<T: Setting + Copy> Setting for Patterns<T> {
    fn of(value: &Value) -> Option<Self> {
        let entries = value.table()?.iter();
        let valid = entries.filter(|e| Expression::of_ending(&e.key).is_ok());
        let read = valid.map(|e| Some((e.key.as_str(), T::of(&e.value)?)));
        Self::new(read.collect::<Option<Vec<_>>>()?).ok()
    }
}

impl Setting for ModuleSelector {
    fn of(value: &Value) -> Option<Self> {
        let some = Vec::of(value).map(Self::Patterns);
        some.or_else(|| Expression::of_path(value.str()?).ok().map(Self::Expression))
    }
}

impl Setting for Reshard {
    fn of(value: &Value) -> Option<Self> {
        match value.datum {
            Datum::Bool(true) => Some(Self::Always),
            Datum::Bool(false) => Some(Self::Never),
            Datum::Str(_) => Some(Self::Auto),
            _ => u32::of(value).map(Self::Group),
        }
    }
}

impl Setting for IgnoredParams {
    fn of(value: &Value) -> Option<Self> {
        let some = Vec::of(value).map(Self::Patterns);
        some.or_else(|| value.str().map(|_| Self::Experts))
    }
}

impl Setting for Atomic {
    fn of(value: &Value) -> Option<Self> {
        match value.str() {
            Some("tensor") => Some(Self::Tensor),
            Some(_) => Some(Self::Row),
            None => u32::of(value).map(Self::Block),
        }
    }
}

impl Setting for Prefetch {
    fn of(value: &Value) -> Option<Self> {
        match &value.datum {
            Datum::Str(_) => Some(Self::Implicit),
            Datum::Table(fields) => fields.first()?.value.integer().map(Self::Elements),
            _ => u32::of(value).map(Self::Depth),
        }
    }
}

impl Setting for CudaGraph {
    fn of(value: &Value) -> Option<Self> {
        match value.str() {
            Some("full_iteration") => Some(Self::FullIteration),
            Some(_) => Some(Self::Off),
            None => Vec::<Scope>::of(value).map(Self::Scopes),
        }
    }
}

impl Setting for Offload {
    fn of(value: &Value) -> Option<Self> {
        let names: Vec<String> = Vec::of(value)?;
        let has = |name: &str| names.iter().any(|n| n == name);
        Some(Self {
            params: has("params"),
            grads: has("grads"),
            optimizer: has("optimizer"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ModelOptions, Vision};
    use crate::scenario::check;
    use crate::scenario::keys::Accept;
    use std::collections::BTreeSet;

    #[test]
    fn defaults_of_options_are_those_of_the_table() {
        let literal = Key::of_section("model").filter_map(|key| {
            let value = DEFAULTS[key as usize].as_ref()?;
            Some((key.info().key, Plain(value)))
        });
        let options = ModelOptions::deserialize(MapDeserializer::new(literal)).unwrap();
        assert_eq!(options, ModelOptions::default());
        let fields = serde_json::to_value(options).unwrap();
        for field in fields.as_object().unwrap().keys() {
            assert!(Key::find("model", field).is_some(), "{field} has no key");
        }
    }

    #[test]
    fn towers_have_the_keys_of_their_table() {
        let fields = serde_json::to_value(Vision::default()).unwrap();
        let fields: BTreeSet<&str> = fields.as_object().unwrap().keys().map(|k| &**k).collect();
        let [Accept::Table(keys)] = Key::Vision.info().accepts else {
            panic!("a tower is a table");
        };
        assert_eq!(fields, keys.iter().map(|(key, _)| *key).collect());
        let given = serde_json::json!({
            "projector": false, "projector_norm": "merged", "projector_layers": [5],
            "projector_inputs": [6], "projector_halves": true, "projector_bias": false,
            "projector_gate": 7, "merge": 2, "pool": true, "patch_layers": [8],
            "patch_layer_bias": true, "latents": 9, "latent_window": 10, "latent_width": 11,
            "latent_cross": 12, "latent_ffn": 13, "latent_layers": 14, "latent_vocab": 15,
            "latent_positions": 16, "latent_tokens": 17, "latent_heads": [18, 19, 20],
        });
        let tower = Vision::deserialize(&given).unwrap();
        let again = serde_json::to_value(&tower).unwrap();
        for (key, value) in given.as_object().unwrap() {
            assert_eq!(&again[key], value, "{key}");
        }
        assert_eq!((tower.layers, tower.projector.layers), (12, vec![5]));
        assert_eq!((tower.input.positions, tower.latents.positions), (196, 16));
    }

    /// A default in parentheses is derived; any other is a value that the key takes.
    #[test]
    fn literal_defaults_are_values_of_their_keys() {
        let document = Document::new("defaults".into());
        for (info, default) in KEYS.iter().zip(DEFAULTS.iter()) {
            let key = Key::find(info.section, info.key).unwrap();
            match default {
                Some(value) => check::form(&document, key, value).unwrap(),
                None => assert!(info.default.starts_with('('), "{}", key.path()),
            }
        }
    }
}
