//! Finding and loading the library.

use crate::error::{Code, Error, LoadError, Version};
use crate::ffi::{Functions, IN_PROGRESS, RawComm, RawResult, RawUniqueId, SUCCESS};
use crate::types::UniqueId;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Variable that names the library's file.
pub const ENVIRONMENT: &str = "NCCL_RS_LIB";
const FILE: &str = "libnccl.so.2";

/// Where to look for the library. The default looks at the environment and the system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// This file, and nothing else.
    pub file: Option<PathBuf>,
    /// Python's `site-packages` folders: pip puts the library into `nvidia/nccl/lib` there.
    pub site_packages: Vec<PathBuf>,
    /// Folders that may hold `libnccl.so.2` itself.
    pub folders: Vec<PathBuf>,
}

impl Search {
    /// Candidates in order: the file that is named (by `file`, else by the environment) is the only one; otherwise pip's
    /// packages, the folders, and the system's loader by name.
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

/// The loaded library. Clones are the same one; it stays loaded until the process ends, because it runs threads that no
/// call ends, such as the one behind a unique id.
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
            // A path (unlike a bare name, which the system's loader looks up) is checked first, for a short reason.
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
        // SAFETY: the file is NCCL as its name says; its initialisers have no requirements on the process.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| {
            let source = std::error::Error::source(&e).map(ToString::to_string);
            source.unwrap_or_else(|| e.to_string())
        })?;
        // SAFETY: likewise; the library stays loaded.
        let functions = unsafe { Functions::of(&library) }
            .map_err(|symbol| format!("loaded, but it has no {symbol}"))?;
        let nccl = Self::with(functions, path.to_owned()).map_err(|e| e.to_string())?;
        std::mem::forget(library);
        Ok(nccl)
    }

    /// A library of these functions.
    ///
    /// # Safety
    /// Every function behaves as the one of `nccl.h` whose name it has, as long as the program runs.
    ///
    /// # Errors
    /// When the library does not tell its version.
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

    /// Version of the library.
    #[must_use]
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// Its file; a bare name where the system's loader found it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether the library has a function, by its C name: versions differ.
    #[must_use]
    pub fn has(&self, symbol: &str) -> bool {
        self.0.functions.has(symbol)
    }

    /// The C functions, for what is not wrapped.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// A new identity for a communicator: made by one rank, and given to the others by any means.
    ///
    /// # Errors
    /// What NCCL reports, such as no usable network interface.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = RawUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is valid for a write.
        let result = unsafe { (self.functions().get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", result, std::ptr::null_mut())?;
        Ok(UniqueId::from_raw(id))
    }

    /// A result in NCCL's words.
    #[must_use]
    pub fn error_string(&self, code: Code) -> String {
        // SAFETY: the function takes any integer and returns a static string.
        unsafe { text((self.functions().get_error_string)(code.0)) }
    }

    /// NCCL's last error message, of any thread of the process; empty where there is none.
    #[must_use]
    pub fn last_error(&self) -> String {
        self.last_error_of(std::ptr::null_mut())
    }

    fn last_error_of(&self, comm: RawComm) -> String {
        let Some(f) = self.functions().get_last_error else {
            return String::new();
        };
        // SAFETY: the communicator is live or null, both of which are allowed; the string is NCCL's own.
        unsafe { text(f(comm)) }.trim().to_owned()
    }

    /// A result as `Result`. `comm` is live, or null.
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

    /// An optional function, or the error that it is missing.
    pub(crate) fn optional<F>(&self, f: Option<F>, symbol: &'static str) -> Result<F, Error> {
        f.ok_or(Error::Unsupported {
            symbol,
            version: self.version(),
        })
    }
}

/// A C string as text; empty for null.
///
/// # Safety
/// Null, or a string that ends and lives meanwhile.
unsafe fn text(p: *const c_char) -> String {
    if p.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
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
        // A library that is none of NCCL's.
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
