//! Draws questions on top of the view.

use super::kit::{pieces, popup, put, wrap};
use crate::dash::app::{App, Purpose};
use crate::dash::confirm::Question;
use crate::dash::train::End;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

/// Maximum number of changes of a baseline that are listed.
const MAX_LISTED: usize = 6;

pub(super) fn draw(app: &App, question: Question, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let width = body.width.min(76);
    let room = usize::from(width) - 4;
    let mut lines: Vec<(String, Style)> = Vec::new();
    let mut say = |text: &str, style| {
        lines.extend(wrap(text, room).into_iter().map(|l| (l, style)));
    };
    let (title, yes, no) = match question {
        Question::Bless => {
            bless(app, &mut say);
            ("Bless", "write it", "cancel")
        }
        Question::Overwrite => {
            let path = app.export.as_ref().map(|e| e.path.display().to_string());
            say(
                &format!("{} already exists.", path.unwrap_or_default()),
                theme.strong(),
            );
            say(
                "Replace it with the scenario and its changes?",
                theme.text(),
            );
            ("Write", "replace it", "cancel")
        }
        Question::Remove => {
            let id = app.runs.subject.as_deref().unwrap_or_default();
            let run = app.runs.stored.iter().find(|r| r.id == id);
            say(&format!("Remove {id} from the store?"), theme.strong());
            if let Some(r) = run {
                let text = format!("{} {} {} {}", r.kind, r.scenario, r.made, r.changes);
                say(&text, theme.text());
            }
            say("This cannot be undone.", theme.bad());
            ("Remove", "remove it", "keep it")
        }
        Question::Quit => {
            let job = app.job(Purpose::Train);
            let of = job.map_or("", |j| &j.of);
            let (doing, lost) = if job.is_some_and(|j| j.cancelled) {
                (
                    "stopping",
                    "Its run is lost unless you stay until it has stopped.",
                )
            } else {
                let lost = "Its run is lost; s in view 3 stops it and saves the run so far.";
                ("training", lost)
            };
            say(&format!("{of} is still {doing}."), theme.strong());
            say(lost, theme.text());
            ("Quit", "quit", "stay")
        }
        Question::TooLarge => {
            too_large(app, &mut say);
            ("Train", "train it anyway", "cancel")
        }
    };
    let height = (lines.len() as u16 + 4).min(body.height);
    let area = Rect {
        x: body.x + (body.width - width) / 2,
        y: body.y + (body.height - height) / 2,
        width,
        height,
    };
    let inner = popup(buf, area, title, theme);
    let last = inner.bottom().saturating_sub(1);
    for (y, (line, style)) in (inner.y..last.saturating_sub(1)).zip(&lines) {
        put(buf, inner.x + 1, y, inner.width - 1, line, *style);
    }
    let keys = [
        ("y".to_owned(), theme.accent()),
        (format!(" {yes}   "), theme.text()),
        ("n".to_owned(), theme.accent()),
        (format!(" {no}"), theme.text()),
    ];
    pieces(buf, inner.x + 1, last, inner.width - 1, &keys);
}

/// Explains why a training was not started.
fn too_large(app: &App, say: &mut impl FnMut(&str, Style)) {
    let theme = app.theme;
    let name = app.train.name();
    say(&format!("{name} is not started."), theme.strong());
    if let Some(End::TooLarge(reason)) = &app.train.end {
        say(&format!("On this machine's CPU {reason}."), theme.bad());
    }
    let text = "It may use up all memory. On a machine with GPUs, x trains on them.";
    say(text, theme.text());
}

/// Shows what would be written, and where.
fn bless(app: &App, say: &mut impl FnMut(&str, Style)) {
    let theme = app.theme;
    let Some(judged) = app.gate.judged.as_deref() else {
        return;
    };
    say(&format!("Write {}?", judged.path.display()), theme.strong());
    if !judged.facts.set.is_empty() {
        let set = judged.facts.set.join(" ");
        say(&format!("With changed options: {set}"), theme.bad());
    }
    match (judged.exists, judged.changes.len()) {
        (false, _) => say("There is none yet.", theme.text()),
        (true, 0) => say(
            "The current baseline passes; nothing important would change.",
            theme.text(),
        ),
        (true, n) => {
            say("It replaces the current baseline:", theme.text());
            for change in judged.changes.iter().take(MAX_LISTED) {
                say(change, theme.dim());
            }
            if n > MAX_LISTED {
                say(&format!("and {} more", n - MAX_LISTED), theme.dim());
            }
        }
    }
}
