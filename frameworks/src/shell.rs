//! Reads shell scripts that start training: the arguments of the last such command, with the
//! variables that the script sets.
//!
//! Follows assignments, arrays, `${NAME:-default}`, arithmetic, string comparisons and `source`.
//! Values from outside the script, such as `$1` or `$(hostname)`, stay variables.

mod arguments;
mod lex;
mod source;
mod word;

use crate::error::ConfigError;

use shardlab_plan::scenario::Position;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub(crate) use arguments::Command;
pub(crate) use source::{SOURCE, note as source_note};
use word::{Line, Part, Word};

/// Maximum number of words of a command: arrays can repeat one another.
const MAX_WORDS: usize = 20_000;
/// Maximum size of a variable in bytes: variables can repeat one another.
const MAX_TEXT: usize = 100_000;
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

#[derive(Default)]
struct Shell {
    variables: HashMap<String, Vec<Text>>,
    /// For each open `if`: whether its lines run, and whether a branch has run.
    branches: Vec<(bool, bool)>,
    /// Words of the last command that starts training.
    words: Vec<Text>,
    /// Number of nested scripts, sourced or passed as arguments of other commands, that are being
    /// read.
    depth: usize,
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
    let command = Command::new(&shell.words, &shell.environment());
    Ok(command.with_sourced(&shell.sourced))
}

impl Shell {
    fn runs(&self) -> bool {
        self.branches.iter().all(|(runs, _)| *runs)
    }

    fn line(&mut self, line: &Line) {
        let first = line.words.first().and_then(Word::literal);
        match first {
            Some("if") => {
                let holds = self.runs() && self.condition(&line.words[1..]);
                self.branches.push((holds, holds));
                return;
            }
            Some("elif") => {
                let holds = self.condition(&line.words[1..]);
                if let Some((runs, ran)) = self.branches.last_mut() {
                    *runs = holds && !*ran;
                    *ran |= holds;
                }
                return;
            }
            Some("else") => {
                if let Some((runs, ran)) = self.branches.last_mut() {
                    *runs = !*ran;
                }
                return;
            }
            Some("fi") => {
                self.branches.pop();
                return;
            }
            _ => {}
        }
        if !self.runs() {
            return;
        }
        if let (Some("source" | "."), Some(path)) = (first, line.words.get(1)) {
            self.source(path);
            return;
        }
        let skip = match first {
            // `declare -a NAME=(…)`
            Some("export" | "local" | "readonly" | "declare" | "typeset") => {
                let words = line.words[1..].iter().map(Word::literal);
                1 + words
                    .take_while(|w| w.is_some_and(|w| w.starts_with('-')))
                    .count()
            }
            Some("then") => 1,
            _ => 0,
        };
        let words = line.words.get(skip..).unwrap_or_default();
        let assigned = words.iter().take_while(|w| w.assignment.is_some()).count();
        if assigned < words.len() {
            let before = self.words.clone();
            self.command(&words[assigned..]);
            // Assignments before a command set its environment.
            if self.words.len() != before.len() || !self.words.iter().eq(before.iter()) {
                for word in &words[..assigned] {
                    self.assign(word);
                }
            }
            return;
        }
        for word in words {
            self.assign(word);
        }
    }

    fn assign(&mut self, word: &Word) {
        let Some(assignment) = &word.assignment else {
            return;
        };
        let mut values: Vec<Text> = match &assignment.array {
            Some(words) => words.iter().flat_map(|w| self.expand(w)).collect(),
            None => vec![Text {
                text: self.joined(&assignment.value),
                at: word.at,
            }],
        };
        values.truncate(MAX_WORDS);
        let old = self.variables.entry(assignment.name.clone()).or_default();
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

    /// Keeps the arguments of a command if it starts Python with options.
    fn command(&mut self, words: &[Word]) {
        let words: Vec<Text> = words
            .iter()
            .flat_map(|w| self.expand(w))
            .take(MAX_WORDS + 1)
            .collect();
        if let Some(script) = script(&words) {
            self.inner(&script);
            return;
        }
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
        if words.iter().any(says)
            && words.iter().any(starts)
            && !words.windows(2).any(starts_none)
            && (self.words.is_empty() || !trains_nothing(&words))
            && words.first().is_none_or(|w| w.text != "echo")
        {
            self.words = words;
        }
    }

    /// Returns the variables of the environment that programs read.
    fn environment(&self) -> Vec<(&'static str, Text)> {
        let value = |name: &&'static str| {
            let values = self.variables.get(*name)?;
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
        for mut line in lines {
            for word in &mut line.words {
                word.move_to(script.at);
            }
            self.line(&line);
        }
        self.depth -= 1;
    }

    /// Runs the lines of a sourced file, if it is found.
    fn source(&mut self, path: &Word) {
        let (text, at) = (self.joined(&path.parts), path.at);
        let script = source::text(&self.folder, &text);
        self.sourced.push(Text { text, at });
        if let Some(text) = script {
            let open = self.branches.len();
            self.inner(&Text { text, at });
            self.branches.truncate(open);
        }
    }

    /// Evaluates conditions such as `[[ "$A" == x ]] || [ -z "$B" ]`. Conditions that cannot be
    /// evaluated, such as whether a file exists, are false.
    fn condition(&self, words: &[Word]) -> bool {
        let words: Vec<String> = words
            .iter()
            .map(|w| self.joined(&w.parts))
            .take_while(|w| w != "then")
            .filter(|w| !matches!(w.as_str(), "[" | "[[" | "]" | "]]"))
            .collect();
        let any = words.split(|w| w == "||");
        any.into_iter()
            .any(|all| all.split(|w| w == "&&").all(test))
    }

    /// Expands a word. Unquoted variables are split at blanks.
    fn expand(&self, word: &Word) -> Vec<Text> {
        if let [part] = word.parts.as_slice()
            && let Part::Variable { name, quoted, .. } = part
            && let Some(values) = self.variables.get(name)
        {
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
                Part::Variable { name, default, .. } => {
                    all += &self.variable(name, default.as_deref());
                }
                Part::Arithmetic(text) => all += &self.arithmetic(text),
                Part::Command => all += "$(…)",
            }
            if all.len() > MAX_TEXT {
                break;
            }
        }
        all
    }

    fn variable(&self, name: &str, default: Option<&[Part]>) -> String {
        match (self.variables.get(name), default) {
            (Some(values), default) => {
                let texts: Vec<&str> = values.iter().map(|t| t.text.as_str()).collect();
                let text = texts.join(" ");
                match default {
                    Some(parts) if is_empty(&text) => self.joined(parts),
                    _ => text,
                }
            }
            (None, Some(parts)) => self.joined(parts),
            (None, None) => format!("${name}"),
        }
    }

    /// Evaluates arithmetic over integers and variables, from left to right.
    fn arithmetic(&self, text: &str) -> String {
        // An unknown result stays one word, as a number would be.
        let unknown = || {
            let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
            format!("$(({text}))")
        };
        let mut result: Option<i64> = None;
        let mut operator = '*';
        for token in text.split_inclusive(['*', '/', '+', '-']) {
            let next = token.chars().last().filter(|c| "*/+-".contains(*c));
            let name = token.trim_end_matches(['*', '/', '+', '-']).trim();
            let name = name.trim_start_matches('$').trim_matches(['{', '}']);
            let number = name
                .parse()
                .or_else(|_| self.variable(name, None).trim().parse::<i64>());
            let Ok(number) = number else {
                return unknown();
            };
            let combined = match (result, operator) {
                (None, _) => Some(number),
                (Some(a), '*') => a.checked_mul(number),
                (Some(a), '/') => a.checked_div(number),
                (Some(a), '+') => a.checked_add(number),
                (Some(a), _) => a.checked_sub(number),
            };
            result = combined;
            if result.is_none() {
                return unknown();
            }
            operator = next.unwrap_or('*');
        }
        result.map_or_else(unknown, |n| n.to_string())
    }
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

fn test(words: &[String]) -> bool {
    let number = |text: &str| text.parse::<i64>();
    match words {
        [not, rest @ ..] if not == "!" && !rest.is_empty() => {
            // A condition that cannot be evaluated is false, whether negated or not.
            !matches!(rest, [op, _] if op.starts_with('-') && !matches!(op.as_str(), "-z" | "-n"))
                && !test(rest)
        }
        [op, text] if op == "-z" => is_empty(text),
        [op, text] if op == "-n" => !is_empty(text),
        // The test for an argument that is not given: `[ "$2" == "" ]`.
        [a, op, b] if b.is_empty() && matches!(op.as_str(), "=" | "==" | "!=") => {
            is_empty(a) == (op != "!=")
        }
        [a, op, b] if matches!(op.as_str(), "=" | "==" | "!=") => (a == b) == (op != "!="),
        [a, op, b] => match (number(a), number(b)) {
            (Ok(a), Ok(b)) => match op.as_str() {
                "-eq" => a == b,
                "-ne" => a != b,
                "-gt" => a > b,
                "-ge" => a >= b,
                "-lt" => a < b,
                "-le" => a <= b,
                _ => false,
            },
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(script: &str) -> Vec<String> {
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

    #[test]
    fn conditions_hold_on_texts_and_numbers() {
        let script = |condition: &str| {
            format!(
                "A=x\nB=3\nif {condition}; then\nC=(--yes)\nelse\nC=(--no)\nfi\npython a.py ${{C[@]}}\n"
            )
        };
        for (condition, expected) in [
            ("[[ \"$A\" == \"x\" ]]", "--yes"),
            ("[ $A != x ] || [ $B -ge 3 ]", "--yes"),
            ("[ -z \"$A\" ] && [ $B -eq 3 ]", "--no"),
            ("[ -f /etc/passwd ]", "--no"),
            ("[ ! -z \"$A\" ]", "--yes"),
        ] {
            let shown = shown(&script(condition));
            assert!(shown[0].contains(expected), "{condition}: {shown:?}");
        }
    }
}
