//! Exit of a process that cannot shut down in good order.

use std::ffi::c_int;

unsafe extern "C" {
    /// POSIX: ends all threads of the process at once.
    safe fn _exit(status: c_int) -> !;
}

/// Ends the process without running exit handlers: libraries wait there for their threads, and a
/// thread that is inside a driver call may never return.
pub fn exit_now(status: u8) -> ! {
    _exit(c_int::from(status))
}
