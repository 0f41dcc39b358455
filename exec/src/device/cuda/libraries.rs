//! Finds and loads NVIDIA's libraries.
//!
//! Libraries come from four places, in this order: folders from the command line, the environment,
//! pip's `nvidia` packages, and the system. Each library is loaded by its absolute path with global
//! symbols. A later `dlopen` of the bare name (by the bindings) then finds the library that is
//! already loaded, because the names inside the libraries match. The bindings panic if a library is
//! missing, so none of their functions may be called before [`Libraries::load`] has succeeded, and
//! none of those of an optional library unless [`Libraries::has`] returns `true`.

mod folders;
mod hidden;

pub use folders::{Folder, Origin, Surroundings, folders};

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_LAZY, RTLD_NOW};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// An NVIDIA library that the device uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Library {
    /// `libcuda`, which comes with the driver.
    Driver,
    /// Run-time compiler (NVRTC).
    Nvrtc,
    /// GEMMs (cuBLASLt).
    CublasLt,
    /// GEMMs, older interface (cuBLAS); cuDNN uses it.
    Cublas,
    /// Attention and convolutions (cuDNN).
    Cudnn,
    /// Activity records (CUPTI): exact times of the GPU's work.
    Cupti,
}

impl Library {
    /// All libraries in the order in which they are loaded: dependencies precede their users.
    pub const ALL: [Self; 6] = [
        Self::Driver,
        Self::Nvrtc,
        Self::CublasLt,
        Self::Cublas,
        Self::Cudnn,
        Self::Cupti,
    ];

    /// Returns the name of its file.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so.1",
            Self::Nvrtc => "libnvrtc.so.13",
            Self::CublasLt => "libcublasLt.so.13",
            Self::Cublas => "libcublas.so.13",
            Self::Cudnn => "libcudnn.so.9",
            Self::Cupti => "libcupti.so.13",
        }
    }

    /// Returns files in the same folder that the library opens by name when it needs them. They are
    /// loaded before the library, if they exist.
    const fn parts(self) -> &'static [&'static str] {
        match self {
            // The compiler has no search path for these files.
            Self::Nvrtc => &["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.so.13"],
            Self::Cudnn => &[
                "libcudnn_graph.so.9",
                "libcudnn_ops.so.9",
                "libcudnn_adv.so.9",
                "libcudnn_cnn.so.9",
                "libcudnn_heuristic.so.9",
                "libcudnn_engines_runtime_compiled.so.9",
                "libcudnn_engines_precompiled.so.9",
            ],
            _ => &[],
        }
    }

    /// Returns the name in run records.
    const fn name(self) -> &'static str {
        match self {
            Self::Driver => "cuda",
            Self::Nvrtc => "nvrtc",
            Self::CublasLt => "cublaslt",
            Self::Cublas => "cublas",
            Self::Cudnn => "cudnn",
            Self::Cupti => "cupti",
        }
    }

    /// Returns the name that the bindings look for, and the name of a function in the library.
    pub(super) const fn stem(self) -> (&'static str, &'static CStr) {
        match self {
            Self::Driver => ("cuda", c"cuInit"),
            Self::Nvrtc => ("nvrtc", c"nvrtcVersion"),
            Self::CublasLt => ("cublasLt", c"cublasLtGetVersion"),
            Self::Cublas => ("cublas", c"cublasCreate_v2"),
            Self::Cudnn => ("cudnn", c"cudnnGetVersion"),
            Self::Cupti => ("cupti", c"cuptiGetVersion"),
        }
    }

    /// Returns a description, and the pip package that contains the library.
    const fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Driver => ("GPU driver", "comes with the NVIDIA driver"),
            Self::Nvrtc => ("run-time compiler", "pip install nvidia-cuda-nvrtc"),
            Self::CublasLt | Self::Cublas => ("matmuls", "pip install nvidia-cublas"),
            Self::Cudnn => ("attention, convolutions", "pip install nvidia-cudnn-cu13"),
            Self::Cupti => ("activity records", "pip install nvidia-cuda-cupti"),
        }
    }

    /// Returns whether the device needs the library.
    #[must_use]
    pub const fn is_required(self) -> bool {
        matches!(self, Self::Driver | Self::Nvrtc | Self::CublasLt)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file())
    }
}

/// Required libraries that could not be loaded, and all places that were tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct MissingLibraries {
    /// Missing libraries. Those with a file that could not be loaded also have the reason.
    pub missing: Vec<(Library, Option<String>)>,
    /// Folders that were searched.
    pub searched: Vec<Folder>,
}

impl fmt::Display for MissingLibraries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no usable GPU: NVIDIA libraries are missing")?;
        for (library, reason) in &self.missing {
            let (what, from) = library.words();
            write!(f, "\n  {library} ({what}): ")?;
            match reason {
                Some(reason) => write!(f, "{reason}")?,
                None => write!(f, "not found; {from}")?,
            }
        }
        f.write_str("\nsearched, in this order:")?;
        for origin in Origin::ALL {
            let here: Vec<String> = self
                .searched
                .iter()
                .filter(|s| s.origin == origin)
                .map(|s| s.path.display().to_string())
                .collect();
            let here = if here.is_empty() {
                origin.nothing().to_owned()
            } else {
                here.join(", ")
            };
            write!(f, "\n  {}: {here}", origin.name())?;
        }
        f.write_str("\n  dynamic loader: by name")
    }
}

/// A loaded library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Which library it is.
    pub library: Library,
    /// Path of its file, or the bare name if the system's loader found it.
    pub path: PathBuf,
}

/// Loaded libraries, which stay loaded until the process ends.
#[derive(Clone, Debug)]
pub struct Libraries {
    loaded: Vec<Loaded>,
    /// Reasons why optional libraries with an existing file are not loaded.
    refused: Vec<(Library, String)>,
    folders: Vec<Folder>,
}

impl Libraries {
    /// Finds and loads all libraries. `extra` are folders that are searched first. Later calls
    /// return the first success, for any folders.
    ///
    /// # Errors
    /// [`MissingLibraries`] if a required library cannot be loaded.
    pub fn load(extra: &[PathBuf]) -> Result<&'static Self, MissingLibraries> {
        static LOADED: OnceLock<Libraries> = OnceLock::new();
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let loaded = Self::from_folders(folders(&Surroundings::of_process(), extra))?;
        Ok(LOADED.get_or_init(|| loaded))
    }

    /// Finds and loads only the driver, which is enough to list GPUs.
    ///
    /// # Errors
    /// [`MissingLibraries`] if it cannot be loaded.
    pub(crate) fn load_driver(extra: &[PathBuf]) -> Result<(), MissingLibraries> {
        let searched = folders(&Surroundings::of_process(), extra);
        match open_known(Library::Driver, &searched) {
            Ok(_) => Ok(()),
            Err(reason) => Err(MissingLibraries {
                missing: vec![(Library::Driver, reason)],
                searched,
            }),
        }
    }

    fn from_folders(folders: Vec<Folder>) -> Result<Self, MissingLibraries> {
        let mut it = Self {
            loaded: Vec::new(),
            refused: Vec::new(),
            folders,
        };
        let mut missing = Vec::new();
        for library in Library::ALL {
            match open_known(library, &it.folders) {
                Ok(path) => it.loaded.push(Loaded { library, path }),
                Err(reason) if library.is_required() => missing.push((library, reason)),
                Err(reason) => it.refused.extend(reason.map(|r| (library, r))),
            }
        }
        if missing.is_empty() {
            Ok(it)
        } else {
            Err(MissingLibraries {
                missing,
                searched: it.folders,
            })
        }
    }

    /// Returns whether a library is loaded.
    #[must_use]
    pub fn has(&self, library: Library) -> bool {
        self.path(library).is_some()
    }

    /// Returns the path of a loaded library.
    #[must_use]
    pub fn path(&self, library: Library) -> Option<&Path> {
        let found = self.loaded.iter().find(|l| l.library == library)?;
        Some(&found.path)
    }

    /// Returns all loaded libraries.
    #[must_use]
    pub fn loaded(&self) -> &[Loaded] {
        &self.loaded
    }

    /// Returns the reasons why optional libraries that exist could not be loaded.
    #[must_use]
    pub fn refused(&self) -> &[(Library, String)] {
        &self.refused
    }

    /// Returns the reason why a library is not loaded; `None` if it is.
    #[must_use]
    pub fn missing(&self, library: Library) -> Option<String> {
        if self.has(library) {
            return None;
        }
        let refused = self.refused.iter().find(|r| r.0 == library);
        Some(match refused {
            Some((_, why)) => format!("{library} cannot be loaded: {why}"),
            None => format!("{library} was not found ({})", library.words().1),
        })
    }

    /// Returns the folders that were searched, in order. NCCL's loader searches the same folders.
    #[must_use]
    pub fn folders(&self) -> &[Folder] {
        &self.folders
    }
}

/// Returns the versions of the loaded libraries, for a run's environment.
pub(super) fn versions() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let Ok(libraries) = Libraries::load(&[]) else {
        return all;
    };
    for l in libraries.loaded() {
        if let Some(version) = version(l.library) {
            all.insert(l.library.name().to_owned(), version);
        }
        let key = format!("{}.library", l.library.name());
        all.insert(key, l.path.display().to_string());
    }
    all
}

/// Returns the version that a loaded library reports.
fn version(library: Library) -> Option<String> {
    use cudarc::{cublaslt, cudnn, cupti, nvrtc};
    let dotted = |v: usize| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100);
    // SAFETY: the library is loaded; the outputs are local numbers.
    unsafe {
        match library {
            Library::Driver | Library::Cublas => None,
            Library::Nvrtc => {
                let (mut major, mut minor) = (0, 0);
                let r = nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor);
                r.result().ok().map(|()| format!("{major}.{minor}"))
            }
            Library::CublasLt => Some(dotted(cublaslt::sys::cublasLtGetVersion())),
            Library::Cudnn => Some(dotted(cudnn::sys::cudnnGetVersion())),
            Library::Cupti => {
                let mut version = 0;
                let r = cupti::sys::cuptiGetVersion(&raw mut version);
                r.result().ok().map(|()| version.to_string())
            }
        }
    }
}

/// Like [`open`], but fails if the bindings do not find the library.
fn open_known(library: Library, folders: &[Folder]) -> Result<PathBuf, Option<String>> {
    let path = open(library, folders)?;
    if is_known(library) {
        Ok(path)
    } else {
        let hidden = format!("{}: loaded under a different name", path.display());
        Err(Some(hidden))
    }
}

/// Loads a library from the first folder that has it, or else by the system's loader. The error is
/// the reason why the last existing file could not be loaded.
fn open(library: Library, folders: &[Folder]) -> Result<PathBuf, Option<String>> {
    let mut reason = None;
    // The driver must match the kernel module, so only the system's driver is used, unless the user
    // names another one.
    let (before, after): (Vec<_>, Vec<_>) = folders
        .iter()
        .filter(|f| library != Library::Driver || f.origin != Origin::Pip)
        .partition(|f| library != Library::Driver || f.origin == Origin::Flag);
    let mut attempt = |folder: &Folder| {
        let path = folder.path.join(library.file());
        if !path.exists() {
            return None;
        }
        for part in library.parts() {
            let part = folder.path.join(part);
            if part.exists() {
                // If a file cannot be loaded here, the library reports it when it needs the file.
                let _ = keep(&part, RTLD_LAZY | RTLD_GLOBAL);
            }
        }
        match keep(&path, RTLD_NOW | RTLD_GLOBAL) {
            Ok(()) => Some(path),
            Err(e) => {
                reason = Some(format!("{}: {e}", path.display()));
                None
            }
        }
    };
    if let Some(path) = before.into_iter().find_map(&mut attempt) {
        return Ok(path);
    }
    for part in library.parts() {
        let _ = keep(Path::new(part), RTLD_LAZY | RTLD_GLOBAL);
    }
    let name = Path::new(library.file());
    if keep(name, RTLD_NOW | RTLD_GLOBAL).is_ok() {
        return Ok(name.to_owned());
    }
    match after.into_iter().find_map(attempt) {
        Some(path) => Ok(path),
        None => Err(reason),
    }
}

/// Returns whether the bindings will find a library; they panic if they do not.
fn is_known(library: Library) -> bool {
    use cudarc::{cublas, cublaslt, cudnn, cupti, driver, nvrtc};
    // SAFETY: it opens and closes a library that is already loaded.
    unsafe {
        match library {
            Library::Driver => driver::sys::is_culib_present(),
            Library::Nvrtc => nvrtc::sys::is_culib_present(),
            Library::CublasLt => cublaslt::sys::is_culib_present(),
            Library::Cublas => cublas::sys::is_culib_present(),
            Library::Cudnn => cudnn::sys::is_culib_present(),
            Library::Cupti => cupti::sys::is_culib_present(),
        }
    }
}

/// Loads a file and never unloads it.
fn keep(path: &Path, flags: i32) -> Result<(), String> {
    // SAFETY: loading NVIDIA's libraries runs no code that depends on this program; they are never
    // unloaded, so no pointer into them can dangle.
    match unsafe { Handle::open(Some(path), flags) } {
        Ok(handle) => {
            std::mem::forget(handle);
            Ok(())
        }
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(path: &Path, origin: Origin) -> Folder {
        Folder {
            path: path.to_owned(),
            origin,
        }
    }

    #[test]
    fn what_is_missing_is_named_with_every_place() {
        let dir = tempfile::tempdir().unwrap();
        let error = MissingLibraries {
            missing: vec![
                (Library::Driver, None),
                (Library::Nvrtc, Some("x/libnvrtc.so.13: too short".into())),
            ],
            searched: vec![folder(dir.path(), Origin::Flag)],
        };
        let text = error.to_string();
        assert!(
            text.contains("libcuda.so.1 (GPU driver): not found; comes with"),
            "{text}"
        );
        assert!(text.contains("x/libnvrtc.so.13: too short"), "{text}");
        let flag = format!("--library-path: {}", dir.path().display());
        assert!(text.contains(&flag), "{text}");
        assert!(text.contains("pip: no nvidia packages"), "{text}");
    }

    #[test]
    fn a_library_that_does_not_load_is_not_one_that_is_not_there() {
        let libraries = Libraries {
            loaded: vec![Loaded {
                library: Library::Cublas,
                path: PathBuf::from("libcublas.so.13"),
            }],
            refused: vec![(Library::Cupti, "x/libcupti.so.13: too short".into())],
            folders: Vec::new(),
        };
        let missing = |l| libraries.missing(l);
        assert_eq!(missing(Library::Cublas), None);
        assert_eq!(
            missing(Library::Cupti).unwrap(),
            "libcupti.so.13 cannot be loaded: x/libcupti.so.13: too short"
        );
        assert_eq!(
            missing(Library::Cudnn).unwrap(),
            "libcudnn.so.9 was not found (pip install nvidia-cudnn-cu13)"
        );
    }

    #[test]
    fn a_file_that_is_no_library_is_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libcublasLt.so.13"), b"nothing").unwrap();
        let reason = open(Library::CublasLt, &[folder(dir.path(), Origin::Flag)]);
        if let Err(reason) = reason {
            let reason = reason.unwrap();
            assert!(reason.contains("libcublasLt.so.13"), "{reason}");
        }
    }
}
