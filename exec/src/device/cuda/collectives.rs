//! What the device asks of whoever performs collectives.

use super::context::Context;
use super::driver::{RawStream, check};
use super::support::Support;
use crate::operand::RawRange;
use cudarc::driver::sys;
use shardlab_plan::ir::{Collective, CollectiveId, ReduceOp};
use shardlab_plan::program::Program;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Collectives of one rank.
pub(crate) trait Collectives: Send {
    /// Tells which memory collectives will use: device addresses and lengths, which stay allocated until this is dropped.
    /// Called once, before anything else, on all ranks at the same time.
    ///
    /// # Errors
    /// In words.
    fn register(&mut self, ranges: &[(u64, usize)]) -> Result<(), String>;

    /// Enqueues a collective; capturable.
    ///
    /// # Errors
    /// In words.
    fn launch(
        &mut self,
        id: CollectiveId,
        parts: &[(RawRange, RawRange)],
        stream: RawStream,
    ) -> Result<(), String>;

    /// The library's own estimate of how long a collective takes; nothing is enqueued. `None` where it has none. All ranks of its
    /// communicator ask at the same time.
    ///
    /// # Errors
    /// In words.
    fn estimate(
        &mut self,
        _id: CollectiveId,
        _parts: &[(RawRange, RawRange)],
        _stream: RawStream,
    ) -> Result<Option<Duration>, String> {
        Ok(None)
    }

    /// Whether something went wrong since.
    ///
    /// # Errors
    /// In words.
    fn poll(&mut self) -> Result<(), String>;

    /// Ends everything in flight at once: peers are gone. Waits a bounded time for that; whether it was enough.
    fn abort(&mut self) -> bool;

    /// Does the same from another thread, also while this one is inside of a call.
    fn cutter(&self) -> Box<dyn Fn() + Send>;

    /// Facts for the run's environment.
    fn facts(&self) -> BTreeMap<String, String>;
}

/// Communicators of one rank: nothing is exchanged.
pub(crate) struct Alone {
    program: Arc<Program>,
    support: Support,
}

impl Alone {
    /// For a program none of whose collectives needs another rank.
    pub(crate) fn new(context: &Arc<Context>, program: &Arc<Program>) -> Result<Self, String> {
        Ok(Self {
            program: Arc::clone(program),
            support: Support::new(context)?,
        })
    }

    fn factor(c: &Collective) -> f32 {
        match c.reduce {
            ReduceOp::PremulSum(factor) => factor as f32,
            ReduceOp::None | ReduceOp::Sum | ReduceOp::Avg => 1.0,
        }
    }
}

impl Collectives for Alone {
    fn register(&mut self, _: &[(u64, usize)]) -> Result<(), String> {
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
                self.support.scale(from, to, factor, stream)
            } else if from.ptr == to.ptr {
                Ok(())
            } else {
                // SAFETY: ranges of live device memory of equal length, by the interpreter's promise.
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

    fn cutter(&self) -> Box<dyn Fn() + Send> {
        Box::new(|| ())
    }

    fn facts(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}
