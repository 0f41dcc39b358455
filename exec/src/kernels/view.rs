//! Strided windows on a launch's operands.

use super::convert;
use super::error::OperandError;
use super::strides::{self, Dim, Dims, merge};
use crate::operand::RawRange;
use shardlab_plan::ir::{DType, Slot};
use smallvec::SmallVec;

/// Elements in logical (row-major) order, somewhere in memory.
///
/// The creator guarantees that the underlying range stays live while the view is used, and that
/// only the current launch touches it. All elements are inside that range.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    pub(super) ptr: *mut u8,
    pub(super) dtype: DType,
    /// Merged dimensions: no two adjacent ones could be one, and none has one entry.
    pub(super) dims: Dims,
    pub(super) numel: usize,
}

// SAFETY: a view is an address with a shape; its creator's guarantee makes uses of it sound, on any
// thread that works for the launch.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Returns the window that a slot describes, in the element type of the range.
    pub(super) fn new(range: RawRange, slot: &Slot) -> Result<Self, OperandError> {
        Self::build(range, slot, strides::dims(slot).into_iter())
    }

    /// Returns the same, repeated over a larger shape whose last dimensions match.
    pub(super) fn broadcast(
        range: RawRange,
        slot: &Slot,
        to: &[u64],
    ) -> Result<Self, OperandError> {
        let dims = strides::broadcast(slot, to).ok_or_else(|| {
            OperandError::Shape(format!("{:?} does not broadcast to {to:?}", slot.shape))
        })?;
        Self::build(range, slot, dims.into_iter())
    }

    fn build(
        range: RawRange,
        slot: &Slot,
        dims: impl Iterator<Item = Dim> + Clone,
    ) -> Result<Self, OperandError> {
        let numel = dims.clone().map(|d| d.n).product();
        let size = range.dtype.size() as usize;
        let offset = slot.offset as usize;
        if numel > 0 {
            let last: usize = dims.clone().map(|d| (d.n - 1) * d.stride).sum();
            let (needed, found) = (offset + last + 1, range.bytes / size);
            if needed > found {
                return Err(OperandError::Size {
                    what: "an operand",
                    needed,
                    found,
                });
            }
        }
        aligned(range.ptr, range.dtype)?;
        Ok(Self {
            ptr: range.ptr.wrapping_add(offset * size),
            dtype: range.dtype,
            dims: merge(dims),
            numel,
        })
    }

    /// Returns all elements of a range, one after another.
    pub(super) fn flat(range: RawRange) -> Result<Self, OperandError> {
        aligned(range.ptr, range.dtype)?;
        let numel = range.bytes / range.dtype.size() as usize;
        let dims = merge(std::iter::once(Dim {
            n: numel,
            stride: 1,
        }));
        Ok(Self {
            ptr: range.ptr,
            dtype: range.dtype,
            dims,
            numel,
        })
    }

    /// Returns whether the elements are contiguous.
    pub(super) fn is_contiguous(&self) -> bool {
        self.numel <= 1 || matches!(self.dims[..], [Dim { stride: 1, .. }])
    }

    /// Returns the address of the first element, if all are contiguous floats.
    pub(super) fn as_floats(&self) -> Option<*mut f32> {
        (self.dtype == DType::F32 && self.is_contiguous()).then_some(self.ptr.cast())
    }

    /// Returns the bytes of contiguous elements.
    ///
    /// # Errors
    /// [`OperandError::Shape`] if they are not contiguous.
    pub(super) fn bytes(&self) -> Result<&[u8], OperandError> {
        if !self.is_contiguous() {
            let message = "stored bytes are contiguous".to_owned();
            return Err(OperandError::Shape(message));
        }
        let len = self.numel * self.dtype.size() as usize;
        // SAFETY: all elements are inside the range, which the view's creator keeps live, and
        // which only this launch touches.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr, len) })
    }

    /// Returns the bytes from the first to the end of the last element.
    pub(super) fn extent(&self) -> std::ops::Range<usize> {
        let start = self.ptr as usize;
        if self.numel == 0 {
            return start..start;
        }
        let last: usize = self.dims.iter().map(|d| (d.n - 1) * d.stride).sum();
        start..start + (last + 1) * self.dtype.size() as usize
    }

    /// Calls `f(element, stride, from, len)` for runs of `len` equally spaced elements that cover
    /// `start..start + count`.
    #[inline]
    fn runs(&self, start: usize, count: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        debug_assert!(start + count <= self.numel);
        if count == 0 {
            return;
        }
        let (inner, outer) = match self.dims.split_last() {
            None => return f(0, 1, 0, count),
            Some((d, [])) => return f(start * d.stride, d.stride, 0, count),
            Some((d, outer)) => (*d, outer),
        };
        let mut index: SmallVec<[usize; 4]> = SmallVec::from_elem(0, outer.len());
        let mut rest = start / inner.n;
        let mut offset = 0;
        for (i, d) in outer.iter().enumerate().rev() {
            index[i] = rest % d.n;
            rest /= d.n;
            offset += index[i] * d.stride;
        }
        let mut first = start % inner.n;
        let mut done = 0;
        while done < count {
            let len = (inner.n - first).min(count - done);
            f(offset + first * inner.stride, inner.stride, done, len);
            done += len;
            first = 0;
            for (i, d) in outer.iter().enumerate().rev() {
                index[i] += 1;
                offset += d.stride;
                if index[i] < d.n {
                    break;
                }
                offset -= d.n * d.stride;
                index[i] = 0;
            }
        }
    }

    /// Loads elements `start..start + dst.len()` as floats.
    #[inline]
    pub(super) fn load(&self, start: usize, dst: &mut [f32]) {
        // SAFETY: the view's creator guarantees that it may be read.
        unsafe { self.load_at(self.ptr, start, dst) }
    }

    /// Like [`View::load`], with the view's first element at `ptr`.
    ///
    /// # Safety
    /// The elements are in live memory that nothing writes meanwhile.
    #[inline]
    pub(super) unsafe fn load_at(&self, ptr: *const u8, start: usize, dst: &mut [f32]) {
        let size = self.dtype.size() as usize;
        self.runs(start, dst.len(), |at, stride, from, len| {
            let src = ptr.wrapping_add(at * size);
            // SAFETY: these are among the requested elements.
            unsafe { convert::read(self.dtype, src, stride, &mut dst[from..from + len]) }
        });
    }

    /// Writes elements `start..start + src.len()`, rounded.
    #[inline]
    pub(super) fn store(&self, start: usize, src: &[f32]) {
        let size = self.dtype.size() as usize;
        self.runs(start, src.len(), |at, stride, from, len| {
            let dst = self.ptr.wrapping_add(at * size);
            // SAFETY: the run is inside the view, whose creator guarantees that it may be written.
            unsafe { convert::write(self.dtype, dst, stride, &src[from..from + len]) }
        });
    }

    /// Returns the element at a position, as a float.
    pub(super) fn get(&self, at: usize) -> f32 {
        let mut v = [0.0];
        self.load(at, &mut v);
        v[0]
    }

    /// Writes the same value everywhere.
    pub(super) fn fill(&self, value: f32) {
        let block = [value; 256];
        for start in (0..self.numel).step_by(block.len()) {
            self.store(start, &block[..block.len().min(self.numel - start)]);
        }
    }

    /// Loads integers from `start` on, exactly.
    pub(super) fn load_ids(&self, start: usize, dst: &mut [i64]) -> Result<(), OperandError> {
        if self.dtype != DType::I64 {
            return Err(OperandError::Type(self.dtype));
        }
        let ptr = self.ptr.cast::<i64>();
        self.runs(start, dst.len(), |at, stride, from, len| {
            for i in 0..len {
                // SAFETY: the element is inside the view.
                dst[from + i] = unsafe { ptr.add(at + i * stride).read_unaligned() };
            }
        });
        Ok(())
    }

    /// Writes integers exactly.
    pub(super) fn store_ids(&self, start: usize, src: &[i64]) {
        let ptr = self.ptr.cast::<i64>();
        self.runs(start, src.len(), |at, stride, from, len| {
            for i in 0..len {
                // SAFETY: the element is inside the view.
                unsafe { ptr.add(at + i * stride).write_unaligned(src[from + i]) };
            }
        });
    }
}

/// Returns whether two byte ranges share a byte.
pub(super) fn overlap(a: &std::ops::Range<usize>, b: &std::ops::Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

fn aligned(ptr: *mut u8, dtype: DType) -> Result<(), OperandError> {
    // Integers are read and written unaligned.
    if dtype.is_float() && !(ptr as usize).is_multiple_of(dtype.size() as usize) {
        return Err(OperandError::Misaligned(dtype));
    }
    Ok(())
}
