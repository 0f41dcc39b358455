//! Captured scopes as CUDA graphs.
//!
//! A scope's commands may use several streams. One of them is the origin: the capture starts there,
//! and the other streams fork from it and join it at the end. A replay makes the origin wait for
//! earlier work of the other streams, and the other streams wait for the graph. Events that are
//! awaited or were recorded outside of the scope become nodes of the graph.

use super::driver::{CudaError, Event, RawStream, check};
use crate::device::Command;
use cudarc::driver::sys;
use shardlab_plan::ir::{EventId, StreamId};
use shardlab_plan::program::{Op, Program};
use std::collections::BTreeSet;

/// Streams and events of a scope's commands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Stream on which the graph is launched.
    pub(super) origin: StreamId,
    /// The other streams, ascending.
    pub(super) others: Vec<StreamId>,
    /// Events that commands outside of the scope wait for.
    pub(super) outward: BTreeSet<EventId>,
    /// Events that were recorded before the scope.
    pub(super) inward: BTreeSet<EventId>,
}

impl Shape {
    /// Collects the streams and events of commands; `None` if there are none.
    pub(super) fn of(program: &Program, commands: &[(StreamId, Command)]) -> Option<Self> {
        let streams: BTreeSet<StreamId> = commands.iter().map(|c| c.0).collect();
        // The lowest stream is the compute stream, if the scope uses it.
        let origin = *streams.first()?;
        let first = commands.iter().map(|c| c.1.instr().0).min()?;
        let last = commands.iter().map(|c| c.1.instr().0).max()?;
        let mut recorded = BTreeSet::new();
        let mut inward = BTreeSet::new();
        for (_, command) in commands {
            match *command {
                Command::Record { event, .. } => {
                    recorded.insert(event);
                }
                Command::Wait { event, .. } if !recorded.contains(&event) => {
                    inward.insert(event);
                }
                _ => {}
            }
        }
        let section = program.sections.iter().find(|s| s.instrs.contains(&first));
        let outside = section
            .map(|s| s.instrs.clone())
            .unwrap_or_default()
            .filter(|i| !(first..=last).contains(i));
        let outward = outside
            .filter_map(|i| match program.instrs[i as usize].op {
                Op::Wait { event, .. } | Op::HostWait(event) => Some(event),
                _ => None,
            })
            .filter(|e| recorded.contains(e))
            .collect();
        Some(Self {
            origin,
            others: streams.into_iter().filter(|&s| s != origin).collect(),
            outward,
            inward,
        })
    }
}

/// An executable graph.
#[derive(Debug)]
pub(super) struct Exec {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: handles of the driver; only one thread at a time uses them, through `&mut`.
unsafe impl Send for Exec {}

impl Exec {
    /// Captures the work that `issue` enqueues on streams that fork from `origin` and join it
    /// again.
    pub(super) fn capture<E: From<CudaError>>(
        origin: RawStream,
        others: &[RawStream],
        issue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let fork = Event::new(false)?;
        let joins = others
            .iter()
            .map(|_| Event::new(false))
            .collect::<Result<Vec<_>, _>>()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not the default one.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(origin.0, mode)
        })?;
        let issued = (|| {
            fork.record(origin)?;
            for &s in others {
                fork.wait(s)?;
            }
            issue()?;
            for (&s, join) in others.iter().zip(&joins) {
                join.record(s)?;
                join.wait(origin)?;
            }
            Ok::<_, E>(())
        })();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture began above. It must always be ended, because otherwise the stream
        // could not be used again.
        let ended = check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(origin.0, &raw mut graph)
        });
        if let Err(e) = issued {
            if ended.is_ok() && !graph.is_null() {
                // SAFETY: the graph belongs to this function.
                let _ = unsafe { sys::cuGraphDestroy(graph) };
            }
            return Err(e);
        }
        ended?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is complete.
        let made = check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)
        });
        if let Err(e) = made {
            // SAFETY: the graph belongs to this function.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
            return Err(e.into());
        }
        let it = Self { graph, exec };
        // SAFETY: both handles are alive. The upload makes the first launch as fast as later ones.
        check("cuGraphUpload", unsafe {
            sys::cuGraphUpload(it.exec, origin.0)
        })?;
        Ok(it)
    }

    pub(super) fn launch(&mut self, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: the graph is alive, and so is the arena whose addresses it contains.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.exec, stream.0)
        })
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: created in `capture`, and no longer used. Errors cannot be handled here.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.exec);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::{Build, WORLD};
    use shardlab_plan::ir::{COMPUTE, InstrId};

    #[test]
    fn events_of_a_scope_are_classified_by_their_recorder_and_waiter() {
        let program = Build::new(WORLD, WORLD, 1).finish();
        let other = StreamId(1);
        let i = InstrId(0);
        let event = EventId;
        let commands = [
            (
                COMPUTE,
                Command::Wait {
                    instr: i,
                    event: event(7),
                },
            ),
            (
                COMPUTE,
                Command::Record {
                    instr: i,
                    event: event(1),
                },
            ),
            (
                other,
                Command::Wait {
                    instr: i,
                    event: event(1),
                },
            ),
        ];
        let shape = Shape::of(&program, &commands).unwrap();
        assert_eq!(shape.origin, COMPUTE);
        assert_eq!(shape.others, [other]);
        assert_eq!(shape.inward, [event(7)].into());
        assert!(shape.outward.is_empty());
        assert_eq!(Shape::of(&program, &[]), None);
    }
}
