//! Finds repetitions in lists of statements: loops, and parts that several places share.

use std::collections::{BTreeSet, HashMap};

/// Number of a statement, a loop or a shared part.
pub(super) type Id = u32;

/// Meaning of a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Symbol {
    /// A statement.
    Line(String),
    /// A body and the number of its repetitions.
    Repeat(u32, Vec<Id>),
    /// A part that occurs in several places.
    Block(Vec<Id>),
}

/// Maximum number of earlier occurrences of a symbol that are considered for a loop. A loop's body
/// must contain a symbol that occurs in it at most this many times.
const HOPS: usize = 8;
/// Minimum number of characters that sharing a part must save.
const MIN_SAVED: usize = 30;
/// Minimum length of a shared part, in characters: shorter ones are easier to read than a
/// reference.
const MIN_PART: usize = 48;
/// Number of characters for the definition of a part: its title, and a line that is not full.
const TITLE: usize = 60;
/// Length of a reference to a part, in characters.
const REFERENCE: usize = 8;
/// Maximum length in symbols of a text that is searched for shared parts.
const MAX_SYMBOLS: usize = 20_000;

/// All symbols of an outline.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    all: Vec<Symbol>,
    ids: HashMap<Symbol, Id>,
}

impl Symbols {
    /// Returns the number of a symbol. Equal symbols have equal numbers.
    pub(super) fn id(&mut self, symbol: Symbol) -> Id {
        if let Some(id) = self.ids.get(&symbol) {
            return *id;
        }
        let id = self.all.len() as Id;
        self.all.push(symbol.clone());
        self.ids.insert(symbol, id);
        id
    }

    pub(super) fn get(&self, id: Id) -> &Symbol {
        &self.all[id as usize]
    }

    /// Folds adjacent repetitions into loops, shortest bodies first, so that equal lists fold the
    /// same way wherever they occur. If there is a choice, the loop's body starts with a statement
    /// that `first` accepts.
    pub(super) fn fold(&mut self, mut list: Vec<Id>, first: impl Fn(&str) -> bool) -> Vec<Id> {
        while let Some(length) = shortest(&list, self.all.len()) {
            let mut folded = Vec::with_capacity(list.len());
            let mut end = 0;
            for (start, matched) in runs(&list, length) {
                // Skips the symbols that the previous loop consumed.
                let stop = start + matched;
                let start = start.max(end);
                let matched = stop.saturating_sub(start);
                if matched < length {
                    continue;
                }
                let is_first = |i: usize| match self.get(list[i]) {
                    Symbol::Line(text) => first(text),
                    _ => false,
                };
                let spare = matched % length;
                let start = (start..=start + spare)
                    .find(|i| is_first(*i))
                    .unwrap_or(start);
                let times = matched / length + 1;
                folded.extend(&list[end..start]);
                let body = list[start..start + length].to_vec();
                folded.push(self.id(Symbol::Repeat(times as u32, body)));
                end = start + length * times;
            }
            folded.extend(&list[end..]);
            list = folded;
        }
        list
    }

    /// Turns parts that occur more than once in these lists, or in the bodies of their loops, into
    /// blocks. Parts that save the most text come first.
    pub(super) fn share(&mut self, lists: &mut [Vec<Id>]) {
        loop {
            let inner = self.reachable(lists);
            let bodies = inner.iter().map(|id| self.body(*id).to_vec());
            let all: Vec<Vec<Id>> = lists.iter().cloned().chain(bodies).collect();
            if all.iter().map(Vec::len).sum::<usize>() > MAX_SYMBOLS {
                return;
            }
            let Some(part) = self.best(&all) else {
                return;
            };
            let block = self.all.len() as Id;
            self.all.push(Symbol::Block(part.clone()));
            for list in lists.iter_mut() {
                *list = replaced(list, &part, block);
            }
            for id in inner {
                let body = replaced(self.body(id), &part, block);
                match &mut self.all[id as usize] {
                    Symbol::Repeat(_, old) | Symbol::Block(old) => *old = body,
                    Symbol::Line(_) => {}
                }
            }
        }
    }

    fn body(&self, id: Id) -> &[Id] {
        match self.get(id) {
            Symbol::Line(_) => &[],
            Symbol::Repeat(_, body) | Symbol::Block(body) => body,
        }
    }

    /// Returns the loops and blocks reachable from the lists, without duplicates.
    fn reachable(&self, lists: &[Vec<Id>]) -> Vec<Id> {
        let mut seen = BTreeSet::new();
        let mut todo: Vec<Id> = lists.iter().flatten().copied().collect();
        while let Some(id) = todo.pop() {
            if !matches!(self.get(id), Symbol::Line(_)) && seen.insert(id) {
                todo.extend(self.body(id));
            }
        }
        seen.into_iter().collect()
    }

    /// Returns the length of a symbol's text in characters.
    fn width(&self, id: Id) -> usize {
        match self.get(id) {
            Symbol::Line(text) => text.len() + 2,
            Symbol::Repeat(_, body) => 6 + body.iter().map(|i| self.width(*i)).sum::<usize>(),
            Symbol::Block(_) => REFERENCE,
        }
    }

    /// Returns the part with the largest savings.
    fn best(&self, lists: &[Vec<Id>]) -> Option<Vec<Id>> {
        // Concatenate the lists; each ends with a unique number.
        let mut text: Vec<u64> = Vec::new();
        for (i, list) in lists.iter().enumerate() {
            text.extend(list.iter().map(|id| u64::from(*id)));
            text.push(u64::MAX - i as u64);
        }
        let mut before = vec![0usize; text.len() + 1];
        for (i, t) in text.iter().enumerate() {
            let width = Id::try_from(*t).map_or(0, |id| self.width(id));
            before[i + 1] = before[i] + width;
        }
        let mut order: Vec<usize> = (0..text.len()).collect();
        order.sort_by(|a, b| text[*a..].cmp(&text[*b..]));
        let common = |a: usize, b: usize| {
            let pairs = text[a..].iter().zip(&text[b..]);
            pairs.take_while(|(x, y)| x == y).count()
        };
        let mut best: Option<(usize, usize, usize)> = None;
        // Intervals of suffixes with a common prefix: the start of each, and the length of the
        // prefix.
        let mut open: Vec<(usize, usize)> = Vec::new();
        for i in 0..order.len() {
            let length = match order.get(i + 1) {
                Some(next) => common(order[i], *next),
                None => 0,
            };
            let mut from = i;
            while let Some((start, known)) = open.last().copied() {
                if known <= length {
                    break;
                }
                open.pop();
                from = start;
                let width = before[order[start] + known] - before[order[start]];
                let most = saved(i + 1 - start, width);
                if width < MIN_PART || most < MIN_SAVED || best.is_some_and(|(s, ..)| most <= s) {
                    continue;
                }
                let times = apart(&order[start..=i], known);
                let saved = saved(times, width);
                if saved >= MIN_SAVED && best.is_none_or(|(s, ..)| saved > s) {
                    best = Some((saved, order[start], known));
                }
            }
            if length > 0 && open.last().is_none_or(|(_, known)| *known < length) {
                open.push((from, length));
            }
        }
        let (_, start, length) = best?;
        let part = text[start..start + length].iter();
        Some(part.map(|t| *t as Id).collect())
    }
}

/// Returns the number of characters saved by sharing a part of this width that occurs `times`
/// times.
fn saved(times: usize, width: usize) -> usize {
    (times.saturating_sub(1) * width).saturating_sub(times * REFERENCE + TITLE)
}

/// Returns the number of these places that do not overlap.
fn apart(places: &[usize], length: usize) -> usize {
    let mut places = places.to_vec();
    places.sort_unstable();
    let (mut times, mut end) = (0, 0);
    for place in places {
        if place >= end {
            times += 1;
            end = place + length;
        }
    }
    times
}

fn replaced(list: &[Id], part: &[Id], by: Id) -> Vec<Id> {
    let mut out = Vec::with_capacity(list.len());
    let mut i = 0;
    while i < list.len() {
        if list[i..].starts_with(part) {
            out.push(by);
            i += part.len();
        } else {
            out.push(list[i]);
            i += 1;
        }
    }
    out
}

/// Returns the shortest length of a part that occurs twice in a row. Symbols are below `symbols`.
fn shortest(list: &[Id], symbols: usize) -> Option<usize> {
    const NONE: usize = usize::MAX;
    let mut last = vec![NONE; symbols];
    let mut before = vec![NONE; list.len()];
    // The position up to which each length has been searched.
    let mut seen = vec![0; list.len() / 2 + 1];
    let mut least: Option<usize> = None;
    for (i, id) in list.iter().enumerate() {
        before[i] = std::mem::replace(&mut last[*id as usize], i);
        let mut j = before[i];
        for _ in 0..HOPS {
            if j == NONE || least.is_some_and(|l| i - j >= l) || i - j >= seen.len() {
                break;
            }
            let length = i - j;
            if i >= seen[length] {
                let again = |k: &usize| list[*k] == list[*k - length];
                let back = (length..i).rev().take_while(again).count();
                let on = (i..list.len()).take_while(again).count();
                seen[length] = i + on;
                if back + on >= length {
                    least = Some(length);
                    break;
                }
            }
            j = before[j];
        }
    }
    least
}

/// Returns where symbols repeat after `length` positions, in order: the start of each run, and its
/// length.
fn runs(list: &[Id], length: usize) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    let mut i = 0;
    while i + length < list.len() {
        let start = i;
        while i + length < list.len() && list[i] == list[i + length] {
            i += 1;
        }
        if i - start >= length {
            all.push((start, i - start));
        }
        i += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(words: &[&str]) -> (Symbols, Vec<Id>) {
        let mut symbols = Symbols::default();
        let list = words
            .iter()
            .map(|w| symbols.id(Symbol::Line((*w).to_owned())));
        let list = list.collect();
        let list = symbols.fold(list, |text| text.starts_with('='));
        (symbols, list)
    }

    fn shown(symbols: &Symbols, list: &[Id]) -> String {
        let words: Vec<String> = list
            .iter()
            .map(|id| match symbols.get(*id) {
                Symbol::Line(text) => text.clone(),
                Symbol::Repeat(n, body) => format!("{n}({})", shown(symbols, body)),
                Symbol::Block(body) => format!("[{}]", shown(symbols, body)),
            })
            .collect();
        words.join(" ")
    }

    #[test]
    fn loops_are_found_at_every_level() {
        for (words, expected) in [
            ("a a a b", "3(a) b"),
            ("a b a b c a b a b c", "2(2(a b) c)"),
            ("x a b a b a", "x 2(a b) a"),
            ("d c d c b c b e", "2(d c) b c b e"),
            // A body starts with a heading if that costs nothing.
            ("a =h b a =h b a", "a 2(=h b a)"),
            ("a b c d", "a b c d"),
        ] {
            let words: Vec<&str> = words.split(' ').collect();
            let (symbols, list) = folded(&words);
            assert_eq!(shown(&symbols, &list), expected);
        }
    }

    /// Layers that are partly equal: the equal parts fold the same way, for any number of layers.
    #[test]
    fn depth_does_not_lengthen_a_folded_list() {
        for layers in [2, 500] {
            let mut words = vec!["start"];
            for _ in 0..layers {
                words.extend([
                    "=layer", "gather", "gather", "gather", "mm", "add", "mm", "add",
                ]);
            }
            let (symbols, list) = folded(&words);
            let expected = format!("start {layers}(=layer 3(gather) 2(mm add))");
            assert_eq!(shown(&symbols, &list), expected);
        }
    }

    #[test]
    fn parts_of_several_places_are_written_once() {
        let long = "a part that is long enough to be worth a name of its own in the text";
        let words = ["x", long, "y", "z", long, "y", "w"];
        let (mut symbols, list) = folded(&words);
        let mut lists = [list];
        symbols.share(&mut lists);
        assert_eq!(
            shown(&symbols, &lists[0]),
            "x a part that is long enough to be worth a name of its own in the text y z a part that is long enough to be worth a name of its own in the text y w"
        );
        let words = [
            "x", long, long, "y", "z", long, long, "y", "q", long, long, "y", "w",
        ];
        let (mut symbols, list) = folded(&words);
        let mut lists = [list];
        symbols.share(&mut lists);
        assert_eq!(
            shown(&symbols, &lists[0]),
            format!("x [2({long}) y] z [2({long}) y] q [2({long}) y] w")
        );
    }
}
