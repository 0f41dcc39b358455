//! Limits the size of a store: the oldest unnamed runs are removed to make room for new ones.

use super::error::StoreError;
use super::id::Id;
use super::{Entry, Store, names_in};
use shardlab_plan::record::RunKind;
use shardlab_plan::scenario::parse_bytes;
use shardlab_plan::units::Bytes;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;

/// Percentage of the cap that remains used after removing runs, so that not every save has to
/// remove one.
const ROOM: u64 = 90;

/// Maximum number of runs and bytes of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap {
    /// Number of runs.
    pub runs: usize,
    /// Size of their files.
    pub bytes: Bytes,
}

impl Default for Cap {
    fn default() -> Self {
        Self {
            runs: 500,
            bytes: Bytes(2 << 30),
        }
    }
}

impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} runs or {}", self.runs, self.bytes)
    }
}

impl Cap {
    /// Parses `RUNS`, `SIZE` or `RUNS,SIZE`, for example `200,1GiB`; `off` means no cap. A missing
    /// part keeps its default.
    ///
    /// # Errors
    /// Fails if the text has none of these forms.
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        if text == "off" {
            return Ok(None);
        }
        let mut cap = Self::default();
        for part in text.split(',').map(str::trim) {
            if let Ok(runs @ 1..) = part.parse() {
                cap.runs = runs;
            } else if let Some(bytes @ 1..) = parse_bytes(part) {
                cap.bytes = Bytes(bytes);
            } else {
                return Err(format!(
                    "`{text}`: a number of runs, a size or both are expected, for example 200,1GiB, or off"
                ));
            }
        }
        Ok(Some(cap))
    }
}

impl Store {
    /// Removes the oldest unnamed runs until the store is well below the cap, and returns the
    /// number of removed runs. Predictions are removed before measurements, which are more
    /// expensive to repeat. The run `newest`, which has just been saved, is kept.
    ///
    /// # Errors
    /// Fails if the folder cannot be read or a run cannot be removed.
    pub fn enforce(&self, cap: Cap, newest: &Id) -> Result<usize, StoreError> {
        let ids = self.ids()?;
        let mut runs = ids.len();
        let mut bytes: u64 = ids.iter().map(|id| size(&self.path(id))).sum();
        if runs <= cap.runs && bytes <= cap.bytes.0 {
            return Ok(0);
        }
        let named: BTreeSet<Id> = self.names()?.into_iter().map(|(_, id)| id).collect();
        let mut oldest: Vec<Entry> = self.list()?.runs;
        oldest.retain(|e| e.id != *newest && !named.contains(&e.id));
        let is_measured = |e: &Entry| e.kind != RunKind::Sim.name();
        oldest.sort_by(|a, b| (is_measured(a), &a.id).cmp(&(is_measured(b), &b.id)));
        let share = |n: u64| n - n * (100 - ROOM) / 100;
        let most = (share(cap.runs as u64) as usize, share(cap.bytes.0));
        let mut removed = 0;
        for entry in oldest {
            if runs <= most.0 && bytes <= most.1 {
                break;
            }
            let size = size(&self.path(&entry.id));
            match self.remove(&entry.id) {
                Ok(()) => removed += 1,
                // Another process has removed it first.
                Err(_) if !self.path(&entry.id).exists() => {}
                Err(e) => return Err(e),
            }
            runs -= 1;
            bytes = bytes.saturating_sub(size);
        }
        Ok(removed)
    }
}

/// Returns the size of the files in a folder, ignoring unreadable ones.
fn size(dir: &Path) -> u64 {
    let names = names_in(dir).unwrap_or_default().into_iter();
    let files = names.filter_map(|name| fs::metadata(dir.join(name)).ok());
    files.map(|m| m.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_are_numbers_and_sizes() {
        let default = Cap::default();
        for (text, expected) in [
            (
                "200",
                Some(Cap {
                    runs: 200,
                    ..default
                }),
            ),
            (
                "1GiB",
                Some(Cap {
                    bytes: Bytes(1 << 30),
                    ..default
                }),
            ),
            (
                "3, 1MiB",
                Some(Cap {
                    runs: 3,
                    bytes: Bytes(1 << 20),
                }),
            ),
            ("off", None),
        ] {
            assert_eq!(Cap::parse(text), Ok(expected), "{text}");
        }
        for bad in ["", "0", "-1", "many", "1GiB,"] {
            assert!(Cap::parse(bad).is_err(), "{bad}");
        }
    }
}
