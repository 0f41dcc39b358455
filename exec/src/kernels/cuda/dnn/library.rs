//! The functions of cuDNN that attention needs.
//!
//! The general bindings open `libcudnn.so`, which pip's package does not have: on a machine with
//! another cuDNN, two versions would be mixed. Here the loaded file is found by its full name.

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptor_t as Raw, cudnnBackendDescriptorType_t as Kind, cudnnHandle_t as Handle,
};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

/// Result of the functions: 0 is success.
pub(super) type Status = u32;

/// Functions of the library.
pub(super) struct Api {
    pub(super) create: unsafe extern "C" fn(*mut Handle) -> Status,
    pub(super) destroy: unsafe extern "C" fn(Handle) -> Status,
    pub(super) version: unsafe extern "C" fn() -> usize,
    pub(super) set_stream: unsafe extern "C" fn(Handle, *mut c_void) -> Status,
    pub(super) last_error: unsafe extern "C" fn(*mut c_char, usize),
    pub(super) new: unsafe extern "C" fn(Kind, *mut Raw) -> Status,
    pub(super) drop: unsafe extern "C" fn(Raw) -> Status,
    pub(super) finish: unsafe extern "C" fn(Raw) -> Status,
    pub(super) set: unsafe extern "C" fn(Raw, Name, Type, i64, *const c_void) -> Status,
    pub(super) get: unsafe extern "C" fn(Raw, Name, Type, i64, *mut i64, *mut c_void) -> Status,
    pub(super) execute: unsafe extern "C" fn(Handle, Raw, Raw) -> Status,
}

/// Returns the library, if it is loaded or can be loaded; otherwise the reason why not.
pub(super) fn api() -> Result<&'static Api, &'static str> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let api = API.get_or_init(|| load().map_err(|e| e.to_string()));
    api.as_ref().map_err(String::as_str)
}

fn load() -> Result<Api, libloading::Error> {
    // SAFETY: NVIDIA's library runs no code at loading that depends on ours, and is never unloaded;
    // the names are those of its headers, whose signatures are the fields' types.
    unsafe {
        fn raw<T: Copy>(s: Symbol<T>) -> T {
            *s
        }
        let library = Library::open(Some("libcudnn.so.9"), RTLD_NOW | RTLD_GLOBAL)?;
        let api = Api {
            create: raw(library.get(b"cudnnCreate\0")?),
            destroy: raw(library.get(b"cudnnDestroy\0")?),
            version: raw(library.get(b"cudnnGetVersion\0")?),
            set_stream: raw(library.get(b"cudnnSetStream\0")?),
            last_error: raw(library.get(b"cudnnGetLastErrorString\0")?),
            new: raw(library.get(b"cudnnBackendCreateDescriptor\0")?),
            drop: raw(library.get(b"cudnnBackendDestroyDescriptor\0")?),
            finish: raw(library.get(b"cudnnBackendFinalize\0")?),
            set: raw(library.get(b"cudnnBackendSetAttribute\0")?),
            get: raw(library.get(b"cudnnBackendGetAttribute\0")?),
            execute: raw(library.get(b"cudnnBackendExecute\0")?),
        };
        std::mem::forget(library);
        Ok(api)
    }
}

/// Returns the first lines of the library's message about its last failure on this thread.
pub(super) fn last_error(api: &Api, most: usize) -> String {
    let mut text = vec![0u8; most];
    // SAFETY: the buffer has the given length.
    unsafe { (api.last_error)(text.as_mut_ptr().cast(), text.len()) };
    let text = String::from_utf8_lossy(&text);
    text.trim_end_matches('\0').trim().to_owned()
}
