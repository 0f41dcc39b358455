//! Interned texts: each is stored once.

use std::collections::HashMap;

/// Index of a text in [`Names`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameId(u32);

/// Texts by index, in the order of first occurrence.
#[derive(Clone, Debug, Default)]
pub struct Names {
    known: HashMap<Box<str>, NameId>,
    all: Vec<Box<str>>,
}

impl Names {
    /// Returns the index of a text.
    pub fn id(&mut self, text: &str) -> NameId {
        if let Some(&id) = self.known.get(text) {
            return id;
        }
        let id = NameId(self.all.len() as u32);
        self.known.insert(text.into(), id);
        self.all.push(text.into());
        id
    }

    /// Returns the index of a text as a number, for data that others read.
    pub(crate) fn number(&mut self, text: &str) -> u32 {
        self.id(text).0
    }

    /// Returns the text of an index returned by these names.
    #[must_use]
    pub fn get(&self, id: NameId) -> &str {
        &self.all[id.0 as usize]
    }

    /// Returns the number of texts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether there are no texts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the result of a function for each text, by index.
    pub(crate) fn map<T>(&self, of: impl Fn(&str) -> T) -> Vec<T> {
        self.all.iter().map(|text| of(text)).collect()
    }
}

impl NameId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}
