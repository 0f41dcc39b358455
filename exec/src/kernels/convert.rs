//! Conversions between element types, and runs of elements in memory.

use super::wide::wide;
use half::f16;
use shardlab_plan::ir::DType;

/// Returns the bfloat16 nearest to a float, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if x.is_nan() { nan } else { rounded }) as u16
}

/// Returns a bfloat16 as float.
#[inline(always)]
pub(super) fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

wide! {
    /// bfloat16 to float.
    fn widen(src: &[u16], dst: &mut [f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = from_bf16(*s);
        }
    }

    /// Float to bfloat16.
    fn narrow(src: &[f32], dst: &mut [u16]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = to_bf16(*s);
        }
    }

    /// Rounds to what bfloat16 holds.
    fn round_bf16(x: &mut [f32]) {
        for v in x {
            *v = from_bf16(to_bf16(*v));
        }
    }
}

/// Rounds to what a type holds; integers and float32 are left alone.
pub(super) fn round(dtype: DType, x: &mut [f32]) {
    match dtype {
        DType::Bf16 => round_bf16(x),
        DType::F16 => x.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
        DType::F32 | DType::I64 | DType::U8 => {}
    }
}

/// Reads `dst.len()` elements that lie `stride` elements apart, as floats.
///
/// # Safety
/// All of them are in live memory that nothing writes meanwhile, aligned for the type
/// (integers need not be); `dst` lies elsewhere.
#[inline]
pub(super) unsafe fn read(dtype: DType, ptr: *const u8, stride: usize, dst: &mut [f32]) {
    // SAFETY: the caller's promise covers every element that is read.
    unsafe {
        match (dtype, stride) {
            (DType::F32, 1) => {
                dst.copy_from_slice(std::slice::from_raw_parts(ptr.cast(), dst.len()));
            }
            (DType::Bf16, 1) => widen(std::slice::from_raw_parts(ptr.cast(), dst.len()), dst),
            (_, 0) => {
                let v = if dst.is_empty() {
                    0.0
                } else {
                    read_one(dtype, ptr, 0)
                };
                dst.fill(v);
            }
            (DType::F32, _) => {
                let src = ptr.cast::<f32>();
                for (i, d) in dst.iter_mut().enumerate() {
                    *d = *src.add(i * stride);
                }
            }
            _ => {
                for (i, d) in dst.iter_mut().enumerate() {
                    *d = read_one(dtype, ptr, i * stride);
                }
            }
        }
    }
}

/// Reads the element at an index, as float.
///
/// # Safety
/// As for [`read`].
#[inline]
unsafe fn read_one(dtype: DType, ptr: *const u8, at: usize) -> f32 {
    // SAFETY: as for `read`.
    unsafe {
        match dtype {
            DType::F32 => *ptr.cast::<f32>().add(at),
            DType::Bf16 => from_bf16(*ptr.cast::<u16>().add(at)),
            DType::F16 => f16::from_bits(*ptr.cast::<u16>().add(at)).to_f32(),
            DType::I64 => ptr.cast::<i64>().add(at).read_unaligned() as f32,
            DType::U8 => f32::from(*ptr.add(at)),
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
            _ => {
                for (i, &v) in src.iter().enumerate() {
                    let at = i * stride;
                    match dtype {
                        DType::F32 => *ptr.cast::<f32>().add(at) = v,
                        DType::Bf16 => *ptr.cast::<u16>().add(at) = to_bf16(v),
                        DType::F16 => *ptr.cast::<u16>().add(at) = f16::from_f32(v).to_bits(),
                        DType::I64 => ptr.cast::<i64>().add(at).write_unaligned(v as i64),
                        DType::U8 => *ptr.add(at) = v as u8,
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn bfloat16_rounds_as_half_does() {
        // Every upper half with the lower halves around ties.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (got, want) = (bf16::from_bits(to_bf16(x)), bf16::from_f32(x));
                assert!(
                    got == want || got.is_nan() && want.is_nan(),
                    "{x:?}: {got} {want}"
                );
            }
            let back = from_bf16(high);
            let want = bf16::from_bits(high).to_f32();
            assert!(back == want || back.is_nan() && want.is_nan());
        }
    }
}
