//! The mouse selects, zooms and pans.

use super::{in_help, in_view};
use crate::dash::app::{App, Hit, View};
use crate::dash::event::Effect;
use crate::dash::keys::Command;
use crate::dash::lanes::bins::Window;
use crate::dash::{fit, runs, scenarios, whatif, whole};
use ratatui::crossterm::event::{MouseButton, MouseEvent, MouseEventKind};

pub(super) fn mouse(app: &mut App, event: MouseEvent) -> Vec<Effect> {
    let hit = app.hit(event.column, event.row);
    let wheel = |up: bool| if up { Command::Up } else { Command::Down };
    match event.kind {
        MouseEventKind::Down(MouseButton::Left) => hit.map_or_else(Vec::new, |(area, hit)| {
            click(app, hit, event.column.saturating_sub(area.x), area.width)
        }),
        MouseEventKind::Drag(MouseButton::Left) => {
            if let Some((area, Hit::Lane(_) | Hit::Time)) = hit {
                let column = event.column.saturating_sub(area.x);
                app.timeline.dragged(column, area.width);
            }
            Vec::new()
        }
        MouseEventKind::Up(_) => {
            app.timeline.drag = None;
            Vec::new()
        }
        MouseEventKind::ScrollUp | MouseEventKind::ScrollDown => {
            let up = event.kind == MouseEventKind::ScrollUp;
            if app.help.is_some() {
                return in_help(app, wheel(up));
            }
            if app.prompt.is_some() || app.question.is_some() {
                return Vec::new();
            }
            if app.whole.is_some() {
                return whole::command(app, wheel(up));
            }
            if app.view == View::Timeline {
                if let Some((area, Hit::Lane(_) | Hit::Time)) = hit {
                    let view: Window = app.timeline.view();
                    let about = view.time(event.column.saturating_sub(area.x), area.width);
                    app.timeline.zoom(about, if up { 1.5 } else { 1.0 / 1.5 });
                }
                return Vec::new();
            }
            in_view(app, wheel(up))
        }
        _ => Vec::new(),
    }
}

fn click(app: &mut App, hit: Hit, column: u16, width: u16) -> Vec<Effect> {
    let covered = app.help.is_some() || app.question.is_some() || app.whole.is_some();
    if app.prompt.is_some() || covered {
        return Vec::new();
    }
    match hit {
        Hit::Tab(view) => {
            app.view = view;
            return match view {
                View::WhatIf => whatif::open(app),
                View::Fit => fit::open(app),
                _ => Vec::new(),
            };
        }
        Hit::Change(of, row) => {
            if app.proposals(of).cursor.at == row {
                return whatif::command(app, of, Command::Enter);
            }
            app.proposals_mut(of).cursor.at = row;
        }
        Hit::Scenario(row) => {
            app.scenarios.pane = scenarios::Pane::List;
            if app.scenarios.cursor.at != row {
                app.scenarios.cursor.at = row;
                return scenarios::selected(app);
            }
        }
        Hit::Option(row) => {
            app.scenarios.pane = scenarios::Pane::Options;
            // A click on the selected option edits it.
            if app.scenarios.option.at == row {
                return scenarios::command(app, Command::Enter);
            }
            app.scenarios.option.at = row;
        }
        Hit::Point(row) => app.sweep.cursor.at = row,
        Hit::Run(row) => {
            if app.runs.cursor.at == row {
                return runs::command(app, Command::Enter);
            }
            app.runs.cursor.at = row;
        }
        Hit::Lane(row) => {
            app.timeline.drag = Some((column, app.timeline.view()));
            let time = app.timeline.view().time(column, width);
            if let Some(lane) = app.timeline.rows().get(row) {
                app.timeline.select_at(*lane, time);
            }
        }
        Hit::Time => app.timeline.drag = Some((column, app.timeline.view())),
    }
    Vec::new()
}
