//! shardlab-reports stores, compares and reports runs.
//!
//! ```text
//! (run, program, scenario) ─▶ view ─┬─▶ store    saves runs in a folder and reads them
//!                                   ├─▶ compare  finds differences and their causes
//!                                   └─▶ stats    tests whether a difference is significant
//! ```
//!
//! A [`RunView`] is everything that readers of a run need without its program. Nothing in this
//! crate plans, simulates or executes.
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
