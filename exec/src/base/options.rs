//! Options of a session.

use super::fault::Fault;
use super::progress::Progress;
use shardlab_plan::units::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Default limit of the watchdog.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Default number of commands that a stream's queue holds.
pub(crate) const DEFAULT_QUEUE_DEPTH: usize = 1024;

/// Random delays to inject.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelaySpec {
    /// Seed. Each stream of each rank has a separate sequence.
    pub seed: u64,
    /// Probability of a sleep before a command, 0 to 1.
    pub probability: f64,
    /// Longest sleep.
    pub max: Duration,
}

/// How memory is registered with the communication library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Registration {
    /// No registration.
    #[default]
    Off,
    /// As user buffers. Collectives use them directly, without copies through the library's
    /// buffers.
    Buffer,
    /// As symmetric windows.
    Window,
}

impl Registration {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Off, Self::Buffer, Self::Window];

    /// Returns the name on the command line and in run records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Buffer => "buffer",
            Self::Window => "window",
        }
    }
}

/// Source of the times of a recorded pass, if a device has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Times {
    /// CUPTI's activity records if the process has one GPU, or else events. Collecting records may
    /// make the driver wait for every GPU of the process, and a GPU whose collective waits for
    /// another rank of the same process would never finish it.
    #[default]
    Auto,
    /// CUPTI's activity records. Nothing is inserted between instructions.
    Cupti,
    /// Events around every instruction. Each one costs about one microsecond of stream time.
    Events,
}

impl Times {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Cupti, Self::Events];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cupti => "cupti",
            Self::Events => "events",
        }
    }

    /// Returns whether a process with `ranks` ranks uses activity records. `missing` is the reason
    /// why CUPTI is unavailable, if it is.
    ///
    /// # Errors
    /// Returns a message if records are requested but unavailable.
    pub fn records(self, ranks: usize, missing: Option<String>) -> Result<bool, String> {
        match (self, missing) {
            (Self::Auto, missing) => Ok(missing.is_none() && ranks == 1),
            (Self::Cupti, None) => Ok(true),
            (Self::Cupti, Some(why)) => Err(format!(
                "--timing-source cupti is not possible: {why}; use --timing-source events"
            )),
            (Self::Events, _) => Ok(false),
        }
    }
}

/// Options for running a session. The default is a normal run.
#[derive(Clone, Debug)]
pub struct ExecOptions {
    /// Longest time without progress before waits time out.
    pub timeout: Duration,
    /// Random sleeps before the commands of every stream and the instructions of every host. The
    /// results must not change.
    pub delay: Option<DelaySpec>,
    /// A fault to inject.
    pub fault: Option<Fault>,
    /// Fill memory with NaN at its first use after an allocation, to detect reads of uninitialized
    /// memory.
    pub poison: bool,
    /// Check the outputs of every kernel and collective for NaN.
    pub nan_check: bool,
    /// Memory limit of a rank's device. Allocations beyond it fail.
    pub capacity: Option<Bytes>,
    /// Replay captured scopes instead of issuing them again in every step.
    pub graphs: bool,
    /// Sum the squares of the gradients that each optimizer launch reads, if the program computes
    /// no norm.
    pub grad_squares: bool,
    /// Count how often each expert is chosen, in every layer with experts.
    pub routing: bool,
    /// Keep spans and memory samples of every step. Those of the last step become part of the run.
    pub record: bool,
    /// Source of the times of recorded passes.
    pub times: Times,
    /// Where ranks publish their progress. If not given, a session creates its own.
    pub progress: Option<Arc<Progress>>,
    /// Number of threads that a kernel may use on the CPU device. The results have the same bits
    /// for any number.
    pub threads: usize,
    /// How devices register memory with the communication library.
    pub registration: Registration,
    /// Number of commands that a stream's queue holds.
    pub queue_depth: usize,
}

impl Default for ExecOptions {
    fn default() -> Self {
        Self {
            timeout: DEFAULT_TIMEOUT,
            delay: None,
            fault: None,
            poison: false,
            nan_check: false,
            capacity: None,
            graphs: true,
            grad_squares: false,
            routing: false,
            record: false,
            times: Times::default(),
            progress: None,
            threads: 1,
            registration: Registration::default(),
            queue_depth: DEFAULT_QUEUE_DEPTH,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_uses_records_only_in_a_process_with_one_gpu() {
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
