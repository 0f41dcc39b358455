//! Commands of the timeline.

use super::{LaneRow, Selected, Timeline};
use crate::dash::app::{App, Tone};
use crate::dash::event::Effect;
use crate::dash::keys::Command;
use crate::dash::lanes::Lanes;
use crate::dash::lanes::bins::Window;
use crate::dash::prompt::{Asks, Prompt};
use shardlab_plan::record::RunKind;
use shardlab_plan::units::Bytes;
use std::sync::Arc;

/// Handles a command in the timeline.
pub(in crate::dash) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    let t = &mut app.timeline;
    match command {
        Command::Left => t.along(false),
        Command::Right => t.along(true),
        Command::Up => t.across(false),
        Command::Down => t.across(true),
        Command::First | Command::Last => ends(t, command == Command::First),
        Command::ZoomIn => t.zoom(t.centre(), 2.0),
        Command::ZoomOut => t.zoom(t.centre(), 0.5),
        Command::Whole | Command::Back => t.window = None,
        Command::ZoomSpan => {
            if let Some(time) = t.selected_time() {
                t.show(time);
            }
        }
        Command::ZoomUnit => {
            let window = t.selected.and_then(|s| {
                let unit = t.run(s.run)?.unit_of(s.span)?;
                Some(Window {
                    from: t.on_screen(s.run, unit.from),
                    to: t.on_screen(s.run, unit.to),
                })
            });
            if let Some(window) = window {
                t.show(window);
            }
        }
        Command::PanLeft => t.pan(-0.5),
        Command::PanRight => t.pan(0.5),
        Command::NextGap | Command::PreviousGap => {
            let said = t.go_to_gap(command == Command::NextGap);
            app.say(
                Tone::Plain,
                said.unwrap_or_else(|| "nothing is exposed".into()),
            );
        }
        Command::Critical => t.critical = !t.critical,
        Command::Blocker => blocker(app),
        Command::Peak => peak(app),
        Command::Pair => pair(app),
        Command::Stretch => {
            t.stretch = !t.stretch;
            t.window = None;
        }
        Command::JumpUnit | Command::JumpInstr => {
            let asks = if command == Command::JumpUnit {
                Asks::Unit
            } else {
                Asks::Instr
            };
            let mut prompt = Prompt::new(asks, "");
            if let (Asks::Unit, Some(main)) = (asks, &t.main) {
                prompt.completions = main.unit_names();
            }
            app.prompt = Some(prompt);
        }
        _ => {}
    }
    Vec::new()
}

fn ends(t: &mut Timeline, first: bool) {
    let Some(s) = t.selected else { return };
    let span = t.run(s.run).and_then(|run| {
        let items = &run.lanes.get(run.place(s.span)?.0)?.items;
        let item = if first { items.first() } else { items.last() };
        item.map(|i| i.span)
    });
    if let Some(span) = span {
        t.select(s.run, span);
    }
}

fn blocker(app: &mut App) {
    let t = &mut app.timeline;
    let Some(s) = t.selected else { return };
    let Some(run) = t.run(s.run) else { return };
    let (why, target) = run.why(s.span);
    match target {
        Some(span) => {
            t.select(s.run, span);
            app.say(Tone::Plain, why);
        }
        None => app.say(Tone::Plain, format!("no span to jump to: {why}")),
    }
}

fn peak(app: &mut App) {
    let t = &mut app.timeline;
    let Some(run) = t.main.clone() else { return };
    let Some(sample) = run.memory.peak.map(|i| run.memory.samples[i]) else {
        app.say(Tone::Plain, "the run has no memory timeline");
        return;
    };
    // Memory is allocated in host order, so the kernels that need it run at that time or later.
    t.select_at(LaneRow { run: 0, lane: 0 }, sample.time);
    let bytes = Bytes(sample.allocated);
    app.say(
        Tone::Plain,
        format!("peak: {bytes} allocated by the host at this time"),
    );
}

/// Shows the next of the other runs below, or none after the last.
fn pair(app: &mut App) {
    let t = &mut app.timeline;
    let Some(main) = &t.main else { return };
    let missing = match main.view.run.kind {
        RunKind::Sim => "train (1, x)",
        RunKind::Exec | RunKind::Import => "simulate (1, r)",
    };
    let mut others: Vec<&Arc<Lanes>> = app.runs.kept.iter().map(|k| &k.lanes).collect();
    others.retain(|l| !Arc::ptr_eq(l, main));
    let at = t
        .other
        .as_ref()
        .and_then(|o| others.iter().position(|l| Arc::ptr_eq(l, o)));
    let next = at.map_or(0, |i| i + 1);
    t.other = others.get(next).map(|l| Arc::clone(l));
    if t.other.is_none() && t.selected.is_some_and(|s| s.run == 1) {
        t.selected = None;
        ends_of_main(t);
    }
    if others.is_empty() {
        app.say(
            Tone::Plain,
            format!("there is no other run: {missing} the scenario, or open one in view 5"),
        );
    }
}

fn ends_of_main(t: &mut Timeline) {
    let first = t
        .main
        .as_ref()
        .and_then(|m| m.lanes.first()?.items.first().map(|i| i.span));
    t.selected = first.map(|span| Selected { run: 0, span });
}

/// Accepts a typed jump.
pub(in crate::dash) fn jump(app: &mut App, asks: Asks, text: &str) {
    let t = &mut app.timeline;
    let Some(main) = t.main.clone() else { return };
    if asks == Asks::Unit {
        match main.find_unit(text) {
            Some((window, span)) => {
                t.selected = Some(Selected { run: 0, span });
                t.show(window);
            }
            None => app.say(Tone::Bad, format!("no unit `{text}` in this step")),
        }
        return;
    }
    let (run, lanes, after) = match t.selected {
        Some(Selected { run: 1, span }) => (1, t.other.clone().unwrap_or(main), Some(span)),
        s => (0, main, s.map(|s| s.span)),
    };
    match lanes.find_instr(text, after) {
        Some(span) => t.select(run, span),
        None => app.say(
            Tone::Bad,
            format!("no instruction `{text}` ran in this step"),
        ),
    }
}
