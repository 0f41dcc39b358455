//! Patterns of `case` and of `[[ a == pattern ]]`.

/// A part of a pattern.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Glob {
    /// A character that stands for itself.
    Char(char),
    /// `?`: any character.
    One,
    /// `*`: any text.
    Any,
    /// `[a-z]`: a character of some ranges, or with `!` or `^`, of none.
    Set(Vec<(char, char)>, bool),
}

/// Adds the parts of quoted text, which stands for itself.
pub(super) fn quoted(parts: &mut Vec<Glob>, text: &str) {
    parts.extend(text.chars().map(Glob::Char));
}

/// Adds the parts of unquoted text.
pub(super) fn unquoted(parts: &mut Vec<Glob>, text: &str) {
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '?' => parts.push(Glob::One),
            '*' if parts.last() == Some(&Glob::Any) => {}
            '*' => parts.push(Glob::Any),
            '[' => match set(rest) {
                Some((part, after)) => {
                    parts.push(part);
                    rest = after;
                }
                None => parts.push(Glob::Char(c)),
            },
            _ => parts.push(Glob::Char(c)),
        }
    }
}

/// Reads a set up to its closing bracket, and returns the text after it.
fn set(text: &str) -> Option<(Glob, &str)> {
    let (negated, text) = match text.strip_prefix(['!', '^']) {
        Some(text) => (true, text),
        None => (false, text),
    };
    // A bracket that comes first is a member.
    let skip = usize::from(text.starts_with(']'));
    let end = skip + text.get(skip..)?.find(']')?;
    let members: Vec<char> = text[..end].chars().collect();
    let mut ranges = Vec::new();
    let mut rest = members.as_slice();
    while let [first, after @ ..] = rest {
        rest = match after {
            ['-', last, after @ ..] => {
                ranges.push((*first, *last));
                after
            }
            _ => {
                ranges.push((*first, *first));
                after
            }
        };
    }
    (!ranges.is_empty()).then(|| (Glob::Set(ranges, negated), &text[end + 1..]))
}

/// Returns whether a whole text matches a pattern. Takes time proportional to the product of the
/// lengths.
pub(super) fn matches(parts: &[Glob], text: &str) -> bool {
    let text: Vec<char> = text.chars().collect();
    let (mut part, mut at) = (0, 0);
    // Where to resume if the text after the last `*` does not match.
    let mut retry: Option<(usize, usize)> = None;
    while at < text.len() {
        match parts.get(part) {
            Some(Glob::Any) => {
                retry = Some((part + 1, at));
                part += 1;
                continue;
            }
            Some(one) if one.accepts(text[at]) => {
                part += 1;
                at += 1;
                continue;
            }
            _ => {}
        }
        let Some((after, from)) = retry else {
            return false;
        };
        retry = Some((after, from + 1));
        (part, at) = (after, from + 1);
    }
    parts[part..].iter().all(|p| *p == Glob::Any)
}

impl Glob {
    fn accepts(&self, c: char) -> bool {
        match self {
            Self::Char(own) => *own == c,
            Self::One => true,
            Self::Any => false,
            Self::Set(ranges, negated) => {
                ranges.iter().any(|(a, b)| (*a..=*b).contains(&c)) != *negated
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_texts() {
        for (pattern, text, expected) in [
            ("8b", "8b", true),
            ("8b", "8bx", false),
            ("*", "", true),
            ("*-8B*", "Llama-3.1-8B-Instruct", true),
            ("*-8B", "Llama-3.1-8B-Instruct", false),
            ("?b", "8b", true),
            ("[0-9]b", "8b", true),
            ("[!0-9]b", "8b", false),
            ("[Yy]*", "yes", true),
            ("[]x]", "]", true),
            ("[", "[", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
        ] {
            let mut parts = Vec::new();
            unquoted(&mut parts, pattern);
            assert_eq!(matches(&parts, text), expected, "{pattern} {text}");
        }
        let mut parts = Vec::new();
        quoted(&mut parts, "*");
        assert!(matches(&parts, "*") && !matches(&parts, "x"));
    }
}
