//! Waits of the host. They end when the device is done, when a failure has occurred anywhere, or
//! when nothing has made progress for the watchdog's time.

use super::driver::done;
use super::{CudaDevice, Error};
use crate::base::suspend::IdleTime;
use crate::device::{FailureKind, Stop};
use cudarc::driver::sys;
use shardlab_plan::ir::{EventId, InstrId, StreamId};
use std::time::{Duration, Instant};

/// Duration of busy waiting, which detects the end of a step immediately.
const SPIN: Duration = Duration::from_millis(2);
/// Period of the check for failures and timeouts.
const POLL_PERIOD: Duration = Duration::from_millis(1);
/// Time for work in flight to end after its collectives have been aborted.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

impl CudaDevice {
    /// Returns a stream that has unfinished work.
    pub(super) fn busy_stream(&self) -> Result<Option<StreamId>, Error> {
        for (i, s) in self.queues.streams.iter().enumerate() {
            // SAFETY: the stream is alive.
            if !done("cuStreamQuery", unsafe { sys::cuStreamQuery(s.0) })? {
                return Ok(Some(StreamId(i as u8)));
            }
        }
        Ok(None)
    }

    pub(super) fn wait_for_streams(&mut self) -> Result<(), Stop> {
        let mut watch = Watch::new();
        loop {
            let busy = self.busy_stream().map_err(|e| self.driver_error(&e))?;
            let Some(stream) = busy else {
                self.abort.progressed();
                // The results of streams that ended because their peers no longer exist are
                // invalid.
                return if self.abort.aborted() {
                    Err(Stop::Aborted)
                } else {
                    Ok(())
                };
            };
            self.look(&mut watch, InstrId(u32::MAX), |d| {
                let name = d.program.streams[stream.index()].kind.name();
                format!("stream {name} has not finished its work")
            })?;
        }
    }

    pub(super) fn wait_for_event(&mut self, instr: InstrId, event: EventId) -> Result<(), Stop> {
        let mut watch = Watch::new();
        loop {
            let is_done = self.queues.events[event.index()].is_done();
            if is_done.map_err(|e| self.driver_error(&e))? {
                self.abort.progressed();
                return Ok(());
            }
            self.look(&mut watch, instr, |_| {
                format!("event e{} has not completed", event.0)
            })?;
        }
    }

    /// Pauses, and ends the wait on a failure or timeout.
    fn look(
        &mut self,
        watch: &mut Watch,
        instr: InstrId,
        what: impl FnOnce(&Self) -> String,
    ) -> Result<(), Stop> {
        let now = Instant::now();
        if now - watch.start < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        if now - watch.looked < POLL_PERIOD {
            return Ok(());
        }
        watch.looked = now;
        if self.abort.aborted() {
            // Work that does not end now is handled when the device is shut down.
            let _ = self.abort_collectives();
            return Err(Stop::Aborted);
        }
        if let Err(e) = self.collectives.poll() {
            return Err(self.fail(FailureKind::Kernel, None, instr, e));
        }
        if self.moved().map_err(|e| self.driver_error(&e))? {
            self.abort.progressed();
            watch.idle.progressed(now);
        }
        if watch.idle.read(now) < self.abort.timeout() {
            return Ok(());
        }
        let last = self
            .queues
            .completed
            .checked_sub(1)
            .map(|i| self.queues.recorded[i]);
        let behind = match last {
            Some(e) => format!("; the last completed event is e{}", e.0),
            None => "; no event of this pass has completed yet".to_owned(),
        };
        let what = format!("{} after {:.1?}{behind}", what(self), self.abort.timeout());
        Err(self.fail(FailureKind::Timeout, None, instr, what))
    }

    /// Returns whether events have completed since the last call. Events of different streams may
    /// complete in another order than they were recorded in. The first incomplete event stops the
    /// count, which is good enough for a watchdog.
    fn moved(&mut self) -> Result<bool, Error> {
        let before = self.queues.completed;
        while let Some(event) = self.queues.recorded.get(self.queues.completed) {
            if !self.queues.events[event.index()].is_done()? {
                break;
            }
            self.queues.completed += 1;
        }
        Ok(self.queues.completed > before)
    }

    /// Waits for work in flight for a limited time, even after a failure. Returns whether it has
    /// ended.
    pub(super) fn wait_briefly(&self) -> bool {
        let start = Instant::now();
        while self.busy_stream().is_ok_and(|s| s.is_some()) {
            if start.elapsed() >= SHUTDOWN_TIMEOUT {
                return false;
            }
            std::thread::sleep(POLL_PERIOD);
        }
        true
    }
}

struct Watch {
    start: Instant,
    looked: Instant,
    idle: IdleTime,
}

impl Watch {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            looked: now,
            idle: IdleTime::new(now),
        }
    }
}
