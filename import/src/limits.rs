//! Limits of the numbers in a file. Numbers beyond them indicate damage. Sums of numbers within
//! them fit 64 bits.

/// Largest absolute time in nanoseconds: 73 years.
pub(crate) const TIME: i64 = 1 << 61;
/// Longest duration of device work in nanoseconds: an hour.
pub(crate) const MAX_DURATION: i64 = 3_600_000_000_000;
/// Largest distance of an event from the median of its trace in nanoseconds: a day.
pub(crate) const SPREAD: i64 = 24 * MAX_DURATION;
/// Largest size in bytes: 4 TiB.
pub(crate) const BYTES: u64 = 1 << 42;
/// Largest address. Predictions use higher addresses than devices do.
pub(crate) const ADDRESS: u64 = 1 << 63;
/// Largest number of elements of a tensor.
pub(crate) const ELEMENTS: u64 = 1 << 40;

/// Returns the number of elements of a shape; `None` if no tensor has that shape.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    let all = shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d));
    all.filter(|n| *n <= ELEMENTS && shape.iter().all(|d| *d <= ELEMENTS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_a_size() {
        assert_eq!(elements(&[2, 3]), Some(6));
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[1 << 33, 1 << 33]), None);
        assert_eq!(elements(&[u64::MAX, 0]), None);
    }
}
