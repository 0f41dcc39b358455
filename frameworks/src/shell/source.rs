//! Files that a script sources.

use crate::convert::LAUNCH;
use crate::row::Lack;
use std::path::{Path, PathBuf};

/// Name of the entry for a sourced file.
pub(crate) const SOURCE: &str = "source";
/// Maximum size of a sourced file in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Number of folders to search, from that of the script upwards: scripts are often started in the
/// root of a repository.
const ABOVE: usize = 6;
/// Files that set up an environment of Python or of a shell, and decide nothing about a job.
const ENVIRONMENTS: [&str; 8] = [
    "activate",
    "bashrc",
    ".bashrc",
    ".bash_profile",
    ".profile",
    ".zshrc",
    "conda.sh",
    "modules.sh",
];

/// Returns the text of a sourced file, if it is found and is not too large.
pub(super) fn text(folder: &Path, path: &str) -> Option<String> {
    let file = find(folder, path)?;
    let size = std::fs::metadata(&file).ok()?.len();
    if size > MAX_BYTES || is_environment(path) {
        return None;
    }
    std::fs::read_to_string(file).ok()
}

/// Returns what a prediction lacks because of a sourced file, and why.
pub(crate) fn note(folder: &Path, path: &str) -> (Lack, &'static str) {
    const MISSING: &str = "the file is not found relative to this script or the working directory: what it sets is not known";
    if is_environment(path) {
        return (Lack::Nothing, LAUNCH);
    }
    match text(folder, path) {
        Some(_) => (Lack::Nothing, "read as well"),
        None => (Lack::Accuracy, MISSING),
    }
}

/// Finds a sourced file relative to the folder of the script, one above it, or the working
/// directory.
fn find(folder: &Path, path: &str) -> Option<PathBuf> {
    // A variable or command at the start usually stands for the folder of the script.
    let path = match path.split_once('/') {
        Some((first, rest)) if first.contains('$') => rest,
        _ => path,
    };
    let folders = folder.ancestors().take(ABOVE).chain([Path::new("")]);
    folders.map(|f| f.join(path)).find(|f| f.is_file())
}

/// Returns whether a file sets up an environment.
fn is_environment(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    ENVIRONMENTS.contains(&name) || path.starts_with("/etc/")
}
