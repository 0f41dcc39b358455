//! The key table. Dispatch, the footer and the help all use it, so they always agree.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Meaning of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Quit; asks first if a training is running.
    Quit,
    /// Quit immediately.
    Leave,
    /// Suspend the process until the shell resumes it.
    Suspend,
    /// Show or hide the help.
    Help,
    /// Go to the n-th view.
    View(u8),
    /// Next theme.
    Theme,
    /// Mouse on or off.
    Mouse,
    /// Close, cancel or clear the innermost open element.
    Back,
    /// Row up.
    Up,
    /// Row down.
    Down,
    /// Left, or the previous value.
    Left,
    /// Right, or the next value.
    Right,
    /// Page up.
    PageUp,
    /// Page down.
    PageDown,
    /// First row.
    First,
    /// Last row.
    Last,
    /// Do the default action.
    Enter,
    /// Switch to the other pane.
    Switch,
    /// Show the full content of a pane.
    ShowAll,
    /// Type a filter.
    Filter,
    /// Simulate and open the timeline.
    Simulate,
    /// Train on this machine, on the scenario's hardware if available.
    Train,
    /// Train on the CPU of this machine, even if the scenario's hardware is different.
    TrainOnCpu,
    /// Sweep.
    Sweep,
    /// Gate.
    Gate,
    /// Make the result of the gate the baseline.
    Bless,
    /// Choose another folder.
    Folder,
    /// Undo a change.
    Reset,
    /// Undo all changes.
    ResetAll,
    /// Complete the typed text.
    Complete,
    /// Previous completion.
    CompleteBack,
    /// End a job.
    Stop,
    /// Add an axis or a run.
    Add,
    /// Remove an axis or a run.
    Remove,
    /// Sort by the next column.
    Sort,
    /// Sort by the previous column.
    SortBack,
    /// Reverse the order.
    Reverse,
    /// Show only the Pareto front.
    Front,
    /// Mark for comparison.
    Mark,
    /// Compare marked runs.
    Compare,
    /// Save a run.
    Keep,
    /// Name a run.
    Name,
    /// Copy the command of a scenario.
    Copy,
    /// Write a scenario file.
    Write,
    /// Reload.
    Reload,
    /// Zoom in.
    ZoomIn,
    /// Zoom out.
    ZoomOut,
    /// The whole step.
    Whole,
    /// Zoom to the selected span.
    ZoomSpan,
    /// Zoom to the unit and phase of the selected span.
    ZoomUnit,
    /// Move the window left.
    PanLeft,
    /// Move the window right.
    PanRight,
    /// The next exposed interval.
    NextGap,
    /// The previous exposed interval.
    PreviousGap,
    /// Show or hide the critical path.
    Critical,
    /// Jump to what the selected span waited for.
    Blocker,
    /// Jump to a unit.
    JumpUnit,
    /// Jump to an instruction.
    JumpInstr,
    /// Jump to the memory peak.
    Peak,
    /// Show another run below the first.
    Pair,
    /// Stretch the other run to the same length.
    Stretch,
    /// List the scenarios for tests, or hide them.
    Tests,
    /// Show the effects of changes.
    WhatIf,
    /// Show whether the scenario fits.
    Fit,
    /// Search for the best settings.
    Tune,
    /// Show all changes, or only those that help.
    All,
    /// Undo the change that was applied last.
    Undo,
}

/// Places in which a key has a meaning. Keys that a place does not bind may be bound by
/// [`Place::Everywhere`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All views, unless the user is typing text.
    Everywhere,
    /// The scenario list.
    Scenarios,
    /// The option editor.
    Options,
    /// The line that is being typed.
    Typing,
    /// The timeline.
    Timeline,
    /// Live training.
    Training,
    /// The sweep table.
    Sweep,
    /// The runs.
    Runs,
    /// The comparison.
    Compare,
    /// The gate.
    Gate,
    /// What changes would do.
    WhatIf,
    /// Whether the scenario fits.
    Fit,
    /// The best settings.
    Tune,
    /// A question.
    Confirm,
    /// The full text on a scenario or a training.
    Whole,
    /// The help.
    Help,
}

impl Place {
    /// All places, in the order of the help.
    pub const ALL: [Self; 16] = [
        Self::Everywhere,
        Self::Scenarios,
        Self::Options,
        Self::Typing,
        Self::Timeline,
        Self::Training,
        Self::Sweep,
        Self::Runs,
        Self::Compare,
        Self::Gate,
        Self::WhatIf,
        Self::Fit,
        Self::Tune,
        Self::Confirm,
        Self::Whole,
        Self::Help,
    ];

    /// Returns the heading in the help.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Everywhere => "Everywhere",
            Self::Scenarios => "Scenario list",
            Self::Options => "Options",
            Self::Typing => "While typing",
            Self::Timeline => "Timeline",
            Self::Training => "Train",
            Self::Sweep => "Sweep",
            Self::Runs => "Runs",
            Self::Compare => "Compare",
            Self::Gate => "Gate",
            Self::WhatIf => "What-if",
            Self::Fit => "Fit",
            Self::Tune => "Tune",
            Self::Confirm => "When asked to confirm",
            Self::Whole => "All of a message or a prediction",
            Self::Help => "Help",
        }
    }
}

/// A key with its modifiers. Shift is part of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chord(KeyCode, KeyModifiers);

impl Chord {
    /// Returns the key that was pressed.
    #[must_use]
    pub fn of(key: KeyEvent) -> Self {
        let mut modifiers =
            key.modifiers & (KeyModifiers::CONTROL | KeyModifiers::ALT | KeyModifiers::SHIFT);
        if matches!(key.code, KeyCode::Char(_) | KeyCode::BackTab) {
            modifiers -= KeyModifiers::SHIFT;
        }
        Self(key.code, modifiers)
    }

    /// Formats the key for the help and the footer.
    #[must_use]
    pub fn text(self) -> String {
        let name = match self.0 {
            KeyCode::Char(' ') => "space".to_owned(),
            KeyCode::Char(c) => c.to_string(),
            KeyCode::Up => "↑".into(),
            KeyCode::Down => "↓".into(),
            KeyCode::Left => "←".into(),
            KeyCode::Right => "→".into(),
            KeyCode::PageUp => "PgUp".into(),
            KeyCode::PageDown => "PgDn".into(),
            KeyCode::Enter => "Enter".into(),
            KeyCode::Esc => "Esc".into(),
            KeyCode::Tab => "Tab".into(),
            KeyCode::F(n) => format!("F{n}"),
            KeyCode::BackTab => "Shift-Tab".into(),
            other => format!("{other:?}"),
        };
        match self.1 {
            KeyModifiers::CONTROL => format!("Ctrl-{name}"),
            KeyModifiers::SHIFT => format!("Shift-{name}"),
            _ => name,
        }
    }
}

const fn k(code: KeyCode) -> Chord {
    Chord(code, KeyModifiers::NONE)
}

const fn c(char: char) -> Chord {
    k(KeyCode::Char(char))
}

const fn ctrl(char: char) -> Chord {
    Chord(KeyCode::Char(char), KeyModifiers::CONTROL)
}

const fn shift(code: KeyCode) -> Chord {
    Chord(code, KeyModifiers::SHIFT)
}

/// A row of the key table.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    /// Place in which it applies.
    pub place: Place,
    /// Keys that trigger it.
    pub chords: &'static [Chord],
    /// Command.
    pub command: Command,
    /// One or two words for the footer; empty if it is not shown there.
    pub short: &'static str,
    /// One line for the help.
    pub help: &'static str,
}

macro_rules! table {
    ($($place:ident: [$($chord:expr),+] $command:expr, $short:literal, $help:literal;)*) => {
        /// All bindings.
        pub static TABLE: &[Binding] = &[
            $(Binding {
                place: Place::$place,
                chords: &[$($chord),+],
                command: $command,
                short: $short,
                help: $help,
            }),*
        ];
    };
}

use Command as C;

table! {
    Everywhere: [c('q')] C::Quit, "", "quit (asks first if training is running)";
    Everywhere: [ctrl('c')] C::Leave, "", "quit at once, and stop all jobs";
    Everywhere: [ctrl('z')] C::Suspend, "", "suspend (resume with `fg`)";
    Everywhere: [c('?'), k(KeyCode::F(1))] C::Help, "", "this help";
    Everywhere: [c('1')] C::View(0), "", "scenarios";
    Everywhere: [c('2')] C::View(1), "", "timeline";
    Everywhere: [c('3')] C::View(2), "", "train";
    Everywhere: [c('4')] C::View(3), "", "sweep";
    Everywhere: [c('5')] C::View(4), "", "runs";
    Everywhere: [c('6')] C::View(5), "", "compare";
    Everywhere: [c('7')] C::View(6), "", "gate";
    Everywhere: [c('8')] C::View(7), "", "what-if: what changes would do";
    Everywhere: [c('9')] C::View(8), "", "fit: whether it fits, and what takes up the memory";
    Everywhere: [c('0')] C::View(9), "", "tune: the best settings (in the timeline, 0 shows the whole step)";
    Everywhere: [c('t')] C::Theme, "", "next theme: dark, light, safe (color-blind), mono";
    Everywhere: [ctrl('t')] C::Mouse, "", "mouse on or off; off, the terminal selects text";
    Everywhere: [k(KeyCode::Esc)] C::Back, "", "close, clear the filter, or cancel";
    Everywhere: [k(KeyCode::Up), c('k')] C::Up, "", "up";
    Everywhere: [k(KeyCode::Down), c('j')] C::Down, "", "down";
    Everywhere: [k(KeyCode::Left), c('h')] C::Left, "", "left";
    Everywhere: [k(KeyCode::Right), c('l')] C::Right, "", "right";
    Everywhere: [k(KeyCode::PageUp), ctrl('u')] C::PageUp, "", "page up";
    Everywhere: [k(KeyCode::PageDown), ctrl('d')] C::PageDown, "", "page down";
    Everywhere: [k(KeyCode::Home), c('g')] C::First, "", "first";
    Everywhere: [k(KeyCode::End), c('G')] C::Last, "", "last";

    Scenarios: [k(KeyCode::Enter), k(KeyCode::Tab)] C::Switch, "options", "go to the options of the selected scenario";
    Scenarios: [c('r')] C::Simulate, "sim", "simulate and open the timeline";
    Scenarios: [c('x')] C::Train, "train", "train it on this machine, on the device that `shardlab exec` would choose";
    Scenarios: [c('X')] C::TrainOnCpu, "", "train it on the CPU";
    Scenarios: [c('w')] C::Sweep, "sweep", "sweep it, over its own axes or those you add";
    Scenarios: [c('b')] C::Gate, "gate", "check it against its baseline";
    Scenarios: [c('y')] C::Copy, "", "show and copy the command with all changes";
    Scenarios: [c('W')] C::Write, "", "write it with all changes to a scenario file";
    Scenarios: [c('i')] C::WhatIf, "what-if", "predict what changes would do";
    Scenarios: [c('f')] C::Fit, "", "say whether it fits, and what takes up the memory";
    Scenarios: [c('o')] C::Tune, "", "search its best settings";
    Scenarios: [c('T')] C::Tests, "", "list the scenarios for tests and benchmarks, or hide them";
    Scenarios: [c('e')] C::ShowAll, "", "show the full message or prediction";
    Scenarios: [c('/')] C::Filter, "search", "search: names first, then descriptions; !word, and fields as in `step<100 fits=yes policy=fsdp2`";
    Scenarios: [c('D')] C::ResetAll, "", "revert all changes";

    Options: [k(KeyCode::Enter)] C::Enter, "edit", "edit the value; the prediction follows as you type";
    Options: [k(KeyCode::Left), c('h')] C::Left, "", "previous value";
    Options: [k(KeyCode::Right), c('l')] C::Right, "±value", "next value";
    Options: [k(KeyCode::Tab)] C::Switch, "list", "back to the list";
    Options: [k(KeyCode::Esc)] C::Back, "", "discard an invalid value, or go back to the list";
    Options: [c('r')] C::Simulate, "sim", "simulate and open the timeline";
    Options: [c('x')] C::Train, "train", "train it on this machine, on the device that `shardlab exec` would choose";
    Options: [c('X')] C::TrainOnCpu, "", "train it on the CPU";
    Options: [c('w')] C::Sweep, "", "sweep it";
    Options: [c('b')] C::Gate, "", "check it against its baseline";
    Options: [c('a')] C::Add, "+axis", "make the selected option an axis of the sweep";
    Options: [c('y')] C::Copy, "", "show and copy the command with all changes";
    Options: [c('W')] C::Write, "", "write it with all changes to a scenario file";
    Options: [c('i')] C::WhatIf, "", "predict what changes would do";
    Options: [c('f')] C::Fit, "", "say whether it fits, and what takes up the memory";
    Options: [c('o')] C::Tune, "", "search its best settings";
    Options: [c('e')] C::ShowAll, "", "show everything on the selected option, or the full message";
    Options: [c('/')] C::Filter, "search", "search among the options";
    Options: [c('d'), k(KeyCode::Backspace), k(KeyCode::Delete)] C::Reset, "", "revert the selected option";
    Options: [c('D')] C::ResetAll, "", "revert all changes";

    Typing: [k(KeyCode::Enter)] C::Enter, "accept", "accept";
    Typing: [k(KeyCode::Esc), ctrl('c')] C::Back, "cancel", "cancel and keep the old text";
    Typing: [k(KeyCode::Tab), k(KeyCode::Down)] C::Complete, "complete", "next completion";
    Typing: [k(KeyCode::BackTab), k(KeyCode::Up)] C::CompleteBack, "", "previous completion";

    Timeline: [k(KeyCode::Left), c('h')] C::Left, "", "previous span on this stream";
    Timeline: [k(KeyCode::Right), c('l')] C::Right, "", "next span on this stream";
    Timeline: [k(KeyCode::Up), c('k')] C::Up, "", "stream above, at about the same time";
    Timeline: [k(KeyCode::Down), c('j')] C::Down, "", "stream below";
    Timeline: [c('+'), c('=')] C::ZoomIn, "zoom", "zoom in around the selected span";
    Timeline: [c('-'), c('_')] C::ZoomOut, "", "zoom out";
    Timeline: [c('0')] C::Whole, "all", "show the whole step";
    Timeline: [c('z'), k(KeyCode::Enter)] C::ZoomSpan, "", "zoom to the selected span";
    Timeline: [c('Z')] C::ZoomUnit, "", "zoom to the unit and phase of the selected span";
    Timeline: [c('H'), shift(KeyCode::Left), k(KeyCode::PageUp)] C::PanLeft, "", "move the window left";
    Timeline: [c('L'), shift(KeyCode::Right), k(KeyCode::PageDown)] C::PanRight, "", "move the window right";
    Timeline: [c('n')] C::NextGap, "exposed", "next exposed interval";
    Timeline: [c('N')] C::PreviousGap, "", "previous exposed interval";
    Timeline: [c('c')] C::Critical, "critical", "toggle the critical path";
    Timeline: [c('b')] C::Blocker, "why", "jump to what the selected span waited for";
    Timeline: [c('u'), c('/')] C::JumpUnit, "unit", "jump to a unit, as in `layers.3 backward`";
    Timeline: [c('i')] C::JumpInstr, "", "jump to an instruction, by number or part of its name";
    Timeline: [c('p')] C::Peak, "", "jump to the memory peak";
    Timeline: [c('m')] C::Pair, "2nd run", "show another run below, such as the measured one";
    Timeline: [c('s')] C::Stretch, "", "stretch the other run to the same length";

    Training: [c('x')] C::Train, "train", "train the selected scenario, on the device that `shardlab exec` would choose";
    Training: [c('X')] C::TrainOnCpu, "on CPU", "train it on the CPU";
    Training: [c('s'), k(KeyCode::Esc)] C::Stop, "stop", "stop after the current step";
    Training: [c('e')] C::ShowAll, "all", "show the full output";

    Sweep: [c('w'), c('r')] C::Sweep, "run", "run the sweep";
    Sweep: [c('a')] C::Add, "+axis", "add an axis, as in `fsdp.prefetch_forward=[0, 1, 2]`";
    Sweep: [c('d')] C::Remove, "", "remove the last axis";
    Sweep: [c('s'), c('>')] C::Sort, "sort", "sort by the next column";
    Sweep: [c('S'), c('<')] C::SortBack, "", "sort by the previous column";
    Sweep: [c('o')] C::Reverse, "reverse", "reverse the sort order";
    Sweep: [c('f')] C::Front, "front", "show only the Pareto front (time vs. memory)";
    Sweep: [c('/')] C::Filter, "filter", "filter: words, and fields as in `step<100 fits=yes`; Tab completes";
    Sweep: [k(KeyCode::Enter)] C::Enter, "apply", "apply the settings of the selected point to the options";
    Sweep: [c('y')] C::Copy, "", "show and copy the command of the selected point";
    Sweep: [c('W')] C::Write, "", "write the selected point to a scenario file";
    Sweep: [k(KeyCode::Esc)] C::Back, "", "cancel the sweep, or clear the filter";

    Runs: [k(KeyCode::Enter)] C::Enter, "open", "open its timeline";
    Runs: [c(' ')] C::Mark, "mark", "mark for comparison: A, the base, then B, C, …";
    Runs: [c('c')] C::Compare, "compare", "compare the marked runs, or the last two";
    Runs: [c('/')] C::Filter, "filter", "filter: words, and fields and options as in `kind=exec step<100 micro_batch=4`; Tab completes";
    Runs: [c('s'), c('>')] C::Sort, "sort", "sort by the next column";
    Runs: [c('S'), c('<')] C::SortBack, "", "sort by the previous column";
    Runs: [c('o')] C::Reverse, "", "reverse the sort order";
    Runs: [c('K')] C::Keep, "keep", "save it in the store (training runs are saved automatically)";
    Runs: [c('e')] C::Name, "name", "name it, which protects it from removal; an empty line removes the name";
    Runs: [c('d')] C::Remove, "", "remove it from the store, unless it has a name (asks first)";
    Runs: [c('R')] C::Reload, "", "reload the store";

    Compare: [c('c')] C::Compare, "again", "compare the marked runs, or the last two";
    Compare: [c('m')] C::Pair, "timelines", "show both timelines, one above the other";

    Gate: [c('b'), c('r')] C::Gate, "gate", "check the selected scenario against its baseline";
    Gate: [c('B')] C::Bless, "bless", "make this result the new baseline (asks first)";
    Gate: [c('f')] C::Folder, "folder", "choose another folder of baselines";
    Gate: [k(KeyCode::Esc)] C::Back, "", "cancel";

    WhatIf: [k(KeyCode::Enter)] C::Enter, "apply", "apply the selected change to the options";
    WhatIf: [c('u')] C::Undo, "undo", "undo the change that was applied last";
    WhatIf: [c('a')] C::All, "all", "show every change, also those without gain or impossible ones";
    WhatIf: [c('e')] C::ShowAll, "why", "show exposed time, memory, critical path, compile modes and slower parts";
    WhatIf: [c('i'), c('R')] C::WhatIf, "again", "predict them again";
    WhatIf: [c('r')] C::Simulate, "sim", "simulate the scenario as it is, and open the timeline";
    WhatIf: [c('y')] C::Copy, "", "show and copy the command with all changes";
    WhatIf: [k(KeyCode::Esc)] C::Back, "", "cancel";

    Fit: [c('f'), c('R')] C::Fit, "again", "predict it again";
    Fit: [c('o')] C::Tune, "tune", "search its best settings";
    Fit: [c('i')] C::WhatIf, "what-if", "predict what changes would do";
    Fit: [c('y')] C::Copy, "", "show and copy the command with all changes";
    Fit: [k(KeyCode::Esc)] C::Back, "", "cancel";

    Tune: [k(KeyCode::Enter)] C::Enter, "apply", "apply the selected settings to the options";
    Tune: [c('u')] C::Undo, "undo", "undo the settings that were applied last";
    Tune: [c('e')] C::ShowAll, "why", "show what each change does, and how good the best settings can be";
    Tune: [c('o'), c('R')] C::Tune, "search", "search for the best settings of the selected scenario";
    Tune: [c('r')] C::Simulate, "sim", "simulate the scenario as it is, and open the timeline";
    Tune: [c('y')] C::Copy, "", "show and copy the command with all changes";
    Tune: [k(KeyCode::Esc)] C::Back, "stop", "end the search with the best settings so far";

    Confirm: [c('y'), k(KeyCode::Enter)] C::Enter, "yes", "yes, do it";
    Confirm: [c('n'), k(KeyCode::Esc), ctrl('c')] C::Back, "no", "no, cancel";

    Whole: [k(KeyCode::Esc), c('e'), c('q'), k(KeyCode::Enter)] C::Back, "close", "close it";
    Whole: [k(KeyCode::Up), c('k')] C::Up, "", "a line up";
    Whole: [k(KeyCode::Down), c('j')] C::Down, "scroll", "a line down";

    Help: [k(KeyCode::Esc), c('?'), c('q'), k(KeyCode::F(1))] C::Back, "close", "close the help";
    Help: [c('/')] C::Filter, "search", "search in the help";
}

/// Returns the command of a key in a place, if it has one.
#[must_use]
pub fn find(place: Place, key: KeyEvent) -> Option<Command> {
    let chord = Chord::of(key);
    let bound = |in_: Place| {
        TABLE
            .iter()
            .find(|b| b.place == in_ && b.chords.contains(&chord))
            .map(|b| b.command)
    };
    bound(place).or_else(|| {
        // Typed keys are text, and a question must be answered first.
        (!matches!(place, Place::Typing | Place::Confirm)).then(|| bound(Place::Everywhere))?
    })
}

/// Returns the first key of a command in a place, as the help formats it; empty if there is none.
#[must_use]
pub fn first(place: Place, command: Command) -> String {
    TABLE
        .iter()
        .find(|b| b.place == place && b.command == command)
        .map_or_else(String::new, |b| b.chords[0].text())
}

/// Returns the bindings that the footer shows in a place.
pub(crate) fn footer(place: Place) -> impl Iterator<Item = &'static Binding> {
    TABLE
        .iter()
        .filter(move |b| b.place == place && !b.short.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_means_two_things_in_one_place() {
        for place in Place::ALL {
            let mut seen: Vec<Chord> = Vec::new();
            for binding in TABLE.iter().filter(|b| b.place == place) {
                for chord in binding.chords {
                    assert!(!seen.contains(chord), "{place:?} {}", chord.text());
                    seen.push(*chord);
                }
            }
            assert!(!seen.is_empty(), "{place:?}");
        }
    }

    #[test]
    fn shift_is_part_of_a_character_but_not_of_an_arrow() {
        let key = |code, modifiers| KeyEvent::new(code, modifiers);
        let find = |k| find(Place::Timeline, k);
        let shift = KeyModifiers::SHIFT;
        assert_eq!(find(key(KeyCode::Char('H'), shift)), Some(Command::PanLeft));
        assert_eq!(find(key(KeyCode::Left, shift)), Some(Command::PanLeft));
        assert_eq!(
            find(key(KeyCode::Left, KeyModifiers::NONE)),
            Some(Command::Left)
        );
        assert_eq!(
            find(key(KeyCode::Char('q'), KeyModifiers::NONE)),
            Some(Command::Quit)
        );
        assert_eq!(find(key(KeyCode::Char('y'), KeyModifiers::NONE)), None);
    }

    #[test]
    fn typed_text_is_text() {
        let key = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::NONE);
        assert_eq!(super::find(Place::Typing, key('q')), None);
        assert_eq!(super::find(Place::Typing, key('1')), None);
    }

    /// The footer fits a narrow terminal. Keys without room are listed only in the help.
    #[test]
    fn footers_fit_80_columns() {
        for place in Place::ALL {
            let width: usize = footer(place)
                .map(|b| b.chords[0].text().chars().count() + 1 + b.short.chars().count() + 2)
                .sum();
            assert!(width <= 72, "{place:?}: {width}");
        }
    }
}
