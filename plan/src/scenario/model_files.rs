//! Texts of model files.

use super::load;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Texts of model files by path. Clones share them, so that the points of a sweep, which are clones
/// of one document, read a file once.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelFiles(Arc<Mutex<BTreeMap<PathBuf, Arc<str>>>>);

impl ModelFiles {
    /// Returns the text of a file.
    ///
    /// # Errors
    /// As [`load::read_model`].
    pub(super) fn text(&self, path: &Path) -> Result<Arc<str>, String> {
        let mut texts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = texts.get(path) {
            return Ok(Arc::clone(text));
        }
        let text: Arc<str> = load::read_model(path)?.into();
        texts.insert(path.to_owned(), Arc::clone(&text));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Folder;
    use super::*;

    #[test]
    fn clones_read_a_file_once() {
        let folder = Folder::new("model-files", &[("config.json", "first")]);
        let path = folder.file("config.json");
        let files = ModelFiles::default();
        assert!(files.text(&folder.file("none.json")).is_err());
        assert_eq!(&*files.text(&path).unwrap(), "first");
        std::fs::write(&path, "second").unwrap();
        assert_eq!(&*files.clone().text(&path).unwrap(), "first");
        assert_eq!(&*ModelFiles::default().text(&path).unwrap(), "second");
    }
}
