//! The help: the key table, grouped by place.

use super::keys::{Binding, Place, TABLE};

/// State of the help.
#[derive(Clone, Debug, Default)]
pub struct Help {
    /// First visible line.
    pub top: usize,
    /// Only lines that contain this text are shown.
    pub search: String,
    /// The place whose keys come first.
    pub here: Option<Place>,
}

/// A line of the help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HelpLine {
    /// A heading.
    Title(&'static str),
    /// Keys and what they do.
    Keys(String, &'static str),
    /// An empty line.
    Blank,
}

impl Help {
    /// Returns all lines that match the search: first those of the current place, then those that
    /// apply everywhere, then the rest.
    #[must_use]
    pub fn lines(&self) -> Vec<HelpLine> {
        let mut places: Vec<Place> = self.here.into_iter().collect();
        places.extend(Place::ALL.into_iter().filter(|p| Some(*p) != self.here));
        let search = self.search.to_lowercase();
        let fits = |b: &&Binding| {
            search.is_empty()
                || keys(b).to_lowercase().contains(&search)
                || b.help.to_lowercase().contains(&search)
                || b.place.title().to_lowercase().contains(&search)
        };
        let mut lines = Vec::new();
        for place in places {
            let of: Vec<&Binding> = TABLE
                .iter()
                .filter(|b| b.place == place)
                .filter(fits)
                .collect();
            if of.is_empty() {
                continue;
            }
            if !lines.is_empty() {
                lines.push(HelpLine::Blank);
            }
            lines.push(HelpLine::Title(place.title()));
            lines.extend(of.iter().map(|b| HelpLine::Keys(keys(b), b.help)));
        }
        lines
    }
}

fn keys(binding: &Binding) -> String {
    let all: Vec<String> = binding.chords.iter().map(|c| c.text()).collect();
    all.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_place_comes_first_and_the_search_narrows() {
        let mut help = Help {
            here: Some(Place::Sweep),
            ..Help::default()
        };
        assert_eq!(help.lines()[0], HelpLine::Title("Sweep"));
        let all = help.lines().len();
        assert!(all > TABLE.len());
        help.search = "critical".into();
        let found = help.lines();
        assert!(
            found.len() < 8
                && found
                    .iter()
                    .any(|l| matches!(l, HelpLine::Keys(k, _) if k == "c"))
        );
        help.search = "zzz".into();
        assert!(help.lines().is_empty());
    }
}
