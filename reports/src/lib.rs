//! shardlab-reports stores, compares and reports runs.
//!
//! ```text
//! (run, program, scenario) ─▶ view ─┬─▶ store    saves runs in a folder and reads them
//!                                   ├─▶ compare  finds differences and their causes
//!                                   └─▶ stats    tests whether a difference is significant
//! ```
//!
//! A [`RunView`] is everything that a reader of a run needs without its program. Nothing in this
//! crate plans, simulates or executes.

pub mod compare;
pub mod environment;
pub mod files;
pub mod gate;
pub mod plots;
pub mod report;
pub mod shell;
pub mod stats;
pub mod store;
#[doc(hidden)]
pub mod testing;
mod tolerance;
pub mod view;

pub use store::Store;
pub use view::RunView;
