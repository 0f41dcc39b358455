//! Bindings of NCCL 2, NVIDIA's collective communication library, loaded at run time.
//!
//! Building needs neither CUDA nor NCCL; a program starts without them and says what is missing when they are asked for.
//! Functions that a loaded version does not have are errors when they are called, not when the library is loaded. Streams
//! and memory are raw pointers, so that the crate works beside any binding of CUDA.
//!
//! ```no_run
//! use nccl_rs::{Communicator, Config, DataType, Nccl, RedOp, Search, Stream};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (rank, size) = (0, 2);
//! # let (gradients, count, stream) = (std::ptr::null_mut(), 0, Stream(std::ptr::null_mut()));
//! # fn tell_the_others(_: &[u8]) {}
//! let nccl = Nccl::load(&Search::default())?;
//! println!("NCCL {}", nccl.version());
//!
//! // One rank makes the identity, the others get its bytes by any means.
//! let id = nccl.unique_id()?;
//! tell_the_others(id.as_bytes());
//!
//! // With the thread's current CUDA device.
//! let comm = Communicator::init(&nccl, &id, size, rank, Config::default())?;
//!
//! // SAFETY: `gradients` are `count` floats on the device, and the stream is the device's.
//! unsafe { comm.all_reduce(gradients, gradients, count, DataType::F32, RedOp::AVG, stream)? };
//! comm.destroy()?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Nccl`] is the loaded library: [`Nccl::has`] asks for functions by name, [`Nccl::group`] fuses calls,
//!   [`Nccl::simulate`] asks NCCL for its own estimate of a group's time.
//! - [`Communicator`] has the collectives; [`Watch`] is what another thread may have of it, and says what can be aborted when.
//!   [`Communicator::call`] makes calls that are not wrapped.
//! - [`RedOp`] is an integer, not an enumeration, because [`PreMulSum`] makes new ones at run time.
//! - [`ffi`] has the C interface as it is.

mod collectives;
mod communicator;
mod error;
pub mod ffi;
mod group;
mod library;
mod memory;
mod shared;
mod types;

pub use communicator::{Communicator, PATIENCE};
pub use error::{Code, Error, LoadError, Version};
pub use library::{ENVIRONMENT, Nccl, Search};
pub use memory::{DeviceMemory, PreMulSum, Registration, Window, WindowKind};
pub use shared::{State, Watch};
pub use types::{Config, CtaPolicy, DataType, RedOp, Scalar, Stream, UniqueId};
