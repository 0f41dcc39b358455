//! Interface between the device and the communication library.

use super::context::Context;
use super::driver::{RawStream, check};
use super::helper_kernels::HelperKernels;
use super::memory::Piece;
use crate::base::operand::RawRange;
use cudarc::driver::sys;
use shardlab_plan::ir::{Collective, CollectiveId, ReduceOp};
use shardlab_plan::program::Program;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Collectives of one rank.
pub(crate) trait Collectives: Send {
    /// Registers the memory that collectives will use. The memory stays allocated until this object
    /// is dropped. Called once, before all other calls, on all ranks at the same time.
    ///
    /// # Errors
    /// Returns a message if the library cannot register the memory.
    fn register(&mut self, memory: &[Piece]) -> Result<(), String>;

    /// Enqueues a collective. Can be captured.
    ///
    /// # Errors
    /// Returns a message if the parts do not fit the collective, or if the library refuses the
    /// call.
    fn launch(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<(), String>;

    /// Returns the library's estimate of a collective's duration without enqueuing anything; `None`
    /// if there is none. All ranks of the communicator must call it at the same time.
    ///
    /// # Errors
    /// Returns a message if the parts do not fit the collective, or if the library refuses the
    /// call.
    fn estimate(
        &mut self,
        _id: CollectiveId,
        _parts: &[(RawRange, RawRange)],
        _stream: RawStream,
    ) -> Result<Option<Duration>, String> {
        Ok(None)
    }

    /// Checks whether an asynchronous error has occurred.
    ///
    /// # Errors
    /// Returns a message if one has; it names the communicator.
    fn poll(&mut self) -> Result<(), String>;

    /// Aborts everything in flight, because peers no longer exist. Waits for a limited time, and
    /// returns whether everything has ended.
    fn abort(&mut self) -> bool;

    /// Returns a function that aborts everything in flight from another thread, even while this
    /// thread is inside a call.
    fn aborter(&self) -> Box<dyn Fn() + Send>;

    /// Returns facts for the run's environment.
    fn facts(&self) -> BTreeMap<String, String>;

    /// Returns a feature that the program could use but this object does not, with the reason.
    fn unused(&self) -> Option<(&'static str, String)> {
        None
    }
}

/// Collectives of a rank whose communicators have no other members. Nothing is exchanged.
pub(crate) struct SingleRank {
    program: Arc<Program>,
    helpers: HelperKernels,
}

impl SingleRank {
    /// Creates the collectives of a program in which no collective needs another rank.
    pub(crate) fn new(context: &Arc<Context>, program: &Arc<Program>) -> Result<Self, String> {
        Ok(Self {
            program: Arc::clone(program),
            helpers: HelperKernels::new(context)?,
        })
    }

    fn factor(c: &Collective) -> f32 {
        match c.reduce {
            ReduceOp::PremulSum(factor) => factor as f32,
            ReduceOp::None | ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Max => 1.0,
        }
    }
}

impl Collectives for SingleRank {
    fn register(&mut self, _: &[Piece]) -> Result<(), String> {
        Ok(())
    }

    fn launch(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<(), String> {
        let factor = Self::factor(&self.program.collectives[id.index()]);
        for (from, to) in parts {
            let done = if factor != 1.0 {
                self.helpers.scale(from, to, factor, stream)
            } else if from.ptr == to.ptr {
                Ok(())
            } else {
                // SAFETY: by the interpreter's contract, the ranges are live device memory of equal
                // length.
                check("cuMemcpyAsync", unsafe {
                    sys::cuMemcpyAsync(
                        to.ptr.addr() as u64,
                        from.ptr.addr() as u64,
                        to.bytes.min(from.bytes),
                        stream.0,
                    )
                })
            };
            done.map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn abort(&mut self) -> bool {
        true
    }

    fn aborter(&self) -> Box<dyn Fn() + Send> {
        Box::new(|| ())
    }

    fn facts(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}
