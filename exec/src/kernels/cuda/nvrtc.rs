//! The run-time compiler, loaded from its own file: it needs no GPU and no driver.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY, RTLD_NOW, Symbol};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

type Program = *mut c_void;

/// An open `libnvrtc`.
pub(crate) struct Compiler {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
}

impl Compiler {
    /// Opens the library in one of these folders, or by name.
    pub(crate) fn open(folders: &[PathBuf]) -> Result<Self, String> {
        let mut reason = "no folder has it".to_owned();
        let inside = folders.iter().map(|f| f.join("libnvrtc.so.13"));
        for path in inside.chain([PathBuf::from("libnvrtc.so.13")]) {
            if path.is_absolute() && !path.exists() {
                continue;
            }
            match Self::load(&path) {
                Ok(it) => return Ok(it),
                Err(e) => reason = format!("{}: {e}", path.display()),
            }
        }
        Err(format!("libnvrtc.so.13 (run-time compiler): {reason}"))
    }

    fn load(path: &Path) -> Result<Self, libloading::Error> {
        // It looks for its built-ins by name alone; a loaded library of that name is found.
        for part in ["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.so.13"] {
            let part = path.with_file_name(part);
            if part.exists() {
                // SAFETY: NVIDIA's library runs no code at loading that depends on ours; it is
                // never unloaded.
                if let Ok(handle) = unsafe { Library::open(Some(&part), RTLD_LAZY | RTLD_GLOBAL) } {
                    std::mem::forget(handle);
                }
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }?;
        // SAFETY: the names are those of nvrtc.h, whose signatures are the fields' types.
        unsafe {
            fn raw<T: Copy>(s: Symbol<T>) -> T {
                *s
            }
            let it = Self {
                create: raw(library.get(b"nvrtcCreateProgram\0")?),
                compile: raw(library.get(b"nvrtcCompileProgram\0")?),
                cubin_size: raw(library.get(b"nvrtcGetCUBINSize\0")?),
                cubin: raw(library.get(b"nvrtcGetCUBIN\0")?),
                log_size: raw(library.get(b"nvrtcGetProgramLogSize\0")?),
                log: raw(library.get(b"nvrtcGetProgramLog\0")?),
                destroy: raw(library.get(b"nvrtcDestroyProgram\0")?),
            };
            std::mem::forget(library);
            Ok(it)
        }
    }

    /// Compiles a source to machine code.
    pub(crate) fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let text = CString::new(source).map_err(|_| "the source holds a zero byte".to_owned())?;
        let options: Vec<CString> = options
            .iter()
            .filter_map(|o| CString::new(o.as_str()).ok())
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: strings end in zero bytes and outlive the calls; buffers have the length
        // that the library reports; the program is destroyed once.
        unsafe {
            let made = (self.create)(
                &raw mut program,
                text.as_ptr(),
                c"kernel.cu".as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            );
            if made != 0 {
                return Err(format!("nvrtcCreateProgram: error {made}"));
            }
            let done = (self.compile)(program, pointers.len() as c_int, pointers.as_ptr());
            let result = if done == 0 {
                let mut size = 0;
                (self.cubin_size)(program, &raw mut size);
                let mut code = vec![0u8; size];
                match (self.cubin)(program, code.as_mut_ptr().cast()) {
                    0 if size > 0 => Ok(code),
                    e => Err(format!("no machine code: error {e}")),
                }
            } else {
                let mut size = 0;
                (self.log_size)(program, &raw mut size);
                let mut log = vec![0u8; size];
                (self.log)(program, log.as_mut_ptr().cast());
                let text = String::from_utf8_lossy(&log);
                Err(format!(
                    "error {done}: {}",
                    text.trim_end_matches(['\0', '\n'])
                ))
            };
            (self.destroy)(&raw mut program);
            result
        }
    }
}

// SAFETY: the compiler may be called from any thread, on different programs at once (nvrtc's
// documentation).
unsafe impl Send for Compiler {}
// SAFETY: as above.
unsafe impl Sync for Compiler {}
