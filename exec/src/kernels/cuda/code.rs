//! Loads generated sources as functions.

use super::cache::Cache;
use super::error::ErrorKind;
use super::nvrtc::Compiler;
use super::target::Target;
use cudarc::driver::{result, sys};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::PathBuf;

/// Returns the options of a compilation. Multiply-adds are not contracted, so that fused and
/// separate operations give the same bits.
pub(crate) fn options(target: Target) -> [String; 3] {
    [
        format!("--gpu-architecture={target}"),
        "--fmad=false".to_owned(),
        "--std=c++17".to_owned(),
    ]
}

/// Compiles sources for one kind of GPU, at most once each.
pub(crate) struct Loader {
    target: Target,
    cache: Cache,
    folders: Vec<PathBuf>,
    compiler: Option<Compiler>,
    modules: BTreeMap<String, Loaded>,
}

struct Loaded {
    module: sys::CUmodule,
    functions: BTreeMap<String, sys::CUfunction>,
}

// SAFETY: modules and functions belong to the context, not to a thread.
unsafe impl Send for Loader {}

/// Returns the name of a source's entry on disk.
pub(crate) fn key(target: Target, source: &str) -> String {
    let options = options(target).join(" ");
    Cache::key(&["cubin 1", &target.to_string(), &options, source])
}

impl Loader {
    pub(super) fn new(target: Target, cache: Cache, folders: Vec<PathBuf>) -> Self {
        Self {
            target,
            cache,
            folders,
            compiler: None,
            modules: BTreeMap::new(),
        }
    }

    /// Creates a loader with the user's cache.
    pub(crate) fn of_user(target: Target, folders: Vec<PathBuf>) -> Self {
        Self::new(target, Cache::of_user(), folders)
    }

    /// Returns a function of a source, which is compiled and loaded at its first use.
    pub(crate) fn function(
        &mut self,
        source: &str,
        name: &str,
        shared: u32,
    ) -> Result<sys::CUfunction, ErrorKind> {
        let key = key(self.target, source);
        if !self.modules.contains_key(&key) {
            let loaded = self.load(source, &key)?;
            self.modules.insert(key.clone(), loaded);
        }
        let Some(loaded) = self.modules.get_mut(&key) else {
            return Err(ErrorKind::Launch("a module vanished".to_owned()));
        };
        if let Some(f) = loaded.functions.get(name) {
            return Ok(*f);
        }
        let text = CString::new(name).map_err(|e| ErrorKind::Launch(e.to_string()))?;
        // SAFETY: the module is loaded and never unloaded while this lives.
        let f = unsafe { result::module::get_function(loaded.module, text) }
            .map_err(ErrorKind::driver("cuModuleGetFunction"))?;
        if shared > 48 << 10 {
            let attribute =
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is live.
            unsafe { result::function::set_function_attribute(f, attribute, shared as i32) }
                .map_err(ErrorKind::driver("cuFuncSetAttribute"))?;
        }
        loaded.functions.insert(name.to_owned(), f);
        Ok(f)
    }

    fn load(&mut self, source: &str, key: &str) -> Result<Loaded, ErrorKind> {
        if let Some(code) = self.cache.get(key, "cubin")
            && let Ok(loaded) = open(&code)
        {
            return Ok(loaded);
        }
        let compiler = match &mut self.compiler {
            Some(c) => c,
            none => none.insert(Compiler::open(&self.folders).map_err(ErrorKind::Library)?),
        };
        let code = compiler
            .compile(source, &options(self.target))
            .map_err(ErrorKind::Compiler)?;
        self.cache.put(key, "cubin", &code);
        open(&code)
    }
}

fn open(code: &[u8]) -> Result<Loaded, ErrorKind> {
    // SAFETY: the code is a whole image, which the driver checks and copies.
    let module = unsafe { result::module::load_data(code.as_ptr().cast()) }
        .map_err(ErrorKind::driver("cuModuleLoadData"))?;
    Ok(Loaded {
        module,
        functions: BTreeMap::new(),
    })
}

impl Drop for Loader {
    fn drop(&mut self) {
        for loaded in self.modules.values() {
            // SAFETY: loaded once, unloaded once; the owner has waited for all launches.
            let _ = unsafe { result::module::unload(loaded.module) };
        }
    }
}

/// Describes the registers and local memory of a function, for reports.
pub(super) fn resources(f: sys::CUfunction) -> String {
    use sys::CUfunction_attribute_enum as A;
    let get = |a| {
        // SAFETY: the function is live.
        unsafe { result::function::get_function_attribute(f, a) }.unwrap_or(-1)
    };
    let (regs, local) = (
        get(A::CU_FUNC_ATTRIBUTE_NUM_REGS),
        get(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
    );
    if local > 0 {
        format!("{regs} registers, {local} bytes spilled")
    } else {
        format!("{regs} registers")
    }
}
