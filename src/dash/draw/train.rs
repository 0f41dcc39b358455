//! Draws live training.

use super::charts::{Curve, curves};
use super::kit::{
    MORE, bytes, duration, excerpt, lines, over_all, pane, pieces, put, put_right, step_time,
};
use crate::dash::app::{App, Purpose};
use crate::dash::event::{RankStep, StepNews};
use crate::dash::keys::{self, Command, Place};
use crate::dash::train::End;
use crate::dash::whole::Whole;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use shardlab_exec::train::ParamNorm;
use shardlab_plan::units::thousands;
use std::time::Duration;

/// Minimum duration after which the running step is shown.
const MIN_STEP_SHOWN: Duration = Duration::from_secs(1);

pub(super) fn draw(app: &App, buf: &mut Buffer, body: Rect) {
    let ranks = app
        .train
        .steps
        .last()
        .map_or(0, |s| s.ranks.len())
        .max(app.train.ranks.len());
    let rank_rows = (ranks as u16 + 3).clamp(5, (body.height / 3).max(5));
    let top = Rect { height: 7, ..body };
    summary(app, buf, top);
    let middle = Rect {
        y: top.bottom(),
        height: body.height - 7 - rank_rows,
        ..body
    };
    let wide = body.width >= 120;
    let half = if wide { body.width * 2 / 3 } else { body.width };
    losses(
        app,
        buf,
        Rect {
            width: half,
            ..middle
        },
    );
    if wide {
        let right = Rect {
            x: middle.x + half,
            width: middle.width - half,
            ..middle
        };
        match &app.train.param_norms {
            None => times(app, buf, right),
            Some((step, norms)) => {
                let height = right.height / 2;
                times(app, buf, Rect { height, ..right });
                let below = Rect {
                    y: right.y + height,
                    height: right.height - height,
                    ..right
                };
                largest_gradients(app, buf, below, *step, norms);
            }
        }
    }
    rank_table(
        app,
        buf,
        Rect {
            y: middle.bottom(),
            height: rank_rows,
            ..body
        },
    );
}

fn summary(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let t = &app.train;
    let running = app.job(Purpose::Train);
    let title = t.setup.as_ref().map_or_else(
        || "Train".to_owned(),
        |s| {
            let on = t.on.as_ref().map(|on| format!(" on {on}"));
            format!("Train {}{}", s.path.display(), on.unwrap_or_default())
        },
    );
    let inner = pane(buf, area, &title, running.is_some(), theme);
    let x = inner.x + 1;
    let width = inner.width.saturating_sub(2);
    let line = |y: u16| Rect {
        x,
        y: inner.y + y,
        width,
        height: 1,
    };
    if t.setup.is_none() {
        return no_training(app, buf, line(0));
    }
    pieces(buf, x, inner.y, width, &status_line(app));
    bar(app, buf, line(1), t.done(), t.total());
    if let Some(step) = t.steps.last() {
        pieces(buf, x, inner.y + 2, width, &loss_line(app, step));
        pieces(buf, x, inner.y + 3, width, &speed_line(app, step));
    }
    ending(app, buf, line(4));
}

/// Draws how to start a training, beginning at a row.
fn no_training(app: &App, buf: &mut Buffer, at: Rect) {
    let theme = app.theme;
    put(
        buf,
        at.x,
        at.y,
        at.width,
        "No training yet.",
        theme.strong(),
    );
    let name = app.scenarios.current().map_or("…", |s| s.name.as_str());
    let how = [
        format!("x trains {name} on the device that `shardlab exec` would choose,"),
        format!(
            "and {} on the CPU; collectives are real",
            keys::first(Place::Training, Command::TrainOnCpu)
        ),
    ];
    for (y, text) in (at.y + 1..).zip(&how) {
        put(buf, at.x, y, at.width, text, theme.dim());
    }
}

/// Pieces of text with their styles.
type Pieces = Vec<(String, Style)>;

/// Returns the state of the training, its step, its times and its learning rate.
fn status_line(app: &App) -> Pieces {
    let (theme, t) = (app.theme, &app.train);
    let dim = |t: &str| (t.to_owned(), theme.dim());
    let strong = |t: String| (t, theme.strong());
    let running = app.job(Purpose::Train);
    let (done, all) = (t.done(), t.total());
    let (state, style) = match (running, &t.end) {
        (_, Some(End::TooLarge(_))) => ("■ not started", theme.warn()),
        (Some(j), _) if j.cancelled => ("stopping", theme.warn()),
        (Some(_), _) if t.since.is_none() => ("setting up", theme.accent()),
        (Some(_), _) => ("training", theme.accent()),
        (None, Some(End::Done)) => ("✓ done", theme.good()),
        (None, Some(End::Stopped)) => ("■ stopped", theme.warn()),
        (None, Some(End::Failed(_))) => ("✗ failed", theme.bad()),
        (None, None) => ("", theme.dim()),
    };
    let mut all_pieces = vec![(state.to_owned(), style)];
    if all > 0 {
        // The running step, if there is one.
        let step = if running.is_some() {
            (done + 1).min(all)
        } else {
            done
        };
        all_pieces.extend([dim("   step "), strong(format!("{step} of {all}"))]);
    }
    if let Some(job) = running.filter(|_| done < all || all == 0) {
        // For short steps, the time would only flicker.
        let since = app.now.saturating_sub(t.since.unwrap_or(job.since));
        if since >= MIN_STEP_SHOWN {
            all_pieces.push(dim(&format!(" for {}", duration(since))));
        }
    }
    if running.is_some()
        && let Some(left) = t.left()
    {
        all_pieces.extend([dim("   left "), strong(duration(left))]);
    }
    if let Some(step) = t.steps.last() {
        all_pieces.extend([dim("   lr "), strong(format!("{:.3e}", step.lr))]);
    }
    all_pieces
}

/// Returns loss and gradient norm of a step, and the last validation loss.
fn loss_line(app: &App, step: &StepNews) -> Pieces {
    let theme = app.theme;
    let dim = |t: &str| (t.to_owned(), theme.dim());
    let strong = |t: String| (t, theme.strong());
    let mut all = vec![dim("loss "), strong(format!("{:.4}", step.loss))];
    if let Some(norm) = step.grad_norm {
        all.extend([dim("   gradient norm "), strong(format!("{norm:.4}"))]);
    }
    if let Some((at, loss)) = app.train.validations.last() {
        all.extend([
            dim("   validation "),
            strong(format!("{loss:.4}")),
            dim(&format!(" at {at}")),
        ]);
    }
    all
}

/// Returns the current step time and throughput, and the memory of a step.
fn speed_line(app: &App, step: &StepNews) -> Pieces {
    let (theme, t) = (app.theme, &app.train);
    let dim = |t: &str| (t.to_owned(), theme.dim());
    let strong = |t: String| (t, theme.strong());
    let mut all = vec![
        dim("step "),
        strong(step_time(t.pace().unwrap_or(step.time))),
        dim(&format!("   {} ", step.counted_in.rate())),
        strong(
            t.tokens_per_s()
                .map_or_else(|| "-".into(), |n| thousands(n, 0)),
        ),
    ];
    if let Some(memory) = step.ranks.iter().map(|r| r.allocated).max() {
        all.extend([dim("   peak per rank "), strong(bytes(memory))]);
    }
    all
}

/// Draws why the training failed, its last note, or what to do after it. The text ends on row
/// `last`.
fn ending(app: &App, buf: &mut Buffer, last: Rect) {
    let (theme, t) = (app.theme, &app.train);
    let Rect { x, y, width, .. } = last;
    let text = match &t.end {
        Some(End::Failed(reason)) => Some((reason, theme.bad())),
        Some(End::TooLarge(reason)) => Some((reason, theme.warn())),
        _ => t.notes.last().map(|n| (n, theme.warn())),
    };
    if let Some((text, style)) = text {
        // If there are no steps yet, there is room above.
        let rows = if t.steps.is_empty() { 3 } else { 1 };
        let text = excerpt(text, usize::from(width), rows, MORE);
        for (y, line) in (y + 1 - rows as u16..).zip(&text) {
            put(buf, x, y, width, line, style);
        }
    } else if t.end.is_some() {
        let text =
            "2 shows its last step, next to the prediction if there is one; 5 lists all runs";
        put(buf, x, y, width, text, theme.dim());
    }
}

fn bar(app: &App, buf: &mut Buffer, area: Rect, done: u64, all: u64) {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let share = if all == 0 {
        0.0
    } else {
        done as f64 / all as f64
    };
    let cells = share.min(1.0) * f64::from(area.width);
    let full = cells.floor() as usize;
    let mut text = "█".repeat(full);
    if full < usize::from(area.width) {
        text.push(EIGHTHS[((cells - cells.floor()) * 8.0) as usize % 8]);
    }
    let dots = "·".repeat(usize::from(area.width));
    put(buf, area.x, area.y, area.width, &dots, app.theme.dim());
    put(
        buf,
        area.x,
        area.y,
        area.width,
        text.trim_end(),
        app.theme.good(),
    );
}

fn losses(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let inner = pane(buf, area, "Loss", false, theme);
    let points: Vec<(f64, f64)> = app
        .train
        .steps
        .iter()
        .map(|s| (s.step as f64, s.loss))
        .collect();
    let checks: Vec<(f64, f64)> = app
        .train
        .validations
        .iter()
        .map(|(s, l)| (*s as f64, *l))
        .collect();
    if points.is_empty() {
        put(
            buf,
            inner.x + 1,
            inner.y,
            inner.width - 1,
            "no step has finished yet",
            theme.dim(),
        );
        return;
    }
    let mut all = vec![Curve {
        name: if checks.is_empty() { "" } else { "train" },
        points: &points,
        style: theme.accent(),
        scatter: false,
    }];
    if !checks.is_empty() {
        all.push(Curve {
            name: "validation",
            points: &checks,
            style: theme.warn(),
            scatter: true,
        });
    }
    curves(buf, inner, &all, theme);
}

fn times(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let inner = pane(buf, area, "Step time, ms", false, theme);
    let points: Vec<(f64, f64)> = app
        .train
        .steps
        .iter()
        .map(|s| (s.step as f64, s.time.as_secs_f64() * 1e3))
        .collect();
    if points.is_empty() {
        return;
    }
    let curve = Curve {
        name: "",
        points: &points,
        style: theme.series(1),
        scatter: false,
    };
    curves(buf, inner, &[curve], theme);
}

/// Draws the parameters with the largest gradients.
fn largest_gradients(app: &App, buf: &mut Buffer, area: Rect, step: u64, norms: &[ParamNorm]) {
    let theme = app.theme;
    let title = format!("Largest gradients, step {step}");
    let inner = pane(buf, area, &title, false, theme);
    let (x, width) = (inner.x + 1, inner.width.saturating_sub(1));
    for (y, n) in (inner.y..inner.bottom()).zip(by_gradient(norms)) {
        let value = gradient(n);
        let room = width.saturating_sub(value.len() as u16 + 2);
        put(buf, x, y, room, &n.name, theme.text());
        put_right(buf, inner.x, y, width, &value, theme.strong());
    }
}

/// Returns parameters, the one with the largest gradient first.
fn by_gradient(norms: &[ParamNorm]) -> Vec<&ParamNorm> {
    let mut order: Vec<&ParamNorm> = norms.iter().collect();
    let of = |n: &ParamNorm| n.gradient.unwrap_or(-1.0);
    order.sort_by(|a, b| of(b).total_cmp(&of(a)));
    order
}

fn gradient(n: &ParamNorm) -> String {
    n.gradient
        .map_or_else(|| "-".to_owned(), |g| format!("{g:.4}"))
}

fn rank_table(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let inner = pane(buf, area, "Ranks", false, theme);
    let last = app.train.steps.last();
    let steps = last.map_or(&[][..], |s| &s.ranks);
    let now = app.ranks();
    let rows = steps.len().max(now.len());
    if rows == 0 {
        return;
    }
    // The progress of ranks is known only while they run in this process.
    let placed = !now.is_empty();
    let head = if placed {
        "rank  issued  last step      host  memory       peak"
    } else {
        "rank  last step      host  peak         reserved"
    };
    let (x, width) = (inner.x + 1, inner.width - 1);
    put(buf, x, inner.y, width, head, theme.dim());
    if placed {
        put_right(buf, inner.x, inner.y, width, "issued up to", theme.dim());
    }
    let room = usize::from(inner.height.saturating_sub(1));
    let shown = if rows > room {
        room.saturating_sub(1)
    } else {
        rows
    };
    let slowest = steps.iter().map(|s| s.time).max();
    for rank in 0..shown {
        let y = inner.y + 1 + rank as u16;
        let part = steps.get(rank);
        let place = now.get(rank);
        let late = part.is_some_and(|p| rows > 1 && Some(p.time) == slowest);
        let time =
            |f: fn(&RankStep) -> Duration| part.map_or_else(|| "-".into(), |p| step_time(f(p)));
        let size = |n: Option<u64>| n.map_or_else(|| "-".into(), bytes);
        let (time, host) = (time(|p| p.time), time(|p| p.host));
        let peak = size(part.map(|p| p.allocated));
        let text = if placed {
            let issued = place.map_or_else(|| "-".into(), |p| format!("{} %", p.percent));
            let memory = size(place.map(|p| p.allocated));
            format!("{rank:>4}  {issued:>5}  {time:>9} {host:>9}  {memory:<11}  {peak:<11}")
        } else {
            let reserved = size(part.map(|p| p.reserved));
            format!("{rank:>4}  {time:>9} {host:>9}  {peak:<11}  {reserved:<11}")
        };
        let end = put(buf, x, y, width, &text, theme.text());
        let at = place.map_or(0, |p| p.at.chars().count() + 1);
        let free = usize::from((inner.x + width).saturating_sub(end + 1));
        if late && free >= "slowest".len() + at {
            put(buf, end + 1, y, 8, "slowest", theme.warn());
        }
        if let Some(place) = place {
            put_right(buf, inner.x, y, width, &place.at, theme.accent());
        }
    }
    if shown < rows {
        let text = format!("and {} more", rows - shown);
        put(
            buf,
            inner.x + 1,
            inner.bottom() - 1,
            inner.width,
            &text,
            theme.dim(),
        );
    }
}

/// Draws all messages of a training over the body.
pub(super) fn whole(app: &App, whole: &Whole, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let t = &app.train;
    let title = format!("Train {}", t.name());
    let inner = over_all(buf, body, title.trim_end(), theme);
    let (x, width) = (inner.x + 1, inner.width.saturating_sub(2));
    let end = match &t.end {
        Some(End::Failed(reason)) => Some((format!("✗ {reason}"), theme.bad())),
        Some(End::TooLarge(reason)) => Some((reason.clone(), theme.warn())),
        _ => None,
    };
    let notes = t.notes.iter().map(|n| (n.clone(), theme.text()));
    let mut rows = Vec::new();
    for (text, style) in end.into_iter().chain(notes) {
        let wrapped = lines(&text, usize::from(width));
        rows.extend(wrapped.into_iter().map(|line| (line, style)));
    }
    if let Some((step, norms)) = &t.param_norms {
        let title = format!("norms of parameters after step {step}");
        rows.push((title, theme.strong()));
        let head = format!("{:>12}  {:>12}  parameter", "gradient", "weights");
        rows.push((head, theme.dim()));
        for n in by_gradient(norms) {
            let line = format!("{:>12}  {:>12.4}  {}", gradient(n), n.weight, n.name);
            rows.push((line, theme.text()));
        }
    }
    if rows.is_empty() {
        rows.push(("no output yet".to_owned(), theme.dim()));
    }
    let first = whole.first(rows.len(), usize::from(inner.height));
    for (y, (line, style)) in (inner.y..inner.bottom()).zip(&rows[first..]) {
        put(buf, x, y, width, line, *style);
    }
}
