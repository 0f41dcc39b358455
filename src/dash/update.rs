//! Computes the next state and the requested effects from an event. Nothing here blocks.

mod mouse;
mod news;

use super::app::{App, Purpose, Tone, View};
use super::confirm::{self, Question};
use super::cursor::moved;
use super::event::{Effect, Event, Message};
use super::help::Help;
use super::keys::{self, Command, Place};
use super::options;
use super::prompt::{Asks, Prompt};
use super::scenarios::Refused;
use super::whatif::Ask;
use super::{
    compare, export, fields, fit, gate, runs, scenarios, sweep, timeline, train, whatif, whole,
};
use mouse::mouse;
use ratatui::crossterm::event::{KeyEvent, KeyEventKind};
use shardlab_reports::gate::baseline::FOLDERS;
use std::time::Duration;

/// Time for which a message is shown.
const NOTICE: Duration = Duration::from_secs(8);

/// Handles an event.
#[must_use = "effects are to be carried out"]
pub fn update(app: &mut App, event: Event) -> Vec<Effect> {
    match event {
        Event::Key(k) if k.kind == KeyEventKind::Release => Vec::new(),
        Event::Key(k) => key(app, k),
        Event::Mouse(m) if app.mouse => mouse(app, m),
        Event::Mouse(_) => Vec::new(),
        Event::Resize(columns, rows) => {
            app.size = (columns, rows);
            Vec::new()
        }
        Event::Tick(now) => {
            app.now = now;
            let old = |n: &super::app::Notice| now.saturating_sub(n.since) > NOTICE;
            if app.notice.as_ref().is_some_and(old) {
                app.notice = None;
            }
            Vec::new()
        }
        Event::Message(message) => self::message(app, message),
    }
}

fn key(app: &mut App, key: KeyEvent) -> Vec<Effect> {
    let place = app.place();
    let command = keys::find(place, key);
    // Everything that is open remains as it is.
    if keys::find(Place::Everywhere, key) == Some(Command::Suspend) {
        return vec![Effect::Suspend];
    }
    if place == Place::Typing {
        return typing(app, key, command);
    }
    let Some(command) = command else {
        return Vec::new();
    };
    app.notice = None;
    if let Some(question) = app.question {
        return confirm::answer(app, question, command);
    }
    if place == Place::Help {
        return in_help(app, command);
    }
    if place == Place::Whole {
        return whole::command(app, command);
    }
    match command {
        Command::Quit => return quit(app),
        Command::Leave => return vec![Effect::Save(app.save()), Effect::Quit],
        Command::Help => {
            app.help = Some(Help {
                here: Some(place),
                ..Help::default()
            });
            return Vec::new();
        }
        Command::View(n) => {
            app.view = View::ALL[usize::from(n).min(View::ALL.len() - 1)];
            return match app.view {
                View::WhatIf => whatif::open(app),
                View::Fit => fit::open(app),
                _ => Vec::new(),
            };
        }
        Command::Theme => {
            app.theme = app.theme.next();
            app.say(Tone::Plain, format!("theme: {}", app.theme.name.text()));
            return Vec::new();
        }
        Command::Mouse => {
            app.mouse = !app.mouse;
            let state = if app.mouse {
                "on"
            } else {
                "off: the terminal selects text"
            };
            app.say(Tone::Plain, format!("mouse {state}"));
            return vec![Effect::Mouse(app.mouse)];
        }
        _ => {}
    }
    in_view(app, command)
}

/// Quits, or asks first if that would end a training.
fn quit(app: &mut App) -> Vec<Effect> {
    // A training that is stopping still has to deliver its run.
    if app.job(Purpose::Train).is_some() {
        app.question = Some(Question::Quit);
        return Vec::new();
    }
    vec![Effect::Save(app.save()), Effect::Quit]
}

/// Handles a command of the current view.
fn in_view(app: &mut App, command: Command) -> Vec<Effect> {
    match app.view {
        View::Scenarios => scenarios::command(app, command),
        View::Timeline => timeline::command(app, command),
        View::Train => train::command(app, command),
        View::Sweep => sweep::command(app, command),
        View::Runs => runs::command(app, command),
        View::Compare => compare::command(app, command),
        View::Gate => gate::command(app, command),
        View::WhatIf => whatif::command(app, Ask::Changes, command),
        View::Fit => fit::command(app, command),
        View::Tune => whatif::command(app, Ask::Best, command),
    }
}

fn in_help(app: &mut App, command: Command) -> Vec<Effect> {
    let Some(help) = &mut app.help else {
        return Vec::new();
    };
    let page = usize::from(app.size.1).saturating_sub(6).max(1);
    let last = help.lines().len().saturating_sub(page);
    match command {
        Command::Back => app.help = None,
        Command::Quit | Command::Leave => return vec![Effect::Save(app.save()), Effect::Quit],
        Command::Filter => {
            let text = help.search.clone();
            app.prompt = Some(Prompt::replacing(Asks::FilterHelp, text));
            help.search.clear();
        }
        _ => help.top = moved(help.top, command, page, last).unwrap_or(help.top.min(last)),
    }
    Vec::new()
}

fn typing(app: &mut App, key: KeyEvent, command: Option<Command>) -> Vec<Effect> {
    let Some(mut prompt) = app.prompt.take() else {
        return Vec::new();
    };
    let asks = prompt.asks;
    match command {
        Some(Command::Back) => {
            let before = prompt.before.clone();
            return match asks {
                // The prediction followed the typed text, so it returns to the effective options.
                Asks::Option(_) => {
                    app.scenarios.refused = None;
                    if prompt.touched {
                        return app.predict();
                    }
                    Vec::new()
                }
                asks if asks.is_filter() => filter(app, asks, &before),
                _ => Vec::new(),
            };
        }
        Some(Command::Enter) => {
            let text = prompt.line.text().to_owned();
            return match asks {
                Asks::Option(option) => scenarios::accept(app, option, &text),
                Asks::Unit | Asks::Instr => {
                    timeline::jump(app, asks, &text);
                    Vec::new()
                }
                Asks::Axis => {
                    // The line stays open for correction.
                    if let Err(reason) = sweep::accept(app, &text) {
                        prompt.refused = Some(reason);
                        app.prompt = Some(prompt);
                    }
                    Vec::new()
                }
                Asks::Baselines => gate::accept(app, &text),
                Asks::Export => export::accept(app, &text),
                Asks::RunName => runs::named(app, &text, &prompt.before),
                // The line stays open for correction.
                asks if asks.is_filter() && prompt.refused.is_some() => {
                    app.prompt = Some(prompt);
                    Vec::new()
                }
                _ => Vec::new(),
            };
        }
        Some(Command::Complete | Command::CompleteBack) => {
            // Fields are offered only on request, because most filters are words. After a name, its
            // values are offered.
            if asks.is_filter() && prompt.completions.len() < 2 {
                prompt.completions = fields::complete(app, asks, prompt.line.text());
                prompt.chosen = None;
            }
            prompt.complete(command == Some(Command::Complete));
        }
        _ if prompt.line.key(key) => {
            prompt.change();
            prompt.chosen = None;
            prompt.completions = completions(app, asks, prompt.line.text());
        }
        _ => {}
    }
    let text = prompt.line.text().to_owned();
    if asks.is_filter() {
        prompt.refused = fields::refusal(app, asks, &text);
    }
    app.prompt = Some(prompt);
    match asks {
        Asks::Option(_) => app.predict(),
        asks if asks.is_filter() => filter(app, asks, &text),
        _ => Vec::new(),
    }
}

/// Returns the completions of the typed text.
fn completions(app: &App, asks: Asks, text: &str) -> Vec<String> {
    let containing = |all: Vec<String>| -> Vec<String> {
        let (first, second): (Vec<String>, Vec<String>) = all
            .into_iter()
            .filter(|c| text.split_whitespace().all(|w| c.contains(w)))
            .partition(|c| c.starts_with(text));
        first.into_iter().chain(second).collect()
    };
    match asks {
        Asks::Option(option) => {
            let current = app.scenarios.value(option);
            options::completions(options::all()[option], current, text)
        }
        Asks::Unit => app
            .timeline
            .main
            .as_ref()
            .map_or_else(Vec::new, |m| containing(m.unit_names())),
        Asks::Baselines => containing(FOLDERS.map(str::to_owned).to_vec()),
        Asks::Axis if !text.contains('=') => containing(
            options::all()
                .iter()
                .map(|i| format!("{}=[]", options::path(i)))
                .collect(),
        ),
        _ => Vec::new(),
    }
}

/// Applies a filter while it is typed.
pub(super) fn filter(app: &mut App, asks: Asks, text: &str) -> Vec<Effect> {
    match asks {
        Asks::FilterScenarios => return scenarios::filter(app, text),
        Asks::FilterOptions => {
            app.scenarios.option_filter = text.to_owned();
            let len = app.scenarios.option_rows().len();
            app.scenarios.option.clamp(len);
        }
        Asks::FilterSweep => {
            app.sweep.filter = text.to_owned();
            let len = app.sweep.rows().len();
            app.sweep.cursor.clamp(len);
        }
        Asks::FilterRuns => {
            app.runs.filter = text.to_owned();
            let len = app.runs.rows().len();
            app.runs.cursor.clamp(len);
        }
        Asks::FilterHelp => {
            if let Some(help) = &mut app.help {
                help.search = text.to_owned();
                help.top = 0;
            }
        }
        Asks::Option(_)
        | Asks::Unit
        | Asks::Instr
        | Asks::Axis
        | Asks::Baselines
        | Asks::Export
        | Asks::RunName => {}
    }
    Vec::new()
}

fn message(app: &mut App, message: Message) -> Vec<Effect> {
    match message {
        Message::Predicted { ticket, base, now } => {
            let s = &mut app.scenarios;
            // The answer for an older ticket is no longer needed.
            if ticket != s.ticket {
                return Vec::new();
            }
            s.pending = false;
            s.base = base;
            let typed = app.prompt.as_ref().and_then(Prompt::edited);
            match (now, typed) {
                (Ok(glance), typed) => {
                    let brief = glance.brief.clone();
                    s.glance = Some(glance);
                    s.error = None;
                    match typed {
                        Some(_) => s.refused = None,
                        None => {
                            s.prove();
                            s.predicted(&Ok(brief));
                        }
                    }
                }
                // If the scenario is invalid in any case, the value is not the cause.
                (Err(reason), Some((option, text))) if s.is_proven() => {
                    let path = options::path(options::all()[option]);
                    s.refused = Some(Refused {
                        values: [(path, text.trim().to_owned())].into(),
                        reason,
                    });
                }
                (Err(reason), _) => {
                    if s.fall_back(&reason) {
                        app.say(Tone::Bad, format!("refused: {reason}"));
                        return app.predict();
                    }
                    s.error = Some(reason.clone());
                    s.predicted(&Err(reason));
                }
            }
        }
        Message::Surveyed(setup, brief) => {
            let key = app.scenarios.current().map(|s| s.key.clone());
            app.scenarios.surveyed(&setup, &brief);
            // A filter on numbers may let another row pass, so the selection is kept.
            if let Some(key) = key.filter(|_| !app.scenarios.filter.is_empty()) {
                app.scenarios.select(&key);
            }
        }
        Message::Job(id, news) => return news::news(app, id, news),
    }
    Vec::new()
}
