//! Shows the full text on the selected scenario or a training on top of everything else, for text
//! that does not fit its pane.

use super::app::App;
use super::cursor::moved;
use super::event::Effect;
use super::keys::Command;
use std::cell::Cell;

/// State of the full text. Its content is that of the view below it.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    /// First visible line.
    top: usize,
    /// Number of lines beyond those that fit in the last drawing, and number of lines that fit.
    drawn: Cell<(usize, usize)>,
}

impl Whole {
    /// Returns the first line to show out of `lines`, if `room` lines fit.
    pub fn first(&self, lines: usize, room: usize) -> usize {
        let beyond = lines.saturating_sub(room);
        self.drawn.set((beyond, room));
        self.top.min(beyond)
    }
}

/// Handles a command while the text is shown.
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
