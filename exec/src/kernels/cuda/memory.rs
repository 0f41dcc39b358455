//! Device memory and timing for autotuning, while kernels are prepared.

use super::error::ErrorKind;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr, CUstream};

/// Device memory that is freed when it is dropped.
pub(super) struct Scratch {
    pub(super) at: CUdeviceptr,
}

impl Scratch {
    /// Allocates memory of the current context and sets every byte.
    pub(super) fn new(bytes: u64, byte: u8) -> Result<Self, ErrorKind> {
        // SAFETY: the context is current; the allocation is set before anything reads it.
        unsafe {
            let at = result::malloc_sync(bytes.max(256) as usize)
                .map_err(ErrorKind::driver("cuMemAlloc"))?;
            let it = Self { at };
            result::memset_d8_sync(at, byte, bytes as usize)
                .map_err(ErrorKind::driver("cuMemsetD8"))?;
            // The host does not wait for memory to be set, and other streams do not wait for the
            // stream that sets it.
            result::ctx::synchronize().map_err(ErrorKind::driver("cuCtxSynchronize"))?;
            Ok(it)
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once; the user has waited for its stream.
        let _ = unsafe { result::free_sync(self.at) };
    }
}

/// A stream with two events on it.
pub(super) struct Stopwatch {
    stream: CUstream,
    events: [sys::CUevent; 2],
}

impl Stopwatch {
    pub(super) fn new() -> Result<Self, ErrorKind> {
        use result::{event, stream};
        let kind = stream::StreamKind::NonBlocking;
        let stream = stream::create(kind).map_err(ErrorKind::driver("cuStreamCreate"))?;
        let make = || {
            event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
                .map_err(ErrorKind::driver("cuEventCreate"))
        };
        Ok(Self {
            stream,
            events: [make()?, make()?],
        })
    }

    pub(super) fn stream(&self) -> CUstream {
        self.stream
    }

    /// Returns the shortest time of some runs after one that is not counted, in microseconds.
    pub(super) fn micros(
        &self,
        runs: usize,
        mut f: impl FnMut() -> Result<(), ErrorKind>,
    ) -> Result<f32, ErrorKind> {
        f()?;
        let mut best = f32::INFINITY;
        for _ in 0..runs {
            best = best.min(self.once(&mut f)?);
        }
        Ok(best)
    }

    /// Times candidates in a short burst: microseconds of each, infinite for those that do not run.
    ///
    /// # Errors
    /// The last one's reason, if none runs.
    pub(super) fn bursts(
        &self,
        candidates: usize,
        mut run: impl FnMut(usize) -> Result<(), ErrorKind>,
    ) -> Result<Vec<f32>, ErrorKind> {
        let (mut times, mut trouble) = (Vec::new(), None);
        for i in 0..candidates {
            // A candidate that does not run is not an option.
            let micros = self
                .micros(3, || run(i))
                .inspect_err(|e| trouble = Some(e.clone()));
            times.push(micros.unwrap_or(f32::INFINITY));
        }
        match trouble {
            Some(e) if times.iter().all(|t| t.is_infinite()) => Err(e),
            _ => Ok(times),
        }
    }

    /// Returns the mean time of consecutive runs, after some that are not counted, in microseconds.
    /// `f` gets the number of the run.
    pub(super) fn mean(
        &self,
        before: usize,
        runs: usize,
        mut f: impl FnMut(usize) -> Result<(), ErrorKind>,
    ) -> Result<f32, ErrorKind> {
        (0..before).try_for_each(&mut f)?;
        let all = self.once(|| (before..before + runs).try_for_each(&mut f))?;
        Ok(all / runs.max(1) as f32)
    }

    /// Returns the microseconds of what `f` enqueues.
    fn once(&self, f: impl FnOnce() -> Result<(), ErrorKind>) -> Result<f32, ErrorKind> {
        use result::{event, stream};
        let record = |e| {
            // SAFETY: stream and events are live.
            unsafe { event::record(e, self.stream) }.map_err(ErrorKind::driver("cuEventRecord"))
        };
        record(self.events[0])?;
        f()?;
        record(self.events[1])?;
        // SAFETY: the same.
        let ms = unsafe {
            stream::synchronize(self.stream).map_err(ErrorKind::driver("cuStreamSynchronize"))?;
            event::elapsed(self.events[0], self.events[1])
                .map_err(ErrorKind::driver("cuEventElapsedTime"))?
        };
        Ok(ms * 1000.0)
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            for e in self.events {
                let _ = result::event::destroy(e);
            }
        }
    }
}
