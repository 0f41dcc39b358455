//! Bindings of NCCL 2, NVIDIA's collective communication library, loaded at run time.
//!
//! Building requires neither CUDA nor NCCL. A program starts without them, and reports what is
//! missing when they are requested. Functions that a loaded version does not have are errors when
//! they are called, not when the library is loaded. Streams and memory are raw pointers, so the
//! crate works with any CUDA bindings.
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
//!   wrapped. Another thread can use a [`Watch`] of it, whose documentation says what can be
//!   aborted when.
//! - [`RedOp`] is an integer, not an enumeration, because [`PreMulSum`] creates new ones at run
//!   time.
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

pub use communicator::{Communicator, DEFAULT_TIMEOUT};
pub use error::{Code, Error, LoadError, Version};
pub use library::{ENVIRONMENT, Nccl, Search};
pub use memory::{DeviceMemory, PreMulSum, Registration, Window, WindowKind};
pub use shared::{State, Watch};
pub use types::{Config, CtaPolicy, DataType, RedOp, Scalar, Stream, UniqueId};
