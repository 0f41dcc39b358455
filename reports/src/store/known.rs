//! Finds equal predictions in a store, so that none of them is saved twice.

use super::entry::{Entry, summary};
use super::error::StoreError;
use super::id::Id;
use super::{Store, write};
use crate::view::RunView;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The predictions of a store by content, read once for any number of saves.
#[derive(Debug)]
pub struct Known(Mutex<BTreeMap<String, Id>>);

/// A run in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its id.
    pub id: Id,
    /// Whether it already existed, since equal predictions are saved only once.
    pub before: bool,
}

impl Store {
    /// Returns the existing predictions. If several are equal, the newest counts.
    ///
    /// # Errors
    /// Fails if the folder cannot be read.
    pub fn known(&self) -> Result<Known, StoreError> {
        let runs = self.list()?.runs.into_iter();
        let known = runs.filter_map(|e| Some((e.identity()?, e.id)));
        Ok(Known(Mutex::new(known.collect())))
    }

    /// Saves a run unless it is a prediction that already exists: one of the same program with the
    /// same options and the same numbers, made by the same version. Measurements are always saved.
    ///
    /// # Errors
    /// Fails if the run cannot be written. In that case, it is not listed.
    pub fn save_once(&self, view: &RunView, known: &Known) -> Result<Saved, StoreError> {
        let view = write::complete(view);
        let identity = identity(&view)?;
        let lock = || known.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = identity.as_ref().and_then(|i| lock().get(i).cloned())
            && self.path(&id).is_dir()
        {
            return Ok(Saved { id, before: true });
        }
        let id = write::save(self, &view)?;
        if let Some(identity) = identity {
            lock().insert(identity, id.clone());
        }
        Ok(Saved { id, before: false })
    }
}

/// Returns the key that a run will have once it is saved.
fn identity(view: &RunView) -> Result<Option<String>, StoreError> {
    let id = Id::now();
    let invalid = |e| StoreError::invalid("summary".as_ref(), e);
    let text = serde_json::to_vec(&summary(&id, view)).map_err(invalid)?;
    Ok(Entry::parse(id, &text).map_err(invalid)?.identity())
}
