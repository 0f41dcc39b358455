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
//!
//! ```
//! use shardlab_reports::Store;
//! # let view = shardlab_reports::testing::view(100);
//! # let folder = std::env::temp_dir().join(format!("shardlab-doc-{}", std::process::id()));
//!
//! // `view` is `RunView::new(&run, &program, &scenario)` of what `simulate` or `train` returned.
//! let store = Store::at(&folder);
//! let id = store.save(&view)?;
//! assert_eq!(store.open(&id)?.run.step_ms(), view.run.step_ms());
//! # std::fs::remove_dir_all(folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
