//! All that is told of the selected scenario, or of a training, over everything else: what a pane
//! has no room for.

use super::app::App;
use super::cursor::moved;
use super::event::Effect;
use super::keys::Command;
use std::cell::Cell;

/// The text as it is shown. What it says follows the view below it.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    /// First line shown.
    top: usize,
    /// Lines beyond those that the last drawing had room for, and how many it had.
    drawn: Cell<(usize, usize)>,
}

impl Whole {
    /// The first line to show of so many, where so many find room.
    pub fn first(&self, lines: usize, room: usize) -> usize {
        let beyond = lines.saturating_sub(room);
        self.drawn.set((beyond, room));
        self.top.min(beyond)
    }
}

/// A key while it is shown.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    let Some(whole) = &mut app.whole else {
        return Vec::new();
    };
    let (last, room) = whole.drawn.get();
    let page = room.max(2) - 1;
    match command {
        Command::Back => app.whole = None,
        Command::Leave => return vec![Effect::Save(app.save()), Effect::Quit],
        _ => whole.top = moved(whole.top, command, page, last).unwrap_or(whole.top.min(last)),
    }
    Vec::new()
}
