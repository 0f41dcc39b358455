//! Waits of the host: they end when the device is done, when something has failed anywhere, or when nothing has moved for
//! the watchdog's time.

use super::driver::done;
use super::{CudaDevice, Error};
use crate::device::{FailureKind, Stop};
use crate::stopped::Idle;
use cudarc::driver::sys;
use shardlab_plan::ir::{EventId, InstrId, StreamId};
use std::time::{Duration, Instant};

/// Looks without a pause between them: a step's end must not be noticed late.
const EAGER: Duration = Duration::from_millis(2);
/// Between looks at what else may have happened.
const PERIOD: Duration = Duration::from_millis(1);
/// How long work in flight may take to end once its collectives are aborted.
const FAREWELL: Duration = Duration::from_secs(5);

impl CudaDevice {
    /// A stream that has work left.
    pub(super) fn busy_stream(&self) -> Result<Option<StreamId>, Error> {
        for (i, s) in self.streams.iter().enumerate() {
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
            let busy = self.busy_stream().map_err(|e| self.broken(&e))?;
            let Some(stream) = busy else {
                self.abort.progressed();
                // Streams that ended although their peers are gone hold nothing of use.
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
            let is_done = self.events[event.index()].is_done();
            if is_done.map_err(|e| self.broken(&e))? {
                self.abort.progressed();
                return Ok(());
            }
            self.look(&mut watch, instr, |_| {
                format!("event e{} has not completed", event.0)
            })?;
        }
    }

    /// Pauses, and ends the wait where there is a reason.
    fn look(
        &mut self,
        watch: &mut Watch,
        instr: InstrId,
        what: impl FnOnce(&Self) -> String,
    ) -> Result<(), Stop> {
        let now = Instant::now();
        if now - watch.start < EAGER {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        if now - watch.looked < PERIOD {
            return Ok(());
        }
        watch.looked = now;
        if self.abort.aborted() {
            // What does not end now is seen to when the device is given up.
            let _ = self.cut();
            return Err(Stop::Aborted);
        }
        if let Err(e) = self.collectives.poll() {
            return Err(self.fail(FailureKind::Kernel, None, instr, e));
        }
        if self.moved().map_err(|e| self.broken(&e))? {
            self.abort.progressed();
            watch.idle.moved(now);
        }
        if watch.idle.look(now) < self.abort.timeout() {
            return Ok(());
        }
        let last = self.passed.checked_sub(1).map(|i| self.marks[i]);
        let behind = match last {
            Some(e) => format!("; the last completed event is e{}", e.0),
            None => "; no event of this pass has completed yet".to_owned(),
        };
        let what = format!("{} after {:.1?}{behind}", what(self), self.abort.timeout());
        Err(self.fail(FailureKind::Timeout, None, instr, what))
    }

    /// Whether events have completed since the last look. Those of different streams complete in another order than
    /// they were recorded in; the first that has not holds up the count, which is good enough for a watchdog.
    fn moved(&mut self) -> Result<bool, Error> {
        let before = self.passed;
        while let Some(event) = self.marks.get(self.passed) {
            if !self.events[event.index()].is_done()? {
                break;
            }
            self.passed += 1;
        }
        Ok(self.passed > before)
    }

    /// Waits for work in flight for a little while, whatever has happened; whether it has ended.
    pub(super) fn wait_briefly(&self) -> bool {
        let start = Instant::now();
        while self.busy_stream().is_ok_and(|s| s.is_some()) {
            if start.elapsed() >= FAREWELL {
                return false;
            }
            std::thread::sleep(PERIOD);
        }
        true
    }
}

struct Watch {
    start: Instant,
    looked: Instant,
    idle: Idle,
}

impl Watch {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            looked: now,
            idle: Idle::new(now),
        }
    }
}
