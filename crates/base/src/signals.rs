//! Handlers of signals that end this process.

use std::io;
use std::mem::zeroed;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;

use libc::{c_int, c_void, siginfo_t};

/// A handler of a signal: its number, what the kernel tells about it, and the thread's context.
pub type SignalHandler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// Has the kernel call a handler at a signal (sigaction(2)), with these flags besides `SA_SIGINFO`.
///
/// # Errors
/// The signal can have no handler.
///
/// # Safety
/// The handler only calls async-signal-safe functions (signal-safety(7)).
pub unsafe fn handle_signal(signal: c_int, handler: SignalHandler, flags: c_int) -> io::Result<()> {
    // SAFETY: all zeros is an empty mask and no flags.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | flags;
    // SAFETY: the caller promises a handler that may run at any time.
    match unsafe { libc::sigaction(signal, &raw const action, null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a write to a pipe or a socket whose other end is closed an error, which does not end
/// this process. The standard library does so before its `main`.
///
/// # Errors
/// That of sigaction(2).
pub fn ignore_broken_pipes() -> io::Result<()> {
    // SAFETY: the standard library and this workspace have no handler of this signal.
    match unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Writes a line to standard error and ends this process with an exit code. As with a kill, nothing
/// is cleaned up. Async-signal-safe.
pub fn end_with(line: &[u8], code: c_int) -> ! {
    // SAFETY: standard error may be closed, and then the write fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    // A failure cannot be reported anywhere else.
    let _ = rustix::io::write(stderr, line);
    // SAFETY: it ends the process and runs no code of it.
    unsafe { libc::_exit(code) }
}
