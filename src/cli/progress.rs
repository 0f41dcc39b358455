//! Progress on the terminal (stderr) for work that takes longer than a second. Shows nothing if
//! stderr is not a terminal, or with `--json`.

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Work that takes less than this shows no progress.
const AFTER: Duration = Duration::from_secs(1);
/// Time between two redraws.
const TICK: Duration = Duration::from_millis(100);

/// Template for work with one part, whose progress is unknown.
const ONE: &str = "{spinner} {msg}, {elapsed} elapsed";
/// Template for work with several parts.
const MANY: &str = "{msg} {bar:30} {pos}/{len}, {elapsed} elapsed{left}";

/// Progress of some work. Its line disappears on drop.
pub(super) struct Progress {
    bar: ProgressBar,
    /// Shows the bar after a delay, unless the work ends first and drops the sender.
    timer: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Starts counting the `parts` of the work `doing`, for example `predicting`.
    pub(super) fn new(doing: &'static str, parts: usize, json: bool) -> Self {
        let bar = bar(doing, parts);
        let shown = wanted(json, std::io::stderr().is_terminal());
        let timer = shown.then(|| later(bar.clone())).flatten();
        Self { bar, timer }
    }

    /// Counts a part as done. Parts beyond the announced number are ignored.
    pub(super) fn step(&self) {
        if self
            .bar
            .length()
            .is_none_or(|parts| self.bar.position() < parts)
        {
            self.bar.inc(1);
        }
    }

    /// Shows the result so far, such as `tuning: 975 ms per step`.
    pub(super) fn reached(&self, message: String) {
        self.bar.set_message(message);
    }

    /// Hides the line while something is written.
    pub(super) fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((working, timer)) = self.timer.take() {
            drop(working);
            let _ = timer.join();
        }
        self.bar.finish_and_clear();
    }
}

fn bar(doing: &'static str, parts: usize) -> ProgressBar {
    let hidden = ProgressDrawTarget::hidden();
    let bar = ProgressBar::with_draw_target(Some(parts as u64), hidden).with_message(doing);
    let template = if parts > 1 { MANY } else { ONE };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.with_key("left", left)),
        // The templates are constants that are covered by tests. If one failed, the default bar
        // would be used.
        Err(_) => bar,
    }
}

/// Writes the remaining time once it can be estimated.
fn left(state: &ProgressState, w: &mut dyn Write) {
    if state.pos() > 0 {
        // A line that cannot be formatted stays empty.
        let _ = write!(w, ", {:#} left", HumanDuration(state.eta()));
    }
}

fn wanted(json: bool, terminal: bool) -> bool {
    terminal && !json
}

/// Shows a bar on stderr after a delay. If no thread can be started, nothing is shown.
fn later(bar: ProgressBar) -> Option<(Sender<()>, JoinHandle<()>)> {
    let (working, work) = channel();
    let ended = move |time| work.recv_timeout(time) != Err(RecvTimeoutError::Timeout);
    let body = move || show(&bar, ProgressDrawTarget::stderr(), ended);
    let thread = std::thread::Builder::new().name("progress".to_owned());
    Some((working, thread.spawn(body).ok()?))
}

/// Shows a bar unless the work has `ended` by then. `ended` waits for at most the given time.
fn show(bar: &ProgressBar, on: ProgressDrawTarget, ended: impl FnOnce(Duration) -> bool) {
    if !ended(AFTER) {
        bar.set_draw_target(on);
        bar.tick();
        bar.enable_steady_tick(TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;
    use std::sync::{Arc, Mutex};

    /// A terminal that records what is written to it.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn text(&self) -> String {
            self.0.lock().unwrap().clone()
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, s: &str) -> io::Result<()> {
            self.write_str(s)
        }
        fn write_str(&self, s: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(s);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the content of the screen when the delay is over, for work with `parts` parts, of
    /// which `done` are done; `ended` is whether the work has ended.
    fn shown(parts: usize, done: u64, ended: bool) -> String {
        let screen = Screen::default();
        let bar = bar("predicting", parts);
        bar.inc(done);
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        show(&bar, target, |time| {
            assert_eq!(time, Duration::from_secs(1));
            ended
        });
        screen.text()
    }

    #[test]
    fn only_a_terminal_without_json_shows_it() {
        let cases = [(false, true), (false, false), (true, true), (true, false)];
        assert_eq!(
            cases.map(|(j, t)| wanted(j, t)),
            [true, false, false, false]
        );
    }

    #[test]
    fn work_that_ends_in_time_shows_nothing() {
        assert_eq!(shown(10, 3, true), "");
        assert_eq!(shown(1, 0, true), "");
    }

    #[test]
    fn longer_work_shows_how_far_it_is() {
        let text = shown(10, 3, false);
        assert!(
            text.contains("predicting") && text.contains("3/10"),
            "{text}"
        );
        assert!(text.contains(" left"), "{text}");
        // The remaining time is unknown until the first part is done.
        let text = shown(10, 0, false);
        assert!(text.contains("0/10") && !text.contains(" left"), "{text}");
        let text = shown(1, 0, false);
        assert!(
            text.contains("predicting, ") && !text.contains('/'),
            "{text}"
        );
    }

    #[test]
    fn dropping_it_ends_the_timer() {
        let bar = bar("predicting", 2);
        let timer = later(bar.clone());
        assert!(timer.is_some());
        let progress = Progress { bar, timer };
        progress.step();
        assert_eq!(progress.pause(|| 7), 7);
        drop(progress);
    }
}
