//! Tensor maps of matrices.

use super::codegen::hopper::Map;
use super::error::ErrorKind;
use crate::base::element;
use crate::operand::RawRange;
use cudarc::driver::sys;

/// Returns the tensor map with which a kernel copies boxes of a matrix into shared memory, in lines
/// of 128 bytes that are swizzled; beyond its edges there are zeros.
///
/// # Errors
/// The driver's reason if it refuses the matrix, for example an address or a row that is not a
/// multiple of 16 bytes.
pub(super) fn map(of: &Map, at: &RawRange) -> Result<sys::CUtensorMap, ErrorKind> {
    let mut out = sys::CUtensorMap { opaque: [0; 16] };
    let size = of.dtype.size();
    let [columns, rows] = of.size;
    let sizes = [columns, rows, of.stack.unwrap_or(1)];
    let strides = [columns * size, columns * rows * size];
    let (part, steps) = ([of.part[0], of.part[1], 1], [1; 3]);
    let rank = if of.stack.is_some() { 3 } else { 2 };
    let ty = element::cuda(of.dtype).tensor_map;
    let ty = ty.ok_or_else(|| ErrorKind::Unsupported(format!("no tensor map of {}", of.dtype)))?;
    // SAFETY: all arrays have the length of three dimensions, and outlive the call; the driver only
    // computes with the address.
    let done = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut out,
            ty,
            rank,
            at.ptr.add((of.first * size) as usize).cast(),
            sizes.as_ptr(),
            strides.as_ptr(),
            part.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    done.result()
        .map_err(ErrorKind::driver("cuTensorMapEncodeTiled"))?;
    Ok(out)
}
