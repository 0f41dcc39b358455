//! Detects libraries that are loaded but that the bindings would not use.
//!
//! The bindings try a library's shortest name first (`libcudnn.so` before `libcudnn.so.9`). pip's
//! packages have no file of that name, so the bindings would use a system library with that name.
//! The loader reads its search path only when a process starts, so the process has to be restarted
//! with another path.

use super::{Libraries, Library};
use libloading::os::unix::{Library as Handle, RTLD_LAZY};
use std::ffi::{CStr, OsString};
use std::path::{Path, PathBuf};

impl Libraries {
    /// Returns the `LD_LIBRARY_PATH` with which a new process would use the libraries that are
    /// loaded here; `None` if this process already uses them.
    ///
    /// The path starts with a folder in the user's cache that contains these libraries under their
    /// shortest names.
    ///
    /// # Errors
    /// Returns a message if the folder cannot be created.
    pub fn better_path(&self) -> Result<Option<OsString>, String> {
        let hidden: Vec<_> = self
            .loaded
            .iter()
            .filter(|l| l.path.is_absolute() && is_hidden(l.library, &l.path))
            .collect();
        if hidden.is_empty() {
            return Ok(None);
        }
        let mut key = blake3::Hasher::new();
        for l in &hidden {
            key.update(l.path.as_os_str().as_encoded_bytes());
            key.update(b"\n");
        }
        let name = format!("libraries-{}", &key.finalize().to_hex()[..16]);
        let links = cache().join("shardlab").join(name);
        std::fs::create_dir_all(&links).map_err(|e| format!("{}: {e}", links.display()))?;
        for l in &hidden {
            let link = links.join(format!("lib{}.so", l.library.stem().0));
            if !link.exists() {
                // Another process may create the link at the same time, which has the same result.
                let _ = std::os::unix::fs::symlink(&l.path, &link);
            }
        }
        let mut folders = vec![links];
        for folder in self.loaded.iter().filter_map(|l| l.path.parent()) {
            if folder.is_absolute() && !folders.iter().any(|f| f == folder) {
                folders.push(folder.to_owned());
            }
        }
        let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        folders.extend(std::env::split_paths(&before).filter(|p| !p.as_os_str().is_empty()));
        let path = std::env::join_paths(folders).map_err(|e| e.to_string())?;
        Ok(Some(path))
    }
}

/// Returns the user's cache folder.
fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v: &OsString| !v.is_empty());
    set("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&set("HOME")?).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
}

/// Returns whether the bindings would use a different file from the one that was loaded.
fn is_hidden(library: Library, path: &Path) -> bool {
    let (stem, function) = library.stem();
    let found = cudarc::get_lib_name_candidates(stem)
        .into_iter()
        .find_map(|name| address(Path::new(&name), function));
    let ours = address(path, function);
    ours.is_some() && found != ours
}

/// Returns the address of a library's function.
fn address(path: &Path, function: &CStr) -> Option<usize> {
    // SAFETY: loading NVIDIA's libraries runs no code that depends on this program; the function is
    // not called.
    unsafe {
        let library = Handle::open(Some(path), RTLD_LAZY).ok()?;
        let symbol = library.get::<*const ()>(function).ok()?;
        Some(symbol.into_raw().addr())
    }
}
