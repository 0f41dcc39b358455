//! Properties of the machine, and its copy rates.

use super::typical;
use std::time::Duration;

/// Bytes of the copies that measure the memory bandwidth. They are larger than caches.
const COPY: usize = 64 << 20;

/// See the module documentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    /// Name of the processor.
    pub(super) model: String,
    /// Number of cores that threads may use.
    pub(super) cores: u32,
    /// Memory in MiB.
    pub(super) memory_mib: u64,
    /// Last-level cache in MiB.
    pub(super) cache_mib: u64,
    /// Rate of a large copy in GB/s. A byte that is both read and written counts once.
    pub(super) copy_gbps: f64,
    /// Time of a copy of one kilobyte, in microseconds.
    pub(super) copy_latency_us: f64,
}

impl Machine {
    pub(super) fn measure() -> Self {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let cache = |i: u32| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size");
            let text = std::fs::read_to_string(path).ok()?;
            let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
            Some(kib / 1024)
        };
        let mut from = vec![1u8; COPY];
        let mut to = vec![0u8; COPY];
        let us = typical(Duration::from_millis(200), || {
            to.copy_from_slice(&from);
            from[0] = std::hint::black_box(to[COPY - 1]);
        });
        let latency = typical(Duration::from_millis(2), || {
            to[..1024].copy_from_slice(&from[..1024]);
            from[0] = std::hint::black_box(to[1023]);
        });
        Self {
            model: field(&cpu, "model name").unwrap_or_else(|| "a CPU".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            memory_mib: field(&memory, "MemTotal")
                .and_then(|t| t.split(' ').next()?.parse::<u64>().ok())
                .map_or(1024, |kib| kib / 1024),
            cache_mib: (0..5).rev().find_map(cache).filter(|&c| c > 0).unwrap_or(8),
            copy_gbps: COPY as f64 / us / 1e3,
            copy_latency_us: latency,
        }
    }

    /// Returns the `source` text for values that were measured here.
    pub(super) fn source(&self, what: &str) -> String {
        let cores = if self.cores == 1 { "core" } else { "cores" };
        format!(
            "{what}: measured on {}, {} {cores}, by shardlab calibrate --device cpu",
            self.model, self.cores
        )
        .replace(['"', '\\'], "'")
    }
}

/// Returns the value of the first line with a key, in text with lines of the form `key : value`.
fn field(text: &str, key: &str) -> Option<String> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files() {
        let text = "MemTotal:       1048576 kB\nMemFree: 1 kB\n";
        assert_eq!(field(text, "MemTotal").unwrap(), "1048576 kB");
        assert_eq!(field(text, "Swap"), None);
    }
}
