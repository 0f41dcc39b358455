//! Dimensions of slots: sizes and strides in elements, for CPU loops and generated code alike.

use shardlab_plan::ir::Slot;
use smallvec::SmallVec;

/// A dimension: entries and the distance between them in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dim {
    pub(super) n: usize,
    pub(super) stride: usize,
}

/// Dimensions, outermost first.
pub(super) type Dims = SmallVec<[Dim; 4]>;

/// Returns the strides of a slot, one per dimension.
pub(super) fn of(slot: &Slot) -> SmallVec<[usize; 4]> {
    if slot.strides.is_empty() {
        let mut out: SmallVec<[usize; 4]> = SmallVec::from_elem(1, slot.shape.len());
        for i in (1..slot.shape.len()).rev() {
            out[i - 1] = out[i] * slot.shape[i] as usize;
        }
        out
    } else {
        slot.strides.iter().map(|&s| s as usize).collect()
    }
}

/// Returns the number of elements of a slot.
pub(super) fn numel(slot: &Slot) -> usize {
    slot.shape.iter().product::<u64>() as usize
}

/// Returns the number of rows and the length of the last dimension.
pub(super) fn matrix(slot: &Slot) -> (usize, usize) {
    let cols = slot.shape.last().map_or(1, |&c| c as usize);
    (numel(slot) / cols.max(1), cols)
}

/// Merges dimensions that one loop can run over.
pub(super) fn merge(dims: impl Iterator<Item = Dim>) -> Dims {
    let mut out = Dims::new();
    for d in dims {
        if d.n == 1 {
            continue;
        }
        match out.last_mut() {
            Some(last) if last.stride == d.stride * d.n => {
                last.n *= d.n;
                last.stride = d.stride;
            }
            _ => out.push(d),
        }
    }
    out
}

/// Returns the dimensions of a slot, unmerged.
pub(super) fn dims(slot: &Slot) -> Dims {
    let dim = |(&n, stride)| Dim {
        n: n as usize,
        stride,
    };
    slot.shape.iter().zip(of(slot)).map(dim).collect()
}

/// Returns the unmerged dimensions of a slot that is repeated over a larger shape, or `None` if its
/// dimensions are not the last ones of `to`, or 1.
pub(super) fn broadcast(slot: &Slot, to: &[u64]) -> Option<Dims> {
    let own = dims(slot);
    let lead = to.len().checked_sub(own.len())?;
    let mut out = Dims::with_capacity(to.len());
    for (i, &n) in to.iter().enumerate() {
        let n = n as usize;
        let stride = match i.checked_sub(lead).map(|j| own[j]) {
            None => 0,
            Some(d) if d.n == n => d.stride,
            Some(d) if d.n == 1 => 0,
            Some(_) => return None,
        };
        out.push(Dim { n, stride });
    }
    Some(out)
}
