//! NCCL's C interface as in `nccl.h` 2.28: types with their layouts, and a table of functions.
//!
//! Enumerations are plain integers here, because a closed Rust `enum` with an unlisted value is
//! undefined behavior. NCCL returns such values: `ncclRedOpCreatePreMulSum` assigns new numbers to
//! reductions.

use std::ffi::{c_char, c_float, c_int, c_uint, c_void};

/// `ncclResult_t`.
pub type RawResult = c_int;
/// `ncclComm_t`.
pub type RawComm = *mut c_void;
/// `ncclWindow_t`.
pub type RawWindow = *mut c_void;
/// `cudaStream_t`, which is the driver's `CUstream`.
pub type RawStream = *mut c_void;

/// `ncclSuccess`.
pub const SUCCESS: RawResult = 0;
/// `ncclInProgress`.
pub const IN_PROGRESS: RawResult = 7;
/// `NCCL_CONFIG_UNDEF_INT`.
pub const UNDEFINED: c_int = c_int::MIN;
/// Version of the header of these types: `NCCL_VERSION(2, 28, 9)`.
pub const HEADER_VERSION: c_uint = 22809;
/// `NCCL_SPLIT_NOCOLOR`.
pub const NO_COLOR: c_int = -1;
/// `ncclScalarHostImmediate`.
pub const HOST_IMMEDIATE: c_int = 1;

/// `ncclUniqueId`: 128 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawUniqueId {
    /// Opaque bytes.
    pub internal: [c_char; 128],
}

/// `ncclConfig_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields of nccl.h")]
pub struct RawConfig {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub traffic_class: c_int,
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    pub channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
}

impl RawConfig {
    /// `NCCL_CONFIG_INITIALIZER`.
    #[must_use]
    pub const fn initial() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: HEADER_VERSION,
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
        }
    }
}

/// `ncclSimInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields of nccl.h")]
pub struct RawSimInfo {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub estimated_time: c_float,
}

impl RawSimInfo {
    /// `NCCL_SIM_INFO_INITIALIZER`.
    #[must_use]
    pub const fn initial() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0x7468_5283,
            version: HEADER_VERSION,
            estimated_time: -1.0,
        }
    }
}

macro_rules! functions {
    (
        required { $($field:ident $symbol:literal: fn($($arg:ty),*) -> $ret:ty;)* }
        optional { $($ofield:ident $osymbol:literal: fn($($oarg:ty),*) -> $oret:ty;)* }
    ) => {
        /// Functions of the library. Functions of later versions, and optional ones, may be
        /// missing.
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(#[doc = concat!("`", $symbol, "`.")] pub $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $(#[doc = concat!("`", $osymbol, "`.")] pub $ofield: Option<unsafe extern "C" fn($($oarg),*) -> $oret>,)*
        }

        impl Functions {
            /// Symbols that a library must have.
            pub const REQUIRED: &'static [&'static str] = &[$($symbol),*];
            /// Symbols that a library may have.
            pub const OPTIONAL: &'static [&'static str] = &[$($osymbol),*];

            /// Looks up every symbol. The error is the first required symbol that is missing.
            ///
            /// # Safety
            /// The library is NCCL 2: its symbols have the types of `nccl.h`. The table is only
            /// used while the library is loaded.
            pub(crate) unsafe fn of(library: &libloading::Library) -> Result<Self, &'static str> {
                $(
                    // SAFETY: the caller guarantees the symbol's type.
                    let $field = match unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> $ret>($symbol.as_bytes()) } {
                        Ok(f) => *f,
                        Err(_) => return Err($symbol),
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $ofield = unsafe { library.get::<unsafe extern "C" fn($($oarg),*) -> $oret>($osymbol.as_bytes()) }
                        .ok()
                        .map(|f| *f);
                )*
                Ok(Self { $($field,)* $($ofield,)* })
            }

            /// Returns whether a symbol exists.
            #[must_use]
            pub fn has(&self, symbol: &str) -> bool {
                match symbol {
                    $($symbol => true,)*
                    $($osymbol => self.$ofield.is_some(),)*
                    _ => false,
                }
            }
        }
    };
}

functions! {
    required {
        get_version "ncclGetVersion": fn(*mut c_int) -> RawResult;
        get_unique_id "ncclGetUniqueId": fn(*mut RawUniqueId) -> RawResult;
        get_error_string "ncclGetErrorString": fn(RawResult) -> *const c_char;
        comm_init_rank_config "ncclCommInitRankConfig": fn(*mut RawComm, c_int, RawUniqueId, c_int, *mut RawConfig) -> RawResult;
        comm_finalize "ncclCommFinalize": fn(RawComm) -> RawResult;
        comm_destroy "ncclCommDestroy": fn(RawComm) -> RawResult;
        comm_abort "ncclCommAbort": fn(RawComm) -> RawResult;
        comm_get_async_error "ncclCommGetAsyncError": fn(RawComm, *mut RawResult) -> RawResult;
        comm_count "ncclCommCount": fn(RawComm, *mut c_int) -> RawResult;
        comm_cu_device "ncclCommCuDevice": fn(RawComm, *mut c_int) -> RawResult;
        comm_user_rank "ncclCommUserRank": fn(RawComm, *mut c_int) -> RawResult;
        group_start "ncclGroupStart": fn() -> RawResult;
        group_end "ncclGroupEnd": fn() -> RawResult;
        all_reduce "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
        reduce "ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawComm, RawStream) -> RawResult;
        broadcast "ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
        all_gather "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> RawResult;
        reduce_scatter "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
        send "ncclSend": fn(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
        recv "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
    }
    optional {
        get_last_error "ncclGetLastError": fn(RawComm) -> *const c_char;
        comm_split "ncclCommSplit": fn(RawComm, c_int, c_int, *mut RawComm, *mut RawConfig) -> RawResult;
        comm_shrink "ncclCommShrink": fn(RawComm, *mut c_int, c_int, *mut RawComm, *mut RawConfig, c_int) -> RawResult;
        comm_init_rank_scalable "ncclCommInitRankScalable": fn(*mut RawComm, c_int, c_int, c_int, *mut RawUniqueId, *mut RawConfig) -> RawResult;
        comm_revoke "ncclCommRevoke": fn(RawComm, c_int) -> RawResult;
        comm_register "ncclCommRegister": fn(RawComm, *mut c_void, usize, *mut *mut c_void) -> RawResult;
        comm_deregister "ncclCommDeregister": fn(RawComm, *mut c_void) -> RawResult;
        comm_window_register "ncclCommWindowRegister": fn(RawComm, *mut c_void, usize, *mut RawWindow, c_int) -> RawResult;
        comm_window_deregister "ncclCommWindowDeregister": fn(RawComm, RawWindow) -> RawResult;
        mem_alloc "ncclMemAlloc": fn(*mut *mut c_void, usize) -> RawResult;
        mem_free "ncclMemFree": fn(*mut c_void) -> RawResult;
        red_op_create_pre_mul_sum "ncclRedOpCreatePreMulSum": fn(*mut c_int, *mut c_void, c_int, c_int, RawComm) -> RawResult;
        red_op_destroy "ncclRedOpDestroy": fn(c_int, RawComm) -> RawResult;
        all_to_all "ncclAlltoAll": fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> RawResult;
        gather "ncclGather": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
        scatter "ncclScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> RawResult;
        group_simulate_end "ncclGroupSimulateEnd": fn(*mut RawSimInfo) -> RawResult;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    /// Checks the offsets that a C compiler gives the structs of nccl.h 2.28.9 on a 64-bit machine.
    #[test]
    fn structs_are_those_of_the_header() {
        assert_eq!((size_of::<RawConfig>(), align_of::<RawConfig>()), (80, 8));
        let offsets = [
            offset_of!(RawConfig, size),
            offset_of!(RawConfig, magic),
            offset_of!(RawConfig, version),
            offset_of!(RawConfig, blocking),
            offset_of!(RawConfig, cga_cluster_size),
            offset_of!(RawConfig, min_ctas),
            offset_of!(RawConfig, max_ctas),
            offset_of!(RawConfig, net_name),
            offset_of!(RawConfig, split_share),
            offset_of!(RawConfig, traffic_class),
            offset_of!(RawConfig, comm_name),
            offset_of!(RawConfig, collnet_enable),
            offset_of!(RawConfig, cta_policy),
            offset_of!(RawConfig, shrink_share),
            offset_of!(RawConfig, nvls_ctas),
            offset_of!(RawConfig, channels_per_net_peer),
            offset_of!(RawConfig, nvlink_centric_sched),
        ];
        assert_eq!(
            offsets,
            [
                0, 8, 12, 16, 20, 24, 28, 32, 40, 44, 48, 56, 60, 64, 68, 72, 76
            ]
        );
        assert_eq!((size_of::<RawSimInfo>(), align_of::<RawSimInfo>()), (24, 8));
        assert_eq!(offset_of!(RawSimInfo, magic), 8);
        assert_eq!(offset_of!(RawSimInfo, version), 12);
        assert_eq!(offset_of!(RawSimInfo, estimated_time), 16);
        assert_eq!(size_of::<RawUniqueId>(), 128);
        assert_eq!(RawConfig::initial().size, 80);
        assert_eq!(RawSimInfo::initial().size, 24);
    }
}
