//! The CUDA driver calls that the example needs, loaded at run time.

use crate::Ptr;
use libloading::Library;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

type Words = String;

pub(crate) struct Driver(Library);

/// Calls a driver function by name; errors have its name and number.
macro_rules! cu {
    ($driver:expr, $name:literal, $($arg:expr => $ty:ty),*) => {{
        let f = unsafe { $driver.0.get::<unsafe extern "C" fn($($ty),*) -> c_int>($name.as_bytes()) }
            .map_err(|e| e.to_string())?;
        match unsafe { f($($arg),*) } {
            0 => Ok::<(), Words>(()),
            e => Err(format!("{}: error {e}", $name)),
        }
    }};
}

impl Driver {
    pub(crate) fn load() -> Result<Self, Words> {
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
        let it = Self(library);
        cu!(it, "cuInit", 0 => c_uint)?;
        Ok(it)
    }

    pub(crate) fn gpus(&self) -> Result<u32, Words> {
        let mut n = 0;
        cu!(self, "cuDeviceGetCount", &raw mut n => *mut c_int)?;
        Ok(n as u32)
    }
}

/// A GPU whose context is current on the thread.
pub(crate) struct Gpu {
    driver: Arc<Driver>,
    device: c_int,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Plain,
    /// Memory of the virtual memory functions, with a handle for other processes.
    Exportable,
}

pub(crate) struct Memory(u64);

impl Memory {
    pub(crate) fn ptr(&self) -> Ptr {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Prop {
    kind: c_int,
    handles: c_int,
    location: c_int,
    id: c_int,
    win32: *const u8,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDesc {
    location: c_int,
    id: c_int,
    flags: c_int,
}

impl Gpu {
    pub(crate) fn new(driver: &Arc<Driver>, ordinal: u32) -> Result<Self, Words> {
        let mut device = 0;
        cu!(driver, "cuDeviceGet", &raw mut device => *mut c_int, ordinal as c_int => c_int)?;
        let mut context: Ptr = std::ptr::null_mut();
        cu!(driver, "cuDevicePrimaryCtxRetain", &raw mut context => *mut Ptr, device => c_int)?;
        cu!(driver, "cuCtxSetCurrent", context => Ptr)?;
        Ok(Self {
            driver: Arc::clone(driver),
            device,
        })
    }

    /// Lives until the process ends.
    pub(crate) fn alloc(&self, bytes: usize, kind: Kind) -> Result<Memory, Words> {
        let d = &self.driver;
        let mut at = 0u64;
        if kind == Kind::Plain {
            cu!(d, "cuMemAlloc_v2", &raw mut at => *mut u64, bytes => usize)?;
            return Ok(Memory(at));
        }
        let prop = Prop {
            kind: 1,
            handles: 1,
            location: 1,
            id: self.device,
            win32: std::ptr::null(),
            flags: [0; 8],
        };
        let bytes = bytes.next_multiple_of(2 << 20);
        let mut handle = 0u64;
        cu!(d, "cuMemCreate", &raw mut handle => *mut u64, bytes => usize, &raw const prop => *const Prop, 0 => u64)?;
        cu!(d, "cuMemAddressReserve", &raw mut at => *mut u64, bytes => usize, 0 => usize, 0 => u64, 0 => u64)?;
        cu!(d, "cuMemMap", at => u64, bytes => usize, 0 => usize, handle => u64, 0 => u64)?;
        let access = AccessDesc {
            location: 1,
            id: self.device,
            flags: 3,
        };
        cu!(d, "cuMemSetAccess", at => u64, bytes => usize, &raw const access => *const AccessDesc, 1 => usize)?;
        Ok(Memory(at))
    }

    pub(crate) fn write(&self, m: &Memory, data: &[f32]) -> Result<(), Words> {
        let bytes = size_of_val(data);
        cu!(self.driver, "cuMemcpyHtoD_v2", m.0 => u64, data.as_ptr() => *const f32, bytes => usize)
    }

    pub(crate) fn read(&self, m: &Memory, n: usize) -> Result<Vec<f32>, Words> {
        let mut out = vec![0f32; n];
        cu!(self.driver, "cuMemcpyDtoH_v2", out.as_mut_ptr() => *mut f32, m.0 => u64, n * 4 => usize)?;
        Ok(out)
    }

    pub(crate) fn stream(&self) -> Result<Ptr, Words> {
        let mut s: Ptr = std::ptr::null_mut();
        cu!(self.driver, "cuStreamCreate", &raw mut s => *mut Ptr, 1 => c_uint)?;
        Ok(s)
    }

    pub(crate) fn wait(&self, stream: Ptr) -> Result<(), Words> {
        cu!(self.driver, "cuStreamSynchronize", stream => Ptr)
    }

    /// Returns the microseconds of a call, by events around many.
    pub(crate) fn time(
        &self,
        stream: Ptr,
        warm: u32,
        many: u32,
        call: &mut dyn FnMut() -> Result<(), Words>,
    ) -> Result<f64, Words> {
        let d = &self.driver;
        let (mut from, mut to): (Ptr, Ptr) = (std::ptr::null_mut(), std::ptr::null_mut());
        cu!(d, "cuEventCreate", &raw mut from => *mut Ptr, 0 => c_uint)?;
        cu!(d, "cuEventCreate", &raw mut to => *mut Ptr, 0 => c_uint)?;
        for _ in 0..warm {
            call()?;
        }
        cu!(d, "cuEventRecord", from => Ptr, stream => Ptr)?;
        for _ in 0..many {
            call()?;
        }
        cu!(d, "cuEventRecord", to => Ptr, stream => Ptr)?;
        self.wait(stream)?;
        let mut ms = 0f32;
        cu!(d, "cuEventElapsedTime", &raw mut ms => *mut f32, from => Ptr, to => Ptr)?;
        Ok(f64::from(ms) * 1e3 / f64::from(many))
    }
}
