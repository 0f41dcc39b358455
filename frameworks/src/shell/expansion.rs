//! Expansions of variables in braces: `${B[2]}`, `${X##*/}`, `${X/a/b}`, `${X,,}`, `${#X}`.

use super::word::{Part, Word};
use super::{MAX_OPERAND, MAX_TEXT, Shell, Text, is_empty, pattern};

/// Maximum length of a text that patterns are searched in, in bytes: that takes quadratic time.
const MAX_SEARCHED: usize = 4096;

/// Text of an expansion whose value is not known.
const UNKNOWN: &str = "$(…)";

/// The elements of a variable that an expansion gives.
#[derive(Debug)]
pub(super) enum Elements {
    All,
    /// The element of an index or a key.
    One(Vec<Part>),
}

/// What an expansion does with the value of its variable.
#[derive(Debug)]
pub(super) enum Operation {
    /// `${X:-word}`, or with `:=`, which assigns the word too.
    Default { word: Vec<Part>, assigns: bool },
    /// `${X:+word}`
    Alternative(Vec<Part>),
    /// `${X#pattern}`, `${X%pattern}`, and with two signs, the longest match.
    Trim {
        end: End,
        longest: bool,
        pattern: Vec<Part>,
    },
    /// `${X/pattern/text}`
    Replace {
        matches: Matches,
        pattern: Vec<Part>,
        with: Vec<Part>,
    },
    /// `${X,,}` or `${X^}`
    Case { upper: bool, all: bool },
    /// `${X:offset:length}`
    Substring {
        offset: String,
        length: Option<String>,
    },
    /// `${#X}`: of a text its characters, of an array its elements.
    Length,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Front,
    Back,
}

/// Which matches of a pattern are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matches {
    First,
    All,
    /// The match at one end of the text.
    At(End),
}

impl Operation {
    /// Returns the words that an operation contains.
    pub(super) fn parts(&self) -> impl Iterator<Item = &Part> {
        let (one, two): (&[Part], &[Part]) = match self {
            Self::Default { word, .. } | Self::Alternative(word) => (word, &[]),
            Self::Trim { pattern, .. } => (pattern, &[]),
            Self::Replace { pattern, with, .. } => (pattern, with),
            Self::Case { .. } | Self::Substring { .. } | Self::Length => (&[], &[]),
        };
        one.iter().chain(two)
    }
}

impl Shell {
    /// Returns the text of an expansion. A variable without value stays a variable, and an
    /// operation on a value that is not known has none.
    pub(super) fn expansion(
        &self,
        name: &str,
        elements: &Elements,
        operation: Option<&Operation>,
    ) -> String {
        let values = self.elements(name, elements);
        let text = || -> Option<String> {
            let texts: Vec<&str> = values?.iter().map(|t| t.text.as_str()).collect();
            Some(texts.join(" "))
        };
        match operation {
            None => text().unwrap_or_else(|| self.without_value(name, elements)),
            Some(Operation::Default { word, .. }) => match text() {
                Some(text) if !is_empty(&text) => text,
                _ => self.joined(word),
            },
            Some(Operation::Alternative(word)) => match text() {
                Some(text) if !is_empty(&text) => self.joined(word),
                _ => String::new(),
            },
            Some(Operation::Length) => match (values, elements) {
                (Some(values), Elements::All) if values.len() != 1 => values.len().to_string(),
                (None, _) => "0".to_owned(),
                _ => match text() {
                    Some(text) if !text.contains('$') => text.chars().count().to_string(),
                    _ => UNKNOWN.to_owned(),
                },
            },
            // Operations on arrays apply to each element.
            Some(_) if values.is_some_and(|values| values.len() > 1) => UNKNOWN.to_owned(),
            Some(operation) => match text() {
                None => self.without_value(name, elements),
                Some(text) if is_empty(&text) => text,
                Some(text) if text.contains('$') => UNKNOWN.to_owned(),
                Some(text) => {
                    let changed = self.changed(&text, operation);
                    changed.unwrap_or_else(|| UNKNOWN.to_owned())
                }
            },
        }
    }

    /// Returns the values of a variable, or of one of its elements.
    pub(super) fn elements(&self, name: &str, elements: &Elements) -> Option<&[Text]> {
        let index = match elements {
            Elements::All => return Some(self.scope.variables.get(name)?),
            Elements::One(index) => self.joined(index),
        };
        if let Some(element) = self.scope.variables.get(&element(name, &index)) {
            return Some(element);
        }
        let values = self.scope.variables.get(name)?;
        if index.len() > MAX_OPERAND {
            return None;
        }
        let index: i64 = self.arithmetic(&index).parse().ok()?;
        let count = i64::try_from(values.len()).ok()?;
        let index = if index < 0 { index + count } else { index };
        Some(std::slice::from_ref(
            values.get(usize::try_from(index).ok()?)?,
        ))
    }

    /// Returns the text for a variable without value.
    fn without_value(&self, name: &str, elements: &Elements) -> String {
        match elements {
            Elements::One(_) if self.scope.variables.contains_key(name) => UNKNOWN.to_owned(),
            _ => format!("${name}"),
        }
    }

    fn changed(&self, text: &str, operation: &Operation) -> Option<String> {
        match operation {
            Operation::Trim {
                end,
                longest,
                pattern,
            } => self.trimmed(text, *end, *longest, pattern),
            Operation::Replace {
                matches,
                pattern,
                with,
            } => self.replaced(text, *matches, pattern, &self.joined(with)),
            Operation::Case { upper, all } => {
                let convert = |text: &str| match upper {
                    true => text.to_uppercase(),
                    false => text.to_lowercase(),
                };
                let first = text.chars().next().map_or(0, char::len_utf8);
                let (changed, rest) = text.split_at(if *all { text.len() } else { first });
                Some(convert(changed) + rest)
            }
            Operation::Substring { offset, length } => {
                let count = i64::try_from(text.chars().count()).ok()?;
                let number = |text: &str| self.arithmetic(text).parse::<i64>().ok();
                let from_end = |n: i64| if n < 0 { n.saturating_add(count) } else { n };
                let start = from_end(number(offset)?);
                let end = match length {
                    None => count,
                    Some(length) => match number(length)? {
                        n if n < 0 => from_end(n),
                        n => start.saturating_add(n),
                    },
                };
                let skip = usize::try_from(start).ok()?;
                let take = usize::try_from(end.saturating_sub(start)).ok()?;
                Some(text.chars().skip(skip).take(take).collect())
            }
            Operation::Default { .. } | Operation::Alternative(_) | Operation::Length => None,
        }
    }

    fn trimmed(&self, text: &str, end: End, longest: bool, pattern: &[Part]) -> Option<String> {
        let globs = self.pattern(pattern)?;
        let mut cuts = cuts(text)?;
        // The longest match at the front ends last, that at the back starts first.
        if (end == End::Front) == longest {
            cuts.reverse();
        }
        let found = cuts.into_iter().find_map(|at| {
            let (front, back) = text.split_at(at);
            let (matched, kept) = match end {
                End::Front => (front, back),
                End::Back => (back, front),
            };
            pattern::matches(&globs, matched).then_some(kept)
        });
        Some(found.unwrap_or(text).to_owned())
    }

    fn replaced(
        &self,
        text: &str,
        matches: Matches,
        pattern: &[Part],
        with: &str,
    ) -> Option<String> {
        let globs = self.pattern(pattern)?;
        let cuts = cuts(text)?;
        let mut all = String::new();
        let mut at = 0;
        for start in cuts.iter().copied().filter(|c| *c < text.len()) {
            if start < at {
                continue;
            }
            let longest = cuts.iter().rev().copied().take_while(|end| *end > start);
            let mut allowed = longest.filter(|end| match matches {
                Matches::At(End::Front) => start == 0,
                Matches::At(End::Back) => *end == text.len(),
                Matches::First | Matches::All => true,
            });
            let Some(end) = allowed.find(|end| pattern::matches(&globs, &text[start..*end])) else {
                continue;
            };
            all += &text[at..start];
            all += with;
            at = end;
            if matches != Matches::All || all.len() > MAX_TEXT {
                break;
            }
        }
        all += &text[at..];
        Some(all)
    }

    /// Assigns the elements of `NAME=([key]=value)`, and removes them from the values of the array.
    pub(super) fn assign_elements(&mut self, name: &str, appends: bool, values: &mut Vec<Text>) {
        if !appends {
            let start = element(name, "");
            let start = start.trim_end_matches(']');
            self.scope.variables.retain(|n, _| !n.starts_with(start));
        }
        values.retain(|value| {
            let keyed = value
                .text
                .strip_prefix('[')
                .and_then(|t| t.split_once("]="));
            let Some((key, text)) = keyed else {
                return true;
            };
            let (text, at) = (text.to_owned(), value.at);
            let name = element(name, key);
            self.scope.variables.insert(name, vec![Text { text, at }]);
            false
        });
    }

    /// Assigns the words of `${X:=word}` to variables without value, as the command does that has
    /// these parts.
    pub(super) fn assign_defaults(&mut self, words: &[Word]) {
        for word in words {
            let assignment = word.assignment.as_ref();
            let value = assignment.map_or(&[][..], |a| a.value.as_slice());
            for part in word.parts.iter().chain(value) {
                let Part::Variable {
                    name,
                    operation:
                        Some(Operation::Default {
                            word: default,
                            assigns: true,
                        }),
                    ..
                } = part
                else {
                    continue;
                };
                let text = self.joined(std::slice::from_ref(part));
                let doubt = self.doubt_of(default).cloned();
                if let Some(doubt) = doubt {
                    self.scope.doubtful.entry(name.clone()).or_insert(doubt);
                }
                let at = word.at;
                self.scope
                    .variables
                    .insert(name.clone(), vec![Text { text, at }]);
            }
        }
    }
}

/// Returns the name under which an element of an array is stored that is assigned by itself.
fn element(name: &str, index: &str) -> String {
    format!("{name}[{index}]")
}

/// Returns the places at which a text can be cut, or `None` if it is too long to be searched.
fn cuts(text: &str) -> Option<Vec<usize>> {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    (text.len() <= MAX_SEARCHED).then(|| std::iter::once(0).chain(ends).collect())
}

#[cfg(test)]
mod tests {
    use super::super::flow::tests::options;

    /// The values are those of bash 5.2.
    #[test]
    fn expansions_are_those_of_bash() {
        for (script, expected) in EXPANSIONS {
            assert_eq!(options(script), [format!("--c={expected}")], "{script}");
        }
    }

    const EXPANSIONS: [(&str, &str); 44] = [
        ("X=meta-llama/Llama-3.1-8B; C=${X##*/}", "Llama-3.1-8B"),
        ("X=a_b_7B; C=${X##*_}", "7B"),
        ("X=a_b_7B; C=${X#*_}", "b_7B"),
        ("X=a_b_7B; C=${X%_*}", "a_b"),
        ("X=a_b_7B; C=${X%%_*}", "a"),
        ("X=a_b_7B; C=${X%x}", "a_b_7B"),
        ("X=run.tar.gz; C=${X%.tar.gz}", "run"),
        ("S=.sh; X=a.sh; C=${X%$S}", "a"),
        ("S='*'; X='a*'; C=${X%\"$S\"}", "a"),
        ("X=a/b/c; C=${X/\\//-}", "a-b/c"),
        ("X=a/b/c; C=${X//\\//-}", "a-b-c"),
        ("X=0,1,2,3; Y=${X//,/}; C=${#Y}", "4"),
        ("X=0,1,2,3; Y=${X//[^,]}; C=$((${#Y} + 1))", "4"),
        ("X=abcabc; C=${X/#abc/x}", "xabc"),
        ("X=abcabc; C=${X/%abc/x}", "abcx"),
        ("X=abcabc; C=${X/b*/x}", "ax"),
        ("X=ZeRO; C=${X,,}", "zero"),
        ("X=bf16; C=${X^^}", "BF16"),
        ("X=adam; C=${X^}", "Adam"),
        ("X=Adam; C=${X,}", "adam"),
        ("X=llama-8b; C=${X:6}", "8b"),
        ("X=llama-8b; C=${X:0:5}", "llama"),
        ("X=llama-8b; C=${X: -2}", "8b"),
        ("X=llama-8b; C=${X:6:-1}", "8"),
        ("B=(1 2 4 8); C=${B[2]}", "4"),
        ("B=(1 2 4 8); C=${B[-1]}", "8"),
        ("B=(1 2 4 8); I=1; C=${B[$I]}", "2"),
        ("B=(1 2 4 8); I=1; C=${B[I+1]}", "4"),
        ("B=(1 2 4 8); C=${#B[@]}", "4"),
        ("B=(1 2); B[1]=7; C=${B[1]}", "7"),
        ("declare -A M=([7b]=4 [13b]=2); S=13b; C=${M[$S]}", "2"),
        ("declare -A M; M[7b]=4; C=${M[7b]}", "4"),
        (": ${C:=4}", "4"),
        ("C=2; : ${C:=4}", "2"),
        (": \"${C:=4}\"", "4"),
        ("X=${C:=4}", "4"),
        ("X=1; C=${X:+5}", "5"),
        ("C=3${X:+5}", "3"),
        ("read C <<< 4", "4"),
        ("X='1 2 3'; read -r A B <<< \"$X\"; C=${B/ /-}", "2-3"),
        ("IFS=, read -r A C D <<< 1,2,3", "2"),
        ("IFS=',' read -r -a G <<< \"0,1,2\"; C=${#G[@]}", "3"),
        ("C=4; (C=1; unset C)", "4"),
        ("C=4; (cd / && C=1) && D=1", "4"),
    ];
}
