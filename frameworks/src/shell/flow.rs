//! Which lines of a script run: branches, loops, groups, and lists of commands.
//!
//! A condition that cannot be evaluated counts as false. What depends on it is recorded, so that
//! readers can warn if it reaches the command that trains.

use super::expansion::Operation;
use super::word::{Join, Kind, Line, Part, Word};
use super::{MAX_DEPTH, Scope, Shell, Text, pattern};

/// Maximum length of the text of a condition, in characters.
const MAX_SHOWN: usize = 60;

/// An open `if`, `case`, loop or group.
pub(super) struct Frame {
    kind: Opened,
    /// Whether its current lines run.
    runs: bool,
    /// Whether they may run, as far as conditions could be evaluated.
    may_run: bool,
    /// Whether a branch has run.
    ran: bool,
    /// The first condition that could not be evaluated.
    unknown: Option<Text>,
    /// Whether the list in front of it runs, and whether it may.
    list: (bool, bool),
    /// Outcome of the list in front of it.
    before: Outcome,
}

enum Opened {
    If,
    /// With its subject, if that is known.
    Case(Option<String>),
    Loop,
    Group,
    /// With the variables to which its end returns, unless subshells are nested too deeply.
    Subshell(Option<Box<Scope>>),
}

/// Outcome of the last command of a list.
#[derive(Clone, Default)]
pub(super) enum Outcome {
    /// A command that is not run, and is assumed to succeed.
    Assumed(Text),
    Known(bool),
    Unknown(Text),
    #[default]
    None,
}

/// The list that lines belong to.
#[derive(Default)]
pub(super) struct List {
    outcome: Outcome,
    /// Whether the last line ran, and whether it may have.
    last: (bool, bool),
}

impl Frame {
    /// Sets whether the lines of a branch run.
    fn branch(&mut self, holds: Option<bool>, condition: &Text) {
        let open = !self.ran;
        self.runs = self.list.0 && open && holds == Some(true);
        self.may_run = self.list.1 && open && holds != Some(false);
        self.ran |= holds == Some(true);
        if open && holds.is_none() && self.unknown.is_none() {
            self.unknown = Some(condition.clone());
        }
    }
}

impl Shell {
    /// Returns whether the next line runs, and whether it may run.
    fn state(&self, join: Join) -> (bool, bool) {
        match (join, &self.list.outcome) {
            (Join::Always, _) | (_, Outcome::None) => (true, true),
            (Join::Pipe, _) => self.list.last,
            (Join::And, Outcome::Known(holds)) => (*holds, *holds),
            (Join::Or, Outcome::Known(holds)) => (!holds, !holds),
            (Join::And, Outcome::Assumed(_)) => (true, true),
            (Join::Or, Outcome::Assumed(_)) | (_, Outcome::Unknown(_)) => (false, true),
        }
    }

    fn open(&mut self, kind: Opened, list: (bool, bool)) -> &mut Frame {
        let unknown = match &self.list.outcome {
            Outcome::Unknown(text) | Outcome::Assumed(text) if list == (false, true) => {
                Some(text.clone())
            }
            _ => None,
        };
        let before = self.list.outcome.clone();
        self.frames.push(Frame {
            before,
            kind,
            runs: list.0,
            may_run: list.1,
            ran: false,
            unknown,
            list,
        });
        let last = self.frames.len() - 1;
        &mut self.frames[last]
    }

    /// Closes the innermost open frame of a kind, and those within it.
    fn close(&mut self, is: fn(&Opened) -> bool) {
        if let Some(at) = self.frames.iter().rposition(|f| is(&f.kind)) {
            self.frames.truncate(at);
        }
        self.list.outcome = Outcome::None;
    }

    /// Closes a group. The list around it continues with the outcome of its last command,
    /// and with its own outcome if the group does not run.
    fn close_group(&mut self, is: fn(&Opened) -> bool) {
        let Some(at) = self.frames.iter().rposition(|f| is(&f.kind)) else {
            return;
        };
        let mut closed = self.frames.drain(at..);
        let Some(group) = closed.next() else {
            return;
        };
        drop(closed);
        if let Opened::Subshell(Some(scope)) = group.kind {
            self.scope = *scope;
        }
        if group.list != (true, true) {
            self.list.outcome = group.before;
        }
    }

    /// Processes a line: keywords decide what runs, other lines are commands.
    pub(super) fn line(&mut self, line: &Line) {
        match line.kind {
            Kind::Command => self.words_of_line(&line.words, line.join),
            Kind::Pattern => self.patterns(&line.words),
            Kind::EndOfBranch => {
                if let Some(frame) = self.case() {
                    (frame.runs, frame.may_run) = (false, false);
                }
                self.list.outcome = Outcome::None;
            }
        }
    }

    fn words_of_line(&mut self, words: &[Word], join: Join) {
        let list = self.state(join);
        let (first, rest) = match words.split_first() {
            Some((first, rest)) => (first.literal(), rest),
            None => return,
        };
        match first {
            Some("if") => {
                let (holds, shown) = (self.condition(rest), self.shown(rest));
                self.open(Opened::If, list).branch(holds, &shown);
            }
            Some("elif" | "else") => {
                let holds = match first {
                    Some("else") => Some(true),
                    _ => self.condition(rest),
                };
                let shown = self.shown(rest);
                let mut open = self.frames.iter_mut().rev();
                if let Some(frame) = open.find(|f| matches!(f.kind, Opened::If)) {
                    frame.branch(holds, &shown);
                }
            }
            Some("fi") => self.close(|kind| matches!(kind, Opened::If)),
            Some("case") => {
                let subject = rest.first().and_then(|word| self.known(word));
                let frame = self.open(Opened::Case(subject), list);
                (frame.runs, frame.may_run) = (false, false);
            }
            Some("esac") => self.close(|kind| matches!(kind, Opened::Case(_))),
            Some("while" | "until") => {
                let holds = self
                    .condition(rest)
                    .map(|holds| holds == (first == Some("while")));
                let frame = self.open(Opened::Loop, list);
                // Other loops run once.
                if holds == Some(false) {
                    (frame.runs, frame.may_run) = (false, false);
                }
            }
            Some("for") => self.enter_for(rest, list),
            Some("done") => self.close(|kind| matches!(kind, Opened::Loop)),
            Some("}") => self.close_group(|kind| matches!(kind, Opened::Group)),
            Some(")") => self.close_group(|kind| matches!(kind, Opened::Subshell(_))),
            Some("(") => {
                let is_subshell = |f: &&Frame| matches!(f.kind, Opened::Subshell(_));
                let depth = self.frames.iter().filter(is_subshell).count();
                let scope = (depth < MAX_DEPTH).then(|| Box::new(self.scope.clone()));
                self.open(Opened::Subshell(scope), list);
            }
            Some("{") => {
                self.open(Opened::Group, list);
                self.words_of_line(rest, Join::Always);
                return;
            }
            Some("then" | "do") => self.list.outcome = Outcome::None,
            // The body of a function runs where it is written.
            _ if words.last().and_then(Word::literal) == Some("{") => {
                self.open(Opened::Group, list);
            }
            _ => {
                if join == Join::Always {
                    self.list.outcome = Outcome::None;
                }
                self.command_of_list(words, list);
                self.list.last = list;
                return;
            }
        }
        if !matches!(first, Some("}" | ")" | "fi" | "done" | "esac")) {
            self.list.outcome = Outcome::None;
        }
    }

    /// Opens a loop over words. Its body runs once, unless there are no words: for the first word,
    /// if its text is known.
    fn enter_for(&mut self, words: &[Word], list: (bool, bool)) {
        let name = words.first().and_then(Word::literal).map(str::to_owned);
        let is_list = words.get(1).and_then(Word::literal) == Some("in");
        let values = words.get(2..).filter(|_| is_list).unwrap_or_default();
        let is_empty = |w: &Word| self.known(w).is_some_and(|text| text.is_empty());
        let none = is_list && values.iter().all(is_empty);
        let first = self.first_value(values);
        let frame = self.open(Opened::Loop, list);
        if none {
            (frame.runs, frame.may_run) = (false, false);
        }
        let runs = self.frames.iter().all(|f| f.runs);
        match (name, first) {
            (Some(name), Some(first)) if runs => {
                self.scope.loops.remove(&name);
                self.scope.doubtful.remove(&name);
                self.scope.variables.insert(name, vec![first]);
            }
            (name, _) => {
                if let Some(name) = &name {
                    self.scope.variables.remove(name);
                }
                self.scope.loops.extend(name);
            }
        }
    }

    /// Returns the first of some words after expansion, if its text is known.
    fn first_value(&self, words: &[Word]) -> Option<Text> {
        let word = words.iter().find(|w| !self.expand(w).is_empty())?;
        let is_pattern = |c: char| "*?[]{}".contains(c);
        let is_unquoted = |part: &Part| match part {
            Part::Literal { text, quoted } => !quoted && text.contains(is_pattern),
            _ => false,
        };
        if self.doubt(word).is_some() || word.parts.iter().any(is_unquoted) {
            return None;
        }
        let first = self.expand(word).into_iter().next()?;
        (!first.text.contains('$')).then_some(first)
    }

    /// Runs or skips a command.
    fn command_of_list(&mut self, words: &[Word], list: (bool, bool)) {
        let runs = list.0 && self.frames.iter().all(|f| f.runs);
        let may_run = list.1 && self.frames.iter().all(|f| f.runs || f.may_run);
        if !may_run {
            return;
        }
        let open = self.frames.iter().find_map(|f| f.unknown.clone());
        let unknown = open.or_else(|| match &self.list.outcome {
            Outcome::Unknown(text) => Some(text.clone()),
            Outcome::Assumed(text) if !runs => Some(text.clone()),
            _ => None,
        });
        if runs {
            self.run(words, unknown.as_ref());
            let assigns = !super::arithmetic_assignments(words).is_empty();
            self.list.outcome = if self.is_test(words) && !assigns {
                self.condition(words)
                    .map_or_else(|| Outcome::Unknown(self.shown(words)), Outcome::Known)
            } else if succeeds(words) {
                Outcome::Known(true)
            } else {
                Outcome::Assumed(self.shown(words))
            };
        } else if let Some(unknown) = unknown {
            self.skip(words, &unknown);
        }
    }

    fn case(&mut self) -> Option<&mut Frame> {
        let frame = self.frames.last_mut();
        frame.filter(|f| matches!(f.kind, Opened::Case(_)))
    }

    /// Decides whether a branch of a `case` runs.
    fn patterns(&mut self, words: &[Word]) {
        // Blocks that are still open within the branch before it are damaged.
        let is_case = |f: &Frame| matches!(f.kind, Opened::Case(_));
        let Some(at) = self.frames.iter().rposition(is_case) else {
            return;
        };
        self.frames.truncate(at + 1);
        let Opened::Case(subject) = &self.frames[at].kind else {
            return;
        };
        let one = |word: &Word| {
            let globs = self.pattern(&word.parts)?;
            if globs == [pattern::Glob::Any] {
                return Some(true);
            }
            Some(pattern::matches(&globs, subject.as_deref()?))
        };
        let mut holds = Some(false);
        for word in words {
            holds = match (holds, one(word)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            };
        }
        let shown = self.shown(words);
        self.frames[at].branch(holds, &shown);
        self.list.outcome = Outcome::None;
    }

    /// Records what a command would set that may run.
    fn skip(&mut self, words: &[Word], unknown: &Text) {
        let computed = super::arithmetic_assignments(words);
        let words = if computed.is_empty() {
            &words[super::declarations(words)..]
        } else {
            &computed
        };
        let assigned = words.iter().take_while(|w| w.assignment.is_some()).count();
        if assigned < words.len() {
            if self.training(&words[assigned..]).is_some() {
                self.unevaluated.push(unknown.clone());
            }
            return;
        }
        for assignment in words.iter().filter_map(|w| w.assignment.as_ref()) {
            self.scope
                .doubtful
                .entry(assignment.name.clone())
                .or_insert_with(|| unknown.clone());
        }
    }

    /// Returns the condition that a word depends on and that could not be evaluated.
    pub(super) fn doubt(&self, word: &Word) -> Option<&Text> {
        let assignment = word.assignment.as_ref();
        let value = assignment.map_or(word.parts.as_slice(), |a| a.value.as_slice());
        let array = assignment.and_then(|a| a.array.as_ref());
        let mut array = array.into_iter().flatten();
        self.doubt_of(value)
            .or_else(|| array.find_map(|word| self.doubt(word)))
    }

    pub(super) fn doubt_of(&self, parts: &[Part]) -> Option<&Text> {
        if self.scope.doubtful.is_empty() {
            return None;
        }
        parts.iter().find_map(|part| match part {
            Part::Variable {
                name, operation, ..
            } => self.scope.doubtful.get(name).or_else(|| {
                let mut parts = operation.iter().flat_map(Operation::parts);
                parts.find_map(|part| self.doubt_of(std::slice::from_ref(part)))
            }),
            Part::Arithmetic(text) => {
                let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
                let mut names = text.split(|c| !is_part(c));
                names.find_map(|name| self.scope.doubtful.get(name))
            }
            Part::Literal { .. } | Part::Command => None,
        })
    }

    /// Returns the text of a condition with the position of its first word.
    fn shown(&self, words: &[Word]) -> Text {
        let texts: Vec<String> = words.iter().map(|w| self.joined(&w.parts)).collect();
        let at = words.first().map_or(Text::START, |w| w.at);
        let mut text = texts.join(" ");
        if let Some((end, _)) = text.char_indices().nth(MAX_SHOWN) {
            text.truncate(end);
            text.push('…');
        }
        Text { text, at }
    }
}

/// Commands that succeed, as far as the rest of a script is concerned.
const SUCCEED: [&str; 8] = [
    "echo", "printf", "export", "mkdir", "sleep", "set", "unset", "cd",
];

/// Returns whether a command succeeds: an assignment without commands, or one of some commands.
fn succeeds(words: &[Word]) -> bool {
    let runs_no_command = |w: &Word| {
        let value = w.assignment.as_ref().map(|a| &a.value);
        value.is_some_and(|v| !v.iter().any(|part| matches!(part, Part::Command)))
    };
    let first = words.first().and_then(Word::literal);
    first.is_some_and(|first| SUCCEED.contains(&first)) || words.iter().all(runs_no_command)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::shown;

    /// Returns the options of `python a.py $C`, without positions.
    pub(in super::super) fn options(script: &str) -> Vec<String> {
        let shown = shown(&format!("{script}\npython a.py --c $C\n"));
        let texts = shown.iter().filter_map(|s| s.split_once(' '));
        texts.map(|(_, text)| text.to_owned()).collect()
    }

    /// The values are those of bash 5.2, started without arguments.
    #[test]
    fn lines_run_as_in_bash() {
        for (script, expected) in [
            ("C=4\n[ \"$LONG\" = 1 ] && C=1", "4"),
            ("C=4\n[ \"$LONG\" = 1 ] || C=1", "1"),
            ("C=4\n[[ a == a ]] && C=1 && C=2", "2"),
            ("C=4\n[ a = b ] && C=1 || C=2", "2"),
            ("C=4\n[ a = b ] &&\n  C=1\nC=${C}5", "45"),
            ("C=4\n[ a = b ] && { C=1; C=2; }", "4"),
            ("C=4\n[ a = a ] && { C=1; C=2; }", "2"),
            ("C=4\n(( C > 3 )) && C=1", "1"),
            ("C=4\ncd /tmp && C=1", "1"),
            ("case 8b in\n  8b)\n C=1\n ;;\n 70b) C=2;;\nesac", "1"),
            ("case 70b in 8b) C=1;; 70b | 405b) C=2;; *) C=3;; esac", "2"),
            ("case \"$U\" in (8b) C=1;; (*) C=3;; esac", "3"),
            ("S=Llama-8B\ncase $S in *8B) C=1;; *) C=2;; esac", "1"),
            (
                "case a in a) if [ 1 = 2 ]; then C=1; else C=2; fi;; b) C=3;; esac",
                "2",
            ),
            ("C=4\n[ 1 -eq 1 ] && { X=1; } || { C=1; }", "4"),
            ("C=4\n[ 1 -eq 2 ] && { X=1; } || { C=1; }", "1"),
            ("C=4\n[ 1 -eq 2 ] || { X=1; } && { C=1; }", "1"),
            ("C=4\n[ 1 -eq 1 ] || { X=1; false; } && C=2", "2"),
            ("C=8; (( C = C / 2 ))", "4"),
            ("C=8; ((C/=2))", "4"),
            ("C=8; let C=C/2", "4"),
            ("C=8; let C/=2", "4"),
            ("C=8; : $((C/=2))", "4"),
            ("C=8; ((C++))", "9"),
            ("C=8; ((--C, C *= 1 + 1))", "14"),
            ("C=8; (( C == 4 )) || C=1", "1"),
            ("C=8; unset C; C=${C:-2}", "2"),
            ("true && C=4 || C=2", "4"),
            ("false && C=4 || C=2", "2"),
            ("C=4\nX=1 || C=2", "4"),
            ("C=4\necho hi || C=2", "4"),
            ("C=4\nmkdir -p o || { C=1; }", "4"),
            ("D=true; if $D; then C=1; else C=4; fi", "1"),
            ("D=false; if $D; then C=1; else C=4; fi", "4"),
            ("D=false; $D && C=1 || C=4", "4"),
            ("D=false; if ! \"$D\"; then C=1; else C=4; fi", "1"),
            ("X=$(echo \"$Y\" | sed 's/)//')\nC=4", "4"),
            ("X=$(echo \"$(echo ')')\" # it's\n)\nC=4", "4"),
            ("for C in 2 4; do echo $C; break; done", "2"),
            ("for B in 2 4; do C=$((B * 2)); break; done", "4"),
            (
                "for B in 2 4; do if [ $B = 2 ]; then C=1; else C=3; fi; break; done",
                "1",
            ),
            ("C=4\nwhile [[ $# -gt 0 ]]; do\n C=1\n shift\ndone", "4"),
            ("C=4\nfor a in \"$@\"; do C=1; done", "4"),
            ("for a in x; do C=1; done", "1"),
            ("f() {\n C=1\n}\nf", "1"),
            ("C=4\nif [ 1 = 2 ]; then\n f() { C=1; }\n C=2\nfi", "4"),
            ("A=2\nC=$((1 + A * 3))", "7"),
            (
                "C=4\nif [ 1 = 1 ]\nthen\n C=1\nelif [ 1 = 1 ]; then C=2; fi",
                "1",
            ),
        ] {
            assert_eq!(options(script), [format!("--c={expected}")], "{script}");
        }
    }

    #[test]
    fn conditions_that_decide_the_command_are_reported() {
        for (script, expected, condition) in [
            ("C=4\n[ -f x ] && C=1", "4", Some("[ -f x ]")),
            ("C=4\n[ -f x ] || { C=1; }", "4", Some("[ -f x ]")),
            ("C=4\n[ -f x ] && ((C/=2))", "4", Some("[ -f x ]")),
            ("C=4\nD=$(hostname)\nif $D; then C=1; fi", "4", Some("$(…)")),
            (
                "for B in *.json; do C=4; done\n[ $B = a ] && C=1",
                "4",
                Some("[ $B = a ]"),
            ),
            ("C=4\nif [ -f x ]; then C=1; fi", "4", Some("[ -f x ]")),
            (
                "if command -v x; then B=1; else B=2; fi\nC=$((B * 2))",
                "4",
                Some("command -v x"),
            ),
            ("C=4\nnvidia-smi || C=1", "4", Some("nvidia-smi")),
            (
                "S=$(hostname)\ncase $S in a*) C=1;; *) C=2;; esac",
                "2",
                Some("a*"),
            ),
            ("if [ -f x ]; then C=1; fi\nC=2", "2", None),
            ("C=4\nif [ -f x ]; then D=1; fi", "4", None),
            ("C=4\n[ -f x ] || exit 1", "4", None),
        ] {
            let mut all = vec![format!("--c={expected}")];
            all.extend(condition.map(|c| format!("condition={c}")));
            assert_eq!(options(script), all, "{script}");
        }
        let one = "if [ -f x ]; then\npython a.py --c 1\nelse\npython a.py --c 2\nfi\n";
        assert!(shown(one)[1].ends_with("condition=[ -f x ]"));
    }
}
