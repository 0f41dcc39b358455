//! The CUDA device: streams, events, memory and graphs of an NVIDIA GPU behind the [`crate::device::Device`] seam.
//!
//! Nothing of CUDA is linked: [`Libraries`] finds and loads what is there when a GPU is asked for, so the same binary
//! starts anywhere.

pub mod libraries;

pub use libraries::{Libraries, Library, MissingLibraries};
