//! Signals. Ctrl-C, and the signal by which batch schedulers announce the end of a job, end a run
//! early with its results so far. Ctrl-Z is handled if other processes have to stop as well.

use shardlab_exec::process::has_launcher;
use shardlab_exec::train::Flow;
use signal_hook::consts::{SIGINT, SIGTERM, SIGTSTP};
use signal_hook::flag;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once};

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// Set by SIGTERM, which a launcher also passes on. It must not be mistaken for a second signal.
static TERMINATED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Makes either signal set a flag instead of ending the process. A second signal ends it.
pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        on(SIGINT);
        if has_launcher() {
            // A scheduler signals every process of a job, and the launcher passes the signal on.
            let _ = flag::register(SIGTERM, Arc::clone(&TERMINATED));
        } else {
            on(SIGTERM);
        }
    });
}

/// Makes a signal set the flag, and a second one end the process. If no handler can be installed,
/// the first signal ends the process.
fn on(signal: i32) {
    // The order matters: if the flag is already set, this is the second signal.
    let _ = flag::register_conditional_shutdown(signal, 3, Arc::clone(&INTERRUPTED));
    let _ = flag::register(signal, Arc::clone(&INTERRUPTED));
}

/// Returns whether a signal has arrived.
pub(super) fn requested() -> bool {
    [&INTERRUPTED, &TERMINATED]
        .iter()
        .any(|f| f.load(Ordering::Relaxed))
}

/// Returns whether training continues after this step.
pub(super) fn flow() -> Flow {
    if requested() {
        Flow::Stop
    } else {
        Flow::Continue
    }
}

/// Makes Ctrl-Z set a flag instead of stopping the process. The caller stops the process after its
/// children.
pub(super) fn watch_stops() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Without a handler, Ctrl-Z stops only this process, as usual.
        let _ = flag::register(SIGTSTP, Arc::clone(&STOP));
    });
}

/// Returns whether Ctrl-Z was pressed since the last call.
pub(super) fn stop_requested() -> bool {
    STOP.swap(false, Ordering::Relaxed)
}
