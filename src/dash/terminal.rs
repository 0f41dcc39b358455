//! The terminal: taken over at the begin, given back however the dashboard ends.

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

/// How often the clock ticks while nothing else happens.
const TICK: Duration = Duration::from_millis(250);
/// The shortest time between two drawings: reports may come by the thousand.
const FRAME: Duration = Duration::from_millis(30);

/// Set by tests only: drawing panics, to see that the terminal is given back then too.
const PANIC: &str = "SHARDLAB_TEST_PANIC";

/// Whether the terminal is the dashboard's.
static HELD: AtomicBool = AtomicBool::new(false);

/// While it lives the terminal is the dashboard's.
struct Guard;

impl Guard {
    fn new(mouse: bool) -> io::Result<Self> {
        hook(std::thread::current().id());
        // What has been taken when it fails is given back.
        let guard = Self;
        take(mouse)?;
        Ok(guard)
    }
}

/// Takes the terminal over.
fn take(mouse: bool) -> io::Result<()> {
    enable_raw_mode()?;
    HELD.store(true, Ordering::Relaxed);
    // Not by ratatui's own clear: it asks where the cursor is, and not every terminal answers.
    execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
    if mouse {
        execute!(stdout(), EnableMouseCapture)?;
    }
    Ok(())
}

/// Gives the terminal to the shell and stops; when the shell lets it go on, all is drawn anew.
fn suspend(mouse: bool, terminal: &mut Terminal<CrosstermBackend<Stdout>>) -> io::Result<Size> {
    give_back();
    // What the terminal does for programs that leave Ctrl-Z to it: a script that waits for this one
    // stops as well, else its shell would never know. Without a shell that could let it go on
    // nothing happens. The drawing thread is the main one, which takes its own signal before it
    // comes back from here.
    kill_current_process_group(Signal::TSTP)?;
    take(mouse)?;
    // Not told while it was stopped.
    let size = terminal.size()?;
    terminal.resize(size.into())?;
    Ok(size)
}

impl Drop for Guard {
    fn drop(&mut self) {
        give_back();
    }
}

/// Gives the terminal back, once: leaving the other screen again would put the cursor back to where
/// it was before, over what a panic has said meanwhile. Nothing can be done about a terminal that
/// is gone.
fn give_back() {
    if !HELD.swap(false, Ordering::Relaxed) {
        return;
    }
    let _ = execute!(stdout(), DisableMouseCapture, LeaveAlternateScreen);
    let _ = execute!(stdout(), ratatui::crossterm::cursor::Show);
    let _ = disable_raw_mode();
}

/// A panic of the drawing thread gives the terminal back before it is reported. Others become
/// failed jobs: what they would print would only spoil the screen.
fn hook(own: ThreadId) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == own {
            give_back();
            before(info);
        }
    }));
}

/// Runs until the user leaves or a signal ends it.
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
    // What was reported by the panic hook in between belongs to the default one again.
    drop(std::panic::take_hook());
    result
}

/// Reads keys and the mouse on a thread of its own.
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
    // Without it there are no keys; signals still end the dashboard.
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
        // Drawing comes first when it is due: reports that never cease must not keep the screen
        // from moving.
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
            // The worker holds a sender as long as this loop runs.
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
