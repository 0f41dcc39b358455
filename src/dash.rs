//! The terminal dashboard: scenarios and their options with predictions, timelines, live training,
//! sweeps, comparisons and gates.
//!
//! ```text
//! keys, mouse, clock ─┐                     ┌─▶ draw(&App, frame)
//!                     ├─▶ update(&mut App) ─┤
//! reports of work ────┘                     └─▶ effects ─▶ worker threads ─▶ reports
//! ```
//!
//! State changes only in [`update`], which neither blocks nor has side effects. Drawing only reads
//! the state. Slow work runs on threads (`worker`) and can be cancelled. Dispatch, the footer and
//! the help all use the key table ([`keys`]).

pub mod app;
pub mod compare;
pub mod confirm;
pub mod cursor;
mod draw;
pub mod event;
pub mod export;
mod fields;
pub mod fit;
pub mod gate;
pub mod glance;
pub mod help;
mod judge;
pub mod keys;
pub mod lanes;
pub mod line;
pub mod names;
pub mod options;
pub mod prompt;
pub mod query;
pub mod runs;
pub mod scenarios;
pub mod state;
pub mod sweep;
pub mod tables;
mod terminal;
pub mod theme;
pub mod timeline;
pub mod train;
mod update;
pub mod whatif;
pub mod whole;
mod worker;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use app::App;
pub use draw::draw;
pub use event::{Effect, Event};
pub use scenarios::Source;
pub use update::update;

use crate::cli::DeviceArgs;
use scenarios::Changes;
use state::Saved;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use theme::{Depth, Name, Theme};

/// Key of the scenario that is selected in the first session, which is the one in the tutorial.
const FIRST: &str = "llama3-8b-4xh200";

/// Initial settings of the dashboard.
#[derive(Clone, Debug)]
pub struct Options {
    /// Scenarios, in the order of the list.
    pub sources: Vec<Source>,
    /// Key of the scenario to select instead of the last selected one.
    pub select: Option<String>,
    /// Changes by scenario key, instead of those of the last session.
    pub changes: BTreeMap<String, Changes>,
    /// Theme, instead of the last one.
    pub theme: Option<Name>,
    /// Folder of saved runs.
    pub store: Option<PathBuf>,
    /// Folder of baselines.
    pub baselines: PathBuf,
    /// File for the state; `None` disables saving.
    pub state: Option<PathBuf>,
    /// Whether to report the mouse.
    pub mouse: bool,
    /// Device to train on.
    pub(crate) device: DeviceArgs,
}

/// Shows the dashboard until the user quits. The caller must have checked that there is a terminal.
///
/// # Errors
/// Fails if the terminal cannot be read or written.
pub fn run(options: Options) -> std::io::Result<()> {
    let var = |name: &str| std::env::var(name).ok();
    let mut saved = options
        .state
        .as_deref()
        .map_or_else(Saved::default, state::read);
    saved.mouse &= options.mouse;
    if options.select.is_some() {
        saved.scenario.clone_from(&options.select);
        saved.filter.clear();
    }
    saved.scenario.get_or_insert_with(|| FIRST.to_owned());
    let select = options.select;
    let kept = select.is_some_and(|key| !options.changes.contains_key(&key));
    saved.overrides.extend(options.changes);
    let name = options
        .theme
        .or_else(|| Name::find(saved.theme.as_deref()?))
        .unwrap_or(Name::Dark);
    let theme = Theme::new(name, Depth::of(var));
    let (mut app, begin) = App::new(options.sources, theme, &saved);
    app.keep = options.store.is_some();
    app.gate.folder = options.baselines;
    if kept {
        scenarios::tell_kept(&mut app);
    }
    let folders = worker::Folders {
        store: options.store,
    };
    let trainer = worker::Trainer {
        device: options.device,
        program: std::env::current_exe()?,
        children: worker::Children::default(),
    };
    let (events, inbox) = channel();
    let mut worker = worker::Worker::new(events.clone(), folders, trainer, options.state);
    terminal::run(&mut app, begin, &mut worker, &events, &inbox)
}
