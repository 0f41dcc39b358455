//! Takes over the terminal at the start, and restores it however the dashboard ends.

use super::app::App;
use super::draw::draw;
use super::event::{Effect, Event};
use super::export::clipboard;
use super::update::update;
use super::worker::Worker;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self as input, DisableMouseCapture, EnableMouseCapture};
use ratatui::crossterm::execute;
use ratatui::crossterm::style::Print;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::Size;
use rustix::process::{Signal, kill_current_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{self, Stdout, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Interval of the clock while nothing else happens.
const TICK: Duration = Duration::from_millis(250);
/// Minimum time between two drawings, because there may be thousands of reports.
const FRAME: Duration = Duration::from_millis(30);

/// Set only by tests. Makes drawing panic, to check that the terminal is restored.
const PANIC: &str = "SHARDLAB_TEST_PANIC";

/// Whether the dashboard owns the terminal.
static HELD: AtomicBool = AtomicBool::new(false);

/// Owns the terminal; dropping it restores the terminal.
struct Guard;

impl Guard {
    fn new(mouse: bool) -> io::Result<Self> {
        hook(std::thread::current().id());
        // If a later step fails, dropping the guard restores what was changed.
        let guard = Self;
        take(mouse)?;
        Ok(guard)
    }
}

/// Takes over the terminal.
fn take(mouse: bool) -> io::Result<()> {
    enable_raw_mode()?;
    HELD.store(true, Ordering::Relaxed);
    // ratatui's clear is not used, because it queries the cursor position, which not every terminal
    // reports.
    execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
    if mouse {
        execute!(stdout(), EnableMouseCapture)?;
    }
    Ok(())
}

/// Returns the terminal to the shell and suspends the process. Everything is redrawn when the shell
/// resumes it.
fn suspend(mouse: bool, terminal: &mut Terminal<CrosstermBackend<Stdout>>) -> io::Result<Size> {
    give_back();
    // Stops the whole process group, as the terminal does on Ctrl-Z. A script that waits for this
    // process stops as well; otherwise its shell would never notice. Without a shell that could
    // resume the group, nothing happens. The drawing thread is the main thread, which handles its
    // own signal before this call returns.
    kill_current_process_group(Signal::TSTP)?;
    take(mouse)?;
    // Resizes are not reported while the process is stopped.
    let size = terminal.size()?;
    terminal.resize(size.into())?;
    Ok(size)
}

impl Drop for Guard {
    fn drop(&mut self) {
        give_back();
    }
}

/// Restores the terminal, only once. Leaving the alternate screen a second time would move the
/// cursor back over the message of a panic. Errors are ignored, because the terminal may no longer
/// exist.
fn give_back() {
    if !HELD.swap(false, Ordering::Relaxed) {
        return;
    }
    let _ = execute!(stdout(), DisableMouseCapture, LeaveAlternateScreen);
    let _ = execute!(stdout(), ratatui::crossterm::cursor::Show);
    let _ = disable_raw_mode();
}

/// Restores the terminal before a panic of the drawing thread is reported. Panics of other threads
/// become failed jobs without output, which would only corrupt the screen.
fn hook(own: ThreadId) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == own {
            give_back();
            before(info);
        }
    }));
}

/// Runs until the user quits or a signal ends the dashboard.
pub(super) fn run(
    app: &mut App,
    begin: Vec<Effect>,
    worker: &mut Worker,
    events: &Sender<Event>,
    inbox: &Receiver<Event>,
) -> io::Result<()> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let guard = Guard::new(app.mouse)?;
    let mut terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
    let size = terminal.size()?;
    let _ = update(app, Event::Resize(size.width, size.height));
    listen(events.clone());
    begin.into_iter().for_each(|e| worker.carry_out(e));
    let result = turn(app, worker, inbox, &mut terminal, &ended);
    worker.stop_all();
    drop(guard);
    // Panic reporting returns to the default hook.
    drop(std::panic::take_hook());
    result
}

/// Reads keys and the mouse on a separate thread.
fn listen(events: Sender<Event>) {
    let body = move || {
        while let Ok(event) = input::read() {
            let event = match event {
                input::Event::Key(k) => Event::Key(k),
                input::Event::Mouse(m) => Event::Mouse(m),
                input::Event::Resize(columns, rows) => Event::Resize(columns, rows),
                _ => continue,
            };
            if events.send(event).is_err() {
                return;
            }
        }
    };
    // Without this thread there are no keys, but signals still end the dashboard.
    let _ = std::thread::Builder::new().name("input".into()).spawn(body);
}

fn turn(
    app: &mut App,
    worker: &mut Worker,
    inbox: &Receiver<Event>,
    terminal: &mut Terminal<CrosstermBackend<Stdout>>,
    ended: &AtomicBool,
) -> io::Result<()> {
    let begin = Instant::now();
    let mut drawn = begin.checked_sub(FRAME).unwrap_or(begin);
    let mut changed = true;
    let trap = std::env::var_os(PANIC).is_some();
    loop {
        if ended.load(Ordering::Relaxed) {
            worker.carry_out(Effect::Save(app.save()));
            return Ok(());
        }
        // A due drawing comes first, so that endless reports cannot freeze the screen.
        if changed && drawn.elapsed() >= FRAME {
            let _ = update(app, Event::Tick(begin.elapsed()));
            terminal.draw(|frame| draw(app, frame))?;
            assert!(!trap, "{PANIC} asks for it");
            drawn = Instant::now();
            changed = false;
        }
        let wait = if changed {
            FRAME.saturating_sub(drawn.elapsed())
        } else {
            TICK
        };
        let event = match inbox.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => {
                changed = true;
                continue;
            }
            // The worker holds a sender while this loop runs.
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        changed = true;
        for effect in update(app, event) {
            match effect {
                Effect::Quit => return Ok(()),
                Effect::Suspend => {
                    let size = suspend(app.mouse, terminal)?;
                    let _ = update(app, Event::Resize(size.width, size.height));
                }
                Effect::Mouse(true) => execute!(stdout(), EnableMouseCapture)?,
                Effect::Mouse(false) => execute!(stdout(), DisableMouseCapture)?,
                Effect::Copy(text) => execute!(stdout(), Print(clipboard(&text)))?,
                other => worker.carry_out(other),
            }
        }
    }
}
