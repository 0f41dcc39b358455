//! Training around the engine: where state lies, how it begins, what it is fed, how it is kept.

pub mod checkpoint;
pub mod data;
mod error;
pub mod hf;
pub mod init;
pub mod layout;
pub(crate) mod random;
pub mod run;
mod safe;
pub mod schedule;
pub mod state;
#[cfg(test)]
mod testing;
mod together;

pub use data::{DataError, Feed, TokenWidth, Tokens, tokenizer_beside};
pub use error::TrainError;
pub use layout::{Kind, Span, StateLayout};
pub use run::{
    Begun, CheckpointOptions, Flow, Observer, Outcome, Resume, RunOptions, Silent, StepReport,
    train, train_on,
};
pub use state::{StateIo, With};
