//! Strides: which reshapes are views, and which layouts ops produce.

use super::Shape;
use smallvec::SmallVec;

/// Strides in elements, one per dimension.
pub(crate) type Strides = SmallVec<[u64; 4]>;

/// Returns row-major strides.
pub(crate) fn contiguous(shape: &[u64]) -> Strides {
    let mut strides: Strides = SmallVec::from_elem(1, shape.len());
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1];
    }
    strides
}

/// Returns whether the elements are row-major without gaps (strides of dimensions of size 1 do not
/// matter).
pub(crate) fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1;
    for (&n, &s) in shape.iter().zip(strides).rev() {
        if n != 1 {
            if s != expected {
                return false;
            }
            expected *= n;
        }
    }
    true
}

/// Returns dense strides whose order of dimensions is that of `strides`, as PyTorch's
/// TensorIterator sorts them: broadcast dimensions keep their place and are skipped; of dimensions
/// with equal strides, the longer one is the outer one.
pub(crate) fn dense_like(shape: &[u64], strides: &[u64]) -> Strides {
    // Innermost first; an insertion sort that continues past dimensions that it cannot compare.
    let mut order: SmallVec<[usize; 4]> = (0..shape.len()).rev().collect();
    for i in 1..order.len() {
        let mut at = i;
        for inner in (0..i).rev() {
            let (a, b) = (order[inner], order[at]);
            if strides[a] == 0 || strides[b] == 0 {
                continue;
            }
            let by_length = strides[a] == strides[b] && shape[a] > shape[b];
            if strides[a] > strides[b] || by_length {
                order.swap(inner, at);
                at = inner;
            } else if strides[a] < strides[b] {
                break;
            }
        }
    }
    let mut out: Strides = SmallVec::from_elem(1, shape.len());
    let mut step = 1;
    for &d in &order {
        out[d] = step;
        step *= shape[d];
    }
    out
}

/// Returns the strides of the same memory viewed with another shape, or `None` if that needs a
/// copy.
pub(crate) fn view(shape: &[u64], strides: &[u64], to: &[u64]) -> Option<Strides> {
    if is_contiguous(shape, strides) {
        return Some(contiguous(to));
    }
    let mut out: Strides = SmallVec::from_elem(1, to.len());
    let mut t = to.len();
    // Walk chunks of source dimensions that are contiguous among themselves, innermost first.
    let mut i = shape.len();
    while i > 0 {
        let mut chunk = shape[i - 1];
        let base = strides[i - 1];
        let mut expected = base * shape[i - 1];
        i -= 1;
        while i > 0 && (shape[i - 1] == 1 || strides[i - 1] == expected) {
            chunk *= shape[i - 1];
            expected *= shape[i - 1];
            i -= 1;
        }
        let mut step = base;
        let mut covered = 1;
        while t > 0 && (covered < chunk || to[t - 1] == 1) {
            out[t - 1] = step;
            step *= to[t - 1];
            covered *= to[t - 1];
            t -= 1;
        }
        if covered != chunk {
            return None;
        }
    }
    (t == 0).then_some(out)
}

/// Returns strides that broadcast `shape` to `to` (right-aligned). They are zero for repeated
/// dimensions.
pub(crate) fn broadcast(shape: &[u64], strides: &[u64], to: &[u64]) -> Strides {
    let lead = to.len() - shape.len();
    let mut out: Strides = SmallVec::from_elem(0, to.len());
    for i in 0..shape.len() {
        if shape[i] == to[lead + i] {
            out[lead + i] = strides[i];
        } else {
            debug_assert_eq!(shape[i], 1, "cannot broadcast {shape:?} to {to:?}");
        }
    }
    out
}

/// Returns the number of elements from the first to the last one accessed, inclusive.
pub(crate) fn extent(shape: &[u64], strides: &[u64]) -> u64 {
    shape
        .iter()
        .zip(strides)
        .map(|(&n, &s)| (n - 1) * s)
        .sum::<u64>()
        + 1
}

/// Returns the number of distinct elements: broadcast dimensions count once.
pub(crate) fn distinct(shape: &[u64], strides: &[u64]) -> u64 {
    shape
        .iter()
        .zip(strides)
        .map(|(&n, &s)| if s == 0 { 1 } else { n })
        .product()
}

/// Creates a shape from a slice.
pub(crate) fn shape(dims: &[u64]) -> Shape {
    SmallVec::from_slice(dims)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_and_copies() {
        // [2, 3, 4, 5] viewed with dimensions 1 and 2 transposed.
        let (sh, st) = ([2, 4, 3, 5], [60, 5, 20, 1]);
        assert!(!is_contiguous(&sh, &st));
        assert_eq!(
            view(&sh, &st, &[2, 4, 15]),
            None,
            "merging 3 and 5 across a gap copies"
        );
        assert_eq!(
            view(&sh, &st, &[2, 4, 3, 5, 1]).as_deref(),
            Some(&[60, 5, 20, 1, 1][..])
        );
        assert_eq!(
            view(&sh, &st, &[2, 2, 2, 3, 5]).as_deref(),
            Some(&[60, 10, 5, 20, 1][..])
        );
        assert_eq!(
            view(&[2, 8], &[9, 1], &[16]),
            None,
            "tokens without the last column"
        );
        assert_eq!(
            view(&[1, 8], &[9, 1], &[8]).as_deref(),
            Some(&[1][..]),
            "one row of it is a view"
        );
    }

    #[test]
    fn dense_layout_follows_the_order_of_strides() {
        // The first half of the last dimension of a transposed view. It is not dense, and the order
        // is batch, sequence, head, element.
        assert_eq!(
            dense_like(&[2, 4, 3, 5], &[120, 10, 40, 1]).as_slice(),
            &[60, 5, 20, 1]
        );
        assert_eq!(
            dense_like(&[2, 4, 3, 5], &[60, 15, 5, 1]).as_slice(),
            &[60, 15, 5, 1]
        );
    }

    /// Dimensions of size 1 and broadcast dimensions do not separate those next to them. The
    /// expected strides were derived by hand from `reorder_dimensions`.
    #[test]
    fn dense_layout_looks_past_dimensions_that_say_nothing() {
        // A transposed [5, 3] with a dimension of size 1 between; its stride is that of the
        // outermost.
        assert_eq!(dense_like(&[3, 1, 5], &[1, 15, 3]).as_slice(), &[1, 15, 3]);
        // A broadcast dimension keeps its place between the two that change theirs.
        assert_eq!(dense_like(&[3, 2, 5], &[1, 0, 3]).as_slice(), &[1, 3, 6]);
        // Equal strides: one head of a [batch, sequence, head, element] tensor, seen with heads
        // first.
        assert_eq!(
            dense_like(&[2, 1, 3, 4], &[12, 4, 4, 1]).as_slice(),
            &[12, 4, 4, 1]
        );
        assert_eq!(
            dense_like(&[2, 3, 1, 4], &[12, 4, 4, 1]).as_slice(),
            &[12, 4, 4, 1]
        );
    }

    #[test]
    fn extents_and_distinct_elements() {
        assert_eq!(extent(&[2, 3], &[10, 1]), 13);
        assert_eq!(distinct(&[2, 3], &[0, 1]), 3);
        assert_eq!(broadcast(&[3], &[1], &[2, 3]).as_slice(), &[0, 1]);
    }
}
