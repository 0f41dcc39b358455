//! Ranks that end with their launcher.

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal,
};
use std::io::Read;
use std::process::Child;

/// Environment variable with the launcher's process number.
pub const PARENT: &str = "SHARDLAB_PARENT";

/// Ends this process when the launcher that started it ends, however that happens; `farewell` is called where there is
/// time for it. Does nothing in a process that no launcher of shardlab's has started.
///
/// The system sends a signal (Linux); and standard input, which the launcher holds, ends.
pub fn end_with_launcher(farewell: impl FnOnce() + Send + 'static) {
    let Some(parent) = launcher() else {
        return;
    };
    // Where the system knows no such thing, standard input remains.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() != Some(parent) {
        // It ended before the signal was asked for.
        std::process::exit(3);
    }
    // Without the thread the signal remains.
    let _ = std::thread::Builder::new()
        .name("launcher".to_owned())
        .spawn(move || {
            let mut nothing = [0; 64];
            while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
            farewell();
            std::process::exit(3);
        });
}

/// The launcher that started this process.
fn launcher() -> Option<Pid> {
    let parent = std::env::var(PARENT).ok()?.parse().ok()?;
    Pid::from_raw(parent)
}

/// Whether a launcher of shardlab's has started this process, and tells it when it is to stop.
#[must_use]
pub fn has_launcher() -> bool {
    launcher().is_some()
}

/// Sends a child what Ctrl-C sends.
pub fn interrupt(child: &Child) {
    send(child, Signal::INT);
}

/// Stops this process and those children, until it is told to go on; then they go on as well.
pub(super) fn stop_with<'a>(children: impl Iterator<Item = &'a Child> + Clone) {
    children.clone().for_each(|c| send(c, Signal::STOP));
    // Where this is refused, all go on at once.
    let _ = kill_process(getpid(), Signal::STOP);
    children.for_each(|c| send(c, Signal::CONT));
}

fn send(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended.
        let _ = kill_process(pid, signal);
    }
}
