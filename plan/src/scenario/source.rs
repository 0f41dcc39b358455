//! Texts that values come from.

use std::path::Path;
use std::sync::Arc;

/// A text that values come from: a file, a preset, or one override.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// As errors show it.
    pub name: Arc<str>,
    /// Its text.
    pub text: Arc<str>,
    /// Folder that its paths are relative to: that of a file on disk. Other texts have none, and
    /// mean the working directory.
    pub folder: Option<Arc<Path>>,
}
