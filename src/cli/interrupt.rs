//! Ctrl-C, and the signal by which batch schedulers announce a job's end: finish with what there
//! is. Ctrl-Z, where others are to stop as well.

use shardlab_exec::process::has_launcher;
use signal_hook::consts::{SIGINT, SIGTERM, SIGTSTP};
use signal_hook::flag;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once};

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// Likewise, where it is no reason to take what the launcher passes on for a second one.
static TERMINATED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// From now on either signal sets a flag instead of ending the process; a second one ends it.
pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        on(SIGINT);
        if has_launcher() {
            // A scheduler sends it to every process of a job, and the launcher passes on what it
            // gets.
            let _ = flag::register(SIGTERM, Arc::clone(&TERMINATED));
        } else {
            on(SIGTERM);
        }
    });
}

/// Without handlers a signal ends the process at once, which is no reason not to begin.
fn on(signal: i32) {
    // In this order: what finds the flag set is a second one.
    let _ = flag::register_conditional_shutdown(signal, 3, Arc::clone(&INTERRUPTED));
    let _ = flag::register(signal, Arc::clone(&INTERRUPTED));
}

/// Whether one has come.
pub(super) fn requested() -> bool {
    [&INTERRUPTED, &TERMINATED]
        .iter()
        .any(|f| f.load(Ordering::Relaxed))
}

/// From now on Ctrl-Z sets a flag instead of stopping the process: whoever asks for it stops
/// itself, after its children.
pub(super) fn watch_stops() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Without a handler it stops this process alone, as it always does.
        let _ = flag::register(SIGTSTP, Arc::clone(&STOP));
    });
}

/// Whether one has come since this was asked last.
pub(super) fn stop_requested() -> bool {
    STOP.swap(false, Ordering::Relaxed)
}
