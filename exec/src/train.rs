//! Training around the engine: the layout of state, its initialization, data, and checkpoints.

pub mod adapter;
pub mod checkpoint;
pub mod data;
mod error;
pub mod hf;
pub mod init;
pub mod layout;
mod options;
mod resume;
mod routing;
pub mod run;
pub mod schedule;
pub mod state;
mod tensor_file;
#[cfg(test)]
mod testing;
mod weights;

pub use data::{DataError, TokenWidth, Tokens, tokenizer_next_to};
pub(crate) use data::{Feed, step_inputs};
pub use error::TrainError;
pub use layout::{Kind, Span, StateLayout};
pub use options::{
    CheckpointOptions, Flow, NoObserver, Observer, ParamNorm, Resume, RunOptions, RunStart,
    StepReport,
};
pub use run::{Outcome, train, train_on};
pub use state::{StateIo, With};
