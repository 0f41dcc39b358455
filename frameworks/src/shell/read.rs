//! `read NAME … <<< text`, which splits a text into variables.

use super::word::Word;
use super::{Shell, Text};

impl Shell {
    /// Assigns the fields of the text of `read NAME … <<< text`, and returns whether a command is
    /// one. `unknown` is a condition around it that could not be evaluated.
    pub(super) fn read(&mut self, words: &[Word], unknown: Option<&Text>) -> bool {
        let assigned = words.iter().take_while(|w| w.assignment.is_some()).count();
        let (environment, command) = words.split_at(assigned);
        let [first, arguments @ .., mark, source] = command else {
            return false;
        };
        if first.literal() != Some("read") || mark.literal() != Some("<<<") {
            return false;
        }
        let separators = environment.iter().filter_map(|w| w.assignment.as_ref());
        let separators = separators.filter(|a| a.name == "IFS");
        let separators = separators.map(|a| self.joined(&a.value)).next_back();
        let separators = separators.unwrap_or_else(|| " \t\n".to_owned());
        let (names, is_array) = names(arguments);
        let (text, at) = (self.joined(&source.parts), source.at);
        let doubt = unknown.or_else(|| self.doubt(source)).cloned();
        let fields = match (text.contains('$'), names.len()) {
            (true, 1) => vec![text.as_str()],
            (true, count) => vec!["$(…)"; count],
            (false, _) if is_array => fields(&text, &separators, usize::MAX),
            (false, count) => fields(&text, &separators, count),
        };
        let fields: Vec<Text> = fields
            .into_iter()
            .map(|text| Text {
                text: text.to_owned(),
                at,
            })
            .collect();
        for (i, name) in names.into_iter().enumerate() {
            self.scope.doubtful.remove(name);
            if let Some(doubt) = &doubt {
                self.scope.doubtful.insert(name.to_owned(), doubt.clone());
            }
            let values = if is_array {
                fields.clone()
            } else {
                let text = String::new();
                vec![fields.get(i).cloned().unwrap_or(Text { text, at })]
            };
            self.scope.variables.insert(name.to_owned(), values);
        }
        true
    }
}

/// Returns the names among the arguments of `read`, and whether they are of an array.
fn names(arguments: &[Word]) -> (Vec<&str>, bool) {
    let mut is_array = false;
    let mut names = Vec::new();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.literal() {
            Some(option) if option.starts_with('-') => {
                is_array |= option.contains('a');
                // These options have a value.
                if option.ends_with(['d', 'i', 'n', 'N', 'p', 't', 'u']) {
                    words.next();
                }
            }
            Some(name) => names.push(name),
            None => {}
        }
    }
    (names, is_array)
}

/// Splits a text into at most `count` fields, the last of which is the rest.
fn fields<'t>(text: &'t str, separators: &str, count: usize) -> Vec<&'t str> {
    let is_blank = |c: char| c.is_whitespace() && separators.contains(c);
    let is_separator = |c: char| separators.contains(c);
    let mut rest = text.trim_matches(is_blank);
    let mut all = Vec::new();
    while !rest.is_empty() && all.len() < count {
        let end = rest.find(is_separator).unwrap_or(rest.len());
        if all.len() + 1 == count || end == rest.len() {
            all.push(rest);
            break;
        }
        all.push(&rest[..end]);
        // Blanks around another separator belong to it.
        rest = rest[end..].trim_start_matches(is_blank);
        if let Some(c) = rest.chars().next().filter(|c| is_separator(*c)) {
            rest = rest[c.len_utf8()..].trim_start_matches(is_blank);
        }
    }
    all
}
