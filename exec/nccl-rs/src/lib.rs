//! Bindings of NCCL 2, NVIDIA's collective communication library, loaded at run time.
//!
//! Building requires neither CUDA nor NCCL. A program also starts without them; [`Nccl::load`] then
//! returns an error that lists every file that was tried. If the loaded version lacks a function,
//! calling it returns an error, but loading the library does not. Streams and memory are raw
//! pointers, so the crate works with any CUDA bindings.
//!
//! ```no_run
//! use nccl_rs::{Communicator, Config, DataType, Nccl, RedOp, Search, Stream};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (rank, size) = (0, 2);
//! # let (gradients, count, stream) = (std::ptr::null_mut(), 0, Stream(std::ptr::null_mut()));
//! # fn send_to_other_ranks(_: &[u8]) {}
//! let nccl = Nccl::load(&Search::default())?;
//! println!("NCCL {}", nccl.version());
//!
//! // One rank creates the unique id; the others receive its bytes by any means.
//! let id = nccl.unique_id()?;
//! send_to_other_ranks(id.as_bytes());
//!
//! // Uses the thread's current CUDA device.
//! let comm = Communicator::init(&nccl, &id, size, rank, Config::default())?;
//!
//! // SAFETY: `gradients` are `count` floats on the device, and the stream is the device's.
//! unsafe { comm.all_reduce(gradients, gradients, count, DataType::F32, RedOp::AVG, stream)? };
//! comm.destroy()?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Nccl`] is the loaded library: [`Nccl::has`] looks up functions by name, [`Nccl::group`]
//!   launches calls together, [`Nccl::simulate`] returns NCCL's estimate of a group's duration.
//! - [`Communicator`] has the collectives, and [`Communicator::call`] makes calls that are not
//!   wrapped. Another thread can use its [`Watch`]; [`Watch::abort`] documents when a communicator
//!   can be aborted.
//! - [`RedOp`] is an integer and not an enumeration, because [`PreMulSum`] creates new values at
//!   run time.
//! - [`ffi`] is the C interface.

mod collectives;
mod communicator;
mod error;
pub mod ffi;
mod group;
mod library;
mod memory;
mod shared;
mod types;

pub use collectives::Splits;
pub use communicator::{Communicator, DEFAULT_TIMEOUT};
pub use error::{Code, Error, LoadError, Version};
pub use library::{ENVIRONMENT, Nccl, Search};
pub use memory::{DeviceMemory, PreMulSum, Registration, Window, WindowKind};
pub use shared::{State, Watch};
pub use types::{Config, CtaPolicy, DataType, RedOp, Scalar, Stream, UniqueId};
