//! Options of a session.

use super::fault::{Fault, FaultKind};
use super::live::Live;
use crate::device::cpu::{CpuOptions, DelaySpec, WATCHDOG};
use shardlab_plan::units::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// How memory is made known to the library of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Registration {
    /// Not at all.
    #[default]
    Off,
    /// As buffers: collectives use them without copies through the library's own.
    Buffer,
    /// As symmetric windows.
    Window,
}

impl Registration {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Off, Self::Buffer, Self::Window];

    /// Name on the command line and in run records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Buffer => "buffer",
            Self::Window => "window",
        }
    }
}

/// What times of a recorded pass are taken with, where a device has a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Times {
    /// Activity records where a process drives one GPU, else events. Taking records may make the driver wait for every
    /// GPU of the process, and a GPU whose collective waits for another rank of the same process never ends it.
    #[default]
    Auto,
    /// CUPTI's activity records: nothing lies between instructions.
    Cupti,
    /// Events around every instruction: each costs its stream about a microsecond.
    Events,
}

impl Times {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Cupti, Self::Events];

    /// Name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cupti => "cupti",
            Self::Events => "events",
        }
    }

    /// Whether records are to be taken in a process of so many ranks; `missing` says why the library is not
    /// there, if it is not.
    ///
    /// # Errors
    /// In words, if records are asked for and cannot be had.
    pub fn records(self, ranks: usize, missing: Option<String>) -> Result<bool, String> {
        match (self, missing) {
            (Self::Auto, missing) => Ok(missing.is_none() && ranks == 1),
            (Self::Cupti, None) => Ok(true),
            (Self::Cupti, Some(why)) => Err(format!(
                "--times cupti is not possible: {why}; use --times events"
            )),
            (Self::Events, _) => Ok(false),
        }
    }
}

/// How a session runs. The default is a plain run.
#[derive(Clone, Debug)]
pub struct ExecOptions {
    /// Longest time in which nothing moves before waits are given up.
    pub timeout: Duration,
    /// Random sleeps before commands of every stream and instructions of every host; results must not change.
    pub delay: Option<DelaySpec>,
    /// A fault to inject.
    pub fault: Option<Fault>,
    /// Fill memory with NaN at its first use after an allocation, so that reads of what nobody wrote show.
    pub poison: bool,
    /// Look for NaN in the outputs of every kernel and collective.
    pub nan_check: bool,
    /// Memory of a rank's device; allocations beyond it fail.
    pub capacity: Option<Bytes>,
    /// Replay captured scopes instead of issuing them anew in every step.
    pub graphs: bool,
    /// Sum the squares of the gradients that each optimizer launch is given, where the program computes no norm.
    pub grad_squares: bool,
    /// Keep spans and memory samples of every step (the last ones go into the run).
    pub record: bool,
    /// What times of recorded passes are taken with.
    pub times: Times,
    /// Where ranks say what they are at, for whoever watches. A session makes its own where there is none.
    pub live: Option<Arc<Live>>,
    /// Threads that a kernel may use on the CPU device; results have the same bits with any number.
    pub threads: usize,
    /// How devices make memory known to the library of collectives.
    pub registration: Registration,
    /// Commands that a stream's queue holds.
    pub queue_depth: usize,
}

impl Default for ExecOptions {
    fn default() -> Self {
        Self {
            timeout: WATCHDOG,
            delay: None,
            fault: None,
            poison: false,
            nan_check: false,
            capacity: None,
            graphs: true,
            grad_squares: false,
            record: false,
            times: Times::default(),
            live: None,
            threads: 1,
            registration: Registration::default(),
            queue_depth: CpuOptions::default().queue_depth,
        }
    }
}

impl ExecOptions {
    pub(crate) fn cpu(&self) -> CpuOptions {
        CpuOptions {
            queue_depth: self.queue_depth,
            delay: self.delay,
            nan_check: self.nan_check,
            threads: self.threads,
            crash: self
                .fault
                .filter(|f| f.kind == FaultKind::DevicePanic)
                .map(|f| (f.rank, f.instr)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_taken_unasked_only_where_a_process_has_one_gpu() {
        let gone = || Some("libcupti.so.13 does not load".to_owned());
        assert_eq!(Times::Auto.records(1, None), Ok(true));
        assert_eq!(Times::Auto.records(4, None), Ok(false));
        assert_eq!(Times::Auto.records(1, gone()), Ok(false));
        assert_eq!(Times::Cupti.records(4, None), Ok(true));
        assert_eq!(Times::Events.records(1, None), Ok(false));
        let why = Times::Cupti.records(1, gone()).unwrap_err();
        assert!(why.contains("libcupti.so.13 does not load"), "{why}");
    }
}
