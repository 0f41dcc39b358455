//! Presets: models (and, for the toys, batch shapes) by name, or by the file that describes them.

use super::error::ScenarioError;
use super::huggingface;
use super::keys::Key;
use super::merge::Document;
use super::source::Source;
use std::path::PathBuf;
use std::sync::OnceLock;
use toml::de::DeTable;

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        /// Accepted values of `model.preset`.
        pub(crate) const PRESETS: &[&str] = &[$($name,)* "none"];

        static SHIPPED: [Shipped; PRESETS.len() - 1] = [
            $(Shipped {
                name: concat!("preset ", $name),
                text: include_str!(concat!("../../../scenarios/models/", $name, ".toml")),
                table: OnceLock::new(),
            }),*
        ];
    };
}

/// A shipped preset.
struct Shipped {
    /// Name in messages.
    name: &'static str,
    text: &'static str,
    table: OnceLock<DeTable<'static>>,
}

impl Shipped {
    /// Returns its table, which is parsed once: a sweep loads the same preset for every point.
    ///
    /// # Panics
    /// If the text is not TOML, which a test of all presets would find.
    fn table(&self) -> &DeTable<'static> {
        self.table.get_or_init(|| {
            let table = DeTable::parse(self.text);
            let table = table.unwrap_or_else(|e| panic!("{}: {e}", self.name));
            table.into_inner()
        })
    }

    fn source(&self) -> Source {
        Source {
            name: self.name.into(),
            text: self.text.into(),
            folder: None,
        }
    }
}

presets![
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "llama3.2-1b",
    "llama3.2-3b",
    "llama2-7b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen1.5-moe-a2.7b",
    "mixtral-8x7b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "deepseek-v3",
    "olmoe-1b-7b",
    "llama4-scout",
    "llama4-maverick",
    "gpt2",
    "toy-linear",
    "toy-cnn",
    "toy-transformer",
];

/// A preset that has filled a document.
pub(crate) struct Filled {
    /// As the scenario has it: a name or a path.
    pub(crate) name: String,
    /// The file that it names, if it is a path.
    pub(crate) file: Option<PathBuf>,
    /// Its feed-forward width and the model width that goes with it, where the scenario gives
    /// another model width and says nothing of the feed-forward layer.
    pub(crate) ffn_to_hidden: Option<(u64, u64)>,
}

/// Fills keys that the scenario does not set from its preset.
pub(crate) fn fill(document: &mut Document) -> Result<Option<Filled>, ScenarioError> {
    let Some(value) = document.value(Key::Preset) else {
        return Ok(None);
    };
    let name = value.str().unwrap_or_default().to_owned();
    let file = name
        .ends_with(huggingface::ENDING)
        .then(|| (document.found(value), value.origin));
    let asked = document
        .value(Key::Family)
        .and_then(|v| v.str())
        .map(str::to_owned);
    let index = PRESETS.iter().position(|p| *p == name);
    let shape = match (&file, index.and_then(|i| SHIPPED.get(i))) {
        (Some((file, named)), _) => huggingface::fill(document, file, *named)?,
        (None, Some(preset)) => document.absorb_preset(preset.source(), preset.table())?,
        (None, None) => return Ok(None),
    };
    let rescaled = document.says(Key::Hidden) && !document.says(Key::Ffn);
    match (asked, shape.family) {
        (Some(asked), Some(family)) if asked != family => Err(document
            .conflict(
                &[Key::Family, Key::Preset],
                format!("preset `{name}` belongs to family {family}, not {asked}"),
            )
            .with_help("drop one of the two, or set preset = \"none\"")),
        _ => Ok(Some(Filled {
            name,
            file: file.map(|(path, _)| path),
            ffn_to_hidden: shape.ffn.zip(shape.hidden).filter(|_| rescaled),
        })),
    }
}
