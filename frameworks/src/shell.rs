//! Reads shell scripts that start training: the arguments of the last such command, with the
//! variables that the script sets.
//!
//! Follows assignments, arrays, expansions such as `${NAME:-default}`, arithmetic, subshells, `if`,
//! `case`, lists with `&&` and `||`, and `source`. Values from outside the script, such as `$1` or
//! `$(hostname)`, stay variables.

mod arguments;
mod arithmetic;
mod braces;
mod condition;
mod expansion;
mod flow;
mod lex;
mod pattern;
mod read;
mod source;
mod word;

use crate::error::ConfigError;

use shardlab_plan::scenario::Position;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

pub(crate) use arguments::Command;
pub(crate) use source::{SOURCE, note as source_note};

/// Name of the entry for a condition that cannot be evaluated and that the command depends on.
pub(crate) const CONDITION: &str = "condition";

use expansion::Operation;
use flow::{Frame, List};
use word::{Assignment, Part, Word};

/// Maximum number of words of a command: arrays can repeat one another.
const MAX_WORDS: usize = 20_000;
/// Maximum size of a variable in bytes: variables can repeat one another.
const MAX_TEXT: usize = 100_000;
/// Maximum length of an index, and of the contents of `${…}` in arithmetic, in bytes. They are
/// evaluated recursively.
const MAX_OPERAND: usize = 256;
/// Maximum nesting of commands that take a script as an argument.
const MAX_DEPTH: usize = 8;

/// Programs that start training by themselves.
const PROGRAMS: [&str; 10] = [
    "trl",
    "axolotl",
    "llamafactory-cli",
    "tune",
    "automodel",
    "swift",
    "megatron",
    "litgpt",
    "composer",
    "llmfoundry",
];

/// Commands of LitGPT that scripts run before or after training.
const NO_TRAINING: [&str; 9] = [
    "download",
    "chat",
    "generate",
    "evaluate",
    "serve",
    "merge_lora",
    "convert_to_litgpt",
    "convert_from_litgpt",
    "convert_pretrained_checkpoint",
];

/// Parts of the names of scripts and modules that train nothing.
const AFTER_TRAINING: [&str; 8] = [
    "convert",
    "download",
    "eval",
    "export",
    "generate",
    "infer",
    "merge",
    "preprocess",
];

/// A word after expansion.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Text {
    text: String,
    at: Position,
}

impl Text {
    const START: Position = Position { line: 1, column: 1 };
}

/// Variables, which subshells change for themselves only.
#[derive(Clone, Default)]
struct Scope {
    variables: HashMap<String, Vec<Text>>,
    /// Variables that depend on a condition that could not be evaluated, with the condition.
    doubtful: HashMap<String, Text>,
    /// Variables of loops, whose values are not known.
    loops: HashSet<String>,
}

#[derive(Default)]
struct Shell {
    scope: Scope,
    /// Open branches, loops and groups.
    frames: Vec<Frame>,
    list: List,
    /// Conditions that could not be evaluated and that the command depends on.
    unevaluated: Vec<Text>,
    /// Words of the last command that starts training.
    words: Vec<Text>,
    /// Number of nested scripts, sourced or passed as arguments of other commands, that are being
    /// read.
    depth: usize,
    /// Variables that the command's programs read.
    environment: Vec<(&'static str, Text)>,
    /// Folder of the script.
    folder: PathBuf,
    /// Paths of sourced files, as the script writes them.
    sourced: Vec<Text>,
}

/// Reads the command of a script that starts training.
///
/// # Errors
/// Fails if a quote is not closed or the script has no such command.
pub(crate) fn parse(file: &str, text: &str) -> Result<Command, ConfigError> {
    let mut shell = Shell {
        folder: Path::new(file).parent().unwrap_or(Path::new("")).to_owned(),
        ..Shell::default()
    };
    for line in lex::lines(file, text)? {
        shell.line(&line);
        if shell.words.len() > MAX_WORDS {
            let message = format!("a command of more than {MAX_WORDS} words");
            return Err(ConfigError::at(file, shell.words[0].at, message));
        }
    }
    if shell.words.is_empty() {
        return Err(ConfigError::File {
            file: file.to_owned(),
            message:
                "this script has no command with --arguments that starts Python (python, torchrun, \
                      accelerate launch, deepspeed), and none that names a configuration file (axolotl, \
                      llamafactory-cli, tune, automodel, swift, megatron, litgpt, composer, llmfoundry)"
                    .to_owned(),
        });
    }
    let command = Command::new(&shell.words, &shell.environment);
    let command = command.with_findings(SOURCE, &shell.sourced);
    Ok(command.with_findings(CONDITION, &shell.unevaluated))
}

impl Shell {
    /// Runs a command. `unknown` is a condition around it that could not be evaluated.
    fn run(&mut self, words: &[Word], unknown: Option<&Text>) {
        let first = words.first().and_then(Word::literal);
        if let (Some("source" | "."), Some(path)) = (first, words.get(1)) {
            self.source(path);
            return;
        }
        if first == Some("unset") {
            self.unset(&words[1..], unknown);
            return;
        }
        self.assign_defaults(words);
        if self.read(words, unknown) {
            return;
        }
        let computed = arithmetic_assignments(words);
        for word in &computed {
            self.assign(word, unknown);
        }
        if !computed.is_empty() {
            return;
        }
        let words = &words[declarations(words)..];
        let assigned = words.iter().take_while(|w| w.assignment.is_some()).count();
        if assigned < words.len() {
            // Assignments before a command set its environment.
            if self.command(&words[assigned..], unknown) {
                for word in &words[..assigned] {
                    self.assign(word, unknown);
                }
                self.environment = self.environment();
            }
            return;
        }
        for word in words {
            self.assign(word, unknown);
        }
    }

    /// Removes variables.
    fn unset(&mut self, words: &[Word], unknown: Option<&Text>) {
        let names = words.iter().filter_map(Word::literal);
        for name in names.filter(|name| !name.starts_with('-')) {
            match unknown {
                Some(unknown) => {
                    self.scope.doubtful.insert(name.to_owned(), unknown.clone());
                }
                None => {
                    self.scope.doubtful.remove(name);
                }
            }
            self.scope.variables.remove(name);
        }
    }

    fn assign(&mut self, word: &Word, unknown: Option<&Text>) {
        let Some(assignment) = &word.assignment else {
            return;
        };
        match unknown.or_else(|| self.doubt(word)).cloned() {
            Some(unknown) => {
                self.scope.doubtful.insert(assignment.name.clone(), unknown);
            }
            None if !assignment.appends => {
                self.scope.doubtful.remove(&assignment.name);
            }
            None => {}
        }
        let mut values: Vec<Text> = match &assignment.array {
            Some(words) => words.iter().flat_map(|w| self.expand(w)).collect(),
            None => vec![Text {
                text: self.joined(&assignment.value),
                at: word.at,
            }],
        };
        values.truncate(MAX_WORDS);
        if assignment.array.is_some() {
            self.assign_elements(&assignment.name, assignment.appends, &mut values);
        }
        let old = self
            .scope
            .variables
            .entry(assignment.name.clone())
            .or_default();
        let more = assignment.array.is_none().then(|| values.first()).flatten();
        match (assignment.appends, old.last_mut(), more) {
            (false, ..) => *old = values,
            (true, Some(last), Some(more)) if last.text.len() < MAX_TEXT => last.text += &more.text,
            (true, ..) => {
                old.append(&mut values);
                old.truncate(MAX_WORDS);
            }
        }
    }

    /// Keeps the arguments of a command if it starts training, and returns whether it does.
    fn command(&mut self, words: &[Word], unknown: Option<&Text>) -> bool {
        let before = self.words.len();
        let doubts = words.iter().filter_map(|w| self.doubt(w));
        let mut doubts: Vec<Text> = unknown.into_iter().chain(doubts).cloned().collect();
        let expanded = self.expanded(words);
        if let Some(script) = script(&expanded) {
            self.inner(&script);
            self.note(&mut doubts);
            return self.words.len() != before;
        }
        let Some(words) = self.training(words) else {
            return false;
        };
        // An earlier command that may run is of no interest if this one runs.
        if unknown.is_none() {
            self.unevaluated.clear();
        }
        self.note(&mut doubts);
        self.words = words;
        true
    }

    /// Keeps conditions that the command depends on.
    fn note(&mut self, doubts: &mut Vec<Text>) {
        for doubt in doubts.drain(..) {
            if !self.unevaluated.contains(&doubt) {
                self.unevaluated.push(doubt);
            }
        }
    }

    fn expanded(&self, words: &[Word]) -> Vec<Text> {
        let words = words.iter().flat_map(|w| self.expand(w));
        words.take(MAX_WORDS + 1).collect()
    }

    /// Returns the words of a command if it starts training with options.
    fn training(&self, words: &[Word]) -> Option<Vec<Text>> {
        let words = self.expanded(words);
        let starts = |w: &Text| {
            let name = w.text.rsplit('/').next().unwrap_or_default();
            matches!(
                name,
                "torchrun" | "python" | "python3" | "accelerate" | "deepspeed"
            ) || name.ends_with(".py")
                || PROGRAMS.contains(&name)
        };
        let says = |w: &Text| {
            let text = &w.text;
            text.starts_with("--") || arguments::is_config(text) || arguments::is_override(text)
        };
        let starts_none = |pair: &[Text]| {
            let (program, command) = (&pair[0].text, pair[1].text.as_str());
            program.rsplit('/').next() == Some("litgpt") && NO_TRAINING.contains(&command)
        };
        let trains = words.iter().any(says)
            && words.iter().any(starts)
            && !words.windows(2).any(starts_none)
            && (self.words.is_empty() || !trains_nothing(&words))
            && words.first().is_none_or(|w| w.text != "echo");
        trains.then_some(words)
    }

    /// Returns the variables of the environment that programs read.
    fn environment(&self) -> Vec<(&'static str, Text)> {
        let value = |name: &&'static str| {
            let values = self.scope.variables.get(*name)?;
            Some((*name, values.first()?.clone()))
        };
        arguments::ENVIRONMENT.iter().filter_map(value).collect()
    }

    /// Runs a script that is sourced or passed as an argument of another command. All of its words
    /// have the position of that command.
    fn inner(&mut self, script: &Text) {
        // A script that cannot be parsed starts no known command.
        let Ok(lines) = lex::lines("", &script.text) else {
            return;
        };
        if self.depth >= MAX_DEPTH {
            return;
        }
        self.depth += 1;
        let list = std::mem::take(&mut self.list);
        for mut line in lines {
            for word in &mut line.words {
                word.move_to(script.at);
            }
            self.line(&line);
        }
        self.list = list;
        self.depth -= 1;
    }

    /// Runs the lines of a sourced file, if it is found.
    fn source(&mut self, path: &Word) {
        let (text, at) = (self.joined(&path.parts), path.at);
        let script = source::text(&self.folder, &text);
        self.sourced.push(Text { text, at });
        if let Some(text) = script {
            let open = self.frames.len();
            self.inner(&Text { text, at });
            self.frames.truncate(open);
        }
    }

    /// Expands a word. Unquoted variables are split at blanks.
    fn expand(&self, word: &Word) -> Vec<Text> {
        if let [part] = word.parts.as_slice()
            && let Part::Variable {
                name,
                elements,
                operation,
                quoted,
            } = part
        {
            let text;
            let values = match (self.elements(name, elements), operation) {
                (Some(values), None) => values,
                (Some(values), Some(Operation::Default { .. }))
                    if values.iter().any(|t| !is_empty(&t.text)) =>
                {
                    values
                }
                _ => {
                    text = self.joined(&word.parts);
                    &[Text { text, at: word.at }]
                }
            };
            let split = |t: &Text| -> Vec<Text> {
                if *quoted {
                    return vec![t.clone()];
                }
                let words = t.text.split_whitespace();
                let at = t.at;
                words
                    .map(|text| Text {
                        text: text.to_owned(),
                        at,
                    })
                    .collect()
            };
            return values.iter().flat_map(split).collect();
        }
        let text = self.joined(&word.parts);
        if text.is_empty() && !word.is_quoted() {
            return Vec::new();
        }
        vec![Text { text, at: word.at }]
    }

    fn joined(&self, parts: &[Part]) -> String {
        let mut all = String::new();
        for part in parts {
            match part {
                Part::Literal { text, .. } => all += text,
                Part::Variable {
                    name,
                    elements,
                    operation,
                    ..
                } => all += &self.expansion(name, elements, operation.as_ref()),
                Part::Arithmetic(text) => all += &self.arithmetic(text),
                Part::Command => all += "$(…)",
            }
            if all.len() > MAX_TEXT {
                break;
            }
        }
        all
    }

    /// Evaluates arithmetic over integers and variables.
    fn arithmetic(&self, text: &str) -> String {
        let value = |inner: &str| self.joined(&[operand(inner)?]).trim().parse().ok();
        // An unknown result stays one word, as a number would be.
        let unknown = || {
            let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
            format!("$(({text}))")
        };
        arithmetic::evaluate(text, &value).map_or_else(unknown, |n| n.to_string())
    }
}

/// Returns the part for an operand of arithmetic: a name, `B[1]`, or the contents of `${…}`.
fn operand(inner: &str) -> Option<Part> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_#?".contains(c);
    if inner.chars().all(is_part) && !inner.starts_with('#') {
        return Some(Part::variable(inner.to_owned(), false));
    }
    let short = inner.len() <= MAX_OPERAND && !inner.contains("((");
    short.then(|| braces::braces("", inner, Text::START, 0, false).ok())?
}

/// Returns the assignments of `((A = B))`, `let A=B` and `: $((A = B))` as words `A=$((B))`.
fn arithmetic_assignments(words: &[Word]) -> Vec<Word> {
    let word = |at: Position, (name, text): (String, String)| Word {
        at,
        parts: Vec::new(),
        assignment: Some(Assignment {
            name,
            appends: false,
            value: vec![Part::Arithmetic(text)],
            array: None,
        }),
    };
    let all = |at: Position, text: &str| -> Vec<Word> {
        let found = text.split(',').filter_map(arithmetic::assignment);
        found.map(|found| word(at, found)).collect()
    };
    let Some((first, rest)) = words.split_first() else {
        return Vec::new();
    };
    let (literal, at) = (first.literal(), first.at);
    match (literal, rest) {
        (Some("(("), [text, ..]) => text.literal().map_or_else(Vec::new, |text| all(at, text)),
        (Some("let"), rest) => {
            let texts = rest.iter().filter_map(|w| match &w.assignment {
                Some(a) => match (a.appends, a.value.as_slice()) {
                    (appends, [Part::Literal { text, .. }]) => {
                        let operator = if appends { "+=" } else { "=" };
                        Some(format!("{}{operator}{text}", a.name))
                    }
                    _ => None,
                },
                None => match w.parts.as_slice() {
                    [Part::Literal { text, .. }] => Some(text.clone()),
                    _ => None,
                },
            });
            texts.flat_map(|text| all(at, &text)).collect()
        }
        (Some(":"), rest) => {
            let parts = rest.iter().flat_map(|w| &w.parts);
            let texts = parts.filter_map(|part| match part {
                Part::Arithmetic(text) => Some(text),
                _ => None,
            });
            texts.flat_map(|text| all(at, text)).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the number of words before the assignments of a declaration: `declare -a NAME=(…)`.
fn declarations(words: &[Word]) -> usize {
    let first = words.first().and_then(Word::literal);
    if !matches!(
        first,
        Some("export" | "local" | "readonly" | "declare" | "typeset")
    ) {
        return 0;
    }
    let options = words[1..].iter().map(Word::literal);
    1 + options
        .take_while(|w| w.is_some_and(|w| w.starts_with('-')))
        .count()
}

/// Returns whether a command runs a script or module that evaluates, merges or converts weights, as
/// scripts do after training.
fn trains_nothing(words: &[Text]) -> bool {
    let module = words.windows(2).find(|pair| pair[0].text == "-m");
    let script = words.iter().find(|w| w.text.ends_with(".py"));
    let Some(name) = module.map(|pair| &pair[1]).or(script) else {
        return false;
    };
    let name = name.text.trim_end_matches(".py");
    let name = name.rsplit(['/', '.']).next().unwrap_or(name);
    !name.contains("train") && AFTER_TRAINING.iter().any(|part| name.contains(part))
}

/// Returns the script that a command runs: the arguments of `eval`, or of a shell's `-c`.
fn script(words: &[Text]) -> Option<Text> {
    if let [first, rest @ ..] = words
        && first.text == "eval"
    {
        let texts: Vec<&str> = rest.iter().map(|w| w.text.as_str()).collect();
        let (text, at) = (texts.join(" "), rest.first()?.at);
        return Some(Text { text, at });
    }
    let is_shell = |w: &Text| matches!(w.text.rsplit('/').next(), Some("bash" | "sh"));
    let after = &words[words.iter().position(is_shell)? + 1..];
    let options = after.iter().take_while(|w| w.text.starts_with('-'));
    let is_script = |w: &Text| w.text.ends_with('c') && !w.text.starts_with("--");
    let at = options.clone().position(is_script)?;
    after.get(at + 1).cloned()
}

/// Returns whether a text is empty, or a variable or argument that the script does not set. Scripts
/// are read as if started without arguments.
fn is_empty(text: &str) -> bool {
    let is = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let name = text.strip_prefix('$');
    text.is_empty() || name.is_some_and(|name| !name.is_empty() && name.chars().all(is))
}

/// Returns a text without its variables that have no value. Returns `None` if it has the output of
/// a command or arithmetic that could not be evaluated.
fn without_unset(text: &str) -> Option<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut pieces = text.split('$');
    let mut all = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        if piece.starts_with('(') {
            return None;
        }
        let rest = match piece.chars().next() {
            Some('@' | '*' | '#' | '?') => &piece[1..],
            _ => piece.trim_start_matches(is_part),
        };
        all += rest;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn shown(script: &str) -> Vec<String> {
        let command = parse("run.sh", script).unwrap();
        let entries = command.arguments.entries().iter();
        entries
            .map(|(n, v)| format!("{}:{} {}={v}", n.at.line, n.at.column, n.text))
            .collect()
    }

    #[test]
    fn variables_arrays_and_defaults_are_resolved() {
        let script = "#!/bin/bash\nN=8 # GPUs\nM=2\nexport W=$(($N*$M))\nMB=${MB:-4}\nARGS=(\n  --num-layers 32\n  --micro_batch-size ${MB}\n)\nif [ \"$N\" = 8 ]; then\n  ARGS+=(\"--lr 1e-4\")\nelse\n  ARGS+=(--sgd)\nfi\nif [ ! -f x.py ]; then\n  exit 1\nfi\ntorchrun --nproc_per_node $N pretrain_gpt.py \\\n  ${ARGS[@]} --bf16 \\\n  --world $W --save \"$DIR/x\" --path $1\n";
        assert_eq!(
            shown(script),
            [
                "18:10 --nproc-per-node=8",
                "7:3 --num-layers=32",
                "8:3 --micro-batch-size=4",
                "11:10 --lr=0.0001",
                "19:14 --bf16=true",
                "20:3 --world=16",
                "20:14 --save=$DIR/x",
                "20:30 --path=$1",
            ]
        );
    }

    #[test]
    fn arithmetic_of_expr_is_evaluated() {
        let script = "N=4\npython a.py --a $(expr 16 / $N) --b `expr $N \\* 2` --c $(expr 8 / $X) --d $(date)\n";
        let shown: Vec<String> = shown(script)
            .iter()
            .map(|s| s.split_once(' ').unwrap().1.to_owned())
            .collect();
        assert_eq!(shown, ["--a=4", "--b=8", "--c=$((8/$X))", "--d=$(…)"]);
    }

    #[test]
    fn bad_scripts_say_where() {
        let error = |script: &str| parse("run.sh", script).unwrap_err().to_string();
        assert_eq!(error("A=1\nB=\"x\n"), "run.sh:2:3: this quote does not end");
        assert!(error("echo --help").contains("no command"));
    }
}
