//! Noticing that this process was stopped and goes on (Ctrl-Z and `fg`, a debugger): nobody else's silence follows from the
//! time between, and no patience ends by it.

use std::time::Duration;

/// Looks that are further apart than this are so because the process was stopped between them. The watchdog's time may be as
/// short as this.
const STOPPED: Duration = Duration::from_secs(1);

/// How long the process was stopped between two looks that are so far apart: about as long, or not at all.
pub(crate) fn stopped(apart: Duration) -> Duration {
    if apart > STOPPED {
        apart
    } else {
        Duration::ZERO
    }
}
