//! Conversions between element types, and runs of elements in memory.

use super::wide::wide;
use crate::base::element::{Element, match_dtype};
use half::bf16;
use shardlab_plan::ir::DType;

wide! {
    /// Converts bfloat16 to float.
    fn widen(src: &[bf16], dst: &mut [f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = s.widen();
        }
    }

    /// Converts float to bfloat16.
    fn narrow(src: &[f32], dst: &mut [bf16]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = bf16::round(*s);
        }
    }

    /// Rounds to bfloat16 precision.
    fn round_bf16(x: &mut [f32]) {
        for v in x {
            *v = bf16::round(*v).widen();
        }
    }
}

/// Rounds to the precision of a type; integers and float32 are left alone.
pub(super) fn round(dtype: DType, x: &mut [f32]) {
    match dtype {
        DType::Bf16 => round_bf16(x),
        DType::F32 => {}
        _ if !dtype.is_float() && !dtype.is_float8() => {}
        _ => match_dtype!(dtype, T => {
            x.iter_mut().for_each(|v| *v = <T as Element>::round(*v).widen());
        }),
    }
}

/// Reads `dst.len()` elements that are `stride` elements apart, as floats.
///
/// # Safety
/// All of them are in live memory that nothing writes meanwhile, aligned for the type (integers
/// need not be); `dst` is elsewhere.
#[inline]
pub(super) unsafe fn read(dtype: DType, ptr: *const u8, stride: usize, dst: &mut [f32]) {
    // SAFETY: the caller's promise covers every element that is read.
    unsafe {
        match (dtype, stride) {
            (DType::F32, 1) => {
                dst.copy_from_slice(std::slice::from_raw_parts(ptr.cast(), dst.len()));
            }
            (DType::Bf16, 1) => widen(std::slice::from_raw_parts(ptr.cast(), dst.len()), dst),
            (_, 0) if dst.is_empty() => {}
            (_, 0) => dst.fill(match_dtype!(dtype, T => {
                ptr.cast::<T>().read_unaligned().widen()
            })),
            _ => match_dtype!(dtype, T => {
                let src = ptr.cast::<T>();
                for (i, d) in dst.iter_mut().enumerate() {
                    *d = src.add(i * stride).read_unaligned().widen();
                }
            }),
        }
    }
}

/// Writes elements `stride` apart, rounding each to the type.
///
/// # Safety
/// All of them are in live memory that nothing else touches meanwhile, aligned for the
/// type (integers need not be); `src` is elsewhere.
#[inline]
pub(super) unsafe fn write(dtype: DType, ptr: *mut u8, stride: usize, src: &[f32]) {
    // SAFETY: the caller's promise covers every element that is written.
    unsafe {
        match (dtype, stride) {
            (DType::F32, 1) => {
                std::slice::from_raw_parts_mut(ptr.cast(), src.len()).copy_from_slice(src);
            }
            (DType::Bf16, 1) => narrow(src, std::slice::from_raw_parts_mut(ptr.cast(), src.len())),
            _ => match_dtype!(dtype, T => {
                let dst = ptr.cast::<T>();
                for (i, &v) in src.iter().enumerate() {
                    dst.add(i * stride).write_unaligned(<T as Element>::round(v));
                }
            }),
        }
    }
}
