//! Times of tasks: what the host knows about them, combined with the device's clocks.

use super::activity::Activity;
use super::driver::{CudaError, Event, RawStream};
use super::host_stream::HostTimes;
use crate::device::TaskTimes;
use shardlab_plan::ir::{CommId, EventId};
use smallvec::SmallVec;

/// A task of a recorded pass.
#[derive(Debug)]
struct Task {
    number: u32,
    stream: usize,
    comm: Option<CommId>,
    issued: u64,
    /// Events that its stream has waited for since the previous task.
    waits: SmallVec<[EventId; 2]>,
}

/// Source of the times of tasks.
#[derive(Debug)]
enum Clock {
    /// CUPTI's records. The label of a task is its index plus one.
    Records(Activity),
    /// Events around each task, if CUPTI is unavailable.
    Events {
        /// Event that was recorded at the start of the pass.
        base: Event,
        /// Host clock at that time.
        base_ns: u64,
        /// Pairs of events, by task.
        pairs: Vec<(Event, Event)>,
    },
}

/// Number of pairs that exist at the start of a pass. Nothing should be created while collectives
/// wait for each other.
const SPARE: usize = 512;

/// Message of a failed measurement.
pub(super) type Trouble = String;

/// Records the tasks of passes.
#[derive(Debug)]
pub(crate) struct Recorder {
    tasks: Vec<Task>,
    /// Tasks of the current pass.
    clock: Option<Clock>,
    /// Use CUPTI's records.
    records: bool,
    /// By stream: events awaited since the last task.
    waits: Vec<SmallVec<[EventId; 2]>>,
    /// By stream: the last task.
    last: Vec<Option<usize>>,
    /// By event: the task after which it was recorded.
    behind: Vec<Option<usize>>,
    /// Pairs of events of earlier passes.
    spare: Vec<(Event, Event)>,
}

impl Recorder {
    pub(crate) fn new(streams: usize, events: usize, records: bool) -> Self {
        Self {
            tasks: Vec::new(),
            clock: None,
            records,
            waits: vec![SmallVec::new(); streams],
            last: vec![None; streams],
            behind: vec![None; events],
            spare: Vec::new(),
        }
    }

    /// Begins a pass on an idle device.
    pub(crate) fn begin(
        &mut self,
        stream: RawStream,
        now: impl Fn() -> u64,
    ) -> Result<(), CudaError> {
        self.tasks.clear();
        self.waits.iter_mut().for_each(SmallVec::clear);
        self.last.fill(None);
        self.behind.fill(None);
        self.put_away();
        if self.records {
            // If another profiler uses CUPTI, events work as well.
            self.clock = Activity::start(&now).ok().map(Clock::Records);
        }
        // CUPTI allocates memory at the first call that it observes. This memory must not belong to
        // the pass.
        let base = Event::new(true)?;
        base.record(stream)?;
        while !base.is_done()? {
            std::hint::spin_loop();
        }
        if self.clock.is_none() {
            while self.spare.len() < SPARE {
                self.spare.push((Event::new(true)?, Event::new(true)?));
            }
            self.clock = Some(Clock::Events {
                base,
                base_ns: now(),
                pairs: Vec::new(),
            });
        }
        Ok(())
    }

    /// Returns the source of times.
    pub(crate) fn source(&self) -> &'static str {
        match self.clock {
            Some(Clock::Records(_)) => "CUPTI activity records",
            _ => "events around every instruction",
        }
    }

    /// Records that a task is about to be enqueued.
    pub(crate) fn start(
        &mut self,
        number: u32,
        stream: (usize, RawStream),
        comm: Option<CommId>,
        issued: u64,
    ) -> Result<(), Trouble> {
        let (index, raw) = stream;
        self.tasks.push(Task {
            number,
            stream: index,
            comm,
            issued,
            waits: std::mem::take(&mut self.waits[index]),
        });
        self.last[index] = Some(self.tasks.len() - 1);
        let label = self.tasks.len() as u64;
        match &mut self.clock {
            Some(Clock::Records(activity)) => activity.enter(label)?,
            Some(Clock::Events { pairs, .. }) => {
                let pair = match self.spare.pop() {
                    Some(pair) => pair,
                    None => (words(Event::new(true))?, words(Event::new(true))?),
                };
                words(pair.0.record(raw))?;
                pairs.push(pair);
            }
            None => {}
        }
        Ok(())
    }

    /// Records that the task has been enqueued.
    pub(crate) fn end(&mut self, stream: RawStream) -> Result<(), Trouble> {
        match &mut self.clock {
            Some(Clock::Records(activity)) => activity.leave(),
            Some(Clock::Events { pairs, .. }) => match pairs.last() {
                Some(pair) => words(pair.1.record(stream)),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Records that an event was recorded on a stream.
    pub(crate) fn recorded(&mut self, event: EventId, stream: usize) {
        self.behind[event.index()] = self.last[stream];
    }

    /// Records that a stream waits for an event.
    pub(crate) fn waited(&mut self, event: EventId, stream: usize) {
        self.waits[stream].push(event);
    }

    /// Returns start and end of every task, in issue order, in nanoseconds of the host's clock;
    /// `None` for tasks without a record.
    fn spans(&self) -> Result<Vec<Option<(u64, u64)>>, Trouble> {
        match &self.clock {
            None => Ok(vec![None; self.tasks.len()]),
            Some(Clock::Records(activity)) => {
                let spans = activity.spans()?;
                Ok((1..=self.tasks.len() as u64)
                    .map(|label| spans.get(&label).copied())
                    .collect())
            }
            Some(Clock::Events {
                base,
                base_ns,
                pairs,
            }) => {
                let at = |e: &Event| {
                    let ms = words(e.ms_since(base))?;
                    Ok::<_, Trouble>(base_ns + (f64::from(ms) * 1e6).max(0.0) as u64)
                };
                pairs
                    .iter()
                    .map(|(s, e)| Ok(Some((at(s)?, at(e)?))))
                    .collect()
            }
        }
    }

    /// Ends the recording, and keeps its events for the next one.
    fn put_away(&mut self) {
        if let Some(Clock::Events { pairs, .. }) = self.clock.take() {
            self.spare.extend(pairs);
        }
    }

    /// Returns the times of the pass and ends the recording. The device must be idle. Tasks on the
    /// CPU, which the GPU does not record, have the times `on_cpu`.
    pub(crate) fn times(&mut self, on_cpu: &HostTimes) -> Result<Vec<TaskTimes>, Trouble> {
        let mut spans = self.spans()?;
        for (task, span) in self.tasks.iter().zip(&mut spans) {
            if let Some(&found) = on_cpu.get(&task.number) {
                *span = Some(found);
            }
        }
        self.put_away();
        Ok(join(&self.tasks, &spans, &self.behind))
    }
}

fn words<T>(r: Result<T, CudaError>) -> Result<T, Trouble> {
    r.map_err(|e| e.to_string())
}

/// Combines what the host knows about tasks with the times at which they ran.
fn join(tasks: &[Task], spans: &[Option<(u64, u64)>], behind: &[Option<usize>]) -> Vec<TaskTimes> {
    let streams = tasks.iter().map(|t| t.stream + 1).max().unwrap_or(0);
    let comms = tasks
        .iter()
        .filter_map(|t| t.comm)
        .map(|c| c.index() + 1)
        .max()
        .unwrap_or(0);
    let mut stream_end = vec![0; streams];
    let mut comm_end = vec![0; comms];
    let mut out: Vec<TaskTimes> = Vec::with_capacity(tasks.len());
    for (task, span) in tasks.iter().zip(spans) {
        let waited = task
            .waits
            .iter()
            .filter_map(|&e| Some((e, out.get(behind[e.index()]?)?.end)))
            .max_by_key(|w| w.1);
        let ready = task
            .issued
            .max(stream_end[task.stream])
            .max(waited.map_or(0, |w| w.1));
        // A task without a record did no work.
        let (start, end) = span.unwrap_or((ready, ready));
        // The clocks of device and host differ slightly, but a task does not start before it could.
        let ready = ready.min(start);
        let free = task.comm.map_or(ready, |c| comm_end[c.index()].max(ready));
        let end = end.max(start);
        stream_end[task.stream] = end;
        if let Some(c) = task.comm {
            comm_end[c.index()] = end;
        }
        out.push(TaskTimes {
            task: task.number,
            issued: task.issued.min(start),
            ready,
            free: free.min(start),
            start,
            end,
            waited,
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(number: u32, stream: usize, issued: u64, waits: &[u32]) -> Task {
        Task {
            number,
            stream,
            comm: None,
            issued,
            waits: waits.iter().map(|&e| EventId(e)).collect(),
        }
    }

    #[test]
    fn a_task_is_ready_when_it_is_issued_its_stream_is_free_and_its_events_are_done() {
        let tasks = [
            task(0, 0, 10, &[]),
            task(1, 1, 20, &[]),
            // The task waits for both events; the later one counts.
            task(2, 0, 30, &[0, 1]),
            task(3, 0, 500, &[]),
        ];
        let spans = [(15, 100), (25, 200), (210, 300), (510, 520)].map(Some);
        let times = join(&tasks, &spans, &[Some(0), Some(1)]);
        let ready: Vec<u64> = times.iter().map(|t| t.ready).collect();
        assert_eq!(ready, [10, 20, 200, 500]);
        assert_eq!(times[2].waited, Some((EventId(1), 200)));
        assert_eq!(times[3].waited, None);
    }

    #[test]
    fn a_collective_waits_for_its_communicator() {
        let mut tasks = [task(0, 0, 0, &[]), task(1, 1, 5, &[])];
        tasks.iter_mut().for_each(|t| t.comm = Some(CommId(0)));
        let times = join(&tasks, &[Some((1, 50)), Some((60, 70))], &[]);
        assert_eq!((times[1].ready, times[1].free, times[1].start), (5, 50, 60));
    }

    #[test]
    fn clocks_that_differ_a_little_do_no_harm() {
        let times = join(&[task(0, 0, 12, &[])], &[Some((10, 9))], &[]);
        assert_eq!((times[0].issued, times[0].ready), (10, 10));
        assert_eq!((times[0].start, times[0].end), (10, 10));
        let times = join(&[task(0, 0, 12, &[])], &[None], &[]);
        assert_eq!((times[0].start, times[0].end), (12, 12));
    }
}
