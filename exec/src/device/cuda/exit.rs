//! Exit of a process that cannot shut down cleanly.

use std::ffi::c_int;

unsafe extern "C" {
    /// POSIX: ends all threads of the process immediately.
    safe fn _exit(status: c_int) -> !;
}

/// Ends the process without running exit handlers, in which libraries wait for their threads: a
/// thread that is inside a driver call may never return.
pub fn exit_now(status: u8) -> ! {
    _exit(c_int::from(status))
}
