//! Signals between a launcher and its ranks: ranks end with their launcher, and the launcher
//! interrupts and suspends them.

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal,
};
use std::io::Read;
use std::process::Child;

/// Environment variable with the launcher's process id.
pub const PARENT: &str = "SHARDLAB_PARENT";

/// Ends this process when the shardlab launcher that started it ends for any reason. Calls
/// `cleanup` first if there is time. Does nothing in a process that was started in another way.
///
/// There are two mechanisms: the system sends a signal (on Linux), and the standard input, which
/// the launcher holds open, ends.
pub fn end_with_launcher(cleanup: impl FnOnce() + Send + 'static) {
    let Some(parent) = launcher() else {
        return;
    };
    // If the system does not support it, the standard input remains.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() != Some(parent) {
        // The launcher ended before the signal was requested.
        std::process::exit(3);
    }
    // If the thread cannot be started, the signal remains.
    let _ = std::thread::Builder::new()
        .name("launcher".to_owned())
        .spawn(move || {
            let mut nothing = [0; 64];
            while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
            cleanup();
            std::process::exit(3);
        });
}

/// Returns the id of the shardlab launcher that started this process.
fn launcher() -> Option<Pid> {
    let parent = std::env::var(PARENT).ok()?.parse().ok()?;
    Pid::from_raw(parent)
}

/// Returns whether a shardlab launcher started this process. That launcher forwards signals to it.
#[must_use]
pub fn has_launcher() -> bool {
    launcher().is_some()
}

/// Sends a child the signal of Ctrl-C.
pub fn interrupt(child: &Child) {
    send(child, Signal::INT);
}

/// Suspends this process and its children until this process is resumed. Then it resumes the
/// children.
pub(super) fn suspend_with<'a>(children: impl Iterator<Item = &'a Child> + Clone) {
    children.clone().for_each(|c| send(c, Signal::STOP));
    // If the system rejects this, the children are resumed immediately.
    let _ = kill_process(getpid(), Signal::STOP);
    children.for_each(|c| send(c, Signal::CONT));
}

fn send(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // The child may have ended.
        let _ = kill_process(pid, signal);
    }
}
