//! Operands with realistic values, for autotuning: the power of a kernel depends on how many bits
//! change, so with repeated numbers the clock would be higher than in training.

use super::error::ErrorKind;
use crate::base::element::push;
use crate::base::random::Sequence;
use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use shardlab_plan::ir::DType;
use std::sync::OnceLock;

/// Number of elements that are repeated through an operand; a prime's multiple, so that the rows of
/// tiles are not copies of one another.
const DISTINCT: usize = 256 * 4099;

/// Fills live device memory with normal numbers of an element type; `turn` makes operands differ.
/// Wait for the device before reading them.
pub(super) fn fill(
    at: CUdeviceptr,
    bytes: u64,
    dtype: DType,
    scale: f32,
    turn: usize,
) -> Result<(), ErrorKind> {
    let block = block(dtype, scale, turn, bytes);
    let first = block.len().min(bytes as usize);
    // SAFETY: the memory has as many bytes; data copied within it are already written, and precede
    // their copy.
    unsafe {
        result::memcpy_htod_sync(at, &block[..first]).map_err(ErrorKind::driver("cuMemcpyHtoD"))?;
        let mut done = first as u64;
        while done < bytes {
            let more = done.min(bytes - done);
            result::memcpy_dtod_sync(at + done, at, more as usize)
                .map_err(ErrorKind::driver("cuMemcpyDtoD"))?;
            done += more;
        }
    }
    Ok(())
}

/// Returns normally distributed numbers, which are always the same.
fn normals() -> &'static [f32] {
    static NORMALS: OnceLock<Vec<f32>> = OnceLock::new();
    NORMALS.get_or_init(|| {
        let mut all = Sequence::new(7, "operands");
        (0..DISTINCT).map(|_| all.normal() as f32).collect()
    })
}

/// Returns at most `bytes` bytes of the numbers from number `turn` on, in an element type.
fn block(dtype: DType, scale: f32, turn: usize, bytes: u64) -> Vec<u8> {
    let all = normals();
    let (end, start) = all.split_at(turn % all.len());
    let scaled = start.iter().chain(end).map(|x| x * scale);
    let mut out = Vec::new();
    for x in scaled.take(bytes.div_ceil(dtype.size()) as usize) {
        push(&mut out, dtype, x);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn operands_are_normal() {
        let all = normals();
        let n = all.len() as f64;
        let moment = |k| all.iter().map(|&x| f64::from(x).powi(k)).sum::<f64>() / n;
        assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.01);
        assert!((moment(4) - 3.0).abs() < 0.05, "{}", moment(4));
        let bytes = block(DType::Bf16, 0.02, 5, u64::MAX);
        assert_eq!(bytes.len(), 2 * all.len());
        let first = bf16::from_le_bytes([bytes[0], bytes[1]]);
        assert_eq!(first, bf16::from_f32(all[5] * 0.02));
    }
}
