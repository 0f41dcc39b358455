//! Conditions of `if`, `while` and lists: `[ … ]`, `[[ … ]]`, `((…))`.

use super::word::{Part, Word};
use super::{Shell, arithmetic, operand, pattern};

/// Maximum nesting of brackets.
const MAX_DEPTH: usize = 64;

/// Reads the words of a condition.
struct Reader<'s> {
    shell: &'s Shell,
    words: &'s [Word],
    depth: usize,
}

impl Shell {
    /// Returns whether a command is a test, so that its outcome follows from variables.
    pub(super) fn is_test(&self, words: &[Word]) -> bool {
        let first = words.first().and_then(Word::literal);
        match first {
            Some("!") => self.is_test(&words[1..]),
            Some("[" | "[[" | "((" | "test" | ":") => true,
            _ => self.constant(words).is_some(),
        }
    }

    /// Returns the outcome of `true` and `false`, which a variable can name.
    fn constant(&self, words: &[Word]) -> Option<bool> {
        let [word] = words else {
            return None;
        };
        match self.known(word)?.as_str() {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        }
    }

    /// Evaluates a condition such as `[[ "$A" == x ]] || [ -z "$B" ]`.
    ///
    /// Returns `None` if it depends on files, on the output of commands, or on whether commands
    /// succeed.
    pub(super) fn condition(&self, words: &[Word]) -> Option<bool> {
        let mut reader = Reader {
            shell: self,
            words,
            depth: 0,
        };
        reader.list(false)
    }

    /// Returns the text of a word in which variables without value are empty, as if the script was
    /// started without them. Returns `None` if it contains the output of a command or a variable of
    /// a loop.
    pub(super) fn known(&self, word: &Word) -> Option<String> {
        self.known_parts(&word.parts)
    }

    fn known_parts(&self, parts: &[Part]) -> Option<String> {
        let mut all = String::new();
        for part in parts {
            let text = self.joined(std::slice::from_ref(part));
            let text = match part {
                Part::Literal { .. } => text,
                Part::Variable { name, .. } if self.scope.loops.contains(name) => return None,
                Part::Variable { name, .. } if name == "#" || name == "?" => "0".to_owned(),
                _ => super::without_unset(&text)?,
            };
            all += &text;
        }
        Some(all)
    }

    /// Returns the pattern of some text, or `None` if its text is not known.
    pub(super) fn pattern(&self, parts: &[Part]) -> Option<Vec<pattern::Glob>> {
        let mut globs = Vec::new();
        for part in parts {
            match part {
                Part::Literal {
                    text,
                    quoted: false,
                } => pattern::unquoted(&mut globs, text),
                part => {
                    let text = self.known_parts(std::slice::from_ref(part))?;
                    pattern::quoted(&mut globs, &text);
                }
            }
        }
        Some(globs)
    }

    /// Evaluates `((…))`, in which variables without value are 0.
    fn holds_arithmetic(&self, text: &str) -> Option<bool> {
        let value = |inner: &str| {
            let text = self.known_parts(&[operand(inner)?])?;
            let text = text.trim();
            if text.is_empty() {
                Some(0)
            } else {
                text.parse().ok()
            }
        };
        arithmetic::evaluate(text, &value).map(|n| n != 0)
    }
}

impl<'s> Reader<'s> {
    fn is(&self, text: &str) -> bool {
        self.words.first().and_then(Word::literal) == Some(text)
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.is(text);
        if found {
            self.words = &self.words[1..];
        }
        found
    }

    /// Takes the words up to one of some operators.
    fn until(&mut self, ends: &[&str]) -> &'s [Word] {
        let is_end = |w: &Word| w.literal().is_some_and(|w| ends.contains(&w));
        let end = self.words.iter().position(is_end);
        let (taken, rest) = self.words.split_at(end.unwrap_or(self.words.len()));
        self.words = rest;
        taken
    }

    /// Reads commands with `&&`, `||` and `;` between them. Within `[[ ]]`, `&&` binds more.
    fn list(&mut self, in_brackets: bool) -> Option<bool> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            self.words = &[];
            return None;
        }
        let mut result = self.operand(in_brackets);
        loop {
            if self.take("&&") {
                let right = self.operand(in_brackets);
                result = and(result, right);
            } else if self.take("||") {
                let right = if in_brackets {
                    self.list(true)
                } else {
                    self.operand(false)
                };
                result = or(result, right);
            } else if !in_brackets && self.take(";") {
                if self.words.is_empty() || self.is("}") || self.is(")") {
                    break;
                }
                result = self.operand(false);
            } else {
                break;
            }
        }
        self.depth -= 1;
        result
    }

    fn operand(&mut self, in_brackets: bool) -> Option<bool> {
        const COMMAND: [&str; 5] = ["&&", "||", ";", "}", ")"];
        if self.take("!") {
            return self.operand(in_brackets).map(|holds| !holds);
        }
        if self.take("(") {
            let result = self.list(in_brackets);
            return self.take(")").then_some(result)?;
        }
        if in_brackets {
            let words = self.until(&["&&", "||", ")", "]]"]);
            return self.shell.test_words(words, true);
        }
        if self.take("[[") {
            let result = self.list(true);
            return self.take("]]").then_some(result)?;
        }
        if self.take("{") {
            let result = self.list(false);
            return self.take("}").then_some(result)?;
        }
        if self.take("((") {
            let text = self.words.first().and_then(Word::literal);
            let holds = text.and_then(|text| self.shell.holds_arithmetic(text));
            self.until(&["))"]);
            return self.take("))").then_some(holds)?;
        }
        if self.take("[") {
            let words = self.until(&["]"]);
            return self.take("]").then(|| self.shell.any_of(words))?;
        }
        let words = self.until(&COMMAND);
        let first = words.first().and_then(Word::literal);
        if words.iter().any(|w| w.literal() == Some("|")) {
            return None;
        }
        match first {
            Some("test") => self.shell.any_of(&words[1..]),
            Some(":") => Some(true),
            _ => self.shell.constant(words),
        }
    }
}

impl Shell {
    /// Evaluates the words of `[ … ]`, with `-a` and `-o` between tests.
    fn any_of(&self, words: &[Word]) -> Option<bool> {
        let is = |word: &Word, text: &str| word.literal() == Some(text);
        let any = words.split(|w| is(w, "-o"));
        any.map(|all| {
            let tests = all.split(|w| is(w, "-a"));
            tests
                .map(|test| self.test_words(test, false))
                .fold(Some(true), and)
        })
        .fold(Some(false), or)
    }

    /// Evaluates one test.
    fn test_words(&self, words: &[Word], in_brackets: bool) -> Option<bool> {
        let operator = |word: &Word| word.literal().map(str::to_owned);
        match words {
            [not, rest @ ..] if operator(not).as_deref() == Some("!") && !rest.is_empty() => {
                self.test_words(rest, in_brackets).map(|holds| !holds)
            }
            [] => Some(false),
            [text] => Some(!self.known(text)?.is_empty()),
            [op, text] => match operator(op)?.as_str() {
                "-z" => Some(self.known(text)?.is_empty()),
                "-n" => Some(!self.known(text)?.is_empty()),
                "-v" => Some(self.scope.variables.contains_key(&self.known(text)?)),
                // Tests of files.
                _ => None,
            },
            [a, op, b] => {
                let left = self.known(a)?;
                match operator(op)?.as_str() {
                    equal @ ("=" | "==" | "!=") => {
                        let same = if in_brackets {
                            pattern::matches(&self.pattern(&b.parts)?, &left)
                        } else {
                            left == self.known(b)?
                        };
                        Some(same == (equal != "!="))
                    }
                    // Texts are compared in the order of the C locale.
                    "<" => Some(left < self.known(b)?),
                    ">" => Some(left > self.known(b)?),
                    op => compare(&left, op, &self.known(b)?, in_brackets),
                }
            }
            _ => None,
        }
    }
}

/// Compares numbers. Variables without value are 0 within `[[ ]]`; elsewhere, the comparison fails.
fn compare(a: &str, op: &str, b: &str, in_brackets: bool) -> Option<bool> {
    let number = |text: &str| match text.trim() {
        "" => Some(0),
        text => text.parse::<i64>().ok(),
    };
    if !matches!(op, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le") {
        return None;
    }
    if !in_brackets && (a.is_empty() || b.is_empty()) {
        return Some(false);
    }
    let (a, b) = (number(a)?, number(b)?);
    Some(match op {
        "-eq" => a == b,
        "-ne" => a != b,
        "-gt" => a > b,
        "-ge" => a >= b,
        "-lt" => a < b,
        _ => a <= b,
    })
}

fn and(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

fn or(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), Some(false)) => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shown;

    /// The outcomes are those of bash 5.2, started without arguments and without the variable `U`.
    #[test]
    fn conditions_have_the_outcome_of_bash() {
        let script = |condition: &str| {
            format!(
                "A=x\nB=3\nif {condition}; then\nC=(--yes)\nelse\nC=(--no)\nfi\npython a.py ${{C[@]}}\n"
            )
        };
        for (condition, expected) in [
            ("[[ \"$A\" == \"x\" ]]", "--yes"),
            ("[ $A != x ] || [ $B -ge 3 ]", "--yes"),
            ("[ -z \"$A\" ] && [ $B -eq 3 ]", "--no"),
            ("[ ! -z \"$A\" ]", "--yes"),
            ("[ \"$A\" ]", "--yes"),
            ("[ \"$U\" ]", "--no"),
            ("[ \"$U\" = \"1\" ]", "--no"),
            ("[ \"${U}\" != \"1\" ]", "--yes"),
            ("[ $# -ne 0 ]", "--no"),
            ("(( B > 0 ))", "--yes"),
            ("(( U > 0 ))", "--no"),
            ("(( B * 2 == 6 && B ))", "--yes"),
            ("! (( B > 0 ))", "--no"),
            ("[[ $B > 0 ]]", "--yes"),
            ("[[ $B < 0 ]]", "--no"),
            ("[[ $B -gt 2 && ( $A == y || $A == x ) ]]", "--yes"),
            ("[[ $A == y || $A == x && $B -gt 5 ]]", "--no"),
            ("[[ $A == [a-w]* ]]", "--no"),
            ("[[ llama-8b == *\"8b\" ]]", "--yes"),
            ("[[ $A != *y* ]]", "--yes"),
            ("[ \"$A\" = x -a \"$B\" = 4 ]", "--no"),
            ("[ \"$A\" = y -o \"$B\" = 3 ]", "--yes"),
            ("test \"$A\" = x", "--yes"),
            (
                "[ \"$A\" = x ] && { [ \"$B\" = 2 ] || [ \"$B\" = 3 ]; }",
                "--yes",
            ),
            ("[ a = b ] && [ a = b ] || [ a = a ]", "--yes"),
            ("[ a = a ] || [ a = a ] && [ a = b ]", "--no"),
            ("true", "--yes"),
        ] {
            let shown = shown(&script(condition));
            assert_eq!(shown.len(), 1, "{condition}: {shown:?}");
            assert!(shown[0].contains(expected), "{condition}: {shown:?}");
        }
        // These count as false, and are reported.
        for condition in [
            "[ -f /etc/passwd ]",
            "[ ! -f /etc/passwd ]",
            "grep -q x y",
            "[[ $A =~ ^x ]]",
            "[ \"$(hostname)\" = a ]",
        ] {
            let shown = shown(&script(condition));
            assert!(shown[0].contains("--no"), "{condition}: {shown:?}");
            assert!(shown[1].contains("condition="), "{condition}: {shown:?}");
        }
    }
}
