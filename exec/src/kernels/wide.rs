//! Compiles one loop for several vector widths.
//!
//! The loops are written so that their results do not depend on the width: every reduction has a
//! fixed number of lanes, and nothing is contracted into fused multiply-adds. The widest variant
//! that the processor supports runs.

/// Vector instructions of the processor, beyond the baseline of the target.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// Nothing more.
    Base,
    /// AVX2 and FMA.
    V3,
    /// AVX-512.
    V4,
}

/// Returns the level of this processor, which is determined once.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn level() -> Level {
    static LEVEL: std::sync::OnceLock<Level> = std::sync::OnceLock::new();
    *LEVEL.get_or_init(|| {
        let v3 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let v4 = v3
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (v3, v4) {
            (_, true) => Level::V4,
            (true, false) => Level::V3,
            _ => Level::Base,
        }
    })
}

/// Defines functions that are compiled once for each vector level.
macro_rules! wide {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "the arguments of a loop")]
        pub(in crate::kernels) fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
                fn v4($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn v3($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                match crate::kernels::wide::level() {
                    // SAFETY: the processor has these instructions.
                    crate::kernels::wide::Level::V4 => return unsafe { v4($($arg),*) },
                    // SAFETY: as above.
                    crate::kernels::wide::Level::V3 => return unsafe { v3($($arg),*) },
                    crate::kernels::wide::Level::Base => {}
                }
            }
            body($($arg),*)
        }
    )*};
}
pub(super) use wide;
