//! Checks that a collective's ranges fit its kind. NCCL receives a single length and does not check
//! it.

use crate::base::operand::RawRange;
use crate::comm::check::{in_place, overlap};
use shardlab_plan::ir::{CollectiveKind, DType};

/// Checks the parts of the member at `position` of `n`.
pub(super) fn parts(
    kind: CollectiveKind,
    dtype: DType,
    position: usize,
    n: usize,
    parts: &[(RawRange, RawRange)],
) -> Result<(), String> {
    let element = dtype.size() as usize;
    for (p, (input, output)) in parts.iter().enumerate() {
        let (i, o) = (input.bytes, output.bytes);
        // NCCL's all-to-all has no staging copy.
        let exchanges = kind.exchanges();
        let fits = kind.sizes_fit(i as u64, o as u64, n as u64)
            && (!exchanges || i.is_multiple_of(n * element));
        if !fits || !i.is_multiple_of(element) || !o.is_multiple_of(element) {
            return Err(format!(
                "part {p} of {}: {i} input and {o} output bytes of {dtype} do not match {n} ranks",
                kind.name()
            ));
        }
        if overlap(input, output) && (exchanges || !in_place(kind, position, input, output)) {
            return Err(format!(
                "part {p} of {}: input and output overlap other than in place",
                kind.name()
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};

    fn at(address: usize, bytes: usize) -> RawRange {
        RawRange {
            ptr: std::ptr::without_provenance_mut(address),
            bytes,
            dtype: DType::F32,
        }
    }

    #[test]
    fn lengths_and_places() {
        let ok = |kind, position, input, output| {
            parts(kind, DType::F32, position, 4, &[(input, output)]).is_ok()
        };
        assert!(ok(AllGather, 2, at(0x1000, 16), at(0x2000, 64)));
        assert!(!ok(AllGather, 2, at(0x1000, 16), at(0x2000, 60)));
        // In place means the same address: the rank's own slice.
        assert!(ok(AllGather, 2, at(0x1020, 16), at(0x1000, 64)));
        assert!(!ok(AllGather, 1, at(0x1020, 16), at(0x1000, 64)));
        assert!(ok(ReduceScatter, 3, at(0x1000, 64), at(0x1030, 16)));
        assert!(!ok(ReduceScatter, 3, at(0x1000, 64), at(0x1000, 16)));
        assert!(ok(AllReduce, 0, at(0x1000, 64), at(0x1000, 64)));
        assert!(!ok(AllReduce, 0, at(0x1000, 64), at(0x1004, 64)));
        assert!(ok(AllToAll, 0, at(0x1000, 64), at(0x1040, 64)));
        assert!(!ok(AllToAll, 0, at(0x1000, 64), at(0x1000, 64)));
        assert!(!ok(AllToAll, 0, at(0x1000, 72), at(0x2000, 72)));
        // Lengths that are not whole elements.
        assert!(!ok(AllReduce, 0, at(0x1000, 6), at(0x2000, 6)));
    }
}
