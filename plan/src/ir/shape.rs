//! Tensor shapes.

use smallvec::SmallVec;

/// A tensor shape, outermost dimension first.
pub type Shape = SmallVec<[u64; 4]>;
