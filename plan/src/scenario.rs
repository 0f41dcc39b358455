//! Scenario files: format, validation with positions, overrides, sweeps, presets, JSON Schema.

pub mod types;

pub use types::*;
