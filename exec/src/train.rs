//! Training around the engine: where state lies, how it begins, what it is fed, how it is kept.

pub mod data;
pub mod layout;
mod random;
pub mod schedule;
#[cfg(test)]
mod testing;

pub use data::{DataError, Feed, TokenWidth, Tokens};
pub use layout::{Kind, Span, StateLayout};
