//! shardlab-reports: what is done with runs once there are any.
//!
//! ```text
//! (run, program, scenario) ─▶ view ─┬─▶ store    kept in a folder, read back
//!                                   ├─▶ compare  differences and what they come from
//!                                   └─▶ stats    whether a difference is one
//! ```
//!
//! A [`RunView`] is everything a reader of a run needs without its program at hand; nothing here
//! plans, simulates or executes.

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
