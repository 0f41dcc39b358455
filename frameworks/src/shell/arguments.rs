//! The arguments of a command that starts training.

use super::Text;
use crate::tree::{Name, Node, Value, plain};
use crate::yaml;
use shardlab_plan::scenario::Position;

/// Variables of the environment that programs read.
pub(super) const ENVIRONMENT: [&str; 15] = [
    "NPROC_PER_NODE",
    "NNODES",
    "CUDA_VISIBLE_DEVICES",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_MIXED_PRECISION",
    "FSDP_VERSION",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_ACTIVATION_CHECKPOINTING",
    ALLOCATOR[0],
    ALLOCATOR[1],
];
/// Variables with options of PyTorch's allocator, which every program reads.
const ALLOCATOR: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];
/// Name of the entry for a configuration file that no option names.
const CONFIG: &str = "--config";

/// A command that starts training.
#[derive(Debug)]
pub(crate) struct Command {
    /// Options as a map of `--names`, and maps by the path of `a.b=value`, as in Hydra.
    pub(crate) arguments: Node,
    /// Variables of the environment that some programs read.
    pub(crate) environment: Vec<(Name, Node)>,
    /// Programs, modules, scripts and positional arguments of the command.
    words: Vec<Text>,
}

impl Command {
    pub(super) fn new(words: &[Text], environment: &[(&'static str, Text)]) -> Self {
        let mut reader = Reader::default();
        let mut rest = words;
        while let Some((word, after)) = rest.split_first() {
            rest = reader.word(word, after);
        }
        let Reader {
            mut entries,
            unset,
            words,
            ..
        } = reader;
        name_unset(&mut entries, unset);
        let (allocator, environment): (Vec<_>, Vec<_>) = environment
            .iter()
            .partition(|(name, _)| ALLOCATOR.contains(name));
        for (name, value) in allocator {
            set(&mut entries, name, value.at, scalar(value));
        }
        let variable = |(name, value): &(&str, Text)| {
            let (text, at) = ((*name).to_owned(), value.at);
            (Name { text, at }, scalar(value))
        };
        let at = entries
            .first()
            .map_or(Position { line: 1, column: 1 }, |(n, _)| n.at);
        Self {
            arguments: Node::new(at, Value::Map(entries)),
            environment: environment.into_iter().map(variable).collect(),
            words,
        }
    }

    /// Adds an entry for each of some findings about the script, such as a file that it sources.
    pub(super) fn with_findings(mut self, name: &str, findings: &[Text]) -> Self {
        if let Value::Map(entries) = &mut self.arguments.value {
            for found in findings {
                let (text, at) = (name.to_owned(), found.at);
                let node = Node::new(at, Value::Text(found.text.clone()));
                entries.push((Name { text, at }, node));
            }
        }
        self
    }

    /// Returns whether the command runs one of some subcommands of a program.
    pub(crate) fn runs(&self, program: &str, subcommands: &[&str]) -> bool {
        let is = |pair: &[Text]| {
            file_name(&pair[0]) == program && subcommands.contains(&file_name(&pair[1]))
        };
        self.words.windows(2).any(is)
    }

    /// Returns whether the command starts with a program.
    pub(crate) fn starts(&self, program: &str) -> bool {
        self.words.first().is_some_and(|w| file_name(w) == program)
    }

    /// Returns the word that comes `n` words after a program, counted without options.
    pub(crate) fn after(&self, program: &str, n: usize) -> Option<Node> {
        let at = self.words.iter().position(|w| file_name(w) == program)?;
        let word = self.words.get(at + n)?;
        Some(Node::new(word.at, Value::Text(word.text.clone())))
    }

    /// Returns whether a program, module or script of the command has a text in its name.
    pub(crate) fn names(&self, text: &str) -> bool {
        self.words.iter().any(|word| file_name(word).contains(text))
    }
}

impl Command {
    /// Returns whether the name of a script of the command has one of some words, as
    /// `run_dpo.py` has `dpo`.
    pub(crate) fn names_word(&self, words: &[&str]) -> bool {
        self.part_has(0, words)
    }

    /// Returns whether the name of the folder of a script has one of some words.
    pub(crate) fn folder_has_word(&self, words: &[&str]) -> bool {
        self.part_has(1, words)
    }

    /// Returns whether the path of a script has one of some words in the part that is `nth` from
    /// its end.
    fn part_has(&self, nth: usize, words: &[&str]) -> bool {
        let scripts = self.words.iter().filter_map(|w| w.text.strip_suffix(".py"));
        let mut names = scripts.filter_map(|path| path.rsplit('/').nth(nth));
        names.any(|name| {
            let name = name.to_ascii_lowercase();
            name.split(['_', '-', '.'])
                .any(|part| words.contains(&part))
        })
    }
}

/// Options of launchers with one value. The name of a recipe may follow it.
const WITH_ONE_VALUE: [&str; 11] = [
    "config",
    "nproc-per-node",
    "nproc_per_node",
    "nnodes",
    "node-rank",
    "node_rank",
    "master-port",
    "master_port",
    "num-processes",
    "num_processes",
    "num_machines",
];
/// Programs that take `name=value` in place of `--name value`.
const WITH_OVERRIDES: [&str; 2] = ["llamafactory-cli", "tune"];

/// Reads the words of a command, one after another.
#[derive(Default)]
struct Reader {
    entries: Vec<(Name, Node)>,
    /// Variables that the script does not set, among the values of options.
    unset: Vec<Text>,
    words: Vec<Text>,
    /// Whether a script or module was named, so that options of one dash are its options.
    has_script: bool,
}

impl Reader {
    /// Reads a word together with its values, and returns the words after them.
    fn word<'w>(&mut self, word: &Text, after: &'w [Text]) -> &'w [Text] {
        let text = word.text.as_str();
        if let Some(name) = text.strip_prefix("--") {
            // `--` ends the launcher's arguments.
            return if name.is_empty() {
                after
            } else {
                self.option(name, word.at, after)
            };
        }
        if text == "-m"
            && let Some((module, after)) = after.split_first()
        {
            self.words.push(module.clone());
            self.has_script = true;
            return after;
        }
        // Composer's launcher has a short option for the number of processes.
        if text == "-n"
            && self
                .words
                .first()
                .is_some_and(|w| file_name(w) == "composer")
            && !self.has_script
            && let Some((number, after)) = after.split_first()
        {
            set(&mut self.entries, "--nproc", word.at, scalar(number));
            return after;
        }
        if is_short_option(text)
            && self.has_script
            && let Some((value, after)) = after.split_first()
            && !ends_values(&value.text)
        {
            let name = if is_config(&value.text) { CONFIG } else { text };
            set(&mut self.entries, name, word.at, scalar(value));
            return after;
        }
        if let Some((path, value)) =
            assigned_path(text).or_else(|| assigned_name(text).filter(|_| self.has_script))
        {
            let value = Text {
                text: value.to_owned(),
                at: word.at,
            };
            self.set_path(path, word.at, assigned(&value));
        } else if is_config(text) && !self.words.is_empty() {
            set(&mut self.entries, CONFIG, word.at, scalar(word));
        } else {
            self.has_script |= text.ends_with(".py") || WITH_OVERRIDES.contains(&file_name(word));
            self.words.push(word.clone());
        }
        after
    }

    /// Reads an option: it takes the words up to the next option, script or path with a value. The
    /// last of several equal names wins.
    fn option<'w>(&mut self, name: &str, at: Position, after: &'w [Text]) -> &'w [Text] {
        let (name, inline) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (name, None),
        };
        let mut values: Vec<Node> = inline
            .map(|v| {
                let text = v.to_owned();
                scalar(&Text { text, at })
            })
            .into_iter()
            .collect();
        let mut rest = after;
        let most = if WITH_ONE_VALUE.contains(&name) {
            1
        } else {
            usize::MAX
        };
        while inline.is_none()
            && values.len() < most
            && let Some((value, after)) = rest.split_first()
            && !ends_values(&value.text)
        {
            rest = after;
            // These are further options that the script does not define.
            if !values.is_empty() && is_variable(&value.text) {
                self.unset.push(value.clone());
                continue;
            }
            values.push(scalar(value));
        }
        let value = match values.len() {
            0 => Node::new(at, Value::Bool(true)),
            1 => values.remove(0),
            _ => Node::new(values[0].at, Value::List(values)),
        };
        if name == "module"
            && let Some(module) = value.text()
        {
            let text = module.to_owned();
            self.words.push(Text { text, at });
        }
        let name = format!("--{}", name.replace('_', "-"));
        set(&mut self.entries, &name, at, value);
        rest
    }

    /// Sets the value at a path, as Hydra does. A word that chooses a file of defaults for a map
    /// (`engine=fsdp`) becomes an entry of the map.
    fn set_path(&mut self, path: &str, at: Position, value: Node) {
        let mut entries = &mut self.entries;
        let names: Vec<&str> = path.split('.').collect();
        let Some((last, above)) = names.split_last() else {
            return;
        };
        for name in above {
            let found = entries.iter().position(|(n, _)| n.text == *name);
            let is_map = |i: &usize| matches!(entries[*i].1.value, Value::Map(_));
            let index = found.filter(is_map).unwrap_or_else(|| {
                let choice = found.map(|i| entries[i].1.clone());
                let inner = choice.map(|c| (choice_name(c.at), c)).into_iter().collect();
                set(entries, name, at, Node::new(at, Value::Map(inner)));
                entries.len() - 1
            });
            let Value::Map(inner) = &mut entries[index].1.value else {
                return;
            };
            entries = inner;
        }
        let is_map =
            |(n, v): &&mut (Name, Node)| n.text == *last && matches!(v.value, Value::Map(_));
        if let Some((
            _,
            Node {
                value: Value::Map(inner),
                ..
            },
        )) = entries.iter_mut().find(is_map)
        {
            let name = choice_name(at);
            set(inner, &name.text, at, value);
            return;
        }
        set(entries, last, at, value);
    }
}

/// Returns the name of the entry for the file of defaults that Hydra reads for a map.
fn choice_name(at: Position) -> Name {
    let text = "_choice_".to_owned();
    Name { text, at }
}

/// Returns the last part of a path.
fn file_name(word: &Text) -> &str {
    word.text.rsplit('/').next().unwrap_or(&word.text)
}

/// Sets an entry in place of one of the same name.
fn set(entries: &mut Vec<(Name, Node)>, name: &str, at: Position, value: Node) {
    entries.retain(|(n, _)| n.text != name);
    let text = name.to_owned();
    entries.push((Name { text, at }, value));
}

/// Returns whether a word cannot be a value of the option before it.
fn ends_values(text: &str) -> bool {
    text.starts_with("--")
        || text.ends_with(".py")
        || matches!(text, "python" | "python3" | "torchrun")
        || is_short_option(text)
        || assigned_path(text).is_some()
}

/// Returns whether a word is an option of one dash, and not a negative number.
fn is_short_option(text: &str) -> bool {
    let name = text.strip_prefix('-');
    name.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// Returns whether a word is the path of a configuration file.
pub(super) fn is_config(text: &str) -> bool {
    let ends = |ending: &&str| text.ends_with(ending);
    !text.starts_with('-') && [".yaml", ".yml", ".toml"].iter().any(ends)
}

/// Returns whether a word sets the value at a path.
pub(super) fn is_override(text: &str) -> bool {
    assigned_path(text).is_some()
}

/// Splits `a.b=value`, which may start with `+` or `++`, into its path and its value.
fn assigned_path(text: &str) -> Option<(&str, &str)> {
    assigned_name(text).filter(|(path, _)| path.contains('.'))
}

/// Splits `a.b=value` or `a=value` into its path and its value.
fn assigned_name(text: &str) -> Option<(&str, &str)> {
    let (path, value) = text.trim_start_matches('+').split_once('=')?;
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    path.split('.').all(is_name).then_some((path, value))
}

/// Adds variables that the script does not set, under their own names.
fn name_unset(entries: &mut Vec<(Name, Node)>, unset: Vec<Text>) {
    for Text { text, at } in unset {
        let name = Name {
            text: text.clone(),
            at,
        };
        if entries.iter().all(|(n, _)| n.text != name.text) {
            entries.push((name, Node::new(at, Value::Text(text))));
        }
    }
}

/// Returns whether a word consists of exactly one variable that the script does not set.
fn is_variable(text: &str) -> bool {
    let name = text.strip_prefix('$');
    name.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
}

/// Parses the value of a path: a list, as Hydra writes it, or a value as in an option.
fn assigned(word: &Text) -> Node {
    let list = word
        .text
        .starts_with('[')
        .then(|| yaml::parse("", &word.text).ok());
    match list.flatten() {
        Some(mut node) => {
            node.move_to(word.at);
            node
        }
        None => scalar(word),
    }
}

/// Parses a value: a scalar, or a map written as JSON.
fn scalar(word: &Text) -> Node {
    let text = word.text.trim_matches('\'');
    let map = text.trim_start().starts_with('{');
    let parsed = map.then(|| yaml::parse("", text).ok()).flatten();
    match parsed {
        Some(mut node) => {
            node.move_to(word.at);
            node
        }
        None => Node::new(word.at, plain(text)),
    }
}
