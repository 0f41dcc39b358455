//! Temporary memory of kernels, kept per thread, so that a launch allocates nothing once its thread
//! is warm.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Float temporaries with contents left over from earlier uses; returned to the thread when
/// dropped.
pub(super) struct Scratch {
    data: Vec<f32>,
    len: usize,
}

impl Scratch {
    /// Takes `len` floats.
    pub(super) fn take(len: usize) -> Self {
        let mut data = FREE.with_borrow_mut(|free| {
            // The smallest that is long enough, or else the longest.
            let fits = (0..free.len())
                .filter(|&i| free[i].len() >= len)
                .min_by_key(|&i| free[i].len());
            match fits.or_else(|| (0..free.len()).max_by_key(|&i| free[i].len())) {
                Some(i) => free.swap_remove(i),
                None => Vec::new(),
            }
        });
        if data.len() < len {
            data.clear();
            data.resize(len.next_multiple_of(1024), 0.0);
        }
        Self { data, len }
    }

    /// Takes `len` zeros.
    pub(super) fn zeroed(len: usize) -> Self {
        let mut s = Self::take(len);
        s.fill(0.0);
        s
    }
}

impl Deref for Scratch {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.data[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        // Fails only while the thread ends; then the memory is simply freed.
        let _ = FREE.try_with(|free| free.borrow_mut().push(data));
    }
}
