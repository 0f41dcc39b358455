//! The end of a process that cannot end in good order.

use std::ffi::c_int;

unsafe extern "C" {
    /// POSIX: ends all threads at once.
    safe fn _exit(status: c_int) -> !;
}

/// Ends the process without anything that runs at exit: libraries wait there for their threads, and one that is inside of a
/// driver's call may never leave it.
pub fn leave(status: u8) -> ! {
    _exit(c_int::from(status))
}
