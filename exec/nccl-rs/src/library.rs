//! Finds and loads the library.

use crate::error::{Code, Error, LoadError, Version};
use crate::ffi::{Functions, IN_PROGRESS, RawComm, RawResult, RawUniqueId, SUCCESS};
use crate::types::UniqueId;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variable with the path of the library.
pub const ENVIRONMENT: &str = "NCCL_RS_LIB";
const FILE: &str = "libnccl.so.2";

/// Where to search for the library. The default searches the environment variable [`ENVIRONMENT`]
/// and the system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Loads only this file.
    pub file: Option<PathBuf>,
    /// Python's `site-packages` folders, in which pip installs the library as `nvidia/nccl/lib`.
    pub site_packages: Vec<PathBuf>,
    /// Folders that may contain `libnccl.so.2`.
    pub folders: Vec<PathBuf>,
}

impl Search {
    /// Returns the candidates in order. If `file` or else `environment` names a file, it is the
    /// only candidate. Otherwise these are pip's packages, the folders, and bare names for the
    /// system's loader.
    #[must_use]
    pub fn candidates(&self, environment: Option<&Path>) -> Vec<PathBuf> {
        if let Some(file) = self.file.as_deref().or(environment) {
            return vec![file.to_owned()];
        }
        let pip = self
            .site_packages
            .iter()
            .map(|s| s.join("nvidia/nccl/lib").join(FILE));
        let folders = self.folders.iter().map(|f| f.join(FILE));
        let system = [FILE, "libnccl.so"].map(PathBuf::from);
        pip.chain(folders).chain(system).collect()
    }
}

struct Inner {
    functions: Functions,
    path: PathBuf,
    version: Version,
}

/// The loaded library. Clones refer to the same one. The library stays loaded until the process
/// ends, because no call ends some of its threads, such as the one that serves a unique id.
#[derive(Clone)]
pub struct Nccl(Arc<Inner>);

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} ({})", self.0.version, self.0.path.display())
    }
}

impl Nccl {
    /// Finds and loads the library.
    ///
    /// # Errors
    /// [`LoadError`] lists everything that was tried.
    pub fn load(search: &Search) -> Result<Self, LoadError> {
        let environment = std::env::var_os(ENVIRONMENT).map(PathBuf::from);
        let mut tried = Vec::new();
        for path in search.candidates(environment.as_deref()) {
            // Checks paths first, to give a short reason. The system's loader searches bare names.
            if path.components().count() > 1 && !path.exists() {
                tried.push((path, "no such file".to_owned()));
                continue;
            }
            match Self::open(&path) {
                Ok(nccl) => return Ok(nccl),
                Err(reason) => tried.push((path, reason)),
            }
        }
        Err(LoadError { tried })
    }

    fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: by its name, the file is NCCL, whose initializers have no requirements on the
        // process.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| {
            let source = std::error::Error::source(&e).map(ToString::to_string);
            source.unwrap_or_else(|| e.to_string())
        })?;
        // SAFETY: as above; the library stays loaded.
        let functions = unsafe { Functions::of(&library) }
            .map_err(|symbol| format!("loaded, but it has no {symbol}"))?;
        let nccl = Self::with(functions, path.to_owned()).map_err(|e| e.to_string())?;
        std::mem::forget(library);
        Ok(nccl)
    }

    /// Creates a library from a table of functions.
    ///
    /// # Safety
    /// Every function behaves like the function of `nccl.h` with its name, while the program runs.
    ///
    /// # Errors
    /// An error if the library does not return its version.
    pub unsafe fn from_functions(functions: Functions) -> Result<Self, Error> {
        Self::with(functions, PathBuf::from("(functions)"))
    }

    fn with(functions: Functions, path: PathBuf) -> Result<Self, Error> {
        let mut inner = Inner {
            functions,
            path,
            version: Version::from_code(0),
        };
        let mut code = 0;
        // SAFETY: the pointer is valid for a write.
        let result = unsafe { (inner.functions.get_version)(&raw mut code) };
        if result != SUCCESS {
            return Err(Error::Nccl {
                call: "ncclGetVersion",
                code: Code(result),
                text: String::new(),
                last: String::new(),
            });
        }
        inner.version = Version::from_code(code);
        Ok(Self(Arc::new(inner)))
    }

    /// Returns the version of the library.
    #[must_use]
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// Returns the path of its file, or a bare name if the system's loader found it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns whether this version of the library has a function, by its C name.
    #[must_use]
    pub fn has(&self, symbol: &str) -> bool {
        self.0.functions.has(symbol)
    }

    /// Returns the C functions, for calls that are not wrapped.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// Creates the unique id of a communicator. One rank creates it and sends it to the others by
    /// any means.
    ///
    /// # Errors
    /// Errors of NCCL, such as no usable network interface.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = RawUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is valid for a write.
        let result = unsafe { (self.functions().get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", result, std::ptr::null_mut())?;
        Ok(UniqueId::from_raw(id))
    }

    /// Returns NCCL's description of a result.
    #[must_use]
    pub fn error_string(&self, code: Code) -> String {
        // SAFETY: the function takes any integer and returns a static string.
        unsafe { text((self.functions().get_error_string)(code.0)) }
    }

    /// Returns NCCL's last error message of any thread of the process; empty if there is none.
    #[must_use]
    pub fn last_error(&self) -> String {
        self.last_error_of(std::ptr::null_mut())
    }

    fn last_error_of(&self, comm: RawComm) -> String {
        let Some(f) = self.functions().get_last_error else {
            return String::new();
        };
        // SAFETY: the communicator is live or null, both of which are allowed; the string belongs
        // to NCCL.
        unsafe { text(f(comm)) }.trim().to_owned()
    }

    /// Converts a result to a `Result`. `comm` is live or null.
    pub(crate) fn check(
        &self,
        call: &'static str,
        result: RawResult,
        comm: RawComm,
    ) -> Result<(), Error> {
        match result {
            SUCCESS => Ok(()),
            _ => Err(Error::Nccl {
                call,
                code: Code(result),
                text: self.error_string(Code(result)),
                last: if result == IN_PROGRESS {
                    String::new()
                } else {
                    self.last_error_of(comm)
                },
            }),
        }
    }

    /// Returns an optional function, or an error if it is missing.
    pub(crate) fn optional<F>(&self, f: Option<F>, symbol: &'static str) -> Result<F, Error> {
        f.ok_or(Error::Unsupported {
            symbol,
            version: self.version(),
        })
    }
}

/// Converts a C string to text; empty for null.
///
/// # Safety
/// Null, or a terminated string that lives during the call.
unsafe fn text(p: *const c_char) -> String {
    if p.is_null() {
        return String::new();
    }
    // SAFETY: the caller's contract.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_file_is_the_only_candidate() {
        let search = Search {
            site_packages: vec!["/a".into()],
            folders: vec!["/b".into()],
            ..Search::default()
        };
        let names = |list: Vec<PathBuf>| -> Vec<String> {
            list.iter().map(|p| p.display().to_string()).collect()
        };
        assert_eq!(
            names(search.candidates(None)),
            [
                "/a/nvidia/nccl/lib/libnccl.so.2",
                "/b/libnccl.so.2",
                "libnccl.so.2",
                "libnccl.so"
            ]
        );
        assert_eq!(names(search.candidates(Some(Path::new("/env")))), ["/env"]);
        let named = Search {
            file: Some("/file".into()),
            ..search
        };
        assert_eq!(names(named.candidates(Some(Path::new("/env")))), ["/file"]);
    }

    #[test]
    fn what_was_tried_is_listed() {
        let missing = Search {
            file: Some("/no/such/libnccl.so.2".into()),
            ..Search::default()
        };
        let words = Nccl::load(&missing).unwrap_err().to_string();
        assert!(
            words.ends_with("/no/such/libnccl.so.2: no such file"),
            "{words}"
        );
        // A library that is not NCCL.
        let other = [
            "/lib/x86_64-linux-gnu/libm.so.6",
            "/usr/lib/libm.so.6",
            "/lib64/libm.so.6",
        ]
        .into_iter()
        .map(PathBuf::from)
        .find(|p| p.exists());
        if let Some(file) = other {
            let search = Search {
                file: Some(file),
                ..Search::default()
            };
            let words = Nccl::load(&search).unwrap_err().to_string();
            assert!(words.contains("it has no ncclGetVersion"), "{words}");
        }
    }
}
