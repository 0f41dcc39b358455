//! A device that does nothing, for measuring the interpreter's own cost.

use super::{Command, Device, FailureKind, GraphId, Pass, Region, Stop, TaskTimes};
use crate::base::operand::RawRange;
use shardlab_plan::ir::{EventId, InstrId, StreamId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Counts commands and ignores them.
#[derive(Debug)]
pub struct NullDevice {
    epoch: Instant,
    graphs: Vec<usize>,
    /// Commands submitted so far.
    pub commands: u64,
    /// Addresses from this one on have no memory.
    pub memory_end: u64,
    /// Number of passes that replay graphs as individual launches.
    pub replay_as_instructions: Arc<AtomicU32>,
    /// Reason why it rejects memory, if it does.
    pub refuses: Option<String>,
    /// Result of [`Device::shutdown`].
    pub shuts_down: bool,
}

impl Default for NullDevice {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            graphs: Vec::new(),
            commands: 0,
            memory_end: u64::MAX,
            replay_as_instructions: Arc::default(),
            refuses: None,
            shuts_down: true,
        }
    }
}

impl Device for NullDevice {
    fn name(&self) -> String {
        "null".to_owned()
    }

    fn map(&mut self, _: &[Region]) -> Result<(), String> {
        self.refuses.clone().map_or(Ok(()), Err)
    }

    fn pointer(&self, address: u64, _: u64) -> Result<Option<*mut u8>, (FailureKind, String)> {
        if address >= self.memory_end {
            let what = format!("no memory at {address:#x}");
            return Err((FailureKind::OutOfMemory, what));
        }
        // The pointer is never dereferenced.
        Ok(Some(std::ptr::without_provenance_mut(address as usize)))
    }

    fn begin(&mut self, pass: Pass) -> Result<(), Stop> {
        self.replay_as_instructions
            .fetch_add(u32::from(pass.replay_as_instructions), Ordering::Relaxed);
        Ok(())
    }

    fn submit(&mut self, _: StreamId, command: Command, _: u32) -> Result<(), Stop> {
        std::hint::black_box(&command);
        self.commands += 1;
        Ok(())
    }

    fn capture(&mut self, commands: Vec<(StreamId, Command)>) -> Result<GraphId, Stop> {
        self.graphs.push(commands.len());
        Ok(GraphId(self.graphs.len() - 1))
    }

    fn replay(&mut self, graph: GraphId, _: u32) -> Result<(), Stop> {
        self.commands += self.graphs[graph.0] as u64;
        Ok(())
    }

    fn host_wait(&mut self, _: InstrId, _: EventId) -> Result<(), Stop> {
        Ok(())
    }

    fn idle(&mut self) -> Result<(), Stop> {
        Ok(())
    }

    fn is_busy(&mut self) -> bool {
        false
    }

    fn shutdown(&mut self) -> bool {
        self.shuts_down
    }

    fn slot(&self, _: u32) -> f32 {
        0.0
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn times(&mut self) -> Vec<TaskTimes> {
        Vec::new()
    }

    fn read(&self, range: RawRange) -> Vec<u8> {
        vec![0; range.bytes]
    }

    fn write(&mut self, _: RawRange, _: &[u8]) {}
}
