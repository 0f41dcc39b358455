//! Nesting of host events, and lookup of the event at a given time.

use crate::kineto::Trace;
use std::ops::Range;

/// The nesting of a trace's host events, by index.
pub(crate) struct Tree {
    parents: Vec<Option<u32>>,
    /// Events of each thread.
    threads: Vec<Range<usize>>,
}

impl Tree {
    pub(crate) fn new(trace: &Trace) -> Self {
        let host = &trace.host;
        let mut parents = Vec::with_capacity(host.len());
        let mut threads = vec![0..0; trace.threads.len()];
        let mut open: Vec<u32> = Vec::new();
        for (i, event) in host.iter().enumerate() {
            if i == 0 || host[i - 1].thread != event.thread {
                open.clear();
                threads[event.thread as usize] = i..i;
            }
            threads[event.thread as usize].end = i + 1;
            // Times are rounded, so an event that starts within another one is nested in it, even
            // if it seems to end later.
            while let Some(&top) = open.last() {
                if host[top as usize].end > event.start {
                    break;
                }
                open.pop();
            }
            parents.push(open.last().copied());
            open.push(i as u32);
        }
        Self { parents, threads }
    }

    /// Returns the event that encloses an event.
    pub(crate) fn parent(&self, event: usize) -> Option<usize> {
        self.parents[event].map(|p| p as usize)
    }

    /// Returns an event and the events that enclose it, innermost first.
    pub(crate) fn around(&self, event: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(event), |&e| self.parent(e))
    }

    /// Returns the innermost event of a thread at a time.
    pub(crate) fn at(&self, trace: &Trace, thread: u32, time: i64) -> Option<usize> {
        let range = self.threads.get(thread as usize)?.clone();
        let events = &trace.host[range.clone()];
        let last = events.partition_point(|e| e.start <= time).checked_sub(1)?;
        self.around(range.start + last)
            .find(|&e| trace.host[e].end >= time)
    }

    /// Returns the event of a thread that starts exactly at a time; the innermost if there are
    /// several.
    pub(crate) fn starting(&self, trace: &Trace, thread: u32, time: i64) -> Option<usize> {
        let range = self.threads.get(thread as usize)?.clone();
        let events = &trace.host[range.clone()];
        let last = events.partition_point(|e| e.start <= time).checked_sub(1)?;
        (events[last].start == time).then_some(range.start + last)
    }
}
