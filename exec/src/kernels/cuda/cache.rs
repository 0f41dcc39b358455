//! Machine code and autotuned choices on disk, by content.
//!
//! A file's name is the hash of everything that its content depends on. The content starts with its
//! own hash, so that a truncated or changed file counts as missing. Files appear complete: they are
//! written to a temporary name and renamed.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// A folder of entries; without a folder nothing is kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

const HASH: usize = 32;

impl Cache {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// Opens `$SHARDLAB_KERNEL_CACHE`, or the user's cache directory.
    pub(crate) fn of_user() -> Self {
        let set = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        let folder = set("SHARDLAB_KERNEL_CACHE").map(PathBuf::from).or_else(|| {
            let base = set("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| set("HOME").map(|h| Path::new(&h).join(".cache")))?;
            Some(base.join("shardlab").join("kernels"))
        });
        Self { folder }
    }

    /// Returns the folder.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns the name of an entry that depends on these texts.
    pub(crate) fn key(parts: &[&str]) -> String {
        let mut h = blake3::Hasher::new();
        for p in parts {
            h.update(&(p.len() as u64).to_le_bytes());
            h.update(p.as_bytes());
        }
        h.finalize().to_hex()[..40].to_owned()
    }

    fn path(&self, key: &str, ending: &str) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{key}.{ending}")))
    }

    /// Returns the entry, if it exists and is complete.
    pub(crate) fn get(&self, key: &str, ending: &str) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.path(key, ending)?).ok()?;
        let content = bytes.get(HASH..)?;
        if bytes[..HASH] != blake3::hash(content).as_bytes()[..] {
            return None;
        }
        bytes.drain(..HASH);
        Some(bytes)
    }

    /// Stores an entry. A failure is not an error: the entry will be made again.
    pub(crate) fn put(&self, key: &str, ending: &str, content: &[u8]) {
        let Some(path) = self.path(key, ending) else {
            return;
        };
        let beside = path.with_extension(format!("{ending}.{}.part", std::process::id()));
        let write = || -> std::io::Result<()> {
            if let Some(folder) = &self.folder {
                fs::create_dir_all(folder)?;
            }
            let mut file = fs::File::create(&beside)?;
            file.write_all(blake3::hash(content).as_bytes())?;
            file.write_all(content)?;
            drop(file);
            fs::rename(&beside, &path)
        };
        if write().is_err() {
            let _ = fs::remove_file(&beside);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_and_damaged_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(dir.path().join("deep")));
        let key = Cache::key(&["a", "bc"]);
        assert_ne!(key, Cache::key(&["ab", "c"]));
        assert_eq!(cache.get(&key, "cubin"), None);
        cache.put(&key, "cubin", b"code");
        assert_eq!(cache.get(&key, "cubin").as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.get(&key, "algo"), None);
        let path = cache.path(&key, "cubin").unwrap();
        let whole = fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..10], &[]] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get(&key, "cubin"), None);
        }
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&path, changed).unwrap();
        assert_eq!(cache.get(&key, "cubin"), None);
        cache.put(&key, "cubin", b"code");
        assert_eq!(fs::read(&path).unwrap(), whole);
        assert_eq!(fs::read_dir(dir.path().join("deep")).unwrap().count(), 1);
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let cache = Cache::new(None);
        cache.put("k", "cubin", b"x");
        assert_eq!(cache.get("k", "cubin"), None);
    }
}
