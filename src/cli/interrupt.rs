//! Ctrl-C: finish with what there is.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C sets a flag instead of ending the process; a second one ends it.
pub(super) fn watch() {
    // Without a handler Ctrl-C ends the process at once, which is no reason not to begin.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(3);
        }
    });
}

/// Whether Ctrl-C has been pressed.
pub(super) fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
