//! Settings of the allocator, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.

use super::{LARGE_SEGMENT, MIB};
use crate::units::Bytes;
use std::fmt;
use std::str::FromStr;

/// Settings that determine which blocks are reused, split and released.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AllocatorSettings {
    /// Whether segments can grow (`expandable_segments`).
    pub expandable_segments: bool,
    /// Size from which blocks are neither split nor used for smaller requests
    /// (`max_split_size_mb`).
    pub max_split_size: Option<Bytes>,
    /// Share of the device's memory, 0 to 1, from which unused segments are released before new
    /// ones are allocated (`garbage_collection_threshold`). PyTorch ignores it unless
    /// `set_per_process_memory_fraction` was called.
    pub garbage_collection_threshold: Option<f64>,
}

impl AllocatorSettings {
    pub(super) fn max_split(&self) -> u64 {
        self.max_split_size.map_or(u64::MAX, |s| s.0)
    }

    /// Returns whether a free block of `block` bytes may serve a request for `size`.
    ///
    /// Oversize blocks serve only oversize requests, which may be up to 20 MiB smaller
    /// (`max_non_split_rounding_size`).
    pub(super) fn may_serve(&self, block: u64, size: u64) -> bool {
        let limit = self.max_split();
        if size < limit {
            block < limit
        } else {
            block < size + LARGE_SEGMENT
        }
    }
}

impl fmt::Display for AllocatorSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.expandable_segments {
            parts.push("expandable_segments:True".to_owned());
        }
        if let Some(size) = self.max_split_size {
            parts.push(format!("max_split_size_mb:{}", size.0 / MIB));
        }
        if let Some(share) = self.garbage_collection_threshold {
            parts.push(format!("garbage_collection_threshold:{share}"));
        }
        if parts.is_empty() {
            return f.write_str("default settings");
        }
        f.write_str(&parts.join(","))
    }
}

/// Reason why settings cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(String);

impl FromStr for AllocatorSettings {
    type Err = SettingsError;

    /// Reads the syntax of `PYTORCH_CUDA_ALLOC_CONF`. An empty text and `default` stand for the
    /// defaults.
    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let mut settings = Self::default();
        if text.is_empty() || text == "default" {
            return Ok(settings);
        }
        for part in text.split(',') {
            let bad = |expected: &str| SettingsError(format!("`{part}`: {expected} is expected"));
            let Some((key, value)) = part.trim().split_once(':') else {
                return Err(bad("KEY:VALUE"));
            };
            match key {
                "expandable_segments" => {
                    settings.expandable_segments = match value {
                        "True" | "true" => true,
                        "False" | "false" => false,
                        _ => return Err(bad("True or False")),
                    }
                }
                // PyTorch accepts no limit below its largest shared segment.
                "max_split_size_mb" => {
                    let mb = value.parse().ok().filter(|mb| *mb > LARGE_SEGMENT / MIB);
                    let bytes = mb.and_then(|mb: u64| mb.checked_mul(MIB));
                    let bytes = bytes.ok_or_else(|| bad("a number of MiB above 20"))?;
                    settings.max_split_size = Some(Bytes(bytes));
                }
                "garbage_collection_threshold" => {
                    let share = value.parse().ok().filter(|x| (0.0..1.0).contains(x));
                    let share: f64 = share.ok_or_else(|| bad("a number from 0 to below 1"))?;
                    settings.garbage_collection_threshold = (share > 0.0).then_some(share);
                }
                _ => {
                    return Err(bad(
                        "expandable_segments, max_split_size_mb or garbage_collection_threshold",
                    ));
                }
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_written_as_torch_does() {
        let text =
            "expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.6";
        let settings: AllocatorSettings = text.parse().unwrap();
        assert_eq!(settings.max_split_size, Some(Bytes(128 * MIB)));
        assert_eq!(settings.to_string(), text);
        assert_eq!("default".parse(), Ok(AllocatorSettings::default()));
        for (bad, expected) in [
            ("max_split_size_mb:20", "above 20"),
            ("garbage_collection_threshold:1.5", "below 1"),
            ("expandable_segments", "KEY:VALUE"),
            ("expandable_segments:1", "True or False"),
            ("backend:native", "max_split_size_mb"),
        ] {
            let error = bad.parse::<AllocatorSettings>().unwrap_err().to_string();
            assert!(error.contains(bad) && error.contains(expected), "{error}");
        }
    }
}
